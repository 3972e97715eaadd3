"""Whether Spark has given up the task that this process runs.

A task whose input fails is over for Spark, and tried again at once. Its Python worker is not killed: Spark closes the
connection to it, which a worker that waits for brokers does not see, and what was handed over before can still be read, as if
it were all.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from types import FrameType

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
        if str(frame.f_globals.get("__name__")).startswith("pyspark.") and "infile" in frame.f_locals:
            try:
                return int(frame.f_locals["infile"].fileno())
            except (AttributeError, ValueError):
                return None
        frame = frame.f_back
    return None
