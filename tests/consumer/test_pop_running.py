"""A whole ``BaseConsumer`` on a Proxy in memory; its threads are real, its timers move by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import pop
from rocketmq_spark.consumer.pop import POLLER_CHECK_INTERVAL_S
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.tools import TIMEOUT_S, ConsumerTools
from rocketmq_spark.errors import AccessDenied, ClosedError, ConnectionLost, OptionError, RocketMQError
from rocketmq_spark.model import NO_FILTER, Filter
from rocketmq_spark.model.message import GroupPolicy
from tests.consumer.pop import SETTINGS, arrival, of
from tests.fakes.pop_member import FakeProxy
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import RAISED, no_more_threads, raising
from tests.mockbroker import eventually


class Member:
    """A consumer of topic t whose listener notes what it gets, and then does what it is told."""

    def __init__(self, **settings: Any) -> None:
        self.time = Time()
        self.proxy = FakeProxy(self.time.monotonic, t=1)
        self.consumer = BaseConsumer(
            self.proxy, replace(SETTINGS, **settings), ConsumerTools(make_timer=lambda _: ManualTimer(self.time))
        )
        self.got: list[str] = []
        self.does: Callable[[Any], object] = lambda message: None

    def listener(self, messages: Any, context: Any) -> object:
        (message,) = messages
        self.got.append(message.msg_id)
        return self.does(message)

    def start(self) -> None:
        self.consumer.subscribe("t", tags="a || b")
        self.consumer.start(self.listener)
        self.time.run_due()

    def held_up(self, group: str | None = None) -> threading.Event:
        """It runs, and its listener has message A of this group until this is set."""
        goes_on, has = threading.Event(), threading.Event()

        def wait(message: Any) -> None:
            has.set()
            goes_on.wait(60)

        self.does = wait
        self.start()
        self.proxy.put(of("A", group))
        assert has.wait(60)
        return goes_on


@pytest.fixture
def member() -> Iterator[Member]:
    made = Member()
    yield made
    made.consumer.stop(30)


def test_messages_are_consumed_and_counted(member):
    member.start()
    member.proxy.put(of("A"), of("B"))
    eventually(lambda: member.consumer.stats().consumed == 2 and not member.consumer.stats().cached, 60)
    assert sorted(member.got) == ["A", "B"]
    assert sorted(member.proxy.told) == [("ack", "A"), ("ack", "B")]
    stats = member.consumer.stats()
    assert (stats.failed, stats.sent_back, stats.lag) == (0, 0, None)
    assert stats.topics["t"].consumed_per_s > 0
    assert member.proxy.filters == [{"t": Filter("a || b")}]


def test_messages_received_without_threads_are_consumed_later(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    member.start()
    with monkeypatch.context() as patched:
        no_more_threads(patched, "rocketmq-g")
        member.proxy.put(of("A"))
        eventually(lambda: member.consumer._running._workers._is_short_of_threads, 60)
    assert member.got == []
    member.time.advance(POLLER_CHECK_INTERVAL_S)
    eventually(lambda: member.got == ["A"], 60)


def test_what_is_wanted_may_change_while_it_runs(member):
    member.proxy.counts["u"] = 1
    member.start()
    member.consumer.subscribe("u")
    member.consumer.unsubscribe("t")
    assert member.proxy.filters[-1] == {"u": NO_FILTER}
    member.time.run_due()
    member.proxy.put(replace(of("A"), topic="u"))
    eventually(lambda: member.got == ["A"], 60)


def test_refused_subscription_is_not_sent_with_the_next_topic(member):
    member.start()
    for topic in ("t", "bad"):
        member.proxy.failing["subscribe"] = AccessDenied("no")
        with pytest.raises(AccessDenied):
            member.consumer.subscribe(topic, tags="c")
        del member.proxy.failing["subscribe"]
    member.consumer.subscribe("u")
    assert member.proxy.filters[-1] == {"t": Filter("a || b"), "u": NO_FILTER}


def test_concurrent_subscriptions_all_reach_the_proxy(member):
    member.proxy.counts |= {"u": 1, "v": 1}
    member.start()
    second = threading.Thread(target=member.consumer.subscribe, args=("v",))
    arrived = arrival(member.consumer._running, "_subscribe_lock", second)
    tell = member.proxy.subscribe

    def meanwhile(filters: Any, deadline: Any) -> None:
        if threading.current_thread() is second:
            tell(filters, deadline)
            arrived.set()
        else:
            second.start()
            assert arrived.wait(60)
            tell(filters, deadline)

    member.proxy.subscribe = meanwhile
    member.consumer.subscribe("u")
    second.join(60)
    assert member.proxy.filters[-1].keys() == {"t", "u", "v"}


def test_subscription_waiting_during_a_stop_does_not_join(member):
    member.start()
    running = member.consumer._running
    second = threading.Thread(target=subscribes, args=(member, outcomes := []))
    arrived = arrival(running, "_subscribe_lock", second)
    with running._subscribe_lock:
        second.start()
        assert arrived.wait(60)
        assert member.consumer.stop(30) == []
    second.join(60)
    assert [type(error) for error in outcomes] == [ClosedError]
    assert member.proxy.closed


def test_stop_during_a_subscription_leaves_no_member_behind(member):
    member.start()
    tell = member.proxy.subscribe

    def meanwhile(filters: Any, deadline: Any) -> None:
        stops = threading.Thread(target=member.consumer.stop, args=(30,))
        stops.start()
        stops.join(60)
        tell(filters, deadline)

    member.proxy.subscribe = meanwhile
    member.consumer.subscribe("u")
    assert member.proxy.closed


@pytest.mark.parametrize("before", [None, "a"])
def test_refused_subscription_does_not_block_later_ones(member, before):
    """Or the one of before: a Proxy refuses all topics because of one."""
    member.start()
    if before is not None:
        member.consumer.subscribe("bad", tags=before)
    tell = member.proxy.subscribe

    def refusing(filters: Mapping[str, Filter], deadline: Deadline) -> None:
        if filters.get("bad") == Filter("(", "SQL92"):
            raise AccessDenied("not you")
        tell(filters, deadline)

    member.proxy.subscribe = refusing
    with pytest.raises(AccessDenied):
        member.consumer.subscribe("bad", sql="(")
    member.consumer.subscribe("u")
    kept = {} if before is None else {"bad": Filter(before)}
    assert member.proxy.filters[-1] == {"t": Filter("a || b"), "u": NO_FILTER, **kept}


def subscribes(member: Member, outcomes: list[Exception]) -> None:
    try:
        member.consumer.subscribe("u")
    except RocketMQError as e:
        outcomes.append(e)


def test_a_listener_that_takes_long_keeps_its_message(member):
    goes_on = member.held_up()
    acknowledger = member.consumer._running._acknowledger
    eventually(lambda: len(member.proxy.receives) == 2, 60)
    for number in range(1, 7):
        member.time.advance(10)
        eventually(lambda: not acknowledger._renew_threads, 60)  # they ask on threads of their own
        assert member.proxy.told == [("change", "A", 30.0)] * number
    goes_on.set()
    eventually(lambda: member.proxy.told[6:] == [("ack", "A")], 60)
    member.proxy.answer()  # no question waits for a minute, as this one did
    eventually(lambda: len(member.proxy.receives) == 3, 60)
    member.proxy.put(of("B"))
    eventually(lambda: member.proxy.told[7:] == [("ack", "B")], 60)
    assert member.got == ["A", "B"]


def test_slowly_received_message_gets_its_lease_renewed_at_once(member):
    """A Proxy counts from the moment at which it sends: by the next look it may be somebody else's."""
    member.proxy.takes = lambda: member.time.advance(25)
    goes_on = member.held_up()
    eventually(lambda: member.proxy.told == [("change", "A", 30.0)], 60)
    goes_on.set()
    eventually(lambda: member.proxy.told == [("change", "A", 30.0), ("ack", "A")], 60)


