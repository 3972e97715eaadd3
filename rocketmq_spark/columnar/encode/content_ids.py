"""Message ids made of content: the same row of the same batch has the same id whenever, and in whatever order, it is sent.

An id has 28 bytes, as Java's has on hosts with IPv6: 7 of the batch, 3 of the partition, 12 of the row, then the time where
Java's tools look for it and a counter. The first 22 are compared, the last 6 make each id of an attempt unique.

A row's hash is a sum over its parts: the body, the text of its properties sorted by name, and the columns that are none. Of a
value the 32-bit words are multiplied by eight keys of 12 bits for each place, and added up: for all values of a column that is
one product of matrices. It stays below 2^53, so that it is exact; different values have the same sums once in 2^96.
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
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID, BadRows, TextPieces, add_properties, encoded_texts
from rocketmq_spark.wire.identifiers import month_of

Words = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

BATCH_BYTES, PARTITION_BYTES, ROW_BYTES = 7, 3, 12
SCOPE_BYTES = BATCH_BYTES + PARTITION_BYTES
# Of an id, as hexadecimal digits: those that are compared, and all.
COMPARED_DIGITS, ID_DIGITS = 2 * (SCOPE_BYTES + ROW_BYTES), 56
MAX_PARTITION = (1 << 8 * PARTITION_BYTES) - 1

# So many words are hashed as one; of larger values each part is one, and counts with its place.
_MAX_WORDS = 512
_MAX_BYTES = 4 * _MAX_WORDS
_SUMS, _KEY_BITS = 8, 12
# So many words at a time stay in a core's cache.
_WORDS, _ROWS = 1 << 16, 1 << 11
_LOW = 1 << 16
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)], np.uint64)
_A, _B = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_S32 = np.uint64(32)
_COLUMNS = ("body", "brokername")
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
        keys = self._material("keys", _MAX_WORDS * _SUMS) >> np.uint64(64 - _KEY_BITS)
        self._keys = keys.astype(np.float64).reshape(_MAX_WORDS, _SUMS)
        self._weights = self._material("weights", 2 * _SUMS).reshape(2, _SUMS) | np.uint64(1)
        self._places = self._material("places", _MAX_WORDS + 2)
        self._place_weights = self._material("weights of places", _MAX_WORDS + 2) | np.uint64(1)
        self._parts = self._material("parts", 2).reshape(2, 1)
        self._roles: dict[str, tuple[np.uint64, np.uint64]] = {}
        self._room = np.empty(_WORDS)
        self._sums = np.empty((_ROWS, _SUMS))
        self._crossed = np.empty((2, _ROWS, _SUMS), np.uint64)

    def __call__(
        self, batch: pa.RecordBatch, columns: Mapping[str, str], topic: str | None, texts: pa.Array | None = None
    ) -> Bytes:
        """Of every row of ``batch``, whose columns are named by ``columns`` as for the encoder.

        ``texts`` are the properties of the rows as ``encoded_texts`` makes them, which it does where they are not given. With a
        column of row ids that is the content, beside the topic.
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
        if texts is None:
            pieces = TextPieces(len(batch))
            add_properties(pieces, batch, columns, BadRows(), by_name=True)
            texts = encoded_texts(pieces)
        if texts is not None:
            total.add(self._texts("properties", texts))
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
        lanes = Lanes(_mix(values, self._places[0]), _mix(values, self._places[1]))
        return _of_role(lanes, self._seeds(role), values != 0)

    def _lanes(self, values: pa.Array) -> tuple[Lanes, Ints]:
        """Of every value, and their lengths; a null one is empty."""
        if values.null_count:
            values = pc.fill_null(values, b"")
        content, ends = arrow.content(values)
        starts, lengths = ends[:-1].astype(np.int64), np.diff(ends).astype(np.int64)
        data = np.frombuffer(content, np.uint8)
        if len(data) < 8:
            data = np.concatenate([data, np.zeros(8, np.uint8)])
        if not len(lengths) or int(lengths.max()) <= _MAX_BYTES:
            return self._of_parts(data, starts, lengths), lengths
        parts = np.maximum(1, -(-lengths // _MAX_BYTES))
        bounds = np.append(0, np.cumsum(parts))
        place = np.arange(bounds[-1]) - np.repeat(bounds[:-1], parts)
        skipped = place * _MAX_BYTES
        lanes = self._of_parts(
            data, np.repeat(starts, parts) + skipped, np.minimum(np.repeat(lengths, parts) - skipped, _MAX_BYTES)
        )
        numbers = place.astype(np.uint64)
        weights = _mix(numbers, self._parts) * (numbers > 0) | np.uint64(1)  # 1 for the first one, and for the only one
        return Lanes(
            *(np.add.reduceat(lane * each, bounds[:-1]) for lane, each in zip(lanes, weights, strict=True))
        ), lengths

    def _of_parts(self, data: Bytes, starts: Ints, lengths: Ints) -> Lanes:
        """Of values that are not too large: their whole words, their last eight bytes where some are in none of those (of a
        shorter one all bytes and zeros), and their length.
        """
        if not len(lengths):
            return _nothing(0)
        lanes = _nothing(len(lengths))
        self._add_words(data, starts, lengths, lanes)
        self._add_rest(data, starts, lengths, lanes)
        return lanes

    def _add_words(self, data: Bytes, starts: Ints, lengths: Ints, lanes: Lanes) -> None:
        """The whole words: as matrices of values that have about as many."""
        least, most = int(lengths.min()), int(lengths.max())
        if least == most:  # they lie one behind the other
            count = most >> 2
            for rows in _slices(len(starts) if count else 0, _ROWS):
                for part in _slices(rows.stop - rows.start, max(1, _WORDS // count)):
                    at = int(starts[rows.start + part.start])
                    words = np.ndarray((part.stop - part.start, count), "<u4", data, at, (most, 4))
                    self._sum(words, None, part)
                self._cross(rows, rows.stop - rows.start, lanes)
            return
        counts = (lengths >> 2).astype(np.int16)
        order = np.argsort(counts, kind="stable")
        order = order[int(np.searchsorted(counts[order], 1)) :]
        padded = np.concatenate([data[max(0, len(data) - _MAX_BYTES) :], np.zeros(_MAX_BYTES, np.uint8)])
        for group in _slices(len(order), _ROWS):
            mine = order[group]
            widths = counts[mine]
            for part in _portions(widths):
                words = _gathered(data, padded, starts[mine[part]], int(widths[part.stop - 1]))
                self._sum(words, widths[part], part)
            self._cross(mine, len(mine), lanes)

    def _sum(self, words: npt.NDArray[np.uint32], counts: npt.NDArray[np.int16] | None, part: slice) -> None:
        """The sums of values whose words are a row of ``words`` each, as many as ``counts``, which grow, or all."""
        width = words.shape[1]
        exact = self._room[: words.size].reshape(words.shape)
        exact[:] = words
        if counts is not None and (least := int(counts[0])) < width:
            exact[:, least:] *= np.arange(least, width) < counts[:, None]
        np.matmul(exact, self._keys[:width], out=self._sums[part])

    def _cross(self, rows: Any, count: int, lanes: Lanes) -> None:
        """The first ``count`` sums into the lanes of ``rows``."""
        crossed, spare = self._crossed[:, :count]
        crossed[:] = self._sums[:count]
        np.multiply(crossed, _A, out=crossed)
        np.right_shift(crossed, _S32, out=spare)
        np.bitwise_xor(crossed, spare, out=crossed)
        for lane, weights in zip(lanes, self._weights, strict=True):
            lane[rows] += np.einsum("ij,j->i", crossed, weights)

    def _add_rest(self, data: Bytes, starts: Ints, lengths: Ints, lanes: Lanes) -> None:
        """The last bytes, and the length."""
        at = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        torn = np.flatnonzero(lengths & 3)
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
            self._add_one(tails, mine >> 2, lanes, rows)
        same = int(lengths[0]) if int(lengths.min()) == int(lengths.max()) else None
        words = lengths.astype(np.uint64) if same is None else np.array([same], np.uint64)
        self._add_one(words, np.full(1, -1), lanes, slice(None))

    def _add_one(self, words: Words, places: Ints, lanes: Lanes, rows: Any) -> None:
        """One word of each of ``rows``, or one for all, with the keys of ``places``."""
        if len(places) > 1 and int(places.min()) == int(places.max()):
            places = places[:1]
        mixed = _mix(words, self._places[places])
        lanes.first[rows] += mixed
        lanes.second[rows] += mixed * self._place_weights[places]


def _gathered(data: Bytes, padded: Bytes, starts: Ints, count: int) -> npt.NDArray[np.uint32]:
    """So many words from each of ``starts`` on; behind the end of ``data``, which is that of ``padded`` too, they are 0."""
    size = 4 * count
    words = np.empty((len(starts), count), "<u4")
    whole = starts + size <= len(data)
    offset = len(padded) - _MAX_BYTES - len(data)
    for source, rows, at in ((data, whole, starts), (padded, ~whole, starts + offset)):
        if rows.all():
            words[:] = _windows(source, size)[at].view("<u4").reshape(-1, count)
        elif rows.any():
            words[rows] = _windows(source, size)[at[rows]].view("<u4").reshape(-1, count)
    return words


def _windows(data: Bytes, size: int) -> npt.NDArray[np.void]:
    """The ``size`` bytes from each place on."""
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(count, begin + size)) for begin in range(0, count, size))


def _portions(counts: npt.NDArray[np.int16]) -> Iterator[slice]:
    """Rows whose words, as a matrix, stay in a core's cache; ``counts`` grow."""
    begin = 0
    while begin < len(counts):
        sizes = counts[begin:].astype(np.int64) * np.arange(1, len(counts) - begin + 1)
        end = begin + int(np.searchsorted(sizes, _WORDS, side="right"))
        yield slice(begin, end)
        begin = end


def _nothing(rows: int) -> Lanes:
    return Lanes(np.zeros(rows, np.uint64), np.zeros(rows, np.uint64))


def _mix(words: Words, key: Words | np.uint64) -> Words:
    """Each word with a key, or the key of its place."""
    mixed = words ^ key
    np.multiply(mixed, _A, out=mixed)
    mixed ^= mixed >> _S32
    np.multiply(mixed, _B, out=mixed)
    return mixed ^ mixed >> _S32


def _of_role(lanes: Lanes, seeds: tuple[np.uint64, np.uint64], there: npt.NDArray[np.bool_]) -> Lanes:
    """Values as values of one column; nothing where none is ``there``."""
    crossed = lanes.first + (lanes.second << _S32 | lanes.second >> _S32)
    mixed = Lanes(_mix(crossed, seeds[0]), _mix(lanes.second ^ lanes.first, seeds[1]))
    if there.all():
        return mixed
    return Lanes(np.where(there, mixed.first, np.uint64(0)), np.where(there, mixed.second, np.uint64(0)))


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
