"""Draws a random sample of names and sentences of the product for readers: ``python -m tests.reading_sample --seed 7``

A reader marks each entry that needs a second reading with an ``x``. The share of marks measures how readable the code is, and
shows where to begin. The same seed draws the same sample of the same tree. Each room gives entries in proportion to what it has.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "rocketmq_spark"
SENTENCE_KINDS = ("docstring", "comment", "log line", "error")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, *_FUNCTIONS)


class Entry(NamedTuple):
    """A name or a sentence of a file, with the number of its line."""

    kind: str
    text: str
    line: int
    path: str = ""
    around: tuple[str, ...] = ()


def names(source: str) -> list[Entry]:
    """Return the names that a module defines, each once per scope, in the order of their lines."""
    lines = source.splitlines()
    found = {
        (kind, scope, name): line for kind, scope, name, line in reversed(list(_names(ast.parse(source), "module", 0)))
    }
    entries = [Entry(kind, name, line, around=_around(lines, line)) for (kind, _, name), line in found.items()]
    return sorted((entry for entry in entries if _is_chosen(entry.text)), key=lambda entry: (entry.line, entry.text))


def _is_chosen(name: str) -> bool:
    """Whether the author chose the name: Python chose ``self`` and ``__init__``."""
    return name not in ("self", "cls", "_") and not name.startswith("__")


def _around(lines: Sequence[str], line: int, count: int = 1) -> tuple[str, ...]:
    """The line with ``count`` lines before it and after it. A name is judged where it is defined, a sentence where it stands."""
    numbers = range(max(line - count, 1), min(line + count, len(lines)) + 1)
    return tuple(f"{'>' if number == line else ' '} {number:>4} | {lines[number - 1]}" for number in numbers)


def _names(node: ast.AST, scope: str, number: int) -> Iterator[tuple[str, int, str, int]]:
    """Kind, number of the scope, name and line. ``scope`` is the kind of the innermost scope: module, class or function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *_FUNCTIONS)):
            is_class = isinstance(child, ast.ClassDef)
            yield "class" if is_class else "function", number, child.name, child.lineno
            yield from _names(child, "class" if is_class else "function", id(child))
        elif isinstance(child, ast.arg):
            yield "parameter", number, child.arg, child.lineno
        elif (
            isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and ast.unparse(child.value) == "self"
        ):
            yield "attribute", 0, child.attr, child.lineno
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield {"module": "constant", "class": "attribute"}.get(scope, "local"), number, child.id, child.lineno
        else:
            yield from _names(child, scope, number)


def sentences(source: str) -> list[Entry]:
    """Return the sentences of docstrings, comments, log lines and errors, in the order of their lines."""
    tree = ast.parse(source)
    texts = [*_docstrings(tree), *_comments(source), *_messages(tree)]
    lines = source.splitlines()
    entries = {entry._replace(around=_around(lines, entry.line, 3)) for text in texts for entry in _cut(*text)}
    return sorted(entries, key=lambda entry: (entry.line, entry.text))


def _cut(kind: str, text: str, line: int) -> Iterator[Entry]:
    """The sentences of a text that begins in ``line``."""
    begin = 0
    for end in [match.end() for match in re.finditer(r"[.!?:](?=\s+[A-Z`\"])\s+|\n\s*\n", text)] + [len(text)]:
        words = text[begin:end].split()
        if len(words) > 2:
            skipped = text[:end].index(words[0], begin)
            yield Entry(kind, " ".join(words), line + text.count("\n", 0, skipped))
        begin = end


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and (text := ast.get_docstring(node, clean=False)):
            yield "docstring", text, node.body[0].lineno


def _comments(source: str) -> Iterator[tuple[str, str, int]]:
    """Comments; those on lines of their own that follow one another are one text."""
    text, begin, last = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (type:|fmt:|noqa)", token.string):
            continue
        line, own_line = token.start[0], not token.line[: token.start[1]].strip()
        if own_line and line == last + 1:
            text += "\n" + token.string.lstrip("# ")
        else:
            yield "comment", text, begin
            text, begin = token.string.lstrip("# "), line
        last = line if own_line else 0
    yield "comment", text, begin


