"""Stores records that are due later until they are settled. The store does not interpret their content.

One lock guards one ``Database``. Every step is one atomic write, so that a process may be killed at
any point. Taking a record *leases* it: the lease is in memory, so it ends with its process, and the record is still due.
Only additions wait for the disk (``sync``); if a power cut undoes a settlement, it is repeated: at least once.

In a *lane* only the first record is pending. The next one follows after the first is finally settled.
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

from rocketmq_spark.base.folders import warn_if_open, warn_if_replaceable
from rocketmq_spark.errors import ClosedError, DecodeError, RocketMQError, SpoolError
from rocketmq_spark.spool import recovery
from rocketmq_spark.spool.changes import AtomicChange, GroupCommit, StoredRecord, Ticket
from rocketmq_spark.spool.database import Damaged, Database, occupy
from rocketmq_spark.spool.files import OWNERS, SENT, CopyUse, FreeSpace, check_owner, make_folder
from rocketmq_spark.spool.lanes import Joins, Marks, Work, followers, kept, lane_with, lanes, leave
from rocketmq_spark.spool.pending import PendingIndex, migrate
from rocketmq_spark.spool.records import (
    IDENTITY,
    LOST_OWNER,
    NOTE,
    OWNER,
    PENDING,
    RECORD,
    TARGETING,
    TOTALS,
    Dead,
    Done,
    Due,
    PendingPlace,
    Record,
    RecordState,
    Replaced,
    RetryLater,
    SpoolOwner,
    Totals,
    Verdict,
    behind,
    behind_group,
    decoded,
    due_in,
    group_of,
    numbered,
)
from rocketmq_spark.spool.recovery import Salvaged, finish, salvage
from rocketmq_spark.spool.turns import Turns

logger = logging.getLogger(__name__)

REVIVED_AT_ONCE, REVIVED_BYTES = 1000, 8 << 20
RETARGETED_BYTES = 4 << 20


class Store:
    """The records of one folder.

    ``sync`` is ``always`` (each call of ``add`` waits for its own flush), ``batch`` (calls of several threads wait for one flush)
    or ``never``. ``max_bytes`` limits all records, dead ones included. ``damages`` counts how often damage was found.
    Files of another user are an error. With ``any_owner`` they are not; the caller must have called
    ``owner_rights.become_owner``. The error recommends a copy, and names the ``use`` of the copy.
    """

    def __init__(
        self,
        path: Path,
        sync: str = "always",
        max_bytes: int | None = None,
        any_owner: bool = False,
        use: CopyUse = SENT,
    ) -> None:
        self.path = path.absolute()
        self._use = use
        self._sync, self._space = sync != "never", FreeSpace(self.path, max_bytes)
        self._any_owner = any_owner
        self._lock = threading.RLock()
        self._group = GroupCommit(self._lock, self._add, together=sync == "batch")
        self._leased: set[int] = set()
        # New places of records that were out when damage was found; None for one whose result must not be stored.
        self._moved: dict[int, PendingPlace | None] = {}
        self.totals = Totals()
        # The latest original due time of the records that ended; when it was opened, the latest moment that was recorded.
        self.ended_ms = 0
        self._owner: SpoolOwner | None = None
        self._failed = self._damaged = self._closed = False
        self.damages = 0
        self._ready = _Ready(self)
        occupy(self)
        try:
            self._open()
        except BaseException:
            OWNERS.discard(self)
            raise

    def __len__(self) -> int:
        """The number of records that are neither settled nor dead."""
        return self.totals.depth

    def holds(self, lane: bytes) -> bool:
        """Whether the lane has a record that is not settled yet."""
        return lane in self._lanes

    def add(
        self,
        records: Sequence[tuple[Record, int]],
        notes: Mapping[bytes, bytes] | None = None,
        states: Sequence[RecordState] | None = None,
    ) -> None:
        """Store records, each with its due time (ms since 1970), and ``notes``. On return, both are as durable as ``sync`` says.
        A record whose first mark belongs to a stored record is not stored; that record gets its marks in further spaces.
        ``states`` are those of the records in another store.

        Writes all or nothing. Raises ``SpoolFull`` beyond ``max_bytes`` or if the disk is nearly full, ``SpoolError`` if writing
        fails.
        """
        self._group.put(Ticket(records, notes, states))

    def notes(self) -> dict[bytes, bytes]:
        """The latest notes by name."""
        with self._ready:
            return {key[len(NOTE) :]: value for key, value in self._db.scan(NOTE, behind(NOTE))}

    def places(self, space: bytes, start: bytes | None = None, limit: int = 1) -> list[bytes]:
        """The first places in a space of marks, of records that are not settled; from ``start`` on, if given."""
        with self._ready:
            if start is None:
                first = self._marks.first(space)
                return [] if first is None else [first]
            return [place for place, _ in itertools.islice(self._marks.all(space, start), limit)]

    def free(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Remove marks from records, and return how many. The records stay, and are found by their other marks."""
        with self._ready:
            count, rest = 0, marks
            while rest:
                change, rest = self._marks.freed(rest, self.totals)
                self._write(change)
                count += len(change.deletes)
            return count

    def forget(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Drop records by one of their marks, and return how many of them were not leased. What is settled for a leased one later
        changes nothing. Such records have no lane.
        """
        return self._forget(marks, lambda record, mark: False)

    def hand_over(self, marks: Sequence[tuple[bytes, bytes]]) -> int:
        """Like ``forget``, but a record that has a mark in a further space, besides its identity, only loses the given mark."""

        def stays(record: Record, mark: tuple[bytes, bytes]) -> bool:
            return any(other != mark and other[0] != IDENTITY for other in record.marks)

        return self._forget(marks, stays)

    def _forget(
        self, marks: Sequence[tuple[bytes, bytes]], stays: Callable[[Record, tuple[bytes, bytes]], bool]
    ) -> int:
        with self._ready:
            change, gone, freed = AtomicChange(self.totals), set(), []
            for mark in marks:
                due = self._marks.known(*mark)
                if due is None or due.sequence in gone:
                    continue
                data = self._db.get(numbered(RECORD, due.sequence)) or b""
                if isinstance(record := decoded(data), Record):
                    if stays(record, mark):
                        freed.append(mark)
                        continue
                    change.unmark(record)
                    pending = self._pending.find(record.target, due)
                else:
                    change.deletes += recovery.marks_with(self._db, due.sequence)
                    pending = None
                pending = pending or recovery.pending_now(self._db, [due.sequence])[due.sequence]
                if pending is not None:
                    change.unpend(pending)
                change.finish(due.sequence, len(data))
                gone.add(due.sequence)
            if change.deletes:
                self._write(change)
            self.free(freed)
            self._moved |= dict.fromkeys(gone & self._leased)
            return len(gone - self._leased)

    def take(
        self, now_ms: int, limit: int, max_bytes: int = 1 << 62, joins: Joins | None = None, turns: Turns | None = None
    ) -> list[Work]:
        """Take the first due records that are not leased, of the targets that ``turns`` accepts, at most ``limit`` and
        ``max_bytes``, each with the records that ``joins`` accepts.

        The caller must settle each of them. A record that cannot be read becomes a dead letter, unchanged, with the reason.
        """
        with self._ready:
            taken: list[Work] = []
            size = 0
            accepts = _always if turns is None else turns.accepts
            try:
                with contextlib.closing(self._pending.due(now_ms, accepts)) as due:
                    for pending, value in due:
                        if (work := self._read(pending, value, now_ms)) is not None:
                            if joins is not None:
                                sent_with_it = followers(self._db, pending.due.sequence, work.record, joins)
                                work = work._replace(behind=sent_with_it)
                            if turns is not None:
                                turns.took(pending.target, work.size)
                            taken.append(work)
                            size += work.size
                        if size >= max_bytes or len(taken) >= limit:
                            break
            except BaseException:
                self._failed = True  # the index has passed the records that were taken
                raise
            self._leased.update([work.pending.due.sequence for work in taken])
            return taken

    def is_kept(self, work: Work) -> bool:
        """Whether the store still waits for the result of a taken record."""
        with self._lock:
            return self._moved.get(work.pending.due.sequence, work.pending) is not None

    def settle(self, outcomes: Sequence[tuple[Work, Verdict]], now_ms: int) -> None:
        """Write the results of taken records, all in one write. Records that were sent with one are settled if that one is
        ``Done``; otherwise they wait in their lane as before.
        """
        with self._ready:
            change = AtomicChange(self.totals)
            change.totals.last_ms = max(now_ms, self.totals.last_ms)
            left = []
            for work, verdict in outcomes:
                sequence, tries = work.pending.due.sequence, work.state.tries + 1
                if (pending := self._moved.get(sequence, work.pending)) is None:
                    continue  # forgotten, lost by damage, or a repair recovered an earlier record of its lane
                record, size = kept(self._db, work) if self._marks.changed else (work.record, work.size)
                if isinstance(verdict, RetryLater):
                    state = RecordState(tries, now_ms, verdict.reason)
                    change.retry(record, pending, Due(verdict.due_ms, sequence), state)
                    continue
                if isinstance(verdict, Replaced):
                    instead = dataclasses.replace(verdict.record, marks=record.marks)
                    failed = pending.waits or work.state.tries > 0
                    due, state = pending.due, work.state
                    if verdict.reason is not None:
                        # Not counted again if the same write took place before, although it seemed to fail.
                        change.totals.give_ups += instead != record
                        due = Due(max(now_ms, record.first_due_ms or 0), sequence)
                        failed, state = False, RecordState(0, now_ms, verdict.reason)
                    change.replace(pending, instead, size, instead.pending(due, failed), state.encode())
                    continue
                change.unpend(pending)
                change.unmark(record)
                if isinstance(verdict, Dead):
                    if verdict.record is not None:
                        size = change.rewrite(sequence, dataclasses.replace(verdict.record, marks=record.marks), size)
                    change.bury(
                        sequence, size, RecordState(tries, now_ms, verdict.reason), counts=verdict.record is None
                    )
                else:
                    change.finish(sequence, size)
                gone = [sequence]
                for other in work.behind if isinstance(verdict, Done) else ():
                    if self._db.get(numbered(RECORD, other.sequence)) is not None:  # it may be lost by damage
                        change.unmark(other.record)
                        change.finish(other.sequence, other.size)
                    gone.append(other.sequence)
                if not leave(self._db, change, work.record.lane, gone, now_ms):
                    left.append(work.record.lane)
            self._write(change)
            self._lanes.difference_update(left)
            ended = {work.pending.due.sequence for work, _ in outcomes}
            self._leased -= ended
            self._moved = {sequence: due for sequence, due in self._moved.items() if sequence not in ended}

    def hasten(self, target: str | None, start: bytes | None, limit: int, now_ms: int) -> bytes | None:
        """Make records that wait for ``target`` (None: all) due now, but not before their original due time. Examines ``limit``
        records from ``start`` on.

        Returns where to continue, or None after the last record.
        """
        with self._ready:
            change, goes_on, marked = AtomicChange(self.totals), None, self._marks.used
            groups = self._pending.groups() if target is None else [group_of(target, True)]
            with contextlib.closing(self._later(groups, start, now_ms)) as entries:
                for seen, (key, state) in enumerate(entries):
                    if seen >= limit:
                        goes_on = key
                        break
                    if (sequence := due_in(key).sequence) not in self._leased:
                        data = self._db.get(numbered(RECORD, sequence)) if marked else None
                        change.hasten(PendingPlace.parse(key), now_ms, state, data)
            if change.puts:
                self._write(change)
            return goes_on

    def _later(
        self, groups: Iterable[bytes], start: bytes | None, now_ms: int
    ) -> Generator[tuple[bytes, bytes], None, None]:
        """The pending entries of ``groups`` from ``start`` on that are due after ``now_ms``."""
        for group in groups:
            if start is None or start < behind_group(group):
                first = max(start or b"", group + Due(now_ms + 1, 0).packed)
                with contextlib.closing(self._db.scan(first, behind_group(group))) as entries:
                    yield from entries

    def begin_targeting(self, rules: bytes) -> None:
        """Note that new records have targets by ``rules``. Records that already wait get such targets from ``retarget``."""
        with self._ready:
            if not self.has_targets_by(rules):
                # Before this process stores a record. Otherwise, if it is killed, a later process with the previous rules would
                # find its own fingerprint, and not compare the targets.
                self.add([], {TARGETING: b"" if len(self) else rules})

    def has_targets_by(self, rules: bytes) -> bool:
        """Whether all pending records certainly have their targets by ``rules``."""
        with self._ready:
            return self._db.get(NOTE + TARGETING) == rules

    def retarget(
        self,
        target_of: Callable[[Record], str],
        start: bytes | None,
        limit: int,
        kind: str | None = None,
        now_ms: int = 0,
    ) -> bytes | None:
        """Give pending records the targets that ``target_of`` returns. Due times stay, but a record of ``kind`` whose target
        changes becomes due now, or at its original due time if that is later. Examines ``limit`` records, or about
        ``RETARGETED_BYTES``, from ``start`` on. Leased records are skipped: their handlers compare the targets.

        Returns where to continue, or None after the last record.
        """
        with self._ready:
            change, goes_on, size = AtomicChange(self.totals), None, 0
            with contextlib.closing(self._db.scan(start or PENDING, behind(PENDING))) as entries:
                for seen, (key, state) in enumerate(entries):
                    if seen >= limit or size >= RETARGETED_BYTES:
                        goes_on = key
                        break
                    place = PendingPlace.parse(key)
                    data = self._db.get(numbered(RECORD, place.due.sequence)) or b""
                    record, size = decoded(data), size + len(data)
                    if place.due.sequence in self._leased or not isinstance(record, Record):
                        continue
                    if (target := target_of(record)) != record.target:
                        instead = dataclasses.replace(record, target=target)
                        due, failed = place.due, RecordState.known(state).tries > 0
                        if record.kind == kind:
                            due = min(due, Due(max(now_ms, record.first_due_ms or 0), due.sequence))
                        change.replace(place, instead, len(data), instead.moved(place, due, failed), state)
            if change.puts:
                self._write(change)
            return goes_on

    def next_due_ms(self, without: Collection[str] = ()) -> int | None:
        """The first due time of records that are not leased, except those of targets in ``without``."""
        with self._ready:
            return self._pending.first_due_ms(without)

    def due_targets(self, targets: Collection[str], now_ms: int) -> list[str]:
        """Those of ``targets`` that have due records that are not leased."""
        with self._ready:
            return self._pending.due_targets(targets, now_ms)

    def revive(self, now_ms: int, target_of: Callable[[Record], str] = operator.attrgetter("target")) -> int:
        """Make readable dead records pending again for ``target_of``, with all attempts and in no order. Returns how many."""
        with self._ready:
            before, change = len(self), AtomicChange(self.totals)
            for sequence, record, size in recovery.dead_ones(self._db):
                if isinstance(record, Record):
                    target = target_of(record)
                    change.revive(sequence, record, size, target)
                    due = Due(max(now_ms, record.first_due_ms or 0), sequence)
                    # Before its original due time, an answer of its target must not make it due.
                    place = dataclasses.replace(record, target=target).pending(due, failed=due.due_ms <= now_ms)
                    change.pend(place, RecordState(0, now_ms).encode())
                revived_bytes = change.totals.size - self.totals.size
                if len(change.puts) >= REVIVED_AT_ONCE or revived_bytes >= REVIVED_BYTES:  # there may be millions
                    self._write(change)
                    change = AtomicChange(self.totals)
            self._write(change)
            return len(self) - before

    def belong(self, owner: SpoolOwner, force: bool = False, lent: bool = False) -> None:
        """Set the owner of the records. Raises ``SpoolError`` if they belong to another owner, unless ``force`` reassigns them.
        With ``lent``, the stored owner is not changed.
        """
        with self._ready:
            held = recovery.owner_in(self._db)
            if self.totals.all_bytes and not force and not owner.is_same(held):
                raise SpoolError(
                    f"the spool in {self.path} holds records of {held}, not of {owner}",
                    remedy=_remedy(self.path, owner, held),
                )
            self._owner = owner = held if lent and self.totals.all_bytes and held != SpoolOwner() else owner
            if held != owner:
                puts, deletes = owner.doubts(self._db.scan(NOTE, behind(NOTE)), held, force)
                self._db.write([(key, owner.encode()) for key in OWNER] + puts, deletes, sync=self._sync)

    def verify(self) -> None:
        """Read everything, and repair damage that is found."""
        try:
            self._read_all()
        except Damaged:
            self._read_all()  # of the repaired database

    def _read_all(self) -> None:
        with self._ready:
            for _ in self._db.scan(*recovery.ALL_KEYS):
                pass

    def close(self) -> None:
        """Release the folder; leased records are due for its next user."""
        with self._lock:
            self._closed = True
            self._db.close()
            OWNERS.discard(self)

    def _open(self) -> None:
        if self._any_owner:
            self._open_files()
            return
        with contextlib.suppress(OSError):  # opening it raises the error
            make_folder(self.path)  # before the check, so that no other user can create the folder after it
        check_owner(self.path, self._use)
        self._open_files()
        try:
            check_owner(self.path, self._use)  # again: if others may write there, they may have added files meanwhile
        except BaseException:
            self._failed = True
            self._db.close()
            raise
        warn_if_open(self.path, "whole messages")
        warn_if_replaceable(self.path, "the spool of this process")

    def _open_files(self) -> None:
        finish(self.path)
        salvaged = salvage(self.path) if self._damaged else None
        try:
            self._load(salvaged)
        except Damaged as e:
            if salvaged is not None:
                raise
            logger.error("%s; what can be read is kept", e.message)
            self._load(salvage(self.path))
        self._failed = self._damaged = False

    def _load(self, salvaged: Salvaged | None) -> None:
        db = Database(self.path)
        try:
            damaged = salvaged is not None or recovery.needs_repair(db)
            migrate(db, damaged)
            if damaged:
                self.damages += 1
                recovery.repair(db, salvaged)
                recovery.name_owner(db, self._owner, salvaged)
            # After damage, or after a write that took place although RocksDB reported a failure.
            self._moved = recovery.pending_now(db, self._leased)
            known = self.totals.next_sequence  # never reuse a sequence of a record that is out
            self.totals = recovery.stored_totals(db) or Totals()
            self.totals.next_sequence = max(known, self.totals.next_sequence)
            self.ended_ms = self.ended_ms or self.totals.last_ms
            self._lanes = set(lanes(db))
            self._marks = Marks(db, bool(self._leased))
            self._pending = PendingIndex(db, self._leased)
        except BaseException as e:
            db.close()
            if isinstance(e, DecodeError):
                raise recovery.of_another_release(self.path, e) from e
            raise
        self._db = db

    def _add(self, tickets: Sequence[Ticket]) -> None:
        try:
            with self._ready:
                change = AtomicChange(self.totals)
                lanes = set(self._lanes) if any(t.laned for t in tickets) else self._lanes
                written: dict[tuple[bytes, bytes], StoredRecord] = {}  # by first mark
                for ticket in tickets:
                    held = change.totals.all_bytes
                    if ticket.items and (problem := self._space.problem(held, ticket.size)) is not None:
                        ticket.error = problem
                        continue
                    change.puts += ticket.notes
                    for at, (record, due_ms, data) in enumerate(ticket.items):
                        if record.marks and (first := self._same(record, written)) is not None:
                            written[record.marks[0]] = joined = change.join(first, record)
                            self._marks.added(joined.record)
                            self._marks.changed = True
                            continue
                        new = RecordState(0, record.stored_ms)
                        state = ticket.states[at] if ticket.states else new
                        sequence = change.add(record, data, state)
                        if not record.lane or record.lane not in lanes:
                            place = record.pending(Due(due_ms, sequence), failed=state.tries > 0)
                            change.pend(place, state.encode())
                        if record.lane:
                            lanes.add(record.lane)
                        if record.marks:
                            change.mark(record, Due(due_ms, sequence))
                            written[record.marks[0]] = StoredRecord(Due(due_ms, sequence), record, len(data))
                            self._marks.added(record)
                if change.puts:
                    self._write(change, self._sync)
                    self._lanes = lanes
        except RocketMQError as e:
            for ticket in tickets:
                ticket.error = ticket.error or e

    def _same(self, record: Record, written: Mapping[tuple[bytes, bytes], StoredRecord]) -> StoredRecord | None:
        """The record with the same first mark, which was stored before or is ``written`` now."""
        return written.get(record.marks[0]) or self._marks.record_with(record.marks[0])

    def _read(self, pending: PendingPlace, value: bytes, now_ms: int) -> Work | None:
        due = pending.due
        data = self._db.get(numbered(RECORD, due.sequence)) or b""
        try:
            return Work(pending, RecordState.decode(value), Record.decode(data), len(data))
        except DecodeError as e:
            logger.error("record %d of the spool in %s becomes a dead letter: %s", due.sequence, self.path, e)
            now_ms = min(now_ms, max(due.due_ms, self.totals.last_ms))  # adoption takes at the end of time
            change = AtomicChange(self.totals)
            change.unpend(pending)
            change.bury(due.sequence, len(data), RecordState(0, now_ms, f"it cannot be read: {e.message}"))
            change.deletes += recovery.marks_with(self._db, due.sequence) if self._marks.used else ()
            lane = lane_with(self._db, due.sequence) if self._lanes else None
            if lane is not None and not leave(self._db, change, lane, [due.sequence], now_ms):
                self._lanes.discard(lane)
            self._write(change)
            return None

    def _write(self, change: AtomicChange, sync: bool = False) -> None:
        try:
            if not change.totals.are_possible:
                self._db.write([], [TOTALS])  # the next call opens the database again, and counts
                raise SpoolError(
                    f"the totals of the spool in {self.path} are lower than its records; these are counted again"
                )
            self._db.write(change.all_puts, change.deletes, sync)
        except RocketMQError:
            self._failed = True
            raise
        self.totals = change.totals
        self.ended_ms = max(self.ended_ms, change.ended_ms)
        self._pending.changed(change.pended, change.unpended)


def _remedy(path: Path, owner: SpoolOwner, held: SpoolOwner) -> str:
    """What to do with a spool whose records belong to ``held``."""
    if held.purpose == owner.purpose or held == LOST_OWNER:
        return (
            "Give each cluster, namespace and environment a 'spoolDir' of its own. A cluster whose addresses are others now "
            "gets its records with: rocketmq-spark spool assign"
        )
    if held.purpose:
        return f"A node of that --group sends them: rocketmq-spark delay serve --data {shlex.quote(str(path))}"
    return f"Give the node a folder of its own. The records are sent with: rocketmq-spark spool send {shlex.quote(str(path))}"


def _always(target: str) -> bool:
    return True


class _Ready:
    """Holds the lock of a store, and ensures that its database works. After a failure, such as a full disk, RocksDB accepts no
    writes until it is reopened, and may have written more than it reported. A damaged database is repaired.

    One object serves all calls, and is no generator, because every addition enters it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        store = self._store
        store._lock.acquire()
        try:
            if store._closed:
                raise ClosedError("the spool is closed")
            if store._failed:
                store._db.close()
                store._open()
        except BaseException:
            store._lock.release()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, Damaged):
            self._store._failed = self._store._damaged = True
        elif error is not None and not isinstance(error, Exception):
            self._store._failed = True  # after Ctrl-C, memory may differ from what was written
        self._store._lock.release()
