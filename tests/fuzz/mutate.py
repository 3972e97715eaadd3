"""Breaks well-formed inputs in the ways that wires and peers do: flips, cuts, repeats, splices, and large numbers.

One of a thousand inputs is grown to up to 256 KiB by repeating a part of it, as a hostile peer does to use up time and memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x00\x00\x01")


_GROWS, _GROWN_BYTES, _PART_BYTES = 1000, 256 << 10, 60


def mutate(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of ``samples`` with one to four faults."""
    data = bytearray(rng.choice(samples))
    if rng.randrange(_GROWS) == 0:
        at, size = rng.randrange(len(data) + 1), rng.randint(1, _PART_BYTES)
        part = data[at : at + size]
        data[at:at] = part * (rng.randint(1, _GROWN_BYTES) // max(1, len(part)))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        fault = rng.randrange(6)
        if fault == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif fault == 1:
            data[at : at + 4] = rng.choice(_NUMBERS)
        elif fault == 2:
            del data[at : at + rng.randint(1, 8)]
        elif fault == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif fault == 4:
            del data[at:]
        else:
            other = rng.choice(samples)
            data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)
