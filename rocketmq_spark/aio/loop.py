"""An event loop of asyncio and the threads that wait for it, or for which it waits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, ParamSpec, Self, TypeVar

from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.errors import ClosedError, OptionError

P = ParamSpec("P")
T = TypeVar("T")

WAITING_THREADS = 8
PAUSE_S = 0.005  # after which what can go on without a pause lets the event loop have a turn
_ALIVE_S = 1.0  # how often a thread that waits for an event loop looks whether it is still there


class EventLoop:
    """The event loop of an object, and the ways between it and threads."""

    def __init__(self, threads: int = WAITING_THREADS) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(threads, "rocketmq-aio")
        self._ready: deque[Callable[[], object]] = deque()
        self._woken = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False
        self.orphaned: Callable[[], None] | None = None  # called once, if the event loop is closed before this

    def here(self) -> asyncio.AbstractEventLoop:
        """The running loop; raises ``OptionError`` in another one than before."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise OptionError("this object was used in another event loop; expected one object for each loop")
        return running

    # --- from the loop to threads

    def start(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run ``code`` on a thread, whatever becomes of who waits for it. Raises ``ClosedError`` after ``close``."""
        if self.closed:
            raise ClosedError("the object is closed")
        future = self.here().run_in_executor(self._threads, functools.partial(code, *args, **kwargs))
        future.add_done_callback(_retrieve)
        return future

    async def call(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``code`` returns or raises, on a thread and in this context. If its caller is cancelled it goes on, or does not
        begin.
        """
        work = [functools.partial(copy_context().run, functools.partial(code, *args, **kwargs))]
        try:
            begun = self.start(lambda: work.pop()())
        except BaseException:  # no thread for it now, and a later one must not do what was said not to have begun
            work.clear()
            raise
        return await begun

    async def finish(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same; it begins, and goes on, if its caller is cancelled."""
        return await asyncio.shield(self.start(copy_context().run, functools.partial(code, *args, **kwargs)))

    def last(self, code: Callable[[], T]) -> asyncio.Future[T]:
        """The same, and ``close`` behind it, on a thread of its own: an end must not wait for those that may be kept, nor be
        cancelled before it began. Raises ``RuntimeError`` where there can be no more threads: then it has not begun.
        """
        threads = ThreadPoolExecutor(1, "rocketmq-aio-close")
        future = self.here().run_in_executor(threads, code)
        future.add_done_callback(_retrieve)
        future.add_done_callback(lambda _: self.close())
        threads.shutdown(wait=False)
        return future

    # --- from threads to the loop

    @property
    def gone(self) -> bool:
        """Whether it was closed: what it was to call then is never called."""
        return self._loop is not None and self._loop.is_closed()

    def soon(self, call: Callable[[], object]) -> None:
        """Have it called in the loop. Raises ``RuntimeError`` if there is none any more."""
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
        self._woken = False  # first: what is added from now on wakes the loop again
        while self._ready:
            self._ready.popleft()()

    def put(self, future: asyncio.Future[Any], outcome: object) -> None:
        """The outcome of ``future``; dropped if no one can wait for it any more."""
        with contextlib.suppress(RuntimeError):
            self.soon(functools.partial(_put, future, outcome))

    def run(self, code: Callable[..., Any], *args: Any) -> Any:
        """What a user's function returns, called here; what it awaits runs in the loop while this thread waits, and in its
        context.
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
            coroutine.close()  # which did not begin if its task was cancelled at once
            if not done.done():
                done.set_exception(ClosedError("the coroutine was cancelled"))

        if self.closed:
            ended(None)
        else:
            self.run_task(_run(coroutine, done), ended)

    def run_task(self, coroutine: Coroutine[Any, Any, None], ended: Callable[[object], None]) -> None:
        """Run it in the loop until it ends, or this is closed; then ``ended`` is called."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)

    def close(self) -> None:
        """Cancel what runs for threads, and end the threads when they have nothing to do any more."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False)


async def _run(coroutine: Coroutine[Any, Any, Any], done: Future[Any]) -> None:
    """Whatever the user's coroutine raises is its outcome; a ``SystemExit`` of it would end the event loop."""
    try:
        done.set_result(await coroutine)
    except BaseException as e:
        if isinstance(e, asyncio.CancelledError):
            raise
        done.set_exception(e)


def _put(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, StopIteration):  # which no future takes
        future.set_exception(RuntimeError("StopIteration was raised"))
    elif isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """An error that no one waits for any more is not for the log."""
    if not future.cancelled():
        future.exception()


class Asynchronous:
    """What all have: an event loop, and an end. ``threads``: how many of its calls may wait at the same time."""

    def __init__(self, threads: int = WAITING_THREADS) -> None:
        self._loop = EventLoop(threads)
        self._closed = False

    def _check(self) -> asyncio.AbstractEventLoop:
        loop = self._loop.here()
        if self._closed:
            raise ClosedError(f"the {type(self).__name__} is closed")
        return loop

    async def _ask(self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call of the object for threads returns or raises."""
        self._check()
        return await self._loop.call(code, *args, **kwargs)

    async def _end(self, code: Callable[[], T]) -> T:
        """Closed from now on, and ``code`` goes on if its caller is cancelled. Where no thread can do it another call may."""
        self._closed = True
        try:
            ending = self._loop.last(code)
        except BaseException:
            self._closed = False
            raise
        return await asyncio.shield(ending)

    async def close(self) -> object:
        """Give back what is held; nothing is done the second time."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._check()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
