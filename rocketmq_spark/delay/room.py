"""A node whose disk has no room: it reads nothing for a while, and says so again and again."""

from __future__ import annotations

import logging
from pathlib import Path

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolFull

logger = logging.getLogger(__name__)

# So long nothing is read after the disk had no room, and as often that is said.
FULL_S, ALARM_S = 5.0, 60.0


class Room:
    """Whether there is room on the disk of a folder, as far as is known. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._again = Deadline(0.0)
        self._alarm = Deadline(0.0)
        self._full = False

    @property
    def waits(self) -> bool:
        """Whether it is not to be tried yet."""
        return not self._again.expired

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
            logger.warning("there is room again in %s: delayed messages are read again", self._folder)
