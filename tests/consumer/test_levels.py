from __future__ import annotations

import pytest

from rocketmq_spark.codes import DELAY_LEVELS
from rocketmq_spark.consumer import levels

# What a reader of RocketMQ's documentation expects: seconds until the n-th repetition.
WAITS = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]


def test_1_24_the_sixteen_repetitions_come_at_the_levels_of_the_table() -> None:
    waits = [levels.delay_s(levels.retry_level(times)) for times in range(16)]
    assert waits == WAITS
    assert sum(waits) == 17140


@pytest.mark.parametrize(("asked", "level"), [(0, 5), (1, 1), (18, 18)])
def test_1_24_a_level_that_is_asked_for_wins(asked: int, level: int) -> None:
    assert levels.retry_level(2, asked) == level


@pytest.mark.parametrize(
    ("times", "asked", "dead"),
    [(15, 0, False), (16, 0, True), (17, 0, True), (0, -1, True), (16, 5, True), (3, 5, False)],
)
def test_1_24_dead_letters_after_the_last_try_or_on_request(times: int, asked: int, dead: bool) -> None:
    assert levels.is_dead(times, levels.MAX_RECONSUME_TIMES, asked) is dead


def test_levels_above_the_table_are_its_last_one_and_none_waits_no_time() -> None:
    assert levels.delay_s(99) == levels.delay_s(len(DELAY_LEVELS)) == 7200
    assert levels.delay_s(0) == 0
    assert levels.delay_s(2, ("1s", "1d")) == 86400
