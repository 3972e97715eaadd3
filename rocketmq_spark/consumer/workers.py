"""Threads that call listeners: so many, with an endless line of work before them.

As in Java's pool the line never blocks who adds to it, and there are never more threads than the lower bound; what holds
back a consumer whose listener is slow is the bound of what is cached.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from rocketmq_spark.clock import Deadline

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Workers:
    """``count`` threads, started with the first work."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._line: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, work: Work) -> None:
        """Have it done in turn; never after ``close``."""
        if self._closed:
            return
        if not self._threads:
            self._start()
        self._line.put(work)

    def close(self, deadline: Deadline) -> bool:
        """Drop what was not begun, and say whether what was begun ended by ``deadline``."""
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in threads:
            self._line.put(None)
        me = threading.current_thread()
        for thread in threads:
            if thread is not me:
                thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in threads if thread is not me)

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()

    def _run(self) -> None:
        while (work := self._line.get()) is not None:
            if self._closed:
                continue
            try:
                work()
            except Exception:  # a thread's root: the next work must be done all the same
                logger.exception("work of %s failed", self._name)
