"""Batch and AvailableNow reads next to the Java client's, plain sockets and Kafka, on the same machine in turns.

Three times over the same messages: with the broker's stock limits, with raised ones, and cold, when a broker believes
that its data lies on disk and gives eight messages an answer.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks import ceiling, harness, java, raw, spark, targets, workload
from benchmarks.harness import Case, Cpu, Found, Result
from benchmarks.kafka import KafkaNode
from rocketmq_spark import LocalBroker

# Peers, which are slower and start warm, read one message in so many; ours pay their start from more.
SLOWER = 4
PLAIN = "topic,brokerName,queueId,queueOffset,body,bornTimestamp,storeTimestamp"
# What an operator may raise, and what makes every pull a "disk" pull; both can be changed while a broker runs.
RAISED = {"maxTransferCountOnMessageInMemory": "1024", "maxTransferBytesOnMessageInMemory": str(4 << 20)}
COLD = {"accessMessageInMemoryMaxRatio": "0", "accessMessageInMemoryHotRatio": "0"}
STOCK = {
    "maxTransferCountOnMessageInMemory": "32", "maxTransferBytesOnMessageInMemory": str(256 << 10),
    "accessMessageInMemoryMaxRatio": "40", "accessMessageInMemoryHotRatio": "26",
}  # fmt: skip


def run(broker: LocalBroker, session: SparkSession, kafka: KafkaNode | None, options: Any, found: Found) -> None:
    for size in harness.SIZES:
        count = harness.count_of(options.messages, size)
        topic = f"read-{size}"
        workload.fill(broker, topic, count, size)
        workload.fill(broker, whole(topic), count, size, whole=True)
        if kafka is not None:
            kafka.write(spark.rows(session, count // SLOWER, size), topic)
        with tempfile.TemporaryDirectory() as folder:
            reads = Reads(broker, session, kafka, topic, count, Path(folder) / "batch.arrow")
            ceiling.prepare(broker, topic, reads.path)
            for name, conf, cases in (
                ("stock", STOCK, reads.stock()),
                ("raised", RAISED, reads.raised()),
                ("cold", {**STOCK, **COLD}, reads.cold()),
            )[: 1 if harness.ONLY else None]:
                broker.admin.update_broker_config("broker-a", conf)
                harness.rounds(cases, options.repeats)
                title = f"Reads of {count:,} messages, {size} B, {name} broker (thousand messages a second)"
                found[f"{name} {size}"] = harness.report(title, cases, size)
        broker.admin.update_broker_config("broker-a", STOCK)


class Reads:
    """Every way to read one topic."""

    def __init__(
        self, broker: LocalBroker, session: SparkSession, kafka: KafkaNode | None, topic: str, count: int, path: Path
    ) -> None:
        self.broker, self.session, self.kafka, self.topic, self.count, self.path = (
            broker, session, kafka, topic, count, path,
        )  # fmt: skip
        self.pid = raw.pid_of(broker)
        self.part = count // SLOWER

    def stock(self) -> list[Case]:
        per, depth = raw.per_answer(self.broker, self.topic), 64
        return [
            *self._plain_sockets(per, depth),
            *self._ours(),
            Case(targets.KAFKA_COLUMNS, lambda: self.noop(self.source(kafkaColumns="true", includeHeaders="true"))),
            Case(targets.STREAM, self.available_now),
            *self._whole(),
            Case(targets.CEILING, self.prebuilt),
            *self._java(32, lite=True),
            *self._kafka(),
        ]

    def raised(self) -> list[Case]:
        return [
            *self._plain_sockets(1024, 4),
            *self._ours(warm_up=False),
            Case(targets.CEILING, self.prebuilt, warm_up=False),
            *self._java(1024),
        ]

    def cold(self) -> list[Case]:
        return [
            *self._plain_sockets(8, 64),
            Case(targets.SPARK, lambda: self.noop(self.source()), warm_up=False),
            *self._java(32),
        ]

    def _plain_sockets(self, per_answer: int, depth: int) -> list[Case]:
        return [
            Case(
                targets.RAW, lambda: raw.sockets(self.broker, self.topic, self.count, per_answer, depth), warm_up=False
            ),
            Case(targets.BULK, lambda: raw.bulk(self.broker, self.topic, self.count), warm_up=False),
        ]

    def _ours(self, warm_up: bool = True) -> list[Case]:
        return [
            Case(targets.ALONE, lambda: raw.decoded(self.broker, self.topic, self.count), warm_up=False),
            Case(targets.SPARK, lambda: self.noop(self.source()), warm_up),
            Case(targets.PLAIN, lambda: self.noop(self.source(columns=PLAIN)), warm_up),
        ]

    def _whole(self) -> list[Case]:
        """The same messages in a batch topic."""
        topic = whole(self.topic)
        return [
            Case(targets.BULK_WHOLE, lambda: raw.bulk(self.broker, topic, self.count), warm_up=False),
            Case(targets.ALONE_WHOLE, lambda: raw.decoded(self.broker, topic, self.count), warm_up=False),
            Case(targets.SPARK_WHOLE, lambda: self.noop(spark.source(self.session, self.broker, topic))),
            Case(targets.LITE_WHOLE, lambda: self.peer("lite", 32, 20, topic=topic), warm_up=False),
        ]

    def _java(self, max_offsets: int, lite: bool = False) -> list[Case]:
        cases = [
            Case(targets.PULL8, lambda: self.peer("pull", max_offsets, 8), warm_up=False),
            Case(targets.LITE32, lambda: self.peer("lite", max_offsets, 20), warm_up=False),
        ]
        if lite:
            cases.append(Case(targets.LITE, lambda: self.peer("lite", 10, 20), warm_up=False))
        return cases

    def _kafka(self) -> list[Case]:
        kafka = self.kafka
        if kafka is None:
            return []
        return [Case(targets.KAFKA, lambda: self.noop(kafka.read(self.session, self.topic), kafka.pid, self.part))]

    def source(self, **options: str) -> DataFrame:
        return spark.source(self.session, self.broker, self.topic, **options)

    def noop(self, frame: DataFrame, pid: int | None = None, count: int | None = None) -> Result:
        """Every row to a sink that drops it, counted on the way: a second pass would be a second read."""
        frame, seen = spark.counted(frame, f"rows{os.urandom(4).hex()}")
        count = count or self.count
        with harness.timed([pid or self.pid], count) as result:
            frame.write.format("noop").mode("overwrite").save()
        harness.expect("batch read", seen.get["rows"], count)
        return result

    def available_now(self) -> Result:
        stream = spark.stream(self.session, self.broker, self.topic)
        with harness.timed([self.pid], self.count) as result:
            rows = spark.available_now(stream)
        harness.expect("AvailableNow read", rows, self.count)
        return result

    def prebuilt(self) -> Result:
        reader = self.session.read.format("ceiling").option("path", str(self.path)).option("rows", self.count)
        return self.noop(reader.load())

    def peer(self, mode: str, *arguments: int, topic: str | None = None) -> Result:
        return java_run(self.broker, mode, topic or self.topic, self.part, *arguments, at_least=True)


def whole(topic: str) -> str:
    """The batch topic with the messages of ``topic``."""
    return f"{topic}-whole"


def java_run(
    broker: LocalBroker,
    mode: str,
    topic: str,
    count: int,
    *arguments: int | str,
    at_least: bool = False,
    until: Callable[[], None] = lambda: None,
) -> Result:
    """A run of the Java client, its count checked. Time and CPU of the broker go on ``until`` returns."""
    pid, marks = raw.pid_of(broker), []

    def mark() -> None:
        marks.append((time.perf_counter(), harness.process_cpu(pid)))

    def end() -> None:
        until()
        mark()

    found = java.run(mode, broker.name_server, topic, count, *arguments, on_begin=mark, on_end=end)
    distinct = found["distinct"]
    harness.expect(f"Java {mode}", distinct, max(count, distinct) if at_least else count)
    (begin_s, cpu_before), (end_s, cpu_after) = marks
    return Result(distinct, end_s - begin_s, Cpu(jvm=found["cpu"], server=cpu_after - cpu_before))
