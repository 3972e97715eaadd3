"""Parts of a delay node besides its loop: the state of queues, brokers and the node's disk, and envelopes as records of the
node's store.

``RecreationCheck`` checks whether a queue still has the messages that were read. A queue changes if its topic was created again,
or if its broker returned without its last messages. New messages of the queue then have offsets that were already read, but later
store times than all messages that were read. ``BackPressure`` pauses the reader while the disk is full. ``BrokerAvailability``
skips the queues of a broker for a while after the broker did not answer, so that other queues do not wait. ``Retention`` warns if
a broker keeps envelopes for a shorter time than an envelope waits, because a node that lost its disk can rebuild its store only
from the topic.

``effect_of`` turns an envelope into a record, and ``send_decoder`` turns a due record into a send. Both functions are pure: they
do no I/O. Records wait in ``spool/store``, and ``spool/redelivery`` takes them when they are due.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SINGLE_MAX_PROPERTIES_BYTES, Property
from rocketmq_spark.delay import release
from rocketmq_spark.delay.commits import REQUEST_TIMEOUT_S
from rocketmq_spark.delay.release import (
    PROBLEM_PROPERTY,
    Delivery,
    HasEnvelopes,
    Original,
    QueueCheckpoint,
    has_default_name,
    newest_store_ms_before,
)
from rocketmq_spark.errors import DecodeError, MessageRefused, OffsetError, RocketMQError, SpoolError, SpoolFull
from rocketmq_spark.model import Message, MessageQueue, QueueBounds, ReceivedMessage, Resent, SpooledSend
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.producer.encoding import PreparedMessage, single_request
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.lanes import RETRY_PAUSES_S, Schedule
from rocketmq_spark.spool.records import IDENTITY, Record
from rocketmq_spark.spool.redelivery import DeadLetters, TargetRules
from rocketmq_spark.spool.spool import RedeliveryPolicy, broker_target, topic_target
from rocketmq_spark.wire.envelope import INNER_TOPIC, DecodedEnvelope, digest
from rocketmq_spark.wire.properties import encode_properties

logger = logging.getLogger(__name__)

# The store time for a queue that has no message before the position. With this store time, every message that later appears
# before the position counts as new.
BEFORE_ALL_MESSAGES_MS = 1


class RecreationCheck:
    """Checks whether a topic was created again. The methods send requests to brokers in the name of ``group``, and raise the
    errors of these requests.
    """

    def __init__(self, member: GroupMember, group: str) -> None:
        self._member = member
        self._group = group

    def is_unchanged(self, queue: MessageQueue, checkpoint: QueueCheckpoint) -> bool:
        """Whether the queue seems to have the messages that were read. If the queue has lost these messages, a pull shows no
        error: it continues at the position, or at the new end of the queue.
        """
        end, newest_store_ms = checkpoint.end_and_newest_store_ms
        if not newest_store_ms or self._offset_at(queue, newest_store_ms + 1) >= end:
            return True
        return self._member.bounds(queue, Deadline.after(REQUEST_TIMEOUT_S)).min_offset >= end

    def has_last_message(self, queue: MessageQueue, checkpoint: QueueCheckpoint) -> bool:
        """Whether the last message that was read is certainly in this queue, at the same offset. The queue may belong to
        another cluster.
        """
        first_offset = self._offset_at(queue, checkpoint.newest_store_ms)
        return bool(checkpoint.newest_store_ms) and first_offset < checkpoint.read_end <= self._offset_at(
            queue, checkpoint.newest_store_ms + 1
        )

    def first_changed_offset_with_log(
        self, queue: MessageQueue, read_end: int, newest_store_ms: int, bounds: QueueBounds
    ) -> int | None:
        """Like ``first_changed_offset``, but also logs that messages have changed."""
        offset = self.first_changed_offset(queue, read_end, newest_store_ms, bounds)
        if offset is not None:
            logger.warning(
                "%s was read up to %d, and has newer messages from %d on: the topic was created again, the broker lost its "
                "last messages, or the node that read the queue was killed during a commit. Reading continues at the newer "
                "messages; old messages on this disk are still sent", queue, read_end, offset,
            )  # fmt: skip
        return offset

    def first_changed_offset(
        self, queue: MessageQueue, read_end: int, newest_store_ms: int, bounds: QueueBounds
    ) -> int | None:
        """Return the offset from which on the messages differ from the messages that were read; None if all messages are the
        same.
        """
        offset = read_end if read_end <= bounds.max_offset else 0
        if newest_store_ms:
            offset = self._offset_at(queue, newest_store_ms + 1)
        offset = max(offset, bounds.min_offset)
        return offset if offset < read_end else None

    def newest_store_ms(self, queue: MessageQueue, offset: int, now_ms: int) -> int:
        """The store time of the last message before ``offset``."""
        return newest_store_ms_before(offset, now_ms, partial(self._offset_at, queue)) or BEFORE_ALL_MESSAGES_MS

    def _offset_at(self, queue: MessageQueue, epoch_ms: int) -> int:
        return self._member.search_offset(queue, epoch_ms, Deadline.after(REQUEST_TIMEOUT_S), self._group)


# How long reading pauses after the disk was full, and the interval of the log line about the full disk.
FULL_DISK_PAUSE_S, FULL_DISK_LOG_S = 5.0, 60.0


class EnvelopeReader(Protocol):
    """The methods that a node needs of its pull consumer, which is subscribed to the inner topic."""

    def poll(self, timeout_s: float = 5.0) -> list[ReceivedMessage]: ...
    def assignment(self) -> list[MessageQueue]: ...
    def seek(self, queue: MessageQueue, offset: int) -> None: ...
    def pause(self, *queues: MessageQueue) -> None: ...
    def resume(self, *queues: MessageQueue) -> None: ...
    def close(self) -> None: ...


class BackPressure:
    """Pauses the reader while the disk of a folder has no room. Not thread-safe."""

    def __init__(self, folder: Path, reader: EnvelopeReader) -> None:
        self._folder = folder
        self._reader = reader
        self._is_paused = False
        self._pause_deadline = Deadline(0.0)
        self._next_log_deadline = Deadline(0.0)
        self._is_full = False

    def apply(self) -> None:
        """Pause or resume all queues. Call this method before each poll, because newly assigned queues must be paused, too."""
        was_paused, self._is_paused = self._is_paused, not self._pause_deadline.expired
        if not (self._is_paused or was_paused):
            return
        for queue in self._reader.assignment():
            with contextlib.suppress(OffsetError):  # the queue was revoked meanwhile
                (self._reader.pause if self._is_paused else self._reader.resume)(queue)

    def on_full(self, error: SpoolFull, waiting_count: int) -> None:
        """Record that the disk had no room while the node holds ``waiting_count`` messages."""
        self._pause_deadline = Deadline.after(FULL_DISK_PAUSE_S)
        if self._is_full and not self._next_log_deadline.expired:
            return
        self._is_full, self._next_log_deadline = True, Deadline.after(FULL_DISK_LOG_S)
        logger.error(
            "no room for more delayed messages: until there is room, this node reads no messages and no recalls; the %d messages "
            "that it holds are sent when they are due, if the disk can be written: %s", waiting_count, error,
        )  # fmt: skip

    def on_stored(self) -> None:
        """Record that the disk had room for new records."""
        if self._is_full:
            self._is_full = False
            logger.warning("there is room again in %s: reading delayed messages continues", self._folder)


class BrokerAvailability:
    """Remembers brokers whose queues had an error; they are tried again after ``retry_pause_s`` seconds. Not thread-safe."""

    def __init__(self, retry_pause_s: float) -> None:
        self._retry_pause_s = retry_pause_s
        self._retry_deadlines: dict[str, Deadline] = {}
        self.has_any_broker_answered = False

    def is_unavailable(self, queue: MessageQueue) -> bool:
        """Whether the queue's broker did not answer the last request."""
        return queue.broker_name in self._retry_deadlines

    def for_each(self, queues: Iterable[MessageQueue], step: Callable[[MessageQueue], None]) -> None:
        """Call ``step`` for each queue. If a broker does not answer, or sends an unusable answer, its queues are skipped for a
        while.

        Raises errors of the spool, and a permanent error if no broker has answered yet. Once a broker has answered, a permanent
        error is only logged, because it concerns only one broker.
        """
        permanent_error: RocketMQError | None = None
        for queue in sorted(queues):
            broker_name = queue.broker_name
            if broker_name in self._retry_deadlines and not self._retry_deadlines[broker_name].expired:
                continue
            try:
                step(queue)
                self._retry_deadlines.pop(broker_name, None)
                self.has_any_broker_answered = True
            except SpoolError:
                raise
            except Exception as e:  # wrong numbers from one broker must not stop the queues of other brokers
                if isinstance(e, RocketMQError) and not e.retriable:
                    permanent_error = permanent_error or e
                # Only the first failure of a broker is logged as a warning.
                level = logging.INFO if broker_name in self._retry_deadlines else logging.WARNING
                text = "%s is neither taken over nor handed over while its broker does not answer as expected: %s"
                logger.log(level, text, queue, e, exc_info=None if isinstance(e, RocketMQError) else e)
                self._retry_deadlines[broker_name] = Deadline.after(self._retry_pause_s)
        if permanent_error is not None and not self.has_any_broker_answered:
            raise permanent_error


