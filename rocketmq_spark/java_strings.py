"""Java's ``String.hashCode`` and ``String.compareTo``: queues, tags and consistent hashing depend on them.

The arithmetic is Java's: 32-bit, wrapping, over UTF-16 code units.
"""

from __future__ import annotations


def string_hash(text: str) -> int:
    """``String.hashCode``: the sum of s[i] * 31^(n-1-i) over UTF-16 code units, as a signed 32-bit number."""
    if text.isascii():
        units: bytes | memoryview = text.encode("ascii")
    else:
        units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    h = 0
    for unit in units:
        h = (31 * h + unit) & 0xFFFFFFFF
    return signed(h)


def string_order(text: str) -> bytes:
    """A sort key that orders texts as ``String.compareTo`` does; plain order differs beyond U+FFFF."""
    return text.encode("utf-16-be", "surrogatepass")


def signed(bits: int) -> int:
    """32 bits as Java's ``int``."""
    return bits - (1 << 32) if bits >> 31 else bits
