"""The processes of a session: a process that was started with ``start_new_session``, and all its descendants.

The process group is not enough, because Spark's Python daemon puts its workers into a separate group. Nothing that Spark starts
leaves the session.

As a script, this file is the watcher of a program that starts sessions. The program writes the id of the session that it runs,
or 0, to the watcher's standard input, a line each time. When the program ends, however it ends, the input ends, and the watcher
kills the session of the last line. A watcher is necessary, because a stopped process cannot notice the end of its parent. The
script imports nothing of the package, so that it is ready at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_LISTING_INTERVAL_S = 0.002
_PROC = Path("/proc")
_STOPPED_STATES, _ENDED_STATES = frozenset("Tt"), frozenset("ZX")


def members(session: int) -> dict[int, frozenset[str]]:
    """Return the living processes of a session, each with the states of its threads, as letters of ``ps``."""
    states_by_pid = {pid: _states(pid) for pid in _pids() if _session(pid) == session}
    return {pid: states for pid, states in states_by_pid.items() if states - _ENDED_STATES}


def stop(session: int, timeout_s: float) -> bool:
    """Stop all processes with SIGSTOP. Returns False if there is no process, or if a thread of a process still runs."""
    end_s = time.monotonic() + timeout_s
    stopped_pids: set[int] = set()
    while time.monotonic() < end_s:
        living_processes = members(session)
        running_pids = [pid for pid, states in living_processes.items() if states - _ENDED_STATES - _STOPPED_STATES]
        # Just before a process stopped, it may have started another process that the listing missed. So list the processes once
        # more.
        if not running_pids and stopped_pids == living_processes.keys():
            return bool(living_processes)
        stopped_pids = set() if running_pids else set(living_processes)
        for pid in running_pids:
            _signal(pid, signal.SIGSTOP)
        time.sleep(_LISTING_INTERVAL_S if running_pids else 0)
    return False


def resume(session: int) -> None:
    """Let stopped processes continue."""
    for pid in members(session):
        _signal(pid, signal.SIGCONT)


def kill(session: int) -> None:
    """Kill all processes with SIGKILL, and return when no process lives."""
    while living_processes := members(session):
        for pid in living_processes:
            _signal(pid, signal.SIGKILL)
        time.sleep(_LISTING_INTERVAL_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process has ended
        return None


def _pids() -> list[int]:
    names = os.listdir(_PROC) if _PROC.is_dir() else _ps("-axo", "pid=")
    return [int(name) for name in names if name.isdigit()]


def _states(pid: int) -> frozenset[str]:
    if not _PROC.is_dir():  # macOS
        return frozenset(state[0] for state in _ps("-o", "state=", "-p", str(pid)))
    states = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(_PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may contain any character.
                states.add(
                    (_PROC / str(pid) / "task" / thread / "stat").read_text("utf-8", "replace").rpartition(")")[2][1]
                )
    return frozenset(states)


def _ps(*arguments: str) -> list[str]:
    return subprocess.run(["ps", *arguments], capture_output=True, text=True, check=False).stdout.split()


def _watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these signals are for the demo; the watcher waits until the demo ends
    session = 0
    for line in sys.stdin:
        session = int(line)
    if session:
        kill(session)


if __name__ == "__main__":
    _watch()
