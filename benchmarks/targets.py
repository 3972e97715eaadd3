"""What the figures have to reach, each next to its peers of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks import scale
from benchmarks.harness import SIZES, Found

Value = Callable[[Found, int], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure with what it should be, for 100 B and 1 KiB or, with one number, whatever the size."""

    name: str
    wanted: tuple[float, ...]
    value: Value
    at_most: bool = False
    unit: str = ""
    bound: Value | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target's figure in this run; None where a peer was not measured."""

    target: Target
    size: int | None
    wanted: float
    value: float | None
    bound: float | None = None

    @property
    def held(self) -> bool | None:
        if self.value is None:
            return None
        if self.bound is not None and self.bound < self.wanted:  # two cores cannot give more
            return self.value >= 0.95 * self.bound
        return self.value <= self.wanted if self.target.at_most else self.value >= self.wanted

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target.name, "size": self.size, "wanted": self.wanted, "value": self.value,
            "two_core_bound": self.bound, "held": self.held,
        }  # fmt: skip


def rate(section: str, case: str) -> Value:
    return lambda found, size: float(found[f"{section} {size}"][case]["median"])


def ratio(section: str, case: str, *peers: str, of: str | None = None) -> Value:
    """Median of a case to that of the best of its peers."""

    def value(found: Found, size: int) -> float:
        best = max(rate(of or section, peer)(found, size) for peer in peers)
        return rate(section, case)(found, size) / best

    return value


def figure(section: str, case: str, name: str) -> Value:
    return lambda found, size: float(found[section][case][name])


def quotient(above: Value, below: Value) -> Value:
    return lambda found, size: above(found, size) / below(found, size)


def largest(section: str, name: str) -> Value:
    return lambda found, size: max(float(case[name]) for case in found[section].values())


def two_core_bound(section: str, server: str, spark: tuple[str, str], *peers: str) -> Value:
    """Two cores over the CPU of an ideal client: what the server needs, and what Spark itself needs; to the best peer."""

    def value(found: Found, size: int) -> float:
        ideal, handing = found[f"{section} {size}"][server], found[f"{spark[0]} {size}"][spark[1]]
        best = max(rate(section, peer)(found, size) for peer in peers)
        return float(2000 / (ideal["server_us"] + handing["python_us"] + handing["jvm_us"]) / best)

    return value


SPARK, PLAIN, STREAM = "Spark batch read, all columns", "Spark batch read, without properties", "Spark AvailableNow"
RAW, BULK, ALONE = "raw sockets, nothing decoded", "bulk pull, nothing decoded", "pull and decode, no Spark"
PULL8, LITE, LITE32 = "Java pull consumer, 8 threads", "Java LitePull, defaults", "Java LitePull, 32 a pull"
CEILING, KAFKA = "Spark's ceiling, prebuilt batches", "spark-sql-kafka batch read"
WRITE, KAFKA_WRITE, HASH = "Spark batch write", "spark-sql-kafka batch write", "Spark batch write by shardingKey"
JAVA_BATCH = ("Java batches of 1 MiB, 2 threads", "Java autoBatch, asynchronous")
PRODUCER = "Producer, autoBatch, asynchronous"
SEND_ARROW, SEND_MANY = "Producer.send_arrow", "Producer.send_many"
SEND, DROP = "batch bodies sent, made before", "Spark's ceiling, rows dropped"
SPARK_WHOLE, BULK_WHOLE = "Spark batch read, batch topic", "bulk pull, batch topic"
ALONE_WHOLE, LITE_WHOLE = "pull and decode, no Spark, batch topic", "Java LitePull, 32 a pull, batch topic"
ONCE = "Spark batch write, exactly-once"
WRITE_WHOLE, SEND_WHOLE = "Spark batch write, batch topic", "batch bodies sent, batch topic"
JAVA_WHOLE = "Java batches of 1 MiB, batch topic"
WRITE_GRPC, PRODUCER_GRPC = "Spark batch write over gRPC", "Producer over gRPC, autoBatch"
JAVA_GRPC = "Java over gRPC, asynchronous"
SEND_GRPC, JAVA_SEND_GRPC = "Producer.send over gRPC", "Java's send over gRPC"
MEMBER, PUSH = "Consumer, empty listener", "Java push consumer, empty listener"
MEMBER_ARROW = "Consumer with arrow, empty listener"
POLL, POLL_ARROW, LITE_POLL = "PullConsumer.poll", "PullConsumer.poll_arrow", "Java LitePull, 32 a pull"
KAFKA_COLUMNS, WRITE_KAFKA_COLUMNS = (
    "Spark batch read, kafkaColumns with headers",
    "Spark batch write, kafkaColumns with headers",
)
OURS, LOW = "rocketmq, defaults", "rocketmq, low_latency_conf()"
KAFKA_LATENCY, KAFKA_LOW = "spark-sql-kafka, 8 partitions", "spark-sql-kafka, low_latency_conf()"

# What ``--quick`` measures: ours, and the peers that users compare it with.
QUICK = frozenset({
    SPARK, STREAM, PULL8, LITE, LITE32, KAFKA, WRITE, HASH, KAFKA_WRITE, *JAVA_BATCH, MEMBER, PUSH, POLL_ARROW,
})  # fmt: skip

