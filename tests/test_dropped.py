"""Public clients that were dropped without ``close``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from rocketmq_spark import Consumer, Message, Producer, PullConsumer, SimpleConsumer, aio, session
from rocketmq_spark.aio.producer import MAX_LOOP_BODY_BYTES
from rocketmq_spark.base import dropped
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import LocalProtocolError, RocketMQError
from rocketmq_spark.model import SendResult
from rocketmq_spark.session import consumers, producers
from tests.fakes.group_member import FakeBrokers, FakeMember
from tests.fakes.pop_member import FakeProxy
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.mockbroker import MockBroker, eventually, ok, refuse, route

NOWHERE = "127.0.0.1:1"
WAIT_S = 60.0
TOPIC = "t"


def settle() -> None:
    dropped.wait_for_dropped(Deadline.after(WAIT_S))


def gone(reference: Callable[[], object]) -> None:
    """Wait until an object is collected: another thread may be returning from a call that refers to it."""
    eventually(lambda: gc.collect() >= 0 and reference() is None)


def threads_of(group: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if f"-{group}-" in thread.name]


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    settle()
    session.close_all()


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker({Request.HEART_BEAT: ok(), Request.UNREGISTER_CLIENT: ok()}) as made:
        made.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": made.address}))
        made.on(Request.GET_CONSUMER_LIST_BY_GROUP, refuse(1))
        yield made


def unregistered(broker: MockBroker, kind: str) -> list[str]:
    return [command.ext[kind] for command in broker.seen(Request.UNREGISTER_CLIENT) if kind in command.ext]


def failing(send: Callable[[], object]) -> None:
    with contextlib.suppress(RocketMQError):
        send()


def sends(producer: Producer) -> None:
    failing(lambda: producer.send(Message(TOPIC, b"x"), timeout_s=0.1))


def sends_async(producer: Producer) -> None:
    failing(lambda: producer.send_async(Message(TOPIC, b"x"), lambda outcome: None, timeout_s=0.1).result(WAIT_S))


def requests(producer: Producer) -> None:
    failing(lambda: producer.request(Message(TOPIC, b"x"), timeout_s=0.1))


USES = {"idle": lambda producer: None, "send": sends, "async": sends_async, "request": requests}
PRODUCERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batching": {"auto_batch": True},
    "transactions": {"transaction_check": lambda half: "COMMIT"},
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("options", PRODUCERS.values(), ids=PRODUCERS)
def test_a_dropped_producer_leaves_no_thread(use: Callable[[Producer], None], options: dict[str, Any]) -> None:
    producer = Producer(NOWHERE, "dropped", **options)
    reference = weakref.ref(producer)
    use(producer)
    assert threads_of("dropped")
    del producer
    gone(reference)
    eventually(lambda: not threads_of("dropped"))


def test_a_dropped_half_message_does_not_keep_its_producer(broker: MockBroker) -> None:
    broker.on(Request.SEND_MESSAGE_V2, ok(msgId="0A", queueId=0, queueOffset=7, transactionId="tx"))
    broker.on(Request.GET_TOPIC_CONFIG, refuse(1))
    producer = Producer(broker.address, "dropped", transaction_check=lambda half: "COMMIT")
    half = producer.send_half(Message(TOPIC, b"x"))
    reference = weakref.ref(producer)
    del producer
    gc.collect()
    assert reference() is not None, "the half message can still be decided"
    del half
    gone(reference)
    eventually(lambda: not threads_of("dropped"))


def test_a_dropped_producer_leaves_its_group(broker: MockBroker) -> None:
    Producer(broker.address, "dropped", transaction_check=lambda half: "COMMIT").queues(TOPIC)
    eventually(lambda: unregistered(broker, "producerGroup") == ["dropped"])


class Service:
    """Owns a producer that asks a method of it."""

    def __init__(self, kind: type[Producer] | type[aio.Producer], server: str) -> None:
        self.producer: Any = kind(server, "dropped", transaction_check=self.check)

    def check(self, half: object) -> str:
        return "COMMIT"


@pytest.mark.parametrize("kind", [Producer, aio.Producer])
def test_a_dropped_owner_of_a_producer_leaves_no_thread(kind: type[Producer]) -> None:
    async def made() -> weakref.ref[Any]:
        return weakref.ref(Service(kind, NOWHERE))

    gone(asyncio.run(made()))
    eventually(lambda: gc.collect() >= 0 and not threads_of("dropped"))


def test_a_check_is_kept_with_its_producer() -> None:
    """Nobody else has the object of the method; the class of the second one cannot be referred to weakly."""

    class Slots:
        __slots__ = ()

        def check(self, half: object) -> str:
            return "ROLLBACK"

    for check, decision in ((Service.__new__(Service).check, "COMMIT"), (Slots().check, "ROLLBACK")):
        producer = Producer(NOWHERE, "dropped", transaction_check=check)
        del check
        gc.collect()
        asked: Any = producer.settings.transaction_check
        with contextlib.closing(producer):
            assert asked.args[0](None) == decision


def test_a_warning_names_what_was_dropped() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Producer(NOWHERE, "some")
        PullConsumer(NOWHERE, "other")
        settle()
    said = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert [text.partition(" was dropped")[0] for text in said] == [
        "the producer of group 'some'",
        "the pull consumer of group 'other'",
    ]


def test_a_warning_that_raises_does_not_keep_it_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Producer(NOWHERE, "dropped")
        settle()
    assert not threads_of("dropped")


def test_what_was_closed_is_not_closed_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (Producer(NOWHERE, "g"), PullConsumer(NOWHERE, "g")):
            made.close()
            del made
        settle()


def test_a_constructor_that_raises_leaves_nothing_to_close() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for make in (Producer, PullConsumer, SimpleConsumer):
            with pytest.raises(RocketMQError):
                make(NOWHERE, "no group")
        settle()
    assert not [warning for warning in caught if warning.category is ResourceWarning]


def test_a_dropped_pull_consumer_leaves_its_group(broker: MockBroker) -> None:
    consumer = PullConsumer(broker.address, "g")
    consumer.subscribe(TOPIC)
    del consumer
    eventually(lambda: unregistered(broker, "consumerGroup") == ["g"])
    eventually(lambda: not threads_of("g"))


def test_the_next_consumer_waits_until_a_dropped_one_has_left(broker: MockBroker) -> None:
    """A notebook cell that runs twice."""
    consumer = PullConsumer(broker.address, "g")
    consumer.subscribe(TOPIC)
    consumer.itself = consumer  # type: ignore[attr-defined]  # garbage that only a collection finds
    consumer = PullConsumer(broker.address, "g")
    consumer.subscribe(TOPIC)
    assert unregistered(broker, "consumerGroup") == ["g"]
    consumer.close()


def test_a_second_consumer_is_told_to_close_the_other_one(broker: MockBroker) -> None:
    with PullConsumer(broker.address, "g") as first, PullConsumer(broker.address, "g") as second:
        first.subscribe(TOPIC)
        with pytest.raises(LocalProtocolError, match=r"already\. Close the other member first"):
            second.subscribe(TOPIC)
        assert not unregistered(broker, "consumerGroup")


def test_a_dropped_simple_consumer_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FakeProxy(t=1)
    monkeypatch.setattr(consumers, "pop_member", lambda options: proxy)
    consumer = SimpleConsumer(group="g", proxy_endpoint=NOWHERE)
    consumer.subscribe(TOPIC)
    assert not proxy.closed
    del consumer
    eventually(lambda: proxy.closed)


def test_a_simple_consumer_whose_proxy_is_away_leaves_no_thread() -> None:
    def threads() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [
            name for name in names if name.startswith("rocketmq-telemetry-") or name == "rocketmq-dropped-heartbeat"
        ]

    consumer = SimpleConsumer(group="dropped", proxy_endpoint=NOWHERE, connect_timeout="100ms")
    with pytest.raises(RocketMQError):
        consumer.subscribe(TOPIC)
    assert threads()
    del consumer
    eventually(lambda: gc.collect() >= 0 and not threads())


def test_a_started_consumer_runs_on_when_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a thread does: its listener is user code that was started, and only ``stop`` ends it."""
    brokers = FakeBrokers(Time(), {"t": "a:0"})
    monkeypatch.setattr(consumers, "member", lambda options: FakeMember(brokers, "me"))
    heard: SimpleQueue[bytes] = SimpleQueue()
    consumer = Consumer(NOWHERE, "g", consume_from_where="earliest")
    consumer.subscribe("t")
    consumer.start(lambda messages, context: heard.put(messages[0].body))
    running, reference = consumer._running, weakref.ref(consumer)
    assert running is not None
    del consumer
    gone(reference)
    settle()
    brokers.send(brokers.topics["t"][0], b"later")
    assert heard.get(timeout=WAIT_S) == b"later"
    running.stop(Deadline.after(WAIT_S))


