"""Option ``kafkaColumns``: all tasks of a write use the numbers that the driver determined when it began."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence

import pyarrow as pa
import pytest

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.spark.sink.writer import RocketMQWriter
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.helpers import stored
from tests.live.writes import sink_options
from tests.queues import qs
from tests.reading import names
from tests.schemas import struct

SCHEMA = "value string, partition int"


def numbered(start: int) -> pa.RecordBatch:
    values, partitions = [str(start + i) for i in range(4)], pa.array(range(4), pa.int32())
    return pa.RecordBatch.from_pydict({"value": values, "partition": partitions})


def test_broker_that_gains_the_topic_mid_write_changes_no_number(pair: LocalBroker) -> None:
    (topic,) = names(1, "numbered")
    pair.create_topic(topic, 4, broker="broker-b")
    options = sink_options(pair.name_server, topic=topic, kafkaColumns=True)
    writer = RocketMQWriter(options, struct(SCHEMA))
    begun = pickle.dumps(writer)
    pair.create_topic(topic, 4, broker="broker-a")
    pickle.loads(begun).write(iter([numbered(0)]))
    pickle.loads(pickle.dumps(RocketMQWriter(options, struct(SCHEMA)))).write(iter([numbered(4)]))
    places = {int(message.body): (message.queue.broker_name, message.queue_id) for message in stored(pair, topic, 8)}
    assert [places[i] for i in range(4)] == [("broker-b", i) for i in range(4)]
    assert [places[i] for i in range(4, 8)] == [("broker-a", i) for i in range(4)]


class Registering(ScriptedSender):
    """The second broker registers when the route has been asked for so often."""

    def __init__(self, after: int) -> None:
        super().__init__(Time(), "a:0-1")
        self.after = after

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        if len(self.seen("route")) >= self.after:
            self.routes["T"] = tuple(qs("a:0-1 b:0-1"))
        return super().publish_queues(topic, deadline, refresh)


@pytest.mark.parametrize("timeout", ["60s", "300ms"])
def test_a_task_waits_for_a_broker_that_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, timeout: str
) -> None:
    sender = Registering(4 if timeout == "60s" else 1_000_000)
    monkeypatch.setattr(session, "sender", lambda options: sender)
    options = sink_options("x:1", topic="T", kafkaColumns=True, sendTimeout=timeout)
    writer = TaskWriter(
        options, {"body": "value", "partition": "partition"}, partition_queues={"T": tuple(qs("a:0-1 b:0-1"))}
    )
    if timeout == "60s":
        assert writer.write(iter([numbered(0)])).rows == 4
        assert {queue for _, queue, _ in sender.calls} == {*qs("a:0-1 b:0-1")}
    else:
        with pytest.raises(
            MessageRefused, match="partition is 2, which is queue T/b/0, and this queue does not accept"
        ):
            writer.write(iter([numbered(0)]))
        assert sender.calls == []
    assert caplog.text.count("topic T: rows name partitions of b, which no name server lists as writable now") == 1


def test_topics_whose_brokers_are_away_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = [f"t{n}" for n in range(20)]
    sender = ScriptedSender(Time(), "a:0-1")
    sender.routes = {topic: tuple(qs("a:0-1", topic)) for topic in topics}
    monkeypatch.setattr(session, "sender", lambda options: sender)
    writer = TaskWriter(
        sink_options("x:1", kafkaColumns=True, sendTimeout="500ms"),
        {"body": "value", "topic": "topic", "partition": "partition"},
        partition_queues={topic: tuple(qs("a:0-1 b:0-1", topic)) for topic in topics},
    )
    rows = {"value": topics, "topic": topics, "partition": pa.array([2] * len(topics), pa.int32())}
    began = time.monotonic()
    with pytest.raises(MessageRefused, match="partition is 2, which is queue t0/b/0, and this queue does not accept"):
        writer.write(iter([pa.RecordBatch.from_pydict(rows)]))
    assert time.monotonic() - began < 5.0  # 10 s with a timeout for each
