"""What a node has beside its loop: what it knows of queues, brokers and its disk, and envelopes as records of its store.

``Commits``: what the nodes of a group say of a queue, numbers that they commit as offsets of consumer groups, of which a node has
four. ``Remade``: whether the messages of a queue are those that were read: its topic may have been made again, or its broker may
have come back without its last messages; a broker is asked from where on it has younger ones than the youngest that was read.
``Room``: a node whose disk has no room reads nothing for a while, and says so again and again. ``Answering`` skips brokers that
did not answer a moment ago, so that the queues of others do not wait. ``Retention`` warns if brokers keep envelopes for a shorter
time than they wait: a node that lost its disk rebuilds its store from the topic alone.

``arrival`` makes a record of an envelope and ``sending`` a send of a due record; both are pure. Records wait in ``spool/store``,
and ``spool/redelivery`` takes them when they are due.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.delay import release
from rocketmq_spark.delay.release import Progress, Seen, newest_before
from rocketmq_spark.errors import DecodeError, GroupNotFound, OffsetError, RocketMQError, SpoolError, SpoolFull
from rocketmq_spark.model import Message, MessageQueue, QueueBounds, ReceivedMessage, SpooledSend
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.producer.encoding import Prepared, single_request
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.lanes import STEPS_S, Schedule
from rocketmq_spark.spool.records import IDENTITY, Record
from rocketmq_spark.spool.spool import RedeliveryPolicy, broker_target, topic_target
from rocketmq_spark.wire.envelope import CANCEL, Opened, digest, unpack
from rocketmq_spark.wire.properties import encode_properties

logger = logging.getLogger(__name__)

REQUEST_S = 3.0


@dataclass(frozen=True, slots=True)
class Names:
    """The consumer group, and those whose offsets are the other numbers of a ``Committed``."""

    group: str

    @property
    def all(self) -> tuple[str, str, str, str]:
        return self.group, f"{self.group}_stored", f"{self.group}_done_ms", f"{self.group}_newest_ms"


class Committed(NamedTuple):
    """How far a queue is, and the latest store time of what was read of it: by that its next owner knows the messages that are
    spoken of from those of a topic that was made again. 0 where that was not said.
    """

    progress: Progress
    newest_ms: int = 0

    @property
    def read(self) -> tuple[int, int]:
        """Up to which offset, and the store time."""
        return self.progress.stored, self.newest_ms


class Commits:
    """The committed numbers of one group of nodes. Not thread-safe."""

    def __init__(self, member: GroupMember, names: Names, make_group: Callable[[str, Sequence[str]], None]) -> None:
        self._member = member
        self._names = names
        self._make_group = make_group
        self._told_all = True

    def of(self, queue: MessageQueue) -> Committed | None:
        """What was committed last; None for nothing. Raises what questions raise."""
        deadline = Deadline.after(REQUEST_S)
        oldest, stored, done_ms, newest_ms = (
            self._member.committed(group, queue, deadline, False) for group in self._names.all
        )
        if oldest is None:
            return None
        return Committed(Progress(oldest, stored if stored is not None else oldest, done_ms or 0), newest_ms or 0)

    def tell(self, news: dict[MessageQueue, Committed]) -> bool:
        """Drops of ``news`` what brokers did not take; whether they took all.

        The moment first: it may go back, and with the old one a broker that gets no more commits would have too much. The store
        time last: with an older one those before it are taken for another topic's, and read again.
        """
        count, groups = len(news), self._names.all
        for number in (2, 1, 0, 3):
            group = groups[number]
            offsets = {queue: (*committed.progress, committed.newest_ms)[number] for queue, committed in news.items()}
            errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
            if new := sorted({queue.broker_name for queue, e in errors.items() if isinstance(e, GroupNotFound)}):
                self._make_group(group, new)
                errors = self._member.commit(group, offsets, Deadline.after(REQUEST_S))
            for queue in errors:
                del news[queue]
            if errors:
                error = next(iter(errors.values()))
                # Once when it begins.
                level = logging.WARNING if self._told_all else logging.INFO
                logger.log(
                    level, "cannot commit the positions of %d queues as group %s now: %s", len(errors), group, error
                )
        self._told_all = len(news) == count
        return self._told_all


# Of a queue without a message before its beginning: any that lies there later is another one.
LONG_AGO_MS = 1


class Remade:
    """Asks brokers as a group. Its methods raise what questions raise."""

    def __init__(self, member: GroupMember, group: str) -> None:
        self._member = member
        self._group = group

    def is_same(self, queue: MessageQueue, seen: Seen) -> bool:
        """Whether it seems so. The next message does not show it: a pull goes on behind what was read as if nothing were, or
        at the new end.
        """
        if not seen.newest_ms or self._since(queue, seen.newest_ms + 1) >= seen.stored:
            return True
        return self._member.bounds(queue, Deadline.after(REQUEST_S)).min_offset >= seen.stored

    def other_from(self, queue: MessageQueue, stored: int, newest_ms: int, bounds: QueueBounds) -> int | None:
        """From where on the messages are others than those that were read, None if they are the same."""
        at = stored if stored <= bounds.max_offset else 0
        if newest_ms:
            at = self._since(queue, newest_ms + 1)
        at = max(at, bounds.min_offset)
        if at >= stored:
            return None
        logger.warning(
            "%s was read up to %d, and has newer messages from %d on: its topic was created again, or its broker lost its "
            "last messages. Reading continues there; old messages on this disk are still sent", queue, stored, at,
        )  # fmt: skip
        return at

    def newest_of(self, queue: MessageQueue, stored: int, now_ms: int) -> int:
        """When the last message before ``stored`` was stored."""
        return newest_before(stored, now_ms, partial(self._since, queue)) or LONG_AGO_MS

    def _since(self, queue: MessageQueue, epoch_ms: int) -> int:
        return self._member.search_offset(queue, epoch_ms, Deadline.after(REQUEST_S), self._group)


# So long nothing is read after the disk had no room, and as often that is said.
FULL_S, ALARM_S = 5.0, 60.0


class EnvelopeReader(Protocol):
    """What the node needs of a pull consumer that is subscribed to the inner topic."""

    def poll(self, timeout_s: float = 5.0) -> list[ReceivedMessage]: ...
    def assignment(self) -> list[MessageQueue]: ...
    def seek(self, queue: MessageQueue, offset: int) -> None: ...
    def pause(self, *queues: MessageQueue) -> None: ...
    def resume(self, *queues: MessageQueue) -> None: ...
    def close(self) -> None: ...


class Room:
    """Whether there is room on the disk of a folder, as far as is known, and a reader that pauses if not. Not thread-safe."""

    def __init__(self, folder: Path, reader: EnvelopeReader) -> None:
        self._folder = folder
        self._reader = reader
        self._paused = False
        self._again = Deadline(0.0)
        self._alarm = Deadline(0.0)
        self._full = False

    def keep(self) -> None:
        """Before each poll: nothing comes of any queue, of new ones neither, until it is tried again. All else goes on."""
        before, self._paused = self._paused, not self._again.expired
        if not (self._paused or before):
            return
        for queue in self._reader.assignment():
            with contextlib.suppress(OffsetError):  # it has gone since
                (self._reader.pause if self._paused else self._reader.resume)(queue)

    def refused(self, error: SpoolFull, waiting: int) -> None:
        """There was none; ``waiting`` messages are held."""
        self._again = Deadline.after(FULL_S)
        if self._full and not self._alarm.expired:
            return
        self._full, self._alarm = True, Deadline.after(ALARM_S)
        logger.error(
            "no room for more delayed messages: until there is, this node reads neither messages nor recalls; the %d that "
            "it holds are sent when they are due, if it can write at all: %s", waiting, error,
        )  # fmt: skip

    def found(self) -> None:
        """Something was stored."""
        if self._full:
            self._full = False
            logger.warning("there is room again in %s: reading delayed messages continues", self._folder)


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
                "a message waits for %.1f hours, but %s keeps messages for %.1f: after that, only this disk has it; raise "
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
