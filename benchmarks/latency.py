"""From a producer's clock to the hands of foreachBatch, at 100 messages a second; each run in a process of its own.

``python -m benchmarks.latency CASE ADDRESS TOPIC WARM_UP SECONDS`` is one run; it prints its percentiles as JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.table import Table

from benchmarks import harness, spark, targets, workload
from benchmarks.harness import Found
from benchmarks.kafka import KafkaNode, connector_jars
from rocketmq_spark import LocalBroker, Message, Producer, low_latency_conf

RATE = 100
SECONDS = 15
# What the JIT still has to do would be all that is measured.
WARM_UP_S = 15.0
_NUMBERS = itertools.count()
_KAFKA = (targets.KAFKA_LATENCY, targets.KAFKA_LOW)
# By default a query remembers its last 100 micro-batches.
_CONF = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
Send = Callable[[bytes], object]


def run(broker: LocalBroker, kafka: KafkaNode | None, options: Any, found: Found) -> None:
    runs: dict[str, list[dict[str, float]]] = {}
    for turn in range(options.repeats):
        for case in (targets.OURS, targets.LOW, *_KAFKA):
            address = broker.name_server if case not in _KAFKA else kafka.address if kafka else None
            if address is None:
                continue
            topic = f"latency-{next(_NUMBERS)}"
            if case not in _KAFKA:
                broker.create_topic(topic, queues=workload.QUEUES)
            command = [sys.executable, "-m", "benchmarks.latency", case, address, topic, str(WARM_UP_S), str(SECONDS)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                raise SystemExit(f"{case}: {done.stderr[-3000:]}")
            one = json.loads(done.stdout.splitlines()[-1])
            runs.setdefault(case, []).append(one)
            harness.say(f"  {turn + 1}/{options.repeats} {case}: p50 {one['p50']:.0f} ms, p99 {one['p99']:.0f} ms")
    _show(
        runs,
        _PERCENTILES,
        f"Latency at {RATE} messages a second, producer to foreachBatch (ms, medians of the runs)",
        "latency",
        found,
    )
    parts = dict.fromkeys(
        name for all_of in runs.values() for one in all_of for name in one if name not in _PERCENTILES
    )
    _show(
        runs,
        parts,
        "Where a micro-batch spends its time (ms, medians, as Spark's progress reports it)",
        "micro-batch",
        found,
    )


def _show(
    runs: dict[str, list[dict[str, float]]], names: Iterable[str], title: str, section: str, found: Found
) -> None:
    table = Table(title=title)
    for column in ("case", *names):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, all_of in runs.items():
        middle = {name: statistics.median(one.get(name, 0.0) for one in all_of) for name in names}
        found.setdefault(section, {})[case] = middle
        table.add_row(case, *(f"{middle[name]:.0f}" for name in names))
    harness.show(table)


def main(case: str, address: str, topic: str, warm_up_s: float, seconds: float) -> None:
    kafka = case in _KAFKA
    session = spark.plain_session(
        connector_jars() if kafka else (),
        {**_CONF, **(low_latency_conf() if case in (targets.LOW, targets.KAFKA_LOW) else {})},
    )
    if kafka:
        send, close = _kafka_producer(session, address, topic)
        reader = session.readStream.format("kafka").option("kafka.bootstrap.servers", address)
        # The first send makes the topic.
        send(_stamp())
        rows = reader.option("subscribe", topic).option("startingOffsets", "earliest").load().selectExpr("value body")
    else:
        send, close = _producer(address, topic)
        reader = session.readStream.format("rocketmq").option("nameServer", address).option("subscribe", topic)
        rows = reader.option("startingOffsets", "earliest").load().select("body")
    seen: list[tuple[float, float]] = []

    def take(frame: Any, _: int) -> None:
        bodies = [row.body for row in frame.collect()]
        now = time.time()
        seen.extend((float(body), now) for body in bodies)

    with tempfile.TemporaryDirectory() as folder:
        query = rows.writeStream.option("checkpointLocation", folder).foreachBatch(take).start()
        sent = 1 if kafka else 0
        begin = time.time()
        stop = threading.Event()
        while (elapsed := time.time() - begin) < warm_up_s + seconds:
            send(_stamp())
            sent += 1
            stop.wait(max(0.0, (sent / RATE) - elapsed))
        while len(seen) < sent and time.time() < begin + warm_up_s + seconds + 60:
            stop.wait(0.05)
        parts = _parts(query.recentProgress[-int(seconds / (warm_up_s + seconds) * len(query.recentProgress)) :])
        query.stop()
    close()
    harness.expect("latency", len({born for born, _ in seen}), sent)
    late = sorted(1000 * (now - born) for born, now in seen if born > begin + warm_up_s)
    at = {name: late[min(len(late) - 1, int(part * len(late)))] for name, part in _PERCENTILES.items()}
    print(json.dumps({**at, **parts}))
    session.stop()


_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}


def _parts(progress: Sequence[Any]) -> dict[str, float]:
    """The medians of what the micro-batches with messages report: their rows, and the milliseconds of each step."""
    full = [one for one in progress if one["numInputRows"]]
    steps = dict.fromkeys(name for one in full for name in one["durationMs"])
    return {
        "rows": statistics.median(one["numInputRows"] for one in full),
        **{name: statistics.median(one["durationMs"].get(name, 0) for one in full) for name in steps},
    }


def _stamp() -> bytes:
    return f"{time.time():.6f}".encode()


def _producer(name_server: str, topic: str) -> tuple[Send, Callable[[], object]]:
    producer = Producer(name_server=name_server, group="latency")
    return lambda body: producer.send(Message(topic, body)), producer.close


def _kafka_producer(session: Any, address: str, topic: str) -> tuple[Send, Callable[[], object]]:
    """Kafka's Java producer in Spark's own JVM, with its defaults."""
    jvm = session._jvm
    conf = jvm.java.util.Properties()
    conf.put("bootstrap.servers", address)
    kind = "org.apache.kafka.common.serialization.ByteArraySerializer"
    conf.put("key.serializer", kind)
    conf.put("value.serializer", kind)
    producer = jvm.org.apache.kafka.clients.producer.KafkaProducer(conf)

    def send(body: bytes) -> None:
        producer.send(jvm.org.apache.kafka.clients.producer.ProducerRecord(topic, bytearray(body)))

    return send, producer.close


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
