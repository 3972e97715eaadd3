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
from rocketmq_spark.client.calls import RpcClient, error_from_response
from rocketmq_spark.client.groups import with_user_names
from rocketmq_spark.client.questions import TopicAttributesCache, is_batched, is_compacted
from rocketmq_spark.client.route import Routes
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
        self._kinds = kinds
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
        why = "Offsets without messages were found, which is right for compaction topics only"
        found = self._known(
            lambda soon: self._kinds.attributes(queue.topic, queue.broker_name, soon, ATTRIBUTES_MAX_AGE_S),
            why,
            deadline,
        )
        return is_compacted(found)

    def batched(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        why = "Brokers do not filter the messages of a batch topic, or of a compaction topic, one by one"
        batched = self._known(lambda soon: self._kinds.batched(queue, soon, ATTRIBUTES_MAX_AGE_S), why, deadline)
        return batched or self.compacted(queue, deadline)

    def _known(self, ask: Callable[[Deadline], T], why: str, deadline: Deadline | None) -> T:
        """``why`` becomes the remedy of ``AccessDenied``."""
        until = deadline or Deadline.after(LONGEST_S)
        try:
            return self._retry.run(lambda: ask(until.within(self._calls.request_timeout_s)), until)
        except AccessDenied as e:
            e.remedy = f"{why}; to tell what it is, the reader needs Get on the topic's configuration"
            raise


Done = Callable[[PullAnswer | RocketMQError], None]

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
        self._kinds = kinds
        self._aside = Aside()

    def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
        name = request.queue.broker_name
        try:
            data = self._routes.broker(name)
            if data is None or not data.addresses:
                raise BrokerNotFound("no address of the queue's broker is known", queue=str(request.queue))
            broker_id, address = replica(data, request.broker_id)
            ask = functools.partial(self._ask, address, broker_id == MASTER_ID, deadline, done)
            knows = not request.filter or self._kinds.fresh(request.queue)
            if knows and self._calls.pool.live(address) and not self._aside.busy(address):
                with never_waiting():  # a socket may accept no bytes, and this thread also sends other pulls
                    ask(request)
            else:  # sent later, when a reset or the next owner may have stored another offset
                self._aside.run(address, functools.partial(ask, replace(request, commit_offset=None)))
        except RocketMQError as e:
            done(e)
        except RuntimeError as e:
            done(ConnectionLost(f"no connection can be made: {e}", queue=str(request.queue)))

    def introduce(self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline) -> list[RocketMQError]:
        """Pull as a group: brokers with ``autoCreateSubscriptionGroup`` create a group at its first pull. Returns the errors.

        The pulls have a filter: if a group has no members at a Proxy, the Proxy does not forward its pulls without a filter.
        """
        asked = []
        for queue in {queue.broker_name: queue for queue in offsets}.values():
            data = self._routes.broker(queue.broker_name)
            if data is not None and data.master is not None:
                request = PullRequest(group, queue, offsets[queue], count=1, suspend_s=0.0, post_filter=True)
                asked.append((data.master, pull_command(request, self._calls, True)))
        answers = self._calls.exchange_each(asked, deadline)
        return [
            answer if isinstance(answer, RocketMQError) else error_from_response(answer, address)
            for (address, _), answer in zip(asked, answers, strict=True)
            if isinstance(answer, RocketMQError) or answer.code not in _STATUS
        ]

    def _ask(self, address: str, is_master: bool, deadline: Deadline, done: Done, request: PullRequest) -> None:
        try:
            on_broker = self._on_broker(request, deadline) if request.filter else request
        except RocketMQError as e:
            done(e)
            return
        command = pull_command(on_broker, self._calls, is_master)
        self._calls.ask_async(address, command, deadline, functools.partial(self._told, request, address, done))

    def _on_broker(self, request: PullRequest, deadline: Deadline) -> PullRequest:
        """The request to the broker. In a batch topic it would drop whole batches, so tags are compared only here."""
        queue, wanted = request.queue, request.filter
        try:
            kind = self._kinds.attributes(queue.topic, queue.broker_name, deadline)
        except AccessDenied:  # the right to read does not include the topic's type
            kind = None
        batched = is_batched(kind)
        if wanted.kind == "TAG":
            return request if batched is False else replace(request, filter=NO_FILTER, post_filter=True)
        if batched or is_compacted(kind):
            raise OptionError(
                f"sql is {wanted.expression!r}, but {queue.topic} is a batch topic, or a compaction topic: brokers filter none",
                topic=queue.topic,
                remedy="Subscribe with tags, or filter in the listener",
            )
        return request

    def _told(self, request: PullRequest, address: str, done: Done, answer: Command | RocketMQError) -> None:
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


def replica(broker: BrokerData, wanted: int) -> tuple[int, str]:
    """Id and address of the replica to ask: the wanted one, the next one if that is a slave that is gone, or else any.

    Mirrors ``MQClientInstance.findBrokerAddressInSubscribe``.
    """
    addresses = broker.addresses
    for number in (wanted, wanted + 1) if wanted != MASTER_ID else (wanted,):
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
    found, left = portion(read())
    return replace(empty, messages=found, next_offset=empty.next_offset if left is None else left.queue_offset)


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
    retried = queue.topic.startswith(RETRY_PREFIX)
    data, how = bytes(stored), DecodeSettings(queue.broker_name, queue=queue, room=room)
    usual = usual_messages(data, request.offset, end, queue)
    messages = usual or _with_valid_offsets(data, stored_in(data), request.offset, end, how)
    if tags is None and not retried:
        return messages
    return (
        with_user_names(message, scope) if retried else message
        for message in messages
        if tags is None or tags.accepts(message.tags) or (message.decode_error is not None and _has_no_tag(message))
    )


def _has_no_tag(message: ReceivedMessage) -> bool:
    """Whether its tag is unknown, perhaps because of damage, or it is a batch, in which each message has a tag."""
    return message.tags is None or bool(message.sys_flag & SysFlag.INNER_BATCH)


def _with_valid_offsets(
    data: bytes, found: Sequence[Stored], start: int, end: int, how: DecodeSettings
) -> Iterator[ReceivedMessage]:
    """The messages from ``start`` on. An impossible offset is replaced by the first possible one."""
    found = _merge_damaged(data, found, end - start, how)
    at, left = start, len(found)
    for one, latest in zip(found, _max_offsets(found, at, end), strict=True):
        left -= 1
        *_, batch = one
        if batch:
            how = how._replace(window=OffsetWindow(start, end, at if at > start else None, end - left))
        for message in decode_one(data, one, how):
            batched = batch and message.decode_error is None
            if batched and message.queue_offset < start:
                continue
            # With a later one, a commit would skip messages that are not consumed.
            if not batched and not at <= message.queue_offset <= latest:
                message = replace(message, queue_offset=at)
            at = message.queue_offset + 1
            yield message


def _merge_damaged(data: bytes, found: Sequence[Stored], room: int, how: DecodeSettings) -> Sequence[Stored]:
    """At most as many messages as offsets: a damaged size splits a message in two, which would take the offsets of others."""
    if not 0 < room < len(found):
        return found
    joined, was_broken = list(found[:1]), _is_broken(data, found[0], how)
    for number, one in enumerate(found[1:], 1):
        broken = _is_broken(data, one, how)
        if broken and was_broken and len(joined) + len(found) - number > room:
            joined[-1] = (joined[-1][0], one[1], None, False)
        else:
            joined.append(one)
        was_broken = broken
    last = joined[room - 1 :]
    return [*joined[: room - 1], (last[0][0], last[-1][1], None, False)] if len(last) > 1 else joined


def _is_broken(data: bytes, one: Stored, how: DecodeSettings) -> bool:
    """Whether a message cannot even be split into its parts."""
    first = next(iter(decode_one(data, one, how._replace(queue=None, max_body_bytes=None, room=None))), None)
    return first is not None and first.decode_error is not None and not first.topic


def _max_offsets(found: Sequence[Stored], start: int, end: int) -> list[int]:
    """The highest possible offset of each message: every message after it needs one, its own if that is possible."""
    latest: list[int] = []
    for number in range(len(found) - 1, -1, -1):
        end -= 1
        said = found[number][2]
        if said is not None and start + number <= said < end:
            end = said
        latest.append(end)
    return latest[::-1]
