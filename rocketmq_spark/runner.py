"""The process that Spark runs for a stream on the driver's machine: what it keeps, and how it ends.

When a query stops, Spark closes the connection first. The runner then fails to read the next question, and fails again
to tell Spark so: two tracebacks on the console of a user for nothing.
"""

from __future__ import annotations

import gc
import sys
from types import TracebackType

_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def settle() -> None:
    """Here a stream lives for long. Elsewhere than in a runner: nothing.

    What was imported stays, so the full collections that come with views of thousands of queues need not look through
    it, which is most of what they would do.
    """
    if _is_runner():
        gc.freeze()


def end_quietly() -> None:
    """From here on this process does not tell that nobody listens to it any more. Elsewhere than in a runner: nothing."""
    if _is_runner():
        sys.excepthook = _but_for_broken_pipes


def _is_runner() -> bool:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return main is not None and main.name == _RUNNER


def _but_for_broken_pipes(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, trace)
