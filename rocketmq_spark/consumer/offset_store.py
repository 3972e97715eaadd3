"""Where a member's offsets are kept: on brokers where the group shares its queues, in a file where it broadcasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.held import MemberState
from rocketmq_spark.consumer.local_offsets import LocalOffsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)


class StoreTrouble:
    """Which brokers do not store a group's offsets: one line when one begins to fail, and one when it stores again."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._failing: set[str] = set()

    def note(self, stored: Iterable[MessageQueue], errors: Mapping[MessageQueue, RocketMQError]) -> None:
        """Offsets of the queues in ``stored`` were sent to their brokers, with these errors."""
        for queue, error in errors.items():
            if queue.broker_name not in self._failing:
                self._failing.add(queue.broker_name)
                text = "group %s: offsets of queues of %s cannot be stored, they are sent again: %s"
                logger.warning(text, self._group, queue.broker_name, error)
        failed = {queue.broker_name for queue in errors}
        for broker in sorted(self._failing & {queue.broker_name for queue in stored} - failed):
            self._failing.discard(broker)
            logger.warning("group %s: offsets of queues of %s are stored again", self._group, broker)


class OffsetStore(Protocol):
    """Reads raise what they raise; what cannot be stored is logged, and stored with the next run."""

    def begin(self) -> None:
        """Nobody else has what is this member's alone. Raises ``OptionError`` where somebody has it."""

    def end(self) -> None:
        """Others may have it."""

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        """The stored offset, None where there is none for sure."""

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store what has changed; of ``queues`` everything."""


class BrokerOffsets:
    """``OffsetStore`` of a group that shares its queues."""

    def __init__(self, port: GroupMember, group: str, held: MemberState) -> None:
        self._port = port
        self._group = group
        self._held = held
        self._trouble = StoreTrouble(group)
        self._under_way: set[MessageQueue] = set()  # those of which a commit is
        self._ended = threading.Condition(held.lock)

    def begin(self) -> None:
        """Brokers keep the offsets, for all members."""

    def end(self) -> None:
        """Nothing was taken."""

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        return self._port.committed(self._group, queue, deadline)

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        """A queue has one commit under way at a time: an offset from before a reset must not come after that of the reset.

        Queues that have one are waited for when the others are stored. Those that have it still at ``deadline`` stay untold.
        """
        with self._held.lock:
            left = set(queues) if queues is not None else self._held.offsets.untold().keys() - self._under_way
        while offsets := self._begun(left, deadline):
            told: Mapping[MessageQueue, int] = {}
            try:
                errors = self._port.commit(self._group, offsets, deadline)
                self._trouble.note(offsets, errors)
                told = {queue: offset for queue, offset in offsets.items() if queue not in errors}
            finally:
                with self._held.lock:
                    self._held.offsets.told(told)
                    self._under_way -= offsets.keys()
                    self._ended.notify_all()
            left -= offsets.keys()

    def _begun(self, queues: Collection[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        """What is to be committed now: of those ``queues`` that are free, or come free by ``deadline``."""
        with self._held.lock:
            while True:
                known = self._held.offsets.every()
                offsets = {queue: known[queue] for queue in queues if queue in known}
                free = {queue: offset for queue, offset in offsets.items() if queue not in self._under_way}
                if free or not offsets or not self._ended.wait(deadline.remaining()):
                    self._under_way |= free.keys()
                    return free


class FileOffsets:
    """``OffsetStore`` of a broadcasting member. What the file has of queues that are not here now stays in it."""

    def __init__(self, file: LocalOffsets, held: MemberState) -> None:
        self._file = file
        self._held = held
        self._failing = False
        self._storing = threading.Lock()

    def begin(self) -> None:
        self._file.hold()

    def end(self) -> None:
        self._file.release()

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        return self._file.load().get(queue)

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._storing:
            self._persist()

    def _persist(self) -> None:
        with self._held.lock:
            changed, offsets = self._held.offsets.untold(), self._held.offsets.every()
        if not changed:
            return
        try:
            self._file.store({**self._file.load(), **offsets})
        except RocketMQError as e:
            if not self._failing:
                logger.warning("offsets are not stored yet: %s", e)
            self._failing = True
            return
        if self._failing:
            self._failing = False
            logger.warning("offsets are stored again")
        with self._held.lock:
            self._held.offsets.told(offsets)
