"""Answers to the requests that brokers send to the members of a group, such as those of ``mqadmin consumerStatus`` and
``resetOffsetByTime``. Mirrors ``ClientRemotingProcessor``. The answers run on the group's own thread, so they may block.
"""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from rocketmq_spark.base.threads import Failure, Timer
from rocketmq_spark.consumer.concurrent import ConcurrentConsumeService
from rocketmq_spark.consumer.listener import CommitAction
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.ordered import OrderedConsumeService
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.rebalancing import Rebalancing
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError, DecodeError, MessageRefused
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.model.membership import (
    BrokerRequest,
    ConsumeDirectly,
    DirectOutcome,
    DirectResult,
    GetConsumedOffsets,
    GetRunningInfo,
    MembersChanged,
    Membership,
    QueueInfo,
    RequestAnswer,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.wire.messages import decompressed

logger = logging.getLogger(__name__)


class BrokerRequestHandler:
    """Answers requests of brokers to one member."""

    def __init__(
        self,
        state: MemberState,
        rebalancing: Rebalancing,
        membership: Callable[[], Membership],
        consume_service: ConcurrentConsumeService | OrderedConsumeService,
        settings: ConsumerSettings,
        timer: Timer,
    ) -> None:
        self._member_state = state
        self._rebalancing = rebalancing
        self._membership = membership
        self._consume_service = consume_service
        self._settings = settings
        self._timer = timer
        self._started_ms = timer.wall_ms()
        self.closed = False  # listeners are not called after the close

    def __call__(self, address: str, request: BrokerRequest) -> RequestAnswer | None:
        """Return the answer to a request of the broker at ``address``; None if the broker expects no answer."""
        match request:
            case MembersChanged():
                logger.info("the broker at %s reports that the members of the group changed", address)
                self._rebalancing.schedule()
            case ResetOffsets(topic, offsets):
                logger.info("the broker at %s requests an offset reset of %s", address, topic)
                self._rebalancing.reset(offsets)
            case GetConsumedOffsets(topic):
                with self._member_state.lock:
                    offsets = self._member_state.offsets.all_offsets()
                return {queue: offset for queue, offset in offsets.items() if queue.topic == topic}
            case GetRunningInfo(wants_stacks):
                return self._running_info(wants_stacks)
            case ConsumeDirectly(message):
                return self._consume_directly(message)
        return None

    def _running_info(self, wants_stacks: bool) -> RunningInfo:
        membership = self._membership()
        with self._member_state.lock:
            queues = {
                queue: self._queue_info(process_queue) for queue, process_queue in self._member_state.queues.items()
            }
            topics = self._member_state.figures.figures_of_topics(membership.subscriptions, self._timer.now_ms())
        return RunningInfo(
            membership,
            self._started_ms,
            self._settings.ordered,
            self._settings.threads,
            queues=queues,
            topics=topics,
            stacks=stacks_of_threads() if wants_stacks and self._settings.answer_stacks else None,
        )

    def _queue_info(self, process_queue: ProcessQueue) -> QueueInfo:
        first_offset, last_offset = process_queue.offsets or (None, None)
        return QueueInfo(
            commit_offset=self._member_state.offsets.get(process_queue.queue),
            cached_min_offset=first_offset,
            cached_max_offset=last_offset,
            cached_count=process_queue.count,
            cached_bytes=process_queue.bytes,
            locked=process_queue.lock.requested_ms is not None and self._consume_service.is_ready(process_queue),
            dropped=process_queue.dropped,
            last_lock_ms=self._wall_ms(process_queue.lock.requested_ms, self._timer.lease_ms()),
            last_pull_ms=self._wall_ms(process_queue.last_pull_ms, self._timer.now_ms()),
            last_consume_ms=self._wall_ms(process_queue.last_consume_ms, self._timer.now_ms()),
        )

    def _wall_ms(self, timer_ms: int | None, now_ms: int) -> int | None:
        return None if timer_ms is None else self._timer.wall_ms() - now_ms + timer_ms

    def _consume_directly(self, message: ReceivedMessage) -> DirectResult:
        if self.closed:
            raise ClosedError("the consumer is closed")
        self._check_direct_message(message)
        message = decompressed(message)
        if message.decode_error is not None:
            raise DecodeError(f"the message cannot be decoded: {message.decode_error}", topic=message.topic)
        started_ms = self._timer.now_ms()
        queue, messages = message.queue, (message,)
        if isinstance(self._consume_service, OrderedConsumeService):
            ordered_context = self._consume_service.context(queue, messages)
            return self._direct_result(
                self._consume_service.call_directly(messages, ordered_context),
                started_ms,
                self._consume_service.auto_commit,
            )
        context = self._consume_service.context(queue, messages)
        return self._direct_result(self._consume_service.call_directly(messages, context), started_ms, None)

    def _check_direct_message(self, message: ReceivedMessage) -> None:
        """Raise ``MessageRefused`` if the listener must not get a message that a broker passes to it directly.

        The group must be subscribed to the topic of the queue, and to the topic that the message names. If the message is a
        retry, its queue belongs to the retry topic, and the message names its original topic. The topic that the message names
        is checked, too, because any sender can write the name of another topic into a message.
        """
        if not self._settings.answer_direct_messages:
            raise MessageRefused("option 'answerDirectMessages' of this member is false", topic=message.topic)
        subscriptions = self._membership().subscriptions
        for topic in (message.queue.topic, message.topic):
            if topic not in subscriptions:
                raise MessageRefused(f"group {self._settings.group} is not subscribed to this topic", topic=topic)

    def _direct_result(self, outcome: object, started_ms: int, auto_commit: bool | None) -> DirectResult:
        duration_ms = self._timer.now_ms() - started_ms
        remark = str(outcome) if isinstance(outcome, Failure) else None
        return DirectResult(
            _direct_outcome(outcome), duration_ms, auto_commit is not None, auto_commit is not False, remark
        )


def _direct_outcome(outcome: object) -> DirectOutcome:
    if isinstance(outcome, Failure):
        return DirectOutcome.THROW_EXCEPTION
    direct_outcomes = {
        None: DirectOutcome.SUCCESS,
        CommitAction.COMMIT: DirectOutcome.COMMIT,
        CommitAction.ROLLBACK: DirectOutcome.ROLLBACK,
    }
    return (
        direct_outcomes.get(outcome, DirectOutcome.LATER)
        if isinstance(outcome, CommitAction | None)
        else DirectOutcome.LATER
    )


def stacks_of_threads() -> str:
    """Return the stacks of up to 100 threads of this process as text, with up to 100 calls each, the newest call first.

    The stacks come from ``faulthandler``, which creates no Python objects, because ``sys._current_frames`` may block Python
    3.11 for ever (python/cpython#106883).
    """
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read()
    except OSError as e:
        return f"The stacks cannot be written to a temporary file: {e}"
    for thread in threading.enumerate():
        text = text.replace(f"0x{thread.ident or 0:016x}", thread.name)
    return text


class PullRequestHandler:
    """Handles the requests of brokers to a ``PullConsumer``.

    ``on_members_changed`` makes the consumer check its group soon. ``on_foreign_reset`` gets resets of queues that are not
    assigned. If the consumer is acquiring such a queue, it may have read the start offset before the reset.
    """

    def __init__(
        self,
        polls: Polls,
        membership: Callable[[], Membership],
        on_members_changed: Callable[[], None],
        commit: Callable[[Mapping[MessageQueue, int]], object],
        on_foreign_reset: Callable[[MessageQueue, int], None] = lambda queue, offset: None,
        answers_stacks: bool = True,
    ) -> None:
        self._polls = polls
        self._answers_stacks = answers_stacks
        self._membership = membership
        self._on_members_changed = on_members_changed
        self._commit = commit
        self._on_foreign_reset = on_foreign_reset
        self._started_ms = time.time_ns() // 1_000_000

    def __call__(self, address: str, request: BrokerRequest) -> RequestAnswer | None:
        """Return the answer to a request of the broker at ``address``.

        Returns None if the broker expects no answer, and for requests that need a listener.
        """
        match request:
            case MembersChanged():
                logger.info("the broker at %s reports that the members of the group changed", address)
                self._on_members_changed()
            case ResetOffsets(topic, offsets):
                reset_offsets = self._polls.reset(offsets)
                logger.warning("offsets of %s were reset by %s: %s", topic, address, reset_offsets)
                if foreign_queues := sorted(offsets.keys() - reset_offsets.keys()):
                    logger.warning("this member does not own these queues and did not reset them: %s", foreign_queues)
                for queue in foreign_queues:
                    self._on_foreign_reset(queue, offsets[queue])
                self._commit(reset_offsets)
            case GetConsumedOffsets(topic):
                return {q: info.commit_offset or 0 for q, info in self._polls.queue_infos().items() if q.topic == topic}
            case GetRunningInfo(wants_stacks):
                stack_text = stacks_of_threads() if wants_stacks and self._answers_stacks else None
                return RunningInfo(
                    self._membership(), self._started_ms, queues=self._polls.queue_infos(), stacks=stack_text
                )
        return None
