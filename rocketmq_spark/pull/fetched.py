"""Answers that were received and not decoded yet: the interface to decoders.

``ReceivedAnswers`` knows which answers may be decoded, and which part of the buffer is still needed. ``index_ranges``
determines which offsets each stored message has in the broker's index (the consume queue). For an inner batch, it reads these
offsets from properties that the broker wrote into the batch.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.wire.properties import inner_base_and_count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_INNER_BATCH, _NEED_UNWRAP = int(SysFlag.INNER_BATCH), int(SysFlag.NEED_UNWRAP)
# Positions of the offset and the flags in a stored message.
_OFFSET_POSITION, _FLAGS_POSITION = 20, 36
_OFFSET_STRUCT = struct.Struct(">q")
_FLAGS_STRUCT = struct.Struct(">i")


def index_ranges(entries: Iterable[tuple[int, int, bytes]], start: int, end: int) -> list[tuple[int, int]] | None:
    """Return the offsets ``[first, next)`` of each message of an answer that covers the offsets from ``start`` to ``end``.

    ``entries`` are the stored offset, flags and encoded properties of each message. Returns None if the offsets are impossible,
    or if an inner batch lacks the properties with its offsets.
    """
    ranges: list[tuple[int, int]] = []
    next_offset = start
    for stored_offset, flags, properties in entries:
        base_offset, count = stored_offset, 1
        if flags & _INNER_BATCH:
            inner_base, inner_count = inner_base_and_count(properties)
            if inner_count is None and flags & _NEED_UNWRAP:
                return None
            base_offset, count = stored_offset if inner_base is None else inner_base, inner_count or 1
        if not next_offset < base_offset + count <= end or (ranges and base_offset < next_offset):
            return None
        next_offset = base_offset + count
        ranges.append((base_offset, next_offset))
    return ranges


class FetchedAnswer(NamedTuple):
    """The messages of one answer to a pull of offsets ``[start, limit)`` of the range at index ``range_number``.

    ``next_offset`` is the start of the next pull according to the broker. ``[begin, end)`` are the positions of the bytes in
    the buffer.
    """

    range_number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class FetchedAnswers(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. The buffer is valid until the next answers are fetched."""

    buffer: npt.NDArray[np.uint8]
    answers: list[FetchedAnswer]


def offset_count(answers: Iterable[FetchedAnswer]) -> int:
    """Return the number of offsets that the answers cover."""
    return sum(min(answer.next_offset, answer.limit) - answer.start for answer in answers)


def stored_offset_at(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """Return the offset stored in the message at ``begin``."""
    offset: int = _OFFSET_STRUCT.unpack_from(buffer.data, begin + _OFFSET_POSITION)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is an inner batch, which a broker returns whole for each of its offsets."""
    return bool(_FLAGS_STRUCT.unpack_from(buffer.data, begin + _FLAGS_POSITION)[0] & _INNER_BATCH)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` for which the answer at index ``answer_index`` has no messages."""

    answer_index: int
    start: int
    end: int


class ReceivedAnswers:
    """Answers that are not delivered yet, in any order, and the number of offsets that these answers cover. The reader adds to
    both attributes.
    """

    def __init__(self) -> None:
        self.answers: list[FetchedAnswer] = []
        self.offset_count = 0
        self.delivered_answers: list[FetchedAnswer] = []
        # Answers that the decoder did not use.
        self._unused_answers: list[FetchedAnswer] = []
        # Where the answers since the last ``retain`` begin in the buffer.
        self._new_answers_begin = 0

    def add(self, answer: FetchedAnswer, count: int) -> None:
        """Add an answer that covers ``count`` offsets."""
        self.answers.append(answer)
        self.offset_count += count

    def split_at(self, position: tuple[int, int]) -> tuple[list[FetchedAnswer], list[FetchedAnswer]]:
        """Return the answers before a position (range number and offset) and the later answers, both in order."""
        self.answers.sort()
        split_index = bisect_left(self.answers, position)
        return self.answers[:split_index], self.answers[split_index:]

    def remove(self, answers: Collection[FetchedAnswer]) -> None:
        """Remove answers that must not be delivered."""
        removed_answers = set(answers)
        self.answers = [answer for answer in self.answers if answer not in removed_answers]
        self.offset_count -= offset_count(answers)

    def give_back(self, answers: Sequence[FetchedAnswer]) -> None:
        """Take back answers that the decoder did not use, to deliver them again."""
        self._unused_answers = list(answers)

    def retain(self, rest_answers: list[FetchedAnswer], count: int, stream: BulkStream) -> None:
        """Keep only ``rest_answers``, which cover ``count`` offsets, and the answers that were given back. If the free space of
        the buffer is smaller than what was received since the last call, the buffer is compacted.
        """
        if self._unused_answers:
            rest_answers, self._unused_answers = self._unused_answers + rest_answers, []
            count = offset_count(rest_answers)
        self.answers, self.offset_count, self.delivered_answers = rest_answers, count, []
        if stream.is_full or stream.free_bytes < stream.filled_bytes - self._new_answers_begin:
            new_begins = stream.compact((answer.begin, answer.end) for answer in self.answers)
            self.answers = [
                answer._replace(
                    begin=new_begins[answer.begin], end=new_begins[answer.begin] + answer.end - answer.begin
                )
                for answer in self.answers
            ]
        self._new_answers_begin = stream.filled_bytes

    def clear(self) -> list[FetchedAnswer]:
        """Remove all answers, because their stream and buffer are gone. Returns the removed answers, so that the caller can
        request them again.
        """
        removed_answers, self.answers, self.offset_count, self._new_answers_begin = self.answers, [], 0, 0
        return removed_answers
