"""Whether Spark has given up the task that this process runs.

A task whose input fails is over for Spark, and tried again at once. Its Python worker is not killed: Spark closes the
connection to it, which a worker that waits for brokers does not see, and what was handed over before can still be read, as if
it were all.
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

# Linux says that the other side is gone also while there is something to read.
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR if hasattr(select, "poll") else 0


def never() -> bool:
    """Outside of a worker there is no task that could be given up."""
    return False


def watch() -> Callable[[], bool]:
    """A function that says, on any thread, whether Spark has given up the task that calls this."""
    number = _connection(sys._getframe())
    if number is None or not _GONE:
        return never

    def given_up() -> bool:
        poll = select.poll()  # two threads cannot use one at a time
        poll.register(number, _GONE)
        return bool(poll.poll(0))

    return given_up


def error() -> ClosedError:
    """What a send is refused with then: nothing has left this process."""
    made = ClosedError("Spark has given up this task: the next attempt sends what is not stored")
    made.unsent = True
    return made


def _connection(frame: FrameType | None) -> int | None:
    """The number of the file that PySpark's worker reads what it has to do from; None where there is none below us."""
    while frame is not None:
        if _module(frame).startswith("pyspark.") and "infile" in frame.f_locals:
            try:
                return _number(frame.f_locals["infile"])
            except (AttributeError, ValueError):
                return None
        frame = frame.f_back
    return None


def _number(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except io.UnsupportedOperation:
        return _to_factory(os.environ)


def _to_factory(environment: Mapping[str, str]) -> int | None:
    """Of the connection that a worker has made itself, without Spark's daemon: its file shows no number. Linux only."""
    path, port = (environment.get(f"PYTHON_WORKER_FACTORY_{name}") for name in ("SOCK_PATH", "PORT"))
    with contextlib.suppress(OSError):
        for number in sorted(map(int, os.listdir("/proc/self/fd"))):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                peer = copy.getpeername()
                if peer and (peer == path or (isinstance(peer, tuple) and str(peer[1]) == port)):
                    return number
    return None


def _module(frame: FrameType) -> str:
    """The module of its code. Without Spark's daemon the worker is the program, and is called so."""
    names = frame.f_globals
    run_as = getattr(names.get("__spec__"), "name", None) if names.get("__name__") == "__main__" else None
    return str(run_as or names.get("__name__"))
