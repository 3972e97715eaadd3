"""The format of a store: keys and values. Pure.

A key is one byte for the area, followed by numbers of fixed width, so that keys sort like their numbers. Every record has a
number, its *sequence*, which never changes. The areas, with their keys and, after the colon, their values:

* ``r`` records by sequence: kind, payload, target, lane and marks.
* ``q`` pending records by target, due time and sequence: the state of the record.
* ``p`` pending records by due time and sequence, as releases before 0.2 wrote them; see ``pending.migrate_keys``.
* ``o`` order by lane and sequence: the records of a lane. Only the first record of a lane is pending.
* ``d`` dead records by sequence: the state of a record that was given up.
* ``i`` marks (see ``lanes``) by space and place: due time and sequence of the record.
* ``n`` notes by name: data that the user of the store keeps beside the records.
* ``m`` the totals, ``e`` and ``z`` the owner of the records.

Keys are binary. Text keys such as ``expireTime:retryCount:typeName:uuid`` sort correctly only until 2286, and a name that
contains the separator would break a text key.

Values are versioned and binary; a value that cannot be read raises ``DecodeError``.

A ``Record`` does not change after it was stored, except for its target and its marks. Each record has a checksum of its own, so
that damage is detected. A ``RecordState`` counts the failures of a record. ``Totals`` are updated in every write, so that they
need not be counted when a store is opened.
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError

RECORD, PENDING, ORDER, DEAD = b"r", b"q", b"o", b"d"
UNINDEXED = b"p"
MARK, NOTE = b"i", b"n"
# Notes with this prefix are not about records, so they remain valid when records are lost.
LASTING_PREFIX = b"environment's "
# The name of a note with the fingerprint of the rules from which all pending records got their targets. The name does not begin
# with ``LASTING_PREFIX``, so a damaged store and a copy lose the note, and the targets of all their records are compared again.
TARGET_RULES_NOTE = b"targeting"
# Prefix of notes from the time of another owner. The reader of such a note must check whether the note is still true.
DOUBTFUL_PREFIX = b"doubtful "
TOTALS = b"m"
# Without the owner, the destination of the records is unknown. So the owner is stored twice, under two distant keys: damage to
# one block of the database then usually destroys only one of the two copies.
OWNER = (b"e", b"z")

_DUE = struct.Struct(">cQQ")
_AREA_AND_SEQUENCE = struct.Struct(">cQ")
_AREA_AND_LENGTH = struct.Struct(">cH")
_DUE_AND_SEQUENCE = struct.Struct(">QQ")
_SEQUENCE = struct.Struct(">Q")
LAST_SEQUENCE = 2**64 - 1


class Due(NamedTuple):
    """The due time of a record (ms since 1970) and its sequence."""

    due_ms: int
    sequence: int

    @property
    def mark_value(self) -> bytes:
        """The stored value of a mark. In releases before 0.2, the same bytes were also the key of a pending record."""
        return _DUE.pack(UNINDEXED, self.due_ms, self.sequence)

    @property
    def key_suffix(self) -> bytes:
        """The last bytes of the key of a pending record."""
        return _DUE_AND_SEQUENCE.pack(self.due_ms, self.sequence)

    @classmethod
    def parse(cls, data: bytes) -> Due:
        _, due_ms, sequence = _DUE.unpack(data)
        return cls(due_ms, sequence)


@functools.lru_cache(1024)
def group_of(target: str, waits_for_answer: bool) -> bytes:
    """Return the bytes with which the keys of a group of pending records begin. ``waits_for_answer`` chooses between the two
    groups of ``target``: the records that wait for an answer of the target, or its other records.
    """
    data = target.encode()
    return _AREA_AND_LENGTH.pack(PENDING, len(data)) + data + (b"\1" if waits_for_answer else b"\0")


def target_of(group: bytes) -> str:
    """The target of a group."""
    return group[_AREA_AND_LENGTH.size : -1].decode(errors="replace")


def group_end(group: bytes) -> bytes:
    """Return the key at which a group ends."""
    return group + b"\xff" * (_DUE_AND_SEQUENCE.size + 1)


class PendingKey(NamedTuple):
    """The key of a pending record.

    Args:
        target: The record's target.
        waits_for_answer: Whether the record becomes due as soon as its target answers, even before its due time. For a record
            with marks, this is true only after a failed attempt.
        due: The due time and the sequence of the record.
    """

    target: str
    waits_for_answer: bool
    due: Due

    @property
    def group(self) -> bytes:
        return group_of(self.target, self.waits_for_answer)

    @property
    def encoded(self) -> bytes:
        target, waits_for_answer, due = self
        return group_of(target, waits_for_answer) + _DUE_AND_SEQUENCE.pack(*due)

    @classmethod
    def parse(cls, key: bytes) -> PendingKey:
        return cls(target_of(key[: -_DUE_AND_SEQUENCE.size]), key[-_DUE_AND_SEQUENCE.size - 1] != 0, due_of_key(key))


def due_of_key(key: bytes) -> Due:
    """The due time and sequence at the end of the key of a pending record, also of a release before 0.2."""
    return Due(*_DUE_AND_SEQUENCE.unpack(key[-_DUE_AND_SEQUENCE.size :]))


def record_key(area: bytes, sequence: int) -> bytes:
    """The key of a record in area ``RECORD`` or ``DEAD``."""
    return _AREA_AND_SEQUENCE.pack(area, sequence)


def sequence_of(key: bytes) -> int:
    """The sequence at the end of the key of a record, a pending record, a lane entry or a dead record."""
    sequence: int = _SEQUENCE.unpack(key[-_SEQUENCE.size :])[0]
    return sequence


def lane_key(lane: bytes, sequence: int) -> bytes:
    """Return the key of a record in its lane. The key begins with the length of the lane, so that no lane is a prefix of another
    lane.
    """
    return _AREA_AND_LENGTH.pack(ORDER, len(lane)) + lane + _SEQUENCE.pack(sequence)


def lane_of(key: bytes) -> bytes:
    """The lane in a key of ``lane_key``."""
    return key[_AREA_AND_LENGTH.size : -_SEQUENCE.size]


def mark_key(space: bytes, place: bytes = b"") -> bytes:
    """Return the key of a mark. If ``place`` is empty, this is the first key of the space."""
    return _AREA_AND_LENGTH.pack(MARK, len(space)) + space + place


def space_end(space: bytes) -> bytes:
    """Return the key at which a space ends."""
    next_space = int.from_bytes(space) + 1
    if next_space >> 8 * len(space):
        return _AREA_AND_LENGTH.pack(MARK, len(space) + 1)
    return _AREA_AND_LENGTH.pack(MARK, len(space)) + next_space.to_bytes(len(space))


def place_of(key: bytes) -> bytes:
    """Return the place of the mark with this key."""
    return key[_AREA_AND_LENGTH.size + _AREA_AND_LENGTH.unpack_from(key)[1] :]


def area_end(area: bytes) -> bytes:
    """The key at which an area ends."""
    return bytes((area[0] + 1,))


# The space of the marks whose places begin with the original due time of their records (ms since 1970).
IDENTITY = b"id"
VERSION = 1
# The version of the totals if a store has pending records. Releases before 0.2 would not find these records.
INDEXED_VERSION = 2
MARKED_VERSION = 2  # version of records that have marks before the payload
# The maximum number of marks of a record. A producer sends a message at most three times by default, so the envelope of a
# delayed message may be stored in three queues. The number is limited because a repair needs memory for each mark.
MAX_MARKS = 4

_HEAD = struct.Struct(">BI")  # version, checksum of all other bytes
_TIME_AND_LENGTHS = struct.Struct(">QHHH")  # time when stored, lengths of kind, target and lane
_LENGTH = struct.Struct(">H")
MAX_TARGET_BYTES = (1 << 16) - 1
_STATE = struct.Struct(">BHQH")  # version, tries, time of the state, length of the target
# Tries are not counted beyond this number, which is the largest that a stored state can hold. Encoding a larger number would
# raise an error, and the results of other records in the same write would not be stored.
_MAX_COUNTED_TRIES = 65535
_TOTALS = struct.Struct(">B7Q")
NUMBER_LIMIT = 1 << 62  # above all counts and times in a store


@dataclass(frozen=True, slots=True)
class Record:
    """Data that is handled later.

    Args:
        kind: Name of the handler.
        payload: Data for the handler.
        stored_ms: When the record was stored, in ms since 1970.
        target: What the record waits for after a failure, such as a broker's name; empty if it waits for nothing in particular.
        lane: The name of an order: records with the same lane are handled one after the other, in the order in which they were
            stored. Empty for a record without a lane.
        marks: Pairs of a space and a place in this space (see ``lanes``), by which the record is found until it is finished. Of
            two records with the same first mark, the second is not stored, and the first also gets those marks of the second that
            are in other spaces.
    """

    kind: str
    payload: bytes
    stored_ms: int
    target: str = ""
    lane: bytes = b""
    marks: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def original_due_ms(self) -> int | None:
        """The original due time; None if the record has no mark in the space ``IDENTITY``. The original due time is a part of
        this mark, and the record contains its marks. So the time is known even if the store has lost the due time.
        """
        places = (place for space, place in self.marks if space == IDENTITY and len(place) >= _SEQUENCE.size)
        return next(map(due_ms_of_identity, places), None)

    def pending_key(self, due: Due, has_failed: bool = False) -> PendingKey:
        """Return the key of this record when it is pending. ``has_failed`` is whether an attempt has failed."""
        return PendingKey(self.target, bool(self.target) and (has_failed or not self.marks), due)

    def retargeted_key(self, old_key: PendingKey, due: Due, has_failed: bool) -> PendingKey:
        """Return the key of this record with its new target. The returned key replaces ``old_key``. If the record had a target
        before, it waits for an answer of the new target only if it waited for an answer of the old target. For example, a
        record that was revived before its due time does not wait for an answer.
        """
        waits_for_answer = (
            old_key.waits_for_answer if old_key.target else self.pending_key(due, has_failed).waits_for_answer
        )
        return PendingKey(self.target, bool(self.target) and waits_for_answer, due)

    @staticmethod
    def pending_key_of_data(data: bytes, due: Due, has_failed: bool = False) -> PendingKey:
        """Like ``pending_key``, for an encoded record. Does not verify the checksum, because a caller may read a million
        records.
        """
        try:
            version, _ = _HEAD.unpack_from(data)
            _, kind_length, target_length, _ = _TIME_AND_LENGTHS.unpack_from(data, _HEAD.size)
            start = _HEAD.size + _TIME_AND_LENGTHS.size + kind_length
            target = data[start : start + target_length].decode()
        except (struct.error, UnicodeDecodeError):  # ``Store.take`` makes it a dead letter
            return PendingKey("", False, due)
        return PendingKey(target, bool(target) and (has_failed or version != MARKED_VERSION), due)

    def with_marks_of(self, other: Record) -> Record:
        """Return this record with those marks of ``other`` that are in other spaces than its own marks, up to ``MAX_MARKS``
        marks.
        """
        spaces = {space for space, _ in self.marks}
        added_marks = [mark for mark in other.marks if mark[0] not in spaces][: max(0, MAX_MARKS - len(self.marks))]
        return replace(self, marks=(*self.marks, *added_marks)) if added_marks else self

    def encode(self) -> bytes:
        kind, target = self.kind.encode(), self.target.encode()
        fields = (
            _TIME_AND_LENGTHS.pack(self.stored_ms, len(kind), len(target), len(self.lane)) + kind + target + self.lane
        )
        if self.marks:
            parts = [_LENGTH.pack(len(part)) + part for mark in self.marks for part in mark]
            fields = b"".join((fields, _LENGTH.pack(len(parts)), *parts))
        crc = zlib.crc32(self.payload, zlib.crc32(fields))
        return b"".join((_HEAD.pack(MARKED_VERSION if self.marks else VERSION, crc), fields, self.payload))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        try:
            version, crc = _HEAD.unpack_from(data)
            if version not in (VERSION, MARKED_VERSION):
                raise DecodeError(f"a record of version {version}; this release reads version {VERSION}")
            if zlib.crc32(data[_HEAD.size :]) != crc:
                raise DecodeError("a record does not match its checksum: it was damaged")
            stored_ms, *lengths = _TIME_AND_LENGTHS.unpack_from(data, _HEAD.size)
            position, parts = _HEAD.size + _TIME_AND_LENGTHS.size, []
            for length in lengths:
                parts.append(data[position : position + length])
                position += length
            mark_parts: list[bytes] = []
            if version == MARKED_VERSION:
                (count,) = _LENGTH.unpack_from(data, position)
                position += _LENGTH.size
                for _ in range(count):
                    (length,) = _LENGTH.unpack_from(data, position)
                    position += _LENGTH.size + length
                    mark_parts.append(data[position - length : position])
            marks = tuple(zip(mark_parts[::2], mark_parts[1::2], strict=True))
            return cls(parts[0].decode(), data[position:], stored_ms, parts[1].decode(), parts[2], marks)
        except (struct.error, ValueError) as e:
            raise DecodeError(f"a record of {len(data)} bytes cannot be read: {e}") from e


class RecordState(NamedTuple):
    """The state of a record: the number of its failures, the time of this state (ms since 1970), and the reason of the last
    failure.
    """

    tries: int
    state_since_ms: int
    reason: str = ""

    def encode(self) -> bytes:
        head = _STATE.pack(VERSION, min(self.tries, _MAX_COUNTED_TRIES), self.state_since_ms, 0)
        return head + self.reason.encode(errors="replace") if self.reason else head

    @classmethod
    def decode(cls, data: bytes) -> RecordState:
        try:
            version, tries, state_since_ms, length = _STATE.unpack_from(data)
            if version != VERSION:
                raise DecodeError(f"a state of version {version}; this release reads version {VERSION}")
            return cls(tries, state_since_ms, data[_STATE.size + length :].decode(errors="replace"))
        except struct.error as e:
            raise DecodeError(f"a state of {len(data)} bytes cannot be read: {e}") from e

    @classmethod
    def decode_or_empty(cls, data: bytes) -> RecordState:
        """Like ``decode``, but returns an empty state if the data are empty or cannot be read."""
        if not data:  # most records in lanes have no state
            return cls(0, 0)
        try:
            return cls.decode(data)
        except DecodeError:
            return cls(0, 0)

    @staticmethod
    def legacy_target(data: bytes) -> str:
        """The target that a record waits for, in the state that a release before 0.2 wrote; empty if it cannot be read."""
        try:
            version, _, _, length = _STATE.unpack_from(data)
        except struct.error:
            return ""
        return data[_STATE.size : _STATE.size + length].decode(errors="replace") if version == VERSION else ""


class Done(NamedTuple):
    """The verdict for a record that was handled."""


class RetryLater(NamedTuple):
    """The verdict for a record that failed, and is due again at ``due_ms``."""

    due_ms: int
    reason: str


class Replaced(NamedTuple):
    """The verdict for a record that is replaced by another record with the same sequence and the same marks. Without a
    ``reason``, the new record is the old record with another target, and keeps the count of failures. With a ``reason``, the new
    record is the dead letter, which is due now.
    """

    record: Record
    reason: str | None = None


class Dead(NamedTuple):
    """The verdict for a record that is given up, and kept as a dead record. If a broker rejected a dead letter, ``record`` is
    the record for which the dead letter was created. This record is kept instead of the dead letter.
    """

    reason: str
    record: Record | None = None


Verdict = Done | RetryLater | Replaced | Dead


@dataclass(slots=True)
class Totals:
    """Totals of a store: the next sequence, the number and bytes of live records and of dead records, the number of records that
    were given up so far, and the latest time that was recorded (ms since 1970).
    """

    next_sequence: int = 1
    depth: int = 0
    size: int = 0
    dead: int = 0
    dead_bytes: int = 0
    give_ups: int = 0
    last_recorded_ms: int = 0

    def copy(self) -> Totals:
        """Return a copy. Every addition copies the totals, and ``dataclasses.replace`` would take three times as long."""
        return Totals(
            self.next_sequence, self.depth, self.size, self.dead, self.dead_bytes, self.give_ups, self.last_recorded_ms
        )

    @property
    def is_valid(self) -> bool:
        """Whether no total is negative. A total becomes negative if a record is deleted that was not counted in the totals."""
        return min(self.depth, self.size, self.dead, self.dead_bytes) >= 0

    @property
    def all_bytes(self) -> int:
        """The bytes that count towards ``max_bytes``. Dead letters are counted, too, because they are on the same disk."""
        return self.size + self.dead_bytes

    def encode(self) -> bytes:
        """Encode the totals. The totals of a store without records get the version that earlier releases can open."""
        return _TOTALS.pack(INDEXED_VERSION if self.depth else VERSION, self.next_sequence, self.depth, self.size, self.dead,
                            self.dead_bytes, self.give_ups, self.last_recorded_ms)  # fmt: skip

    @staticmethod
    def with_indexed_version(data: bytes) -> bytes:
        """Return the encoded totals with ``INDEXED_VERSION``, so that earlier releases do not open the store."""
        return bytes((INDEXED_VERSION,)) + data[1:]

    @classmethod
    def decode(cls, data: bytes) -> Totals | None:
        """Return None for damaged totals, with a number that no store reaches. Raises ``DecodeError`` for another format."""
        try:
            version, *numbers = _TOTALS.unpack(data)
        except struct.error as e:
            raise DecodeError(f"totals of {len(data)} bytes cannot be read: {e}") from e
        if version not in (VERSION, INDEXED_VERSION):
            raise DecodeError(f"totals of version {version}; this release reads version {INDEXED_VERSION}")
        return cls(*numbers) if max(numbers) <= NUMBER_LIMIT else None


@dataclass(frozen=True, slots=True)
class SpoolOwner:
    """The owner of a store's records. No record is sent to the cluster of another owner.

    Args:
        servers: Addresses of the cluster's name servers, or of its Proxies; empty if an earlier release wrote the owner.
        namespace: None if an earlier release wrote the owner.
        environment: Name and mode of the environment, as in ``environment 'eu' (suffix)``, and the queues of environments if
            they are given; empty without an environment.
        purpose: Empty for a store of sends; other users of a store set a name.
    """

    servers: tuple[str, ...] = ()
    namespace: str | None = None
    environment: str = ""
    purpose: str = ""

    def encode(self) -> bytes:
        return json.dumps([VERSION, self.purpose, self.servers, self.namespace, self.environment]).encode()

    @classmethod
    def decode(cls, data: bytes) -> SpoolOwner:
        """Decode an owner. Earlier releases wrote only a text: the environment, or the purpose."""
        if not data.startswith(b"["):
            text = data.decode(errors="replace")
            return cls(environment=text) if text.startswith("environment ") else cls(purpose=text)
        try:
            version, purpose, servers, namespace, environment = json.loads(data)
            if version != VERSION:
                raise DecodeError(f"an owner of version {version}; this release reads version {VERSION}")
            return cls(tuple(servers), namespace, environment, purpose)
        except (ValueError, TypeError, RecursionError) as e:
            raise DecodeError(f"an owner of {len(data)} bytes cannot be read: {e}") from e

    @classmethod
    def read(cls, get: Callable[[bytes], bytes | None]) -> SpoolOwner:
        """Return the owner in the store that ``get`` reads."""
        return cls.decode(next(filter(None, map(get, OWNER)), b""))

    def may_use(self, other: SpoolOwner) -> bool:
        """Whether this owner may use the records of ``other``. Two lists of servers belong to one cluster if they have an address
        in common. Values that an earlier release did not write are not compared.
        """
        return (
            self.purpose == other.purpose
            and _environments_match(self.environment, other.environment)
            and (None in (self.namespace, other.namespace) or self.namespace == other.namespace)
            and (not self.servers or not other.servers or not set(self.servers).isdisjoint(other.servers))
        )

    def puts_and_deletes_of_notes(
        self, notes: Iterable[tuple[bytes, bytes]], previous_owner: SpoolOwner, is_assigned: bool
    ) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Return puts and deletes for the stored ``notes`` that this owner does not trust. If the records were assigned to this
        owner (``is_assigned``), notes about records are kept with ``DOUBTFUL_PREFIX``. They help to find out whether marks are
        about queues of this owner's brokers.
        """
        untrusted = [
            (key, value) for key, value in notes if not self.trusts_note(key[len(NOTE) :], previous_owner, is_assigned)
        ]
        named_values = [(key[len(NOTE) :], value) for key, value in untrusted if is_assigned]
        notes_about_records = [
            (name, value)
            for name, value in named_values
            if name != TARGET_RULES_NOTE and not name.startswith(LASTING_PREFIX)
        ]
        puts = [(NOTE + DOUBTFUL_PREFIX + name, value) for name, value in notes_about_records]
        return puts, [key for key, _ in untrusted]

    def trusts_note(self, note_name: bytes, previous_owner: SpoolOwner, is_assigned: bool) -> bool:
        """Whether a note from the time of the owner ``previous_owner`` is true for this owner, who may have other brokers with
        the same names. The purpose of the owners is not compared. If the records were assigned to this owner (``is_assigned``),
        the note about the queues of an environment remains valid if namespace and environment are the same. This method also
        returns True for notes with ``DOUBTFUL_PREFIX``, which are not changed.
        """
        if note_name.startswith(DOUBTFUL_PREFIX):
            return True
        if is_assigned and note_name.startswith(LASTING_PREFIX):
            return (self.namespace, self.environment) == (previous_owner.namespace, previous_owner.environment)
        return self.may_use(replace(previous_owner, purpose=self.purpose))

    def __str__(self) -> str:
        servers = f"the cluster of {';'.join(self.servers)}" if self.servers else "an unnamed cluster"
        parts = [self.purpose, servers, f"namespace {self.namespace!r}" if self.namespace else "", self.environment]
        return ", ".join(part for part in parts if part)


