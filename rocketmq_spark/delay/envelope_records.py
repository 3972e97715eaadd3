"""Envelopes as records of a store, with what is sent when they are due; also unavailable brokers and the retention of the topic.

``arrival`` makes a record of an envelope and ``sending`` a send of a due record; both are pure. Records wait in
``spool/store``, and ``spool/redelivery`` takes them when they are due. ``Answering`` skips brokers that did not answer a
moment ago, so that the queues of others do not wait. ``Retention`` warns if brokers keep envelopes for a shorter time than
they wait: a node that lost its disk rebuilds its store from the topic alone.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.delay import release
from rocketmq_spark.errors import DecodeError, RocketMQError, SpoolError
from rocketmq_spark.model import Message, MessageQueue, SpooledSend
from rocketmq_spark.producer.encoding import Prepared, single_request
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.lanes import STEPS_S, Schedule
from rocketmq_spark.spool.records import IDENTITY, Record
from rocketmq_spark.spool.spool import RedeliveryPolicy, broker_target, topic_target
from rocketmq_spark.wire.envelope import CANCEL, Opened, digest, unpack
from rocketmq_spark.wire.properties import encode_properties

logger = logging.getLogger(__name__)


class Answering:
    """A broker that did not answer is asked again after ``again_s`` seconds. Not thread-safe."""

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._silent: dict[str, Deadline] = {}

    def is_silent(self, queue: MessageQueue) -> bool:
        """Whether its broker did not answer when it was asked last."""
        return queue.broker_name in self._silent

    def each(self, queues: Iterable[MessageQueue], step: Callable[[MessageQueue], None]) -> None:
        """A step for each queue. Those of a broker that does not answer are left for another call.

        Raises what will not pass, and what is wrong with the spool.
        """
        for queue in sorted(queues):
            name = queue.broker_name
            if name in self._silent and not self._silent[name].expired:
                continue
            try:
                step(queue)
                self._silent.pop(name, None)
            except RocketMQError as e:
                if not e.retriable or isinstance(e, SpoolError):
                    raise
                # Once when it begins.
                level = logging.INFO if name in self._silent else logging.WARNING
                logger.log(
                    level, "%s is neither taken over nor handed over while its broker does not answer: %s", queue, e
                )
                self._silent[name] = Deadline.after(self._again_s)


# As often the same is said, and a broker's setting is asked for.
AGAIN_S = 3600.0


class Retention:
    """``kept_ms`` says for how long a broker keeps messages, None where it does not tell. Not thread-safe."""

    def __init__(self, kept_ms: Callable[[str], int | None]) -> None:
        self._ask = kept_ms
        self._longest: dict[str, int] = {}
        self._kept: dict[str, tuple[int | None, Deadline]] = {}
        self._said: dict[str, Deadline] = {}

    def note(self, broker_name: str, waits_ms: int) -> None:
        """An envelope on this broker waits for so long."""
        if waits_ms > self._longest.get(broker_name, 0):
            self._longest[broker_name] = waits_ms

    def warn(self) -> list[str]:
        """Say which brokers keep messages for less than what was noted; their names."""
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
                "a message waits for %.1f hours, and %s keeps messages for %.1f: after that it is on this disk alone; raise "
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


KIND = "delayed"
_DUE = struct.Struct(">Q")
_PLACE = struct.Struct(">QQ")
_LAST_MS = (1 << 63) - 1


class Arrival(NamedTuple):
    """What an envelope means to a store: a record with its due time, or the mark of one that is taken back."""

    record: Record | None
    due_ms: int
    cancels: tuple[bytes, bytes] | None = None


def space_of(queue: MessageQueue) -> bytes:
    """Where the records of a queue are found by offset."""
    return b"q" + str(queue).encode()


def place(offset: int, due_ms: int = 0) -> bytes:
    return _PLACE.pack(offset, due_ms)


def offset_and_due(place: bytes) -> tuple[int, int]:
    offset, due_ms = _PLACE.unpack(place)
    return offset, due_ms


def arrival(queue: MessageQueue, offset: int, body: bytes, now_ms: int) -> Arrival:
    """An envelope that lies at ``offset``. What is none is due at once, to go to the dead letters."""
    due_ms, identity, target = 0, digest(body), ""
    with contextlib.suppress(DecodeError):
        opened = unpack(body)
        found_ms = min(max(0, opened.due_ms), _LAST_MS)
        if opened.kind == CANCEL:
            return Arrival(None, found_ms, (IDENTITY, _DUE.pack(found_ms) + opened.identity[_DUE.size :]))
        chosen = release.original(opened).queue
        due_ms, identity = found_ms, opened.identity[_DUE.size :]
        target = topic_target(opened.topic) if chosen is None else broker_target(chosen)
    marks = ((IDENTITY, _DUE.pack(due_ms) + identity), (space_of(queue), place(offset, due_ms)))
    return Arrival(Record(KIND, body, now_ms, target, marks=marks), due_ms)


def trade(
    settings: ProducerSettings, dead_topic: str, max_out: int, topics: Collection[str] = release.ALL_TOPICS
) -> RedeliveryPolicy:
    """How a spool sends such records. Nothing of them failed before they were due, so the steps count from the first try."""
    return RedeliveryPolicy({KIND: sending(settings, dead_topic, topics)}, max_out, Schedule((0, *STEPS_S)))


def sending(
    settings: ProducerSettings, dead_topic: str, topics: Collection[str] = release.ALL_TOPICS
) -> Callable[[Record], SpooledSend]:
    """What makes the original of a record, as its sender would have sent it; of what may not be sent a dead letter."""

    def send_of(record: Record) -> SpooledSend:
        data = record.payload
        try:
            opened = unpack(data)
            properties, text, queue = release.original(opened, topics)
        except DecodeError as e:
            opened, queue = Opened(dead_topic, 0, b"", record.stored_ms, 0, "", data or release.EMPTY, 0), None
            properties = {Property.UNIQ_KEY: digest(data).hex().upper(), **release.reason(e)}
            text = encode_properties(properties)
        msg_id = properties.get(Property.UNIQ_KEY, "")
        message = Message(opened.topic, opened.body, flag=opened.flag)
        request = single_request(Prepared(message, msg_id, text, False), settings, opened.born_ms)
        return SpooledSend(opened.topic, request, queue, (msg_id,))

    return send_of
