"""Copies answers for a consumer that reads ahead.

An answer is not plain if offsets are lost, illegal or skipped, or if it has messages beyond the requested end. ``PlainRead``
ends before such an answer, and the consumer gets the broker's answer with a long poll instead. An operator's reset of the group
also ends the read. Only one pull of each queue receives the reset. So the read records the reset, and before the read ends, it
waits for the answers to all pulls in flight.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.fetched import FetchedAnswers
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import MAX_PULL_DEPTH
from rocketmq_spark.pull.puller import Puller

_MIN_BYTES_IN_FLIGHT, _MAX_BYTES_IN_FLIGHT = 64 << 10, 8 << 20
_READ_DEADLINE_S = 30.0
_range_number_of = itemgetter(0)


class PlainAnswers(NamedTuple):
    """The stored messages of consecutive answers from ``start`` on. ``ends`` has the next offset of each answer, and where its
    bytes in ``stored_messages`` end.
    """

    queue: MessageQueue
    start: int
    ends: list[tuple[int, int]]
    stored_messages: bytes


class PlainRead:
    """A read of ``ranges`` of one broker, in their order. The ranges of a queue must be consecutive.

    ``max_offsets`` and ``max_bytes`` limit the pulls in flight, and what ``fetch`` yields at once.
    """

    def __init__(self, puller: Puller, ranges: Sequence[OffsetRange], max_offsets: int, max_bytes: int) -> None:
        settings = replace(
            puller.settings,
            depth=min(MAX_PULL_DEPTH, max(1, max_offsets // puller.settings.batch_size)),
            max_bytes_in_flight=min(_MAX_BYTES_IN_FLIGHT, max(_MIN_BYTES_IN_FLIGHT, max_bytes)),
            offsets_per_fetch=max(1, max_offsets // 2),
            grace_s=0.0,
            read_deadline_s=_READ_DEADLINE_S,
            follows_resets=True,
        )
        self._ranges = ranges
        self._reading = reading.read(replace(puller, settings=settings), ranges, self._record_loss)
        self._next_offsets = {r.queue: r.start for r in reversed(ranges)}
        self._has_met_other_answer = False  # whether an answer was not plain

    @property
    def had_only_plain_answers(self) -> bool:
        """Whether all answers were plain. If all were plain, the read reached the end of its ranges, or was stopped."""
        return not self._has_met_other_answer and not self.resets

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """The offsets to which an operator reset the group during the read, by queue. The mapping is complete when the read has
        ended.
        """
        return self._reading.resets

    def fetch(self) -> Generator[list[PlainAnswers], None, None]:
        """Yield answers until all are read or ``stop`` is called. The read ends before an answer that is not plain, and
        ``had_only_plain_answers`` is then False.

        Raises permanent errors of a broker, and temporary errors that lasted too long.
        """
        with closing(self._reading.fetch()) as fetched_batches:
            for fetched in fetched_batches:
                yield self._plain_answers(fetched)
                if self._has_met_other_answer:
                    return

    def stop(self) -> None:
        """Make ``fetch`` end soon, also while it waits for a broker."""
        self._reading.stop()

    def _plain_answers(self, fetched: FetchedAnswers) -> list[PlainAnswers]:
        """Return copies of the answers before the first answer that is not plain."""
        plain_answers = []
        view = fetched.buffer.data
        for range_number, range_answers in groupby(fetched.answers, key=_range_number_of):
            queue = self._ranges[range_number].queue
            start = next_start = self._next_offsets[queue]
            ends, answer_bytes, size = [], [], 0
            for _, answer_start, limit, next_offset, begin, end in range_answers:
                if answer_start != next_start or next_offset > limit:
                    self._has_met_other_answer = True
                    break
                next_start = next_offset
                size += end - begin
                ends.append((next_start, size))
                answer_bytes.append(view[begin:end])
            self._next_offsets[queue] = next_start
            if ends:
                plain_answers.append(PlainAnswers(queue, start, ends, b"".join(answer_bytes)))
            if self._has_met_other_answer:
                break
        return plain_answers

    def _record_loss(self, part: OffsetRange, cause: Cause) -> None:
        self._has_met_other_answer = True
        self.stop()
