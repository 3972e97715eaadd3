"""The ``PopMember`` port over gRPC: a consumer that receives messages from a Proxy.

``to_popped_message`` converts a message of the Proxy into a ``PoppedMessage``. ``group_policy`` converts the Proxy's settings
into a ``GroupPolicy``.
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
from rocketmq_spark.grpc_proxy.protos import error_from_status, get_ms, get_seconds, proto, set_seconds
from rocketmq_spark.grpc_proxy.proxy import Proxy, TelemetryStream, require_success
from rocketmq_spark.grpc_proxy.tables import ClientType, Code, Encoding, FilterType
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.message import GroupPolicy, PoppedMessage, PopTarget, estimated_popped_memory

logger = logging.getLogger(__name__)

# RocketMQ's defaults, for groups whose policy the Proxy does not report.
_DEFAULT_ATTEMPTS, _DEFAULT_PAUSES_S = 17, (10.0,)
# A policy lists the pauses up to this attempt. The last pause applies to all later attempts.
_MAX_PAUSES = 100


def to_popped_message(
    message: Any, topic: str, origin: tuple[str, str], unpack: Callable[[bytes], bytes]
) -> PoppedMessage:
    """Convert a message. ``topic`` is the user's name of its topic; ``origin`` is the name of its broker, and the endpoint that
    delivered the message.

    If the body cannot be decoded, the message has the raw body and a ``decode_error``, as over remoting. No exception is
    raised, because an exception would also lose the other messages of the answer.
    """
    broker_name, endpoint = origin
    system_properties = message.system_properties
    body, decode_error = bytes(message.body), None
    if system_properties.body_encoding == Encoding.GZIP:
        try:
            body = unpack(body)
        except (DecodeError, LocalProtocolError) as e:  # the body is damaged, or its codec is not installed
            decode_error = str(e)
    return PoppedMessage(
        topic=topic,
        queue=MessageQueue(topic, broker_name, system_properties.queue_id),
        queue_offset=system_properties.queue_offset,
        body=body,
        tags=system_properties.tag or None,
        # A broker stores at most this many bytes of keys and properties. A hostile Proxy could send millions of empty keys.
        keys=list(itertools.islice(system_properties.keys, MAX_PROPERTIES_BYTES)),
        properties=dict(itertools.islice(message.user_properties.items(), MAX_PROPERTIES_BYTES)),
        born_timestamp=get_ms(system_properties.born_timestamp),
        store_timestamp=get_ms(system_properties.store_timestamp)
        if system_properties.HasField("store_timestamp")
        else None,
        msg_id=system_properties.message_id,
        delivery_attempt=max(1, system_properties.delivery_attempt),
        message_group=system_properties.message_group or None,
        receipt=system_properties.receipt_handle,
        endpoint=endpoint,
        decode_error=decode_error,
    )


def group_policy(settings: Any) -> GroupPolicy:
    """Return the policy of a group from the settings that a Proxy sends to its consumers."""
    retry_policy = settings.backoff_policy
    if retry_policy.HasField("customized_backoff"):
        pauses = [get_seconds(pause) for pause in retry_policy.customized_backoff.next[:_MAX_PAUSES]]
    elif retry_policy.HasField("exponential_backoff"):
        exponential_policy = retry_policy.exponential_backoff
        longest_pause, pause = get_seconds(exponential_policy.max), get_seconds(exponential_policy.initial)
        pauses = [pause]
        while exponential_policy.multiplier > 1 and pause < longest_pause and len(pauses) < _MAX_PAUSES:
            pause = min(longest_pause, pause * exponential_policy.multiplier)
            pauses.append(pause)
    else:
        pauses = []
    max_attempts = retry_policy.max_attempts if retry_policy.max_attempts > 0 else _DEFAULT_ATTEMPTS
    return GroupPolicy(max_attempts, settings.subscription.fifo, tuple(pauses) or _DEFAULT_PAUSES_S)


HEARTBEAT_S = 10.0
# A few compressed kilobytes may decompress to gigabytes. So the bodies of one answer may have ``_ANSWER_BYTES_PER_MESSAGE`` bytes
# for each requested message, but at least ``_MIN_ANSWER_BYTES`` bytes in total.
_MIN_ANSWER_BYTES, _ANSWER_BYTES_PER_MESSAGE = 64 << 20, 4 << 20
# If one endpoint has accepted the settings, a member waits only this long for the other endpoints.
_OTHER_ENDPOINTS_TIMEOUT_S = 1.0
# The maximum age of the cached list of a topic's brokers.
_ASSIGNMENT_AGE_S = 30.0
# A consumer starts a thread for each broker of a topic, and a hostile Proxy could list any number of brokers.
_MAX_BROKERS = 1024


class ProxyMember:
    """Implements ``ports.PopMember``: one consumer of ``group``.

    The consumer has its own ``proxy``, because a Proxy keeps settings by client id. ``unpack`` decompresses a body. ``ordered``
    asks for ordered delivery.
    """

    def __init__(self, proxy: Proxy, group: str, unpack: Callable[[bytes], bytes], ordered: bool = False) -> None:
        self._proxy = proxy
        self._ordered = ordered
        self._group = group
        self._unpack = unpack
        self._filters: Mapping[str, Filter] = {}  # the subscribed topics
        self._lock = threading.Lock()
        self._streams: dict[str, TelemetryStream] = {}  # by endpoint
        self._timer: Timer | None = None
        self._policy = group_policy(proto("Settings")())
        self._closed = False
        self._is_fifo_by_endpoint: dict[
            str, bool
        ] = {}  # whether the group is ordered, according to the last settings of each endpoint
        # By topic: one queue for each broker of the topic, and the time when this list expires.
        self._assignments: dict[str, tuple[Sequence[Any], Deadline]] = {}

    @property
    def client_id(self) -> str:
        return self._proxy.client_id

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        with self._lock:
            previous_filters, self._filters = self._filters, dict(filters)
            if self._closed:  # a start that failed has closed the member, and the user may start it again
                self._proxy.open()
                self._closed = False
            existing_streams = list(self._streams.values())
            # A call may fail in the middle. So each step below checks what an earlier call has already done, and does the rest.
            if self._timer is None:
                timer = Timer(f"rocketmq-{self._group}-heartbeat")
                timer.call_repeatedly(HEARTBEAT_S, self._send_heartbeats, HEARTBEAT_S)
                self._timer = timer
            for address in self._proxy.addresses:
                if address not in self._streams:
                    on_settings = partial(self._on_settings, address)
                    self._streams[address] = TelemetryStream(
                        self._proxy.channel_of(address), self._settings, on_settings
                    )
            streams = list(self._streams.values())
        for stream in existing_streams:
            stream.send_settings()
        errors = _settings_errors(streams, deadline)
        failures = [error for error in errors if error is not None]
        if len(failures) == len(errors):
            permanent_errors = [error for error in failures if not error.retriable]
            if previous_filters and not filters.items() <= previous_filters.items() and permanent_errors:
                with self._lock:
                    # A Proxy rejects all topics because of one topic. So remove the new topics; otherwise new streams fail, too.
                    self._filters = previous_filters
                for stream in streams:
                    stream.send_settings()
            raise (permanent_errors or failures)[0]

    def policy(self) -> GroupPolicy:
        return self._policy

    def target_count(self, topic: str, deadline: Deadline) -> int:
        return len(self._assigned_queues(topic, deadline))

    def receive(
        self, target: PopTarget, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        topic, index = target
        queues = self._assigned_queues(topic, deadline)
        queue = queues[index % len(queues)]
        topic_filter = self._filters.get(topic)
        if topic_filter is None:  # another thread has just unsubscribed
            raise LocalProtocolError("the topic is not subscribed to", topic=topic)
        request = proto("ReceiveMessageRequest")(
            group=self._proxy.resource(self._group), message_queue=queue, batch_size=count, auto_renew=False
        )
        request.filter_expression.CopyFrom(_expression(topic_filter))
        set_seconds(request.invisible_duration, invisible_s)
        set_seconds(request.long_polling_timeout, wait_s)
        for _ in self._proxy.addresses[1:]:
            try:
                return self._receive_from(self._proxy.channel(), request, topic, deadline)
            except ConnectionLost as e:
                if not e.unsent or deadline.remaining() < wait_s:  # too little time for another endpoint
                    raise
        return self._receive_from(self._proxy.channel(), request, topic, deadline)

    def _receive_from(
        self, channel: ProxyChannel, request: Any, topic: str, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        queue, count = request.message_queue, request.batch_size
        messages: list[PoppedMessage] = []
        remaining_s = deadline.remaining()
        try:
            call = channel.stream(tables.RECEIVE_MESSAGE, request, deadline)
            remaining_bytes = max(_MIN_ANSWER_BYTES, count * _ANSWER_BYTES_PER_MESSAGE)
            for answer in channel.answers(call):
                if answer.HasField("message"):
                    if len(messages) == count or remaining_bytes <= 0:
                        logger.warning(
                            "%s delivered a part of the messages for topic %s; the others are delivered again",
                            channel.address,
                            topic,
                        )
                        call.cancel()
                        break
                    origin = queue.broker.name, channel.address
                    messages.append(to_popped_message(answer.message, topic, origin, self._unpack))
                    remaining_bytes -= estimated_popped_memory(messages[-1])
                elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                    raise error_from_status(answer.status, channel.address, topic)
        except RocketMQError as e:
            self._proxy.record_result(channel.address, e, remaining_s - deadline.remaining())
            if not messages:
                raise
            # Return the messages that have arrived, because they are invisible to other consumers now. If this method discarded
            # these messages, their redelivery might be cut off in the same way, until they become dead letters.
            logger.warning(
                "%s delivered a part of the messages for topic %s; the others are delivered again: %s",
                channel.address,
                topic,
                e,
            )
            return messages
        self._proxy.record_result(channel.address)
        return messages

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        request = proto("AckMessageRequest")(**self._resources_of(message))
        request.entries.add(message_id=message.msg_id, receipt_handle=message.receipt)
        answer = self._proxy.request(tables.ACK_MESSAGE, request, deadline, message.topic, message.endpoint)
        for entry in answer.entries:
            require_success(entry, message.endpoint, message.topic)

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        request = proto("ChangeInvisibleDurationRequest")(
            **self._resources_of(message), receipt_handle=message.receipt, message_id=message.msg_id
        )
        set_seconds(request.invisible_duration, invisible_s)
        rpc = tables.CHANGE_INVISIBLE_DURATION
        answer = self._proxy.request(rpc, request, deadline, message.topic, message.endpoint)
        message.receipt = answer.receipt_handle or message.receipt

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        request = proto("ForwardMessageToDeadLetterQueueRequest")(
            **self._resources_of(message),
            receipt_handle=message.receipt,
            message_id=message.msg_id,
            delivery_attempt=message.delivery_attempt,
            max_delivery_attempts=self._policy.max_attempts,
        )
        self._proxy.request(tables.FORWARD_TO_DEAD_LETTER_QUEUE, request, deadline, message.topic, message.endpoint)

    def close(self, deadline: Deadline) -> None:
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
            timer, self._timer = self._timer, None
            self._closed = True
            self._is_fifo_by_endpoint = {}
        with contextlib.ExitStack() as cleanup:  # runs every step, even if an earlier step is interrupted
            cleanup.callback(self._proxy.close)
            for stream in streams:
                cleanup.callback(stream.close, deadline)
            if streams:
                cleanup.callback(self._leave, deadline)
            if timer is not None:
                cleanup.callback(timer.close, deadline.remaining())

    def _leave(self, deadline: Deadline) -> None:
        request = proto("NotifyClientTerminationRequest")(group=self._proxy.resource(self._group))
        self._send_to_all(tables.NOTIFY_CLIENT_TERMINATION, request, deadline)

    def _resources_of(self, message: PoppedMessage) -> dict[str, Any]:
        return {"group": self._proxy.resource(self._group), "topic": self._proxy.resource(message.topic)}

    def _send_heartbeats(self) -> None:
        request = proto("HeartbeatRequest")(
            group=self._proxy.resource(self._group), client_type=ClientType.SIMPLE_CONSUMER
        )
        self._send_to_all(tables.HEARTBEAT, request, Deadline.after(self._proxy.connect_options.request_timeout_s))
        with self._lock:
            streams = list(self._streams.values())
        # A Proxy does not report that a group has changed, but it answers settings with the group's current settings. Also, a
        # Proxy forgets settings after two minutes. So the settings are sent again.
        for stream in streams:
            stream.resend_settings()

    def _send_to_all(self, rpc: tables.Rpc, request: Any, deadline: Deadline) -> None:
        """Send a request to all endpoints in parallel, so that an endpoint that hangs delays no other endpoint. Logs failures."""
        answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        for address in self._proxy.addresses:
            try:
                channel = self._proxy.channel_of(address)
                channel.invoke_async(rpc, request, deadline, partial(_put_answer, answers, address))
            except RocketMQError as e:
                answers.put((address, e))
        for _ in self._proxy.addresses:
            address, answer = answers.get()
            try:
                if isinstance(answer, RocketMQError):
                    raise answer
                require_success(answer, address)
            except RocketMQError as e:
                logger.info("%s at %s: %s", rpc.name, address, e)
                with self._lock:
                    # An endpoint that fails delivers no messages, so its settings must not decide whether the group is ordered.
                    self._is_fifo_by_endpoint.pop(address, None)

    def _on_settings(self, address: str, settings: Any) -> None:
        if settings.HasField("backoff_policy"):
            policy = group_policy(settings)
            with self._lock:
                self._is_fifo_by_endpoint[address] = policy.ordered
                self._policy = replace(policy, ordered=all(self._is_fifo_by_endpoint.values()))

    def _settings(self) -> Any:
        settings = self._proxy.settings(ClientType.SIMPLE_CONSUMER)
        settings.subscription.group.CopyFrom(self._proxy.resource(self._group))
        # A Proxy uses this field until brokers report the group's settings.
        settings.subscription.fifo = self._ordered
        for topic, topic_filter in self._filters.items():
            settings.subscription.subscriptions.add(
                topic=self._proxy.resource(topic), expression=_expression(topic_filter)
            )
        return settings

    def _assigned_queues(self, topic: str, deadline: Deadline) -> Sequence[Any]:
        cached_assignment = self._assignments.get(topic)
        if cached_assignment is not None and not cached_assignment[1].expired:
            return cached_assignment[0]
        request = proto("QueryAssignmentRequest")(
            topic=self._proxy.resource(topic),
            group=self._proxy.resource(self._group),
            endpoints=self._proxy.endpoints(),
        )
        answer = self._proxy.request(tables.QUERY_ASSIGNMENT, request, deadline, topic)
        queues = [assignment.message_queue for assignment in answer.assignments]
        if not queues:
            raise RouteNotFound("no broker of the topic lets this group read", topic=topic)
        if len(queues) > _MAX_BROKERS:
            text = f"the Proxy lists {len(queues)} brokers for the topic; expected at most {_MAX_BROKERS}"
            raise RemoteProtocolError(text, topic=topic)
        self._assignments[topic] = queues, Deadline.after(_ASSIGNMENT_AGE_S)
        return queues


def _settings_errors(streams: Sequence[TelemetryStream], deadline: Deadline) -> list[RocketMQError | None]:
    """Return for each stream the error of its settings; None if the endpoint has accepted them. Waits for slow endpoints only
    until one endpoint has accepted the settings.
    """
    errors = [
        stream.wait(deadline.within(_OTHER_ENDPOINTS_TIMEOUT_S), waits_through_errors=False) for stream in streams
    ]
    return errors if None in errors else [stream.wait(deadline) for stream in streams]


def _put_answer(answers: SimpleQueue[tuple[str, Any]], address: str, answer: Any) -> None:
    answers.put((address, answer))


def _expression(topic_filter: Filter) -> Any:
    kind = FilterType.SQL if topic_filter.kind == "SQL92" else FilterType.TAG
    return proto("FilterExpression")(type=kind, expression=topic_filter.expression)
