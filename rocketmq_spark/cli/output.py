"""The output of commands, as text for people or as JSON for programs. Commands call ``Output`` and never print.

Results go to standard output; notes and failures go to standard error, so that a pipe gets results only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Protocol, TextIO

import click

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.base.logs import CONTROL_CHARACTERS, escaped, replace_characters
from rocketmq_spark.base.secret import Secret
from rocketmq_spark.errors import RocketMQError

Row = Mapping[str, object]

# Bodies, properties and names may contain control characters.
_CONTROL_CHARACTER = re.compile(f"[{CONTROL_CHARACTERS}]")


class Output(Protocol):
    """A format of output. If ``is_for_programs``, programs read the output, so commands must not draw pictures."""

    is_for_programs: bool

    def item(self, values: Row, *lines: str) -> None:
        """Print one result: ``values`` as an object, or ``lines``. Line breaks inside of a line are escaped."""

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        """Print results of one kind: one object per line, or a table with ``columns`` (headings by key)."""

    def note(self, text: str) -> None:
        """Print one line of information for people, but not for programs. Line breaks are escaped."""

    def warning(self, text: str) -> None:
        """Print a sentence about what the results lack. Programs get this sentence, too."""

    def failure(self, error: BaseException) -> None:
        """Print the error that ends the command, in one line."""


class Text:
    """Output for people, as text."""

    is_for_programs = False

    def item(self, values: Row, *lines: str) -> None:
        for line in lines:
            click.echo(escaped(line))

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        for line in table_lines(columns, list(rows), width_of(sys.stdout)):
            click.echo(line)

    def note(self, text: str) -> None:
        click.echo("\n".join(wrap(escaped(text), width_of(sys.stderr))), err=True)

    def warning(self, text: str) -> None:
        self.note(text)

    def failure(self, error: BaseException) -> None:
        click.echo("\n".join(wrap(safe(f"Error: {one_line(error)}"), width_of(sys.stderr))), err=True)


class Json:
    """Output for programs: each result is a JSON object on a separate line."""

    is_for_programs = True

    def item(self, values: Row, *lines: str) -> None:
        click.echo(_json(values))

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        for row in rows:
            self.item(row, "")

    def note(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        click.echo(_json({"warning": text}), err=True)

    def failure(self, error: BaseException) -> None:
        code = error.code if isinstance(error, RocketMQError) else type(error).__name__
        click.echo(_json({"error": {"code": code, "message": one_line(error)}}), err=True)


def safe(text: str) -> str:
    """Make text safe for a terminal: keep line breaks and tabs, replace other control characters by their codes."""
    return replace_characters(_CONTROL_CHARACTER, _escape_code, text)


def safe_labels(text: str) -> str:
    """As ``safe``, for the Prometheus format, in which a backslash is doubled."""
    return replace_characters(_CONTROL_CHARACTER, lambda match: f"\\{_escape_code(match)}", text)


def _escape_code(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def _json(value: object) -> str:
    text = json.dumps(_mask_secrets(value), ensure_ascii=False, default=str)
    return replace_characters(_CONTROL_CHARACTER, lambda match: f"\\u{ord(match[0]):04x}", text)


def _mask_secrets(value: object) -> object:
    """Return ``value`` with asterisks for each ``Secret``, which ``json`` would write like any other str."""
    if isinstance(value, Secret):
        return str(value)[1:-1]
    if isinstance(value, Mapping):
        return {key: _mask_secrets(part) for key, part in value.items()}
    return [_mask_secrets(part) for part in value] if isinstance(value, list | tuple) else value


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks; its class name if it has no text."""
    text = " ".join(str(error).replace("\n  - ", "; ").split()).replace("] ; ", "] ")
    return text or type(error).__name__


def time_text(epoch_ms: int | None) -> str | None:
    """Return a time as text, in UTC. Returns None if the time is None, or -1, which brokers report for expired messages."""
    return utc_text(epoch_ms) if epoch_ms is not None and epoch_ms > 0 else None


def _cell(value: object) -> str:
    """Return the text of a cell; a list gets one line per element."""
    if value is None:
        return "-"
    return "\n".join(escaped(str(part)) for part in (value if isinstance(value, list) else [value]))


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit() or text == "-"


def width_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that ``stream`` writes to; None if it is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def wrap(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Wrap a line between words to ``width``, and indent the further lines. Without a ``width``, the line is not wrapped."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def table_lines(columns: Mapping[str, str], rows: Sequence[Row], width: int | None) -> list[str]:
    """Return a heading and a line for each of ``rows``. If the lines are wider than ``width``, the column of topics is omitted,
    and each topic is on a separate line above its rows.
    """
    lines = _table(columns, rows)
    if width is None or "topic" not in columns or max(map(len, lines)) <= width:
        return lines
    heading, *row_lines = _table({key: text for key, text in columns.items() if key != "topic"}, rows)
    remaining_lines = iter(row_lines)
    grouped_lines = [heading]
    for topic, topic_rows in groupby(rows, key=lambda row: row["topic"]):
        grouped_lines += [
            escaped(str(topic)),
            *(next(remaining_lines) for row in topic_rows for _ in range(_height(row, columns))),
        ]
    return grouped_lines


def _height(row: Row, columns: Mapping[str, str]) -> int:
    return max(_cell(row.get(key)).count("\n") + 1 for key in columns)


def _table(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    cells = [list(columns.values())] + [[_cell(row.get(key)) for key in columns] for row in rows]
    is_number_column = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(columns))]
    return list(align(cells, is_number_column))


def align(cells: Sequence[Sequence[str]], is_number_column: Sequence[bool]) -> Iterable[str]:
    lines = [line for row in cells for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(len(line[i]) for line in lines) for i in range(len(is_number_column))]
    for line in lines:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, is_number_column, strict=True)]
        yield "  ".join(parts).rstrip()
