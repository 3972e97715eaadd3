"""Checks and encodes messages: properties, compression, batch items.

Mirrors ``Validators``, the first half of ``DefaultMQProducerImpl.sendKernelImpl``, and ``MessageBatch``. Messages that a broker
would always reject, or would accept and then lose or corrupt, are rejected here. The caller's message is never changed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence, Sized
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.arguments import check_instance, check_text
from rocketmq_spark.base.codes import LONGEST_DELAY_MS, Property, SysFlag
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message, MessageQueue, SendRequest
from rocketmq_spark.model.message import KeyedMessage
from rocketmq_spark.model.send import Batch, BatchStorage, MessageEncoder
from rocketmq_spark.options.transport import SELECTORS
from rocketmq_spark.producer.accumulator import MAX_KEYWORD_BYTES, MessageBatch, has_key, key_words
from rocketmq_spark.producer.settings import COMPRESSIONS, ProducerSettings
from rocketmq_spark.queues.selection import Selector
from rocketmq_spark.wire.compression import compress_if_smaller
from rocketmq_spark.wire.names import Scope, is_send_forbidden, topic_problem
from rocketmq_spark.wire.properties import check_message, encode_properties, message_properties

_BODY_TYPES = (bytes, bytearray, memoryview)


class How(NamedTuple):
    """The arguments of ``Producer.send`` besides the message, with the meaning described there.

    ``Destinations.resolve`` returns a ``How`` that has only the destination: a ``queue``, or a ``selector`` and its ``arg``,
    which are applied later, when the topic has a route.
    """

    queue: MessageQueue | None = None
    selector: str | Selector | None = None
    arg: object = None
    delay_level: int | None = None
    delay: float | timedelta | None = None
    deliver_at: int | datetime | None = None
    timeout_s: float | None = None

    @property
    def selection(self) -> tuple[str, Any] | None:
        """The name and argument of the selector; None if the selector is a function, or without a selector."""
        return (self.selector, self.arg) if isinstance(self.selector, str) else None


DEFAULT_HOW = How()


class EnvelopedMessage(NamedTuple):
    """The topic of the message in an envelope, and when the message is due."""

    topic: str
    due_ms: int


# A Proxy would keep only 32 bits of a larger priority.
_MAX_PRIORITY = 2**31 - 1
# All control characters except the two that separate properties.
_CONTROL_CHARACTER = re.compile("[\x00\x03-\x1f\x7f-\x9f]")


class PreparedMessage(NamedTuple):
    """A checked message with its id and its encoded properties. ``envelope`` is set if the message is the envelope of another
    message. ``half`` says whether the message is a half message.
    """

    message: Message
    msg_id: str
    properties: str
    delayed: bool
    envelope: EnvelopedMessage | None = None
    half: bool = False


def prepare(message: Message, msg_id: str, settings: ProducerSettings, how: How = DEFAULT_HOW) -> PreparedMessage:
    """Check ``message`` and encode its properties. Raises ``MessageRefused`` for a message that no broker would accept."""
    check_message(message)
    check_topic(message.topic, settings.scope)
    if (proxy_chooses_text := settings.features.queue_choice_problem) and how.queue is not None:
        raise MessageRefused(f"the message names {how.queue}, but {proxy_chooses_text}", topic=message.topic)
    body: object = message.body
    if isinstance(body, memoryview):  # a memoryview may have items of several bytes, or gaps
        message = dataclasses.replace(message, body=body.tobytes())
    check_body(message, settings)
    delay_property = _timing_property(how)
    system_properties = {
        Property.WAIT: "true" if message.wait_store_ok else "false",
        Property.UNIQ_KEY: msg_id,
        **delay_property,
    }
    if message.priority is not None:
        system_properties[Property.PRIORITY] = _priority(message, settings)
    if isinstance(message, KeyedMessage) and message.sharding_key:
        system_properties[Property.SHARDING_KEY] = message.sharding_key
    if proxy_chooses_text and how.selector is not None:
        system_properties |= _message_group(message.topic, how, proxy_chooses_text)
    try:
        properties = encode_properties(
            message_properties(message, **system_properties), codes.SINGLE_MAX_PROPERTIES_BYTES
        )
    except MessageRefused as e:
        raise MessageRefused(e.message, topic=message.topic) from None
    if settings.features.restricts_characters:
        _check_proxy_texts(message, properties)
    return PreparedMessage(message, msg_id, properties, bool(delay_property))


# The maximum bytes of the producer group's property, which a transport adds to a half message.
_MAX_GROUP_BYTES = len(Property.PRODUCER_GROUP) + 2 + 255


def as_half(prepared: PreparedMessage) -> PreparedMessage:
    """The message as a half message."""
    properties = prepared.properties + encode_properties({Property.TRANSACTION_PREPARED: "true"})
    size = len(properties.encode()) + _MAX_GROUP_BYTES
    if size > codes.SINGLE_MAX_PROPERTIES_BYTES:
        raise MessageRefused(
            f"Properties of {size} bytes exceed the {codes.SINGLE_MAX_PROPERTIES_BYTES} bytes that a half message may carry",
            topic=prepared.message.topic,
        )
    return prepared._replace(properties=properties, half=True)


def as_request(prepared: PreparedMessage, correlation_id: str, client_id: str, wait_s: float) -> PreparedMessage:
    """The message as a request (``prepareSendRequest``). The client ``client_id`` waits ``wait_s`` seconds for the reply."""
    properties = prepared.properties + encode_properties(
        {
            Property.CORRELATION_ID: correlation_id,
            Property.REPLY_TO_CLIENT: client_id,
            Property.TTL: str(round(1000 * wait_s)),
        }
    )
    size = len(properties.encode())
    if size > codes.SINGLE_MAX_PROPERTIES_BYTES:
        raise MessageRefused(
            f"Properties of {size} bytes exceed the {codes.SINGLE_MAX_PROPERTIES_BYTES} bytes that a request may carry",
            topic=prepared.message.topic,
        )
    return prepared._replace(properties=properties)


def _check_proxy_texts(message: Message, properties: str) -> None:
    """Reject texts for which a Proxy would reject the whole request, so that other messages of the batch do not fail."""
    if match := _CONTROL_CHARACTER.search(properties):
        name = properties[: match.start()].rpartition("\x02")[2].partition("\x01")[0]
        raise MessageRefused(
            f"property {name!r} has the control character {match[0]!r}, which a Proxy rejects", topic=message.topic
        )
    if "|" in (message.tags or ""):
        raise MessageRefused(f"the tag is {message.tags!r}; a Proxy accepts no tag with '|'", topic=message.topic)


def _priority(message: Message, settings: ProducerSettings) -> str:
    if not settings.features.supports_priorities:
        raise MessageRefused(
            "the message has a priority, which only gRPC supports", topic=message.topic, remedy="Set transport=grpc"
        )
    priority: object = message.priority
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= _MAX_PRIORITY:
        raise MessageRefused(
            f"the message's priority is {priority!r}; expected a whole number from 0 to {_MAX_PRIORITY}",
            topic=message.topic,
        )
    return str(priority)


def check_topic(topic: str, scope: Scope | None = None) -> None:
    """Check the length and characters of a topic name as Java does, and reject system topics to which clients cannot send. The
    length is that of the name on the wire, which ``scope`` makes longer.
    """
    if topic is not None:
        check_text("topic", topic, "the name of a topic")
    problem = _topic_problem(topic, scope)
    if problem:
        raise MessageRefused(problem.rstrip("."), topic=topic or None)


@functools.lru_cache(1024)  # many messages go to few topics
def _topic_problem(topic: str, scope: Scope | None) -> str | None:
    problem = topic_problem(topic or "", scope)
    if problem is None and is_send_forbidden(topic):
        return f"Sending message to topic [{topic}] is forbidden."
    return problem


def check_body(message: Message, settings: ProducerSettings) -> None:
    body: object = message.body
    if body is None:
        raise MessageRefused("the message body is null", topic=message.topic)
    if not isinstance(body, _BODY_TYPES):
        raise MessageRefused(f"the message body is {type(body).__name__}; expected bytes", topic=message.topic)
    if not len(body):
        raise MessageRefused("the message body length is zero", topic=message.topic)
    if len(body) > settings.max_message_size:
        raise MessageRefused(
            f"the message body size over max value, MAX: {settings.max_message_size}, it has {len(body)} bytes",
            topic=message.topic,
        )


def check_queue(topic: str, queue: MessageQueue) -> None:
    check_instance("queue", queue, MessageQueue, "a MessageQueue, such as queues() returns")
    if queue.topic != topic:
        raise MessageRefused(f"message's topic not equal mq's topic: {topic!r} and {queue}", topic=topic)


def _message_group(topic: str, how: How, proxy_chooses_text: str) -> dict[str, str]:
    """Return the sharding key of selector ``hash`` over gRPC, where the Proxy chooses one queue for each message group."""
    name = how.selector.lower() if isinstance(how.selector, str) else ""
    if name not in (selector.lower() for selector in SELECTORS):
        raise MessageRefused(
            f"selector {how.selector!r} chooses a queue, but {proxy_chooses_text}; expected one of {', '.join(SELECTORS)}",
            topic=topic,
        )
    return {Property.SHARDING_KEY: str(how.arg)} if name == "hash" else {}


def _timing_property(how: How) -> dict[str, str]:
    level, delay, deliver_at = how.delay_level, how.delay, how.deliver_at
    if level is None and delay is None and deliver_at is None:
        return {}
    if sum(value is not None for value in (level, delay, deliver_at)) > 1:
        raise MessageRefused("a message can be delayed in one way only: delay_level, delay or deliver_at")
    if level is not None:
        return _level_property(level)
    if delay is not None:
        return _delay_property(delay)
    return _deliver_at_property(deliver_at)


def _level_property(value: object) -> dict[str, str]:
    # The level has no upper bound, because a broker may be configured with more levels than the default ones.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MessageRefused(f"delay level {value!r}: expected a whole number of at least 0")
    return {Property.DELAY: str(value)} if value else {}


def _delay_property(value: object) -> dict[str, str]:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= LONGEST_DELAY_MS / 1000:
        raise MessageRefused(
            f"delay {value!r}: expected seconds or a timedelta, from 0 to {LONGEST_DELAY_MS // 1000} seconds"
        )
    return {Property.TIMER_DELAY_MS: str(round(seconds * 1000))} if seconds else {}


def _deliver_at_property(value: object) -> dict[str, str]:
    if isinstance(value, datetime):
        value = round(value.timestamp() * 1000)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LONGEST_DELAY_MS:
        raise MessageRefused(
            f"deliver_at {value!r}: expected a datetime or epoch milliseconds, no more than {LONGEST_DELAY_MS}"
        )
    return {Property.TIMER_DELIVER_MS: str(value)}


def single_request(prepared: PreparedMessage, settings: ProducerSettings, now_ms: int) -> SendRequest:
    """The request of one message. A large body is compressed if the compressed body is smaller, as in Java (zlib, level 5)."""
    body, sys_flag = bytes(prepared.message.body), 0
    compression = COMPRESSIONS[settings.compression]
    if compression is not None and len(body) >= settings.compress_above:
        compressed = compress_if_smaller(body, compression)
        if compressed is not None:
            body, sys_flag = compressed, int(SysFlag.COMPRESSED | compression)
    return SendRequest(
        group=settings.group,
        body=body,
        properties=prepared.properties,
        sys_flag=sys_flag | (SysFlag.TRANSACTION_PREPARED if prepared.half else 0),
        flag=prepared.message.flag,
        born_timestamp_ms=now_ms,
        default_topic_queues=settings.default_topic_queues,
    )


def batch_item(prepared: PreparedMessage, encoder: MessageEncoder, now_ms: int) -> Sized:
    """The message as an item of a batch, with all its properties, because the broker adds none."""
    message = prepared.message
    return encoder.encode_item(message.topic, message.body, prepared.properties, message.flag, now_ms)


def explicit_batch(
    prepared_messages: Sequence[PreparedMessage],
    batch_id: str | None,
    settings: ProducerSettings,
    now_ms: int,
    encoder: MessageEncoder,
) -> SendRequest:
    """The request of ``send_batch``, with Java's rules (``MessageBatch.generateFromList``).

    The batch has no id, because brokers before 5.5 would copy the id to each message if the topic stores each message
    separately. For a topic that stores a batch as one message, ``with_storage_properties`` adds an id.
    """
    if not prepared_messages:
        raise MessageRefused("the batch has no messages")
    first_message = prepared_messages[0].message
    if first_message.topic.startswith(codes.RETRY_PREFIX):
        raise MessageRefused("Retry Group is not supported for batching", topic=first_message.topic)
    for prepared_message in prepared_messages:
        if prepared_message.delayed:
            raise MessageRefused("TimeDelayLevel is not supported for batching", topic=first_message.topic)
        if prepared_message.message.topic != first_message.topic:
            raise MessageRefused(
                "The topic of the messages in one batch should be the same", topic=prepared_message.message.topic
            )
        if prepared_message.message.wait_store_ok != first_message.wait_store_ok:
            raise MessageRefused(
                "The waitStoreMsgOK of the messages in one batch should be the same", topic=first_message.topic
            )
    items: list[Sized] = []
    for prepared_message in prepared_messages:
        try:
            items.append(batch_item(prepared_message, encoder, now_ms))
        except MessageRefused as e:
            raise MessageRefused(
                f"Message {len(items)} of a batch: {e.message}", topic=e.topic, remedy=e.remedy
            ) from e.__cause__
    body = encoder.encode_batch(items)
    if len(body) > settings.max_message_size:
        raise MessageRefused(
            f"the encoded batch has {len(body)} bytes, more than the {settings.max_message_size} allowed",
            topic=first_message.topic,
        )
    id_property = {} if batch_id is None else {Property.UNIQ_KEY: batch_id}
    return batch_request(
        body, {Property.WAIT: str(first_message.wait_store_ok).lower(), **id_property}, settings, now_ms
    )


def no_key_reason(topic: str) -> str:
    """Describe why a compaction topic would drop a message without a key."""
    return f"no key, but {topic!r} is a compaction topic, of which brokers keep messages with a key only"


def with_storage_properties(
    request: SendRequest, prepared_messages: Sequence[PreparedMessage], batch_id: str, storage: BatchStorage
) -> SendRequest:
    """Return the batch with the properties that the storage of its topic requires.

    A batch that is stored as one message gets an id, the common tag, and the keys of all messages. Java's explicit batches have
    no id, tag or keys, so no filter matches them.

    Raises:
        MessageRefused: A message has no key, and the topic is a compaction topic, which would drop this message.
    """
    messages = [prepared_message.message for prepared_message in prepared_messages]
    if storage.is_compacted and (
        keyless_numbers := [number for number, message in enumerate(messages) if not has_key(message.keys)]
    ):
        topic = messages[0].topic
        raise MessageRefused(f"Message {keyless_numbers[0]} of a batch has {no_key_reason(topic)}", topic=topic)
    if not storage.as_one_message:
        return request
    keywords = dict.fromkeys(word for message in messages for word in key_words(message.keys))
    tag = messages[0].tags if len({message.tags or None for message in messages}) == 1 else None
    size = sum(len(word.encode()) + 1 for word in keywords) + len((tag or "").encode())
    storage_properties: dict[str, str | None] = {
        Property.UNIQ_KEY: batch_id,
        Property.TAGS: tag or None,
        Property.KEYS: codes.KEY_SEPARATOR.join(keywords) if keywords and size <= MAX_KEYWORD_BYTES else None,
    }
    return request._replace(properties=request.properties + encode_properties(storage_properties))


def accumulated_batch(
    batch: MessageBatch, batch_id: str | None, settings: ProducerSettings, now_ms: int, encoder: MessageEncoder
) -> SendRequest:
    """The request of a batch of the accumulator. If the topic stores a batch as one message, the caller passes ``batch_id``, and
    the batch gets an id, a tag and keys. Without ``batch_id``, the batch gets none of them, because brokers before 5.5 would copy
    them to each message.
    """
    properties, body = {Property.WAIT: str(batch.key.wait_store_ok).lower()}, encoder.encode_batch(batch.items())
    if batch_id is None:
        return batch_request(body, properties, settings, now_ms)
    properties[Property.UNIQ_KEY] = batch_id
    if batch.key.tag:
        properties[Property.TAGS] = batch.key.tag
    if batch.keywords:
        properties[Property.KEYS] = codes.KEY_SEPARATOR.join(batch.keywords)
    return batch_request(body, properties, settings, now_ms)


def batch_request(
    body: bytes | memoryview | Batch, properties: dict[str, str], settings: ProducerSettings, now_ms: int
) -> SendRequest:
    """The request of an encoded batch. Batches are never compressed."""
    return SendRequest(
        group=settings.group,
        body=body,
        properties=encode_properties(properties),
        born_timestamp_ms=now_ms,
        batch=True,
        default_topic_queues=settings.default_topic_queues,
    )
