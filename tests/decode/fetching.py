"""Fetched answers as a range reader hands them out, and hypothesis strategies for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.messages import decode_messages, encode_batch
from tests import strategies
from tests.harness import store

QUEUES = tuple(MessageQueue(topic, broker, 3) for topic, broker in (("t", "broker-a"), ("t", "broker-b"), ("u", "b")))
# What lies between bodies: headers of frames, of which a decoder must see nothing.
JUNK = b"\x02\x01\xff\x00{}"
SLACK = b"\xfe" * 128


@dataclass(frozen=True)
class Answer:
    """Stored messages of one answer. ``start``, ``limit`` and ``next_offset`` follow from them unless given."""

    messages: Sequence[bytes]
    number: int = 0
    start: int | None = None
    limit: int | None = None
    next_offset: int | None = None

    def piece(self, begin: int) -> FetchedAnswer:
        offsets = [offset_of(message) for message in self.messages] or [0]
        next_offset = max(offsets) + 1 if self.next_offset is None else self.next_offset
        return FetchedAnswer(
            self.number,
            min(offsets) if self.start is None else self.start,
            next_offset if self.limit is None else self.limit,
            next_offset,
            begin,
            begin + sum(map(len, self.messages)),
        )


class _Shown(FetchedAnswers):
    """One that failed tests show as what it is made of."""

    def __repr__(self) -> str:
        bodies = [bytes(self.buffer[piece.begin : piece.end]) for piece in self.answers]
        return f"Fetched({list(zip(self.answers, bodies, strict=True))})"


def offset_of(message: bytes) -> int:
    return struct.unpack_from(">q", message, 20)[0]


def fetch(*answers: Answer, order: Sequence[int] | None = None) -> FetchedAnswers:
    """``answers`` in their order; ``order`` is that in which their bytes lie in the buffer."""
    buffer = b""
    pieces: dict[int, FetchedAnswer] = {}
    for i in order if order is not None else range(len(answers)):
        buffer += JUNK
        pieces[i] = answers[i].piece(len(buffer))
        buffer += b"".join(answers[i].messages)
    made = [pieces[i] for i in range(len(answers))]
    return _Shown(np.frombuffer(bytearray(buffer + SLACK), np.uint8), made)


def one(*messages: bytes) -> FetchedAnswers:
    return fetch(Answer(messages))


def stored(body: bytes = b"x", properties: bytes = b"", **fields: Any) -> bytes:
    """A stored message whose property string may be any bytes."""
    whole = store(fields.pop("topic", "t"), body, "", **fields)
    rest = whole[4:-2] + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", len(rest) + 4) + rest


def text(**properties: str) -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


# --- strategies

_NAMES = st.sampled_from(
    [b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"region", b"WAIT", b"CLUSTER", b"__RMQ.TRANSIENT.x", b"ARRIVE_TIME",
     b"user-property-with-a-long-name", b"user-property-with-a-Long-name", "имя".encode(), b"REAL_TOPIC", b"tags"]
)  # fmt: skip
_CLEAN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\x01\x02"), min_size=1, max_size=12)
_VALUES = _CLEAN.map(str.encode) | st.sampled_from([b" a  b ", b"7F000001", b" ", b"k1 k2"])
_ODD = st.sampled_from(
    [b"", b"\x01", b"\x01x", b"x\x01", b"no separator", b"a\x01b\x01c", b"\x00", b"n\x00\x01v", b"ab"]
)
_BROKEN = st.binary(min_size=1, max_size=9).map(lambda b: b.replace(b"\x02", b"\xc3"))


@st.composite
def clean_properties(draw: st.DrawFn, names: Sequence[bytes]) -> bytes:
    """Exactly these names, well-formed; the last separator may be missing."""
    found = b"".join(name + b"\x01" + draw(_VALUES) + b"\x02" for name in names)
    return found[:-1] if found and draw(st.booleans()) else found


@st.composite
def odd_properties(draw: st.DrawFn) -> bytes:
    """Pairs and whatever else may stand between separators."""
    pair = st.tuples(_NAMES, _VALUES).map(b"\x01".join)
    parts = draw(st.lists(st.one_of(pair, pair, pair, _ODD, _BROKEN), max_size=6))
    return b"\x02".join(parts) + draw(st.sampled_from([b"\x02", b""]))


_KINDS = [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD, 0]
_HOSTS = st.tuples(st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16), strategies.int32)
# A sender chooses the born timestamp, so it may be anything.
_TIMES = st.integers(0, 1 << 42) | strategies.int64


@dataclass(frozen=True)
class Style:
    """What the messages of a buffer have in common: ``plain`` ones differ in body and properties only."""

    properties: st.SearchStrategy[bytes]
    plain: bool
    inner: bool
    beyond: int


@st.composite
def messages(draw: st.DrawFn, offset: int, style: Style) -> bytes:
    properties = style.properties
    body = draw(st.binary(max_size=40))
    if style.plain:
        return stored(
            body, draw(properties), queue_id=3, queue_offset=offset, log_offset=offset * 100, born_ms=1, store_ms=2
        )
    flags = draw(st.sampled_from([0, 0, 4, SysFlag.NEED_UNWRAP]))
    if style.inner and draw(st.booleans()):
        body = encode_batch(draw(st.lists(strategies.batch_items(), max_size=3)))
        flags = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
    if draw(st.booleans()):
        kind = draw(st.sampled_from(_KINDS))
        body = compression.compress(body, kind or SysFlag.ZLIB)
        flags |= SysFlag.COMPRESSED | kind
    return stored(
        body,
        draw(properties),
        topic=draw(strategies.names | st.just("%RETRY%" + "n" * 140)),
        queue_id=draw(strategies.int32),
        queue_offset=offset,
        log_offset=draw(strategies.int64),
        flag=draw(strategies.int32),
        sys_flag=int(flags),
        born_ms=draw(_TIMES),
        store_ms=draw(_TIMES),
        born=draw(_HOSTS),
        stored=draw(_HOSTS),
    )


@st.composite
def answers(draw: st.DrawFn, first: int, number: int, style: Style) -> Answer:
    """Messages from about ``first`` on, with gaps, perhaps more than were asked for."""
    count = draw(st.integers(0, 4))
    gaps = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    offsets = [first + sum(gaps[: i + 1]) for i in range(count)]
    made = [draw(messages(offset, style)) for offset in offsets]
    next_offset = (offsets[-1] if offsets else first) + 1
    limit = next_offset + draw(st.integers(-style.beyond, 1))
    begins_inside = style.inner and made and made[0][39] & SysFlag.INNER_BATCH
    start = first
    if begins_inside:  # before its end, and before the next message
        ends = [*offsets[1:2], offsets[0] + len(decode_messages(made[0])), offsets[0] + 3]
        start = draw(st.integers(offsets[0], max(offsets[0], min(ends) - 1)))
    return Answer(made, number, start, limit, next_offset)


@st.composite
def fetches(draw: st.DrawFn, max_answers: int = 6, inner: bool = False, beyond: int = 2) -> FetchedAnswers:
    """Of one writer, whose messages are all alike, or of many."""
    plain = draw(st.booleans())
    names = draw(st.lists(_NAMES, max_size=4, unique=draw(st.booleans())))
    alike = clean_properties(names)
    properties = draw(st.sampled_from([alike, alike, alike | odd_properties(), odd_properties()]))
    numbers = sorted(draw(st.lists(st.integers(0, len(QUEUES) - 1), min_size=1, max_size=max_answers)))
    made = [draw(answers(20 * i, number, Style(properties, plain, inner, beyond))) for i, number in enumerate(numbers)]
    return fetch(*made, order=draw(st.permutations(range(len(made)))))
