"""Inner batches as columns: equal to the careful path, which is asked only for what no producer makes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import inner, stored_messages
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.rows import check_each_answer
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, DECODE_ERROR, FULL_COLUMNS, BadMessages
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import Filter
from rocketmq_spark.pull.fetched import FetchedAnswer, Hole
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, one, stored, text
from tests.decode.test_decoder import LENIENT, both, rows

FLAGS = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
CODECS = {"zlib": SysFlag.ZLIB, "lz4": SysFlag.LZ4, "zstd": SysFlag.ZSTD}


def items(count: int, first: int = 0) -> list[BatchItem]:
    return [
        BatchItem(b"%d" % i * (i % 5), text(TAGS="ab"[i % 2], UNIQ_KEY=f"ID{i}", n=str(i)).decode(), i)
        for i in range(first, first + count)
    ]


def batch(count: int, offset: int, codec: int = 0, **fields: object) -> bytes:
    body, flags = encode_batch(items(count, offset)), int(FLAGS)
    if codec:
        body, flags = compression.compress(body, codec), flags | int(SysFlag.COMPRESSED | codec)
    return stored(body, text(INNER_NUM=str(count)), queue_offset=offset, sys_flag=flags, **fields)


def _last(body: bytes) -> int:
    """Where the last message of a batch begins."""
    at = following = 0
    while following < len(body):
        at, following = following, following + struct.unpack_from(">i", body, following)[0]
    return at


def _changed(body: bytes, place: int, kind: str, by: int) -> bytes:
    """With another number at ``place`` of the last message of a batch."""
    changed, at = bytearray(body), _last(body) + place
    struct.pack_into(kind, changed, at, struct.unpack_from(kind, body, at)[0] + by)
    return bytes(changed)


@pytest.mark.parametrize("flag", [SysFlag.NEED_UNWRAP, SysFlag.INNER_BATCH, SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH])
@pytest.mark.parametrize("body", [b"", encode_batch(items(3))], ids=["empty", "batch"])
def test_a_body_is_opened_only_with_both_flags(flag, body):
    """As Java does it; a flag alone is left by damage, and the body is then the message's own."""
    outer = stored(body, text(INNER_NUM="3" if body else "0"), queue_offset=4, sys_flag=flag)
    bodies = both(fetch(Answer([outer], start=4, limit=7, next_offset=7)))["body"].to_pylist()
    assert bodies == ([item.body for item in items(3 if body else 0)] if flag == FLAGS else [body])


@pytest.fixture
def fast_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the careful path was taken")

    monkeypatch.setattr(Decoder, "_reference_decoder", property(refuse))


@pytest.mark.parametrize("codec", [0, *CODECS.values()], ids=["plain", *CODECS])
def test_batches_as_producers_make_them_take_no_message_apart(fast_only: None, codec: int) -> None:
    fetched = fetch(
        Answer([batch(7, 10, codec), batch(1, 17), stored(b"single", queue_offset=18), batch(300, 19, codec)], start=12,
               limit=319, next_offset=319),
        Answer([batch(40, 500, codec)], number=1, start=500, limit=540, next_offset=540),
    )  # fmt: skip
    found = both(fetched, "all")
    assert found.column("queueOffset").to_pylist() == [*range(12, 319), *range(500, 540)]
    assert found.column("flag").to_pylist()[:6] == [12, 13, 14, 15, 16, 17]
    assert found.column("body").to_pylist()[6] == b"single"


def test_hosts_of_both_lengths(fast_only: None) -> None:
    """What lies behind a long one is moved in every message of the batch, and in no other."""
    long, other = (bytes(range(16)), 5), (bytes(range(16, 32)), 6)
    made = [batch(3, 0), batch(3, 3, born=long, reconsumed=2), batch(2, 6, stored=other, log_offset=77)]
    fetched = fetch(Answer([*made, batch(4, 8, born=long, stored=other, reconsumed=9)], limit=12, next_offset=12))
    assert both(fetched).column("reconsumeTimes").to_pylist() == [0] * 3 + [2] * 3 + [0] * 2 + [9] * 4