# Interval of repeated log lines, and of requests for a broker's setting.
LOG_REPEAT_S = 3600.0


class Retention:
    """Compares delays with the retention of brokers. ``retention_ms`` returns a broker's retention; None if it is unknown. Not
    thread-safe.
    """

    def __init__(self, retention_ms: Callable[[str], int | None]) -> None:
        self._fetch_retention_ms = retention_ms
        self._longest_delays_ms: dict[str, int] = {}
        self._cached_retentions: dict[str, tuple[int | None, Deadline]] = {}
        self._next_log_deadlines: dict[str, Deadline] = {}

    def record_delay(self, broker_name: str, delay_ms: int) -> None:
        """Record that an envelope on this broker waits for ``delay_ms``."""
        if delay_ms > self._longest_delays_ms.get(broker_name, 0):
            self._longest_delays_ms[broker_name] = delay_ms

    def warn(self) -> list[str]:
        """Log the brokers whose retention is shorter than a recorded delay. Returns their names."""
        brokers_with_short_retention = []
        for broker_name, delay_ms in self._longest_delays_ms.items():
            retention_ms = self._retention_ms(broker_name)
            if retention_ms is None or delay_ms < retention_ms:
                continue
            brokers_with_short_retention.append(broker_name)
            if broker_name in self._next_log_deadlines and not self._next_log_deadlines[broker_name].expired:
                continue
            self._next_log_deadlines[broker_name] = Deadline.after(LOG_REPEAT_S)
            logger.warning(
                "a message waits for %.1f hours, but %s keeps messages for %.1f hours: after that, only this disk has the "
                "message; raise fileReservedTime of the broker above the longest delay",
                delay_ms / 3_600_000,
                broker_name,
                retention_ms / 3_600_000,
            )
        return brokers_with_short_retention

    def _retention_ms(self, broker_name: str) -> int | None:
        cached_retention = self._cached_retentions.get(broker_name)
        if cached_retention is None or cached_retention[1].expired:
            cached_retention = self._cached_retentions[broker_name] = (
                self._fetch_retention_ms(broker_name),
                Deadline.after(LOG_REPEAT_S),
            )
        return cached_retention[0]


