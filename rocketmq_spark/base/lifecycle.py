"""Closing producers and consumers: at the end of a ``with`` block, in signal handlers, and never in a forked child.

A signal handler interrupts the main thread anywhere. If that is inside one of our calls, the call may hold locks that the
close needs, or that the threads which receive answers need, and the close would deadlock. So the close is postponed until
the call ends.

``Owner`` ties a producer or consumer to the process that created it.
``on_signals`` replaces the handlers of signals for as long as something is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from rocketmq_spark.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")

_postponed: dict[int, list[Callable[[], object]]] = {}  # by thread


class Closing:
    """Has a ``close``, which may be called twice."""

    def close(self) -> object:
        """Give back what is held; nothing is done the second time."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def entry(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a method that users call. What was ``postponed`` above it is done when it ends, whatever it raises."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return _inside(method, *args, **kwargs)
        finally:
            if _postponed:
                _catch_up()

    return call


def postponed(close: Callable[[], object]) -> bool:
    """Whether this thread is in an ``entry``, which then calls ``close`` when it ends. It may be another object's: they share
    connections.
    """
    if not _is_inside():
        return False
    _postponed.setdefault(threading.get_ident(), []).append(close)
    return True


def _inside(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Marks the stack: a count would be wrong for ever where Ctrl-C comes between two steps of it."""
    return method(*args, **kwargs)


def _is_inside() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _inside.__code__:
            return True
        frame = frame.f_back
    return False


def _catch_up() -> None:
    me = threading.get_ident()
    while not _is_inside() and (closes := _postponed.pop(me, None)) is not None:
        for close in closes:
            close()


# The number of this process: kept, for the system takes as long to say it as all other steps of a send.
_process = [os.getpid()]
os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, os.getpid()))


class Owner:
    """The process that made this, of ``what``: a producer, a consumer. Sockets, locks and threads of another one are no use."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = _process[0]

    @property
    def here(self) -> bool:
        """Whether this process is it, and no fork of it."""
        return _process[0] == self._pid

    def check(self, closed: bool) -> None:
        """Raises ``ClosedError`` in a fork, and when it was ``closed``."""
        if _process[0] != self._pid:
            raise ClosedError(
                f"this {self._what} belongs to process {self._pid}, from which this one was forked",
                remedy=f"Make a {self._what} in this process",
            )
        if closed:
            raise ClosedError(f"the {self._what} is closed")


_Handlers = dict[int, Any]
_replaced: list[_Handlers] = []  # the handlers in whose place others are now, by signal


@contextlib.contextmanager
def on_signals(handle: Callable[[], object], *numbers: signal.Signals) -> Iterator[None]:
    """These signals call ``handle`` instead of ending the program wherever it is. Only the main thread receives them: in any
    other this does nothing.
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
        _put_back(before)


def _put_back(before: _Handlers) -> None:
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python


def _put_back_all() -> None:
    """In a child that was forked meanwhile: it has nothing to end, and who ends the child would wait for it for ever."""
    while _replaced:
        _put_back(_replaced.pop())


os.register_at_fork(after_in_child=_put_back_all)
