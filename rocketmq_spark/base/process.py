"""What a process keeps between calls, how producers and consumers are closed, and how Spark's source runner ends.

One registry holds clients, accumulators, fault tables and answers to questions about the cluster. An entry stays until its
owner drops it, or until ``clear_registry`` drops all. A forked process begins with an empty registry: it neither uses nor closes
what it inherited, because the connections and locks belong to the parent. ``OwnerProcess`` ties a producer or consumer to the process
that created it.

Producers and consumers close at the end of a ``with`` block, in signal handlers, and never in a forked child. A signal handler
interrupts the main thread anywhere. If that is inside one of our calls, the call may hold locks that the close needs, or that the
threads which receive answers need, and the close would deadlock. So the close is postponed until the call ends. ``on_signals``
replaces the handlers of signals while a call waits.

When a query stops, Spark closes its connection to the source runner (the Python process of a stream on the driver's
machine). The runner then fails to read the next request, and fails again to report that. ``suppress_broken_pipes`` suppresses the two
tracebacks.

``python_call`` starts another Python, which must import nothing from the current folder: other users may write there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, Self, TypedDict, TypeVar

from rocketmq_spark.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")


# Thresholds of garbage collection: new objects before the young generation is collected, and such collections before older ones.
GC_THRESHOLDS = (50_000, 20, 20)


class _Registry:
    """State of one process. ``inherited`` keeps the parent's state alive in a child, where it must not be closed."""

    def __init__(self, inherited: _Registry | None = None) -> None:
        self.lock = threading.RLock()
        self.entries_by_kind: dict[str, dict[Any, Any]] = {}
        # The locks of entries. An entry has one only while threads use it.
        self.entry_locks: weakref.WeakValueDictionary[tuple[str, Hashable], Any] = weakref.WeakValueDictionary()
        self.inherited = inherited


_registry = _Registry()


def _reset_in_child() -> None:
    global _registry
    _registry = _Registry(_registry)


os.register_at_fork(after_in_child=_reset_in_child)


def registry_lock() -> AbstractContextManager[bool]:
    """The lock of the registry. Each process has a new one, because a fork may inherit a held lock.

    All threads need it, so nothing that may wait belongs into its block: no server, no file, no ``entry_lock``, no ``get_or_create``.
    """
    return _registry.lock


def entry_lock(kind: str, key: Hashable) -> AbstractContextManager[bool]:
    """The lock of one entry, which may be held for long: only threads that want the same entry wait for it. Reentrant."""
    here = _registry
    with here.lock:
        found = here.entry_locks.get((kind, key))
        if found is None:
            found = here.entry_locks[kind, key] = threading.RLock()
        held: AbstractContextManager[bool] = found
        return held


def entries(kind: str) -> dict[Any, Any]:
    """The entries of a kind in this process."""
    here = _registry
    with here.lock:
        return here.entries_by_kind.setdefault(kind, {})


def get_or_create(kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """The entry of this kind and key; the first call creates it. While ``make`` runs, calls for other entries do not wait."""
    things: dict[Any, T] = entries(kind)
    with registry_lock():
        if key in things:
            return things[key]
    with entry_lock(kind, key):
        with registry_lock():
            if key in things:  # another thread was faster
                return things[key]
        made = make()
        with registry_lock():
            return things.setdefault(key, made)


class LiveObjects(Generic[T]):
    """The living objects of a kind in this process, which does not keep them alive. A forked child begins with none of them.

    Objects that nobody uses any more do nothing by themselves, so those in use look after all: ``due`` says when.
    """

    def __init__(self, period_s: float = 0.0) -> None:
        self._period_s = period_s
        self._next_due = 0.0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, one: T) -> T:
        """Note an object, and return it."""
        with self._lock:
            self._objects.add(one)
        return one

    def all(self) -> list[T]:
        """Return the objects."""
        with self._lock:
            return list(self._objects)

    def due(self, now: float) -> list[T]:
        """Return the objects, at most once in ``period_s`` seconds of a monotonic clock; otherwise none."""
        if now < self._next_due:
            return []
        self._next_due = now + self._period_s
        return self.all()


def clear_registry() -> dict[str, dict[Any, Any]]:
    """Empty the registry. Returns the entries by kind, for the caller to close."""
    here = _registry
    with here.lock:
        gone = {kind: dict(things) for kind, things in here.entries_by_kind.items()}
        for things in here.entries_by_kind.values():
            things.clear()
    return gone


_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"


def is_worker(worker: str) -> bool:
    """Whether Spark started this process to run its module ``worker``: as main module, or in a fork of its daemon."""
    return worker in sys.modules or _main_module() == worker


