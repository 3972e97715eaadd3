"""Message ids made of content: the same row of the same batch has the same id whenever, and in whatever order, it is sent.

An id has 28 bytes, as Java's has on hosts with IPv6: 7 of the batch, 3 of the partition, 12 of the row, then the time where
Java's tools look for it and a counter. The first 22 are compared, the last 6 make each id of an attempt unique.

A row's hash is a sum over its columns, and that of a map a sum over its entries: the order of neither counts, and nothing is
sorted. Words of eight bytes are mixed with the key of their place, so that a column is hashed word by word for all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints
from rocketmq_spark.columnar.encode.batch import HEX
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID, keys_of
from rocketmq_spark.wire.identifiers import month_of

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

BATCH_BYTES, PARTITION_BYTES, ROW_BYTES = 7, 3, 12
SCOPE_BYTES = BATCH_BYTES + PARTITION_BYTES
# Of an id, as hexadecimal digits: those that are compared, and all.
COMPARED_DIGITS, ID_DIGITS = 2 * (SCOPE_BYTES + ROW_BYTES), 56
MAX_PARTITION = (1 << 8 * PARTITION_BYTES) - 1

_MAX_WORDS = 256
# Larger values are few, and hashed one by one.
_MAX_BYTES = 8 * _MAX_WORDS
# So many words at a time stay in a core's cache.
_WORDS = 1 << 15
_LOW = 1 << 16
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)], np.uint64)
_A, _B = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S32 = np.uint64(32)
_COLUMNS = ("body", "tags", "shardingkey", "brokername")
_NUMBERS = ("flag", "queueid")


class BatchName(NamedTuple):
    """What makes a batch of a query another one: ``offsets`` are the bytes of Spark's entry of it, or a hash of them."""

    query: str
    epoch: int
    number: int
    offsets: bytes
    write: str

    def digest(self) -> bytes:
        """The bytes that all ids of the batch begin with."""
        made = hashlib.blake2b(digest_size=BATCH_BYTES)
        for part in (self.query.encode(), b"%d %d" % (self.epoch, self.number), self.offsets, self.write.encode()):
            made.update(len(part).to_bytes(8, "big") + part)
        return made.digest()

    def scope(self, partition: int) -> bytes:
        """The bytes that the ids of one task begin with."""
        if partition > MAX_PARTITION:
            raise ValueError(f"partition {partition} is more than {MAX_PARTITION}")
        return self.digest() + partition.to_bytes(PARTITION_BYTES, "big")


class Lanes(NamedTuple):
    """Two hashes of each value or row."""

    first: Words
    second: Words

    def add(self, other: Lanes) -> None:
        np.add(self.first, other.first, out=self.first)
        np.add(self.second, other.second, out=self.second)


