"""The ``Resender`` port over an engine: sends the records of a spool like other messages, but does not spool them again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import KEY_SEPARATOR, RESERVED_PROPERTIES, RETRY_PREFIX, Property, SysFlag, timer_due_ms
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.errors import (
    ClosedError,
    DecodeError,
    MessageIllegal,
    MessageRefused,
    OptionError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import Message, MessageQueue, Resent, SendStatus, SpooledSend
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.accumulator import MAX_KEYWORD_BYTES, has_key, key_words
from rocketmq_spark.producer.delays import BrokerTimers, DelayRouter
from rocketmq_spark.producer.encoding import How, PreparedMessage, single_request
from rocketmq_spark.producer.engine import Engine, WriteBatching
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spool_bridge import cause_of, is_transient, selector_function
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire.compression import decompress
from rocketmq_spark.wire.identifiers import UniqKeys
from rocketmq_spark.wire.messages import BatchItem, decode_batch, encode_batch, encode_item
from rocketmq_spark.wire.properties import decode_properties, encode_properties

logger = logging.getLogger(__name__)

# The timeout of a send from the spool is Java's default send timeout. A longer timeout, such as that of a sink, would let one
# slow send delay the records of other queues.
RESEND_TIMEOUT_S = 3.0
# If a broker did not report its timers, it is asked again after this pause. Other records wait during each request for timers,
# so these requests must not follow each other at once.
SILENT_RETRY_S = 1.0
# How long the ``BatchStorage`` of a topic is cached. The topic may be deleted and created again with another type.
STORAGE_AGE_S = 30.0
# How long sends are collected before they are written together.
GATHER_S = 0.002
# Limits of one batch: its messages, its bytes, and the span of its messages' born timestamps. All messages of a batch get one
# born timestamp.
_MAX_BATCH_MESSAGES, _MAX_BATCH_BYTES, _MAX_BORN_SPREAD_MS = 256, 1 << 20, 1000
# The system properties that a message in a batch may have. All other system properties are instructions to the broker, and in a
# batch the broker ignores them.
_BATCH_PROPERTIES = {Property.TAGS, Property.KEYS, Property.UNIQ_KEY, Property.WAIT, Property.SHARDING_KEY}
_TIMER_PROPERTIES = (Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
# The errors of a missing topic, and of an environment without a queue. These errors may be temporary: a broker may be down, or
# may not have registered yet.
_MISSING_TOPIC_ERRORS = (RouteNotFound, OptionError)
# The text with which a broker without timers rejects a delayed message (code 1), even if the message is due.
_NO_TIMERS_TEXT = "accurate timer message is not enabled"
_id_source = UniqKeys()


class EngineResender:
    """Sends through an engine of its own, so that the limits of the producer apply only to new messages.

    ``batch_writes`` returns a context in which all sends are written at once. With ``batch_writes``, sends are collected for
    ``GATHER_S``.
    """

    def __init__(
        self,
        sender: Sender,
        settings: ProducerSettings,
        timer: Timer,
        batch_writes: WriteBatching | None = None,
    ) -> None:
        resend_settings = dataclasses.replace(
            settings,
            send_timeout_s=RESEND_TIMEOUT_S,
            attempt_timeout_s=None,
            retries=2,
            pinned_retries=0,
            send_latency_fault=True,  # messages for any queue avoid a broker that hangs
            detector=False,
            failed_queues_stay_closed=False,
            max_in_flight=1024,
            max_in_flight_per_broker=None,
            max_async_messages=None,
        )
        self._sender = sender
        self._store_must_be_ok = settings.store_must_be_ok
        self._max_message_size = settings.max_message_size
        self._engine = Engine(sender, resend_settings, timer, batch_writes=batch_writes or contextlib.nullcontext)
        self._timer = timer
        # The thread for requests about topics and timers, and for sends that need the answers.
        self._request_executor = timer.with_own_thread("timers")
        self._settings = settings
        self._long_delays = DelayRouter(sender, BrokerTimers(sender, {}, SILENT_RETRY_S), settings, timer.wall_ms)
        self._gathers_sends = batch_writes is not None
        self._storage_due_ms: dict[str, int] = {}  # by topic: when its ``BatchStorage`` must be fetched again
        self._dispatch_lock = threading.Lock()  # locked while a dispatch is scheduled

    def pin_queues(self, queues: Mapping[str, tuple[MessageQueue, ...]]) -> None:
        """Send the records of each topic in ``queues`` only to the topic's queues in this mapping."""
        self._engine.routes.pinned_queues = queues

    def batch_predicate(self, first_send: SpooledSend) -> Callable[[SpooledSend], bool]:
        max_messages = self._settings.features.max_single_requests or _MAX_BATCH_MESSAGES
        return _BatchBuilder(
            first_send,
            min(_MAX_BATCH_BYTES, self._max_message_size),
            max_messages,
            self._stores_keyless_messages(first_send.topic),
        ).try_add

    def _stores_keyless_messages(self, topic: str) -> bool:
        """Whether a batch for the topic may contain messages without a key. False for a compaction topic, whose brokers drop such
        messages. Also False while no broker has reported the topic's type.
        """
        now_ms = self._timer.now_ms()
        if now_ms >= self._storage_due_ms.get(topic, now_ms):
            # The time of the next request is set before the call, because ``_fetch_storage`` sets an earlier time if no broker
            # answers.
            self._storage_due_ms[topic] = now_ms + round(1000 * STORAGE_AGE_S)
            # The request runs on another thread, because the spool must not wait for an answer.
            self._request_executor.call_soon(functools.partial(self._fetch_storage, topic))
        storage = self._engine.routes.storage.get(topic)
        return storage is not None and not storage.is_compacted

    def _fetch_storage(self, topic: str) -> None:
        if self._engine.routes.fetch_storage(topic, Deadline.after(RESEND_TIMEOUT_S)) is None:
            self._storage_due_ms[topic] = self._timer.now_ms() + round(1000 * SILENT_RETRY_S)

    def join_sends(self, sends: Sequence[SpooledSend]) -> SpooledSend:
        builder = _BatchBuilder(sends[0], len(sends) * self._max_message_size)
        for send in sends[1:]:
            if not builder.try_add(send):
                raise ValueError(f"{send} does not fit into the batch of {sends[0]}")
        is_stored_whole = self._engine.routes.is_stored_whole(sends[0].topic)
        return builder.batch(_id_source.next(self._timer.wall_ms()) if is_stored_whole else None)

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        try:
            self._timer.start()  # the thread that dispatches and retries
        except RuntimeError as e:
            done(Resent(None, str(e), is_temporary=True))
            return
        environment = self._settings.environment
        # The queue of another environment was set by 'spool assign'.
        if environment is not None and self._is_of_other_environment(send.queue, environment):
            done(Resent(None, f"{send.queue} does not belong to environment {environment.name!r}"))
            return
        if self._settings.features.knows_timers and any(name in send.request.properties for name in _TIMER_PROPERTIES):
            self._request_executor.call_soon(functools.partial(self._resend_delayed_message, send, done))
        elif send.request.batch and not isinstance(send, _JoinedSend):
            self._request_executor.call_soon(functools.partial(self._resend_batch, send, done))
        else:
            self._resend(send, done)

    def _resend_batch(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        """Resend a batch. If a broker reports that the topic is no compaction topic, the batch is sent as a whole. If the type is
        unknown, the batch is split by keys, because a compaction topic drops messages without a key from a batch.
        """
        capture(self._engine.routes.fetch_storage, send.topic, Deadline.after(RESEND_TIMEOUT_S))
        storage = self._engine.routes.storage.get(send.topic)  # None if no broker has answered
        self._resend_each([send] if storage is not None and not storage.is_compacted else _split_by_key(send), done)

    def _is_of_other_environment(self, queue: MessageQueue | None, environment: Environment) -> bool:
        """Whether a queue belongs to another environment, according to cached routes."""
        if queue is None:
            return False
        if environment.is_by_position:
            return queue not in queues_of_environment(self._sender, environment).get(queue.topic, (queue,))
        return not environment.owned([queue], possibly_empty_topics=(queue.topic,))

    def _resend_delayed_message(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        """Resend a delayed message, as an envelope if a broker has no timers. The timers are checked now, because they may have
        been unknown when the message was spooled, and a broker without timers would deliver the message at once.
        """
        try:
            send = self._envelope_if_needed(send, Deadline.after(RESEND_TIMEOUT_S))
        except RocketMQError as e:
            is_rejected = isinstance(e, MessageRefused) and self._settings.long_delay == "error"
            is_temporary = isinstance(e, (*_MISSING_TOPIC_ERRORS, MessageRefused)) and not is_rejected
            done(Resent(None, str(e), is_temporary or is_transient(e, self._sender)))
        except Exception as e:  # each record must get an outcome
            logger.exception("cannot determine the timers of the brokers of %s", send.topic)
            done(Resent(None, f"{type(e).__name__}: {e}", is_temporary=True))
        else:
            self._resend(send, done)

    def _envelope_if_needed(self, send: SpooledSend, deadline: Deadline) -> SpooledSend:
        """The send itself, or its envelope if brokers of its topic cannot serve its delay."""
        request = send.request
        body = decompress(request.data, request.sys_flag) if request.sys_flag & SysFlag.COMPRESSED else request.data
        message = Message(send.topic, bytes(body), flag=request.flag)
        prepared = PreparedMessage(message, ",".join(send.msg_ids), request.properties, True)
        destination = How(send.queue, send.selector, send.arg)
        queues = functools.partial(self._engine.routes.queues, send.topic, deadline)
        prepared, _ = self._long_delays.route(prepared, destination, queues, deadline, require_answers=True)
        if prepared.envelope is None:
            return send
        topic, now_ms = prepared.message.topic, self._timer.wall_ms()
        return SpooledSend(topic, single_request(prepared, self._settings, now_ms), msg_ids=send.msg_ids)

    def _resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        filter_queues = None
        if send.queue is None and send.selector is not None:
            filter_queues = selector_function(send.topic, send.selector, send.arg)

        def on_completion(completion: SendCompletion) -> None:
            outcome = completion.outcome
            if isinstance(outcome, RocketMQError):
                if isinstance(outcome, MessageIllegal | MessageRefused) and (parts := _halves(send, outcome.stored)):
                    logger.warning("a batch that was rejected is sent in parts: %s", outcome)
                    self._resend_each(parts, done)
                    return
                cause = cause_of(outcome)
                # The timers may have been disabled after the check.
                lacks_timers = (cause.remark or "").startswith(_NO_TIMERS_TEXT)
                if (
                    lacks_timers
                    and (send_without_delay := _without_past_delay(send, self._timer.wall_ms())) is not None
                ):
                    self._resend(send_without_delay, done)
                    return
                # A ``ClosedError`` is temporary: ``close`` dropped the send, which is still in the spool.
                is_temporary = lacks_timers or isinstance(cause, (*_MISSING_TOPIC_ERRORS, ClosedError))
                done(Resent(None, str(outcome), is_temporary or is_transient(outcome, self._sender)))
            elif self._store_must_be_ok and outcome.status is not SendStatus.SEND_OK:
                reason = f"it was stored with {outcome.status.value}, and option 'requireStoreOk' is ok"
                done(Resent(None, reason, is_temporary=True))
            else:
                done(Resent(outcome.queue))

        outgoing = OutgoingSend(
            send.topic,
            send.request,
            Deadline.after(RESEND_TIMEOUT_S),
            send.queue,
            filter_queues=filter_queues,
            done=on_completion,
            msg_ids=send.msg_ids,
        )
        if not self._gathers_sends or not self._engine.enqueue(outgoing):
            self._engine.submit(outgoing)  # submit also reports that the engine is closed
        elif self._dispatch_lock.acquire(blocking=False):
            try:
                self._timer.call_later(GATHER_S, self._dispatch)
            except BaseException:  # the thread cannot start
                self._dispatch_lock.release()
                raise

    def _resend_each(self, parts: Sequence[SpooledSend], done: Callable[[Resent], None]) -> None:
        """Resend the parts of a batch, one after the other. After a temporary failure, no further part is sent, and the whole
        batch is retried later.
        """
        remaining_parts, failed_results = deque(parts), []

        def on_part_done(resent: Resent) -> None:
            if resent.error is not None:
                failed_results.append(resent)
            if remaining_parts and not resent.is_temporary:
                resend_next()
            else:
                done(resent if resent.is_temporary or not failed_results else failed_results[0])

        def resend_next() -> None:
            capture_result = capture(self._resend, remaining_parts.popleft(), on_part_done)
            if isinstance(capture_result, Failure):  # for example because no thread can start
                done(Resent(None, str(capture_result), is_temporary=True))

        resend_next()

    def _dispatch(self) -> None:
        self._dispatch_lock.release()
        self._engine.dispatch_ready()

    def close(self, deadline: Deadline) -> None:
        self._request_executor.close(deadline.remaining())
        self._engine.close(deadline)


class _JoinedSend(SpooledSend):
    """A batch that was joined from several records of a spool. If the batch is rejected, the spool sends each record
    separately.
    """


def _halves(send: SpooledSend, stored_ids: Collection[str]) -> list[SpooledSend]:
    """Return two halves of the messages of a batch, without the stored messages. Returns an empty list if only one message is not
    stored, because this message is the rejected one.
    """
    if not send.request.batch or isinstance(send, _JoinedSend):
        return []
    try:
        items = decode_batch(send.request.data)
    except DecodeError:
        return []
    items_and_ids = [(item, decode_properties(item.properties).get(Property.UNIQ_KEY, "")) for item in items]
    remaining_entries = [entry for entry in items_and_ids if entry[1] not in stored_ids]
    middle = len(remaining_entries) // 2
    return [_part(send, half) for half in (remaining_entries[:middle], remaining_entries[middle:])] if middle else []


def _split_by_key(send: SpooledSend) -> list[SpooledSend]:
    """Split a batch so that each message without a key is alone. A broker of a compaction topic rejects a single message
    without a key, but drops such a message from a batch without an error.
    """
    parts: list[list[tuple[BatchItem, str]]] = []
    is_keyed = False
    try:
        for item in decode_batch(send.request.data):
            properties, was_keyed = decode_properties(item.properties), is_keyed
            is_keyed = has_key([properties.get(Property.KEYS, "")])
            if not (was_keyed and is_keyed):
                parts.append([])
            parts[-1].append((item, properties.get(Property.UNIQ_KEY, "")))
    except DecodeError:
        return [send]
    return [_part(send, items) for items in parts] if len(parts) > 1 or not is_keyed else [send]


def _part(send: SpooledSend, items: Sequence[tuple[BatchItem, str]]) -> SpooledSend:
    request, ((first_item, _), *other_items) = send.request, items
    if other_items:
        properties = decode_properties(request.properties)
        if Property.UNIQ_KEY in properties:  # each batch needs its own id
            properties[Property.UNIQ_KEY] = _id_source.next(request.born_timestamp_ms)
        request = request._replace(
            body=encode_batch(item for item, _ in items), properties=encode_properties(properties)
        )
    else:
        request = request._replace(
            body=bytes(first_item.body), properties=first_item.properties, flag=first_item.flag, batch=False
        )
    return dataclasses.replace(send, request=request, msg_ids=tuple(msg_id for _, msg_id in items))


def _without_past_delay(send: SpooledSend, now_ms: int) -> SpooledSend | None:
    """Return the send without its delay; None if the delay has not passed. The caller removes the delay only after a broker
    without timers has rejected the message, because a Proxy rejects a message without a delay for a topic of delayed messages.
    """
    properties = decode_properties(send.request.properties)
    due_ms = timer_due_ms(properties, send.request.born_timestamp_ms)
    if due_ms is None or due_ms > now_ms:
        return None
    remaining_properties = {
        name: value for name, value in properties.items() if name not in (*_TIMER_PROPERTIES, Property.TIMER_DELAY_SEC)
    }
    return dataclasses.replace(send, request=send.request._replace(properties=encode_properties(remaining_properties)))


class _BatchBuilder:
    """Collects single messages for one queue into a batch. All messages have the same tag, because a topic that stores a batch as
    one message filters the batch by one tag.
    """

    def __init__(
        self,
        first_send: SpooledSend,
        max_bytes: int,
        max_messages: int = _MAX_BATCH_MESSAGES,
        accepts_keyless_messages: bool = True,
    ) -> None:
        self._first_send = first_send
        self._max_messages = max_messages
        self._accepts_keyless_messages = accepts_keyless_messages
        self._properties = self._properties_of(first_send)
        self._sends: list[SpooledSend] = []
        self._items: list[bytes] = []
        self._keywords: dict[str, None] = {}
        self._keyword_bytes = 0
        self._free_bytes = max_bytes
        if self._properties is not None:
            self._add(first_send, self._properties)

    def try_add(self, send: SpooledSend) -> bool:
        properties, first_properties = self._properties_of(send), self._properties
        if first_properties is None or properties is None or len(self._sends) >= self._max_messages:
            return False
        first_request, request = self._first_send.request, send.request
        has_same_settings = (
            _destination(self._first_send) == _destination(send)
            and (first_request.group, first_request.default_topic_queues)
            == (request.group, request.default_topic_queues)
            and all(first_properties.get(name) == properties.get(name) for name in (Property.TAGS, Property.WAIT))
            and abs(first_request.born_timestamp_ms - request.born_timestamp_ms) <= _MAX_BORN_SPREAD_MS
        )
        return has_same_settings and self._add(send, properties)

    def _properties_of(self, send: SpooledSend) -> Mapping[str, str] | None:
        properties = _batchable_properties(send)
        return (
            properties
            if properties is None or self._accepts_keyless_messages or has_key([properties.get(Property.KEYS, "")])
            else None
        )

    def _add(self, send: SpooledSend, properties: Mapping[str, str]) -> bool:
        item = encode_item(send.request.data, send.request.properties, send.request.flag)
        new_keywords = [
            keyword for keyword in key_words([properties.get(Property.KEYS, "")]) if keyword not in self._keywords
        ]
        new_bytes = sum(len(keyword.encode()) + 1 for keyword in new_keywords)
        if self._sends and (len(item) > self._free_bytes or self._keyword_bytes + new_bytes > MAX_KEYWORD_BYTES):
            return False
        self._free_bytes -= len(item)
        self._keyword_bytes += new_bytes
        self._keywords.update(dict.fromkeys(new_keywords))
        self._sends.append(send)
        self._items.append(item)
        return True

    def batch(self, batch_id: str | None) -> SpooledSend:
        """Return the batch. A batch has an id, tag and keys of its own only if it is stored as one message, because brokers
        before 5.5 copy the properties of a batch to each message (``encoding.explicit_batch``).
        """
        first_properties = self._properties or {}
        properties: dict[str, str | None] = {Property.WAIT: first_properties.get(Property.WAIT, "true")}
        if batch_id is not None:
            properties[Property.UNIQ_KEY] = batch_id
            properties[Property.TAGS] = first_properties.get(Property.TAGS)
            properties[Property.KEYS] = KEY_SEPARATOR.join(self._keywords) or None
        request = self._first_send.request._replace(
            body=b"".join(self._items), properties=encode_properties(properties), flag=0, batch=True
        )
        ids = tuple(msg_id for send in self._sends for msg_id in send.msg_ids)
        return _JoinedSend(
            self._first_send.topic,
            request,
            self._first_send.queue,
            ids,
            self._first_send.selector,
            self._first_send.arg,
        )


def _destination(send: SpooledSend) -> tuple[object, ...]:
    return send.topic, send.queue, send.selector, send.arg


def _batchable_properties(send: SpooledSend) -> Mapping[str, str] | None:
    """The properties of a send; None if the send may not become a message of a batch."""
    request = send.request
    if request.batch or request.sys_flag or request.reconsume_times or request.max_reconsume_times is not None:
        return None
    try:
        properties = decode_properties(request.properties)
    except DecodeError:
        return None
    is_batchable = properties.keys() & RESERVED_PROPERTIES <= _BATCH_PROPERTIES and not send.topic.startswith(
        RETRY_PREFIX
    )
    return properties if is_batchable else None
