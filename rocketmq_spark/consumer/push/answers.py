"""Answers requests of brokers, such as those of ``mqadmin consumerStatus`` and ``resetOffsetByTime``.

Mirrors ``ClientRemotingProcessor``. Runs on the group's own thread, so it may block.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from rocketmq_spark.base.threads import Failure
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.concurrent import Concurrent
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.orderly import Orderly
from rocketmq_spark.consumer.push.rebalancing import Rebalancing
from rocketmq_spark.consumer.result import Hold
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.membership import (
    Answer,
    BrokerRequest,
    ConsumeDirectly,
    DirectOutcome,
    DirectResult,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    QueueInfo,
    ResetOffsets,
    RunningInfo,
)

logger = logging.getLogger(__name__)


class Answers:
    """Answers the requests to one member."""

    def __init__(
        self,
        held: MemberState,
        rebalancing: Rebalancing,
        membership: Callable[[], Membership],
        consuming: Concurrent | Orderly,
        settings: ConsumerSettings,
        timer: Timer,
    ) -> None:
        self._held = held
        self._rebalancing = rebalancing
        self._membership = membership
        self._consuming = consuming
        self._settings = settings
        self._timer = timer
        self._started_ms = timer.wall_ms()
        self.closed = False  # listeners are not called after the close

    def __call__(self, address: str, question: BrokerRequest) -> Answer | None:
        """Return the answer to a request of the broker at ``address``; None if the broker expects none."""
        match question:
            case MembersChanged():
                logger.info("the broker at %s reports that the members of the group changed", address)
                self._rebalancing.wake()
            case ResetOffsets(topic, offsets):
                logger.info(
                    "the broker at %s requests an offset reset of %s", address, topic
                )  # what is done says who does it
                self._rebalancing.reset(offsets)
            case OffsetsAsked(topic):
                with self._held.lock:
                    every = self._held.offsets.every()
                return {queue: offset for queue, offset in every.items() if queue.topic == topic}
            case InfoAsked(stacks):
                return self._info(stacks)
            case ConsumeDirectly(message):
                return self._consumed(message)
        return None

    def _info(self, stacks: bool) -> RunningInfo:
        membership = self._membership()
        with self._held.lock:
            queues = {queue: self._queue(held) for queue, held in self._held.queues.items()}
            topics = self._held.figures.all(membership.subscriptions, self._timer.now_ms())
        return RunningInfo(
            membership,
            self._started_ms,
            self._settings.ordered,
            self._settings.threads,
            queues=queues,
            topics=topics,
            stacks=stacks_of_threads() if stacks else None,
        )

    def _queue(self, held: ProcessQueue) -> QueueInfo:
        first, last = held.offsets or (None, None)
        return QueueInfo(
            commit_offset=self._held.offsets.get(held.queue),
            cached_min_offset=first,
            cached_max_offset=last,
            cached_count=held.count,
            cached_bytes=held.bytes,
            locked=held.lock.held(self._timer.lease_ms()),
            dropped=held.dropped,
            last_lock_ms=self._wall(held.lock.granted_ms, self._timer.lease_ms()),
            last_pull_ms=self._wall(held.last_pull_ms, self._timer.now_ms()),
            last_consume_ms=self._wall(held.last_consume_ms, self._timer.now_ms()),
        )

    def _wall(self, at_ms: int | None, now_ms: int) -> int | None:
        return None if at_ms is None else self._timer.wall_ms() - now_ms + at_ms

    def _consumed(self, message: ReceivedMessage) -> DirectResult:
        if self.closed:
            raise ClosedError("the consumer is closed")
        began_ms = self._timer.now_ms()
        queue, messages = message.queue, (message,)
        if isinstance(self._consuming, Orderly):
            ordered = self._consuming.context(queue, messages)
            return self._direct(self._consuming.call(messages, ordered), began_ms, self._consuming.auto_commit)
        context = self._consuming.context(queue, messages)
        return self._direct(self._consuming.call(messages, context), began_ms, None)

    def _direct(self, outcome: object, began_ms: int, auto_commit: bool | None) -> DirectResult:
        spent_ms = self._timer.now_ms() - began_ms
        remark = str(outcome) if isinstance(outcome, Failure) else None
        return DirectResult(_told(outcome), spent_ms, auto_commit is not None, auto_commit is not False, remark)


def _told(outcome: object) -> DirectOutcome:
    if isinstance(outcome, Failure):
        return DirectOutcome.THROW_EXCEPTION
    known = {None: DirectOutcome.SUCCESS, Hold.COMMIT: DirectOutcome.COMMIT, Hold.ROLLBACK: DirectOutcome.ROLLBACK}
    return known.get(outcome, DirectOutcome.LATER) if isinstance(outcome, Hold | None) else DirectOutcome.LATER


def stacks_of_threads() -> str:
    """Return the stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
