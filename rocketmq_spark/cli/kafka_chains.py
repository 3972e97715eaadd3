"""Finds chains of calls that read or write, such as ``df.writeStream.format("kafka").option(…).start()``. Pure.

A program may hold a reader or a writer in several variables. Spark's readers and writers are mutable: an option that one chain
sets also applies to the other chains of the same object.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rocketmq_spark.cli.kafka_options import KAFKA, ROCKETMQ, SPARK_KAFKA_OPTIONS, Setting, replacements
from rocketmq_spark.cli.kafka_text import APPEND_ONLY, CHECK_FORMAT, USE_FORMAT, KafkaFinding
from rocketmq_spark.cli.python_values import UNKNOWN, DictValue, Function, Parameter, PythonProgram

_APPEND_REMEDY = 'mode("append"), which is required'
_CONTINUOUS_REMEDY = "a trigger of micro-batches; continuous processing is not supported"
_OPTIONS_REMEDY = "the options are computed: compare them with docs/coming-from-kafka.md"
ROLES = {"read": "batch source", "readStream": "stream source", "write": "sink", "writeStream": "sink"}
_FINAL_CALLS = ("load", "save", "start", "toTable")
_OTHER_FINAL_CALLS = {"parquet", "orc", "json", "csv", "text", "table", "jdbc", "saveAsTable", "insertInto"}
# Methods of readers and writers. ``format`` is left out, because ``str`` has a method of this name, too.
_IO_METHODS = {"option", "options", *_FINAL_CALLS}
# Parameters of load, save, start and toTable that are not options, in the order of positional arguments.
_PARAMETERS = {
    "load": ("path", "format", "schema"),
    "save": ("path", "format", "mode", "partitionBy"),
    "start": ("path", "format", "outputMode", "partitionBy", "queryName"),
    "toTable": ("tableName", "format", "outputMode", "partitionBy", "queryName"),
}


class ChainOption(NamedTuple):
    """An option that a chain sets. ``name`` is ``UNKNOWN`` if the program does not show the name. ``value`` is None if the
    program does not show the value.
    """

    name: str
    value: ast.expr | None
    line: int


@dataclass(eq=False)
class CallChain:
    """A chain of calls. ``root`` is the expression of the first call; ``role`` is None if ``root`` is not a reader or writer."""

    calls: list[tuple[str, ast.Call]]
    root: ast.expr
    role: str | None = None

    @classmethod
    def of(cls, call: ast.Call, program: PythonProgram) -> CallChain:
        calls: list[tuple[str, ast.Call]] = []
        node: ast.expr = call
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not program.functions(node.func):
            calls.append((node.func.attr, node))
            node = node.func.value
        return cls(calls[::-1], node, ROLES.get(node.attr) if isinstance(node, ast.Attribute) else None)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.calls}

    def formats(self, program: PythonProgram) -> list[ast.expr | None]:
        """Return the expressions of the format. An expression that the program does not show is None."""
        formats: list[ast.expr | None] = []
        for name, call in self.calls:
            if name == "format":
                formats.append(_argument(call, 0, "source"))
            elif name in _FINAL_CALLS:
                argument = self.parameter(name, call, "format")
                formats += [argument] if argument is not None else self._unpacked_formats(call, program)
        return [node for node in formats if node is not None] or formats

    @staticmethod
    def _unpacked_formats(call: ast.Call, program: PythonProgram) -> Iterator[ast.expr | None]:
        for keyword in call.keywords:
            for option in _unpacked_options(keyword.value, program) if keyword.arg is None else ():
                if option.name in ("format", UNKNOWN):
                    yield option.value

    @staticmethod
    def parameter(name: str, call: ast.Call, parameter: str) -> ast.expr | None:
        """Return an argument of load, save, start or toTable; None if the call does not have it."""
        names = _PARAMETERS[name]
        return _argument(call, names.index(parameter), parameter) if parameter in names else None

    def options(self, program: PythonProgram) -> Iterator[ChainOption]:
        for name, call in self.calls:
            if name == "option":
                key, value = _argument(call, 0, "key"), _argument(call, 1, "value")
                if key is None or value is None:
                    continue
                names = program.texts(key)
                for text in names:
                    yield ChainOption(
                        UNKNOWN if UNKNOWN in text else text, value if len(names) == 1 else None, key.lineno
                    )
            if name not in ("options", *_FINAL_CALLS):
                continue
            for keyword in call.keywords:
                if keyword.arg is None:
                    yield from _unpacked_options(keyword.value, program)
                elif keyword.arg not in _PARAMETERS.get(name, ()):
                    yield ChainOption(keyword.arg, keyword.value, keyword.value.lineno)


def _argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    named_argument = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return call.args[index] if len(call.args) > index else named_argument


def _unpacked_options(node: ast.expr, program: PythonProgram) -> Iterator[ChainOption]:
    for value in program.values(node):
        if isinstance(value, DictValue):
            yield from (ChainOption(*entry) for entry in value.items)
        if value is not None and (not isinstance(value, DictValue) or value.is_open):
            yield ChainOption(UNKNOWN, None, node.lineno)


@dataclass(eq=False)
class ReaderOrWriter:
    """One reader or writer: its chains, and the options that they set together."""

    program: PythonProgram
    chains: list[CallChain] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)

    @functools.cached_property
    def formats(self) -> list[ast.expr | None]:
        formats = [node for chain in self.chains for node in chain.formats(self.program)]
        return [node for node in formats if node is not None] or formats

    @functools.cached_property
    def option_names(self) -> set[str]:
        """Return the names of all options, in lower case."""
        return {option.name.lower() for chain in self.chains for option in chain.options(self.program)}

    @functools.cached_property
    def modes(self) -> list[str]:
        """Return the values of ``mode``."""
        calls = [call for chain in self.chains for name, call in chain.calls if name == "mode"]
        return [text for call in calls for text in self.program.texts(_argument(call, 0, "saveMode"))]


class Chains:
    """All chains of a program, grouped by reader or writer."""

    def __init__(self, program: PythonProgram, trees: list[ast.Module]) -> None:
        self.program = program
        self._parents: dict[object, object] = {}
        self._united_names: set[object] = set()
        self._united_functions: set[Function] = set()  # the functions whose results have been united
        self.chains: list[CallChain] = []
        self._chain_by_call: dict[ast.Call, CallChain] = {}
        self._roots: list[ast.Attribute] = []
        nodes = [node for tree in trees for node in ast.walk(tree)]  # a whole chain comes before its parts
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute() as method) if (
                    node not in self._chain_by_call and not program.functions(method)
                ):
                    chain = CallChain.of(node, program)
                    self._chain_by_call.update((call, chain) for _, call in chain.calls)
                    self.chains.append(chain)
                case ast.Attribute(attr=name) if name in ROLES:
                    self._roots.append(node)
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                self._unite_bindings(node)
        self._owners: dict[object, ReaderOrWriter] = {}
        for root in self._roots:
            self._owner(root).roles.add(ROLES[root.attr])
        self.chains = [chain for chain in self.chains if self._is_io(chain)]
        for chain in self.chains:
            self.owner(chain).chains.append(chain)

    def owner(self, chain: CallChain) -> ReaderOrWriter:
        return self._owner(self._key(chain.root))

    def chain_with(self, call: ast.expr) -> CallChain | None:
        """Return the chain that contains a call."""
        return self._chain_by_call.get(call) if isinstance(call, ast.Call) else None

    def format(self, chain: CallChain) -> str | None:
        """Return the format of a chain: ``KAFKA`` if the format may be Kafka's; None if the format is unknown."""
        nodes = chain.formats(self.program) or self.owner(chain).formats
        texts = [text.strip().lower() for node in nodes for text in self.program.texts(node)]
        if any(map(_is_kafka, texts)):
            return KAFKA
        if ROCKETMQ in texts:
            return ROCKETMQ
        return None if not texts or any(UNKNOWN in text for text in texts) else texts[0]

    def _is_io(self, chain: CallChain) -> bool:
        if chain.role is not None or self.owner(chain).roles or chain.names & _IO_METHODS:
            return True
        format_calls = [call for name, call in chain.calls if name == "format"]
        is_on_text = any(text != UNKNOWN for text in self.program.texts(chain.root))
        return not is_on_text and any(len(call.args) == 1 and not call.keywords for call in format_calls)

    def written_frames(self) -> Iterator[tuple[ast.expr, ReaderOrWriter]]:
        """Yield the frames that are written, with their writers."""
        for node in self._roots:
            if ROLES[node.attr] == "sink":
                yield node.value, self._owner(node)

    # A union-find structure unites variables, parameters, functions and expressions that may have the same reader or writer.

    def _representative_of(self, key: object) -> object:
        while (parent := self._parents.get(key, key)) is not key:
            self._parents[key] = self._parents.get(parent, parent)
            key = parent
        return key

    def _unite(self, key: object, other_key: object) -> None:
        first, second = self._representative_of(key), self._representative_of(other_key)
        if first is not second:
            self._parents[first] = second

    def _owner(self, key: object) -> ReaderOrWriter:
        return self._owners.setdefault(self._representative_of(key), ReaderOrWriter(self.program))

    def _key(self, node: ast.expr) -> object:
        """Return the key of the union-find structure for the object whose methods ``node`` calls."""
        while (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not self.program.functions(node.func)
        ):
            node = node.func.value
        if isinstance(node, ast.Call) and (functions := self.program.functions(node.func)):
            for function in functions:
                self._unite(("returns", functions[0]), ("returns", function))
            for function in functions:
                if function not in self._united_functions:
                    self._united_functions.add(function)
                    for returned_value in filter(self._may_be_io, self.program.returned_nodes(function)):
                        self._unite(("returns", function), self._key(returned_value))
            return "returns", functions[0]
        if isinstance(node, ast.IfExp):
            self._unite(self._key(node.body), self._key(node.orelse))
            return self._key(node.body)
        if isinstance(node, ast.Attribute) and node.attr in ROLES:
            return node
        key, _ = self.program.bindings(node)
        return key

    def _may_be_io(self, node: ast.expr) -> bool:
        """Whether an expression may be a reader or a writer. The result of load, save or start is not a reader or writer."""
        match node:
            case ast.Name():
                return True
            case ast.Attribute(attr=name):
                return name in ROLES or self.program.bindings(node)[0] is not node
            case ast.Call(func=ast.Attribute()) if not self.program.functions(node.func):
                chain = self._chain_by_call.get(node)
                calls = [] if chain is None else chain.calls[: [call for _, call in chain.calls].index(node) + 1]
                return not any(name in _FINAL_CALLS or name in _OTHER_FINAL_CALLS for name, _ in calls)
            case ast.Call():
                return bool(self.program.functions(node.func))
            case ast.IfExp():
                return True
        return False

    def _unite_bindings(self, node: ast.Name | ast.Attribute) -> None:
        key, bindings = self.program.bindings(node)
        if not isinstance(key, tuple) or key in self._united_names:
            return
        self._united_names.add(key)
        for binding in bindings:
            arguments = self.program.arguments(binding) if isinstance(binding, Parameter) else [binding]
            for value in arguments:
                if isinstance(value, ast.expr) and self._may_be_io(value):
                    self._unite(key, self._key(value))


