"""The columns of Spark's Kafka connector in a Python program, and those of RocketMQ that have their values. Pure.

Only certain ones: texts that functions of columns and frames get, and attributes and items of frames that Kafka's source made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator

_HERE = {
    "key": "shardingKey, or keys",
    "value": "body",
    "topic": "topic",
    "partition": "brokerName and queueId",
    "offset": "queueOffset",
    "timestamp": "bornTimestamp",
    "timestampType": "none",
    "headers": "properties",
}
_OF_LOWER = {name.lower(): name for name in _HERE}
_WORDS = "|".join(_HERE)
# Functions whose texts name columns, functions whose texts are expressions, and those that are methods of frames only.
_OF_FRAMES = {"select", "groupBy", "withColumn", "withWatermark", "dropDuplicates", "orderBy"}
_NAMED = {"col", "column", "window", *_OF_FRAMES}
_TEXTS = {"expr", "selectExpr", "where", "filter"}
_METHODS = {"selectExpr", "where", "filter", *_OF_FRAMES}
# A name in an expression: no function, no type of a cast, no part of a longer name.
_IN_TEXT = re.compile(rf"(?<![\w$@-])(?!(?<=\bas )timestamp\b)(?:\w+\.)?`?({_WORDS})`?(?![\w.-]|\s*\()", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_IN_CAST = re.compile(rf"\bcast\s*\(\s*(?:\w+\.)?({_WORDS})\s+as\b", re.IGNORECASE)


def columns(tree: ast.Module, frames: Container[str]) -> Iterator[tuple[int, str, str]]:
    """Line, column and what is known of it; ``frames`` are the variables with rows of Kafka's source."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        for line, name in _of_node(node, frames, called):
            column = _OF_LOWER[name.lower()]
            yield line, f"column {column}", f"stays, with kafkaColumns=true; without it: {_HERE[column]}"


def _of_node(node: ast.AST, frames: Container[str], called: Container[ast.expr]) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Call(func=ast.Attribute(attr="sql"), args=[ast.Constant(value=str()) as text, *_]):
            yield from _matches(_IN_CAST, text)
        case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function)) if function in _NAMED | _TEXTS:
            if function in _METHODS and isinstance(node.func, ast.Name):
                return
            given = node.args[:1] if function == "withColumn" else node.args
            for each in given:
                for part in each.elts if isinstance(each, ast.List | ast.Tuple) else [each]:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield from _matches(_IN_TEXT, part) if function in _TEXTS else _whole(part)
        case ast.Attribute(value=ast.Name(id=frame), attr=name) if frame in frames and node not in called:
            if name in _HERE:
                yield node.lineno, name
        case ast.Subscript(value=ast.Name(id=frame), slice=ast.Constant() as name) if frame in frames:
            yield from _whole(name)


def _whole(text: ast.Constant) -> Iterator[tuple[int, str]]:
    name = str(text.value).rpartition(".")[2].strip("` ")
    if name.lower() in _OF_LOWER:
        yield text.lineno, name


def _matches(pattern: re.Pattern[str], text: ast.Constant) -> Iterator[tuple[int, str]]:
    plain = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), str(text.value))
    for found in pattern.finditer(plain):
        yield text.lineno + plain.count("\n", 0, found.start()), found[1]
