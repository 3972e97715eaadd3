"""Where the queues of some topics end: noted before anything is sent, and compared with what brokers say later.

Nothing is inferred from an end that went back: that broker lost its tail, and a new end may hide what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rocketmq_spark.base.clock import Deadline, backoff, utc_text
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, UnprovedError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds, TopicRoute
from rocketmq_spark.ports import OffsetReader, RouteReader

AT_LEAST_ONCE = "or run this batch once with option 'deliveryGuarantee' at-least-once, which may repeat rows"

# Of a topic: raises an error unless rows can be sent with the queues alone whose brokers have masters.
Enough = Callable[[TopicRoute, Set[MessageQueue]], None]


@dataclass(frozen=True, slots=True)
class QueueEnds:
    """The end of each queue, and of each broker the address of its master.

    ``stored_ms`` is when the last message of a queue was stored, 0 where it was not kept any more: by that one a queue differs
    from another of its name, whose topic was made again. Queues of which that is not known are not in it.
    """

    queues: Mapping[MessageQueue, int]
    masters: Mapping[str, str]
    stored_ms: Mapping[MessageQueue, int] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.queues})

    def of_topics(self, topics: Iterable[str]) -> QueueEnds:
        """Those of some topics."""
        wanted = set(topics)
        return self.of_queues(queue for queue in self.queues if queue.topic in wanted)

    def with_others(self, other: QueueEnds) -> QueueEnds:
        """These, and those of ``other`` for queues that are not among them."""
        times = {queue: at for queue, at in other.stored_ms.items() if queue not in self.queues}
        return QueueEnds(
            {**other.queues, **self.queues}, {**other.masters, **self.masters}, {**times, **self.stored_ms}
        )

    def of_broker(self, name: str, queues: Mapping[MessageQueue, int]) -> QueueEnds:
        """One broker with other ends of some of its queues."""
        return QueueEnds(queues, {name: self.masters[name]})

    def of_queues(self, queues: Iterable[MessageQueue]) -> QueueEnds:
        """Those of some queues, as far as they are among them."""
        wanted = {queue for queue in queues if queue in self.queues}
        names = {queue.broker_name for queue in wanted}
        return QueueEnds(
            {queue: end for queue, end in self.queues.items() if queue in wanted},
            {name: address for name, address in self.masters.items() if name in names},
            {queue: at for queue, at in self.stored_ms.items() if queue in wanted},
        )

    def to_json(self) -> dict[str, Any]:
        brokers = {name: {"master": self.masters[name]} for name in sorted(self.masters)}
        return {"topics": _nested(self.queues), "brokers": brokers, "stored": _nested(self.stored_ms)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> QueueEnds:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what ``to_json`` did not make."""
        masters = {name: str(data["master"]) for name, data in value["brokers"].items()}
        return cls(_by_queue(value["topics"]), masters, _by_queue(value.get("stored", {})))

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
            raise _unproved(queue, why)

    @property
    def lasts(self) -> dict[MessageQueue, int]:
        """The last message of each queue of which it is known when it was stored, or that it was not kept."""
        return {queue: self.queues[queue] - 1 for queue in sorted(self.stored_ms)}

    def check_lasts(self, now: Mapping[MessageQueue, int]) -> None:
        """Raises ``UnprovedError`` where the message before an end is another one, by when these were stored. One that retention
        has deleted by now says nothing.
        """
        for queue, stored_ms in sorted(now.items()):
            before = self.stored_ms.get(queue, stored_ms)
            if before == stored_ms:
                continue
            there = f"stored at {utc_text(before)}" if before else "not kept any more"
            raise _unproved(
                queue,
                f"the message before offset {self.queues[queue]} was {there}, and now there is one stored at "
                f"{utc_text(stored_ms)}: the topic was made again, or its broker lost what it had",
            )


def _unproved(queue: MessageQueue, why: str) -> UnprovedError:
    return UnprovedError(
        f"what is stored in {queue} cannot be proved: {why}", topic=queue.topic, queue=str(queue),
        remedy=f"Give the topic back what it had, {AT_LEAST_ONCE}",
    )  # fmt: skip


def _nested(numbers: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """By topic, broker and number."""
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, number in sorted(numbers.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = number
    return topics


def _by_queue(topics: Mapping[str, Any]) -> dict[MessageQueue, int]:
    return {
        MessageQueue(topic, name, int(number)): int(value)
        for topic, brokers in topics.items()
        for name, values in brokers.items()
        for number, value in values.items()
    }


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
    return QueueEnds({queue: bounds[queue].max_offset for queue in sorted(queues)}, masters, last_times(bounds))


def last_times(bounds: Mapping[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    """When the last message of each queue was stored, for ``QueueEnds``."""
    return {
        queue: max(0, each.last_update_ms)
        for queue, each in sorted(bounds.items())
        if each.max_offset > 0 and (each.last_update_ms > 0 or each.min_offset == each.max_offset)
    }
