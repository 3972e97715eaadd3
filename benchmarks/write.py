"""Batch and stream writes next to the Java client's and Kafka's, on the same machine in turns.

Sustained: the clock stops when all messages can be read, not when they are acknowledged.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from benchmarks import harness, raw, spark, targets, workload
from benchmarks.harness import Case, Found, Result
from benchmarks.kafka import KafkaNode
from benchmarks.read import java_run
from rocketmq_spark import LocalBroker, Producer, SentRows

# Of the messages of a read a write has one in so many: it takes longer. What goes message by message has a part of those.
SHARE, SLOWER = 2, 10
_NUMBERS = itertools.count()


def run(session: SparkSession, kafka: KafkaNode | None, options: Any, found: Found) -> None:
    for size in harness.SIZES:
        count = harness.count_of(options.messages // SHARE, size)
        with workload.broker() as broker:
            cases = Writes(broker, session, kafka, count, size).cases()
            harness.rounds(cases, options.repeats)
        title = f"Writes of {count:,} messages, {size} B, until they can be read (thousand messages a second)"
        found[f"write {size}"] = harness.report(title, cases, size)


class Writes:
    """Every way to write the same messages, each time to a topic of its own."""

    def __init__(
        self, broker: LocalBroker, session: SparkSession, kafka: KafkaNode | None, count: int, size: int
    ) -> None:
        self.broker, self.session, self.kafka, self.count, self.size = broker, session, kafka, count, size
        self.pid = raw.pid_of(broker)
        self.topic("warm")
        self.source = f"source-{size}"

    def cases(self) -> list[Case]:
        workload.fill(self.broker, self.source, self.count, self.size)
        kafka = self.kafka
        return [
            Case(targets.SEND, self.bodies),
            Case(targets.SEND_WHOLE, lambda: self.bodies(whole=True)),
            Case(targets.WRITE, self.batch),
            Case(targets.ONCE, lambda: self.batch(deliveryGuarantee="exactly-once")),
            Case(targets.WRITE_WHOLE, lambda: self.batch(whole=True)),
            Case(targets.HASH, lambda: self.batch(self.rows("concat('s-', id % 1000) shardingKey"))),
            Case(targets.WRITE_KAFKA_COLUMNS, lambda: self.batch(self.kafka_rows(), kafkaColumns="true")),
            Case("Spark topic to topic, AvailableNow", self.stream),
            Case(targets.DROP, self.drop),
            Case(targets.PRODUCER, self.produced),
            Case(targets.SEND_MANY, self.many),
            Case(targets.SEND_ARROW, self.arrow),
            Case(targets.JAVA_BATCH[0], lambda: self.peer("batch", self.size, 1 << 20, 2), warm_up=False),
            Case(targets.JAVA_BATCH[1], lambda: self.peer("auto", self.size), warm_up=False),
            Case(targets.JAVA_WHOLE, lambda: self.peer("batch", self.size, 1 << 20, 2, whole=True), warm_up=False),
            *([Case(targets.KAFKA_WRITE, lambda: self.to_kafka(kafka))] if kafka is not None else []),
        ]

    def topic(self, name: str | None = None, whole: bool = False) -> str:
        name = name or f"write-{self.size}-{next(_NUMBERS)}"
        self.broker.create_topic(name, queues=workload.QUEUES, batch=whole)
        return name

    def rows(self, *more: str) -> DataFrame:
        return spark.rows(self.session, self.count, self.size, *more)

    def kafka_rows(self) -> DataFrame:
        """The rows of the write by sharding key, as Spark's Kafka sink takes them."""
        amount = "struct('amount' key, cast(cast(id AS string) AS binary) value)"
        headers = f"array(struct('region' key, cast('eu-west' AS binary) value), {amount})"
        rows = self.rows("concat('s-', id % 1000) key", f"{headers} headers").withColumnRenamed("body", "value")
        return rows.select("key", "value", "headers")

    def bodies(self, whole: bool = False) -> Result:
        """Encoded before, sent by plain sends one after the other."""
        name = self.topic(whole=whole)
        batches = list(workload.bodies(self.count, self.size))
        with harness.timed([self.pid], self.count) as result:
            workload.send(self.broker, name, batches, whole=whole)
            workload.wait_visible(self.broker, name, self.count)
        return result

    def batch(self, rows: DataFrame | None = None, whole: bool = False, **options: str) -> Result:
        name = self.topic(whole=whole)
        rows = rows if rows is not None else self.rows()
        with harness.timed([self.pid], self.count) as result:
            writer = rows.write.format("rocketmq").option("nameServer", self.broker.name_server).option("topic", name)
            writer.options(**options).mode("append").save()
            workload.wait_visible(self.broker, name, self.count)
        harness.expect("Spark batch write", workload.visible(self.broker, name), self.count)
        return result

    def stream(self) -> Result:
        name = self.topic()
        rows = spark.stream(self.session, self.broker, self.source)
        with tempfile.TemporaryDirectory() as folder, harness.timed([self.pid], self.count) as result:
            writer = rows.select("body", "tags", "keys", "properties").writeStream.format("rocketmq")
            writer = writer.option("nameServer", self.broker.name_server).option("topic", name)
            writer.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()
            workload.wait_visible(self.broker, name, self.count)
        harness.expect("Spark stream write", workload.visible(self.broker, name), self.count)
        return result

    def drop(self) -> Result:
        with harness.timed([self.pid], self.count) as result:
            self.rows().write.format("ceiling").mode("append").save()
        return result

    def produced(self) -> Result:
        name, few = self.topic(), max(1, self.count // SLOWER)
        options: dict[str, Any] = {"name_server": self.broker.name_server, "group": "bench", "auto_batch": True}
        with Producer(**options) as producer, harness.timed([self.pid], few) as result:
            workload.produce(producer, name, few, self.size)
            workload.wait_visible(self.broker, name, few)
        harness.expect("Producer", workload.visible(self.broker, name), few)
        return result

    def many(self) -> Result:
        """A generator, so that the messages are made meanwhile, as Java's are."""
        name, body = self.topic(), os.urandom(self.size)
        messages = (workload.message(name, body, i) for i in range(self.count))
        return self._sent(name, lambda producer: producer.send_many(messages))

    def arrow(self) -> Result:
        name, rows = self.topic(), pa.Table.from_batches([workload.frame(self.count, self.size)])
        return self._sent(name, lambda producer: producer.send_arrow(rows, name))

    def _sent(self, name: str, send: Callable[[Producer], SentRows]) -> Result:
        with (
            Producer(self.broker.name_server, "bench", send_timeout="30s") as producer,
            harness.timed([self.pid], self.count) as result,
        ):
            send(producer).raise_for_failed()
            workload.wait_visible(self.broker, name, self.count)
        harness.expect("Producer", workload.visible(self.broker, name), self.count)
        return result

    def to_kafka(self, kafka: KafkaNode) -> Result:
        """A node may stall; its producer gives up after two minutes."""
        name = f"write-{self.size}-{next(_NUMBERS)}"
        rows = self.rows()
        try:
            with harness.timed([kafka.pid], self.count) as result:
                kafka.write(rows, name)
        except PySparkException as e:
            raise harness.PeerFailed(str(e)[:200]) from e
        harness.expect("spark-sql-kafka write", kafka.read(self.session, name).count(), self.count)
        return result

    def peer(self, mode: str, *arguments: int, whole: bool = False) -> Result:
        name = self.topic(whole=whole)

        def visible() -> None:
            workload.wait_visible(self.broker, name, self.count)

        result = java_run(self.broker, mode, name, self.count, *arguments, "warm", until=visible)
        harness.expect(f"Java {mode}", workload.visible(self.broker, name), self.count)
        return result
