"""Sections of the benchmarks run once with everything tiny: what one measures means nothing, that it counts right does.

A section counts what it read or wrote and ends the run when that is wrong; so ``run`` alone says a good deal.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import (
    ceiling,
    codec,
    consume,
    growth,
    grpc,
    harness,
    java,
    latency,
    memory,
    planning,
    read,
    restart,
    targets,
    trips,
    workload,
    write,
)
from benchmarks.harness import Found
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.localbroker import LocalBroker
from tests import witness
from tests.scale import soak

SIZE = 100
# Eight batches of 1 MiB: one for each queue.
ONCE = Namespace(messages=30_000, repeats=1)

# What makes sections tiny.
TINY = (
    (harness, "SIZES", (SIZE,)),
    (harness, "WARM_UP", False),
    (codec, "ROWS", 500),
    (codec, "TIMES", 1),
    (java, "WARM_UP_S", 0.0),
    (java, "jvm", witness.quick_java),
    (consume, "LATE_OF", 50),
    (grpc, "SENDS", 20),
    (latency, "WARM_UP_S", 0.0),
    (latency, "SECONDS", 1.0),
    (planning, "TOPICS", 20),
    (planning, "IDLE_S", 0.3),
    (planning, "REST_S", 0.5),
    (growth, "AXES", {"tasks": (3,), "size": (1 << 20,), "brokers": (2,)}),
    (growth, "MAX_BYTES", 5 << 20),
    (memory, "TOPICS", {"1 KiB": (1024, 500)}),
    (memory, "COMPRESSED", {"4 MiB of zeros, zstd": (SysFlag.ZSTD, 3)}),
    (memory, "BATCHES", 5),
    (trips, "WARM_UPS", 1),
    (trips, "RUNS", 3),
    (restart, "ROWS", 2_000),
    (restart, "BROKERS", 2),
    (restart, "QUEUES", 16),
    (restart, "SETTLE_S", 4.0),  # as little as exactly-once takes
)

# Sections that need a context that exactly-once can be used with run in a driver of their own.
OWN_DRIVER = """
    from benchmarks import restart, spark, write
    from tests.spark.test_benchmarks_run import ONCE, SIZE, TINY

    for module, name, value in TINY:
        setattr(module, name, value)
    found = {}
"""
WRITE = f"""{OWN_DRIVER}
    write.run(spark.session(), None, ONCE, found)
    report(list(found["write {SIZE}"]))
"""
RESTART = f"""{OWN_DRIVER}
    restart.run(spark.plain_session((), spark.FAST), found)
    report(found["restart"])
