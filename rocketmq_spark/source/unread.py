"""Queues that their living broker does not read any more: the topic was narrowed, and what they still hold is given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, TopicRoute
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.source import filters
from rocketmq_spark.source.decisions import QueuesView
from rocketmq_spark.source.recreation import Share, share

# For how long an answer holds: a queue that is not read may be written to, or be read again.
_FRESH_S = 1.0


class _Told(NamedTuple):
    """What a broker said of a topic: until when that holds, by which route and connection, about which queues."""

    until: float = 0.0
    by: object = None
    about: frozenset[MessageQueue] = frozenset()
    ends: Mapping[MessageQueue, int] = MappingProxyType({})


class Unread:
    """Asks brokers where such queues end, at most once a second. ``waits`` is told of what fails."""

    def __init__(
        self, reader: Callable[[], OffsetReader], timeout_s: float, waits: Callable[[RocketMQError], None]
    ) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._waits = waits
        self._told: dict[Share, _Told] = {}
        self._due: dict[str, float] = {}

    def ends(
        self, queues: Iterable[MessageQueue], view: QueuesView, routes: Mapping[str, TopicRoute]
    ) -> dict[MessageQueue, int]:
        """Those of ``queues`` that their broker does not read, with the end that it still knows.

        The route of a name server that lags behind may lack queues that are read: the broker is asked itself. One that is
        away is not asked, and one that hangs costs a sixth of the time at most.
        """
        away = view.silent | view.orphans
        gone: dict[Share, set[MessageQueue]] = {}
        for queue in queues:
            present = queue in view.bounds or queue.broker_name in away
            if not present and filters.is_hidden(routes.get(queue.topic), queue):
                gone.setdefault(share(queue), set()).add(queue)
        found: dict[MessageQueue, int] = {}
        for one, mine in sorted(gone.items()):
            ends = self._of(one, mine, routes[one[0]])
            found.update({queue: ends[queue] for queue in mine if queue in ends})
        return found

    def _of(self, one: Share, queues: set[MessageQueue], route: TopicRoute) -> Mapping[MessageQueue, int]:
        by, now = (route, self._reader().connection(one[1])), time.monotonic()
        told = self._told.get(one, _Told())
        if told.by == by and queues <= told.about and now < told.until:
            return told.ends
        if now < self._due.get(one[1], 0.0):
            return {}
        about = frozenset(queues) | (told.about if told.by == by else frozenset())
        try:
            ends = self._ask(*one, sorted(about))
        except RocketMQError as e:
            self._due[one[1]] = time.monotonic() + 5 * (time.monotonic() - now)
            self._waits(e)
            return {}
        self._told[one] = _Told(time.monotonic() + _FRESH_S, by, about, ends)
        return ends

    def _ask(self, topic: str, broker_name: str, queues: list[MessageQueue]) -> dict[MessageQueue, int]:
        reader, deadline = self._reader(), Deadline.after(self._timeout_s)
        read = reader.read_queues(topic, broker_name, deadline) or 0
        unread = [queue for queue in queues if queue.queue_id >= read]
        return reader.max_offsets(unread, deadline) if unread else {}