TARGETS: Sequence[Target] = (
    Target("decode, one core, all columns (M msg/s)", (3.0, 2.2), rate("codec", "decode, all columns")),
    Target("encode, one core (M msg/s)", (6.0, 3.4), rate("codec", "encode")),
    Target("bulk pull of raw sockets, stock", (0.85, 0.85), ratio("stock", BULK, RAW)),
    Target("bulk pull of raw sockets, raised limits", (0.85, 0.85), ratio("raised", BULK, RAW)),
    Target("pull and decode without Spark of raw sockets, stock", (0.55, 0.55), ratio("stock", ALONE, RAW)),
    Target(
        "batch read of the best Java consumer, stock", (2.0, 2.0), ratio("stock", SPARK, PULL8, LITE, LITE32),
        bound=two_core_bound("stock", RAW, ("stock", CEILING), PULL8, LITE, LITE32),
    ),
    Target(
        "batch read of LitePull defaults, stock", (5.0, 4.0), ratio("stock", SPARK, LITE),
        bound=two_core_bound("stock", RAW, ("stock", CEILING), LITE),
    ),
    Target(
        "batch read of spark-sql-kafka, stock", (2.3, 3.0), ratio("stock", SPARK, KAFKA),
        bound=two_core_bound("stock", RAW, ("stock", CEILING), KAFKA),
    ),
    Target(
        "batch read of Spark's ceiling, raised limits", (0.55, 0.45), ratio("raised", SPARK, CEILING),
        bound=two_core_bound("raised", RAW, ("raised", CEILING), CEILING),
    ),
    Target("batch read without properties of that with them", (1.5, 1.3), ratio("stock", PLAIN, SPARK)),
    Target("batch read with kafkaColumns of that without", (0.9, 0.9), ratio("stock", KAFKA_COLUMNS, SPARK)),
    Target("AvailableNow of the batch read", (0.9, 0.9), ratio("stock", STREAM, SPARK)),
    Target("batch read of the best Java consumer, cold", (2.0, 2.0), ratio("cold", SPARK, PULL8, LITE32)),
    Target("batch read of a batch topic of an ordinary one, stock", (1.3, 1.2), ratio("stock", SPARK_WHOLE, SPARK)),
    Target(
        "batch read of a batch topic of spark-sql-kafka, stock", (5.0, 5.0), ratio("stock", SPARK_WHOLE, KAFKA),
        bound=two_core_bound("stock", BULK_WHOLE, ("stock", CEILING), KAFKA),
    ),
    Target(
        "batch write of Java's batch producer", (1.0, 1.0), ratio("write", WRITE, *JAVA_BATCH),
        bound=two_core_bound("write", SEND, ("write", DROP), *JAVA_BATCH),
    ),
    Target(
        "batch write of spark-sql-kafka", (1.35, 1.05), ratio("write", WRITE, KAFKA_WRITE),
        bound=two_core_bound("write", SEND, ("write", DROP), KAFKA_WRITE),
    ),
    Target(
        "batch write to a batch topic of spark-sql-kafka", (1.2, 1.2), ratio("write", WRITE_WHOLE, KAFKA_WRITE),
        bound=two_core_bound("write", SEND_WHOLE, ("write", DROP), KAFKA_WRITE),
    ),
    Target("batch write to a batch topic of an ordinary one", (2.0, 1.3), ratio("write", WRITE_WHOLE, WRITE)),
    Target(
        "batch write to a batch topic of Java's batches to an ordinary one", (2.5, 1.5),
        ratio("write", WRITE_WHOLE, *JAVA_BATCH), bound=two_core_bound("write", SEND_WHOLE, ("write", DROP), *JAVA_BATCH),
    ),
    Target("batch write with exactly-once of at-least-once", (0.95, 0.97), ratio("write", ONCE, WRITE)),
    Target("write by shardingKey of round robin", (0.7, 0.7), ratio("write", HASH, WRITE)),
    Target("write with kafkaColumns of that by shardingKey", (0.9, 0.9), ratio("write", WRITE_KAFKA_COLUMNS, HASH)),
    Target("send_arrow of Java's batch producer", (0.9, 0.9), ratio("write", SEND_ARROW, JAVA_BATCH[0])),
    Target("send_many of Java's autoBatch", (0.8, 0.8), ratio("write", SEND_MANY, JAVA_BATCH[1])),
    Target("send_async with autoBatch of Java's", (0.35, 0.35), ratio("write", PRODUCER, JAVA_BATCH[1])),
    Target("batch write over gRPC of Java's asynchronous sends", (2.0, 2.0), ratio("grpc", WRITE_GRPC, JAVA_GRPC)),
    Target(
        "p50 of send over gRPC of Java's", (1.3,),
        quotient(figure("send over grpc", SEND_GRPC, "p50"), figure("send over grpc", JAVA_SEND_GRPC, "p50")), at_most=True,
    ),
    Target("Consumer of Java's push consumer", (0.8, 1.0), ratio("consume", MEMBER, PUSH)),
    Target("Consumer with arrow of Java's push consumer", (3.0, 2.0), ratio("consume", MEMBER_ARROW, PUSH)),
    Target("poll_arrow of LitePull, 32 a pull", (2.0, 2.0), ratio("consume", POLL_ARROW, LITE_POLL)),
    Target(
        "delivery p50 of Java's push consumer, plus", (2.0,),
        lambda found, size: found["delivery"][MEMBER]["p50"] - found["delivery"][PUSH]["p50"], at_most=True, unit="ms",
    ),
    *(
        Target(
            f"latency {part} of spark-sql-kafka's{name}", (most,),
            quotient(figure("latency", ours, part), figure("latency", theirs, part)), at_most=True,
        )
        for ours, theirs, name in ((OURS, KAFKA_LATENCY, ""), (LOW, KAFKA_LOW, ", low_latency_conf() for both"))
        for part, most in (("p50", 0.9), ("p99", 0.5))
    ),
    Target("latency p50", (170.0,), figure("latency", OURS, "p50"), at_most=True, unit="ms"),
    Target("latency p99", (280.0,), figure("latency", OURS, "p99"), at_most=True, unit="ms"),
    Target("low_latency_conf() p50", (70.0,), figure("latency", LOW, "p50"), at_most=True, unit="ms"),
    Target("low_latency_conf() p99", (120.0,), figure("latency", LOW, "p99"), at_most=True, unit="ms"),
    Target(
        "low_latency_conf() p50 of the default's", (0.65,),
        quotient(figure("latency", LOW, "p50"), figure("latency", OURS, "p50")), at_most=True,
    ),
    Target("planning 10,000 queues, warm routes", (1.0,), figure("planning", "warm", "seconds"), True, "s"),
    Target("planning 10,000 queues, cold routes", (5.0,), figure("planning", "cold", "seconds"), True, "s"),
    Target(
        "restart with a million rows that are stored, beyond settling", (10.0,),
        figure("restart", "1,000,000 rows", "beyond settling"), True, "s",
    ),
    Target(
        "restart with 1,024 queues on 8 brokers, beyond settling", (2.0,),
        figure("restart", "1,024 queues", "beyond settling"), True, "s",
    ),
    Target("a batch of 1,024 queues on 64 brokers", (0.03,), figure(scale.SMALL, "warm", "batch"), True, "s"),
    Target("a batch of 100,000 queues in 5,000 topics on 64 brokers", (3.0,), figure(scale.LARGE, "warm", "batch"), True, "s"),
    Target("memory for these", (1024.0,), figure(scale.LARGE, "memory", "peak MiB"), True, "MiB"),
    Target(
        "what a broker of 64 that hangs delays the others", (scale.REQUEST_TIMEOUT_S,),
        lambda found, size: found[scale.LARGE]["a broker hangs, first batch"]["batch"] - found[scale.LARGE]["warm"]["batch"],
        True, "s",
    ),
    Target("idle polling of a core", (0.02,), figure("planning", "idle", "of a core"), at_most=True),
    Target("idle member of a group, 0 queues", (1.0,), figure("idle", "0 queues", "cpu"), True, "% of a core"),
    Target(
        "idle member of a group, 1,000 queues of 100 topics", (10.0,),
        figure("idle", "1,000 queues of 100 topics", "cpu"), True, "% of a core",
    ),
    Target("memory that a consuming member gains", (2.0,), figure("idle", "consuming", "grown"), True, "MiB"),
    Target("memory of a read task above the bare worker", (256.0,), largest("memory", "MiB"), True, "MiB"),
    Target(
        "memory that a write gains whose queue waits for its broker", (64.0,), largest("memory of a write", "MiB"), True, "MiB"
    ),
)  # fmt: skip


