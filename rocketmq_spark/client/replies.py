"""The ``Replies`` port over remoting: requests that wait for replies, and replies to requests of other clients.

A request is an ordinary message with a correlation id and the client id of its sender. The reply is sent to a broker, which
forwards it over the connection of the requester's heartbeats. Mirrors ``RequestFutureHolder``,
``ClientRemotingProcessor.receiveReplyMessage`` and ``MessageUtil.createReplyMessage``. There is one deliberate difference: Java
sends a reply to any broker. This module sends a reply to the broker of the request and, if this broker cannot forward the reply,
to the other brokers of the request's topic.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from rocketmq_spark.base.clock import Deadline, RateLimit, epoch_ms
from rocketmq_spark.base.codes import (
    AUTO_CREATE_TOPIC,
    MAX_BODY_BYTES,
    REPLY_SUFFIX,
    Property,
    Response,
    SysFlag,
)
from rocketmq_spark.client.instance import LOG_PAUSE_S, ClientInstance, RegisteredMember
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.client.send_back import COMPRESS_ABOVE_BYTES
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    DecodeError,
    LocalProtocolError,
    MessageRefused,
    NotSupported,
    RocketMQError,
)
from rocketmq_spark.model import Message, ReceivedMessage, Reply
from rocketmq_spark.remoting.connection import ServerRequest
from rocketmq_spark.wire import compression, rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.properties import (
    check_message,
    decode_properties,
    encode_properties,
    is_reserved,
    message_properties,
)

logger = logging.getLogger(__name__)

_MAX_LOG_LINES = 5  # the maximum number of log lines in a period of ``LOG_PAUSE_S``, for each kind of bad reply
# Java's MixAll.REPLY_MESSAGE_FLAG, the message type of a reply.
_REPLY_TYPE = "reply"
_REQUESTER_GONE_REMEDY = "Perhaps the requester has ended, or stopped waiting"
_BROKER_NAME_SERVER_REMEDY = "Give the name server of the brokers as option 'nameServer'"
OnReply = Callable[[Reply | RocketMQError], object]


class AwaitedReplies:
    """The requests of this process that wait for replies, by correlation id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_requests: dict[
            str, tuple[OnReply, int]
        ] = {}  # the callback, and the number of replies that had arrived before the request
        self._reply_count = 0
        self._last_reply_numbers: dict[str, int] = {}  # by address of a broker: the number of its last reply
        self._forwarding_brokers: frozenset[str] | None = None
        self._has_sent_request = False
        self._unreadable_log_limit, self._late_log_limit = (
            RateLimit(LOG_PAUSE_S, _MAX_LOG_LINES),
            RateLimit(LOG_PAUSE_S, _MAX_LOG_LINES),
        )

    def expect(self, correlation_id: str, done: OnReply) -> Callable[[], None]:
        with self._lock:
            self._has_sent_request = True
            self._waiting_requests[correlation_id] = done, self._reply_count
        return lambda: self._cancel(correlation_id)

    def take_forwarding_brokers(self) -> frozenset[str] | None:
        """Return the brokers that forwarded other replies during every wait for a reply that timed out; None if no wait timed
        out. The next call does not consider these waits again.
        """
        with self._lock:
            brokers, self._forwarding_brokers = self._forwarding_brokers, None
            return brokers

    def record_timeout(self, brokers: frozenset[str]) -> None:
        """Record that a request got no reply in time, although ``brokers`` forwarded replies to other requests meanwhile."""
        with self._lock:
            self._forwarding_brokers = (
                brokers if self._forwarding_brokers is None else self._forwarding_brokers & brokers
            )

    def _cancel(self, correlation_id: str) -> None:
        with self._lock:
            waiting_request = self._waiting_requests.pop(correlation_id, None)
            last_reply_numbers = list(self._last_reply_numbers.items())
        if waiting_request is not None:
            self.record_timeout(
                frozenset(
                    address
                    for address, last_reply_number in last_reply_numbers
                    if last_reply_number > waiting_request[1]
                )
            )

    def on_reply(self, request: ServerRequest, run_later: Callable[[Callable[[], None]], None]) -> bool:
        """Handle a forwarded reply on the thread that reads answers; ``run_later`` runs a function on another thread.

        Any client of the cluster can send replies to this client, so the body is decoded only if a request waits for the reply.
        If no request waits, the broker still gets a success, as in Java. Returns False, which rejects the reply, if this client
        has never sent a request.
        """
        if not self._has_sent_request:
            return False
        try:
            fields = rpc.PUSH_REPLY_MESSAGE_TO_CLIENT.arguments(request.command)
            properties = decode_properties(fields["properties"] or "")
        except (RocketMQError, ValueError) as e:
            if self._unreadable_log_limit.due():  # there may be thousands of such replies
                logger.warning("a reply from %s cannot be read: %s", request.address, e)
            request.answer(Command(Response.SYSTEM_ERROR, remark="the reply cannot be read"))
            return True
        correlation_id = properties.get(Property.CORRELATION_ID, "")
        with self._lock:
            self._reply_count += 1
            self._last_reply_numbers[request.address] = self._reply_count
            if self._forwarding_brokers is not None:
                self._forwarding_brokers |= {request.address}
            waiting_request = self._waiting_requests.pop(correlation_id, None)
        if waiting_request is None:
            request.answer(rpc.PUSH_REPLY_MESSAGE_TO_CLIENT.reply(request.command))
            if self._late_log_limit.due():
                text = "a reply from %s is ignored, because no request waits for it: %s"
                logger.info(text, request.address, correlation_id)
            return True
        try:
            run_later(functools.partial(_complete, request, fields, properties, waiting_request[0]))
        except RuntimeError:  # no thread can start: the reply is rejected, and its sender may send it again
            with self._lock:
                self._waiting_requests[correlation_id] = waiting_request
            raise
        return True


