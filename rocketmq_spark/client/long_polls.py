"""Pulls over remoting: the ``PullSource`` port for reads of offset ranges, and the long polls of group members.

``RemotingPulls`` provides what a read needs besides its pulls: routes, keys, and types of topics. ``LongPolls`` sends the
pulls of group members, chooses the replica for each and interprets the answer. It mirrors ``PullAPIWrapper`` and
``MQClientAPIImpl.processPullResponse``, and never blocks the calling thread: connections are opened on other threads.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rocketmq_spark.base.clock import LONGEST_S, Deadline
from rocketmq_spark.base.codes import OFFSET_RESET, RETRY_PREFIX, PullSysFlag, Response, SysFlag
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.base.threads import Aside, Failure, attempt, never_waiting
from rocketmq_spark.client.broker_client import TopicAttributesCache, is_batched, is_compacted
from rocketmq_spark.client.broker_requests import with_user_names
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, ConnectionLost, DecodeError, OptionError, RocketMQError
from rocketmq_spark.model import (
    MASTER_ID,
    NO_FILTER,
    BrokerData,
    MessageQueue,
    PullAnswer,
    PullRequest,
    PullStatus,
    ReceivedMessage,
    TopicRoute,
)
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Bytes, Command
from rocketmq_spark.wire.messages import DecodeRoom, DecodeSettings, Stored, decode_one, portion, stored_in
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import parse_subscription
from rocketmq_spark.wire.stored_fields import usual_messages

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A topic may be deleted and created again with another type; the offsets of a read are then those of the new topic.
ATTRIBUTES_MAX_AGE_S = 1.0


class RemotingPulls:
    """Implements ``ports.PullSource``."""

    def __init__(self, calls: RpcClient, routes: Routes, kinds: TopicAttributesCache, retry: Retry) -> None:
        self._calls = calls
        self._routes = routes
        self._attributes = kinds
        self._retry = retry

    def on_wire(self, name: str) -> str:
        return self._calls.on_wire(name)

    def keys(self) -> tuple[str, str, str | None] | None:
        if self._calls.credentials is None:
            return None
        keys = self._calls.credentials.current()
        return keys.access_key, keys.secret_key, keys.security_token

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        return self._routes.get(topic, 0.0, deadline.within(self._calls.request_timeout_s))

    def compacted(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        remedy = "Offsets without messages were found, which is right for compaction topics only"
        attributes = self._fetch_with_retries(
            lambda soon: self._attributes.attributes(queue.topic, queue.broker_name, soon, ATTRIBUTES_MAX_AGE_S),
            remedy,
            deadline,
        )
        return is_compacted(attributes)

    def batched(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        remedy = "Brokers do not filter the messages of a batch topic, or of a compaction topic, one by one"
        batched = self._fetch_with_retries(
            lambda soon: self._attributes.stores_batches(queue, soon, ATTRIBUTES_MAX_AGE_S), remedy, deadline
        )
        return batched or self.compacted(queue, deadline)

    def _fetch_with_retries(self, fetch: Callable[[Deadline], T], remedy: str, deadline: Deadline | None) -> T:
        """``remedy`` becomes the remedy of ``AccessDenied``."""
        overall_deadline = deadline or Deadline.after(LONGEST_S)
        try:
            return self._retry.run(
                lambda: fetch(overall_deadline.within(self._calls.request_timeout_s)), overall_deadline
            )
        except AccessDenied as e:
            e.remedy = f"{remedy}; to tell what it is, the reader needs Get on the topic's configuration"
            raise


OnPulled = Callable[[PullAnswer | RocketMQError], None]

_STATUS = {
    Response.SUCCESS: PullStatus.FOUND,
    Response.PULL_NOT_FOUND: PullStatus.NO_NEW_MSG,
    Response.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MSG,
    Response.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}


class LongPolls:
    """Pulls over the connections of a client."""

    def __init__(self, calls: RpcClient, routes: Routes, kinds: TopicAttributesCache) -> None:
        self._calls = calls
        self._routes = routes
        self._attributes = kinds
        self._executor = Aside()

    def pull(self, request: PullRequest, deadline: Deadline, done: OnPulled) -> None:
        name = request.queue.broker_name
        try:
            data = self._routes.broker(name)
            if data is None or not data.addresses:
                raise BrokerNotFound("no address of the queue's broker is known", queue=str(request.queue))
            broker_id, address = replica(data, request.broker_id)
            send = functools.partial(self._send, address, broker_id == MASTER_ID, deadline, done)
            knows_attributes = not request.filter or self._attributes.is_cached(request.queue)
            if knows_attributes and self._calls.pool.is_connected(address) and not self._executor.busy(address):
                with never_waiting():  # a socket may accept no bytes, and this thread also sends other pulls
                    send(request)
            else:  # sent later, when a reset or the next owner may have stored another offset
                self._executor.run(address, functools.partial(send, replace(request, commit_offset=None)))
        except RocketMQError as e:
            done(e)
        except RuntimeError as e:
            done(ConnectionLost(f"no connection can be made: {e}", queue=str(request.queue)))

    def create_group_by_pull(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> list[RocketMQError]:
        """Pull as a group: brokers with ``autoCreateSubscriptionGroup`` create a group at its first pull. Returns the errors.

        The pulls have a filter: if a group has no members at a Proxy, the Proxy does not forward its pulls without a filter.
        """
        requests = []
        for queue in {queue.broker_name: queue for queue in offsets}.values():
            data = self._routes.broker(queue.broker_name)
            if data is not None and data.master is not None:
                request = PullRequest(group, queue, offsets[queue], count=1, suspend_s=0.0, post_filter=True)
                requests.append((data.master, pull_command(request, self._calls, True)))
        answers = self._calls.invoke_each(requests, deadline)
        return [
            answer if isinstance(answer, RocketMQError) else error_from_response(answer, address)
            for (address, _), answer in zip(requests, answers, strict=True)
            if isinstance(answer, RocketMQError) or answer.code not in _STATUS
        ]

    def _send(self, address: str, is_master: bool, deadline: Deadline, done: OnPulled, request: PullRequest) -> None:
        try:
            broker_request = self._request_for_broker(request, deadline) if request.filter else request
        except RocketMQError as e:
            done(e)
            return
        command = pull_command(broker_request, self._calls, is_master)
        self._calls.invoke_async(address, command, deadline, functools.partial(self._on_answer, request, address, done))

    def _request_for_broker(self, request: PullRequest, deadline: Deadline) -> PullRequest:
        """The request to the broker. In a batch topic it would drop whole batches, so tags are compared only here."""
        queue, requested_filter = request.queue, request.filter
        try:
            attributes = self._attributes.attributes(queue.topic, queue.broker_name, deadline)
        except AccessDenied:  # the right to read does not include the topic's type
            attributes = None
        batched = is_batched(attributes)
        if requested_filter.kind == "TAG":
            return request if batched is False else replace(request, filter=NO_FILTER, post_filter=True)
        if batched or is_compacted(attributes):
            raise OptionError(
                f"sql is {requested_filter.expression!r}, but {queue.topic} is a batch topic, or a compaction topic: "
                "brokers filter none",
                topic=queue.topic,
                remedy="Subscribe with tags, or filter in the listener",
            )
        return request

    def _on_answer(self, request: PullRequest, address: str, done: OnPulled, answer: Command | RocketMQError) -> None:
        if isinstance(answer, RocketMQError):
            done(answer)
            return
        result = attempt(to_pull_answer, request, answer, address, self._calls.scope)
        if not isinstance(result, Failure):
            done(result)
        elif isinstance(result.error, RocketMQError):
            done(result.error)
        else:  # without memory for instance: who hears of it pulls again
            result.log(logger, "an answer to the pull of %s could not be decoded", request.queue)
            done(DecodeError(f"the answer could not be decoded: {result}", queue=str(request.queue)))


def replica(broker: BrokerData, broker_id: int) -> tuple[int, str]:
    """Id and address of the replica to ask: the wanted one, the next one if that is a slave that is gone, or else any.

    Mirrors ``MQClientInstance.findBrokerAddressInSubscribe``.
    """
    addresses = broker.addresses
    for number in (broker_id, broker_id + 1) if broker_id != MASTER_ID else (broker_id,):
        if number in addresses:
            return number, addresses[number]
    return min(addresses.items())


def pull_command(request: PullRequest, calls: RpcClient, to_master: bool) -> Command:
    """The request on the wire. Only a master stores the offset in it."""
    commits = to_master and request.commit_offset is not None
    sys_flag = PullSysFlag(0)
    sys_flag |= PullSysFlag.COMMIT_OFFSET if commits else 0
    sys_flag |= PullSysFlag.SUSPEND if request.suspend_s else 0
    sys_flag |= PullSysFlag.SUBSCRIPTION if request.post_filter else 0
    fields: dict[str, Any] = {
        "consumerGroup": calls.on_wire(request.group),
        "topic": calls.on_wire(request.queue.topic),
        "queueId": request.queue.queue_id,
        "queueOffset": request.offset,
        "maxMsgNums": request.count,
        "sysFlag": sys_flag,
        "commitOffset": (commits and request.commit_offset) or 0,
        "suspendTimeoutMillis": round(1000 * request.suspend_s),
        "subscription": request.filter.expression if request.post_filter else None,
        "subVersion": request.version_ms,
        "expressionType": request.filter.kind,
        "maxMsgBytes": request.max_bytes,
        "bname": request.queue.broker_name,
    }
    return rpc.PULL_MESSAGE.request(**fields)


def to_pull_answer(request: PullRequest, answer: Command, address: str, scope: Scope) -> PullAnswer:
    """Interpret an answer. Raises the error for a code that is none of the four outcomes of a pull."""
    status = _STATUS.get(Response(answer.code)) if answer.code in _STATUS else None
    if status is None:
        raise error_from_response(answer, address, request.queue.topic, str(request.queue))
    fields = rpc.PULL_MESSAGE.answer(answer)
    empty = PullAnswer(
        status,
        fields["nextBeginOffset"],
        fields["minOffset"],
        fields["maxOffset"],
        broker_id=fields["suggestWhichBrokerId"] or MASTER_ID,
        reset=status is PullStatus.OFFSET_ILLEGAL and answer.remark == OFFSET_RESET,
    )
    if status is not PullStatus.FOUND:
        return empty

    read = functools.partial(requested_messages, request, answer.body, scope, empty.next_offset)
    if not request.decoded:
        return replace(empty, stored=answer.body, read=read)
    messages, first_left = portion(read())
    return replace(
        empty, messages=messages, next_offset=empty.next_offset if first_left is None else first_left.queue_offset
    )


def requested_messages(
    request: PullRequest, stored: Bytes, scope: Scope, end: int, room: DecodeRoom | None = None
) -> Iterable[ReceivedMessage]:
    """The requested messages of an answer, with the user's names. ``end``: the next offset according to the broker.

    A broker compares tags by their hashes, and returns whole inner batches. Messages that cannot be decoded are returned raw,
    so that they stop no reader.

    Messages get different, increasing offsets from the requested one to below ``end``, because commits and the next pull depend
    on them. The offset stored in a message may be wrong if the message is damaged or the index of the queue was shifted.
    """
    queue = request.queue
    tags = parse_subscription(request.filter.expression) if request.filter.kind == "TAG" and request.filter else None
    is_retry_topic = queue.topic.startswith(RETRY_PREFIX)
    data, settings = bytes(stored), DecodeSettings(queue.broker_name, queue=queue, room=room)
    undamaged = usual_messages(data, request.offset, end, queue)
    messages = undamaged or _with_valid_offsets(data, stored_in(data), request.offset, end, settings)
    if tags is None and not is_retry_topic:
        return messages
    return (
        with_user_names(message, scope) if is_retry_topic else message
        for message in messages
        if tags is None or tags.accepts(message.tags) or (message.decode_error is not None and _has_no_tag(message))
    )


def _has_no_tag(message: ReceivedMessage) -> bool:
    """Whether its tag is unknown, perhaps because of damage, or it is a batch, in which each message has a tag."""
    return message.tags is None or bool(message.sys_flag & SysFlag.INNER_BATCH)


def _with_valid_offsets(
    data: bytes, stored: Sequence[Stored], start: int, end: int, settings: DecodeSettings
) -> Iterator[ReceivedMessage]:
    """The messages from ``start`` on. An impossible offset is replaced by the first possible one."""
    stored = _merge_damaged(data, stored, end - start, settings)
    next_offset, remaining = start, len(stored)
    for stored_message, max_offset in zip(stored, _max_offsets(stored, next_offset, end), strict=True):
        remaining -= 1
        *_, is_batch = stored_message
        if is_batch:
            settings = settings._replace(
                window=OffsetWindow(start, end, next_offset if next_offset > start else None, end - remaining)
            )
        for message in decode_one(data, stored_message, settings):
            is_decoded_batch = is_batch and message.decode_error is None
            if is_decoded_batch and message.queue_offset < start:
                continue
            # With a later one, a commit would skip messages that are not consumed.
            if not is_decoded_batch and not next_offset <= message.queue_offset <= max_offset:
                message = replace(message, queue_offset=next_offset)
            next_offset = message.queue_offset + 1
            yield message


def _merge_damaged(data: bytes, stored: Sequence[Stored], max_count: int, settings: DecodeSettings) -> Sequence[Stored]:
    """At most as many messages as offsets: a damaged size splits a message in two, which would take the offsets of others."""
    if not 0 < max_count < len(stored):
        return stored
    merged, was_broken = list(stored[:1]), _is_broken(data, stored[0], settings)
    for number, stored_message in enumerate(stored[1:], 1):
        broken = _is_broken(data, stored_message, settings)
        if broken and was_broken and len(merged) + len(stored) - number > max_count:
            merged[-1] = (merged[-1][0], stored_message[1], None, False)
        else:
            merged.append(stored_message)
        was_broken = broken
    last = merged[max_count - 1 :]
    return [*merged[: max_count - 1], (last[0][0], last[-1][1], None, False)] if len(last) > 1 else merged


def _is_broken(data: bytes, stored_message: Stored, settings: DecodeSettings) -> bool:
    """Whether a message cannot even be split into its parts."""
    first = next(
        iter(decode_one(data, stored_message, settings._replace(queue=None, max_body_bytes=None, room=None))), None
    )
    return first is not None and first.decode_error is not None and not first.topic


def _max_offsets(stored: Sequence[Stored], start: int, end: int) -> list[int]:
    """The highest possible offset of each message: every message after it needs one, its own if that is possible."""
    max_offsets: list[int] = []
    for number in range(len(stored) - 1, -1, -1):
        end -= 1
        stored_offset = stored[number][2]
        if stored_offset is not None and start + number <= stored_offset < end:
            end = stored_offset
        max_offsets.append(end)
    return max_offsets[::-1]
