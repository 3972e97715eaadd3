"""Log lines about unread messages, for a Spark that does not call ``reportLatestOffset``."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from rocketmq_spark import options
from rocketmq_spark.spark.source.progress import LOG_PERIOD_S, LagLog

Logged = Callable[[], list[tuple[int, str]]]


def lag_log(**given: object) -> LagLog:
    return LagLog(options.parse({"nameServer": "x:1", "subscribe": "t", **given}).for_role("stream source"))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Returns the lines that were logged since its last call."""
    caplog.set_level(logging.INFO, "rocketmq_spark.spark.source.progress")

    def new() -> list[tuple[int, str]]:
        lines = [(record.levelno, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return lines

    return new


@pytest.mark.parametrize("limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_what_a_limit_leaves_in_the_first_batch_is_a_warning(logged: Logged, limit: str) -> None:
    lag_log(**{limit: "100"}).note_planned_batch(0.0, lambda: {"lag": 7, "behindMs": 5})
    ((level, text),) = logged()
    assert level == logging.WARNING
    assert f"option '{limit}' leaves 7 messages unread" in text


@pytest.mark.parametrize("given", [{}, {"minOffsetsPerTrigger": "3"}])
def test_without_a_limit_the_first_batch_logs_nothing(logged: Logged, given: dict[str, str]) -> None:
    lag_log(**given).note_planned_batch(0.0, lambda: {"lag": 7})
    lag_log(maxOffsetsPerTrigger="3").note_planned_batch(0.0, lambda: {"lag": 0})
    assert logged() == []


def test_a_batch_of_unknown_lag_is_not_the_first_one(logged: Logged) -> None:
    log = lag_log(maxOffsetsPerTrigger="100")
    log.note_planned_batch(0.0, lambda: {"lag": None})
    assert logged() == []
    log.note_planned_batch(LOG_PERIOD_S, lambda: {"lag": 7})
    ((level, text),) = logged()
    assert level == logging.WARNING
    assert "leaves 7 messages unread" in text


def test_a_lag_that_grows_is_a_warning_once_a_minute(logged: Logged) -> None:
    log, asked = lag_log(), []

    def report(lag: int | None) -> Callable[[], dict[str, int | None]]:
        return lambda: asked.append(lag) or {"lag": lag, "behindMs": None}  # type: ignore[func-returns-value]

    for now_s, lag in (
        (0.0, 5),
        (LOG_PERIOD_S / 2, 50),
        (LOG_PERIOD_S, 9),
        (2 * LOG_PERIOD_S, 9),
        (3 * LOG_PERIOD_S, None),
    ):
        log.note_planned_batch(now_s, report(lag))
    assert asked == [5, 9, 9, None]
    assert [level for level, _ in logged()] == [logging.WARNING, logging.INFO]
    log.note_planned_batch(4 * LOG_PERIOD_S, report(10))
    ((level, text),) = logged()
    assert level == logging.WARNING
    assert text.startswith("10 messages are unread after this batch, previously 9; behindMs: unknown")
