"""Where a module may be broken, and how: each change is small, and some test should notice it. Pure.

The text stays as it is but for the changed place. Left alone are annotations, decorators, asserts, f-strings (Python 3.11 does
not tell their places) and what only type checkers read.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_COMPARED = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
_COMPUTED = {
    "+": "-", "-": "+", "*": "//", "/": "*", "//": "*", "%": "*", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&",
}  # fmt: skip
_SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISON = re.compile(rb"not\s+in\b|is\s+not\b|[=!<>]=|[<>]|\bin\b|\bis\b")
_OPERATOR = re.compile(rb"//|<<|>>|[-+*/%&|^]")
_JUNCTION = re.compile(rb"\b(and|or)\b")
_DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ENTRY = re.compile(r"(\S+)::(\S*) `([^`]+)` => `([^`]+)`: (.+)")


class Mutant(NamedTuple):
    """One change. ``before`` and ``after`` are the lines that it touches, as one; ``start`` and ``end`` count bytes."""

    line: int
    function: str
    before: str
    after: str
    start: int
    end: int
    text: bytes

    def applied(self, source: bytes) -> bytes:
        """The broken module."""
        return source[: self.start] + self.text + source[self.end :]

    @property
    def change(self) -> Change:
        """What names it, wherever it stands."""
        return self.function, self.before, self.after


Change = tuple[str, str, str]


class Entry(NamedTuple):
    """A mutant that changes nothing that could be noticed, and why."""

    path: str
    change: Change
    reason: str


def entries(text: str) -> list[Entry]:
    """The lines ``path::function `line` => `changed line`: reason`` of a file; others are empty or begin with ``#``."""
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise ValueError(f"no entry of the form path::function `line` => `changed line`: reason: {line}")
        path, function, before, after, reason = match.groups()
        found.append(Entry(path, (function, before, after), reason))
    return found


def unknown(listed: Iterable[Entry], source_of: Callable[[str], bytes | None]) -> list[Entry]:
    """Entries that no mutant has any more; ``source_of`` gives a module by its path, None where there is none."""
    changes: dict[str, Counter[Change]] = {}
    found = []
    for entry in listed:
        if entry.path not in changes:
            source = source_of(entry.path)
            changes[entry.path] = Counter(mutant.change for mutant in mutants(source or b""))
        changes[entry.path][entry.change] -= 1
        if changes[entry.path][entry.change] < 0:
            found.append(entry)
    return found


def mutants(source: bytes) -> list[Mutant]:
    """Every mutant of a module that Python still reads, from its first line to its last, each once."""
    found: dict[bytes, Mutant] = {}
    for mutant in _Finder(source).found():
        broken = mutant.applied(source)
        if broken == source or broken in found:
            continue
        try:
            compile(broken, "mutant", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            continue
        found[broken] = mutant
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.start))


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def found(self) -> Iterator[Mutant]:
        yield from self._of(ast.parse(self._source), "")

    def _of(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.AnnAssign) and not getattr(node, "value", None):
            return
        for start, end, text in self._changes(node, bool(function)):
            yield self._mutant(start, end, text, function)
        inner = function
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            inner = f"{function}.{node.name}" if function else node.name
        for child in _children(node):
            yield from self._of(child, inner)

    def _mutant(self, start: int, end: int, text: bytes, function: str) -> Mutant:
        first = self._source.rfind(b"\n", 0, start) + 1
        last = self._source.find(b"\n", end)
        last = len(self._source) if last < 0 else last
        lines = self._source[first:last], self._source[first:start] + text + self._source[end:last]
        before, after = (" ".join(part.decode().split()) for part in lines)
        return Mutant(self._source.count(b"\n", 0, start) + 1, function, before, after, start, end, text)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._begins[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> bytes:
        return self._source[self._start(node) : self._end(node)]

    def _changes(self, node: ast.AST, in_function: bool) -> Iterator[tuple[int, int, bytes]]:
        """Places and what stands there instead, of this node alone."""
        match node:
            case ast.Compare():
                for left, right in itertools.pairwise([node.left, *node.comparators]):
                    yield from self._between(left, right, _COMPARISON, _COMPARED)
            case ast.BoolOp():
                for left, right in itertools.pairwise(node.values):
                    yield from self._between(left, right, _JUNCTION, {"and": "or", "or": "and"})
            case ast.BinOp():
                yield from self._between(node.left, node.right, _OPERATOR, _COMPUTED)
                if isinstance(node.op, _SWAPPED):
                    yield self._swap(node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                yield self._start(node), self._start(node) + len("not "), b""
            case ast.Constant(value=bool() | int()):
                changed = not node.value if isinstance(node.value, bool) else node.value + 1
                yield self._start(node), self._end(node), str(changed).encode()
            case ast.Call():
                plain = list(itertools.takewhile(lambda one: not isinstance(one, ast.Starred), node.args))
                yield from itertools.starmap(self._swap, itertools.pairwise(plain))
            case ast.Dict():
                merged = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
                yield from itertools.starmap(self._swap, itertools.pairwise(merged))
            case ast.If() | ast.IfExp() | ast.comprehension():
                for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                    if (
                        not isinstance(test, ast.Compare | ast.BoolOp | ast.Constant)
                        and ast.unparse(test) != "TYPE_CHECKING"
                    ):
                        yield self._start(test), self._end(test), b"(not (" + self._text(test) + b"))"
            case ast.Return(value=ast.expr() as value):
                yield self._start(value), self._end(value), b"None"
            case ast.stmt() if in_function and isinstance(node, _DROPPED) and not _docstring(node):
                yield self._start(node), self._end(node), b"pass"

    def _between(
        self, left: ast.expr, right: ast.expr, operator: re.Pattern[bytes], others: dict[str, str]
    ) -> Iterator[tuple[int, int, bytes]]:
        """The other operator for the one that stands between two operands."""
        match = operator.search(self._source, self._end(left), self._start(right))
        if match is not None and (other := others.get(" ".join(match[0].decode().split()))):
            yield match.start(), match.end(), other.encode()

    def _swap(self, one: ast.expr, other: ast.expr) -> tuple[int, int, bytes]:
        between = self._source[self._end(one) : self._start(other)]
        return self._start(one), self._end(other), self._text(other) + between + self._text(one)


def _docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What lies below a node and runs."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if name == "body" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
