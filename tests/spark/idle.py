"""Spark's Python workers while no task runs: Spark ends them when nothing was asked of them for a minute."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def workers() -> list[int]:
    """The processes that were forked for tasks of this process's session."""
    found, below = [], [os.getpid()]
    while below:
        pid = below.pop()
        children = _children(pid)
        below += children
        if b"pyspark.daemon" in _read(pid, "cmdline"):
            found += children
    return found


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def connections(pid: int, port: int) -> int:
    """How many open connections to a port a process has."""
    mine = {_target(fd) for fd in Path(f"/proc/{pid}/fd").glob("*")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _read(pid, f"net/{name}").decode().splitlines()[1:]]
    # Columns 2, 3 and 9: the address of the other end, the state (01: established), the inode.
    return sum(r[2].endswith(f":{port:04X}") and r[3] == "01" and f"socket:[{r[9]}]" in mine for r in rows)


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in _text(task).split()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:
        return ""
