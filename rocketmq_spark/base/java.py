"""Java's string hash, string order and ``hashCode``: queues, tags and consistent hashing depend on them.

The arithmetic is Java's: 32-bit, wrapping, over UTF-16 code units. A queue chosen by hash must be the one that a Java
producer chooses for the same key. ``columnar/java_hashes`` hashes whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable

from rocketmq_spark.errors import OptionError


def string_hash(text: str) -> int:
    """``String.hashCode``: the sum of s[i] * 31^(n-1-i) over UTF-16 code units, as a signed 32-bit number."""
    if text.isascii():
        units: bytes | memoryview = text.encode("ascii")
    else:
        units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    hash_code = 0
    for unit in units:
        hash_code = (31 * hash_code + unit) & 0xFFFFFFFF
    return signed_int(hash_code)


def string_sort_key(text: str) -> bytes:
    """A sort key that orders texts as ``String.compareTo`` does. Python's own order differs for characters beyond U+FFFF."""
    return text.encode("utf-16-be", "surrogatepass")


def sorted_texts(texts: Iterable[str]) -> list[str]:
    """Sort as ``String.compareTo`` does; for ASCII this is Python's order."""
    texts = list(texts)
    return sorted(texts, key=None if all(map(str.isascii, texts)) else string_sort_key)


def signed_int(bits: int) -> int:
    """32 bits as Java's ``int``."""
    return bits - (1 << 32) if bits >> 31 else bits


_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1
_LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1


class Long(int):
    """A whole number that is a ``Long`` in Java: the hash of a negative ``Long`` differs from the hash of the equal
    ``Integer``.
    """


def java_hash(value: object) -> int:
    """Return Java's ``value.hashCode()`` of a str, bool or int. An int of at most 32 bits is an ``Integer`` in Java, unless it is
    a ``Long``.
    """
    if isinstance(value, str):
        return string_hash(value)
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, int):
        if not isinstance(value, Long) and _INT_MIN <= value <= _INT_MAX:
            return int(value)
        if _LONG_MIN <= value <= LONG_MAX:
            return signed_int((value ^ ((value & 0xFFFFFFFFFFFFFFFF) >> 32)) & 0xFFFFFFFF)
        raise OptionError(f"cannot hash {value}: expected a whole number of at most 64 bits")
    description = "None" if value is None else f"a {type(value).__name__}"
    raise OptionError(f"cannot hash {description}: expected a str, int or bool, whose Java hash is the same everywhere")
