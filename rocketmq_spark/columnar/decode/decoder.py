"""Fetched or polled answers to Arrow record batches, without a Python step per message.

``stored_messages`` finds the messages, ``inner`` the messages of inner batches, ``properties`` splits their property strings,
``arrow`` copies values; this module assembles the columns. ``rows.ReferenceDecoder`` decodes messages in an unusual form, and
makes the same batch from objects.

Compressed bodies are decompressed a portion at a time, because a few kilobytes may become megabytes. The size of a body is known
only after its decompression. So bodies are decompressed one by one, and a portion ends when it is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar.decode import buffers, inner, property_columns, stored_messages
from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.columnar.decode.rows import (
    ColumnBuilder,
    CorrectEnds,
    CountUsableAnswers,
    ReferenceDecoder,
    check_each_answer,
    with_correct_ends,
)
from rocketmq_spark.columnar.decode.schema import (
    BASIC_COLUMNS,
    BadMessages,
    Column,
    arrow_schema,
    is_time,
    undecodable_error,
)
from rocketmq_spark.columnar.decode.stored_messages import Malformed, StoredMessages
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers
from rocketmq_spark.wire import compression, messages
from rocketmq_spark.wire.properties import parse_subscription

# A plain int, because an operation with an enumeration takes a microsecond.
_INNER = int(codes.SysFlag.INNER_BATCH)
_COMPRESSED = int(codes.SysFlag.COMPRESSED)


@dataclass(slots=True)
class DecompressedBodies:
    """The bodies of consecutive rows, from ``first_row`` on. A body that cannot be decompressed is None; ``reasons`` has the
    reasons by the index of the body.
    """

    first_row: int
    bodies: list[bytes | None] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def decompressed_bodies(
    messages: StoredMessages, rows: slice, portion_bytes: int | None
) -> Iterator[DecompressedBodies]:
    """The bodies of ``rows``, in parts that end as soon as they have ``portion_bytes``; at least one part."""
    starts, ends, flags = messages.body_start[rows], messages.body_end[rows], messages.sys_flags[rows]
    is_compressed_row = (((flags & _COMPRESSED) != 0) & (ends > starts)).tolist()
    part, size, has_yielded = DecompressedBodies(rows.start), 0, False
    stored_bodies = buffers.slices(messages.buffer, starts, ends).to_pylist()
    for body, is_compressed, flag in zip(stored_bodies, is_compressed_row, flags.tolist(), strict=True):
        if is_compressed:
            try:
                body = compression.decompress(body, flag)
            except DecodeError as e:
                part.reasons[len(part.bodies)] = e.message
                body = None
        part.bodies.append(body)
        size += len(body or b"")
        if portion_bytes and size >= portion_bytes:
            yield part
            part, size, has_yielded = DecompressedBodies(part.first_row + len(part.bodies)), 0, True
    if part.bodies or not has_yielded:
        yield part


def arrays_with_errors(
    arrays: Sequence[pa.Array], columns: Sequence[Column], reasons: Mapping[int, str], flags: npt.NDArray[np.int32]
) -> list[pa.Array]:
    """Return the columns with changed values in the rows of bad messages: the error, and the flags as they are stored."""
    result = []
    for array, column in zip(arrays, columns, strict=True):
        name = column.name.lower() if column.property is None else ""
        values: Mapping[int, object] = {}
        if name == "decodeerror":
            values = reasons
        elif name == "sysflag":
            values = {row: int(flags[row]) for row in reasons}
        if values:
            array = pa.array([values.get(i, value) for i, value in enumerate(array.to_pylist())], array.type)
        result.append(array)
    return result


@dataclass(frozen=True)
class Decoder:
    """Decodes fetched answers into batches of ``columns``. ``range_number`` of an answer is an index of ``queues``."""

    queues: Sequence[MessageQueue]
    columns: tuple[Column, ...] = BASIC_COLUMNS
    include_properties: str = "user"
    topic_filter: Filter = NO_FILTER
    count_usable_answers: CountUsableAnswers | None = None
    correct_ends: CorrectEnds | None = None
    bad_messages: BadMessages = field(default_factory=BadMessages)
    selection: props.PropertySelection = field(init=False)

    def __post_init__(self) -> None:
        names = {column.name.lower() for column in self.columns if column.property is None}
        filters_by_tag = bool(self.topic_filter) and self.topic_filter.kind == "TAG"
        selection = props.PropertySelection(
            "tags" in names or filters_by_tag,
            "keys" in names,
            "msgid" in names,
            self.include_properties if "properties" in names else "none",
            tuple(column.property for column in self.columns if column.property is not None),
        )
        object.__setattr__(self, "selection", selection)

    def __call__(self, fetched: FetchedAnswers) -> pa.RecordBatch:
        """The messages in their order. Raises ``DecodeError`` with queue and offset of a bad message."""
        (batch,) = self.batches(fetched, None)
        return batch

    def batches(self, fetched: FetchedAnswers, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """Yield the messages in batches of about ``portion_bytes``. The caller must use all batches before it fetches more
        answers.
        """
        try:
            messages = stored_messages.locate(fetched.buffer, fetched.answers)
        except Malformed as e:
            if self.bad_messages.fails:
                raise self._decode_error(fetched, e) from e
            yield from self._decode_separately(fetched, portion_bytes)
            return
        unwrapped = inner.unwrap(messages) if inner.has_inner_batches(messages) else None
        is_contiguous = None if unwrapped is None else inner.contiguous_answers(messages, unwrapped)
        usable_count = self._usable_count(messages, fetched.answers, is_contiguous)
        if usable_count < len(fetched.answers):
            usable_part = FetchedAnswers(fetched.buffer, fetched.answers[:usable_count])
            yield from replace(self, count_usable_answers=None).batches(usable_part, portion_bytes)
            return
        if inner.has_inner_batches(messages):
            if (
                unwrapped is None
                or is_contiguous is None
                or inner.has_damaged_batch(messages, unwrapped, is_contiguous)
            ):
                yield from self._reference_decoder.batches(self._with_correct_ends(fetched), portion_bytes)
                return
            messages = _drop_before_start(messages, unwrapped)
        yield from self._batches(_drop_after_end(messages, self.correct_ends), portion_bytes)

    @property
    def _reference_decoder(self) -> ReferenceDecoder:
        return ReferenceDecoder(
            self.queues, self.columns, self.include_properties, self.topic_filter, self.bad_messages
        )

    def _usable_count(
        self, messages: StoredMessages, answers: Sequence[FetchedAnswer], is_contiguous: npt.NDArray[np.bool_] | None
    ) -> int:
        """The number of usable answers. Answers are usable up to the first hole that may still be filled. If the broker
        filters, ``count_usable_answers`` is None, and all answers are usable.
        """
        if self.count_usable_answers is None or not (holes := stored_messages.holes(messages, is_contiguous)):
            return len(answers)
        return self.count_usable_answers(answers, holes)

    def _decode_separately(self, fetched: FetchedAnswers, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """Decodes answers if the messages of some answers cannot be located. The reference decoder decodes these answers."""
        checks = check_each_answer(fetched)
        holes = [hole for check in checks for hole in check.holes]
        count_usable_answers = self.count_usable_answers if holes else None
        usable_count = count_usable_answers(fetched.answers, holes) if count_usable_answers else len(fetched.answers)
        decoder = replace(self, count_usable_answers=None)
        for is_readable, answer_indexes in groupby(range(usable_count), lambda i: checks[i].is_readable):
            part = FetchedAnswers(fetched.buffer, [fetched.answers[i] for i in answer_indexes])
            if is_readable:
                yield from decoder.batches(part, portion_bytes)
            else:
                yield from self._reference_decoder.batches(self._with_correct_ends(part), portion_bytes)

    def _with_correct_ends(self, fetched: FetchedAnswers) -> FetchedAnswers:
        if self.correct_ends is None:
            return fetched
        exceeds_limit = [answer.next_offset > answer.limit for answer in fetched.answers]
        return FetchedAnswers(fetched.buffer, with_correct_ends(fetched.answers, exceeds_limit, self.correct_ends))

    def _decode_error(self, fetched: FetchedAnswers, malformed: Malformed) -> DecodeError:
        answer = next(answer for answer in fetched.answers if answer.begin <= malformed.position < answer.end)
        return undecodable_error(
            self.queues[answer.range_number], answer.start, malformed.reason, "a message at or after"
        )

    def _batches(self, messages: StoredMessages, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """Yields batches. Bodies are most of the bytes, and are copied portion by portion. So a portion stays in the
        processor's cache until the JVM has it, and the next portion reuses its memory.
        """
        selection = self.selection
        property_arrays = props.PropertyColumns()
        if selection.selects_any:
            pairs = props.locate(messages.buffer, messages.properties_start, messages.properties_end)
            property_arrays = props.build_columns(pairs, selection)
        builder = ColumnBuilder(messages, property_arrays, self.queues)
        arrays: list[pa.Array | None] = []
        for column in self.columns:
            if column.property is not None:
                arrays.append(
                    property_columns.cast(property_arrays.property_columns[column.property], column.arrow_type)
                )
            else:
                arrays.append(None if column.from_rows is None else column.from_rows(builder, column.arrow_type))
        body_bytes = int((messages.body_end - messages.body_start).sum())
        size = sum(body_bytes if array is None else array.nbytes for array in arrays)
        tag_matches = self._tag_matches(property_arrays)
        has_compressed_bodies = bool(messages.combined_flags & _COMPRESSED) and None in arrays
        self._count_impossible_times(messages, arrays, tag_matches)
        for rows in _portions(len(messages), size, portion_bytes):
            if has_compressed_bodies:
                yield from self._decompressed_batches(messages, arrays, rows, tag_matches, portion_bytes)
                continue
            parts = [_bodies(messages, rows) if array is None else array[rows] for array in arrays]
            batch = pa.RecordBatch.from_arrays(parts, schema=arrow_schema(self.columns))
            yield batch if tag_matches is None else batch.filter(tag_matches[rows])

    def _decompressed_batches(
        self,
        messages: StoredMessages,
        arrays: Sequence[pa.Array | None],
        rows: slice,
        tag_matches: pa.Array | None,
        portion_bytes: int | None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of rows with compressed bodies, cut by the decompressed size. A bad body affects no other row."""
        for part in decompressed_bodies(messages, rows, portion_bytes):
            part_rows = slice(part.first_row, part.first_row + len(part.bodies))
            is_kept = (
                np.ones(len(part.bodies), bool) if tag_matches is None else buffers.true_mask(tag_matches[part_rows])
            )
            reasons = {row: reason for row, reason in part.reasons.items() if is_kept[row]}
            for row, reason in reasons.items():
                row_in_batch = part.first_row + row
                queue = self.queues[int(messages.answers[messages.answer_of_row[row_in_batch]][0])]
                self.bad_messages.add(queue, int(messages.fixed_field("queueOffset")[row_in_batch]), reason)
            if self.bad_messages.skips:
                is_kept[list(reasons)] = False
            columns = [pa.array(part.bodies, pa.binary()) if array is None else array[part_rows] for array in arrays]
            if reasons:
                columns = arrays_with_errors(columns, self.columns, reasons, messages.sys_flags[part_rows])
            batch = pa.RecordBatch.from_arrays(columns, schema=arrow_schema(self.columns))
            yield batch if is_kept.all() else batch.filter(pa.array(is_kept))

    def _count_impossible_times(
        self, messages: StoredMessages, arrays: Sequence[pa.Array | None], tag_matches: pa.Array | None
    ) -> None:
        for column, array in zip(self.columns, arrays, strict=True):
            if not is_time(column) or array is None or not array.null_count:
                continue
            is_impossible = buffers.true_mask(array.is_null())
            rows = np.flatnonzero(
                is_impossible if tag_matches is None else is_impossible & buffers.true_mask(tag_matches)
            )
            if len(rows):
                queue = self.queues[int(messages.answers[messages.answer_of_row[rows[0]]][0])]
                offset = int(messages.fixed_field("queueOffset")[rows[0]])
                self.bad_messages.add_impossible_times(column.name, queue, offset, len(rows))

    def _tag_matches(self, property_arrays: props.PropertyColumns) -> pa.Array | None:
        """Which rows have a requested tag; None if all rows have one. Rows with other tags may arrive, because brokers compare
        only the hashes of tags.
        """
        if not self.topic_filter or self.topic_filter.kind != "TAG":
            return None
        has_tag = pc.is_in(
            property_arrays.tags, pa.array(parse_subscription(self.topic_filter.expression).tags, pa.string())
        )
        return None if pc.all(has_tag).as_py() else has_tag


