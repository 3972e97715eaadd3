"""Opens reads: the replica, the requests and the reader for ranges of one broker, with options that all reads share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.ports import PullSource
from rocketmq_spark.pull.outcomes import OnLoss
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.pull.replica import Replica
from rocketmq_spark.remoting.bulk import Keys, PullTemplate
from rocketmq_spark.remoting.pool import ConnectOptions
from rocketmq_spark.wire import rpc

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Puller:
    """Opens reads with the same group, settings and replica."""

    source: PullSource
    connect_options: ConnectOptions
    group: str
    settings: PullSettings
    read_from: str = "master"

    def _deadline(self) -> Deadline:
        """The deadline of a request about a topic: the request may take as long as a read may wait for messages."""
        return Deadline.after(self.settings.read_deadline_s)

    def is_compacted(self, queue: MessageQueue) -> bool:
        """Whether the queue belongs to a compaction topic, in which offsets may have no message."""
        return self.source.is_compacted(queue, self._deadline())

    def stores_batches(self, queue: MessageQueue) -> bool:
        """Whether brokers store the queue's messages in batches, and so cannot filter single messages. If the broker cannot
        report the topic's type now, returns True. Then the read starts, and waits longer for the broker than this method does.
        """
        try:
            return self.source.stores_batches(queue, self._deadline())
        except RocketMQError as e:
            if not e.retriable:
                raise
            logger.info("cannot determine the type of the topic of %s now: %s", queue, e)
            return True

    def broker_filter(self, queue: MessageQueue, requested_filter: Filter) -> Filter:
        """Return the filter that brokers apply to a queue. Tags that brokers cannot filter are filtered after decoding.

        An SQL expression cannot be applied after decoding, so brokers get it even while the type of the topic is unknown.
        Raises ``OptionError`` for an SQL expression about a batch topic.
        """
        if not requested_filter or requested_filter.kind == NO_FILTER.kind:
            return NO_FILTER if requested_filter and self.stores_batches(queue) else requested_filter
        try:
            is_batch_topic = self.source.stores_batches(queue, self._deadline())
        except RocketMQError as e:
            if not e.retriable:
                raise
            return requested_filter
        if is_batch_topic:
            raise batch_topic_filter_error(requested_filter, queue.topic)
        return requested_filter

    def reader(
        self,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        broker_filter: Filter = NO_FILTER,
        planned_address: str | None = None,
        recreated_topics: RecreatedTopics | None = None,
    ) -> RangeReader:
        """Return a reader of ranges of one broker, which connects first to ``planned_address``."""
        replica = self.replica(ranges[0].queue, planned_address)
        templates_by_queue = {queue: self.template(queue, broker_filter) for queue in {r.queue for r in ranges}}
        templates = [templates_by_queue[r.queue] for r in ranges]
        settings = replace(self.settings, has_filter=bool(broker_filter))
        return RangeReader(
            ranges,
            replica,
            templates,
            settings,
            on_loss,
            on_hint=replica.follow_hint,
            recreated_topics=recreated_topics,
        )

    def replica(self, queue: MessageQueue, planned_address: str | None = None) -> Replica:
        # A stream needs memory for the answers in flight, for answers that wait for an earlier answer, and for compaction. Each
        # of the three needs up to the limit of bytes in flight.
        spare_bytes = 3 * self.settings.max_bytes_in_flight
        return Replica(
            self.source,
            self.connect_options,
            queue.broker_name,
            queue.topic,
            self.read_from,
            planned_address,
            spare_bytes,
        )

    def template(self, queue: MessageQueue, broker_filter: Filter = NO_FILTER) -> PullTemplate:
        """Return the template of pulls of one queue. The pulls commit no offset, and the broker answers them at once."""
        request = rpc.PULL_MESSAGE.request(
            consumerGroup=self.source.name_on_wire(self.group),
            topic=self.source.name_on_wire(queue.topic),
            queueId=queue.queue_id,
            queueOffset=0,
            maxMsgNums=1,
            subscription=broker_filter.expression,
            expressionType=broker_filter.kind,
            bname=queue.broker_name,
            **rpc.IMMEDIATE_PULL,
        )
        return PullTemplate(request, self._signing_keys if self.source.signing_keys() else None)

    def _signing_keys(self) -> Keys:
        keys = self.source.signing_keys()
        assert keys is not None
        return keys


def batch_topic_filter_error(sql_filter: Filter, topic: str) -> OptionError:
    """Return the error for an SQL expression about a topic whose messages brokers store in batches."""
    return OptionError(
        f"option 'sql' is {sql_filter.expression!r}, but {topic} is a batch topic, or a compaction topic, "
        "which brokers do not filter",
        remedy="Filter with option 'tags', or in Spark",
    )
