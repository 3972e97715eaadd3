"""When records are sent: after a failed try, behind others of their lane, and by target.

The steps of ``Schedule`` are counted from each failure. After the last step, the record is given up.

``UnreachableTargets`` makes the records of a target due at once when the target answers again. A broker that answers some
requests and refuses others must not use up all tries of a record in a moment: after each failure that follows such a call
the next one is delayed, by the steps of the schedule. It then comes without another answer, because there may be no other
send.

Records of one lane are handled in the order in which they were stored: only the first is pending. Records that may go with
the first are handled together with it, and the next one follows when those are settled.

A mark finds a record by its *space* (a named group of records, such as one queue) and its place in it. ``Marks`` is a driver
over a ``Database``, under the lock of its store. It remembers where a space begins, because RocksDB would step over
everything that was deleted before the first key that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    LAST,
    MARK,
    ORDER,
    RECORD,
    Due,
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
    place_of,
    sequence_of,
)

STEPS_S = (3, 5, 30, 60, 120, 300, 480, 600, 900, 1800)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pauses in seconds: the first one after the failure that led here, each other one after a failed try."""

    steps_s: Sequence[float] = STEPS_S

    def due_ms(self, tries: int, now_ms: int) -> int | None:
        """When it is tried again after so many failed tries, the last of which was now; None: never."""
        if tries >= len(self.steps_s):
            return None
        return now_ms + round(1000 * self.steps_s[tries])


class SteadyClock:
    """Milliseconds since 1970 that go on evenly whatever is done to the machine's clock, and never go back.

    They begin at the machine's time, or at ``not_before_ms``, the latest moment that an earlier process wrote down: after
    a clock was put back what is due keeps its distance. A clock that is put forward while no process runs makes records due,
    as time does.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], not_before_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = max(wall_ms(), not_before_ms) - monotonic_ms()

    def __call__(self) -> int:
        return self._monotonic_ms() + self._offset_ms


# After so long without a failure a target begins anew.
FORGOTTEN_MS = 1000 * STEPS_S[-1]


@dataclass(slots=True)
class _Silence:
    not_before_ms: int
    failed_ms: int
    calls: int = 0
    called: bool = False
    answered_ms: int | None = None  # since it failed, and there was no call yet


class UnreachableTargets:
    """Targets that failed. Times are ms of a clock that does not go back."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}
        self._assumed_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._silent) or self._assumed_ms is not None

    def assume(self, now_ms: int) -> None:
        """Any target may have failed before: there was no question yet."""
        self._assumed_ms = now_ms

    def failed(self, target: str, now_ms: int, since_ms: int | None = None) -> None:
        """Something for ``target`` could not be sent, tried from ``since_ms`` on: an answer that came later still counts."""
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
        """Those of ``targets`` that were silent and are to be called now."""
        for target in targets:
            if target not in self._silent and self._assumed_ms is not None:
                self.failed(target, self._assumed_ms)
            if target in self._silent:
                self._silent[target].answered_ms = now_ms
        return self.due(now_ms)

    def due(self, now_ms: int) -> set[str]:
        """Those that have answered since they failed and are to be called now."""
        due = {target for target, known in self._silent.items() if _is_pending(known) and known.not_before_ms <= now_ms}
        for target in due:
            known = self._silent[target]
            known.called, known.calls = True, known.calls + 1
        return due

    def next_ms(self) -> int | None:
        """When one is to be called that has answered too early for that."""
        return min((known.not_before_ms for known in self._silent.values() if _is_pending(known)), default=None)

    def forget(self) -> None:
        """Nothing waits any more."""
        self._silent.clear()
        self._assumed_ms = None


def _is_pending(known: _Silence) -> bool:
    return known.answered_ms is not None and not known.called


# Says of one record after the other whether it goes with the first of its lane and those that it took.
Joins = Callable[[Record], Callable[[Record], bool]]


class Behind(NamedTuple):
    """A record that goes with the one before it in its lane; ``size`` is what it counts against the bound."""

    sequence: int
    record: Record
    size: int


class Work(NamedTuple):
    """A record that was taken, with those of its lane that go with it; ``size`` is what it counts against the bound."""

    due: Due
    state: RecordState
    record: Record
    size: int
    taken_ms: int
    behind: tuple[Behind, ...] = ()


class Runs:
    """Which records of a lane go as one: those that ``joins`` lets, but for those of a run that was refused for good. They go
    one by one, so that the one which no broker takes is found.
    """

    def __init__(self) -> None:
        self.joins: Joins = _nothing
        self._alone: dict[bytes, int] = {}  # so many more of a lane

    def of(self, first: Record) -> Callable[[Record], bool]:
        """Implements ``Joins``."""
        return (_nothing if first.lane in self._alone else self.joins)(first)

    def ended(self, lane: bytes, count: int, done: bool, final: bool) -> None:
        """What came of ``count`` records that went together."""
        if count > 1:
            if final and not done:
                self._alone[lane] = count
        elif lane in self._alone and (done or final):
            self._alone[lane] -= 1
            if not self._alone[lane]:
                del self._alone[lane]


def _nothing(first: Record) -> Callable[[Record], bool]:
    return lambda record: False


# So many that are due may lie before others because their target takes no more: with more they are put off.
SPARE = 64


