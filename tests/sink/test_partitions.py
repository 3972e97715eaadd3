"""Option ``kafkaColumns``: all tasks of a write use the numbers that the driver determined when it began."""

from __future__ import annotations

import pickle

import pyarrow as pa

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.spark.sink.task import RocketMQWriter
from tests.helpers import stored
from tests.live.writes import sink_options
from tests.reading import names
from tests.schemas import struct

SCHEMA = "value string, partition int"


def numbered(start: int) -> pa.RecordBatch:
    values, partitions = [str(start + i) for i in range(4)], pa.array(range(4), pa.int32())
    return pa.RecordBatch.from_pydict({"value": values, "partition": partitions})


def test_a_broker_that_gets_the_topic_during_a_write_changes_no_number(pair: LocalBroker) -> None:
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
