"""Time that a test moves, and a store with a handler that fails when it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rocketmq_spark.model import Resent
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import Schedule
from rocketmq_spark.spool.records import Record
from rocketmq_spark.spool.redelivery import MAX_IN_FLIGHT, Redelivery
from rocketmq_spark.spool.store import Store
from tests.fakes.timer import ManualTimer, Time

BASE_MS = 1_700_000_000_000


def record(payload: bytes, kind: str = "k", target: str = "", lane: bytes = b"", at_ms: int = BASE_MS) -> Record:
    return Record(kind, payload, at_ms, target, lane)


def database(store: Store) -> Database:
    """The open database of a store, for tests that damage it or compare its keys."""
    return store._db


class Bench:
    """A redelivery of one kind, ``k``. ``works`` says whether a try succeeds; ``tried`` are seconds and payloads."""

    def __init__(self, path: Path, schedule: Schedule | None = None, max_out: int = MAX_IN_FLIGHT) -> None:
        self.time = Time()
        self.start = self.time.now
        self.step_ms = 0  # by which the machine's clock was set
        self.store = Store(path, sync="never")
        self.tried: list[tuple[float, bytes]] = []
        self.together: list[int] = []  # how many went at a time
        self.joins: Callable[[Record, Record], bool] = lambda head, other: False
        self.works: Callable[[Record], Resent] = lambda one: Resent()
        self.waiting: list[Callable[[Resent], None]] | None = None  # a list holds answers back
        timer = ManualTimer(self.time)
        self.redelivery = Redelivery(self.store, {"k": self._handle}, self.now_ms, timer, schedule, max_out)
        self.redelivery.batch_policy.predicate = lambda head: lambda other: self.joins(head, other)

    def now_ms(self) -> int:
        return BASE_MS + round(1000 * (self.time.now - self.start)) + self.step_ms

    def add(self, *records: Record, after_s: float = 3) -> None:
        self.store.add([(each, self.now_ms() + round(1000 * after_s)) for each in records])
        self.redelivery.wake()

    def _handle(self, records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        """What goes together succeeds or fails together."""
        self.tried += [(round(self.time.now - self.start, 3), one.payload) for one in records]
        self.together.append(len(records))
        if self.waiting is not None:
            self.waiting.append(done)
        else:
            done(next((bad for bad in map(self.works, records) if bad.error is not None), Resent()))

    @property
    def seconds(self) -> list[float]:
        return [second for second, _ in self.tried]

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.tried]
