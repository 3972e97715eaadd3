"""Finds columns of Spark's Kafka connector in a Python program, and names the RocketMQ columns with the same values. Pure.

Columns are searched only in frames that Kafka's source returns or Kafka's sink writes. Topic names that contain dots are also
searched in frames of the RocketMQ source and sink, because a program that is ported in part may still have such names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator

from rocketmq_spark.cli.kafka_options import TOPIC_NAMES_REMEDY, has_dots_of_names
from rocketmq_spark.cli.kafka_text import KafkaFinding
from rocketmq_spark.cli.python_values import PythonProgram
from rocketmq_spark.options.names import KAFKA_SINK_COLUMNS, KAFKA_SOURCE_COLUMNS
from rocketmq_spark.wire.names import legal_name

_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
_COLUMN_OF_LOWER_NAME = {name.lower(): name for name in _COLUMNS}
_COLUMN_PATTERN = "|".join(_COLUMNS)
# Methods of frames whose string arguments are names of columns; methods whose strings are SQL; functions whose first string is
# the name of a column.
_COLUMN_NAME_METHODS = {
    *("select", "groupBy", "withColumn", "withColumnRenamed", "withWatermark", "dropDuplicates", "orderBy", "drop"),
    *("dropDuplicatesWithinWatermark", "repartition", "sort"),
}
_SQL_METHODS = {"selectExpr", "where", "filter"}
_COLUMN_NAME_FUNCTIONS = {"col", "column", "window"}
_VIEW_METHODS = {"createOrReplaceTempView", "createTempView", "createOrReplaceGlobalTempView", "createGlobalTempView"}
# The name of a column in SQL: not a function, not the type of a cast, not a part of a longer name.
_COLUMN_IN_SQL = re.compile(
    rf"(?<![\w$@-])(?!(?<=\bas )timestamp\b)(?:\w+\.)?`?({_COLUMN_PATTERN})`?(?![\w.-]|\s*\()", re.IGNORECASE
)
_REGEX_FUNCTION = re.compile(r"\brlike\b|\bregexp", re.IGNORECASE)
_QUOTED_PATTERN = re.compile(r"'[^']*'|\"[^\"]*\"")
# In SQL, a text with a dot that is compared with the column topic (group ``compared``), or that becomes the column topic (group
# ``assigned``).
_TOPIC_WITH_DOTS = re.compile(
    r"\btopic\b(?:(?!\b(?:and|or)\b)[^'\"]){0,99}(['\"])(?P<compared>[^'\"]{0,127}\.[^'\"]{0,127})\1|(['\"])(?P<assigned>[^'\"\s]{0,127}\.[^'\"\s]{0,127})\3\s+as\s+topic\b",
    re.I,
)


def column_findings(
    tree: ast.Module,
    program: PythonProgram,
    reads_kafka: Callable[[ast.expr], bool],
    written_nodes: Container[ast.expr],
) -> Iterator[KafkaFinding]:
    """Yield line, column and replacement. ``written_nodes`` are the calls and names in the expressions of all frames that Kafka's
    sink writes.
    """
    for line, name, is_read in _columns(tree, program, reads_kafka, written_nodes):
        column = _COLUMN_OF_LOWER_NAME[name.lower()]
        yield line, f"column {column}", f"stays, with kafkaColumns=true{_hint_without_option(column.lower(), is_read)}"
    for call, is_read in _frame_calls(tree, reads_kafka, written_nodes):
        yield from _assigned_topic_findings(call, program)
        if is_read:
            yield from _compared_topic_findings(call, program)


def topic_findings(
    tree: ast.Module,
    program: PythonProgram,
    reads_rocketmq: Callable[[ast.expr], bool],
    written_nodes: Container[ast.expr],
) -> Iterator[KafkaFinding]:
    """Yield findings for topic names with dots in frames of RocketMQ.

    ``written_nodes`` are the written frames, without those whose writer has option ``topicNames``.
    """
    for call, is_read in _frame_calls(tree, reads_rocketmq, written_nodes):
        if call in written_nodes:
            yield from _assigned_topic_findings(call, program)
        if is_read:
            yield from _compared_topic_findings(call, program)


def _hint_without_option(kafka_column: str, is_read: bool) -> str:
    column = (KAFKA_SOURCE_COLUMNS if is_read else KAFKA_SINK_COLUMNS).get(kafka_column)
    return f"; without it: {column}" if column else ""


def _frame_calls(
    tree: ast.Module, reads: Callable[[ast.expr], bool], written_nodes: Container[ast.expr]
) -> Iterator[tuple[ast.Call, bool]]:
    """Yield each call of a method of a frame that is read, with True, and each other call of ``written_nodes``, with False."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=frame)):
                is_read = reads(frame)
                if is_read or node in written_nodes:
                    yield node, is_read


