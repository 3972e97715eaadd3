"""What a process keeps between calls: clients, accumulators, fault tables, what was asked already.

One registry with one rule: a thing stays until its owner drops it, or until ``forget`` drops everything. A forked process
begins with nothing. What it inherited it neither uses nor drops, for connections and locks in it are its parent's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
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
