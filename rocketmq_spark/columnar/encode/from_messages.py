"""Messages to the columns of rows, with a few passes over all messages instead of many steps per message. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rocketmq_spark.base import codes
from rocketmq_spark.base.java import java_hash
from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import MessageRefused, OptionError
from rocketmq_spark.model import Message, MessageQueue

_BODIES = (bytes, bytearray, memoryview)
_SEPARATOR = codes.KEY_SEPARATOR
_NONE: dict[str, str] = {}
# Maximum size of a column, because offsets have 32 bits.
MOST_BYTES = 2**31 - 1
# The role of a column with Java's hash of each key, if some keys are not texts: a number's hash differs from that of its text.
KEY_HASH = "keyhash"

Key = Callable[[Message], object]


def batch_of(
    messages: Sequence[Message], bad_rows: BadRows, queue: MessageQueue | None = None, key: Key | None = None
) -> pa.RecordBatch:
    """The columns of ``messages`` by role; only columns that some message needs. Raises for values that fit in no column.

    ``queue`` is the queue of all messages, ``key`` returns the sharding key of each.
    """
    try:
        found = _columns(messages, bad_rows, key)
    except Exception:
        for number, message in enumerate(messages):
            found_out = attempt(_columns, [message], BadRows(), key)
            if isinstance(found_out, Failure):
                bad_rows.rows(np.array([number]), str(found_out))
        bad_rows.raise_if_any()
        raise
    if queue is not None:
        found["queueid"] = arrow.integers(np.full(len(messages), queue.queue_id, np.int64), pa.int64())
        found["brokername"] = arrow.repeated(queue.broker_name, len(messages))
    return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))


def _columns(messages: Sequence[Message], bad_rows: BadRows, key: Key | None) -> dict[str, pa.Array]:
    found = {"body": _bodies([each.body for each in messages]), "topic": _topics([each.topic for each in messages])}
    if any(tags := [each.tags for each in messages]):
        found["tags"] = _texts([tag or "" for tag in tags])
    if any(keys := [each.keys for each in messages]):
        found["keys"] = _keys(keys, bad_rows)
    if any(own := [each.properties for each in messages]):
        found["properties"] = _maps(own)
    if any(flags := [each.flag for each in messages]):
        found["flag"] = _numbers(flags)
    priorities = [each.priority for each in messages]
    if (without := priorities.count(None)) < len(messages):
        found["priority"] = _numbers([each or 0 for each in priorities])
        if without:
            bad_rows.add(_none(priorities), "it has no priority, and others have one: send it with another call")
    if not all(waits := [each.wait_store_ok for each in messages]):
        bad_rows.add(~np.array(waits, np.bool_), "its wait_store_ok is False: send it with send")
    if key is not None:
        groups = [key(message) for message in messages]
        if None in groups:
            bad_rows.add(_none(groups), "its key is None")
        found["shardingkey"] = _texts([str(group) for group in groups])
        if not {*map(type, groups)} <= {str}:
            found[KEY_HASH] = _hashes(groups, bad_rows)
    return found


def _hashes(groups: Sequence[object], bad_rows: BadRows) -> pa.Array:
    found = np.zeros(len(groups), np.int64)
    for row, group in enumerate(groups):
        try:
            found[row] = java_hash(group)
        except OptionError as e:
            bad_rows.rows(np.array([row]), f"its key: {e.message}")
    return arrow.integers(found, pa.int64())


def _none(values: Sequence[object]) -> Any:
    return np.fromiter((each is None for each in values), np.bool_, len(values))


def _bodies(bodies: list[Any]) -> pa.Array:
    if not {*map(type, bodies)} <= {bytes}:
        for body in bodies:
            if not isinstance(body, _BODIES):
                raise TypeError(f"the message body is {type(body).__name__}; expected bytes")
        bodies = [bytes(body) for body in bodies]
    return _binary(b"".join(bodies), bodies, pa.binary())


def _topics(topics: list[str]) -> pa.Array:
    same = topics.count(topics[0]) == len(topics) and isinstance(topics[0], str)
    return arrow.repeated(topics[0], len(topics)) if same else _texts(topics)


def _texts(texts: Sequence[str]) -> pa.Array:
    joined = "".join(texts)
    if joined.isascii():
        return _binary(joined.encode(), texts, pa.string())
    encoded = [text.encode() for text in texts]
    return _binary(b"".join(encoded), encoded, pa.string())


def _binary(content: bytes, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if len(content) > MOST_BYTES:
        raise MessageRefused(
            f"{len(values)} messages have {len(content)} bytes together, and {MOST_BYTES} at most are sent at once",
            remedy="Send large messages with send",
        )
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(_offsets(values)), pa.py_buffer(content)])


def _offsets(values: Sequence[Any]) -> Any:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return offsets


def _keys(keys: Sequence[Sequence[str]], bad_rows: BadRows) -> pa.Array:
    texts = [_SEPARATOR.join(each) if each else "" for each in keys]
    if _SEPARATOR in "".join(texts):
        for row, (text, each) in enumerate(zip(texts, keys, strict=True)):
            if each and text.count(_SEPARATOR) >= len(each):
                split = next(key for key in each if _SEPARATOR in key)
                bad_rows.rows(np.array([row]), f"key {split!r} has a blank, and RocketMQ splits keys at blanks")
    return _texts(texts)


def _maps(own: Sequence[Any]) -> pa.Array:
    maps = [each or _NONE for each in own]
    values = [value for each in maps for value in each.values()]
    if None in values:  # omitted, as in Java
        maps = [{name: value for name, value in each.items() if value is not None} for each in maps]
        values = [value for each in maps for value in each.values()]
    if not {*map(type, values)} <= {str}:
        values = [str(value) for value in values]
    names = [name for each in maps for name in each]
    return pa.MapArray.from_arrays(arrow.integers(_offsets(maps), pa.int32()), _texts(names), _texts(values))


def _numbers(numbers: Sequence[int]) -> pa.Array:
    if not {*map(type, numbers)} <= {int}:
        raise TypeError("flag and priority are whole numbers")
    return arrow.integers(np.array(numbers, np.int64), pa.int64())
