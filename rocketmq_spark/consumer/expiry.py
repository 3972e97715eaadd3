"""Messages whose listener does not come back: they must not hold up the offset of their queue for ever.

Mirrors ``ProcessQueue.cleanExpiredMsg``. Only the first message is looked at, as only that one holds up anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.model import ReceivedMessage

MAX_AT_ONCE = 16  # of one queue in one run
DELAY_LEVEL = 3


class Call(NamedTuple):
    """A listener has these messages of a queue since then."""

    queue: ProcessQueue
    messages: Sequence[ReceivedMessage]
    began_ms: int


def expired(queue: ProcessQueue, calls: Iterable[Call], now_ms: int, timeout_ms: int) -> ReceivedMessage | None:
    """The first message if one of ``calls`` has had it for longer than ``timeout_ms``, else None."""
    first = queue.first()
    if queue.dropped or first is None:
        return None
    late = (call for call in calls if call.queue is queue and now_ms - call.began_ms > timeout_ms)
    return first if any(message is first for call in late for message in call.messages) else None
