"""The accounts of a run of delay nodes see what they are for."""

from __future__ import annotations

import pytest

from tests.chaos.delay_books import Event, Sent, early, parsed, reason, reasons, repeats

FIRST, AGAIN = Sent(100_000, "a", 100_000, 99_000, "m"), Sent(160_000, "b", 160_000, 99_000, "m")


def test_lines_are_read_and_a_line_that_is_cut_is_not() -> None:
    assert parsed("a", "1 2 3 m x\n4 5 6 n\n7 8") == [Sent(1, "a", 2, 3, "m x"), Sent(4, "a", 5, 6, "n")]


def test_early_is_what_was_not_due_by_the_clock_of_its_node() -> None:
    ahead = Sent(1, "a", 20, 10, "m")
    assert early([ahead, ahead._replace(now_ms=9), ahead._replace(now_ms=10)], []) == [ahead._replace(now_ms=9)]


@pytest.mark.parametrize(
    ("events", "is_early"),
    [
        ([], True),
        ([("a", 99_500, -20_000)], False),
        ([("a", 90_000, -20_000)], True),
        ([("b", 99_500, -20_000)], True),
        ([("a", 50_000, -10_000), ("a", 99_500, -20_000)], True),
        ([("a", 50_000, 20_000), ("a", 90_000, -20_000)], True),
    ],
)
def test_a_clock_set_between_taking_and_sending(events: list[tuple[str, int, int]], is_early: bool) -> None:
    sent = Sent(100_000, "a", 80_000, 99_000, "m")
    clocks = [Event("clock", node, at, at, ahead) for node, at, ahead in events]
    assert early([sent], clocks) == [sent] * is_early


def test_a_node_that_stood_still_sends_what_it_had_taken() -> None:
    sent = Sent(100_000, "a", 80_000, 99_000, "m")
    ahead, back = Event("clock", "a", 1, 1, 20_000), Event("clock", "a", 90_000, 90_000, -20_000)
    assert early([sent], [ahead, back]) == [sent]
    assert early([sent], [ahead, back, Event("freeze", "a", 80_000, 99_500)]) == []


def test_repeats_are_pairs_of_one_message() -> None:
    other = FIRST._replace(body="n")
    assert repeats([AGAIN, other, FIRST, AGAIN._replace(at_ms=170_000)]) == [
        (FIRST, AGAIN), (AGAIN, AGAIN._replace(at_ms=170_000)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], None),
        ([Event("kill", "a", 101_000, 101_000)], "killed"),
        ([Event("kill", "a", 99_000, 99_000)], None),
        ([Event("kill", "b", 101_000, 101_000)], None),
        ([Event("kill", "a", 140_000, 140_000)], None),
        ([Event("kill", "a", 140_000, 140_000), Event("freeze", "c", 100_500, 130_000)], "killed"),
        ([Event("freeze", "a", 101_000, 140_000)], "froze"),
        ([Event("freeze", "b", 101_000, 159_000)], "woke"),
        ([Event("freeze", "b", 101_000, 120_000)], None),
        ([Event("taken", "c", 103_000, 103_000)], "moved"),
        ([Event("freeze", "c", 60_000, 99_000)], "moved"),
        ([Event("freeze", "c", 60_000, 90_000)], None),
        ([Event("taken", "c", 99_000, 99_000)], None),
        ([Event("taken", "c", 120_000, 120_000)], None),
        ([Event("clock", "c", 110_000, 110_000, -20_000)], "clocks differ"),
        ([Event("clock", "c", 50_000, 50_000, -2_000)], "clocks differ"),
        ([Event("clock", "c", 50_000, 50_000, -2_000), Event("clock", "c", 60_000, 60_000, 0)], None),
        ([Event("clock", "c", 110_000, 110_000, 0)], None),
    ],
)
def test_a_repeat_has_the_reason_that_the_page_names(events: list[Event], why: str | None) -> None:
    assert reason(FIRST, AGAIN, events) == why
    assert reasons([(FIRST, AGAIN)], events) == {why: 1}


def test_what_a_clock_that_was_ahead_sent_may_come_again() -> None:
    assert reason(FIRST._replace(due_ms=105_000), AGAIN, []) == "clocks differ"
