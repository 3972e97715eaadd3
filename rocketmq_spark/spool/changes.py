"""Writes of a store: one atomic change, and additions of several threads as one write.

``AtomicChange`` contains the puts and deletes of a write, and the totals after it. Pure. With ``GroupCommit``, the thread that
gets the lock writes for all waiting threads.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from rocketmq_spark.errors import RocketMQError, SpoolError
from rocketmq_spark.spool.records import (
    DEAD,
    NOTE,
    RECORD,
    TOTALS,
    Due,
    PendingPlace,
    Record,
    RecordState,
    Totals,
    decoded,
    marked,
    numbered,
    ordered,
)

_NEW = RecordState(0, 0)  # the state of a new record in its lane; it gets a time when it becomes pending


class StoredRecord(NamedTuple):
    """A record as it is stored, with its due time and size."""

    due: Due
    record: Record
    size: int


class AtomicChange:
    """Steps that are written together or not at all. ``pended`` and ``unpended`` are the places of records that become pending
    and that no longer are, ``ended_ms`` is the latest original due time of those whose marks end with it (0 if none).
    """

    def __init__(self, totals: Totals) -> None:
        self.totals = totals.copy()
        self.puts: list[tuple[bytes, bytes]] = []
        self.deletes: list[bytes] = []
        self.pended: list[PendingPlace] = []
        self.unpended: list[PendingPlace] = []
        self.ended_ms = 0

    @property
    def all_puts(self) -> list[tuple[bytes, bytes]]:
        return [*self.puts, (TOTALS, self.totals.encode())]

    def add(self, record: Record, data: bytes, state: RecordState = _NEW) -> int:
        """Add a new record, encoded as ``data``; returns its sequence. Its place in its lane keeps the ``state`` of a record that
        has failed before, because it may have to wait there.
        """
        totals = self.totals
        sequence = totals.next_sequence
        totals.next_sequence += 1
        totals.depth += 1
        totals.size += len(data)
        totals.last_ms = max(totals.last_ms, record.stored_ms)
        self.puts.append((numbered(RECORD, sequence), data))
        if record.lane:
            self.puts.append((ordered(record.lane, sequence), state.encode() if state.tries else b""))
        return sequence

    def mark(self, record: Record, due: Due) -> None:
        """Write a record's marks, by which the record and its due time are found."""
        self.puts += [(marked(*mark), due.encoded) for mark in record.marks]

    def pend(self, pending: PendingPlace, state: bytes) -> None:
        """Make a record pending, with its encoded state."""
        self.puts.append((pending.key, state))
        self.pended.append(pending)

    def unpend(self, pending: PendingPlace) -> None:
        self.deletes.append(pending.key)
        self.unpended.append(pending)

    def retry(self, record: Record, pending: PendingPlace, due: Due, state: RecordState) -> None:
        """Give a record a new due time after a failed attempt, but not one before its original due time: an earlier clock, by
        which that time seemed to be over, may have been ahead.
        """
        due = Due(max(due.due_ms, record.first_due_ms or 0), due.sequence)
        self.unpend(pending)
        self.pend(record.pending(due, failed=True), state.encode())
        self.mark(record, due)

    def hasten(self, pending: PendingPlace, now_ms: int, state: bytes, data: bytes | None) -> None:
        """Make a pending record due now, or at the original due time that ``data`` contains, if that is later."""
        record = decoded(data)
        original_ms = record.first_due_ms if isinstance(record, Record) else None
        due = Due(max(now_ms, original_ms or 0), pending.due.sequence)
        self.unpend(pending)
        self.pend(pending._replace(due=due), state)
        if isinstance(record, Record):
            self.mark(record, due)

    def join(self, stored: StoredRecord, other: Record) -> StoredRecord:
        """Give a stored record the marks of a repeated one; returns it as it is stored then."""
        record = stored.record.joined(other)
        if record is stored.record:
            return stored
        data = record.encode()
        self.puts.append((numbered(RECORD, stored.due.sequence), data))
        self.puts += [(marked(*mark), stored.due.encoded) for mark in record.marks[len(stored.record.marks) :]]
        self.totals.size += len(data) - stored.size
        return StoredRecord(stored.due, record, len(data))

    def remark(self, data: bytes | None, due: Due) -> None:
        """Like ``mark``, for an encoded record. Does nothing if it cannot be decoded."""
        if isinstance(record := decoded(data), Record):
            self.mark(record, due)

    def unmark(self, record: Record) -> None:
        self.deletes += [marked(*mark) for mark in record.marks]
        self.ended_ms = max(self.ended_ms, record.first_due_ms or 0)

    def free(self, sequence: int, data: bytes | None, mark: tuple[bytes, bytes]) -> None:
        """Remove a mark from a record, also inside its stored form, so that setting its marks again does not restore this one."""
        self.deletes.append(marked(*mark))
        if isinstance(record := decoded(data), Record):
            freed = dataclasses.replace(record, marks=tuple(each for each in record.marks if each != mark)).encode()
            self.puts.append((numbered(RECORD, sequence), freed))
            self.totals.size += len(freed) - len(data or b"")

    def rewrite(self, sequence: int, record: Record, size: int) -> int:
        """Store another record under the sequence of one that has ``size``. Returns the new size."""
        data = record.encode()
        self.puts.append((numbered(RECORD, sequence), data))
        self.totals.size += len(data) - size
        return len(data)

    def replace(self, pending: PendingPlace, record: Record, size: int, place: PendingPlace, state: bytes) -> None:
        """Store another record, at ``place``, instead of a pending one that has ``size``."""
        self.rewrite(place.due.sequence, record, size)
        self.unpend(pending)
        self.pend(place, state)
        self.mark(record, place.due)

    def finish(self, sequence: int, size: int) -> None:
        """Delete a record that was handled."""
        self.deletes.append(numbered(RECORD, sequence))
        self.totals.depth -= 1
        self.totals.size -= size

    def bury(self, sequence: int, size: int, state: RecordState, counts: bool = True) -> None:
        """Give a record up. It stays stored under its sequence, and is listed as dead. ``counts`` is False if it was counted."""
        self.puts.append((numbered(DEAD, sequence), state.encode()))
        totals = self.totals
        totals.depth, totals.size = totals.depth - 1, totals.size - size
        totals.dead, totals.dead_bytes = totals.dead + 1, totals.dead_bytes + size
        totals.give_ups += counts

    def revive(self, sequence: int, record: Record, size: int, target: str) -> None:
        """Make a dead record a live one with this target; the caller makes it pending. Its marks are not restored, because they
        ended when it was given up.
        """
        self.deletes.append(numbered(DEAD, sequence))
        totals, kept = self.totals, size
        revived = dataclasses.replace(record, target=target, marks=())
        if revived != record:
            data = revived.encode()
            self.puts.append((numbered(RECORD, sequence), data))
            kept = len(data)
        totals.depth, totals.size = totals.depth + 1, totals.size + kept
        totals.dead, totals.dead_bytes = totals.dead - 1, totals.dead_bytes - size


