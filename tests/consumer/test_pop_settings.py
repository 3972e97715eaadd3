from __future__ import annotations

import pytest

from rocketmq_spark import options
from rocketmq_spark.consumer.settings import PopSettings
from rocketmq_spark.errors import OptionError


def of(**given: str) -> PopSettings:
    told = {"transport": "grpc", "proxyEndpoint": "p:1", "group": "g", **given}
    return PopSettings.of(options.parse(told).for_role("consumer"))


def test_options_come_over_and_defaults_are_those_of_remoting():
    assert of() == PopSettings(group="g")
    assert of(
        ordered="true",
        consumeThreadMin="3",
        pullBatchSize="8",
        suspendCurrentQueueTime="2s",
        consumeTimeout="1m",
        pullTimeDelayWhenException="4s",
        requestTimeout="5s",
    ) == PopSettings(
        group="g",
        ordered=True,
        threads=3,
        batch_size=8,
        suspend_time_s=2.0,
        consume_timeout_s=60.0,
        error_pause_s=4.0,
        request_timeout_s=5.0,
    )


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(
        OptionError, match=r"(?s)option 'group' is 'a b'.*option 'pullBatchSize' is 33; expected 1 to 32"
    ):
        of(group="a b", pullBatchSize="33")


def test_a_proxy_sees_to_what_failed():
    assert not of().retry_topic
