"""What is refused before the first row, all of it in one error."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import codes, session
from rocketmq_spark.errors import ConnectionLost, OptionError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.sink import checks
from tests.sink.live import TYPES, sink_options

OLD = 409  # 4.9.8


def schema(**columns):
    return from_arrow_schema(
        pa.schema([(name, kind or TYPES.get(name, pa.string())) for name, kind in columns.items()])
    )


def problems(columns, **given):
    with pytest.raises(OptionError) as e:
        checks.check(sink_options("x:1", **given), schema(**columns))
    return e.value.message


def test_everything_wrong_is_in_one_error():
    text = problems(
        {"bodi": None, "tags": pa.int32(), "deliverAt": pa.timestamp("us"), "queueId": pa.string(), "flag": pa.int64()},
        queueSelector="hash", latencyMax="1s", messageId="id", batchMaxBytes="5m",
    )  # fmt: skip
    for part in (
        "column 'bodi' is unknown; the sink takes body, value, topic",
        "column 'tags' is int; expected string",
        "column 'deliverAt' is timestamp_ntz; expected timestamp",
        "column 'queueId' is string; expected int",
        "column 'flag' is bigint; expected int",
        "option 'messageId' is 'id', but no column of the frame is called so",
        "column 'body' (or 'value') is missing",
        "there is neither option 'topic' nor a column 'topic'",
        "queueSelector 'hash' needs a column 'shardingKey'",
        "means nothing with queueSelector 'hash'",
        "option 'notAvailableDuration'",
        "option 'batchMaxBytes' is 5242880, more than 'maxMessageSize' 4194304",
    ):
        assert part in text, part
    assert text.count("\n  - ") == 12


@pytest.mark.parametrize(
    ("columns", "given", "part"),
    [
        ({}, {"queueSelector": "column"}, "queueSelector 'column' needs a column 'queueId'"),
        ({"brokerName": None}, {}, "column 'brokerName' needs a column 'queueId'"),
        ({}, {"queueSelector": "machineRoom"}, "queueSelector 'machineRoom' needs option 'machineRooms'"),
        ({}, {"queueSelector": "environment"}, "queueSelector 'environment' needs option 'environment'"),
        ({}, {"machineRooms": "r"}, "option 'machineRooms' means nothing without queueSelector 'machineRoom'"),
        ({}, {"environments": "3"}, "option 'environments' needs option 'environment'"),
        ({}, {"environment": "4", "environments": "3"}, "option 'environment' is '4'; expected a whole number from 1 to 3"),
        ({}, {"queueSelector": "no.such:selector"}, "option 'queueSelector' is 'no.such:selector'"),
        ({}, {"queueSelector": "os:sep"}, "expected a callable, found str"),
        ({}, {"topic": "bad topic"}, "option 'topic' is 'bad topic': "),
        ({}, {"topic": "SCHEDULE_TOPIC_XXXX"}, "is forbidden"),
        ({"id": pa.float64()}, {"messageId": "id"}, "column 'id' is double; expected string or bigint"),
        ({"id": None, "ID": None}, {"messageId": "id"}, "several columns of the frame are called so"),
    ],
)  # fmt: skip
def test_one_thing_wrong(columns, given, part):
    assert part in problems({"body": None, **columns}, **{"topic": "t", **given})


def test_good_ones_are_found_by_their_names():
    columns = {"VALUE": pa.binary(), "ShardingKey": None, "queueid": pa.int16(), "order_no": pa.int64()}
    assert checks.check(sink_options("x:1", topic="t", messageId="ORDER_NO"), schema(**columns)) == {
        "body": "VALUE", "shardingkey": "ShardingKey", "queueid": "queueid", "messageid": "order_no",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["batchMaxDelay", "group", "subscribe", "columns"])
def test_options_that_mean_nothing_to_a_sink_are_refused(name):
    with pytest.raises(OptionError, match=f"option '{name}' does not belong to a sink"):
        sink_options("x:1", **{name: "10"})


def test_the_sinks_settings():
    found = checks.settings(sink_options("x:1", sendTimeout="12s", requireStoreOk="ok", totalBatchMaxBytes="1m"))
    assert (found.send_timeout_s, found.attempt_timeout_s, found.retries, found.pinned_retries) == (12, 2, None, None)
    assert found.store_must_be_ok
    assert found.send_latency_fault
    assert (found.max_async_bytes, found.auto_create_topics) == (1 << 20, False)
    given = {"sendLatencyFault": "false", "latencyMax": "1s,2s", "notAvailableDuration": "0,9s"}
    found = checks.settings(sink_options("x:1", **given))
    assert not found.send_latency_fault
    assert (found.fault_tables.latency_max_ms, found.fault_tables.not_available_ms) == ((1000, 2000), (0, 9000))
    assert checks.settings(sink_options("x:1", sendLatencyFault="4.x")).fault_tables.isolated_ms == 30_000


class Asked:
    """A client whose brokers are of some release, and whose topics are all missing if it is told so."""

    def __init__(self, version=codes.VERSION, error=None, brokers=()):
        self.asked = 0
        self.error = error
        self.sender = SimpleNamespace(publish_queues=self._queues, versions=lambda *a: {"a": 513, "b": version})
        self.calls = SimpleNamespace(request_timeout_s=1.0)
        self.routes = SimpleNamespace(cluster=lambda: brokers, missing_topic=lambda e: e)
        self.retry = SimpleNamespace(run=lambda ask, deadline: ask())

    def _queues(self, topic, deadline):
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def use(monkeypatch):
    monkeypatch.setattr(checks, "_checked", set())

    def patch(client):
        monkeypatch.setattr(session, "client", lambda options: client)
        return client

    return patch


@pytest.mark.parametrize("column", ["delayms", "deliverat"])
def test_timers_are_refused_by_brokers_that_would_ignore_them(use, column):
    use(Asked(OLD))
    with pytest.raises(OptionError, match=f"column '{column}' cannot be used: b is older than RocketMQ 5.0"):
        checks.check_brokers(sink_options("x:1", topic="t"), {column: column})
    checks.check_brokers(sink_options("x:1", topic="t"), {"delaylevel": "delayLevel"})
    use(Asked())
    checks.check_brokers(sink_options("x:1", topic="t"), {column: column})


def test_the_versions_of_real_brokers_are_those_of_their_answers(rocketmq: LocalBroker, topic: str):
    options = sink_options(rocketmq.name_server)
    checks.check_timers(session.client(options), topic, options, {"delayms": "delayMs"})


def test_a_stream_asks_once_and_a_batch_each_time(use):
    client = use(Asked())
    for _ in range(3):
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once=True)
    assert client.asked == 1
    for _ in range(3):
        checks.check_brokers(sink_options("x:1", topic="t"), {})
    assert client.asked == 4
    checks.check_brokers(sink_options("x:1"), {})
    assert client.asked == 4


def test_a_stream_goes_on_when_nobody_can_tell(use):
    missing = RouteNotFound("no such topic", None, codes.Response.TOPIC_NOT_EXIST, "t")
    for error in (ConnectionLost("no name server"), missing):
        use(Asked(error=error))
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once=True)
    use(Asked(error=missing, brokers=("a",)))
    with pytest.raises(RouteNotFound):
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once=True)
