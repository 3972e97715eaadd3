"""Threads that call listeners.

``ListenerPool`` has a fixed number of threads and an unbounded queue, as Java's pool: adding work never blocks. The queue does
not grow for ever, because the limits on cached messages pause the pulls of a consumer whose listener is slow.

Waking a thread takes longer than a call of a quick listener, and threads that are awake compete for the interpreter. Therefore,
new work wakes a single thread, and a thread that starts work wakes the next thread if more work is waiting. If the work is
quick, few threads do it. If listeners block, each thread wakes the next until all threads are awake.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import start_thread

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class ListenerPool:
    """A pool of ``count`` threads, which are started with the first work. Exceptions of work are logged."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._thread_count = count
        self._queue: deque[Work] = deque()
        self._wake_tokens: SimpleQueue[None] = SimpleQueue()
        # Whether a token is in ``_wake_tokens``. The thread that gets the token sets this flag to False before it checks the
        # queue.
        self._wake_pending = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Marks the current thread as a worker. The list ``_threads`` is not enough, because a new thread runs before it is
        # added to the list.
        self._thread_local = threading.local()
        self._is_short_of_threads = False
        self._closed = False

    def submit(self, *work: Work) -> None:
        """Queue work. After ``close``, the work is ignored."""
        if self._closed:
            return
        self._queue.extend(work)
        if len(self._threads) < self._thread_count:
            self.start_missing_threads()
        self._wake()

    def start_missing_threads(self) -> None:
        """Start missing threads if work is waiting.

        If the system cannot start a thread, the running threads do the work, or the work waits for the next call of this
        method.
        """
        if not self._queue:
            return
        with self._lock:
            try:
                while len(self._threads) < self._thread_count and not self._closed:
                    self._threads.append(start_thread(f"{self._name}-{len(self._threads)}", self._run))
            except RuntimeError as e:
                if not self._is_short_of_threads:
                    text = "%d of %d threads of %s run, and no more can be started: %s"
                    logger.warning(text, len(self._threads), self._thread_count, self._name, e)
                self._is_short_of_threads = True

    def close(self, deadline: Deadline) -> bool:
        """Drop queued work; returns whether running work ended by ``deadline``."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._wake_tokens.put(None)
        other_threads = [thread for thread in threads if thread is not threading.current_thread()]
        for thread in other_threads:
            thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in other_threads)

    @property
    def is_worker_thread(self) -> bool:
        """Whether the calling thread is a worker."""
        return getattr(self._thread_local, "is_worker", False)

    def _wake(self) -> None:
        if not self._wake_pending:
            self._wake_pending = True
            self._wake_tokens.put(None)

    def _run(self) -> None:
        self._thread_local.is_worker = True
        while not self._closed:
            try:
                work = self._queue.popleft()
            except IndexError:
                self._wake_tokens.get()
                self._wake_pending = False
                continue
            if self._queue and not self._wake_pending:
                self._wake()
            work()
            del work  # without this statement, the waiting thread would keep the messages of the last call alive
