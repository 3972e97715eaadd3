"""The spool's figures: additions against a bare loop of fsync, what a healthy send costs, a million records.

``python -m benchmarks.spool [--records N]`` prints them. The disk is that of the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus, SpooledSend
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session import spools
from rocketmq_spark.spool.records import Done, Record
from rocketmq_spark.spool.spool import SendSpool, record_of
from rocketmq_spark.spool.store import Store

BODY = os.urandom(256)
PROPERTIES = "UNIQ_KEY\x01" + "0" * 32 + "\x02WAIT\x01true\x02"
QUEUES = tuple(MessageQueue("t", "broker-a", i) for i in range(4))


SEND = SpooledSend("t", SendRequest("g", BODY, PROPERTIES), None, ("0" * 32,))


def record(now_ms: int) -> Record:
    """Of a send that failed, which is there whether it is kept or not."""
    return record_of(SEND, now_ms)


def rate(count: int, step: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return count / (time.perf_counter() - began)


def always(folder: Path, turns: int = 20, count: int = 100) -> tuple[float, float, float]:
    """Additions a second, appends with fsync of as many bytes a second, by turns; and the median of the turns' ratios."""
    store = Store(folder / "always")
    data = os.urandom(len(record(1).encode()) + 100)
    with (folder / "bare").open("wb", buffering=0) as file:

        def bare() -> None:
            file.write(data)
            os.fsync(file.fileno())

        rates = [(rate(count, lambda: store.add([(record(1), 1)])), rate(count, bare)) for _ in range(turns)]
    store.close()
    ours, theirs = (statistics.median(column) for column in zip(*rates, strict=True))
    return ours, theirs, statistics.median(one / other for one, other in rates)


