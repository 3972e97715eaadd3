"""The long polls of group members: chooses the replica for each pull, sends the pull, and interprets the answer.

Mirrors ``PullAPIWrapper`` and ``MQClientAPIImpl.processPullResponse``. Never blocks the calling thread: connections are opened on
other threads.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import OFFSET_RESET, PullSysFlag, Response
from rocketmq_spark.base.threads import Failure, KeyedExecutor, capture, without_blocking
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.client.topic_attributes import TopicAttributesCache, is_batched, is_compacted
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, ConnectionLost, DecodeError, OptionError, RocketMQError
from rocketmq_spark.model import (
    MASTER_ID,
    NO_FILTER,
    BrokerData,
    MessageQueue,
    PullAnswer,
    PullRequest,
    PullStatus,
)
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import first_portion
from rocketmq_spark.wire.names import Scope

logger = logging.getLogger(__name__)


OnPulled = Callable[[PullAnswer | RocketMQError], None]

_STATUS_BY_CODE = {
    Response.SUCCESS: PullStatus.FOUND,
    Response.PULL_NOT_FOUND: PullStatus.NO_NEW_MSG,
    Response.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MSG,
    Response.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}


class LongPolls:
    """Sends long polls over the connections of a client."""

    def __init__(self, rpc_client: RpcClient, routes: Routes, attributes: TopicAttributesCache) -> None:
        self._rpc_client = rpc_client
        self._routes = routes
        self._attributes = attributes
        self._executor = KeyedExecutor()

    def pull(self, request: PullRequest, deadline: Deadline, done: OnPulled) -> None:
        broker_name = request.queue.broker_name
        try:
            data = self._routes.broker(broker_name)
            if data is None or not data.addresses:
                raise BrokerNotFound("no address of the queue's broker is known", queue=str(request.queue))
            broker_id, address = replica(data, request.broker_id)
            send = functools.partial(self._send, address, broker_id == MASTER_ID, deadline, done)
            knows_attributes = not request.filter or self._attributes.is_cached(request.queue)
            if (
                knows_attributes
                and self._rpc_client.pool.is_connected(address)
                and not self._executor.has_work(address)
            ):
                with without_blocking():  # this thread also sends other pulls, so it must not wait for this socket
                    send(request)
            else:
                # This pull is sent later, so it must not commit an offset. Before it is sent, a reset or the next owner of the
                # queue may commit another offset, which this commit would overwrite.
                self._executor.run(address, functools.partial(send, replace(request, commit_offset=None)))
        except RocketMQError as e:
            done(e)
        except RuntimeError as e:
            done(ConnectionLost(f"no connection can be made: {e}", queue=str(request.queue)))

    def create_group_by_pull(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> list[RocketMQError]:
        """Send a pull of the group to each broker, because brokers with ``autoCreateSubscriptionGroup`` create a group at its
        first pull. Returns the errors.

        The pulls have a filter, because a Proxy forwards the pulls of a group without members only if the pulls have a filter.
        """
        requests = []
        for queue in {queue.broker_name: queue for queue in offsets}.values():
            data = self._routes.broker(queue.broker_name)
            if data is not None and data.master is not None:
                request = PullRequest(group, queue, offsets[queue], count=1, suspend_s=0.0, post_filter=True)
                requests.append((data.master, pull_command(request, self._rpc_client, True)))
        answers = self._rpc_client.invoke_each(requests, deadline)
        return [
            answer if isinstance(answer, RocketMQError) else error_from_response(answer, address)
            for (address, _), answer in zip(requests, answers, strict=True)
            if isinstance(answer, RocketMQError) or answer.code not in _STATUS_BY_CODE
        ]

    def _send(self, address: str, is_master: bool, deadline: Deadline, done: OnPulled, request: PullRequest) -> None:
        try:
            broker_request = self._request_for_broker(request, deadline) if request.filter else request
        except RocketMQError as e:
            done(e)
            return
        command = pull_command(broker_request, self._rpc_client, is_master)
        self._rpc_client.invoke_async(
            address, command, deadline, functools.partial(self._on_answer, request, address, done)
        )

    def _request_for_broker(self, request: PullRequest, deadline: Deadline) -> PullRequest:
        """Return the request for the broker. If a pull from a batch topic has tags, the broker may drop whole batches. So for a
        batch topic, the request has no tags, and only this client compares the tags.
        """
        queue, requested_filter = request.queue, request.filter
        try:
            attributes = self._attributes.attributes(queue.topic, queue.broker_name, deadline)
        except AccessDenied:  # a user who may read the topic may not be allowed to get its type
            attributes = None
        is_batch_topic = is_batched(attributes)
        if requested_filter.kind == "TAG":
            return request if is_batch_topic is False else replace(request, filter=NO_FILTER, post_filter=True)
        if is_batch_topic or is_compacted(attributes):
            raise OptionError(
                f"sql is {requested_filter.expression!r}, but {queue.topic} is a batch topic, or a compaction topic: "
                "brokers do not filter their messages",
                topic=queue.topic,
                remedy="Subscribe with tags, or filter in the listener",
            )
        return request

    def _on_answer(self, request: PullRequest, address: str, done: OnPulled, answer: Command | RocketMQError) -> None:
        if isinstance(answer, RocketMQError):
            done(answer)
            return
        result = capture(to_pull_answer, request, answer, address, self._rpc_client.scope)
        if not isinstance(result, Failure):
            done(result)
        elif isinstance(result.error, RocketMQError):
            done(result.error)
        else:  # an unexpected error, such as lack of memory; the caller pulls again
            result.log(logger, "an answer to the pull of %s could not be decoded", request.queue)
            done(DecodeError(f"the answer could not be decoded: {result}", queue=str(request.queue)))


def replica(broker: BrokerData, broker_id: int) -> tuple[int, str]:
    """Return id and address of the replica to pull from, by default replica ``broker_id``.

    If replica ``broker_id`` is a slave that is gone, returns the replica with the next id. If that replica does not exist
    either, returns the replica with the lowest id.

    Mirrors ``MQClientInstance.findBrokerAddressInSubscribe``.
    """
    addresses = broker.addresses
    for candidate_id in (broker_id, broker_id + 1) if broker_id != MASTER_ID else (broker_id,):
        if candidate_id in addresses:
            return candidate_id, addresses[candidate_id]
    return min(addresses.items())


def pull_command(request: PullRequest, rpc_client: RpcClient, is_to_master: bool) -> Command:
    """Return the command of a pull. The command has a committed offset only for a master, because slaves do not store this
    offset.
    """
    has_commit = is_to_master and request.commit_offset is not None
    sys_flag = PullSysFlag(0)
    sys_flag |= PullSysFlag.COMMIT_OFFSET if has_commit else 0
    sys_flag |= PullSysFlag.SUSPEND if request.suspend_s else 0
    sys_flag |= PullSysFlag.SUBSCRIPTION if request.post_filter else 0
    fields: dict[str, Any] = {
        "consumerGroup": rpc_client.name_on_wire(request.group),
        "topic": rpc_client.name_on_wire(request.queue.topic),
        "queueId": request.queue.queue_id,
        "queueOffset": request.offset,
        "maxMsgNums": request.count,
        "sysFlag": sys_flag,
        "commitOffset": (has_commit and request.commit_offset) or 0,
        "suspendTimeoutMillis": round(1000 * request.suspend_s),
        "subscription": request.filter.expression if request.post_filter else None,
        "subVersion": request.version_ms,
        "expressionType": request.filter.kind,
        "maxMsgBytes": request.max_bytes,
        "bname": request.queue.broker_name,
    }
    return rpc.PULL_MESSAGE.request(**fields)


def to_pull_answer(request: PullRequest, answer: Command, address: str, scope: Scope) -> PullAnswer:
    """Interpret an answer. Raises the error of the code, unless the code is one of the four in ``_STATUS_BY_CODE``."""
    status = _STATUS_BY_CODE.get(Response(answer.code)) if answer.code in _STATUS_BY_CODE else None
    if status is None:
        raise error_from_response(answer, address, request.queue.topic, str(request.queue))
    fields = rpc.PULL_MESSAGE.answer(answer)
    answer_without_messages = PullAnswer(
        status,
        fields["nextBeginOffset"],
        fields["minOffset"],
        fields["maxOffset"],
        broker_id=fields["suggestWhichBrokerId"] or MASTER_ID,
        is_reset=status is PullStatus.OFFSET_ILLEGAL and answer.remark == OFFSET_RESET,
    )
    if status is not PullStatus.FOUND:
        return answer_without_messages

    read_messages = functools.partial(
        requested_messages, request, answer.body, scope, answer_without_messages.next_offset
    )
    if not request.decoded:
        return replace(answer_without_messages, stored_messages=answer.body, read_messages=read_messages)
    messages, first_remaining_message = first_portion(read_messages())
    return replace(
        answer_without_messages,
        messages=messages,
        next_offset=answer_without_messages.next_offset
        if first_remaining_message is None
        else first_remaining_message.queue_offset,
    )
