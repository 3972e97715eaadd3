"""A broker that restarts has forgotten the members of a group and their locks; its topics and offsets are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.consumer.ownership import request_locks
from rocketmq_spark.errors import CallTimeout, ConnectionLost
from rocketmq_spark.model.membership import GetRunningInfo, MembersChanged
from tests.consumer.group import GroupBench
from tests.consumer.pull_bench import A as OF_PULLS
from tests.consumer.pull_bench import Hand, made
from tests.fakes.group_member import QueueMember
from tests.queues import q, qs

B = q("b:0")
ALL = qs("a:0-1 b:0-1")


def restart(group: GroupBench) -> None:
    """At once: connections are new when members look again."""
    brokers = group.brokers
    brokers.locks.clear()
    brokers.members.clear()
    brokers.versions.clear()
    brokers.connections = {name: (brokers.connections.get(name) or 1) + 1 for name in ("a", "b")}
    parked, brokers.parked = brokers.parked, []
    for _, done in parked:
        done(ConnectionLost("the server closed the connection without an answer"))


def test_after_restart_no_two_members_share_an_ordered_queue(group: GroupBench) -> None:
    """The broker gives the lock to whoever asks first, and its list of members has that one alone."""
    first, _ = group.start(ordered=True, rebalance_interval_s=2.0)
    second, _ = group.start(ordered=True, rebalance_interval_s=60.0)
    group.time.advance(3)
    assert (group.owned_queues(first), group.owned_queues(second)) == (ALL[:2], ALL[2:])
    group.workers[1].held = True  # what the second one has pulled waits
    group.brokers.send(B, *[b"%d" % i for i in range(4)])
    group.time.advance(0.2)
    restart(group)
    group.brokers.locks[B] = "m1"
    group.brokers.offsets[B] = 2
    group.workers[1].let_go()
    group.time.advance(0.05)
    assert group.got == []
    group.time.advance(30)
    assert not [entry for entry in group.got if entry[0] == "m2" and group.brokers.locks[B] == "m1"]
    assert (group.owned_queues(first), group.owned_queues(second)) == (ALL[:2], ALL[2:])
    group.brokers.locks[B] = "m2"
    group.time.advance(30)
    assert [entry[:2] for entry in group.got] == [("m2", b"2"), ("m2", b"3")]


def test_an_idle_ordered_queue_is_locked_again_soon(group: GroupBench) -> None:
    consumer, _ = group.start(ordered=True)
    group.time.advance(5)
    restart(group)
    group.time.advance(1.2)
    assert group.brokers.locks == dict.fromkeys(ALL, "m1")
    group.brokers.send(B, b"1")
    group.time.advance(3)
    assert group.bodies() == [b"1"]
    assert group.owned_queues(consumer) == ALL


def test_lock_with_an_unknown_offset_blocks_no_other_queue(group: GroupBench) -> None:
    consumer, _ = group.start(ordered=True)
    group.time.advance(2)
    both = [q("a:0"), B]
    for owner in ("another", consumer.client_id):
        group.brokers.locks |= dict.fromkeys(both, owner)
        group.brokers.failing["committed a"] = CallTimeout("late")
        group.time.advance(20)
    for queue in both:
        group.brokers.send(queue, str(queue).encode())
    group.time.advance(10)
    assert group.bodies() == [str(B).encode()]
    group.brokers.failing.clear()
    group.time.advance(10)
    assert group.bodies() == [str(B).encode(), b"T/a/0"]


def test_queue_is_locked_again_while_its_listener_is_busy(group: GroupBench) -> None:
    inside, free = threading.Event(), threading.Event()

    def listener(messages: Any, context: Any) -> None:
        inside.set()
        assert free.wait(60)

    group.start(listener, ordered=True)
    group.time.advance(5)
    group.workers[0].threads = threads = []
    group.brokers.send(B, b"1")
    group.time.advance(0.1)
    assert inside.wait(60)
    restart(group)
    group.time.advance(1.2)
    assert group.brokers.locks[B] == "m1"
    free.set()
    for thread in threads:
        thread.join(60)


def test_a_full_queue_without_pulls_notices_the_restart(group: GroupBench) -> None:
    group.start(ordered=True)
    group.time.advance(5)
    group.workers[0].held = True
    group.brokers.send(B, *[b"1"] * 1100)
    group.time.advance(5)
    assert not [request for request, _ in group.brokers.parked if request.queue == B]
    restart(group)
    group.time.advance(0.3)
    assert group.brokers.locks == {B: "m1"}


def test_lock_belongs_to_the_connection_before_its_request(group: GroupBench) -> None:
    """Of a broker that restarts within it nobody knows which one gave the lock; the first request makes a connection."""
    _, port = group.consumer()
    real = port.lock

    def lock(*given: Any) -> Any:
        granted = real(*given)
        group.brokers.connections["b"] = (group.brokers.connections["b"] or 1) + 1
        return granted

    port.lock = lock  # type: ignore[method-assign]
    group.brokers.connections["b"] = None
    assert request_locks(port, "g", [B], 1.0) == {B: 2}
    assert request_locks(port, "g", [B], 1.0) == {B: 2}
    assert group.brokers.connections["b"] == 3


def test_only_an_ordered_member_says_that_its_queues_are_locked(group: GroupBench) -> None:
    for ordered in (False, True):
        consumer, port = group.start(ordered=ordered)
        group.time.advance(2)
        assert port.asked is not None
        info: Any = port.asked("a:1", GetRunningInfo(False))
        assert [info.queues[queue].locked for queue in ALL] == [ordered] * 4
        consumer.stop()


def test_lock_requests_are_limited_while_there_is_no_connection(group: GroupBench) -> None:
    _, port = group.start(ordered=True)
    group.time.advance(5)
    restart(group)
    group.brokers.connections = {"a": None, "b": None}
    group.brokers.failing["lock"] = ConnectionLost("cannot connect")
    before = len(port.seen("lock"))
    group.time.advance(12)
    assert 3 <= len(port.seen("lock")) - before <= 5
    del group.brokers.failing["lock"]
    group.brokers.connections = {"a": 3, "b": 3}
    group.time.advance(4.3)
    assert group.brokers.locks == dict.fromkeys(ALL, "m1")


def test_broker_that_forgot_a_member_gets_a_heartbeat_at_a_pull(group: GroupBench) -> None:
    consumer, port = group.start()
    group.time.advance(5)
    group.brokers.members.clear()
    group.brokers.versions.clear()
    group.brokers.send(B, b"1")
    group.time.advance(0.1)
    assert group.brokers.members == {"m1": port}
    group.brokers.send(B, b"2")
    group.time.advance(1.1)
    assert group.bodies() == [b"1", b"2"]
    assert group.owned_queues(consumer) == ALL


def test_restarted_broker_gets_a_heartbeat_without_refused_pulls(group: GroupBench) -> None:
    """It knows the group by another member."""
    consumer, port = group.start()
    group.time.advance(5)
    versions = dict(group.brokers.versions)
    restart(group)
    group.brokers.versions.update(versions)
    group.brokers.connections = {"a": 2, "b": None}
    group.time.advance(3)
    group.brokers.members.clear()  # the broker was not there yet
    group.brokers.connections["b"] = 2
    group.time.advance(1.1)
    assert group.brokers.members == {"m1": port}
    before = len(port.seen("heartbeat"))
    group.time.advance(10)
    assert len(port.seen("heartbeat")) == before
    group.brokers.send(B, b"1")
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(1)
    restart(group)  # once more
    group.brokers.versions.update(versions)
    group.time.advance(2.1)
    assert group.brokers.members == {"m1": port}
    assert group.owned_queues(consumer) == ALL


@pytest.mark.parametrize("refuses_pulls", [False, True])
def test_broker_gets_a_heartbeat_once_its_route_is_back(group: GroupBench, refuses_pulls: bool) -> None:
    """Heartbeats go to brokers of routes, and the route of one that was away is asked for by a rebalance."""
    consumer, port = group.start()
    group.time.advance(5)
    heartbeat, queues, known = port.heartbeat, port.queues, []
    port.heartbeat = lambda deadline: heartbeat(deadline) if known else None  # type: ignore[method-assign]
    port.queues = lambda *given, **how: known.append(1) or queues(*given, **how)  # type: ignore[func-returns-value, method-assign]
    if refuses_pulls:
        group.brokers.members.clear()
        group.brokers.versions.clear()
        group.brokers.send(B, b"1")
    else:
        versions = dict(group.brokers.versions)
        restart(group)
        group.brokers.versions.update(versions)
    group.time.advance(3)
    assert group.brokers.members == {"m1": port}
    assert group.owned_queues(consumer) == ALL


def test_broker_ignoring_heartbeats_is_not_sent_one_per_pull(group: GroupBench) -> None:
    _, port = group.start()
    group.time.advance(5)
    port.membership = None
    restart(group)
    before = len(port.seen("heartbeat"))
    group.time.advance(10)
    assert 3 <= len(port.seen("heartbeat")) - before <= 7


def test_pull_consumer_unknown_to_broker_announces_itself_again() -> None:
    fake, hand = QueueMember([OF_PULLS]), Hand()
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
        consumer.poll(0)
        before = len(fake.memberships)
        fake.has_members("another")
        hand.now += 21
        consumer.poll(0)
        assert len(fake.memberships) == before + 1
        fake.has_members("another", "me")
        hand.now += 21
        consumer.poll(0)
        assert len(fake.memberships) == before + 1


def test_members_changed_notice_during_start_delays_no_rebalance(group: GroupBench) -> None:
    """It comes while other brokers do not know this member yet, and rebalances are a second apart."""
    consumer, port = group.consumer()
    real = port.heartbeat

    def heartbeat(deadline: Any) -> None:
        asked, members = port.asked, port.members
        assert asked is not None
        port.members = lambda *given: ["another"]  # type: ignore[method-assign]
        asked("a:1", MembersChanged())
        group.time.run_due()
        port.members = members  # type: ignore[method-assign]
        real(deadline)

    port.heartbeat = heartbeat  # type: ignore[method-assign]
    consumer.subscribe("T")
    consumer.start(print)
    assert group.owned_queues(consumer) == ALL


def test_queues_have_begun_when_start_returns(group: GroupBench, tmp_path: Any) -> None:
    """What is sent then is not behind the end at which they begin."""
    group.brokers.send(B, b"old")
    group.brokers.queues[B].first = 1
    group.brokers.queues[B].messages.clear()
    hows: list[dict[str, Any]] = [{}, {"clustering": False, "offsets_folder": tmp_path}]
    for how in hows:
        consumer, _ = group.consumer(**how)
        consumer.subscribe("T")
        consumer.start(lambda messages, context: group.got.append(("", messages[0].body, 0)))
        group.brokers.send(B, b"new")
        group.time.advance(2)
        assert group.bodies() == [b"new"]
        consumer.stop()
        group.got.clear()


@pytest.mark.parametrize("waits", [True, False], ids=["listener", "pull"])
def test_lock_is_requested_even_if_the_requesting_thread_stalls(group: GroupBench, waits: bool) -> None:
    """A listener that keeps the interpreter, or a machine that stops: the question is due before the next line runs."""
    group.brokers.topics["T"] = [B]  # no other queue asks for this one, too
    consumer, _ = group.start(ordered=True)
    group.time.advance(22)
    group.workers[0].held = True
    group.brokers.send(B, *[b"1"] * waits)
    group.time.advance(0.1)
    locks = consumer._running._lock_timer  # type: ignore[union-attr]
    later, still = locks.call_later, [0.5]

    def stands_still(seconds: float, call: Callable[[], None]) -> None:
        later(seconds, call)
        if still:
            group.time.advance(still.pop())

    locks.call_later = stands_still  # type: ignore[method-assign]
    restart(group)
    group.workers[0].let_go()
    group.time.advance(5)
    assert still == []
    assert group.brokers.locks == {B: "m1"}
    group.brokers.send(B, b"2")
    group.time.advance(60)
    assert group.bodies() == [b"1"] * waits + [b"2"]
