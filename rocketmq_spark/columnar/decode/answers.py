"""Which messages belong to an answer, answer by answer: for messages as objects, and for what the fast path cannot locate.

What the fast path decides of all answers of a buffer at once (``decoder``) is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import stored_messages
from rocketmq_spark.columnar.decode.stored_messages import Malformed
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.pull.fetched import Fetched, Hole, Piece

# Says how many answers may be used, given the offsets that they jump over.
OnHoles = Callable[[Sequence[Piece], Sequence[Hole]], int]
# Gives answers that went beyond their ends ones that are true of the offsets inside of messages.
OnBeyond = Callable[[Sequence[Piece]], Sequence[Piece]]


class AnswerCheck(NamedTuple):
    """What an answer is when it is looked at alone: whether its messages can be located, whether some may belong to
    another pull, and what it jumps over."""

    whole: bool
    beyond: bool
    holes: list[Hole]


def apart(fetched: Fetched) -> list[AnswerCheck]:
    """A look at each answer."""
    looks = []
    for i, piece in enumerate(fetched.pieces):
        beyond = piece.next_offset > piece.limit
        try:
            messages = stored_messages.locate(fetched.buffer, [piece])
        except Malformed:
            looks.append(AnswerCheck(False, beyond, []))
            continue
        holes = [hole._replace(piece=i) for hole in stored_messages.holes(messages)]
        # An inner batch has offsets behind the one that stands in its head.
        last = messages.any_flags & SysFlag.INNER_BATCH or (messages.part("queueOffset") >= piece.limit).any()
        looks.append(AnswerCheck(True, beyond and bool(last), holes))
    return looks


def usable(fetched: Fetched, on_holes: OnHoles, on_beyond: OnBeyond) -> list[Piece]:
    """The answers that may be used, with ends that are true of the offsets inside of their messages."""
    looks = apart(fetched)
    count = on_holes(fetched.pieces, [hole for look in looks for hole in look.holes])
    return ended(fetched.pieces[:count], [look.beyond for look in looks[:count]], on_beyond)


def ended(pieces: Sequence[Piece], beyond: Sequence[bool], on_beyond: OnBeyond) -> list[Piece]:
    """The answers, those that are ``beyond`` with true ends."""
    odd = [piece for piece, is_odd in zip(pieces, beyond, strict=True) if is_odd]
    meant = dict(zip(odd, on_beyond(odd), strict=True)) if odd else {}
    return [meant.get(piece, piece) for piece in pieces]


def placed(messages: Iterable[ReceivedMessage], piece: Piece, dense: bool = True) -> Iterator[ReceivedMessage]:
    """The messages of an answer that belong to what was asked for, as objects.

    Those of unknown offset, which could not be decoded, stand for what is missing between their neighbours; one row for
    each offset where every offset has a message (``dense``).
    """
    end = min(piece.limit, piece.next_offset)
    at, lost = piece.start, None
    for message in messages:
        if message.queue_offset < 0 and message.decode_error is not None:
            lost = lost or message
            continue
        if lost is not None:
            yield from _standing(lost, at, min(message.queue_offset, end), dense)
            lost = None
        # A pull inside an inner batch gives the whole batch. Only there do offsets before the start mean what they say;
        # those behind the end only where the broker itself went on beyond it.
        before = message.queue_offset < piece.start and message.sys_flag & SysFlag.INNER_BATCH
        if not before and (piece.next_offset <= piece.limit or message.queue_offset < piece.limit):
            yield message
        at = max(at, message.queue_offset + 1)
    if lost is not None:
        yield from _standing(lost, at, end, dense)


def _standing(message: ReceivedMessage, start: int, end: int, dense: bool) -> Iterator[ReceivedMessage]:
    # At least once: where neighbours are damaged too, or shifted, nothing may be missing between them.
    for offset in range(start, max(end if dense else 0, start + 1)):
        yield replace(message, queue_offset=offset)
