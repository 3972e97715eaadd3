"""Columns from the fixed fields of stored messages: numbers, times, hosts and the id made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark import codes
from rocketmq_spark.columnar import slices
from rocketmq_spark.decode.frames import Frames
from rocketmq_spark.decode.schema import EARLIEST_MS, LATEST_MS, Column
from rocketmq_spark.wire.identifiers import host_text

# Column to field, and whether the field lies behind the born host, whose length varies.
_FIELDS = {
    "queueid": ("queueId", False),
    "queueoffset": ("queueOffset", False),
    "borntimestamp": ("bornTimestamp", False),
    "storetimestamp": ("storeTimestamp", True),
    "flag": ("flag", False),
    "reconsumetimes": ("reconsumeTimes", True),
    "commitlogoffset": ("commitLogOffset", False),
    "storesize": ("size", False),
}
_HOSTS = {"bornhost": ("bornHost", codes.SysFlag.BORNHOST_V6), "storehost": ("storeHost", codes.SysFlag.STOREHOST_V6)}


def column(found: Frames, wanted: Column) -> pa.Array:
    """The column as Arrow's type of it."""
    name = wanted.name.lower()
    if name == "offsetmsgid":
        return offset_message_ids(found)
    if name in _HOSTS:
        return _hosts(found, name)
    if name == "sysflag":
        return slices.integers(_flags(found), wanted.arrow)
    field, late = _FIELDS[name]
    values = found.store_part(field) if late else found.head[field]
    if pa.types.is_timestamp(wanted.arrow):
        return slices.integers(np.clip(values.astype(np.int64), EARLIEST_MS, LATEST_MS) * 1000, wanted.arrow)
    return slices.integers(values.astype(wanted.arrow.to_pandas_dtype()), wanted.arrow)


def _flags(found: Frames) -> npt.NDArray[np.int32]:
    """Bodies come out decompressed, so the flag does not say otherwise; an empty one is left alone. As in Java."""
    packed = codes.SysFlag.COMPRESSED * (found.body_end > found.body_start)
    return found.sys_flags & ~packed.astype(np.int32)


def _hosts(found: Frames, name: str) -> pa.Array:
    """``address:port`` texts, made once per host."""
    field, v6 = _HOSTS[name]
    raw = found.store_part(field) if name == "storehost" else found.head[field]
    hosts, which = np.unique(np.frombuffer(raw.tobytes(), ">u8"), return_inverse=True)
    texts = [_text(host.tobytes()) for host in hosts.reshape(-1, 1)]
    column = pa.array(texts, pa.string()).take(pa.array(which))
    long = np.flatnonzero((found.sys_flags & v6) != 0)
    if not len(long):
        return column
    values = column.to_pylist()
    for row in long.tolist():
        values[row] = _text(_long_host(found, row, name == "storehost"))
    return pa.array(values, pa.string())


def _text(host: bytes) -> str:
    return host_text(host[:-4], int.from_bytes(host[-4:], "big", signed=True))


def _long_host(found: Frames, row: int, stored: bool) -> bytes:
    """Sixteen bytes of address and four of port."""
    at = int(found.starts[row]) + 48
    if stored:
        at += 16 + (12 if found.sys_flags[row] & codes.SysFlag.BORNHOST_V6 else 0)
    return found.buffer[at : at + 20].tobytes()


def offset_message_ids(found: Frames) -> pa.Array:
    """Hex of store host and commit log offset: 32 characters, 56 where the store host is IPv6."""
    host = found.store_part("storeHost")
    rows = np.empty((len(found), 16), np.uint8)
    rows[:, :8] = _as_bytes(host)
    rows[:, 8:] = _as_bytes(found.head["commitLogOffset"])
    short = slices.hexadecimal(rows)
    long = np.flatnonzero((found.sys_flags & codes.SysFlag.STOREHOST_V6) != 0)
    if not len(long):
        return short
    values = short.to_pylist()
    for row in long.tolist():
        offset = found.head["commitLogOffset"][row : row + 1].tobytes()
        values[row] = (_long_host(found, row, stored=True) + offset).hex().upper()
    return pa.array(values, pa.string())


def _as_bytes(field: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(field.tobytes(), np.uint8).reshape(-1, 8)
