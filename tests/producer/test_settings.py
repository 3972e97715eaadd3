from __future__ import annotations

import re
from typing import Any

import pytest

from rocketmq_spark import options
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import TABLE
from rocketmq_spark.producer.accumulator import BatchLimits
from rocketmq_spark.producer.fault_tolerance import CURRENT_RELEASE
from rocketmq_spark.producer.settings import ProducerSettings


def test_the_defaults_are_javas() -> None:
    settings = ProducerSettings(group="g")
    assert settings.send_timeout_s == 3.0
    assert (settings.retries, settings.pinned_retries) == (2, 0)
    assert not settings.send_latency_fault
    assert not settings.detector
    assert not settings.auto_batch
    assert settings.fault_tables == CURRENT_RELEASE
    assert (settings.max_message_size, settings.compress_above, settings.compression) == (4194304, 4096, "zlib")
    assert (settings.default_topic_queues, settings.heartbeat_s, settings.route_refresh_s) == (4, 30.0, 30.0)
    assert (settings.detect_interval_ms, settings.detect_timeout_ms) == (2000, 200)
    shared = BatchLimits()
    assert (shared.max_bytes, shared.max_delay_ms, shared.total_max_bytes) == (32768, 10, 33554432)


@pytest.mark.parametrize("group", ["", " ", "a b", "DEFAULT_PRODUCER", "g" * 121])
def test_a_bad_group_is_refused(group: str) -> None:
    with pytest.raises(OptionError, match=r"option 'group' is .*expected the name of a producer group"):
        ProducerSettings(group=group)


def test_all_problems_come_in_one_error() -> None:
    bad: dict[str, Any] = {
        "send_timeout_s": 0, "attempt_timeout_s": -1.0, "retries": -1, "max_message_size": 0, "compress_above": -1,
        "compression": "rar", "max_in_flight": 0, "batch_max_bytes": 0, "batch_max_delay_ms": 30_001,
    }  # fmt: skip
    with pytest.raises(OptionError) as e:
        ProducerSettings(group="g", **bad)
    for name in ("sendTimeout", "maxMessageSize", "compressAbove", "compression", "batchMaxBytes", "batchMaxDelay"):
        assert f"option '{name}' is" in str(e.value)
    for name in ("attempt_timeout_s", "retries", "max_in_flight"):
        assert f"setting '{name}' is" in str(e.value)
    assert str(e.value).count("\n") == 9


def test_what_is_called_an_option_is_one_of_a_producer() -> None:
    bad: dict[str, Any] = dict.fromkeys(("send_timeout_s", "max_message_size", "max_in_flight"), 0)
    bad |= {"group": "", "retries": -1, "compress_above": -1, "compression": "rar", "attempt_timeout_s": -1.0}
    bad |= {"batch_max_bytes": 0, "batch_max_delay_ms": 0, "total_batch_max_bytes": 0}
    with pytest.raises(OptionError) as e:
        ProducerSettings(**bad)
    named = re.findall(r"option '(\w+)'", str(e.value))
    assert len(named) == 8
    assert not set(named) - {row.name for row in TABLE if "producer" in row.roles}


def test_batch_limits_left_open_keep_what_is_shared() -> None:
    shared = BatchLimits(max_bytes=1, max_delay_ms=2, total_max_bytes=3)
    assert ProducerSettings(group="g").batch_limits(shared) == shared
    own = ProducerSettings(group="g", batch_max_delay_ms=7).batch_limits(shared)
    assert (own.max_bytes, own.max_delay_ms, own.total_max_bytes) == (1, 7, 3)


def test_settings_of_a_producer_come_from_its_options() -> None:
    given = {
        "sendLatencyFault": "4.x",
        "batchMaxDelay": "20ms",
        "requireStoreOk": "ok",
        "compression": "lz4",
        "group": "g",
    }
    settings = ProducerSettings.of(options.parse({"nameServer": "h:1", **given}).for_role("producer"))
    assert (settings.group, settings.send_timeout_s, settings.compression) == ("g", 3.0, "lz4")
    assert (settings.send_latency_fault, settings.store_must_be_ok, settings.batch_max_delay_ms) == (True, True, 20)
    plain = ProducerSettings.of(options.parse({"nameServer": "h:1", "group": "g"}).for_role("producer"))
    assert (plain.send_latency_fault, plain.auto_batch, plain.batch_max_delay_ms) == (False, False, None)
    assert plain.environment is None
