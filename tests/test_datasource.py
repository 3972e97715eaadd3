"""The data source by itself: what can be said before a reader or a writer is made, and when."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pyspark import cloudpickle

import pyspark_rocketmq
from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests.fix_spark import environment
from tests.schemas import struct

GIVEN = {"nameServer": "127.0.0.1:1", "subscribe": "t"}
BASIC = "topic string, body binary"


def source(**options):
    return RocketMQDataSource({**GIVEN, **options})


def test_its_name():
    assert RocketMQDataSource.name() == pyspark_rocketmq.DefaultSource.name() == "rocketmq"


def test_the_constructor_only_parses():
    """Spark makes it in several processes, for reading and for writing."""
    assert "body binary" in source(sendTimeout="3s", maxOffsetsPerTrigger="5").schema()
    with pytest.raises(OptionError, match="option 'tls' is 'x'"):
        source(tls="x")


def test_what_spark_finds_by_itself_is_the_same():
    assert isinstance(pyspark_rocketmq.DefaultSource(dict(GIVEN)), RocketMQDataSource)


def test_options_travel_and_secrets_with_them_unseen():
    made = source(accessKey="k", secretKey="s3cr3t-of-the-user")
    again = cloudpickle.loads(cloudpickle.dumps(made))
    assert again._options.secret_key.reveal() == "s3cr3t-of-the-user"
    assert "s3cr3t" not in repr(again) + repr(again._options) + str(again._options.secret_key)


@pytest.mark.parametrize("kind", ["reader", "streamReader"])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": None}, "none is given"),
        ({"subscribePattern": ".*"}, "several are given"),
        ({"tags": "a", "sql": "b > 1"}, "mutually exclusive"),
        ({"environments": "3"}, "option 'environments' needs option 'environment'"),
        (
            {"subscribe": "orders,dmq_inner_topic", "environment": "1", "environments": "2"},
            "option 'environment' is '1', but with environmentMode=queues dmq_inner_topic has the delayed",
        ),
        ({"sendTimeout": "3s"}, "option 'sendTimeout' does not belong to a"),
        (
            {"subscribe": "orders,a.b"},
            r"option 'subscribe': .* a.b, contains illegal characters: '.'; .*'a_b'; option 'topicNames' .*. If",
        ),
        ({"subscribe": "t" * 125, "namespace": "shop"}, "shop%t+, is longer than topic max length: 127"),
        (
            {"group": "$Default"},
            r"option 'group' is '\$Default'; expected .* illegal characters: '\$'; .*, such as 'Default'",
        ),
        ({"group": "orders.job"}, "such as 'orders_job'"),
        (
            {"subscribe": None, "assign": '{"тема":{"b":[0]}}'},
            "option 'assign': The specified topic: тема, contains illegal",
        ),
        ({"asyncProgressTrackingEnabled": "false"}, "option 'asyncProgressTrackingEnabled' does not belong to a"),
        ({"startingOffsets": "committed"}, "give the group with option 'group'"),
        ({"nameServer": None}, "option 'nameServer' is required"),
    ],
)
def test_what_a_source_refuses_without_a_broker(kind, options, problem):
    given = {name: value for name, value in {**GIVEN, **options}.items() if value is not None}
    with pytest.raises(OptionError, match=problem):
        getattr(RocketMQDataSource(given), kind)(struct(BASIC))


def test_what_only_a_stream_refuses():
    with pytest.raises(OptionError, match="option 'minOffsetsPerTrigger' is 9, more than 'maxOffsetsPerTrigger' 5"):
        source(minOffsetsPerTrigger="9", maxOffsetsPerTrigger="5").streamReader(struct(BASIC))
    with pytest.raises(OptionError, match="option 'endingOffsets' does not belong to a stream source"):
        source(endingOffsets="latest").streamReader(struct(BASIC))


@pytest.mark.parametrize("kind", ["reader", "streamReader"])
def test_a_schema_picks_columns(kind):
    reader = getattr(source(), kind)(struct("msgId string, body binary"))
    assert [column.name for column in reader._columns] == ["msgId", "body"]
    with pytest.raises(OptionError, match="the schema names 'nosuch'"):
        getattr(source(), kind)(struct("nosuch string"))


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_what_a_sink_refuses_without_a_broker(kind):
    made = RocketMQDataSource({"nameServer": "127.0.0.1:1", "topic": "t"})
    with pytest.raises(OptionError, match="cannot be overwritten"):
        getattr(made, kind)(struct("body binary"), True)
    with pytest.raises(OptionError, match="column 'price' is unknown"):
        getattr(made, kind)(struct("body binary, price double"), False)
    with pytest.raises(OptionError, match="option 'subscribe' does not belong to a sink"):
        getattr(source(topic="t"), kind)(struct("body binary"), False)


@pytest.mark.parametrize("given", [{"path": "orders"}, {"PATH": "orders"}, {"paths": '["a","b"]'}])
@pytest.mark.parametrize(
    ("kind", "arguments", "call"),
    [
        ("reader", (), r".option\('subscribe', ...\).load\(\)"),
        ("streamReader", (), r".option\('subscribe', ...\).load\(\)"),
        ("writer", (False,), r".option\('topic', ...\).save\(\)"),
        ("streamWriter", (False,), r".option\('topic', ...\).start\(\)"),
    ],
)
def test_a_path_is_named_with_the_option_that_is_meant(kind, arguments, call, given):
    """``load("orders")``, ``save("orders")`` and ``start("orders")`` give it, and nothing would read it."""
    chosen = {"subscribe": "t"} if kind in ("reader", "streamReader") else {"topic": "t"}
    for more in ({}, chosen):
        made = RocketMQDataSource({"nameServer": "127.0.0.1:1", **given, **more})
        with pytest.raises(OptionError, match=r"orders|a.*b") as caught:
            getattr(made, kind)(struct("body binary"), *arguments)
        assert re.search(call, str(caught.value)), caught.value


TRACKING = {
    "asyncProgressTrackingEnabled": "true",
    "asyncProgressTrackingCheckpointIntervalMs": "1000",
    "_asyncProgressTrackingOverrideSinkSupportCheck": "true",
}


def test_progress_that_spark_tracks_later_and_exactly_once():
    given = {"nameServer": "127.0.0.1:1", "topic": "t", "checkpointLocation": "c", "deliveryGuarantee": "exactly-once"}
    with pytest.raises(
        OptionError, match="Remove 'asyncProgressTrackingEnabled', or write with deliveryGuarantee=at-least"
    ):
        RocketMQDataSource({**given, **TRACKING}).streamWriter(struct("body binary"), False)


def test_the_package_that_spark_searches_is_light():
    """An import that fails there would break the search for everybody."""
    rooms = "('pyarrow', 'numpy', 'rocketmq_spark')"
    text = f"import sys, pyspark_rocketmq; print(*(n for n in sys.modules if n.split('.')[0] in {rooms}))"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment(), timeout=60, check=True
    )
    before = subprocess.run(
        [sys.executable, "-c", text.replace("pyspark_rocketmq", "pyspark.sql.datasource")],
        capture_output=True, text=True, env=environment(), timeout=60, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) <= set(before.stdout.split())
    assert "rocketmq_spark" not in done.stdout