def test_lease_half_used_in_transit_is_renewed_within_a_second(member):
    member.proxy.takes = lambda: member.time.advance(15)
    goes_on = member.held_up()
    member.proxy.takes = lambda: None
    assert member.proxy.told == []
    eventually(lambda: any(at <= member.time.now + 1 for at, *_ in list(member.time.due)), 60)
    member.time.advance(1)
    eventually(lambda: member.proxy.told == [("change", "A", 30.0)], 60)
    goes_on.set()
    eventually(lambda: member.proxy.told[1:] == [("ack", "A")], 60)


def test_message_whose_lease_expired_in_transit_is_not_consumed(member):
    """Or lay there while this process stood still: when the answer is read says nothing, and others have had the message."""
    came: list[float] = []

    def slowly() -> None:
        came.append(member.time.now)
        member.time.advance(31)

    member.proxy.takes = slowly
    member.start()
    member.proxy.put(of("A"))
    eventually(lambda: len(came) > 2, 60)
    assert member.got == []


def test_the_end_finishes_what_is_in_hand(member):
    goes_on = member.held_up()
    stopped: list[object] = []
    stops = threading.Thread(target=lambda: stopped.append(member.consumer.stop(30)))
    stops.start()
    eventually(lambda: member.consumer._closed, 60)
    goes_on.set()
    stops.join(60)
    assert stopped == [[]]
    assert member.proxy.told[-1] == ("ack", "A")
    assert member.proxy.closed
    assert member.proxy.goodbye_s <= TIMEOUT_S, "that is for listeners, not for a Proxy that does not answer"


