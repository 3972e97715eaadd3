"""Detects that Spark has abandoned the task of this worker: Spark closes the worker's socket when it abandons the task.

When the input of a task fails, Spark retries the task at once. Spark does not kill the Python worker, but closes the connection
to it. A worker that waits for brokers does not notice the closed connection. The worker can still read the rows that it received
before, and these rows look like the whole input.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from rocketmq_spark.errors import ClosedError

# Linux reports a closed connection (POLLRDHUP) even while there is unread data.
_CLOSED_EVENTS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR if hasattr(select, "poll") else 0


def never_abandoned() -> bool:
    """Return False. This function is used outside of workers, where no task exists that Spark could abandon."""
    return False


def watch_worker_socket() -> Callable[[], bool]:
    """Return a function that tells whether Spark has abandoned the task that calls ``watch_worker_socket``. The function may be
    called on any thread.
    """
    descriptor = _worker_socket(sys._getframe())
    if descriptor is None or not _CLOSED_EVENTS:
        return never_abandoned

    def is_abandoned() -> bool:
        poll = select.poll()  # a new object, because two threads cannot use the same object at once
        poll.register(descriptor, _CLOSED_EVENTS)
        return bool(poll.poll(0))

    return is_abandoned


def abandoned_error() -> ClosedError:
    """Return the error for sends of an abandoned task. The error is marked as ``unsent``, because nothing has left
    this process.
    """
    error = ClosedError("Spark has abandoned this task: the next attempt sends the rows that are not stored")
    error.unsent = True
    return error


def _worker_socket(frame: FrameType | None) -> int | None:
    """Return the descriptor of the socket from which PySpark's worker reads its task; None if no frame of the stack has one."""
    while frame is not None:
        if _module_of_frame(frame).startswith("pyspark.") and "infile" in frame.f_locals:
            try:
                return _descriptor(frame.f_locals["infile"])
            except (AttributeError, ValueError):
                return None
        frame = frame.f_back
    return None


def _descriptor(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except io.UnsupportedOperation:
        return _factory_socket(os.environ)


def _factory_socket(environment: Mapping[str, str]) -> int | None:
    """Return the descriptor of the socket of a worker that runs without Spark's daemon. The file from which such a worker reads
    has no ``fileno``, so this function searches the open sockets of the process. Linux only.
    """
    path, port = (environment.get(f"PYTHON_WORKER_FACTORY_{name}") for name in ("SOCK_PATH", "PORT"))
    with contextlib.suppress(OSError):
        for number in sorted(map(int, os.listdir("/proc/self/fd"))):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                peer = copy.getpeername()
                if peer and (peer == path or (isinstance(peer, tuple) and str(peer[1]) == port)):
                    return number
    return None


def _module_of_frame(frame: FrameType) -> str:
    """Return the module of a frame. Without Spark's daemon, the worker is the main program, whose module is ``__main__``."""
    global_names = frame.f_globals
    main_module = (
        getattr(global_names.get("__spec__"), "name", None) if global_names.get("__name__") == "__main__" else None
    )
    return str(main_module or global_names.get("__name__"))
