"""``ports.Resender``: the one that sends through an engine to a real broker, and the one in memory of the spool's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, Resent, SendRequest, SpooledSend
from rocketmq_spark.ports import Resender
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.resender import FakeResender
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import ManualTimer, Time


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "in memory"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Resender, MessageQueue]]:
    """One that sends, and a queue."""
    if request.param != "real":
        yield FakeResender(), MessageQueue("T", "a", 0)
        return
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    parsed = options.parse({"nameServer": mq.name_server}).for_role("producer")
    timer = Timer("contracts")
    resender = EngineResender(session.sender(parsed), ProducerSettings(group="contracts"), timer)
    yield resender, MessageQueue(make_topic(queues=1), mq.brokers[0], 0)
    resender.close(Deadline.after(10))
    timer.close()


def send(queue: MessageQueue, chosen: bool) -> SpooledSend:
    request = SendRequest("contracts", b"x", "UNIQ_KEY\x01ID\x02")
    return SpooledSend(queue.topic, request, queue if chosen else None, ("ID",))


@pytest.mark.parametrize("chosen", [True, False], ids=["to its queue", "to any queue"])
def test_each_is_told_once_and_which_queue_has_it(case: tuple[Resender, MessageQueue], chosen: bool) -> None:
    resender, queue = case
    told: SimpleQueue[Resent] = SimpleQueue()
    for _ in range(3):
        resender.resend(send(queue, chosen), told.put)
    assert [told.get(timeout=60) for _ in range(3)] == [Resent(queue)] * 3
    resender.close(Deadline.after(10))
    assert told.empty()


def test_after_the_close_it_has_not_failed_for_good(case: tuple[Resender, MessageQueue]) -> None:
    resender, queue = case
    resender.close(Deadline.after(0))
    told: SimpleQueue[Resent] = SimpleQueue()
    resender.resend(send(queue, True), told.put)
    found = told.get(timeout=60)
    assert (found.queue, found.is_temporary) == (None, True)
    assert found.error


def engine_without_answers() -> Resender:
    sender = ScriptedSender(Time(), "a:0")
    sender.script = [None]
    return EngineResender(sender, ProducerSettings(group="contracts"), ManualTimer(sender.time))


def fake_without_answers() -> Resender:
    fake = FakeResender()
    fake.answer = lambda send: None
    return fake


@pytest.mark.parametrize("make", [engine_without_answers, fake_without_answers])
def test_the_close_fails_sends_without_an_answer(make: Callable[[], Resender]) -> None:
    resender, told = make(), SimpleQueue[Resent]()
    resender.resend(send(MessageQueue("T", "a", 0), True), told.put)
    assert told.empty()
    for _ in range(2):
        resender.close(Deadline.after(0))
    failed = told.get_nowait()
    assert (failed.queue, failed.is_temporary) == (None, True)
    assert told.empty()
