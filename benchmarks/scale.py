"""What a driver does for each micro-batch with 64 brokers and up to 100,000 queues, against a cluster that is a script.

Every layout is measured in a process of its own, which calls the reader as Spark's runner does: offsets travel as JSON, and
tasks as pickles.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import pickle
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pyspark.sql.streaming.datasource import ReadLimit
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import Found
from benchmarks.scripted import Layout, Scripted
from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.options import parse
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader

T = TypeVar("T")

PER_QUEUE = 5
TASKS = 800
IDLE_S = 10.0
POLLS_PER_S = 75  # how often Spark asks an idle stream
REQUEST_TIMEOUT_S = 3.0
# Sections of the two that have targets.
SMALL, LARGE = "scale, 1,024 queues, 1 topic", "scale, 100,000 queues, 5,000 topics"
QUICK = ("1,024 queues, 1 topic", "10,000 queues, 500 topics")
LAYOUTS: Mapping[str, Layout] = {
    "1,024 queues, 1 topic": Layout(),
    "1,024 queues, 64 topics": Layout(topics=64, spread=4, queues=4),
    "9,984 queues, 1 topic": Layout(queues=156),
    "10,000 queues, 500 topics": Layout(topics=500, spread=5, queues=4),
    "100,032 queues, 1 topic": Layout(queues=1563),
    "102,400 queues, 100 topics": Layout(topics=100),
    "100,000 queues, 5,000 topics": Layout(topics=5000, spread=5, queues=4),
    "100,000 queues, 5,000 topics, nothing expired": Layout(topics=5000, spread=5, queues=4, first=0),
    "1,024 queues, 1 topic, 5 ms": Layout(latency_ms=5.0),
    "1,024 queues, 1 topic, 20 ms": Layout(latency_ms=20.0),
    "10,000 queues, 500 topics, 20 ms": Layout(topics=500, spread=5, queues=4, latency_ms=20.0),
}


class Driver:
    """The reader of a stream as Spark's runner calls it, and what it takes: seconds by part.

    With two tasks at least: a batch of one small task would be read by the driver itself.
    """

    def __init__(self, cluster: Scripted, **options: str) -> None:
        given = {
            "nameServer": cluster.name_server, "subscribe": ",".join(cluster.layout.names()), "startingOffsets": "latest",
            "requestTimeout": f"{REQUEST_TIMEOUT_S:g}s", "minPartitions": "2", **options,
        }  # fmt: skip
        self._reader = RocketMQStreamReader(parse(given).for_role("stream source"), BASIC_COLUMNS)
        self._limit: ReadLimit = self._reader.getDefaultReadLimit()
        self.tasks: list[bytes] = []
        self.rows = 0

    def begin(self) -> str:
        return json.dumps(self._reader.initialOffset())

    def batch(self, start: str) -> tuple[str, dict[str, float]]:
        """Where it ends, and its seconds: of the newest offset, of the plan, of the report, of texts and pickles.

        A stream asks for less than everything after it was idle: what finds nothing new does not count.
        """
        text = start
        while text == start:
            seconds: dict[str, float] = {}
            cpu = time.process_time()
            given = _timed(seconds, "hand over", functools.partial(json.loads, start))
            end = _timed(seconds, "newest", functools.partial(self._reader.latestOffset, given, self._limit))
            text = _timed(seconds, "hand over", functools.partial(json.dumps, end))
        report = _timed(seconds, "report", self._reader.reportLatestOffset)
        _timed(seconds, "hand over", lambda: json.dumps(report))
        self._plan(start, text, seconds)
        seconds["batch"] = sum(seconds.values())
        seconds["CPU"] = time.process_time() - cpu
        return text, seconds

    def again(self, start: str, end: str) -> dict[str, float]:
        """A batch that was logged by a run before this one, and not finished."""
        seconds: dict[str, float] = {}
        cpu = time.process_time()
        self._plan(start, end, seconds)
        return {"batch": sum(seconds.values()), "CPU": time.process_time() - cpu}

    def _plan(self, start: str, end: str, seconds: dict[str, float]) -> None:
        texts = _timed(seconds, "hand over", lambda: (json.loads(start), json.loads(end)))
        planned = _timed(seconds, "plan", lambda: self._reader.partitions(*texts))
        self.tasks = _timed(seconds, "hand over", lambda: [pickle.dumps(task, 5) for task in planned])
        self.rows = sum(r.size for task in planned for r in getattr(task, "ranges", ()))

    def poll(self, start: str) -> bool:
        """Whether an idle stream has something new."""
        given = json.loads(start)
        found = self._reader.latestOffset(given, self._limit)
        self._reader.reportLatestOffset()
        return found is not given


def _timed(seconds: dict[str, float], part: str, work: Callable[[], T]) -> T:
    begin = time.perf_counter()
    done = work()
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begin
    return done


Figures = dict[str, dict[str, float]]


def measured(layout: Layout, turns: int = 5, idle_s: float = IDLE_S, tasks: int = TASKS) -> Figures:
    """All cases of one layout, in this process."""
    figures: Figures = {}
    before = _resident_mib()
    with Scripted(layout) as cluster:
        figures["cold"], driver, start = _cold(cluster)
        figures["warm"], start = _warm(cluster, driver, start, turns)
        figures["one topic in 100 grows"], start = _warm(cluster, driver, start, turns, every=100)
        figures["idle"] = _idle(driver, start, idle_s)
        figures["memory"] = {
            "MiB": _resident_mib() - before,
            "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
            "connections": cluster.counted()["connections"], "threads": threading.active_count(),
        }  # fmt: skip
        del driver
        for case in (
            functools.partial(_many_tasks, tasks=tasks), functools.partial(_backlog, turns=turns), _outage, _changes, _restart
        ):  # fmt: skip
            found, start = case(cluster, start)
            figures |= found
            harness.say(f"  {', '.join(found)}")
    session.close_all()
    return figures


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def _grown(cluster: Scripted, driver: Driver, start: str, every: int = 1) -> tuple[str, dict[str, float]]:
    """A batch after queues grew, all that did with their messages."""
    topics = -(-cluster.layout.topics // every)
    rows = PER_QUEUE * topics * cluster.layout.total // cluster.layout.topics
    while True:
        asked = cluster.grow(PER_QUEUE, every)
        time.sleep(0.02)  # Spark takes longer between two batches, and what was seen in that time serves again
        start, seconds = driver.batch(start)
        after = cluster.counted()
        if driver.rows == rows:
            break
        harness.say(f"  {driver.rows} of {rows} messages, for a part of the answers was late; again")
    seconds["servers' CPU"] = after["cpu"] - asked["cpu"]
    seconds["requests"] = sum(after["asked"].values())
    return start, seconds


def _cold(cluster: Scripted) -> tuple[dict[str, float], Driver, str]:
    """A new process's first batch: routes and bounds of everything, then tasks."""
    begin, cpu = time.perf_counter(), time.process_time()
    driver = Driver(cluster)
    start = driver.begin()
    begun, begun_cpu = time.perf_counter() - begin, time.process_time() - cpu
    end, seconds = _grown(cluster, driver, start)
    seconds["batch"] += begun
    seconds["CPU"] += begun_cpu
    return {**seconds, "offset KiB": len(end) / 1024}, driver, end


