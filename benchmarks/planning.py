"""What the driver does: plan 10,000 queues, and poll while nothing arrives."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.table import Table

from benchmarks import harness, workload
from benchmarks.harness import Found
from rocketmq_spark import LocalBroker, session
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.options import parse
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader

TOPICS, QUEUES, BROKERS = 1250, 4, 2
# A message in every queue would take longer to write than to plan: a moved end is planned just the same.
PER_QUEUE = 5
IDLE_S = 20.0
# A sweep that took half a second is not made again for five times as long.
REST_S = 5.0
# How often Spark asks an idle stream for its newest offset.
POLLS_PER_S = 75


def run(options: Any, found: Found) -> None:
    names = [f"plan-{i:04d}" for i in range(TOPICS)]
    with workload.broker(brokers=BROKERS) as broker:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: broker.admin.create_topic(name, QUEUES), names))
        cold, warm = [], []
        for _ in range(options.repeats):
            session.close_all()
            cold.append(_cold(broker, names))
            warm.append(_warm(broker, names))
        idle = _idle(broker, names)
    cold.sort(key=_seconds)
    warm.sort(key=_seconds)
    found["planning"] = {
        "cold": cold[len(cold) // 2], "warm": warm[len(warm) // 2], "idle": {"of a core": idle},
    }  # fmt: skip
    table = Table(title=f"Planning {TOPICS * QUEUES * BROKERS:,} queues in {TOPICS:,} topics on {BROKERS} brokers")
    for column in ("case", "seconds", "CPU seconds"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in ("cold", "warm"):
        row = found["planning"][case]
        table.add_row(f"{case} routes", f"{row['seconds']:.2f}", f"{row['cpu']:.2f}")
    table.add_row(f"idle, asked {POLLS_PER_S} times a second", "", f"{idle:.3f} of a core")
    harness.show(table)


def _seconds(figure: dict[str, float]) -> float:
    return figure["seconds"]


def _reader(broker: LocalBroker, names: list[str]) -> RocketMQStreamReader:
    options = {"nameServer": broker.name_server, "subscribe": ",".join(names), "startingOffsets": "earliest"}
    return RocketMQStreamReader(parse(options).for_role("stream source"), BASIC_COLUMNS)


def _cold(broker: LocalBroker, names: list[str]) -> dict[str, float]:
    """A new process's first plan: routes and bounds of everything, then tasks."""
    reader = _reader(broker, names)
    wall, cpu = time.perf_counter(), time.process_time()
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    begun = time.perf_counter() - wall, time.process_time() - cpu
    return _planned(reader, start, end, *begun)


def _warm(broker: LocalBroker, names: list[str]) -> dict[str, float]:
    """The next batch of a running stream, long enough after the last that everything is asked again."""
    reader = _reader(broker, names)
    start = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    start = json.loads(json.dumps(start))
    time.sleep(REST_S)
    wall, cpu = time.perf_counter(), time.process_time()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    return _planned(reader, start, end, time.perf_counter() - wall, time.process_time() - cpu)


def _planned(
    reader: RocketMQStreamReader, start: dict[str, Any], end: dict[str, Any], seconds: float, cpu_seconds: float
) -> dict[str, float]:
    """With the tasks of a batch in which every queue has something; offsets travel as JSON, which is not our time."""
    end = json.loads(json.dumps(end))
    for brokers in end["topics"].values():
        for queues in brokers.values():
            for queue in queues:
                queues[queue] += PER_QUEUE
    wall, cpu = time.perf_counter(), time.process_time()
    tasks = reader.partitions(start, end)
    seconds, cpu_seconds = seconds + time.perf_counter() - wall, cpu_seconds + time.process_time() - cpu
    planned = sum(r.size for task in tasks for r in getattr(task, "ranges", ()))
    harness.expect("planning", planned, PER_QUEUE * TOPICS * QUEUES * BROKERS)
    return {"seconds": seconds, "cpu": cpu_seconds}


def _idle(broker: LocalBroker, names: list[str]) -> float:
    """CPU of the driver's side of an idle stream, in cores."""
    reader = _reader(broker, names)
    text = json.dumps(reader.initialOffset())
    starts = [json.loads(text), json.loads(text)]  # Spark hands over a new object each time
    polls = 0
    for measured in (False, True):
        begin, cpu = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < begin + IDLE_S:
            polls += 1
            reader.latestOffset(starts[polls % 2], reader.getDefaultReadLimit())
            reader.reportLatestOffset()
            time.sleep(max(0.0, now + 1 / POLLS_PER_S - time.perf_counter()))
        if measured:
            return (time.process_time() - cpu) / (time.perf_counter() - begin)
    raise AssertionError
