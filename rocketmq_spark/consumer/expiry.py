"""Messages whose listener does not come back: they must not hold up the offset of their queue for ever.

Mirrors ``ProcessQueue.cleanExpiredMsg``. Only the first message is looked at, as only that one holds up anything.
"""

from __future__ import annotations

from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.model import ReceivedMessage

MAX_AT_ONCE = 16  # of one queue in one run
DELAY_LEVEL = 3


def expired(queue: ProcessQueue, now_ms: int, timeout_ms: int) -> ReceivedMessage | None:
    """The first message if a listener has had it for longer than ``timeout_ms``, else None."""
    first = queue.first()
    if queue.dropped or first is None:
        return None
    started = queue.started_ms(first)
    return first if started is not None and now_ms - started > timeout_ms else None
