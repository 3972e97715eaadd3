"""What a process keeps between calls, and how Spark's source runner ends.

One registry holds clients, accumulators, fault tables and answers to questions about the cluster. An entry stays until its
owner drops it, or until ``forget`` drops all. A forked process begins with an empty registry: it neither uses nor closes
what it inherited, because the connections and locks belong to the parent.

When a query stops, Spark closes its connection to the source runner (the Python process of a stream on the driver's
machine). The runner then fails to read the next request, and fails again to report that. ``end_quietly`` suppresses the two
tracebacks.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class _Kept:
    """Of one process. ``inherited`` keeps alive what would otherwise be closed in a child."""

    def __init__(self, inherited: _Kept | None = None) -> None:
        self.lock = threading.RLock()
        self.kinds: dict[str, dict[Any, Any]] = {}
        self.inherited = inherited


_here = _Kept()


def _begin() -> None:
    global _here
    _here = _Kept(_here)


os.register_at_fork(after_in_child=_begin)


def lock() -> AbstractContextManager[bool]:
    """For steps that must not be mixed with others; a new one in each process, for a fork may find the old one held."""
    return _here.lock


def kept(kind: str) -> dict[Any, Any]:
    """What this process keeps of a kind."""
    here = _here
    with here.lock:
        return here.kinds.setdefault(kind, {})


def once(kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """The thing of this kind and key, made by the first who asks."""
    with lock():
        things = kept(kind)
        if key not in things:
            things[key] = make()
        made: T = things[key]
        return made


def forget() -> dict[str, dict[Any, Any]]:
    """Begin anew; gives what was kept, by kind, to be closed."""
    here = _here
    with here.lock:
        gone = {kind: dict(things) for kind, things in here.kinds.items()}
        for things in here.kinds.values():
            things.clear()
    return gone


_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def is_for(worker: str) -> bool:
    """Whether Spark made this process to run its module ``worker``: as the main one, or in a fork of a daemon that has it."""
    return worker in sys.modules or _main() == worker


def settle() -> None:
    """Here a stream lives for long. Elsewhere than in a runner: nothing.

    What was imported stays, so the full collections that come with views of thousands of queues need not look through
    it, which is most of what they would do.
    """
    if _is_runner():
        gc.freeze()


def end_quietly() -> None:
    """Suppress broken-pipe tracebacks at exit. Does nothing outside a runner."""
    if _is_runner():
        sys.excepthook = _but_for_broken_pipes


def _is_runner() -> bool:
    return _main() == _RUNNER


def _main() -> str | None:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)


def _but_for_broken_pipes(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, trace)
