"""The lines of a program that name Kafka, and what replaces them. The program is read, never run. Pure.

Python is parsed, so that comments and other texts are no findings. Other languages (Scala, SQL, shells, configurations) are
searched line by line for Kafka's format, options and packages.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from rocketmq_spark.options.names import KAFKA_SOURCE_COLUMNS, of_foreign_option


class KafkaLine(NamedTuple):
    """``where`` is the number of a line, in a notebook ``cell:line``."""

    where: str
    kafka: str
    here: str


_FORMAT = 'format("rocketmq"); README.md shows how to install it'
_COLUMNS = "kept by option 'kafkaColumns' = true; without it, column {}"
_PACKAGE = "no jar: pip install the package in the Python of driver and workers (docs/where-it-runs.md)"
_MODE = "write with foreachBatch(foreach_batch_writer(...)), since the sink takes append mode only (docs/writing.md)"
_PLACES = 'a queue has a broker and an id: {"orders": {"broker-a": {"0": 12}}}; or use startingTimestamp'
_DSTREAMS = "a stream of format rocketmq; there are no DStreams"
_CONTINUOUS = "a trigger of micro-batches; continuous processing is not supported"
_CLIENTS = {
    "kafka": "rocketmq_spark.Producer, PullConsumer and Consumer (docs/api.md)",
    "confluent_kafka": "rocketmq_spark.Producer, PullConsumer and Consumer (docs/api.md)",
    "aiokafka": "rocketmq_spark.aio (docs/asyncio.md)",
    "faust": "rocketmq_spark.aio (docs/asyncio.md)",
}
# Options of both whose values name partitions.
_OF_PARTITIONS = (
    "assign",
    "startingoffsets",
    "endingoffsets",
    "startingoffsetsbytimestamp",
    "endingoffsetsbytimestamp",
)
# Methods of DataFrames and functions of Spark whose texts name columns.
_NAMING = frozenset(
    {
        "agg", "col", "column", "drop", "dropDuplicates", "expr", "filter", "from_avro", "from_json", "get_json_object",
        "groupBy", "observe", "orderBy", "select", "selectExpr", "sort", "where", "window", "withColumn", "withColumnRenamed",
        "withColumns", "withWatermark",
    }
)  # fmt: skip
_NAMES = {name.lower(): name for name in (*KAFKA_SOURCE_COLUMNS, "timestampType")}
_WORD = re.compile(rf"\b({'|'.join(sorted(_NAMES, key=len, reverse=True))})\b", re.IGNORECASE)
_IN_SQL = re.compile(r"\busing\s+kafka\b", re.IGNORECASE)
_JAR = re.compile(r"spark-(?:sql|streaming)-kafka[\w.:-]*|kafka-clients[\w.:-]*")
_ANY_FORMAT = re.compile(r"""format\s*\(\s*["']kafka["']\s*\)""")
_ANY_OPTION = re.compile(
    r"""["'`]?(kafka\.[\w.]+|includeHeaders|groupIdPrefix|kafkaConsumer\.\w+|fetchOffset\.\w+)\b"""
)


def findings(name: str, text: str) -> list[KafkaLine]:
    """Findings in the order of lines. Raises ``SyntaxError`` if a Python program or a notebook cannot be parsed."""
    if name.endswith(".ipynb"):
        return list(_of_notebook(text))
    found = _of_python(text) if name.endswith(".py") else _of_lines(text)
    return [KafkaLine(str(line), kafka, here) for line, kafka, here in sorted(set(found))]


def _of_notebook(text: str) -> Iterator[KafkaLine]:
    try:
        cells = json.loads(text)["cells"]
    except (ValueError, KeyError, TypeError) as e:
        raise SyntaxError(f"it is no notebook: {e}") from e
    programs = ["".join(cell["source"]) if cell.get("cell_type") == "code" else "" for cell in cells]
    kafka = any(_reads_kafka(program) for program in programs)
    for number, program in enumerate(programs, 1):
        magic = "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in program.split("\n"))
        found = [*_of_python(magic, kafka), *(_of_lines(program) if program.lstrip().startswith("%%") else [])]
        yield from (KafkaLine(f"{number}:{line}", kafka, here) for line, kafka, here in sorted(set(found)))


Found = tuple[int, str, str]


def _reads_kafka(text: str) -> bool:
    return bool(_ANY_FORMAT.search(text) or _IN_SQL.search(text))


def _of_lines(text: str) -> Iterator[Found]:
    for number, line in enumerate(text.split("\n"), 1):
        if found := _ANY_FORMAT.search(line) or _IN_SQL.search(line):
            yield number, found[0], _FORMAT
        if found := _JAR.search(line):
            yield number, found[0], _PACKAGE
        for found in _ANY_OPTION.finditer(line):
            yield number, found[1], of_foreign_option(found[1]) or "see docs/coming-from-kafka.md"


def _of_python(text: str, reads_kafka: bool | None = None) -> Iterator[Found]:
    """``reads_kafka`` is whether the program uses Kafka's columns; None: if this text names its format."""
    tree = ast.parse(text)
    columns = _reads_kafka(text) if reads_kafka is None else reads_kafka
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="format"), args=[ast.Constant(value=str() as value)]):
                if value.lower() == "kafka":
                    yield node.args[0].lineno, 'format("kafka")', _FORMAT
            case ast.Call(func=ast.Attribute(attr="option" | "options")):
                yield from _options(node)
            case ast.Call(
                func=ast.Attribute(attr="outputMode"), args=[ast.Constant(value="update" | "complete" as mode)]
            ):
                if columns:
                    yield node.args[0].lineno, f'outputMode("{mode}")', _MODE
            case ast.Call(func=ast.Attribute(attr="trigger")) if any(
                each.arg == "continuous" for each in node.keywords
            ):
                yield node.lineno, "trigger(continuous=…)", _CONTINUOUS
            case ast.Dict():
                yield from _keys(node)
            case ast.Import() | ast.ImportFrom():
                yield from _imports(node)
            case ast.Constant(value=str() as value):
                if found := _JAR.search(value):
                    yield node.lineno, found[0], _PACKAGE
                if found := _IN_SQL.search(value):
                    yield node.lineno, found[0], _FORMAT
        if columns:
            yield from _columns(node)


