"""Settings of a pull consumer: from options, with their ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocketmq_spark import options
from rocketmq_spark.consumer.rebalance import ConsumeFrom, Where
from rocketmq_spark.consumer.settings import PullConsumerSettings
from rocketmq_spark.errors import OptionError


def settings(**given: object) -> PullConsumerSettings:
    return PullConsumerSettings.of(
        options.parse({"nameServer": "h:1", "group": "g", **given}).for_role("pull consumer")
    )


def test_defaults() -> None:
    plain = PullConsumerSettings(group="g")
    assert replace(settings(), allocate=plain.allocate) == plain
    assert (settings().pull_batch_size, settings().auto_commit_interval_s, settings().max_waiting) == (32, 5.0, 1000)


def test_what_is_given() -> None:
    made = settings(
        auto_commit=False, autoCommitInterval="1s", pullBatchSize=7, pullThresholdForQueue=9, requestTimeout="2s"
    )
    assert (made.auto_commit, made.auto_commit_interval_s, made.pull_batch_size) == (False, 1.0, 7)
    assert (made.max_waiting, made.request_timeout_s) == (9, 2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", ConsumeFrom(Where.LATEST)),
        ("Earliest", ConsumeFrom(Where.EARLIEST)),
        ("1970-01-01T00:00:01Z", ConsumeFrom(Where.TIMESTAMP, 1000)),
    ],
)
def test_where_to_begin(text: str, expected: ConsumeFrom) -> None:
    assert settings(consumeFromWhere=text).consume_from == expected


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        settings(group="a b", pullBatchSize=1025)
    assert "option 'group' is 'a b'" in caught.value.message
    assert "option 'pullBatchSize' is 1025; expected a whole number from 1 to 1024" in caught.value.message
