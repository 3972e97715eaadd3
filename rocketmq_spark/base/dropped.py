"""Closes public objects that were dropped without ``close``.

Python runs a finalizer on any thread and between any two statements, perhaps while this thread holds a lock that ``close`` needs.
So a finalizer only marks its object: it puts the object into a queue, which also keeps it alive. One thread of the process
closes the objects of the queue. It is not the thread of the heartbeats, because a close waits for brokers that hang.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
import warnings
from queue import SimpleQueue

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import Closing, Owner
from rocketmq_spark.base.threads import Failure, Latch, attempt, start_thread

logger = logging.getLogger(__name__)

_NAME = "rocketmq-dropped"


class ClosedWhenDropped(Closing):
    """Is closed by a thread of the process if its last reference is dropped before ``close``.

    Threads and registries must not refer to it while it is idle. Its constructor calls ``_watch`` at its end.
    """

    _owner: Owner
    _dropped_as: str | None = (
        None  # names the object in the warning; None before it is complete, and nothing is to be closed
    )

    @property
    def _is_open(self) -> bool:
        raise NotImplementedError

    def _watch(self, name: str) -> None:
        """Close this object, called ``name`` in the warning, when it is dropped."""
        _marked.begin()
        self._dropped_as = name

    def _close_dropped(self) -> None:
        attempt(self._warn)  # a filter may raise the warning
        closed = attempt(self.close)
        if isinstance(closed, Failure):
            closed.log(logger, "%s, which was dropped, could not be closed: %s", self._dropped_as, closed)

    def _warn(self) -> None:
        text = f"{self._dropped_as} was dropped without close(), and is closed now; call close(), or use a with block"
        warnings.warn(text, ResourceWarning, stacklevel=1, source=self)

    def __del__(self) -> None:
        if self._dropped_as is not None and self._owner.here and self._is_open:
            _marked.put(self)


class _Marked:
    """The dropped objects of one process. ``SimpleQueue.put`` may interrupt any method of the queue, as finalizers do."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[ClosedWhenDropped | Latch] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread: a finalizer cannot. If the system allows no more threads, the next object starts it."""
        with self._lock, contextlib.suppress(RuntimeError):
            if self._thread is None:
                self._thread = start_thread(_NAME, functools.partial(_close_all, self._queue))

    def put(self, dropped: ClosedWhenDropped) -> None:
        self._queue.put(dropped)

    def settle(self, deadline: Deadline) -> None:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        settled = Latch()
        self._queue.put(settled)
        settled.wait(deadline.remaining())


_marked = _Marked()


def _begin_in_child() -> None:
    global _marked
    _marked = _Marked()


os.register_at_fork(after_in_child=_begin_in_child)


def settle(deadline: Deadline) -> None:
    """Collect garbage, and wait until the objects that were dropped so far are closed, or until ``deadline``."""
    gc.collect()
    _marked.settle(deadline)


def _close_all(queue: SimpleQueue[ClosedWhenDropped | Latch]) -> None:
    while True:
        _close_next(queue)  # its frame ends here: while this thread waits, it refers to no object


def _close_next(queue: SimpleQueue[ClosedWhenDropped | Latch]) -> None:
    dropped = queue.get()
    if isinstance(dropped, Latch):
        dropped.set()
    else:
        dropped._close_dropped()