class RowHash:
    """Hashes of rows with one key: 12 bytes each, the same for equal content only."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(key, digest_size=32).digest()
        self._words = self._material("words", _MAX_WORDS + 2)
        self._weights = self._material("weights", _MAX_WORDS + 2) | np.uint64(1)
        self._roles: dict[str, tuple[np.uint64, np.uint64]] = {}

    def __call__(self, batch: pa.RecordBatch, columns: Mapping[str, str], topic: str | None) -> Bytes:
        """Of every row of ``batch``, whose columns are named by ``columns`` as for the encoder.

        With a column of row ids that is the content, beside the topic.
        """
        total = _nothing(len(batch))

        def of(role: str) -> Any:
            return batch.column(columns[role])

        if topic is not None:
            total.add(self._texts("topic", pa.array([topic.encode()])))
        else:
            total.add(self._texts("topic", arrow.as_bytes(of("topic"))))
        if MESSAGE_ID in columns:
            total.add(self._texts(MESSAGE_ID, _as_text(of(MESSAGE_ID))))
            return _rows(total)
        for role in _COLUMNS:
            if role in columns:
                total.add(self._texts(role, arrow.as_bytes(of(role))))
        if "keys" in columns:
            total.add(self._texts("keys", keys_of(of("keys"))))
        if "properties" in columns:
            total.add(self._map("properties", of("properties")))
        for role in _NUMBERS:
            if role in columns:
                total.add(self._numbers(role, of(role)))
        return _rows(total)

    def _material(self, label: str, count: int) -> Words:
        made = [hashlib.blake2b(f"{label} {i}".encode(), key=self._key).digest() for i in range(-(-count // 8))]
        return np.frombuffer(b"".join(made), np.uint64)[:count]

    def _seeds(self, role: str) -> tuple[np.uint64, np.uint64]:
        known = self._roles.get(role)
        if known is None:
            first, second = self._material(f"role {role}", 2)
            known = self._roles[role] = first, second
        return known

    def _texts(self, role: str, values: pa.Array) -> Lanes:
        """Nothing for an empty value and for none: they are stored alike."""
        lanes, lengths = self._lanes(values)
        return _of_role(lanes, self._seeds(role), lengths > 0)

    def _numbers(self, role: str, column: Any) -> Lanes:
        values = pc.fill_null(arrow.plain(column).cast(pa.int64()), 0).to_numpy().astype(np.uint64)
        lanes = Lanes(_mix(values, self._words[0]), _mix(values, self._words[1]))
        return _of_role(lanes, self._seeds(role), values != 0)

    def _map(self, role: str, column: Any) -> Lanes:
        column = arrow.plain(column)
        if column.null_count:  # a null map may own entries that are not visible
            column = pc.if_else(column.is_valid(), column, pa.scalar([], column.type))
        ends = arrow.offsets(column).astype(np.int64)
        low, high = int(ends[0]), int(ends[-1])
        names, values = arrow.as_bytes(column.keys[low:high]), arrow.as_bytes(column.items[low:high])
        entries = self._texts(f"{role} name", names)
        of_value, _ = self._lanes(values)
        kept = np.ones(len(names), bool) if not values.null_count else ~arrow.flags(values.is_null())
        entries.add(of_value)
        entries = _of_role(entries, self._seeds(f"{role} entry"), kept)
        return Lanes(*(_sums(lane, ends - low) for lane in entries))

    def _lanes(self, values: pa.Array) -> tuple[Lanes, Ints]:
        """Of every value, and their lengths; a null one is empty.

        A value is its whole words, each with the key of its place, its last eight bytes where some are in none of those (of a
        shorter one all bytes and zeros), and its length.
        """
        if values.null_count:
            values = pc.fill_null(values, b"")
        content, ends = arrow.content(values)
        starts, lengths = ends[:-1].astype(np.int64), np.diff(ends).astype(np.int64)
        data = np.frombuffer(content, np.uint8)
        if len(data) < 8:
            data = np.concatenate([data, np.zeros(8, np.uint8)])
        large = np.flatnonzero(lengths > _MAX_BYTES)
        small = lengths
        if len(large):
            small = lengths.copy()
            small[large] = 0
        lanes = _nothing(len(values))
        if len(small):
            self._add_words(data, starts, small, lanes)
            self._add_rest(data, starts, small, lanes)
        for row in large.tolist():
            digest = hashlib.blake2b(content[ends[row] : ends[row + 1]], key=self._key, digest_size=16).digest()
            lanes.first[row], lanes.second[row] = np.frombuffer(digest, np.uint64)
        return lanes, lengths

    def _add_words(self, data: Bytes, starts: Ints, lengths: Ints, lanes: Lanes) -> None:
        """The whole words: as matrices of values that have about as many."""
        least, most = int(lengths.min()), int(lengths.max())
        room = np.empty((2, _WORDS), np.uint64)
        if least == most:  # they lie one behind the other
            count = most >> 3
            for part in _portions(np.full(len(starts), count)):
                words = np.ndarray((part.stop - part.start, count), "<u8", data, int(starts[part.start]), (most, 8))
                self._add_matrix(words, None, lanes, part, room)
            return
        counts = (lengths >> 3).astype(np.int16)
        order = np.argsort(counts, kind="stable")
        counts = counts[order]
        padded = np.concatenate([data[max(0, len(data) - _MAX_BYTES) :], np.zeros(_MAX_BYTES, np.uint8)])
        for part in _portions(counts):
            rows = order[part]
            words = _gathered(data, padded, starts[rows], int(counts[part.stop - 1]))
            self._add_matrix(words, counts[part], lanes, rows, room)

    def _add_matrix(
        self, words: Words, counts: npt.NDArray[np.int16] | None, lanes: Lanes, rows: Any, room: Words
    ) -> None:
        """The words of ``rows``, in one row of ``words`` each, as many as ``counts``, which grow, or all."""
        width = words.shape[1]
        mixed, spare = (part[: words.size].reshape(words.shape) for part in room)
        _mixed(words, self._words[:width], mixed, spare)
        if counts is not None and (least := int(counts[0])) < width:
            mixed[:, least:] *= np.arange(least, width) < counts[:, None]
        lanes.first[rows] += np.einsum("ij->i", mixed)  # which takes half the time of sum(axis=1)
        lanes.second[rows] += np.einsum("ij,j->i", mixed, self._weights[:width])

    def _add_rest(self, data: Bytes, starts: Ints, lengths: Ints, lanes: Lanes) -> None:
        """The last bytes, and the length."""
        at = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        torn = np.flatnonzero(lengths & 7)
        if len(torn):
            few = len(torn) < len(lengths)
            mine, rows = (lengths[torn], torn) if few else (lengths, slice(None))
            places = starts[rows] + mine - 8
            short = np.flatnonzero(mine < 8)
            readable = np.maximum(places, 0) if len(short) else places
            tails = at[readable]
            if len(short):
                begin, length = (starts[rows])[short], mine[short]
                readable = np.minimum(begin, len(data) - 8)
                tails[short] = (at[readable] >> (8 * (begin - readable)).astype(np.uint64)) & _MASKS[length]
            self._add_one(tails, mine >> 3, lanes, rows)
        same = int(lengths[0]) if int(lengths.min()) == int(lengths.max()) else None
        words = lengths.astype(np.uint64) if same is None else np.array([same], np.uint64)
        self._add_one(words, np.full(1, -1), lanes, slice(None))

    def _add_one(self, words: Words, places: Ints, lanes: Lanes, rows: Any) -> None:
        """One word of each of ``rows``, or one for all, with the keys of ``places``."""
        if len(places) > 1 and int(places.min()) == int(places.max()):
            places = places[:1]
        mixed = _mixed(words, self._words[places], np.empty_like(words), np.empty_like(words))
        lanes.first[rows] += mixed
        lanes.second[rows] += mixed * self._weights[places]


def _gathered(data: Bytes, padded: Bytes, starts: Ints, count: int) -> Words:
    """So many words from each of ``starts`` on; behind the end of ``data``, which is that of ``padded`` too, they are 0."""
    size = 8 * count
    words = np.empty((len(starts), count), "<u8")
    whole = starts + size <= len(data)
    offset = len(padded) - _MAX_BYTES - len(data)
    for source, rows, at in ((data, whole, starts), (padded, ~whole, starts + offset)):
        if rows.all():
            words[:] = _windows(source, size)[at].view("<u8").reshape(-1, count)
        elif rows.any():
            words[rows] = _windows(source, size)[at[rows]].view("<u8").reshape(-1, count)
    return words


def _windows(data: Bytes, size: int) -> npt.NDArray[np.void]:
    """The ``size`` bytes from each place on."""
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))


def _portions(counts: npt.NDArray[np.integer[Any]]) -> Iterator[slice]:
    """Rows whose words, as a matrix, stay in a core's cache; ``counts`` grow, and who has no words is left out."""
    begin = int(np.searchsorted(counts, 1))
    while begin < len(counts):
        widths = counts[begin : begin + _WORDS // int(counts[begin])].astype(np.int64)
        sizes = widths * np.arange(1, len(widths) + 1)
        end = begin + int(np.searchsorted(sizes, _WORDS, side="right"))
        yield slice(begin, end)
        begin = end


def _nothing(rows: int) -> Lanes:
    return Lanes(np.zeros(rows, np.uint64), np.zeros(rows, np.uint64))


def _mixed(words: Words, keys: Words | np.uint64, target: Words, spare: Words) -> Words:
    """Each word with the key of its place: ``target``, whose lower bits depend on fewer bits until it is mixed once more."""
    np.bitwise_xor(words, keys, out=target)
    np.multiply(target, _A, out=target)
    np.right_shift(target, _S32, out=spare)
    np.bitwise_xor(target, spare, out=target)
    np.multiply(target, _B, out=target)
    return target


def _mix(words: Words, key: np.uint64) -> Words:
    mixed = _mixed(words, key, np.empty_like(words), np.empty_like(words))
    return mixed ^ mixed >> _S32


def _of_role(lanes: Lanes, seeds: tuple[np.uint64, np.uint64], there: npt.NDArray[np.bool_]) -> Lanes:
    """Values as values of one column; nothing where none is ``there``."""
    crossed = lanes.first + (lanes.second << _S32 | lanes.second >> _S32)
    mixed = Lanes(_mix(crossed, seeds[0]), _mix(lanes.second ^ lanes.first, seeds[1]))
    if there.all():
        return mixed
    return Lanes(np.where(there, mixed.first, np.uint64(0)), np.where(there, mixed.second, np.uint64(0)))


def _sums(lane: Words, ends: Ints) -> Words:
    whole = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lane, dtype=np.uint64)])
    sums: Words = whole[ends[1:]] - whole[ends[:-1]]
    return sums


