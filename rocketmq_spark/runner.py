"""The process that Spark runs for a stream on the driver's machine, and how it ends.

When a query stops, Spark closes the connection first. The runner then fails to read the next question, and fails again
to tell Spark so: two tracebacks on the console of a user for nothing.
"""

from __future__ import annotations

import sys
from types import TracebackType

_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def end_quietly() -> None:
    """From here on this process does not tell that nobody listens to it any more. Elsewhere than in a runner: nothing."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name == _RUNNER:
        sys.excepthook = _but_for_broken_pipes


def _but_for_broken_pipes(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, trace)
