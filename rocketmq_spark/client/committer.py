"""The ``OffsetCommitter`` port over remoting: a group's offsets on its brokers, and the group itself where it is missing."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.client.admin import Admin
from rocketmq_spark.client.broker import Brokers
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import RETRY_PREFIX
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue


class RemotingCommitter:
    """Implements ``ports.OffsetCommitter``."""

    def __init__(self, brokers: Brokers, admin: Admin) -> None:
        self._brokers = brokers
        self._admin = admin

    def commit_each(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        return self._brokers.commit_each(group, offsets, deadline, grace_s)

    def members(self, group: str, broker_name: str, deadline: Deadline) -> list[str]:
        return self._brokers.members(group, broker_name, deadline)

    def create_group(self, group: str) -> None:
        self._admin.create_group(group)

    def create_retry_topic(self, group: str, timeout_s: float) -> None:
        self._admin.create_topic(RETRY_PREFIX + group, 1, timeout_s=timeout_s)
