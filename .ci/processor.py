"""Processor seconds by kind of process, of its siblings and their descendants; Linux only, and standard library only.

``processor.py FILE`` looks twice a second until it is ended with SIGTERM and then writes its table to FILE. What a
process did after the last look at it is missing: up to half a second of each.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

EVERY_S = 0.5
YOUNG_S = 0.3
TICKS = os.sysconf("SC_CLK_TCK")
# The first whose words all stand in a command line names its kind.
KINDS = (
    ("broker", "org.apache.rocketmq.broker.BrokerStartup"),
    ("name server", "org.apache.rocketmq.namesrv.NamesrvStartup"),
    ("Proxy", "org.apache.rocketmq.proxy.ProxyStartup"),
    ("Spark executor", "CoarseGrainedExecutorBackend"),
    ("Spark driver", "org.apache.spark.deploy.SparkSubmit"),
    ("Java witness", "witness-"),
    ("other Java", "java"),
    ("Spark worker (Python)", "rocketmq_spark.daemon"),
    ("Spark planner (Python)", "pyspark.daemon"),
    ("pytest", "-m pytest"),
    ("pytest", "execnet"),
    ("checks", "mypy"),
    ("checks", "ruff"),
    ("pip", "-m pip"),
    ("other Python", "python"),
)


def kind(command: str) -> str:
    program, _, rest = command.partition(" ")
    if "java" not in program and "python" not in program:
        return next((name for name, word in KINDS if name == "checks" and word in command), "rest")
    return next(
        (name for name, word in KINDS if word in (command if "java" in word or "python" in word else rest)), "rest"
    )


def look(seen: dict[tuple[int, int], tuple[str, float]]) -> None:
    """Note how far each process is, and what it is while it is young: it may yet become another program."""
    ours = {os.getppid(), *(pid for pid, _ in seen)}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read().rpartition(b")")[2].split()
            started = int(stat[19])
            # Parents come before their children, but where numbers begin again: those come with the next look.
            if (pid, started) not in seen and int(stat[1]) not in ours:
                continue
            ours.add(pid)
            spent, known = (int(stat[11]) + int(stat[12])) / TICKS, seen.get((pid, started))
            if known is None or known[1] < YOUNG_S:
                command = Path("/proc", str(pid), "cmdline").read_text("utf-8", "replace").replace("\0", " ")
                known = (kind(command) if command else known[0] if known else "rest"), spent
            seen[pid, started] = known[0], spent


def table(seen: dict[tuple[int, int], tuple[str, float]]) -> str:
    seconds: collections.Counter[str] = collections.Counter()
    processes: collections.Counter[str] = collections.Counter()
    for name, spent in seen.values():
        seconds[name] += spent
        processes[name] += 1
    rows = [f"{name:24}{spent:8.0f} s{processes[name]:8}" for name, spent in seconds.most_common()]
    return "\n".join(["Processor seconds by kind, and processes", *rows, f"{'all':24}{seconds.total():8.0f} s", ""])


def main() -> None:
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    seen: dict[tuple[int, int], tuple[str, float]] = {}
    try:
        while True:
            look(seen)
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        Path(sys.argv[1]).write_text(table(seen), "utf-8")


if __name__ == "__main__":
    main()
