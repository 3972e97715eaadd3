"""Parts of a delay node besides its loop: the state of queues, brokers and its disk, and envelopes as records of its store.

``Remade``: whether
the messages of a queue are still those that were read. If the topic was created again, or its broker returned without its last
messages, the queue has messages with a later store time than the latest one read, but before the position. ``Room``: a node whose
disk is full reads nothing for a while, and repeats its log line. ``Answering`` skips brokers that did not answer a moment ago, so
that the queues of others do not wait. ``Retention`` warns if brokers keep envelopes for a shorter time than they wait, because a
node that lost its disk can rebuild its store only from the topic.

``arrival`` makes a record of an envelope and ``sending`` a send of a due record; both are pure. Records wait in ``spool/store``,
and ``spool/redelivery`` takes them when they are due.
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
from rocketmq_spark.base.codes import SINGLE_MAX_PROPERTIES, Property
from rocketmq_spark.delay import release
from rocketmq_spark.delay.commits import REQUEST_S
from rocketmq_spark.delay.release import PROBLEM, Delivery, HasEnvelopes, Seen, has_default_name, newest_before
from rocketmq_spark.errors import DecodeError, MessageRefused, OffsetError, RocketMQError, SpoolError, SpoolFull
from rocketmq_spark.model import Message, MessageQueue, QueueBounds, ReceivedMessage, Resent, SpooledSend
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.producer.encoding import Prepared, single_request
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.lanes import STEPS_S, Schedule
from rocketmq_spark.spool.records import IDENTITY, Record
from rocketmq_spark.spool.redelivery import Letters
from rocketmq_spark.spool.spool import RedeliveryPolicy, broker_target, topic_target
from rocketmq_spark.wire.envelope import DecodedEnvelope, digest
from rocketmq_spark.wire.properties import decode_properties, encode_properties

logger = logging.getLogger(__name__)

# The store time for a queue that has no message before the position: any message that appears there later is a new one.
LONG_AGO_MS = 1


class Remade:
    """Checks whether a topic was created again, by requests as a group. Its methods raise the errors of these requests."""

    def __init__(self, member: GroupMember, group: str) -> None:
        self._member = member
        self._group = group

    def is_same(self, queue: MessageQueue, seen: Seen) -> bool:
        """Whether the queue seems to have the messages that were read. Pulls do not show that: they continue at the position, or
        at the new end, without an error.
        """
        if not seen.newest_ms or self._since(queue, seen.newest_ms + 1) >= seen.stored:
            return True
        return self._member.bounds(queue, Deadline.after(REQUEST_S)).min_offset >= seen.stored

    def is_known(self, queue: MessageQueue, seen: Seen) -> bool:
        """Whether the queue, perhaps that of another cluster, has the message that was read last, and at its offset. False if
        that is not certain.
        """
        first = self._since(queue, seen.newest_ms)
        return bool(seen.newest_ms) and first < seen.stored <= self._since(queue, seen.newest_ms + 1)

    def other_from(self, queue: MessageQueue, stored: int, newest_ms: int, bounds: QueueBounds) -> int | None:
        """As ``differs_from``, with a log line."""
        at = self.differs_from(queue, stored, newest_ms, bounds)
        if at is not None:
            logger.warning(
                "%s was read up to %d, and has newer messages from %d on: its topic was created again, its broker lost its last "
                "messages, or the node that read it was killed while it committed. Reading continues there; old messages on "
                "this disk are still sent", queue, stored, at,
            )  # fmt: skip
        return at

    def differs_from(self, queue: MessageQueue, stored: int, newest_ms: int, bounds: QueueBounds) -> int | None:
        """The offset from which on the messages differ from those that were read; None if they are the same."""
        at = stored if stored <= bounds.max_offset else 0
        if newest_ms:
            at = self._since(queue, newest_ms + 1)
        at = max(at, bounds.min_offset)
        return at if at < stored else None

    def newest_of(self, queue: MessageQueue, stored: int, now_ms: int) -> int:
        """The store time of the last message before ``stored``."""
        return newest_before(stored, now_ms, partial(self._since, queue)) or LONG_AGO_MS

    def _since(self, queue: MessageQueue, epoch_ms: int) -> int:
        return self._member.search_offset(queue, epoch_ms, Deadline.after(REQUEST_S), self._group)


# Pause of reading after the disk was full, and interval of the log line about it.
FULL_S, ALARM_S = 5.0, 60.0


class EnvelopeReader(Protocol):
    """The methods that a node needs of its pull consumer, which is subscribed to the inner topic."""

    def poll(self, timeout_s: float = 5.0) -> list[ReceivedMessage]: ...
    def assignment(self) -> list[MessageQueue]: ...
    def seek(self, queue: MessageQueue, offset: int) -> None: ...
    def pause(self, *queues: MessageQueue) -> None: ...
    def resume(self, *queues: MessageQueue) -> None: ...
    def close(self) -> None: ...


class Room:
    """Pauses the reader while the disk of a folder has no room. Not thread-safe."""

    def __init__(self, folder: Path, reader: EnvelopeReader) -> None:
        self._folder = folder
        self._reader = reader
        self._paused = False
        self._again = Deadline(0.0)
        self._alarm = Deadline(0.0)
        self._full = False

    def keep(self) -> None:
        """Pause or resume all queues; call it before each poll, because new queues must be paused, too. The rest of the node runs
        on.
        """
        before, self._paused = self._paused, not self._again.expired
        if not (self._paused or before):
            return
        for queue in self._reader.assignment():
            with contextlib.suppress(OffsetError):  # the queue has been revoked since
                (self._reader.pause if self._paused else self._reader.resume)(queue)

    def refused(self, error: SpoolFull, waiting: int) -> None:
        """Note that the disk had no room; the node holds ``waiting`` messages."""
        self._again = Deadline.after(FULL_S)
        if self._full and not self._alarm.expired:
            return
        self._full, self._alarm = True, Deadline.after(ALARM_S)
        logger.error(
            "no room for more delayed messages: until there is, this node reads neither messages nor recalls; the %d that "
            "it holds are sent when they are due, if it can write at all: %s", waiting, error,
        )  # fmt: skip

    def found(self) -> None:
        """Note that storing worked."""
        if self._full:
            self._full = False
            logger.warning("there is room again in %s: reading delayed messages continues", self._folder)


class Answering:
    """Remembers brokers whose queues had an error; they are tried again after ``again_s`` seconds. Not thread-safe."""

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._silent: dict[str, Deadline] = {}
        self.any_answered = False

    def is_silent(self, queue: MessageQueue) -> bool:
        """Whether the queue's broker did not answer the last request."""
        return queue.broker_name in self._silent

    def each(self, queues: Iterable[MessageQueue], step: Callable[[MessageQueue], None]) -> None:
        """Call ``step`` for each queue. Queues whose broker does not answer, or answers what cannot be used, are left for another
        call.

        Raises errors of the spool, and a permanent error if no broker has answered yet: later it is that of a single broker.
        """
        permanent: RocketMQError | None = None
        for queue in sorted(queues):
            name = queue.broker_name
            if name in self._silent and not self._silent[name].expired:
                continue
            try:
                step(queue)
                self._silent.pop(name, None)
                self.any_answered = True
            except SpoolError:
                raise
            except Exception as e:  # numbers of one broker must not stop the queues of others
                if isinstance(e, RocketMQError) and not e.retriable:
                    permanent = permanent or e
                # Once when it begins.
                level = logging.INFO if name in self._silent else logging.WARNING
                text = "%s is neither taken over nor handed over while its broker does not answer as expected: %s"
                logger.log(level, text, queue, e, exc_info=None if isinstance(e, RocketMQError) else e)
                self._silent[name] = Deadline.after(self._again_s)
        if permanent is not None and not self.any_answered:
            raise permanent


