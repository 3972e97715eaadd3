"""Spark's folder of a query, as far as it says what our sources have read.

``offsets/N`` is what batch N reads up to: a version, settings, then a line for each source of the query; ``commits/N`` is there
when the batch is done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.source.offsets import Offsets

_HEAD = 2  # lines before the first source


class Batch(NamedTuple):
    """What batch ``number`` read up to, by the place of the source in its query; other sources are left out."""

    number: int
    sources: dict[int, Offsets]


def last_batch(folder: Path, committed: bool = True) -> Batch | None:
    """The last batch that is done, or with ``committed=False`` the last that was begun; None where there is none yet.

    Raises ``OffsetError`` for what is no checkpoint.
    """
    if not (folder / "offsets").is_dir():
        raise OffsetError(f"{folder} is no checkpoint: it has no folder 'offsets'", remedy="Name a checkpointLocation")
    numbers = _numbers(folder / "offsets")
    if committed:
        numbers &= _numbers(folder / "commits")
    return read(folder, max(numbers)) if numbers else None


def read(folder: Path, number: int) -> Batch:
    """One entry of the log. Raises ``OffsetError`` for one that cannot be read."""
    path = folder / "offsets" / str(number)
    lines = path.read_text("utf-8").splitlines()
    if not lines or not lines[0].startswith("v"):
        raise OffsetError(f"{path} is no entry of an offset log: it begins with {lines[:1]}")
    found = {at: _ours(line) for at, line in enumerate(lines[_HEAD:])}
    return Batch(number, {at: offsets for at, offsets in found.items() if offsets is not None})


def _numbers(folder: Path) -> set[int]:
    return {int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()} if folder.is_dir() else set()


def _ours(line: str) -> Offsets | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a source that had nothing has "-"
    if not isinstance(value, dict) or "topics" not in value or "v" not in value:
        return None
    return Offsets.from_json(value)