def additions(folder: Path, sync: str, count: int, threads: int = 1) -> float:
    store = Store(folder / f"{sync}-{threads}", sync)

    def work() -> None:
        for _ in range(count // threads):
            store.add([(record(1), 1)])

    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    store.close()
    return count / took


def together(folder: Path, count: int, size: int) -> float:
    """As asynchronous sends that fail in one moment are kept."""
    store = Store(folder / "together", "batch")
    began = time.perf_counter()
    for _ in range(count // size):
        store.add([(record(1), 1) for _ in range(size)])
    took = time.perf_counter() - began
    store.close()
    return count / took


class Healthy:
    """Implements as much of ``ports.Sender`` as a send asks."""

    client_id = "benchmark"

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> tuple[MessageQueue, ...]:
        return QUEUES

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        return SendResult(SendStatus.SEND_OK, "", queue, 1, "x")


class Nobody:
    """Implements ``ports.Resender``; nothing is spooled here."""

    def batch_predicate(self, first_send: SpooledSend) -> Callable[[SpooledSend], bool]:
        raise AssertionError

    def join_sends(self, sends_: object) -> SpooledSend:
        raise AssertionError

    def resend(self, send: SpooledSend, done: object) -> None:
        raise AssertionError

    def close(self, deadline: Deadline) -> None:
        pass


def healthy(folder: Path, count: int) -> tuple[float, float]:
    """Microseconds of a send through an engine without a spool and with one, medians of seven turns each."""
    settings, sender = ProducerSettings(group="g"), Healthy()
    spool = SendSpool(Store(folder / "healthy"), Nobody(), Timer("spool"))
    engines = [Engine(sender, settings, Timer("a")), Engine(sender, settings, Timer("b"), spool=spool)]  # type: ignore[arg-type]
    request, costs = SendRequest("g", BODY, PROPERTIES), ([], [])  # type: tuple[SendRequest, tuple[list[float], list[float]]]
    for _ in range(7):
        for engine, cost in zip(engines, costs, strict=True):
            cost.append(1e6 / rate(count, lambda: engine.send(OutgoingSend("t", request, Deadline.after(3)))))  # noqa: B023
    spool.close(Deadline.after(0))
    return statistics.median(costs[0]), statistics.median(costs[1])


def resident_mib(which: str = "VmRSS") -> float:
    """Now, or at most (``VmHWM``). ``getrusage`` would count what the process was before it executed this program."""
    with Path("/proc/self/status").open() as file:
        (line,) = (line for line in file if line.startswith(which))
    return int(line.split()[1]) / 1024


def million(folder: str) -> None:
    """In a process of its own: open, take, hasten; what it cost."""
    before = resident_mib()
    began = time.perf_counter()
    store = Store(Path(folder), "never")
    first = store.take(2**40, 64)
    started = time.perf_counter() - began
    store.settle([(work, Done()) for work in first], 1)
    began, done = time.perf_counter(), 0
    while done < 100_000 and (works := store.take(2**40, 64)):
        store.settle([(work, Done()) for work in works], 1)
        done += len(works)
    drained = done / (time.perf_counter() - began)
    print(
        f"  start, first 64 taken: {started:.2f} s; {drained:,.0f} settled a second\n"
        f"  resident: {before:.0f} MiB before, {resident_mib():.0f} MiB after, {resident_mib('VmHWM'):.0f} MiB at most"
    )
    store.close()


def fill(folder: Path, count: int) -> float:
    store = Store(folder, "batch", max_bytes=None)
    began = time.perf_counter()
    for _ in range(count // 1000):
        store.add([(record(1), 1) for _ in range(1000)])
    took = time.perf_counter() - began
    peak = resident_mib()
    store.close()
    print(f"{count:,} records pending, written in {took:.0f} s, resident {peak:.0f} MiB")
    return took


def lane(folder: Path, count: int, alone: bool) -> float:
    """Keyed messages a second that a lane sends to a real broker after an outage, in their order; ``alone``: one by one."""
    queue = MessageQueue(BROKERS.topic, BROKERS.name, 0)
    store, now_ms = Store(folder / f"lane-{alone}", "batch"), time.time_ns() // 1_000_000
    kept = [
        record_of(SpooledSend(queue.topic, SendRequest("g", BODY, PROPERTIES, born_timestamp_ms=now_ms), queue), now_ms)
        for _ in range(count)
    ]
    store.add([(each, now_ms) for each in kept])
    parsed = options.parse({"nameServer": BROKERS.name_server}).for_role("producer")
    began = time.perf_counter()
    spool = spools.open_send_spool(store, session.sender(parsed), ProducerSettings(group="g"))
    if alone:
        spool.redelivery.batch_policy.predicate = lambda first: lambda other: False
    left = spool.send_all(300.0)
    took = time.perf_counter() - began
    spool.close(Deadline.after(5))
    assert left == 0, left
    return count / took


class BROKERS:
    """A broker for all turns of ``lane``."""

    name_server, name, topic = "", "", "lanes"


def lanes(folder: Path, count: int, turns: int = 3) -> None:
    with LocalBroker() as mq:
        BROKERS.name_server, BROKERS.name = mq.name_server, mq.brokers[0]
        mq.create_topic(BROKERS.topic, 1)
        for turn in range(turns):
            here = folder / str(turn)
            here.mkdir()
            alone, together = lane(here, count // 10, True), lane(here, count, False)
            print(f"a lane of keyed messages: {together:,.0f} a second, one by one {alone:,.0f}")
        session.close_all()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--opened")
    given = arguments.parse_args()
    if given.opened:
        million(given.opened)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(3):
            ours, bare, ratio = always(folder)
            print(f"always: {ours:,.0f} a second, a bare loop of fsync {bare:,.0f}; ratio of turns {ratio:.2f}")
        print(f"batch, 1000 in one call: {together(folder, 50_000, 1000):,.0f} a second")
        for threads in (1, 8, 64):
            print(f"batch, {threads} threads: {additions(folder, 'batch', 6400, threads):,.0f} a second")
        print(f"never: {additions(folder, 'never', 20_000):,.0f} a second")
        lanes(folder, 30_000)
        without, with_spool = healthy(folder, 20_000)
        print(f"a healthy send through the engine: {without:.2f} µs without a spool, {with_spool:.2f} µs with one")
        fill(folder / "million", given.records)
        command = [sys.executable, "-m", "benchmarks.spool", "--opened", str(folder / "million")]
        sys.stdout.flush()
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
