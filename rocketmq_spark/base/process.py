"""State of a process: its registry, deferred closes, signal handlers, garbage collection, and how it starts another Python.

One registry holds clients, accumulators, fault tables and answers to questions about the cluster. An entry stays until its
owner removes it, or until ``clear_registry`` removes all. A forked process starts with an empty registry: it neither uses nor
closes the inherited entries, because their connections and locks belong to the parent. ``OwnerProcess`` ties a producer or
consumer to the process that created it.

Producers and consumers close at the end of a ``with`` block, in signal handlers, and never in a forked child. A signal handler
interrupts the main thread anywhere, perhaps in a call of this package. The interrupted call may hold a lock that ``close``, or
a thread that receives answers, needs. The close would deadlock, so it is deferred until the call ends
(``signal_safe``, ``defer_close``). ``on_signals`` replaces the handlers of signals while a call waits.

When a query stops, Spark closes its connection to the source runner (the Python process of a stream on the driver's
machine). The runner then fails to read the next request, and fails again when it reports the first failure.
``suppress_broken_pipes`` suppresses the two tracebacks.

``python_call`` describes the start of another Python. That Python must not import from the current folder, because other users
may write to the current folder.
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


# Thresholds of garbage collection. The first one is the number of new objects before the young generation is collected. Each
# further threshold is the number of collections of one generation before the next older generation is collected.
GC_THRESHOLDS = (50_000, 20, 20)


class _Registry:
    """The registry of one process. ``inherited_registry`` keeps the parent's registry alive in a child, because the child must
    not close the parent's entries.
    """

    def __init__(self, inherited_registry: _Registry | None = None) -> None:
        self.lock = threading.RLock()
        self.entries_by_kind: dict[str, dict[Any, Any]] = {}
        # The locks of entries. The lock of an entry exists only while threads use the lock.
        self.entry_locks: weakref.WeakValueDictionary[tuple[str, Hashable], Any] = weakref.WeakValueDictionary()
        self.inherited_registry = inherited_registry


_registry = _Registry()


def _reset_in_child() -> None:
    global _registry
    _registry = _Registry(_registry)


os.register_at_fork(after_in_child=_reset_in_child)


def registry_lock() -> AbstractContextManager[bool]:
    """The lock of the registry. Each process has a new lock, because a fork may inherit a held lock.

    All threads need this lock, so a thread that holds this lock must not wait: not for a server, a file or an ``entry_lock``,
    and not in ``get_or_create``.
    """
    return _registry.lock


def entry_lock(kind: str, key: Hashable) -> AbstractContextManager[bool]:
    """The lock of one entry. It may be held for long, because only threads that want the same entry wait for it. Reentrant."""
    registry = _registry
    with registry.lock:
        lock = registry.entry_locks.get((kind, key))
        if lock is None:
            lock = registry.entry_locks[kind, key] = threading.RLock()
        typed_lock: AbstractContextManager[bool] = lock
        return typed_lock


def entries(kind: str) -> dict[Any, Any]:
    """The entries of a kind in this process."""
    registry = _registry
    with registry.lock:
        return registry.entries_by_kind.setdefault(kind, {})


def get_or_create(kind: str, key: Hashable, make: Callable[[], T]) -> T:
    """Return the entry of this kind and key; the first call creates it. Calls for other entries do not wait for ``make``."""
    entries_of_kind: dict[Any, T] = entries(kind)
    with registry_lock():
        if key in entries_of_kind:
            return entries_of_kind[key]
    with entry_lock(kind, key):
        with registry_lock():
            if key in entries_of_kind:  # another thread was faster
                return entries_of_kind[key]
        entry = make()
        with registry_lock():
            return entries_of_kind.setdefault(key, entry)


class LiveObjects(Generic[T]):
    """Weak references to the objects of a kind in this process. A forked child starts with none of them.

    An idle object does nothing by itself. So an object in use calls ``due``, and does the periodic work of all objects that
    ``due`` returns.
    """

    def __init__(self, period_s: float = 0.0) -> None:
        self._period_s = period_s
        self._next_due_s = 0.0
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, live_object: T) -> T:
        """Add an object, and return it."""
        with self._lock:
            self._objects.add(live_object)
        return live_object

    def all(self) -> list[T]:
        """Return the objects."""
        with self._lock:
            return list(self._objects)

    def due(self, now_s: float) -> list[T]:
        """Return all objects once in ``period_s`` seconds of a monotonic clock; in between, an empty list."""
        if now_s < self._next_due_s:
            return []
        self._next_due_s = now_s + self._period_s
        return self.all()


def clear_registry() -> dict[str, dict[Any, Any]]:
    """Empty the registry. Returns the entries by kind, for the caller to close."""
    registry = _registry
    with registry.lock:
        removed_entries = {kind: dict(entries_of_kind) for kind, entries_of_kind in registry.entries_by_kind.items()}
        for entries_of_kind in registry.entries_by_kind.values():
            entries_of_kind.clear()
    return removed_entries


_RUNNER_MODULE = "pyspark.sql.streaming.python_streaming_source_runner"


def is_worker(module: str) -> bool:
    """Whether Spark started this process to run its module ``module``: as main module, or in a fork of Spark's daemon."""
    return module in sys.modules or _main_module() == module


