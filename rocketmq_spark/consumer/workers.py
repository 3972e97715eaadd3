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
from rocketmq_spark.failures import start_thread

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class Workers:
    """``count`` threads, started with the first work. What a piece of work raises is logged."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._line: deque[Work] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._waking = False  # a wake is under way: whoever gets it looks at the line after this is False again
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._lacking = False
        self._closed = False

    def submit(self, *work: Work) -> None:
        """Have each done in turn; never after ``close``."""
        if self._closed:
            return
        self._line.extend(work)
        if len(self._threads) < self._count:
            self.start_missing()
        self._wake()

    def start_missing(self) -> None:
        """Start the threads that are not there yet, unless there is nothing to do.

        Where the system gives none, those that run do the work, or it waits for the next call of this.
        """
        if not self._line:
            return
        with self._lock:
            try:
                while len(self._threads) < self._count and not self._closed:
                    self._threads.append(start_thread(f"{self._name}-{len(self._threads)}", self._run))
            except RuntimeError as e:
                if not self._lacking:
                    text = "%d of %d threads of %s run, and no more can be started: %s"
                    logger.warning(text, len(self._threads), self._count, self._name, e)
                self._lacking = True

    def close(self, deadline: Deadline) -> bool:
        """Drop what was not begun, and say whether what was begun ended by ``deadline``."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._wakes.put(None)
        me = threading.current_thread()
        for thread in threads:
            if thread is not me:
                thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in threads if thread is not me)

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
            work()
