"""Message ids computed from content: a row of a batch has the same id at every attempt and in any order.

An id has 28 bytes, as Java's ids on hosts with IPv6: 7 for the batch, 3 for the partition, 12 for the row, 4 for the time (where
Java's tools expect it), and 2 for a counter. The first 22 bytes are compared. The last 6 bytes make each id of an attempt unique.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import extras
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode import buffers
from rocketmq_spark.columnar.encode.ids import HEX
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID
from rocketmq_spark.errors import OptionError
from rocketmq_spark.wire.identifiers import month_bounds

Hashes = npt.NDArray[np.uint8]

BATCH_BYTES, PARTITION_BYTES, ROW_BYTES = 7, 3, 12
SCOPE_BYTES = BATCH_BYTES + PARTITION_BYTES
# Numbers of hexadecimal digits: of the compared part of an id, and of the whole id.
COMPARED_DIGITS, ID_DIGITS = 2 * (SCOPE_BYTES + ROW_BYTES), 56
MAX_PARTITION = (1 << 8 * PARTITION_BYTES) - 1

_COUNTER_LIMIT = 1 << 16
_QUEUE_COLUMNS = ("brokername", "queueid")
# If a batch has this column, the column is part of each row's hash. Rows of other batches keep the hashes of earlier releases.
_PARTITION = "partition"


class BatchName(NamedTuple):
    """The identity of a batch of a query; ``offsets`` are the bytes of Spark's log entry, or a hash of them."""

    query: str
    epoch: int
    number: int
    offsets: bytes
    write_name: str

    def digest(self) -> bytes:
        """The bytes that all ids of the batch begin with."""
        digest = hashlib.blake2b(digest_size=BATCH_BYTES)
        for part in (self.query.encode(), b"%d %d" % (self.epoch, self.number), self.offsets, self.write_name.encode()):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def scope(self, partition: int) -> bytes:
        """The bytes that the ids of one task begin with."""
        if partition > MAX_PARTITION:
            raise ValueError(f"partition {partition} is more than {MAX_PARTITION}")
        return self.digest() + partition.to_bytes(PARTITION_BYTES, "big")