def test_a_tag_filter_looks_at_the_messages_and_not_at_the_batch(fast_only: None) -> None:
    outer = stored(encode_batch(items(6)), text(TAGS="nobody's"), sys_flag=int(FLAGS))
    found = Decoder(QUEUES, topic_filter=Filter("b || c", "TAG"))(fetch(Answer([outer], limit=6, next_offset=6)))
    assert found.column("queueOffset").to_pylist() == [1, 3, 5]


@settings(LENIENT, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0, 0, *CODECS.values()]), st.booleans()), max_size=5),
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(0, 3),
)
def test_any_window_of_any_batches(sizes: list[tuple[int, int, bool]], skipped: int, short: int, beyond: int) -> None:
    """Of every size, codec and version of the stored message, singles between them."""
    made, at = [], 100
    for size, codec, single in sizes:
        if size:
            made.append((at + size, batch(size, at, codec, topic="n" * 200 if size % 2 else "t")))
            at += size
        if single:
            made.append((at + 1, stored(b"s", queue_offset=at)))
            at += 1
    if not made:
        return
    start = min(100 + skipped, at - 1)
    made = [message for end, message in made if end > start]  # an answer begins with what was asked for
    limit = max(start, at - short)
    next_offset = at if limit < at else limit
    fetched = fetch(Answer(made, start=start, limit=limit + beyond, next_offset=max(next_offset, limit + beyond)))
    both(fetched)


def test_filtered_out_inner_batch_is_no_longer_detected() -> None:
    """What flags any message has had is kept; it says only where looking is worth while."""
    for flags, there in ((0, False), (int(FLAGS), True)):
        fetched = one(stored(encode_batch(items(2)), sys_flag=flags))
        located = stored_messages.locate(fetched.buffer, fetched.answers)
        assert inner.has_inner_batches(replace(located, combined_flags=int(FLAGS))) is there


def test_sizes_that_lie_are_believed_by_nobody() -> None:
    body = bytearray(encode_batch(items(3)))
    body[0:4] = struct.pack(">i", 9)
    fetched = one(stored(bytes(body), sys_flag=int(FLAGS)))
    assert inner.unwrap(stored_messages.locate(fetched.buffer, fetched.answers)) is None
    assert both(fetched).column("body").to_pylist() == [item.body for item in items(3)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[:-1],
        lambda body: body + b"\0\0\0",
        lambda body: body[:16] + struct.pack(">i", -1) + body[20:],
        lambda body: body[:16] + struct.pack(">i", 1 << 30) + body[20:],
        lambda body: struct.pack(">i", -5) + body[4:],
        lambda body: body[:16] + struct.pack(">i", -(1 << 30)) + body[20:],
        lambda body: _changed(body, 0, ">i", -1),
        lambda body: _changed(body, 0, ">i", 1),
        lambda body: _changed(body, 20 + len(items(3)[2].body), ">H", -1),
        lambda body: b"ten bytes.",
    ],
    ids=["cut", "more", "negative", "huge", "size", "below", "smaller", "larger", "fewer properties", "too short"],
)
@pytest.mark.parametrize("codec", [0, SysFlag.ZLIB], ids=["plain", "packed"])
def test_a_damaged_batch_is_what_it_is_on_the_careful_path(damage: object, codec: int) -> None:
    body, flags = damage(encode_batch(items(3))), int(FLAGS)  # type: ignore[operator]
    if codec:
        body, flags = compression.compress(body, codec), flags | int(SysFlag.COMPRESSED | codec)
    fetched = fetch(Answer([batch(2, 0), stored(body, sys_flag=flags, queue_offset=2)], limit=5, next_offset=5))
    columns = (*BASIC_COLUMNS, *FULL_COLUMNS)
    decoder = Decoder(QUEUES, columns, bad_messages=BadMessages("null"))
    slow = careful.ReferenceDecoder(QUEUES, columns, "user", bad_messages=BadMessages("null"))(fetched)
    assert rows(decoder(fetched)) == rows(slow)


