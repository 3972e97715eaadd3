"""Decides when records are sent: after a failed attempt, after earlier records of their lane, and when their target answers.

Each step of ``Schedule`` is a pause that begins at a failure. After the last step, the record is given up.

``UnreachableTargets`` makes the records of a target due at once (an *early retry*) when the target answers again. A broker that
answers some requests and rejects others must not use up all attempts of a record in a moment. Therefore, after an early retry has
failed, the next early retry is delayed by the steps of the schedule. A delayed early retry does not wait for a further answer,
because there may be no other send that gets an answer.

Records of one lane are handled in the order in which they were stored, and only the first record is pending. Records that may be
sent together with the first record are handled with it. The next record becomes pending when all these records are settled.

A *mark* is an index entry by which a record is found. It is a pair of a *space*, which is the name of an index (such as the index
of one queue), and a *place*, which is the key of the record in this index. ``Marks`` is a driver over a ``Database``, and is used
under the lock of its store. It caches the first place of each space, because RocksDB would otherwise read all deleted entries
before that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.spool.changes import AtomicChange, StoredRecord
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    LAST_SEQUENCE,
    MARK,
    ORDER,
    RECORD,
    Due,
    PendingKey,
    Record,
    RecordState,
    Totals,
    area_end,
    decode_record,
    lane_key,
    lane_of,
    mark_key,
    pending_key,
    place_of,
    record_key,
    sequence_of,
    space_end,
)

RETRY_PAUSES_S = (3, 5, 30, 60, 120, 300, 480, 600, 900, 1800)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pauses in seconds. The first pause follows the failure that caused the record to be stored. Each further pause follows a
    failed attempt.
    """

    pauses_s: Sequence[float] = RETRY_PAUSES_S

    def due_ms(self, tries: int, now_ms: int) -> int | None:
        """Return when a record is due again if its ``tries``-th attempt fails at ``now_ms``; None if the record is given up."""
        if tries >= len(self.pauses_s):
            return None
        return now_ms + round(1000 * self.pauses_s[tries])


