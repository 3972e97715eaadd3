"""Rows 3-14, 3-15, 3-18: which try is due when, and a clock that nobody can put back."""

from __future__ import annotations

import itertools

from rocketmq_spark.spool.lanes import Schedule, SteadyClock


def test_3_15_tries_come_after_3_8_38_98_seconds_and_the_tenth_failure_is_the_last() -> None:
    moments, now_ms = [], 0
    for tries in itertools.count():
        due_ms = Schedule().due_ms(tries, now_ms)
        if due_ms is None:
            break
        moments.append(due_ms // 1000)
        now_ms = due_ms
    assert moments == [3, 8, 38, 98, 218, 518, 998, 1598, 2498, 4298]


def test_step_counts_from_the_failure_in_milliseconds() -> None:
    assert Schedule().due_ms(0, 1_700_000_000_123) == 1_700_000_003_123
    assert Schedule((0.25,)).due_ms(0, 7) == 257
    assert Schedule((0.25,)).due_ms(1, 7) is None


def test_3_18_a_clock_that_is_put_forward_or_back_makes_nothing_earlier_or_later() -> None:
    wall, monotonic = [1_000_000], [500]
    clock = SteadyClock(lambda: wall[0], lambda: monotonic[0])
    assert clock() == 1_000_000
    for step_ms in (60_000, -120_000):
        wall[0] += step_ms
        monotonic[0] += 1_000
    assert clock() == 1_002_000


def test_3_18_g2_8_after_a_restart_with_a_clock_put_back_time_goes_on_from_what_was_written() -> None:
    clock = SteadyClock(lambda: 940_000, lambda: 0, not_before_ms=1_000_000)
    assert clock() == 1_000_000
