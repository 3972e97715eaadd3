"""A pull consumer that is far behind, on real brokers: it reads ahead, and gives each message once in the order of its queue."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark import Producer, PullConsumer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.pull.read_ahead import PlainRead
from tests.helpers import WAIT_S, awaited, indexed, killed, told
from tests.live.consumer.test_pull_consumer import Make, group, make, texts

__all__ = ["group", "make"]


def backlog(mq: LocalBroker, topic: str, count: int) -> Counter[str]:
    """``count`` messages for each queue, in batches; their ids."""
    ids: list[str] = []
    with Producer(name_server=mq.name_server, group="p_pull") as producer:
        for queue in producer.queues(topic):
            for first in range(0, count, 500):
                many = [Message(topic, b"%d" % i) for i in range(first, min(count, first + 500))]
                ids += producer.send_batch(many, queue=queue).msg_id.split(",")
    assert len(ids) == len(set(ids))
    indexed(mq)
    return Counter(ids)


@pytest.mark.parametrize("batch", [False, True], ids=["plain", "inner batches"])
@pytest.mark.parametrize("arrow", [False, True], ids=["messages", "rows"])
def test_each_backlog_message_is_read_ahead_once_in_queue_order(
    rocketmq: LocalBroker,
    make_topic: Callable[..., str],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    arrow: bool,
    batch: bool,
) -> None:
    topic = make_topic(queues=2, attributes={"queue.type": "BatchCQ"} if batch else None)
    sent = backlog(rocketmq, topic, 6000)
    ahead: list[int] = []
    copies = PlainRead._plain_answers

    def noted(run: PlainRead, fetched: Any) -> Any:
        ahead.append(len(fetched.answers))
        return copies(run, fetched)

    monkeypatch.setattr(PlainRead, "_plain_answers", noted)
    ids: Counter[str] = Counter()
    places: dict[MessageQueue, list[int]] = {}
    with make(consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        while ids.total() < 12000:
            if arrow:
                rows = consumer.poll_arrow(20.0)
                found = zip(*(rows[name].to_pylist() for name in ("msgId", "queueId", "queueOffset")), strict=True)
            else:
                found = ((m.msg_id, m.queue_id, m.queue_offset) for m in consumer.poll(20.0))
            before = ids.total()
            for msg_id, queue_id, offset in found:
                ids[msg_id] += 1
                places.setdefault(MessageQueue(topic, rocketmq.brokers[0], queue_id), []).append(offset)
            assert ids.total() > before
        consumer.commit()
        assert {consumer.committed(queue) for queue in consumer.assignment()} == {6000}
    assert len(ids) == ids.total() == 12000
    assert batch or ids == sent  # an inner batch is acknowledged by one id
    assert list(places.values()) == [list(range(6000))] * 2
    assert sum(ahead) > (0 if batch else 200)  # answers of 32, of 375 in all


def test_a_seek_in_a_backlog_goes_on_there(rocketmq: LocalBroker, make_topic: Callable[..., str], make: Make) -> None:
    topic = make_topic(queues=1)
    backlog(rocketmq, topic, 6000)
    with make(consume_from_where="earliest") as consumer:
        (queue,) = consumer.queues(topic)
        consumer.assign([queue])
        consumer.poll(20.0)
        consumer.seek(queue, 5990)
        assert texts(consumer, 10) == list(map(str, range(5990, 6000)))
        consumer.seek(queue, 100)
        assert texts(consumer, 5900) == list(map(str, range(100, 6000)))


def test_a_backlog_of_a_broker_that_was_killed_comes_whole(pair: LocalBroker, group: str) -> None:
    """It is back only when the read ahead, or a pull, has said that it misses it; until then no other queue is read."""
    topic = f"behind_{group}"
    pair.create_topic(topic, queues=1)
    sent = backlog(pair, topic, 6000)
    with PullConsumer(name_server=pair.name_server, group=group, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        victim, other = consumer.assignment()
        consumer.pause(other)
        ids = Counter(message.msg_id for _ in range(20) for message in consumer.poll(20.0))
        assert 0 < ids.total() < 6000, "it is in the middle"

        def more() -> None:
            ids.update(message.msg_id for message in consumer.poll(0.05))

        with told("the read waits for") as waits, told("failed, retrying", logging.INFO) as again:
            killed(pair, victim.broker_name)
            awaited(more, lambda _: waits.is_set() or again.is_set())
        assert ids.total() < 6000, "all of it was here before"
        consumer.resume(other)
        pair.restart(victim.broker_name)
        deadline = Deadline.after(WAIT_S)
        while ids.keys() != sent.keys() and not deadline.expired:
            ids.update(message.msg_id for message in consumer.poll(1.0))
    assert ids == sent
