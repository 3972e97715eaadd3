"""A node whose disk has no room: it reads nothing for a while, and says so again and again."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError, SpoolFull
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

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
