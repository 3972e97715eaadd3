"""Groups that exist once they are created, and their offsets."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue
from tests.fakes.ports import Fake


def offset_committer(committed: dict[tuple[str, MessageQueue], int] | None = None) -> Fake:
    """Return an ``OffsetCommitter`` that stores offsets in ``committed``, by group and queue."""
    stored = {} if committed is None else committed
    groups: set[str] = set()

    def commit_each(
        group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        if group not in groups:
            return {queue: GroupNotFound("no group") for queue in offsets}
        stored.update({(group, queue): offset for queue, offset in offsets.items()})
        return {}

    return Fake(
        ports.OffsetCommitter,
        commit_each=commit_each,
        members=lambda group, broker_name, deadline: [],
        lists_all_members=lambda broker_name: True,
        create_group=lambda group, offsets: groups.add(group),
        create_retry_topic=lambda group, timeout_s: None,
    )
