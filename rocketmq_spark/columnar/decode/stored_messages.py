"""Locates messages and their parts in a receive buffer, with numpy over the stored layout and no Python step per message.

The layout is the protocol's stored message (``wire/messages.py`` decodes this layout to objects). If bytes do not have this
layout, ``Malformed`` is raised with their position in the buffer. The caller knows queue and offset, and converts this error to
a ``DecodeError``. Inner batches are located as one message each (``inner`` unwraps them).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base import codes
from rocketmq_spark.pull import fetched
from rocketmq_spark.pull.fetched import FetchedAnswer, Hole

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

MIN_MESSAGE_BYTES = 91
# With at least this number of answers, or parts of answers, it is faster to advance in all of them at once than one after the
# other.
_MIN_LOCK_STEP_CHAINS = 24
_CHAIN_MESSAGES = 32
_MAGIC = re.compile(
    b"|".join(re.escape(n.to_bytes(4, "big")) for n in (codes.MESSAGE_MAGIC_V1, codes.MESSAGE_MAGIC_V2))
)
_IPV6_EXTRA_BYTES = 12
_FIELDS_AFTER_BORN_HOST = frozenset({"storeTimestamp", "storeHost", "reconsumeTimes", "preparedOffset", "bodyLength"})

_FIXED_FIELDS = np.dtype(
    {
        "names": [
            "size",
            "magic",
            "crc",
            "queueId",
            "flag",
            "queueOffset",
            "commitLogOffset",
            "sysFlag",
            "bornTimestamp",
            "bornHost",
            "storeTimestamp",
            "storeHost",
            "reconsumeTimes",
            "preparedOffset",
            "bodyLength",
        ],
        "formats": [
            ">i4",
            ">u4",
            ">u4",
            ">i4",
            ">i4",
            ">i8",
            ">i8",
            ">i4",
            ">i8",
            "V8",
            ">i8",
            "V8",
            ">i4",
            ">i8",
            ">i4",
        ],
        "offsets": [0, 4, 8, 12, 16, 20, 28, 36, 40, 48, 56, 64, 72, 76, 84],
        "itemsize": 88,
    }
)


class Malformed(Exception):
    """The bytes at ``position`` are not a stored message. The callers know the queue, and convert this error to a
    ``DecodeError``.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoredMessages:
    """Fetched messages. Positions are byte indexes into the buffer. ``answers`` has a row per answer and a column per field of
    ``FetchedAnswer``; ``counts`` has the number of messages of each answer.

    ``head`` has the fixed fields as stored, one record per message. With inner batches, several messages share a record:
    ``record_of_row`` has the number of each message's record, and ``item_fields`` has the fields that differ within a batch.
    """

    buffer: Bytes
    answers: Ints
    counts: npt.NDArray[np.intp]
    starts: Ints
    answer_of_row: npt.NDArray[np.intp]
    head: npt.NDArray[Any]
    sys_flags: npt.NDArray[np.int32]
    combined_flags: int
    body_start: Ints
    body_end: Ints
    properties_start: Ints
    properties_end: Ints
    record_of_row: npt.NDArray[np.intp] | None
    item_fields: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.starts)

    def keep(self, mask: npt.NDArray[np.bool_]) -> StoredMessages:
        """The rows where ``mask`` is true."""
        rows = np.flatnonzero(mask)
        return StoredMessages(
            self.buffer,
            self.answers,
            self.counts,
            self.starts[rows],
            self.answer_of_row[rows],
            # ``take`` is twenty times as fast as indexing, for a structured array.
            self.head.take(rows) if self.record_of_row is None else self.head,
            self.sys_flags[rows],
            self.combined_flags,
            self.body_start[rows],
            self.body_end[rows],
            self.properties_start[rows],
            self.properties_end[rows],
            None if self.record_of_row is None else self.record_of_row[rows],
            {name: values[rows] for name, values in self.item_fields.items()},
        )

    def fixed_field(self, name: str) -> npt.NDArray[Any]:
        """A fixed field of all messages. Fields after the born host have a position that depends on the host's length."""
        if name in self.item_fields:
            return self.item_fields[name]
        if name in _FIELDS_AFTER_BORN_HOST and self.combined_flags & _IPV6_FLAGS:
            shifted_fields = _shifted_fields(self.buffer, self.starts, self.sys_flags, self.combined_flags, self.head)
            shifted_values: npt.NDArray[Any] = shifted_fields[name]
            return shifted_values
        values: npt.NDArray[Any] = self.head[name]
        return values if self.record_of_row is None else values.copy()[self.record_of_row]