def verdicts(found: Found, targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Every target with its figure, as far as the run measured it."""
    for target in targets:
        for size, wanted in zip(SIZES, target.wanted, strict=False):
            value = _measured(target.value, found, size)
            bound = _measured(target.bound, found, size) if target.bound and value is not None else None
            yield Verdict(target, size if len(target.wanted) > 1 else None, wanted, value, bound)


def _measured(value: Value, found: Found, size: int) -> float | None:
    try:
        return value(found, size)
    except (KeyError, ZeroDivisionError):  # a case that did not run, or too short a run for the clock of CPU time
        return None


def table(results: Sequence[Verdict]) -> Table:
    made = Table(title="Targets (medians of this run)")
    for column in ("figure", "bytes", "target", "measured", "two-core bound", ""):
        made.add_column(column, justify="left" if column == "figure" else "right")
    for v in results:
        sign = "≤" if v.target.at_most else "≥"
        measured = "not measured" if v.value is None else f"{v.value:.2f}"
        held = {True: "held", False: "NOT HELD", None: ""}[v.held]
        size = str(v.size) if v.size is not None else ""
        bound = "" if v.bound is None else f"{v.bound:.2f}"
        made.add_row(v.target.name, size, f"{sign} {v.wanted:g} {v.target.unit}".strip(), measured, bound, held)
    return made
