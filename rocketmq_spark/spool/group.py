"""Additions of several threads as one write. Whoever gets the lock writes for all who wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from rocketmq_spark.errors import RocketMQError, SpoolError
from rocketmq_spark.spool.keys import NOTE
from rocketmq_spark.spool.records import Record


class Ticket:
    """What one caller adds: records with their due times, how they are stored, and notes. ``error`` is why they are not."""

    def __init__(self, records: Sequence[tuple[Record, int]], notes: Mapping[bytes, bytes] | None = None) -> None:
        self.items = [(record, due_ms, record.encode()) for record, due_ms in records]
        self.notes = [(NOTE + name, value) for name, value in (notes or {}).items()]
        self.size = sum([len(data) for _, _, data in self.items])
        self.laned = any(record.lane for record, _ in records)
        self.error: RocketMQError | None = None
        self.done = False


class GroupCommit:
    """Hands tickets to ``write`` under ``lock``: one by one, or those that wait ``together``."""

    def __init__(
        self, lock: AbstractContextManager[bool], write: Callable[[Sequence[Ticket]], None], together: bool
    ) -> None:
        self._lock = lock
        self._write = write
        self._together = together
        self._waiting: deque[Ticket] = deque()

    def put(self, ticket: Ticket) -> None:
        """Returns when it is written; raises its error."""
        if not self._together:
            with self._lock:
                self._write((ticket,))
        else:
            self._waiting.append(ticket)
            with self._lock:
                if not ticket.done:
                    waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
                    # Ctrl-C may have hit whoever took it from there, before it wrote.
                    self._write_all(waiting if ticket in waiting else [*waiting, ticket])
        if ticket.error is not None:
            raise ticket.error

    def _write_all(self, tickets: Sequence[Ticket]) -> None:
        try:
            self._write(tickets)
        except BaseException:  # Ctrl-C hits one of them; that the others are written is not known
            for each in tickets:
                each.error = each.error or SpoolError("the write to the spool was interrupted")
            raise
        finally:
            for each in tickets:
                each.done = True
