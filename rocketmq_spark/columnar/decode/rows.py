"""Located messages as columns: fixed fields (numbers, times, hosts, message ids) and properties.

``Located`` implements ``schema.MessageRows``: one method for each kind of column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.columnar.decode import stored_messages
from rocketmq_spark.columnar.decode.schema import EARLIEST_MS, LATEST_MS, PROPERTIES
from rocketmq_spark.columnar.decode.stored_messages import StoredMessages
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.identifiers import host_text

_HOST_FLAGS = {"bornHost": codes.SysFlag.BORNHOST_V6, "storeHost": codes.SysFlag.STOREHOST_V6}


def number(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    return arrow.integers(messages.part(field).astype(kind.to_pandas_dtype()), kind)


def moment(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    """Milliseconds as microseconds, within the calendar."""
    return arrow.integers(np.clip(messages.part(field).astype(np.int64), EARLIEST_MS, LATEST_MS) * 1000, kind)


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
    short = arrow.hexadecimal(rows)
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


@dataclass(frozen=True, slots=True)
class Located:
    """The messages that were fetched, with what their properties are and the queues that the pieces are of."""

    messages: StoredMessages
    made: props.Columns
    queues: Sequence[MessageQueue]

    def of_queue(self, field: str) -> pa.Array:
        """A text that depends on the queue alone, which mostly means the same in every row."""
        names = [getattr(queue, field) for queue in self.queues]
        if len(set(names)) == 1:
            return arrow.repeated(names[0], len(self.messages))
        number_of_row = stored_messages.field(self.messages.pieces, "number")[self.messages.piece_of_row]
        return pa.array(names, pa.string()).take(arrow.integers(number_of_row, pa.int64()))

    def number(self, field: str, kind: pa.DataType) -> pa.Array:
        return number(self.messages, field, kind)

    def moment(self, field: str, kind: pa.DataType) -> pa.Array:
        return moment(self.messages, field, kind)

    def host(self, field: str) -> pa.Array:
        return hosts(self.messages, field)

    def flags(self, kind: pa.DataType) -> pa.Array:
        return arrow.integers(flags(self.messages), kind)

    def tags(self) -> pa.Array:
        return self.made.tags

    def keys(self) -> pa.Array:
        return self.made.keys

    def properties(self) -> pa.Array:
        made = self.made.properties
        return made if made is not None else arrow.null_column(PROPERTIES, len(self.messages))

    def offset_message_id(self) -> pa.Array:
        return offset_message_ids(self.messages)

    def message_id(self) -> pa.Array:
        """The client's id, and where a message has none the offset message id, as Java consumers show it."""
        unique = self.made.msg_id
        assert unique is not None
        if not unique.null_count:
            return unique
        return pc.coalesce(unique, offset_message_ids(self.messages))

    def null(self, kind: pa.DataType) -> pa.Array:
        return arrow.null_column(kind, len(self.messages))
