"""What a store keeps: its keys, and what their values look like. Pure.

A key is one byte for the area, then numbers of fixed width, so that the order of bytes is that of numbers. What is stored has
a number (its *sequence*), which it keeps. Areas:

* ``r`` records by sequence: what was stored, never changed.
* ``p`` pending by due time and sequence: when a record is due, and how it fared so far.
* ``o`` order by lane and sequence: the records of a lane, of which only the first is pending.
* ``d`` dead by sequence: records that were given up.
* ``i`` marks by space and place: which record is found there, and when it is due.
* ``n`` notes by name: what a user of the store writes down beside records.
* ``m`` the totals, ``e`` and ``z`` whose records these are.

Seed 003 has ``expireTime:retryCount:typeName:uuid`` as text, whose order ends in 2286 and whose parts a name can break.

Values are versioned binary envelopes; ``DecodeError`` says what cannot be read.

A ``Record`` is what was stored and never changes; it carries a checksum of its own, so that one that was damaged is found
and named. A ``RecordState`` is how it fared. ``Totals`` are counted in every write, so that a start need not count.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError

RECORD, PENDING, ORDER, DEAD = b"r", b"p", b"o", b"d"
MARK, NOTE = b"i", b"n"
# What notes of this name say holds also when records are lost: they speak of none.
LASTING = b"environment's "
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


# The space of marks that begin with when a record was due at first (ms since 1970).
IDENTITY = b"id"
VERSION = 1
MARKED = 2  # of a record: marks stand before its payload

_HEAD = struct.Struct(">BI")  # version, checksum of the rest
_REST = struct.Struct(">QHHH")  # stored at, lengths of kind, target and lane
_LENGTH = struct.Struct(">H")
_STATE = struct.Struct(">BHQH")  # version, tries, since when, length of the target
_TOTALS = struct.Struct(">B7Q")


@dataclass(frozen=True, slots=True)
class Record:
    """What is due later.

    Args:
        kind: Who handles it.
        payload: What the handler gets.
        stored_ms: When it was stored, ms since 1970.
        target: What it waits for when it has failed, such as a broker's name; empty for nothing in particular.
        lane: Records of a lane are handled one after the other, in the order in which they were stored; empty for none.
        marks: By what it is found until it is over, each a space and a place in it. Of two records with the same first mark
            the second one is not kept.
    """

    kind: str
    payload: bytes
    stored_ms: int
    target: str = ""
    lane: bytes = b""
    marks: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def first_due_ms(self) -> int | None:
        """When it was due at first, if its identity says so: a store that lost its due time still knows."""
        places = (place for space, place in self.marks if space == IDENTITY and len(place) >= _SEQUENCE.size)
        return next(map(due_of, places), None)

    @property
    def first_target(self) -> str:
        """What it waits for before it was tried: what is marked waits for its time alone."""
        return "" if self.marks else self.target

    def encode(self) -> bytes:
        kind, target = self.kind.encode(), self.target.encode()
        rest = _REST.pack(self.stored_ms, len(kind), len(target), len(self.lane)) + kind + target + self.lane
        if self.marks:
            parts = [_LENGTH.pack(len(part)) + part for mark in self.marks for part in mark]
            rest = b"".join((rest, _LENGTH.pack(len(parts)), *parts))
        crc = zlib.crc32(self.payload, zlib.crc32(rest))
        return b"".join((_HEAD.pack(MARKED if self.marks else VERSION, crc), rest, self.payload))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        try:
            version, crc = _HEAD.unpack_from(data)
            if version not in (VERSION, MARKED):
                raise DecodeError(f"a record of version {version}; this release reads version {VERSION}")
            if zlib.crc32(data[_HEAD.size :]) != crc:
                raise DecodeError("a record does not match its checksum: it was damaged")
            stored_ms, *lengths = _REST.unpack_from(data, _HEAD.size)
            at, parts = _HEAD.size + _REST.size, []
            for length in lengths:
                parts.append(data[at : at + length])
                at += length
            marks: list[bytes] = []
            if version == MARKED:
                (count,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size
                for _ in range(count):
                    (length,) = _LENGTH.unpack_from(data, at)
                    at += _LENGTH.size + length
                    marks.append(data[at - length : at])
            pairs = tuple(zip(marks[::2], marks[1::2], strict=True))
            return cls(parts[0].decode(), data[at:], stored_ms, parts[1].decode(), parts[2], pairs)
        except (struct.error, ValueError) as e:
            raise DecodeError(f"a record of {len(data)} bytes cannot be read: {e}") from e


class RecordState(NamedTuple):
    """How a record fared: how often it failed, since when this holds (ms since 1970), what it waits for, and why."""

    tries: int
    since_ms: int
    target: str = ""
    reason: str = ""

    def encode(self) -> bytes:
        target = self.target.encode()
        return (
            _STATE.pack(VERSION, self.tries, self.since_ms, len(target)) + target + self.reason.encode(errors="replace")
        )

    @classmethod
    def decode(cls, data: bytes) -> RecordState:
        try:
            version, tries, since_ms, length = _STATE.unpack_from(data)
            if version != VERSION:
                raise DecodeError(f"a state of version {version}; this release reads version {VERSION}")
            at = _STATE.size + length
            return cls(tries, since_ms, data[_STATE.size : at].decode(), data[at:].decode(errors="replace"))
        except (struct.error, UnicodeDecodeError) as e:
            raise DecodeError(f"a state of {len(data)} bytes cannot be read: {e}") from e

    @classmethod
    def known(cls, data: bytes) -> RecordState:
        """The same, and of what cannot be read nothing: who takes the record meets that."""
        try:
            return cls.decode(data)
        except DecodeError:
            return cls(0, 0)


class Done(NamedTuple):
    """It is over."""


class RetryLater(NamedTuple):
    """It failed, and is due once more."""

    due_ms: int
    reason: str


class Dead(NamedTuple):
    """It is given up, and kept among the dead."""

    reason: str


Verdict = Done | RetryLater | Dead


@dataclass(slots=True)
class Totals:
    """Of a store: the next sequence, records that are kept and their bytes, dead ones and theirs, all that were given up
    so far, and the latest moment that was written (ms since 1970).
    """

    next_sequence: int = 1
    depth: int = 0
    size: int = 0
    dead: int = 0
    dead_bytes: int = 0
    give_ups: int = 0
    last_ms: int = 0

    def copy(self) -> Totals:
        """As ``dataclasses.replace``, which takes three times as long, and each addition has one."""
        return Totals(
            self.next_sequence, self.depth, self.size, self.dead, self.dead_bytes, self.give_ups, self.last_ms
        )

    @property
    def all_bytes(self) -> int:
        """What counts against the bound: dead letters lie on the same disk."""
        return self.size + self.dead_bytes

    def encode(self) -> bytes:
        return _TOTALS.pack(VERSION, self.next_sequence, self.depth, self.size, self.dead, self.dead_bytes,
                            self.give_ups, self.last_ms)  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> Totals:
        try:
            version, *numbers = _TOTALS.unpack(data)
        except struct.error as e:
            raise DecodeError(f"totals of {len(data)} bytes cannot be read: {e}") from e
        if version != VERSION:
            raise DecodeError(f"totals of version {version}; this release reads version {VERSION}")
        return cls(*numbers)


@dataclass(frozen=True, slots=True)
class SpoolOwner:
    """Whose records a store holds; records of one are never sent to the cluster of another.

    Args:
        servers: Addresses of the cluster's name servers, or of its Proxies; empty where an earlier release wrote them.
        namespace: None where an earlier release wrote it.
        environment: With its mode, as in ``environment 'eu' (suffix)``, and the queues of environments where they are
            given; empty for none.
        purpose: Empty for sends; other users of a store name themselves.
    """

    servers: tuple[str, ...] = ()
    namespace: str | None = None
    environment: str = ""
    purpose: str = ""

    def encode(self) -> bytes:
        return json.dumps([VERSION, self.purpose, self.servers, self.namespace, self.environment]).encode()

    @classmethod
    def decode(cls, data: bytes) -> SpoolOwner:
        """Earlier releases wrote a text: the environment, or the purpose."""
        if not data.startswith(b"["):
            text = data.decode(errors="replace")
            return cls(environment=text) if text.startswith("environment ") else cls(purpose=text)
        try:
            version, purpose, servers, namespace, environment = json.loads(data)
            if version != VERSION:
                raise DecodeError(f"an owner of version {version}; this release reads version {VERSION}")
            return cls(tuple(servers), namespace, environment, purpose)
        except (ValueError, TypeError) as e:
            raise DecodeError(f"an owner of {len(data)} bytes cannot be read: {e}") from e

    @classmethod
    def stored(cls, get: Callable[[bytes], bytes | None]) -> SpoolOwner:
        """The owner of what ``get`` reads."""
        return cls.decode(next(filter(None, map(get, OWNER)), b""))

    def is_same(self, other: SpoolOwner) -> bool:
        """Whether it may have what is ``other``'s. Servers of one cluster have one in common; what an earlier release did not
        write is not compared.
        """
        return (
            self.purpose == other.purpose
            and _is_same_environment(self.environment, other.environment)
            and (None in (self.namespace, other.namespace) or self.namespace == other.namespace)
            and (not self.servers or not other.servers or not set(self.servers).isdisjoint(other.servers))
        )

    def believes(self, note: bytes, held: SpoolOwner, given: bool) -> bool:
        """Whether what was noted while it was ``held``'s is true of this one's brokers, which may have the same names; for whom
        it was read is no matter. Which queues an environment had is, where it was ``given`` to this one, if it is the same.
        """
        if given and note.startswith(LASTING):
            return (self.namespace, self.environment) == (held.namespace, held.environment)
        return self.is_same(replace(held, purpose=self.purpose))

    def __str__(self) -> str:
        servers = f"the cluster of {';'.join(self.servers)}" if self.servers else "an unnamed cluster"
        parts = [self.purpose, servers, f"namespace {self.namespace!r}" if self.namespace else "", self.environment]
        return ", ".join(part for part in parts if part)


def _is_same_environment(one: str, held: str) -> bool:
    """Which queues it has is not compared where ``held`` does not say it: what an earlier release wrote, or a number alone."""
    return one == held or (bool(held) and one.startswith(f"{held}, "))


# The owner of records whose owner stood in a block that cannot be read: none, until a command assigns them.
LOST_OWNER = SpoolOwner(purpose="an owner that a damaged block named")


def due_of(identity: bytes) -> int:
    """When the record with this identity was due at first, in ms since 1970."""
    due_ms: int = _SEQUENCE.unpack_from(identity)[0]
    return due_ms


def decoded(data: bytes | None) -> Record | DecodeError:
    """A record as it is stored, or what is wrong with it."""
    if data is None:
        return DecodeError("the record is missing")
    try:
        return Record.decode(data)
    except DecodeError as e:
        return e
