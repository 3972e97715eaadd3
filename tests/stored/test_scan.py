"""A look at scripted scripted, whose time the test moves: nothing is "not stored" before the waits are over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    RocketMQError,
    UnprovedError,
)
from rocketmq_spark.model import BrokerData, LogState, MessageQueue, OffsetRange, QueueBounds, QueueData, TopicRoute
from rocketmq_spark.stored.ends import QueueEnds, fetch_ends, last_store_times
from rocketmq_spark.stored.scan import ScanTools, StoredIdScan
from tests.fakes.ports import Fake

A, B = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)
TIMEOUT_S, SETTLE_S = 30.0, 10.0


class Brokers:
    """Two scripted with a queue each; ``log`` bytes stand for messages, of ten bytes each."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queues: dict[MessageQueue, list[str]] = {A: ["a0", "a1"], B: ["b0"]}
        self.unindexed: dict[str, int] = {}
        self.masters = {"a": "a:1", "b": "b:1"}
        self.states: dict[str, Callable[[], LogState | RocketMQError]] = {}
        self.head_wait_ms = 0
        self.low: dict[MessageQueue, int] = {}
        self.asked: list[tuple[str, float]] = []
        self.events: dict[float, Callable[[], None]] = {}
        self.late = False
        self.made_ms = 1_000
        self.name_server_away = False

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep, lambda: itertools.repeat(0.5))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in sorted(self.events):
            if at <= self.now:
                self.events.pop(at)()

    def get(self, topic: str, max_age_s: float, deadline: Deadline) -> None:
        if self.name_server_away:
            raise ConnectionLost("no name server")
        self.asked.append(("route", self.now))

    def address(self, name: str, read_from: str = "master") -> str:
        if name not in self.masters:
            raise BrokerNotFound(f"no {name}")
        return self.masters[name]

    def log_states(self, names: Sequence[str], deadline: Deadline) -> dict[str, LogState | RocketMQError]:
        self.asked.append(("state", self.now))
        return {name: self.states.get(name, lambda name=name: self.state(name))() for name in names}  # type: ignore[misc]

    def state(self, name: str) -> LogState:
        size = 10 * sum(len(ids) for queue, ids in self.queues.items() if queue.broker_name == name)
        return LogState(size, 10 * self.unindexed.get(name, 0), self.head_wait_ms, self.now)

    def is_slow_once(self, name: str, answered: Callable[[float], object] = float) -> None:
        """The next answer of a broker takes 1.4 s, for which the round waits."""

        def answer() -> LogState:
            del self.states[name]
            self.sleep(1.4)
            answered(self.now)
            return self.state(name)

        self.states[name] = answer

    def broker_indexes_after_replication(self, name: str, deadline: Deadline) -> bool:
        return self.late

    def bounds(self, queues: Any, deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        self.asked.append(("ends", self.now))
        ends = {queue: len(ids) - self.unindexed.get(queue.broker_name, 0) for queue, ids in self.queues.items()}
        return {queue: QueueBounds(self.low.get(queue, 0), end, self.made_ms + end - 1) for queue, end in ends.items()}

    def read(self, ranges: Sequence[OffsetRange]) -> Iterator[pa.Array]:
        for part in ranges:
            yield pa.array(self.queues[part.queue][part.start : part.end])

    def store_times_ms(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, on_error: Any
    ) -> dict[MessageQueue, int]:
        there = {queue: at for queue, at in offsets.items() if self.low.get(queue, 0) <= at < len(self.queues[queue])}
        return {queue: self.made_ms + at for queue, at in there.items()}

    def noted(self) -> QueueEnds:
        ends = {queue: len(ids) for queue, ids in self.queues.items()}
        return QueueEnds(ends, dict(self.masters), {queue: self.made_ms + end - 1 for queue, end in ends.items()})

    def look(self, since: QueueEnds) -> list[str]:
        found: list[str] = []
        routes: Any = Fake(ports.RouteReader, self)
        offsets: Any = Fake(ports.OffsetReader, self)
        tools = ScanTools(routes, offsets, self.read, TIMEOUT_S, SETTLE_S, clock=self.clock())
        self.until = StoredIdScan(tools, since).run(lambda ids: found.extend(ids.to_pylist()))
        return found


@pytest.fixture
def scripted() -> Brokers:
    return Brokers()


def test_scan_finds_only_messages_behind_the_noted_ends(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.queues[A] += ["a2", "a3"]
    scripted.queues[B] += ["b1"]
    assert scripted.look(since) == ["a2", "a3", "b1"]
    assert scripted.until == {A: 4, B: 2}


def test_what_comes_within_the_settle_time_is_found_once(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.queues[A] += ["a2"]
    scripted.events[100.0 + SETTLE_S - 0.1] = lambda: scripted.queues[A].append("late")
    assert scripted.look(since) == ["a2", "late"]
    assert scripted.now >= 100.0 + SETTLE_S


def test_ends_are_asked_for_when_the_index_has_reached_the_log(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.queues[A] += ["a2"]
    scripted.unindexed["a"] = 1
    scripted.events[104.0] = lambda: scripted.unindexed.clear()
    assert scripted.look(since) == ["a2"]
    assert min(at for what, at in scripted.asked if what == "ends") >= 104.0


def test_a_busy_broker_is_indexed_to_where_its_log_was(scripted: Brokers) -> None:
    """It is never without anything to index."""
    since = scripted.noted()
    scripted.queues[A] += ["a2", "a3"]
    scripted.unindexed["a"] = 2

    def grow() -> None:
        scripted.queues[A].append("x")
        scripted.queues[A].append("x")
        scripted.events[scripted.now + 0.5] = grow

    scripted.events[100.5] = grow
    assert scripted.look(since)[:2] == ["a2", "a3"]


def test_where_copies_must_confirm_the_index_has_nothing_left(scripted: Brokers) -> None:
    """Such a broker says how far its index is behind what is confirmed, and its log may grow beyond that meanwhile."""
    since, log = scripted.noted(), [40]
    scripted.late = True
    scripted.queues[A] += ["a2", "a3"]
    scripted.unindexed["a"] = 1
    scripted.states["a"] = lambda: LogState(log[0], 10, 0, scripted.now)

    def indexed() -> None:
        scripted.unindexed.clear()
        scripted.states.clear()

    scripted.events |= {100.5: lambda: log.__setitem__(0, 90), 103.0: indexed}
    assert scripted.look(since) == ["a2", "a3"]
    assert min(at for what, at in scripted.asked if what == "ends") >= 103.0


def test_a_broker_that_stood_still_begins_its_settle_time_anew(scripted: Brokers) -> None:
    since = scripted.noted()

    def freeze() -> None:
        scripted.states["a"] = lambda: CallTimeout("frozen")

    def thaw() -> None:
        scripted.states.clear()
        scripted.queues[A].append("from its sockets")

    scripted.events |= {104.0: freeze, 108.0: thaw}
    assert scripted.look(since) == ["from its sockets"]
    assert scripted.now >= 108.0 + SETTLE_S


def test_settle_time_counts_each_broker_answer_not_the_slowest(scripted: Brokers) -> None:
    """One stands still from its answer on, for which another keeps the round waiting, until late in the next round."""
    since, thawed = scripted.noted(), []

    def freeze() -> None:
        scripted.is_slow_once("b", thawed.append)
        scripted.events[scripted.now + 1.3] = lambda: scripted.is_slow_once("a", thawed.append)

    scripted.events[104.0] = freeze
    assert scripted.look(since) == []
    assert scripted.now >= thawed[-1] + SETTLE_S


def test_send_queued_in_the_broker_before_scan_is_waited_for(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.head_wait_ms = 30_000

    def stored() -> None:
        scripted.head_wait_ms = 0
        scripted.queues[B].append("waited")

    scripted.events[120.0] = stored
    assert scripted.look(since) == ["waited"]


def test_send_queued_within_the_settle_time_is_waited_for(scripted: Brokers) -> None:
    """An earlier attempt may have sent it: it is not stored yet when the settle time is over."""
    since = scripted.noted()
    came_at, stored_at = 105.0, 117.0

    def waits() -> LogState:
        waited_s = scripted.now - came_at if came_at <= scripted.now < stored_at else 0.0
        return scripted.state("a")._replace(head_wait_ms=int(1000 * waited_s))

    scripted.states["a"] = waits
    scripted.events[stored_at] = lambda: scripted.queues[A].append("late")
    assert scripted.look(since) == ["late"]


def test_send_blocked_by_a_locked_commit_log_is_waited_for(scripted: Brokers) -> None:
    """A disk that hangs: who waits for the log is in no queue any more, and the broker empties its queue then."""
    since = scripted.noted()
    locked_at, stored_at = 90.0, 117.0

    def locked() -> LogState:
        locked_s = scripted.now - locked_at if scripted.now < stored_at else 0.0
        return scripted.state("a")._replace(lock_ms=int(1000 * locked_s))

    scripted.states["a"] = locked
    scripted.events[stored_at] = lambda: scripted.queues[A].append("late")
    assert scripted.look(since) == ["late"]


def test_log_lock_within_the_settle_time_restarts_it(scripted: Brokers) -> None:
    """The lock is not fair: when it is free, another send may get it before one that waits since before the look."""
    since = scripted.noted()

    def hangs(lock_ms: int) -> None:
        scripted.states["a"] = lambda: scripted.state("a")._replace(lock_ms=lock_ms)

    scripted.events |= {104.0: lambda: hangs(2_500), 104.5: lambda: hangs(0)}
    scripted.events[104.0 + SETTLE_S - 0.1] = lambda: scripted.queues[A].append("late")
    assert scripted.look(since) == ["late"]


def test_broker_that_loses_found_messages_proves_nothing(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.queues[A] += ["a2", "a3"]
    scripted.events[104.0] = lambda: scripted.queues[A].remove("a3")
    with pytest.raises(UnprovedError, match="it ends at offset 3 now, and ended at 4 before"):
        scripted.look(since)


def test_a_log_that_is_locked_for_short_is_settled(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.states["a"] = lambda: scripted.state("a")._replace(lock_ms=1_900)
    assert scripted.look(since) == []
    assert scripted.now < 100.0 + SETTLE_S + 1.0


def test_what_a_broker_says_of_its_sends_counts_when_it_says_so(scripted: Brokers) -> None:
    """The settle time is over for the slowest of the round, and was not for the one that answered first."""
    since = scripted.noted()
    came_at, stored_at = 100.0 + SETTLE_S - 0.8, 117.0

    def waits() -> LogState:
        waited_s = scripted.now - came_at if came_at <= scripted.now < stored_at else 0.0
        return scripted.state("a")._replace(head_wait_ms=int(1000 * waited_s))

    scripted.states["a"] = waits
    scripted.events[100.0 + SETTLE_S - 0.1] = lambda: scripted.is_slow_once("b")
    scripted.events[stored_at] = lambda: scripted.queues[A].append("late")
    assert scripted.look(since) == ["late"]


def test_absent_broker_is_waited_for_then_named_in_the_error(
    scripted: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    since = scripted.noted()
    master = scripted.masters.pop("b")
    scripted.events[110.0] = lambda: scripted.masters.update(b=master)
    assert scripted.look(since) == []
    assert caplog.text.count("what is stored cannot be read yet, waiting for the brokers") == 1, (
        "not with each question"
    )
    scripted.masters.pop("b")
    with pytest.raises(BrokerNotFound, match="Start the brokers a, b, or run this batch once with option"):
        scripted.look(since)


def test_broker_lost_within_the_settle_time_becomes_an_error(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.events[104.0] = lambda: scripted.states.update(a=lambda: CallTimeout("gone"))
    with pytest.raises(CallTimeout, match="broker a does not answer"):
        scripted.look(since)
    assert scripted.now >= 104.0 + TIMEOUT_S


def test_broker_that_answers_only_sometimes_becomes_an_error(scripted: Brokers) -> None:
    since, asked = scripted.noted(), itertools.count()
    scripted.states["a"] = lambda: CallTimeout("slow") if next(asked) % 6 else scripted.state("a")
    scripted.events[10_000.0] = lambda: pytest.fail("it is looked at for good")
    with pytest.raises(CallTimeout, match="broker a answers only sometimes"):
        scripted.look(since)


def test_send_stuck_in_the_broker_queue_becomes_an_error(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.head_wait_ms = 10_000_000
    scripted.events[9_000.0] = lambda: pytest.fail("it is looked at for good")
    with pytest.raises(CallTimeout, match="keeps sends waiting for its log"):
        scripted.look(since)


def test_without_a_name_server_brokers_are_where_they_were(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.queues[A] += ["a2"]
    scripted.name_server_away = True
    assert scripted.look(since) == ["a2"]


@pytest.mark.parametrize("away", [{1: "b:2"}, {0: "b:2"}], ids=["a slave", "an acting master"])
def test_a_note_leaves_out_brokers_without_a_master_of_their_own(scripted: Brokers, away: dict[int, str]) -> None:
    """Tasks do not send there, and a copy that answers now is not what answers later."""
    brokers = {"a": BrokerData("a", "c", {0: "a:1"}), "b": BrokerData("b", "c", away, has_acting_master=0 in away)}
    route = TopicRoute("t", tuple(QueueData(name, 1, 1, 6) for name in brokers), brokers)
    scripted.masters = {name: data.master for name, data in brokers.items() if data.master}
    scripted.get = lambda topic, max_age_s, deadline: route  # type: ignore[method-assign, assignment, return-value]
    ends = fetch_ends(scripted, scripted, ["t"], Deadline.after(0), 1.0)  # type: ignore[arg-type]
    assert (ends.end_offsets, ends.masters) == ({A: 2}, {"a": "a:1"})


def test_no_note_is_made_of_copies_alone(scripted: Brokers) -> None:
    """A master that comes back would not be the one of the note."""
    acting = BrokerData("a", "c", {0: "a:2"}, has_acting_master=True)
    route = TopicRoute("t", (QueueData("a", 1, 1, 6),), {"a": acting})
    scripted.get = lambda topic, max_age_s, deadline: route  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(BrokerNotFound, match="no broker of the topic has a master of its own"):
        fetch_ends(scripted, scripted, ["t"], Deadline.after(0), 1.0)  # type: ignore[arg-type]


def shorter(scripted: Brokers) -> None:
    scripted.queues[A].pop()


def another_master(scripted: Brokers) -> None:
    scripted.masters["a"] = "slave:1"


def expired(scripted: Brokers) -> None:
    scripted.queues[A] += ["a2", "a3", "a4"]
    scripted.low[A] = 3


def queue_gone(scripted: Brokers) -> None:
    del scripted.queues[B]
    scripted.states["b"] = lambda: LogState(10, 0, 0, scripted.now)


def made_again(scripted: Brokers) -> None:
    """Others have filled its queue beyond the noted end, behind what is stored of the batch."""
    scripted.queues[A] = ["mine", "other", "other", "other"]
    scripted.made_ms += 5_000


def made_again_later(scripted: Brokers) -> None:
    scripted.events[105.0] = lambda: made_again(scripted)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            made_again,
            "before offset 2 was stored at .*01.001Z, and now there is one stored at .*06.001Z: the topic was created again",
        ),
        (made_again_later, "the topic was created again, or its broker lost messages"),
        (shorter, "it ends at offset 1 now, and ended at 2 before"),
        (another_master, "the master of broker a is slave:1, and was a:1"),
        (expired, "retention deleted offsets 2 to 3"),
        (queue_gone, "does not report it any more"),
    ],
)
def test_nothing_is_inferred_from_what_cannot_be_proved(
    scripted: Brokers, change: Callable[[Brokers], None], why: str
) -> None:
    since = scripted.noted()
    change(scripted)
    with pytest.raises(UnprovedError, match=why):
        scripted.look(since)
    assert scripted.now >= 100.0 + TIMEOUT_S, "it might have been passing"


def test_message_before_an_expired_end_is_of_another_topic(scripted: Brokers) -> None:
    scripted.low[A] = 2
    since = scripted.noted()
    since = replace(since, stored_ms={**since.stored_ms, A: 0})
    scripted.queues[A] += ["a2"]
    assert scripted.look(since) == ["a2"], "as it was"
    scripted.low[A] = 0
    with pytest.raises(UnprovedError, match="before offset 2 was not kept any more, and now there is one stored at"):
        scripted.look(since)


@pytest.mark.parametrize("expired", [True, False], ids=["it has expired", "a note of an earlier version"])
def test_nothing_is_said_of_a_last_message_that_is_not_known(scripted: Brokers, expired: bool) -> None:
    since = scripted.noted() if expired else replace(scripted.noted(), stored_ms={})
    scripted.made_ms += 5_000
    if expired:
        scripted.low = {A: 2, B: 1}
    scripted.queues[A] += ["a2"]
    assert scripted.look(since) == ["a2"]


def test_access_denied_is_not_waited_for(scripted: Brokers) -> None:
    scripted.states["a"] = lambda: AccessDenied("no")
    with pytest.raises(AccessDenied):
        scripted.look(scripted.noted())
    assert scripted.now == 100.0


def test_access_denied_within_the_settle_time_fails_at_once(scripted: Brokers) -> None:
    since = scripted.noted()
    scripted.events[104.0] = lambda: scripted.states.update(a=lambda: AccessDenied("not any more"))
    with pytest.raises(AccessDenied):
        scripted.look(since)
    assert scripted.now < 105.0


def routed(scripted: Brokers, *queues: QueueData) -> Any:
    """The scripted brokers with a route of their topic."""
    route = TopicRoute("t", queues, {name: BrokerData(name, "c", {0: f"{name}:1"}) for name in scripted.masters})
    scripted.get = lambda topic, max_age_s, deadline: route  # type: ignore[method-assign, assignment, return-value]
    return scripted


def test_queue_that_takes_writes_but_is_not_read_cannot_be_noted(scripted: Brokers) -> None:
    """What went there would never be found again."""
    brokers = routed(scripted, QueueData("a", 1, 2, 6), QueueData("b", 1, 1, 6))
    with pytest.raises(UnprovedError, match=r"broker a reports no end of t/a/1"):
        fetch_ends(brokers, brokers, ["t"], Deadline.after(0), 1.0)


def test_a_broker_that_does_not_say_its_ends_is_asked_again(scripted: Brokers) -> None:
    brokers = routed(scripted, QueueData("a", 1, 1, 6), QueueData("b", 1, 1, 6))
    bounds, away = scripted.bounds, [CallTimeout("it starts"), ConnectionLost("it starts")]

    def answered(queues: Any, deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        if away:
            raise away.pop()
        return bounds(queues, deadline)

    scripted.bounds = answered  # type: ignore[method-assign]
    assert fetch_ends(brokers, brokers, ["t"], Deadline.after(60), 1.0) == scripted.noted()
    assert not away


def test_ends_as_json() -> None:
    ends = Brokers().noted()
    assert QueueEnds.from_json(ends.to_json()) == ends
    assert ends.ends_of_topics(["u"]) == QueueEnds({}, {})
    earlier = {key: value for key, value in ends.to_json().items() if key != "stored"}
    assert QueueEnds.from_json(earlier) == replace(ends, stored_ms={})


def test_added_ends_say_nothing_about_queues_noted_before() -> None:
    """The last message of a queue may be of the batch by now."""
    scripted = Brokers()
    ends = replace(scripted.noted().ends_of_queues([A]), stored_ms={})
    scripted.queues[A] += ["a2"]
    assert ends.with_further_queues(scripted.noted()) == QueueEnds({A: 2, B: 1}, scripted.masters, {B: 1_000})


@pytest.mark.parametrize(
    ("bounds", "stored_ms"),
    [
        (QueueBounds(2, 9, 5), {A: 5}),
        (QueueBounds(9, 9, -1), {A: 0}),
        (QueueBounds(2, 9, 0), {}),
        (QueueBounds(0, 0, 0), {}),
    ],
    ids=["kept", "expired", "not said", "empty"],
)
def test_what_is_known_of_last_messages(bounds: QueueBounds, stored_ms: dict[MessageQueue, int]) -> None:
    assert last_store_times({A: bounds}) == stored_ms