def _environments_match(own_environment: str, stored_environment: str) -> bool:
    """Whether two texts mean the same environment. If ``stored_environment`` has no queues, queues are not compared. There are
    no queues if an earlier release wrote ``stored_environment``, or if the environment is only a number.
    """
    return own_environment == stored_environment or (
        bool(stored_environment) and own_environment.startswith(f"{stored_environment}, ")
    )


# The owner of records whose real owner cannot be read. No process can use these records until a command assigns them.
UNKNOWN_OWNER = SpoolOwner(purpose="an owner that a damaged block named")


def due_ms_of_identity(identity: bytes) -> int:
    """Return the original due time of the record with this identity, in ms since 1970."""
    due_ms: int = _SEQUENCE.unpack_from(identity)[0]
    return due_ms


def pending_key(record: Record | DecodeError, due: Due, has_failed: bool = False) -> PendingKey:
    """Return the key of a pending record; the key has no target if the record cannot be read. ``has_failed`` is whether an
    attempt has failed.
    """
    return record.pending_key(due, has_failed) if isinstance(record, Record) else PendingKey("", False, due)


def decode_record(data: bytes | None) -> Record | DecodeError:
    """Return the record in stored data, or the error if it cannot be read.

    The error has no traceback, because a traceback and the variables of callers would reference each other, and keep RocksDB
    open.
    """
    if data is None:
        return DecodeError("the record is missing")
    try:
        return Record.decode(data)
    except DecodeError as e:
        message, remedy = e.message, e.remedy
    return DecodeError(message, remedy=remedy)