def test_batch_that_fails_to_decompress_names_its_offset() -> None:
    flags = int(FLAGS | SysFlag.COMPRESSED | SysFlag.ZLIB)
    with pytest.raises(DecodeError, match="offset 7"):
        Decoder(QUEUES)(fetch(Answer([stored(b"no zlib", sys_flag=flags, queue_offset=7)], start=7)))


def test_what_would_fill_the_memory_is_decompressed_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "_MAX_DECOMPRESSED_BYTES", 1000)
    fetched = fetch(Answer([batch(40, 0, SysFlag.ZLIB), batch(40, 40, SysFlag.ZLIB)], limit=80, next_offset=80))
    assert inner.unwrap(stored_messages.locate(fetched.buffer, fetched.answers)) is None
    assert len(both(fetched)) == 80


def test_the_room_of_one_answer_is_shared_by_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch fits in it, two do not."""
    size = len(encode_batch(items(40)))
    opened = []
    for room in (2 * size, 2 * size - 1):
        monkeypatch.setattr(inner, "_MAX_DECOMPRESSED_BYTES", room)
        made = [stored(compression.compress(encode_batch(items(40))), sys_flag=int(FLAGS | SysFlag.COMPRESSED | SysFlag.ZLIB),
                       queue_offset=at) for at in (0, 40)]  # fmt: skip
        fetched = fetch(Answer(made, limit=80, next_offset=80))
        opened.append(inner.unwrap(stored_messages.locate(fetched.buffer, fetched.answers)))
        assert len(both(fetched)) == 80
    assert [found is not None for found in opened] == [True, False]


@pytest.mark.parametrize("codec", [0, SysFlag.ZLIB], ids=["plain", "compressed"])
@pytest.mark.parametrize("lie", [0, 3, 90, 130, 1 << 40, (1 << 63) - 3, -1, -(1 << 63)])
@pytest.mark.parametrize("place", [0, 1])
def test_batch_with_impossible_offset_cannot_be_decoded(place: int, lie: int, codec: int) -> None:
    """One flipped byte in its offset: it is neither dropped without a word, nor do others stand for it."""
    made = [batch(10, 100, codec), batch(10, 110, codec)]
    made[place] = made[place][:20] + struct.pack(">q", lie) + made[place][28:]
    fetched = fetch(
        Answer([batch(10, 90, codec)], start=95, limit=100, next_offset=100),
        Answer(made, start=100, limit=120, next_offset=120),
        Answer([stored(b"s", queue_offset=120)], start=120, limit=121, next_offset=121),
    )
    doubts: list[object] = []

    def doubted(answers: object, holes: object) -> int:
        doubts.append(holes)
        return 3

    columns = (*BASIC_COLUMNS, DECODE_ERROR)
    for decoder in (Decoder(QUEUES, columns), Decoder(QUEUES, columns, count_usable_answers=doubted)):
        with pytest.raises(
            DecodeError, match=f"offset {100 + 10 * place} cannot be decoded: a batch of offsets {lie} to"
        ):
            decoder(fetched)
        found = replace(decoder, bad_messages=BadMessages("null"))(fetched)
        bad = [row["queueOffset"] for row in found.to_pylist() if row["decodeError"]]
        assert bad == list(range(100 + 10 * place, 110 + 10 * place))
        assert found.column("queueOffset").to_pylist() == list(range(95, 121))
        assert len(replace(decoder, bad_messages=BadMessages("skip"))(fetched)) == 16
    assert not doubts


def indexed(count: int, offset: int, codec: int = 0, says: int | None = None) -> bytes:
    """As a broker stores it: with its index entry among its properties. It ``says`` another offset where it is damaged."""
    body, flags = encode_batch(items(count, offset)), int(FLAGS)
    if codec:
        body, flags = compression.compress(body, codec), flags | int(SysFlag.COMPRESSED | codec)
    names = {"KEYS": "INNER_NUM INNER_BASE", "INNER_NUM": str(count), "INNER_BASE": str(offset)}
    return stored(body, text(**names), queue_offset=offset if says is None else says, sys_flag=flags)


@pytest.mark.parametrize("codec", [0, SysFlag.ZLIB], ids=["plain", "compressed"])
@pytest.mark.parametrize("says", [91, 99, 101, 109])
def test_a_batch_that_says_two_offsets_cannot_be_decoded(says: int, codec: int) -> None:
    """What its index entry says goes against its own: rows would be dropped as those from before, or lie where others do."""
    fetched = fetch(
        Answer([indexed(10, 100, codec, says), indexed(10, 110, codec)], start=100, limit=120, next_offset=120)
    )
    doubts: list[object] = []

    def doubted(answers: object, holes: object) -> int:
        doubts.append(holes)
        return 1

    with pytest.raises(
        DecodeError, match=f"a batch of offsets {says} to {says + 10} is outside of the requested offsets"
    ):
        Decoder(QUEUES, count_usable_answers=doubted)(fetched)
    found = Decoder(
        QUEUES, (*BASIC_COLUMNS, DECODE_ERROR), count_usable_answers=doubted, bad_messages=BadMessages("null")
    )(fetched)
    assert found.column("queueOffset").to_pylist() == list(range(100, 120))
    assert found.column("decodeError").null_count == 10
    assert not doubts


@pytest.mark.parametrize(
    ("there", "window", "gone"),
    [
        ([(100, 10), (110, 10)], (100, 120, 120), []),
        ([(110, 10), (120, 10)], (100, 130, 130), [(100, 110)]),
        ([(100, 10), (120, 10)], (100, 130, 130), [(110, 120)]),
        ([(100, 10), (120, 10)], (105, 125, 130), [(110, 120)]),
        ([(100, 10), (120, 10)], (105, 115, 130), [(110, 115)]),
        ([(100, 10), (120, 10)], (100, 140, 140), [(110, 120), (130, 140)]),
        ([(110, 10), (130, 1), (140, 2)], (100, 150, 142), [(100, 110), (120, 130), (131, 140)]),
        ([(100, 10)], (109, 200, 130), [(110, 130)]),
        ([(100, 10)], (109, 110, 130), []),
    ],
)
def test_batches_that_are_gone_between_others_are_a_hole(
    there: list[tuple[int, int]], window: tuple[int, int, int], gone: list[tuple[int, int]]
) -> None:
    """A file that is gone from the middle of the log: a broker leaves its batches out and goes on behind them."""
    start, limit, next_offset = window
    made = [stored(b"s", queue_offset=at) if n == 1 else indexed(n, at, at % 20 and SysFlag.ZLIB) for at, n in there]
    fetched = fetch(
        Answer([indexed(10, 90)], start=95, limit=100, next_offset=100),
        Answer(made, start=start, limit=limit, next_offset=next_offset),
    )
    seen = []

    def doubted(answers: Sequence[FetchedAnswer], holes: Sequence[Hole]) -> int:
        seen.extend(holes)
        return len(answers)

    Decoder(QUEUES, count_usable_answers=doubted)(fetched)
    assert seen == [Hole(1, *hole) for hole in gone]
    assert [hole for look in check_each_answer(fetched) for hole in look.holes] == seen


@pytest.mark.parametrize("codec", [0, SysFlag.ZLIB], ids=["plain", "compressed"])
@pytest.mark.parametrize("before", [{}, {"XINNER_NUM": "7"}], ids=["alone", "behind a name that ends alike"])
@pytest.mark.parametrize(("counted", "held"), [(1, 7), (1, 2), (7, 1), (7, 8)])
def test_a_batch_that_its_broker_counted_otherwise_is_damaged(
    counted: int, held: int, before: dict[str, str], codec: int
) -> None:
    """A sender may make the sizes, which a broker counts, differ from the parts: its rows would have the offsets of others."""
    body, flags = encode_batch(items(held)), int(FLAGS)
    if codec:
        body, flags = compression.compress(body, codec), flags | int(SysFlag.COMPRESSED | codec)
    names = {**before, "INNER_NUM": str(counted), "INNER_BASE": "100"}
    wrong = stored(body, text(**names), queue_offset=100, sys_flag=flags)
    end = 100 + counted + 10
    fetched = fetch(Answer([wrong, indexed(10, 100 + counted)], start=100, limit=end, next_offset=end))
    with pytest.raises(DecodeError, match=f"a batch has {held} messages, but its broker counted {counted}"):
        Decoder(QUEUES)(fetched)
    found = Decoder(QUEUES, (*BASIC_COLUMNS, DECODE_ERROR), bad_messages=BadMessages("null"))(fetched)
    assert found.column("queueOffset").to_pylist() == [100, *range(100 + counted, end)]
    assert found.column("decodeError").null_count == 10
    assert len(Decoder(QUEUES, bad_messages=BadMessages("skip"))(fetched)) == 10


def test_a_count_is_compared_where_all_offsets_follow_each_other() -> None:
    """As on the careful path, which looks at one batch alone."""
    wrong = stored(encode_batch(items(7)), text(INNER_NUM="6"), queue_offset=100, sys_flag=int(FLAGS))
    with pytest.raises(DecodeError, match="a batch has 7 messages, but its broker counted 6"):
        Decoder(QUEUES)(fetch(Answer([wrong, indexed(10, 107)], start=100, limit=117, next_offset=117)))


def test_no_more_messages_are_looked_for_than_a_broker_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes may inflate to millions."""
    starts: list[int] = []
    found = inner._item_starts
    monkeypatch.setattr(inner, "_item_starts", lambda *args: (starts.extend((made := found(*args))[0]), made)[1])
    body = zlib.compress(encode_batch(items(1)) * 5000)
    flags = int(FLAGS | SysFlag.COMPRESSED | SysFlag.ZLIB)
    for counted in (6, 0):
        fetched = fetch(
            Answer([stored(body, text(INNER_NUM=str(counted)), queue_offset=100, sys_flag=flags)], start=100)
        )
        messages = stored_messages.locate(fetched.buffer, fetched.answers)
        assert inner.unwrap(messages) is None
        assert len(starts) <= 6


@pytest.mark.parametrize("flags", [int(SysFlag.INNER_BATCH), int(FLAGS)])
def test_a_flag_of_a_batch_that_damage_left_hides_no_hole(flags: int) -> None:
    """Of a message that is none: a body that is opened as a batch is one, or is damaged."""
    made = [stored(b"s", queue_offset=5), stored(b"s", queue_offset=6, sys_flag=flags), stored(b"s", queue_offset=9)]
    fetched = fetch(Answer(made, start=5, limit=10, next_offset=10))
    holes = stored_messages.holes(stored_messages.locate(fetched.buffer, fetched.answers))
    assert holes == ([Hole(0, 7, 9)] if flags != FLAGS else [])


def test_shifted_message_is_kept_beside_batch_read_from_middle() -> None:
    begun = Answer([batch(3, 4)], start=5, limit=7, next_offset=7)
    shifted = Answer([stored(queue_offset=i) for i in (0, 1)], number=1, start=2, limit=4, next_offset=4)
    for order, expected in (((begun, shifted), [5, 6, 0, 1]), ((shifted, begun), [0, 1, 5, 6])):
        assert both(fetch(*order)).column("queueOffset").to_pylist() == expected