def answer_field(answers: Ints, name: str) -> Ints:
    """One field of ``FetchedAnswer``, of all answers."""
    return answers[:, FetchedAnswer._fields.index(name)]


def locate(buffer: Bytes, answers: list[FetchedAnswer]) -> StoredMessages:
    """Locate the messages of ``answers`` and all of their parts. Raises ``Malformed``."""
    table = np.array(answers, np.int64).reshape(len(answers), len(FetchedAnswer._fields))
    starts, counts = boundaries(buffer, answer_field(table, "begin"), answer_field(table, "end"))
    head = _records(buffer, starts)
    sys_flags = head["sysFlag"].astype(np.int32)
    combined_flags = int(np.bitwise_or.reduce(sys_flags)) if len(starts) else 0
    shifted_fields = _shifted_fields(buffer, starts, sys_flags, combined_flags, head)
    body_start = starts + 88
    if combined_flags & _IPV6_FLAGS:
        body_start += _host_shift(sys_flags)
    body_end = body_start + shifted_fields["bodyLength"]
    message_ends = starts + head["size"]
    _check_limits(starts, body_start, body_end, "the body has a negative length")
    _check_limits(starts, body_end, message_ends - 3, "the body leaves the message")
    topic_end = _topic_end(buffer, starts, head["magic"], body_end)
    _check_limits(starts, topic_end, message_ends - 2, "the topic leaves the message")
    properties_start = topic_end + 2
    properties_end = properties_start + read_numbers(buffer, topic_end, ">u2")
    wrong_rows = np.flatnonzero(properties_end != message_ends)
    if len(wrong_rows):
        raise Malformed(int(starts[wrong_rows[0]]), "the properties do not end where the message does")
    answer_of_row = np.repeat(np.arange(len(answers)), counts)
    return StoredMessages(
        buffer,
        table,
        counts,
        starts,
        answer_of_row,
        head,
        sys_flags,
        combined_flags,
        body_start,
        body_end,
        properties_start,
        properties_end,
        None,
        {},
    )


def holes(messages: StoredMessages, is_dense: npt.NDArray[np.bool_] | None = None) -> list[Hole]:
    """For queues in which every offset has a message: the offsets that answers skip. Holes are found by the number of messages,
    because the offsets inside messages may be wrong. If there are no holes, one comparison of all answers finds this out.
    Answers for which ``is_dense`` is true have no holes.
    """
    expected_counts = answer_field(messages.answers, "next_offset") - answer_field(messages.answers, "start")
    has_holes = messages.counts != expected_counts if is_dense is None else ~is_dense
    return [hole for i in np.flatnonzero(has_holes).tolist() for hole in _holes_of_answer(messages, i)]


def _holes_of_answer(messages: StoredMessages, i: int) -> list[Hole]:
    _, start, limit, next_offset, _, _ = messages.answers[i].tolist()
    end, is_of_answer = min(limit, next_offset), messages.answer_of_row == i
    offsets = messages.fixed_field("queueOffset")[is_of_answer].tolist()
    if offsets and (messages.sys_flags[is_of_answer] & codes.SysFlag.INNER_BATCH).any():
        texts = property_texts(messages, np.flatnonzero(is_of_answer))
        entries = zip(offsets, messages.sys_flags[is_of_answer].tolist(), texts, strict=True)
        ranges = fetched.index_ranges(entries, start, next_offset)
        # No batch has ``INNER_BASE``. Brokers remove messages only at the front, so a hole can only be at the front. If the
        # first offset is after the end, it is damaged.
        ranges = ranges or [(offsets[0] if start < offsets[0] < next_offset else start, next_offset)]
    elif len(offsets) >= next_offset - start:
        return []
    else:
        ranges = [(offset, offset + 1) for offset in sorted(offsets)]
    found_holes, next_expected = [], start
    for first, range_end in [*ranges, (end, end)]:
        if first > next_expected:
            found_holes.append(Hole(i, next_expected, min(first, end)))
        next_expected = max(next_expected, range_end)
    return [hole for hole in found_holes if hole.start < hole.end]


