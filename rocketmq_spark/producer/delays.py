"""Delayed messages that a broker's timers cannot keep (option ``longDelay``), because the delay is too long, the timers are
disabled, or the broker is older than 5.0.

With ``longDelay=dmq``, a message with a long delay goes to ``dmq_inner_topic`` in an envelope, and the delay service sends the
message when it is due. With ``longDelay=error``, the message is rejected. Two answers of brokers are cached: the limits of their
timers, and whether a group consumes envelopes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence, Set

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import TIMER_MAX_DELAY_S, Property
from rocketmq_spark.errors import AccessDenied, CallTimeout, MessageRefused, RocketMQError, RouteNotFound
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.encoding import DEFAULT_HOW, EnvelopedMessage, How, PreparedMessage, single_request
from rocketmq_spark.producer.outgoing import with_message_ids
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spool_bridge import selector_function
from rocketmq_spark.wire.envelope import INNER_TOPIC, QUEUE, DelayHandle, Envelope, cancel_envelope
from rocketmq_spark.wire.properties import decode_properties, encode_properties

logger = logging.getLogger(__name__)

# How long three results are cached: the limits of a broker's timers, a missing answer, and the existence of a consumer.
LIMITS_VALID_S, SILENT_RETRY_S, CONSUMER_VALID_S = 600.0, 30.0, 10.0
_UNKNOWN_LIMIT: tuple[int | None, Deadline] = (None, Deadline(0.0))
_TIMER_PROPERTIES = (Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
_REMEDY = "Start the delay service: rocketmq-spark delay serve, or the Spark job of docs/delay.md"


class BrokerTimers:
    """The maximum delays of brokers' timers. All users of a cluster may share the ``limit_cache``.

    A broker that does not answer is asked again after ``retry_pause_s`` seconds.
    """

    def __init__(
        self,
        sender: Sender,
        limit_cache: MutableMapping[str, tuple[int | None, Deadline]],
        retry_pause_s: float = SILENT_RETRY_S,
    ) -> None:
        self._sender = sender
        self._limit_cache = limit_cache
        self._retry_pause_s = retry_pause_s

    def max_delays_ms(self, topic: str, brokers: Collection[str], deadline: Deadline) -> dict[str, int]:
        """The maximum delay of each broker's timers, 0 for a broker without timers. If a broker does not answer, the result has
        its last answer. A broker that has never answered is missing from the result.
        """
        due_brokers = [name for name in brokers if self._limit_cache.get(name, _UNKNOWN_LIMIT)[1].expired]
        if due_brokers:
            reported_delays_ms = self._sender.max_timer_delays_ms(topic, sorted(due_brokers), deadline)
            for name in due_brokers:
                if name not in reported_delays_ms:
                    logger.info("broker %s does not report its timers", name)
                # A broker without timers is asked each time, because its delayed messages are rejected until it is upgraded.
                valid_s = (
                    self._retry_pause_s
                    if name not in reported_delays_ms
                    else LIMITS_VALID_S
                    if reported_delays_ms[name]
                    else 0.0
                )
                cached_delay_ms, _ = self._limit_cache.get(name, _UNKNOWN_LIMIT)
                self._limit_cache[name] = reported_delays_ms.get(name, cached_delay_ms), Deadline.after(valid_s)
        max_delays = {name: self._limit_cache[name][0] for name in brokers}
        return {name: max_delay_ms for name, max_delay_ms in max_delays.items() if max_delay_ms is not None}

    def brokers_without_timers(self, topic: str, brokers: Collection[str], deadline: Deadline) -> list[str]:
        """The brokers without timers, which would deliver delayed messages at once."""
        return sorted(name for name, ms in self.max_delays_ms(topic, brokers, deadline).items() if not ms)


class DelayRouter:
    """Decides whether a delayed message needs an envelope, and creates envelopes.

    ``is_transient`` returns whether an error is temporary; None without a spool. If a temporary error prevents the check for a
    consumer of envelopes, the envelope is created nevertheless.
    """

    def __init__(
        self,
        sender: Sender,
        timers: BrokerTimers,
        settings: ProducerSettings,
        wall_ms: Callable[[], int],
        is_transient: Callable[[RocketMQError], bool] | None = None,
    ) -> None:
        self._is_transient = is_transient
        self._sender = sender
        self.timers = timers
        self._settings = settings
        self._wall_ms = wall_ms
        self._consumer_known_until = Deadline(0.0)

    def route(
        self,
        prepared: PreparedMessage,
        destination: How,
        queues: Callable[[], Sequence[MessageQueue]],
        deadline: Deadline,
        require_answers: bool = False,
    ) -> tuple[PreparedMessage, How]:
        """Return the message, or its envelope if it needs one, with the destination to send it to. ``queues`` returns the queues
        of the topic.

        With ``require_answers``, raises ``CallTimeout`` if a broker has never reported its timers.
        """
        candidates = (destination.queue,) if destination.queue is not None else queues()
        brokers = {queue.broker_name for queue in candidates}
        due_ms = self.envelope_due_ms(prepared.message.topic, prepared.properties, brokers, deadline, require_answers)
        if due_ms is None:
            return prepared, destination
        queue = destination.queue
        if queue is None and (destination.selection is not None or self._settings.environment is not None):
            # The queue is chosen now, because the delay service does not know environments and selectors.
            queue = self._choose_queue(prepared.message.topic, destination, candidates)
        return self.to_envelope(prepared, due_ms, queue, deadline), DEFAULT_HOW

    def _choose_queue(self, topic: str, destination: How, queues: Sequence[MessageQueue]) -> MessageQueue:
        if not queues:
            raise MessageRefused(
                "the queue of a message with a delay of this length must be chosen now, but no name server reports the "
                "queues of its topic",
                topic=topic,
                remedy="Send the message again when a name server answers",
            )
        return random.choice(
            queues if destination.selection is None else selector_function(topic, *destination.selection)(queues)
        )

    def envelope_due_ms(
        self, topic: str, properties: str, brokers: Set[str], deadline: Deadline, require_answers: bool = False
    ) -> int | None:
        """The due time of a message that needs an envelope. None if the message has no delay, or if the timers of all ``brokers``
        can keep the delay.

        With ``longDelay=error``, raises ``MessageRefused`` if a broker would deliver the message at once. Brokers themselves
        reject a delay that is too long. ``require_answers`` is the same as in ``route``.
        """
        timer_properties = decode_properties(properties)
        delay, deliver_at = (timer_properties.get(name) for name in _TIMER_PROPERTIES)
        if delay is None and deliver_at is None:
            return None
        now_ms = self._wall_ms()
        due_ms = now_ms + int(delay) if delay is not None else int(deliver_at or 0)
        if due_ms <= now_ms:
            return None
        max_delays = self.timers.max_delays_ms(topic, brokers, deadline)
        brokers_without_timers = sorted(name for name, ms in max_delays.items() if not ms)
        if brokers_without_timers and self._settings.long_delay == "error":
            raise no_timers_error(f"a delay of {(due_ms - now_ms) / 1000:g} s", brokers_without_timers, topic)
        max_delay_ms = min(max_delays.values(), default=1000 * TIMER_MAX_DELAY_S)
        if due_ms - now_ms > max_delay_ms and self._settings.long_delay == "dmq":
            return due_ms
        if require_answers and (silent_brokers := sorted(brokers - max_delays.keys())):
            raise CallTimeout(
                f"{', '.join(silent_brokers)} did not report timers, and might deliver a delayed message at once",
                topic=topic,
            )
        return None

    def to_envelope(
        self, prepared: PreparedMessage, due_ms: int, queue: MessageQueue | None, deadline: Deadline
    ) -> PreparedMessage:
        """The envelope of a message, with the message in its body. Raises ``MessageRefused`` if no group consumes envelopes."""
        self._check_consumer(deadline)
        message = prepared.message
        body = envelope_bytes(message, prepared.properties, due_ms, self._wall_ms(), queue)
        if len(body) > self._settings.max_message_size:
            raise MessageRefused(
                f"the message has {len(body)} bytes in the envelope that a delay of this length needs; expected at most "
                f"{self._settings.max_message_size}, option 'maxMessageSize'",
                topic=message.topic,
            )
        msg_id = decode_properties(prepared.properties)[Property.UNIQ_KEY]
        properties = encode_properties({Property.WAIT: "true", Property.UNIQ_KEY: msg_id})
        return PreparedMessage(
            Message(INNER_TOPIC, body), prepared.msg_id, properties, True, EnvelopedMessage(message.topic, due_ms)
        )

    def _check_consumer(self, deadline: Deadline) -> None:
        if not self._consumer_known_until.expired:
            return
        try:
            is_consumed = self._sender.has_online_consumer(INNER_TOPIC, deadline)
        except RocketMQError as e:
            is_consumed = isinstance(e, AccessDenied) or (self._is_transient is not None and self._is_transient(e))
            if not is_consumed and not isinstance(e, RouteNotFound):
                raise
            if is_consumed:
                logger.warning("cannot check whether a group consumes %s: %s", INNER_TOPIC, e)
        if not is_consumed:
            raise MessageRefused(
                f"option 'longDelay' is 'dmq', but no member of a consumer group consumes {INNER_TOPIC}: the message would "
                "never be delivered",
                topic=INNER_TOPIC,
                remedy=_REMEDY,
            )
        self._consumer_known_until = Deadline.after(CONSUMER_VALID_S)


def send_to_all(queues: Iterable[MessageQueue], send: Callable[[MessageQueue], object]) -> None:
    """Call ``send`` for each queue, also after errors. Raises the first error at the end."""
    errors: list[RocketMQError] = []
    for queue in queues:
        try:
            send(queue)
        except RocketMQError as e:
            errors.append(e)
    if errors:
        raise errors[0]


def caller_result(result: SendResult, prepared: PreparedMessage) -> SendResult:
    """The result of one message, with its id and recall handle."""
    return with_recall_handle(with_message_ids(result, (prepared.msg_id,)), prepared)


def with_recall_handle(result: SendResult, prepared: PreparedMessage) -> SendResult:
    """Return the result with the recall handle of an envelope. Returns the result unchanged if the queue of the envelope is
    unknown.
    """
    envelope, queue = prepared.envelope, result.queue
    if envelope is None or queue is None or result.queue_offset is None:
        return result
    handle = DelayHandle(envelope.topic, queue.broker_name, queue.queue_id, envelope.due_ms, prepared.msg_id)
    return result._replace(recall_handle=str(handle))


def envelope_bytes(message: Message, properties: str, due_ms: int, born_ms: int, queue: MessageQueue | None) -> bytes:
    """Encode an envelope. It contains ``message`` with its encoded ``properties``, and names ``queue`` if a queue was chosen."""
    properties_by_name = {
        name: value for name, value in decode_properties(properties).items() if name not in _TIMER_PROPERTIES
    }
    msg_id = properties_by_name.get(Property.UNIQ_KEY, "")
    if queue is not None:
        properties_by_name[QUEUE] = f"{queue.broker_name}:{queue.queue_id}"
    text = encode_properties(properties_by_name)
    return Envelope(message.topic, due_ms, msg_id, born_ms, message.flag, text, bytes(message.body)).pack()


def cancel_request(
    handle: DelayHandle, topic: str, msg_id: str, settings: ProducerSettings, now_ms: int
) -> SendRequest:
    """The request that cancels an envelope, for the queue to which the envelope was sent."""
    if handle.topic != topic:
        raise MessageRefused(f"the recall handle belongs to topic {handle.topic!r}", topic=topic)
    if handle.due_ms <= now_ms:
        raise MessageRefused(
            f"it is too late to recall message {handle.msg_id}: it was due {(now_ms - handle.due_ms) / 1000:g} s ago",
            topic=topic,
        )
    body = cancel_envelope(topic, handle.due_ms, handle.msg_id, now_ms)
    properties = encode_properties({Property.WAIT: "true", Property.UNIQ_KEY: msg_id})
    return single_request(PreparedMessage(Message(INNER_TOPIC, body), msg_id, properties, False), settings, now_ms)


def no_timers_error(delay_text: str, brokers: Collection[str], topic: str) -> MessageRefused:
    """The error for a delay that brokers without timers would not keep."""
    return MessageRefused(
        f"{delay_text} cannot be kept: {', '.join(brokers)} is older than RocketMQ 5.0, or has timerWheelEnable=false",
        topic=topic,
        remedy="Set option 'longDelay' to 'dmq' with the service of docs/delay.md, use a delay level, or newer brokers",
    )
