"""Bodies in portions of limited size, for Spark's state. Portions are needed because any number of messages may be due in the
same second.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from rocketmq_spark.delay.release import identity_of, is_cancellation

# The maximum size of a portion. Only a portion with a single body may be larger.
PORTION_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


def pack(bodies: Iterable[bytes]) -> bytes:
    return b"".join(part for body in bodies for part in (_LENGTH.pack(len(body)), body))


def unpack(portion: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(portion):
        (length,) = _LENGTH.unpack_from(portion, position)
        position += _LENGTH.size
        yield bytes(portion[position : position + length])
        position += length


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


def drop_repeated_bodies(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Drop repeated envelopes, and repeated cancellations. Only the identities are kept in memory."""
    seen_identities: set[tuple[bool, bytes]] = set()
    for body in bodies:
        identity = is_cancellation(body), identity_of(body)
        if identity not in seen_identities:
            seen_identities.add(identity)
            yield body
