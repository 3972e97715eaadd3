"""Groups that exist once they are created."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue
from tests.fakes.ports import Fake


def offset_committer() -> Fake:
    groups: list[str] = []

    def commit_each(
        group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        return {} if group in groups else dict.fromkeys(offsets, GroupNotFound("no group"))

    return Fake(
        ports.OffsetCommitter,
        commit_each=commit_each,
        members=lambda group, broker, deadline: [],
        lists_all_members=lambda broker: True,
        create_group=lambda group, offsets: groups.append(group),
        create_retry_topic=lambda group, timeout_s: None,
    )
