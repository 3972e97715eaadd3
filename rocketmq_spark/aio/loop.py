"""Calls from an asyncio event loop to threads, and from threads to the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import copy_context
from itertools import repeat
from typing import Any, ParamSpec, Self, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.base.threads import DaemonThreadPool, Failure, capture, start_thread
from rocketmq_spark.consumer.listener import DeferredListener, ListenerCall, NextCall
from rocketmq_spark.errors import ClosedError, OptionError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_MAX_THREADS = 8
RETRY_PAUSE_S = 1.0  # pause before the next attempt to apply an outcome, if no thread could start
YIELD_AFTER_S = 0.005  # code that runs in the event loop without awaiting yields after this time
_CLOSED_LOOP_CHECK_S = (
    1.0  # interval at which a thread that waits for a coroutine checks whether the event loop was closed
)


_EXIT_TIMEOUT_S = 30.0  # at its exit, the process waits this long for all running calls together
# A forked child begins with an empty collection, because the threads of its parent do not exist in the child.
_thread_pools: LiveObjects[DaemonThreadPool] = LiveObjects()


@atexit.register
def _finish_at_exit() -> None:
    deadline = Deadline.after(_EXIT_TIMEOUT_S)
    for thread_pool in _thread_pools.all():
        thread_pool.wait_until_idle(deadline)


class EventLoop:
    """The event loop of one object, and the object's threads for blocking calls."""

    def __init__(self, max_threads: int = DEFAULT_MAX_THREADS) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop of the first use
        self._creation_loop: asyncio.AbstractEventLoop | None = None  # used by ``schedule`` before the first use
        with contextlib.suppress(RuntimeError):
            self._creation_loop = asyncio.get_running_loop()
        self._thread_pool: Executor = _thread_pools.add(DaemonThreadPool(max_threads, "rocketmq-aio"))
        self._ready_calls: deque[Callable[[], object]] = deque()  # calls to run in the event loop
        self._is_drain_scheduled = False
        self._tasks: set[asyncio.Task[Any]] = set()  # the tasks that ``run_task`` started
        self.is_shut_down = False
        # Called once if the event loop is closed before this object is closed.
        self.on_loop_closed: Callable[[], None] | None = None

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. Raises ``OptionError`` if the object was used in another loop before."""
        current_loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = current_loop
        if self._loop is not current_loop:
            raise OptionError("this object was used in another event loop before; expected one object for each loop")
        return current_loop

    # --- from the event loop to threads

    def start(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run ``code`` on a thread, even if its caller is cancelled. Raises ``ClosedError`` after ``close``."""
        if self.is_shut_down:
            raise ClosedError("the object is closed")
        future = self.running_loop().run_in_executor(self._thread_pool, functools.partial(code, *args, **kwargs))
        future.add_done_callback(_mark_retrieved)
        return future

    async def call(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``code`` on a thread in the caller's context, and return its result. If the caller is cancelled after ``code`` has
        begun, ``code`` runs to its end. If the caller is cancelled before ``code`` has begun, ``code`` does not run.
        """
        work = [functools.partial(copy_context().run, functools.partial(code, *args, **kwargs))]
        try:
            future = self.start(lambda: work.pop()())
        except BaseException:  # no thread could start; the caller gets this error, so no later thread may run ``code``
            work.clear()
            raise
        return await future

    async def call_or_undo(self, undo: Callable[[T], object], code: Callable[[], T]) -> T:
        """As ``call``. If the caller is cancelled while ``code`` runs, a thread calls ``undo`` with the result."""
        work, future = [functools.partial(copy_context().run, functools.partial(code))], None
        try:
            future = self.start(lambda: work.pop()())
            return await asyncio.shield(future)
        except BaseException:
            work.clear()
            if future is not None:
                future.add_done_callback(functools.partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[T], object], future: asyncio.Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:
            with contextlib.suppress(RuntimeError):  # no thread can start
                self.start_after_close(undo, future.result())

    def start_after_close(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As ``start``, but also allowed after ``close``, for operations that began before ``close``."""
        if self.is_shut_down:
            return self.start_on_new_thread(functools.partial(code, *args, **kwargs))
        return self.start(code, *args, **kwargs)

    async def call_after_close(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As ``call``, but also allowed after ``close``, for operations that began before ``close``. ``code`` runs even if the
        caller is cancelled.
        """
        return await asyncio.shield(
            self.start_after_close(copy_context().run, functools.partial(code, *args, **kwargs))
        )

    def start_on_new_thread(self, code: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``code``, which closes an object, on a new thread. So ``code`` does not wait for busy threads, and begins even if
        its caller is cancelled. Raises ``RuntimeError`` if no thread can start; in this case, ``code`` does not run.
        """
        thread_pool = _thread_pools.add(DaemonThreadPool(1, "rocketmq-aio-close"))
        future = self.running_loop().run_in_executor(thread_pool, code)
        future.add_done_callback(_mark_retrieved)
        thread_pool.shutdown(wait=False)
        return future

    # --- from threads to the event loop

    @property
    def loop_is_closed(self) -> bool:
        """Whether the event loop was closed, so that pending calls never run."""
        return self._loop is not None and self._loop.is_closed()

    def schedule(self, call: Callable[[], object]) -> None:
        """Schedule ``call`` in the event loop. Raises ``RuntimeError`` if the event loop was closed, or if there is no event
        loop yet.
        """
        if self._loop is None and self._creation_loop is not None and not self._creation_loop.is_closed():
            self._loop = self._creation_loop
        if self._loop is None:
            raise RuntimeError("there is no event loop yet")
        self._ready_calls.append(call)
        if self._is_drain_scheduled and not self.loop_is_closed:
            return
        self._is_drain_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            self._is_drain_scheduled = False
            self._ready_calls.clear()
            on_loop_closed, self.on_loop_closed = self.on_loop_closed, None
            if on_loop_closed is not None and self.loop_is_closed and not self.is_shut_down:
                start_thread("rocketmq-aio-close", on_loop_closed, restart=False)
            raise

    def _drain(self) -> None:
        # The flag is cleared before the calls run, so that a later call of ``schedule`` schedules a new drain.
        self._is_drain_scheduled = False
        try:
            while self._ready_calls:
                self._ready_calls.popleft()()
        except BaseException:  # an interrupt (Ctrl-C) is raised to the user, and the other calls still run
            self.running_loop().call_soon(self._drain)
            raise

    def set_outcome(self, future: asyncio.Future[Any], outcome: object) -> None:
        """Set the result or exception of ``future``. Does nothing if the event loop was closed."""
        with contextlib.suppress(RuntimeError):
            self.schedule(functools.partial(_set_outcome, future, outcome))

    def run(self, code: Callable[..., Any], *args: Any) -> Any:
        """Call a user's function on this thread, and return its result. If the function returns a coroutine, this thread waits
        while the coroutine runs in the event loop, in the context of this thread.
        """
        result = code(*args)
        if not inspect.iscoroutine(result):
            return result
        future: Future[Any] = Future()
        try:
            self.schedule(functools.partial(copy_context().run, self._begin, result, future))
        except BaseException:
            result.close()
            raise
        while True:
            with contextlib.suppress(TimeoutError):
                if future.exception(_CLOSED_LOOP_CHECK_S) is None:
                    return future.result()
            if future.done():
                return future.result()
            if self.loop_is_closed:
                raise ClosedError("the event loop was closed")

    def _begin(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        def on_end(task: object) -> None:
            coroutine.close()  # avoids a warning of Python if the task was cancelled before it began
            if not future.done():
                future.set_exception(ClosedError("the coroutine was cancelled"))

        if self.is_shut_down:
            on_end(None)
        else:
            self.run_task(_run(coroutine, future), on_end)

    def run_task(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[object], None]) -> None:
        """Run ``coroutine`` as a task of the event loop, and call ``on_end`` with the task at its end. ``close`` cancels the
        task.
        """
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(on_end)

    def close(self) -> None:
        """Cancel the tasks of ``run_task``, and end the threads after their current work."""
        self.is_shut_down = True
        for task in self._tasks:
            task.cancel()
        self._thread_pool.shutdown(wait=False)


class CoroutineListener(DeferredListener):
    """A listener that awaits ``code`` in an event loop, at most ``max_running_calls`` calls at a time."""

    def __init__(self, loop: EventLoop, code: Callable[[Any, Any], Any], max_running_calls: int) -> None:
        self._loop = loop
        self._code = code
        self._max_running_calls = max_running_calls
        self._running_task_count = 0
        self._waiting_calls: deque[NextCall] = deque()

    def submit(self, next_call: NextCall, count: int, at_front: bool = False) -> None:
        """Queue calls. Raises ``RuntimeError`` if the event loop was closed before the consumer."""
        (self._waiting_calls.extendleft if at_front else self._waiting_calls.extend)(repeat(next_call, count))
        try:
            self._loop.schedule(self._start_tasks)
        except RuntimeError:
            self._waiting_calls.clear()
            raise

    def _start_tasks(self) -> None:
        for _ in range(min(len(self._waiting_calls), self._max_running_calls - self._running_task_count)):
            self._running_task_count += 1
            self._loop.run_task(self._run(), self._on_task_end)

    def _on_task_end(self, task: object) -> None:
        """Count the end of a task, and start tasks for the waiting calls. This method is also called for a task that was
        cancelled before it began.
        """
        self._running_task_count -= 1
        if self._waiting_calls and not self._loop.is_shut_down:
            self._start_tasks()

    async def _run(self) -> None:
        """Call the listener for each waiting call. One task serves many calls, because starting a task can take longer than a
        quick listener.

        A call that sets context variables is the last call of its task, so that other calls do not see these variables.
        """
        pause_at = time.monotonic() + YIELD_AFTER_S
        while self._waiting_calls:
            if (call := self._waiting_calls.popleft()()) is None:
                continue
            context_before = copy_context()  # copied here, because the line above may set context variables
            outcome: object
            try:
                outcome = await self._code(call.messages, call.context)
            except BaseException as e:
                outcome = Failure(e)  # also a CancelledError, if the listener awaited an operation that was cancelled
                if isinstance(e, asyncio.CancelledError) and _is_cancelled():
                    # After ``close``, the outcome is not applied: the consumer has stopped, and the messages are redelivered.
                    if not self._loop.is_shut_down:
                        self._apply_outcome(call, outcome)
                    raise
            if outcome is None and call.context.ack_index is None:
                call(None)
            else:
                self._apply_outcome(call, outcome)
            # Errors are captured, because the comparison of the user's values may raise an error.
            if capture(copy_context().__eq__, context_before) is not True:
                return
            if time.monotonic() > pause_at:
                await asyncio.sleep(0)
                pause_at = time.monotonic() + YIELD_AFTER_S

    def _apply_outcome(self, call: ListenerCall, outcome: object) -> None:
        """Apply an outcome on a thread, because applying it may send messages back to a broker. Tries again later if no thread
        can start.
        """
        submission = capture(self._loop.start, call, outcome)
        if isinstance(submission, Failure):
            logger.warning("messages of %s cannot be returned to the broker now: %s", call.context.queue, submission)
            if not self._loop.is_shut_down:
                asyncio.get_running_loop().call_later(RETRY_PAUSE_S, self._apply_outcome, call, outcome)


def _is_cancelled() -> bool:
    """Whether the current task itself was cancelled, not only an operation that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _run(coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
    """Run a user's coroutine, and give ``future`` its result or exception. The exception may be ``SystemExit``, which would
    otherwise end the event loop.
    """
    try:
        future.set_result(await coroutine)
    except BaseException as e:
        if isinstance(e, asyncio.CancelledError):
            raise
        future.set_exception(e)


def _set_outcome(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, StopIteration):  # a future does not accept StopIteration
        future.set_exception(RuntimeError("StopIteration was raised"))
    elif isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future, because asyncio logs exceptions that nobody retrieved, for example after a cancelled
    call.
    """
    if not future.cancelled():
        future.exception()


class AsyncClient:
    """Base class of objects that wrap a blocking object. ``max_threads`` is the maximum number of calls that block at the same
    time.
    """

    def __init__(self, max_threads: int = DEFAULT_MAX_THREADS) -> None:
        self._loop = EventLoop(max_threads)
        self._is_closed = False

    def _check_open(self) -> asyncio.AbstractEventLoop:
        loop = self._loop.running_loop()
        if self._is_closed:
            raise ClosedError(f"the {type(self).__name__} is closed")
        return loop

    async def _run_on_thread(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the wrapped object on a thread, and return its result."""
        self._check_open()
        return await self._loop.call(code, *args, **kwargs)

    async def _close_with_code(self, code: Callable[[], T]) -> T:
        """Close the object with ``code``, which runs to its end even if the caller is cancelled. If ``code`` fails or no thread
        can start, the object is open again, and ``close`` may be called again.
        """
        self._is_closed = True
        try:
            close_future = self._loop.start_on_new_thread(code)
        except BaseException:
            self._is_closed = False
            raise
        close_future.add_done_callback(self._on_closed)
        return await asyncio.shield(close_future)

    def _on_closed(self, close_future: asyncio.Future[Any]) -> None:
        if close_future.cancelled() or close_future.exception() is None:
            self._loop.close()
        else:
            self._is_closed = False

    async def close(self) -> object:
        """Release all resources. A second call does nothing."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
