"""Reads ranges for tasks, commands, and consumers that read ahead.

A decoder sees which offsets an answer skips, and which messages the answer has beyond the requested end. ``RangesReading``
decides, for all readers, whether skipped offsets are lost, and which messages belong to an answer.

``SingleMessageReader`` reads single messages without the filter of the read, to learn two facts that filtered answers do not
show. The first fact is where an answer ends: a broker that searches beyond the requested end sends messages of the next read.
A damaged message may have shifted the broker's index (consume queue): the offsets stored in later messages are then larger than
the offsets that the index has for these messages. In this case, only the message *at* the requested end shows which messages
belong to the next read. The second fact is whether messages were lost: if a part of the commit log was removed, a broker skips
the index entries of this part, as if the filter had skipped them. Logs are removed from their front, so while the first message
of a read exists, all later messages exist, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers, Hole, stored_offset_at
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.range_reader import RangeReader

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

# Interval of checks during a read: messages that retention removes between two checks count as possibly skipped.
_CHECK_INTERVAL_S = 1.0


class SingleMessageReader:
    """Reads single messages of queues of one broker, with the same time limits as other reads.

    ``is_compacted`` returns whether a queue belongs to a compaction topic, in which a broker returns the next message in place
    of a missing message.
    """

    def __init__(
        self,
        open_reader: Callable[[Sequence[OffsetRange], OnLoss], RangeReader],
        is_compacted: Callable[[MessageQueue], bool],
    ) -> None:
        self._open_reader = open_reader
        self._is_compacted = is_compacted

    def __call__(self, positions: Sequence[tuple[MessageQueue, int]]) -> list[int | None]:
        """Return the offset stored in the message at each position; None if the message is lost."""
        ranges = [OffsetRange(queue, offset, offset + 1) for queue, offset in positions]
        lost_ranges: set[OffsetRange] = set()
        stored_offsets: dict[int, int] = {}
        reader = self._open_reader(ranges, lambda part, _: lost_ranges.add(part))
        for fetched in reader.fetch():
            offsets = [stored_offset_at(fetched.buffer, answer.begin) for answer in fetched.answers]
            holes = [
                Hole(i, answer.start, answer.limit)
                for i, (answer, offset) in enumerate(zip(fetched.answers, offsets, strict=True))
                if answer.next_offset > answer.limit
                and offset > answer.start  # an inner batch may begin before the requested offset
                and not self._is_compacted(ranges[answer.range_number].queue)
            ]
            usable_count = reader.count_usable_answers(holes) if holes else len(offsets)
            stored_offsets.update((fetched.answers[i].range_number, offsets[i]) for i in range(usable_count))
        return [None if part in lost_ranges else stored_offsets.get(i) for i, part in enumerate(ranges)]


def with_true_ends(
    answers: Sequence[FetchedAnswer], queues: Sequence[MessageQueue], single_message_reader: SingleMessageReader
) -> list[FetchedAnswer]:
    """Return ``answers``. If the end of an answer does not match the offsets stored in its messages, the end is corrected.

    If a damaged message shifts the broker's index of a queue, all later entries of the index stay shifted. So if the message at
    the end of an answer has the right offset, all earlier messages of the range have the right offsets, too.
    """
    last_answers = {answer.range_number: answer for answer in answers}
    end_positions = [(queues[range_number], answer.limit) for range_number, answer in last_answers.items()]
    true_ends = dict(zip(last_answers.values(), single_message_reader(end_positions), strict=True))
    shifted_ranges = {
        answer.range_number for answer, end in true_ends.items() if end is not None and end > answer.limit
    }
    other_answers = [answer for answer in answers if answer.range_number in shifted_ranges and answer not in true_ends]
    if other_answers:
        end_positions = [(queues[answer.range_number], answer.limit) for answer in other_answers]
        true_ends |= zip(other_answers, single_message_reader(end_positions), strict=True)
    return [_with_true_end(answer, true_ends.get(answer)) for answer in answers]


def _with_true_end(answer: FetchedAnswer, true_end: int | None) -> FetchedAnswer:
    if true_end is None or true_end <= answer.limit:
        return answer
    return answer._replace(limit=true_end, next_offset=max(answer.next_offset, true_end + 1))


class FilteredReadCheck:
    """Checks during a filtered read, and at its end, that the offsets existed when the broker searched them."""

    def __init__(
        self,
        ranges: Sequence[OffsetRange],
        single_message_reader: SingleMessageReader,
        on_loss: OnLoss,
        clock: Clock | None = None,
    ) -> None:
        self._ranges = ranges
        self._single_message_reader = single_message_reader
        self._on_loss = on_loss
        self._clock = clock or Clock()
        self._checked_at = self._clock.now()
        # An offset for each range. The earlier offsets need no further check: they existed when the broker searched them, or
        # are reported as lost.
        self._verified_ends = [r.start for r in ranges]
        # For each range, the offset of the first message that was found at or after ``_verified_ends``.
        self._first_found_offsets: dict[int, int] = {}

    def record_loss(self, part: OffsetRange, cause: Cause) -> None:
        """Report a loss that the read itself noticed, and exclude the lost offsets from the checks."""
        for i, r in enumerate(self._ranges):
            if r.queue != part.queue or not r.start <= part.start < r.end:
                continue
            if cause is not Cause.TRUNCATED:  # the rest of the range cannot be requested any more
                self._verified_ends[i] = r.end
            elif part.start <= self._verified_ends[i]:
                self._verified_ends[i] = max(self._verified_ends[i], part.end)
            if self._first_found_offsets.get(i, r.end) < self._verified_ends[i]:
                del self._first_found_offsets[i]
        self._on_loss(part, cause)

    def record_answers(self, fetched: FetchedAnswers) -> None:
        """Record answers. Answers come in order, so the broker has searched all offsets before the last answer."""
        for answer in fetched.answers:
            offset = stored_offset_at(fetched.buffer, answer.begin)
            if offset >= self._verified_ends[answer.range_number]:
                self._first_found_offsets.setdefault(answer.range_number, offset)
        if fetched.answers and self._clock.now() - self._checked_at >= _CHECK_INTERVAL_S:
            last_answer = fetched.answers[-1]
            self._check(
                [r.end for r in self._ranges[: last_answer.range_number]]
                + [min(last_answer.limit, last_answer.next_offset)]
            )

    def check_all(self) -> None:
        """Check the whole ranges, at the end of the read."""
        self._check([r.end for r in self._ranges])

    def _check(self, searched_ends: Sequence[int]) -> None:
        """Report the offsets that were lost before they were searched. ``searched_ends`` are the offsets up to which each range
        was searched.
        """
        unverified_ranges = [i for i, end in enumerate(searched_ends) if self._verified_ends[i] < end]
        positions = [(self._ranges[i].queue, self._verified_ends[i]) for i in unverified_ranges]
        stored_offsets = self._single_message_reader(positions) if positions else []
        for i, offset in zip(unverified_ranges, stored_offsets, strict=True):
            start, self._verified_ends[i] = self._verified_ends[i], searched_ends[i]
            first_found_offset = self._first_found_offsets.pop(i, searched_ends[i])
            # Logs lose messages only at their front. So the first found message and all later ones existed.
            if offset is None and start < first_found_offset:
                lost_range = OffsetRange(self._ranges[i].queue, start, min(first_found_offset, searched_ends[i]))
                self._on_loss(lost_range, Cause.TRUNCATED)
        self._checked_at = self._clock.now()


def read(
    puller: Puller,
    ranges: Sequence[OffsetRange],
    on_loss: OnLoss,
    broker_filter: Filter = NO_FILTER,
    planned_address: str | None = None,
    recreated_topics: RecreatedTopics | None = None,
) -> RangesReading:
    """Return a read of ``ranges`` of one broker, in their order.

    Args:
        puller: The puller that opens the read.
        ranges: The ranges to read.
        on_loss: Receives offsets that cannot be read any more, and may raise an error.
        broker_filter: The filter that the brokers apply, the same for all queues; see ``Puller.broker_filter``. In batch
            topics, brokers filter whole batches by the tags of the batch.
        planned_address: The address of the broker when the read was planned.
        recreated_topics: Finds messages of topics that were created again after the read was planned. These messages count as
            lost.
    """
    return RangesReading(puller, ranges, on_loss, broker_filter, planned_address, recreated_topics)


class RangesReading:
    """A read of ranges of one broker. See ``read``."""

    def __init__(
        self,
        puller: Puller,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        broker_filter: Filter,
        planned_address: str | None,
        recreated_topics: RecreatedTopics | None,
    ) -> None:
        self.queues = [r.queue for r in ranges]
        self._is_compacted = puller.is_compacted
        # The next two attributes are set only for a filtered read.
        self._single_message_reader: SingleMessageReader | None = None
        self._filtered_read_check: FilteredReadCheck | None = None
        if broker_filter:
            open_reader = functools.partial(puller.reader, planned_address=planned_address)
            self._single_message_reader = SingleMessageReader(open_reader, puller.is_compacted)
            self._filtered_read_check = FilteredReadCheck(ranges, self._single_message_reader, on_loss)
            on_loss = self._filtered_read_check.record_loss
        self._reader = puller.reader(ranges, on_loss, broker_filter, planned_address, recreated_topics)

    def fetch(self) -> Generator[FetchedAnswers, None, None]:
        """Yield all messages of the ranges, buffer by buffer. Closing the iterator closes the connection."""
        with closing(self._reader.fetch()) as fetched_batches:
            for fetched in fetched_batches:
                if self._filtered_read_check is not None:
                    self._filtered_read_check.record_answers(fetched)
                yield fetched
        if self._filtered_read_check is not None:
            self._filtered_read_check.check_all()

    def stop(self) -> None:
        """Make ``fetch`` end soon, without further messages. Any thread may call this."""
        self._reader.stop()

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """The offsets to which an operator reset the group during the read, by queue. The mapping is complete when the read has
        ended.
        """
        return self._reader.resets

    @property
    def usable_answer_counter(self) -> Callable[[Sequence[FetchedAnswer], Sequence[Hole]], int] | None:
        """The method ``count_usable_answers``; None if holes do not matter for this read."""
        return self.count_usable_answers if self._single_message_reader is None else None

    def count_usable_answers(self, answers: Sequence[FetchedAnswer], holes: Sequence[Hole]) -> int:
        """Return how many of ``answers``, which skip the offsets ``holes``, may be used. The other answers are delivered again.

        Holes that filters or compaction cause are no losses. Other holes are requested again during the grace period, and then
        count as lost.
        """
        if self._single_message_reader is not None:
            return len(answers)
        unexpected_holes = [
            hole for hole in holes if not self._is_compacted(self.queues[answers[hole.answer_index].range_number])
        ]
        return self._reader.count_usable_answers(unexpected_holes) if unexpected_holes else len(answers)

    def with_true_ends(self, answers: Sequence[FetchedAnswer]) -> Sequence[FetchedAnswer]:
        """Return ``answers``. If the end of an answer does not match the offsets stored in its messages, the end is corrected.

        Without a filter, all answers are unchanged, because their ends are right.
        """
        return (
            answers
            if self._single_message_reader is None
            else with_true_ends(answers, self.queues, self._single_message_reader)
        )
