"""Answers to pulls: what one means for a reader that owns its offsets, and fetched bytes, the interface to decoders.

``judge`` decides, and nothing here waits. RocketMQ's own clients follow ``nextBeginOffset`` wherever it leads. A reader with
offsets of its own must not: the same code 21 stands for data that expired, for an index that lags behind an acknowledged send,
for a topic that was made again and for an operator's reset. Rules: docs/guarantees.md.

``Collected`` holds the answers that were received and not read yet: which may be handed out, and which part of the buffer is
still needed. ``spans`` says which offsets a stored message has in its broker's index: an inner batch says it once more, in
properties of its broker's.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import OFFSET_RESET, PULLS_FORBIDDEN, UNREADABLE, Response, SysFlag
from rocketmq_spark.errors import AccessDenied, BrokerError, error_for
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.remoting.bulk import Answer, BulkStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    """Nothing to read before ``at``: ask there now."""

    at: int


@dataclass(frozen=True, slots=True)
class RepeatPull:
    """Ask the same once more after a pause; ``reroute`` when the address may have changed."""

    reroute: bool = False


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Ask the same on a new connection."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What is missing before ``until`` is gone for good."""

    until: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Suspect:
    """It looks like loss but may be lag: ask again for a while, then it is loss up to ``until``, or of all the rest."""

    cause: Cause
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """An operator moved the group to ``at``, which its broker says to one pull only: who owns its offsets asks the same again."""

    at: int


Decision = Continue | RepeatPull | Reconnect | Lost | Suspect | Reset

# Answers that say "not now": the broker is busy, starting, or not the right one any more.
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
# A slave says these with the code for "nothing matched": only its master knows.
_BOUNDS_REMARKS = frozenset(
    {"OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY", "NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE", OFFSET_RESET}
)


def judge(start: int, answer: Answer) -> Decision | BrokerError:
    """What to do about ``answer`` to a pull at ``start``, which the broker was known to have when the read began."""
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
        if answer.remark == "OFFSET_FOUND_NULL":  # a file of the index is missing, all of it, or not open yet
            return Suspect(Cause.TRUNCATED, beyond)
        return Continue(beyond)
    return Suspect(Cause.WENT_BACK)  # the end of the queue, before the end that the plan saw


def _nothing_matched(start: int, answer: Answer) -> Decision:
    beyond = answer.next_offset
    if beyond is None or beyond <= start or answer.remark in _BOUNDS_REMARKS:
        return RepeatPull(reroute=True)
    if answer.remark == "MESSAGE_WAS_REMOVING":
        return Lost(beyond, Cause.TRUNCATED)
    if answer.min_offset is not None and answer.min_offset > start:
        return Lost(answer.min_offset, Cause.TRUNCATED)  # nothing that the filter wants, or nothing that is left
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


# Where a stored message has its offset and its flags.
_OFFSET_AT, _FLAGS_AT = 20, 36
_OFFSET = struct.Struct(">q")
_FLAGS = struct.Struct(">i")
_INNER = int(SysFlag.INNER_BATCH)


class Piece(NamedTuple):
    """Messages of one answer: range number, offset asked, end of what was asked, where the broker went on, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class Fetched(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until more is asked for."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[Piece]


def covered(pieces: Iterable[Piece]) -> int:
    """How many offsets the pieces answer."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


def first_offset(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """The offset that the message at ``begin`` itself has."""
    offset: int = _OFFSET.unpack_from(buffer.data, begin + _OFFSET_AT)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is one that holds many, which come together whichever of them is asked for."""
    return bool(_FLAGS.unpack_from(buffer.data, begin + _FLAGS_AT)[0] & _INNER)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` that the answer at index ``piece`` should have had messages for."""

    piece: int
    start: int
    end: int


class Collected:
    """``pieces`` in any order and ``rows``, the offsets that they answer: the reader adds to both."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.rows = 0
        self.lent: list[Piece] = []  # what is handed out
        self._returned: list[Piece] = []  # what came back of it
        self._begin = 0  # where in the buffer what is handed out begins

    def add(self, piece: Piece, rows: int) -> None:
        self.pieces.append(piece)
        self.rows += rows

    def before(self, frontier: tuple[int, int]) -> tuple[list[Piece], list[Piece]]:
        """What lies before the first offset that is missing, in order, and the rest."""
        self.pieces.sort()
        split = bisect_left(self.pieces, frontier)
        return self.pieces[:split], self.pieces[split:]

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Of what is handed out: they come again."""
        self._returned = list(pieces)

    def keep(self, rest: list[Piece], rows: int, stream: BulkStream) -> None:
        """``rest`` and what was given back are all that is left; the buffer turns where as much might not fit again."""
        if self._returned:
            rest, self._returned = self._returned + rest, []
            rows = covered(rest)
        self.pieces, self.rows, self.lent = rest, rows, []
        if stream.full or stream.room < stream.filled - self._begin:
            moved = stream.turn((piece.begin, piece.end) for piece in self.pieces)
            self.pieces = [
                piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin)
                for piece in self.pieces
            ]
        self._begin = stream.filled

    def drop(self) -> list[Piece]:
        """Bodies lived in the buffer of a stream that is gone: what they answer is to be asked for again."""
        lost, self.pieces, self.rows, self._begin = self.pieces, [], 0, 0
        return lost
