"""The ``PopMember`` port over gRPC: a consumer that receives messages from a Proxy.

``popped`` converts a message of the Proxy into a ``PoppedMessage``, ``policy`` the Proxy's settings into a ``GroupPolicy``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import MAX_PROPERTIES_BYTES
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import (
    ConnectionLost,
    DecodeError,
    LocalProtocolError,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.grpc_proxy import tables
from rocketmq_spark.grpc_proxy.channel import ProxyChannel
from rocketmq_spark.grpc_proxy.protos import get_ms, get_seconds, proto, refused, set_seconds
from rocketmq_spark.grpc_proxy.proxy import Proxy, Telemetry, checked
from rocketmq_spark.grpc_proxy.tables import ClientType, Code, Encoding, FilterType
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.message import GroupPolicy, Place, PoppedMessage, memory_of_popped

logger = logging.getLogger(__name__)

# RocketMQ's defaults, for groups whose policy the Proxy does not report.
_ATTEMPTS, _PAUSES_S = 17, (10.0,)
# Pauses are listed up to this attempt; the last pause holds for all later attempts.
_MAX_PAUSES = 100


def popped(message: Any, topic: str, place: tuple[str, str], unpack: Callable[[bytes], bytes]) -> PoppedMessage:
    """Converts a message of ``topic`` (the user's name); ``place`` is its broker's name and the endpoint that delivered it.

    As with remoting, a message whose body cannot be decoded is returned raw, with the reason, so that others are not lost with
    it.
    """
    broker_name, endpoint = place
    system = message.system_properties
    body, why = bytes(message.body), None
    if system.body_encoding == Encoding.GZIP:
        try:
            body = unpack(body)
        except (DecodeError, LocalProtocolError) as e:  # damaged, or its codec is not installed
            why = str(e)
    return PoppedMessage(
        topic=topic,
        queue=MessageQueue(topic, broker_name, system.queue_id),
        queue_offset=system.queue_offset,
        body=body,
        tags=system.tag or None,
        # Brokers store at most so many bytes of them; a hostile Proxy could send millions of empty ones.
        keys=list(itertools.islice(system.keys, MAX_PROPERTIES_BYTES)),
        properties=dict(itertools.islice(message.user_properties.items(), MAX_PROPERTIES_BYTES)),
        born_timestamp=get_ms(system.born_timestamp),
        store_timestamp=get_ms(system.store_timestamp) if system.HasField("store_timestamp") else None,
        msg_id=system.message_id,
        delivery_attempt=max(1, system.delivery_attempt),
        message_group=system.message_group or None,
        receipt=system.receipt_handle,
        endpoint=endpoint,
        decode_error=why,
    )


def policy(settings: Any) -> GroupPolicy:
    """The group's policy in the settings with which a Proxy answers a consumer's settings."""
    retry = settings.backoff_policy
    if retry.HasField("customized_backoff"):
        pauses = [get_seconds(pause) for pause in retry.customized_backoff.next[:_MAX_PAUSES]]
    elif retry.HasField("exponential_backoff"):
        grown = retry.exponential_backoff
        longest, pause = get_seconds(grown.max), get_seconds(grown.initial)
        pauses = [pause]
        while grown.multiplier > 1 and pause < longest and len(pauses) < _MAX_PAUSES:
            pause = min(longest, pause * grown.multiplier)
            pauses.append(pause)
    else:
        pauses = []
    attempts = retry.max_attempts if retry.max_attempts > 0 else _ATTEMPTS
    return GroupPolicy(attempts, settings.subscription.fifo, tuple(pauses) or _PAUSES_S)


HEARTBEAT_S = 10.0
# A few compressed kilobytes may become gigabytes, so the bodies of one answer are limited: to the second number times the
# requested messages, but at least to the first.
_MIN_OPENED_BYTES, _MESSAGE_BYTES = 64 << 20, 4 << 20
# After this time, an endpoint that has not answered settings is not waited for if another one has.
_QUICK_S = 1.0
# The brokers of a topic are requested again after this time.
_PLACES_S = 30.0
# A consumer has a thread for each broker of a topic, and a hostile Proxy could list any number of brokers.
_MOST_BROKERS = 1024


class ProxyMember:
    """One consumer of ``group``. It has its own ``proxy``, because a Proxy keeps settings by client id."""

    def __init__(self, proxy: Proxy, group: str, unpack: Callable[[bytes], bytes], ordered: bool = False) -> None:
        self._proxy = proxy
        self._ordered = ordered
        self._group = group
        self._unpack = unpack
        self._filters: Mapping[str, Filter] = {}
        self._lock = threading.Lock()
        self._streams: dict[str, Telemetry] = {}
        self._timer: Timer | None = None
        self._policy = policy(proto("Settings")())
        self._closed = False
        self._keeps_order: dict[str, bool] = {}  # whether the group is ordered, by each endpoint's last answer
        self._places: dict[str, tuple[Sequence[Any], Deadline]] = {}

    @property
    def client_id(self) -> str:
        return self._proxy.client_id

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        with self._lock:
            before, self._filters = self._filters, dict(filters)
            if self._closed:  # a failed start closes the member, and may be repeated
                self._proxy.open()
                self._closed = False
            begun = list(self._streams.values())
            # Each step checks what exists, so that a call which failed at any point can be repeated and does the rest.
            if self._timer is None:
                timer = Timer(f"rocketmq-{self._group}-heartbeat")
                timer.every(HEARTBEAT_S, self._beat, HEARTBEAT_S)
                self._timer = timer
            for one in self._proxy.addresses:
                if one not in self._streams:
                    hear = partial(self._on_settings, one)
                    self._streams[one] = Telemetry(self._proxy.at(one), self._settings, hear)
            streams = list(self._streams.values())
        for stream in begun:
            stream.tell()
        errors = _errors(streams, deadline)
        refused = [error for error in errors if error is not None]
        if len(refused) == len(errors):
            final = [error for error in refused if not error.retriable]
            if before and not filters.items() <= before.items() and final:
                with self._lock:
                    self._filters = before  # one bad topic makes a Proxy reject all, also on a new stream
                for stream in streams:
                    stream.tell()
            raise (final or refused)[0]

    def policy(self) -> GroupPolicy:
        return self._policy

    def places(self, topic: str, deadline: Deadline) -> int:
        return len(self._queues(topic, deadline))

    def receive(
        self, place: Place, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        topic, at = place
        queues = self._queues(topic, deadline)
        queue = queues[at % len(queues)]
        wanted = self._filters.get(topic)
        if wanted is None:  # another thread has just unsubscribed
            raise LocalProtocolError("the topic is not subscribed to", topic=topic)
        request = proto("ReceiveMessageRequest")(
            group=self._proxy.resource(self._group), message_queue=queue, batch_size=count, auto_renew=False
        )
        request.filter_expression.CopyFrom(_expression(wanted))
        set_seconds(request.invisible_duration, invisible_s)
        set_seconds(request.long_polling_timeout, wait_s)
        for _ in self._proxy.addresses[1:]:
            try:
                return self._received(self._proxy.channel(), request, topic, deadline)
            except ConnectionLost as e:
                if not e.unsent or deadline.remaining() < wait_s:  # too little time for another endpoint
                    raise
        return self._received(self._proxy.channel(), request, topic, deadline)

    def _received(self, channel: ProxyChannel, request: Any, topic: str, deadline: Deadline) -> Sequence[PoppedMessage]:
        queue, count = request.message_queue, request.batch_size
        found: list[PoppedMessage] = []
        left_s = deadline.remaining()
        try:
            call = channel.stream(tables.RECEIVE_MESSAGE, request, deadline)
            room = max(_MIN_OPENED_BYTES, count * _MESSAGE_BYTES)
            for answer in channel.answers(call):
                if answer.HasField("message"):
                    if len(found) == count or room <= 0:
                        logger.warning(
                            "%s delivered a part of the messages for topic %s; the others are delivered again",
                            channel.address,
                            topic,
                        )
                        call.cancel()
                        break
                    origin = queue.broker.name, channel.address
                    found.append(popped(answer.message, topic, origin, self._unpack))
                    room -= memory_of_popped(found[-1])
                elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                    raise refused(answer.status, channel.address, topic)
        except RocketMQError as e:
            self._proxy.noted(channel.address, e, left_s - deadline.remaining())
            if not found:
                raise
            # The messages that arrived are leased to this consumer, so return them. If they were discarded, the redelivery would
            # be cut off in the same way, until they are dead letters.
            logger.warning(
                "%s delivered a part of the messages for topic %s; the others are delivered again: %s",
                channel.address,
                topic,
                e,
            )
            return found
        self._proxy.noted(channel.address)
        return found

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        request = proto("AckMessageRequest")(**self._about(message))
        request.entries.add(message_id=message.msg_id, receipt_handle=message.receipt)
        answer = self._proxy.ask(tables.ACK_MESSAGE, request, deadline, message.topic, message.endpoint)
        for entry in answer.entries:
            checked(entry, message.endpoint, message.topic)

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        request = proto("ChangeInvisibleDurationRequest")(
            **self._about(message), receipt_handle=message.receipt, message_id=message.msg_id
        )
        set_seconds(request.invisible_duration, invisible_s)
        rpc = tables.CHANGE_INVISIBLE_DURATION
        answer = self._proxy.ask(rpc, request, deadline, message.topic, message.endpoint)
        message.receipt = answer.receipt_handle or message.receipt

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        request = proto("ForwardMessageToDeadLetterQueueRequest")(
            **self._about(message),
            receipt_handle=message.receipt,
            message_id=message.msg_id,
            delivery_attempt=message.delivery_attempt,
            max_delivery_attempts=self._policy.max_attempts,
        )
        self._proxy.ask(tables.FORWARD_TO_DEAD_LETTER_QUEUE, request, deadline, message.topic, message.endpoint)

    def close(self, deadline: Deadline) -> None:
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
            timer, self._timer = self._timer, None
            self._closed = True
            self._keeps_order = {}
        with contextlib.ExitStack() as rest:  # every step runs, even if an earlier one is interrupted
            rest.callback(self._proxy.close)
            for stream in streams:
                rest.callback(stream.close, deadline)
            if streams:
                rest.callback(self._leave, deadline)
            if timer is not None:
                rest.callback(timer.close, deadline.remaining())

    def _leave(self, deadline: Deadline) -> None:
        request = proto("NotifyClientTerminationRequest")(group=self._proxy.resource(self._group))
        self._each(tables.NOTIFY_CLIENT_TERMINATION, request, deadline)

    def _about(self, message: PoppedMessage) -> dict[str, Any]:
        return {"group": self._proxy.resource(self._group), "topic": self._proxy.resource(message.topic)}

    def _beat(self) -> None:
        request = proto("HeartbeatRequest")(
            group=self._proxy.resource(self._group), client_type=ClientType.SIMPLE_CONSUMER
        )
        self._each(tables.HEARTBEAT, request, Deadline.after(self._proxy.access.request_timeout_s))
        with self._lock:
            streams = list(self._streams.values())
        for (
            stream
        ) in streams:  # a Proxy does not report that a group has changed, and forgets settings after two minutes
            stream.repeat()

    def _each(self, rpc: tables.Rpc, request: Any, deadline: Deadline) -> None:
        """Send a request to all endpoints at once, so that one that hangs does not delay the others. Failures are logged."""
        answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        for address in self._proxy.addresses:
            try:
                self._proxy.at(address).ask_async(rpc, request, deadline, lambda a, at=address: answers.put((at, a)))  # type: ignore[misc]
            except RocketMQError as e:
                answers.put((address, e))
        for _ in self._proxy.addresses:
            address, answer = answers.get()
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                checked(answer, address)
            except RocketMQError as e:
                logger.info("%s at %s: %s", rpc.name, address, e)
                with self._lock:
                    self._keeps_order.pop(address, None)  # an endpoint that fails delivers no messages either

    def _on_settings(self, address: str, settings: Any) -> None:
        if settings.HasField("backoff_policy"):
            said = policy(settings)
            with self._lock:
                self._keeps_order[address] = said.ordered
                self._policy = replace(said, ordered=all(self._keeps_order.values()))

    def _settings(self) -> Any:
        made = self._proxy.settings(ClientType.SIMPLE_CONSUMER)
        made.subscription.group.CopyFrom(self._proxy.resource(self._group))
        made.subscription.fifo = self._ordered  # a Proxy uses this while brokers do not report the group's settings
        for topic, wanted in self._filters.items():
            made.subscription.subscriptions.add(topic=self._proxy.resource(topic), expression=_expression(wanted))
        return made

    def _queues(self, topic: str, deadline: Deadline) -> Sequence[Any]:
        known = self._places.get(topic)
        if known is not None and not known[1].expired:
            return known[0]
        request = proto("QueryAssignmentRequest")(
            topic=self._proxy.resource(topic),
            group=self._proxy.resource(self._group),
            endpoints=self._proxy.endpoints(),
        )
        answer = self._proxy.ask(tables.QUERY_ASSIGNMENT, request, deadline, topic)
        queues = [assignment.message_queue for assignment in answer.assignments]
        if not queues:
            raise RouteNotFound("no broker of the topic lets this group read", topic=topic)
        if len(queues) > _MOST_BROKERS:
            text = f"the Proxy lists {len(queues)} brokers for the topic; expected at most {_MOST_BROKERS}"
            raise RemoteProtocolError(text, topic=topic)
        self._places[topic] = queues, Deadline.after(_PLACES_S)
        return queues


def _errors(streams: Sequence[Telemetry], deadline: Deadline) -> list[RocketMQError | None]:
    """For each stream, why the Proxy has no settings, or None. Waits for slow endpoints only while no endpoint has them."""
    errors = [stream.wait(deadline.within(_QUICK_S), patient=False) for stream in streams]
    return errors if None in errors else [stream.wait(deadline) for stream in streams]


def _expression(wanted: Filter) -> Any:
    kind = FilterType.SQL if wanted.kind == "SQL92" else FilterType.TAG
    return proto("FilterExpression")(type=kind, expression=wanted.expression)