def _warm(cluster: Scripted, driver: Driver, start: str, turns: int, every: int = 1) -> tuple[dict[str, float], str]:
    """The median of the next batches."""
    found = []
    for _ in range(turns):
        start, seconds = _grown(cluster, driver, start, every)
        found.append(seconds)
    return {part: statistics.median(seconds[part] for seconds in found) for part in found[0]}, start


def _idle(driver: Driver, start: str, lasting_s: float) -> dict[str, float]:
    """Cores that a stream takes to which nothing comes; first it has to find that out."""
    for measured in (False, True):
        begin, cpu, polls = time.perf_counter(), time.process_time(), 0
        while (now := time.perf_counter()) < begin + lasting_s / (1 if measured else 2):
            driver.poll(start)
            polls += 1
            time.sleep(max(0.0, now + 1 / POLLS_PER_S - time.perf_counter()))
    wall = time.perf_counter() - begin
    return {"cores": (time.process_time() - cpu) / wall, "polls a second": polls / wall}


def _many_tasks(cluster: Scripted, start: str, tasks: int) -> tuple[Figures, str]:
    """A batch in as many tasks as 200 executors of 4 cores take at once."""
    driver = Driver(cluster, minPartitions=str(tasks))
    cluster.grow(PER_QUEUE)
    start, _ = driver.batch(start)
    start, seconds = _grown(cluster, driver, start)
    sizes = [len(task) for task in driver.tasks]
    figures = {"tasks": float(len(sizes)), "pickles KiB": sum(sizes) / 1024, "largest KiB": max(sizes) / 1024}
    return {f"{tasks} tasks": {**seconds, **figures}}, start


