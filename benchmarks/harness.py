"""Cases that are measured in turns, and the table of what came out."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from rocketmq_spark import LocalBroker

_TICKS = os.sysconf("SC_CLK_TCK")
SIZES = (100, 1024)


@dataclass(slots=True)
class Result:
    """One run: how many messages in how many seconds, and CPU seconds of client and broker."""

    messages: int
    seconds: float
    cpu_client: float = 0.0
    cpu_broker: float = 0.0

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


@dataclass(slots=True)
class Case:
    """A named way to do the same work. ``run`` raises when its count is wrong."""

    name: str
    run: Callable[[], Result]
    results: list[Result] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(result.rate for result in self.results)


def process_cpu(pid: int) -> float:
    """CPU seconds of a process so far, its ended children included."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process and all its living descendants."""
    total, queue = 0.0, [pid]
    while queue:
        current = queue.pop()
        with contextlib.suppress(OSError):
            total += process_cpu(current)
            for task in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{task}/children", encoding="ascii") as children:
                    queue += map(int, children.read().split())
    return total


@contextlib.contextmanager
def timed(broker: LocalBroker, messages: int) -> Iterator[Result]:
    """Time the body; CPU of this process with its children, and of the broker."""
    pid = broker.pid("broker-a")
    client, server, begin = tree_cpu(os.getpid()), process_cpu(pid), time.perf_counter()
    result = Result(messages, 1.0)
    yield result
    result.seconds = time.perf_counter() - begin
    # Name server and brokers are children of this process too.
    result.cpu_broker = process_cpu(pid) - server
    result.cpu_client = tree_cpu(os.getpid()) - client - result.cpu_broker


def expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: {found} messages instead of {wanted}")


def rounds(cases: Sequence[Case], repeats: int, between: Callable[[], None] = lambda: None) -> None:
    """Run all cases in turns, so that a slow moment of the machine hits each of them."""
    for turn in range(repeats):
        for case in cases:
            between()
            result = case.run()
            case.results.append(result)
            rate, done = result.rate / 1000, f"{turn + 1}/{repeats}"
            print(f"  {done} {case.name}: {rate:,.0f} k msg/s in {result.seconds:.2f} s", file=sys.stderr, flush=True)


def report(title: str, cases: Sequence[Case], size: int, peer: str) -> dict[str, Any]:
    """Print the table: rates in thousand messages a second, ratio to ``peer`` by medians, CPU microseconds a message."""
    base = next((case.median() for case in cases if case.name == peer), None)
    table = Table(title=title)
    for column in ("case", "min", "median", "max", "MiB/s", f"times {peer}", "client µs", "broker µs"):
        table.add_column(column, justify="left" if column == "case" else "right")
    found = {}
    for case in cases:
        rates = sorted(result.rate / 1000 for result in case.results)
        median = case.median()
        middle = min(case.results, key=lambda r, m=median: abs(r.rate - m))
        ratio = median / base if base else float("nan")
        client, broker = (1e6 * cpu / middle.messages for cpu in (middle.cpu_client, middle.cpu_broker))
        table.add_row(
            case.name, f"{rates[0]:,.0f}", f"{median / 1000:,.0f}", f"{rates[-1]:,.0f}",
            f"{median * size / 2**20:,.0f}", f"{ratio:.2f}", f"{client:.2f}", f"{broker:.2f}",
        )  # fmt: skip
        found[case.name] = {
            "min": rates[0], "median": median / 1000, "max": rates[-1], "ratio": ratio,
            "client_us": client, "broker_us": broker,
        }  # fmt: skip
    Console(width=130).print(table)
    return found


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--messages", type=int, default=1_000_000, help="messages of 100 B; a fifth of that of 1 KiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document beside the tables")
    return parser.parse_args()


def count_of(messages: int, size: int) -> int:
    return messages if size <= 100 else max(1, messages // 4)


def dump(found: dict[str, Any], wanted: bool) -> None:
    if wanted:
        print(json.dumps(found))
