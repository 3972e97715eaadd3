"""Which offsets a stored message has in its broker's index: an inner batch says it once more, in properties of its broker's."""

from __future__ import annotations

from collections.abc import Iterable

from rocketmq_spark.base import codes

_BATCH, _UNWRAP = int(codes.SysFlag.INNER_BATCH), int(codes.SysFlag.NEED_UNWRAP)
# With what stands before the value.
_NUM, _BASE = (f"{name}\x01".encode() for name in (codes.Property.INNER_NUM, codes.Property.INNER_BASE))


def spans(entries: Iterable[tuple[int, int, bytes]], start: int, end: int) -> list[tuple[int, int]] | None:
    """The offsets of each message of an answer that has those from ``start`` to ``end``, by its own offset, flags and
    properties. None where that cannot be so, or a batch does not say it.
    """
    found: list[tuple[int, int]] = []
    at = start
    for first, flag, text in entries:
        count = 1
        if flag & _BATCH:
            base, wrote = base_of(text), _written(text, _NUM)
            if wrote is None and flag & _UNWRAP:
                return None
            first, count = first if base is None else base, wrote or 1
        behind = first + count
        if not at < behind <= end or (found and first < at):
            return None
        found.append((first, behind))
        at = behind
    return found


def base_of(text: bytes) -> int | None:
    """The first offset of an inner batch with these properties; None where it is not there."""
    return _written(text, _BASE)


def _written(text: bytes, name: bytes) -> int | None:
    at = text.find(name)
    if at < 0 or (at and text[at - 1] != 2):
        return None
    value = text[at + len(name) :].partition(b"\x02")[0]
    return int(value[:20]) if value.isdigit() else None
