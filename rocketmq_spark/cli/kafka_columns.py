"""The columns of Spark's Kafka connector in a Python program, and those of RocketMQ that have their values. Pure.

Only those of frames that Kafka's source made, or that Kafka's sink writes. Names of topics with dots also count in frames of
RocketMQ.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator

from rocketmq_spark.cli.kafka_options import DOTS, has_dots_of_names
from rocketmq_spark.cli.kafka_text import KafkaUse
from rocketmq_spark.cli.python_values import PythonProgram
from rocketmq_spark.options.names import KAFKA_SINK_COLUMNS, KAFKA_SOURCE_COLUMNS
from rocketmq_spark.wire.names import legal_name

_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
_OF_LOWER = {name.lower(): name for name in _COLUMNS}
_WORDS = "|".join(_COLUMNS)
# Methods of frames whose string arguments are names of columns; those whose strings are SQL; functions whose first string is a
# name.
_NAMED = {
    *("select", "groupBy", "withColumn", "withColumnRenamed", "withWatermark", "dropDuplicates", "orderBy", "drop"),
    *("dropDuplicatesWithinWatermark", "repartition", "sort"),
}
_EXPRESSIONS = {"selectExpr", "where", "filter"}
_NAMED_FUNCTIONS = {"col", "column", "window"}
_VIEWS = {"createOrReplaceTempView", "createTempView", "createOrReplaceGlobalTempView", "createGlobalTempView"}
# A name in an expression: no function, no type of a cast, no part of a longer name.
_IN_TEXT = re.compile(rf"(?<![\w$@-])(?!(?<=\bas )timestamp\b)(?:\w+\.)?`?({_WORDS})`?(?![\w.-]|\s*\()", re.IGNORECASE)
_PATTERN = re.compile(r"\brlike\b|\bregexp", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# A text beside the column topic in an expression.
_TOPIC_WITH_DOTS = re.compile(
    r"\btopic\b(?:(?!\b(?:and|or)\b)[^'\"]){0,99}(['\"])(?P<name>[^'\"]{0,127}\.[^'\"]{0,127})\1|(['\"])(?P<sent>[^'\"\s]{0,127}\.[^'\"\s]{0,127})\3\s+as\s+topic\b",
    re.I,
)


def column_findings(
    tree: ast.Module, program: PythonProgram, reads_kafka: Callable[[ast.expr], bool], written: Container[ast.expr]
) -> Iterator[KafkaUse]:
    """Line, column and its replacement. ``written`` are the calls and names in the expressions of all frames that Kafka's sink
    writes.
    """
    for line, name, is_read in _columns(tree, program, reads_kafka, written):
        column = _OF_LOWER[name.lower()]
        yield line, f"column {column}", f"stays, with kafkaColumns=true{_without_option(column.lower(), is_read)}"
    for call, is_read in _frame_calls(tree, reads_kafka, written):
        yield from _assigned_topics(call, program)
        if is_read:
            yield from _compared_topics(call, program)


def topic_findings(
    tree: ast.Module, program: PythonProgram, reads_rocketmq: Callable[[ast.expr], bool], written: Container[ast.expr]
) -> Iterator[KafkaUse]:
    """The names of topics with dots in frames of RocketMQ; ``written`` without those that option ``topicNames`` accepts."""
    for call, is_read in _frame_calls(tree, reads_rocketmq, written):
        if call in written:
            yield from _assigned_topics(call, program)
        if is_read:
            yield from _compared_topics(call, program)


def _without_option(lower: str, is_read: bool) -> str:
    here = (KAFKA_SOURCE_COLUMNS if is_read else KAFKA_SINK_COLUMNS).get(lower)
    return f"; without it: {here}" if here else ""


def _frame_calls(
    tree: ast.Module, reads: Callable[[ast.expr], bool], written: Container[ast.expr]
) -> Iterator[tuple[ast.Call, bool]]:
    """The calls of methods of frames that are read or ``written``, and whether they are read."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=frame)):
                is_read = reads(frame)
                if is_read or node in written:
                    yield node, is_read


def _columns(
    tree: ast.Module, program: PythonProgram, reads_kafka: Callable[[ast.expr], bool], written: Container[ast.expr]
) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each column, and whether it is one of Kafka's source."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    views: set[str] = set()
    for call, _ in _frame_calls(tree, reads_kafka, ()):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS:
            views.update(text for argument in call.args for text in program.texts(argument))
    for call, is_read in _frame_calls(tree, reads_kafka, written):
        yield from ((line, name, is_read) for line, name in _of_method(call))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="sql"), args=[ast.Constant(value=str(text)) as query, *_]):
                if any(re.search(rf"\b{re.escape(view)}\b", text) for view in views):
                    yield from ((line, name, True) for line, name in _columns_in_sql(query))
            case ast.Attribute(value=frame, attr=name) if name in _COLUMNS and node not in called:
                if reads_kafka(frame):
                    yield node.lineno, name, True
            case ast.Subscript(value=frame, slice=ast.Constant(value=str()) as name) if reads_kafka(frame):
                yield from ((line, name, True) for line, name in _column_name(name))


