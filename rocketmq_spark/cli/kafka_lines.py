"""The lines of a program for Kafka that change, and what replaces them. The program is read, never run. Pure.

Python is parsed: a *chain* such as ``df.writeStream.format("kafka").option(…).start()`` says which options it has and whether it
reads or writes, also if it goes on in other statements by the name of a variable. Everything else (Scala, SQL, shells, cells of
notebooks that are not Python) is searched, statement by statement.
"""

from __future__ import annotations

import ast
import bisect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rocketmq_spark.cli.kafka_columns import columns
from rocketmq_spark.options import TABLE
from rocketmq_spark.options.names import KAFKA_OPTIONS, of_foreign_option


class KafkaLine(NamedTuple):
    """``where`` is the number of a line, in a notebook ``cell:line``."""

    where: str
    kafka: str
    here: str


class Findings(NamedTuple):
    """``searched`` are the parts that were searched as text, such as ``cell 2``."""

    lines: list[KafkaLine]
    searched: list[str]


# A finding without the place of its text: line, Kafka's name, and what replaces it.
Found = tuple[int, str, str]

_FORMAT = 'format("rocketmq").option("kafkaColumns", True)'
_SQL = "USING rocketmq OPTIONS (kafkaColumns 'true', …)"
_PACKAGE = "no jar: pip install the package in the Python of driver and workers (docs/where-it-runs.md)"
_UPDATE = (
    "the sink appends only: write with foreachBatch(foreach_batch_writer(…, kafka_columns=True)) (docs/writing.md)"
)
_APPEND = 'mode("append"), which is required'
_DSTREAMS = "a stream of format rocketmq; there are no DStreams"
_CONTINUOUS = "a trigger of micro-batches; continuous processing is not supported"
_SETTING = "it has no effect: remove it"
_LAG = 'progress(query)["lag"] (docs/monitoring.md)'
_DOTS = "names have no dots here: add option topicNames=dotsToUnderscores"
_PATTERN = "it matches RocketMQ's names, which have no dots: shop_.* for shop\\..*; option topicNames does not go with a pattern"
_HEADERS = "the same option, with kafkaColumns"
_NO_HEADERS = "omit it: the sink stores the column headers anyway"
_FOLDER = "a new folder: offsets of Kafka mean nothing here"
_OTHER = "see docs/coming-from-kafka.md"
_BY_TIME = 'by broker: {"orders": {"broker-a": {"0": 1700000000000}}}; or one time for all queues, option '
_BY_OFFSET = 'by broker: {"orders": {"broker-a": {"0": 12}}}; or a time, option '
# Options of both connectors whose values may name partitions.
_OF_PARTITIONS = {
    "assign": 'by broker: {"orders": {"broker-a": [0, 1]}}',
    "startingoffsets": f"{_BY_OFFSET}startingTimestamp",
    "endingoffsets": f"{_BY_OFFSET}endingTimestamp",
    "startingoffsetsbytimestamp": f"{_BY_TIME}startingTimestamp",
    "endingoffsetsbytimestamp": f"{_BY_TIME}endingTimestamp",
}
_CLIENTS = {
    "kafka": "rocketmq_spark.Producer, PullConsumer and Consumer (docs/api.md)",
    "confluent_kafka": "rocketmq_spark.Producer, PullConsumer and Consumer (docs/api.md)",
    "aiokafka": "rocketmq_spark.aio (docs/asyncio.md)",
    "faust": "rocketmq_spark.aio (docs/asyncio.md)",
}
# Options that only Spark's Kafka connector has. Other formats have names such as ``timeout`` or ``key``, too.
_OF_SPARK = {"includeheaders", "groupidprefix"} | {
    name for name in KAFKA_OPTIONS if name.startswith(("kafkac", "fetcho"))
}
_SIDES = {"read": "source", "readStream": "source", "write": "sink", "writeStream": "sink"}
_ENDS = ("load", "save", "start")
# Parameters of load, save and start that are no options; the first ones are also positional.
_PARAMETERS = {
    "load": ("path", "format", "schema"),
    "save": ("path", "format", "mode", "partitionBy"),
    "start": ("path", "format", "outputMode", "partitionBy", "queryName"),
}
_NUMBERED = re.compile(r'"\s*\d+\s*"\s*:|\[\s*\d')
_IN_SQL = re.compile(r"\busing\s+kafka\b", re.IGNORECASE)
_CREATE = re.compile(r"\bcreate\b", re.IGNORECASE)
_JAR = re.compile(r"spark-(?:sql|streaming)-kafka[\w.:-]*|kafka-clients[\w.:-]*")
_ANY_FORMAT = re.compile(r"""format\s*\(\s*["']kafka["']\s*\)""")
_ANY_SETTING = re.compile(r"\bspark\.kafka\.[\w.]+")
_ANY_OPTION = re.compile(rf"(?<![\w.])(kafka\.[\w.]+|{'|'.join(map(re.escape, sorted(_OF_SPARK)))})\b", re.IGNORECASE)
_ANY_MODE = re.compile(r"""outputMode\s*\(\s*(?:["'](?:update|complete)["']|OutputMode\.(?:Update|Complete)\b)""")
_ANY_PLACES = re.compile(rf"\b({'|'.join(_OF_PARTITIONS)})\b", re.IGNORECASE)
_OTHER_FORMAT = re.compile(r"""format\s*\(\s*["'](?!kafka["'])|\busing\s+(?!kafka\b)\w""", re.IGNORECASE)
# A line that is only a comment, in any language. Options of shells begin with two hyphens, too, but without a blank.
_COMMENT = re.compile(r"^[ \t]*(?://|#|/?\*|--\s).*", re.MULTILINE)
_STATEMENT = re.compile(r"(?:.*?(?:;|\.(?:load|save|start|toTable)\s*\([^\n]*|\n[ \t]*\n)|.+$)", re.DOTALL)
# What ``ast.parse`` and ``json.loads`` raise for texts that they cannot read, or that are too deep for them.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def findings(name: str, text: str | bytes) -> Findings:
    """What changes, in the order of lines. Raises one of ``UNREADABLE`` if the program or the notebook cannot be parsed."""
    if name.endswith(".py"):
        tree = ast.parse(text)  # bytes may say their encoding
        return Findings(_placed("", _of_python(tree, Variables.of([tree]))), [])
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    if name.endswith(".ipynb"):
        return _of_notebook(text)
    return Findings(_placed("", _of_text(text)), [name])


