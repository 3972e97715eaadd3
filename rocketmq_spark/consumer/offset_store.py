"""Where a member's offsets are kept: on brokers where the group shares its queues, in a file where it broadcasts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.local_offsets import LocalOffsets
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)


class OffsetStore(Protocol):
    """Reads raise what they raise; what cannot be stored is logged, and stored with the next run."""

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        """The stored offset, None where there is none for sure."""

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store what has changed; of ``queues`` everything."""


class BrokerOffsets:
    """``OffsetStore`` of a group that shares its queues."""

    def __init__(self, port: GroupMember, group: str, held: Held) -> None:
        self._port = port
        self._group = group
        self._held = held

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        return self._port.committed(self._group, queue, deadline)

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._held.lock:
            offsets = self._held.offsets.untold()
            if queues is not None:
                known = self._held.offsets.every()
                offsets = {queue: known[queue] for queue in queues if queue in known}
        if not offsets:
            return
        errors = self._port.commit(self._group, offsets, deadline)
        for queue, error in errors.items():
            logger.warning("offset %d of %s is not stored yet: %s", offsets[queue], queue, error)
        with self._held.lock:
            self._held.offsets.told({queue: offset for queue, offset in offsets.items() if queue not in errors})


class FileOffsets:
    """``OffsetStore`` of a broadcasting member. What the file has of queues that are not here now stays in it."""

    def __init__(self, file: LocalOffsets, held: Held) -> None:
        self._file = file
        self._held = held

    def read(self, queue: MessageQueue, deadline: Deadline) -> int | None:
        return self._file.load().get(queue)

    def persist(self, deadline: Deadline, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._held.lock:
            changed, offsets = self._held.offsets.untold(), self._held.offsets.every()
        if not changed:
            return
        try:
            self._file.store({**self._file.load(), **offsets})
        except RocketMQError as e:
            logger.warning("offsets are not stored yet: %s", e)
            return
        with self._held.lock:
            self._held.offsets.told(offsets)
