"""When a queue is pulled, and what an answer to a pull leads to.

Mirrors ``DefaultMQPushConsumerImpl.pullMessage`` and its callback. Pulling never waits for listeners: thresholds of what is
cached hold it back instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocketmq_spark.base.codes import Response
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import PullAnswer, PullStatus, ReceivedMessage

FULL_S = 0.05
BUSY_S = 0.02
PAUSED_S = 1.0
FIRST_PULL_S = 0.5  # after a rebalance, since 5.0.0: a queue that is handed over is given up by then
SUSPEND_S = 15.0  # what brokers may take until they answer "nothing new"
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of one queue's cache. ``max_span`` None: offsets may lie as far apart as they do, for an orderly listener."""

    max_count: int = 1000
    max_bytes: int = 100 << 20
    max_span: int | None = 2000


def divided(thresholds: Thresholds, topic_count: int | None, topic_bytes: int | None, queues: int) -> Thresholds:
    """Thresholds of one of ``queues`` where those of the whole topic are given; each keeps at least 1."""
    share = max(1, queues)
    return Thresholds(
        thresholds.max_count if topic_count is None else max(1, topic_count // share),
        thresholds.max_bytes if topic_bytes is None else max(1, topic_bytes // share),
        thresholds.max_span,
    )


def full(queue: ProcessQueue, thresholds: Thresholds) -> str | None:
    """Why the queue is not pulled now; None if it is."""
    if queue.count > thresholds.max_count:
        return f"{queue.count} messages are cached, more than {thresholds.max_count}"
    if queue.bytes > thresholds.max_bytes:
        return f"{queue.bytes} bytes are cached, more than {thresholds.max_bytes}"
    if thresholds.max_span is not None and queue.span > thresholds.max_span:
        return f"cached offsets span {queue.span}, more than {thresholds.max_span}"
    return None


@dataclass(frozen=True, slots=True)
class Next:
    """What an answer leads to.

    ``messages`` are to be cached and consumed; ``finished`` is an offset up to which nothing is left to do, to be noted if
    nothing is cached; then the next pull, at ``offset`` in ``pause_s``. ``repair`` is instead the right offset of a queue
    whose own was not to be had: it is noted and frozen, stored, and the queue is given up, to be added again.
    """

    offset: int
    pause_s: float = 0.0
    messages: Sequence[ReceivedMessage] = ()
    finished: int | None = None
    repair: int | None = None


def after(offset: int, answer: PullAnswer | RocketMQError, interval_s: float, error_s: float) -> Next:
    """What ``answer`` to the pull at ``offset`` leads to; pauses are ``pullInterval`` and the one after errors."""
    if isinstance(answer, RocketMQError):
        return Next(offset, BUSY_S if answer.broker_code == Response.FLOW_CONTROL else error_s)
    if answer.status is PullStatus.OFFSET_ILLEGAL:
        return Next(offset, repair=answer.next_offset)
    if answer.status is not PullStatus.FOUND:
        return Next(answer.next_offset, finished=answer.next_offset)
    if not answer.messages:  # a tag's hash matched, its text did not
        return Next(answer.next_offset, finished=answer.next_offset)
    return Next(answer.next_offset, interval_s, answer.messages)
