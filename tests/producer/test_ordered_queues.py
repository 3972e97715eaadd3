from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.producer.send_queue import OrderedQueues
from tests.models import SteppingMachine, model_test, step


def test_one_thing_of_a_queue_is_out_at_a_time() -> None:
    queues: OrderedQueues[str] = OrderedQueues(10)
    for thing in ("a1", "a2", "b1"):
        queues.put(thing, thing[0])
    assert queues.take_ready(0) == ["a1", "b1"]
    assert queues.take_ready(0) == []
    queues.complete("a1")
    assert queues.take_ready(0) == ["a2"]
    assert len(queues) == 2


def test_unqueued_sends_wait_only_for_room_not_for_each_other() -> None:
    queues: OrderedQueues[str] = OrderedQueues(2)
    for thing in "xyz":
        queues.put(thing)
    assert queues.take_ready(0) == ["x", "y"]
    assert queues.is_limited
    queues.complete("y")
    assert queues.take_ready(0) == ["z"]
    assert not queues.is_limited


def test_nothing_follows_what_failed_for_good() -> None:
    queues: OrderedQueues[str] = OrderedQueues(10)
    for thing in ("a1", "a2", "a3", "b1"):
        queues.put(thing, thing[0])
    assert queues.take_ready(0) == ["a1", "b1"]
    assert queues.fail("a1") == ["a2", "a3"]
    assert (queues.take_ready(0), len(queues)) == ([], 1)
    queues.put("a4", "a")
    assert queues.take_ready(0) == ["a4"]


def test_a_retry_comes_first_and_its_queue_is_muted_until_then() -> None:
    queues: OrderedQueues[str] = OrderedQueues(10)
    for thing in ("a1", "a2"):
        queues.put(thing, "a")
    assert queues.take_ready(0) == ["a1"]
    queues.requeue("a1", 50)
    queues.put("a3", "a")
    assert queues.take_ready(49) == []
    assert queues.take_ready(50) == ["a1"]
    queues.complete("a1")
    assert queues.take_ready(50) == ["a2"]


def test_drop_gives_back_everything_and_forgets_it() -> None:
    queues: OrderedQueues[str] = OrderedQueues(1)
    for thing in ("a1", "a2", "b1"):
        queues.put(thing, thing[0])
    queues.take_ready(0)
    assert sorted(queues.clear()) == ["a1", "a2", "b1"]
    assert len(queues) == 0
    assert queues.take_ready(10**9) == []


def test_ordered_queues_take_turns_in_order_of_becoming_free() -> None:
    queues: OrderedQueues[str] = OrderedQueues(1)
    for thing in ("a1", "a2", "b1", "c1"):
        queues.put(thing, thing[0])
    order = []
    while len(queues):
        (thing,) = queues.take_ready(0)
        order.append(thing)
        queues.complete(thing)
    assert order == ["a1", "b1", "c1", "a2"]


def test_queue_that_was_muted_comes_behind_those_that_wait() -> None:
    queues: OrderedQueues[str] = OrderedQueues(1)
    for thing in ("a1", "b1"):
        queues.put(thing, thing[0])
    assert queues.take_ready(0) == ["a1"]
    queues.requeue("a1", 5)
    assert queues.take_ready(5) == ["b1"]
    queues.complete("b1")
    assert queues.take_ready(5) == ["a1"]


def test_what_is_dropped_while_it_is_muted_does_not_come_back() -> None:
    queues: OrderedQueues[str] = OrderedQueues(10)
    queues.put("a1", "a")
    queues.take_ready(0)
    queues.requeue("a1", 50)
    assert queues.clear() == ["a1"]
    assert queues.take_ready(50) == []
    queues.put("a2", "a")
    assert queues.take_ready(50) == ["a2"]


class LanesModel(SteppingMachine):
    """Against plain lists per queue: what leaves for good leaves in the order in which it was put."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: OrderedQueues[tuple[str, int]] = OrderedQueues(3)
        self.number = 0
        self.now = 0
        self.model: dict[str, list[tuple[str, int]]] = {}
        self.out: list[tuple[str, int]] = []
        self.muted: dict[tuple[str, int], int] = {}

    @step(queue=st.sampled_from("abcd"))
    def put(self, queue: str) -> None:
        self.number += 1
        thing = (queue, self.number)
        self.model.setdefault(queue, []).append(thing)
        self.queues.put(thing, queue)

    @step()
    def take(self) -> None:
        heads = {things[0] for things in self.model.values() if things} - set(self.out)
        may_go = {thing for thing in heads if self.muted.get(thing, 0) <= self.now}
        taken = self.queues.take_ready(self.now)
        assert set(taken) <= may_go
        assert len(taken) == min(len(may_go), 3 - len(self.out))
        self.out += taken

    def one(self, which: int) -> tuple[str, int] | None:
        """One of those that are out, or else of what may go now."""
        if not self.out:
            self.take()
        return self.out.pop(which % len(self.out)) if self.out else None

    @step(which=st.integers(0, 2))
    def done(self, which: int) -> None:
        if (thing := self.one(which)) is None:
            return
        self.did["done"] += 1
        assert self.model[thing[0]].pop(0) == thing
        self.queues.complete(thing)

    @step(which=st.integers(0, 2), pause=st.integers(0, 20))
    def again(self, which: int, pause: int) -> None:
        if (thing := self.one(which)) is None:
            return
        self.did["again"] += 1
        self.muted[thing] = self.now + pause
        self.queues.requeue(thing, self.now + pause)

    @step(ms=st.integers(0, 10))
    def wait(self, ms: int) -> None:
        self.now += ms

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queues) == sum(map(len, self.model.values()))


TestLanesModel = model_test(
    LanesModel, settings(max_examples=60, stateful_step_count=40, deadline=None), done=50, again=50
)
