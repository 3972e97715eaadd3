"""Consistent hashing of queues to consumers: a consumer that leaves moves only its own queues.

Mirrors ``ConsistentHashRouter`` and ``AllocateMessageQueueConsistentHash``, so that Python and Java members of one
group agree.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from rocketmq_spark.model import MessageQueue


def md5_hash(key: str) -> int:
    """The first four bytes of the key's MD5 as an unsigned number."""
    digest = hashlib.md5(key.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class Ring:
    """Consumers on a ring, each at several places; a key belongs to the first place at or after its hash."""

    def __init__(self, consumers: Sequence[str], virtual_nodes: int, hash_of: Callable[[str], int]) -> None:
        self.hash_of = hash_of
        ring: dict[int, str] = {}
        times = Counter(consumers)
        for consumer in consumers:
            # A consumer that is listed twice continues its numbering, and a later place takes over an equal hash.
            placed = sum(owner == consumer for owner in ring.values()) if times[consumer] > 1 else 0
            for k in range(placed, placed + virtual_nodes):
                ring[hash_of(f"{consumer}-{k}")] = consumer
        self.places = sorted(ring)
        self.owners = [ring[place] for place in self.places]

    def owner(self, key: str) -> str | None:
        """The consumer of ``key``; None on an empty ring."""
        if not self.places:
            return None
        return self.owners[bisect_left(self.places, self.hash_of(key)) % len(self.places)]


def queue_key(queue: MessageQueue) -> str:
    """The text of a queue that is hashed: what ``MessageQueue.toString`` prints in Java."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