def _portions(row_count: int, size: int, portion_bytes: int | None) -> list[slice]:
    """Splits this number of rows, which have ``size`` bytes together, into equal parts. There is at least one part, so that Spark
    gets a schema.
    """
    part_count = math.ceil(size / portion_bytes) if portion_bytes else 1
    step = max(1, math.ceil(row_count / max(1, part_count)))
    return [slice(start, start + step) for start in range(0, max(1, row_count), step)]


def _drop_before_start(stored: StoredMessages, unwrapped: StoredMessages) -> StoredMessages:
    """Drops messages of inner batches if their offsets are before the start of the answer. Brokers return whole batches, so the
    first messages of a batch may be before the start. Messages outside of batches are kept, because their offsets can only be
    before the start if a damaged message has shifted the broker's index of the queue (the consume queue).
    """
    starts = stored_messages.answer_field(stored.answers, "start")
    may_start_early = ((stored.sys_flags & _INNER) != 0) & (
        stored.fixed_field("queueOffset") < starts[stored.answer_of_row]
    )
    if not may_start_early.any():
        return unwrapped
    is_before_start = may_start_early[unwrapped.record_of_row] & (
        unwrapped.fixed_field("queueOffset") < starts[unwrapped.answer_of_row]
    )
    return unwrapped.keep(~is_before_start)


