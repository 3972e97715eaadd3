"""Finds the lines of a Kafka program that must change, and their replacements. The program is read and not run. Pure.

Python is parsed by ``ast``. In the parsed program, ``kafka_chains`` finds readers and writers, and ``python_values`` computes
formats and options. Scala, SQL, shells, and cells of notebooks in other languages are searched as text by ``kafka_text``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rocketmq_spark.cli.kafka_chains import Chains, KafkaChains
from rocketmq_spark.cli.kafka_columns import column_findings, topic_findings
from rocketmq_spark.cli.kafka_frames import Frames
from rocketmq_spark.cli.kafka_options import KAFKA, ROCKETMQ, Setting, replacements
from rocketmq_spark.cli.kafka_text import (
    CHECK_TEXT,
    JAR_PATTERN,
    REMOVE_SETTING,
    USE_PACKAGE,
    KafkaFinding,
    sql_findings,
    text_findings,
)
from rocketmq_spark.cli.python_values import UNKNOWN, DictValue, PythonProgram


class PortedLine(NamedTuple):
    """A line that changes. ``where`` is the number of the line; in a notebook, it is ``cell:line``."""

    where: str
    kafka: str
    replacement: str


class PortReport(NamedTuple):
    """The lines that change. ``searched_parts`` names the parts that were searched as text, such as ``cell 2``."""

    lines: list[PortedLine]
    searched_parts: list[str]


_DSTREAM_REPLACEMENT = "a stream of format rocketmq; there are no DStreams"
_LAG_REPLACEMENT = 'progress(query)["lag"] (docs/monitoring.md)'
_CLIENT_REPLACEMENT = (
    "rocketmq_spark.Producer, PullConsumer and Consumer; "
    "Admin for topics, queues and groups: help(rocketmq_spark.Admin)"
)
_ASYNC_REPLACEMENT = "rocketmq_spark.aio (rocketmq-spark help asyncio)"
_REPLACEMENT_BY_MODULE = {
    "kafka": _CLIENT_REPLACEMENT,
    "confluent_kafka": _CLIENT_REPLACEMENT,
    "aiokafka": _ASYNC_REPLACEMENT,
    "faust": _ASYNC_REPLACEMENT,
}
# Databricks stores notebooks as programs, in which cells in other languages are comments.
_MAGIC_PREFIX = re.compile(r"^(?:#|--|//) MAGIC(?: |$)", re.MULTILINE)
_MAGIC_CELL = re.compile(r"(?:^# MAGIC(?: .*)?$\n?)+", re.MULTILINE)
_MARKDOWN_CELL = re.compile(r"\s*%%?(?:md|markdown)\b")
# Lines of a notebook's cell for IPython or a shell. A backslash at the end of a line continues the line.
_LINE_MAGIC = re.compile(r"^([^\S\n]*)[%!](?:.*\\\n)*.*", re.MULTILINE)
# What ``ast.parse`` and ``json.loads`` raise for texts that they cannot parse, or that are nested too deeply.
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def port_report(name: str, text: str | bytes) -> PortReport:
    """Return the lines that change, in order. Raises one of ``PARSE_ERRORS`` if the program or the notebook cannot be parsed."""
    if name.endswith(".py"):
        (findings,) = _python_findings([_parse_program(text)])
        magic_cells = list(_magic_cells(text if isinstance(text, str) else text.decode("utf-8", "replace")))
        findings += [finding for part in magic_cells for finding in text_findings(part)]
        return PortReport(_ported_lines("", findings), ["the text after # MAGIC"] if magic_cells else [])
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise SyntaxError(f"byte {e.start} is not UTF-8: save the file as UTF-8") from e
    if name.endswith(".ipynb"):
        return _notebook_report(text)
    return PortReport(_ported_lines("", text_findings(_MAGIC_PREFIX.sub("", text))), [name])


def _magic_cells(text: str) -> Iterator[str]:
    """Yield the cells of a Databricks notebook in other languages, each after empty lines, so that its lines keep their
    numbers.
    """
    text = text.replace("\r\n", "\n")
    for part in _MAGIC_CELL.finditer(text):
        plain_text = _MAGIC_PREFIX.sub("", part[0])
        if not _MARKDOWN_CELL.match(plain_text):
            yield "\n" * text.count("\n", 0, part.start()) + plain_text


def _parse_program(text: str | bytes) -> ast.Module:
    try:
        return ast.parse(text)  # ``text`` may be bytes that declare their encoding
    except SyntaxError as e:
        if "'utf-8' codec" in e.msg:
            e.msg += ": save the file as UTF-8, or name its encoding in the first line"
        raise


def _ported_lines(prefix: str, findings: Iterable[KafkaFinding]) -> list[PortedLine]:
    return [PortedLine(f"{prefix}{line}", kafka, replacement) for line, kafka, replacement in sorted(set(findings))]


def _notebook_report(text: str) -> PortReport:
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise SyntaxError(f"a notebook must be JSON: {e}") from e
    try:
        cells = notebook["cells"]
        programs = ["".join(cell.get("source", "")) if cell["cell_type"] == "code" else "" for cell in cells]
        programs = ["" if _MARKDOWN_CELL.match(program) else program for program in programs]
    except (KeyError, TypeError, AttributeError) as e:
        raise SyntaxError(
            "it is not a notebook of format 4: expected a JSON object with a list 'cells', each with 'cell_type' and 'source'"
        ) from e
    parsed_cells = [_parse_cell(program) for program in programs]
    python_findings = iter(_python_findings([tree for tree, _ in parsed_cells if tree is not None]))
    lines, searched_parts = [], []
    for number, (program, (tree, line_magics)) in enumerate(zip(programs, parsed_cells, strict=True), 1):
        if tree is None:
            searched_parts.append(f"cell {number}")
            lines += _ported_lines(f"{number}:", text_findings(program))
        else:
            lines += _ported_lines(
                f"{number}:",
                [*next(python_findings), *(finding for part in line_magics for finding in text_findings(part))],
            )
    return PortReport(lines, searched_parts)


def _parse_cell(cell: str) -> tuple[ast.Module | None, list[str]]:
    """Return the parsed cell without its line magics, and the line magics. The parsed cell is None if the cell is not Python.
    Each line magic follows empty lines, so that it keeps its line number.
    """
    if cell.lstrip().startswith("%%"):
        return None, []
    with contextlib.suppress(*PARSE_ERRORS):
        return ast.parse(cell), []  # in Python, too, a line may begin with ``%``
    line_magics = ["\n" * cell.count("\n", 0, part.start()) + part[0] for part in _LINE_MAGIC.finditer(cell)]
    with contextlib.suppress(*PARSE_ERRORS):
        return ast.parse(_LINE_MAGIC.sub(lambda part: f"{part[1]}pass" + "\n" * part[0].count("\n"), cell)), line_magics
    return None, []


def _python_findings(trees: list[ast.Module]) -> list[list[KafkaFinding]]:
    """Return the findings of each module or cell. All modules and cells share their variables."""
    program = PythonProgram(trees)
    chains = Chains(program, trees)
    kafka_chains = KafkaChains(chains)
    # All chains come first, because ``_other_findings`` skips what the chains explain.
    chain_findings = [list(kafka_chains.findings(tree)) for tree in trees]
    kafka_frames, rocketmq_frames = Frames(chains, KAFKA), Frames(chains, ROCKETMQ)
    written_to_kafka = kafka_frames.written_expressions()
    written_to_rocketmq = rocketmq_frames.written_expressions(excluded_options=("topic", "topicnames", UNKNOWN))
    return [
        [
            *findings_of_chains,
            *column_findings(tree, program, kafka_frames.reads, written_to_kafka),
            *topic_findings(tree, program, rocketmq_frames.reads, written_to_rocketmq),
            *_other_findings(tree, program, kafka_chains),
        ]
        for tree, findings_of_chains in zip(trees, chain_findings, strict=True)
    ]


def _other_findings(tree: ast.Module, program: PythonProgram, kafka_chains: KafkaChains) -> Iterator[KafkaFinding]:
    """Yield findings outside of chains: clients, dictionaries of options, SQL, settings, and texts that may become a format."""
    seen_nodes: set[ast.AST] = set()  # docstrings, and parts of strings that need no further search
    checked_dictionaries: set[object] = set()  # the variables whose dictionaries were checked
    for node in ast.walk(tree):  # a whole text comes before its parts
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                seen_nodes.add(docstring)
            case ast.Dict():
                yield from _dictionary_findings(node, program, kafka_chains)
            case ast.Assign(targets=[ast.Subscript(value=dictionary, slice=key)], value=value):
                variable, _ = program.bindings(dictionary)
                if variable not in checked_dictionaries:  # a thousand lines may set items of a dictionary
                    checked_dictionaries.add(variable)
                    yield from _dictionary_findings(dictionary, program, kafka_chains)
                yield from _dictionary_findings(ast.Dict([key], [value]), program, kafka_chains)
            case ast.Import() | ast.ImportFrom():
                yield from _import_findings(node)
            case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant() | ast.JoinedStr() as text)):
                seen_nodes.update(node.args)
                seen_nodes.update(keyword.value for keyword in node.keywords)
                yield from _built_sql_findings(node, text, program, seen_nodes)
            case ast.JoinedStr() | ast.BinOp() if node not in seen_nodes:
                yield from _built_sql_findings(node, node, program, seen_nodes)
            case ast.AugAssign(value=ast.JoinedStr() | ast.BinOp() | ast.Constant() as text):
                yield from _built_sql_findings(text, text, program, seen_nodes)
            case ast.Constant(value=str() as text) if node not in seen_nodes:
                yield from sql_findings(text, node.lineno)
                yield from _constant_findings(text, node.lineno)
                if text.lower() == "kafka" and node not in kafka_chains.format_constants:
                    yield node.lineno, '"kafka"', CHECK_TEXT


def _built_sql_findings(
    node: ast.expr, line_node: ast.expr, program: PythonProgram, seen_nodes: set[ast.AST]
) -> Iterator[KafkaFinding]:
    """Yield the findings of SQL in a string that the program joins from parts."""
    constants = [
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    texts = program.texts(node) if any(re.search(r"create|using", text, re.IGNORECASE) for text in constants) else []
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.BinOp)]
    findings = [finding for text in texts for finding in sql_findings(text, line_node.lineno)]
    seen_nodes.update(parts)
    if findings:  # without findings, each part is searched separately
        seen_nodes.update(part for part in ast.walk(node) if isinstance(part, ast.Constant))
    yield from findings


def _dictionary_findings(
    dictionary: ast.expr, program: PythonProgram, kafka_chains: KafkaChains
) -> Iterator[KafkaFinding]:
    """Yield findings for all entries of a dictionary, if the name of any entry begins with ``kafka.``. Omits entries that a
    chain uses.
    """
    for entries in program.values(dictionary):
        if not isinstance(entries, DictValue) or not any(
            entry.name.lower().startswith("kafka.") for entry in entries.items
        ):
            continue
        names = {entry.name.lower() for entry in entries.items}
        for entry in entries.items:
            if (entry.line, entry.name) not in kafka_chains.explained_options:
                setting = Setting(entry.name, program.texts(entry.value), None, None, names)
                yield from ((entry.line, entry.name, replacement) for replacement in replacements(setting))


def _constant_findings(text: str, line: int) -> Iterator[KafkaFinding]:
    if match := JAR_PATTERN.search(text):
        yield line, match[0], USE_PACKAGE
    elif text.startswith("spark.kafka."):
        yield line, text, REMOVE_SETTING
    elif text.endswith("OffsetsBehindLatest"):
        yield line, text, _LAG_REPLACEMENT


def _import_findings(node: ast.Import | ast.ImportFrom) -> Iterator[KafkaFinding]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.startswith("pyspark.streaming.kafka"):
            yield node.lineno, module, _DSTREAM_REPLACEMENT
        elif replacement := _REPLACEMENT_BY_MODULE.get(module.partition(".")[0]):
            yield node.lineno, module, replacement
