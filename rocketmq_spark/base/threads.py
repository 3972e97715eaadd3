"""Threads: errors of user code as values (``capture``), one thread per key (``KeyedExecutor``), a pool (``DaemonThreadPool``) and
a scheduler (``Timer``).

A listener, a callback, a strategy or a hook may raise anything, even ``SystemExit``. Python ends a thread on ``SystemExit``
without a message, so ``capture`` returns each exception of user code as a value (``Failure``).

``KeyedExecutor`` runs work that may block. Work of one key runs in order, on a thread that ends when the key has no more work. So
if the hosts are keys, a host that does not answer delays only the work for this host.

``Timer`` is the clock and the scheduler of producers and client instances. Tests replace it by a timer whose clock they set.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.logs import escaped

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """User code raised ``error`` instead of returning."""

    error: BaseException

    def __str__(self) -> str:
        """The class and the text of the error."""
        return f"{type(self.error).__name__}: {safe_text(self.error, str)}"

    def log(self, logger: logging.Logger, text: str, *args: object) -> None:
        """Log the error with its traceback. An exception of a log handler is ignored."""
        capture(logger.error, text, *args, exc_info=self.error, stacklevel=3)


# After a failure was logged with its traceback, further failures of its kind are logged without a traceback for this time.
_TRACEBACK_PAUSE_S = 60.0
_MAX_KINDS = 100


class TracebackLimit:
    """Limits the tracebacks of repeated failures to one a minute for each type of error and line of code."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._last_logged_s_by_kind: dict[object, float] = {}

    def due(self, outcome: object) -> BaseException | None:
        """Return the error of ``outcome`` if its traceback is to be logged now.

        Returns None if ``outcome`` is not a ``Failure``, or if a failure of its kind was logged within the last minute.
        """
        if not isinstance(outcome, Failure):
            return None
        innermost_traceback = outcome.error.__traceback__
        while innermost_traceback is not None and innermost_traceback.tb_next is not None:
            innermost_traceback = innermost_traceback.tb_next
        kind = (
            type(outcome.error),
            innermost_traceback and (innermost_traceback.tb_frame.f_code, innermost_traceback.tb_lineno),
        )
        now_s = self._now_s()
        if now_s - self._last_logged_s_by_kind.get(kind, -_TRACEBACK_PAUSE_S) < _TRACEBACK_PAUSE_S:
            return None
        if len(self._last_logged_s_by_kind) >= _MAX_KINDS:
            self._last_logged_s_by_kind.clear()
        self._last_logged_s_by_kind[kind] = now_s
        return outcome.error


