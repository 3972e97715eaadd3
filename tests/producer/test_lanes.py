from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rocketmq_spark.producer.lanes import Lanes


def test_one_thing_of_a_lane_is_out_at_a_time() -> None:
    lanes: Lanes[str] = Lanes(10)
    for thing in ("a1", "a2", "b1"):
        lanes.put(thing, thing[0])
    assert lanes.take(0) == ["a1", "b1"]
    assert lanes.take(0) == []
    lanes.done("a1")
    assert lanes.take(0) == ["a2"]
    assert len(lanes) == 2


def test_things_without_a_lane_do_not_wait_for_each_other_but_for_the_window() -> None:
    lanes: Lanes[str] = Lanes(2)
    for thing in "xyz":
        lanes.put(thing)
    assert lanes.take(0) == ["x", "y"]
    assert lanes.blocked
    lanes.done("y")
    assert lanes.take(0) == ["z"]
    assert not lanes.blocked


def test_11_18_nothing_follows_what_failed_for_good() -> None:
    lanes: Lanes[str] = Lanes(10)
    for thing in ("a1", "a2", "a3", "b1"):
        lanes.put(thing, thing[0])
    assert lanes.take(0) == ["a1", "b1"]
    assert lanes.shut("a1") == ["a2", "a3"]
    assert (lanes.take(0), len(lanes)) == ([], 1)
    lanes.put("a4", "a")
    assert lanes.take(0) == ["a4"]


def test_a_retry_comes_first_and_its_lane_is_mute_until_then() -> None:
    lanes: Lanes[str] = Lanes(10)
    for thing in ("a1", "a2"):
        lanes.put(thing, "a")
    assert lanes.take(0) == ["a1"]
    lanes.again("a1", 50)
    lanes.put("a3", "a")
    assert lanes.take(49) == []
    assert lanes.take(50) == ["a1"]
    lanes.done("a1")
    assert lanes.take(50) == ["a2"]


def test_drop_gives_back_everything_and_forgets_it() -> None:
    lanes: Lanes[str] = Lanes(1)
    for thing in ("a1", "a2", "b1"):
        lanes.put(thing, thing[0])
    lanes.take(0)
    assert sorted(lanes.drop()) == ["a1", "a2", "b1"]
    assert len(lanes) == 0
    assert lanes.take(10**9) == []


def test_11_26_lanes_take_turns_in_the_order_in_which_they_became_free() -> None:
    lanes: Lanes[str] = Lanes(1)
    for thing in ("a1", "a2", "b1", "c1"):
        lanes.put(thing, thing[0])
    order = []
    while len(lanes):
        (thing,) = lanes.take(0)
        order.append(thing)
        lanes.done(thing)
    assert order == ["a1", "b1", "c1", "a2"]


def test_11_26_a_lane_that_was_mute_comes_behind_those_that_wait() -> None:
    lanes: Lanes[str] = Lanes(1)
    for thing in ("a1", "b1"):
        lanes.put(thing, thing[0])
    assert lanes.take(0) == ["a1"]
    lanes.again("a1", 5)
    assert lanes.take(5) == ["b1"]
    lanes.done("b1")
    assert lanes.take(5) == ["a1"]


def test_11_26_what_is_dropped_while_it_is_mute_does_not_come_back() -> None:
    lanes: Lanes[str] = Lanes(10)
    lanes.put("a1", "a")
    lanes.take(0)
    lanes.again("a1", 50)
    assert lanes.drop() == ["a1"]
    assert lanes.take(50) == []
    lanes.put("a2", "a")
    assert lanes.take(50) == ["a2"]


class LanesModel(RuleBasedStateMachine):
    """Against plain lists per lane: what leaves for good leaves in the order in which it was put."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: Lanes[tuple[str, int]] = Lanes(3)
        self.number = 0
        self.now = 0
        self.model: dict[str, list[tuple[str, int]]] = {}
        self.out: list[tuple[str, int]] = []
        self.mute: dict[tuple[str, int], int] = {}

    @rule(lane=st.sampled_from("abcd"))
    def put(self, lane: str) -> None:
        self.number += 1
        thing = (lane, self.number)
        self.model.setdefault(lane, []).append(thing)
        self.lanes.put(thing, lane)

    @rule()
    def take(self) -> None:
        heads = {things[0] for things in self.model.values() if things} - set(self.out)
        may_go = {thing for thing in heads if self.mute.get(thing, 0) <= self.now}
        taken = self.lanes.take(self.now)
        assert set(taken) <= may_go
        assert len(taken) == min(len(may_go), 3 - len(self.out))
        self.out += taken

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 2))
    def done(self, which: int) -> None:
        thing = self.out.pop(which % len(self.out))
        assert self.model[thing[0]].pop(0) == thing
        self.lanes.done(thing)

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 2), pause=st.integers(0, 20))
    def again(self, which: int, pause: int) -> None:
        thing = self.out.pop(which % len(self.out))
        self.mute[thing] = self.now + pause
        self.lanes.again(thing, self.now + pause)

    @rule(ms=st.integers(0, 10))
    def wait(self, ms: int) -> None:
        self.now += ms

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.lanes) == sum(map(len, self.model.values()))


TestLanesModel = LanesModel.TestCase
TestLanesModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
