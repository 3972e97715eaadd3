"""A batch of many messages as a request to a Proxy, without a Python step for each but the one that finds them.

Most batches are alike in all of their messages: the same properties in the same order, with other values. Then the values are
columns, and what a request has round them is made by numpy and Arrow, as the encoder does it. Other batches are not for this.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.base.codes import RESERVED_PROPERTIES, Property
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints, Pieces
from rocketmq_spark.grpc_proxy import outgoing
from rocketmq_spark.grpc_proxy.outgoing import ProxySendRequest, RequestEncoder

Bytes = bytes | bytearray | memoryview
# For fewer the other way is as quick.
MIN_ROWS = 64
_SIZE = struct.Struct(">i")
_HEAD_BYTES, _LENGTH_BYTES = 20, 2


class _Alike(NamedTuple):
    """The messages of a batch: their bodies, and the values of each property, by name."""

    bodies: pa.Array
    values: dict[str, pa.Array]


def by_columns(body: Bytes, encode: RequestEncoder) -> ProxySendRequest | None:
    """The request that ``encode`` would make of a batch body, or None where each message must be looked at."""
    starts = _starts(body)
    messages = None if len(starts) < MIN_ROWS else _alike(np.frombuffer(body, np.uint8), starts)
    if messages is None:
        return None
    bodies, values = messages
    fields, system = Pieces(len(bodies)), Pieces(len(bodies))
    fields.constant(encode.first)
    system.constant(encode.system + outgoing.NORMAL)
    for name, column in values.items():
        if name in outgoing.TEXTS or name == Property.KEYS:
            system.constant(outgoing.TEXTS.get(name, outgoing.KEY))
            _sized(system, column)
        elif name not in outgoing.LEFT_OUT:
            entry = Pieces(len(bodies))
            entry.constant(encode.name(name))
            _sized(entry, column)
            _within(fields, outgoing.USER, entry)
    _within(fields, outgoing.SYSTEM, system)
    fields.constant(outgoing.BODY)
    _sized(fields, bodies)
    whole = Pieces(len(bodies))
    _within(whole, outgoing.MESSAGE, fields)
    data, ends = arrow.content(whole.joined())
    ids = values.get(Property.UNIQ_KEY, [""] * len(bodies))
    sent = ",".join(ids) if isinstance(ids, list) else b",".join(ids.to_pylist()).decode()
    return ProxySendRequest(bytes(data[: int(ends[-1])]), sent, delayed=False)


def _starts(body: Bytes) -> Ints:
    """Where the messages begin; none where their sizes do not add up."""
    found, at, end = [], 0, len(body)
    while at + _HEAD_BYTES < end:
        found.append(at)
        size = _SIZE.unpack_from(body, at)[0]
        if size <= _HEAD_BYTES:
            break
        at += size
    return np.array(found if at == end else [], np.int64)


def _alike(data: npt.NDArray[np.uint8], starts: Ints) -> _Alike | None:
    heads = data[starts[:, None] + np.arange(_HEAD_BYTES)].view(">i4").astype(np.int64)
    flags, lengths = heads[:, 3], heads[:, 4]
    body_at, ends = starts + _HEAD_BYTES, np.append(starts[1:], len(data))
    text_at = body_at + lengths + _LENGTH_BYTES
    if flags.any() or bool((lengths < 0).any()) or bool((text_at > ends).any()):
        return None
    announced = data[text_at[:, None] + np.arange(-_LENGTH_BYTES, 0)].view(">u2").ravel()
    if bool((text_at + announced != ends).any()):
        return None
    values = _values(_cut(data, text_at, ends))
    return None if values is None else _Alike(_cut(data, body_at, text_at - _LENGTH_BYTES), values)


def _values(texts: pa.Array) -> dict[str, pa.Array] | None:
    """The values of each property; None where names differ, or are RocketMQ's and mean more than a text."""
    text, bounds = arrow.content(texts)
    used, rows = bytes(text[: int(bounds[-1])]), len(texts)
    chars = np.frombuffer(used, np.uint8)
    middles, ends = np.flatnonzero(chars == 1), np.flatnonzero(chars == 2)
    width = len(ends) // rows
    if not width or len(ends) != rows * width or len(middles) != len(ends) or not _is_text(used):
        return None
    begins: Ints = np.append(0, ends + 1)
    if bool((begins[::width] != bounds).any() | (middles <= begins[:-1]).any() | (ends <= middles + 1).any()):
        return None
    found = {}
    for which in range(width):
        begin, middle, end = begins[which:-1:width], middles[which::width], ends[which::width]
        name = used[begin[0] : middle[0]]
        same = not bool((middle - begin != len(name)).any())
        if not same or not (chars[begin[:, None] + np.arange(len(name))] == np.frombuffer(name, np.uint8)).all():
            return None
        found[name.decode()] = _cut(chars, middle + 1, end)
    known = RESERVED_PROPERTIES & found.keys() <= {*outgoing.TEXTS, Property.KEYS, *outgoing.LEFT_OUT}
    keys = found.get(Property.KEYS)
    several = keys is not None and len(arrow.rows_with(keys, outgoing.KEY_SEPARATOR_BYTES)) > 0
    return found if known and not several and len(found) == width else None


def _is_text(data: bytes) -> bool:
    """The Proxy refuses a request with anything else in it."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut(data: npt.NDArray[np.uint8], begins: Ints, ends: Ints) -> pa.Array:
    """Parts of a buffer that follow each other in it."""
    bounds = np.column_stack((begins, ends)).astype(np.int32).ravel()
    parts_and_gaps = pa.Array.from_buffers(
        pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    return parts_and_gaps.take(pa.array(np.arange(0, len(bounds), 2)))


def _sized(pieces: Pieces, column: pa.Array) -> None:
    """Each value behind its length."""
    pieces.column(arrow.fixed(_varints(arrow.lengths(column))))
    pieces.column(column)


def _within(pieces: Pieces, start: bytes, fields: Pieces) -> None:
    """A field of each message that is a message itself."""
    pieces.constant(start)
    pieces.column(arrow.fixed(_varints(fields.lengths)))
    pieces.extend(fields)


def _varints(numbers: Ints) -> npt.NDArray[np.uint8]:
    """Numbers as protobuf writes them, all as wide as the largest: it takes bytes that say nothing."""
    width = max(1, -(-int(numbers.max()).bit_length() // 7))
    made = (numbers[:, None] >> np.arange(0, 7 * width, 7) & 0x7F).astype(np.uint8)
    made[:, :-1] |= 0x80
    return made
