"""Where messages and their parts lie, against offsets counted by hand."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.decode import stored_messages
from rocketmq_spark.columnar.decode.stored_messages import MIN_MESSAGE_BYTES, Malformed, boundaries
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.decode.fetching import Answer, fetch, one, stored
from tests.harness import peak_bytes


def parts(fetched):
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    return [
        (bytes(found.buffer[a:b]), bytes(found.buffer[c:d]))
        for a, b, c, d in zip(
            found.body_start, found.body_end, found.properties_start, found.properties_end, strict=True
        )
    ]


@pytest.mark.parametrize("born", [4, 16])
@pytest.mark.parametrize("host", [4, 16])
@pytest.mark.parametrize("topic", ["t", "n" * 127, "n" * 128, "n" * 255])
def test_parts(born, host, topic):
    hosts = {"born": (b"\x09" * born, 1), "stored": (b"\x08" * host, 2)}
    fetched = one(
        stored(b"body", b"a\x01b\x02", topic=topic, store_ms=77, reconsumed=3, **hosts),
        stored(b"", b"", topic="t"),
    )
    assert parts(fetched) == [(b"body", b"a\x01b\x02"), (b"", b"")]
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    assert found.fixed_field("storeTimestamp").tolist() == [77, 0]
    assert found.fixed_field("reconsumeTimes").tolist() == [3, 0]
    assert found.fixed_field("bodyLength").tolist() == [4, 0]


def test_rows_know_their_answer():
    answers = [Answer([stored(queue_offset=10 * i + j) for j in range(i % 4)], number=i) for i in range(40)]
    fetched = fetch(*answers, order=list(reversed(range(40))))
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    expected = [(i, 10 * i + j) for i in range(40) for j in range(i % 4)]
    assert list(zip(found.answer_of_row.tolist(), found.fixed_field("queueOffset").tolist(), strict=True)) == expected


def long_answers(rng, answers, body):
    """Answers of hundreds of messages, which are looked through from several places at once."""
    return [
        Answer([stored(body(), queue_offset=n) for n in range(rng.choice([0, 1, 200, 900]))], number=i)
        for i in range(answers)
    ]


@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_boundaries_in_long_answers(seed, answers):
    """Bodies have what looks like the beginning of a message, sometimes a whole one."""
    rng = random.Random(seed)
    whole = stored(b"within")
    bodies = [b"", rng.randbytes(50), whole[:8], whole[:8] * 7, whole, whole * 3, b"x" * 300]
    weights = rng.choice([[1, 1, 0, 0, 0, 0, 1], [1] * 7, [50, 50, 0, 0, 1, 0, 50]])
    fetched = fetch(*long_answers(rng, answers, lambda: rng.choices(bodies, weights)[0]))
    begins = np.array([answer.begin for answer in fetched.answers])
    ends = np.array([answer.end for answer in fetched.answers])
    starts, counts = stored_messages.boundaries(fetched.buffer, begins, ends)
    expected = stored_messages._boundaries_one_by_one(fetched.buffer, begins, ends)
    assert starts.tolist() == expected[0].tolist()
    assert counts.tolist() == expected[1].tolist()


@pytest.mark.parametrize("size", [0, 50, 40_000])
def test_a_long_answer_is_cut_where_messages_begin(size):
    """A small message first, and larger ones behind it."""
    messages = [stored(bytes(size if i else 0)) for i in range(200)]
    fetched = one(*messages)
    begin, end = fetched.answers[0].begin, fetched.answers[0].end
    begins, ends, first = stored_messages._chains(fetched.buffer, np.array([begin]), np.array([end]))
    real = set((begin + np.cumsum([0, *map(len, messages)])).tolist())
    assert len(begins) > 3
    assert set(begins.tolist()) < real
    assert ends.tolist() == [*begins.tolist()[1:], end]
    assert first.tolist() == [0]


@pytest.mark.parametrize("row", [0, 700, 1799])
@pytest.mark.parametrize(("size", "reason"), [(5, "a message of 5 bytes"), (2**31 - 1, "cut off")])
def test_a_malformed_message_in_a_long_answer(row, size, reason):
    messages = [stored(b"%d" % i) for i in range(1800)]
    messages[row] = size.to_bytes(4, "big") + messages[row][4:]
    fetched = one(*messages)
    with pytest.raises(Malformed, match=reason) as caught:
        stored_messages.locate(fetched.buffer, fetched.answers)
    assert caught.value.position == fetched.answers[0].begin + sum(map(len, messages[:row]))


def test_long_answer_among_short_ones_uses_no_extra_memory():
    """Sizes that lead on and no message behind them: what a stranger may send."""
    size = struct.pack(">i", MIN_MESSAGE_BYTES) + bytes(MIN_MESSAGE_BYTES - 4)
    counts = [20_000, *[1] * 1_999]
    buffer = np.frombuffer(size * sum(counts), np.uint8)
    ends = np.cumsum(np.array(counts, np.int64)) * MIN_MESSAGE_BYTES
    found = []
    assert (
        peak_bytes(lambda: found.append(boundaries(buffer, ends - np.array(counts) * MIN_MESSAGE_BYTES, ends)))
        < 8 << 20
    )
    ((starts, per_answer),) = found
    assert starts.tolist() == list(range(0, len(buffer), MIN_MESSAGE_BYTES))
    assert per_answer.tolist() == counts


def test_keeping_some_rows():
    fetched = one(*(stored(b"%d" % i, b"", queue_offset=i, sys_flag=i) for i in range(4)))
    found = stored_messages.locate(fetched.buffer, fetched.answers).keep(np.array([False, True, False, True]))
    assert len(found) == 2
    assert found.fixed_field("queueOffset").tolist() == found.sys_flags.tolist() == [1, 3]


def test_nothing_at_all():
    assert len(stored_messages.locate(*fetch(Answer([]))[:1], fetch(Answer([])).answers)) == 0
    assert len(stored_messages.locate(fetch().buffer, [])) == 0


def test_message_truncated_at_buffer_end_is_not_read_beyond_it():
    """Only the slack lies behind the last message."""
    huge = stored(b"x" * 100)[:-1]
    fetched = one(huge)
    with pytest.raises(Malformed, match="cut off"):
        stored_messages.locate(fetched.buffer, fetched.answers)


def test_a_malformed_message_tells_where_it_begins():
    good = stored(b"x")
    bad = good[:4] + b"\0\0\0\0" + good[8:]
    fetched = one(good, bad)
    with pytest.raises(Malformed) as caught:
        stored_messages.locate(fetched.buffer, fetched.answers)
    assert caught.value.position == fetched.answers[0].begin + len(good)
    assert "unknown magic number" in caught.value.reason


@pytest.mark.parametrize("length", [-1, -10, -88])
def test_body_of_negative_length_is_malformed_even_if_rest_fits(length):
    """Behind its "end", within the fixed fields, stand an empty topic and properties that end where the message does."""
    whole = bytearray(stored(b"x" * 40))
    whole[84:88] = length.to_bytes(4, "big", signed=True)
    at = 88 + length
    if at > 4:
        whole[at] = 0
        whole[at + 1 : at + 3] = (len(whole) - at - 3).to_bytes(2, "big")
    whole[84:88] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(Malformed, match="negative length"):
        stored_messages.locate(*one(stored(b"before"), bytes(whole))[:2])


@pytest.mark.parametrize(("size", "fits"), [(91, True), (90, False)])
@pytest.mark.parametrize("answers", [1, 30])
def test_the_smallest_message(size, fits, answers):
    """No body, no topic, no properties: one byte less cannot be one. In turn and in lock step."""
    empty = bytearray(stored(b"", b"", topic=""))
    empty[:4] = size.to_bytes(4, "big")
    fetched = fetch(*(Answer([bytes(empty[:size])], start=0, next_offset=1) for _ in range(answers)))
    if fits:
        assert len(stored_messages.locate(fetched.buffer, fetched.answers)) == answers
    else:
        with pytest.raises(Malformed, match="a message of 90 bytes"):
            stored_messages.locate(fetched.buffer, fetched.answers)


def hole_bounds(*answers):
    fetched = fetch(*answers)
    return [tuple(hole) for hole in stored_messages.holes(stored_messages.locate(fetched.buffer, fetched.answers))]


def numbered(*offsets, **asked):
    return Answer([stored(queue_offset=n) for n in offsets], **asked)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (numbered(10, 11, 12), []),
        (numbered(12, start=10, limit=13, next_offset=13), [(0, 10, 12)]),
        (numbered(10, 12, start=10, limit=13, next_offset=13), [(0, 11, 12)]),
        (numbered(10, 12, 14, start=10, limit=15, next_offset=15), [(0, 11, 12), (0, 13, 14)]),
        (numbered(10, 11, start=10, limit=14, next_offset=14), [(0, 12, 14)]),
        (numbered(40, 41, start=10, limit=20, next_offset=42), [(0, 10, 20)]),
        (numbered(10, 40, start=10, limit=11, next_offset=41), []),
        (numbered(11, 12, 13, start=10, limit=13, next_offset=13), []),  # a shifted queue
        (numbered(12, 10, start=10, limit=13, next_offset=13), [(0, 11, 12)]),  # in another order, by damage
    ],
)
def test_holes(answer, expected):
    assert hole_bounds(answer) == expected


def test_holes_of_several_answers():
    assert hole_bounds(numbered(0), numbered(5, start=4, next_offset=6), numbered(6, start=6, next_offset=8)) == [
        (1, 4, 5), (2, 7, 8)
    ]  # fmt: skip


@pytest.mark.parametrize(("start", "expected"), [(8, [(0, 8, 10)]), (10, []), (12, [])])
def test_an_inner_batch_stands_for_several_offsets(start, expected):
    inner = stored(encode_batch([BatchItem(b"x")] * 5), sys_flag=0xC0, queue_offset=10)
    assert hole_bounds(Answer([inner], start=start, limit=15, next_offset=15)) == expected