class RowHash:
    """Hashes of rows under a key: 12 bytes each, equal only for equal content, and independent of the other rows.

    The hash is the sum of two XXH3 digests of 128 bits. One is of the item that is sent, with zeros in place of its id; the
    other is of the row's destination. With a column of row ids, the two digests are of the row id and of the topic.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from xxhash import xxh3_128_digest
        except ImportError as e:
            raise OptionError(
                "option 'deliveryGuarantee' exactly-once needs xxhash, which a Spark worker does not have",
                remedy=f"On all workers: {extras.install_command(extras.ARROW)}",
            ) from e
        self._digest: Callable[[memoryview, int], bytes] = xxh3_128_digest
        self._seeds = struct.unpack("<2Q", hashlib.blake2b(key, digest_size=16).digest())

    def __call__(self, items: pa.Array, batch: pa.RecordBatch, columns: Mapping[str, str], topic: str | None) -> Hashes:
        """The hash of every row of ``batch``; ``columns`` and ``items`` are those of the encoder."""
        has_row_id = MESSAGE_ID in columns
        content_seed, destination_seed = self._seeds
        sums = self._digests(_as_text(batch.column(columns[MESSAGE_ID])) if has_row_id else items, content_seed)
        sums = sums + self._digests(
            _destinations(batch, columns, topic, () if has_row_id else _QUEUE_COLUMNS), destination_seed
        )
        return np.ascontiguousarray(sums.view(np.uint8)[:, :ROW_BYTES])

    def _digests(self, values: pa.Array, seed: int) -> npt.NDArray[np.uint64]:
        content, ends = arrow.data_and_offsets(values)
        digest = self._digest
        digests = [digest(content[start:end], seed) for start, end in itertools.pairwise(ends.tolist())]
        return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


def _destinations(
    batch: pa.RecordBatch, columns: Mapping[str, str], topic: str | None, queue_columns: Sequence[str]
) -> pa.Array:
    """The destination of each row, as far as the batch contains it: topic, queue and partition. If all rows have the same
    destination, the result is a single value.
    """
    parts: list[pa.Array | bytes] = [_text_of("topic", batch, columns) if topic is None else topic.encode()]
    for name in queue_columns:
        parts += [b"\0", _text_of(name, batch, columns) if name in columns else b""]
    has_partition = bool(queue_columns) and _PARTITION in columns
    if has_partition:
        parts += [b"\0", _text_of(_PARTITION, batch, columns)]
    if topic is not None and not has_partition and not columns.keys() & set(queue_columns):
        return pa.array([b"".join(part for part in parts if isinstance(part, bytes))], pa.binary())
    return buffers.joined(*parts)


def _text_of(name: str, batch: pa.RecordBatch, columns: Mapping[str, str]) -> pa.Array:
    return pc.fill_null(_as_text(batch.column(columns[name])), b"")


def _as_text(column: Any) -> pa.Array:
    array = arrow.one_array(column)
    return arrow.as_bytes(array if pa.types.is_string(array.type) else array.cast(pa.string()))


class ContentIds:
    """Message ids of one attempt of a task, whose ids begin with ``scope``."""

    width = ID_DIGITS

    def __init__(self, scope: bytes, now_ms: Callable[[], int]) -> None:
        if len(scope) != SCOPE_BYTES:
            raise ValueError(f"the scope of ids must have {SCOPE_BYTES} bytes")
        self._scope = np.frombuffer(scope.hex().upper().encode(), np.uint8)
        self._now_ms = now_ms
        self._month_bounds = (0, 0)
        self._month_ms = self._counter = 0

    def fill(self, target: Hashes, hashes: Hashes) -> None:
        """Write the id of each row hash into the row of ``target``, which is 56 bytes wide."""
        target[:, :20] = self._scope
        hash_words = np.ascontiguousarray(hashes).view(">u2").astype(np.uint16)
        target[:, 20:44] = HEX[hash_words].view(np.uint8).reshape(len(target), 24)
        self._advance_time()
        filled_count = 0
        # The ids of one step differ only in the last four characters, because the counter does not overflow within a step.
        while filled_count < len(target):
            count = min(len(target) - filled_count, _COUNTER_LIMIT - self._counter)
            rows = target[filled_count : filled_count + count]
            rows[:, 44:52] = np.frombuffer(f"{self._month_ms & 0xFFFFFFFF:08X}".encode(), np.uint8)
            rows[:, 52:] = HEX[self._counter : self._counter + count].view(np.uint8).reshape(count, 4)
            filled_count += count
            self._month_ms, self._counter = (
                self._month_ms + (self._counter + count) // _COUNTER_LIMIT,
                (self._counter + count) % _COUNTER_LIMIT,
            )

    def _advance_time(self) -> None:
        """Set the time of the next ids to that of the clock, and the counter to 0. If an overflow of the counter has moved the
        time ahead of the clock, time and counter stay unchanged.
        """
        now_ms = self._now_ms()
        is_other_month = not self._month_bounds[0] <= now_ms < self._month_bounds[1]
        if is_other_month:
            self._month_bounds = month_bounds(now_ms)
        month_ms = now_ms - self._month_bounds[0]
        if is_other_month or month_ms > self._month_ms:
            self._month_ms, self._counter = month_ms, 0


class StoredRows:
    """The hashes of the stored messages of one task, and how often each is stored."""

    def __init__(self, hashes: Hashes) -> None:
        """``hashes`` are 12 bytes wide, one for every stored message, in any order."""
        row_hashes = np.ascontiguousarray(hashes).reshape(-1, ROW_BYTES).view(f"S{ROW_BYTES}").reshape(-1)
        self._hashes, counts = np.unique(row_hashes, return_counts=True)
        self._unmatched_counts = counts.astype(np.int64)
        # True if there were more rows with the hash of a stored message than stored messages with this hash, so that some of
        # these rows are missing.
        self.has_surplus_rows = False

    @property
    def unmatched_count(self) -> int:
        """The number of stored messages that no row has matched."""
        return int(self._unmatched_counts.sum())

    def missing_mask(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Which rows are not stored. Each stored message matches one row. If several rows are equal, the first of them are
        matched.
        """
        rows = np.ascontiguousarray(hashes).view(f"S{ROW_BYTES}").reshape(-1)
        is_missing = np.ones(len(rows), bool)
        if not len(self._hashes):
            return is_missing
        hash_indexes = np.minimum(np.searchsorted(self._hashes, rows), len(self._hashes) - 1)
        found_rows = np.flatnonzero(self._hashes[hash_indexes] == rows)
        ordered_rows = found_rows[np.argsort(hash_indexes[found_rows], kind="stable")]
        ordered_indexes = hash_indexes[ordered_rows]
        first_positions = np.searchsorted(ordered_indexes, ordered_indexes, side="left")
        is_matched = np.arange(len(ordered_indexes)) - first_positions < self._unmatched_counts[ordered_indexes]
        is_missing[ordered_rows[is_matched]] = False
        self.has_surplus_rows = self.has_surplus_rows or not bool(is_matched.all())
        np.subtract.at(self._unmatched_counts, ordered_indexes[is_matched], 1)
        return is_missing
