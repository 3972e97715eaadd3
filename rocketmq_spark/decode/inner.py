"""Messages within messages: an inner batch is stored as one message, whose body holds many. Here each becomes a row.

A row of an inner batch has the outer message's fixed fields, but its own offset, flag, body and properties, as in
``wire/messages``. A batch that was compressed as a whole is decompressed behind the fetched bytes. What is not as a
producer makes it is left to the careful path.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rocketmq_spark import codes
from rocketmq_spark.decode.stored_messages import Bytes, Ints, StoredMessages, number_at
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire import compression

_INNER = int(codes.SysFlag.INNER_BATCH)
_COMPRESSED = int(codes.SysFlag.COMPRESSED)
# Size, magic, CRC, flag and length of the body; behind the body the length of the properties.
_FLAG_AT, _LENGTH_AT, _BODY_AT = 12, 16, 20
_SMALLEST = _BODY_AT + 2
# What lies behind the last byte that is looked at, so that every number can be read where it might stand.
_SLACK = 32
# More than this is decompressed portion by portion, on the careful path.
_MAX_UNPACKED = 64 << 20


def present(messages: StoredMessages) -> bool:
    """Whether there is any inner batch among them."""
    return bool(messages.any_flags & _INNER) and bool(((messages.sys_flags & _INNER) != 0).any())


def opened(messages: StoredMessages) -> StoredMessages | None:
    """With the messages of inner batches in place of these; None where one is not as it should be."""
    outer = np.flatnonzero((messages.sys_flags & _INNER) != 0)
    unpacked = _unpacked(messages, outer)
    if unpacked is None:
        return None
    buffer, begins, ends = unpacked
    starts = _starts(buffer, begins, ends)
    if starts is None:
        return None
    counts = np.ones(len(messages), np.intp)
    counts[outer] = [len(found) for found in starts]
    items = np.concatenate(starts)
    rows = np.repeat(np.arange(len(messages)), counts)
    is_item = ((messages.sys_flags & _INNER) != 0)[rows]
    # How manieth of its batch.
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    sys_flags = messages.sys_flags.copy()
    sys_flags[outer] &= ~_COMPRESSED
    head = np.repeat(messages.head, counts)  # twenty times as fast as an index, for a structured array
    head["sysFlag"] = sys_flags[rows]
    head["queueOffset"] += place
    head["flag"][is_item] = number_at(buffer, items + _FLAG_AT, ">i4")
    made = replace(
        messages,
        buffer=buffer,
        starts=messages.starts[rows],
        piece_of_row=messages.piece_of_row[rows],
        head=head,
        sys_flags=sys_flags[rows],
        any_flags=int(np.bitwise_or.reduce(sys_flags)),
        body_start=messages.body_start[rows],
        body_end=messages.body_end[rows],
        properties_start=messages.properties_start[rows],
        properties_end=messages.properties_end[rows],
    )
    lengths = number_at(buffer, items + _LENGTH_AT, ">i4").astype(np.int64)
    made.body_start[is_item] = items + _BODY_AT
    made.body_end[is_item] = items + _BODY_AT + lengths
    made.properties_start[is_item] = made.body_end[is_item] + 2
    made.properties_end[is_item] = made.properties_start[is_item] + number_at(buffer, made.body_end[is_item], ">u2")
    return made


def _unpacked(messages: StoredMessages, outer: npt.NDArray[np.intp]) -> tuple[Bytes, Ints, Ints] | None:
    """A buffer in which the bodies of all batches can be read, and where they lie."""
    begins, ends = messages.body_start[outer], messages.body_end[outer]
    packed = np.flatnonzero(((messages.sys_flags[outer] & _COMPRESSED) != 0) & (ends > begins))
    if not len(packed):
        return messages.buffer, begins, ends
    buffer, parts, behind = messages.buffer, [messages.buffer], len(messages.buffer)
    room = _MAX_UNPACKED
    for i in packed.tolist():
        stored = buffer[int(begins[i]) : int(ends[i])].tobytes()
        try:
            body = compression.decompress(stored, int(messages.sys_flags[outer[i]]), room)
        except DecodeError:
            return None
        begins[i], ends[i] = behind, behind + len(body)
        parts.append(np.frombuffer(body, np.uint8))
        behind += len(body)
        room -= len(body)
    return np.concatenate([*parts, np.zeros(_SLACK, np.uint8)]), begins, ends


def _starts(buffer: Bytes, begins: Ints, ends: Ints) -> list[Ints] | None:
    """Where the messages of each batch begin, by the sizes that they announce; None unless these are true."""
    found = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        starts = np.array(_announced(buffer.data, begin, end), np.int64)
        if not _true(buffer, starts, begin, end):
            return None
        found.append(starts)
    return found


def _announced(view: memoryview, at: int, end: int) -> list[int]:
    """From size to size, the one step in Python that every message takes; sizes that lie are for ``_true`` to find.

    As many steps as there can be messages, so that sizes of 0 or less end, too.
    """
    unpack = struct.Struct(">i").unpack_from
    starts: list[int] = []
    append, last = starts.append, end - _SMALLEST
    for _ in range((end - at) // _SMALLEST):
        if not 0 <= at <= last:
            break
        append(at)
        at += unpack(view, at)[0]
    return starts


def _true(buffer: Bytes, starts: Ints, begin: int, end: int) -> bool:
    """Whether the messages lie end to end, and fill the batch, as far as their lengths say."""
    if not len(starts):
        return begin == end
    stops = np.append(starts[1:], end)
    lengths = number_at(buffer, starts + _LENGTH_AT, ">i4").astype(np.int64)
    properties_at = starts + _BODY_AT + lengths
    if (lengths < 0).any() or (properties_at + 2 > stops).any():
        return False
    sized = (starts + number_at(buffer, starts, ">i4") == stops).all()
    return bool(sized and (properties_at + 2 + number_at(buffer, properties_at, ">u2") == stops).all())