DELAYED_KIND, DEAD_LETTER_KIND = "delayed", "dead letter"
_LENGTH = struct.Struct(">H")
_DUE = struct.Struct(">Q")
_OFFSET_AND_DUE = struct.Struct(">QQ")
_MAX_DUE_MS = (1 << 63) - 1
_MAX_ID_CHARS = 255  # the maximum length of an id in a log line
# Increase this number with each change of ``release.delivery`` or ``DeliveryRules`` that changes the target of an envelope.
_RULES_VERSION = 1
OTHER_ID_REASON = "delayed messages whose envelope has the digest of another message id"


class EnvelopeEffect(NamedTuple):
    """What an envelope changes in a store: it adds ``record``, due at ``due_ms``, or it cancels the record with
    ``cancelled_mark``.
    """

    record: Record | None
    due_ms: int
    cancelled_mark: tuple[bytes, bytes] | None = None


def space_of(queue: MessageQueue) -> bytes:
    """The space (see ``spool.lanes``) in which the records of a queue are found by offset."""
    return b"q" + str(queue).encode()


def place_of_offset(offset: int, due_ms: int = 0) -> bytes:
    return _OFFSET_AND_DUE.pack(offset, due_ms)


def offset_and_due(place: bytes) -> tuple[int, int]:
    offset, due_ms = _OFFSET_AND_DUE.unpack(place)
    return offset, due_ms


