"""How far each queue is finished here, and what of that brokers are to be told: Java's ``RemoteBrokerOffsetStore``.

Results that end out of order may only raise an offset; who knows better (an orderly commit, a reset) overwrites it. Java
freezes the offset of a queue whose illegal one was repaired; here results of a queue that is dropped change nothing anyway.

Pure: the caller holds its lock and does the telling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rocketmq_spark.model import MessageQueue


@dataclass(slots=True)
class _Entry:
    value: int
    told: int | None = None


class OffsetTable:
    """The next offset of each queue. None is ever below zero."""

    def __init__(self) -> None:
        self._entries: dict[MessageQueue, _Entry] = {}

    def get(self, queue: MessageQueue) -> int | None:
        entry = self._entries.get(queue)
        return None if entry is None else entry.value

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Only upwards, for results that end in any order."""
        entry = self._entries.get(queue)
        if entry is None or entry.value < offset:
            self._set(queue, offset)

    def put(self, queue: MessageQueue, offset: int) -> None:
        """Whatever it was before."""
        self._set(queue, offset)

    def forget(self, queue: MessageQueue) -> None:
        """The queue is not ours any more, or its offset is read anew."""
        self._entries.pop(queue, None)

    def keep(self, owned: Collection[MessageQueue]) -> None:
        """Forget all others, as each run of Java's ``persistAll`` does."""
        self._entries = {queue: entry for queue, entry in self._entries.items() if queue in owned}

    def untold(self) -> dict[MessageQueue, int]:
        """What the last telling did not say. Java tells everything each time; pulls bring the rest along anyway."""
        return {queue: entry.value for queue, entry in self._entries.items() if entry.value != entry.told}

    def every(self) -> dict[MessageQueue, int]:
        return {queue: entry.value for queue, entry in self._entries.items()}

    def told(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Brokers have these."""
        for queue, offset in offsets.items():
            if queue in self._entries:
                self._entries[queue].told = offset

    def _set(self, queue: MessageQueue, offset: int) -> None:
        if offset < 0:
            raise ValueError(f"the offset of {queue} is {offset}; expected one of at least 0")
        entry = self._entries.get(queue)
        if entry is None:
            self._entries[queue] = _Entry(offset)
        else:
            entry.value = offset