def _options(call: ast.Call) -> Iterator[Found]:
    match call:
        case ast.Call(func=ast.Attribute(attr="option"), args=[ast.Constant(value=str() as name), value]):
            yield from _option(name, value, call.args[0].lineno)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield from _option(keyword.arg, keyword.value, keyword.value.lineno)


def _keys(given: ast.Dict) -> Iterator[Found]:
    for key, value in zip(given.keys, given.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.lower().startswith("kafka."):
            yield from _option(key.value, value, key.lineno)


def _option(name: str, value: ast.expr, line: int) -> Iterator[Found]:
    if name.lower() == "includeheaders":
        yield line, name, "the same option, with 'kafkaColumns' = true"
    elif here := of_foreign_option(name):
        yield line, name, here
    elif name.lower() in _OF_PARTITIONS:
        text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
        if re.search(r'"\s*\d+\s*"\s*:|\[\s*\d', text):
            yield line, name, _PLACES


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[Found]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.startswith("pyspark.streaming.kafka"):
            yield node.lineno, module, _DSTREAMS
        elif here := _CLIENTS.get(module.partition(".")[0]):
            yield node.lineno, module, here


def _columns(node: ast.AST) -> Iterator[Found]:
    """Names of Kafka's columns in the texts of calls that name columns, and in subscripts."""
    texts: list[ast.expr] = []
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _NAMING:
            texts = list(node.args)
        case ast.Subscript(slice=ast.Constant(value=str() as text)) if text.lower() in _NAMES:
            texts = [node.slice]
    for each in texts:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            for word in _WORD.findall(each.value):
                lower = word.lower()
                yield each.lineno, _NAMES[lower], _COLUMNS.format(KAFKA_SOURCE_COLUMNS[lower])
