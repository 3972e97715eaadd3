"""Writes of a store: one atomic change, and additions of several threads as one write.

``AtomicChange`` contains the puts and deletes of a write, and the totals of the store after the write. Pure. With
``GroupCommit``, the thread that gets the lock writes for all waiting threads.
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
    PendingKey,
    Record,
    RecordState,
    Totals,
    decode_record,
    lane_key,
    mark_key,
    record_key,
)

# The state of a new record in its lane. The time is set when the record becomes pending.
_NEW_STATE = RecordState(0, 0)


class StoredRecord(NamedTuple):
    """A record as it is stored, with its due time and size."""

    due: Due
    record: Record
    size: int


class AtomicChange:
    """Puts and deletes that are written in one atomic write.

    ``added_pending`` are the keys of records that become pending, and ``removed_pending`` the keys of records that are no
    longer pending. If this change finishes records with marks, ``last_done_due_ms`` is the latest of their original due times;
    otherwise it is 0.
    """

    def __init__(self, totals: Totals) -> None:
        self.totals = totals.copy()
        self.puts: list[tuple[bytes, bytes]] = []
        self.deletes: list[bytes] = []
        self.added_pending: list[PendingKey] = []
        self.removed_pending: list[PendingKey] = []
        self.last_done_due_ms = 0

    @property
    def all_puts(self) -> list[tuple[bytes, bytes]]:
        return [*self.puts, (TOTALS, self.totals.encode())]

    def add(self, record: Record, data: bytes, state: RecordState = _NEW_STATE) -> int:
        """Add a new record, encoded as ``data``. Returns the sequence of the record. If the record has a lane and has failed
        before, its lane keeps ``state`` while the record waits behind other records.
        """
        totals = self.totals
        sequence = totals.next_sequence
        totals.next_sequence += 1
        totals.depth += 1
        totals.size += len(data)
        totals.last_recorded_ms = max(totals.last_recorded_ms, record.stored_ms)
        self.puts.append((record_key(RECORD, sequence), data))
        if record.lane:
            self.puts.append((lane_key(record.lane, sequence), state.encode() if state.tries else b""))
        return sequence

    def mark(self, record: Record, due: Due) -> None:
        """Write the marks of a record: index entries by which the record and its due time are found."""
        self.puts += [(mark_key(*mark), due.mark_value) for mark in record.marks]

    def add_pending(self, pending: PendingKey, state: bytes) -> None:
        """Make a record pending, with its encoded state."""
        self.puts.append((pending.encoded, state))
        self.added_pending.append(pending)

    def remove_pending(self, pending: PendingKey) -> None:
        self.deletes.append(pending.encoded)
        self.removed_pending.append(pending)

    def retry(self, record: Record, pending: PendingKey, due: Due, state: RecordState) -> None:
        """Give a record a new due time after a failed attempt. The new time is never before the original due time. Otherwise,
        if the clock was ahead and the failed attempt came too early, the next attempt could come too early, too.
        """
        due = Due(max(due.due_ms, record.original_due_ms or 0), due.sequence)
        self.remove_pending(pending)
        self.add_pending(record.pending_key(due, has_failed=True), state.encode())
        self.mark(record, due)

    def make_due(self, pending: PendingKey, now_ms: int, state: bytes, data: bytes | None) -> None:
        """Make a pending record due now. If ``data``, the encoded record, contains a later original due time, the record
        becomes due at this time instead.
        """
        record = decode_record(data)
        original_ms = record.original_due_ms if isinstance(record, Record) else None
        due = Due(max(now_ms, original_ms or 0), pending.due.sequence)
        self.remove_pending(pending)
        self.add_pending(pending._replace(due=due), state)
        if isinstance(record, Record):
            self.mark(record, due)

    def merge_marks(self, stored_record: StoredRecord, repeated_record: Record) -> StoredRecord:
        """Add the marks of a repeated record to the stored record. Returns the new form of the stored record."""
        record = stored_record.record.with_marks_of(repeated_record)
        if record is stored_record.record:
            return stored_record
        data = record.encode()
        self.puts.append((record_key(RECORD, stored_record.due.sequence), data))
        self.puts += [
            (mark_key(*mark), stored_record.due.mark_value) for mark in record.marks[len(stored_record.record.marks) :]
        ]
        self.totals.size += len(data) - stored_record.size
        return StoredRecord(stored_record.due, record, len(data))

    def mark_encoded(self, data: bytes | None, due: Due) -> None:
        """Like ``mark``, but for an encoded record. Does nothing if the record cannot be decoded."""
        if isinstance(record := decode_record(data), Record):
            self.mark(record, due)

    def unmark(self, record: Record) -> None:
        self.deletes += [mark_key(*mark) for mark in record.marks]
        self.last_done_due_ms = max(self.last_done_due_ms, record.original_due_ms or 0)

    def remove_mark(self, sequence: int, data: bytes | None, mark: tuple[bytes, bytes]) -> None:
        """Remove a mark of a record. The mark is also removed from the stored record, so that a later call of ``mark`` does not
        restore it.
        """
        self.deletes.append(mark_key(*mark))
        if isinstance(record := decode_record(data), Record):
            data_without_mark = dataclasses.replace(
                record, marks=tuple(other for other in record.marks if other != mark)
            ).encode()
            self.puts.append((record_key(RECORD, sequence), data_without_mark))
            self.totals.size += len(data_without_mark) - len(data or b"")

    def rewrite(self, sequence: int, record: Record, old_size: int) -> int:
        """Replace the record with this sequence. The old record has ``old_size`` bytes. Returns the size of the new record."""
        data = record.encode()
        self.puts.append((record_key(RECORD, sequence), data))
        self.totals.size += len(data) - old_size
        return len(data)

    def replace(self, pending: PendingKey, record: Record, old_size: int, new_key: PendingKey, state: bytes) -> None:
        """Replace a pending record of ``old_size`` bytes by ``record``, which is pending at ``new_key``."""
        self.rewrite(new_key.due.sequence, record, old_size)
        self.remove_pending(pending)
        self.add_pending(new_key, state)
        self.mark(record, new_key.due)

    def finish(self, sequence: int, size: int) -> None:
        """Delete a record that was handled."""
        self.deletes.append(record_key(RECORD, sequence))
        self.totals.depth -= 1
        self.totals.size -= size

    def add_dead(self, sequence: int, size: int, state: RecordState, is_new_give_up: bool = True) -> None:
        """Give a record up: it keeps its sequence, and is listed as dead. ``is_new_give_up`` is False if ``give_ups`` already
        counts the record.
        """
        self.puts.append((record_key(DEAD, sequence), state.encode()))
        totals = self.totals
        totals.depth, totals.size = totals.depth - 1, totals.size - size
        totals.dead, totals.dead_bytes = totals.dead + 1, totals.dead_bytes + size
        totals.give_ups += is_new_give_up

    def revive(self, sequence: int, record: Record, size: int, target: str) -> None:
        """Turn a dead record into a live record with this target. The caller makes the record pending. The record has no marks,
        because its marks were removed when it was given up.
        """
        self.deletes.append(record_key(DEAD, sequence))
        totals, live_size = self.totals, size
        revived_record = dataclasses.replace(record, target=target, marks=())
        if revived_record != record:
            data = revived_record.encode()
            self.puts.append((record_key(RECORD, sequence), data))
            live_size = len(data)
        totals.depth, totals.size = totals.depth + 1, totals.size + live_size
        totals.dead, totals.dead_bytes = totals.dead - 1, totals.dead_bytes - size


class AddRequest:
    """One call of ``Store.add``: its records, each with its due time and encoded form, and its notes. ``states`` are the records'
    states in another store; None if all records are new. ``error`` is set if the write fails.
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
        self.has_lanes = any(record.lane for record, _ in records)
        self.error: RocketMQError | None = None
        self.is_done = False


