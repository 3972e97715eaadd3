"""Finds the frames of a Python program that a format's source returns, or that its sink writes. Pure."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator

from rocketmq_spark.cli.kafka_chains import ROLES, Chains
from rocketmq_spark.cli.python_values import Binding, Parameter


class Frames:
    """The frames of one ``format``."""

    def __init__(self, chains: Chains, format: str) -> None:
        self._program = chains.program
        self._chains = chains
        self._format = format
        self._is_read_by_key: dict[object, bool | None] = {}  # a key stands for a variable or a function
        # For each node between the end of a chain and the origin of the chain: the origin.
        self._origins: dict[ast.expr, ast.expr] = {}
        self._examined_keys: set[object] = set()
        self._is_circular = False

    def reads(self, node: ast.expr) -> bool:
        """Whether an expression is a frame of the format's source, or derived from one."""
        return self._reads(node) is True

    def _reads(self, node: ast.expr) -> bool | None:
        """Like ``reads``, but returns None if the answer depends only on a variable or function that is being examined
        (recursion).
        """
        origin = self._origin(node)
        if isinstance(origin, ast.Call):
            if functions := self._program.functions(origin.func):
                returned_values = [value for function in functions for value in self._program.returned_nodes(function)]
                return self._all_read(functions[0], returned_values)
            chain = self._chains.chain_with(origin)
            return chain is not None and self._chains.format(chain) == self._format
        if isinstance(origin, ast.Attribute) and origin.attr in ROLES:
            return False
        key, bindings = self._program.bindings(origin)
        return self._all_read(key, self._bound_expressions(bindings))

    def _origin(self, node: ast.expr) -> ast.expr:
        """Return the origin of a chain of calls: the expression that shows what the chain reads or writes.

        The origin is a call of one of the program's functions, a call of ``load``, a reader or writer, or a variable.
        """
        passed_nodes = []
        while isinstance(node, ast.Call | ast.Attribute) and node not in self._origins and not self._is_origin(node):
            passed_nodes.append(node)
            node = node.func if isinstance(node, ast.Call) else node.value
        origin = self._origins.get(node, node)
        self._origins.update(dict.fromkeys(passed_nodes, origin))
        return origin

    def _is_origin(self, node: ast.Call | ast.Attribute) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in ROLES or self._program.bindings(node)[0] is not node
        is_load = isinstance(node.func, ast.Attribute) and node.func.attr == "load"
        return bool(self._program.functions(node.func)) or (is_load and self._chains.chain_with(node) is not None)

    def _all_read(self, key: object, values: Iterable[ast.expr | None]) -> bool | None:
        """Whether all values of a variable or a function are frames of the format's source."""
        if key in self._examined_keys:
            self._is_circular = True
            return None
        if key in self._is_read_by_key:
            return self._is_read_by_key[key]
        self._examined_keys.add(key)
        try:
            frame_values = [value for value in values if not isinstance(value, ast.Constant)]
            results = [False if value is None else self._reads(value) for value in frame_values]
        finally:
            self._examined_keys.discard(key)
        result = False if False in results else True if True in results else None
        if result is False or not self._is_circular or not self._examined_keys:
            self._is_read_by_key[key] = result
        self._is_circular &= bool(self._examined_keys)
        return result

    def _bound_expressions(self, bindings: Iterable[Binding]) -> Iterator[ast.expr | None]:
        for binding in bindings:
            if isinstance(binding, Parameter):
                yield from self._program.arguments(binding)
            else:
                yield binding if isinstance(binding, ast.expr) else None

    def written_expressions(self, excluded_options: Container[str] = ()) -> set[ast.expr]:
        """Return the calls and names in the expressions of all frames that the format's sink writes, with variables resolved.

        Frames of writers that have one of ``excluded_options`` are not included.
        """
        nodes: set[ast.expr] = set()
        frames = [
            frame
            for frame, writer in self._chains.written_frames()
            if any(self._chains.format(chain) == self._format for chain in writer.chains)
            and not any(option in excluded_options for option in writer.option_names)
        ]
        while frames:
            node = frames.pop()
            while isinstance(node, ast.Call | ast.Attribute) and node not in nodes:
                nodes.add(node)
                node = node.func if isinstance(node, ast.Call) else node.value
            if isinstance(node, ast.Name) and node not in nodes:
                nodes.add(node)
                frames += [
                    value for value in self._bound_expressions(self._program.bindings(node)[1]) if value is not None
                ]
        return nodes
