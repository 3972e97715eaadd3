"""Java's string hash of a whole column at once. Pure.

The hash of a string is a sum over its code units. So each hash is the difference of two entries of one running sum over all code
units of the column. The 32-bit arithmetic wraps, as in Java.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rocketmq_spark.errors import OptionError


def hash_codes(strings: Any) -> npt.NDArray[np.int32]:
    """``String.hashCode`` of each text; ``strings`` is a pyarrow string array, a numpy array or a sequence of str."""
    if hasattr(strings, "combine_chunks"):  # true for a chunked array
        return _concatenated([hash_codes(chunk) for chunk in strings.chunks])
    if hasattr(strings, "buffers"):
        return _hash_arrow(strings)
    return _hash_texts(strings)


def _concatenated(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _hash_texts(texts: Sequence[str]) -> npt.NDArray[np.int32]:
    if any(text is None for text in texts):
        raise OptionError("cannot hash None: every row needs a key")
    items = [str(text) for text in texts]
    ends = np.cumsum(np.fromiter(map(len, items), np.int64, len(items)))
    joined_text = "".join(items)
    if joined_text.isascii():
        return _hashes(np.frombuffer(joined_text.encode("ascii"), np.uint8), np.concatenate(([0], ends)))
    code_points = np.frombuffer(joined_text.encode("utf-32-le", "surrogatepass"), np.uint32)
    units = np.frombuffer(joined_text.encode("utf-16-le", "surrogatepass"), np.uint16)
    return _hashes(units, _unit_offsets(1 + (code_points > 0xFFFF), np.concatenate(([0], ends))))


def _hash_arrow(array: Any) -> npt.NDArray[np.int32]:
    """The hashes of a ``string`` or ``large_string`` array, computed from its buffers. The array may be a slice."""
    if str(array.type) not in ("string", "large_string"):
        raise OptionError(f"cannot hash a column of {array.type}: expected string")
    if array.null_count:
        raise OptionError(f"cannot hash null: {array.null_count} of {len(array)} rows have no key")
    if not len(array):
        return np.zeros(0, np.int32)
    _, offset_buffer, data = array.buffers()
    offset_type = np.int64 if str(array.type) == "large_string" else np.int32
    offsets = np.frombuffer(offset_buffer, offset_type)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    utf8_bytes = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    offsets = offsets - offsets[0]
    if not (utf8_bytes & 0x80).any():
        return _hashes(utf8_bytes, offsets)
    # The first byte of a UTF-8 sequence counts as one UTF-16 unit, or as two if the sequence has four bytes. The other bytes of
    # the sequence are not counted.
    widths = ((utf8_bytes & 0xC0) != 0x80).astype(np.int64) + (utf8_bytes >= 0xF0)
    units = np.frombuffer(utf8_bytes.tobytes().decode("utf-8").encode("utf-16-le"), np.uint16)
    return _hashes(units, _unit_offsets(widths, offsets))


def _unit_offsets(widths: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Converts offsets that count elements to offsets that count UTF-16 units. ``widths`` has the number of UTF-16 units of each
    element.
    """
    return np.concatenate(([0], np.cumsum(widths, dtype=np.int64)))[offsets]


def _hashes(units: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Hashes of the texts ``units[offsets[i]:offsets[i + 1]]``. The first offset is 0, the last one is the number of units."""
    lengths = np.diff(offsets)
    powers = np.full(max(int(lengths.max(initial=0)), 1), 31, np.uint32)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint32)
    exponents = np.repeat(offsets[1:], lengths) - 1 - np.arange(offsets[-1])
    terms = units.astype(np.uint32) * powers[exponents]
    sums = np.concatenate((np.zeros(1, np.uint32), np.cumsum(terms, dtype=np.uint32)))
    hashes: npt.NDArray[np.int32] = (sums[offsets[1:]] - sums[offsets[:-1]]).view(np.int32)
    return hashes
