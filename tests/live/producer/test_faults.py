"""Rows of the acceptance list that need two real brokers, one of which is stopped, killed or restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, SendResult, SendStatus
from rocketmq_spark.producer.fault_tolerance import FaultTables
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import SendContext
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.messages import decode_batch
from tests.helpers import freeze, indexed, killed, total
from tests.live.producer.recording import RecordingSender, recorded
from tests.witness import JavaPeer

QUICK = FaultTables(failure_latency_ms=550)  # a failure isolates for the two seconds of a slow send, not for ten


@pytest.fixture
def topic(pair: LocalBroker) -> str:
    name = f"topic-{time.time_ns()}"
    pair.create_topic(name, queues=4)
    return name


@pytest.fixture
def frozen(pair: LocalBroker) -> Iterator[Any]:
    """Stops broker-a for some seconds, without a word to its clients."""
    timers: list[threading.Timer] = []

    def frozen_for(seconds: float) -> Callable[[], None]:
        """What it gives ends it sooner."""
        pid = pair.pid("broker-a")
        assert pid is not None
        freeze(pid)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
        timers.append(timer)
        timer.start()

        def thaw() -> None:
            timer.cancel()
            os.kill(pid, signal.SIGCONT)

        return thaw

    yield frozen_for
    for timer in timers:
        timer.join()


def send_for(producer: BaseProducer, topic: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert producer.send(Message(topic, b"x")).status is SendStatus.SEND_OK
        time.sleep(0.02)


def send_until(producer: BaseProducer, topic: str, condition: Callable[[], object], what: str) -> None:
    """Sends, at least once, until ``condition`` holds; ``what`` is said where that takes longer than a minute."""
    until = time.monotonic() + 60
    send_for(producer, topic, 0.1)
    while not condition():
        assert time.monotonic() < until, what
        send_for(producer, topic, 0.1)


def send_until_second(producer: BaseProducer, sender: RecordingSender, broker: str, topic: str) -> None:
    """Sends until ``broker`` was tried a second time."""
    send_until(producer, topic, lambda: sender.brokers().count(broker) >= 2, "it is not tried again")


def gap_after_first(sender: RecordingSender, broker: str) -> float:
    """Seconds between the first send to ``broker`` and the second."""
    first, second = [at for at, queue, _ in sender.sends if queue.broker_name == broker][:2]
    return second - first


def endings(producer: BaseProducer) -> list[tuple[str, bool]]:
    """The broker of each attempt and whether it isolates it, because it failed or was slow; filled as they end."""
    found: list[tuple[str, bool]] = []
    producer.add_hook(after=lambda c: found.append((c.queue.broker_name, c.error is not None or c.latency_ms >= 550)))
    return found


def with_one_slow(
    pair: LocalBroker, topic: str, frozen: Any, seconds: float, **how: Any
) -> tuple[RecordingSender, set[str]]:
    """Freeze broker-a under a new producer and send until it is used again; which brokers were slow.

    On an overloaded machine the other broker may be slow as well: then both are avoided, so either is used; or we are, and
    broker-a goes on before it is asked. Neither shows anything, and it is done once more.
    """
    for _ in range(20):
        producer, sender = recorded(pair.name_server, send_latency_fault=True, **how)
        with producer:
            producer.queues(topic)
            ended = endings(producer)
            frozen(seconds)
            send_until_second(producer, sender, "broker-a", topic)
        slow = {name for name, isolates in ended if isolates}
        if slow == {"broker-a"} and dict(reversed(ended))["broker-a"]:  # its first one was
            break
    return sender, slow


def test_broker_that_was_slow_gets_nothing_for_two_seconds(pair: LocalBroker, topic: str, frozen: Any) -> None:
    sender, slow = with_one_slow(pair, topic, frozen, 0.8)
    assert slow == {"broker-a"}
    assert gap_after_first(sender, "broker-a") > 2.4


def test_failing_broker_is_left_during_call_and_retried_later(pair: LocalBroker, topic: str, frozen: Any) -> None:
    sender, slow = with_one_slow(
        pair, topic, frozen, 1.5, fault_tables=QUICK, attempt_timeout_s=0.5, send_timeout_s=30.0
    )
    brokers = sender.brokers()
    at = brokers.index("broker-a")
    assert brokers[at + 1] == "broker-b"
    assert "broker-b" not in slow
    assert gap_after_first(sender, "broker-a") > 2.4


def test_frozen_broker_is_retried_without_fault_mode(pair: LocalBroker, topic: str, frozen: Any) -> None:
    """Tried a second time when it is its turn, while it still answers nothing: the retry of a message passes all its queues."""
    producer, _ = recorded(pair.name_server, attempt_timeout_s=2.0, send_timeout_s=60.0)
    silent: list[str] = []
    with producer:
        producer.queues(topic)
        producer.add_hook(after=lambda c: silent.append(c.queue.broker_name) if c.error is not None else None)
        thaw = frozen(60)
        for _ in range(3 * 8):
            producer.send(Message(topic, b"x"))
            if silent.count("broker-a") >= 2:
                break
        thaw()
    assert silent.count("broker-a") >= 2


def counts(mq: LocalBroker, topic: str) -> set[int]:
    indexed(mq)
    return {bounds.max_offset for bounds in mq.admin.describe_topic(topic).values()}


def test_queues_of_both_brokers_take_turns(pair: LocalBroker, topic: str) -> None:
    producer, sender = recorded(pair.name_server)
    with producer:
        for _ in range(80):
            assert producer.send(Message(topic, b"x")).status is SendStatus.SEND_OK
    assert Counter(sender.brokers()) == {"broker-a": 40, "broker-b": 40}
    assert counts(pair, topic) == {10}


def test_queues_that_are_added_are_used_after_the_next_refresh(pair: LocalBroker, topic: str) -> None:
    producer, _ = recorded(pair.name_server, route_refresh_s=0.5)
    with producer:
        send_for(producer, topic, 0.3)
        pair.create_topic(topic, queues=7, resize=True)
        send_until(producer, topic, lambda: 0 not in counts(pair, topic), "new queues get nothing")
        assert len(pair.admin.describe_topic(topic)) == 14


def test_killed_broker_leaves_route_and_fault_table_and_returns(pair: LocalBroker, topic: str) -> None:
    producer, sender = recorded(pair.name_server, send_latency_fault=True, route_refresh_s=0.5)
    with producer:
        send_until(
            producer, topic, lambda: set(producer.faults.faults) == {"broker-a", "broker-b"}, "a broker gets nothing"
        )
        killed(pair, "broker-a")
        send_until(producer, topic, lambda: set(producer.faults.faults) == {"broker-b"}, "it is not forgotten")
        gone = time.monotonic()
        send_for(producer, topic, 0.5)
        assert set(sender.brokers(gone)) == {"broker-b"}
        assert set(producer.faults.faults) == {"broker-b"}
        pair.restart("broker-a")
        back = time.monotonic()
        send_until(producer, topic, lambda: "broker-a" in sender.brokers(back), "it gets nothing again")


def test_automatic_batches_survive_a_killed_broker(pair: LocalBroker, topic: str) -> None:
    producer, _ = recorded(
        pair.name_server, auto_batch=True, send_latency_fault=True, retries=None, attempt_timeout_s=2.0,
        send_timeout_s=60.0,
    )  # fmt: skip
    results: list[Future[SendResult]] = []
    acknowledged: list[int] = []
    took: list[str] = []  # the brokers of attempts that were answered
    failed: Counter[bytes] = Counter()  # by message, the attempts without an answer: each may have stored it
    missed = threading.Event()

    def kill_under_a_batch(context: SendContext) -> None:
        """Kill broker-a when a batch for it is about to leave: one at least meets a dead broker, whatever is avoided then."""
        ready = len(results) >= 3000 and "broker-a" in took and not acknowledged
        if ready and context.queue.broker_name == "broker-a":
            acknowledged.extend(i for i, result in enumerate(results) if result.done())
            if acknowledged:
                killed(pair, "broker-a")

    def note(context: SendContext) -> None:
        if context.error is None:
            took.append(context.queue.broker_name)
            return
        failed.update(bytes(item.body) for item in decode_batch(context.request.data))
        if acknowledged and context.queue.broker_name == "broker-a":
            missed.set()

    producer.add_hook(kill_under_a_batch, note)
    limit = Deadline.after(60)
    with producer:
        while len(results) < 6000 or not missed.is_set():
            assert not limit.expired, "nobody felt that a broker was killed"
            results.append(producer.send_async(Message(topic, f"{len(results)}".encode())))
        ids = {result.result(60).msg_id for result in results}
    assert pair.pid("broker-a") is None
    assert len(ids) == len(results)
    pair.restart("broker-a")
    read = JavaPeer(pair.name_server).read(topic, total(pair, topic, len(results)))
    found = Counter(message.body for message in read)
    assert found.keys() == {f"{i}".encode() for i in range(len(results))}
    assert ids <= {message.id for message in read}
    # Only what was sent again may be there again: on a slow machine that may be before the broker was killed, too.
    assert acknowledged
    assert not {body: times for body, times in found.items() if times > 1 + failed[body]}


def test_route_lost_by_name_server_is_not_taken_from_template(make_cluster: Any) -> None:
    """As after its restart: the template is registered again, the topic is not yet."""
    mq = make_cluster({"autoCreateTopicEnable": True}, brokers=2)
    mq.admin.create_topic("kept", queues=2, brokers=["broker-a"])
    producer, sender = recorded(mq.name_server, send_timeout_s=5.0)
    with producer:
        producer.send(Message("kept", b"before"))
        lost = rpc.DELETE_TOPIC_IN_NAMESRV.request(topic="kept")
        assert mq.admin.offset_reader.rpc_client.request(mq.name_server, lost).code == 0
        assert sender.publish_queues("TBW102", Deadline.after(30.0), refresh=True)
        producer._engine.routes.refresh(Deadline.after(30.0))
        for _ in range(8):
            producer.send(Message("kept", b"after"))
    assert set(sender.brokers()) == {"broker-a"}