class KafkaChains:
    """Finds the lines that must change in chains of a program that read or write Kafka, or may read or write Kafka."""

    def __init__(self, chains: Chains) -> None:
        self._program = chains.program
        self._chains = chains
        self.format_constants: set[ast.Constant] = set()  # the texts that are used as formats
        self.explained_options: set[tuple[int, str]] = set()  # the line and the name of each option

    def findings(self, tree: ast.Module) -> Iterator[KafkaFinding]:
        nodes = set(ast.walk(tree))
        for chain in self._chains.chains:
            if chain.calls[-1][1] in nodes:
                yield from self._chain_findings(chain)

    def _chain_findings(self, chain: CallChain) -> Iterator[KafkaFinding]:
        owner = self._chains.owner(chain)
        role = chain.role or (next(iter(owner.roles)) if len(owner.roles) == 1 else None)
        line = (chain.calls[-1][1].func.end_lineno or 0) if chain.calls else 0
        for node in chain.formats(self._program):
            values, constants = self._program.values_and_constants(node)
            texts = [value for value in values if isinstance(value, str)]
            if any(map(_is_kafka, texts)):
                self.format_constants |= constants
                yield node.lineno if node else line, 'format("kafka")', USE_FORMAT
            elif any(UNKNOWN in text for text in texts) and (role is not None or "format" in chain.names):
                if node is not None:
                    yield node.lineno, f"format({ast.unparse(node)})", CHECK_FORMAT
                elif not any(owner.formats):
                    yield line, f"{chain.calls[-1][0]}(**…)", CHECK_FORMAT
        format = self._chains.format(chain)
        may_have_topic_names = UNKNOWN in owner.option_names and format == ROCKETMQ
        option_names = owner.option_names | {"topicnames"} if may_have_topic_names else owner.option_names
        for option in chain.options(self._program):
            yield from self._option_findings(option, role, format, option_names)
        if format in (KAFKA, ROCKETMQ):
            yield from self._mode_findings(chain, owner)

    def _option_findings(
        self, option: ChainOption, role: str | None, format: str | None, option_names: set[str]
    ) -> Iterator[KafkaFinding]:
        lower_name = option.name.lower()
        self.explained_options.add((option.line, option.name))
        if option.name == UNKNOWN:
            if format == KAFKA:
                yield option.line, "options", _OPTIONS_REMEDY
        elif format in (KAFKA, ROCKETMQ):
            texts = [UNKNOWN] if option.value is None else self._program.texts(option.value)
            for replacement in replacements(Setting(option.name, texts, role, format, option_names)):
                yield option.line, option.name, replacement
        elif lower_name.startswith("kafka.") or (format is None and lower_name in SPARK_KAFKA_OPTIONS):
            texts = [UNKNOWN] if option.value is None else self._program.texts(option.value)
            for replacement in replacements(Setting(option.name, texts, role, None, option_names)):
                yield option.line, option.name, replacement

    def _mode_findings(self, chain: CallChain, owner: ReaderOrWriter) -> Iterator[KafkaFinding]:
        for name, call in chain.calls:
            if name == "trigger" and any(keyword.arg == "continuous" for keyword in call.keywords):
                yield call.lineno, "trigger(continuous=…)", _CONTINUOUS_REMEDY
            if name in ("outputMode", "start", "toTable"):
                node = (
                    _argument(call, 0, "outputMode")
                    if name == "outputMode"
                    else CallChain.parameter(name, call, "outputMode")
                )
                for text in self._program.texts(node) if node is not None else ():
                    if node is not None and text.lower() in ("update", "complete"):
                        yield node.lineno, f'outputMode("{text}")', APPEND_ONLY
            if name == "save":
                node = CallChain.parameter(name, call, "mode")
                texts = [*owner.modes, *([] if node is None else self._program.texts(node))]
                if not any(text.lower() == "append" or UNKNOWN in text for text in texts):
                    shown_text = f'mode("{texts[0]}")' if texts else "save()"
                    yield call.func.end_lineno or call.lineno, shown_text, _APPEND_REMEDY


def _is_kafka(text: str) -> bool:
    lower_text = text.strip().lower()
    return lower_text == KAFKA or "sql.kafka010" in lower_text
