"""How far a reader is behind the ends of its queues. Pure: who asks brokers and what time it is are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue


class QueueLag(NamedTuple):
    """One queue, first and end offset None if no broker reported them. ``position`` is the next offset to read, None where
    the reader has none; ``next_stored_ms`` is when the message there, or the first behind it, was stored (epoch ms), None where
    that is not known.
    """

    queue: MessageQueue
    min_offset: int | None
    position: int | None
    max_offset: int | None
    next_stored_ms: int | None = None

    @property
    def next_offset(self) -> int | None:
        """The first offset that can still be read."""
        return None if self.position is None or self.min_offset is None else max(self.position, self.min_offset)

    @property
    def lag(self) -> int | None:
        """Messages that can be read and are not; with gaps, offsets."""
        if self.next_offset is None or self.max_offset is None:
            return None
        return max(0, self.max_offset - self.next_offset)

    @property
    def lost(self) -> int | None:
        """Messages that were removed before they were read."""
        return None if self.position is None or self.min_offset is None else max(0, self.min_offset - self.position)

    def behind_ms(self, now_ms: int) -> int | None:
        """The age of the next message; 0 where there is none, None where it is not known."""
        if self.lag == 0:
            return 0
        return None if self.lag is None or self.next_stored_ms is None else max(0, now_ms - self.next_stored_ms)


class Total(NamedTuple):
    """Of all queues: messages behind and lost, the age of the oldest that waits, and queues whose lag is not known.

    None where no queue is known.
    """

    lag: int | None
    lost: int | None
    behind_ms: int | None
    unknown_queues: int


def total(queues: Iterable[QueueLag], now_ms: int) -> Total:
    """Queues whose lag is not known count apart and nowhere else; an age that is not known makes that of all unknown."""
    every = list(queues)
    known = [one for one in every if one.lag is not None]
    if not known:
        return Total(None, None, None, len(every))
    ages = [one.behind_ms(now_ms) for one in known]
    return Total(
        sum(one.lag or 0 for one in known),
        sum(one.lost or 0 for one in known),
        None if None in ages else max(age for age in ages if age is not None),
        len(every) - len(known),
    )


class Pace(NamedTuple):
    """Offsets read and written a second between two looks, and the seconds in which, at that pace, nothing is behind.

    None where it is not known; the last one also where the reader does not catch up.
    """

    read_per_s: float | None = None
    written_per_s: float | None = None
    catch_up_s: float | None = None


def pace(before: Iterable[QueueLag], now: Iterable[QueueLag], seconds: float) -> Pace:
    """Of the queues whose lag was known at both looks. One that went back, as a group's offsets do that are set, or those of a
    topic that was made again, has no pace.
    """
    old = {one.queue: one for one in before if one.lag is not None}
    pairs = [(old[one.queue], one) for one in now if one.lag is not None and one.queue in old]
    if not pairs or seconds <= 0:
        return Pace()
    read = [(b.position or 0) - (a.position or 0) for a, b in pairs]
    written = [(b.max_offset or 0) - (a.max_offset or 0) for a, b in pairs]
    if min(read) < 0 or min(written) < 0:
        return Pace()
    left, gained = sum(b.lag or 0 for _, b in pairs), sum(read) - sum(written)
    catch_up_s = 0.0 if not left else left * seconds / gained if gained > 0 else None
    return Pace(sum(read) / seconds, sum(written) / seconds, catch_up_s)
