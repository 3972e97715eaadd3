"""Stores records that are due later, until they are settled. The store does not interpret the content of records.

One lock guards one ``Database``. Every step is one atomic write, so that a process may be killed at any point. A record that is
taken is *leased*. The lease is only in memory: if the process ends, the lease ends, and the record is still due. Only additions
wait for the disk (``sync``). If a power cut undoes the write of a result, the record is sent again (at least once).

In a *lane* only the first record is pending. The next record becomes pending when the first record is done, or given up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import shlex
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from rocketmq_spark.base.folders import warn_if_others_have_rights, warn_if_replaceable
from rocketmq_spark.errors import ClosedError, DecodeError, RocketMQError, SpoolError
from rocketmq_spark.spool import recovery
from rocketmq_spark.spool.changes import AddRequest, AtomicChange, GroupCommit, StoredRecord
from rocketmq_spark.spool.database import Damaged, Database, reserve_folder
from rocketmq_spark.spool.files import COPY_TO_SEND, FOLDER_USERS, CopyUse, FreeSpace, check_owner, make_folder
from rocketmq_spark.spool.lanes import (
    BatchPredicate,
    LeasedRecord,
    Marks,
    current_record,
    find_lane,
    lanes_in,
    records_to_batch,
    remove_from_lane,
)
from rocketmq_spark.spool.pending import PendingIndex, migrate_keys
from rocketmq_spark.spool.records import (
    IDENTITY,
    NOTE,
    OWNER,
    PENDING,
    RECORD,
    TARGET_RULES_NOTE,
    TOTALS,
    UNKNOWN_OWNER,
    Dead,
    Done,
    Due,
    PendingKey,
    Record,
    RecordState,
    Replaced,
    RetryLater,
    SpoolOwner,
    Totals,
    Verdict,
    area_end,
    decode_record,
    due_of_key,
    group_end,
    group_of,
    record_key,
)
from rocketmq_spark.spool.recovery import SalvageResult, finish_repair, salvage
from rocketmq_spark.spool.turns import Admission

logger = logging.getLogger(__name__)

REVIVE_PAGE_SIZE, REVIVE_PAGE_BYTES = 1000, 8 << 20
RETARGET_PAGE_BYTES = 4 << 20


class Store:
    """The records of one folder.

    ``sync`` is ``always`` (each call of ``add`` waits for its own flush), ``batch`` (calls of several threads wait for one flush)
    or ``never``. ``max_bytes`` limits the size of all records, including dead records. ``damage_count`` says how often damage was
    found. Files of another user are an error. The error recommends a copy of the spool, for the purpose ``use``. With
    ``any_owner``, files of another user are permitted, and the caller must have called ``owner_rights.become_owner``.
    """

    def __init__(
        self,
        path: Path,
        sync: str = "always",
        max_bytes: int | None = None,
        any_owner: bool = False,
        use: CopyUse = COPY_TO_SEND,
    ) -> None:
        self.path = path.absolute()
        self._use = use
        self._must_sync, self._free_space = sync != "never", FreeSpace(self.path, max_bytes)
        self._any_owner = any_owner
        self._lock = threading.RLock()
        self._group_commit = GroupCommit(self._lock, self._add, batched=sync == "batch")
        self._leased_sequences: set[int] = set()
        # The new keys of leased records after damage was repaired, by sequence. The key is None if the result of the record must
        # not be stored.
        self._new_keys: dict[int, PendingKey | None] = {}
        self.totals = Totals()
        # The latest original due time of the records that were finished since the store was opened. Until a record is finished,
        # this is the latest time that the store has recorded.
        self.last_done_due_ms = 0
        self._owner: SpoolOwner | None = None
        self._has_failed = self._is_damaged = self._is_closed = False
        self.damage_count = 0
        self._opened_database = _OpenedDatabase(self)
        reserve_folder(self)
        try:
            self._open()
        except BaseException:
            FOLDER_USERS.discard(self)
            raise

    def __len__(self) -> int:
        """The number of live records: they are not settled, and not dead."""
        return self.totals.depth

    def holds_lane(self, lane: bytes) -> bool:
        """Whether the lane has a record that is not settled yet."""
        return lane in self._lanes

    def add(
        self,
        records: Sequence[tuple[Record, int]],
        notes: Mapping[bytes, bytes] | None = None,
        states: Sequence[RecordState] | None = None,
    ) -> None:
        """Store records, each with its due time (ms since 1970), and ``notes``. When the call returns, the records and notes are
        as durable as ``sync`` says. If a stored record has the first mark of a new record, the new record is not stored. The
        stored record then gets those marks of the new record that are in other spaces. ``states`` are the states of the records
        in another store.

        Everything is written, or nothing. Raises ``SpoolFull`` if the records exceed ``max_bytes`` or the disk is nearly full,
        and ``SpoolError`` if the write fails.
        """
        self._group_commit.submit(AddRequest(records, notes, states))

    def notes(self) -> dict[bytes, bytes]:
        """Return the latest notes by name."""
        with self._opened_database:
            return {key[len(NOTE) :]: value for key, value in self._db.scan(NOTE, area_end(NOTE))}

    def places(self, space: bytes, start: bytes | None = None, limit: int = 1) -> list[bytes]:
        """Return the first ``limit`` places of a space, from ``start`` on; without ``start``, only the first place. A space is
        the name of an index of records, and a place is the key of an unfinished record in it (see ``lanes``).
        """
        with self._opened_database:
            if start is None:
                first_place = self._marks.first_place(space)
                return [] if first_place is None else [first_place]
            return [place for place, _ in itertools.islice(self._marks.scan(space, start), limit)]

    def remove_marks(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Remove marks from records. Returns the number of removed marks. The records are kept, and can still be found by their
        other marks.
        """
        with self._opened_database:
            count, marks_left = 0, marks
            while marks_left:
                change, marks_left = self._marks.removal(marks_left, self.totals)
                self._write(change)
                count += len(change.deletes)
            return count

    def drop_records(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Drop the records that have these marks. Returns how many of the dropped records were not leased. If a dropped record
        was leased, its later result is ignored. Records with marks have no lane.
        """
        return self._drop_records(marks, lambda record, mark: False)

    def hand_over(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Like ``drop_records``, but a record that also has a mark of another queue is kept, and loses only the given mark."""

        def keeps_record(record: Record, mark: tuple[bytes, bytes]) -> bool:
            return any(other != mark and other[0] != IDENTITY for other in record.marks)

        return self._drop_records(marks, keeps_record)

    def _drop_records(
        self, marks: Sequence[tuple[bytes, bytes]], keeps_record: Callable[[Record, tuple[bytes, bytes]], bool]
    ) -> int:
        with self._opened_database:
            change, dropped_sequences, marks_to_remove = AtomicChange(self.totals), set(), []
            for mark in marks:
                due = self._marks.find(*mark)
                if due is None or due.sequence in dropped_sequences:
                    continue
                data = self._db.get(record_key(RECORD, due.sequence)) or b""
                if isinstance(record := decode_record(data), Record):
                    if keeps_record(record, mark):
                        marks_to_remove.append(mark)
                        continue
                    change.unmark(record)
                    pending = self._pending.find(record.target, due)
                else:
                    change.deletes += recovery.mark_keys_of(self._db, due.sequence)
                    pending = None
                pending = pending or recovery.pending_keys_of(self._db, [due.sequence])[due.sequence]
                if pending is not None:
                    change.remove_pending(pending)
                change.finish(due.sequence, len(data))
                dropped_sequences.add(due.sequence)
            if change.deletes:
                self._write(change)
            self.remove_marks(marks_to_remove)
            self._new_keys |= dict.fromkeys(dropped_sequences & self._leased_sequences)
            return len(dropped_sequences - self._leased_sequences)

    def take(
        self,
        now_ms: int,
        limit: int,
        max_bytes: int = 1 << 62,
        predicate: BatchPredicate | None = None,
        admission: Admission | None = None,
    ) -> list[LeasedRecord]:
        """Take the first due records, except leased records and records whose targets ``admission`` rejects. Takes at most
        ``limit`` records, and about ``max_bytes``. Each record comes with the following records of its lane that ``predicate``
        accepts.

        The caller must settle each record. A record that cannot be read becomes a dead letter, unchanged, with the reason.
        """
        with self._opened_database:
            leased_records: list[LeasedRecord] = []
            size = 0
            accepts = _accept_all_targets if admission is None else admission.accepts
            try:
                with contextlib.closing(self._pending.due_entries(now_ms, accepts)) as due_entries:
                    for pending, value in due_entries:
                        if (leased := self._decode(pending, value, now_ms)) is not None:
                            if predicate is not None:
                                followers = records_to_batch(self._db, pending.due.sequence, leased.record, predicate)
                                leased = leased._replace(followers=followers)
                            if admission is not None:
                                admission.add_in_flight(pending.target, leased.size)
                            leased_records.append(leased)
                            size += leased.size
                        if size >= max_bytes or len(leased_records) >= limit:
                            break
            except BaseException:
                self._has_failed = True  # in memory, the index has already passed these records
                raise
            self._leased_sequences.update([leased.pending.due.sequence for leased in leased_records])
            return leased_records

    def awaits_result(self, leased: LeasedRecord) -> bool:
        """Whether the store still waits for the result of a taken record."""
        with self._lock:
            return self._new_keys.get(leased.pending.due.sequence, leased.pending) is not None

    def settle(self, verdicts: Sequence[tuple[LeasedRecord, Verdict]], now_ms: int) -> None:
        """Write the results of taken records in one write. If a record is ``Done``, the records that were sent with it are
        finished, too; otherwise they still wait in their lane.
        """
        with self._opened_database:
            change = AtomicChange(self.totals)
            change.totals.last_recorded_ms = max(now_ms, self.totals.last_recorded_ms)
            emptied_lanes = []
            for leased, verdict in verdicts:
                sequence, tries = leased.pending.due.sequence, leased.state.tries + 1
                if (pending := self._new_keys.get(sequence, leased.pending)) is None:
                    continue  # dropped, lost by damage, or a repair recovered an earlier record of its lane
                record, size = (
                    current_record(self._db, leased) if self._marks.may_have_changed else (leased.record, leased.size)
                )
                if isinstance(verdict, RetryLater):
                    state = RecordState(tries, now_ms, verdict.reason)
                    change.retry(record, pending, Due(verdict.due_ms, sequence), state)
                    continue
                if isinstance(verdict, Replaced):
                    replacement = dataclasses.replace(verdict.record, marks=record.marks)
                    has_failed = pending.waits_for_answer or leased.state.tries > 0
                    due, state = pending.due, leased.state
                    if verdict.reason is not None:
                        # A write may have taken place although it seemed to fail. A repeated write must not count the given-up
                        # record again.
                        change.totals.give_ups += replacement != record
                        due = Due(max(now_ms, record.original_due_ms or 0), sequence)
                        has_failed, state = False, RecordState(0, now_ms, verdict.reason)
                    change.replace(pending, replacement, size, replacement.pending_key(due, has_failed), state.encode())
                    continue
                change.remove_pending(pending)
                change.unmark(record)
                if isinstance(verdict, Dead):
                    if verdict.record is not None:
                        size = change.rewrite(sequence, dataclasses.replace(verdict.record, marks=record.marks), size)
                    change.add_dead(
                        sequence,
                        size,
                        RecordState(tries, now_ms, verdict.reason),
                        is_new_give_up=verdict.record is None,
                    )
                else:
                    change.finish(sequence, size)
                settled_sequences = [sequence]
                for follower in leased.followers if isinstance(verdict, Done) else ():
                    if self._db.get(record_key(RECORD, follower.sequence)) is not None:  # damage may have lost it
                        change.unmark(follower.record)
                        change.finish(follower.sequence, follower.size)
                    settled_sequences.append(follower.sequence)
                if not remove_from_lane(self._db, change, leased.record.lane, settled_sequences, now_ms):
                    emptied_lanes.append(leased.record.lane)
            self._write(change)
            self._lanes.difference_update(emptied_lanes)
            sequences = {leased.pending.due.sequence for leased, _ in verdicts}
            self._leased_sequences -= sequences
            self._new_keys = {sequence: due for sequence, due in self._new_keys.items() if sequence not in sequences}

    def make_due(self, target: str | None, start: bytes | None, limit: int, now_ms: int) -> bytes | None:
        """Make records that wait for ``target`` due now, but not before their original due time. If ``target`` is None, make all
        records due. Examines ``limit`` records from ``start`` on.

        Returns the key at which the next call continues, or None after the last record.
        """
        with self._opened_database:
            change, next_key, has_marks = AtomicChange(self.totals), None, self._marks.has_any_marks
            groups = self._pending.groups() if target is None else [group_of(target, True)]
            with contextlib.closing(self._entries_due_later(groups, start, now_ms)) as entries:
                for count, (key, state) in enumerate(entries):
                    if count >= limit:
                        next_key = key
                        break
                    if (sequence := due_of_key(key).sequence) not in self._leased_sequences:
                        data = self._db.get(record_key(RECORD, sequence)) if has_marks else None
                        change.make_due(PendingKey.parse(key), now_ms, state, data)
            if change.puts:
                self._write(change)
            return next_key

    def _entries_due_later(
        self, groups: Iterable[bytes], start: bytes | None, now_ms: int
    ) -> Generator[tuple[bytes, bytes], None, None]:
        """Yield the pending entries of ``groups``, from ``start`` on, that are due after ``now_ms``."""
        for group in groups:
            if start is None or start < group_end(group):
                start_key = max(start or b"", group + Due(now_ms + 1, 0).key_suffix)
                with contextlib.closing(self._db.scan(start_key, group_end(group))) as entries:
                    yield from entries

    def start_target_rules(self, fingerprint: bytes) -> None:
        """Write into the store that new records get their targets from the rules with this ``fingerprint``. ``retarget``
        corrects the targets of the records that already wait.
        """
        with self._opened_database:
            if not self.has_targets_of(fingerprint):
                # The note must be written before this process adds its first record. Otherwise, if this process is killed, a
                # later process with the previous rules would find its own fingerprint, and not compare the targets.
                self.add([], {TARGET_RULES_NOTE: b"" if len(self) else fingerprint})

    def has_targets_of(self, fingerprint: bytes) -> bool:
        """Whether it is certain that all pending records got their targets from the rules with this ``fingerprint``."""
        with self._opened_database:
            return self._db.get(NOTE + TARGET_RULES_NOTE) == fingerprint

    def retarget(
        self,
        target_of: Callable[[Record], str],
        start: bytes | None,
        limit: int,
        kind: str | None = None,
        now_ms: int = 0,
    ) -> bytes | None:
        """Give pending records the targets that ``target_of`` returns. A record of ``kind`` that gets another target becomes due
        now, or at its original due time if this time is later. Other due times do not change. Examines ``limit`` records, or
        about ``RETARGET_PAGE_BYTES``, from ``start`` on. Leased records are skipped, because their handlers compare the targets.

        Returns the key at which the next call continues, or None after the last record.
        """
        with self._opened_database:
            change, next_key, size = AtomicChange(self.totals), None, 0
            with contextlib.closing(self._db.scan(start or PENDING, area_end(PENDING))) as entries:
                for count, (raw_key, state) in enumerate(entries):
                    if count >= limit or size >= RETARGET_PAGE_BYTES:
                        next_key = raw_key
                        break
                    key = PendingKey.parse(raw_key)
                    data = self._db.get(record_key(RECORD, key.due.sequence)) or b""
                    record, size = decode_record(data), size + len(data)
                    if key.due.sequence in self._leased_sequences or not isinstance(record, Record):
                        continue
                    if (target := target_of(record)) != record.target:
                        replacement = dataclasses.replace(record, target=target)
                        due, has_failed = key.due, RecordState.decode_or_empty(state).tries > 0
                        if record.kind == kind:
                            due = min(due, Due(max(now_ms, record.original_due_ms or 0), due.sequence))
                        change.replace(
                            key, replacement, len(data), replacement.retargeted_key(key, due, has_failed), state
                        )
            if change.puts:
                self._write(change)
            return next_key

    def next_due_ms(self, excluded_targets: Collection[str] = ()) -> int | None:
        """Return the first due time of all records, except leased records and records of ``excluded_targets``."""
        with self._opened_database:
            return self._pending.first_due_ms(excluded_targets)

    def due_targets(self, targets: Collection[str], now_ms: int) -> list[str]:
        """Return the ``targets`` that have due records which are not leased."""
        with self._opened_database:
            return self._pending.due_targets(targets, now_ms)

    def revive(self, now_ms: int, target_of: Callable[[Record], str] = operator.attrgetter("target")) -> int:
        """Make readable dead records pending again, without a lane. They get the targets that ``target_of`` returns, and may use
        all attempts again. Returns the number of records.
        """
        with self._opened_database:
            count_before, change = len(self), AtomicChange(self.totals)
            for sequence, record, size in recovery.dead_records(self._db):
                if isinstance(record, Record):
                    target = target_of(record)
                    change.revive(sequence, record, size, target)
                    due = Due(max(now_ms, record.original_due_ms or 0), sequence)
                    # If the record is due later, it must not become due when its target answers.
                    pending = dataclasses.replace(record, target=target).pending_key(
                        due, has_failed=due.due_ms <= now_ms
                    )
                    change.add_pending(pending, RecordState(0, now_ms).encode())
                revived_bytes = change.totals.size - self.totals.size
                if len(change.puts) >= REVIVE_PAGE_SIZE or revived_bytes >= REVIVE_PAGE_BYTES:
                    # The change is written in portions, because there may be millions of dead records.
                    self._write(change)
                    change = AtomicChange(self.totals)
            self._write(change)
            return len(self) - count_before

    def set_owner(self, owner: SpoolOwner, force: bool = False, keep_owner: bool = False) -> None:
        """Set the owner of the records. If the records belong to another owner, raises ``SpoolError``, or with ``force`` assigns
        the records to ``owner``. With ``keep_owner``, the owner is checked, but the stored owner is not changed.
        """
        with self._opened_database:
            stored_owner = recovery.read_owner(self._db)
            if self.totals.all_bytes and not force and not owner.may_use(stored_owner):
                raise SpoolError(
                    f"the spool in {self.path} holds records of {stored_owner}, not of {owner}",
                    remedy=_owner_remedy(self.path, owner, stored_owner),
                )
            self._owner = owner = (
                stored_owner if keep_owner and self.totals.all_bytes and stored_owner != SpoolOwner() else owner
            )
            if stored_owner != owner:
                puts, deletes = owner.puts_and_deletes_of_notes(
                    self._db.scan(NOTE, area_end(NOTE)), stored_owner, force
                )
                self._db.write([(key, owner.encode()) for key in OWNER] + puts, deletes, sync=self._must_sync)

    def verify(self) -> None:
        """Read the whole database, and repair the damage that is found."""
        try:
            self._read_all()
        except Damaged:
            self._read_all()  # the database was repaired by this call

    def _read_all(self) -> None:
        with self._opened_database:
            for _ in self._db.scan(*recovery.ALL_KEYS):
                pass

    def close(self) -> None:
        """Close the database, and release its folder. Leased records are still due in the next process that opens the folder."""
        with self._lock:
            self._is_closed = True
            self._db.close()
            FOLDER_USERS.discard(self)

    def _open(self) -> None:
        if self._any_owner:
            self._open_files()
            return
        with contextlib.suppress(OSError):  # opening the database raises the error
            make_folder(self.path)  # before ``check_owner``: no other user can then create the folder after the check
        check_owner(self.path, self._use)
        self._open_files()
        try:
            # The folder is checked again, because other users who may write to it may have added files since the first check.
            check_owner(self.path, self._use)
        except BaseException:
            self._has_failed = True
            self._db.close()
            raise
        warn_if_others_have_rights(self.path, "whole messages")
        warn_if_replaceable(self.path, "the spool of this process")

    def _open_files(self) -> None:
        finish_repair(self.path)
        salvage_result = salvage(self.path) if self._is_damaged else None
        try:
            self._load(salvage_result)
        except Damaged as e:
            if salvage_result is not None:
                raise
            logger.error("%s; what can be read is kept", e.message)
            self._load(salvage(self.path))
        self._has_failed = self._is_damaged = False

    def _load(self, salvage_result: SalvageResult | None) -> None:
        db = Database(self.path)
        try:
            is_damaged = salvage_result is not None or recovery.needs_repair(db)
            migrate_keys(db, is_damaged)
            if is_damaged:
                self.damage_count += 1
                recovery.repair(db, salvage_result)
                recovery.restore_owner(db, self._owner, salvage_result)
            # The keys of leased records may have changed, by damage or by a write that took place although RocksDB reported a
            # failure.
            self._new_keys = recovery.pending_keys_of(db, self._leased_sequences)
            next_sequence = self.totals.next_sequence  # the sequence of a leased record is never reused
            self.totals = recovery.stored_totals(db) or Totals()
            self.totals.next_sequence = max(next_sequence, self.totals.next_sequence)
            self.last_done_due_ms = self.last_done_due_ms or self.totals.last_recorded_ms
            self._lanes = set(lanes_in(db))
            self._marks = Marks(db, bool(self._leased_sequences))
            self._pending = PendingIndex(db, self._leased_sequences)
        except BaseException as e:
            db.close()
            if isinstance(e, DecodeError):
                raise recovery.other_release_error(self.path, e) from e
            raise
        self._db = db

    def _add(self, requests: Sequence[AddRequest]) -> None:
        try:
            with self._opened_database:
                change = AtomicChange(self.totals)
                lanes = set(self._lanes) if any(request.has_lanes for request in requests) else self._lanes
                written_records: dict[tuple[bytes, bytes], StoredRecord] = {}  # records by their first mark
                for request in requests:
                    used_bytes = change.totals.all_bytes
                    if request.items and (problem := self._free_space.check(used_bytes, request.size)) is not None:
                        request.error = problem
                        continue
                    change.puts += request.notes
                    for index, (record, due_ms, data) in enumerate(request.items):
                        if record.marks and (duplicate := self._find_duplicate(record, written_records)) is not None:
                            written_records[record.marks[0]] = merged_record = change.merge_marks(duplicate, record)
                            self._marks.update_cache(merged_record.record)
                            self._marks.may_have_changed = True
                            continue
                        new_state = RecordState(0, record.stored_ms)
                        state = request.states[index] if request.states else new_state
                        sequence = change.add(record, data, state)
                        if not record.lane or record.lane not in lanes:
                            pending = record.pending_key(Due(due_ms, sequence), has_failed=state.tries > 0)
                            change.add_pending(pending, state.encode())
                        if record.lane:
                            lanes.add(record.lane)
                        if record.marks:
                            change.mark(record, Due(due_ms, sequence))
                            written_records[record.marks[0]] = StoredRecord(Due(due_ms, sequence), record, len(data))
                            self._marks.update_cache(record)
                if change.puts:
                    self._write(change, self._must_sync)
                    self._lanes = lanes
        except RocketMQError as e:
            for request in requests:
                request.error = request.error or e

    def _find_duplicate(
        self, record: Record, written_records: Mapping[tuple[bytes, bytes], StoredRecord]
    ) -> StoredRecord | None:
        """Return the record with the same first mark as ``record``, among ``written_records`` or in the store; None if there is
        none.
        """
        return written_records.get(record.marks[0]) or self._marks.find_record(record.marks[0])

    def _decode(self, pending: PendingKey, value: bytes, now_ms: int) -> LeasedRecord | None:
        due = pending.due
        data = self._db.get(record_key(RECORD, due.sequence)) or b""
        try:
            return LeasedRecord(pending, RecordState.decode(value), Record.decode(data), len(data))
        except DecodeError as e:
            logger.error("record %d of the spool in %s becomes a dead letter: %s", due.sequence, self.path, e)
            # A caller that takes all records passes a ``now_ms`` in the far future. Such a time must not be stored.
            now_ms = min(now_ms, max(due.due_ms, self.totals.last_recorded_ms))
            change = AtomicChange(self.totals)
            change.remove_pending(pending)
            change.add_dead(due.sequence, len(data), RecordState(0, now_ms, f"it cannot be read: {e.message}"))
            change.deletes += recovery.mark_keys_of(self._db, due.sequence) if self._marks.has_any_marks else ()
            lane = find_lane(self._db, due.sequence) if self._lanes else None
            if lane is not None and not remove_from_lane(self._db, change, lane, [due.sequence], now_ms):
                self._lanes.discard(lane)
            self._write(change)
            return None

    def _write(self, change: AtomicChange, sync: bool = False) -> None:
        try:
            if not change.totals.is_valid:
                self._db.write([], [TOTALS])  # the next call opens the database again, and counts all records
                raise SpoolError(
                    f"the totals of the spool in {self.path} are lower than its records, so the records are counted again"
                )
            self._db.write(change.all_puts, change.deletes, sync)
        except RocketMQError:
            self._has_failed = True
            raise
        self.totals = change.totals
        self.last_done_due_ms = max(self.last_done_due_ms, change.last_done_due_ms)
        self._pending.update(change.added_pending, change.removed_pending)


def _owner_remedy(path: Path, owner: SpoolOwner, stored_owner: SpoolOwner) -> str:
    """Return the remedy for a spool whose records belong to ``stored_owner``."""
    if stored_owner.purpose == owner.purpose or stored_owner == UNKNOWN_OWNER:
        return (
            "Give each cluster, namespace and environment a 'spoolDir' of its own. If the addresses of the cluster have changed, "
            "assign the records to the new addresses with: rocketmq-spark spool assign"
        )
    if stored_owner.purpose:
        return f"A node of that --group sends them: rocketmq-spark delay serve --data {shlex.quote(str(path))}"
    return (
        f"Give the node a folder of its own. Send the records with: rocketmq-spark spool send {shlex.quote(str(path))}"
    )


def _accept_all_targets(target: str) -> bool:
    return True


class _OpenedDatabase:
    """A context in which the caller has the lock of a store, and the store's database is open. After a failure, such as a full
    disk, RocksDB accepts no writes until it is reopened, and may have written more than it reported. A damaged database is
    repaired.

    All calls use one object of this class. A context made from a generator would take longer, and every addition enters this
    context.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        store = self._store
        store._lock.acquire()
        try:
            if store._is_closed:
                raise ClosedError("the spool is closed")
            if store._has_failed:
                store._db.close()
                store._open()
        except BaseException:
            store._lock.release()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, Damaged):
            self._store._has_failed = self._store._is_damaged = True
        elif error is not None and not isinstance(error, Exception):
            self._store._has_failed = True  # after Ctrl-C, memory and database may differ
        self._store._lock.release()
