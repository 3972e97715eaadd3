"""How much memory a read task needs above the worker that runs it.

``python -m benchmarks.memory ADDRESS TOPIC`` reads a topic as a task does and prints its peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import harness, raw, read, workload
from benchmarks.harness import Found
from rocketmq_spark import LocalBroker
from rocketmq_spark.codes import SysFlag

# Bodies and how many of them; the largest that a stock broker takes are 4 MiB with their properties.
TOPICS = {"100 B": (100, 500_000), "1 KiB": (1024, 200_000), "4 MiB": ((4 << 20) - 4096, 120)}
# Zeros: a few kilobytes each on the wire, so that one fetched buffer holds all of them.
COMPRESSED = {"4 MiB of zeros, zlib": (SysFlag.ZLIB, 300), "4 MiB of zeros, zstd": (SysFlag.ZSTD, 300)}
RAISED = {**read.RAISED, "maxTransferBytesOnMessageInMemory": str(64 << 20)}


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


def _peak_kib() -> int:
    """Of this program alone: ``getrusage`` counts what the process was before it became it."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:3])
