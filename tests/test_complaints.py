"""A problem that lasts is a warning when it begins, and now and then."""

from __future__ import annotations

import logging

import pytest

from rocketmq_spark.base import complaints
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.errors import BrokerBusy, ConnectionLost

LOST = ConnectionLost("cannot connect: refused", "pod:8080")


def test_a_problem_that_lasts_warns_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complaints, "WARNING_INTERVAL_S", 0.0)
    kept = LogThrottle()
    assert [kept.level("q", LOST) for _ in range(2)] == [logging.WARNING, logging.WARNING]
    monkeypatch.setattr(complaints, "WARNING_INTERVAL_S", 300.0)
    again = LogThrottle()
    assert [again.level("q", why) for why in (LOST, LOST, BrokerBusy("b"), LOST)] == [
        logging.WARNING,
        logging.INFO,
        logging.WARNING,
        logging.INFO,
    ]
