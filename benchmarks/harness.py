"""Cases that are measured in turns, their CPU, and the tables of what came out."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

_TICKS = os.sysconf("SC_CLK_TCK")
CORES = os.cpu_count()
SIZES = (100, 1024)
# Whether cases run once before anything counts.
WARM_UP = True
# The cases that are measured; all of them while it is empty.
ONLY: frozenset[str] = frozenset()

# Section of a size to case to figures: what the report prints, the targets judge and --json writes.
Found = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds: Python processes of the client side, its JVMs, the servers, and a Proxy before them."""

    python: float = 0.0
    jvm: float = 0.0
    server: float = 0.0
    proxy: float = 0.0


@dataclass(slots=True)
class Result:
    """One run: how many messages in how many seconds, and the CPU it took."""

    messages: int
    seconds: float = 1.0
    cpu: Cpu = field(default_factory=Cpu)

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


@dataclass(slots=True)
class Case:
    """A named way to do the same work. ``run`` raises when its count is wrong."""

    name: str
    run: Callable[[], Result]
    warm_up: bool = True
    results: list[Result] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(result.rate for result in self.results)


def process_cpu(pid: int, children: bool = True) -> float:
    """CPU seconds of a process so far, with or without its ended children."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / _TICKS


def spent_by(servers: Sequence[int], proxies: Sequence[int] = ()) -> dict[tuple[str, int], float]:
    """CPU seconds so far by kind and process: ``servers``, ``proxies``, this process and all its living descendants.

    What a JVM started and saw end is the JVM's; a Python worker that ended is forgotten, with all that it ever did.
    """
    spent = {("server", pid): process_cpu(pid) for pid in servers}
    spent |= {("proxy", pid): process_cpu(pid) for pid in proxies}
    for kind, pid in family([*servers, *proxies]):
        with contextlib.suppress(OSError):
            spent[kind, pid] = process_cpu(pid, children=kind == "jvm")
    return spent


def family(without: Sequence[int]) -> Iterator[tuple[str, int]]:
    """This process and all its living descendants, ``python`` or ``jvm``; not those in ``without``, nor their children."""
    queue = [os.getpid()]
    while queue:
        pid = queue.pop()
        if pid in without:
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as comm:
                kind = "jvm" if comm.read().strip() == "java" else "python"
            for task in os.listdir(f"/proc/{pid}/task"):
                # A thread that ends now leaves its children to another one, and its process as it is.
                with (
                    contextlib.suppress(OSError),
                    open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as children,
                ):
                    queue += map(int, children.read().split())
            yield kind, pid


@contextlib.contextmanager
def timed(servers: Sequence[int], messages: int, proxies: Sequence[int] = ()) -> Iterator[Result]:
    """Time the body, and the CPU that it takes."""
    before, begin = spent_by(servers, proxies), time.perf_counter()
    result = Result(messages)
    yield result
    result.seconds = time.perf_counter() - begin
    sums = dict.fromkeys(("python", "jvm", "server", "proxy"), 0.0)
    for (kind, pid), seconds in spent_by(servers, proxies).items():
        sums[kind] += seconds - before.get((kind, pid), 0.0)
    result.cpu = Cpu(**sums)


class PeerFailed(RuntimeError):
    """A peer gave up, with the end of what it said."""


class WrongCount(SystemExit):
    """A reader that reads a row twice is fast and wrong."""


def expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise WrongCount(f"{what}: {found} messages instead of {wanted}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rounds(cases: Sequence[Case], repeats: int) -> None:
    """Run all cases in turns, so that a slow moment of the machine hits each of them; one turn before is not counted."""
    cases = [case for case in cases if not ONLY or case.name in ONLY]
    for case in cases:
        if case.warm_up and WARM_UP:
            _attempt(case)
    for turn in range(repeats):
        for case in cases:
            result = _attempt(case)
            if result is None:
                continue
            case.results.append(result)
            say(f"  {turn + 1}/{repeats} {case.name}: {result.rate / 1000:,.0f} k msg/s in {result.seconds:.2f} s")


def _attempt(case: Case) -> Result | None:
    """A peer that fails gets a second run; one that fails again is not measured this time."""
    for _ in range(2):
        try:
            return case.run()
        except PeerFailed as e:
            say(f"  {case.name} failed: {e}")
    return None


def report(title: str, cases: Sequence[Case], size: int) -> dict[str, dict[str, Any]]:
    """Print rates in thousand messages a second and CPU microseconds a message; the figures by case."""
    parts = ["python", "jvm", "server"]
    if any(result.cpu.proxy for case in cases for result in case.results):
        parts.append("proxy")
    table = Table(title=title)
    titles = {"python": "Python", "jvm": "JVM"}
    for column in ("case", "min", "median", "max", "MiB/s", *(f"{titles.get(part, part)} µs" for part in parts)):
        table.add_column(column, justify="left" if column == "case" else "right")
    found = {}
    for case in cases:
        if not case.results:
            continue
        rates = sorted(result.rate / 1000 for result in case.results)
        median = case.median() / 1000
        middle = sorted(case.results, key=lambda result: result.rate)[(len(case.results) - 1) // 2]
        cpu = {f"{part}_us": 1e6 * getattr(middle.cpu, part) / middle.messages for part in parts}
        mib = median * 1000 * size / 2**20
        table.add_row(
            case.name, *(f"{n:,.0f}" for n in (rates[0], median, rates[-1], mib)), *(f"{n:.2f}" for n in cpu.values())
        )
        found[case.name] = {"min": rates[0], "median": median, "max": rates[-1], **cpu}
    show(table)
    return found


def show(table: Table) -> None:
    Console(width=130).print(table)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=description)
    parser.add_argument(
        "sections",
        nargs="*",
        help="only these: codec, read, write, grpc, consume, idle, latency, planning, memory; and by name asyncio, "
        "growth, restart, scale, trips",
    )
    parser.add_argument(
        "--messages", type=int, help="messages of 100 B in a read; of 1 KiB, in a write and of slow peers: fewer"
    )
    parser.add_argument("--repeats", type=int, help="counted runs of each case")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="more messages and more runs, without a limit of time")
    size.add_argument(
        "--quick",
        action="store_true",
        help="the ratios that users care about, in ten minutes: reads, writes, consumers",
    )
    parser.add_argument("--no-kafka", action="store_true", help="without spark-sql-kafka and its broker")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    options = parser.parse_args()
    options.messages = options.messages or (18_000_000 if options.full else 2_000_000 if options.quick else 4_000_000)
    options.repeats = options.repeats or (7 if options.full else 2 if options.quick else 3)
    return options


def count_of(messages: int, size: int) -> int:
    return messages if size <= 100 else max(1, messages // 3)