# Interval of repeated log lines, and of requests for a broker's setting.
AGAIN_S = 3600.0


class Retention:
    """Compares delays with the retention of brokers: ``kept_ms`` returns it, or None if unknown. Not thread-safe."""

    def __init__(self, kept_ms: Callable[[str], int | None]) -> None:
        self._ask = kept_ms
        self._longest: dict[str, int] = {}
        self._kept: dict[str, tuple[int | None, Deadline]] = {}
        self._said: dict[str, Deadline] = {}

    def note(self, broker_name: str, waits_ms: int) -> None:
        """Note that an envelope on this broker waits for ``waits_ms``."""
        if waits_ms > self._longest.get(broker_name, 0):
            self._longest[broker_name] = waits_ms

    def warn(self) -> list[str]:
        """Log the brokers whose retention is shorter than a noted delay. Returns their names."""
        short = []
        for name, waits_ms in self._longest.items():
            kept = self._kept_ms(name)
            if kept is None or waits_ms < kept:
                continue
            short.append(name)
            if name in self._said and not self._said[name].expired:
                continue
            self._said[name] = Deadline.after(AGAIN_S)
            logger.warning(
                "a message waits for %.1f hours, but %s keeps messages for %.1f hours: after that, only this disk has it; raise "
                "fileReservedTime of the broker above the longest delay",
                waits_ms / 3_600_000,
                name,
                kept / 3_600_000,
            )
        return short

    def _kept_ms(self, broker_name: str) -> int | None:
        known = self._kept.get(broker_name)
        if known is None or known[1].expired:
            known = self._kept[broker_name] = self._ask(broker_name), Deadline.after(AGAIN_S)
        return known[0]