def _complete(request: ServerRequest, fields: dict[str, Any], properties: dict[str, str], done: OnReply) -> None:
    try:
        reply = _decode_reply(request.command, fields, properties)
    finally:
        request.answer(rpc.PUSH_REPLY_MESSAGE_TO_CLIENT.reply(request.command))
    done(reply)


def _decode_reply(command: Command, fields: dict[str, Any], properties: dict[str, str]) -> Reply | RocketMQError:
    body: bytes = bytes(command.body)
    if fields["sysFlag"] & SysFlag.COMPRESSED:
        try:
            body = compression.decompress(body, fields["sysFlag"])
        except (DecodeError, LocalProtocolError) as e:
            return e
    return Reply(
        body,
        {name: value for name, value in properties.items() if not is_reserved(name)},
        properties.get(Property.TAGS),
        properties.get(Property.KEYS, "").split(),
        fields["flag"],
        fields["bornTimestamp"],
        fields["bornHost"],
    )


class RemotingReplies:
    """Implements ``ports.Replies``."""

    def __init__(
        self, rpc_client: RpcClient, routes: Routes, instance: ClientInstance, awaited_replies: AwaitedReplies
    ) -> None:
        self._rpc_client = rpc_client
        self._routes = routes
        self._instance = instance
        self._awaited_replies = awaited_replies

    def join(self, group: str, heartbeat_s: float) -> Callable[[Deadline], None]:
        member = RegisteredMember(group, heartbeat_s, needs_all_brokers=True, receives_replies=True)
        self._instance.join(member)
        return lambda deadline: self._instance.leave(member, deadline)

    def announce(self, deadline: Deadline) -> None:
        self._instance.refresh_cluster(deadline)
        forwarding_brokers = self._awaited_replies.take_forwarding_brokers()
        if not self._instance.register_connection(deadline, forwarding_brokers) and forwarding_brokers is not None:
            self._awaited_replies.record_timeout(forwarding_brokers)  # so that the next call gets these brokers
        proxy = next((data.master for data in self._routes.brokers() if self._is_proxy(data.master)), None)
        if proxy is not None:
            raise NotSupported("a Proxy does not forward replies", proxy, remedy=_BROKER_NAME_SERVER_REMEDY)

    def _is_proxy(self, address: str | None) -> bool:
        return address is not None and self._rpc_client.pool.is_proxy(address)

    def expect(self, correlation_id: str, done: OnReply) -> Callable[[], None]:
        return self._awaited_replies.expect(correlation_id, done)

    def reply(self, request: ReceivedMessage, reply: Message, group: str, deadline: Deadline) -> None:
        make_request = self._request_factory(request, reply, group)
        masters = self._masters(request, deadline)
        last_error: RocketMQError = CallTimeout("there was no time to send the reply", topic=request.topic)
        for remaining_count, (name, address) in zip(range(len(masters), 0, -1), masters, strict=True):
            if deadline.expired:
                break
            try:
                self._rpc_client.request(
                    address, make_request(name), deadline.within(deadline.remaining() / remaining_count)
                )
            except RocketMQError as e:
                last_error = e
            else:
                return
        last_error.remedy = last_error.remedy or (
            _BROKER_NAME_SERVER_REMEDY if isinstance(last_error, NotSupported) else _REQUESTER_GONE_REMEDY
        )
        raise last_error

    def _masters(self, request: ReceivedMessage, deadline: Deadline) -> list[tuple[str, str]]:
        """Names and addresses of the masters of the request's topic. The broker of the request comes first, because the requester
        is connected to it.
        """
        brokers = self._routes.recent_route(request.topic, deadline).brokers.values()
        masters = [(data.broker_name, data.master) for data in brokers if data.master]
        if not masters:
            raise BrokerNotFound("no broker of the topic has a master now", topic=request.topic)
        return sorted(masters, key=lambda master: master[0] != request.broker_name)

    def _request_factory(self, request: ReceivedMessage, reply: Message, group: str) -> Callable[[str], Command]:
        check_message(reply)
        property_names = Property.CLUSTER, Property.REPLY_TO_CLIENT, Property.CORRELATION_ID
        cluster, requester_client_id, correlation_id = (request.properties.get(name) for name in property_names)
        if not (cluster and requester_client_id and correlation_id):
            raise MessageRefused(
                f"message {request.msg_id} is not a request: it was not sent by Producer.request", topic=request.topic
            )
        properties = message_properties(
            reply,
            **{
                Property.MESSAGE_TYPE: _REPLY_TYPE,
                Property.CORRELATION_ID: correlation_id,
                Property.REPLY_TO_CLIENT: requester_client_id,
                Property.TTL: request.properties.get(Property.TTL),
            },
        )
        raw_body: object = reply.body
        if not isinstance(raw_body, bytes | bytearray | memoryview):
            raise MessageRefused(f"the reply's body is {type(raw_body).__name__}; expected bytes", topic=request.topic)
        body, sys_flag = bytes(raw_body), 0
        if not 0 < len(body) <= MAX_BODY_BYTES:
            raise MessageRefused(
                f"the reply has {len(body)} bytes; expected 1 to {MAX_BODY_BYTES}", topic=request.topic
            )
        if len(body) > COMPRESS_ABOVE_BYTES and (compressed_body := compression.compress_if_smaller(body)) is not None:
            body, sys_flag = compressed_body, int(SysFlag.COMPRESSED | SysFlag.ZLIB)
        return lambda broker_name: rpc.SEND_REPLY_MESSAGE_V2.request(
            body,
            producerGroup=self._rpc_client.name_on_wire(group),
            topic=cluster + REPLY_SUFFIX,
            defaultTopic=AUTO_CREATE_TOPIC,
            defaultTopicQueueNums=1,
            queueId=0,
            sysFlag=sys_flag,
            bornTimestamp=epoch_ms(),
            flag=reply.flag,
            properties=encode_properties(properties),
            reconsumeTimes=0,
            unitMode=False,
            batch=False,
            brokerName=broker_name,
        )
