"""Where queues end, as a producer asks for it: seldom, and of the master that is there now."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    CallTimeout,
    ClosedError,
    ConnectionLost,
    RocketMQError,
    RouteNotFound,
    UnprovedError,
    error_for,
)
from rocketmq_spark.model import BrokerData, LogState, MessageQueue, QueueBounds, QueueData, QueueEnd, TopicRoute
from rocketmq_spark.stored.ends import QueueEnds
from rocketmq_spark.stored.scan import NOTE_MAX_AGE_S, LiveStoredIds, NotedStoredIds, ScanTools
from tests.fakes.ports import Fake

A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)


class Brokers:
    def __init__(self) -> None:
        self.now = 100.0
        self.ends = {A0: 5, A1: 7, B0: 9}
        self.masters = {"a": "a:1", "b": "b:1"}
        self.asked: list[set[MessageQueue]] = []
        self.fails: Callable[[], RocketMQError] | None = None
        self.route_fails: RocketMQError | None = None
        self.made_ms = 1_000
        self.ids = LiveStoredIds(self.tools, Clock(lambda: self.now))

    def tools(self, timeout_s: float, clock: Clock) -> ScanTools:
        mine = Clock(lambda: self.now, self.sleep, lambda: itertools.repeat(0.5))
        routes: Any = Fake(ports.RouteReader, self)
        offsets: Any = Fake(ports.OffsetReader, self)
        return ScanTools(routes, offsets, lambda ranges: iter(()), timeout_s, 10.0, clock=mine)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def broker_indexes_after_replication(self, name: str, deadline: Deadline) -> bool:
        return False

    def log_states(self, names: Iterable[str], deadline: Deadline) -> dict[str, LogState]:
        return {name: LogState(0, 0, 0, self.now) for name in names}

    def store_times_ms(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, on_error: object
    ) -> dict[MessageQueue, int]:
        return {queue: self.made_ms + at for queue, at in offsets.items() if at < self.ends[queue]}

    def get(self, topic: str, max_age_s: float, deadline: Deadline) -> TopicRoute:
        if self.route_fails is not None:
            raise self.route_fails
        brokers = {name: BrokerData("c", name, {0: address}) for name, address in self.masters.items()}
        return TopicRoute("t", tuple(QueueData(name, 2 if name == "a" else 1, 2, 6) for name in "ab"), brokers)

    def address(self, name: str, read_from: str = "master") -> str:
        if name not in self.masters:
            raise BrokerNotFound(f"no {name}")
        return self.masters[name]

    def bounds(self, queues: Iterable[MessageQueue], deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        self.asked.append(set(queues))
        if self.fails is not None:
            raise self.fails()
        there = {queue: self.ends[queue] for queue in self.asked[-1] if queue in self.ends}
        return {queue: QueueBounds(0, end, self.made_ms + end - 1) for queue, end in there.items()}

    def among(self, since: int) -> set[str]:
        return self.ids.find_stored({A0: since}, "a:1", ["x"], Deadline.after(1.0))


@pytest.fixture
def scripted() -> Brokers:
    return Brokers()


def test_one_query_gives_all_queue_ends_of_a_broker_for_a_minute(scripted: Brokers) -> None:
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")
    scripted.ends[A0] = 6
    scripted.now += NOTE_MAX_AGE_S - 1
    assert scripted.ids.end(A1) == QueueEnd(7, "a:1")
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")
    assert scripted.asked == [{A0, A1}]
    assert scripted.ids.end(B0) == QueueEnd(9, "b:1")
    scripted.now += 2
    assert scripted.ids.end(A0) == QueueEnd(6, "a:1")
    assert scripted.asked == [{A0, A1}, {B0}, {A0, A1}]


def test_another_master_is_asked_for_itself(scripted: Brokers) -> None:
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")
    scripted.masters["a"], scripted.ends[A0] = "a:2", 3
    assert scripted.ids.end(A0) == QueueEnd(3, "a:2")


def test_a_queue_that_was_added_is_asked_for_at_its_first_send(scripted: Brokers) -> None:
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")
    added = MessageQueue("t", "a", 2)
    scripted.ends[added] = 4
    assert scripted.ids.end(added) == QueueEnd(4, "a:1")
    assert scripted.asked == [{A0, A1}, {A0, A1, added}]


def test_broker_that_does_not_answer_is_asked_again_later(scripted: Brokers) -> None:
    scripted.fails = lambda: CallTimeout("no answer")
    for _ in range(3):
        with pytest.raises(CallTimeout):
            scripted.ids.end(A0)
    assert len(scripted.asked) == 1
    scripted.fails = None
    scripted.now += 6
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")


def test_a_topic_that_the_send_makes_begins_at_its_beginning(scripted: Brokers) -> None:
    scripted.fails = lambda: error_for(17)("no such topic", "a:1", 17)
    assert scripted.ids.end(A0) == QueueEnd(0, "a:1")


def test_ends_are_fetched_by_known_queues_without_a_name_server(scripted: Brokers) -> None:
    """A producer goes on then, and so must one that notes ends."""
    assert scripted.ids.end(A0) == QueueEnd(5, "a:1")
    scripted.route_fails = ConnectionLost("no name server answers")
    scripted.now, scripted.ends[A0] = scripted.now + NOTE_MAX_AGE_S + 1, 6
    assert scripted.ids.end(A0) == QueueEnd(6, "a:1")
    assert scripted.asked == [{A0, A1}, {A0, A1}]
    scripted.route_fails = RouteNotFound("it has started anew, and knows nothing yet")
    assert scripted.ids.end(B0) == QueueEnd(9, "b:1")
    scripted.route_fails, scripted.now = AccessDenied("no"), scripted.now + NOTE_MAX_AGE_S + 1
    with pytest.raises(AccessDenied):
        scripted.ids.end(A0)


def test_hanging_broker_is_asked_once_and_delays_no_other_broker(scripted: Brokers) -> None:
    asked, healed = threading.Event(), threading.Event()

    def hang() -> RocketMQError:
        asked.set()
        assert healed.wait(30)
        return CallTimeout("no answer")

    scripted.fails = hang
    with ThreadPoolExecutor() as pool:
        try:
            slow = [pool.submit(scripted.ids.end, MessageQueue(topic, "a", 0)) for topic in ("t", "u", "v")]
            assert asked.wait(30)
            scripted.fails = None
            assert pool.submit(scripted.ids.end, B0).result(30) == QueueEnd(9, "b:1")
        finally:
            healed.set()
        assert {type(each.exception(30)) for each in slow} == {CallTimeout}
    assert len(scripted.asked) == 2


def test_a_queue_that_nobody_can_read_is_refused(scripted: Brokers) -> None:
    del scripted.ends[A1]
    with pytest.raises(UnprovedError, match="does not report the end of"):
        scripted.ids.end(A1)
    assert scripted.ids.end(B0) == QueueEnd(9, "b:1")


@pytest.mark.parametrize("fails", [False, True], ids=["", "after a question that failed"])
def test_send_begun_before_a_new_note_belongs_to_the_old_topic(scripted: Brokers, fails: bool) -> None:
    """Its topic is made again, and filled beyond where it was: what is stored of the send may lie before that."""

    def noted_again() -> None:
        scripted.now += NOTE_MAX_AGE_S + 1
        if fails:
            scripted.fails = lambda: CallTimeout("no answer")
            with pytest.raises(CallTimeout):
                scripted.ids.end(A0)
            scripted.fails, scripted.now = None, scripted.now + 6
        scripted.ids.end(A0)

    began = scripted.ids.end(A0)
    noted_again()
    assert scripted.among(began.offset) == set(), "the same topic"
    scripted.made_ms, scripted.ends[A0] = scripted.made_ms + 5_000, 8
    noted_again()
    with pytest.raises(
        UnprovedError,
        match=r"before offset 5 was stored at .*, and now there is one .* created again",
    ):
        scripted.among(began.offset)


def test_other_master_proves_nothing_about_a_send_to_this_master(scripted: Brokers) -> None:
    began = scripted.ids.end(A0)
    scripted.masters["a"], scripted.ends[A0], scripted.made_ms = "a:2", 7, 5_000
    assert scripted.ids.end(A0) == QueueEnd(7, "a:2")
    scripted.masters["a"], scripted.ends[A0], scripted.made_ms = "a:1", 9, 1_000
    assert scripted.among(began.offset) == set()


def test_a_look_ends_when_its_producer_is_closed() -> None:
    """It waits for what may still come, and would hold up who closes."""

    def waits(timeout_s: float, clock: Clock) -> ScanTools:
        clock.sleep(60.0)
        raise AssertionError("it waited")

    ids = NotedStoredIds(waits, QueueEnds({}, {}))
    ids.stop()
    with pytest.raises(ClosedError, match="the producer was closed"):
        ids.find_stored({A0: 5}, "a:1", ["x"], Deadline.after(60))
