"""What all reads with the same options have in common, and how one of them is opened: replica, requests, reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.ports import PullSource
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.reader import RangeReader
from rocketmq_spark.pull.replica import Replica
from rocketmq_spark.pull.verdict import OnLoss
from rocketmq_spark.remoting.bulk import Keys, PullTemplate
from rocketmq_spark.remoting.pool import Dialling
from rocketmq_spark.wire import rpc


@dataclass(frozen=True, slots=True)
class Puller:
    """Opens reads."""

    source: PullSource
    dialling: Dialling
    group: str
    settings: PullSettings
    read_from: str = "master"

    def compacted(self, queue: MessageQueue) -> bool:
        """Whether offsets without a message are right in a queue."""
        return self.source.compacted(queue)

    def batched(self, queue: MessageQueue) -> bool:
        """Whether brokers know nothing of a queue's single messages."""
        return self.source.batched(queue)

    def reader(
        self,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        filtered: Filter = NO_FILTER,
        known: str | None = None,
    ) -> RangeReader:
        """Of ranges of one broker, first from the address that the plan knew."""
        replica = self.replica(ranges[0].queue, known)
        templates = [self.template(r.queue, filtered) for r in ranges]
        settings = replace(self.settings, filtered=bool(filtered))
        return RangeReader(ranges, replica, templates, settings, on_loss, on_hint=replica.hint)

    def replica(self, queue: MessageQueue, known: str | None = None) -> Replica:
        return Replica(self.source, self.dialling, queue.broker_name, queue.topic, self.read_from, known)

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
