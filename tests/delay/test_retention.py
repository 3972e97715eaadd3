"""Whether brokers keep envelopes long enough."""

from __future__ import annotations

import pytest

from rocketmq_spark.delay.envelope_records import Retention

HOUR_MS = 3_600_000


def test_a_delay_longer_than_the_retention_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    kept: dict[str, int | None] = {"a": 72 * HOUR_MS, "b": None}
    retention = Retention(kept.get)
    for name in kept:
        retention.record_delay(name, 71 * HOUR_MS)
    assert retention.warn() == []
    for name in kept:
        retention.record_delay(name, 240 * HOUR_MS)
    retention.record_delay("a", 5)
    for _ in range(3):
        assert retention.warn() == ["a"], "what a broker does not tell is not known"
    (record,) = caplog.records
    assert "waits for 240.0 hours, but a keeps messages for 72.0" in record.getMessage()
    assert "fileReservedTime" in record.getMessage()


def test_brokers_are_asked_seldom() -> None:
    asked = []

    def ask(name: str) -> int:
        asked.append(name)
        return 1

    retention = Retention(ask)
    retention.record_delay("a", 5)
    retention.warn()
    retention.warn()
    assert asked == ["a"]