def _rows(total: Lanes) -> Bytes:
    made = np.empty((len(total.first), 16), np.uint8)
    made[:, :8] = _mix(total.first, _A).view(np.uint8).reshape(-1, 8)
    made[:, 8:] = _mix(total.second, _B).view(np.uint8).reshape(-1, 8)
    return made[:, :ROW_BYTES].copy()


def _as_text(column: Any) -> pa.Array:
    plain = arrow.plain(column)
    return arrow.as_bytes(plain if pa.types.is_string(plain.type) else plain.cast(pa.string()))


class ContentIds:
    """Message ids of one attempt of a task, whose ids begin with ``scope``."""

    width = ID_DIGITS

    def __init__(self, scope: bytes, now_ms: Callable[[], int]) -> None:
        if len(scope) != SCOPE_BYTES:
            raise ValueError(f"the scope of ids has {SCOPE_BYTES} bytes")
        self._scope = np.frombuffer(scope.hex().upper().encode(), np.uint8)
        self._now_ms = now_ms
        self._month = (0, 0)
        self._time = self._count = 0

    def fill(self, target: Bytes, hashes: Bytes) -> None:
        """Write the id of each row hash into the row of ``target``, which is 56 bytes wide."""
        target[:, :20] = self._scope
        words = np.ascontiguousarray(hashes).view(">u2").astype(np.uint16)
        target[:, 20:44] = HEX[words].view(np.uint8).reshape(len(target), 24)
        self._tick()
        done = 0
        while done < len(target):  # as long as the counter does not overflow, only four characters differ
            count = min(len(target) - done, _LOW - self._count)
            rows = target[done : done + count]
            rows[:, 44:52] = np.frombuffer(f"{self._time & 0xFFFFFFFF:08X}".encode(), np.uint8)
            rows[:, 52:] = HEX[self._count : self._count + count].view(np.uint8).reshape(count, 4)
            done += count
            self._time, self._count = self._time + (self._count + count) // _LOW, (self._count + count) % _LOW

    def _tick(self) -> None:
        """Go on with the counter, or begin a new moment; the last one may lie ahead of the clock."""
        now_ms = self._now_ms()
        turned = not self._month[0] <= now_ms < self._month[1]
        if turned:
            self._month = month_of(now_ms)
        moment = now_ms - self._month[0]
        if turned or moment > self._time:
            self._time, self._count = moment, 0


