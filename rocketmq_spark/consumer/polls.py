"""The pulls of a ``PullConsumer``.

``Polls`` guards the queues (``AssignedQueues``) by one lock. Answers to pulls arrive on connection threads, which send the next
pulls. Each call of ``poll`` waits for the answers.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.process import signal_safe
from rocketmq_spark.consumer.assigned import AssignedQueues, FetchedPart, FetchRequest, UncommittedOffsets
from rocketmq_spark.consumer.prefetch import BacklogReader, Prefetcher, PrefetchLimits
from rocketmq_spark.consumer.reachability import Reachability
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import BrokerBusy, BrokerError, OffsetError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, PullAnswer, PullRequest, PullStatus, ReceivedMessage
from rocketmq_spark.model.membership import QueueInfo
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)


class Polls:
    """Pulls the queues of one consumer, and passes the fetched parts to the polls of this consumer. Thread-safe."""

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        clock: Clock,
        backlog_reader: BacklogReader | None = None,
    ) -> None:
        self._member = member
        self._settings = settings
        self._subscriptions = subscriptions
        self._clock = clock
        self.reachability = Reachability(settings.group, clock)
        # ``with`` statements enter the lock, and not the condition, because Ctrl-C in the methods of a condition would leave
        # the lock held.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._queues = AssignedQueues(settings.thresholds.max_count, settings.thresholds.max_bytes)
        # The function is called if the answer to a pull of a released queue reports a reset. The function must not block.
        self.on_released_queue_reset: Callable[[MessageQueue, int], None] = lambda queue, offset: None
        self._queues.on_released_queue_reset = lambda queue, offset: self.on_released_queue_reset(queue, offset)
        self._prefetcher: Prefetcher | None = None
        if backlog_reader is not None:
            limits = PrefetchLimits(
                settings.pull_batch_size, settings.thresholds.max_count, settings.thresholds.max_bytes
            )
            self._prefetcher = Prefetcher(self._lock, self._condition, self._queues, limits, backlog_reader, clock)
            self._prefetcher.resume_long_polls = self._pull
        # The queue and the error of a permanent failure. The next ``wait`` raises the error.
        self._error: tuple[MessageQueue, RocketMQError] | None = None
        self.failed_queue: MessageQueue | None = None  # the queue whose error ``wait`` raised last
        self._is_woken = False  # whether the next ``wait`` returns at once
        # The next two attributes are set in the last instruction before a poll returns or a loop yields, so that messages count
        # as not returned if Ctrl-C comes before this instruction.
        self.has_returned_all = False  # whether the poll returned all messages that it took
        self.returned_up_to: int | None = None  # if only some messages were returned: the offset after these messages
        self.closed = False

    # --- queues and positions, as in ``AssignedQueues``

    def assigned_queues(self) -> list[MessageQueue]:
        with self._lock:
            return sorted(self._queues.states)

    def assign(
        self,
        start_offsets: Mapping[MessageQueue, StartOffset | None],
        uncommitted_offsets: UncommittedOffsets | None = None,
    ) -> UncommittedOffsets:
        with self._lock:
            uncommitted_offsets = self._queues.assign({} if self.closed else start_offsets, uncommitted_offsets)
        self._pull()
        return uncommitted_offsets

    def pause(self, queues: Iterable[MessageQueue], paused: bool) -> None:
        with self._lock:
            self._queues.pause([_check_assigned(self._queues, queue) for queue in queues], paused)
        self._pull()

    def seek(self, queues: Iterable[MessageQueue], offset_of: Callable[[MessageQueue], int]) -> None:
        """Continue each queue at the offset that ``offset_of`` returns; ``offset_of`` may send requests. Without ``queues``,
        seek all queues.
        """
        with self._lock:
            named_queues = [_check_assigned(self._queues, queue) for queue in queues]
            queues_to_seek = named_queues or list(self._queues.states)
        offsets = {queue: offset_of(queue) for queue in queues_to_seek}
        with self._lock:
            for queue in named_queues:  # if any named queue is not assigned, no position changes
                _check_assigned(self._queues, queue)
            for queue in offsets.keys() & self._queues.states.keys():
                self._queues.seek(queue, offsets[queue])
        self._pull()

    def reset(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Apply resets to the assigned queues among ``offsets``. Returns the offsets to commit."""
        with self._lock:
            owned_offsets = {queue: offset for queue, offset in offsets.items() if queue in self._queues.states}
            for queue, offset in owned_offsets.items():
                self._queues.seek(queue, offset)
        self._pull()
        return owned_offsets

    def queue_infos(self) -> dict[MessageQueue, QueueInfo]:
        """Return the current state of each queue."""
        with self._lock:
            return self._queues.queue_infos()

    def start_poll(self, repeat_commits: bool = False) -> None:
        """Start a poll: messages that the last poll returned are finished. Messages that the last poll took but did not return
        wait again.

        With ``repeat_commits``, the next commit includes offsets that are already committed.
        """
        with self._lock:
            self._record_returned_messages()
            self._queues.ready_parts.take_back()
            self._queues.finish_returned_messages(repeat_commits)

    def finish_returned_messages(self) -> dict[MessageQueue, int]:
        """Count all returned messages as finished. Returns the offsets to commit."""
        with self._lock:
            self._record_returned_messages()
            self._queues.finish_returned_messages()
            return self._queues.offsets_to_commit()

    def _record_returned_messages(self) -> None:
        if (returned_up_to := self.returned_up_to) is not None:
            self._queues.ready_parts.mark_returned_up_to(returned_up_to)
            if self.returned_up_to == returned_up_to:  # the attribute differs if the loop has yielded another message
                self.returned_up_to = None
        if self.has_returned_all:
            self._queues.ready_parts.mark_returned()
            self.has_returned_all = False

    def never_committed_offsets(self) -> dict[MessageQueue, int]:
        """Return the finished offsets of queues for which the group may have no committed offset."""
        with self._lock:
            return {
                queue: state.finished_offset
                for queue, state in self._queues.states.items()
                if state.committed_offset is None
            }

    def mark_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        with self._lock:
            self._queues.mark_committed(offsets)

    @signal_safe
    def close(self, wait: bool = True) -> None:
        """Send no more pulls. Without ``wait``, this method does not block, so that a signal handler can call it."""
        with self._lock:
            self.closed = True
            self._condition.notify_all()
        if wait and self._prefetcher is not None:
            self._prefetcher.close(self._settings.request_timeout_s)

    # --- messages

    def wake(self) -> None:
        """Make the current or the next ``wait`` return at once."""
        with self._lock:
            self._is_woken = True
            self._condition.notify_all()

    def wait(self, deadline: Deadline, max_parts: int) -> list[FetchedPart]:
        """Wait for messages. Returns an empty list after ``deadline``, ``wake`` or ``close``.

        Raises the error of a pull that failed permanently.
        """
        while not (parts := self._take(max_parts)):
            self._pull()
            with self._lock:
                if parts := self._take(max_parts):  # messages arrived while the pulls were sent
                    break
                if self.closed or self._is_woken or deadline.expired:
                    self._is_woken = False
                    return []
                now, remaining_s = self._clock.now(), deadline.remaining()
                retry_at = self._queues.next_retry_at(now)
                try:
                    self._condition.wait(remaining_s if retry_at is None else min(remaining_s, retry_at - now))
                except BaseException:  # Ctrl-C may end ``wait`` while this thread does not hold the lock
                    if not self._condition._is_owned():  # type: ignore[attr-defined]
                        self._lock.acquire()
                    raise
        self._pull()  # the next messages arrive while the caller processes ``parts``
        return parts

    def _take(self, max_parts: int) -> list[FetchedPart]:
        with self._lock:
            if self._error is not None:
                (self.failed_queue, error), self._error = self._error, None
                if self.failed_queue in self._queues.states:
                    raise error
            self._record_returned_messages()
            return self._queues.ready_parts.take(max_parts)

    def yield_messages(self, part: FetchedPart) -> Iterator[ReceivedMessage]:
        """Yield the messages of ``part``, the only part that was taken. A yielded message counts as returned.

        After another poll or a seek, no more messages of the part are yielded. No lock is held, because a signal handler may
        close the consumer at this point.
        """
        for message in part.read():
            if not self._queues.ready_parts.may_return(part):
                return
            self.returned_up_to = message.queue_offset + 1
            yield message
        if self._queues.ready_parts.may_return(part):
            self.has_returned_all, self.returned_up_to = True, None

    def is_current(self) -> bool:
        """Whether the queue of the last poll's messages was neither revoked nor moved by a seek since the poll."""
        with self._lock:
            return self._queues.ready_parts.has_current_part()

    def _pull(self) -> None:
        """Send the pulls that are due."""
        requests: list[FetchRequest] = []
        sent_count = 0
        try:
            with self._lock:
                if self.closed:
                    return
                prefetcher, is_unfiltered = self._prefetcher, self._subscriptions.is_unfiltered
                queues_read_ahead = prefetcher.start(is_unfiltered) if prefetcher is not None else ()
                self._queues.due_requests(self._clock.now(), queues_read_ahead, requests)
            for request in requests:
                topic_filter = self._subscriptions.filter(request.queue.topic)
                pull_request = _pull_request(self._settings, request, topic_filter)
                deadline = Deadline.after(self._settings.pull_timeout_s)
                self._member.pull(pull_request, deadline, functools.partial(self._on_answer, request, topic_filter))
                sent_count += 1
        except BaseException:  # unsent pulls get no answers, so they are cancelled, also after Ctrl-C
            with self._lock:
                self._queues.cancel(requests[sent_count:])
            raise

    def _on_answer(self, request: FetchRequest, request_filter: Filter, answer: PullAnswer | RocketMQError) -> None:
        """Handle the answer to a pull.

        If the filter has changed since the pull, the answer is dropped, because it may skip messages that match the new filter.
        """
        with self._lock:
            if isinstance(answer, RocketMQError):
                if isinstance(answer, BrokerError):  # ``_on_failure`` retries the pull, or lets the next ``wait`` raise
                    self.reachability.on_queue_read(request.queue.broker_name)
                else:
                    self.reachability.on_failure(request.queue.broker_name, answer)
                self._on_failure(request, answer)
                self._condition.notify_all()
                return
            self.reachability.on_queue_read(request.queue.broker_name)
            if not answer.is_reset and request_filter != self._subscriptions.filter(request.queue.topic):
                self._queues.cancel([request])
            elif self._queues.on_answer(request, answer, request_filter) and answer.status is PullStatus.OFFSET_ILLEGAL:
                event = "was reset by its broker" if answer.is_reset else "does not exist"
                logger.warning(
                    "offset %d of %s %s: continuing at %d", request.offset, request.queue, event, answer.next_offset
                )
            self._condition.notify_all()
        self._pull()

    def _on_failure(self, request: FetchRequest, error: RocketMQError) -> None:
        settings = self._settings
        pause_s = settings.pull_delay_when_busy_s if isinstance(error, BrokerBusy) else settings.pull_delay_on_error_s
        if not self._queues.on_failure(request, self._clock.now() + pause_s) or self.closed:
            return
        if error.retriable:
            logger.info("the pull of %s at %d failed, retrying: %s", request.queue, request.offset, error)
        else:
            self._error = request.queue, error


def _check_assigned(queues: AssignedQueues, queue: MessageQueue) -> MessageQueue:
    if queue not in queues.states:
        raise OffsetError("the queue is not assigned", queue=str(queue), remedy="Assign it first")
    return queue


def _pull_request(settings: ConsumerSettings, request: FetchRequest, topic_filter: Filter) -> PullRequest:
    return PullRequest(
        settings.group,
        request.queue,
        request.offset,
        settings.pull_batch_size,
        topic_filter,
        post_filter=True,
        suspend_s=settings.pull_suspend_s,
        broker_id=request.broker_id,
        decoded=False,
    )
