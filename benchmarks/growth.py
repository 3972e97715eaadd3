"""What bends the line: reads and writes with more brokers, queues, tasks, larger messages or more of them, one at a time.

Everything but one is as in ``Shape``. A cost a message that stays is linear growth; what rises is said, and why, in
docs/performance.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.table import Table

from benchmarks import harness, spark, workload
from benchmarks.harness import Found, Result
from rocketmq_spark import LocalBroker

SLOTS = 16  # of the session: as many tasks at once as the largest case has
MAX_BYTES = 256 << 20  # of the bodies of a topic: of large messages there are fewer
WARM_UP = 200_000
RESET_PEAKS = "5"  # to /proc/PID/clear_refs

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Shape:
    """``queues`` are those of the topic, over all brokers; ``count`` messages of ``size`` bytes."""

    brokers: int = 1
    queues: int = 8
    tasks: int = 2
    size: int = 100
    count: int = 1_000_000


AXES: Mapping[str, Sequence[int]] = {
    "brokers": (1, 2, 4, 8),
    "queues": (8, 64, 512, 4096),
    "tasks": (1, 2, 4, 8, 16),
    "size": (100, 1 << 10, 10 << 10, 100 << 10, 1 << 20),
    "count": (100_000, 1_000_000, 10_000_000),
}


def run(session: SparkSession, options: Any, found: Found) -> None:
    """The largest ``count`` with ``--full`` alone; ``--messages`` bounds all."""
    found["growth"] = {}
    for brokers, shapes in itertools.groupby(_shapes(options), key=lambda one: one[1].brokers):
        with workload.broker(brokers=brokers) as broker:
            _measured(session, broker, Shape(count=min(WARM_UP, options.messages)))
            for name, shape in shapes:
                found["growth"][name] = _measured(session, broker, shape)
                harness.say(f"  {name}: {found['growth'][name]}")
    for what in ("write", "read"):
        _show(what, found["growth"])


def _shapes(options: Any) -> Iterator[tuple[str, Shape]]:
    """All with one broker first, for brokers are started and ended with their number."""
    for axis, values in sorted(AXES.items(), key=lambda one: one[0] == "brokers"):
        for value in values:
            shape = dataclasses.replace(Shape(), **{axis: value})
            if axis == "count" and value > 1_000_000 and not options.full:
                continue
            count = max(
                1, min(shape.count, options.messages, MAX_BYTES // shape.size if axis == "size" else shape.count)
            )
            yield f"{axis} {value:,}", dataclasses.replace(shape, count=count)


def _measured(session: SparkSession, broker: LocalBroker, shape: Shape) -> dict[str, float]:
    """Microseconds a message, of time and of CPU; peaks of memory in MiB."""
    topic = f"growth-{next(_numbers)}"
    broker.create_topic(topic, queues=max(1, shape.queues // shape.brokers))
    servers = [pid for name in broker.brokers if (pid := broker.pid(name)) is not None]
    figures: dict[str, float] = {}
    for what, work in (("write", _write), ("read", _read)):
        _forget_peaks()
        with harness.timed(servers, shape.count) as result:
            work(session, broker, topic, shape)
        figures |= {f"{what} {name}": value for name, value in _costs(result).items()}
        figures |= {f"{what} {kind} MiB": mib for kind, mib in _peaks().items()}
    return figures


def _write(session: SparkSession, broker: LocalBroker, topic: str, shape: Shape) -> None:
    rows = spark.rows(session, shape.count, shape.size, slots=shape.tasks)
    writer = rows.write.format("rocketmq").option("nameServer", broker.name_server).option("topic", topic)
    writer.mode("append").save()
    workload.wait_visible(broker, topic, shape.count)


def _read(session: SparkSession, broker: LocalBroker, topic: str, shape: Shape) -> None:
    share = {"numPartitions": str(min(shape.tasks, shape.queues)), "minPartitions": str(shape.tasks)}
    frame, seen = spark.counted(spark.source(session, broker, topic, **share), f"rows{os.urandom(4).hex()}")
    frame.write.format("noop").mode("overwrite").save()
    harness.expect("batch read", seen.get["rows"], shape.count)


def _costs(result: Result) -> dict[str, float]:
    cpu = {"python": result.cpu.python, "jvm": result.cpu.jvm, "server": result.cpu.server}
    return {name: 1e6 * seconds / result.messages for name, seconds in {"wall": result.seconds, **cpu}.items()}


def _forget_peaks() -> None:
    for _, pid in harness.family(()):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAKS)


def _peaks() -> dict[str, float]:
    """The largest of each kind since they were forgotten: a worker of Spark's, and the driver's JVM."""
    peaks = {"python": 0.0, "jvm": 0.0}
    for kind, pid in harness.family(()):
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            if pid != os.getpid():
                peaks[kind] = max(peaks[kind], kib / 1024)
    return peaks


def _show(what: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title=f"Growth of a {what}: microseconds a message, and peaks in MiB")
    table.add_column("case")
    columns = {
        "wall": "time", "python": "Python's CPU", "jvm": "Spark's JVM", "server": "brokers",
        "python MiB": "a worker's MiB", "jvm MiB": "JVM's MiB",
    }  # fmt: skip
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, row in figures.items():
        values = [row[f"{what} {column}"] for column in columns]
        table.add_row(name, *(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in values))
    harness.show(table)
