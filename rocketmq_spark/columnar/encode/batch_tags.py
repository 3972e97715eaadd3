"""The tag and keys of a batch of a batch topic. Pure.

A broker stores such a batch as one message: it compares the batch's tag with filters and indexes the batch's keys. So a batch
has a tag only if all of its messages have this tag. The keys of a batch are the different keys of all its messages. If the
keys are too many or too long, the batch has no keys.
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
    """Which rows of a batch have no key. ``columns`` are those of the encoder. Brokers treat a key of whitespace as no key."""
    if "keys" not in columns:
        return np.ones(len(batch), bool)
    has_key = arrow.non_empty_mask(
        arrow.as_bytes(pc.utf8_trim_whitespace(_java_texts(keys_of(batch.column(columns["keys"])))))
    )
    return np.zeros(len(batch), bool) if has_key is None else ~has_key


def _java_texts(texts: pa.Array) -> pa.Array:
    """Texts as Java reads them. Some may not be UTF-8, because Spark does not check ``cast(binary as string)``."""
    return arrow.to_strings(
        arrow.as_bytes(texts), arrow.valid_mask(texts) if texts.null_count else None, ascii_only=False
    )


# A batch with more different keys is stored without keys. Each key would cost a broker as much as the key of a single message,
# but a search for this key would find only the whole batch.
MAX_BATCH_KEYS = 64
_SEPARATOR = codes.KEY_SEPARATOR.encode()


class BatchTagKeys:
    """Tags and keys of the rows of an Arrow batch. ``columns`` are those of the encoder; ``max_bytes`` limits the bytes of tag
    and keys together.
    """

    def __init__(self, batch: pa.RecordBatch, columns: Mapping[str, str], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._keys = _BatchKeys(keys_of(batch.column(columns["keys"]))) if "keys" in columns else None
        self._distinct_tags: list[str] = []
        self._tag_codes: npt.NDArray[np.int32] | None = None
        if "tags" in columns:
            self._encode(arrow.one_array(batch.column(columns["tags"])))

    @property
    def tag_count(self) -> int:
        """The number of different tags."""
        return len(self._distinct_tags)

    def rows_by_tag(self, rows: Rows) -> list[Rows]:
        """The rows of each tag, in their order. Rows without a tag are one group."""
        if self._tag_codes is None:
            return [rows]
        row_codes = self._tag_codes[rows]
        narrow_codes = (
            row_codes.astype(np.int16) if len(self._distinct_tags) < 1 << 15 else row_codes
        )  # sorted by digits, which is quick
        order = np.argsort(narrow_codes, kind="stable")
        ends = np.flatnonzero(np.diff(row_codes[order])) + 1
        return np.split(rows[order], ends)

    def properties(self, rows: Rows) -> dict[str, str] | None:
        """The properties of a batch of these rows. None if the tag is too long: such rows must not be stored as a batch."""
        tag = self._tag(rows)
        max_key_bytes = self._max_bytes - len(tag.encode())
        if max_key_bytes < 0:
            return None
        tag_property = {codes.Property.TAGS: tag} if tag else {}
        words = self._keys.words(rows, max_key_bytes) if self._keys is not None else ""
        return {**tag_property, codes.Property.KEYS: words} if words else tag_property

    def _encode(self, tags: Any) -> None:
        encoded_tags = pc.dictionary_encode(tags)
        distinct_tags = _java_texts(encoded_tags.dictionary).to_pylist()
        self._tag_codes = pc.fill_null(encoded_tags.indices, -1).to_numpy().astype(np.int32)
        if "" in distinct_tags:  # an empty tag means no tag
            empty_code = distinct_tags.index("")
            self._tag_codes[self._tag_codes == empty_code] = -1
            self._tag_codes[self._tag_codes > empty_code] -= 1
            del distinct_tags[empty_code]
        self._distinct_tags = distinct_tags

    def _tag(self, rows: Rows) -> str:
        if self._tag_codes is None or not len(rows):
            return ""
        row_codes = self._tag_codes[rows]
        return (
            self._distinct_tags[row_codes[0]] if row_codes[0] >= 0 and bool((row_codes == row_codes[0]).all()) else ""
        )


class _BatchKeys:
    """The keys of the rows of an Arrow batch, with each different text once."""

    def __init__(self, keys: pa.Array) -> None:
        encoded_keys = pc.dictionary_encode(keys)
        self._distinct_keys = encoded_keys.dictionary
        is_empty = arrow.lengths(encoded_keys.dictionary) == 0
        self._key_codes = pc.fill_null(encoded_keys.indices, -1).to_numpy().astype(np.int32)
        self._key_codes[np.append(is_empty, False)[self._key_codes]] = -1  # an empty text of keys means no key
        self._are_single_words = not len(arrow.rows_with(encoded_keys.dictionary, _SEPARATOR))

    def words(self, rows: Rows, max_bytes: int) -> str:
        """The different words of the rows' keys, in the order of the Arrow batch; empty if there are too many."""
        row_codes = self._key_codes[rows]
        is_used = np.zeros(len(self._distinct_keys), np.bool_)
        is_used[row_codes[row_codes >= 0]] = True
        used_codes = np.flatnonzero(is_used)
        if not len(used_codes) or (self._are_single_words and len(used_codes) > MAX_BATCH_KEYS):
            return ""
        keys = self._distinct_keys.take(pa.array(used_codes))
        joined_keys = pc.binary_join(pa.ListArray.from_arrays([0, len(keys)], keys), _SEPARATOR)[0].as_py()
        text: str = joined_keys.decode("utf-8", "replace")
        if not self._are_single_words:  # several texts may contain the same word
            words = dict.fromkeys(word for word in text.split(codes.KEY_SEPARATOR) if word)
            text = codes.KEY_SEPARATOR.join(words) if len(words) <= MAX_BATCH_KEYS else ""
        return text if len(text.encode()) < max_bytes else ""