class GroupCommit:
    """Passes requests to ``write`` under ``lock``: one by one, or, if ``batched``, all waiting requests in one call."""

    def __init__(
        self, lock: AbstractContextManager[bool], write: Callable[[Sequence[AddRequest]], None], batched: bool
    ) -> None:
        self._lock = lock
        self._write = write
        self._is_batched = batched
        self._waiting_requests: deque[AddRequest] = deque()

    def submit(self, request: AddRequest) -> None:
        """Wait until the request is written. Raises the error of the request."""
        if not self._is_batched:
            with self._lock:
                self._write((request,))
        else:
            self._waiting_requests.append(request)
            with self._lock:
                if not request.is_done:
                    requests = [self._waiting_requests.popleft() for _ in range(len(self._waiting_requests))]
                    # The request is missing if another thread took it, and Ctrl-C interrupted that thread before the write.
                    self._write_all(requests if request in requests else [*requests, request])
        if request.error is not None:
            raise request.error

    def _write_all(self, requests: Sequence[AddRequest]) -> None:
        try:
            self._write(requests)
        except BaseException:  # Ctrl-C: it is unknown whether these requests were written
            for request in requests:
                request.error = request.error or SpoolError("the write to the spool was interrupted")
            raise
        finally:
            for request in requests:
                request.is_done = True
