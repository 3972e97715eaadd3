"""The ``OffsetCommitter`` port over remoting: commits a group's offsets on brokers, and creates the group on brokers that do not
have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX, Response
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.broker_client import BrokerClient, BrokerCommand, first_queues
from rocketmq_spark.client.long_polls import LongPolls
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CallTimeout,
    GroupNotFound,
    NotReadable,
    NotSupported,
    RocketMQError,
    TopicNotFound,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import bodies, rpc


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """Commits offsets of a group, at the replicas that ``read_from`` selects. ``grace_s`` is as in ``OffsetReader.bounds``.

    Calling the object commits offsets, and returns the errors by queue.
    """

    broker_client: BrokerClient
    group: str
    deadline: Deadline
    grace_s: float | None = None
    read_from: str = "master"

    def __call__(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit the first queue of each topic and broker, then the other queues.

        A broker creates a table for the group and the topic at the first commit. If two commits create the table at the same
        time, one commit is lost (ConsumerOffsetManager.commitOffset in 5.5.0). If the commit of a first queue fails, the other
        queues of the same topic and broker get the same error. The commits of the first queues get half of the time. So if a
        broker hangs, half of the time is left for the other queues.
        """
        first_queue_by_key = first_queues(offsets)
        half_deadline = self.deadline.within(self.deadline.remaining() / 2)
        errors = self._store({queue: offsets[queue] for queue in first_queue_by_key.values()}, half_deadline)
        remaining_offsets = {}
        for queue in sorted(offsets.keys() - first_queue_by_key.values()):
            first_queue = first_queue_by_key[queue.broker_name, queue.topic]
            if first_queue in errors:
                errors[queue] = errors[first_queue]
            else:
                remaining_offsets[queue] = offsets[queue]
        return {**errors, **self._store(remaining_offsets, self.deadline)}

    def _store(self, offsets: Mapping[MessageQueue, int], deadline: Deadline) -> dict[MessageQueue, RocketMQError]:
        group = self.broker_client.rpc_client.name_on_wire(self.group)
        commands = [
            self.broker_client.queue_command(
                rpc.UPDATE_CONSUMER_OFFSET, queue, consumerGroup=group, commitOffset=offset
            )
            for queue, offset in offsets.items()
        ]
        answers = self.broker_client.request_with_grace(commands, deadline, self.read_from, self.grace_s)
        errors: dict[MessageQueue, RocketMQError] = {}
        for queue, answer in zip(offsets, answers, strict=True):
            if answer is None:
                errors[queue] = CallTimeout("the broker has not answered yet", queue=str(queue))
            elif isinstance(answer, RocketMQError):
                errors[queue] = answer
        return errors


class RemotingCommitter:
    """Implements ``ports.OffsetCommitter``."""

    def __init__(self, broker_client: BrokerClient, admin: BaseAdmin, polls: LongPolls) -> None:
        self._broker_client = broker_client
        self._admin = admin
        self._polls = polls

    def commit_each(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        return OffsetCommit(self._broker_client, group, deadline, grace_s)(offsets)

    def members(self, group: str, broker_name: str, deadline: Deadline) -> list[str]:
        """See ``ports.OffsetCommitter``."""
        command = rpc.GET_CONSUMER_LIST_BY_GROUP.request(
            consumerGroup=self._broker_client.rpc_client.name_on_wire(group), bname=broker_name
        )
        # A broker without members of the group answers with an error.
        accepted_codes = Response.SUCCESS, Response.SYSTEM_ERROR
        (answer,) = self._broker_client.request_all([BrokerCommand(broker_name, command, "")], deadline, accepted_codes)
        return bodies.consumer_ids(answer.body) if answer.code == Response.SUCCESS else []

    def lists_all_members(self, broker_name: str) -> bool:
        connection = self._broker_client.connection(broker_name)
        return connection is None or not self._broker_client.rpc_client.pool.is_proxy(connection[0])

    def create_group(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        try:
            self._admin.create_group(group, sorted({queue.broker_name for queue in offsets}))
        except AccessDenied as e:
            raise _not_created_error(group, e, "this user may not create the group") from e
        except NotSupported as e:
            for error in self._polls.create_group_by_pull(
                group, offsets, Deadline.after(self._broker_client.rpc_client.request_timeout_s)
            ):
                if isinstance(error, GroupNotFound):
                    problem = (
                        "a Proxy does not let it be created, and the broker behind the Proxy creates no groups "
                        "(autoCreateSubscriptionGroup=false)"
                    )
                    raise _not_created_error(group, error, problem) from e
                if error.retriable and not isinstance(error, NotReadable | TopicNotFound):
                    # While the group is new, brokers may answer with a retriable error.
                    raise error from e

    def create_retry_topic(self, group: str, timeout_s: float) -> None:
        self._admin.create_topic(RETRY_PREFIX + group, 1, timeout_s=timeout_s)


def _not_created_error(group: str, error: BrokerError, problem: str) -> GroupNotFound:
    return GroupNotFound(
        f"the broker does not know group {group!r}, and {problem}",
        error.addr,
        error.broker_code,
        remark=error.remark,
        remedy=f"Let an administrator create it: mqadmin updateSubGroup -g {group} -c <cluster>",
    )