def _drop_after_end(messages: StoredMessages, correct_ends: CorrectEnds | None) -> StoredMessages:
    """Drops messages that are after the requested end of an answer, because these messages belong to another pull.

    A damaged message may have shifted the broker's index of the queue (the consume queue). Then the offset that is stored in a
    later message may be after the end, although the position of this message in the index is before the end. So messages are
    dropped only if the broker's next offset is after the end, too. In this case, ``correct_ends`` first corrects the end,
    unless ``correct_ends`` is None.
    """
    limits = stored_messages.answer_field(messages.answers, "limit")
    exceeds_limit = stored_messages.answer_field(messages.answers, "next_offset") > limits
    if not exceeds_limit.any():
        return messages
    limits = np.where(exceeds_limit, limits, 1 << 62)
    is_before_limit = messages.fixed_field("queueOffset") < limits[messages.answer_of_row]
    if correct_ends is not None and not is_before_limit.all():
        corrected_answers = np.unique(messages.answer_of_row[~is_before_limit])
        limits[corrected_answers] = [
            answer.limit
            for answer in correct_ends([FetchedAnswer(*row) for row in messages.answers[corrected_answers].tolist()])
        ]
        is_before_limit = messages.fixed_field("queueOffset") < limits[messages.answer_of_row]
    return messages if is_before_limit.all() else messages.keep(is_before_limit)


