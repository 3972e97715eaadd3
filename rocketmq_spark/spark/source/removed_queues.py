"""Finds queues that can no longer be read, because an operator reduced the number of queues of the topic.

The query drops these queues, and reports their unread messages as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, TopicRoute
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source import subscription
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.recreated_topics import TopicBroker, topic_broker

# How long an answer of a broker is valid. After this time, a removed queue may have more messages, or may have become readable.
_ANSWER_VALID_S = 1.0


class _Answer(NamedTuple):
    """The answer of a broker about ``queues`` of a topic. The answer is valid only for the route and the connection of its
    request.
    """

    valid_until_s: float = 0.0
    route_and_connection: object = None
    queues: frozenset[MessageQueue] = frozenset()
    ends: Mapping[MessageQueue, int] = MappingProxyType({})


class RemovedQueues:
    """Asks brokers for the ends of removed queues, at most once a second. ``note_error`` is called with each error."""

    def __init__(self, timeout_s: float, note_error: Callable[[RocketMQError], None], clock: Clock) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._note_error = note_error
        self._answers: dict[TopicBroker, _Answer] = {}
        self._next_retry_s_by_broker: dict[str, float] = {}

    def ends(
        self,
        offset_reader: OffsetReader,
        queues: Iterable[MessageQueue],
        view: QueuesView,
        routes: Mapping[str, TopicRoute],
    ) -> dict[MessageQueue, int]:
        """Return those of ``queues`` that clients can no longer read from their broker, with the end that the broker reports.

        A name server may have an old route that lacks new queues, so the broker itself is asked, unless it is unavailable. If a
        request fails, the next request to this broker is sent after a pause, which is five times as long as the failed request
        took.
        """
        unavailable_brokers = view.timed_out_brokers | view.brokers_without_master
        candidates: dict[TopicBroker, set[MessageQueue]] = {}
        for queue in queues:
            is_skipped = queue in view.bounds or queue.broker_name in unavailable_brokers
            if not is_skipped and subscription.is_removed_queue(routes.get(queue.topic), queue):
                candidates.setdefault(topic_broker(queue), set()).add(queue)
        removed_ends: dict[MessageQueue, int] = {}
        for pair, candidates_of_pair in sorted(candidates.items()):
            ends = self._ends_at_broker(offset_reader, pair, candidates_of_pair, routes[pair[0]])
            removed_ends.update({queue: ends[queue] for queue in candidates_of_pair if queue in ends})
        return removed_ends

    def _ends_at_broker(
        self, offset_reader: OffsetReader, pair: TopicBroker, queues: set[MessageQueue], route: TopicRoute
    ) -> Mapping[MessageQueue, int]:
        route_and_connection, now_s = (route, offset_reader.connection(pair[1])), self._clock.now()
        answer = self._answers.get(pair, _Answer())
        if (
            answer.route_and_connection == route_and_connection
            and queues <= answer.queues
            and now_s < answer.valid_until_s
        ):
            return answer.ends
        if now_s < self._next_retry_s_by_broker.get(pair[1], 0.0):
            return {}
        queues_to_ask = frozenset(queues) | (
            answer.queues if answer.route_and_connection == route_and_connection else frozenset()
        )
        try:
            ends = self._fetch_ends(offset_reader, *pair, sorted(queues_to_ask))
        except RocketMQError as e:
            self._next_retry_s_by_broker[pair[1]] = self._clock.now() + 5 * (self._clock.now() - now_s)
            self._note_error(e)
            return {}
        self._answers[pair] = _Answer(self._clock.now() + _ANSWER_VALID_S, route_and_connection, queues_to_ask, ends)
        return ends

    def _fetch_ends(
        self, offset_reader: OffsetReader, topic: str, broker_name: str, queues: list[MessageQueue]
    ) -> dict[MessageQueue, int]:
        deadline = Deadline.after(self._timeout_s)
        read_queue_count = offset_reader.read_queue_count(topic, broker_name, deadline) or 0
        removed_queues = [queue for queue in queues if queue.queue_id >= read_queue_count]
        return offset_reader.max_offsets(removed_queues, deadline) if removed_queues else {}