def _columns(
    tree: ast.Module,
    program: PythonProgram,
    reads_kafka: Callable[[ast.expr], bool],
    written_nodes: Container[ast.expr],
) -> Iterator[tuple[int, str, bool]]:
    """Yield line and name of each column, and whether it is a column of Kafka's source."""
    called_nodes = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    views: set[str] = set()
    for call, _ in _frame_calls(tree, reads_kafka, ()):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _VIEW_METHODS:
            views.update(text for argument in call.args for text in program.texts(argument))
    for call, is_read in _frame_calls(tree, reads_kafka, written_nodes):
        yield from ((line, name, is_read) for line, name in _columns_in_call(call))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="sql"), args=[ast.Constant(value=str(text)) as query, *_]):
                if any(re.search(rf"\b{re.escape(view)}\b", text) for view in views):
                    yield from ((line, name, True) for line, name in _columns_in_sql(query))
            case ast.Attribute(value=frame, attr=name) if name in _COLUMNS and node not in called_nodes:
                if reads_kafka(frame):
                    yield node.lineno, name, True
            case ast.Subscript(value=frame, slice=ast.Constant(value=str()) as name_node) if reads_kafka(frame):
                yield from ((line, name, True) for line, name in _column_name(name_node))


def _columns_in_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    arguments = call.args[:1] if method == "withColumn" else call.args
    for argument in arguments:
        for part in argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                if method in _SQL_METHODS:
                    yield from _columns_in_sql(part)
                elif method in _COLUMN_NAME_METHODS:
                    yield from _column_name(part)
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for node in ast.walk(argument):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Constant(value=str()) as text, *_]
                ):
                    if name == "expr":
                        yield from _columns_in_sql(text)
                    elif name in _COLUMN_NAME_FUNCTIONS or (name == "alias" and method == "select"):
                        yield from _column_name(text)


def _assigned_topic_findings(call: ast.Call, program: PythonProgram) -> Iterator[KafkaFinding]:
    """Yield findings for texts with dots that become the column topic."""
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
        yield from ((value.lineno, "column topic", TOPIC_NAMES_REMEDY) for text in program.texts(value) if "." in text)
    for line, match in _topic_texts_in_sql(call):
        if match["assigned"]:
            yield line, "column topic", TOPIC_NAMES_REMEDY


def _compared_topic_findings(call: ast.Call, program: PythonProgram) -> Iterator[KafkaFinding]:
    """Yield findings for texts with dots that are compared with the column topic, or that split the column topic."""
    for argument in call.args:
        for node in ast.walk(argument):
            match node:
                case (
                    ast.Compare()
                    | ast.Call(func=ast.Attribute(attr="isin" | "startswith" | "endswith" | "contains" | "like"))
                ):
                    yield from _comparison_findings(node, program, lambda text: "." in text)
                case ast.Call(func=ast.Attribute(attr="split" | "rlike") | ast.Name(id="split")):
                    yield from _comparison_findings(node, program, has_dots_of_names)
    for line, match in _topic_texts_in_sql(call):
        if match["compared"] and (has_dots_of_names(match["compared"]) or not _REGEX_FUNCTION.search(match.string)):
            yield line, "column topic", _underscore_remedy(match["compared"])


def _topic_texts_in_sql(call: ast.Call) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield the lines and matches of ``_TOPIC_WITH_DOTS`` in the SQL of a call."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    for argument in call.args:
        for node in ast.walk(argument):
            match node:
                case ast.Constant(value=str(text)) if method in _SQL_METHODS or _is_in_expr_call(argument, node):
                    for topic_match in _TOPIC_WITH_DOTS.finditer(text):
                        yield node.lineno + text.count("\n", 0, topic_match.start()), topic_match


def _is_in_expr_call(argument: ast.expr, constant: ast.Constant) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) == "expr"
        and constant in node.args
        for node in ast.walk(argument)
    )


def _comparison_findings(
    node: ast.Compare | ast.Call, program: PythonProgram, has_dots: Callable[[str], bool]
) -> Iterator[KafkaFinding]:
    parts = list(ast.walk(node))
    has_topic_column = any(
        (isinstance(part, ast.Constant) and part.value == "topic")
        or (isinstance(part, ast.Attribute) and part.attr == "topic")
        for part in parts
    )
    operands = [*node.comparators, node.left] if isinstance(node, ast.Compare) else node.args
    texts = [text for operand in operands for text in program.texts(operand) if has_dots(text)]
    if has_topic_column and texts:
        yield node.lineno, "column topic", _underscore_remedy(texts[0])


def _underscore_remedy(text: str) -> str:
    legal_topic = legal_name(text)
    return f"the column has RocketMQ's names, with _ for dots{f': {legal_topic}' if len(legal_topic) > 1 else ''}"


def _column_name(text: ast.Constant) -> Iterator[tuple[int, str]]:
    name = str(text.value).rpartition(".")[2].strip("` ")
    if name.lower() in _COLUMN_OF_LOWER_NAME:
        yield text.lineno, name


def _columns_in_sql(text: ast.Constant) -> Iterator[tuple[int, str]]:
    unquoted_text = _QUOTED_PATTERN.sub(lambda quoted_match: " " * len(quoted_match[0]), str(text.value))
    for match in _COLUMN_IN_SQL.finditer(unquoted_text):
        yield text.lineno + unquoted_text.count("\n", 0, match.start()), match[1]