def _bodies(messages: StoredMessages, rows: slice) -> pa.Array:
    return buffers.slices(messages.buffer, messages.body_start[rows], messages.body_end[rows])


SLACK_BYTES = 64  # bytes after the messages, as in a reader's buffer, because decoders read ahead


# The queue, the requested offset, the consecutive answers (for each the next offset, and the end of its bytes), and the bytes of
# the stored messages.
AnsweredPull = tuple[MessageQueue, int, Sequence[tuple[int, int]], bytes | memoryview]


def batch_of_answers(
    parts: Iterable[tuple[AnsweredPull, Filter]], skip_counts: Mapping[tuple[MessageQueue, Filter], int] | None = None
) -> tuple[pa.RecordBatch, bool]:
    """The messages of answers in the basic columns, and whether all messages are returned. ``parts`` are the answers with the
    filters of their requests. If the messages exceed ``PORTION_BYTES``, only the first messages are returned, at least one.

    ``skip_counts`` is the number of messages to omit at the beginning, by queue and filter. The offsets and queues inside
    messages are ignored, because damage may have changed them. Rows of a queue are in the order of its answers. Raises
    ``DecodeError`` with queue and offset of a bad message.
    """
    batches: list[pa.RecordBatch] = []
    remaining_bytes = messages.PORTION_BYTES
    for topic_filter, pulls, skip_count in _groups(parts, dict(skip_counts or {})):
        for batch in _batches(pulls, topic_filter):
            skipped_count = min(skip_count, batch.num_rows)
            skip_count -= skipped_count
            batch = batch.slice(skipped_count)
            if not batch.num_rows:
                continue
            if remaining_bytes <= 0:
                return pa.concat_batches(batches), False
            batches.append(batch)
            remaining_bytes -= batch.nbytes
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=arrow_schema(BASIC_COLUMNS)), True
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches), True