class StoredRows:
    """Which rows of one task are stored already, and how often."""

    def __init__(self, hashes: Bytes) -> None:
        """``hashes`` are 12 bytes wide, one for every stored message, in any order."""
        flat = np.ascontiguousarray(hashes).reshape(-1, ROW_BYTES).view(f"S{ROW_BYTES}").reshape(-1)
        self._known, counts = np.unique(flat, return_counts=True)
        self._left = counts.astype(np.int64)
        self.exceeded = False  # whether there were more equal rows than stored messages of them

    @property
    def left(self) -> int:
        """Stored messages that no row has matched."""
        return int(self._left.sum())

    def missing(self, hashes: Bytes) -> npt.NDArray[np.bool_]:
        """Which rows are not stored. Each stored message stands for one row: of equal rows the first ones."""
        rows = np.ascontiguousarray(hashes).view(f"S{ROW_BYTES}").reshape(-1)
        missing = np.ones(len(rows), bool)
        if not len(self._known):
            return missing
        places = np.minimum(np.searchsorted(self._known, rows), len(self._known) - 1)
        found = np.flatnonzero(self._known[places] == rows)
        order = found[np.argsort(places[found], kind="stable")]
        of_row = places[order]
        firsts = np.searchsorted(of_row, of_row, side="left")
        taken = np.arange(len(of_row)) - firsts < self._left[of_row]
        missing[order[taken]] = False
        self.exceeded = self.exceeded or not bool(taken.all())
        np.subtract.at(self._left, of_row[taken], 1)
        return missing