def property_texts(messages: StoredMessages, rows: npt.NDArray[np.intp]) -> list[bytes]:
    """The encoded properties of some messages."""
    view = messages.buffer.data
    bounds = zip(messages.properties_start[rows].tolist(), messages.properties_end[rows].tolist(), strict=True)
    return [bytes(view[start:end]) for start, end in bounds]


_IPV6_FLAGS = codes.SysFlag.BORNHOST_V6 | codes.SysFlag.STOREHOST_V6


def _host_shift(sys_flags: npt.NDArray[np.int32]) -> Ints:
    """The number of bytes by which IPv6 hosts shift the body, for each row."""
    is_born_host_v6 = (sys_flags & codes.SysFlag.BORNHOST_V6) > 0
    is_store_host_v6 = (sys_flags & codes.SysFlag.STOREHOST_V6) > 0
    return _IPV6_EXTRA_BYTES * (is_born_host_v6.astype(np.int64) + is_store_host_v6)


def _shifted_fields(
    buffer: Bytes, starts: Ints, sys_flags: npt.NDArray[np.int32], combined_flags: int, head: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """The fixed fields at their right positions: a field after an IPv6 host is read at its shifted position."""
    if not combined_flags & _IPV6_FLAGS:
        return head
    limit = len(buffer) - _FIXED_FIELDS.itemsize
    born_host_shift = _IPV6_EXTRA_BYTES * ((sys_flags & codes.SysFlag.BORNHOST_V6) > 0).astype(np.int64)
    shifted_fields = _records(buffer, np.minimum(starts + born_host_shift, limit))
    fields_after_store_host = _records(buffer, np.minimum(starts + _host_shift(sys_flags), limit))
    for name in ("reconsumeTimes", "preparedOffset", "bodyLength"):
        shifted_fields[name] = fields_after_store_host[name]
    return shifted_fields


def _records(buffer: Bytes, starts: Ints) -> npt.NDArray[Any]:
    """A copy of the fixed fields at every start. They are copied as plain bytes, because numpy would otherwise swap the bytes
    of each field of each record.
    """
    if not len(starts):  # the buffer may be too short for a single record
        return np.empty(0, _FIXED_FIELDS)
    record_at_position = np.ndarray(
        (len(buffer) - _FIXED_FIELDS.itemsize + 1,), f"V{_FIXED_FIELDS.itemsize}", buffer, strides=(1,)
    )
    records: npt.NDArray[Any] = record_at_position[starts].view(_FIXED_FIELDS)
    return records


def _topic_end(buffer: Bytes, starts: Ints, magic: npt.NDArray[Any], body_end: Ints) -> Ints:
    if (magic == codes.MESSAGE_MAGIC_V1).all():
        return body_end + 1 + buffer[body_end]
    is_version_2 = magic == codes.MESSAGE_MAGIC_V2
    unknown_rows = np.flatnonzero(~is_version_2 & (magic != codes.MESSAGE_MAGIC_V1))
    if len(unknown_rows):
        raise Malformed(int(starts[unknown_rows[0]]), "unknown magic number")
    return np.where(is_version_2, body_end + 2 + read_numbers(buffer, body_end, ">u2"), body_end + 1 + buffer[body_end])


def _check_limits(starts: Ints, positions: Ints, limits: Ints, reason: str) -> None:
    rows_outside = np.flatnonzero(positions > limits)
    if len(rows_outside):
        raise Malformed(int(starts[rows_outside[0]]), reason)


def read_numbers(buffer: Bytes, positions: Ints, kind: str) -> npt.NDArray[Any]:
    """Numbers of ``kind`` at unaligned positions."""
    dtype = np.dtype(kind)
    numbers: npt.NDArray[Any] = np.ndarray((len(buffer) - dtype.itemsize + 1,), dtype, buffer, strides=(1,))[positions]
    return numbers


def boundaries(buffer: Bytes, begins: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.intp]]:
    """Starts of all messages in the answers, answer by answer, and the number in each answer. Raises ``Malformed``."""
    chain_begins, chain_ends, first_chains = _chains(buffer, begins, ends)
    if len(chain_begins) < _MIN_LOCK_STEP_CHAINS:
        return _boundaries_one_by_one(buffer, begins, ends)
    try:
        starts, counts = _boundaries_in_lock_step(buffer, chain_begins, chain_ends)
    except Malformed:  # the bytes are damaged, or a body contains bytes that look like the beginning of a message
        return _boundaries_one_by_one(buffer, begins, ends)
    return starts, np.add.reduceat(counts, first_chains)


