"""The delay service's figures: so many messages a second in and out of a node, how late they are, and a million that wait.

``python -m benchmarks.delay [--rate N] [--seconds S] [--nodes N] [--pending N]`` prints them, on a broker of this machine. A
node is a process of its own, as ``rocketmq-spark delay serve`` starts it; lateness is when the broker stored an original, less
when it was due.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rocketmq_spark import LocalBroker, Message, Producer, PullConsumer
from rocketmq_spark.delay.commits import CommittedOffsets, CommittedProgress, GroupNames
from rocketmq_spark.wire.envelope import INNER_TOPIC, Envelope

TARGET = "originals"
_DUE = struct.Struct(">q")
PADDING = os.urandom(240)
FAR_MS = 30 * 24 * 3_600_000


def envelope(name: str, due_ms: int, born_ms: int) -> bytes:
    properties = f"UNIQ_KEY\x01{name}\x02WAIT\x01true\x02TAGS\x01t\x02"
    return Envelope(TARGET, due_ms, name, born_ms, 0, properties, _DUE.pack(due_ms) + PADDING).pack()


class Service:
    """A node in a process of its own."""

    def __init__(self, mq: LocalBroker, folder: Path) -> None:
        command = [sys.executable, "-m", "rocketmq_spark", "delay", "serve", "--topic", "*", "--json",
                   "--name-server", mq.name_server, "--data", str(folder)]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        began = time.perf_counter()
        self._process.stdout.readline()
        self.start_s = time.perf_counter() - began

    def resident_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text("utf-8")
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def cpu_s(self) -> float:
        """Of all its threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> dict[str, int]:
        self._process.send_signal(signal.SIGTERM)
        told: dict[str, int] = json.loads(self._process.communicate(timeout=120)[0].splitlines()[-1])
        return told


def feed(mq: LocalBroker, rate: int, seconds: float, delay_ms: int, due_ms: int | None = None) -> int:
    """Envelopes in batches of a twentieth of a second, each due ``delay_ms`` after it was sent, or all at ``due_ms``."""
    size = max(1, rate // 20)
    with Producer(name_server=mq.name_server, group="feed", send_timeout="60s") as producer:
        began, sent = time.perf_counter(), 0
        while sent < rate * seconds:
            now_ms = time.time_ns() // 1_000_000
            due = now_ms + delay_ms if due_ms is None else due_ms
            batch = [Message(INNER_TOPIC, envelope(f"{sent + i:032X}", due, now_ms)) for i in range(size)]
            producer.send_batch(batch)
            sent += size
            time.sleep(max(0.0, sent / rate - (time.perf_counter() - began)))
        print(f"  fed {sent / (time.perf_counter() - began):,.0f} a second")
    return sent


def lateness(mq: LocalBroker, count: int, within_s: float) -> np.ndarray:
    """Milliseconds of each original, as many as come in time."""
    found: list[np.ndarray] = []
    deadline = time.perf_counter() + within_s
    with PullConsumer(name_server=mq.name_server, group="read", consume_from_where="earliest") as consumer:
        consumer.subscribe(TARGET)
        while sum(map(len, found)) < count and time.perf_counter() < deadline:
            batch = consumer.poll_arrow(2)
            stored = batch.column("storeTimestamp").cast(pa.int64()).to_numpy() // 1000
            due = [_DUE.unpack_from(body)[0] for body in batch.column("body").to_pylist()]
            found.append(stored - np.array(due, np.int64))
    return np.concatenate(found)


def in_and_out(rate: int, seconds: float, nodes: int) -> None:
    print(f"{rate:,} messages a second in and out of {nodes} nodes for {seconds:g} s, each delayed for 3 s")
    with LocalBroker(quiet=True) as mq, tempfile.TemporaryDirectory() as folder:
        mq.create_topic(TARGET, queues=8)
        services = [Service(mq, Path(folder) / f"node{i}") for i in range(nodes)]
        try:
            time.sleep(5)
            before = sum(service.cpu_s() for service in services)
            sent = feed(mq, rate, seconds, 3000)
            late = lateness(mq, sent, 60 + seconds)
            cpu_s = sum(service.cpu_s() for service in services) - before
        finally:
            told = [service.end() for service in services]
    p50, p99 = np.percentile(late, (50, 99))
    print(
        f"  {len(late):,} of {sent:,} came, {int((late < 0).sum())} early; late by {p50:.0f} ms (half), "
        f"{p99:.0f} ms (99 of 100), {late.max()} ms at most\n"
        f"  {1e6 * cpu_s / sent:.0f} µs of processor for a message; sent by each: {[one['sent'] for one in told]}"
    )


def pending(count: int) -> None:
    print(f"{count:,} that wait for a month")
    with LocalBroker(quiet=True, heap_mb=512) as mq, tempfile.TemporaryDirectory() as folder:
        mq.create_topic(TARGET, queues=8)
        mq.create_topic(INNER_TOPIC, queues=8)
        # At one moment: how far a queue is stored is not told anew while envelopes come that are due before what was told.
        feed(mq, 20_000, count / 20_000, FAR_MS, time.time_ns() // 1_000_000 + FAR_MS)
        path = Path(folder) / "node"
        service, began = Service(mq, path), time.perf_counter()
        before = service.resident_mib()
        while (done := stored(mq)) < count:
            time.sleep(0.5)
        took = time.perf_counter() - began
        print(
            f"  stored {done / took:,.0f} a second; resident: {before:.0f} MiB before, {service.resident_mib():.0f} MiB after"
        )
        service.end()
        again = Service(mq, path)
        time.sleep(5)
        print(f"  start again: {again.start_s:.2f} s, resident {again.resident_mib():.0f} MiB")
        assert again.end()["waiting"] == count


def stored(mq: LocalBroker) -> int:
    """How many envelopes the group has stored."""
    oldest, progress = (
        mq.admin.consume_stats(group, INNER_TOPIC) for group in GroupNames("rocketmq_delay").all_groups[:2]
    )
    numbers = (
        CommittedOffsets(oldest[queue].consumer_offset, progress[queue].consumer_offset, 0, 0) for queue in progress
    )
    return sum(CommittedProgress.decode(each).progress.read_end for each in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--pending", type=int, default=1_000_000)
    arguments = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    if arguments.rate:
        in_and_out(arguments.rate, arguments.seconds, arguments.nodes)
    if arguments.pending:
        pending(arguments.pending)


if __name__ == "__main__":
    main()
