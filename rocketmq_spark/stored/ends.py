"""Where the queues of some topics end: noted before anything is sent, and compared with what brokers say later.

Nothing is inferred from an end that went back: that broker lost its tail, and a new end may hide what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, UnprovedError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds, TopicRoute
from rocketmq_spark.ports import OffsetReader, RouteReader

AT_LEAST_ONCE = "or run this batch once with option 'deliveryGuarantee' at-least-once, which may repeat rows"

# Of a topic: raises an error unless rows can be sent with the queues alone whose brokers have masters.
Enough = Callable[[TopicRoute, Set[MessageQueue]], None]


@dataclass(frozen=True, slots=True)
class QueueEnds:
    """The end of each queue, and of each broker the address of its master."""

    queues: Mapping[MessageQueue, int]
    masters: Mapping[str, str]

    @property
    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.queues})

    def of_topics(self, topics: Iterable[str]) -> QueueEnds:
        """Those of some topics."""
        wanted = set(topics)
        return self._only({queue: end for queue, end in self.queues.items() if queue.topic in wanted})

    def with_others(self, other: QueueEnds) -> QueueEnds:
        """These, and those of ``other`` for queues that are not among them."""
        return QueueEnds({**other.queues, **self.queues}, {**other.masters, **self.masters})

    def of_broker(self, name: str, queues: Mapping[MessageQueue, int]) -> QueueEnds:
        """One broker with other ends of some of its queues."""
        return QueueEnds(queues, {name: self.masters[name]})

    def _only(self, queues: Mapping[MessageQueue, int]) -> QueueEnds:
        names = {queue.broker_name for queue in queues}
        return QueueEnds(queues, {name: address for name, address in self.masters.items() if name in names})

    def to_json(self) -> dict[str, Any]:
        topics: dict[str, dict[str, dict[str, int]]] = {}
        for queue, end in sorted(self.queues.items()):
            topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = end
        return {"topics": topics, "brokers": {name: {"master": self.masters[name]} for name in sorted(self.masters)}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> QueueEnds:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what ``to_json`` did not make."""
        queues = {
            MessageQueue(topic, name, int(number)): int(end)
            for topic, brokers in value["topics"].items()
            for name, ends in brokers.items()
            for number, end in ends.items()
        }
        return cls(queues, {name: str(data["master"]) for name, data in value["brokers"].items()})

    def ranges(self, until: Mapping[MessageQueue, int]) -> list[OffsetRange]:
        """From here to later ends, those that are not empty, broker by broker."""
        order = sorted(self.queues, key=lambda queue: (queue.broker_name, queue))
        return [OffsetRange(q, self.queues[q], until[q]) for q in order if self.queues[q] < until[q]]

    def check_bounds(self, bounds: Mapping[MessageQueue, QueueBounds]) -> None:
        """Raises ``UnprovedError`` where the messages behind an end are not all there."""
        for queue, end in sorted(self.queues.items()):
            now = bounds.get(queue)
            if now is None:
                why = "its broker does not report it any more"
            elif now.max_offset < end:
                why = f"it ends at offset {now.max_offset} now, and ended at {end} before"
            elif now.min_offset > end:
                why = f"retention deleted offsets {end} to {now.min_offset}, which may be of this batch"
            else:
                continue
            raise UnprovedError(
                f"what is stored in {queue} cannot be proved: {why}", topic=queue.topic, queue=str(queue),
                remedy=f"Give the topic back what it had, {AT_LEAST_ONCE}",
            )  # fmt: skip


def ends_now(
    routes: RouteReader,
    offsets: OffsetReader,
    topics: Sequence[str],
    deadline: Deadline,
    question_s: float,
    enough: Enough = lambda route, led: None,
) -> QueueEnds:
    """The ends of the queues of ``topics`` whose brokers have masters. Raises the error of a broker that does not say, or of
    ``enough`` for queues that do not suffice; tried again until ``deadline``.
    """
    for pause in backoff(0.1, 1.0):
        try:
            within = Deadline.after(question_s).within(deadline.remaining())
            return _ends_now(routes, offsets, topics, within, enough)
        except RocketMQError as e:
            if not e.retriable or deadline.expired:
                raise
        deadline.pause(pause)
    raise AssertionError("pauses have no end")


def _ends_now(
    routes: RouteReader, offsets: OffsetReader, topics: Sequence[str], deadline: Deadline, enough: Enough
) -> QueueEnds:
    queues: list[MessageQueue] = []
    for topic in topics:
        route = routes.get(topic, 0.0, deadline)
        named = {*route.readable(), *route.writable()}
        # Tasks send to brokers with a master only. Where another copy answers for it, that one is gone when the master is back.
        led = {queue for queue in named if (data := route.brokers.get(queue.broker_name)) and data.own_master}
        if not led:
            raise BrokerNotFound("no broker of the topic has a master of its own now", topic=topic)
        enough(route, led)
        queues += led
    names = sorted({queue.broker_name for queue in queues})
    masters = {name: routes.address(name) for name in names}
    bounds = offsets.bounds(queues, deadline)
    lacking = [queue for queue in queues if queue not in bounds]
    if lacking:
        raise UnprovedError(
            f"broker {lacking[0].broker_name} reports no end of {lacking[0]}",
            topic=lacking[0].topic,
            remedy="Give the topic as many queues for reading as for writing",
        )
    return QueueEnds({queue: bounds[queue].max_offset for queue in sorted(queues)}, masters)