class DeliveryRules(NamedTuple):
    """The rules for what a node may deliver. Envelopes that break these rules, and bodies that are no envelopes, go to
    ``dead_topic``.

    ``has_envelopes`` returns true for ``inner_topic``. The fingerprint contains ``inner_topic`` instead of ``has_envelopes``,
    because a function has no representation that stays the same in another process.
    """

    settings: ProducerSettings
    dead_topic: str
    topics: Collection[str] = release.ALL_TOPICS
    has_envelopes: HasEnvelopes = has_default_name
    inner_topic: str = INNER_TOPIC

    @property
    def fingerprint(self) -> bytes:
        """A digest of the rules. Two sets of rules have different digests if they may give a record different targets."""
        max_size = self.settings.max_message_size
        return digest(repr((_RULES_VERSION, self.dead_topic, tuple(self.topics), max_size, self.inner_topic)).encode())

    def delivery(self, data: bytes) -> Delivery | DecodeError:
        """Return what an envelope delivers, or the error that makes it a dead letter."""
        try:
            return release.delivery(data, self.topics, self.settings.max_message_size, self.has_envelopes)
        except DecodeError as e:
            return e

    def target_of(self, record: Record) -> str:
        """The target of a node's record by these rules."""
        if record.kind == DEAD_LETTER_KIND:
            return topic_target(self.dead_topic)
        return self.target(self.delivery(record.payload)) if record.kind == DELAYED_KIND else record.target

    def target(self, delivery: Delivery | DecodeError) -> str:
        """The broker or the topic to which a record is sent, and for which it waits after a failure."""
        if isinstance(delivery, DecodeError) or delivery.original is None:
            return topic_target(self.dead_topic)
        queue = delivery.original.queue
        return topic_target(delivery.envelope.topic) if queue is None else broker_target(queue)


def effect_of(rules: DeliveryRules, queue: MessageQueue, offset: int, body: bytes, now_ms: int) -> EnvelopeEffect:
    """Return the effect of the envelope at ``offset``. A body that is no envelope is due at once, and becomes a dead letter. If
    only these rules forbid an envelope, it keeps its due time and its identity, and becomes a dead letter when it is due.
    """
    due_ms, message_digest, delivery = 0, digest(body), rules.delivery(body)
    unrestricted_delivery = _unrestricted_delivery(body) if isinstance(delivery, DecodeError) else delivery
    if not isinstance(unrestricted_delivery, DecodeError):
        due_ms, message_digest = _due_and_digest(unrestricted_delivery.envelope)
        if unrestricted_delivery.original is None:
            return EnvelopeEffect(None, due_ms, _identity_mark(due_ms, message_digest))
    marks = (_identity_mark(due_ms, message_digest), (space_of(queue), place_of_offset(offset, due_ms)))
    return EnvelopeEffect(Record(DELAYED_KIND, body, now_ms, rules.target(delivery), marks=marks), due_ms)


