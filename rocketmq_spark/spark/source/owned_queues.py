"""Selects the queues that a source reads: the queues of its environment that the allocation strategy allocates to a partition."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.spark.source import partitioning
from rocketmq_spark.spark.source.offsets import queues_text

logger = logging.getLogger(__name__)


class OwnedQueues:
    """Selects the queues to read. An environment keeps its queues while their brokers are unavailable."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._environment = environment_of(options)
        # The queues that the environment owned in any poll of this run, or that the checkpoint records for it.
        self._owned_queues: frozenset[MessageQueue] = frozenset()
        # The queues that the strategy allocated to no partition at the last poll. A warning is logged when the set of these
        # queues changes.
        self._unallocated_queues: frozenset[MessageQueue] = frozenset()

    @property
    def environment_numbers(self) -> dict[MessageQueue, int]:
        """The queues that the environment owns, each with the number of the environment. Empty unless the environment is given by
        its number alone.
        """
        environment = self._environment
        if environment is None or not environment.is_by_position:
            return {}
        return dict.fromkeys(self._owned_queues, environment.number)

    def select(
        self, queues: list[MessageQueue], possibly_empty_topics: Container[str], all_queues: list[MessageQueue] | None
    ) -> list[MessageQueue]:
        """Return those of ``queues`` that the source reads. ``partitioning.allocated_queues`` describes the other arguments."""
        queues_to_read, unallocated_queues = partitioning.allocated_queues(
            self._options, queues, self._owned_queues, possibly_empty_topics, all_queues
        )
        if self._environment is not None:
            self._owned_queues = self._owned_queues.union(queues_to_read)
        if unallocated_queues != self._unallocated_queues and unallocated_queues:
            logger.warning(
                "the allocation strategy gives these queues to no partition: %s", queues_text(unallocated_queues)
            )
        self._unallocated_queues = unallocated_queues
        return queues_to_read

    def restore(self, recorded_numbers: Mapping[MessageQueue, int]) -> bool:
        """Take over the queues that offsets record for the number of this environment. Returns whether the queues of this
        environment changed.

        For the topics in ``recorded_numbers``, the recorded queues replace the queues that this run chose before it had the
        offsets of the checkpoint. If brokers were unavailable when the run chose its queues, some of these queues may belong to
        another environment.
        """
        if self._environment is None:
            return False
        topics, number = {queue.topic for queue in recorded_numbers}, self._environment.number
        owned_queues = frozenset(queue for queue in self._owned_queues if queue.topic not in topics)
        owned_queues = owned_queues.union(
            queue for queue, recorded_number in recorded_numbers.items() if recorded_number == number
        )
        has_changed, self._owned_queues = owned_queues != self._owned_queues, owned_queues
        return has_changed

    def forget(self, topic: str) -> None:
        """Forget the queues of a topic that was deleted."""
        self._owned_queues = frozenset(queue for queue in self._owned_queues if queue.topic != topic)
