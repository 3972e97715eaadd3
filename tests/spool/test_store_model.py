"""A store and its model do the same, whatever happens to both."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.spool.lanes import Work
from rocketmq_spark.spool.records import Dead, Done, RetryLater, Verdict
from rocketmq_spark.spool.store import Store
from tests.models import SteppingMachine, model_test, step
from tests.spool.bench import record

LANES = (b"", b"l", b"ll")


class Model:
    """What is there, as lists: pending ``(due, number, lane)`` in the order of their numbers, and the dead."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, bytes]] = {}
        self.dead: set[int] = set()

    def heads(self) -> dict[int, int]:
        """Due times of what is pending: of a lane the first only."""
        seen: set[bytes] = set()
        return {
            number: due
            for number, (due, lane) in sorted(self.kept.items())
            if not (lane and lane in seen) and not seen.add(lane)
        }


class StoreMachine(SteppingMachine):
    """A store and its model do the same, through restarts and kills (which drop leases)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder / "s", sync="never")
        self.model = Model()
        self.numbers = 0
        self.now = 1000
        self.out: dict[int, Work] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @step(delays=st.lists(st.tuples(st.integers(-50, 50), st.sampled_from(LANES)), min_size=1, max_size=4))
    def add(self, delays: list[tuple[int, bytes]]) -> None:
        records = []
        for delay, lane in delays:
            self.numbers += 1
            due = self.now + delay
            records.append((record(str(self.numbers).encode(), lane=lane, at_ms=self.now), due))
            self.model.kept[self.numbers] = (due, lane)
        self.store.add(records)

    @step(seconds=st.integers(0, 60))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @step(limit=st.integers(1, 5))
    def take(self, limit: int) -> None:
        due = sorted((at, n) for n, at in self.model.heads().items() if at <= self.now and n not in self.out)[:limit]
        taken = self.store.take(self.now, limit)
        self.did["taken"] += len(taken)
        assert [int(work.record.payload) for work in taken] == [number for _, number in due]
        self.out |= {int(work.record.payload): work for work in taken}

    @step(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Of what is out, or else of what comes next."""
        if not self.out:
            self.now += 50
            self.take(3)
        if not self.out:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.out)), min_size=1, unique=True))
        outcomes: list[tuple[Work, Verdict]] = []
        for number in numbers:
            verdict = data.draw(st.sampled_from([Done(), Dead("why"), RetryLater(self.now + 30, "why")]))
            outcomes.append((self.out.pop(number), verdict))
            lane = self.model.kept[number][1]
            if isinstance(verdict, RetryLater):
                self.model.kept[number] = (verdict.due_ms, lane)
                self.did["retried"] += 1
                continue
            del self.model.kept[number]
            if isinstance(verdict, Dead):
                self.model.dead.add(number)
                self.did["dead"] += 1
            following = min((n for n, (_, other) in self.model.kept.items() if lane and other == lane), default=None)
            if following is not None:
                self.model.kept[following] = (self.now, lane)
                self.did["followed"] += 1
        self.store.settle(outcomes, self.now)

    @step(limit=st.integers(1, 3))
    def hasten(self, limit: int) -> None:
        start, first = None, True
        while first or start is not None:
            start, first = self.store.hasten(None, start, limit, self.now), False
        for number, due in self.model.heads().items():
            if number not in self.out and due > self.now:
                self.model.kept[number] = (self.now, self.model.kept[number][1])
                self.did["hastened"] += 1

    @step()
    def restart(self) -> None:
        self.did["dropped"] += len(self.out)
        self.store.close()
        self.store = Store(self.folder / "s", sync="never")
        self.out.clear()

    @invariant()
    def the_same(self) -> None:
        free = [due for number, due in self.model.heads().items() if number not in self.out]
        assert self.store.next_due_ms() == min(free, default=None)
        assert len(self.store) == len(self.model.kept)
        assert self.store.totals.dead == len(self.model.dead)
        held = {lane for _, lane in self.model.kept.values() if lane}
        assert {lane for lane in LANES if self.store.holds(lane)} == held


test_g2_a_store_and_its_model_do_the_same = model_test(
    StoreMachine,
    settings(max_examples=30, stateful_step_count=30, deadline=None),
    taken=30,
    followed=4,
    retried=5,
    dead=5,
    hastened=5,
    dropped=5,
)