def tune_gc_of_runner() -> None:
    """Tune garbage collection for a long stream. Does nothing outside a source runner.

    Imported modules stay, so full collections, which views of thousands of queues trigger, should not traverse them; that would
    be most of their work. No part of a view is garbage until the next view replaces it: with Python's default
    thresholds, collections took a fifth of the time to plan 100,000 queues.
    """
    if _is_runner():
        tune_gc()


def tune_gc() -> None:
    """Tune garbage collection for a process with one task, which creates tens of objects per message and no cycles.

    Collections become rare and skip the objects that exist now; they took a tenth of a delay node's time.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def suppress_broken_pipes() -> None:
    """Suppress broken-pipe tracebacks at exit. Does nothing outside a runner."""
    if _is_runner():
        sys.excepthook = _excepthook


def _is_runner() -> bool:
    return _main_module() == _RUNNER


def _main_module() -> str | None:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, trace)


_deferred: dict[int, list[Callable[[], object]]] = {}  # by thread


class Closeable:
    """Has a ``close``, which may be called twice."""

    def close(self) -> object:
        """Release all resources. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def signal_safe(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a method that users call. Calls that were ``defer_close`` inside it run when it ends, even if it raises."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return _run_entry(method, *args, **kwargs)
        finally:
            if _deferred:
                _run_deferred()

    return call


def defer_close(close: Callable[[], object]) -> bool:
    """Whether this thread is inside an ``signal_safe``, which then calls ``close`` when it ends. The entry may be of another object,
    because objects share connections.
    """
    if not _is_inside_entry():
        return False
    _deferred.setdefault(threading.get_ident(), []).append(close)
    return True


def _run_entry(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Marks the stack. A counter would stay wrong for ever if Ctrl-C came between its steps."""
    return method(*args, **kwargs)


def _is_inside_entry() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _run_entry.__code__:
            return True
        frame = frame.f_back
    return False


def _run_deferred() -> None:
    me = threading.get_ident()
    while not _is_inside_entry() and (closes := _deferred.pop(me, None)) is not None:
        for close in closes:
            close()


# The id of this process. It is cached, because the system call takes as long as all other steps of a send.
_pid = [os.getpid()]
os.register_at_fork(after_in_child=lambda: _pid.__setitem__(0, os.getpid()))


class OwnerProcess:
    """The process that created a producer or consumer (``what``). Other processes cannot use its sockets, locks and threads."""

    def __init__(self, what: str) -> None:
        self._name = what
        self._pid = _pid[0]

    @property
    def is_current(self) -> bool:
        """Whether this process is the owner, and not a fork of it."""
        return _pid[0] == self._pid

    def check(self, closed: bool) -> None:
        """Raises ``ClosedError`` in a fork, and if ``closed``."""
        if _pid[0] != self._pid:
            raise ClosedError(
                f"this {self._name} belongs to process {self._pid}, from which this one was forked",
                remedy=f"Make a {self._name} in this process",
            )
        if closed:
            raise ClosedError(f"the {self._name} is closed")


_Handlers = dict[int, Any]
_replaced: list[_Handlers] = []  # the replaced handlers by signal


@contextlib.contextmanager
def on_signals(handle: Callable[[], object], *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block, these signals call ``handle`` instead of ending the program. Only the main thread receives signals: in
    other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call(number: int, frame: FrameType | None) -> None:
        handle()

    before: _Handlers = {number: signal.signal(number, call) for number in numbers}
    _replaced.append(before)
    try:
        yield
    finally:
        _replaced.remove(before)
        _restore_handlers(before)


def _restore_handlers(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python


def _restore_in_child() -> None:
    """Restore the handlers in a forked child. With the replaced ones, a signal would not end the child."""
    while _replaced:
        _restore_handlers(_replaced.pop())


os.register_at_fork(after_in_child=_restore_in_child)


class PythonCall(TypedDict):
    """Arguments of ``subprocess.run`` and ``Popen``."""

    args: list[str]
    env: dict[str, str]
    cwd: str


def python_call(*arguments: str, program: str = sys.executable, first: Sequence[str] = ()) -> PythonCall:
    """Return how to start a Python program that imports nothing from the current folder.

    An empty part of PYTHONPATH, as in ``:/x``, means the current folder. So empty and relative parts are left out.

    Args:
        arguments: The command line after the program.
        program: The interpreter.
        first: Folders from which modules are imported before those of PYTHONPATH.
    """
    named = [*first, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = os.pathsep.join(filter(os.path.isabs, named))
    return {
        "args": [os.path.abspath(program), *arguments],
        "env": {**others, "PYTHONPATH": paths} if paths else others,
        "cwd": "/",
    }
