"""``ports.Sender``: the remoting client on a real broker, and the scripted sender of the producer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from rocketmq_spark import Consumer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import RocketMQError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.ports import Sender
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.helpers import awaited


class Case(NamedTuple):
    """A sender, a topic that it may write to, and what the tests do beside it."""

    sender: Sender
    topic: str
    batch_topic: Callable[[], str]
    compaction_topic: Callable[[], str]
    member: Callable[[str], AbstractContextManager[object]]
    """A consumer that has subscribed to a topic, while the context lasts."""


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "scripted"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param != "real":
        return in_memory()
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    given = options.parse({"nameServer": mq.name_server})
    sender = session.client(given.for_role("producer")).sender
    batched = partial(make_topic, attributes={"queue.type": "BatchCQ"})
    compacted = partial(make_topic, attributes={"cleanup.policy": "COMPACTION"})
    return Case(sender, make_topic(queues=2), batched, compacted, partial(subscribed, mq))


def in_memory() -> Case:
    scripted: Any = ScriptedSender(Time())

    def batch_topic() -> str:
        scripted.batch_topics["B"] = True
        return "B"

    def compaction_topic() -> str:
        scripted.compaction_topics.add("C")
        return "C"

    @contextmanager
    def member(topic: str) -> Iterator[None]:
        scripted.consumed_topics.add(topic)
        yield
        scripted.consumed_topics.remove(topic)

    return Case(scripted, "T", batch_topic, compaction_topic, member)


@contextmanager
def subscribed(mq: LocalBroker, topic: str) -> Iterator[Consumer]:
    with Consumer(name_server=mq.name_server, group=f"of-{topic}") as consumer:
        consumer.subscribe(topic)
        consumer.start(lambda messages, context: None)
        yield consumer


def request(*bodies: bytes) -> SendRequest:
    if len(bodies) == 1:
        return SendRequest("contracts", *bodies)
    ids = ("UNIQ_KEY\x010A\x02", "UNIQ_KEY\x010B\x02")
    items = [BatchItem(body, properties) for body, properties in zip(bodies, ids, strict=True)]
    return SendRequest("contracts", encode_batch(items), batch=True)


def test_queues_are_the_same_object_while_nothing_changes(case: Case) -> None:
    sender, topic = case.sender, case.topic
    queues = sender.publish_queues(topic, soon())
    assert {queue.topic for queue in queues} == {topic}
    assert sender.publish_queues(topic, soon()) is queues
    assert set(queues) <= set(sender.all_queues(topic, soon()))


@pytest.mark.parametrize("verb", ["publish_queues", "all_queues", "has_online_consumer"])
def test_a_topic_that_is_not_there(case: Case, verb: str) -> None:
    sender = case.sender
    with pytest.raises(RouteNotFound) as caught:
        getattr(sender, verb)("no-such-topic", soon())
    assert caught.value.broker_code == Response.TOPIC_NOT_EXIST


@pytest.mark.parametrize("bodies", [(b"x",), (b"x", b"y")], ids=["one", "a batch"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_acknowledgement_is_one_for_all_messages_of_a_request(
    case: Case, mode: str, bodies: tuple[bytes, ...]
) -> None:
    """With the place of the first of them, the broker's ids of all, and no id of the producer's."""
    sender, topic = case.sender, case.topic
    queue = sender.publish_queues(topic, soon())[0]
    places: list[int] = []
    for _ in range(2):
        if mode == "sync":
            result = sender.send(queue, request(*bodies), soon())
        else:
            outcomes: SimpleQueue[SendResult | RocketMQError] = SimpleQueue()
            sender.send_async(queue, request(*bodies), soon(), outcomes.put)
            got = outcomes.get(timeout=60)
            assert isinstance(got, SendResult)
            assert outcomes.empty()
            result = got
        assert (result.status, result.msg_id, result.queue) == (SendStatus.SEND_OK, "", queue)
        assert len((result.offset_msg_id or "").split(",")) == len(bodies)
        assert result.queue_offset is not None
        places.append(result.queue_offset)
    assert places[1] - places[0] >= len(bodies)


def test_a_broker_that_is_not_there(case: Case) -> None:
    sender, topic = case.sender, case.topic
    nowhere = MessageQueue(topic, "no-such-broker", 0)
    with pytest.raises(RocketMQError):
        sender.send(nowhere, request(b"x"), soon())
    outcomes: SimpleQueue[SendResult | RocketMQError] = SimpleQueue()
    sender.send_async(nowhere, request(b"x"), soon(), outcomes.put)
    assert isinstance(outcomes.get(timeout=60), RocketMQError)
    assert not sender.probe("no-such-broker", topic, soon())
    assert sender.probe(sender.publish_queues(topic, soon())[0].broker_name, topic, soon())
    assert sender.max_timer_delays_ms(topic, ["no-such-broker"], soon()) == {}


def test_a_topic_is_consumed_while_a_member_is_there(case: Case) -> None:
    sender, topic = case.sender, case.topic
    assert not sender.has_online_consumer(topic, soon())
    with case.member(topic):
        awaited(lambda: sender.has_online_consumer(topic, soon()))
    awaited(lambda: not sender.has_online_consumer(topic, soon()))


def test_how_batches_are_stored(case: Case) -> None:
    assert case.sender.batch_storage(case.batch_topic(), soon()) == BatchStorage(as_one_message=True)
    assert case.sender.batch_storage(case.compaction_topic(), soon()) == BatchStorage(is_compacted=True)
    assert case.sender.batch_storage(case.topic, soon()) == BatchStorage()