def record_to_copy(record: Record) -> Record:
    """Return the copy of a record from another user's folder. The copy has only one mark, the identity of the message, which
    ``show`` prints.

    The copy has no offset in a queue, because the owner of the folder may have forged the offsets. Therefore a node that starts
    with the copy reads its queues again. Raises ``DecodeError`` if the envelope has the digest of another message id.
    """
    data = (open_dead_letter(record)[0] if record.kind == DEAD_LETTER_KIND else record).payload
    # These values are for a body that is not an envelope.
    due_ms, message_digest, delivery = 0, digest(data), _unrestricted_delivery(data)
    if not isinstance(delivery, DecodeError) and delivery.original is not None:
        due_ms, message_digest = _due_and_digest(delivery.envelope)
        if message_digest != digest(delivery.original.properties.get(Property.UNIQ_KEY, "").encode()):
            raise DecodeError(OTHER_ID_REASON)
    return replace(record, marks=(_identity_mark(due_ms, message_digest),))


def _due_and_digest(envelope: DecodedEnvelope) -> tuple[int, bytes]:
    """The due time of an envelope, limited to what a record can have, and the digest of its message id."""
    return min(max(0, envelope.due_ms), _MAX_DUE_MS), envelope.identity[_DUE.size :]


def _identity_mark(due_ms: int, message_digest: bytes) -> tuple[bytes, bytes]:
    return IDENTITY, _DUE.pack(due_ms) + message_digest


# The argument ``rules`` of ``copy_spool`` for a node's records.
COPY_RULES = {DELAYED_KIND: record_to_copy, DEAD_LETTER_KIND: record_to_copy}


def redelivery_policy(rules: DeliveryRules, max_in_flight: int) -> RedeliveryPolicy:
    """The policy for a node's records. Unlike spooled sends, these records have not failed before, so the first pause is 0."""
    return RedeliveryPolicy(
        {DELAYED_KIND: send_decoder(rules), DEAD_LETTER_KIND: partial(dead_letter_send, rules)},
        max_in_flight,
        Schedule((0, *RETRY_PAUSES_S)),
        dead_letters=DeadLetters(
            DEAD_LETTER_KIND, partial(dead_letter_of, rules), partial(given_up_record, rules), describe_message
        ),
        target_rules=TargetRules(rules.target_of, rules.fingerprint),
    )


def dead_letter_of(rules: DeliveryRules, record: Record, failure: Resent) -> Record | None:
    """Return the dead letter of a record that is given up. If the record already goes to the topic of dead letters, return the
    record itself after a temporary failure, and None after a permanent failure. Also return None if the properties leave no room
    for topic and reason.
    """
    if (
        isinstance(delivery := rules.delivery(record.payload), DecodeError)
        or delivery.envelope.topic == rules.dead_topic
    ):
        return record if failure.is_temporary else None
    text = release.reason_text(failure.error or "").encode()
    payload = b"".join((_LENGTH.pack(len(text)), text, record.payload))
    dead_letter = replace(record, kind=DEAD_LETTER_KIND, payload=payload, target=topic_target(rules.dead_topic))
    try:
        dead_letter_send(rules, dead_letter)
    except MessageRefused:
        return None
    return dead_letter


def open_dead_letter(dead_letter: Record) -> tuple[Record, str]:
    """Return the record that was given up, with the target of its dead letter, and the reason. In another user's folder, the
    payload may be any bytes.
    """
    start, data = _LENGTH.size, dead_letter.payload
    end = start + int.from_bytes(data[:start])
    return replace(dead_letter, kind=DELAYED_KIND, payload=data[end:]), release.reason_text(
        data[start:end].decode(errors="replace")
    )