class SteadyClock:
    """A clock in ms since 1970 that advances evenly and never goes back, even if the machine's clock is set.

    The clock begins at the machine's time or at ``last_recorded_ms``, whichever is later. ``last_recorded_ms`` is the latest
    moment that an earlier process recorded. So records do not wait longer if the machine's clock was set back. If the machine's
    clock is set forward while no process runs, records become due.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], last_recorded_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = max(wall_ms(), last_recorded_ms) - monotonic_ms()

    def __call__(self) -> int:
        return self._monotonic_ms() + self._offset_ms


# After this time without a failure, the next failure of a target counts as its first.
FAILURE_MEMORY_MS = 1000 * RETRY_PAUSES_S[-1]


@dataclass(slots=True)
class _Outage:
    next_early_retry_ms: int
    last_failure_ms: int
    early_retries: int = 0
    has_early_retry: bool = False
    answered_ms: int | None = None  # the time of an answer after the last failure; None after an early retry


class UnreachableTargets:
    """The targets that failed. All times are in ms, of a clock that does not go back."""

    def __init__(self) -> None:
        self._outages: dict[str, _Outage] = {}
        self._all_failed_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._outages) or self._all_failed_ms is not None

    def assume_all_failed(self, now_ms: int) -> None:
        """Treat every target as failed, because an earlier process may have had failures."""
        self._all_failed_ms = now_ms

    def record_failure(self, target: str, now_ms: int, sent_ms: int | None = None) -> None:
        """Record that a send to ``target`` failed. The send began at ``sent_ms``, so answers after ``sent_ms`` still count."""
        outage = self._outages.get(target)
        if outage is None or now_ms - outage.last_failure_ms >= FAILURE_MEMORY_MS:
            self._outages[target] = _Outage(now_ms, now_ms)
            return
        if outage.has_early_retry:
            step = RETRY_PAUSES_S[min(outage.early_retries, len(RETRY_PAUSES_S)) - 1]
            outage.next_early_retry_ms, outage.has_early_retry = now_ms + 1000 * step, False
        outage.last_failure_ms = now_ms
        if outage.answered_ms is not None and (sent_ms is None or outage.answered_ms < sent_ms):
            outage.answered_ms = None

    def record_answers(self, targets: Iterable[str], now_ms: int) -> set[str]:
        """Record that ``targets`` answered. Returns all targets whose records become due now."""
        for target in targets:
            if target not in self._outages and self._all_failed_ms is not None:
                self.record_failure(target, self._all_failed_ms)
            if target in self._outages:
                self._outages[target].answered_ms = now_ms
        return self.start_early_retries(now_ms)

    def start_early_retries(self, now_ms: int) -> set[str]:
        """Start an early retry for each target that answered after its failure, unless the early retry is delayed. Returns the
        targets with an early retry.
        """
        due_targets = {
            target
            for target, outage in self._outages.items()
            if _waits_for_early_retry(outage) and outage.next_early_retry_ms <= now_ms
        }
        for target in due_targets:
            outage = self._outages[target]
            outage.has_early_retry, outage.early_retries = True, outage.early_retries + 1
        return due_targets

    def next_early_retry_ms(self) -> int | None:
        """Return the time of the next delayed early retry; None if no early retry is delayed."""
        return min(
            (outage.next_early_retry_ms for outage in self._outages.values() if _waits_for_early_retry(outage)),
            default=None,
        )

    def forget_failures(self) -> None:
        """Forget all failures. To be called when no record waits."""
        self._outages.clear()
        self._all_failed_ms = None


def _waits_for_early_retry(outage: _Outage) -> bool:
    return outage.answered_ms is not None and not outage.has_early_retry


# A function that is called with the first record of a lane, and returns a second function. The second function is called with
# each following record, and returns whether the record may be sent together with the first record and the records that were
# accepted before it.
BatchPredicate = Callable[[Record], Callable[[Record], bool]]


class BatchedRecord(NamedTuple):
    """A record that is sent together with the previous record of its lane. ``size`` counts towards the ``max_bytes`` of
    ``Store.take``. If the record was moved from another store, ``state`` has the failures in that store.
    """

    sequence: int
    record: Record
    size: int
    state: RecordState


class LeasedRecord(NamedTuple):
    """A record that was taken, with the records that are sent together with it. ``size`` counts towards the ``max_bytes`` of
    ``Store.take``.
    """

    pending: PendingKey
    state: RecordState
    record: Record
    size: int
    followers: tuple[BatchedRecord, ...] = ()

    @property
    def due(self) -> Due:
        return self.pending.due


_UNLIMITED_BATCH_LENGTH = 1024  # more records than any batch has


class BatchPolicy:
    """Decides which records of a lane are sent as one batch: those that ``predicate`` accepts, up to a maximum length. If a
    broker permanently rejects a batch, its records are sent one by one, to find the record that brokers reject. After a temporary
    failure, the next batch is half as long, because the failed batch may have been too long for the timeout of an attempt.
    """

    def __init__(self) -> None:
        self.predicate: BatchPredicate = send_alone
        self._single_sends_left: dict[bytes, int] = {}  # how many more records are sent alone, by lane
        self._max_batch_lengths: dict[bytes, int] = {}  # the length of the next batch after a failure, by lane

    def limited_predicate(self, first: Record) -> Callable[[Record], bool]:
        """Implements ``BatchPredicate``: ``predicate`` with the limits after failures."""
        if first.lane in self._single_sends_left:
            return send_alone(first)
        accepts, rest_of_batch = (
            self.predicate(first),
            iter(range(self._max_batch_lengths.get(first.lane, _UNLIMITED_BATCH_LENGTH) - 1)),
        )
        return lambda record: next(rest_of_batch, None) is not None and accepts(record)

    def record_result(self, lane: bytes, count: int, has_succeeded: bool, is_permanent: bool) -> None:
        """Record the result of ``count`` records that were sent together."""
        max_batch = self._max_batch_lengths.get(lane)
        if has_succeeded and max_batch is not None and count >= max_batch:
            self._max_batch_lengths[lane] = max_batch + max(1, max_batch // 8)
        if count > 1 and not has_succeeded:
            (self._single_sends_left if is_permanent else self._max_batch_lengths)[lane] = (
                count if is_permanent else count // 2
            )
        elif count == 1 and lane in self._single_sends_left and (has_succeeded or is_permanent):
            self._single_sends_left[lane] -= 1
            if not self._single_sends_left[lane]:
                del self._single_sends_left[lane]

    def forget_lane(self, lane: bytes) -> None:
        """Forget an empty lane. Without this, memory would grow, because there may be millions of lanes: one for each argument of
        a selector.
        """
        self._single_sends_left.pop(lane, None)
        self._max_batch_lengths.pop(lane, None)


def send_alone(first: Record) -> Callable[[Record], bool]:
    """Implements ``BatchPredicate``: each record is sent alone."""
    return lambda record: False


def lanes_in(db: Database) -> Iterator[bytes]:
    """Yield all lanes. Takes one seek per lane, however many records the lane has."""
    start = ORDER
    while (entry := next(db.scan(start, area_end(ORDER)), None)) is not None:
        lane = lane_of(entry[0])
        yield lane
        start = lane_key(lane, LAST_SEQUENCE)


def find_lane(db: Database, sequence: int) -> bytes | None:
    """The lane of a record that cannot be decoded."""
    for key, _ in db.scan(ORDER, area_end(ORDER)):
        if sequence_of(key) == sequence:
            return lane_of(key)
    return None


def records_to_batch(
    db: Database, sequence: int, first: Record, predicate: BatchPredicate
) -> tuple[BatchedRecord, ...]:
    """Return the records of a lane after its ``first`` record, up to the first record that ``predicate`` rejects. For a revived
    record, return no records, because it is in no lane.
    """
    lane = first.lane
    if not lane or db.get(lane_key(lane, sequence)) is None:
        return ()
    accepts, followers = predicate(first), []
    for key, value in db.scan(lane_key(lane, sequence + 1), lane_key(lane, LAST_SEQUENCE)):
        data = db.get(record_key(RECORD, sequence_of(key))) or b""
        record = decode_record(data)
        if not isinstance(record, Record) or not accepts(record):
            break
        followers.append(BatchedRecord(sequence_of(key), record, len(data), RecordState.decode_or_empty(value)))
    return tuple(followers)


def remove_from_lane(db: Database, change: AtomicChange, lane: bytes, sequences: Sequence[int], now_ms: int) -> bool:
    """Remove the first records of a lane, and make the next record pending and due now. Returns False if no record is left in the
    lane.
    """
    if not lane or db.get(lane_key(lane, sequences[0])) is None:
        return True
    change.deletes += [lane_key(lane, sequence) for sequence in sequences]
    for key, value in db.scan(lane_key(lane, sequences[-1] + 1), lane_key(lane, LAST_SEQUENCE)):
        next_sequence = sequence_of(key)
        record = decode_record(db.get(record_key(RECORD, next_sequence)))
        state = RecordState.decode_or_empty(value)._replace(state_since_ms=now_ms)
        change.add_pending(pending_key(record, Due(now_ms, next_sequence), has_failed=state.tries > 0), state.encode())
        return True
    return False


def current_record(db: Database, leased: LeasedRecord) -> tuple[Record, int]:
    """Return a leased record as it is stored now, and its size. Its marks may have changed since it was taken. The whole record
    may have changed if a write took place although it seemed to fail.
    """
    data = db.get(record_key(RECORD, leased.due.sequence)) or b""
    record = decode_record(data)
    return (record if isinstance(record, Record) else leased.record), len(data)


MAX_REMOVAL_BYTES = 8 << 20


class Marks:
    """The marks of one database. ``may_have_changed`` is true if the marks of records in flight may have changed."""

    def __init__(self, db: Database, may_have_changed: bool = False) -> None:
        self._db = db
        self._first_places: dict[bytes, bytes] = {}
        self.has_any_marks = next(db.scan(MARK, area_end(MARK)), None) is not None
        self.may_have_changed = may_have_changed

    def find(self, space: bytes, place: bytes) -> Due | None:
        """Return the due time and sequence of the record with this mark; None if there is no such record."""
        value = self._db.get(mark_key(space, place))
        return None if value is None else Due.parse(value)

    def find_record(self, mark: tuple[bytes, bytes]) -> StoredRecord | None:
        """Return the record with this mark; None if there is no such record, or if it cannot be read."""
        if (due := self.find(*mark)) is None:
            return None
        data = self._db.get(record_key(RECORD, due.sequence))
        record = decode_record(data)
        return StoredRecord(due, record, len(data or b"")) if isinstance(record, Record) else None

    def first_place(self, space: bytes) -> bytes | None:
        """Return the first place of a space; None if the space has no records."""
        for place, _ in self.scan(space, self._first_places.get(space)):
            self._first_places[space] = place
            return place
        self._first_places.pop(space, None)
        return None

    def scan(self, space: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, Due]]:
        """Yield the places of a space in order, each with the due time and sequence of its record."""
        for key, value in self._db.scan(mark_key(space, start or b""), space_end(space)):
            yield place_of(key), Due.parse(value)

    def removal(
        self, marks: Sequence[tuple[bytes, bytes]], totals: Totals
    ) -> tuple[AtomicChange, Sequence[tuple[bytes, bytes]]]:
        """Return a change that removes as many of the first ``marks`` as fit into one write. Also return the remaining marks.
        No two of the marks may belong to the same record.
        """
        self.may_have_changed = True
        change, size = AtomicChange(totals), 0
        for index, mark in enumerate(marks):
            if size >= MAX_REMOVAL_BYTES:
                return change, marks[index:]
            if (due := self.find(*mark)) is not None:
                data = self._db.get(record_key(RECORD, due.sequence))
                change.remove_mark(due.sequence, data, mark)
                size += len(data or b"")
        return change, ()

    def update_cache(self, record: Record) -> None:
        """Update the cache after a record was added, or has got further marks."""
        self.has_any_marks = True
        for space, place in record.marks:
            first_place = self._first_places.get(space)
            if first_place is not None and place < first_place:
                self._first_places[space] = place
