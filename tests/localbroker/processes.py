"""Looking at processes from outside, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], bool], within_s: float = 15.0) -> bool:
    """Whether ``condition`` becomes true in time: for events that nobody announces, such as the end of a stranger."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
