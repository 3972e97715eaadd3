"""Queues, brokers and topics that come and go, while a query runs and while it is down: no message is missed or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.helpers import killed
from tests.reading import Run, feed, names

Continue = Callable[[Run], Run]


@pytest.fixture(params=["running", "down"])
def go_on(request: pytest.FixtureRequest) -> Callable[..., Run]:
    """The run that goes on after a change: the same, or a new one from its offset."""

    def chosen(run: Run, mq: LocalBroker, **options: object) -> Run:
        if request.param == "running":
            return run
        again = Run(mq, run.offset, **options)
        again.read += run.read
        return again

    return chosen


def exactly(run: Run, sent: list[str]) -> None:
    run.drain(sent)
    assert run.batch() == []
    assert sorted(run.read) == sorted(sent)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_new_queues_start_at_their_first_message(rocketmq, make_topic, go_on, start):
    topic = make_topic(queues=2)
    run = Run(rocketmq, subscribe=topic, startingOffsets=start)
    sent = feed(rocketmq, topic, 6)
    exactly(run, sent)
    rocketmq.create_topic(topic, 5, resize=True)
    sent += feed(rocketmq, topic, 10)
    run = go_on(run, rocketmq, subscribe=topic, startingOffsets=start)
    exactly(run, sent)
    assert {queue.queue_id for queue in run.positions} == set(range(5))


def test_new_topics_of_a_pattern_start_at_their_first_message(rocketmq, go_on):
    (prefix,) = names(1, "family")
    rocketmq.create_topic(f"{prefix}-a", 2)
    options = {"subscribePattern": f"{prefix}-.*"}
    run = Run(rocketmq, startingOffsets="latest", **options)
    sent = feed(rocketmq, f"{prefix}-a", 4)
    exactly(run, sent)
    rocketmq.create_topic(f"{prefix}-b", 2)
    rocketmq.create_topic(f"x{prefix}-c", 2)
    feed(rocketmq, f"x{prefix}-c", 4)
    sent += feed(rocketmq, f"{prefix}-b", 4)
    run = go_on(run, rocketmq, **options)
    exactly(run, sent)
    assert {queue.topic for queue in run.positions} == {f"{prefix}-a", f"{prefix}-b"}


def test_added_topic_starts_at_minimum_and_removed_is_dropped(rocketmq, make_topic, caplog):
    first, second, third = (make_topic(queues=2) for _ in range(3))
    sent = {topic: feed(rocketmq, topic, 4) for topic in (first, second, third)}
    run = Run(rocketmq, subscribe=[first, second], startingOffsets="earliest")
    exactly(run, sent[first] + sent[second])
    unread = feed(rocketmq, first, 4)
    more = feed(rocketmq, second, 4)
    again = Run(rocketmq, run.offset, subscribe=[second, third], startingOffsets="latest")
    exactly(again, [*more, *sent[third]])
    assert {queue.topic for queue in again.positions} == {second, third}
    assert not set(unread) & set(again.read)
    texts = [record.getMessage() for record in caplog.records]
    assert any("are removed from the offsets" in text and first in text for text in texts)
    assert any("start at their first offset" in text and third in text for text in texts)
    assert not any("cannot be read any more" in text for text in texts)
    # Back again it is new: at its minimum.
    back = Run(rocketmq, again.offset, subscribe=[first, second, third])
    exactly(back, [*sent[first], *unread])


def test_read_queues_that_shrink_are_drained_first(rocketmq, make_topic, go_on):
    """Safe shrinking, as the lab describes it: write fewer, read all, and when they are empty read fewer."""
    topic = make_topic(queues=4)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    sent = feed(rocketmq, topic, 8)
    rocketmq.admin.create_topic(topic, read_queues=4, write_queues=2)
    sent += feed(rocketmq, topic, 4)
    run = go_on(run, rocketmq, subscribe=topic)
    exactly(run, sent)
    rocketmq.admin.create_topic(topic, read_queues=2, write_queues=2)
    sent += feed(rocketmq, topic, 4)
    run = go_on(run, rocketmq, subscribe=topic)
    exactly(run, sent)


def test_queues_that_are_written_but_not_read_are_not_missed(rocketmq, make_topic):
    """More write than read queues: what lies in the others appears when they may be read."""
    topic = make_topic(queues=2)
    run = Run(rocketmq, subscribe=topic)
    rocketmq.admin.create_topic(topic, read_queues=2, write_queues=3)
    hidden = feed(rocketmq, topic, 3, queues=[2])
    seen = feed(rocketmq, topic, 4, queues=[0, 1])
    exactly(run, seen)
    rocketmq.create_topic(topic, 3, resize=True)
    exactly(run, seen + hidden)


@pytest.fixture(scope="module")
def growing() -> Iterator[LocalBroker]:
    with LocalBroker(quiet=True) as mq:
        yield mq


def test_a_new_broker_is_read_from_its_first_message(growing, go_on, caplog):
    (topic,) = names(1, "wide")
    growing.create_topic(topic, 2)
    run = Run(growing, subscribe=topic, startingOffsets="latest")
    sent = feed(growing, topic, 4)
    exactly(run, sent)
    new = growing.add_broker()
    growing.create_topic(topic, 2, broker=new)
    queues = [MessageQueue(topic, new, i) for i in range(2)]
    sent += feed(growing, topic, 8)
    run = go_on(run, growing, subscribe=topic, startingOffsets="latest")
    exactly(run, sent)
    assert set(queues) <= run.positions.keys()
    # And when it goes away its queues are waited for, the others are read on.
    killed(growing, new)
    seen = feed(growing, topic, 4, queues=[MessageQueue(topic, "broker-a", i) for i in range(2)])
    run.drain(seen)
    assert set(queues) <= run.positions.keys()
    run.until(lambda: f"cannot read now: {topic}/{new}/0" in caplog.text)
    growing.restart(new)
    later = feed(growing, topic, 4, queues=queues)
    run.drain(later)
    assert sorted(run.read) == sorted(sent + seen + later)
