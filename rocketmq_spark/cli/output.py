"""What commands say, as text for people or as JSON for programs. Commands call ``Output`` and never print.

Results go to standard output; notes and failures go to standard error, so that a pipe gets results only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Protocol

import click

from rocketmq_spark.errors import RocketMQError

Row = Mapping[str, object]


class Output(Protocol):
    """One way to say things. ``machine`` is for the few who draw: they may not."""

    machine: bool

    def item(self, values: Row, text: str) -> None:
        """One result: an object, or its line (or lines) of text."""

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        """Several results of a kind: one object a line, or a table with the ``columns`` (key to heading)."""

    def note(self, text: str) -> None:
        """Something that only a person wants to know."""

    def failure(self, error: BaseException) -> None:
        """Why the command ends: one line."""


class Text:
    """For people."""

    machine = False

    def item(self, values: Row, text: str) -> None:
        click.echo(text)

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        cells = [list(columns.values())] + [[_cell(row.get(key)) for key in columns] for row in rows]
        numeric = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(columns))]
        for line in aligned(cells, numeric):
            click.echo(line)

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def failure(self, error: BaseException) -> None:
        click.echo(f"Error: {one_line(error)}", err=True)


class Json:
    """For programs: each result is an object on a line of its own."""

    machine = True

    def item(self, values: Row, text: str) -> None:
        click.echo(json.dumps(values, ensure_ascii=False, default=str))

    def rows(self, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
        for row in rows:
            self.item(row, "")

    def note(self, text: str) -> None:
        pass

    def failure(self, error: BaseException) -> None:
        code = error.code if isinstance(error, RocketMQError) else type(error).__name__
        click.echo(json.dumps({"error": {"code": code, "message": one_line(error)}}, ensure_ascii=False), err=True)


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks; a name where there is no text."""
    text = " ".join(str(error).replace("\n  - ", "; ").split()).replace("] ; ", "] ")
    return text or type(error).__name__


def moment(epoch_ms: int | None) -> str | None:
    """A time as people and programs read it, UTC; None for none."""
    if not epoch_ms:
        return None
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cell(value: object) -> str:
    """A list stands on lines of its own."""
    return "-" if value is None else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit() or text == "-"


def aligned(cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> Iterable[str]:
    lines = [line for row in cells for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(len(line[i]) for line in lines) for i in range(len(numeric))]
    for line in lines:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)]
        yield "  ".join(parts).rstrip()
