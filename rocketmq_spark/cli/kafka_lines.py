"""The lines of a program for Kafka that change, and what replaces them. The program is read, never run. Pure.

Python is parsed: ``kafka_chains`` finds what reads and writes, ``python_values`` the formats and options that are computed.
Everything else (Scala, SQL, shells, cells of notebooks that are not Python) is searched by ``kafka_text``.
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
from rocketmq_spark.cli.kafka_text import CHECK, JAR, PACKAGE, SETTING, KafkaUse, of_sql, of_text
from rocketmq_spark.cli.python_values import UNKNOWN, DictValue, PythonProgram


class PortedLine(NamedTuple):
    """``where`` is the number of a line, in a notebook ``cell:line``."""

    where: str
    kafka: str
    replacement: str


class PortReport(NamedTuple):
    """``searched`` are the parts that were searched as text, such as ``cell 2``."""

    lines: list[PortedLine]
    searched: list[str]


_DSTREAMS = "a stream of format rocketmq; there are no DStreams"
_LAG = 'progress(query)["lag"] (docs/monitoring.md)'
_CLIENT = "rocketmq_spark.Producer, PullConsumer and Consumer; Admin for topics, queues and groups: help(rocketmq_spark.Admin)"
_ASYNC = "rocketmq_spark.aio (rocketmq-spark help asyncio)"
_CLIENTS = {"kafka": _CLIENT, "confluent_kafka": _CLIENT, "aiokafka": _ASYNC, "faust": _ASYNC}
# In a notebook of Databricks that is stored as a program, cells in other languages are comments.
_MAGIC = re.compile(r"^(?:#|--|//) MAGIC(?: |$)", re.MULTILINE)
_MAGIC_PART = re.compile(r"(?:^# MAGIC(?: .*)?$\n?)+", re.MULTILINE)
_PROSE = re.compile(r"\s*%%?(?:md|markdown)\b")
# Lines of a notebook's cell for IPython or a shell, which may go on after a backslash.
_LINE_MAGIC = re.compile(r"^([^\S\n]*)[%!](?:.*\\\n)*.*", re.MULTILINE)
# What ``ast.parse`` and ``json.loads`` raise for texts that they cannot read, or that are too deep for them.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def port_report(name: str, text: str | bytes) -> PortReport:
    """What changes, in the order of lines. Raises one of ``UNREADABLE`` if the program or the notebook cannot be parsed."""
    if name.endswith(".py"):
        (lines,) = _of_python([_program(text)])
        parts = list(_magic_parts(text if isinstance(text, str) else text.decode("utf-8", "replace")))
        lines += [use for part in parts for use in of_text(part)]
        return PortReport(_placed("", lines), ["the text after # MAGIC"] if parts else [])
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise SyntaxError(f"byte {e.start} is not UTF-8: save the file as UTF-8") from e
    if name.endswith(".ipynb"):
        return _of_notebook(text)
    return PortReport(_placed("", of_text(_MAGIC.sub("", text))), [name])


def _magic_parts(text: str) -> Iterator[str]:
    """The cells of a notebook of Databricks in other languages, each after as many empty lines as are before it in ``text``."""
    text = text.replace("\r\n", "\n")
    for part in _MAGIC_PART.finditer(text):
        plain = _MAGIC.sub("", part[0])
        if not _PROSE.match(plain):
            yield "\n" * text.count("\n", 0, part.start()) + plain


def _program(text: str | bytes) -> ast.Module:
    try:
        return ast.parse(text)  # bytes may say their encoding
    except SyntaxError as e:
        if "'utf-8' codec" in e.msg:
            e.msg += ": save the file as UTF-8, or name its encoding in the first line"
        raise


def _placed(prefix: str, lines: Iterable[KafkaUse]) -> list[PortedLine]:
    return [PortedLine(f"{prefix}{line}", kafka, replacement) for line, kafka, replacement in sorted(set(lines))]


def _of_notebook(text: str) -> PortReport:
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise SyntaxError(f"a notebook must be JSON: {e}") from e
    try:
        cells = notebook["cells"]
        programs = ["".join(cell.get("source", "")) if cell["cell_type"] == "code" else "" for cell in cells]
        programs = ["" if _PROSE.match(program) else program for program in programs]
    except (KeyError, TypeError, AttributeError) as e:
        raise SyntaxError(
            "it is not a notebook of format 4: expected a JSON object with a list 'cells', each with 'cell_type' and 'source'"
        ) from e
    parsed = [_parsed(program) for program in programs]
    of_python = iter(_of_python([tree for tree, _ in parsed if tree is not None]))
    lines, searched = [], []
    for number, (program, (tree, magic)) in enumerate(zip(programs, parsed, strict=True), 1):
        if tree is None:
            searched.append(f"cell {number}")
            lines += _placed(f"{number}:", of_text(program))
        else:
            lines += _placed(f"{number}:", [*next(of_python), *(one for part in magic for one in of_text(part))])
    return PortReport(lines, searched)


def _parsed(cell: str) -> tuple[ast.Module | None, list[str]]:
    """A cell without its line magics, and these, each after as many empty lines as are before it; None if it is not Python."""
    if cell.lstrip().startswith("%%"):
        return None, []
    with contextlib.suppress(*UNREADABLE):
        return ast.parse(cell), []  # a line may begin with the operator ``%``
    magic = ["\n" * cell.count("\n", 0, part.start()) + part[0] for part in _LINE_MAGIC.finditer(cell)]
    with contextlib.suppress(*UNREADABLE):
        return ast.parse(_LINE_MAGIC.sub(lambda part: f"{part[1]}pass" + "\n" * part[0].count("\n"), cell)), magic
    return None, []


def _of_python(trees: list[ast.Module]) -> list[list[KafkaUse]]:
    """The findings of each module or cell; all share their variables."""
    program = PythonProgram(trees)
    chains = Chains(program, trees)
    kafka = KafkaChains(chains)
    of_chains = [list(kafka.findings(tree)) for tree in trees]  # all first: ``_of_rest`` skips what they explain
    of_kafka, ported = Frames(chains, KAFKA), Frames(chains, ROCKETMQ)
    written, sent = of_kafka.written(), ported.written(without=("topic", "topicnames", UNKNOWN))
    return [
        [
            *lines,
            *column_findings(tree, program, of_kafka.reads, written),
            *topic_findings(tree, program, ported.reads, sent),
            *_of_rest(tree, program, kafka),
        ]
        for tree, lines in zip(trees, of_chains, strict=True)
    ]


def _of_rest(tree: ast.Module, program: PythonProgram, kafka: KafkaChains) -> Iterator[KafkaUse]:
    """What is not in a chain: clients, dictionaries of options, SQL, settings, and texts that may become a format."""
    seen: set[ast.AST] = set()  # docstrings, and parts of texts
    judged: set[object] = set()  # variables with dictionaries
    for node in ast.walk(tree):  # a whole text comes before its parts
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                seen.add(docstring)
            case ast.Dict():
                yield from _dictionary(node, program, kafka)
            case ast.Assign(targets=[ast.Subscript(value=whole, slice=key)], value=value):
                place, _ = program.bindings(whole)
                if place not in judged:  # a dictionary may have a thousand such lines
                    judged.add(place)
                    yield from _dictionary(whole, program, kafka)
                yield from _dictionary(ast.Dict([key], [value]), program, kafka)
            case ast.Import() | ast.ImportFrom():
                yield from _imports(node)
            case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant() | ast.JoinedStr() as text)):
                seen.update(node.args)
                seen.update(keyword.value for keyword in node.keywords)
                yield from _of_texts(node, text, program, seen)
            case ast.JoinedStr() | ast.BinOp() if node not in seen:
                yield from _of_texts(node, node, program, seen)
            case ast.AugAssign(value=ast.JoinedStr() | ast.BinOp() | ast.Constant() as text):
                yield from _of_texts(text, text, program, seen)
            case ast.Constant(value=str() as text) if node not in seen:
                yield from of_sql(text, node.lineno)
                yield from _constant(text, node.lineno)
                if text.lower() == "kafka" and node not in kafka.format_constants:
                    yield node.lineno, '"kafka"', CHECK


def _of_texts(node: ast.expr, place: ast.expr, program: PythonProgram, seen: set[ast.AST]) -> Iterator[KafkaUse]:
    """SQL in a text that is put together."""
    constants = [
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    texts = program.texts(node) if any(re.search(r"create|using", text, re.IGNORECASE) for text in constants) else []
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.BinOp)]
    uses = [use for text in texts for use in of_sql(text, place.lineno)]
    seen.update(parts)
    if uses:  # otherwise the parts are judged by themselves
        seen.update(part for part in ast.walk(node) if isinstance(part, ast.Constant))
    yield from uses


def _dictionary(dictionary: ast.expr, program: PythonProgram, kafka: KafkaChains) -> Iterator[KafkaUse]:
    """The entries of a dictionary that has a name with ``kafka.``, unless a chain uses the entry."""
    for entries in program.values(dictionary):
        if not isinstance(entries, DictValue) or not any(
            entry.name.lower().startswith("kafka.") for entry in entries.items
        ):
            continue
        names = {entry.name.lower() for entry in entries.items}
        for entry in entries.items:
            if (entry.line, entry.name) not in kafka.explained_options:
                setting = Setting(entry.name, program.texts(entry.value), None, None, names)
                yield from ((entry.line, entry.name, replacement) for replacement in replacements(setting))


def _constant(text: str, line: int) -> Iterator[KafkaUse]:
    if match := JAR.search(text):
        yield line, match[0], PACKAGE
    elif text.startswith("spark.kafka."):
        yield line, text, SETTING
    elif text.endswith("OffsetsBehindLatest"):
        yield line, text, _LAG


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[KafkaUse]:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if module.startswith("pyspark.streaming.kafka"):
            yield node.lineno, module, _DSTREAMS
        elif replacement := _CLIENTS.get(module.partition(".")[0]):
            yield node.lineno, module, replacement