def _groups(
    parts: Iterable[tuple[AnsweredPull, Filter]], skip_counts: dict[tuple[MessageQueue, Filter], int]
) -> list[tuple[Filter, list[AnsweredPull], int]]:
    """Groups of answers that are decoded together: their filter, and how many of their first messages are omitted.

    Answers with the same filter share a group, unless an earlier answer of their queue is in a later group.
    """
    groups: list[tuple[Filter, list[AnsweredPull], int]] = []
    group_of_filter: dict[Filter, int] = {}
    group_of_queue: dict[MessageQueue, int] = {}  # for each queue, the group of the queue's last answer
    for pull, topic_filter in parts:
        queue = pull[0]
        skip_count = skip_counts.pop((queue, topic_filter), 0)
        group = group_of_filter.get(topic_filter, -1)
        if skip_count or group < group_of_queue.get(queue, 0):
            group = len(groups)
            groups.append((topic_filter, [], skip_count))
            if not skip_count:
                group_of_filter[topic_filter] = group
        groups[group][1].append(pull)
        group_of_queue[queue] = group
    return groups


def _batches(parts: Iterable[AnsweredPull], topic_filter: Filter) -> Iterator[pa.RecordBatch]:
    queues: list[MessageQueue] = []
    answers: list[FetchedAnswer] = []
    received_parts: list[bytes | memoryview] = []
    buffer_end = 0
    for number, (queue, start, ends, received_bytes) in enumerate(parts):
        queues.append(queue)
        received_parts.append(received_bytes)
        begin, part_start = buffer_end, buffer_end
        for next_offset, end_of_answer in ends:
            buffer_end = part_start + end_of_answer
            answers.append(FetchedAnswer(number, start, next_offset, next_offset, begin, buffer_end))
            start, begin = next_offset, buffer_end
    buffer = np.frombuffer(b"".join([*received_parts, bytes(SLACK_BYTES)]), np.uint8)
    return Decoder(queues, topic_filter=topic_filter).batches(FetchedAnswers(buffer, answers), messages.PORTION_BYTES)