def tune_gc_of_runner() -> None:
    """Tune garbage collection for a long stream. Does nothing outside a source runner.

    The objects that describe thousands of queues trigger full collections. Most of the work of a full collection would be to
    traverse the imported modules, which are never freed. The objects that describe queues stay in use until newer ones replace
    them, so a collection would free none of them. With Python's default thresholds, collections took a fifth of the time to
    plan 100,000 queues.
    """
    if _is_runner():
        tune_gc()


def tune_gc() -> None:
    """Tune garbage collection for a process with one task, which creates tens of objects per message and no cycles.

    Collections become rare and skip the objects that exist now. With Python's default thresholds, collections took a tenth of a
    delay node's time.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def suppress_broken_pipes() -> None:
    """Suppress broken-pipe tracebacks at exit. Does nothing outside a source runner."""
    if _is_runner():
        sys.excepthook = _excepthook


def _is_runner() -> bool:
    return _main_module() == _RUNNER_MODULE


def _main_module() -> str | None:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, traceback)


_deferred_closes: dict[int, list[Callable[[], object]]] = {}  # by thread


class Closeable:
    """An object with a method ``close``, which may be called twice."""

    def close(self) -> object:
        """Release all resources. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def signal_safe(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that users call. After the method has returned or raised, the closes that ``defer_close`` deferred
    during the call are run.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return _run_signal_safe(method, *args, **kwargs)
        finally:
            if _deferred_closes:
                _run_deferred_closes()

    return call


def defer_close(close: Callable[[], object]) -> bool:
    """If this thread is inside a ``signal_safe`` method, return True: ``close`` is then called when this method ends. Otherwise
    return False.

    The method may belong to another object, because objects share connections.
    """
    if not _is_inside_signal_safe():
        return False
    _deferred_closes.setdefault(threading.get_ident(), []).append(close)
    return True


def _run_signal_safe(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``method``. The frame of this function on the stack shows that the thread is inside such a method. A counter would
    stay wrong if Ctrl-C interrupted its update.
    """
    return method(*args, **kwargs)


def _is_inside_signal_safe() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _run_signal_safe.__code__:
            return True
        frame = frame.f_back
    return False


def _run_deferred_closes() -> None:
    thread_id = threading.get_ident()
    while not _is_inside_signal_safe() and (closes := _deferred_closes.pop(thread_id, None)) is not None:
        for close in closes:
            close()


# The id of this process, cached because the system call would take as long as all other steps of a send.
_pid = [os.getpid()]
os.register_at_fork(after_in_child=lambda: _pid.__setitem__(0, os.getpid()))


class OwnerProcess:
    """The process that created a producer or consumer (``name``). Other processes cannot use the sockets, locks and threads of
    this process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = _pid[0]

    @property
    def is_current(self) -> bool:
        """Whether this process is the owner, and not a fork of it."""
        return _pid[0] == self._pid

    def check(self, is_closed: bool) -> None:
        """Raise ``ClosedError`` in a forked process, or if ``is_closed``."""
        if _pid[0] != self._pid:
            raise ClosedError(
                f"this {self._name} belongs to process {self._pid}, from which this one was forked",
                remedy=f"Make a {self._name} in this process",
            )
        if is_closed:
            raise ClosedError(f"the {self._name} is closed")


_Handlers = dict[int, Any]
_replaced_handlers: list[_Handlers] = []  # the replaced handlers by signal


@contextlib.contextmanager
def on_signals(handle: Callable[[], object], *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block, these signals call ``handle`` instead of ending the program. In other threads than the main thread, the
    function does nothing, because Python runs handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle_signal(number: int, frame: FrameType | None) -> None:
        handle()

    previous_handlers: _Handlers = {number: signal.signal(number, handle_signal) for number in numbers}
    _replaced_handlers.append(previous_handlers)
    try:
        yield
    finally:
        _replaced_handlers.remove(previous_handlers)
        _restore_handlers(previous_handlers)


def _restore_handlers(handlers: _Handlers) -> None:
    for number, handler in handlers.items():
        # A handler is None if it was not set by Python.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _restore_in_child() -> None:
    """Restore the handlers in a forked child. With the handlers of ``on_signals``, a signal would not end the child."""
    while _replaced_handlers:
        _restore_handlers(_replaced_handlers.pop())


os.register_at_fork(after_in_child=_restore_in_child)


class PythonCall(TypedDict):
    """Arguments of ``subprocess.run`` and ``Popen``."""

    args: list[str]
    env: dict[str, str]
    cwd: str


def python_call(*arguments: str, program: str = sys.executable, first_import_folders: Sequence[str] = ()) -> PythonCall:
    """Return how to start a Python program that imports nothing from the current folder.

    An empty part of PYTHONPATH, as in ``:/x``, means the current folder. So empty and relative parts are left out.

    Args:
        arguments: The command line after the program.
        program: The interpreter.
        first_import_folders: Folders from which modules are imported before those of PYTHONPATH.
    """
    folders = [*first_import_folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python_path = os.pathsep.join(filter(os.path.isabs, folders))
    return {
        "args": [os.path.abspath(program), *arguments],
        "env": {**environment, "PYTHONPATH": python_path} if python_path else environment,
        "cwd": "/",
    }
