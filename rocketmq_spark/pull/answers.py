"""Answers to pulls: their meaning for a reader that owns its offsets, and fetched bytes, the interface to decoders.

``judge`` decides; nothing here waits. RocketMQ's own clients always continue at ``nextBeginOffset``. A reader that owns its
offsets must not: code 21 can mean expired data, an index that lags behind an acknowledged send,
a topic that was created again, or an operator's reset. Rules: docs/guarantees.md.

``ReceivedAnswers`` holds answers that were received and not decoded yet, and knows which may be decoded and which part of the buffer
is still needed. ``spans`` finds the offsets of a stored message in the broker's index; an inner batch also has them in
properties that the broker sets.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import OFFSET_RESET, PULLS_FORBIDDEN, UNREADABLE, Response, SysFlag
from rocketmq_spark.errors import AccessDenied, BrokerError, error_for
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.remoting.bulk import Answer, BulkStream
from rocketmq_spark.wire.properties import inner_numbers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BATCH, _UNWRAP = int(codes.SysFlag.INNER_BATCH), int(codes.SysFlag.NEED_UNWRAP)


def spans(entries: Iterable[tuple[int, int, bytes]], start: int, end: int) -> list[tuple[int, int]] | None:
    """The offsets of each message of an answer that has those from ``start`` to ``end``, by its own offset, flags and
    properties. None if they are impossible, or a batch has no such properties.
    """
    found: list[tuple[int, int]] = []
    at = start
    for first, flag, text in entries:
        count = 1
        if flag & _BATCH:
            base, wrote = inner_numbers(text)
            if wrote is None and flag & _UNWRAP:
                return None
            first, count = first if base is None else base, wrote or 1
        behind = first + count
        if not at < behind <= end or (found and first < at):
            return None
        found.append((first, behind))
        at = behind
    return found


class Cause(enum.Enum):
    """Why offsets cannot be read any more."""

    TRUNCATED = "truncated by retention"
    TOPIC_DELETED = "topic deleted"
    QUEUE_GONE = "queue gone"
    WENT_BACK = "offset went back: the topic was deleted and made again, or the broker lost its tail"
    NOT_KEPT = "the compaction topic does not keep it: sent in a batch without a key, or the topic was made again"


OnLoss = Callable[[OffsetRange, Cause], None]


@dataclass(frozen=True, slots=True)
class Continue:
    """There is no message before ``at``: pull there now."""

    at: int


@dataclass(frozen=True, slots=True)
class RepeatPull:
    """Repeat the pull after a pause; ``reroute`` if the address may have changed."""

    reroute: bool = False


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Repeat the pull on a new connection."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages before ``until`` are lost."""

    until: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible loss, or lag: repeat the pull for a while; then messages before ``until``, or all remaining ones, are lost."""

    cause: Cause
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """An operator reset the group to ``at``, which the broker reports to one pull only. A reader with own offsets repeats it."""

    at: int


Decision = Continue | RepeatPull | Reconnect | Lost | Suspect | Reset

# Temporary errors: the broker is busy, starting, or no longer the right one.
_PASSING = frozenset(
    {
        Response.SYSTEM_BUSY,
        Response.SERVICE_NOT_AVAILABLE,
        Response.FLOW_CONTROL,
        Response.NOT_LEADER_FOR_QUEUE,
        Response.FILTER_DATA_NOT_EXIST,
        Response.FILTER_DATA_NOT_LATEST,
    }
)
# Remarks that a slave sends with the code for "nothing matched", because only its master knows the answer.
_BOUNDS_REMARKS = frozenset(
    {"OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE", OFFSET_RESET}
)


def judge(start: int, answer: Answer) -> Decision | BrokerError:
    """The reaction to ``answer`` to a pull at ``start``, an offset that the broker had when the read began."""
    code = answer.code
    if code == Response.PULL_NOT_FOUND:
        return _not_found(start, answer)
    if code == Response.PULL_RETRY_IMMEDIATELY:
        return _nothing_matched(start, answer)
    if code == Response.PULL_OFFSET_MOVED:
        return _moved(start, answer)
    if code == Response.GO_AWAY:
        return Reconnect()
    if code == Response.NO_PERMISSION:
        told = PULLS_FORBIDDEN in answer.remark if answer.forbidden is None else answer.forbidden in UNREADABLE
        return RepeatPull() if told else _refusal(answer)
    if code in _PASSING:
        return RepeatPull(reroute=code != Response.SYSTEM_BUSY)
    if code == Response.TOPIC_NOT_EXIST:
        return Suspect(Cause.TOPIC_DELETED)
    if code == Response.INVALID_PARAMETER:
        return Suspect(Cause.QUEUE_GONE)
    return _refusal(answer)


def _not_found(start: int, answer: Answer) -> Decision:
    beyond = answer.next_offset
    if beyond is not None and beyond > start:
        if answer.remark == "OFFSET_FOUND_NULL":  # the index, or a file of it, is missing or not open yet
            return Suspect(Cause.TRUNCATED, beyond)
        return Continue(beyond)
    return Suspect(Cause.WENT_BACK)  # the queue now ends before the end that the plan saw


def _nothing_matched(start: int, answer: Answer) -> Decision:
    beyond = answer.next_offset
    if beyond is None or beyond <= start or answer.remark in _BOUNDS_REMARKS:
        return RepeatPull(reroute=True)
    if answer.remark == "MESSAGE_WAS_REMOVING":
        return Lost(beyond, Cause.TRUNCATED)
    if answer.min_offset is not None and answer.min_offset > start:
        return Lost(answer.min_offset, Cause.TRUNCATED)  # no message matches the filter, or none is left
    return Continue(beyond)


def _moved(start: int, answer: Answer) -> Decision:
    if answer.remark == OFFSET_RESET:
        return RepeatPull() if answer.next_offset is None else Reset(answer.next_offset)
    low = answer.min_offset
    if low is None and answer.remark == "OFFSET_TOO_SMALL":
        low = answer.next_offset
    if low is not None and low > start:
        return Lost(low, Cause.TRUNCATED)
    return Suspect(Cause.WENT_BACK)


def _refusal(answer: Answer) -> BrokerError:
    kind = error_for(answer.code, answer.remark)
    remedy = None
    if issubclass(kind, AccessDenied):
        remedy = "A reader needs Sub and Get on the topic and Sub on the group (access denied is never retried)"
    elif answer.code in (
        Response.SUBSCRIPTION_GROUP_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_EXIST,
        Response.SUBSCRIPTION_NOT_LATEST,
    ):
        remedy = "Create the consumer group on the broker, or name an existing one with option 'group'"
    elif "SQL92" in answer.remark:
        remedy = "Set enablePropertyFilter=true in the broker's configuration, or filter with option 'tags'"
    return kind("the broker refused a pull", None, answer.code, None, None, answer.remark, remedy)


# Positions of the offset and the flags in a stored message.
_OFFSET_AT, _FLAGS_AT = 20, 36
_OFFSET = struct.Struct(">q")
_FLAGS = struct.Struct(">i")
_INNER = int(SysFlag.INNER_BATCH)


class FetchedAnswer(NamedTuple):
    """Messages of one answer: number of the range, requested offset, requested end, next offset of the broker, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class FetchedAnswers(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until the next ones are fetched."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[FetchedAnswer]


def offset_count(pieces: Iterable[FetchedAnswer]) -> int:
    """The number of offsets that the pieces cover."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


def first_offset(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """The offset stored in the message at ``begin``."""
    offset: int = _OFFSET.unpack_from(buffer.data, begin + _OFFSET_AT)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is an inner batch, which is returned whole for each of its offsets."""
    return bool(_FLAGS.unpack_from(buffer.data, begin + _FLAGS_AT)[0] & _INNER)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` for which the answer at index ``piece`` has no messages."""

    piece: int
    start: int
    end: int


class ReceivedAnswers:
    """``pieces`` in any order, and ``rows``, the number of offsets that they cover; the reader adds to both."""

    def __init__(self) -> None:
        self.pieces: list[FetchedAnswer] = []
        self.rows = 0
        self.lent: list[FetchedAnswer] = []  # pieces that are being decoded
        self._returned: list[FetchedAnswer] = []  # pieces given back undecoded
        self._begin = 0  # where these pieces begin in the buffer

    def add(self, piece: FetchedAnswer, rows: int) -> None:
        self.pieces.append(piece)
        self.rows += rows

    def before(self, frontier: tuple[int, int]) -> tuple[list[FetchedAnswer], list[FetchedAnswer]]:
        """The pieces before the first missing offset, in order, and the others."""
        self.pieces.sort()
        split = bisect_left(self.pieces, frontier)
        return self.pieces[:split], self.pieces[split:]

    def remove(self, pieces: Collection[FetchedAnswer]) -> None:
        """Remove pieces that must not be delivered."""
        removed = set(pieces)
        self.pieces = [piece for piece in self.pieces if piece not in removed]
        self.rows -= offset_count(pieces)

    def give_back(self, pieces: Sequence[FetchedAnswer]) -> None:
        """Return lent pieces, which are delivered again."""
        self._returned = list(pieces)

    def keep(self, rest: list[FetchedAnswer], rows: int, stream: BulkStream) -> None:
        """Keep only ``rest`` and the pieces given back. The buffer is compacted if an equal amount might not fit."""
        if self._returned:
            rest, self._returned = self._returned + rest, []
            rows = offset_count(rest)
        self.pieces, self.rows, self.lent = rest, rows, []
        if stream.full or stream.room < stream.filled - self._begin:
            moved = stream.turn((piece.begin, piece.end) for piece in self.pieces)
            self.pieces = [
                piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin)
                for piece in self.pieces
            ]
        self._begin = stream.filled

    def drop(self) -> list[FetchedAnswer]:
        """Drop all pieces, whose stream and buffer are gone. Returns them, to be requested again."""
        lost, self.pieces, self.rows, self._begin = self.pieces, [], 0, 0
        return lost