def capture(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """Return the result of ``code``, or its exception as a ``Failure``. In the main thread, a ``KeyboardInterrupt`` is raised,
    not returned.
    """
    try:
        return code(*args, **kwargs)
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return Failure(e)


_local = threading.local()


@contextlib.contextmanager
def without_blocking() -> Iterator[None]:
    """During the ``with`` statement, ``may_block`` returns False on this thread, so that another thread does work that could
    wait.
    """
    previous_value, _local.may_block = may_block(), False
    try:
        yield
    finally:
        _local.may_block = previous_value


def may_block() -> bool:
    """Whether the calling thread may block, for example while a socket takes no bytes."""
    return getattr(_local, "may_block", True)


def safe_text(value: object, convert: Callable[[object], str] = repr) -> str:
    """Return the text of a user's value; if ``convert`` raises, return a text with the value's type."""
    text = capture(convert, value)
    return f"<{type(value).__name__} without a text>" if isinstance(text, Failure) else text


def start_thread(
    name: str, target: Callable[[], None], on_end: Callable[[], None] | None = None, restart: bool = True
) -> threading.Thread:
    """Start a daemon thread that runs ``target``. At the end of the thread, ``on_end`` runs, also after an error.

    Exceptions of ``target`` are logged. With ``restart``, ``target`` is called again after an exception, so it must remove a task
    from its queue before it runs the task.

    Raises:
        RuntimeError: The system allows no more threads. So record only after this call that the thread exists.
    """
    name = escaped(name)  # logs show the thread's name, which may contain the name of a broker
    thread = threading.Thread(target=_run_thread, args=(name, target, on_end, restart), name=name, daemon=True)
    thread.start()
    return thread


def _run_thread(name: str, target: Callable[[], None], on_end: Callable[[], None] | None, restart: bool) -> None:
    try:
        while _run_and_log_failure(name, target) and restart:
            pass
    finally:
        if on_end is not None:
            on_end()


def _run_and_log_failure(name: str, target: Callable[[], None]) -> bool:
    outcome = capture(target)
    if not isinstance(outcome, Failure):
        return False
    outcome.log(logger, "the work of thread %s failed: %s", name, outcome)
    return True


_FLAG_CHECK_INTERVAL_S = 1.0


class Latch:
    """A flag that other threads or signal handlers set, and one thread waits for.

    Unlike an ``Event``, a ``Latch`` is safe in signal handlers. Ctrl-C can interrupt a method of an ``Event`` while the method
    holds a lock. The lock then stays locked, and each later ``set`` blocks forever. A ``set`` in a signal handler that
    interrupts the method at this moment blocks forever, too.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the lock is not held if the flag is set already
            self._lock.release()

    def is_set(self) -> bool:
        """Whether the flag is set. Only the thread that waits for the flag may call this."""
        return not self._lock.locked()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the flag is set, for at most ``seconds``. Returns whether the flag is set.

        Without ``seconds``, the thread wakes periodically to check the flag. If two signals arrive at once, another thread may
        receive both, and this thread is not woken.
        """
        while not self._lock.acquire(timeout=_FLAG_CHECK_INTERVAL_S if seconds is None else max(0.0, seconds)):
            if seconds is not None:
                return False
        self.set()  # sets the flag again, because acquiring the lock cleared it
        return True


_collecting_threads: set[int] = set()  # ids of threads that collect garbage now


def _on_collection(phase: str, info: object) -> None:
    (_collecting_threads.add if phase == "start" else _collecting_threads.discard)(threading.get_ident())


gc.callbacks.append(_on_collection)


def defer_if_collecting(work: Callable[[], None]) -> bool:
    """If this thread is collecting garbage, perhaps while it holds a lock, let another thread run ``work``, and return True.
    Otherwise return False.
    """
    if threading.get_ident() not in _collecting_threads:
        return False
    if not sys.is_finalizing():  # at the end of Python, a new thread no longer runs, and ``start`` would wait for it
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            start_thread("rocketmq-collected", work, restart=False)
    return True


class KeyedExecutor:
    """One thread per key; ``limit`` is how many calls may wait for each thread."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._work_by_key: dict[Hashable, deque[Callable[[], None]]] = {}

    def has_work(self, key: Hashable) -> bool:
        """Whether work of ``key`` waits or runs, so that new work of the key would have to wait."""
        return key in self._work_by_key

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run ``work`` soon. Raises ``RuntimeError`` if the system allows no more threads, or if too much work waits."""
        with self._lock:
            queue = self._work_by_key.get(key)
            if queue is not None:
                if self._limit is not None and len(queue) >= self._limit:
                    raise RuntimeError(f"{len(queue)} requests wait for one thread")
                queue.append(work)
                return
            queue = deque([work])
            try:
                self._work_by_key[key] = queue
                start_thread(f"rocketmq-aside-{key}", functools.partial(self._run, key, queue))
            # If this raises, even by Ctrl-C, the caller keeps the work. The queue is emptied, because the thread may already
            # exist, and must not run the work.
            except BaseException:
                queue.clear()
                self._work_by_key.pop(key, None)
                raise

    def wait(self, key: Hashable, seconds: float) -> None:
        """Wait until the present work of ``key`` is done, for at most ``seconds``."""
        latch = Latch()
        with self._lock:
            if (queue := self._work_by_key.get(key)) is None:
                return
            queue.append(latch.set)
        latch.wait(seconds)

    def _run(self, key: Hashable, queue: deque[Callable[[], None]]) -> None:
        while (work := self._next_work(key, queue)) is not None:
            work()
            del work  # otherwise the waiting thread would keep the objects of the work alive

    def _next_work(self, key: Hashable, queue: deque[Callable[[], None]]) -> Callable[[], None] | None:
        with self._lock:
            if queue:
                return queue.popleft()
            if self._work_by_key.get(key) is queue:
                del self._work_by_key[key]
            return None


_IDLE_TIMEOUT_S, _POLL_INTERVAL_S = 10.0, 0.02


class DaemonThreadPool(Executor):
    """A ``ThreadPoolExecutor`` with daemon threads, so that their work does not delay the end of the process.

    Threads end after ``_IDLE_TIMEOUT_S`` without work. If ``submit`` raises ``RuntimeError``, the work never runs.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._lock = threading.Lock()
        self._state_changed = threading.Condition(self._lock)
        self._queue: deque[Callable[[], None]] = deque()
        self._thread_count = self._idle_count = 0
        self._is_shut_down = False

    def submit(self, code: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``code`` on a thread."""
        future = Future[T]()
        work = functools.partial(_complete, future, functools.partial(code, *args, **kwargs))
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the threads were shut down")
            self._queue.append(work)
            if self._idle_count >= len(self._queue):
                self._state_changed.notify()
            elif self._thread_count < self._max_threads:
                self._thread_count += 1
                try:
                    start_thread(self._name, self._run)
                except BaseException:
                    self._thread_count -= 1
                    self._queue.pop()
                    raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after their work. With ``wait``, return when the threads have ended. No future is cancelled."""
        with self._lock:
            self._is_shut_down = True
            self._state_changed.notify_all()
            if wait:
                self._state_changed.wait_for(lambda: not self._thread_count)

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Wait until no work is left, or until ``deadline``. Returns whether no work is left."""
        while (is_busy := self._thread_count > self._idle_count or bool(self._queue)) and not deadline.expired:
            deadline.pause(_POLL_INTERVAL_S)
        return not is_busy

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            work()
            del work  # otherwise the waiting thread would keep the objects of the work alive

    def _next_work(self) -> Callable[[], None] | None:
        with self._lock:
            self._idle_count += 1
            self._state_changed.wait_for(lambda: self._queue or self._is_shut_down, _IDLE_TIMEOUT_S)
            self._idle_count -= 1
            if self._queue:
                return self._queue.popleft()
            self._thread_count -= 1
            self._state_changed.notify_all()
            return None


def _complete(future: Future[T], code: Callable[[], T]) -> None:
    """Run ``code`` and complete ``future`` with its result or exception, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    outcome = capture(code)
    if isinstance(outcome, Failure):
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome)


# On Linux, this clock also runs while the machine sleeps.
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Timer:
    """Runs calls later, on one thread, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending_calls: list[tuple[float, int, Callable[[], None]]] = []
        self._call_numbers = itertools.count()
        self._lock = threading.Lock()
        # Waiting with a threading.Condition takes several times as long.
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def with_own_thread(self, name: str) -> Timer:
        """Return another timer with a separate thread, for calls that may block."""
        return Timer(f"{self._name}-{name}")

    def now_ms(self) -> int:
        """Milliseconds of a clock that never goes back, for intervals."""
        return time.monotonic_ns() // 1_000_000

    def lease_ms(self) -> int:
        """Milliseconds of a clock that never goes back and runs while the machine sleeps: for leases that servers grant."""
        return time.clock_gettime_ns(_LEASE_CLOCK) // 1_000_000

    def wall_ms(self) -> int:
        """Epoch milliseconds, for times in messages."""
        return time.time_ns() // 1_000_000

    def pause(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)

    def wait(self, future: Future[Any], seconds: float) -> bool:
        """Wait until ``future`` is done, for at most ``seconds``. Returns whether the future is done."""
        try:
            future.exception(seconds)
        except FutureTimeout:
            return future.done()
        return True

    def wait_notified(self, condition: threading.Condition, seconds: float) -> None:
        """Wait until ``condition`` is notified, for at most ``seconds``. The caller holds the lock of the condition."""
        condition.wait(seconds)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` once on the timer's thread, ``seconds`` from now; not if the timer is closed before."""
        with self._lock:
            if self._closed:
                return
            # The thread is started and woken before the call is added. So if the thread cannot start, or Ctrl-C comes, the
            # caller gets the exception, and no call is added. The woken thread waits for the lock. If the call were added
            # without a wakeup, the thread would sleep on: later calls wake the thread only if they are due before all pending
            # calls.
            self._start()
            entry = (time.monotonic() + seconds, next(self._call_numbers), call)
            if not self._pending_calls or entry < self._pending_calls[0]:
                self._wakeups.put(None)
            heapq.heappush(self._pending_calls, entry)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` once and soon, on the timer's thread; on this thread if the system allows no more threads."""
        try:
            self.call_later(0, call)
        except RuntimeError:
            call()

    def start(self) -> None:
        """Start the thread now, for callers that could not handle a failure later. Raises ``RuntimeError`` if the system allows
        no more threads.
        """
        with self._lock:
            if not self._closed:
                self._start()

    def call_repeatedly(self, seconds: float, call: Callable[[], None], first_delay_s: float) -> None:
        """Call ``call`` after ``first_delay_s``, and then ``seconds`` after the end of each call, even if the call raised."""

        def call_and_repeat() -> None:
            try:
                call()
            finally:
                self.call_later(seconds, call_and_repeat)

        self.call_later(first_delay_s, call_and_repeat)

    def drain(self, seconds: float) -> None:
        """Wait until the calls that are due now have ended; does not wait on the timer's own thread."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        latch = Latch()
        self.call_later(0, latch.set)
        latch.wait(seconds)

    def close(self, wait_s: float = 5.0) -> None:
        """Discard pending calls and end the thread; wait up to ``wait_s`` for a running call."""
        with self._lock:
            self._closed = True
            self._pending_calls.clear()
            thread = self._thread
        self._wakeups.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._name, self._run)

    def _run(self) -> None:
        while (call := self._next_work()) is not None:
            call()
            del call  # otherwise the waiting thread would keep the objects of the call alive

    def _next_work(self) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if self._closed:
                    return None
                wait_s = self._pending_calls[0][0] - time.monotonic() if self._pending_calls else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._pending_calls)[2]
            with contextlib.suppress(Empty):  # the timeout is limited, because a lock accepts no timeout of centuries
                self._wakeups.get(timeout=None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))
