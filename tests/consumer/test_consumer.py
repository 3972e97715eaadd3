"""Whole members on brokers in memory."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tools import CLOSE_TIMEOUT_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.errors import CallTimeout, ClosedError, LocalProtocolError, OptionError
from rocketmq_spark.model import Filter, PullRequest
from rocketmq_spark.model.membership import ResetOffsets
from tests.consumer.group import GroupBench
from tests.fakes.group_member import FakeBrokers, FakeMember
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import RAISED
from tests.mockbroker import eventually
from tests.queues import q, qs

ALL = qs("a:0-1 b:0-1")


def test_consumer_owns_queues_at_once_and_pulls_half_a_second_on(group: GroupBench) -> None:
    group.brokers.send(q("a:0"), b"1", b"2")
    group.brokers.offsets[q("a:0")] = 0
    consumer, port = group.start()
    assert group.owned_queues(consumer) == ALL
    assert not port.seen("pull")
    group.time.advance(0.49)
    assert not port.seen("pull")
    group.time.advance(0.01)
    assert {request.queue for request in port.seen("pull")} == set(ALL)
    assert group.bodies() == [b"1", b"2"]


def test_finished_offsets_are_stored_every_5_seconds_and_at_stop(group: GroupBench) -> None:
    consumer, port = group.start()
    group.time.advance(1)
    group.brokers.send(q("b:1"), b"1", b"2", b"3")
    group.time.advance(9.1)
    assert group.brokers.offsets[q("b:1")] == 3
    group.brokers.send(q("b:1"), b"4")
    group.time.advance(0.1)
    assert consumer.stop() == []
    assert group.brokers.offsets[q("b:1")] == 4
    assert [verb for verb, _ in port.calls][-1] == "leave"


def test_a_reset_that_its_broker_cannot_store_at_once_holds(group: GroupBench) -> None:
    consumer, port = group.start()
    group.brokers.send(q("a:0"), *(b"%d" % i for i in range(10)))
    group.time.advance(12)
    assert group.brokers.offsets[q("a:0")] == 10
    group.got.clear()
    group.brokers.failing["commit"] = CallTimeout("busy")
    assert port.asked is not None
    port.asked("a:1", ResetOffsets("T", {q("a:0"): 3}))
    group.time.advance(0.5)
    del group.brokers.failing["commit"]
    group.time.advance(60)
    assert group.bodies() == [b"%d" % i for i in range(3, 10)]
    assert group.brokers.offsets[q("a:0")] == 10
    assert consumer.stop() == []


def test_pull_at_a_hanging_slave_is_repeated_at_the_master(group: GroupBench, monkeypatch: Any) -> None:
    answer, pull = group.brokers.answer, FakeMember.pull
    monkeypatch.setattr(group.brokers, "answer", lambda request: replace(answer(request), broker_id=1))

    def slave_hangs(self: FakeMember, request: PullRequest, deadline: Deadline, done: Any) -> None:
        if request.broker_id == 1:
            self.brokers.timer.call_later(30, lambda: done(CallTimeout("the slave says nothing")))
        else:
            pull(self, request, deadline, done)

    monkeypatch.setattr(FakeMember, "pull", slave_hangs)
    group.brokers.send(q("a:0"), b"0")
    group.start()
    group.time.advance(2)
    group.brokers.send(q("a:0"), b"1", b"2")
    group.time.advance(120)
    assert group.bodies() == [b"0", b"1", b"2"]


def test_pulls_bring_the_offset_along_once_there_is_one(group: GroupBench) -> None:
    _, port = group.start()
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(16)
    found = [request.commit_offset for request in port.seen("pull") if request.queue == q("a:0")]
    assert found[0] is None
    assert found[-1] == 1


def test_second_member_gets_its_part_at_once_and_gives_it_back(group: GroupBench) -> None:
    first, _ = group.start()
    group.time.advance(5)
    second, _ = group.start()
    group.time.advance(2)
    assert (group.owned_queues(first), group.owned_queues(second)) == (ALL[:2], ALL[2:])
    second.stop()
    group.time.advance(2)
    assert group.owned_queues(first) == ALL


def test_idle_queue_changes_owner_without_loss_or_repeat(group: GroupBench) -> None:
    _first, _ = group.start()
    group.time.advance(1)
    for queue in ALL:
        group.brokers.send(queue, *(f"{queue}-{i}".encode() for i in range(50)))
    group.time.advance(1)
    group.start()
    group.time.advance(5)
    for queue in ALL:
        group.brokers.send(queue, *(f"{queue}-{i}".encode() for i in range(50, 60)))
    group.time.advance(1)
    assert sorted(group.bodies()) == sorted(f"{queue}-{i}".encode() for queue in ALL for i in range(60))
    assert {who for who, _, _ in group.got} == {"m1", "m2"}


def test_failed_message_comes_from_retry_topic_and_offset_moves(group: GroupBench) -> None:
    consumer, port = group.start(lambda messages, context: None if messages[0].reconsume_times else 1 / 0)
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"poison")
    group.time.advance(5.1)
    assert port.seen("send_back") == [(b"poison", 0, 16)]
    group.time.advance(5)
    assert group.brokers.offsets[q("a:0")] == 1
    group.time.advance(40)
    assert group.got == [("m1", b"poison", 0), ("m1", b"poison", 1)]
    stats = consumer.stats()
    assert (stats.consumed, stats.failed, stats.sent_back, stats.cached, stats.lag) == (1, 1, 1, 0, 0)


def test_message_that_always_fails_is_tried_seventeen_times(group: GroupBench) -> None:
    group.start(lambda messages, context: context.retry())
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"poison")
    group.time.advance(17140 + 60)
    assert [times for _, _, times in group.got] == list(range(17))
    assert [m.body for m in group.brokers.dead] == [b"poison"]


def test_minus_one_makes_a_dead_letter_at_once(group: GroupBench) -> None:
    group.start(lambda messages, context: context.retry(-1))
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"poison")
    group.time.advance(60)
    assert len(group.got) == len(group.brokers.dead) == 1


def test_topic_that_is_left_keeps_its_offsets_and_its_queues_go(group: GroupBench) -> None:
    group.brokers.topics["U"] = qs("a:0", "U")
    consumer, _ = group.start()
    consumer.subscribe("U")
    group.time.advance(2)
    assert group.owned_queues(consumer, "U") == qs("a:0", "U")
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(0.1)
    consumer.unsubscribe("T")
    group.time.advance(1)
    assert (group.owned_queues(consumer), group.owned_queues(consumer, "U")) == ([], qs("a:0", "U"))
    assert group.brokers.offsets[q("a:0")] == 1


def test_broadcasting_members_get_all_and_keep_offsets_in_files(group: GroupBench, tmp_path) -> None:
    how = {"clustering": False, "offsets_folder": tmp_path}
    consumer, port = group.start(lambda messages, context: context.retry(), **how)
    other, _ = group.start(**(how | {"offsets_folder": tmp_path / "other"}))
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(1)
    assert sorted(who for who, _, _ in group.got) == ["m1", "m2"]
    assert group.owned_queues(consumer) == group.owned_queues(other) == ALL
    group.time.advance(16)  # the next pulls, when the message is finished
    consumer.stop()
    assert not port.seen("send_back")
    assert not group.brokers.offsets
    assert {membership.message_model for membership in port.seen("heartbeat")} == {"BROADCASTING"}
    assert {request.commit_offset for request in port.seen("pull")} == {None}
    group.brokers.send(q("a:0"), b"2")
    group.got.clear()
    group.start(**how)
    group.time.advance(1)
    assert ("m3", b"2", 0) in group.got
    assert ("m3", b"1", 0) not in group.got


def test_two_broadcasting_members_of_a_group_do_not_share_a_file(group: GroupBench, tmp_path) -> None:
    how = {"clustering": False, "offsets_folder": tmp_path}
    consumer, _ = group.start(**how)
    with pytest.raises(OptionError, match=r"offsets\.json.*localOffsetsDir"):
        group.start(**how)
    consumer.stop()
    third, _ = group.start(**how)
    group.time.advance(1)
    assert group.owned_queues(third) == ALL


def test_second_member_of_a_group_in_one_client_is_refused(group: GroupBench) -> None:
    consumer, port = group.start()
    second = BaseConsumer(port, consumer.settings, ConsumerTools(lambda _: ManualTimer(group.time)))
    second.subscribe("T")
    with pytest.raises(LocalProtocolError, match="has a member in this process"):
        second.start(print)
    assert second.stop() == []
    assert group.owned_queues(consumer) == ALL


def test_what_was_not_subscribed_or_started_well_is_said(group: GroupBench) -> None:
    consumer, _ = group.consumer()
    with pytest.raises(OptionError, match="has no subscription; expected subscribe"):
        consumer.start(print)
    with pytest.raises(OptionError, match="at most one of them"):
        consumer.subscribe("T", tags="a", sql="b = 1")
    with pytest.raises(OptionError, match="topic is 'a b'"):
        consumer.subscribe("a b")
    consumer.subscribe("T", tags="a || b")
    consumer.start(print)
    with pytest.raises(OptionError, match="started already"):
        consumer.start(print)
    assert consumer.stop() == consumer.stop() == []
    with pytest.raises(ClosedError):
        consumer.subscribe("T")


def test_stop_tells_what_listeners_still_have(group: GroupBench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hangs(messages, context) -> None:
        inside.set()
        go_on.wait(60)

    consumer, _ = group.start(hangs)
    group.time.advance(1)
    group.workers[0].unfinished_messages = True
    thread = threading.Thread(target=lambda: (group.brokers.send(q("a:0"), b"1"), group.time.advance(0.1)))
    thread.start()
    assert inside.wait(60)
    assert [m.body for m in consumer.stop(0.1)] == [b"1"]
    assert consumer.stop(0.1) == []  # it is over, and nobody waits for that listener again
    go_on.set()
    thread.join(60)
    assert group.brokers.offsets.get(q("a:0"), 0) == 0


def test_stop_does_not_wait_for_a_hanging_rebalance() -> None:
    brokers = FakeBrokers(Time(), {"T": "a:0"})
    port = FakeMember(brokers, "me")
    asked, go_on, done = threading.Event(), threading.Event(), threading.Event()
    real = port.committed

    def hangs(*given):
        asked.set()
        go_on.wait(60)
        try:
            return real(*given)
        finally:
            done.set()

    class Noting(Timer):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.name = name

        def close(self, wait_s: float = 5.0) -> None:
            waits.append((self.name, wait_s))
            super().close(wait_s)

    waits: list[tuple[str, float]] = []
    port.committed = hangs  # type: ignore[method-assign]
    consumer = BaseConsumer(port, ConsumerSettings(group="g"), ConsumerTools(Noting))
    consumer.subscribe("T")
    consumer.start(print)
    assert asked.wait(60)
    running = consumer._running
    assert running is not None
    assert consumer.stop(0.1) == []
    assert not done.is_set()
    assert [wait_s <= CLOSE_TIMEOUT_S for name, wait_s in waits if name.endswith("-rebalance")] == [True]
    assert sum(wait_s for _, wait_s in waits) < 0.1 + TIMEOUT_S
    go_on.set()
    assert done.wait(60)
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.endswith("-rebalance")])
    assert not running.state.queues
    assert port.seen("pull") == []


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_start_that_is_interrupted_leaves_the_group_again(group: GroupBench, error: BaseException) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    group.brokers.failing["heartbeat"] = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        consumer.start(print)
    assert (port.seen("leave"), port.asked) == (["g"], None)
    group.time.advance(60)
    assert port.seen("pull") == port.seen("members") == []
    group.brokers.failing.clear()
    consumer.start(print)
    group.time.advance(1)
    assert group.owned_queues(consumer) == ALL


@pytest.mark.parametrize("change", ["another filter", "one more topic", "one topic less"])
def test_subscription_change_sends_heartbeat_and_delays_no_topic(group: GroupBench, change: str) -> None:
    """They refuse pulls by a filter of which no heartbeat has told."""
    group.brokers.topics |= {"U": qs("a:0", "U"), "V": qs("a:0", "V")}
    consumer, port = group.consumer()
    for topic in "TUV":
        if topic != "V" or change != "one more topic":
            consumer.subscribe(topic)
    got: list[bytes] = []
    consumer.start(lambda messages, context: got.extend(message.body for message in messages))
    group.time.advance(2)
    beats = len(port.seen("heartbeat"))
    if change == "one topic less":
        consumer.unsubscribe("V")
    else:
        consumer.subscribe("V", tags="x")
    assert len(port.seen("heartbeat")) == beats + 1
    told = port.seen("heartbeat")[-1].subscriptions
    assert told.get("V") == (None if change == "one topic less" else Filter("x"))
    group.brokers.send(q("a:0", "U"), b"u")
    group.time.advance(0.1)
    assert got == [b"u"]
    group.time.advance(16)
    group.brokers.send(q("a:0", "V"), b"v")
    group.time.advance(1.1)
    assert got == [b"u"] + ([] if change == "one topic less" else [b"v"])
    refused = [p.queue.topic for p in port.seen("pull") if group.brokers.refusal(p) and p.queue.topic != "V"]
    assert refused == []


@pytest.mark.parametrize("ordered", [True, False])
def test_stop_calls_no_listener_again_and_releases_queues(ordered: bool) -> None:
    brokers = FakeBrokers(Time(), {"T": "a:0"})
    brokers.offsets[q("a:0")] = 0
    brokers.send(q("a:0"), *(b"%d" % i for i in range(30)))
    port = FakeMember(brokers, "me")
    consumer = BaseConsumer(port, ConsumerSettings(group="g", ordered=ordered, threads=1))
    consumer.subscribe("T")
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def listener(messages, context) -> None:
        calls.append(messages[0].queue_offset)
        inside.set()
        assert go_on.wait(60)

    consumer.start(listener)
    assert inside.wait(60)
    stopped: list[object] = []
    stops = threading.Thread(target=lambda: stopped.append(consumer.stop(30)))
    stops.start()
    running = consumer._running
    eventually(lambda: running is not None and running._workers._closed)
    go_on.set()
    stops.join(60)
    assert (stopped, calls) == ([[]], [0])
    assert (brokers.offsets[q("a:0")], brokers.locks, port.seen("leave")) == (1, {}, ["g"])


@pytest.mark.parametrize("ordered", [True, False])
def test_stop_begins_no_call_from_its_first_moment_on(group: GroupBench, ordered: bool, monkeypatch: Any) -> None:
    """Its pulls may take a second to end, in which quick listeners would get hundreds of messages more."""
    consumer, _ = group.start(ordered=ordered)
    group.time.advance(1.6)
    workers, running = group.workers[0], consumer._running
    workers.held = True
    group.brokers.send(q("a:0"), *(b"%d" % i for i in range(10)))
    group.time.advance(0.1)
    assert (running is not None, len(workers.waiting)) == (True, 1 if ordered else 10)

    def close(wait_s: float) -> None:
        workers.let_go()
        group.time.advance(0.5)

    monkeypatch.setattr(running._pulling, "close", close)
    consumer.stop()
    assert (workers.waiting, group.got) == ([], [])


def test_listener_may_stop_its_consumer_and_run_then_returns() -> None:
    time = Time()
    brokers = FakeBrokers(time, {"T": "a:0"})
    brokers.offsets[q("a:0")] = 0
    brokers.send(q("a:0"), b"1")
    port = FakeMember(brokers, "me")
    consumer = BaseConsumer(port, ConsumerSettings(group="g"))
    consumer.subscribe("T")
    consumer.run(lambda messages, context: consumer.stop(5))
    assert port.seen("leave") == ["g"]


@pytest.mark.parametrize("ordered", [True, False])
def test_stop_in_a_listener_does_not_deadlock_with_another_stop(ordered: bool) -> None:
    brokers = FakeBrokers(Time(), {"T": "a:0"})
    brokers.offsets[q("a:0")] = 0
    brokers.send(q("a:0"), b"1")
    consumer = BaseConsumer(FakeMember(brokers, "me"), ConsumerSettings(group="g", ordered=ordered))
    consumer.subscribe("T")
    inside, left = threading.Event(), []

    def listener(messages, context) -> None:
        inside.set()
        eventually(lambda: consumer._running._workers._closed)  # type: ignore[union-attr]
        left.append(consumer.stop(600))

    consumer.start(listener)
    assert inside.wait(60)
    left.append(consumer.stop(30))
    assert left == [[], []]
    assert brokers.offsets[q("a:0")] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_with_a_signal_and_restores_the_handlers(group: GroupBench, number: int) -> None:
    before = signal.getsignal(number)
    consumer, port = group.consumer()
    consumer.subscribe("T")
    real = consumer.start

    def started(listener) -> None:
        real(listener)
        os.kill(os.getpid(), number)

    consumer.start = started  # type: ignore[method-assign]
    consumer.run(print)
    assert signal.getsignal(number) is before
    assert port.seen("leave") == ["g"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_forked_child_has_the_signal_handlers_from_before_run(group: GroupBench, number: int) -> None:
    """A worker of a pool that ignored SIGTERM would be waited for without an end."""
    before = signal.getsignal(number)
    consumer, _ = group.consumer()
    consumer.subscribe("T")
    real = consumer.start
    codes: list[int] = []

    def listener() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(number) is before else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.kill(os.getpid(), number)

    def started(given) -> None:
        real(given)
        assert signal.getsignal(number) is not before
        threading.Thread(target=listener).start()

    consumer.start = started  # type: ignore[method-assign]
    consumer.run(print)
    assert codes == [0]
    assert signal.getsignal(number) is before


def test_a_run_ends_where_handlers_were_not_set_by_python(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    real, before = signal.signal, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "signal", lambda *given: None if real(*given) is before else before)
    started = consumer.start
    consumer.start = lambda listener: (started(listener), consumer._stop_requested.set())  # type: ignore[assignment, method-assign, return-value]
    consumer.run(print)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert port.seen("leave") == ["g"]
    real(signal.SIGTERM, before)
    real(signal.SIGINT, signal.default_int_handler)


def test_a_fork_leaves_the_group_to_its_parent(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    consumer.start(lambda messages, context: None)
    with monkeypatch.context() as forked:
        forked.setattr("rocketmq_spark.base.process._pid", [-1])
        assert consumer.stop() == []
        subscriptions = [lambda: consumer.subscribe("U"), lambda: consumer.unsubscribe("T")]
        for call in (*subscriptions, lambda: consumer.start(print), lambda: consumer.run(print), consumer.stats):
            with pytest.raises(ClosedError, match="was forked"):
                call()
        assert port.seen("leave") == []
    consumer.subscribe("U")
    assert consumer.stop() == []
    assert port.seen("leave") == ["g"]
