"""What all reads with the same options have in common, and how one of them is opened: replica, requests, reader."""

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
from rocketmq_spark.remoting.pool import Dialling
from rocketmq_spark.wire import rpc

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Puller:
    """Opens reads."""

    source: PullSource
    dialling: Dialling
    group: str
    settings: PullSettings
    read_from: str = "master"

    def _deadline(self) -> Deadline:
        """No question takes longer than the read may wait for messages."""
        return Deadline.after(self.settings.read_deadline_s)

    def compacted(self, queue: MessageQueue) -> bool:
        """Whether offsets without a message are right in a queue."""
        return self.source.compacted(queue, self._deadline())

    def batched(self, queue: MessageQueue) -> bool:
        """Whether brokers know nothing of a queue's single messages. While that is unknown, it may be so: a read waits longer
        for its broker than this question does.
        """
        try:
            return self.source.batched(queue, self._deadline())
        except RocketMQError as e:
            if not e.retriable:
                raise
            logger.info("cannot determine the type of the topic of %s now: %s", queue, e)
            return True

    def at_brokers(self, queue: MessageQueue, filtered: Filter) -> Filter:
        """What brokers are to filter a queue by; what they cannot is left to who decodes, which knows tags only.

        So while the type of the topic is unknown, the expression is sent all the same. Raises ``OptionError`` for one that
        is known to be of a batch topic.
        """
        if not filtered or filtered.kind == NO_FILTER.kind:
            return NO_FILTER if filtered and self.batched(queue) else filtered
        try:
            batched = self.source.batched(queue, self._deadline())
        except RocketMQError as e:
            if not e.retriable:
                raise
            return filtered
        if batched:
            raise batch_topic_filter_error(filtered, queue.topic)
        return filtered

    def reader(
        self,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        filtered: Filter = NO_FILTER,
        known: str | None = None,
        recreated: RecreatedTopics | None = None,
    ) -> RangeReader:
        """Of ranges of one broker, first from the address that the plan knew."""
        replica = self.replica(ranges[0].queue, known)
        made = {queue: self.template(queue, filtered) for queue in {r.queue for r in ranges}}
        templates = [made[r.queue] for r in ranges]
        settings = replace(self.settings, filtered=bool(filtered))
        return RangeReader(ranges, replica, templates, settings, on_loss, on_hint=replica.hint, recreated=recreated)

    def replica(self, queue: MessageQueue, known: str | None = None) -> Replica:
        # What is under way, what waits behind it, and a quarter more: ``RangeReader`` and ``BulkStream.turn``.
        spare = 3 * self.settings.max_bytes_in_flight
        return Replica(self.source, self.dialling, queue.broker_name, queue.topic, self.read_from, known, spare)

    def template(self, queue: MessageQueue, filtered: Filter = NO_FILTER) -> PullTemplate:
        """Pulls of one queue that leave nothing behind on the broker."""
        pull = rpc.PULL_MESSAGE.request(
            consumerGroup=self.source.on_wire(self.group),
            topic=self.source.on_wire(queue.topic),
            queueId=queue.queue_id,
            queueOffset=0,
            maxMsgNums=1,
            subscription=filtered.expression,
            expressionType=filtered.kind,
            bname=queue.broker_name,
            **rpc.FLEETING,
        )
        return PullTemplate(pull, self._keys if self.source.keys() else None)

    def _keys(self) -> Keys:
        keys = self.source.keys()
        assert keys is not None
        return keys


def batch_topic_filter_error(sql: Filter, topic: str) -> OptionError:
    """The error for an expression about messages that brokers store many at a time."""
    return OptionError(
        f"option 'sql' is {sql.expression!r}, but {topic} is a batch topic, or a compaction topic, which brokers do not filter",
        remedy="Filter with option 'tags', or in Spark",
    )
