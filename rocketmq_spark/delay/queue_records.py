"""The records and notes of a node's store, by queue of the inner topic. This module is a driver: it sends requests to brokers
if a note is doubtful.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rocketmq_spark.delay.envelope_records import RecreationCheck, offset_and_due, space_of
from rocketmq_spark.delay.release import QueueCheckpoint, checkpoints_of, note_name
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spool.records import DOUBTFUL_PREFIX, IDENTITY, due_ms_of_identity
from rocketmq_spark.spool.store import Store

logger = logging.getLogger(__name__)

PAGE = 2000  # the number of places that are read at once

T = TypeVar("T")


class QueueRecords:
    """Not thread-safe."""

    def __init__(self, store: Store, recreation_check: RecreationCheck) -> None:
        self._store = store
        self._recreation_check = recreation_check
        self._has_warned = False

    def queues(self) -> set[MessageQueue]:
        """The queues that have a checkpoint."""
        notes = self._store.notes()
        return {*checkpoints_of(notes), *checkpoints_of(notes, doubtful=True)}

    def checkpoint(self, queue: MessageQueue) -> QueueCheckpoint | None:
        """Return the checkpoint of a queue. Raises errors of requests.

        If the records were assigned to this cluster (``spool assign``), the queue here may be another queue with the same name.
        If the queue here is another queue, the records lose their marks of the queue (see ``spool.lanes``), because their
        messages are not in the queue here.
        """
        notes = self._store.notes()
        checkpoint = checkpoints_of(notes, doubtful=True).get(queue)
        if checkpoint is None:
            return checkpoints_of(notes).get(queue)
        is_same_queue = self._recreation_check.has_last_message(queue, checkpoint)
        if not is_same_queue:
            count = self.sum_for_marks(queue, lambda offset, due_ms: True, self._store.remove_marks)
            logger.info(
                "%d waiting messages are from another queue with the name %s; this node sends them", count, queue
            )
        if not is_same_queue or self._store.damage_count:  # a damaged store may lack envelopes that were read
            checkpoint = None
        confirmed_note = {} if checkpoint is None else {note_name(queue): checkpoint.encode()}
        self._store.add([], {DOUBTFUL_PREFIX + note_name(queue): b"", **confirmed_note})
        return checkpoint

    def has_record(self, queue: MessageQueue, accepts: Callable[[int, int], bool]) -> bool:
        """Whether the queue has a waiting record for which ``accepts`` returns true."""
        return bool(self.sum_for_marks(queue, accepts, len))

    def sum_for_marks(
        self,
        queue: MessageQueue,
        accepts: Callable[[int, int], bool],
        step: Callable[[Sequence[tuple[bytes, bytes]]], int],
    ) -> int:
        """Call ``step``, in portions, with the marks of a queue's waiting records. Omits a mark if ``accepts`` returns false
        for its offset and due time. Returns the sum of the results of ``step``.
        """
        space = space_of(queue)
        return sum(
            step([(space, place) for place, (offset, due_ms) in portion if accepts(offset, due_ms)])
            for portion in self._read_places(space, offset_and_due)
        )

    def oldest_offset(self, queue: MessageQueue) -> int | None:
        """Return the offset of a queue's first waiting record; None if no record of the queue waits."""
        return next(
            (offset for portion in self._read_places(space_of(queue), offset_and_due) for _, (offset, _) in portion),
            None,
        )

    def first_due_ms(self) -> int | None:
        """Return the original due time of the waiting record that is due first; None if no record waits."""
        return next(
            (due_ms for portion in self._read_places(IDENTITY, due_ms_of_identity) for _, due_ms in portion), None
        )

    def _read_places(self, space: bytes, parse: Callable[[bytes], T]) -> Iterator[list[tuple[bytes, T]]]:
        """Yield lists of the places in a space (see ``spool.lanes``). Each place comes with the value that ``parse`` returns
        for it. The first list has one place.

        Places that ``parse`` rejects are omitted, so that an invalid mark does not stop other messages.
        """
        start = None  # without a start, the store returns only the first place, which it caches
        while places := self._store.places(space, start, PAGE):
            portion = []
            for place in places:
                try:
                    portion.append((place, parse(place)))
                except struct.error:
                    self._warn_once(space, place)
            yield portion
            start = places[-1] + b"\0"

    def _warn_once(self, space: bytes, place: bytes) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a waiting message has the mark %r in %r, which no release writes; such marks are ignored, and "
                "the messages are sent. Check who may write to %s", place[:100], space[:100], self._store.path,
            )  # fmt: skip