def _messages(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """The texts of log lines, and the texts in raised errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
            if re.fullmatch(r"_?log(ger)?", ast.unparse(node.func.value), re.IGNORECASE):
                yield from (("log line", text, line) for text, line in _texts(node.args))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            values = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
            yield from (("error", text, line) for text, line in _texts(values))


def _texts(values: Iterable[ast.expr]) -> Iterator[tuple[str, int]]:
    """Strings among the arguments of a call; fields of f-strings as they are written."""
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value, value.lineno
        elif isinstance(value, ast.JoinedStr):
            parts = (
                str(part.value) if isinstance(part, ast.Constant) else ast.unparse(ast.JoinedStr([part]))[2:-1]
                for part in value.values
            )
            yield "".join(parts), value.lineno


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide ``count`` among rooms in proportion to their sizes; what rounding leaves goes to the largest remainders."""
    total = sum(sizes.values())
    count = min(count, total)
    given = {room: size * count // total for room, size in sizes.items()} if total else {}
    by_remainder = sorted(given, key=lambda room: (-(sizes[room] * count % total), room))
    return {room: given[room] + (room in by_remainder[: count - sum(given.values())]) for room in given}


def drawn(rooms: Mapping[str, Sequence[Entry]], count: int, seed: int) -> dict[str, list[Entry]]:
    """Draw entries of each room, in the order of their places."""
    chooser = random.Random(seed)
    numbers = shares({room: len(entries) for room, entries in rooms.items()}, count)
    return {
        room: [rooms[room][n] for n in sorted(chooser.sample(range(len(rooms[room])), number))]
        for room, number in numbers.items()
        if number
    }


def collected(package: Path, room: str | None) -> tuple[dict[str, list[Entry]], dict[str, list[Entry]]]:
    """Names and sentences of each room. A room is a folder or a module at the top of the package."""
    of_names: dict[str, list[Entry]] = {}
    of_sentences: dict[str, list[Entry]] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if room not in (None, name := inside.parts[0].removesuffix(".py")):
            continue
        source = path.read_text("utf-8")
        for rooms, entries in ((of_names, names(source)), (of_sentences, sentences(source))):
            rooms.setdefault(name, []).extend(entry._replace(path=inside.as_posix()) for entry in entries)
    return of_names, of_sentences


def page(title: str, rooms: Mapping[str, Sequence[Entry]]) -> str:
    """The text to be marked."""
    lines = [f"## {title}", ""]
    number = 0
    for room, entries in rooms.items():
        lines += [f"### {room} ({len(entries)})", ""]
        for entry in entries:
            number += 1
            quoted = entry.text if entry.kind in SENTENCE_KINDS else f"`{entry.text}`"
            lines += [f"[ ] {number}. {entry.kind}, {entry.path}:{entry.line}: {quoted}", *entry.around, ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, package: Path = PACKAGE) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reading_sample", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--seed", type=int, help="default: a random one, which the sample names")
    parser.add_argument("--room", help="a folder or module at the top of the package; default: all")
    parser.add_argument("--count", type=int, default=200, help="how many names, and how many sentences (default: 200)")
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
    of_names, of_sentences = collected(package, chosen.room)
    if not of_names:
        rooms = sorted(
            {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        )
        parser.error(f"--room {chosen.room}: there is no such room; choose from {', '.join(rooms)}")
    print(
        f"# A sample for readers: --seed {seed}{f' --room {chosen.room}' if chosen.room else ''} --count {chosen.count}\n"
    )
    print("Mark with an x each name that does not say what it holds, and each sentence that needs a second reading.\n")
    print(page("Names", drawn(of_names, chosen.count, seed)))
    print(page("Sentences", drawn(of_sentences, chosen.count, seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
