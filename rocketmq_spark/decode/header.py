"""Columns from the fixed fields of stored messages: numbers, times, hosts and the id made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark import codes
from rocketmq_spark.columnar import slices
from rocketmq_spark.decode.schema import EARLIEST_MS, LATEST_MS
from rocketmq_spark.decode.stored_messages import StoredMessages
from rocketmq_spark.wire.identifiers import host_text

_HOST_FLAGS = {"bornHost": codes.SysFlag.BORNHOST_V6, "storeHost": codes.SysFlag.STOREHOST_V6}


def number(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    return slices.integers(messages.part(field).astype(kind.to_pandas_dtype()), kind)


def moment(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    """Milliseconds as microseconds, within the calendar."""
    return slices.integers(np.clip(messages.part(field).astype(np.int64), EARLIEST_MS, LATEST_MS) * 1000, kind)


def flags(messages: StoredMessages) -> npt.NDArray[np.int32]:
    """Bodies come out decompressed, so the flag does not say otherwise; an empty one is left alone. As in Java."""
    packed = codes.SysFlag.COMPRESSED * (messages.body_end > messages.body_start)
    return messages.sys_flags & ~packed.astype(np.int32)


def hosts(messages: StoredMessages, field: str) -> pa.Array:
    """``address:port`` texts, made once per host."""
    different, which = np.unique(np.frombuffer(messages.part(field).tobytes(), ">u8"), return_inverse=True)
    texts = [_text(host.tobytes()) for host in different.reshape(-1, 1)]
    column = pa.array(texts, pa.string()).take(pa.array(which))
    long = np.flatnonzero((messages.sys_flags & _HOST_FLAGS[field]) != 0)
    if not len(long):
        return column
    values = column.to_pylist()
    for row in long.tolist():
        values[row] = _text(_long_host(messages, row, field == "storeHost"))
    return pa.array(values, pa.string())


def _text(host: bytes) -> str:
    return host_text(host[:-4], int.from_bytes(host[-4:], "big", signed=True))


def _long_host(messages: StoredMessages, row: int, stored: bool) -> bytes:
    """Sixteen bytes of address and four of port."""
    at = int(messages.starts[row]) + 48
    if stored:
        at += 16 + (12 if messages.sys_flags[row] & codes.SysFlag.BORNHOST_V6 else 0)
    return messages.buffer[at : at + 20].tobytes()


def offset_message_ids(messages: StoredMessages) -> pa.Array:
    """Hex of store host and commit log offset: 32 characters, 56 where the store host is IPv6."""
    host = messages.part("storeHost")
    rows = np.empty((len(messages), 16), np.uint8)
    rows[:, :8] = _as_bytes(host)
    rows[:, 8:] = _as_bytes(messages.part("commitLogOffset"))
    short = slices.hexadecimal(rows)
    long = np.flatnonzero((messages.sys_flags & codes.SysFlag.STOREHOST_V6) != 0)
    if not len(long):
        return short
    values = short.to_pylist()
    for row in long.tolist():
        offset = messages.part("commitLogOffset")[row : row + 1].tobytes()
        values[row] = (_long_host(messages, row, stored=True) + offset).hex().upper()
    return pa.array(values, pa.string())


def _as_bytes(field: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(field.tobytes(), np.uint8).reshape(-1, 8)
