"""Holes: how long the broker is doubted, what is asked for again, and what is lost."""

from __future__ import annotations

from itertools import count

import pytest

from rocketmq_spark.pull.fetched import FetchedAnswer, Hole
from rocketmq_spark.pull.suspicions import HoleSuspicions, confirmed_losses, split_at_unconfirmed

ANSWERS = [
    FetchedAnswer(number, start, start + 10, start + 10, 0, 0) for number, start in ((0, 0), (0, 10), (1, 0), (1, 10))
]


def doubts() -> HoleSuspicions:
    return HoleSuspicions(15.0, lambda: iter(count(1)))


@pytest.mark.parametrize(("now", "open_"), [(100.0, True), (114.9, True), (115.0, False)])
def test_a_hole_is_doubted_until_the_time_of_grace_is_over(now: float, open_: bool) -> None:
    known, holes = doubts(), [Hole(1, 12, 14)]
    known.unconfirmed_holes(ANSWERS, holes, 100.0, is_reliable=True)
    assert known.unconfirmed_holes(ANSWERS, holes, now, is_reliable=True) == (holes if open_ else [])


def test_what_a_slave_said_does_not_count() -> None:
    known, holes = doubts(), [Hole(0, 2, 4)]
    known.unconfirmed_holes(ANSWERS, holes, 100.0, is_reliable=True)
    assert known.unconfirmed_holes(ANSWERS, holes, 114.0, is_reliable=False) == holes
    assert known.unconfirmed_holes(ANSWERS, holes, 128.9, is_reliable=True) == holes
    assert known.unconfirmed_holes(ANSWERS, holes, 129.0, is_reliable=True) == []


def test_answer_with_holes_is_asked_once_after_growing_pauses() -> None:
    known, holes = doubts(), [Hole(1, 11, 12), Hole(1, 15, 16), Hole(3, 10, 20)]
    assert known.unconfirmed_holes(ANSWERS, holes, 100.0, is_reliable=True) == holes
    assert dict(known.retries(ANSWERS, holes, 100.0)) == {ANSWERS[1]: 101.0, ANSWERS[3]: 101.0}
    assert dict(known.retries(ANSWERS, holes[:2], 105.0)) == {ANSWERS[1]: 107.0}


def test_each_answer_waits_for_its_first_hole() -> None:
    known, first, second = doubts(), Hole(1, 11, 12), Hole(1, 15, 16)
    known.unconfirmed_holes(ANSWERS, [first, second], 100.0, is_reliable=True)
    assert dict(known.retries(ANSWERS, [first, second], 100.0)) == {ANSWERS[1]: 101.0}
    assert dict(known.retries(ANSWERS, [first], 105.0)) == {ANSWERS[1]: 107.0}


def test_joined_losses_before_the_first_doubt_are_reported() -> None:
    holes = [Hole(0, 4, 10), Hole(1, 10, 12), Hole(1, 15, 16), Hole(2, 0, 5), Hole(3, 10, 11)]
    assert confirmed_losses(holes, [], ANSWERS) == [(0, 4, 12), (0, 15, 16), (1, 0, 5), (1, 10, 11)]
    assert confirmed_losses(holes, holes[3:], ANSWERS) == [(0, 4, 12), (0, 15, 16)]
    assert confirmed_losses(holes, holes[:1], ANSWERS) == []
    of_two_ranges = [Hole(0, 4, 10), Hole(3, 10, 12)]
    assert confirmed_losses(of_two_ranges, [], ANSWERS) == [(0, 4, 10), (1, 10, 12)]


def test_answers_behind_a_doubt_wait_for_it() -> None:
    assert split_at_unconfirmed(ANSWERS, []) == (4, [])
    assert split_at_unconfirmed(ANSWERS, [Hole(1, 10, 12), Hole(3, 10, 11)]) == (1, [ANSWERS[2]])
