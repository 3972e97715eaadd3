"""What a node of a group knows of its queues and its disk, beside what it stores.

``Commits``: what the nodes of a group say of a queue, numbers that they commit as offsets of consumer groups, of which a node has
four. ``Remade``: whether the messages of a queue are those that were read: its topic may have been made again, or its broker may
have come back without its last messages; a broker is asked from where on it has younger ones than the youngest that was read.
``Room``: a node whose disk has no room reads nothing for a while, and says so again and again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.release import Progress, Seen, newest_before
from rocketmq_spark.errors import GroupNotFound, OffsetError, SpoolFull
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage
from rocketmq_spark.ports import GroupMember

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
            "%s was read up to %d, and has younger messages from %d on: its topic was made again, or its broker lost its "
            "last messages. It is read from there on; what was stored of the old ones is sent", queue, stored, at,
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
            "no room for more delayed messages: until there is, this node reads none, nor what takes one back; the %d that it "
            "holds are sent when they are due, if it can write at all: %s", waiting, error,
        )  # fmt: skip

    def found(self) -> None:
        """Something was stored."""
        if self._full:
            self._full = False
            logger.warning("there is room again in %s: reading delayed messages continues", self._folder)
