"""The tag and keys of a batch of a batch topic. Pure.

A broker stores such a batch as one message: it compares the batch's tag with filters and indexes the batch's keys. So a
batch has a tag or keys only if all of its messages share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.properties import keys_of

Rows = npt.NDArray[np.intp]


def rows_without_key(batch: pa.RecordBatch, columns: Mapping[str, str]) -> npt.NDArray[np.bool_]:
    """Which rows of a batch have no key; ``columns`` as for the encoder. Brokers treat a key of whitespace as no key."""
    if "keys" not in columns:
        return np.ones(len(batch), bool)
    filled = arrow.non_empty_mask(
        arrow.as_bytes(pc.utf8_trim_whitespace(_as_java_reads(keys_of(batch.column(columns["keys"])))))
    )
    return np.zeros(len(batch), bool) if filled is None else ~filled


def _as_java_reads(texts: pa.Array) -> pa.Array:
    """Texts that may not be UTF-8 (Spark does not check ``cast(binary as string)``), as Java reads them."""
    return arrow.to_strings(
        arrow.as_bytes(texts), arrow.valid_mask(texts) if texts.null_count else None, ascii_only=False
    )


# A batch with more different keys gets no keys: each key costs a broker as much as the key of a single message, and finds only
# the whole batch.
MAX_BATCH_KEYS = 64
_SEPARATOR = codes.KEY_SEPARATOR.encode()


class BatchTagKeys:
    """Tags and keys of the rows of an Arrow batch; ``columns`` as for the encoder, ``max_bytes`` limits tag and keys."""

    def __init__(self, batch: pa.RecordBatch, columns: Mapping[str, str], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._keys = _Keys(keys_of(batch.column(columns["keys"]))) if "keys" in columns else None
        self._names: list[str] = []
        self._codes: npt.NDArray[np.int32] | None = None
        if "tags" in columns:
            self._encode(arrow.combined(batch.column(columns["tags"])))

    @property
    def tags(self) -> int:
        """The number of different tags."""
        return len(self._names)

    def by_tag(self, rows: Rows) -> list[Rows]:
        """The rows of each tag, in their order. Rows without a tag are one group."""
        if self._codes is None:
            return [rows]
        mine = self._codes[rows]
        narrow = mine.astype(np.int16) if len(self._names) < 1 << 15 else mine  # sorted by digits, which is quick
        order = np.argsort(narrow, kind="stable")
        ends = np.flatnonzero(np.diff(mine[order])) + 1
        return np.split(rows[order], ends)

    def properties(self, rows: Rows) -> dict[str, str] | None:
        """The properties of a batch of these rows; None if the tag is too long: then the batch must not be stored as
        one message.
        """
        tag = self._tag(rows)
        room = self._max_bytes - len(tag.encode())
        if room < 0:
            return None
        said = {codes.Property.TAGS: tag} if tag else {}
        words = self._keys.words(rows, room) if self._keys is not None else ""
        return {**said, codes.Property.KEYS: words} if words else said

    def _encode(self, tags: Any) -> None:
        made = pc.dictionary_encode(tags)
        names = _as_java_reads(made.dictionary).to_pylist()
        self._codes = pc.fill_null(made.indices, -1).to_numpy().astype(np.int32)
        if "" in names:  # an empty text counts as no value
            empty = names.index("")
            self._codes[self._codes == empty] = -1
            self._codes[self._codes > empty] -= 1
            del names[empty]
        self._names = names

    def _tag(self, rows: Rows) -> str:
        if self._codes is None or not len(rows):
            return ""
        mine = self._codes[rows]
        return self._names[mine[0]] if mine[0] >= 0 and bool((mine == mine[0]).all()) else ""


class _Keys:
    """The different keys of an Arrow batch."""

    def __init__(self, keys: pa.Array) -> None:
        made = pc.dictionary_encode(keys)
        self._distinct = made.dictionary
        empty = arrow.lengths(made.dictionary) == 0
        self._codes = pc.fill_null(made.indices, -1).to_numpy().astype(np.int32)
        self._codes[np.append(empty, False)[self._codes]] = -1  # an empty text counts as no value
        self._are_single_words = not len(arrow.rows_with(made.dictionary, _SEPARATOR))

    def words(self, rows: Rows, max_bytes: int) -> str:
        """The different words of the rows' keys, in the order of the Arrow batch; empty if there are too many."""
        mine = self._codes[rows]
        there = np.zeros(len(self._distinct), np.bool_)
        there[mine[mine >= 0]] = True
        found = np.flatnonzero(there)
        if not len(found) or (self._are_single_words and len(found) > MAX_BATCH_KEYS):
            return ""
        keys = self._distinct.take(pa.array(found))
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(keys)], keys), _SEPARATOR)[0].as_py()
        text: str = joined.decode("utf-8", "replace")
        if not self._are_single_words:  # a word may stand in several keys
            words = dict.fromkeys(word for word in text.split(codes.KEY_SEPARATOR) if word)
            text = codes.KEY_SEPARATOR.join(words) if len(words) <= MAX_BATCH_KEYS else ""
        return text if len(text.encode()) < max_bytes else ""
