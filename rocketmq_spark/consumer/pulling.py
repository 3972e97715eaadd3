"""The long polls of one member; each answer leads to the queue's next pull. Java's ``PullMessageService``.

One thread serves all queues and never waits for answers or listeners. From the time when a rebalance adds a queue until the
queue is dropped, the queue has one pull at a time.

Queues that are far behind their ends are read ahead for a while (``consumer/prefetch``). A pull returns 32 messages and
involves three threads; reading ahead has many pulls in flight. A queue is never pulled and read ahead at the same time. Between
``try_read_ahead`` and the start of the read, the queue waits. The conditions that pause pulls (a full cache, a listener that
blocks the offset) also end a read. After the read, the queue is pulled again when the condition has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.prefetch import BacklogQueues, DecodeParts, ResetOffsetsSoon, decode_messages
from rocketmq_spark.consumer.process_queue import (
    FIRST_PULL_DELAY_S,
    FULL_CACHE_PAUSE_S,
    ProcessQueue,
    PullDecision,
    decide_next_pull,
    pause_reason,
)
from rocketmq_spark.consumer.settings import ConsumerSettings, TopicFilter
from rocketmq_spark.errors import ConnectionLost, DecodeError, RocketMQError
from rocketmq_spark.model import MASTER_ID, MessageQueue, PullAnswer, PullRequest, PullStatus
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

# The codes of a broker that does not know this member: after a restart, a broker knows no group until the next heartbeat.
_UNKNOWN_MEMBER_CODES = (Response.SUBSCRIPTION_NOT_EXIST, Response.SUBSCRIPTION_NOT_LATEST)


class ConsumeService(Protocol):
    """A ``ConcurrentConsumeService`` or an ``OrderedConsumeService``, which passes messages to the listener."""

    def is_ready(self, queue: ProcessQueue) -> bool:
        """Whether the queue may be pulled: an ordered consumer must have the lock of the queue."""

    def submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        """Consume messages that were put into ``queue``, without blocking."""


class Pulling:
    """Pulls the queues of one member. ``topic_filter_of`` returns the current filter of a topic. ``correct_offset`` replaces an
    offset that does not exist, and releases the queue.
    """

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        state: MemberState,
        timer: Timer,
        topic_filter_of: Callable[[str], TopicFilter | None],
        correct_offset: Callable[[ProcessQueue, int], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._member_state = state
        self._timer = timer
        self._topic_filter_of = topic_filter_of
        self._correct_offset = correct_offset
        self._replica_ids: dict[MessageQueue, int] = {}  # the broker id from which a queue is pulled next
        self._logged_failures: set[tuple[str, int | None]] = set()  # brokers, and the response codes that were logged
        self._backlog_queues: BacklogQueues | None = None
        self.decode: DecodeParts | None = None  # None if the answers are decoded already
        self.consume_service: ConsumeService | None = None
        self.reset_offsets_soon: ResetOffsetsSoon = lambda offsets: None  # gets the resets that answers report
        # The function is called for a queue that is not pulled because ``ConsumeService.is_ready`` is False.
        self.on_not_ready: Callable[[ProcessQueue], None] = lambda queue: None
        self.on_unknown_member: Callable[[], None] = lambda: None  # called if a broker does not know this member
        self.on_connection_lost: Callable[[str], None] = lambda broker_name: None  # called once per lost connection
        self._disconnected_brokers: set[str] = set()  # brokers that have not answered since their connection was lost

    def use_backlog_queues(self, backlog_queues: BacklogQueues) -> None:
        """Use ``backlog_queues`` to read queues that are far behind."""
        backlog_queues.pull, backlog_queues.submit, backlog_queues.reset_offsets_soon = (
            self._pull,
            self._submit,
            self.reset_offsets_soon,
        )
        backlog_queues.decode = self.decode or decode_messages
        backlog_queues.is_unfiltered = lambda queue: (
            (topic_filter := self._topic_filter_of(queue.topic)) is not None and not topic_filter.filter
        )
        self._backlog_queues = backlog_queues

    def pull_later(self, queue: ProcessQueue, offset: int, delay_s: float = FIRST_PULL_DELAY_S) -> None:
        """Pull ``queue`` from ``offset`` on, until it is dropped."""
        self._timer.call_later(delay_s, partial(self._pull, queue, offset))

    def close(self, wait_s: float) -> None:
        """Stop pulling, and ignore later answers. Waits up to ``wait_s`` seconds for reads."""
        self._timer.close(wait_s)
        if self._backlog_queues is not None:
            self._backlog_queues.close(wait_s)

    def _pull(self, queue: ProcessQueue, offset: int) -> None:
        if queue.dropped:
            return
        queue.last_pull_ms = self._timer.now_ms()
        wait_s = self._pause_s(queue)
        topic_filter = self._topic_filter_of(queue.queue.topic)
        if wait_s or topic_filter is None:
            self.pull_later(queue, offset, wait_s or self._settings.pull_delay_on_error_s)
            return
        if self._backlog_queues is not None and self._backlog_queues.try_read_ahead(queue, offset):
            return
        request = self._request(queue.queue, offset, topic_filter)
        self._port.pull(
            request,
            Deadline.after(self._settings.pull_timeout_s),
            partial(self._on_answer, queue, offset, topic_filter),
        )

    def _pause_s(self, queue: ProcessQueue) -> float:
        """Return the pause in seconds before the next pull of the queue; 0 if the queue may be pulled now."""
        # ``is_ready`` is checked first, because the queue may stay full for a long time, and a lost lock must be requested
        # meanwhile.
        if self.consume_service is None or not self.consume_service.is_ready(queue):
            self.on_not_ready(queue)
            return self._settings.pull_delay_on_error_s
        with self._member_state.lock:
            reason = pause_reason(queue, self._member_state.thresholds_of(queue.queue.topic))
        if reason:
            logger.debug("%s is not pulled now: %s", queue.queue, reason)
            return FULL_CACHE_PAUSE_S
        return 0.0

    def _request(self, queue: MessageQueue, offset: int, topic_filter: TopicFilter) -> PullRequest:
        finished_offset = self._member_state.offsets.get(queue) if self._settings.clustering else None
        return PullRequest(
            group=self._settings.group,
            queue=queue,
            offset=offset,
            count=self._settings.pull_batch_size,
            filter=topic_filter.filter,
            post_filter=self._settings.post_subscription_when_pull,
            version_ms=topic_filter.version_ms,
            suspend_s=self._settings.pull_suspend_s,
            commit_offset=finished_offset or None,
            broker_id=self._replica_ids.get(queue, MASTER_ID),
            max_bytes=self._settings.pull_batch_size_in_bytes,
            decoded=self.decode is None,
        )

    def _on_answer(
        self, queue: ProcessQueue, offset: int, request_filter: TopicFilter, answer: PullAnswer | RocketMQError
    ) -> None:
        """Pass an answer from the connection's thread to the pull thread.

        A reset also applies to a queue that was just released, and while the consumer stops, because the broker reports a reset
        only once.
        """
        if isinstance(answer, PullAnswer) and answer.is_reset:
            self.reset_offsets_soon({queue.queue: answer.next_offset})
            return
        if isinstance(answer, PullAnswer) and self.decode is not None and not queue.dropped:
            decoded_answer = capture(_decoded_answer, queue.queue, offset, request_filter, answer, self.decode)
            if isinstance(decoded_answer, Failure):
                # The cause may be temporary, such as a lack of memory, so the next pull requests the messages again.
                decoded_answer.log(logger, "an answer to a pull of %s at %d could not be decoded", queue.queue, offset)
                answer = DecodeError(f"the answer could not be decoded: {decoded_answer}", queue=str(queue.queue))
            else:
                answer = decoded_answer
        self._timer.call_later(0, partial(self._handle_answer, queue, offset, request_filter, answer))

    def _handle_answer(
        self, queue: ProcessQueue, offset: int, request_filter: TopicFilter, answer: PullAnswer | RocketMQError
    ) -> None:
        if queue.dropped:
            return
        if isinstance(answer, RocketMQError):
            # If a slave failed, it may be gone, so the next pull goes to the master, whose answer says which replica to ask.
            self._replica_ids.pop(queue.queue, None)
            self._log_failure(queue.queue, offset, answer)
            if answer.broker_code in _UNKNOWN_MEMBER_CODES:
                self.on_unknown_member()
            elif isinstance(answer, ConnectionLost) and queue.queue.broker_name not in self._disconnected_brokers:
                self._disconnected_brokers.add(queue.queue.broker_name)
                self.on_connection_lost(queue.queue.broker_name)
        else:
            self._replica_ids[queue.queue] = answer.broker_id
            self._logged_failures = {
                failure for failure in self._logged_failures if failure[0] != queue.queue.broker_name
            }
            self._disconnected_brokers.discard(queue.queue.broker_name)
            topic_filter = self._topic_filter_of(queue.queue.topic)
            if topic_filter is None or topic_filter.filter_version_ms != request_filter.filter_version_ms:
                self._pull(queue, offset)  # the answer may lack messages that match the new filter
                return
        decision = decide_next_pull(
            offset, answer, self._settings.pull_interval_s, self._settings.pull_delay_on_error_s
        )
        if decision.corrected_offset is not None:
            logger.warning(
                "offset %d of %s does not exist, continuing at %d", offset, queue.queue, decision.corrected_offset
            )
            self._correct_offset(queue, decision.corrected_offset)
            return
        self._record_answer(queue, answer, decision)
        if decision.messages:
            self._submit(queue, decision.messages)
        if decision.pause_s:
            self.pull_later(queue, decision.offset, decision.pause_s)
        else:
            self._pull(queue, decision.offset)

    def _submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        if self.consume_service is not None:
            self.consume_service.submit(queue, messages)

    def _log_failure(self, queue: MessageQueue, offset: int, error: RocketMQError) -> None:
        """Log a failed pull. A failure that may last, such as a missing group, is logged as a warning, but only once until the
        broker answers again.
        """
        failure = queue.broker_name, error.broker_code
        is_transient = error.retriable or error.broker_code in _UNKNOWN_MEMBER_CODES
        level = logging.INFO if is_transient or failure in self._logged_failures else logging.WARNING
        if not is_transient:
            self._logged_failures.add(failure)
        logger.log(level, "group %s: a pull of %s at %d failed: %s", self._settings.group, queue, offset, error)

    def _record_answer(self, queue: ProcessQueue, answer: PullAnswer | RocketMQError, decision: PullDecision) -> None:
        with self._member_state.lock:
            if isinstance(answer, PullAnswer):
                self._member_state.end_offsets[queue.queue], queue.end_updated_ms = (
                    answer.max_offset,
                    self._timer.now_ms(),
                )
                if answer.status is PullStatus.FOUND:
                    now_ms = self._timer.now_ms()
                    duration_ms = now_ms - queue.last_pull_ms
                    self._member_state.figures.record_pull(
                        queue.queue.topic, queue.message_count(answer.messages), duration_ms, now_ms
                    )
            queue.put(decision.messages)
            if decision.finished_offset is not None and not queue.count:
                self._member_state.record_finished_locked(queue, decision.finished_offset)


def _decoded_answer(
    queue: MessageQueue, offset: int, topic_filter: TopicFilter, answer: PullAnswer, decode: DecodeParts
) -> PullAnswer:
    """Return an answer whose stored messages are decoded for the process queue."""
    if answer.status is not PullStatus.FOUND:
        return answer
    ends = ((answer.next_offset, len(answer.stored_messages)),)
    part = FetchedPart(
        queue, offset, ends, answer.stored_messages, lambda *_: answer.read_messages(), topic_filter.filter
    )
    ((messages, left_out_offset),) = decode([part])
    return replace(
        answer,
        messages=messages,
        next_offset=answer.next_offset if left_out_offset is None else left_out_offset,
        stored_messages=b"",
        read_messages=tuple,
    )
