"""Calls from an asyncio event loop to threads, and from threads to the loop."""

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
from rocketmq_spark.base.process import Living
from rocketmq_spark.base.threads import DaemonThreads, Failure, attempt, start_thread
from rocketmq_spark.consumer.listener import DeferredListener, ListenerCall, NextCall
from rocketmq_spark.errors import ClosedError, OptionError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

WAITING_THREADS = 8
AGAIN_S = 1.0  # after which an outcome is applied that found no thread
PAUSE_S = 0.005  # code that runs in the loop without awaiting yields after this time
_ALIVE_S = 1.0  # how often a thread that waits for a coroutine checks that the loop is not closed


_EXIT_S = 30.0  # in which a process that ends waits for calls that are under way, all together
_all: Living[DaemonThreads] = Living()  # a forked child has none of the threads


@atexit.register
def _finish() -> None:
    end = Deadline.after(_EXIT_S)
    for threads in _all.all():
        threads.finish(end)


class EventLoop:
    """The event loop of one object, and its threads for blocking calls."""

    def __init__(self, threads: int = WAITING_THREADS) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made_in: asyncio.AbstractEventLoop | None = None  # for what threads ask before it is used
        with contextlib.suppress(RuntimeError):
            self._made_in = asyncio.get_running_loop()
        self._threads: Executor = _all.add(DaemonThreads(threads, "rocketmq-aio"))
        self._ready: deque[Callable[[], object]] = deque()
        self._woken = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.orphaned: Callable[[], None] | None = None  # called once, if the event loop is closed before this

    def here(self) -> asyncio.AbstractEventLoop:
        """Return the running loop. Raises ``OptionError`` if the object was used in another loop before."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise OptionError("this object was used in another event loop before; expected one object for each loop")
        return running

    # --- from the loop to threads

    def start(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run ``code`` on a thread, also if its caller is cancelled. Raises ``ClosedError`` after ``close``."""
        if self.closed:
            raise ClosedError("the object is closed")
        future = self.here().run_in_executor(self._threads, functools.partial(code, *args, **kwargs))
        future.add_done_callback(_retrieve)
        return future

    async def call(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``code`` on a thread in the caller's context, and return its result. If the caller is cancelled, ``code``
        runs to its end, or does not begin.
        """
        work = [functools.partial(copy_context().run, functools.partial(code, *args, **kwargs))]
        try:
            begun = self.start(lambda: work.pop()())
        except BaseException:  # no thread could start; a later one must not run ``code`` after this error
            work.clear()
            raise
        return await begun

    async def call_or_undo(self, undo: Callable[[T], object], code: Callable[[], T]) -> T:
        """As ``call``. If the caller is cancelled while ``code`` runs, ``undo`` gets the result, on a thread."""
        work, begun = [functools.partial(copy_context().run, functools.partial(code))], None
        try:
            begun = self.start(lambda: work.pop()())
            return await asyncio.shield(begun)
        except BaseException:
            work.clear()
            if begun is not None:
                begun.add_done_callback(functools.partial(self._undo, undo))
            raise

    def _undo(self, undo: Callable[[T], object], done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            with contextlib.suppress(RuntimeError):  # there can be no more threads
                self.finish(undo, done.result())

    def finish(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As ``start``, also after ``close``, for operations that began before it."""
        if self.closed:
            return self.apart(functools.partial(code, *args, **kwargs))
        return self.start(code, *args, **kwargs)

    async def finished(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As ``call``, also after ``close``, for operations that began before it. ``code`` runs even if the call is cancelled."""
        return await asyncio.shield(self.finish(copy_context().run, functools.partial(code, *args, **kwargs)))

    def apart(self, code: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``code`` on a new thread: a close must not wait for busy threads, nor be cancelled before it begins. Raises
        ``RuntimeError`` if the system has no more threads; then ``code`` has not begun.
        """
        threads = _all.add(DaemonThreads(1, "rocketmq-aio-close"))
        future = self.here().run_in_executor(threads, code)
        future.add_done_callback(_retrieve)
        threads.shutdown(wait=False)
        return future

    # --- from threads to the loop

    @property
    def gone(self) -> bool:
        """Whether the event loop was closed, so that pending calls never run."""
        return self._loop is not None and self._loop.is_closed()

    def soon(self, call: Callable[[], object]) -> None:
        """Schedule ``call`` in the loop. Raises ``RuntimeError`` if the loop was closed."""
        if self._loop is None and self._made_in is not None and not self._made_in.is_closed():
            self._loop = self._made_in
        if self._loop is None:
            raise RuntimeError("there is no event loop yet")
        self._ready.append(call)
        if self._woken and not self.gone:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            self._woken = False
            self._ready.clear()
            orphaned, self.orphaned = self.orphaned, None
            if orphaned is not None and self.gone and not self.closed:
                start_thread("rocketmq-aio-close", orphaned, again=False)
            raise

    def _drain(self) -> None:
        self._woken = False  # before the loop below: later calls of ``soon`` schedule a new drain
        try:
            while self._ready:
                self._ready.popleft()()
        except BaseException:  # Ctrl-C is raised to the user, and the later calls still run
            self.here().call_soon(self._drain)
            raise

    def put(self, future: asyncio.Future[Any], outcome: object) -> None:
        """Set the outcome of ``future``; does nothing if the loop was closed."""
        with contextlib.suppress(RuntimeError):
            self.soon(functools.partial(_put, future, outcome))

    def run(self, code: Callable[..., Any], *args: Any) -> Any:
        """Call a user's function here, and return its result. A coroutine that it returns runs in the loop, in this thread's
        context, while this thread waits.
        """
        returned = code(*args)
        if not inspect.iscoroutine(returned):
            return returned
        done: Future[Any] = Future()
        try:
            self.soon(functools.partial(copy_context().run, self._begin, returned, done))
        except BaseException:
            returned.close()
            raise
        while True:
            with contextlib.suppress(TimeoutError):
                if done.exception(_ALIVE_S) is None:
                    return done.result()
            if done.done():
                return done.result()
            if self.gone:
                raise ClosedError("the event loop was closed")

    def _begin(self, coroutine: Coroutine[Any, Any, Any], done: Future[Any]) -> None:
        def ended(task: object) -> None:
            coroutine.close()  # avoids a warning if its task was cancelled before it began
            if not done.done():
                done.set_exception(ClosedError("the coroutine was cancelled"))

        if self.closed:
            ended(None)
        else:
            self.run_task(_run(coroutine, done), ended)

    def run_task(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[object], None]) -> None:
        """Run ``coroutine`` in the loop, and call ``ended`` with its task at the end. ``close`` cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)

    def close(self) -> None:
        """Cancel coroutines that threads wait for, and end the threads after their work."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False)


class Coroutines(DeferredListener):
    """A listener that runs ``code`` in an event loop, ``limit`` calls at a time."""

    def __init__(self, loop: EventLoop, code: Callable[[Any, Any], Any], limit: int) -> None:
        self._loop = loop
        self._code = code
        self._limit = limit
        self._running = 0
        self._line: deque[NextCall] = deque()

    def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
        """Let calls wait. Raises ``RuntimeError`` if the loop was closed, but not the consumer."""
        (self._line.extendleft if first else self._line.extend)(repeat(turn, times))
        try:
            self._loop.soon(self._spread)
        except RuntimeError:
            self._line.clear()
            raise

    def _spread(self) -> None:
        for _ in range(min(len(self._line), self._limit - self._running)):
            self._running += 1
            self._loop.run_task(self._run(), self._ended)

    def _ended(self, task: object) -> None:
        """Called at the end of a task, also if it was cancelled before it began. Starts the next waiting calls."""
        self._running -= 1
        if self._line and not self._loop.closed:
            self._spread()

    async def _run(self) -> None:
        """Call the listener until no call waits: a task for each call would cost more than a quick listener takes.

        A call that sets context variables is the last one of its task, so that other calls do not see them.
        """
        pause_at = time.monotonic() + PAUSE_S
        while self._line:
            if (call := self._line.popleft()()) is None:
                continue
            before = copy_context()  # after the turn, which may set variables of its own
            outcome: object
            try:
                outcome = await self._code(call.messages, call.context)
            except BaseException as e:
                outcome = Failure(e)  # also if an operation that the listener awaited was cancelled, not the listener
                if isinstance(e, asyncio.CancelledError) and _is_cancelled():
                    if not self._loop.closed:  # otherwise the consumer has stopped, and its messages are redelivered
                        self._settle(call, outcome)
                    raise
            if outcome is None and call.context.ack_index is None:
                call(None)
            else:
                self._settle(call, outcome)
            if attempt(copy_context().__eq__, before) is not True:  # what users put there may not be comparable
                return
            if time.monotonic() > pause_at:
                await asyncio.sleep(0)
                pause_at = time.monotonic() + PAUSE_S

    def _settle(self, call: ListenerCall, outcome: object) -> None:
        """Apply an outcome on a thread, because this may send messages back to a broker."""
        settling = attempt(self._loop.start, call, outcome)
        if isinstance(settling, Failure):
            logger.warning("messages of %s cannot be returned to the broker now: %s", call.context.queue, settling)
            if not self._loop.closed:  # no thread can start now
                asyncio.get_running_loop().call_later(AGAIN_S, self._settle, call, outcome)


def _is_cancelled() -> bool:
    """Whether the task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _run(coroutine: Coroutine[Any, Any, Any], done: Future[Any]) -> None:
    """Run the user's coroutine, and put whatever it raises into ``done``; a ``SystemExit`` would otherwise end the event loop."""
    try:
        done.set_result(await coroutine)
    except BaseException as e:
        if isinstance(e, asyncio.CancelledError):
            raise
        done.set_exception(e)


def _put(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, StopIteration):  # which futures do not accept
        future.set_exception(RuntimeError("StopIteration was raised"))
    elif isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log it if the caller was cancelled."""
    if not future.cancelled():
        future.exception()


class Asynchronous:
    """Base class: an event loop and ``close``. ``threads`` limits how many calls block at the same time."""

    def __init__(self, threads: int = WAITING_THREADS) -> None:
        self._loop = EventLoop(threads)
        self._closed = False

    def _check(self) -> asyncio.AbstractEventLoop:
        loop = self._loop.here()
        if self._closed:
            raise ClosedError(f"the {type(self).__name__} is closed")
        return loop

    async def _ask(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the wrapped object on a thread; returns or raises what it does."""
        self._check()
        return await self._loop.call(code, *args, **kwargs)

    async def _end(self, code: Callable[[], T]) -> T:
        """Close with ``code``, which continues if the caller is cancelled. If it fails, or no thread can start, ``close`` may be
        called again.
        """
        self._closed = True
        try:
            ending = self._loop.apart(code)
        except BaseException:
            self._closed = False
            raise
        ending.add_done_callback(self._settled)
        return await asyncio.shield(ending)

    def _settled(self, ending: asyncio.Future[Any]) -> None:
        if ending.cancelled() or ending.exception() is None:
            self._loop.close()
        else:
            self._closed = False

    async def close(self) -> object:
        """Release all resources. A second call does nothing."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._check()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