def _of_method(call: ast.Call) -> Iterator[tuple[int, str]]:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    arguments = call.args[:1] if method == "withColumn" else call.args
    for argument in arguments:
        for part in argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                if method in _EXPRESSIONS:
                    yield from _columns_in_sql(part)
                elif method in _NAMED:
                    yield from _column_name(part)
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for node in ast.walk(argument):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Constant(value=str()) as text, *_]
                ):
                    if name == "expr":
                        yield from _columns_in_sql(text)
                    elif name in _NAMED_FUNCTIONS or (name == "alias" and method == "select"):
                        yield from _column_name(text)


def _assigned_topics(call: ast.Call, program: PythonProgram) -> Iterator[KafkaUse]:
    """Texts with dots that become the column topic."""
    values = []
    match call:
        case ast.Call(func=ast.Attribute(attr="withColumn"), args=[ast.Constant(value="topic"), value]):
            values.append(value)
    for argument in call.args:
        for node in ast.walk(argument):
            match node:
                case ast.Call(func=ast.Attribute(attr="alias", value=value), args=[ast.Constant(value="topic")]):
                    values.append(value)
    for value in values:
        yield from ((value.lineno, "column topic", DOTS) for text in program.texts(value) if "." in text)
    for line, match in _in_expressions(call):
        if match["sent"]:
            yield line, "column topic", DOTS


def _compared_topics(call: ast.Call, program: PythonProgram) -> Iterator[KafkaUse]:
    """Texts with dots that are compared with the column topic, or split it."""
    for argument in call.args:
        for node in ast.walk(argument):
            match node:
                case (
                    ast.Compare()
                    | ast.Call(func=ast.Attribute(attr="isin" | "startswith" | "endswith" | "contains" | "like"))
                ):
                    yield from _compared(node, program, lambda text: "." in text)
                case ast.Call(func=ast.Attribute(attr="split" | "rlike") | ast.Name(id="split")):
                    yield from _compared(node, program, has_dots_of_names)
    for line, match in _in_expressions(call):
        if match["name"] and (has_dots_of_names(match["name"]) or not _PATTERN.search(match.string)):
            yield line, "column topic", _with_underscores(match["name"])


def _in_expressions(call: ast.Call) -> Iterator[tuple[int, re.Match[str]]]:
    """The places of ``_TOPIC_WITH_DOTS`` in a call, with their lines."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    for argument in call.args:
        for node in ast.walk(argument):
            match node:
                case ast.Constant(value=str(text)) if method in _EXPRESSIONS or _is_expression(argument, node):
                    for found in _TOPIC_WITH_DOTS.finditer(text):
                        yield node.lineno + text.count("\n", 0, found.start()), found


def _is_expression(argument: ast.expr, text: ast.Constant) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) == "expr"
        and text in node.args
        for node in ast.walk(argument)
    )


def _compared(
    node: ast.Compare | ast.Call, program: PythonProgram, has_dots: Callable[[str], bool]
) -> Iterator[KafkaUse]:
    parts = list(ast.walk(node))
    is_topic = any(
        (isinstance(part, ast.Constant) and part.value == "topic")
        or (isinstance(part, ast.Attribute) and part.attr == "topic")
        for part in parts
    )
    operands = [*node.comparators, node.left] if isinstance(node, ast.Compare) else node.args
    texts = [text for operand in operands for text in program.texts(operand) if has_dots(text)]
    if is_topic and texts:
        yield node.lineno, "column topic", _with_underscores(texts[0])


def _with_underscores(text: str) -> str:
    legal = legal_name(text)
    return f"the column has RocketMQ's names, with _ for dots{f': {legal}' if len(legal) > 1 else ''}"


def _column_name(text: ast.Constant) -> Iterator[tuple[int, str]]:
    name = str(text.value).rpartition(".")[2].strip("` ")
    if name.lower() in _OF_LOWER:
        yield text.lineno, name


def _columns_in_sql(text: ast.Constant) -> Iterator[tuple[int, str]]:
    plain = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), str(text.value))
    for match in _IN_TEXT.finditer(plain):
        yield text.lineno + plain.count("\n", 0, match.start()), match[1]
