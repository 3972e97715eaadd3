"""What exists at a moment, as far as name servers and brokers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocketmq_spark.model import MessageQueue, QueueBounds

Bounds = Mapping[MessageQueue, QueueBounds]


@dataclass(frozen=True, slots=True)
class View:
    """The queues of a moment, topics that are known to be deleted, and brokers that only have slaves now.

    ``forgotten`` are topics with the brokers that do not know them any more, although others do.

    A slave may lack what its master has: its bounds say what can be read there, and nothing of what is lost.
    """

    bounds: Bounds = field(default_factory=dict)
    deleted: frozenset[str] = frozenset()
    forgotten: frozenset[tuple[str, str]] = frozenset()
    orphans: frozenset[str] = frozenset()

    def lacks(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic was deleted, everywhere or on its broker."""
        return queue.topic in self.deleted or (queue.topic, queue.broker_name) in self.forgotten

    def ends(self) -> dict[MessageQueue, int]:
        return {queue: bounds.max_offset for queue, bounds in self.bounds.items()}

    def of_masters(self) -> Bounds:
        """The bounds that masters tell. Where only slaves live nobody can be asked whether a topic was made again."""
        return {queue: bounds for queue, bounds in self.bounds.items() if queue.broker_name not in self.orphans}
