"""When records are sent: after a failed attempt, after earlier records of their lane, and when their target answers.

The steps of ``Schedule`` are counted from each failure. After the last step, the record is given up.

``UnreachableTargets`` makes the records of a target due at once (it *calls* them) when the target answers again. A broker that
answers some requests and rejects others must not use up all attempts of a record in a moment. So after each failure that
follows such a call, the next call is delayed by the steps of the schedule. The delayed call needs no further answer, because
there may be no other send.

Records of one lane are handled in the order in which they were stored: only the first is pending. Records that may be sent
together with the first are handled with it, and the next record follows when these are settled.

A mark finds a record by its *space* (a named group of records, such as one queue) and its place in it. ``Marks`` is a driver
over a ``Database``, under the lock of its store. It caches the first key of a space, because otherwise RocksDB would read
through all deleted entries before that key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.spool.changes import AtomicChange, StoredRecord
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    LAST,
    MARK,
    ORDER,
    RECORD,
    Due,
    PendingPlace,
    Record,
    RecordState,
    Totals,
    behind,
    behind_space,
    decoded,
    lane_of,
    marked,
    numbered,
    ordered,
    pending_place,
    place_of,
    sequence_of,
)

STEPS_S = (3, 5, 30, 60, 120, 300, 480, 600, 900, 1800)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pauses in seconds: the first one after the failure that stored the record, each further one after a failed attempt."""

    steps_s: Sequence[float] = STEPS_S

    def due_ms(self, tries: int, now_ms: int) -> int | None:
        """When a record is due again after its ``tries``-th failed attempt, which was now; None: never."""
        if tries >= len(self.steps_s):
            return None
        return now_ms + round(1000 * self.steps_s[tries])


class SteadyClock:
    """A clock in ms since 1970 that advances evenly, even if the machine's clock is set, and never goes back.

    It begins at the machine's time, or at ``not_before_ms``, the latest moment that an earlier process recorded, so that
    records do not wait longer after the machine's clock was set back. If that clock is set forward while no process runs,
    records become due.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], not_before_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = max(wall_ms(), not_before_ms) - monotonic_ms()

    def __call__(self) -> int:
        return self._monotonic_ms() + self._offset_ms


# After this time without a failure, the next failure of a target counts as its first.
FORGOTTEN_MS = 1000 * STEPS_S[-1]


@dataclass(slots=True)
class _Silence:
    not_before_ms: int
    failed_ms: int
    calls: int = 0
    called: bool = False
    answered_ms: int | None = None  # an answer after the last failure, if no call has followed it yet


class UnreachableTargets:
    """Targets that failed. Times are ms of a clock that does not go back."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}
        self._assumed_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._silent) or self._assumed_ms is not None

    def assume(self, now_ms: int) -> None:
        """Treat every target as one that has failed, because an earlier process may have had failures."""
        self._assumed_ms = now_ms

    def failed(self, target: str, now_ms: int, since_ms: int | None = None) -> None:
        """Note that a send to ``target`` failed. It began at ``since_ms``; an answer after that moment still counts."""
        known = self._silent.get(target)
        if known is None or now_ms - known.failed_ms >= FORGOTTEN_MS:
            self._silent[target] = _Silence(now_ms, now_ms)
            return
        if known.called:
            step = STEPS_S[min(known.calls, len(STEPS_S)) - 1]
            known.not_before_ms, known.called = now_ms + 1000 * step, False
        known.failed_ms = now_ms
        if known.answered_ms is not None and (since_ms is None or known.answered_ms < since_ms):
            known.answered_ms = None

    def answered(self, targets: Iterable[str], now_ms: int) -> set[str]:
        """Note answers of ``targets``. Returns all targets whose records are to be called now."""
        for target in targets:
            if target not in self._silent and self._assumed_ms is not None:
                self.failed(target, self._assumed_ms)
            if target in self._silent:
                self._silent[target].answered_ms = now_ms
        return self.due(now_ms)

    def due(self, now_ms: int) -> set[str]:
        """The targets that have answered since they failed and whose records are to be called now."""
        due = {target for target, known in self._silent.items() if _is_pending(known) and known.not_before_ms <= now_ms}
        for target in due:
            known = self._silent[target]
            known.called, known.calls = True, known.calls + 1
        return due

    def next_ms(self) -> int | None:
        """The time of the next delayed call, or None."""
        return min((known.not_before_ms for known in self._silent.values() if _is_pending(known)), default=None)

    def forget(self) -> None:
        """Forget all failures, when no record waits any more."""
        self._silent.clear()
        self._assumed_ms = None


