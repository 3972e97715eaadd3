"""What the delay service reads and tells with: on a real broker, and in memory in a node's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Message, Producer, PullConsumer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.delay import nodes
from tests.helpers import total


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "of a node"])
def reading(request: pytest.FixtureRequest) -> Iterator[tuple[Any, MessageQueue]]:
    """A reader that has one queue of a topic, with the messages 0 to 2, and that queue."""
    if request.param != "real":
        topic = nodes.Topic()
        for i in range(3):
            topic.put(b"%d" % i)
        reader = nodes.Reader(topic)
        reader.own(nodes.QUEUES[0])
        yield reader, nodes.QUEUES[0]
        return
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    queue = MessageQueue(make_topic(queues=2), mq.brokers[0], 0)
    with Producer(name_server=mq.name_server, group="contracts") as producer:
        for i in range(3):
            producer.send(Message(queue.topic, b"%d" % i), queue=queue)
    total(mq, queue.topic, 3)
    given = {"name_server": mq.name_server, "group": f"g-{queue.topic}", "consume_from_where": "earliest"}
    with PullConsumer(**given) as consumer:  # type: ignore[arg-type]
        consumer.assign([queue])
        yield consumer, queue


def bodies(reader: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        polled = [message.body for message in reader.poll(20.0)]
        assert polled, found
        found += polled
    return found


def test_assigned_queue_is_read_in_order_and_then_is_empty(reading: tuple[Any, MessageQueue]) -> None:
    reader, queue = reading
    assert list(reader.assignment()) == [queue]
    assert bodies(reader, 3) == [b"0", b"1", b"2"]
    assert reader.poll(0.0) == []


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_who_seeks_goes_on_there(reading: tuple[Any, MessageQueue], offset: int) -> None:
    reader, queue = reading
    assert bodies(reader, 3)[-1] == b"2"
    reader.seek(queue, offset)
    assert bodies(reader, 3 - offset) == [b"%d" % i for i in range(offset, 3)]
    assert reader.poll(0.0) == []


@pytest.mark.parametrize("offset", [-1, 4])
def test_an_offset_that_the_queue_does_not_have_is_refused(reading: tuple[Any, MessageQueue], offset: int) -> None:
    """Below the minimum, and past the end; it goes on where it was."""
    reader, queue = reading
    with pytest.raises(OffsetError):
        reader.seek(queue, offset)
    assert bodies(reader, 3) == [b"0", b"1", b"2"]


def test_a_queue_of_somebody_else_is_not_sought(reading: tuple[Any, MessageQueue]) -> None:
    reader, queue = reading
    with pytest.raises(OffsetError):
        reader.seek(queue._replace(queue_id=1), 0)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "of a node"])
def telling(request: pytest.FixtureRequest) -> tuple[Any, str, MessageQueue, MessageQueue]:
    """What tells brokers how far a node is, its group, and two queues, the first of which has the messages 0 to 2."""
    if request.param != "real":
        topic = nodes.Topic()
        for i in range(3):
            topic.put(b"%d" % i)
        return topic, "g", *nodes.QUEUES  # type: ignore[return-value]
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    first, second = (MessageQueue(make_topic(queues=2), mq.brokers[0], i) for i in range(2))
    second = second._replace(topic=first.topic)
    with Producer(name_server=mq.name_server, group="contracts") as producer:
        for i in range(3):
            producer.send(Message(first.topic, b"%d" % i), queue=first)
    total(mq, first.topic, 3)
    member = session.member(options.parse({"nameServer": mq.name_server}).for_role("producer"))
    member.queues(first.topic, Deadline.after(20))
    return member, f"g-{first.topic}", first, second


def test_three_numbers_are_told_and_asked_for(telling: tuple[Any, str, MessageQueue, MessageQueue]) -> None:
    member, group, queue, other = telling
    soon = Deadline.after(20)
    assert member.committed(group, queue, soon, False) is None
    assert member.commit(group, {queue: 2}, soon) == {}
    assert member.committed(group, queue, soon, False) == 2
    assert member.committed(group, other, soon, False) is None
    assert member.committed(f"{group}_progress", queue, soon, False) is None
    assert member.commit(group, {queue: 1}, soon) == {}
    assert member.committed(group, queue, soon, False) == 1
    bounds = [member.bounds(each, soon) for each in (queue, other)]
    assert [(each.min_offset, each.max_offset) for each in bounds] == [(0, 3), (0, 0)]
    assert [member.search_offset(queue, at, soon, group) for at in (0, 1 << 60)] == [0, 3]
