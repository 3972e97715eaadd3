"""Lanes: records of one are handled in the order in which they were stored, so that of each only the first is pending.

What may go as one with the first goes with it, and the next one follows when those are settled for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.keys import LAST, ORDER, RECORD, Due, behind, lane_of, numbered, ordered, sequence_of
from rocketmq_spark.spool.records import Record, RecordState, decoded

# Says of one record after the other whether it goes with the first of its lane and those that it took.
Joins = Callable[[Record], Callable[[Record], bool]]


class Behind(NamedTuple):
    """A record that goes with the one before it in its lane; ``size`` is what it counts against the bound."""

    sequence: int
    record: Record
    size: int


class Runs:
    """Which records of a lane go as one: those that ``joins`` lets, but for those of a run that was refused for good. They go
    one by one, so that the one which nobody takes is found.
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
