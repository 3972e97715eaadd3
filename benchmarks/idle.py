"""What a member of a consumer group costs that has nothing to do, and whether its memory stays flat while it has.

``python -m benchmarks.idle MODE NAME_SERVER SECONDS`` is such a member, in a process of its own; it prints its figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness
from benchmarks.harness import Found
from rocketmq_spark import Consumer, LocalBroker, Message, Producer
from rocketmq_spark.model import MessageQueue

NONE, MANY, BUSY = "0 queues", "1,000 queues of 100 topics", "consuming"
TOPICS, QUEUES = 100, 10
SETTLING_S = 40.0  # two rebalances, and offsets are stored
SECONDS, SOAK_S = 60.0, 300.0
FULL_S = 3600.0
RATE, PARTS = 500, 10  # messages a second of the soak, and how often its memory is looked at


def run(broker: LocalBroker, options: Any, found: Found) -> None:
    topics = [f"idle-{i}" for i in range(TOPICS)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda topic: broker.create_topic(topic, queues=QUEUES), topics))
    table = Table(title="A member of a consumer group (each in a process of its own)")
    for column in ("case", "seconds", "CPU, % of a core", "memory at first (MiB)", "at the end (MiB)"):
        table.add_column(column, justify="left" if column == "case" else "right")
    cases = {NONE: SECONDS, MANY: SECONDS, BUSY: FULL_S if options.full else SOAK_S}
    found["idle"] = {}
    for mode, seconds in cases.items():
        with _sending(broker, topics[0]) if mode == BUSY else contextlib.nullcontext():
            figures = _measured(mode, broker.name_server, seconds)
        found["idle"][mode] = figures
        table.add_row(mode, f"{seconds:.0f}", *(f"{figures[name]:.2f}" for name in ("cpu", "first", "last")))
    harness.show(table)


def _measured(mode: str, name_server: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.idle", mode, name_server, str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SETTLING_S + seconds + 120, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


@contextlib.contextmanager
def _sending(broker: LocalBroker, topic: str) -> Iterator[None]:
    stop = threading.Event()

    def send() -> None:
        with Producer(name_server=broker.name_server, group="idle-bench") as producer:
            while not stop.wait(1 / RATE):
                producer.send(Message(topic, bytes(100)))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def nothing(consumer: str, queues: Sequence[MessageQueue], consumers: Sequence[str]) -> list[MessageQueue]:
    """A strategy by which this member has no queue."""
    return []


def main(mode: str, name_server: str, seconds: float) -> None:
    how = {"allocation_strategy": "benchmarks.idle:nothing"} if mode == NONE else {}
    with Consumer(name_server=name_server, group=f"idle-{os.getpid()}", **how) as consumer:
        for i in range(1 if mode == BUSY else TOPICS):
            consumer.subscribe(f"idle-{i}")
        consumer.start(lambda messages, context: None)
        time.sleep(SETTLING_S)
        cpu, memory = harness.process_cpu(os.getpid()), [_mib()]
        begun = time.monotonic()
        for _ in range(PARTS):
            time.sleep(seconds / PARTS)
            memory.append(_mib())
        spent = harness.process_cpu(os.getpid()) - cpu
        consumed = consumer.stats().consumed
        harness.say(f"  {mode}: {', '.join(f'{mib:.1f}' for mib in memory)} MiB; {consumed} consumed")
    figures = {"cpu": 100 * spent / (time.monotonic() - begun), "first": memory[0], "last": memory[-1]}
    print(json.dumps(figures | {"grown": memory[-1] - memory[0]}))


def _mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
