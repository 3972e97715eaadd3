"""Fetched answers to pulls, and the offsets that such answers jump over: what readers and decoders say to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Piece(NamedTuple):
    """Messages of one answer: range number, offset asked, end of what was asked, where the broker went on, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class Fetched(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until more is asked for."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[Piece]


def covered(pieces: Iterable[Piece]) -> int:
    """How many offsets the pieces answer."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` that the answer at index ``piece`` should have had messages for."""

    piece: int
    start: int
    end: int
