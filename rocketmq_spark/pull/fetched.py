"""Fetched answers to pulls, and the offsets that such answers jump over: what readers and decoders say to each other."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base.codes import SysFlag

# Where a stored message has its offset and its flags.
_OFFSET_AT, _FLAGS_AT = 20, 36
_OFFSET = struct.Struct(">q")
_FLAGS = struct.Struct(">i")
_INNER = int(SysFlag.INNER_BATCH)


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


def first_offset(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """The offset that the message at ``begin`` itself has."""
    offset: int = _OFFSET.unpack_from(buffer.data, begin + _OFFSET_AT)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is one that holds many, which come together whichever of them is asked for."""
    return bool(_FLAGS.unpack_from(buffer.data, begin + _FLAGS_AT)[0] & _INNER)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` that the answer at index ``piece`` should have had messages for."""

    piece: int
    start: int
    end: int