class Ticket:
    """One caller's additions: records with their due times, their encoded form, their states (None: new ones), and notes.
    ``error`` is set if writing failed.
    """

    def __init__(
        self,
        records: Sequence[tuple[Record, int]],
        notes: Mapping[bytes, bytes] | None = None,
        states: Sequence[RecordState] | None = None,
    ) -> None:
        self.items = [(record, due_ms, record.encode()) for record, due_ms in records]
        self.states = states
        self.notes = [(NOTE + name, value) for name, value in notes.items()] if notes else []
        self.size = sum([len(data) for _, _, data in self.items])
        self.laned = any(record.lane for record, _ in records)
        self.error: RocketMQError | None = None
        self.done = False


class GroupCommit:
    """Passes tickets to ``write`` under ``lock``: one by one, or with ``together`` all that wait at the same time."""

    def __init__(
        self, lock: AbstractContextManager[bool], write: Callable[[Sequence[Ticket]], None], together: bool
    ) -> None:
        self._lock = lock
        self._write = write
        self._together = together
        self._waiting: deque[Ticket] = deque()

    def put(self, ticket: Ticket) -> None:
        """Returns when the ticket is written; raises its error."""
        if not self._together:
            with self._lock:
                self._write((ticket,))
        else:
            self._waiting.append(ticket)
            with self._lock:
                if not ticket.done:
                    waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
                    # The ticket is missing if Ctrl-C interrupted the thread that had taken it, before that thread wrote.
                    self._write_all(waiting if ticket in waiting else [*waiting, ticket])
        if ticket.error is not None:
            raise ticket.error

    def _write_all(self, tickets: Sequence[Ticket]) -> None:
        try:
            self._write(tickets)
        except BaseException:  # Ctrl-C reaches one thread only; whether the others' tickets were written is unknown
            for each in tickets:
                each.error = each.error or SpoolError("the write to the spool was interrupted")
            raise
        finally:
            for each in tickets:
                each.done = True
