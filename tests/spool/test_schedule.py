"""Rows 3-14, 3-15, 3-18: which try is due when, and a clock that nobody can put back."""

from __future__ import annotations

import itertools

from rocketmq_spark.spool.lanes import Schedule, SteadyClock


def test_retry_delays_grow_and_tenth_failure_is_last() -> None:
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


def test_steady_clock_ignores_steps_of_wall_clock() -> None:
    wall, monotonic = [1_000_000], [500]
    clock = SteadyClock(lambda: wall[0], lambda: monotonic[0])
    assert clock() == 1_000_000
    for step_ms in (60_000, -120_000):
        wall[0] += step_ms
        monotonic[0] += 1_000
    assert clock() == 1_002_000


def test_after_restart_steady_clock_never_precedes_stored_time() -> None:
    clock = SteadyClock(lambda: 940_000, lambda: 0, last_recorded_ms=1_000_000)
    assert clock() == 1_000_000
