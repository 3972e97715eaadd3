"""The records and notes of a node's store by queue of the inner topic. A driver: it asks brokers about notes that it doubts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rocketmq_spark.delay.envelope_records import Remade, offset_and_due, space_of
from rocketmq_spark.delay.release import Seen, note_of, noted
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spool.records import DOUBTFUL
from rocketmq_spark.spool.store import Store

logger = logging.getLogger(__name__)

PAGE = 2000


class QueueRecords:
    """Not thread-safe."""

    def __init__(self, store: Store, remade: Remade) -> None:
        self._store = store
        self._remade = remade

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
        space, start, count = space_of(queue), b"", 0
        while places := self._store.places(space, start, PAGE):
            count += step([(space, place) for place in places if which(*offset_and_due(place))])
            start = places[-1] + b"\0"
        return count
