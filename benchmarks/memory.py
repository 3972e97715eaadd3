"""How much memory a read task needs above the worker that runs it, and a write task whose queue waits for its broker.

``python -m benchmarks.memory ADDRESS TOPIC`` reads a topic as a task does and prints its peak. With a number of Arrow batches
behind it they are written, most rows to ``broker-a``, few to ``broker-b``; it is away when the program goes on after "begun".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.table import Table

from benchmarks import harness, raw, read, workload
from benchmarks.harness import Found
from rocketmq_spark import LocalBroker
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.options import parse
from rocketmq_spark.spark.sink.task import TaskWriter

# Bodies and how many of them; the largest that a stock broker takes are 4 MiB with their properties.
TOPICS = {"100 B": (100, 500_000), "1 KiB": (1024, 200_000), "4 MiB": ((4 << 20) - 4096, 120)}
# Zeros: a few kilobytes each on the wire, so that one fetched buffer holds all of them.
COMPRESSED = {"4 MiB of zeros, zlib": (SysFlag.ZLIB, 300), "4 MiB of zeros, zstd": (SysFlag.ZSTD, 300)}
RAISED = {**read.RAISED, "maxTransferBytesOnMessageInMemory": str(64 << 20)}


# Arrow batches of a write, in each of which few rows are for a broker that is away.
BATCHES, ROWS, FEW = 60, 10_000, 10


def run(broker: LocalBroker, options: Any, found: Found) -> None:
    table = Table(title="Peak memory of a read task above the bare worker (MiB)")
    table.add_column("messages")
    table.add_column("stock limits", justify="right")
    table.add_column("raised limits", justify="right")
    figures: dict[str, dict[str, float]] = {}
    for name, topic, count in _filled(broker):
        for limits, conf in (("stock", read.STOCK), ("raised", RAISED)):
            broker.admin.update_broker_config("broker-a", conf)
            command = [sys.executable, "-m", "benchmarks.memory", broker.name_server, topic]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            one = json.loads(done.stdout)
            harness.expect("memory", one["rows"], count)
            figures[f"{name}, {limits}"] = {"MiB": one["MiB"]}
        table.add_row(name, *(f"{figures[f'{name}, {limits}']['MiB']:.0f}" for limits in ("stock", "raised")))
    broker.admin.update_broker_config("broker-a", read.STOCK)
    found["memory"] = figures
    harness.show(table)
    found["memory of a write"] = {"a queue waits for its broker": _waiting()}
    harness.say(f"  a write whose queue waits for its broker: {found['memory of a write']}")


def _waiting() -> dict[str, float]:
    """What a task holds at most while one of two brokers is away."""
    with workload.broker(brokers=2) as broker:
        broker.create_topic("waiting", queues=1)
        command = [sys.executable, "-m", "benchmarks.memory", broker.name_server, "waiting", str(BATCHES)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            broker.kill("broker-b")
            print("away", file=child.stdin, flush=True)
            one: dict[str, float] = json.loads(child.stdout.readline())
            broker.restart("broker-b")
            print("back", file=child.stdin, flush=True)
            harness.expect("memory of a write", int(child.stdout.readline()), BATCHES * ROWS)
    return one


def _filled(broker: LocalBroker) -> Iterator[tuple[str, str, int]]:
    """Names and topics with their counts, each filled when it is its turn."""
    for name, (size, count) in TOPICS.items():
        workload.fill(broker, f"memory-{size}", count, size)
        yield name, f"memory-{size}", count
    for name, (kind, count) in COMPRESSED.items():
        workload.fill_compressed(broker, f"memory-{kind.name}", count, bytes(4 << 20), kind)
        yield name, f"memory-{kind.name}", count


def main(name_server: str, topic: str) -> None:
    reader = raw.batch_reader(name_server, topic)
    partitions = reader.partitions()
    bare = _peak_kib()
    rows = sum(len(batch) for partition in partitions for batch in reader.read(partition))
    print(json.dumps({"rows": rows, "MiB": (_peak_kib() - bare) / 1024}))


def write(name_server: str, topic: str, batches: int) -> None:
    options = parse({"nameServer": name_server, "topic": topic, "sendTimeout": "5m"}).for_role("sink")
    brokers = pa.array(["broker-a"] * (ROWS - FEW) + ["broker-b"] * FEW)
    rows = pa.RecordBatch.from_pydict(
        {"body": [os.urandom(1024)] * ROWS, "queueId": pa.array([0] * ROWS, pa.int32()), "brokerName": brokers}
    )
    names = {"body": "body", "queueid": "queueId", "brokername": "brokerName"}

    def all_batches() -> Iterator[pa.RecordBatch]:
        yield rows
        print("begun", flush=True)
        input()
        bare = _peak_kib()
        yield from [rows] * (batches - 1)
        print(json.dumps({"MiB": (_peak_kib() - bare) / 1024}), flush=True)
        input()

    print(TaskWriter(options, names).write(all_batches()).rows)


def _peak_kib() -> int:
    """Of this program alone: ``getrusage`` counts what the process was before it became it."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        write(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:3])
