"""What was pulled of one queue and is not finished: Java's ``ProcessQueue``.

Messages lie by queue offset. Removing finished ones tells the offset up to which everything is finished, which is what may be
committed. An orderly consumer takes messages from the front and then commits them or puts them back.

Pure: the caller holds its lock, tells the time, and acts on what is returned. Offsets of a queue mostly come in order, so
that the sorted ones are a deque that loses removed offsets only when they reach one of its ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rocketmq_spark.model import MessageQueue, ReceivedMessage

LOCK_EXPIRES_MS = 30_000  # on our side; the broker's lock lives 60 s


class QueueLock:
    """The broker's lock of a queue, as far as this member knows."""

    def __init__(self) -> None:
        self.granted_ms: int | None = None

    def grant(self, now_ms: int) -> None:
        """The broker gave the queue to this client."""
        self.granted_ms = now_ms

    def lose(self) -> None:
        """The broker did not, or the lock was given back."""
        self.granted_ms = None

    def held(self, now_ms: int) -> bool:
        """Whether it is ours for sure."""
        return self.granted_ms is not None and now_ms - self.granted_ms <= LOCK_EXPIRES_MS


class ProcessQueue:
    """The unfinished messages of ``queue``. Once ``dropped`` the queue is not ours any more, and no result of it counts."""

    def __init__(self, queue: MessageQueue, now_ms: int = 0) -> None:
        self.queue = queue
        self.dropped = False
        self.last_pull_ms = now_ms
        self.last_consume_ms = now_ms
        self.lock = QueueLock()
        self.count = 0
        self.bytes = 0
        self._waiting: dict[int, ReceivedMessage] = {}
        self._taken: dict[int, ReceivedMessage] = {}
        self._sorted: deque[int] = deque()
        self._max_put: int | None = None

    def put(self, messages: Iterable[ReceivedMessage]) -> int:
        """Keep what was pulled, and say how many of them are new; a repeated offset replaces its message uncounted."""
        new = 0
        for message in messages:
            if not self._place(message):
                new += 1
                self.count += 1
                self.bytes += len(message.body)
                self._max_put = message.queue_offset
        return new

    def remove(self, messages: Iterable[ReceivedMessage]) -> int | None:
        """Forget finished ones; gives the offset to commit, None when nothing was here. It never passes an unfinished one."""
        if not self._waiting:
            return None
        for message in messages:
            if (gone := self._waiting.pop(message.queue_offset, None)) is not None:
                self._uncount(gone)
        return self._next()

    def take(self, count: int) -> list[ReceivedMessage]:
        """Up to ``count`` from the front, which are then neither waiting nor finished."""
        taken: list[ReceivedMessage] = []
        while len(taken) < count and (message := self.first()) is not None:
            taken.append(self._waiting.pop(message.queue_offset))
            self._taken[message.queue_offset] = message
        return taken

    def commit(self) -> int | None:
        """All that were taken are finished; gives the offset after the last of them, None when there are none."""
        if not self._taken:
            return None
        last = max(self._taken)
        for message in self._taken.values():
            self._uncount(message)
        self._taken.clear()
        return last + 1

    def rollback(self) -> None:
        """All that were taken wait again."""
        self.put_back(list(self._taken.values()))

    def put_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Those of the taken ones wait again, as they are told here: their count of attempts may have grown."""
        for message in sorted(messages, key=lambda m: m.queue_offset, reverse=True):
            if self._taken.pop(message.queue_offset, None) is not None:
                self._place(message)

    def replace(self, message: ReceivedMessage) -> None:
        """The message of an offset that waits is this one now."""
        if message.queue_offset in self._waiting:
            self._waiting[message.queue_offset] = message

    def __contains__(self, message: ReceivedMessage) -> bool:
        return message.queue_offset in self._waiting

    def first(self) -> ReceivedMessage | None:
        """The waiting message of the smallest offset."""
        while self._sorted and self._sorted[0] not in self._waiting:
            self._sorted.popleft()
        return self._waiting[self._sorted[0]] if self._sorted else None

    @property
    def span(self) -> int:
        """Offsets from the first to the last waiting message."""
        if self.first() is None:
            return 0
        while self._sorted[-1] not in self._waiting:
            self._sorted.pop()
        return self._sorted[-1] - self._sorted[0]

    @property
    def waiting(self) -> int:
        """How many are not taken."""
        return len(self._waiting)

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The first and the last offset that waits."""
        first = self.first()
        return None if first is None else (first.queue_offset, first.queue_offset + self.span)

    def clear(self) -> None:
        """Forget all messages, as a reset of the offset does."""
        for part in (self._waiting, self._taken):
            part.clear()
        self._sorted.clear()
        self.count = self.bytes = 0
        self._max_put = None

    def _place(self, message: ReceivedMessage) -> bool:
        """Put it among the waiting ones; whether its offset was here already."""
        offset = message.queue_offset
        if offset in self._taken:
            return True
        known = offset in self._waiting
        self._waiting[offset] = message
        if not self._sorted or offset > self._sorted[-1]:
            self._sorted.append(offset)
        elif offset < self._sorted[0]:
            self._sorted.appendleft(offset)
        elif not known and offset != self._sorted[0]:  # at either end it may be there, from before it was removed
            self._sorted = deque(sorted(self._waiting))
        return known

    def _uncount(self, message: ReceivedMessage) -> None:
        self.count -= 1
        self.bytes -= len(message.body)

    def _next(self) -> int | None:
        first = self.first()
        if first is not None:
            return first.queue_offset
        return None if self._max_put is None else self._max_put + 1