KIND, LETTER_KIND = "delayed", "dead letter"
_LENGTH = struct.Struct(">H")
_DUE = struct.Struct(">Q")
_PLACE = struct.Struct(">QQ")
_LAST_MS = (1 << 63) - 1


class Arrival(NamedTuple):
    """The effect of an envelope on a store: a record with its due time, or the mark of a record that it cancels."""

    record: Record | None
    due_ms: int
    cancels: tuple[bytes, bytes] | None = None


def space_of(queue: MessageQueue) -> bytes:
    """The space of marks in which the records of a queue are found by offset."""
    return b"q" + str(queue).encode()


def place(offset: int, due_ms: int = 0) -> bytes:
    return _PLACE.pack(offset, due_ms)


def offset_and_due(place: bytes) -> tuple[int, int]:
    offset, due_ms = _PLACE.unpack(place)
    return offset, due_ms


class Rules(NamedTuple):
    """What a node may deliver: envelopes that do not follow the rules, and bodies that are none, go to ``dead_topic``."""

    settings: ProducerSettings
    dead_topic: str
    topics: Collection[str] = release.ALL_TOPICS
    has_envelopes: HasEnvelopes = has_default_name

    def delivery(self, data: bytes) -> Delivery | DecodeError:
        """What an envelope delivers, or why it becomes a dead letter. ``arrival`` and ``sending`` both decide by this."""
        try:
            return release.delivery(data, self.topics, self.settings.max_message_size, self.has_envelopes)
        except DecodeError as e:
            return e

    def target(self, found: Delivery | DecodeError) -> str:
        """What a record waits for: the broker or the topic that it is sent to."""
        if isinstance(found, DecodeError) or found.original is None:
            return topic_target(self.dead_topic)
        queue = found.original.queue
        return topic_target(found.opened.topic) if queue is None else broker_target(queue)


def arrival(rules: Rules, queue: MessageQueue, offset: int, body: bytes, now_ms: int) -> Arrival:
    """The effect of the envelope at ``offset``. A body that is no envelope is due at once, and becomes a dead letter. An envelope
    that only these rules forbid becomes one when it is due, so that it has the same identity as under other rules.
    """
    due_ms, identity, found = 0, digest(body), rules.delivery(body)
    with contextlib.suppress(DecodeError):
        opened, original = release.delivery(body, max_bytes=len(body)) if isinstance(found, DecodeError) else found
        found_ms = min(max(0, opened.due_ms), _LAST_MS)
        if original is None:
            return Arrival(None, found_ms, (IDENTITY, _DUE.pack(found_ms) + opened.identity[_DUE.size :]))
        due_ms, identity = found_ms, opened.identity[_DUE.size :]
    marks = ((IDENTITY, _DUE.pack(due_ms) + identity), (space_of(queue), place(offset, due_ms)))
    return Arrival(Record(KIND, body, now_ms, rules.target(found), marks=marks), due_ms)