@pytest.mark.parametrize("in_time", [True, False])
def test_stop_consumes_waiting_messages_only_within_its_timeout(in_time):
    member = Member(threads=1)
    goes_on = member.held_up()
    member.proxy.put(of("B"))
    eventually(lambda: member.consumer.stats().cached == 2, 60)
    stops = threading.Thread(target=member.consumer.stop, args=(30 if in_time else 0.1,))
    stops.start()
    eventually(lambda: member.consumer._closed, 60)
    if in_time:
        goes_on.set()
    stops.join(60)
    goes_on.set()
    assert member.got == (["A", "B"] if in_time else ["A"])
    assert [message.msg_id for _, message in member.proxy.lent.values()] == ([] if in_time else ["A", "B"])


def test_a_listener_may_end_its_own_consumer(member):
    ended: list[object] = []
    member.does = lambda message: ended.append(member.consumer.stop(30))
    member.start()
    member.proxy.put(of("A"))
    eventually(lambda: member.proxy.closed and ended, 60)
    assert [[message.msg_id for message in left] for left in ended] == [["A"]]
    eventually(lambda: not member.consumer.stats().cached, 60)
    assert ("ack", "A") not in member.proxy.told  # what comes after the end counts for nothing


def test_a_listener_that_does_not_end_is_told_of():
    member = Member()
    goes_on = member.held_up()
    assert [message.msg_id for message in member.consumer.stop(0.1)] == ["A"]
    goes_on.set()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_start_that_is_interrupted_leaves_again(error):
    member = Member()
    member.proxy.failing["subscribe"] = error
    with pytest.raises(type(error)):
        member.start()
    assert member.proxy.closed
    del member.proxy.failing["subscribe"]
    member.start()
    member.proxy.put(of("A"))
    eventually(lambda: member.got == ["A"], 60)
    assert member.consumer.stop(30) == []


def test_nobody_joins_where_no_proxy_answers():
    member = Member()
    member.proxy.failing["subscribe"] = ConnectionLost("away")
    with pytest.raises(ConnectionLost):
        member.start()
    assert member.proxy.closed


def test_an_order_that_brokers_do_not_keep_is_refused():
    member = Member(ordered=True)
    member.proxy.said = GroupPolicy(3, False, (10.0,))
    with pytest.raises(OptionError, match=r"option 'ordered' is true.*group 'g' in any order.*consumeMessageOrderly"):
        member.start()
    assert member.proxy.closed


def test_an_ordered_group_keeps_its_order():
    member = Member(ordered=True)
    member.start()
    member.proxy.put(*(of(f"{n:02}", "a") for n in range(20)))
    eventually(lambda: len(member.got) == 20, 60)
    assert member.got == [f"{n:02}" for n in range(20)]
    assert member.consumer.stop(30) == []


def test_hanging_message_group_blocks_no_receive_of_other_queues():
    """However many messages wait behind: a broker hands out no more of its queue."""
    member = Member(ordered=True)
    member.proxy.counts["t"] = 2
    goes_on = member.held_up("a")
    member.proxy.put(*[of(f"A{n}", "a") for n in range(2 * SETTINGS.threads)])
    eventually(lambda: member.consumer.stats().cached > SETTINGS.threads, 60)
    member.does = lambda message: None
    for n in range(3):  # the first of them is asked for already
        member.proxy.put(of(f"B{n}", "b", queue_id=1), place=1)
        eventually(lambda n=n: member.got == ["A", *[f"B{k}" for k in range(n + 1)]], 20)
    goes_on.set()
    member.consumer.stop(30)


def test_failing_message_groups_block_no_receive_of_other_queues():
    """However many wait to be tried again: their queues give no more until then."""
    member = Member(ordered=True, threads=3)
    member.proxy.counts["t"] = 2
    member.does = lambda message: 1 if message.msg_id.startswith("A") else None
    member.start()
    member.proxy.put(*[of(f"A{n}", f"a{n}") for n in range(4)])
    eventually(lambda: len(member.got) == 4, 60)
    for n in range(3):
        member.proxy.put(of(f"B{n}", "b", queue_id=1), place=1)
        eventually(lambda n=n: member.got[4:] == [f"B{k}" for k in range(n + 1)], 20)
    assert member.consumer.stop(30) == []