def _placed(prefix: str, found: Iterable[Found]) -> list[KafkaLine]:
    return [KafkaLine(f"{prefix}{line}", kafka, here) for line, kafka, here in sorted(set(found))]


def _of_notebook(text: str) -> Findings:
    try:
        cells = json.loads(text)["cells"]
        programs = ["".join(cell.get("source", "")) if cell["cell_type"] == "code" else "" for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise SyntaxError(f"it is no notebook: {e}") from e
    trees = [_parsed(program) for program in programs]
    variables = Variables.of([tree for tree in trees if tree is not None])
    lines, searched = [], []
    for number, (program, tree) in enumerate(zip(programs, trees, strict=True), 1):
        if tree is None:
            searched.append(f"cell {number}")
        found = _of_text(program) if tree is None else _of_python(tree, variables)
        lines += _placed(f"{number}:", found)
    return Findings(lines, searched)


def _parsed(cell: str) -> ast.Module | None:
    """A cell without its line magics; None if it is not Python."""
    if cell.lstrip().startswith("%%"):
        return None
    try:
        return ast.parse(re.sub(r"^([^\S\n]*)[%!].*", r"\1pass", cell, flags=re.MULTILINE))
    except UNREADABLE:
        return None


def _of_text(text: str) -> Iterator[Found]:
    plain = _COMMENT.sub("//", text)
    first = 1
    for statement in _STATEMENT.finditer(plain):
        for line, kafka, here in _of_statement(statement[0]):
            yield first + line, kafka, here
        first += statement[0].count("\n")


def _of_statement(text: str) -> Iterator[Found]:
    """The findings with numbers of lines from 0 on. What other formats have, too, is none in a statement of another format."""
    shared = not _OTHER_FORMAT.search(text) or _ANY_FORMAT.search(text) or _IN_SQL.search(text)
    ends = [end.start() for end in re.finditer("\n", text)]
    for pattern, here in (
        (_ANY_FORMAT, _FORMAT),
        (_IN_SQL, _SQL),
        (_JAR, _PACKAGE),
        (_ANY_SETTING, _SETTING),
        *([(_ANY_MODE, _UPDATE)] if shared else []),
    ):
        for found in pattern.finditer(text):
            yield bisect.bisect_left(ends, found.start()), " ".join(found[0].split()), here
    for found in _ANY_OPTION.finditer(text):
        if shared or found[1].lower().startswith("kafka."):
            yield from _option(found[1], None, bisect.bisect_left(ends, found.start()), None)
    for number, line in enumerate(text.split("\n")) if shared else ():
        if (place := _ANY_PLACES.search(line)) and _NUMBERED.search(line, place.end()):
            yield number, place[1], _OF_PARTITIONS[place[1].lower()]


Constants = Mapping[str, str]


@dataclass
class Variables:
    """What the names of a program stand for: texts; the formats of readers and writers, empty if unknown; rows of Kafka's source;
    and dictionaries of Kafka's options.
    """

    constants: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    frames: set[str] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    has_kafka: bool = False  # a source or a sink

    @classmethod
    def of(cls, trees: Iterable[ast.Module]) -> Variables:
        variables, others = cls(), set[str]()
        nodes = [node for tree in trees for node in _in_order(tree)]
        assigned = [(target, value) for node in nodes for target, value in _assigned(node)]
        for target, value in assigned:
            match target, value:
                case ast.Name(id=name), ast.Constant(value=str() as text):
                    variables.constants[name] = text
        for target, value in assigned:
            match target:
                case ast.Name(id=name):
                    variables._note(name, value)
                    if not variables._of_kafka(value):
                        others.add(name)
                case ast.Subscript(value=ast.Name(id=name), slice=key):
                    if (_text(key, variables.constants) or "").lower().startswith("kafka."):
                        variables.options.add(name)
        others.update(node.arg for node in nodes if isinstance(node, ast.arg))
        variables.frames -= others
        for node in nodes:
            if isinstance(node, ast.Call) and (chain := Chain.of(node, variables)) and chain.format == "kafka":
                variables.has_kafka = True
                variables.options.update(chain.dictionaries())
        return variables

    def _note(self, name: str, value: ast.expr) -> None:
        if self._of_kafka(value):
            self.frames.add(name)
        elif isinstance(value, ast.Dict):
            if any(option.lower().startswith("kafka.") for option, _, _ in _entries(value, self.constants)):
                self.options.add(name)
        elif isinstance(value, ast.Call) and (chain := Chain.of(value, self)) and chain.format is not None:
            same = self.formats.get(name, chain.format) == chain.format
            self.formats[name] = chain.format if same else ""

    def _of_kafka(self, node: ast.expr) -> bool:
        """Whether these are rows of Kafka's source, or made of them."""
        while isinstance(node, ast.Call | ast.Attribute):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                chain = Chain.of(node, self)
                return chain is not None and chain.format == "kafka"
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self.frames


def _in_order(tree: ast.Module) -> list[ast.AST]:
    return sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            return [(target, value)]
    return []


def _text(node: ast.expr | None, constants: Constants) -> str | None:
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.Name(id=name):
            return constants.get(name)
    return None


def _of_python(tree: ast.Module, variables: Variables) -> Iterator[Found]:
    if variables.has_kafka:
        yield from columns(tree, variables.frames)
    seen: set[ast.AST] = set()  # parts of chains, and docstrings: they are no findings of their own
    for node in ast.walk(tree):  # the whole chain comes before its parts
        if isinstance(node, ast.Call) and node not in seen and (chain := Chain.of(node, variables)):
            seen.update(chain.nodes)
            yield from chain.findings()
        for target, value in _assigned(node):
            for name, given, line in _options_of(target, value, variables):
                seen.add(value)
                yield from _option(name, given, line, None, variables.constants)
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                seen.add(docstring)
            case ast.Dict() if node not in seen:
                yield from _dictionary(node, variables)
            case ast.Import() | ast.ImportFrom():
                yield from _imports(node)
            case ast.Constant(value=str() as text) if node not in seen:
                yield from _constant(text, node.lineno)


def _options_of(target: ast.expr, value: ast.expr, variables: Variables) -> list[Option]:
    """The options that an assignment to a dictionary of options, or to its item, has."""
    match target:
        case ast.Name(id=name) if name in variables.options and isinstance(value, ast.Dict):
            return _entries(value, variables.constants)
        case ast.Subscript(value=ast.Name(id=name), slice=key) if name in variables.options:
            option = _text(key, variables.constants)
            return [] if option is None else [(option, value, key.lineno)]
    return []


def _constant(value: str, line: int) -> Iterator[Found]:
    if (create := _CREATE.search(value)) and _IN_SQL.search(value, create.end()):
        yield from ((line + number - 1, kafka, here) for number, kafka, here in _of_text(value))
    elif found := _JAR.search(value):
        yield line, found[0], _PACKAGE
    elif value.startswith("spark.kafka."):
        yield line, value, _SETTING
    elif value.endswith("OffsetsBehindLatest"):
        yield line, value, _LAG


def _dictionary(given: ast.Dict, variables: Variables) -> Iterator[Found]:
    """The entries of a dictionary that has an option of Kafka: it is passed to a source or a sink."""
    entries = _entries(given, variables.constants)
    if any(name.lower().startswith("kafka.") for name, _, _ in entries):
        for name, value, line in entries:
            yield from _option(name, value, line, None)


Option = tuple[str, ast.expr, int]


def _entries(given: ast.Dict, constants: Constants) -> list[Option]:
    named = ((_text(key, constants), key, value) for key, value in zip(given.keys, given.values, strict=True))
    return [(name, value, key.lineno) for name, key, value in named if name is not None and key is not None]


class Chain(NamedTuple):
    """Calls on one another that read or write: from ``spark.read`` to ``load``, or a part of that."""

    side: str | None
    calls: list[tuple[str, ast.Call]]
    nodes: list[ast.AST]
    constants: Constants
    inherited: str | None

    @classmethod
    def of(cls, call: ast.Call, variables: Variables) -> Chain | None:
        calls: list[tuple[str, ast.Call]] = []
        nodes: list[ast.AST] = []
        node: ast.expr = call
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            calls.append((node.func.attr, node))
            nodes.append(node)
            node = node.func.value
        side = _SIDES.get(node.attr) if isinstance(node, ast.Attribute) else None
        names = {name for name, _ in calls}
        if isinstance(node, ast.Constant | ast.JoinedStr):  # a text that is formatted
            return None
        if side is None and not names & {"format", "option", "options", *_ENDS}:
            return None
        nodes += [each.value for _, part in calls for each in part.keywords if isinstance(each.value, ast.Dict)]
        inherited = variables.formats.get(node.id) if isinstance(node, ast.Name) else None
        return cls(side, calls[::-1], nodes, variables.constants, inherited)

    @property
    def format(self) -> str | None:
        """In small letters; empty if it is not known, None if there is none."""
        named = self._formats()
        return (_text(named[-1], self.constants) or "").lower() if named else self.inherited

    def dictionaries(self) -> list[str]:
        """The names of dictionaries that are passed as options."""
        given = [
            each.value
            for name, call in self.calls
            if name in ("options", *_ENDS)
            for each in call.keywords
            if not each.arg
        ]
        return [value.id for value in given if isinstance(value, ast.Name)]

    def _formats(self) -> list[ast.expr]:
        formats = [self._first(call) for name, call in self.calls if name == "format"]
        formats += [self.argument(name, call, "format") for name, call in self.calls if name in _ENDS]
        return [node for node in formats if node is not None]

    def argument(self, name: str, call: ast.Call, parameter: str) -> ast.expr | None:
        """An argument of load, save or start."""
        place = _PARAMETERS[name].index(parameter)
        by_name = (each.value for each in call.keywords if each.arg == parameter)
        return call.args[place] if len(call.args) > place else next(by_name, None)

    def findings(self) -> Iterator[Found]:
        of_kafka = self.format == "kafka"
        for node in self._formats():
            if (_text(node, self.constants) or "").lower() == "kafka":
                yield node.lineno, 'format("kafka")', _FORMAT
        for name, value, line in self._options():
            if of_kafka:
                yield from _option(name, value, line, self.side, self.constants)
            elif name.lower().startswith("kafka.") or (self.format is None and name.lower() in _OF_SPARK):
                yield from _option(name, value, line, None)
        if of_kafka:
            yield from self._modes()

    @staticmethod
    def _first(call: ast.Call) -> ast.expr | None:
        return call.args[0] if call.args else next((each.value for each in call.keywords), None)

    def _options(self) -> Iterator[Option]:
        for name, call in self.calls:
            if name == "option":
                by_name = {each.arg: each.value for each in call.keywords}
                key, value = [*call.args, *(by_name[part] for part in ("key", "value") if part in by_name), None, None][
                    :2
                ]
                if key is not None and value is not None and (option := _text(key, self.constants)) is not None:
                    yield option, value, key.lineno
            if name not in ("options", *_ENDS):
                continue
            for keyword in call.keywords:
                if isinstance(keyword.value, ast.Dict) and keyword.arg is None:
                    yield from _entries(keyword.value, self.constants)
                elif keyword.arg is not None and keyword.arg not in _PARAMETERS.get(name, ()):
                    yield keyword.arg, keyword.value, keyword.value.lineno

    def _modes(self) -> Iterator[Found]:
        modes = [self._first(call) for name, call in self.calls if name == "mode"]
        for name, call in self.calls:
            if name == "trigger" and any(each.arg == "continuous" for each in call.keywords):
                yield call.lineno, "trigger(continuous=…)", _CONTINUOUS
            if name == "outputMode" or name == "start":
                node = self._first(call) if name == "outputMode" else self.argument(name, call, "outputMode")
                if (text := _text(node, self.constants)) in ("update", "complete") and node is not None:
                    yield node.lineno, f'outputMode("{text}")', _UPDATE
            if name == "save":
                given = [*modes, self.argument(name, call, "mode")]
                texts = [_text(node, self.constants) for node in given if node is not None]
                elsewhere = not texts and not self._formats()  # a part of a chain; another one may have the mode
                if not elsewhere and not {"append", None} & {*texts}:
                    yield call.func.end_lineno or call.lineno, "save()" if not texts else f'mode("{texts[0]}")', _APPEND


def _option(
    name: str, value: ast.expr | None, line: int, side: str | None, constants: Constants | None = None
) -> Iterator[Found]:
    """An option of Kafka's source or sink; ``side`` None is unknown, as is a ``value`` that is no text."""
    lower, text = name.lower(), _text(value, constants or {})
    if lower == "includeheaders":
        yield line, name, _NO_HEADERS if side == "sink" else _HEADERS
    elif lower == "checkpointlocation":
        yield line, name, _FOLDER
    elif lower in _OF_PARTITIONS:
        if value is not None and (text is None or _NUMBERED.search(text)):
            yield line, name, _OF_PARTITIONS[lower]
    elif lower == "subscribepattern":
        if text is None or "." in text.replace(".*", "").replace(".+", ""):
            yield line, name, _PATTERN
    elif lower in ("topic", "subscribe"):
        if text is not None and "." in text:
            yield line, name, _DOTS
    elif here := of_foreign_option(name):
        yield line, name, here if side is None or _fits(here, side) else f"omit it: the {side} has no such option"
    elif lower in _OF_SPARK:
        yield line, name, _OTHER


def _fits(here: str, side: str) -> bool:
    """Whether the source or the sink accepts an option that a sentence names, if it names one."""
    main, _, _ = here.partition(", with ")
    named = [row for row in TABLE if f"'{row.name}'" in main]
    return not named or any(role.endswith(side) for row in named for role in row.roles)


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Found]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.startswith("pyspark.streaming.kafka"):
            yield node.lineno, module, _DSTREAMS
        elif here := _CLIENTS.get(module.partition(".")[0]):
            yield node.lineno, module, here
