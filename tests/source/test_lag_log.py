"""Log lines about unread messages, for a Spark that does not ask for a report."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from rocketmq_spark import options
from rocketmq_spark.spark.source.lag_log import PERIOD_S, LagLog

Said = Callable[[], list[tuple[int, str]]]


def lag_log(**given: object) -> LagLog:
    return LagLog(options.parse({"nameServer": "x:1", "subscribe": "t", **given}).for_role("stream source"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """What was logged since the last call."""
    caplog.set_level(logging.INFO, "rocketmq_spark.spark.source.lag_log")

    def new() -> list[tuple[int, str]]:
        lines = [(record.levelno, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return lines

    return new


@pytest.mark.parametrize("limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_what_a_limit_leaves_in_the_first_batch_is_a_warning(said: Said, limit: str) -> None:
    lag_log(**{limit: "100"}).planned(0.0, lambda: {"lag": 7, "behindMs": 5})
    ((level, text),) = said()
    assert level == logging.WARNING
    assert f"option '{limit}' leaves 7 messages unread" in text


@pytest.mark.parametrize("given", [{}, {"minOffsetsPerTrigger": "3"}])
def test_without_a_limit_the_first_batch_says_nothing(said: Said, given: dict[str, str]) -> None:
    lag_log(**given).planned(0.0, lambda: {"lag": 7})
    lag_log(maxOffsetsPerTrigger="3").planned(0.0, lambda: {"lag": 0})
    assert said() == []


def test_the_first_lag_that_is_known_is_the_first_one(said: Said) -> None:
    log = lag_log(maxOffsetsPerTrigger="100")
    log.planned(0.0, lambda: {"lag": None})
    assert said() == []
    log.planned(PERIOD_S, lambda: {"lag": 7})
    ((level, text),) = said()
    assert level == logging.WARNING
    assert "leaves 7 messages unread" in text


def test_a_lag_that_grows_is_a_warning_once_a_minute(said: Said) -> None:
    log, asked = lag_log(), []

    def report(lag: int | None) -> Callable[[], dict[str, int | None]]:
        return lambda: asked.append(lag) or {"lag": lag, "behindMs": None}  # type: ignore[func-returns-value]

    for now_s, lag in ((0.0, 5), (PERIOD_S / 2, 50), (PERIOD_S, 9), (2 * PERIOD_S, 9), (3 * PERIOD_S, None)):
        log.planned(now_s, report(lag))
    assert asked == [5, 9, 9, None]
    assert [level for level, _ in said()] == [logging.WARNING, logging.INFO]
    log.planned(4 * PERIOD_S, report(10))
    ((level, text),) = said()
    assert level == logging.WARNING
    assert text.startswith(
        "10 messages are unread after this batch; 9 before; the oldest was first seen unknown ms ago"
    )
