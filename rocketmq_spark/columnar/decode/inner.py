"""Inner batches: an inner batch is stored as one message, whose body contains many messages. Each message in the body becomes a
row.

A row of an inner batch has the outer message's fixed fields, but its own offset, flag, body and properties, as in
``wire/messages``. A compressed batch is decompressed and appended to the fetched bytes. The reference decoder decodes batches in
an unusual form.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base import codes
from rocketmq_spark.columnar.decode.stored_messages import (
    Bytes,
    Ints,
    StoredMessages,
    answer_field,
    property_texts,
    read_numbers,
)
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.properties import inner_base_and_count

_INNER = int(codes.INNER_BATCH_MASK)
_COMPRESSED = int(codes.SysFlag.COMPRESSED)
# Where the flag, the body's length and the body begin in a message of a batch. The length of the message's properties follows
# the body.
_FLAG_POSITION, _LENGTH_POSITION, _BODY_POSITION = 12, 16, 20
_MIN_ITEM_BYTES = _BODY_POSITION + 2
# Bytes after the last message, so that a number can be read at every possible position.
_SLACK_BYTES = 32
# The reference decoder decompresses larger batches portion by portion.
_MAX_DECOMPRESSED_BYTES = 64 << 20


def has_inner_batches(messages: StoredMessages) -> bool:
    """Whether any message is an inner batch."""
    return messages.combined_flags & _INNER == _INNER and bool(_inner_batch_mask(messages).any())


def _inner_batch_mask(messages: StoredMessages) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = (messages.sys_flags & _INNER) == _INNER
    return mask


def unwrap(messages: StoredMessages) -> StoredMessages | None:
    """Replaces inner batches with their messages; None if a batch has an unusual form."""
    is_batch = _inner_batch_mask(messages)
    batch_rows = np.flatnonzero(is_batch)
    bodies = _decompressed_bodies(messages, batch_rows)
    if bodies is None:
        return None
    buffer, begins, ends = bodies
    broker_counts = [count for _, count in map(inner_base_and_count, property_texts(messages, batch_rows))]
    items = _find_items(buffer, begins, ends, broker_counts)
    if items is None:
        return None
    counts = np.ones(len(messages), np.intp)
    counts[batch_rows] = items.counts
    record_of_item = np.repeat(np.arange(len(messages)), counts)
    item_rows = None if len(batch_rows) == len(messages) else np.flatnonzero(is_batch[record_of_item])
    sys_flags = messages.sys_flags.copy()
    sys_flags[batch_rows] &= ~_COMPRESSED
    offsets = messages.fixed_field("queueOffset") - (np.cumsum(counts) - counts)
    return replace(
        messages,
        buffer=buffer,
        starts=messages.starts[record_of_item],
        answer_of_row=messages.answer_of_row[record_of_item],
        record_of_row=record_of_item,
        item_fields={
            "queueOffset": np.arange(len(record_of_item)) + np.repeat(offsets, counts),
            "flag": _row_values(messages.fixed_field("flag"), record_of_item, item_rows, items.flags),
        },
        sys_flags=sys_flags[record_of_item],
        combined_flags=int(np.bitwise_or.reduce(sys_flags)),
        body_start=_row_values(messages.body_start, record_of_item, item_rows, items.body_start),
        body_end=_row_values(messages.body_end, record_of_item, item_rows, items.body_end),
        properties_start=_row_values(messages.properties_start, record_of_item, item_rows, items.body_end + 2),
        properties_end=_row_values(messages.properties_end, record_of_item, item_rows, items.properties_end),
    )


def contiguous_answers(messages: StoredMessages, unwrapped_messages: StoredMessages) -> npt.NDArray[np.bool_]:
    """Which answers have consecutive offsets up to the broker's next offset. In these answers, no offset can be wrong.

    ``unwrapped_messages`` is the result of ``unwrap``.
    """
    first_offsets, end_offsets = _offset_ranges(messages, unwrapped_messages)
    answer_of_row = messages.answer_of_row
    has_same_answer = answer_of_row[1:] == answer_of_row[:-1]
    is_first_of_answer, is_last_of_answer = np.append(True, ~has_same_answer), np.append(~has_same_answer, True)
    is_wrong = is_first_of_answer & (
        (first_offsets > answer_field(messages.answers, "start")[answer_of_row])
        | (end_offsets <= answer_field(messages.answers, "start")[answer_of_row])
    )
    is_wrong |= is_last_of_answer & (end_offsets != answer_field(messages.answers, "next_offset")[answer_of_row])
    is_wrong[1:] |= has_same_answer & (first_offsets[1:] != end_offsets[:-1])
    is_contiguous: npt.NDArray[np.bool_] = np.bincount(answer_of_row[is_wrong], minlength=len(messages.answers)) == 0
    return is_contiguous


def _offset_ranges(messages: StoredMessages, unwrapped_messages: StoredMessages) -> tuple[Ints, Ints]:
    """For each stored message, the offset of its first row, and the offset after its last row."""
    assert unwrapped_messages.record_of_row is not None
    first_offsets: Ints = messages.fixed_field("queueOffset").astype(np.int64)
    return first_offsets, first_offsets + np.bincount(unwrapped_messages.record_of_row, minlength=len(messages))


def has_damaged_batch(
    messages: StoredMessages, unwrapped_messages: StoredMessages, is_contiguous: npt.NDArray[np.bool_]
) -> bool:
    """Whether a batch has another number of messages than its broker counted, or impossible offsets. Offsets are impossible if
    they are outside of the range that was requested, or differ from the offsets in the properties of the batch.
    ``is_contiguous`` is the result of ``contiguous_answers``: the offsets in contiguous answers are right.
    ``unwrapped_messages`` is the result of ``unwrap``.
    """
    batch_rows = np.flatnonzero(_inner_batch_mask(messages))
    first_offsets, end_offsets = (each[batch_rows] for each in _offset_ranges(messages, unwrapped_messages))
    answers = messages.answers[messages.answer_of_row[batch_rows]]
    recorded_base_counts = map(inner_base_and_count, property_texts(messages, batch_rows))
    offsets_of_batches = zip(recorded_base_counts, first_offsets.tolist(), end_offsets.tolist(), strict=True)
    has_wrong_base, has_wrong_count = zip(
        *(
            (base not in (None, first_offset), count not in (None, end_offset - first_offset))
            for (base, count), first_offset, end_offset in offsets_of_batches
        ),
        strict=True,
    )
    has_wrong_offset = (
        np.array(has_wrong_base, bool)
        | (end_offsets <= answer_field(answers, "start"))
        | (first_offsets >= answer_field(answers, "next_offset"))
    )
    is_impossible = (
        has_wrong_offset & (end_offsets != first_offsets) & ~is_contiguous[messages.answer_of_row[batch_rows]]
    )
    return any(has_wrong_count) or bool(is_impossible.any())


def _row_values(
    stored_values: npt.NDArray[Any],
    record_of_item: npt.NDArray[np.intp],
    item_rows: npt.NDArray[np.intp] | None,
    item_values: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """The value of each row: rows in ``item_rows`` (None means all rows) get ``item_values``; each other row gets the value of
    its stored message.
    """
    if item_rows is None:
        return item_values
    rows = stored_values[record_of_item]
    rows[item_rows] = item_values
    return rows


def _decompressed_bodies(messages: StoredMessages, batch_rows: npt.NDArray[np.intp]) -> tuple[Bytes, Ints, Ints] | None:
    """A buffer with the decompressed bodies of all batches, and their positions; None if a body is damaged, or too large to be
    decompressed at once.
    """
    begins, ends = messages.body_start[batch_rows], messages.body_end[batch_rows]
    compressed_indexes = np.flatnonzero(((messages.sys_flags[batch_rows] & _COMPRESSED) != 0) & (ends > begins))
    if not len(compressed_indexes):
        return messages.buffer, begins, ends
    buffer, parts, buffer_end = messages.buffer, [messages.buffer], len(messages.buffer)
    remaining_bytes = _MAX_DECOMPRESSED_BYTES
    for i in compressed_indexes.tolist():
        stored_body = buffer[int(begins[i]) : int(ends[i])].tobytes()
        try:
            body = compression.decompress(stored_body, int(messages.sys_flags[batch_rows[i]]), remaining_bytes)
        except DecodeError:
            return None
        begins[i], ends[i] = buffer_end, buffer_end + len(body)
        parts.append(np.frombuffer(body, np.uint8))
        buffer_end += len(body)
        remaining_bytes -= len(body)
    return np.concatenate([*parts, np.zeros(_SLACK_BYTES, np.uint8)]), begins, ends


@dataclass(frozen=True, slots=True)
class _Items:
    """The messages of all batches: the number per batch, and the flag and positions of each message."""

    counts: npt.NDArray[np.intp]
    flags: npt.NDArray[Any]
    body_start: Ints
    body_end: Ints
    properties_end: Ints


def _find_items(buffer: Bytes, begins: Ints, ends: Ints, broker_counts: Sequence[int | None]) -> _Items | None:
    """Finds the messages by their sizes and lengths; None if these are inconsistent or the messages do not fill their batches."""
    start_list, count_list = _item_starts(buffer.data, begins, ends, broker_counts)
    starts, counts = np.array(start_list, np.int64), np.array(count_list, np.intp)
    non_empty_batches = np.flatnonzero(counts)
    if (begins != ends)[counts == 0].any():
        return None
    item_ends = np.empty_like(starts)
    item_ends[:-1] = starts[1:]
    last_items = np.cumsum(counts)[non_empty_batches] - 1
    item_ends[last_items] = ends[non_empty_batches]
    body_start = starts + _BODY_POSITION
    body_end = body_start + read_numbers(buffer, starts + _LENGTH_POSITION, ">i4")
    if (body_end < body_start).any() or (body_end + 2 > item_ends).any():
        return None
    properties_end = body_end + 2 + read_numbers(buffer, body_end, ">u2")
    # The size of a batch's last message is not used: the message ends with the batch, as in the reference decoder.
    if not np.array_equal(properties_end, item_ends):
        return None
    return _Items(counts, read_numbers(buffer, starts + _FLAG_POSITION, ">i4"), body_start, body_end, properties_end)


def _item_starts(
    view: memoryview, begins: Ints, ends: Ints, broker_counts: Sequence[int | None]
) -> tuple[list[int], list[int]]:
    """The positions of messages, computed from their sizes, batch by batch, and the number of messages in each batch.
    ``_find_items`` checks the sizes.

    This is the only Python step per message. The number of steps is limited by the possible number of messages, so that the
    loop ends even if a size is 0 or negative. ``broker_counts`` limits the number of steps, too, because a few kilobytes may
    become millions of messages.
    """
    unpack = struct.Struct(">i").unpack_from
    starts: list[int] = []
    counts = []
    append = starts.append
    for position, end, broker_count in zip(begins.tolist(), ends.tolist(), broker_counts, strict=True):
        count_before, last_start = len(starts), end - _MIN_ITEM_BYTES
        max_count = (end - position) // _MIN_ITEM_BYTES
        for _ in range(max_count if broker_count is None else min(max_count, broker_count)):
            if not 0 <= position <= last_start:
                break
            append(position)
            position += unpack(view, position)[0]
        counts.append(len(starts) - count_before)
    return starts, counts
