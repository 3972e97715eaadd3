"""The keys of a store: one byte for the area, then numbers of fixed width, so that the order of bytes is that of numbers.

Pure. What is stored has a number (its *sequence*), which it keeps. Areas:

* ``r`` records by sequence: what was stored, never changed.
* ``p`` pending by due time and sequence: when a record is due, and how it fared so far.
* ``o`` order by lane and sequence: the records of a lane, of which only the first is pending.
* ``d`` dead by sequence: records that were given up.
* ``i`` marks by space and place: which record is found there, and when it is due.
* ``n`` notes by name: what a user of the store writes down beside records.
* ``m`` the totals, ``e`` and ``z`` whose records these are.

Seed 003 has ``expireTime:retryCount:typeName:uuid`` as text, whose order ends in 2286 and whose parts a name can break.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

RECORD, PENDING, ORDER, DEAD = b"r", b"p", b"o", b"d"
MARK, NOTE = b"i", b"n"
TOTALS = b"m"
# Twice, at both ends: without it the destination of records is unknown.
OWNER = (b"e", b"z")

_DUE = struct.Struct(">cQQ")
_NUMBERED = struct.Struct(">cQ")
_LANE = _MARK = struct.Struct(">cH")
_SEQUENCE = struct.Struct(">Q")
LAST = 2**64 - 1


class Due(NamedTuple):
    """When a record is due, in ms since 1970, and its sequence."""

    due_ms: int
    sequence: int

    @property
    def key(self) -> bytes:
        return _DUE.pack(PENDING, self.due_ms, self.sequence)

    @classmethod
    def parse(cls, key: bytes) -> Due:
        _, due_ms, sequence = _DUE.unpack(key)
        return cls(due_ms, sequence)


def numbered(area: bytes, sequence: int) -> bytes:
    """The key of a record, or of a dead one."""
    return _NUMBERED.pack(area, sequence)


def sequence_of(key: bytes) -> int:
    """The sequence that any key but the totals' ends with."""
    number: int = _SEQUENCE.unpack(key[-_SEQUENCE.size :])[0]
    return number


def ordered(lane: bytes, sequence: int) -> bytes:
    """The key of a record in its lane. The lane's length stands first, so that no lane begins with another one."""
    return _LANE.pack(ORDER, len(lane)) + lane + _SEQUENCE.pack(sequence)


def lane_of(key: bytes) -> bytes:
    """The lane of such a key."""
    return key[_LANE.size : -_SEQUENCE.size]


def marked(space: bytes, place: bytes = b"") -> bytes:
    """The key of a mark, or where its space begins."""
    return _MARK.pack(MARK, len(space)) + space + place


def behind_space(space: bytes) -> bytes:
    """Where a space ends."""
    number = int.from_bytes(space) + 1
    if number >> 8 * len(space):
        return _MARK.pack(MARK, len(space) + 1)
    return _MARK.pack(MARK, len(space)) + number.to_bytes(len(space))


def place_of(key: bytes) -> bytes:
    """The place of a mark in its space."""
    return key[_MARK.size + _MARK.unpack_from(key)[1] :]


def behind(area: bytes) -> bytes:
    """Where an area ends."""
    return bytes((area[0] + 1,))
