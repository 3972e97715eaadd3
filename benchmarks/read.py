"""``python -m benchmarks.read``: batch and AvailableNow reads next to the Java client's, on the same broker."""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import SparkSession

from benchmarks import harness, java, spark, workload
from benchmarks.harness import Case, Result
from rocketmq_spark import LocalBroker
from rocketmq_spark.options import parse
from rocketmq_spark.source.readers import RocketMQReader
from rocketmq_spark.source.schema import BASIC

PEER = "Java DefaultMQPullConsumer, 8 threads"


def main() -> None:
    options = harness.arguments(__doc__ or "")
    found = {}
    with LocalBroker(conf=workload.STOCK, heap_mb=1024, quiet=True) as broker:
        session = spark.session()
        for size in harness.SIZES:
            count = harness.count_of(options.messages, size)
            topic = f"read-{size}"
            workload.fill(broker, topic, count, size)
            cases = cases_of(broker, session, topic, count)
            harness.rounds(cases, options.repeats)
            title = f"Reads of {count:,} messages, {size} B, stock broker (thousand messages a second)"
            found[str(size)] = harness.report(title, cases, size, PEER)
        session.stop()
    harness.dump(found, options.json)


def cases_of(broker: LocalBroker, session: SparkSession, topic: str, count: int) -> list[Case]:
    def through_spark(**options: str) -> Result:
        frame, seen = spark.counted(spark.source(session, broker, topic, **options), f"rows{os.urandom(4).hex()}")
        with harness.timed(broker, count) as result:
            frame.write.format("noop").mode("overwrite").save()
        harness.expect("batch read", seen.get["rows"], count)
        return result

    def as_stream() -> Result:
        with harness.timed(broker, count) as result:
            rows = spark.available_now(session, broker, topic)
        harness.expect("AvailableNow read", rows, count)
        return result

    def without_spark() -> Result:
        reader = RocketMQReader(
            parse({"nameServer": broker.name_server, "subscribe": topic}).for_role("batch source"), BASIC
        )
        rows = 0
        with harness.timed(broker, count) as result:
            for partition in reader.partitions():
                for batch in reader.read(partition):
                    rows += len(batch)
        harness.expect("read without Spark", rows, count)
        return result

    return [
        Case("Spark batch read, all columns", through_spark),
        Case("Spark batch read, without properties", lambda: through_spark(columns=_PLAIN)),
        Case("Spark AvailableNow", as_stream),
        Case("pull and decode, one process, no Spark", without_spark),
        Case(PEER, lambda: _java(broker, "pull", topic, count, 32, 8)),
        Case("Java LitePull, defaults", lambda: _java(broker, "lite", topic, count, 10, 20)),
        Case("Java LitePull, 32 a pull", lambda: _java(broker, "lite", topic, count, 32, 20)),
    ]


_PLAIN = "topic,brokerName,queueId,queueOffset,body,bornTimestamp,storeTimestamp"


def _java(broker: LocalBroker, mode: str, topic: str, count: int, *arguments: int) -> Result:
    pid = broker.pid("broker-a")
    before = harness.process_cpu(pid)
    found: dict[str, Any] = java.run(mode, broker.name_server, topic, count, *arguments)
    harness.expect(f"Java {mode}", found["distinct"], count)
    return Result(count, found["seconds"], found["cpu_client"], harness.process_cpu(pid) - before)


if __name__ == "__main__":
    main()
