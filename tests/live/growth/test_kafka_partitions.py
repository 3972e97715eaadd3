"""Option ``kafkaColumns``: the numbers of a stream's partitions while brokers come and go."""

from __future__ import annotations

from typing import Any

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.helpers import awaited, killed
from tests.reading import feed, names, rows, stream_reader


class Numbered:
    """A stream with ``kafkaColumns``: the partition of each value that it has read."""

    def __init__(self, mq: LocalBroker, topic: str, offset: dict[str, Any] | None = None) -> None:
        self.reader = stream_reader(mq, subscribe=topic, startingOffsets="earliest", kafkaColumns=True)
        self.offset = offset or self.reader.initialOffset()
        self.seen: dict[str, int] = {}

    def batch(self) -> None:
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        if end != self.offset:
            planned = self.reader.partitions(self.offset, end)
            self.seen |= {row["value"].decode(): row["partition"] for row in rows(self.reader, planned)}
            self.offset = end

    def until(self, sent: list[str]) -> list[int]:
        awaited(self.batch, lambda _: self.seen.keys() >= set(sent))
        return [self.seen[body] for body in sent]


def test_a_broker_that_is_added_or_away_changes_no_number(pair: LocalBroker) -> None:
    """The topic is on the second broker first, so a batch numbers its queues otherwise later."""
    (topic,) = names(1, "numbered")
    second = [MessageQueue(topic, "broker-b", i) for i in range(2)]
    first = [MessageQueue(topic, "broker-a", i) for i in range(2)]
    pair.create_topic(topic, 2, broker="broker-b")
    stream = Numbered(pair, topic)
    assert [stream.until(feed(pair, topic, 1, queues=[queue])) for queue in second] == [[0], [1]]
    pair.create_topic(topic, 2, broker="broker-a")
    assert [stream.until(feed(pair, topic, 1, queues=[queue])) for queue in first] == [[2], [3]]
    again = Numbered(pair, topic, stream.offset)
    killed(pair, "broker-a")
    assert [again.until(feed(pair, topic, 1, queues=[queue])) for queue in second] == [[0], [1]]
    pair.restart("broker-a")
    assert [again.until(feed(pair, topic, 1, queues=[queue])) for queue in first] == [[2], [3]]
    fresh = Numbered(pair, topic)
    sent = [feed(pair, topic, 1, queues=[queue])[0] for queue in (*first, *second)]
    assert fresh.until(sent) == [0, 1, 2, 3]
