"""Threads that call listeners: so many, with an endless line of work before them.

As in Java's pool the line never blocks who adds to it, and there are never more threads than the lower bound; what holds
back a consumer whose listener is slow is the bound of what is cached.

To wake a thread costs more than a quick listener takes, and one that is awake fights with all others for the interpreter.
So one thread at a time is woken: by new work, and by a thread that begins work while more is waiting. Quick work is thus
done by few of them; where listeners block, each wakes the next until all are awake.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from rocketmq_spark.clock import Deadline

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Workers:
    """``count`` threads, started with the first work."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._line: deque[Work] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._waking = False  # a wake is under way: whoever gets it looks at the line after this is False again
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, *work: Work) -> None:
        """Have each done in turn; never after ``close``."""
        if self._closed:
            return
        if not self._threads:
            self._start()
        self._line.extend(work)
        self._wake()

    def close(self, deadline: Deadline) -> bool:
        """Drop what was not begun, and say whether what was begun ended by ``deadline``."""
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in threads:
            self._wakes.put(None)
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

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._wakes.put(None)

    def _run(self) -> None:
        while not self._closed:
            try:
                work = self._line.popleft()
            except IndexError:
                self._wakes.get()
                self._waking = False
                continue
            if self._line:
                self._wake()
            try:
                work()
            except Exception:  # a thread's root: the next work must be done all the same
                logger.exception("work of %s failed", self._name)