def _chains(buffer: Bytes, begins: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """The begins and ends of the parts of all answers, and for each answer the number of its first part. Long answers are cut
    into parts where a message seems to begin.

    A cut is right if the messages before it end exactly at the cut.
    """
    min_part_sizes = _CHAIN_MESSAGES * np.maximum(
        read_numbers(buffer, begins, ">i4").astype(np.int64), MIN_MESSAGE_BYTES
    )
    if not (ends - begins >= 2 * min_part_sizes).any():
        return begins, ends, np.arange(len(begins))
    view, search = buffer.data, _MAGIC.search
    begins_of_parts: list[int] = []
    first_parts = []
    for begin, end, min_part_size in zip(begins.tolist(), ends.tolist(), min_part_sizes.tolist(), strict=True):
        first_parts.append(len(begins_of_parts))
        begins_of_parts.append(begin)
        # Search from the last part, so that no byte is read twice, even if messages are large.
        while match := search(view, begins_of_parts[-1] + min_part_size, end):
            begins_of_parts.append(match.start() - 4)
    chain_begins = np.array(begins_of_parts, np.int64)
    chain_ends = np.append(chain_begins[1:], ends[-1])
    chain_ends[np.array(first_parts[1:], np.intp) - 1] = ends[:-1]
    return chain_begins, chain_ends, np.array(first_parts)


def _boundaries_one_by_one(buffer: Bytes, begins: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.intp]]:
    view = buffer.data
    unpack = struct.Struct(">i").unpack_from
    starts: list[int] = []
    counts = []
    append = starts.append
    for position, end in zip(begins.tolist(), ends.tolist(), strict=True):
        count_before = len(starts)
        while position < end:
            append(position)
            (size,) = unpack(view, position)
            if size < MIN_MESSAGE_BYTES:
                raise Malformed(position, f"a message of {size} bytes")
            position += size
        if position != end:
            raise Malformed(starts[-1], "the last message of the answer is cut off")
        counts.append(len(starts) - count_before)
    return np.array(starts, np.int64), np.array(counts, np.intp)


def _boundaries_in_lock_step(buffer: Bytes, begins: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.intp]]:
    """Finds messages by their sizes. Answers are independent, so each has a cursor, and all cursors advance together."""
    size_at_position = np.ndarray((len(buffer) - 3,), ">i4", buffer, strides=(1,))
    cursors_by_step: list[Ints] = []
    active_answers = np.flatnonzero(begins < ends)
    cursors, stops = begins[active_answers], ends[active_answers]
    rows_by_step: list[npt.NDArray[np.intp]] = []
    while len(active_answers):
        cursors_by_step.append(cursors)
        rows_by_step.append(active_answers)
        sizes = size_at_position[cursors]
        if sizes.min() < MIN_MESSAGE_BYTES:
            raise Malformed(int(cursors[sizes.argmin()]), f"a message of {sizes.min()} bytes")
        next_cursors = cursors + sizes
        is_unfinished = next_cursors < stops
        if is_unfinished.all():
            cursors = next_cursors
            continue
        is_past_stop = next_cursors > stops
        if is_past_stop.any():
            raise Malformed(int(cursors[is_past_stop.argmax()]), "the last message of the answer is cut off")
        cursors, active_answers, stops = (
            next_cursors[is_unfinished],
            active_answers[is_unfinished],
            stops[is_unfinished],
        )
    if not cursors_by_step:
        return np.empty(0, np.int64), np.zeros(len(begins), np.intp)
    rows = np.concatenate(rows_by_step)
    # A stable sort of 16-bit numbers takes only linear time.
    order = np.argsort(rows.astype(np.uint16) if len(begins) <= 1 << 16 else rows, kind="stable")
    return np.concatenate(cursors_by_step)[order], np.bincount(rows, minlength=len(begins))
