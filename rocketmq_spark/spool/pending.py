"""Finds the pending records of a store by target and due time.

The key of a pending record begins with its target, so that the records of an unavailable target are neither read nor rewritten
while others are due. Each target has two *groups* of pending records: the records that wait for an answer of the target, and the
records that wait only for their due time. ``PendingIndex`` keeps in memory the first due time of each group, and merges the
groups by due time.

``migrate_keys`` replaces the keys of earlier releases, which have no target. It writes portions, each in one atomic write; if
the process is killed, the next process continues. Earlier releases would not find records with a target in the key, so the
totals get a version that earlier releases reject.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator

from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    PENDING,
    RECORD,
    TOTALS,
    UNINDEXED,
    Due,
    PendingKey,
    Record,
    RecordState,
    Totals,
    area_end,
    due_of_key,
    group_end,
    group_of,
    record_key,
    target_of,
)

logger = logging.getLogger(__name__)


class PendingIndex:
    """The pending records of one database, except the leased records. This index is used under the lock of its store.

    For each group, the index has a due time that is not after the due time of the group's first record. A scan begins at this due
    time, because RocksDB would otherwise read all deleted entries before the first record. Groups in ``_inexact_groups`` may have
    no record at this due time.
    """

    def __init__(self, db: Database, leased_sequences: Collection[int]) -> None:
        self._db = db
        self._leased_sequences = leased_sequences
        self._first_due: dict[bytes, Due] = {}
        self._heap: list[tuple[Due, bytes]] = []  # an entry is valid if ``_first_due`` has its due time
        self._heap_entries: set[tuple[Due, bytes]] = set()  # the entries of the heap, which has each entry once
        self._inexact_groups: set[bytes] = set()
        # The next entry of each group, which ``due_entries`` has already read.
        self._entries_read_ahead: dict[bytes, tuple[Due, bytes] | None] = {}
        for key in _group_keys(db):
            pending = PendingKey.parse(key)
            self._set_first_due(pending.group, pending.due)
            if pending.due.sequence in leased_sequences:
                self._inexact_groups.add(pending.group)

    def groups(self) -> list[bytes]:
        """All groups, in the order of their keys."""
        return sorted(self._first_due)

    def update(self, added: Iterable[PendingKey], removed: Iterable[PendingKey]) -> None:
        """Update the index after a write. After the write, the ``added`` records are pending, and the ``removed`` records are
        not.
        """
        for target, waits_for_answer, due in removed:
            if self._first_due.get(group := group_of(target, waits_for_answer)) == due:
                self._inexact_groups.add(group)
        for target, waits_for_answer, due in added:
            first_due = self._first_due.get(group := group_of(target, waits_for_answer))
            self._entries_read_ahead.pop(group, None)  # ``due_entries`` must scan anew to find this record
            if first_due is None or due <= first_due:
                self._inexact_groups.discard(group)
                if due != first_due:
                    self._set_first_due(group, due)

    def first_due_ms(self, excluded_targets: Collection[str] = ()) -> int | None:
        """Return the first due time of all targets except ``excluded_targets``."""
        skipped_entries = []
        try:
            while (first_entry := self._first_entry()) is not None:
                due, group = first_entry
                if excluded_targets and target_of(group) in excluded_targets:
                    skipped_entries.append(heapq.heappop(self._heap))
                elif group in self._inexact_groups:
                    self._inexact_groups.discard(group)
                    self._replace_first(
                        group, next((next_first_due for next_first_due, _ in self._scan(group, due)), None)
                    )
                else:
                    return due.due_ms
            return None
        finally:
            for entry in skipped_entries:
                heapq.heappush(self._heap, entry)

    def due_entries(self, now_ms: int, accepts: Callable[[str], bool]) -> Generator[tuple[PendingKey, bytes]]:
        """Yield the due records, with their states, in the order of their due times. The caller must lease these records. Records
        of targets that ``accepts`` rejects are not read.
        """
        targets_and_waits: dict[bytes, tuple[str, bool]] = {}
        scans: dict[bytes, Iterator[tuple[Due, bytes]]] = {}
        skipped_entries = []
        try:
            while (first_entry := self._first_entry()) is not None and first_entry[0][0] <= now_ms:
                first_due, group = first_entry
                if (target_and_waits := targets_and_waits.get(group)) is None:
                    target_and_waits = targets_and_waits[group] = target_of(group), group[-1] != 0
                if not accepts(target_and_waits[0]):
                    skipped_entries.append(heapq.heappop(self._heap))
                    continue
                entry = self._entries_read_ahead.get(group)
                if entry is None or entry[0] != first_due:  # no scan is open, or the open scan is out of date
                    scans[group] = self._scan(group, first_due)
                    entry = next(scans[group], None)
                    self._inexact_groups.discard(group)
                if entry is None or entry[0] != first_due:  # the first record was deleted
                    self._entries_read_ahead[group] = entry
                    self._replace_first(group, None if entry is None else entry[0])
                    continue
                next_entry = self._entries_read_ahead[group] = next(scans[group], None)
                self._replace_first(group, None if next_entry is None else next_entry[0])
                yield PendingKey(*target_and_waits, first_due), entry[1]
        finally:
            self._entries_read_ahead.clear()
            for skipped_entry in skipped_entries:
                heapq.heappush(self._heap, skipped_entry)

    def due_targets(self, targets: Collection[str], now_ms: int) -> list[str]:
        """The ``targets`` that have due records."""
        return [
            target
            for target in targets
            if any(self._is_due(group_of(target, waits_for_answer), now_ms) for waits_for_answer in (True, False))
        ]

    def find(self, target: str, due: Due) -> PendingKey | None:
        """The key of the record of ``target`` with this due time."""
        keys = (PendingKey(target, waits_for_answer, due) for waits_for_answer in (False, True))
        return next((key for key in keys if self._db.get(key.encoded) is not None), None)

    def _is_due(self, group: bytes, now_ms: int) -> bool:
        first_due = self._first_due.get(group)
        if first_due is not None and first_due.due_ms <= now_ms and group in self._inexact_groups:
            first_due = next((due for due, _ in self._scan(group, first_due)), None)
        return first_due is not None and first_due.due_ms <= now_ms

    def _scan(self, group: bytes, first_due: Due) -> Iterator[tuple[Due, bytes]]:
        for key, value in self._db.scan(group + first_due.key_suffix, group_end(group)):
            due = due_of_key(key)
            if due.sequence not in self._leased_sequences:
                yield due, value

    def _first_entry(self) -> tuple[Due, bytes] | None:
        """Return the first valid entry of the heap; None if there is none."""
        heap = self._heap
        while heap:
            first_entry = heap[0]
            if self._first_due.get(first_entry[1]) == first_entry[0]:
                return first_entry
            self._heap_entries.discard(heapq.heappop(heap))
        return None

    def _set_first_due(self, group: bytes, due: Due) -> None:
        self._first_due[group] = due
        self._push((due, group))

    def _replace_first(self, group: bytes, due: Due | None) -> None:
        """Remove the first entry of the heap, which belongs to ``group``. Then add an entry for ``due``, unless ``due``
        is None.
        """
        self._heap_entries.discard(heapq.heappop(self._heap))
        if due is None:
            del self._first_due[group]
        else:
            self._set_first_due(group, due)

    def _push(self, entry: tuple[Due, bytes]) -> None:
        """Add an entry to the heap, unless it is already there. An old entry stays in the heap when an earlier record becomes the
        first record of its group.
        """
        if entry not in self._heap_entries:
            self._heap_entries.add(entry)
            heapq.heappush(self._heap, entry)


def _group_keys(db: Database) -> Iterator[bytes]:
    """Yield the first key of each group. Takes one seek per group, however many records the group has."""
    start = PENDING
    while (entry := next(db.scan(start, area_end(PENDING)), None)) is not None:
        yield entry[0]
        start = group_end(PendingKey.parse(entry[0]).group)


def all_pending_entries(db: Database) -> Iterator[tuple[bytes, bytes]]:
    """Yield all keys of pending records with their states, also the keys that releases before 0.2 wrote."""
    yield from db.scan(UNINDEXED, area_end(UNINDEXED))
    yield from db.scan(PENDING, area_end(PENDING))


def first_due_ms(db: Database) -> int | None:
    """The first due time of all pending records."""
    first_unindexed_entry = next(db.scan(UNINDEXED, area_end(UNINDEXED)), None)
    first_keys = [*_group_keys(db), *((first_unindexed_entry[0],) if first_unindexed_entry is not None else ())]
    return min((due_of_key(key).due_ms for key in first_keys), default=None)


PORTION_KEYS = 1000


def is_indexed(db: Database) -> bool:
    """Whether a store has no key of a release before 0.2."""
    return next(db.scan(UNINDEXED, area_end(UNINDEXED)), None) is None


def migrate_keys(db: Database, is_damaged: bool = False) -> None:
    """Add the targets to the keys of pending records that an earlier release wrote. The version of a damaged store's totals is
    not changed, so that the next process repairs the store if this process is killed before the repair.
    """
    if is_indexed(db):
        return
    logger.info("the spool in %s gets an index of its records by target, once", db.path)
    totals, moved_count, start = db.get(TOTALS), 0, UNINDEXED
    version_puts = [] if is_damaged or totals is None else [(TOTALS, Totals.with_indexed_version(totals))]
    while portion := list(itertools.islice(db.scan(start, area_end(UNINDEXED)), PORTION_KEYS)):
        puts = [(_indexed_key(db, key, state).encoded, state) for key, state in portion]
        db.write(puts + version_puts, [key for key, _ in portion])
        moved_count += len(portion)
        start = portion[-1][0] + b"\0"
    logger.info("the index of the spool in %s has %d records", db.path, moved_count)


def _indexed_key(db: Database, key: bytes, state: bytes) -> PendingKey:
    due = due_of_key(key)
    if target := RecordState.legacy_target(state):
        return PendingKey(target, True, due)
    has_failed = RecordState.decode_or_empty(state).tries > 0
    return Record.pending_key_of_data(db.get(record_key(RECORD, due.sequence)) or b"", due, has_failed)