def given_up_record(rules: DeliveryRules, dead_letter: Record) -> tuple[Record, str]:
    """Return the record that was given up, with its own target, and the reason."""
    record, reason = open_dead_letter(dead_letter)
    return replace(record, target=rules.target_of(record)), reason


def describe_message(record: Record) -> str:
    """Return a description of a record's message for a log line. The message's id may be any text, so its control characters are
    replaced.
    """
    if record.kind == DEAD_LETTER_KIND:
        record, _ = open_dead_letter(record)
    delivery = _unrestricted_delivery(record.payload)
    if isinstance(delivery, DecodeError) or delivery.original is None:
        return "no valid envelope"
    msg_id = delivery.original.properties.get(Property.UNIQ_KEY, "without id")
    return f"message {release.reason_text(msg_id)[:_MAX_ID_CHARS]} for topic {delivery.envelope.topic}"


def dead_letter_send(rules: DeliveryRules, dead_letter: Record) -> SpooledSend:
    """The send of a dead letter. It goes to the topic of dead letters, and has the message's own topic and the reason as
    properties. Raises ``MessageRefused`` if the message's properties leave no room for the topic and the reason.
    """
    record, reason = open_dead_letter(dead_letter)
    delivery, max_bytes = _unrestricted_delivery(record.payload), rules.settings.max_message_size
    if isinstance(delivery, DecodeError) or delivery.original is None:
        return _send(rules, record, delivery)
    envelope, original = delivery.envelope, delivery.original
    properties = {**original.properties, release.TOPIC_PROPERTY: envelope.topic, PROBLEM_PROPERTY: reason}
    text, note = (
        encode_properties(properties, SINGLE_MAX_PROPERTIES_BYTES),
        release.truncation_note(envelope.body, max_bytes),
    )
    if note and len(text.encode()) + len(note) <= SINGLE_MAX_PROPERTIES_BYTES:
        # The note is optional, because ``dead_letter_of`` has not checked that there is room for it.
        properties[PROBLEM_PROPERTY] = reason + note
        text = encode_properties(properties)
    envelope = envelope._replace(topic=rules.dead_topic, body=envelope.body[:max_bytes])
    return _send(rules, record, Delivery(envelope, Original(properties, text, None)))


def _unrestricted_delivery(data: bytes) -> Delivery | DecodeError:
    """Return what an envelope delivers to a node without rules, or the error that says why it cannot be delivered."""
    try:
        return release.delivery(data, max_bytes=len(data))
    except DecodeError as e:
        return e


def send_decoder(rules: DeliveryRules) -> Callable[[Record], SpooledSend]:
    """Return a function that makes the send of a record: the original message as its sender would have sent it, or a dead
    letter.
    """
    return lambda record: _send(rules, record, rules.delivery(record.payload))


def _send(rules: DeliveryRules, record: Record, delivery: Delivery | DecodeError) -> SpooledSend:
    data, settings = record.payload, rules.settings
    if isinstance(delivery, DecodeError) or delivery.original is None:
        error = delivery if isinstance(delivery, DecodeError) else DecodeError("the envelope cancels another one")
        body, problem_properties = release.dead_letter(data, error, settings.max_message_size)
        envelope, queue = DecodedEnvelope(rules.dead_topic, 0, b"", record.stored_ms, 0, "", body, 0), None
        properties = {Property.UNIQ_KEY: digest(data).hex().upper(), **problem_properties}
        text = encode_properties(properties)
    else:
        envelope, (properties, text, queue) = delivery.envelope, delivery.original
    msg_id = properties.get(Property.UNIQ_KEY, "")
    message = Message(envelope.topic, envelope.body, flag=envelope.flag)
    request = single_request(PreparedMessage(message, msg_id, text, False), settings, envelope.born_ms)
    return SpooledSend(envelope.topic, request, queue, (msg_id,))
