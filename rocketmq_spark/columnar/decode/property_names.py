"""The names of system properties, recognised for many messages at once.

``classify`` recognises a name by its first and last eight bytes and its length. A name of up to sixteen bytes is identified by
its length and its first and last eight bytes; the few longer system names are compared in full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base import codes

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The ids of names, as ``classify`` returns them.
USER = 0
TAGS, KEYS, UNIQ_KEY = 1, 2, 3
_SPECIAL_NAMES = (codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY)
_SYSTEM_PREFIX = codes.TRANSIENT_PROPERTY_PREFIX
# Names with the prefix are not listed, because the prefix identifies them.
_OTHER_NAMES = sorted(
    name for name in codes.RESERVED_PROPERTIES - set(_SPECIAL_NAMES) if not name.startswith(_SYSTEM_PREFIX)
)
NAMES: tuple[str, ...] = ("", *_SPECIAL_NAMES, *_OTHER_NAMES)
ID_BY_NAME = {name: i for i, name in enumerate(NAMES) if i}

# The mask of the first n bytes of a word, by n.
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)] + [(1 << 64) - 1], np.uint64)
_TAIL_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SLOT_SHIFT = np.uint64(52)


def is_system(name: str) -> bool:
    return name in ID_BY_NAME or name.startswith(_SYSTEM_PREFIX)


def words(content: Bytes) -> Words:
    """The eight bytes at every position, little-endian; ``content`` must have eight bytes after the last position used."""
    return np.ndarray((len(content) - 7,), "<u8", content, strides=(1,))


def signatures(content: Bytes, starts: Ints, lengths: Ints) -> Words:
    """A number for each name. Names that differ in their length, or in their first or last eight bytes, have different
    numbers.
    """
    word_at_position = words(content)
    first_words = word_at_position[starts] & _MASKS[np.minimum(lengths, 8)]
    last_words = np.where(lengths > 8, word_at_position[np.maximum(starts + lengths - 8, 0)], np.uint64(0))
    with np.errstate(over="ignore"):
        mixed_words: Words = (
            first_words ^ (last_words * _TAIL_MULTIPLIER) ^ (last_words >> np.uint64(29))
        ) + lengths.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    return mixed_words


def _signature_of(name: str) -> int:
    padded_name = np.frombuffer(name.encode() + bytes(8), np.uint8)
    return int(signatures(padded_name, np.array([0]), np.array([len(name.encode())]))[0])


def _hash_table() -> tuple[np.uint64, npt.NDArray[np.uint8], Words]:
    """A multiplier with which no two system names have the same slot, the id in each slot, and the signature of each id."""
    assert len(_SYSTEM_PREFIX) == 16, "the prefix is compared as two words"
    signature = np.array([0] + [_signature_of(name) for name in NAMES[1:]], np.uint64)
    assert len(set(signature.tolist())) == len(signature), "two system names share length, first and last eight bytes"
    multiplier = 0x9E3779B97F4A7C15
    while True:
        with np.errstate(over="ignore"):
            slots = ((signature[1:] * np.uint64(multiplier)) >> _SLOT_SHIFT).astype(np.intp)
        if len(set(slots.tolist())) == len(slots):
            ids = np.zeros(1 << 12, np.uint8)
            ids[slots] = np.arange(1, len(NAMES))
            return np.uint64(multiplier), ids, signature
        multiplier = (multiplier * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF


_PREFIX_WORDS = np.frombuffer(_SYSTEM_PREFIX.encode(), "<u8")
_MULTIPLIER, _IDS_BY_SLOT, _SIGNATURES = _hash_table()
_IS_LONG_NAME = np.array([len(name.encode()) > 16 for name in NAMES])


def classify(content: Bytes, starts: Ints, lengths: Ints, name_signatures: Words) -> npt.NDArray[np.uint8]:
    """The id of each name: the index of a system name in ``NAMES``, 0 for a user's name, and ``len(NAMES)`` for a name with the
    prefix.
    """
    with np.errstate(over="ignore"):
        candidate_ids = _IDS_BY_SLOT[((name_signatures * _MULTIPLIER) >> _SLOT_SHIFT).astype(np.intp)]
    ids = np.where(_SIGNATURES[candidate_ids] == name_signatures, candidate_ids, np.uint8(0))
    for i in np.flatnonzero(_IS_LONG_NAME[ids]).tolist():
        if bytes(content[starts[i] : starts[i] + lengths[i]]).decode("utf-8", "replace") != NAMES[ids[i]]:
            ids[i] = 0
    word_at_position = words(content)
    long_names = np.flatnonzero(lengths >= len(_SYSTEM_PREFIX))
    has_prefix = (word_at_position[starts[long_names]] == _PREFIX_WORDS[0]) & (
        word_at_position[starts[long_names] + 8] == _PREFIX_WORDS[1]
    )
    ids[long_names[has_prefix]] = len(NAMES)
    return ids
