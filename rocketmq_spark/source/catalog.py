"""What exists now: the queues that a source reads and their bounds, asked as seldom as freshness allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.options import Options
from rocketmq_spark.parsing import EARLIEST, LATEST
from rocketmq_spark.session import Client, client
from rocketmq_spark.source.offsets import Positions

logger = logging.getLogger(__name__)

Bounds = dict[MessageQueue, QueueBounds]

# While nothing new arrives the brokers are asked less and less often, down to four times a second.
_SHORTEST_REST_S = 0.01
_LONGEST_REST_S = 0.25


class Catalog:
    """Queues and bounds of the subscribed topics."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._swept_at = 0.0
        self._rest_s = _SHORTEST_REST_S
        self._bounds: Bounds = {}

    @property
    def client(self) -> Client:
        return client(self._options)

    def queues(self) -> list[MessageQueue]:
        """Readable queues of all topics, sorted. Raises ``RouteNotFound`` naming the nearest topics."""
        return [queue for topic in self._options.subscribe for queue in self._queues_of(topic)]

    def _queues_of(self, topic: str) -> list[MessageQueue]:
        routes = self.client.routes
        try:
            route = routes.get(topic, self._options.route_refresh)
        except RouteNotFound as e:
            raise routes.missing_topic(e) from e
        queues = route.readable()
        if not queues:
            raise RouteNotFound("no queue of the topic may be read: no read permission", topic=topic)
        return queues

    def sweep(self) -> Bounds:
        """Bounds of all queues now, with retries."""

        def ask() -> Bounds:
            return self.client.brokers.bounds(self.queues(), Deadline.after(10 * self._options.request_timeout))

        found = self.client.retry.run(ask)
        self._note(found)
        return found

    def recent(self) -> Bounds:
        """Bounds as of the last sweep when that was a moment ago, else of a new one.

        A running stream outlives brokers: when they do not answer the last bounds stay, and nothing new is planned.
        """
        if time.monotonic() - self._swept_at < self._rest_s:
            return self._bounds
        try:
            found = self.client.brokers.bounds(self.queues(), Deadline.after(self._options.request_timeout))
        except RocketMQError as e:
            if not e.retriable:
                raise
            logger.warning("brokers do not answer, the stream waits: %s", e)
            self._swept_at = time.monotonic()
            self._rest_s = min(2.0, max(_LONGEST_REST_S, self._rest_s * 2))
            return self._bounds
        self._note(found)
        return found

    def _note(self, found: Bounds) -> None:
        quiet = found == self._bounds
        self._rest_s = min(_LONGEST_REST_S, self._rest_s * 2) if quiet else _SHORTEST_REST_S
        self._swept_at = time.monotonic()
        self._bounds = found


def resolve(wanted: str | Positions, bounds: Bounds, option: str) -> dict[MessageQueue, int]:
    """Positions for ``earliest``, ``latest`` or JSON offsets (−2 earliest, −1 latest) within ``bounds``.

    JSON must name every queue and no other; numbers must lie within what the queue has had. A number below the minimum
    stays as it is: what is missing then is data loss, and reported as that.
    """
    if isinstance(wanted, str):
        lowest = wanted == "earliest"
        return {queue: b.min_offset if lowest else b.max_offset for queue, b in bounds.items()}
    _same_queues(wanted, bounds, option)
    found = {}
    for queue, number in wanted.items():
        if number > bounds[queue].max_offset:
            raise OffsetError(
                f"option {option!r}: {queue} is {number}, but the queue ends at {bounds[queue].max_offset}",
                topic=queue.topic,
                remedy="Give an offset up to the end, or -1 for the end",
            )
        marks = {EARLIEST: bounds[queue].min_offset, LATEST: bounds[queue].max_offset}
        found[queue] = marks.get(number, number)
    return found


def _same_queues(wanted: Positions, bounds: Bounds, option: str) -> None:
    def listed(queues: Iterable[MessageQueue]) -> str:
        names = sorted(str(queue) for queue in queues)
        return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

    if missing := bounds.keys() - wanted.keys():
        raise OffsetError(f"option {option!r} must name every queue; it lacks {listed(missing)}")
    if unknown := wanted.keys() - bounds.keys():
        raise OffsetError(f"option {option!r} names queues that do not exist: {listed(unknown)}")
