"""Compressed bodies of located messages, a portion at a time: a few kilobytes may become megabytes.

No message says how large it becomes, so rows are decompressed one by one and a portion is cut when it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.base import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode.schema import Column
from rocketmq_spark.columnar.decode.stored_messages import StoredMessages
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire import compression

_COMPRESSED = int(codes.SysFlag.COMPRESSED)


@dataclass(slots=True)
class UnpackedPart:
    """Bodies of the rows from ``begin`` on, None where one cannot be had, with the reason by its place in the part."""

    begin: int
    bodies: list[bytes | None] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def parts(messages: StoredMessages, rows: slice, portion_bytes: int | None) -> Iterator[UnpackedPart]:
    """The bodies of ``rows``, in parts that are cut as soon as they have ``portion_bytes``; always one."""
    starts, ends, flags = messages.body_start[rows], messages.body_end[rows], messages.sys_flags[rows]
    packed = (((flags & _COMPRESSED) != 0) & (ends > starts)).tolist()
    part, size, made = UnpackedPart(rows.start), 0, False
    stored = arrow.binary(messages.buffer, starts, ends).to_pylist()
    for body, is_packed, flag in zip(stored, packed, flags.tolist(), strict=True):
        if is_packed:
            try:
                body = compression.decompress(body, flag)
            except DecodeError as e:
                part.reasons[len(part.bodies)] = e.message
                body = None
        part.bodies.append(body)
        size += len(body or b"")
        if portion_bytes and size >= portion_bytes:
            yield part
            part, size, made = UnpackedPart(part.begin + len(part.bodies)), 0, True
    if part.bodies or not made:
        yield part


def with_errors(
    arrays: Sequence[pa.Array], columns: Sequence[Column], reasons: Mapping[int, str], flags: npt.NDArray[np.int32]
) -> list[pa.Array]:
    """The columns with the reasons where they belong, and with the flags that bad messages are stored with."""
    made = []
    for array, column in zip(arrays, columns, strict=True):
        name = column.name.lower() if column.property is None else ""
        values: Mapping[int, object] = {}
        if name == "decodeerror":
            values = reasons
        elif name == "sysflag":
            values = {row: int(flags[row]) for row in reasons}
        if values:
            array = pa.array([values.get(i, value) for i, value in enumerate(array.to_pylist())], array.type)
        made.append(array)
    return made
