"""When something ends: at the end of a ``with`` block, and never in a fork.

What is closed at the end of a ``with`` block.

Whose a producer or consumer is: of the process that made it, until it is closed.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from rocketmq_spark.errors import ClosedError


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


class Owner:
    """The process that made this, of ``what``: a producer, a consumer. Sockets, locks and threads of another one are no use."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this process is it, and no fork of it."""
        return os.getpid() == self._pid

    def check(self, closed: bool) -> None:
        """Raises ``ClosedError`` in a fork, and when it was ``closed``."""
        if not self.here:
            raise ClosedError(
                f"this {self._what} belongs to process {self._pid}, from which this one was forked",
                remedy=f"Make a {self._what} in this process",
            )
        if closed:
            raise ClosedError(f"the {self._what} is closed")
