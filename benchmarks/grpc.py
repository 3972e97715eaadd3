"""Writes through a Proxy over gRPC next to RocketMQ's Java client for it, and to our own writes over remoting, in turns.

One broker and one Proxy on the same machine. Writes are sustained, as in ``write``: until all messages can be read.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from typing import Any

from pyspark.sql import SparkSession
from rich.table import Table

from benchmarks import harness, java, raw, spark, targets, workload
from benchmarks.harness import Case, Cpu, Found, Result
from rocketmq_spark import LocalBroker, Producer

# Of the messages of a read our writes have one in so many, peers and what goes message by message a part of those.
SHARE, SLOWER = 8, 10
# Sends one after the other.
SENDS = 2000
_WARM = "warm"
_NUMBERS = itertools.count()


def run(session: SparkSession, options: Any, found: Found) -> None:
    for size in harness.SIZES:
        with workload.broker(proxy=True) as broker:
            writes = Writes(broker, session, harness.count_of(options.messages // SHARE, size), size)
            cases = writes.cases()
            harness.rounds(cases, options.repeats)
            title = f"Writes through a Proxy, {size} B, until they can be read (thousand messages a second)"
            section = harness.report(title, cases, size)
            found[f"grpc {size}"] = section
            _show_limits(section, size)
            if size == harness.SIZES[0]:
                found["send over grpc"] = _latencies(writes, options.repeats)


def _show_limits(section: dict[str, dict[str, Any]], size: int) -> None:
    """What part of the rate that the Proxy could give, had it all cores for itself, at this case's price of a message."""
    table = Table(title=f"Of the Proxy's own limit, {size} B: all cores over its CPU for a message")
    for column in ("case", "limit, k msg/s", "reached"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, figures in section.items():
        if figures.get("proxy_us"):
            limit = 1000 * (harness.CORES or 1) / figures["proxy_us"]
            table.add_row(case, f"{limit:,.0f}", f"{figures['median'] / limit:.2f}")
    harness.show(table)


def _latencies(writes: Writes, repeats: int) -> dict[str, dict[str, float]]:
    """Of single sends, in ms: medians of the turns."""
    runs: dict[str, list[dict[str, float]]] = {targets.SEND_GRPC: [], targets.JAVA_SEND_GRPC: []}
    for _ in range(repeats):
        runs[targets.SEND_GRPC].append(writes.sends())
        runs[targets.JAVA_SEND_GRPC].append(writes.java_sends())
    table = Table(title=f"One send after the other over gRPC, {writes.size} B (ms, medians of the turns)")
    for column in ("case", "p50", "p99"):
        table.add_column(column, justify="left" if column == "case" else "right")
    figures = {}
    for case, all_of in runs.items():
        figures[case] = {name: sorted(one[name] for one in all_of)[len(all_of) // 2] for name in ("p50", "p99")}
        table.add_row(case, *(f"{figures[case][name]:.2f}" for name in ("p50", "p99")))
    harness.show(table)
    return figures


class Writes:
    """Every way to write the same messages, each time to a topic of its own."""

    def __init__(self, broker: LocalBroker, session: SparkSession, count: int, size: int) -> None:
        self.broker, self.session, self.count, self.size = broker, session, count, size
        self.few = max(1, count // SLOWER)
        proxy = broker.pid("proxy")
        assert proxy is not None
        self.pids = raw.pid_of(broker), proxy
        self.topic(_WARM)

    def cases(self) -> list[Case]:
        over_grpc = {"transport": "grpc", "proxyEndpoint": self.broker.proxy_grpc}
        return [
            Case(targets.WRITE_GRPC, lambda: self.batch(**over_grpc)),
            Case(targets.WRITE, lambda: self.batch(nameServer=self.broker.name_server)),
            Case(targets.PRODUCER_GRPC, self.produced),
            Case(targets.JAVA_GRPC, self.peer, warm_up=False),
        ]

    def topic(self, name: str | None = None) -> str:
        name = name or f"grpc-{self.size}-{next(_NUMBERS)}"
        self.broker.create_topic(name, queues=workload.QUEUES)
        return name

    def batch(self, **options: str) -> Result:
        name, rows = self.topic(), spark.rows(self.session, self.count, self.size)
        with self._timed(self.count) as result:
            rows.write.format("rocketmq").options(topic=name, **options).mode("append").save()
            workload.wait_visible(self.broker, name, self.count)
        harness.expect("Spark batch write", workload.visible(self.broker, name), self.count)
        return result

    def produced(self) -> Result:
        name = self.topic()
        with self._producer(auto_batch=True) as producer, self._timed(self.few) as result:
            workload.produce(producer, name, self.few, self.size)
            workload.wait_visible(self.broker, name, self.few)
        harness.expect("Producer", workload.visible(self.broker, name), self.few)
        return result

    def peer(self) -> Result:
        """The Java client tries how many sends in flight are fastest, and is timed with that."""
        name, marks = self.topic(), []

        def mark() -> None:
            marks.append((time.perf_counter(), *map(harness.process_cpu, self.pids)))

        def end() -> None:
            workload.wait_visible(self.broker, name, self.few)
            mark()

        address = self.broker.proxy_grpc
        found = java.run("grpc-async", address, name, self.few, self.size, _WARM, on_begin=mark, on_end=end)
        harness.say(f"  fastest with {found['in_flight']} sends in flight")
        harness.expect("Java over gRPC", workload.visible(self.broker, name), self.few)
        seconds, server, proxy = (after - before for before, after in zip(*marks, strict=True))
        return Result(self.few, seconds, Cpu(jvm=found["cpu"], server=server, proxy=proxy))

    def sends(self) -> dict[str, float]:
        name, body, took = self.topic(), bytes(self.size), []
        with self._producer() as producer:
            for i in range(2 * SENDS):
                begin = time.perf_counter()
                producer.send(workload.message(name, body, i))
                took.append(1000 * (time.perf_counter() - begin))
        counted = sorted(took[SENDS:])
        return {"p50": counted[SENDS // 2], "p99": counted[SENDS * 99 // 100]}

    def java_sends(self) -> dict[str, float]:
        arguments = self.topic(), SENDS, self.size, _WARM
        found = java.run("grpc-sync", self.broker.proxy_grpc, *arguments, on_begin=lambda: None)
        return {name: float(found[name]) for name in ("p50", "p99")}

    def _producer(self, **options: Any) -> Producer:
        return Producer(transport="grpc", proxy_endpoint=self.broker.proxy_grpc, group="bench", **options)

    def _timed(self, count: int) -> AbstractContextManager[Result]:
        server, proxy = self.pids
        return harness.timed([server], count, proxies=[proxy])
