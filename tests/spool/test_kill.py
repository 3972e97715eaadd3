"""Rows 3-12, 3-16, G2.9: a process that adds and redelivers is killed at 20 random moments, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(path: Path, first: int, seed: int, kill_after: int | None, pause_s: float = 0.0) -> list[str]:
    """The whole lines that the victim said; killed ``pause_s`` after it had said that ``kill_after`` records are durable."""
    command = [
        sys.executable,
        "-m",
        "tests.spool.victim",
        str(path),
        str(first),
        str(seed),
        "add" if kill_after else "drain",
    ]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert victim.stdout is not None
    lines: list[str] = []
    if kill_after is None:
        lines = victim.communicate(timeout=180)[0].splitlines()
        assert victim.returncode == 0
        return lines
    while sum(line.startswith("added") for line in lines) < kill_after:
        lines.append(victim.stdout.readline().rstrip("\n"))
        assert lines[-1], "it ended by itself"
    killer = threading.Timer(pause_s, os.kill, (victim.pid, signal.SIGKILL))
    killer.start()
    rest = victim.stdout.read()
    lines += rest.splitlines() if rest.endswith("\n") or not rest else rest.splitlines()[:-1]
    assert victim.wait(60) == -signal.SIGKILL, "it ended by itself"
    killer.join()
    victim.stdout.close()
    return [line for line in lines if line]


def test_kill_at_any_moment_loses_no_record(tmp_path: Path) -> None:
    rng = random.Random()
    path = tmp_path / "s"
    said: list[str] = []
    added: set[int] = set()
    for _ in range(20):
        first = max(added, default=0) + 2  # the one in hand at the kill may be there
        said += run(path, first, rng.randrange(1 << 30), rng.randrange(1, 60), rng.uniform(0.0, 0.02))
        added = {int(line.split()[1]) for line in said if line.startswith("added")}
    said += run(path, 0, 1, None)
    assert said[-1] == "dead 0"
    sent = [line.split() for line in said if line.startswith("sent")]
    times = Counter(int(parts[1]) for parts in sent)
    assert added <= times.keys(), sorted(added - times.keys())[:10]
    unsaid = times.keys() - added  # durable, and killed before it was said
    assert len(unsaid) <= 20
    # Sent again only what was out when it was killed: of each lane one, of the others what one turn hands out.
    assert sum(times.values()) - len(times) <= 20 * 64
    for lane in ("l", "m"):
        order = [int(parts[1]) for parts in sent if parts[2:] == [lane]]
        first_times = list(dict.fromkeys(order))
        assert first_times == sorted(first_times)
