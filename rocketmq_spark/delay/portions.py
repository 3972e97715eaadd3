"""Bodies in portions of limited size, for Spark's state: any number of messages may be due in the same second."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from rocketmq_spark.delay.release import identity_of, is_cancellation

# A larger body is a portion of its own.
PORTION_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


def packed(bodies: Iterable[bytes]) -> bytes:
    return b"".join(part for body in bodies for part in (_LENGTH.pack(len(body)), body))


def unpacked(portion: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(portion):
        (length,) = _LENGTH.unpack_from(portion, at)
        at += _LENGTH.size
        yield bytes(portion[at : at + length])
        at += length


def portions(bodies: Iterable[bytes], max_bytes: int = PORTION_BYTES) -> Iterator[list[bytes]]:
    portion: list[bytes] = []
    size = 0
    for body in bodies:
        if portion and size + len(body) > max_bytes:
            yield portion
            portion, size = [], 0
        portion.append(body)
        size += len(body)
    if portion:
        yield portion


def drop_repeated(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Drop repeated envelopes, and repeated cancellations. Keeps only identities in memory."""
    seen: set[tuple[bool, bytes]] = set()
    for body in bodies:
        identity = is_cancellation(body), identity_of(body)
        if identity not in seen:
            seen.add(identity)
            yield body
