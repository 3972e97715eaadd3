"""The accounts of consumers that are killed, without any."""

from __future__ import annotations

from tests.live.grpc.crew import Took, account

SENT, POISON = {"a", "b", "c", "bad"}, {"bad"}
ALL = [Took("a", 1), Took("b", 1), Took("c", 1), Took("bad", 1), Took("bad", 2)]


def test_all_came_and_what_fails_is_a_dead_letter():
    one = account(SENT, POISON, ALL, ["bad"])
    assert (one.lost, one.again, one.given_up, one.not_given_up, one.attempts) == (set(), 0, set(), set(), {"bad": 2})


def test_what_never_came_is_lost_and_what_came_again_is_counted():
    one = account(SENT, POISON, [*ALL[1:], Took("b", 2), Took("c", 1)], ["bad"])
    assert (one.lost, one.again) == ({"a"}, 2)


def test_dead_letters_are_those_that_fail():
    one = account(SENT, POISON, ALL, ["b"])
    assert (one.given_up, one.not_given_up) == ({"b"}, {"bad"})


def test_messages_of_nobody_are_no_matter():
    one = account(SENT, POISON, [*ALL, Took("unacknowledged", 1)], ["bad", "unacknowledged"])
    assert (one.lost, one.again, one.given_up) == (set(), 0, set())