def _backlog(cluster: Scripted, start: str, turns: int) -> tuple[Figures, str]:
    """Batches of a limited size, with more waiting in every queue than one takes."""
    driver = Driver(cluster, maxOffsetsPerTrigger=str(2 * cluster.layout.total))
    cluster.grow(4 * (turns + 1))
    found = []
    for _ in range(turns + 1):
        cluster.counted()
        start, seconds = driver.batch(start)
        seconds["requests"] = sum(cluster.counted()["asked"].values())
        found.append(seconds)
    return {"backlog": {part: statistics.median(seconds[part] for seconds in found[1:]) for part in found[0]}}, start


def _outage(cluster: Scripted, start: str) -> tuple[Figures, str]:
    """A broker hangs: the batch that meets it, the ones after that, and the first one with it again."""
    figures: Figures = {}
    driver = Driver(cluster)
    cluster.grow(PER_QUEUE)
    start, _ = driver.batch(start)
    cluster.hang(0)
    for case in ("a broker hangs, first batch", "a broker hangs, second", "a broker hangs, third"):
        cluster.grow(PER_QUEUE)
        start, figures[case] = driver.batch(start)
    time.sleep(REQUEST_TIMEOUT_S)
    cluster.grow(PER_QUEUE)
    start, figures["a broker hangs, later"] = driver.batch(start)
    cluster.hang(None)
    return figures, start


def _changes(cluster: Scripted, start: str) -> tuple[Figures, str]:
    """Routes are asked for again and are what they were; a broker has moved; every topic has more queues."""
    figures: Figures = {}
    driver = Driver(cluster, routeRefresh="1ms")
    cluster.grow(PER_QUEUE)
    start, _ = driver.batch(start)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("routes asked for again", lambda: None), ("a broker has moved", lambda: cluster.move(1)),
        ("a queue more everywhere", cluster.widen),
    ]  # fmt: skip
    for case, change in cases:
        change()
        cluster.grow(PER_QUEUE)
        start, figures[case] = driver.batch(start)
    return figures, start


def _restart(cluster: Scripted, start: str) -> tuple[Figures, str]:
    """A new process with a checkpoint: the batch that was logged is read again, then the next one."""
    driver = Driver(cluster)
    cluster.grow(PER_QUEUE)
    start, _ = driver.batch(start)
    cluster.grow(PER_QUEUE)
    end, _ = driver.batch(start)
    session.close_all()
    begin, cpu = time.perf_counter(), time.process_time()
    again = Driver(cluster)
    again.again(start, end)
    cluster.grow(PER_QUEUE)
    start, _ = again.batch(end)
    return {"restart": {"batch": time.perf_counter() - begin, "CPU": time.process_time() - cpu}}, start


def run(options: Any, found: Found) -> None:
    """All layouts, or with ``--quick`` two of them."""
    for name, layout in LAYOUTS.items():
        if options.quick and name not in QUICK:
            continue
        found[f"scale, {name}"] = _apart(layout, options.repeats)
        _show(name, found[f"scale, {name}"])
        found.setdefault("scale", {})[name] = _summary(found[f"scale, {name}"])
    _show("All layouts", found["scale"])


def _apart(layout: Layout, turns: int) -> Figures:
    """Measured in a new process, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.scale", json.dumps(dataclasses.asdict(layout)), str(turns)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def _summary(figures: Figures) -> dict[str, float]:
    """What a table of all layouts has of each."""
    columns = {
        "warm s": ("warm", "batch"), "its CPU": ("warm", "CPU"), "requests": ("warm", "requests"), "cold s": ("cold", "batch"),
        "idle cores": ("idle", "cores"), "backlog s": ("backlog", "batch"), "restart s": ("restart", "batch"),
        "a broker hangs s": ("a broker hangs, first batch", "batch"), "routes again s": ("routes asked for again", "batch"),
        "800 tasks s": (f"{TASKS} tasks", "batch"), "their pickles KiB": (f"{TASKS} tasks", "pickles KiB"),
        "offset KiB": ("cold", "offset KiB"), "peak MiB": ("memory", "peak MiB"),
    }  # fmt: skip
    return {column: figures[case][figure] for column, (case, figure) in columns.items()}


def _show(name: str, figures: Figures) -> None:
    table = Table(title=f"{name}: seconds of a batch, its parts, and sizes")
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    for column in ("case", *columns):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, row in figures.items():
        cells = (row.get(column) for column in columns)
        table.add_row(
            case, *("" if cell is None else f"{cell:,.3f}" if cell < 100 else f"{cell:,.0f}" for cell in cells)
        )
    harness.show(table)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # what hangs, moves and starts again is meant to
    gc.freeze()  # as in Spark's runner: ``process.tune_gc_of_runner``
    gc.set_threshold(*process.GC_THRESHOLDS)
    print(json.dumps(measured(Layout(**json.loads(sys.argv[1])), int(sys.argv[2]))))
