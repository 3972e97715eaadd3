"""The records and notes of a node's store by queue of the inner topic. A driver: it asks brokers about notes that it doubts."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rocketmq_spark.delay.envelope_records import Remade, offset_and_due, space_of
from rocketmq_spark.delay.release import Seen, note_of, noted
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spool.records import DOUBTFUL, IDENTITY, due_of
from rocketmq_spark.spool.store import Store

logger = logging.getLogger(__name__)

PAGE = 2000

T = TypeVar("T")


class QueueRecords:
    """Not thread-safe."""

    def __init__(self, store: Store, remade: Remade) -> None:
        self._store = store
        self._remade = remade
        self._warned = False

    def queues(self) -> set[MessageQueue]:
        """The queues that have a note."""
        notes = self._store.notes()
        return {*noted(notes), *noted(notes, doubtful=True)}

    def note(self, queue: MessageQueue) -> Seen | None:
        """The note about a queue. Raises errors of requests.

        If the records were assigned to this cluster (``spool assign``), its queue may be another one with the same name. Then the
        records lose their marks of the queue: neither its progress nor its next owner knows their messages.
        """
        notes = self._store.notes()
        seen = noted(notes, doubtful=True).get(queue)
        if seen is None:
            return noted(notes).get(queue)
        known = self._remade.is_known(queue, seen)
        if not known:
            count = self.each(queue, lambda offset, due_ms: True, self._store.free)
            logger.info("%d waiting messages are not from this %s, and are sent from here", count, queue)
        if not known or self._store.damages:  # after damage, some of what was read is not in the store
            seen = None
        found = {} if seen is None else {note_of(queue): seen.encode()}
        self._store.add([], {DOUBTFUL + note_of(queue): b"", **found})
        return seen

    def has(self, queue: MessageQueue, which: Callable[[int, int], bool]) -> bool:
        """Whether the queue has a waiting record that ``which`` accepts."""
        return bool(self.each(queue, which, len))

    def each(
        self,
        queue: MessageQueue,
        which: Callable[[int, int], bool],
        step: Callable[[Sequence[tuple[bytes, bytes]]], int],
    ) -> int:
        """Call ``step`` with the marks of a queue's waiting records that ``which`` accepts, in portions. Returns the sum."""
        space = space_of(queue)
        return sum(
            step([(space, place) for place, (offset, due_ms) in found if which(offset, due_ms)])
            for found in self._read(space, offset_and_due)
        )

    def oldest(self, queue: MessageQueue) -> int | None:
        """The offset of a queue's first waiting record."""
        return next((offset for found in self._read(space_of(queue), offset_and_due) for _, (offset, _) in found), None)

    def waits_from_ms(self) -> int | None:
        """The original due time of the waiting record that is due first."""
        return next((due_ms for found in self._read(IDENTITY, due_of) for _, due_ms in found), None)

    def _read(self, space: bytes, read: Callable[[bytes], T]) -> Iterator[list[tuple[bytes, T]]]:
        """Yield the places in a space of marks with what ``read`` returns for them: the first place, and then portions.

        A place that ``read`` rejects is left out, so that a bad mark does not stop other messages.
        """
        start = None  # the store remembers where a space begins
        while places := self._store.places(space, start, PAGE):
            found = []
            for place in places:
                try:
                    found.append((place, read(place)))
                except struct.error:
                    self._warn(space, place)
            yield found
            start = places[-1] + b"\0"

    def _warn(self, space: bytes, place: bytes) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "a waiting message has the mark %r in %r, which no release writes; this mark and others like it are ignored, and "
                "the messages are sent. Check who may write to %s", place[:100], space[:100], self._store.path,
            )  # fmt: skip
