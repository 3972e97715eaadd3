"""The queues that a source reads of those that exist: the queues of its environment that the allocation strategy allocates."""

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
    """Selects the queues to read. An environment keeps the queues that it owned once, while their brokers are unavailable."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._environment = environment_of(options)
        # The queues that the environment owned at any poll.
        self._kept: frozenset[MessageQueue] = frozenset()
        # The queues that the strategy allocated to no partition at the last poll; a change is logged.
        self._unallocated: frozenset[MessageQueue] = frozenset()

    @property
    def numbers(self) -> dict[MessageQueue, int]:
        """The queues that the environment owns, with its number; empty unless the environment is given by its number alone."""
        environment = self._environment
        if environment is None or not environment.is_by_position:
            return {}
        return dict.fromkeys(self._kept, environment.number)

    def select(
        self, queues: list[MessageQueue], topics_without_queues: Container[str], all_queues: list[MessageQueue] | None
    ) -> list[MessageQueue]:
        """Return those of ``queues`` that the source reads; see ``partitioning.allocated_queues`` for the other arguments."""
        allocated, unallocated = partitioning.allocated_queues(
            self._options, queues, self._kept, topics_without_queues, all_queues
        )
        if self._environment is not None:
            self._kept = self._kept.union(allocated)
        if unallocated != self._unallocated and unallocated:
            logger.warning("the allocation strategy gives these queues to no partition: %s", queues_text(unallocated))
        self._unallocated = unallocated
        return allocated

    def restore(self, recorded: Mapping[MessageQueue, int]) -> bool:
        """Take over the queues that offsets record with the number of their environment. Returns whether the queues changed.

        The record overrides queues that this run counted before it had offsets: if brokers were unavailable then, these queues
        may belong to another environment.
        """
        if self._environment is None:
            return False
        topics, number = {queue.topic for queue in recorded}, self._environment.number
        kept = frozenset(queue for queue in self._kept if queue.topic not in topics)
        kept = kept.union(queue for queue, recorded_number in recorded.items() if recorded_number == number)
        has_changed, self._kept = kept != self._kept, kept
        return has_changed

    def forget(self, topic: str) -> None:
        """Forget the queues of a topic that was deleted."""
        self._kept = frozenset(queue for queue in self._kept if queue.topic != topic)
