"""Counts modules, Python calls and hops of eight trips through the package, with a profile hook.

A *module* is a module of the package that the trip enters. A *call* is a function call, a comprehension or a step of a generator
in code of the package; Python 3.12 and later run comprehensions without a call, so compare only counts of one Python version. A
*hop* is a call whose caller, the nearest function of the package on the stack, is in another module.

All threads are counted, except that a read, a plan and a spooled send count only the calling thread: connections that wake while
it waits, and a spool that sends older messages meanwhile, are no part of the trip.

``python -m benchmarks.trips NAME_SERVER READ SENT PULLED FOLDER`` is the process that is measured. It has a client of its own, so
the hook sees each of its threads start. It asks its parent to send messages and to kill the broker.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pyarrow as pa
from rich.table import Table

import rocketmq_spark
from benchmarks import harness, workload
from benchmarks.harness import Found
from rocketmq_spark import Consumer, LocalBroker, Message, Producer
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.options import parse
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader

READ, PLAN, IDLE, ROW = "a task's read of 40 messages", "a plan", "an idle plan", "a row sent"
SEND, ASYNC = "a synchronous send", "an asynchronous send"
PULLED, SPOOLED = "a pulled message to its listener", "a spooled send"
MESSAGES = 5 * workload.QUEUES
# Timers and idle connections only add calls, so the run with the fewest calls counts.
WARM_UPS, RUNS = 3, 15
# A trip has ended when no thread has made a call for this long. Idle connections wake ten times a second.
QUIET_S = 0.03
# Longer than the pause between polls of a source that found nothing new.
REST_S = 0.5
_WITHIN_S = 60.0
_PACKAGE = os.path.dirname(rocketmq_spark.__file__) + os.sep


class Count(NamedTuple):
    """What one run of a trip costs. The smallest of several has the fewest calls."""

    calls: int
    hops: int
    modules: int


class CallCounter:
    """The profile hook. It sees the threads that start after ``install``; between trips it counts nothing."""

    def __init__(self) -> None:
        self._is_counting = False
        self._thread: int | None = None  # the only thread that is counted, or None for all threads
        self._calls: list[tuple[str, bool]] = []  # the module of each call, and whether the call is a hop

    def install(self) -> None:
        threading.setprofile(self.on_event)
        sys.setprofile(self.on_event)

    @contextlib.contextmanager
    def counting(self, caller_only: bool = False) -> Iterator[list[Count]]:
        """Count the trip in the block, and what other threads still do for it. The list gets the count at the end."""
        counts: list[Count] = []
        self._calls, self._thread = [], threading.get_ident() if caller_only else None
        gc.disable()  # the package has callbacks of the garbage collection
        self._is_counting = True
        try:
            yield counts
            if not caller_only:
                self._wait_until_quiet()
        finally:
            self._is_counting = False
            gc.enable()
        modules = {module for module, _ in self._calls}
        counts.append(Count(len(self._calls), sum(is_hop for _, is_hop in self._calls), len(modules)))

    def _wait_until_quiet(self) -> None:
        seen = -1
        while seen != len(self._calls):
            seen = len(self._calls)
            time.sleep(QUIET_S)

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """The function for ``sys.setprofile``."""
        if not self._is_counting or event != "call" or self._thread not in (None, threading.get_ident()):
            return
        if (module := _module(frame)) is not None:
            caller = frame.f_back
            while caller is not None and _module(caller) is None:
                caller = caller.f_back
            self._calls.append((module, caller is not None and _module(caller) != module))


def _module(frame: FrameType) -> str | None:
    """The module of the package that has the code, or None. Generated methods of dataclasses have no file."""
    return frame.f_globals["__name__"] if frame.f_code.co_filename.startswith(_PACKAGE) else None


def run(options: Any, found: Found) -> None:
    with workload.broker() as broker, tempfile.TemporaryDirectory() as folder:
        runs_of_trips = measured(broker, folder)
    for trip, counts in runs_of_trips.items():
        harness.say(f"  {trip}: {' '.join(str(count.calls) for count in counts)} calls")
    found["trips"] = {trip: figures(counts) for trip, counts in runs_of_trips.items()}
    table = Table(title=f"Trips through the package (Python {sys.version_info.major}.{sys.version_info.minor})")
    for column in ("trip", "modules", "calls", "hops"):
        table.add_column(column, justify="left" if column == "trip" else "right")
    for trip, row in found["trips"].items():
        table.add_row(trip, *map(str, row.values()))
    harness.show(table)


def figures(counts: Sequence[Count]) -> dict[str, int]:
    smallest = min(counts)
    return {"modules": smallest.modules, "calls": smallest.calls, "hops": smallest.hops}


def measured(broker: LocalBroker, folder: str) -> dict[str, list[Count]]:
    """Run the measured process, and do what it asks for. Returns the counted runs of each trip."""
    topics = [f"trips-{kind}-{os.urandom(4).hex()}" for kind in ("read", "sent", "pulled")]
    for topic in topics:
        broker.create_topic(topic, queues=workload.QUEUES)
    command = [sys.executable, "-m", "benchmarks.trips", broker.name_server, *topics, folder, str(WARM_UPS), str(RUNS)]
    sent = dict.fromkeys(topics, 0)
    with (
        Producer(broker.name_server, "bench") as producer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        for line in child.stdout:
            match json.loads(line):
                case {"send": topic, "count": count}:
                    for _ in range(count):
                        producer.send(Message(topic, bytes(100)))
                    sent[topic] += count
                    workload.wait_visible(broker, topic, sent[topic])
                case {"kill": True}:
                    broker.kill(broker.brokers[0])
                case {"trips": trips}:
                    broker.restart(broker.brokers[0])
                    return {trip: [Count(*count) for count in counts] for trip, counts in trips.items()}
            print("done", file=child.stdin, flush=True)
    raise SystemExit(f"trips: the measured process ended with exit code {child.returncode}")


class Trips:
    """Runs the trips in the measured process."""

    def __init__(self, name_server: str, read: str, sent: str, pulled: str, folder: Path, warm_ups: int, runs: int):
        self._counter = CallCounter()
        self._counter.install()
        self._name_server = name_server
        self._read, self._sent, self._pulled = read, sent, pulled
        self._folder = folder
        self._warm_ups, self._runs = warm_ups, runs

    def all(self) -> dict[str, list[Count]]:
        ways = self._reads, self._rows, self._sends, self._pulls, self._spooled_sends
        return {trip: counts for way in ways for trip, counts in self._counted(way()).items()}

    def _counted(self, runs: Generator[dict[str, Count]]) -> dict[str, list[Count]]:
        """The counts of runs that share a set-up, without the first runs, which open connections and fill caches."""
        with contextlib.closing(runs):
            counted = list(itertools.islice(runs, self._warm_ups, self._warm_ups + self._runs))
        return {trip: [counts[trip] for counts in counted] for trip in counted[0]}

    def _reads(self) -> Generator[dict[str, Count]]:
        options = {"nameServer": self._name_server, "subscribe": self._read, "startingOffsets": "earliest"}
        reader = RocketMQStreamReader(parse(options).for_role("stream source"), BASIC_COLUMNS)
        limit, start = reader.getDefaultReadLimit(), reader.initialOffset()
        while True:
            _ask(send=self._read, count=MESSAGES)
            time.sleep(REST_S)
            start = json.loads(json.dumps(start))  # Spark passes a new object each time
            with self._counter.counting(caller_only=True) as plan:
                end = reader.latestOffset(start, limit)
            (partition,) = reader.partitions(start, end)
            partition = pickle.loads(pickle.dumps(partition))
            time.sleep(REST_S)
            start = json.loads(json.dumps(end))
            with self._counter.counting(caller_only=True) as idle:
                end = reader.latestOffset(start, limit)
            assert end == start
            with self._counter.counting(caller_only=True) as read:
                rows = sum(batch.num_rows for batch in reader.read(partition))
            harness.expect(READ, rows, MESSAGES)
            yield {READ: read[0], PLAN: plan[0], IDLE: idle[0]}

    def _rows(self) -> Generator[dict[str, Count]]:
        options = parse({"nameServer": self._name_server, "topic": self._sent}).for_role("sink")
        row = pa.RecordBatch.from_pydict({"body": pa.array([bytes(100)], pa.binary())})
        while True:
            writer = TaskWriter(options, {"body": "body"})
            with self._counter.counting() as counts:
                written = writer.write([row])
            harness.expect(ROW, written.rows, 1)
            yield {ROW: counts[0]}

    def _sends(self) -> Generator[dict[str, Count]]:
        with Producer(self._name_server, "bench") as producer:
            while True:
                message = Message(self._sent, bytes(100))
                with self._counter.counting() as sync_counts:
                    producer.send(message)
                with self._counter.counting() as async_counts:
                    producer.send_async(message).result()
                yield {SEND: sync_counts[0], ASYNC: async_counts[0]}

    def _pulls(self) -> Generator[dict[str, Count]]:
        arrived = threading.Event()
        with Consumer(self._name_server, f"bench-{os.urandom(4).hex()}", consume_from_where="earliest") as consumer:
            consumer.subscribe(self._pulled)
            consumer.start(lambda messages, context: arrived.set())
            while True:
                with self._counter.counting() as counts:
                    _request(send=self._pulled, count=1)
                    if not arrived.wait(_WITHIN_S):
                        raise SystemExit(f"{PULLED}: no message within {_WITHIN_S:g} s")
                _await_done()
                arrived.clear()
                yield {PULLED: counts[0]}

    def _spooled_sends(self) -> Generator[dict[str, Count]]:
        with Producer(
            self._name_server, "bench", on_send_failure="spool", spool_dir=str(self._folder / "spool")
        ) as producer:
            producer.send(Message(self._sent, bytes(100)))
            _ask(kill=True)
            while True:
                with self._counter.counting(caller_only=True) as counts:
                    result = producer.send(Message(self._sent, bytes(100)))
                assert isinstance(result, SendResult)
                assert result.status is SendStatus.SPOOLED
                yield {SPOOLED: counts[0]}


def _ask(**request: object) -> None:
    """Let the parent do something, and wait until it is done."""
    _request(**request)
    _await_done()


def _request(**request: object) -> None:
    print(json.dumps(request), flush=True)


def _await_done() -> None:
    if not sys.stdin.readline():
        raise SystemExit("trips: the parent has ended")


def main(name_server: str, read: str, sent: str, pulled: str, folder: str, warm_ups: str, runs: str) -> None:
    trips = Trips(name_server, read, sent, pulled, Path(folder), int(warm_ups), int(runs))
    print(json.dumps({"trips": trips.all()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
