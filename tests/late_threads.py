"""A plug-in that starts threads late, as a busy machine does: ``pytest -p tests.late_threads``, ``make soak ONLY=late-threads``.

``Thread.start`` promises that the thread is there; who counts on what it has done by then passes on a quick machine only.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

LATE_S = (0.0, 0.002, 0.03)


def late(sleep: Callable[[float], None], chance: random.Random) -> Callable[[threading.Thread], None]:
    """What threads run instead; the functions of the module ``time`` are taken before a test puts its own there."""
    run = threading.Thread.run

    def run_late(thread: threading.Thread) -> None:
        sleep(chance.choice(LATE_S))
        run(thread)

    return run_late


def pytest_configure(config: pytest.Config) -> None:
    whole = threading.Thread.run
    threading.Thread.run = late(time.sleep, random.Random())  # type: ignore[method-assign]
    config.add_cleanup(lambda: setattr(threading.Thread, "run", whole))
