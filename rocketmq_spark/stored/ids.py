"""Ids of the messages in some ranges, and of them those that begin as one wants: nothing else is decoded or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import BASIC, Bad
from rocketmq_spark.columnar.encode.content_ids import (
    COMPARED_DIGITS,
    ID_DIGITS,
    PARTITION_BYTES,
    ROW_BYTES,
    SCOPE_BYTES,
)
from rocketmq_spark.errors import UnprovedError
from rocketmq_spark.model import NO_FILTER, OffsetRange
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.verdict import Cause
from rocketmq_spark.stored.ends import AT_LEAST_ONCE

Bytes = npt.NDArray[np.uint8]

_ID = tuple(column for column in BASIC if column.name == "msgId")
_DIGITS = np.zeros(256, np.uint8)
for _digit, _value in zip(b"0123456789ABCDEF", range(16), strict=True):
    _DIGITS[_digit] = _value


def ids_of(open_puller: Callable[[], Puller]) -> Callable[[Sequence[OffsetRange]], Iterator[pa.Array]]:
    """A function that reads the ids of all messages of ranges, those of one broker after the other.

    It raises ``UnprovedError`` for what is gone, and ``DecodeError`` for a message that cannot be taken apart.
    """

    def read(ranges: Sequence[OffsetRange]) -> Iterator[pa.Array]:
        puller = open_puller()
        for _, group in groupby(ranges, key=lambda part: part.queue.broker_name):
            pulls = reading.read(puller, list(group), _lost)
            decoder = Decoder(pulls.queues, _ID, "none", NO_FILTER, pulls.on_holes, pulls.bounded, Bad())
            for fetched in pulls.fetch():
                for batch in decoder.batches(fetched, None):
                    yield batch.column(0)

    return read


def with_scope(ids: pa.Array, scope: bytes) -> pa.Array:
    """The ids of content that begin with ``scope``."""
    mine = pc.and_(pc.starts_with(ids, scope.hex().upper()), pc.equal(pc.binary_length(ids), ID_DIGITS))
    return ids.filter(pc.fill_null(mine, False))


def compared(ids: pa.Array, scope_bytes: int) -> Bytes:
    """What is compared of ids of content, behind the first ``scope_bytes`` bytes: a row for each."""
    data, ends = arrow.content(ids)
    digits = np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])].reshape(len(ids), ID_DIGITS)
    values = _DIGITS[digits[:, 2 * scope_bytes : COMPARED_DIGITS]]
    made: Bytes = values[:, ::2] * np.uint8(16) + values[:, 1::2]
    return made


class ScopedHashes:
    """What is compared of the ids that begin with ``scope``; no more than ``limit`` of them."""

    def __init__(self, scope: bytes, limit: int | None = None) -> None:
        self._scope = scope
        self._limit = limit
        self._parts: list[Bytes] = []
        self.count = 0

    def __call__(self, ids: pa.Array) -> None:
        mine = with_scope(ids, self._scope)
        if not len(mine):
            return
        self.count += len(mine)
        if self._limit is not None and self.count > self._limit:
            self._parts.clear()
        else:
            self._parts.append(compared(mine, len(self._scope)))

    def rows(self) -> Bytes | None:
        """All of them; None where they were too many."""
        if self._limit is not None and self.count > self._limit:
            return None
        return np.concatenate([np.empty((0, SCOPE_BYTES + ROW_BYTES - len(self._scope)), np.uint8), *self._parts])

    def by_partition(self) -> dict[int, bytes] | None:
        """Those of a whole batch, by partition; None where they were too many."""
        rows = self.rows()
        if rows is None:
            return None
        numbers = rows[:, 0].astype(np.int64) << 16 | rows[:, 1].astype(np.int64) << 8 | rows[:, 2]
        return {int(each): rows[numbers == each, PARTITION_BYTES:].tobytes() for each in np.unique(numbers).tolist()}


def _lost(part: OffsetRange, cause: Cause) -> None:
    raise UnprovedError(
        f"what is stored in {part.queue} cannot be proved: offsets {part.start} to {part.end} are gone ({cause.value})",
        topic=part.queue.topic,
        queue=str(part.queue),
        remedy=f"Give the topic back what it had, {AT_LEAST_ONCE}",
    )