def test_an_unanswered_send_keeps_its_producer_open(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = ScriptedSender(Time())
    monkeypatch.setattr(producers, "sender", lambda options: sender)
    sender.script = [None]

    def send() -> Future[SendResult]:
        return Producer(NOWHERE, "g").send_async(Message("T", b"x"), timeout_s=WAIT_S)

    result = send()
    settle()
    assert not result.done()
    sender.answer(0)
    assert result.result(WAIT_S).queue is not None


def test_a_fork_does_not_close_what_its_parent_has() -> None:
    producer = Producer(NOWHERE, "g")
    if (child := os.fork()) == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dropped._dropped_objects.start()  # as another object of the child does
            del producer
            settle()
        os._exit(len(caught))
    assert os.waitpid(child, 0)[1] == 0
    producer.close()


async def _send_and_drop() -> None:
    producer = aio.Producer(NOWHERE, "dropped")
    for size in (1, MAX_LOOP_BODY_BYTES + 1):  # the second one is sent by another thread
        await producer.send(Message("T", bytes(size)))
    assert [thread for thread in threading.enumerate() if thread.name == "rocketmq-aio-send"]


def test_a_dropped_producer_of_coroutines_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = ScriptedSender(Time())
    monkeypatch.setattr(producers, "sender", lambda options: sender)
    asyncio.run(_send_and_drop())
    eventually(lambda: gc.collect() >= 0 and not threads_of("dropped"))
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("rocketmq-aio")])
