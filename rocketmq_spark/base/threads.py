"""Threads that survive errors in user code, and one worker thread per key (``Aside``).

A listener, a callback, a strategy or a hook may raise anything, even ``SystemExit``. Python ends a thread on ``SystemExit``
without a message, so ``attempt`` returns whatever user code raises as a value (``Failure``).

``Aside`` runs work that may block, in the order in which it was added for its key. A thread lives while there is work for
its key, so a host that does not answer delays only the work for that host.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Code of others raised ``error`` instead of returning."""

    error: BaseException

    def __str__(self) -> str:
        """The class and the text of the error."""
        return f"{type(self.error).__name__}: {text_of(self.error, str)}"

    def log(self, logger: logging.Logger, text: str, *args: object) -> None:
        """An error in the log, with the traceback. A handler of the user's that raises, too, costs nothing else."""
        attempt(logger.error, text, *args, exc_info=self.error, stacklevel=3)


def attempt(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Failure:
    """Returns what ``code`` returns, or ``Failure``. Only Ctrl-C in the main thread is raised: that is for the user."""
    try:
        return code(*args, **kwargs)
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return Failure(e)


_here = threading.local()


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """This thread must not be held up now: what another one can finish is left to it."""
    before, _here.waits = may_wait(), False
    try:
        yield
    finally:
        _here.waits = before


def may_wait() -> bool:
    """Whether the calling thread may be held up, for example by a socket that takes no bytes."""
    return getattr(_here, "waits", True)


def text_of(value: object, how: Callable[[object], str] = repr) -> str:
    """The text of a value that is not ours, whose own method may raise."""
    text = attempt(how, value)
    return f"<{type(value).__name__} without a text>" if isinstance(text, Failure) else text


def start_thread(
    name: str, loop: Callable[[], None], ended: Callable[[], None] | None = None, again: bool = True
) -> threading.Thread:
    """Starts a daemon thread that runs ``loop`` until it returns, and ``ended`` whatever happens.

    What ``loop`` raises is logged. With ``again`` the loop is then run anew, so it must have put aside what it failed at.

    Raises:
        RuntimeError: There can be no more threads. The caller must not have noted the thread before.
    """
    thread = threading.Thread(target=_root, args=(name, loop, ended, again), name=name, daemon=True)
    thread.start()
    return thread


def _root(name: str, loop: Callable[[], None], ended: Callable[[], None] | None, again: bool) -> None:
    try:
        while _failed(name, loop) and again:
            pass
    finally:
        if ended is not None:
            ended()


def _failed(name: str, loop: Callable[[], None]) -> bool:
    outcome = attempt(loop)
    if not isinstance(outcome, Failure):
        return False
    outcome.log(logger, "the work of thread %s failed: %s", name, outcome)
    return True


_collecting: set[int] = set()  # the thread that collects garbage now


def _collects(phase: str, info: object) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_collects)


def left_by_collection(work: Callable[[], None]) -> bool:
    """Whether this thread collects garbage, which may come while it holds any lock. Then another one does ``work``."""
    if threading.get_ident() not in _collecting:
        return False
    if not sys.is_finalizing():  # no thread begins any more, and who starts one waits for that
        with contextlib.suppress(RuntimeError):  # there can be no more threads
            start_thread("rocketmq-collected", work, again=False)
    return True


class Aside:
    """Threads by key; ``limit`` is how much may wait for one of them."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._work: dict[Hashable, deque[Callable[[], None]]] = {}

    def busy(self, key: Hashable) -> bool:
        """Whether work of ``key`` waits or is under way: what comes now must wait behind it."""
        return key in self._work

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Have ``work`` done soon. Raises ``RuntimeError`` when there can be no more threads, or too much waits."""
        with self._lock:
            waiting = self._work.get(key)
            if waiting is not None:
                if self._limit is not None and len(waiting) >= self._limit:
                    raise RuntimeError(f"{len(waiting)} requests wait for one thread")
                waiting.append(work)
                return
            waiting = deque([work])
            try:
                self._work[key] = waiting
                start_thread(f"rocketmq-aside-{key}", functools.partial(self._run, key, waiting))
            except BaseException:  # Ctrl-C, too: there may be a thread, or none, and the work is the caller's again
                waiting.clear()
                self._work.pop(key, None)
                raise

    def wait(self, key: Hashable, seconds: float) -> None:
        """Wait until the work that ``key`` has is done, or for ``seconds``."""
        done = threading.Event()
        with self._lock:
            if (waiting := self._work.get(key)) is None:
                return
            waiting.append(done.set)
        done.wait(seconds)

    def _run(self, key: Hashable, mine: deque[Callable[[], None]]) -> None:
        while (work := self._next(key, mine)) is not None:
            work()

    def _next(self, key: Hashable, mine: deque[Callable[[], None]]) -> Callable[[], None] | None:
        with self._lock:
            if mine:
                return mine.popleft()
            if self._work.get(key) is mine:
                del self._work[key]
            return None