def _is_pending(known: _Silence) -> bool:
    return known.answered_ms is not None and not known.called


# From the first record of a lane, makes a function that says for one record after the other whether it may be sent with the
# first and with those accepted before.
Joins = Callable[[Record], Callable[[Record], bool]]


class Behind(NamedTuple):
    """A record that is sent together with the one before it in its lane; ``size`` is what counts against ``max_bytes``, and
    ``state`` has the failures in the store from which the record was moved.
    """

    sequence: int
    record: Record
    size: int
    state: RecordState


class Work(NamedTuple):
    """A record that was taken, with the records that are sent together with it; ``size`` is what counts against ``max_bytes``."""

    pending: PendingPlace
    state: RecordState
    record: Record
    size: int
    behind: tuple[Behind, ...] = ()

    @property
    def due(self) -> Due:
        return self.pending.due


_LONG = 1024  # longer than any run


class Runs:
    """Decides which records of a lane are sent as one batch (a run): those that ``joins`` accepts. If a broker permanently
    rejects a run, its records are sent one by one, to find the one that brokers reject. After another failure the next run is
    half as long: it may have been too long for the time of an attempt, and may be stored nevertheless.
    """

    def __init__(self) -> None:
        self.joins: Joins = no_others
        self._alone: dict[bytes, int] = {}  # by lane, how many more records are sent alone
        self._most: dict[bytes, int] = {}  # by lane after a failure, the length of the next run

    def of(self, first: Record) -> Callable[[Record], bool]:
        """Implements ``Joins``."""
        if first.lane in self._alone:
            return no_others(first)
        takes, room = self.joins(first), iter(range(self._most.get(first.lane, _LONG) - 1))
        return lambda record: next(room, None) is not None and takes(record)

    def ended(self, lane: bytes, count: int, done: bool, final: bool) -> None:
        """Note the result of ``count`` records that were sent together."""
        most = self._most.get(lane)
        if done and most is not None and count >= most:
            self._most[lane] = most + max(1, most // 8)
        if count > 1 and not done:
            (self._alone if final else self._most)[lane] = count if final else count // 2
        elif count == 1 and lane in self._alone and (done or final):
            self._alone[lane] -= 1
            if not self._alone[lane]:
                del self._alone[lane]

    def forget(self, lane: bytes) -> None:
        """Note that a lane is empty. There may be millions, one for each argument of a selector."""
        self._alone.pop(lane, None)
        self._most.pop(lane, None)


def no_others(first: Record) -> Callable[[Record], bool]:
    """Implements ``Joins``: each record is sent alone."""
    return lambda record: False


def lanes(db: Database) -> Iterator[bytes]:
    """All lanes, with one seek per lane, however many records it has."""
    start = ORDER
    while (found := next(db.scan(start, behind(ORDER)), None)) is not None:
        lane = lane_of(found[0])
        yield lane
        start = ordered(lane, LAST)


def lane_with(db: Database, sequence: int) -> bytes | None:
    """The lane of a record that cannot be decoded."""
    for key, _ in db.scan(ORDER, behind(ORDER)):
        if sequence_of(key) == sequence:
            return lane_of(key)
    return None


def followers(db: Database, sequence: int, first: Record, joins: Joins) -> tuple[Behind, ...]:
    """The records that ``joins`` accepts after the first of a lane. A revived record has no place in its lane."""
    lane = first.lane
    if not lane or db.get(ordered(lane, sequence)) is None:
        return ()
    takes, found = joins(first), []
    for key, value in db.scan(ordered(lane, sequence + 1), ordered(lane, LAST)):
        data = db.get(numbered(RECORD, sequence_of(key))) or b""
        record = decoded(data)
        if not isinstance(record, Record) or not takes(record):
            break
        found.append(Behind(sequence_of(key), record, len(data), RecordState.known(value)))
    return tuple(found)


def leave(db: Database, change: AtomicChange, lane: bytes, gone: Sequence[int], now_ms: int) -> bool:
    """Remove the first records of a lane, and make the next one due. Returns False if the lane is empty then."""
    if not lane or db.get(ordered(lane, gone[0])) is None:
        return True
    change.deletes += [ordered(lane, sequence) for sequence in gone]
    for key, value in db.scan(ordered(lane, gone[-1] + 1), ordered(lane, LAST)):
        following = sequence_of(key)
        record = decoded(db.get(numbered(RECORD, following)))
        state = RecordState.known(value)._replace(since_ms=now_ms)
        change.pend(pending_place(record, Due(now_ms, following), failed=state.tries > 0), state.encode())
        return True
    return False


def kept(db: Database, work: Work) -> tuple[Record, int]:
    """The current form and size of a record that was taken. Its marks may have changed since. The whole record may have changed
    if a write took place although it seemed to fail.
    """
    data = db.get(numbered(RECORD, work.due.sequence)) or b""
    record = decoded(data)
    return (record if isinstance(record, Record) else work.record), len(data)


FREED_BYTES = 8 << 20


class Marks:
    """The marks of one database. ``changed`` tells whether marks of records that are out may have changed."""

    def __init__(self, db: Database, changed: bool = False) -> None:
        self._db = db
        self._floors: dict[bytes, bytes] = {}
        self.used = next(db.scan(MARK, behind(MARK)), None) is not None
        self.changed = changed

    def known(self, space: bytes, place: bytes) -> Due | None:
        """The sequence and due time of the record with this mark, or None."""
        value = self._db.get(marked(space, place))
        return None if value is None else Due.parse(value)

    def record_with(self, mark: tuple[bytes, bytes]) -> StoredRecord | None:
        """The record with this mark, or None, also if it cannot be read."""
        if (due := self.known(*mark)) is None:
            return None
        data = self._db.get(numbered(RECORD, due.sequence))
        record = decoded(data)
        return StoredRecord(due, record, len(data or b"")) if isinstance(record, Record) else None

    def first(self, space: bytes) -> bytes | None:
        """The first place in a space that has a record."""
        for place, _ in self.all(space, self._floors.get(space)):
            self._floors[space] = place
            return place
        self._floors.pop(space, None)
        return None

    def all(self, space: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, Due]]:
        """The places of a space in order, each with sequence and due time of its record."""
        for key, value in self._db.scan(marked(space, start or b""), behind_space(space)):
            yield place_of(key), Due.parse(value)

    def freed(
        self, marks: Sequence[tuple[bytes, bytes]], totals: Totals
    ) -> tuple[AtomicChange, Sequence[tuple[bytes, bytes]]]:
        """Removes marks, each of another record. Returns the change, and the marks for which one write has no room."""
        self.changed = True
        change, size = AtomicChange(totals), 0
        for at, mark in enumerate(marks):
            if size >= FREED_BYTES:
                return change, marks[at:]
            if (due := self.known(*mark)) is not None:
                data = self._db.get(numbered(RECORD, due.sequence))
                change.free(due.sequence, data, mark)
                size += len(data or b"")
        return change, ()

    def added(self, record: Record) -> None:
        """Update the cache after a record was added, or marks of it."""
        self.used = True
        for space, place in record.marks:
            floor = self._floors.get(space)
            if floor is not None and place < floor:
                self._floors[space] = place