def trade(rules: Rules, max_out: int) -> RedeliveryPolicy:
    """The policy for a node's records. Unlike spooled sends, they have not failed before they are due: the first pause is 0."""
    send_of = sending(rules)
    return RedeliveryPolicy(
        {KIND: send_of, LETTER_KIND: partial(letter_send, rules.dead_topic, send_of)},
        max_out,
        Schedule((0, *STEPS_S)),
        letters=Letters(LETTER_KIND, partial(letter, rules.dead_topic, send_of), opened_letter),
    )


def letter(dead_topic: str, send_of: Callable[[Record], SpooledSend], record: Record, failure: Resent) -> Record | None:
    """The dead letter of a record that is given up. None if its properties leave no room for topic and reason, or if the record
    was to go to ``dead_topic`` anyway and was permanently rejected.
    """
    given_up, reason = send_of(record), release.reason_text(failure.error or "")
    if given_up.topic == dead_topic and not failure.passing:
        return None
    text = reason.encode()
    payload = b"".join((_LENGTH.pack(len(text)), text, record.payload))
    found = replace(record, kind=LETTER_KIND, payload=payload, target=topic_target(dead_topic))
    try:
        letter_send(dead_topic, send_of, found)
    except MessageRefused:
        return None
    return found


def opened_letter(found: Record) -> tuple[Record, str]:
    """The record that was given up, and the reason."""
    start, data = _LENGTH.size, found.payload
    end = start + int.from_bytes(data[:start])
    return replace(found, kind=KIND, payload=data[end:]), data[start:end].decode(errors="replace")


def letter_send(dead_topic: str, send_of: Callable[[Record], SpooledSend], found: Record) -> SpooledSend:
    """The send of a dead letter: the message that was given up, to ``dead_topic``, with its topic and the reason as properties;
    unchanged if it was to go there anyway. Raises ``MessageRefused`` if its properties leave no room for these two.
    """
    record, reason = opened_letter(found)
    given_up = send_of(record)
    if given_up.topic == dead_topic:
        return given_up
    properties = {**decode_properties(given_up.request.properties), release.TOPIC: given_up.topic, PROBLEM: reason}
    text = encode_properties(properties, SINGLE_MAX_PROPERTIES)
    return SpooledSend(dead_topic, given_up.request._replace(properties=text), None, given_up.msg_ids)


def sending(rules: Rules) -> Callable[[Record], SpooledSend]:
    """Returns a function that makes the send of a record: the original message as its sender would have sent it, or a dead
    letter.
    """
    settings = rules.settings

    def send_of(record: Record) -> SpooledSend:
        data, found = record.payload, rules.delivery(record.payload)
        if isinstance(found, DecodeError) or found.original is None:
            error = found if isinstance(found, DecodeError) else DecodeError("the envelope cancels another one")
            body, why = release.dead_letter(data, error, settings.max_message_size)
            opened, queue = DecodedEnvelope(rules.dead_topic, 0, b"", record.stored_ms, 0, "", body, 0), None
            properties = {Property.UNIQ_KEY: digest(data).hex().upper(), **why}
            text = encode_properties(properties)
        else:
            opened, (properties, text, queue) = found.opened, found.original
        msg_id = properties.get(Property.UNIQ_KEY, "")
        message = Message(opened.topic, opened.body, flag=opened.flag)
        request = single_request(Prepared(message, msg_id, text, False), settings, opened.born_ms)
        return SpooledSend(opened.topic, request, queue, (msg_id,))

    return send_of
