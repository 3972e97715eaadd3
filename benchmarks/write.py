"""``python -m benchmarks.write``: batch and stream writes next to the Java client's, on the same broker.

Sustained: the clock stops when all messages can be read, not when they are acknowledged.
"""

from __future__ import annotations

import itertools
import tempfile

from pyspark.sql import SparkSession

from benchmarks import harness, java, spark, workload
from benchmarks.harness import Case, Result
from rocketmq_spark import LocalBroker

PEER = "Java batches of 1 MiB, 2 threads"


def main() -> None:
    options = harness.arguments(__doc__ or "")
    found = {}
    for size in harness.SIZES:
        with LocalBroker(conf=workload.STOCK, heap_mb=1024, quiet=True) as broker:
            session = spark.session()
            count = harness.count_of(options.messages, size)
            cases = cases_of(broker, session, count, size)
            harness.rounds(cases, options.repeats)
            title = f"Writes of {count:,} messages, {size} B, until readable (thousand messages a second)"
            found[str(size)] = harness.report(title, cases, size, PEER)
            session.stop()
    harness.dump(found, options.json)


def cases_of(broker: LocalBroker, session: SparkSession, count: int, size: int) -> list[Case]:
    numbers = itertools.count()

    def topic() -> str:
        name = f"write-{size}-{next(numbers)}"
        broker.create_topic(name, queues=workload.QUEUES)
        return name

    def batch() -> Result:
        frame, name = spark.rows(session, count, size), topic()
        with harness.timed(broker, count) as result:
            writer = frame.write.format("rocketmq").option("nameServer", broker.name_server).option("topic", name)
            writer.mode("append").save()
            workload.wait_visible(broker, name, count)
        harness.expect("Spark batch write", workload.visible(broker, name), count)
        return result

    def stream() -> Result:
        source, name = f"stream-source-{size}", topic()
        if next(numbers) and not _exists(broker, source):
            workload.fill(broker, source, count, size)
        reader = session.readStream.format("rocketmq").option("nameServer", broker.name_server)
        rows = reader.option("subscribe", source).option("startingOffsets", "earliest").load()
        with tempfile.TemporaryDirectory() as folder, harness.timed(broker, count) as result:
            writer = rows.select("body", "tags", "keys", "properties").writeStream.format("rocketmq")
            writer = writer.option("nameServer", broker.name_server).option("topic", name)
            writer.option("checkpointLocation", folder).trigger(availableNow=True).start().awaitTermination()
            workload.wait_visible(broker, name, count)
        harness.expect("Spark stream write", workload.visible(broker, name), count)
        return result

    def peer(mode: str, *arguments: int) -> Result:
        name, pid = topic(), broker.pid("broker-a")
        before = harness.process_cpu(pid)
        found = java.run(mode, broker.name_server, name, count, size, *arguments)
        with harness.timed(broker, count) as rest:
            workload.wait_visible(broker, name, count)
        harness.expect(f"Java {mode}", workload.visible(broker, name), count)
        seconds = found["seconds"] + rest.seconds
        return Result(count, seconds, found["cpu_client"], harness.process_cpu(pid) - before)

    return [
        Case("Spark batch write", batch),
        Case("Spark topic to topic, AvailableNow", stream),
        Case(PEER, lambda: peer("batch", 1 << 20, 2)),
        Case("Java autoBatch, asynchronous", lambda: peer("auto")),
    ]


def _exists(broker: LocalBroker, topic: str) -> bool:
    from rocketmq_spark.client.admin import Admin

    with Admin(broker.name_server) as admin:
        return topic in admin.topics()


if __name__ == "__main__":
    main()
