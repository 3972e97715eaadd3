"""Which messages of an answer belong to what was asked for, where each answer is looked at alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.rows import AnswerCheck
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.pull.fetched import FetchedAnswer, Hole
from rocketmq_spark.wire.messages import BatchItem, decode_leniently, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, stored


def numbered(*offsets, **asked):
    return Answer([stored(b"%d" % n, queue_offset=n) for n in offsets], **asked)


def damaged(*offsets, **asked):
    first, *rest = numbered(*offsets).messages
    return Answer([first[:4] + bytes(4) + first[8:], *rest], **asked)


def inner(base, **asked):
    return Answer([stored(encode_batch([BatchItem(b"x")] * 5), sys_flag=0xC0, queue_offset=base)], **asked)


@pytest.mark.parametrize(
    ("answer", "whole", "beyond", "holes"),
    [
        (numbered(0, 1, 2), True, False, []),
        (numbered(0, 2, start=0, next_offset=3), True, False, [(1, 2)]),
        (numbered(0, 1, 2, start=0, limit=2, next_offset=3), True, True, []),
        # The broker went on, but what it found there the filter did not want.
        (numbered(0, 1, start=0, limit=2, next_offset=9), True, False, []),
        (damaged(0, 1, start=0, limit=2, next_offset=2), False, False, []),
        (damaged(0, 1, start=0, limit=2, next_offset=3), False, True, []),
        (inner(10, start=10, limit=12, next_offset=15), True, True, []),
    ],
)
def test_a_look_at_an_answer(answer, whole, beyond, holes):
    first, found = careful.check_each_answer(fetch(numbered(7), answer))
    assert first == AnswerCheck(True, False, [])

    assert found == AnswerCheck(whole, beyond, [Hole(1, start, end) for start, end in holes])


def placed(fetched, answers):
    return [
        (answer.range_number, message.queue_offset)
        for answer in answers
        for message in careful.messages_in_range(
            decode_leniently(fetched.buffer[answer.begin : answer.end].tobytes(), "b"), answer
        )
    ]


def test_objects_and_columns_agree():
    """An answer that went beyond its end on a shifted queue, one on a healthy queue, one with a hole that is doubted."""
    fetched = fetch(
        numbered(0, 1, 3, 4, 5, number=0, start=0, limit=3, next_offset=5),
        numbered(0, 1, 2, 3, 4, number=1, start=0, limit=3, next_offset=5),
        numbered(0, 2, number=2, start=0, limit=3, next_offset=3),
    )
    told = []

    def count_usable_answers(answers, holes):
        told.append(list(holes))
        return 2

    def correct_ends(answers):
        return [answer._replace(limit=4 if answer.range_number == 0 else 3) for answer in answers]

    wanted = [*((0, n) for n in (0, 1, 3)), *((1, n) for n in range(3))]
    assert placed(fetched, careful.usable_answers(fetched, count_usable_answers, correct_ends)) == wanted
    (batch,) = Decoder(QUEUES, count_usable_answers=count_usable_answers, correct_ends=correct_ends).batches(
        fetched, None
    )
    assert batch.column("queueOffset").to_pylist() == [offset for _, offset in wanted]
    assert told[0] == told[1] == [Hole(2, 1, 2)]


def test_only_answers_that_went_beyond_are_asked_about():
    fetched = fetch(numbered(0, 1), numbered(2, 3, start=2, limit=3, next_offset=4))
    asked = []
    found = careful.usable_answers(
        fetched, lambda answers, holes: len(answers), lambda answers: asked.extend(answers) or answers
    )
    assert asked == [fetched.answers[1]]
    assert found == fetched.answers


# --- messages as objects


def message(offset: int, sys_flag: int = 0, error: str | None = None) -> ReceivedMessage:
    return ReceivedMessage(
        "t", MessageQueue("t", "b", 0), offset, 0, b"", {}, 0, sys_flag, 0, 0, "", "", 0, 0, 0, "", error
    )


def offsets(found: Iterable[ReceivedMessage]) -> list[int]:
    return [one.queue_offset for one in found]


def test_messages_before_start_are_dropped_only_inside_batches() -> None:
    """The index of a queue may be shifted: then messages have lower offsets than their places."""
    answer = FetchedAnswer(0, 10, 13, 13, 0, 0)
    assert offsets(careful.messages_in_range([message(8), message(9), message(10)], answer)) == [8, 9, 10]
    inner = [message(offset, SysFlag.INNER_BATCH) for offset in (8, 9, 10)]
    assert offsets(careful.messages_in_range(inner, answer)) == [10]


def test_messages_after_end_are_dropped_if_answer_overshoots() -> None:
    given = [message(offset) for offset in (11, 12, 13, 14)]
    assert offsets(careful.messages_in_range(given, FetchedAnswer(0, 10, 13, 13, 0, 0))) == [11, 12, 13, 14]
    assert offsets(careful.messages_in_range(given, FetchedAnswer(0, 10, 13, 15, 0, 0))) == [11, 12]


@pytest.mark.parametrize(("dense", "expected"), [(True, [10, 11, 12, 13, 14, 15]), (False, [10, 11, 13, 14])])
def test_what_cannot_be_decoded_stands_between_its_neighbours(dense: bool, expected: list[int]) -> None:
    garbled = message(-1, error="why")
    given = [message(10), garbled, garbled, message(13), garbled]
    found = list(careful.messages_in_range(given, FetchedAnswer(0, 10, 16, 16, 0, 0), dense))
    assert offsets(found) == expected
    assert [one.queue_offset for one in found if one.decode_error is None] == [10, 13]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("before", [1 << 56, 15])
def test_undecodable_message_is_reported_despite_its_neighbours(before: int, dense: bool) -> None:
    garbled = message(-1, error="why")
    for given in ([message(before), garbled], [message(before), garbled, message(11)]):
        found = list(careful.messages_in_range(given, FetchedAnswer(0, 10, 16, 16, 0, 0), dense))
        assert [one for one in found if one.decode_error is not None]
