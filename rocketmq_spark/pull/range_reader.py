"""Reads offset ranges of one broker with pipelined pulls.

The offsets of a range are known, so many pulls are in flight at once. Answers may be short (a broker sends 32 messages or 256
KiB, 8 messages if the data is cold), empty (filters, compaction), late or out of order. Offsets that an answer did not cover
are requested again, and answers are delivered up to the first offset that is still pending.

``outcomes`` decides what an answer means, and whether a pull is repeated. ``suspicions`` decides when a pull is repeated.
``pending`` has the offsets that are still to be read. ``fetched`` has the answers that were received. ``pacing`` decides how
many messages to request. ``replica`` decides which replica to ask. ``progress_timeout`` decides how long to wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import AccessDenied, BrokerError, ConnectionLost, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import (
    FetchedAnswer,
    FetchedAnswers,
    Hole,
    ReceivedAnswers,
    is_inner_batch,
    offset_count,
)
from rocketmq_spark.pull.outcomes import Cause, Continue, Lost, OnLoss, Reconnect, RepeatPull, Reset, Suspect, judge
from rocketmq_spark.pull.pacing import PullPacing, PullRequests, PullSettings
from rocketmq_spark.pull.pending import PendingOffsets, PendingRange
from rocketmq_spark.pull.progress_timeout import MAX_BROKER_SILENCE_S, ProgressTimeout
from rocketmq_spark.pull.replica import OnHint, ReplicaHints
from rocketmq_spark.pull.suspicions import HoleSuspicions, LossSuspicions, confirmed_losses, split_at_unconfirmed
from rocketmq_spark.remoting.bulk import BUFFER_BYTES, BulkStream, EmptyAnswer, FoundAnswer, PullTemplate

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)


# Time limit of a connection to another address while the present connection still works.
RECONNECT_TIMEOUT_S = 5.0
# How long a read that ends waits for the answers to its pulls in flight, because an answer may report a reset.
LAST_ANSWERS_TIMEOUT_S = 1.0


class GroupResets:
    """The offsets to which an operator reset the group, if the read follows the resets of its group. A broker reports a reset
    to only one pull of each queue.
    """

    def __init__(self, ranges: Sequence[OffsetRange], follows_resets: bool) -> None:
        self._ranges = ranges
        self._follows_resets = follows_resets
        self.offsets_by_queue: dict[MessageQueue, int] = {}

    def record(self, requested_range: PendingRange, offset: int) -> None:
        if self._follows_resets:
            self.offsets_by_queue[self._ranges[requested_range.range_number].queue] = offset

    def collect_in_flight(self, stream: BulkStream, pending: PendingOffsets, clock: Clock) -> None:
        """Wait for the answers to the pulls in flight, before the connection is closed. The offsets of the pulls become
        pending.
        """
        wait_until = clock.now() + LAST_ANSWERS_TIMEOUT_S
        try:
            while self._follows_resets and pending.pulls_in_flight and (remaining_s := wait_until - clock.now()) > 0:
                if stream.is_full:
                    stream.compact(())
                if stream.receive(remaining_s):
                    self._collect(stream, pending)
        except RocketMQError as e:
            logger.info("pulls in flight were not answered: %s", e)

    def _collect(self, stream: BulkStream, pending: PendingOffsets) -> None:
        found_answers, empty_answers = stream.scan()
        answers: list[tuple[int, EmptyAnswer | None]] = [
            *((opaque, None) for opaque, *_ in found_answers),
            *empty_answers,
        ]
        for opaque, answer in answers:
            if (requested_range := pending.finish_pull(opaque)) is None:
                continue
            pending.add(requested_range)
            if answer is not None and isinstance(decision := judge(requested_range.start, answer), Reset):
                self.record(requested_range, decision.offset)


class RangeReader:
    """Reads ``ranges`` of one broker over one connection, which is opened again when it breaks."""

    def __init__(
        self,
        ranges: Sequence[OffsetRange],
        connect: Callable[[Deadline], BulkStream],
        templates: Sequence[PullTemplate],
        settings: PullSettings,
        on_loss: OnLoss,
        clock: Clock | None = None,
        on_hint: OnHint | None = None,
        recreated_topics: RecreatedTopics | None = None,
    ) -> None:
        self._ranges = ranges
        self._recreated_topics = recreated_topics
        self._connect = connect
        self._settings = settings
        self._on_loss = on_loss
        self._clock = clock or Clock()
        grace_s = min(settings.grace_s, settings.read_deadline_s / 2)
        self._pacing = PullPacing(settings)
        self._pending = PendingOffsets(ranges)
        self._received_answers = ReceivedAnswers()
        self._suspicions = LossSuspicions(grace_s, self._clock.pauses)
        self._hole_suspicions = HoleSuspicions(grace_s, self._clock.pauses)
        self._hints = ReplicaHints(on_hint)
        # The earliest time of the next route request. It limits these requests, because each of a task's thousands of pulls
        # might request the route.
        self._next_route_request_at, self._route_pauses = 0.0, self._clock.pauses()
        self._progress_timeout = ProgressTimeout(settings.read_deadline_s, self._clock)
        self._stream: BulkStream | None = None
        # The address of the last stream, to notice a change.
        self._address: str | None = None
        self._is_stopped = False
        self.requests = PullRequests(templates)
        self._resets = GroupResets(ranges, settings.follows_resets)
        self.resets = self._resets.offsets_by_queue

    def fetch(self) -> Generator[FetchedAnswers, None, None]:
        """Yield all messages of the ranges, buffer by buffer. Closing the iterator closes the connection.

        A read that follows its group ends when an operator resets the group, and ``resets`` then has the new offsets by queue.
        """
        self._progress_timeout.restart()
        try:
            while self._pending and not self._is_stopped and not self.resets:
                try:
                    self._step()
                except RocketMQError as e:
                    if e.retriable:  # after other errors, the rejected offsets are not pending, and would be skipped
                        yield from self._deliver(deliver_all=True)
                    self._disconnect()
                    if not self._pending:  # the remaining offsets were rejected, or are lost
                        raise
                    queue = self._ranges[self._pending.first_pending_position()[0]].queue
                    e.topic, e.queue = e.topic or queue.topic, e.queue or str(queue)
                    if e.retriable:
                        e.remedy = e.remedy or f"Start broker {queue.broker_name}, or raise option 'readDeadline'"
                    self._progress_timeout.pause_or_raise(e, self._describe_wait)
                    continue
                # ``_deliver`` also yields the answers that the decoder gave back.
                yield from self._deliver()
        finally:
            self._disconnect()

    def stop(self) -> None:
        """Make ``fetch`` end within about a second. Any thread may call this."""
        self._is_stopped = True

    def count_usable_answers(self, holes: Sequence[Hole]) -> int:
        """Return how many of the delivered answers may be used. The other answers are delivered again.

        ``holes``, in order, are offsets that answers skipped although every offset of their queue has a message. Holes are
        requested again, from the master. Holes that are not filled during the grace period count as lost.
        """
        answers, now = self._received_answers.delivered_answers, self._clock.now()
        is_reliable = not self._hints.return_to_master()
        unconfirmed_holes = self._hole_suspicions.unconfirmed_holes(answers, holes, now, is_reliable)
        for range_number, start, end in confirmed_losses(holes, unconfirmed_holes, answers):
            self._on_loss(OffsetRange(self._ranges[range_number].queue, start, end), Cause.TRUNCATED)
        for answer, time_s in self._hole_suspicions.retries(answers, unconfirmed_holes, now):
            self._pending.retry_at(_covered_range(answer), time_s)
        usable_count, unused_answers = split_at_unconfirmed(answers, unconfirmed_holes)
        self._received_answers.give_back(unused_answers)
        return usable_count

    def _step(self) -> None:
        """Send the pulls that are allowed now, then process what the broker sent."""
        if self._hints.reconnect_needed and not self._pending.pulls_in_flight:
            self._reconnect()
        if self._stream is None:
            self._stream = self._connect(self._progress_timeout.connect_deadline())
        stream = self._stream
        # A new replica may have messages that the previous replica did not have, so suspicions start again.
        if stream.address != self._address:
            self._address = stream.address
            self._suspicions.on_address_changed()
            self._hole_suspicions.on_address_changed()
        self._pending.release_due_ranges(self._clock.now())
        self._send_pulls(stream)
        if not stream.is_full:
            self._receive(stream)
        if not self._pending:
            return
        self._progress_timeout.log_wait(self._describe_wait)
        if self._progress_timeout.remaining_s() <= 0:
            raise self._progress_timeout.timeout_error(stream.address)

    def _describe_wait(self) -> str:
        """Return what the read waits for, for errors and logs."""
        range_number, offset = self._pending.first_pending_position()
        queue = self._ranges[range_number].queue
        return f"broker {queue.broker_name}: {queue} from offset {offset} on"

    def _send_pulls(self, stream: BulkStream) -> None:
        if self._hints.reconnect_needed:  # the reader connects again when no pull is in flight
            return
        depth = self._pacing.depth()
        # Answers after the first pending offset wait in the buffer, so their size is limited to the maximum of bytes in flight.
        if stream.filled_bytes > BUFFER_BYTES + self._settings.max_bytes_in_flight:
            depth = 0 if self._pending.next_retry_at is not None else 1
        frames: list[bytes] = []
        pending = self._pending
        while pending.has_unrequested_offsets and (free_count := depth - pending.pulls_in_flight) > 0:
            pull_size = self._pacing.next_pull_size()
            pull_count = min(free_count, self._pacing.allowed_pull_count(pull_size, pending.offsets_in_flight))
            if not pull_count and pending.pulls_in_flight:
                break
            frames.extend(self.requests.next_frames(pending, self._pacing, max(1, pull_count), pull_size))
        if frames:
            if pending.pulls_in_flight == len(frames):
                self._progress_timeout.record_answer()
            stream.send(frames, self._settings.read_deadline_s)

    def _receive(self, stream: BulkStream) -> None:
        if not stream.receive(self._progress_timeout.receive_wait_s(self._pending.next_retry_at)):
            if self._pending.pulls_in_flight and self._progress_timeout.is_broker_silent:
                raise ConnectionLost(f"the broker sent nothing for {MAX_BROKER_SILENCE_S:g} s", stream.address)
            return
        self._progress_timeout.record_answer()
        found_answers, empty_answers = stream.scan()
        self._accept_all(found_answers)
        for opaque, answer in empty_answers:
            self._handle_empty_answer(opaque, answer, stream.address)

    def _accept_all(self, found_answers: list[FoundAnswer]) -> None:
        """Accept answers with messages. Most answers are full, and a full answer must cost little, because a million messages
        have 30,000 answers.
        """
        finish_pull, answers, suspicions = (
            self._pending.finish_pull,
            self._received_answers.answers,
            self._suspicions.suspicions_by_position,
        )
        last_suggested_broker, pull_size = self._hints.last_suggested_broker, self._pacing.pull_size
        full_answer_count = largest_answer_bytes = 0
        make_answer = FetchedAnswer._make
        for answer in found_answers:
            opaque, next_offset, suggested_broker, begin, end, _ = answer
            requested_range = finish_pull(opaque)
            if requested_range is None:
                continue
            range_number, start, limit = requested_range
            size = end - begin
            if (
                next_offset != limit
                or limit - start != pull_size
                or suggested_broker != last_suggested_broker
                or not size
                or suspicions
            ):
                self._accept(requested_range, answer)
                continue
            answers.append(make_answer((range_number, start, limit, next_offset, begin, end)))
            full_answer_count += 1
            if size > largest_answer_bytes:
                largest_answer_bytes = size
        if full_answer_count:
            self._received_answers.offset_count += full_answer_count * pull_size
            self._progress_timeout.record_progress()
            self._pacing.on_answers_received(pull_size, pull_size, largest_answer_bytes, full_answer_count)

    def _accept(self, requested_range: PendingRange, answer: FoundAnswer) -> None:
        _, next_offset, suggested_broker, begin, end, min_offset = answer
        if suggested_broker != self._hints.last_suggested_broker:
            self._hints.follow(suggested_broker, self._suspicions)
        range_number, start, limit = requested_range
        if next_offset <= start:
            self._retry_later(requested_range)
            return
        if self._settings.has_filter and int(min_offset) > start:  # with a filter, skipped offsets may be lost
            self._report_loss_at_master(requested_range, int(min_offset), Cause.TRUNCATED, from_range_start=True)
            return
        self._record_progress(requested_range)
        if end > begin and not self._settings.has_filter:
            range_number, start, limit = self._with_rest_of_batch(requested_range, next_offset, begin)
        count = min(next_offset, limit) - start
        if end > begin:
            self._received_answers.add(FetchedAnswer(range_number, start, limit, next_offset, begin, end), count)
        self._pacing.on_answers_received(limit - start, count, end - begin)
        self._pending.add(PendingRange(range_number, next_offset, limit))

    def _with_rest_of_batch(self, requested_range: PendingRange, next_offset: int, begin: int) -> PendingRange:
        """Return the offsets that an answer covers. A broker returns an inner batch whole, so an answer with a batch also
        covers the pending offsets up to ``next_offset``. Pending offsets before ``requested_range`` are requested again,
        because only their answer shows where the batch begins.
        """
        assert self._stream is not None
        if not is_inner_batch(self._stream.buffer, begin):
            return requested_range
        return self._pending.extend(requested_range, max(requested_range.end, next_offset))

    def _handle_empty_answer(self, opaque: int, answer: EmptyAnswer, address: str) -> None:
        requested_range = self._pending.finish_pull(opaque)
        if requested_range is None:
            return
        if answer.suggested_broker is not None and answer.suggested_broker != self._hints.last_suggested_broker:
            self._hints.follow(answer.suggested_broker, self._suspicions)
        self._progress_timeout.record_refusal(f"{answer.code} {answer.remark}".strip())
        match judge(requested_range.start, answer):
            case AccessDenied() if self.requests.has_newer_keys(opaque):
                self._retry_later(requested_range)  # the keys of the request expired, and newer keys exist
            case BrokerError() as error:
                queue = self._ranges[requested_range.range_number].queue
                error.addr, error.topic, error.queue = address, queue.topic, str(queue)
                raise error
            case Continue(offset):
                self._record_progress(requested_range)
                self._pacing.on_nothing_matched()
                self._pending.add(requested_range._replace(start=offset))
            case RepeatPull(reroute):
                if reroute:
                    self._request_route()
                    self._hints.return_to_master()
                self._retry_later(requested_range)
            case Reset(offset):
                self._resets.record(requested_range, offset)
                self._retry_later(requested_range)
            case Reconnect():
                self._pending.add(requested_range)
                raise ConnectionLost("the broker is shutting down", address, remark=answer.remark)
            case Lost(end_offset, cause):
                # All messages below the minimum offset are lost. So the loss begins at the start of the range, even if a later
                # offset was requested first.
                self._report_loss_at_master(
                    requested_range, end_offset, cause, from_range_start=end_offset == answer.min_offset
                )
            case Suspect(cause, end_offset):
                self._suspect(requested_range, end_offset, cause)

    def _suspect(self, requested_range: PendingRange, end_offset: int | None, cause: Cause) -> None:
        asks_master = self._hints.return_to_master()
        is_confirmed = self._suspicions.suspect_loss(
            requested_range[:2], self._clock.now(), is_reliable=not asks_master
        )
        if asks_master:
            self._retry_later(requested_range)
            return
        # Earlier offsets of the same range are decided first, so that a loss is reported once and as a whole.
        if is_confirmed and not self._pending.has_pending_offsets_before(requested_range):
            self._report_loss(requested_range, end_offset, cause)
            return
        if cause in (Cause.TOPIC_DELETED, Cause.QUEUE_GONE):
            self._request_route()
        self._retry_later(requested_range)

    def _report_loss_at_master(
        self, requested_range: PendingRange, end_offset: int, cause: Cause, from_range_start: bool
    ) -> None:
        """Report a loss. If the answer came from a slave, request the offsets from the master instead."""
        if self._hints.return_to_master():
            self._retry_later(requested_range)
        else:
            self._report_loss(requested_range, end_offset, cause, from_range_start)

    def _report_loss(
        self, requested_range: PendingRange, end_offset: int | None, cause: Cause, from_range_start: bool = False
    ) -> None:
        """Report pending offsets as lost: from the start of ``requested_range`` to ``end_offset``. If ``end_offset`` is None,
        the loss ends at the end of the whole range. With ``from_range_start``, the loss begins at the start of the whole range.
        """
        whole_range = self._ranges[requested_range.range_number]
        self._record_progress(requested_range)
        self._pending.add(requested_range)
        self._pacing.on_pulls_lost()
        start = whole_range.start if from_range_start else requested_range.start
        end = whole_range.end if end_offset is None else end_offset
        for part in self._pending.remove(PendingRange(requested_range.range_number, start, end)):
            self._on_loss(OffsetRange(whole_range.queue, part.start, part.end), cause)

    def _retry_later(self, requested_range: PendingRange) -> None:
        self._pending.retry_at(requested_range, self._suspicions.next_retry_at(requested_range[:2], self._clock.now()))

    def _record_progress(self, requested_range: PendingRange) -> None:
        self._suspicions.clear(requested_range[:2])
        self._progress_timeout.record_progress()

    def _request_route(self) -> None:
        """Request the route in the next step, unless the route was requested a moment ago."""
        now = self._clock.now()
        if now >= self._next_route_request_at:
            self._hints.reconnect_needed = True
            self._next_route_request_at = now + next(self._route_pauses)

    def _reconnect(self) -> None:
        """Connect to the address in the current route. If the connection fails, the present connection stays."""
        self._hints.reconnect_needed = False
        try:
            stream = self._connect(self._progress_timeout.connect_deadline(RECONNECT_TIMEOUT_S))
        except RocketMQError as e:
            logger.info("cannot connect to the address in the current route: %s", e)
            return
        if self._stream is not None and self._stream.address == stream.address:
            stream.close()
            return
        self._disconnect()
        self._stream = stream

    def _disconnect(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._resets.collect_in_flight(stream, self._pending, self._clock)
        stream.close()
        for answer in self._received_answers.clear():
            self._pending.add(_covered_range(answer))
        self._pending.on_connection_lost()
        self._pacing.on_pulls_lost()

    def _deliver(self, deliver_all: bool = False) -> Iterator[FetchedAnswers]:
        """Yield the answers before the first pending offset, if there are enough answers, or if no offset is pending.

        With ``deliver_all``, and before a reconnect, any number of answers is enough, because a read whose connections break
        early may never collect more answers.
        """
        stream, offsets_per_fetch = self._stream, self._settings.offsets_per_fetch
        must_reconnect = self._hints.reconnect_needed and not self._pending.pulls_in_flight
        is_urgent = deliver_all or must_reconnect or not self._pending or (stream is not None and stream.is_full)
        if stream is None or not (is_urgent or self._received_answers.offset_count >= offsets_per_fetch):
            return
        ready_answers, rest_answers = self._received_answers.split_at(self._pending.first_pending_position())
        while self._recreated_topics is not None and (
            recreated_answers := self._recreated_topics.find(stream.buffer, ready_answers)
        ):
            self._report_recreated_topics(recreated_answers)
            # The first pending offset may be a later offset now, because the lost offsets are not pending.
            ready_answers, rest_answers = self._received_answers.split_at(self._pending.first_pending_position())
        rest_count = offset_count(rest_answers)
        if not is_urgent and self._received_answers.offset_count - rest_count < offsets_per_fetch // 2:
            return
        if ready_answers:
            self._received_answers.delivered_answers = ready_answers
            yield FetchedAnswers(stream.buffer, ready_answers)
            self._progress_timeout.restart()
        self._received_answers.retain(rest_answers, rest_count, stream)

    def _report_recreated_topics(self, answers: Sequence[FetchedAnswer]) -> None:
        """Report ``answers`` and the pending offsets of their ranges as lost, because their topics were created again."""
        self._received_answers.remove(answers)
        for answer in answers:
            self._pending.add(_covered_range(answer))
        for range_number in sorted({answer.range_number for answer in answers}):
            whole_range = self._ranges[range_number]
            for part in self._pending.remove(PendingRange(range_number, whole_range.start, whole_range.end)):
                self._on_loss(OffsetRange(whole_range.queue, part.start, part.end), Cause.WENT_BACK)


def _covered_range(answer: FetchedAnswer) -> PendingRange:
    """Return the offsets that an answer covers."""
    return PendingRange(answer.range_number, answer.start, min(answer.next_offset, answer.limit))