class Window(NamedTuple):
    """Of a target that failed: so many of its records may be out. Others that are in the way are put off for so long, 0 for
    not at all, for it answers.
    """

    size: int
    put_off_ms: int


class Turns:
    """Which records may be handed out now: of targets with a window no more than that, with those that are ``out`` already.

    ``late`` are those of the others that may be put off, with the moment until which.
    """

    def __init__(self, windows: Mapping[str, Window], out: Iterable[str], now_ms: int) -> None:
        self._windows = windows
        self._now_ms = now_ms
        self._out = Counter(out) if windows else Counter()
        self.spare = 1 + SPARE if windows else 0  # how many more than it takes one looks at
        self.refused = False
        self.late: list[tuple[Work, int]] = []

    @property
    def crowd(self) -> bool:
        """Whether those that may be put off hide others."""
        return len(self.late) > SPARE

    def joins(self, joins: Joins) -> Joins:
        """The same, but a record of a target of which one may be out goes alone."""

        def joined(first: Record) -> Callable[[Record], bool]:
            window = self._windows.get(first.target)
            return (joins if window is None or window.size > 1 else _nothing)(first)

        return joined

    def takes(self, work: Work) -> bool:
        """Whether the next record may go."""
        window = self._windows.get(work.record.target)
        if window is None:
            return True
        self._out[work.record.target] += 1
        if self._out[work.record.target] <= window.size:
            return True
        self.refused = True
        if window.put_off_ms:
            self.late.append((work, self._now_ms + window.put_off_ms))
        return False


def lanes(db: Database) -> Iterator[bytes]:
    """The lanes that there are: one look for each, however many records it has."""
    start = ORDER
    while (found := next(db.scan(start, behind(ORDER)), None)) is not None:
        lane = lane_of(found[0])
        yield lane
        start = ordered(lane, LAST)


def lane_with(db: Database, sequence: int) -> bytes | None:
    """The lane of a record that cannot be asked."""
    for key, _ in db.scan(ORDER, behind(ORDER)):
        if sequence_of(key) == sequence:
            return lane_of(key)
    return None


def followers(db: Database, sequence: int, first: Record, joins: Joins) -> tuple[Behind, ...]:
    """What ``joins`` lets go with the first record of a lane. One that came back from the dead has no place in it."""
    lane = first.lane
    if not lane or db.get(ordered(lane, sequence)) is None:
        return ()
    takes, found = joins(first), []
    for key, _ in db.scan(ordered(lane, sequence + 1), ordered(lane, LAST)):
        data = db.get(numbered(RECORD, sequence_of(key))) or b""
        record = decoded(data)
        if not isinstance(record, Record) or not takes(record):
            break
        found.append(Behind(sequence_of(key), record, len(data)))
    return tuple(found)


def leave(db: Database, change: AtomicChange, lane: bytes, gone: Sequence[int], now_ms: int) -> bool:
    """The first records of a lane leave it, and the next one is due. False when the lane is empty then."""
    if not lane or db.get(ordered(lane, gone[0])) is None:
        return True
    change.deletes += [ordered(lane, sequence) for sequence in gone]
    for key, _ in db.scan(ordered(lane, gone[-1] + 1), ordered(lane, LAST)):
        following = sequence_of(key)
        record = decoded(db.get(numbered(RECORD, following)))
        target = record.target if isinstance(record, Record) else ""
        change.pend(Due(now_ms, following), RecordState(0, now_ms, target))
        return True
    return False


def kept(db: Database, work: Work) -> tuple[Record, int]:
    """A record that was taken and its size as they are now: it may have lost a mark since."""
    if not work.record.marks:
        return work.record, work.size
    data = db.get(numbered(RECORD, work.due.sequence)) or b""
    record = decoded(data)
    return (record if isinstance(record, Record) else work.record), len(data)


FREED_BYTES = 8 << 20


class Marks:
    """The marks of one database. ``freeing`` is whether records that are out may have lost some."""

    def __init__(self, db: Database, freeing: bool = False) -> None:
        self._db = db
        self._floors: dict[bytes, bytes] = {}
        self.used = next(db.scan(MARK, behind(MARK)), None) is not None
        self.freeing = freeing

    def known(self, space: bytes, place: bytes) -> Due | None:
        """The record that is found there, with when it is due."""
        value = self._db.get(marked(space, place))
        return None if value is None else Due.parse(value)

    def first(self, space: bytes) -> bytes | None:
        """The first place of a space that is taken."""
        for place, _ in self.all(space, self._floors.get(space)):
            self._floors[space] = place
            return place
        self._floors.pop(space, None)
        return None

    def all(self, space: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, Due]]:
        """The places of a space in their order, each with its record."""
        for key, value in self._db.scan(marked(space, start or b""), behind_space(space)):
            yield place_of(key), Due.parse(value)

    def freed(
        self, marks: Sequence[tuple[bytes, bytes]], totals: Totals
    ) -> tuple[AtomicChange, Sequence[tuple[bytes, bytes]]]:
        """Takes marks, each of another record, from those who have them; gives those for which there is no room in one write."""
        self.freeing = True
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
        """A record has these marks now."""
        self.used = True
        for space, place in record.marks:
            floor = self._floors.get(space)
            if floor is not None and place < floor:
                self._floors[space] = place