"""


@pytest.fixture(scope="module", autouse=True)
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in TINY:
            patch.setattr(module, name, value)
        yield


@pytest.fixture(scope="module")
def brokers():
    """Brokers of their own, for sections change what a broker gives; small ones, for nothing is measured."""
    made: dict[tuple[int, bool], LocalBroker] = {}
    with contextlib.ExitStack() as stack:

        def broker(brokers: int = 1, proxy: bool = False) -> contextlib.AbstractContextManager[LocalBroker]:
            what = brokers, proxy
            if what not in made:
                made[what] = stack.enter_context(
                    LocalBroker(brokers=brokers, proxy=proxy, conf=workload.STORE, quiet=True)
                )
            return contextlib.nullcontext(made[what])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workload, "broker", broker)
            yield broker


def figures(run: Callable[[Found], object], capsys: pytest.CaptureFixture[str]) -> Found:
    """What a section found; every target can be judged and shown with it."""
    found: Found = {}
    run(found)
    assert capsys.readouterr().out.strip()
    harness.show(targets.table(list(targets.verdicts(found))))
    assert "Targets (medians of this run)" in capsys.readouterr().out
    return found


def test_codec(brokers, capsys):
    with brokers() as broker:
        found = figures(lambda found: codec.run(broker, found, 1), capsys)
    assert found.keys() == {f"codec {SIZE}"}
    assert len(found[f"codec {SIZE}"]) == 3


def test_trips(brokers, capsys, monkeypatch):
    runs: dict[str, list[trips.Count]] = {}

    def measured(*arguments: Any) -> dict[str, list[trips.Count]]:
        runs.update(there(*arguments))
        return runs

    there = trips.measured
    monkeypatch.setattr(trips, "measured", measured)
    found = figures(lambda found: trips.run(ONCE, found), capsys)["trips"]
    assert list(found) == [
        trips.READ, trips.PLAN, trips.IDLE, trips.ROW, trips.SEND, trips.ASYNC, trips.PULLED, trips.SPOOLED,
    ]  # fmt: skip
    assert all(0 < row["modules"] < row["hops"] < row["calls"] for row in found.values())
    calls = {trip: row["calls"] for trip, row in found.items()}
    assert calls[trips.IDLE] < calls[trips.PLAN]
    assert calls[trips.SEND] < calls[trips.ASYNC] < calls[trips.SPOOLED], "three attempts, and a record"
    for trip, counts in runs.items():
        assert calls[trip] == min(count.calls for count in counts)
        assert [count for count in counts if count.calls <= 1.5 * calls[trip]][1:], f"{trip}: {counts}"


@soak
def test_quick(brokers, spark, capsys, monkeypatch):
    """What ``make bench QUICK=1`` measures of reading, writing and consuming; whole sections run in ``make soak``."""
    monkeypatch.setattr(harness, "ONLY", targets.QUICK)

    def run(found: Found) -> None:
        with brokers() as broker:
            read.run(broker, spark, None, ONCE, found)
            write.run(spark, None, ONCE, found)
            consume.run(broker, ONCE, found)

    found = figures(run, capsys)
    measured = {f"{name} {SIZE}": found[f"{name} {SIZE}"].keys() for name in ("stock", "write", "consume")}
    assert set().union(*measured.values()) == targets.QUICK - {targets.KAFKA, targets.KAFKA_WRITE}
    assert measured[f"stock {SIZE}"] == {
        targets.SPARK, targets.STREAM, targets.PULL8, targets.LITE, targets.LITE32,
    }  # fmt: skip


@soak
def test_read(brokers, spark, capsys):
    ceiling.register(spark)
    with brokers() as broker:
        found = figures(lambda found: read.run(broker, spark, None, ONCE, found), capsys)
    assert found.keys() == {f"{limits} {SIZE}" for limits in ("stock", "raised", "cold")}
    assert {
        targets.SPARK,
        targets.SPARK_WHOLE,
        targets.LITE_WHOLE,
        targets.STREAM,
        targets.PULL8,
        targets.LITE,
        targets.CEILING,
    } <= found[f"stock {SIZE}"].keys()


@soak
def test_write(run_script):
    assert {
        targets.WRITE,
        targets.ONCE,
        targets.WRITE_WHOLE,
        targets.HASH,
        targets.DROP,
        targets.PRODUCER,
        *targets.JAVA_BATCH,
        targets.JAVA_WHOLE,
    } <= set(run_script(WRITE).report)


@soak
def test_grpc(brokers, spark, capsys):
    few = Namespace(messages=8_000, repeats=1)
    found = figures(lambda found: grpc.run(spark, few, found), capsys)
    cases = found[f"grpc {SIZE}"]
    assert cases.keys() == {targets.WRITE_GRPC, targets.WRITE, targets.PRODUCER_GRPC, targets.JAVA_GRPC}
    assert found["send over grpc"].keys() == {targets.SEND_GRPC, targets.JAVA_SEND_GRPC}
    assert all("proxy_us" in figures for figures in cases.values())


@soak
def test_consume(brokers, capsys):
    with brokers() as broker:
        found = figures(lambda found: consume.run(broker, ONCE, found), capsys)
    assert found[f"consume {SIZE}"].keys() == {
        targets.MEMBER, targets.POLL, targets.POLL_ARROW, targets.PUSH, targets.LITE_POLL,
    }  # fmt: skip
    assert found["delivery"].keys() == {targets.MEMBER, targets.PUSH}


@soak
def test_latency(brokers, capsys):
    with brokers() as broker:
        found = figures(lambda found: latency.run(broker, None, ONCE, found), capsys)
    assert found["latency"].keys() == {targets.OURS, targets.LOW}
    assert all(case["messages"] > 0 for case in found["latency"].values())


@soak
def test_planning(brokers, capsys):
    found = figures(lambda found: planning.run(ONCE, found), capsys)
    assert found["planning"].keys() == {"cold", "warm", "idle"}


@soak
def test_memory(brokers, capsys):
    with brokers() as broker:
        found = figures(lambda found: memory.run(broker, ONCE, found), capsys)
    assert len(found["memory"]) == 4
    assert found["memory of a write"].keys() == {"a queue waits for its broker"}


@soak
def test_growth(brokers, spark, capsys):
    few = Namespace(messages=600, full=False)
    found = figures(lambda found: growth.run(spark, few, found), capsys)
    assert found["growth"].keys() == {"tasks 3", "size 1,048,576", "brokers 2"}
    assert all(value > 0 for name, value in found["growth"]["tasks 3"].items() if name.endswith(("wall", "MiB")))


@soak
def test_restart(run_script):
    found = run_script(RESTART).report
    assert found.keys() == {"2,000 rows", "16 queues"}
    assert found["2,000 rows"]["messages read"] >= 2_000
