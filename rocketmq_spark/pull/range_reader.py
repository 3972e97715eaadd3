"""Reads offset ranges of one broker with pipelined pulls.

The offsets of a range are known, so many pulls are in flight at once. Answers may be short (a broker sends 32 messages or
256 KiB, 8 messages if the data is cold), empty (filters, compaction), late or out of order. Offsets that an answer did not cover
are requested again, and answers are delivered up to the first offset that is still pending.

``outcomes`` decides what an answer means, and so whether a pull is repeated; ``suspicions`` when. ``pending`` has the offsets
that are still to be read, ``fetched`` the answers that were received. ``pacing`` decides how much to request, ``replica`` from
whom, and ``progress_timeout`` how long to wait.
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
from rocketmq_spark.pull.progress_timeout import BROKER_SILENCE_S, ProgressTimeout
from rocketmq_spark.pull.replica import OnHint, ReplicaHints
from rocketmq_spark.pull.suspicions import HoleSuspicions, LossSuspicions, confirmed_losses, split_at_unconfirmed
from rocketmq_spark.remoting.bulk import BUFFER_BYTES, BulkStream, EmptyAnswer, FoundAnswer, PullTemplate

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)


# Time limit of a connection to another address while the present connection still works.
RECONNECT_S = 5.0
# How long a read that ends waits for the answers to its pulls in flight, because one may report a reset.
LAST_ANSWERS_S = 1.0


class GroupResets:
    """The offsets to which an operator reset the group, if the read ``follows`` its group. A broker reports a reset to one pull
    of each queue.
    """

    def __init__(self, ranges: Sequence[OffsetRange], follows: bool) -> None:
        self._ranges = ranges
        self._follows = follows
        self.by_queue: dict[MessageQueue, int] = {}

    def record(self, requested: PendingRange, offset: int) -> None:
        if self._follows:
            self.by_queue[self._ranges[requested.range_number].queue] = offset

    def collect_in_flight(self, stream: BulkStream, pending: PendingOffsets, clock: Clock) -> None:
        """Wait for the answers to the pulls in flight, before the connection is closed. Their offsets become pending."""
        until = clock.now() + LAST_ANSWERS_S
        try:
            while self._follows and pending.pulls_in_flight and (left_s := until - clock.now()) > 0:
                if stream.full:
                    stream.compact(())
                if stream.receive(left_s):
                    self._collect(stream, pending)
        except RocketMQError as e:
            logger.info("pulls in flight were not answered: %s", e)

    def _collect(self, stream: BulkStream, pending: PendingOffsets) -> None:
        found, others = stream.scan()
        answers: list[tuple[int, EmptyAnswer | None]] = [*((opaque, None) for opaque, *_ in found), *others]
        for opaque, answer in answers:
            if (requested := pending.finish_pull(opaque)) is None:
                continue
            pending.add(requested)
            if answer is not None and isinstance(decision := judge(requested.start, answer), Reset):
                self.record(requested, decision.offset)


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
        recreated: RecreatedTopics | None = None,
    ) -> None:
        self._ranges = ranges
        self._recreated = recreated
        self._connect = connect
        self._settings = settings
        self._on_loss = on_loss
        self._clock = clock or Clock()
        grace_s = min(settings.grace_s, settings.read_deadline_s / 2)
        self._pacing = PullPacing(settings)
        self._pending = PendingOffsets(ranges)
        self._received = ReceivedAnswers()
        self._suspicions = LossSuspicions(grace_s, self._clock.pauses)
        self._hole_suspicions = HoleSuspicions(grace_s, self._clock.pauses)
        self._hints = ReplicaHints(on_hint)
        # The earliest time of the next route request. Each rejected pull is a reason for one, and a task has thousands of pulls.
        self._next_route_request_at, self._route_pauses = 0.0, self._clock.pauses()
        self._progress_timeout = ProgressTimeout(settings.read_deadline_s, self._clock)
        self._stream: BulkStream | None = None
        # The address of the last stream, to notice a change.
        self._address: str | None = None
        self._stopped = False
        self.requests = PullRequests(templates)
        self._resets = GroupResets(ranges, settings.follows_resets)
        self.resets = self._resets.by_queue

    def fetch(self) -> Generator[FetchedAnswers, None, None]:
        """Yield all messages of the ranges, buffer by buffer. Closing the iterator closes the connection.

        A read that follows its group ends when an operator resets the group. Then ``resets`` has the new offsets by queue.
        """
        self._progress_timeout.restart()
        try:
            while self._pending and not self._stopped and not self.resets:
                try:
                    self._step()
                except RocketMQError as e:
                    if e.retriable:  # after a permanent error, the offsets of the rejected pull are not pending
                        yield from self._deliver(deliver_all=True)
                    self._disconnect()
                    if not self._pending:  # the rest was rejected, or is lost
                        raise
                    queue = self._ranges[self._pending.first_pending()[0]].queue
                    e.topic, e.queue = e.topic or queue.topic, e.queue or str(queue)
                    if e.retriable:
                        e.remedy = e.remedy or f"Start broker {queue.broker_name}, or raise option 'readDeadline'"
                    self._progress_timeout.pause_or_raise(e, self._waits_for)
                    continue
                # The answers that the decoder gave back are delivered again.
                yield from self._deliver()
        finally:
            self._disconnect()

    def stop(self) -> None:
        """Make ``fetch`` end within about a second. Any thread may call this."""
        self._stopped = True

    def usable_count(self, holes: Sequence[Hole]) -> int:
        """Return how many of the delivered answers may be used. The others are delivered again.

        ``holes``, in order, are offsets that answers skipped although every offset of their queue has a message. They are
        requested again, from the master, until they arrive or the time of grace is over: then they are lost.
        """
        answers, now = self._received.being_decoded, self._clock.now()
        is_reliable = not self._hints.return_to_master()
        unconfirmed = self._hole_suspicions.unconfirmed(answers, holes, now, is_reliable)
        for range_number, start, end in confirmed_losses(holes, unconfirmed, answers):
            self._on_loss(OffsetRange(self._ranges[range_number].queue, start, end), Cause.TRUNCATED)
        for answer, time_s in self._hole_suspicions.retries(answers, unconfirmed, now):
            self._pending.retry_at(_covered(answer), time_s)
        usable, others = split_at_unconfirmed(answers, unconfirmed)
        self._received.give_back(others)
        return usable

    def _step(self) -> None:
        """Send the pulls that are allowed now, then process what the broker sent."""
        if self._hints.reconnect_needed and not self._pending.pulls_in_flight:
            self._reconnect()
        if self._stream is None:
            self._stream = self._connect(self._progress_timeout.connect_deadline())
        stream = self._stream
        if stream.address != self._address:  # what another replica lacked is no evidence any more
            self._address = stream.address
            self._suspicions.address_changed()
            self._hole_suspicions.address_changed()
        self._pending.release_due(self._clock.now())
        self._send_pulls(stream)
        if not stream.full:
            self._receive(stream)
        if not self._pending:
            return
        self._progress_timeout.log_wait(self._waits_for)
        if self._progress_timeout.remaining_s() <= 0:
            raise self._progress_timeout.timeout_error(stream.address)

    def _waits_for(self) -> str:
        """Return what the read waits for, for errors and logs."""
        number, offset = self._pending.first_pending()
        queue = self._ranges[number].queue
        return f"broker {queue.broker_name}: {queue} from offset {offset} on"

    def _send_pulls(self, stream: BulkStream) -> None:
        if self._hints.reconnect_needed:  # first, the pulls in flight must be answered
            return
        depth = self._pacing.depth()
        # While the first pending offset is not answered, no more is received after it than may be in flight.
        if stream.filled_bytes > BUFFER_BYTES + self._settings.max_bytes_in_flight:
            depth = 0 if self._pending.next_retry_at is not None else 1
        frames: list[bytes] = []
        pending = self._pending
        while pending.has_unrequested and (free := depth - pending.pulls_in_flight) > 0:
            count = self._pacing.next_pull_size()
            pulls = min(free, self._pacing.allowed_pulls(count, pending.offsets_in_flight))
            if not pulls and pending.pulls_in_flight:
                break
            frames.extend(self.requests.next_frames(pending, self._pacing, max(1, pulls), count))
        if frames:
            if pending.pulls_in_flight == len(frames):
                self._progress_timeout.record_answer()
            stream.send(frames, self._settings.read_deadline_s)

    def _receive(self, stream: BulkStream) -> None:
        if not stream.receive(self._progress_timeout.receive_wait_s(self._pending.next_retry_at)):
            if self._pending.pulls_in_flight and self._progress_timeout.is_silent:
                raise ConnectionLost(f"the broker sent nothing for {BROKER_SILENCE_S:g} s", stream.address)
            return
        self._progress_timeout.record_answer()
        found, others = stream.scan()
        self._accept_all(found)
        for opaque, answer in others:
            self._handle_other_answer(opaque, answer, stream.address)

    def _accept_all(self, found: list[FoundAnswer]) -> None:
        """Accept answers with messages. Most answers are full, and these must cost little: a million messages have 30,000
        answers.
        """
        finish_pull, answers, suspicions = (
            self._pending.finish_pull,
            self._received.answers,
            self._suspicions.by_position,
        )
        hinted, count = self._hints.last_suggested, self._pacing.pull_size
        full = largest = 0
        make = FetchedAnswer._make
        for answer in found:
            opaque, next_offset, suggested, begin, end, _ = answer
            requested = finish_pull(opaque)
            if requested is None:
                continue
            number, start, limit = requested
            size = end - begin
            if next_offset != limit or limit - start != count or suggested != hinted or not size or suspicions:
                self._accept(requested, answer)
                continue
            answers.append(make((number, start, limit, next_offset, begin, end)))
            full += 1
            if size > largest:
                largest = size
        if full:
            self._received.offset_count += full * count
            self._progress_timeout.record_progress()
            self._pacing.answer_received(count, count, largest, full)

    def _accept(self, requested: PendingRange, answer: FoundAnswer) -> None:
        _, next_offset, suggested, begin, end, min_offset = answer
        if suggested != self._hints.last_suggested:
            self._hints.follow(suggested, self._suspicions)
        number, start, limit = requested
        if next_offset <= start:
            self._retry_later(requested)
            return
        if self._settings.filtered and int(min_offset) > start:  # a filter hides which of the skipped offsets existed
            self._lose_at_master(requested, int(min_offset), Cause.TRUNCATED, from_range_start=True)
            return
        self._record_progress(requested)
        if end > begin and not self._settings.filtered:
            number, start, limit = self._with_rest_of_batch(requested, next_offset, begin)
        count = min(next_offset, limit) - start
        if end > begin:
            self._received.add(FetchedAnswer(number, start, limit, next_offset, begin, end), count)
        self._pacing.answer_received(limit - start, count, end - begin)
        self._pending.add(PendingRange(number, next_offset, limit))

    def _with_rest_of_batch(self, requested: PendingRange, next_offset: int, begin: int) -> PendingRange:
        """Return the offsets that an answer covers. A broker returns an inner batch whole, however few of its offsets were
        requested, so the pending offsets up to ``next_offset`` are covered, too. Those before ``requested`` are requested again:
        only an answer to them shows where the batch begins.
        """
        assert self._stream is not None
        if not is_inner_batch(self._stream.buffer, begin):
            return requested
        return self._pending.extend(requested, max(requested.end, next_offset))

    def _handle_other_answer(self, opaque: int, answer: EmptyAnswer, address: str) -> None:
        requested = self._pending.finish_pull(opaque)
        if requested is None:
            return
        if answer.suggested_broker is not None and answer.suggested_broker != self._hints.last_suggested:
            self._hints.follow(answer.suggested_broker, self._suspicions)
        self._progress_timeout.record_refusal(f"{answer.code} {answer.remark}".strip())
        match judge(requested.start, answer):
            case AccessDenied() if self.requests.has_newer_keys(opaque):
                self._retry_later(requested)  # the keys expired, and there are newer ones
            case BrokerError() as error:
                queue = self._ranges[requested.range_number].queue
                error.addr, error.topic, error.queue = address, queue.topic, str(queue)
                raise error
            case Continue(offset):
                self._record_progress(requested)
                self._pacing.nothing_matched()
                self._pending.add(requested._replace(start=offset))
            case RepeatPull(reroute):
                if reroute:
                    self._request_route()
                    self._hints.return_to_master()
                self._retry_later(requested)
            case Reset(offset):
                self._resets.record(requested, offset)
                self._retry_later(requested)
            case Reconnect():
                self._pending.add(requested)
                raise ConnectionLost("the broker is shutting down", address, remark=answer.remark)
            case Lost(until, cause):
                # Below the minimum nothing is left, so this is one loss, whichever offset was requested first.
                self._lose_at_master(requested, until, cause, from_range_start=until == answer.min_offset)
            case Suspect(cause, until):
                self._suspect(requested, until, cause)

    def _suspect(self, requested: PendingRange, until: int | None, cause: Cause) -> None:
        asks_master = self._hints.return_to_master()
        is_confirmed = self._suspicions.suspect_loss(requested[:2], self._clock.now(), is_reliable=not asks_master)
        if asks_master:
            self._retry_later(requested)
            return
        # Offsets before it in the same range are decided first, so that a loss is reported once and as a whole.
        if is_confirmed and not self._pending.has_pending_before(requested):
            self._lose(requested, until, cause)
            return
        if cause in (Cause.TOPIC_DELETED, Cause.QUEUE_GONE):
            self._request_route()
        self._retry_later(requested)

    def _lose_at_master(self, requested: PendingRange, until: int, cause: Cause, from_range_start: bool) -> None:
        """Report a loss that the master answered; after the answer of a slave, ask the master."""
        if self._hints.return_to_master():
            self._retry_later(requested)
        else:
            self._lose(requested, until, cause, from_range_start)

    def _lose(self, requested: PendingRange, until: int | None, cause: Cause, from_range_start: bool = False) -> None:
        """Report the pending offsets from the start of ``requested``, or of its range, to ``until``, or to the end of the range,
        as lost.
        """
        whole = self._ranges[requested.range_number]
        self._record_progress(requested)
        self._pending.add(requested)
        self._pacing.pulls_lost()
        start = whole.start if from_range_start else requested.start
        end = whole.end if until is None else until
        for part in self._pending.remove(PendingRange(requested.range_number, start, end)):
            self._on_loss(OffsetRange(whole.queue, part.start, part.end), cause)

    def _retry_later(self, requested: PendingRange) -> None:
        self._pending.retry_at(requested, self._suspicions.next_retry_at(requested[:2], self._clock.now()))

    def _record_progress(self, requested: PendingRange) -> None:
        self._suspicions.clear(requested[:2])
        self._progress_timeout.record_progress()

    def _request_route(self) -> None:
        """Request the route in the next step, unless it was requested a moment ago."""
        now = self._clock.now()
        if now >= self._next_route_request_at:
            self._hints.reconnect_needed = True
            self._next_route_request_at = now + next(self._route_pauses)

    def _reconnect(self) -> None:
        """Connect to the address in the current route. If that fails, the present connection stays."""
        self._hints.reconnect_needed = False
        try:
            stream = self._connect(self._progress_timeout.connect_deadline(RECONNECT_S))
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
        for answer in self._received.clear():
            self._pending.add(_covered(answer))
        self._pending.connection_lost()
        self._pacing.pulls_lost()

    def _deliver(self, deliver_all: bool = False) -> Iterator[FetchedAnswers]:
        """Yield the answers before the first pending offset, if they are many enough or no offset is pending.

        With ``deliver_all``, and before a reconnect, yield them in any case: otherwise a read that needs more answers than one
        connection delivers would never end.
        """
        stream, enough = self._stream, self._settings.fetched_offsets
        reconnects = self._hints.reconnect_needed and not self._pending.pulls_in_flight
        is_urgent = deliver_all or reconnects or not self._pending or (stream is not None and stream.full)
        if stream is None or not (is_urgent or self._received.offset_count >= enough):
            return
        ready, rest = self._received.split_at(self._pending.first_pending())
        while self._recreated is not None and (recreated := self._recreated.find(stream.buffer, ready)):
            self._lose_recreated(recreated)
            ready, rest = self._received.split_at(self._pending.first_pending())  # fewer offsets are pending now
        rest_count = offset_count(rest)
        if not is_urgent and self._received.offset_count - rest_count < enough // 2:
            return
        if ready:
            self._received.being_decoded = ready
            yield FetchedAnswers(stream.buffer, ready)
            self._progress_timeout.restart()
        self._received.retain(rest, rest_count, stream)

    def _lose_recreated(self, answers: Sequence[FetchedAnswer]) -> None:
        """Report as lost ``answers``, whose topics were created again, and the pending offsets of their ranges."""
        self._received.remove(answers)
        for answer in answers:
            self._pending.add(_covered(answer))
        for range_number in sorted({answer.range_number for answer in answers}):
            whole = self._ranges[range_number]
            for part in self._pending.remove(PendingRange(range_number, whole.start, whole.end)):
                self._on_loss(OffsetRange(whole.queue, part.start, part.end), Cause.WENT_BACK)


def _covered(answer: FetchedAnswer) -> PendingRange:
    """Return the offsets that an answer covers."""
    return PendingRange(answer.range_number, answer.start, min(answer.next_offset, answer.limit))