def test_ordered_listener_gets_nothing_while_order_is_not_kept(caplog):
    member = Member(ordered=True)
    member.start()
    member.proxy.put(of("A", "a"))
    eventually(lambda: member.got == ["A"], 60)
    member.proxy.said = GroupPolicy(3, False, (10.0,))
    member.proxy.put(of("B", "a"))
    member.time.advance(POLLER_CHECK_INTERVAL_S)
    eventually(lambda: not member.consumer._running._pollers._threads, 60)
    assert [record.levelname for record in caplog.records if "requests no messages" in record.message] == ["ERROR"]
    assert member.got == ["A"]
    member.time.advance(60)  # what the last question got comes again
    member.proxy.said = GroupPolicy(3, True, (10.0,))
    member.time.advance(POLLER_CHECK_INTERVAL_S)
    eventually(lambda: member.got == ["A", "B"], 60)
    assert member.consumer.stop(30) == []


def test_interrupted_stop_leaves_group_and_next_stop_ends_it(member, monkeypatch):
    goes_on = member.held_up()
    running = member.consumer._running
    with monkeypatch.context() as patch:
        patch.setattr(running._unacked_messages, "wait_until_settled", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            member.consumer.stop()
    assert member.proxy.closed
    goes_on.set()
    assert member.consumer.stop() == []
    assert running._workers._closed
    assert running._check_timer._closed


def test_stop_in_a_listener_does_not_deadlock_with_another_stop(member):
    left = []

    def stops(message):
        eventually(lambda: member.consumer._running._pollers.closed)
        left.append(member.consumer.stop(600))

    member.does = stops
    member.start()
    member.proxy.put(of("A"))
    eventually(lambda: member.got == ["A"], 60)
    left.append(member.consumer.stop(30))
    assert left == [[], []]


def test_a_stop_waits_for_no_message_that_waits_for_its_next_try() -> None:
    member = Member(ordered=True)
    member.does = raising(ValueError("no"))
    member.start()
    member.proxy.put(of("A", "g"))
    running = member.consumer._running
    eventually(lambda: running._consume_service._paused_keys, 60)
    assert member.consumer.stop(0.1) == []
    assert (member.got, member.consumer.stats().cached) == (["A"], 0)


def test_a_retry_in_order_does_not_wait_for_routes() -> None:
    """The thread that looks for topics may hang with a Proxy."""
    times: dict[str, Time] = {}

    def timer(name: str) -> ManualTimer:
        return ManualTimer(times.setdefault(name.rpartition("-")[2], Time()))

    proxy = FakeProxy(Time().monotonic, t=1)
    consumer = BaseConsumer(proxy, replace(SETTINGS, ordered=True), ConsumerTools(make_timer=timer))
    attempts: list[int] = []

    def listener(messages: Any, context: Any) -> object:
        attempts.append(messages[0].delivery_attempt)
        return context.retry() if len(attempts) == 1 else None

    consumer.subscribe("t")
    consumer.start(listener)
    times["check"].run_due()
    proxy.put(of("A", "group"))
    eventually(lambda: bool(times["renew"].due) and consumer.stats().failed == 1, 60)
    times["renew"].advance(5)
    eventually(lambda: attempts == [1, 2], 60)
    consumer.stop(30)


def test_more_messages_of_a_line_that_was_cut_end_no_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message group of another client: one message that takes long, large ones behind it, then one more."""
    monkeypatch.setattr(pop, "MAX_WAITING_BYTES", 100_000)
    member = Member(ordered=True)
    member.proxy.said = GroupPolicy(17, True, (10.0,))
    goes_on = member.held_up("g")
    member.proxy.put(replace(of("B", "g"), body=bytes(200_000)))
    eventually(lambda: member.consumer._running._unacked_messages._dropped_keys, 60)
    received = threading.Event()
    came = member.consumer._running._unacked_messages.add

    def noted(*args: Any) -> Any:
        lent = came(*args)
        received.set()
        return lent

    monkeypatch.setattr(member.consumer._running._unacked_messages, "add", noted)
    member.proxy.put(of("C", "g"))
    assert received.wait(60)
    member.does = lambda message: None
    member.proxy.put(of("D", "h"))
    eventually(lambda: "D" in member.got, 10)
    goes_on.set()
    member.consumer.stop(30)
    assert member.got == ["A", "D"]
