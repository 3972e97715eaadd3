"""Closes producers and consumers that a program dropped without ``close``.

Python runs a finalizer on any thread and between any two statements, perhaps while that thread holds a lock that ``close`` needs.
So a finalizer only puts its object into a queue, which also keeps the object alive. One thread of the process closes the objects
in this queue. The heartbeat thread does not close objects, because ``close`` waits for brokers that hang.
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
from rocketmq_spark.base.process import Closeable, OwnerProcess
from rocketmq_spark.base.threads import Failure, Latch, capture, start_thread

logger = logging.getLogger(__name__)

_THREAD_NAME = "rocketmq-dropped"


class ClosedWhenDropped(Closeable):
    """An object that a thread of the process closes if the program drops the last reference before ``close``.

    Threads and registries must not refer to an idle object of this class. The constructor of a subclass ends with a call of
    ``_close_when_dropped``.
    """

    _owner: OwnerProcess
    # The object's name in the warning. None until the constructor has finished, because an incomplete object must not be closed.
    _name_when_dropped: str | None = None

    @property
    def _is_open(self) -> bool:
        raise NotImplementedError

    def _close_when_dropped(self, name: str) -> None:
        """Close this object when it is dropped. ``name`` is the object's name in the warning."""
        _dropped_objects.start()
        self._name_when_dropped = name

    def _close_dropped(self) -> None:
        capture(self._warn_not_closed)  # a filter of warnings may turn the warning into an error
        outcome = capture(self.close)
        if isinstance(outcome, Failure):
            outcome.log(logger, "%s, which was dropped, could not be closed: %s", self._name_when_dropped, outcome)

    def _warn_not_closed(self) -> None:
        text = f"{self._name_when_dropped} was dropped without close(), and is closed now; call close(), or use a with block"
        warnings.warn(text, ResourceWarning, stacklevel=1, source=self)

    def __del__(self) -> None:
        if self._name_when_dropped is not None and self._owner.is_current and self._is_open:
            _dropped_objects.put(self)


class _DroppedObjects:
    """The dropped objects of one process that are not closed yet.

    ``SimpleQueue`` is reentrant: a finalizer may call ``put`` while its thread is inside another method of the queue.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[ClosedWhenDropped | Latch] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that closes objects, because a finalizer cannot start a thread. If the system allows no more
        threads, the next new object tries to start this thread again.
        """
        with self._lock, contextlib.suppress(RuntimeError):
            if self._thread is None:
                self._thread = start_thread(_THREAD_NAME, functools.partial(_close_all, self._queue))

    def put(self, dropped_object: ClosedWhenDropped) -> None:
        self._queue.put(dropped_object)

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until the objects that are in the queue now are closed, or until ``deadline``."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        latch = Latch()
        self._queue.put(latch)
        latch.wait(deadline.remaining())


_dropped_objects = _DroppedObjects()


def _reset_in_child() -> None:
    global _dropped_objects
    _dropped_objects = _DroppedObjects()


os.register_at_fork(after_in_child=_reset_in_child)


def wait_for_dropped(deadline: Deadline) -> None:
    """Collect garbage, and wait until the objects that were dropped so far are closed, or until ``deadline``."""
    gc.collect()
    _dropped_objects.wait_closed(deadline)


def _close_all(queue: SimpleQueue[ClosedWhenDropped | Latch]) -> None:
    while True:
        # This is a separate function, so that no local variable keeps the closed object alive while the thread waits.
        _close_next(queue)


def _close_next(queue: SimpleQueue[ClosedWhenDropped | Latch]) -> None:
    queue_entry = queue.get()
    if isinstance(queue_entry, Latch):
        queue_entry.set()
    else:
        queue_entry._close_dropped()
