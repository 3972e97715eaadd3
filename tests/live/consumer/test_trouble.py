"""Servers that hang or are gone, groups and topics that are not there, listeners that do not come back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from tests.helpers import freeze, killed
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed

QUEUES = 2  # of each broker
LONGER_S = 60.0  # than anything that has a deadline takes, on a busy machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes are asked for with each rebalance."""
    monkeypatch.setattr("rocketmq_spark.client.routes.ROUTE_MAX_AGE_S", 0.0)


class Troubled(Members):
    """Beside a producer that is there all the time: one that goes says so to each broker, and waits for those that hang."""

    def __init__(self, mq: LocalBroker) -> None:
        super().__init__(mq, f"trouble-{time.time_ns()}")
        mq.create_topic(self.topic, queues=QUEUES)
        self.producer = Producer(name_server=mq.name_server, group="trouble", send_timeout="30s")

    def sent_to(self, broker: str) -> set[str]:
        """A message to each queue of one broker."""
        bodies = {f"{broker}-{i}-{time.time_ns()}": MessageQueue(self.topic, broker, i) for i in range(QUEUES)}
        for body, queue in bodies.items():
            self.producer.send(Message(self.topic, body.encode()), queue=queue)
        return set(bodies)


@pytest.fixture
def of_pair(pair: LocalBroker) -> Iterator[Troubled]:
    with made_on(pair) as members:
        yield members


@contextmanager
def made_on(mq: LocalBroker) -> Iterator[Troubled]:
    members = Troubled(mq)
    try:
        yield members
    finally:
        for consumer in members.all:
            consumer.stop(5)
        members.producer.close()


def signalled(mq: LocalBroker, broker: str, number: int) -> None:
    pid = mq.pid(broker)
    assert pid is not None
    os.kill(pid, number)


def within_reason(call: Callable[[], object]) -> list[object]:
    """What it returns, if it does not hang."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(LONGER_S)
    assert found, "it hangs"
    return found


def test_hanging_broker_delays_no_other_queues_and_keeps_its_own(
    of_pair: Troubled, caplog: pytest.LogCaptureFixture
) -> None:
    """No pull is given up before the test is, and there is one time for all turns: what is held up is so in each of them."""
    caplog.set_level("INFO")
    consumer = of_pair.start(rebalance_interval_s=1.0, pull_timeout_s=5 * LONGER_S)
    eventually(lambda: of_pair.owned(consumer) == 2 * QUEUES, 60)
    first = of_pair.sent_to("broker-a") | of_pair.sent_to("broker-b")
    eventually(lambda: set(of_pair.bodies()) == first, 60)
    freeze(of_pair.mq.pid("broker-a"))
    try:
        during: set[str] = set()
        deadline = Deadline.after(LONGER_S)
        for _ in range(6):
            during.update(of_pair.sent_to("broker-b"))
            eventually(lambda: during <= set(of_pair.bodies()), deadline.remaining())
        eventually(lambda: "its assignment stays unchanged" in caplog.text, 60)
        assert of_pair.owned(consumer) == 2 * QUEUES
    finally:
        signalled(of_pair.mq, "broker-a", signal.SIGCONT)
    after = of_pair.sent_to("broker-a")
    eventually(lambda: after <= set(of_pair.bodies()), 60)
    assert sorted(of_pair.bodies()) == sorted(first | during | after)


@pytest.mark.parametrize("ordered", [False, True])
def test_stop_ends_although_a_broker_hangs(of_pair: Troubled, ordered: bool) -> None:
    consumer = of_pair.start(ordered=ordered)
    eventually(lambda: of_pair.owned(consumer) == 2 * QUEUES, 60)
    freeze(of_pair.mq.pid("broker-a"))
    try:
        assert within_reason(lambda: consumer.stop(2.0)) == [[]]
    finally:
        signalled(of_pair.mq, "broker-a", signal.SIGCONT)


def test_broker_that_is_killed_goes_from_the_view_and_comes_back(of_pair: Troubled, quick: None) -> None:
    consumer = of_pair.start(rebalance_interval_s=1.0, pull_timeout_s=5 * LONGER_S)
    eventually(lambda: of_pair.owned(consumer) == 2 * QUEUES, 60)
    first = of_pair.sent_to("broker-a") | of_pair.sent_to("broker-b")
    eventually(lambda: set(of_pair.bodies()) == first, 60)
    killed(of_pair.mq, "broker-a")
    eventually(lambda: of_pair.owned(consumer) == QUEUES, 60)
    during = of_pair.sent_to("broker-b")
    eventually(lambda: during <= set(of_pair.bodies()), 60)
    of_pair.mq.restart("broker-a")
    eventually(lambda: of_pair.owned(consumer) == 2 * QUEUES, 60)
    after = of_pair.sent_to("broker-a")
    eventually(lambda: after <= set(of_pair.bodies()), 60)


def test_without_a_name_server_it_goes_on_with_what_it_knows(
    lone: LocalBroker, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with made_on(lone) as members:
        consumer = members.start(rebalance_interval_s=1.0)
        eventually(lambda: members.owned(consumer) == QUEUES, 60)
        members.producer.send(Message(members.topic, b"before"))
        eventually(lambda: members.bodies() == ["before"], 60)
        killed(lone, "namesrv")
        eventually(lambda: caplog.text.count(f"could not refresh the route of {members.topic}") > 2, 60)
        members.producer.send(Message(members.topic, b"after"))
        eventually(lambda: members.bodies() == ["before", "after"], 60)
        assert members.owned(consumer) == QUEUES
        lone.restart("namesrv")


def test_a_topic_that_is_not_there_is_consumed_once_it_is_made(
    rocketmq: LocalBroker, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    members = Members(rocketmq, f"later-{time.time_ns()}")
    consumer = members.start(rebalance_interval_s=1.0)
    eventually(lambda: f"topic {members.topic} has no route yet" in caplog.text, 60)
    assert members.owned(consumer) == 0
    rocketmq.create_topic(members.topic, 2)
    with Producer(name_server=rocketmq.name_server, group="maker") as producer:
        producer.send(Message(members.topic, b"first"))
    eventually(lambda: members.bodies() == ["first"], 60)
    assert consumer.stop() == []


def test_a_group_that_must_be_made_by_hand_is_named_until_it_is(
    make_cluster: Callable[..., LocalBroker], caplog: pytest.LogCaptureFixture
) -> None:
    mq = make_cluster(conf={"autoCreateSubscriptionGroup": False})
    with made_on(mq) as members:
        members.start(rebalance_interval_s=1.0)
        (body,) = feed(mq, members.topic, 1, queues=[0])
        eventually(lambda: f"no consumer for this group, {members.group}" in caplog.text, 60)
        assert "autoCreateSubscriptionGroup=false" in caplog.text
        assert members.bodies() == []
        mq.admin.create_group(members.group)
        eventually(lambda: members.bodies() == [body], 90)


def test_stop_lists_what_a_listener_still_has(members: Members) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hangs(messages: list[ReceivedMessage], context: object) -> None:
        inside.set()
        go_on.wait(LONGER_S)

    consumer = members.start(hangs)
    (body,) = feed(members.mq, members.topic, 1, queues=[0])
    assert inside.wait(60)
    try:
        (unfinished,) = within_reason(lambda: [m.body.decode() for m in consumer.stop(0.5)])
        assert unfinished == [body]
        assert {offset or 0 for offset in members.stored().values()} == {0}
    finally:
        go_on.set()
