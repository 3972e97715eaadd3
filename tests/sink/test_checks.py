"""What is refused before the first row, all of it in one error."""

from __future__ import annotations

import functools

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import ports, session
from rocketmq_spark.base import codes, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound, CallTimeout, ConnectionLost, OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.sink import checks, task
from rocketmq_spark.spark.sink.exactly_once import NotedQueuesSender
from tests.fakes.ports import Fake
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.live.writes import TYPES, frame, sink_options
from tests.queues import qs

OLD = 409  # 4.9.8


def schema(**columns):
    return from_arrow_schema(
        pa.schema([(name, kind or TYPES.get(name, pa.string())) for name, kind in columns.items()])
    )


def problems(columns, **given):
    with pytest.raises(OptionError) as e:
        checks.check_sink(sink_options("x:1", **given), schema(**columns))
    return e.value.message


def test_a_priority_goes_over_grpc_only():
    text = problems({"body": None, "priority": pa.int32()}, topic="t")
    assert text == "column 'priority' is for messages over gRPC only; expected option 'transport' grpc"
    given = sink_options("x:1", topic="t", transport="grpc", proxyEndpoint="x:2")
    assert checks.check_sink(given, schema(body=None, priority=pa.int32())) == {"body": "body", "priority": "priority"}


def test_everything_wrong_is_in_one_error():
    text = problems(
        {"bodi": None, "tags": pa.int32(), "deliverAt": pa.timestamp("us"), "queueId": pa.string(), "flag": pa.int64()},
        queueSelector="hash", latencyMax="1s", messageId="id", batchMaxBytes="5m",
    )  # fmt: skip
    for part in (
        "column 'bodi' is unknown; the sink takes body, value, topic",
        "name the column of the body, and omit the others: selectExpr('… AS body')",
        "column 'tags' is int; expected string",
        "column 'deliverAt' is timestamp_ntz; expected timestamp",
        "column 'queueId' is string; expected int",
        "column 'flag' is bigint; expected int",
        "option 'messageId' is 'id', but no column of the DataFrame has that name",
        "column 'body' (or 'value') is missing",
        "there is neither option 'topic' nor a column 'topic'",
        "queueSelector 'hash' needs a column 'shardingKey'",
        "has no effect with queueSelector 'hash'",
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
        ({}, {"queueSelector": "environment"}, "option 'queueSelector' is 'environment', which needs option 'environment'"),
        ({}, {"machineRooms": "r"}, "option 'machineRooms' has no effect without queueSelector 'machineRoom'"),
        ({}, {"environments": "3"}, "option 'environments' needs option 'environment'"),
        ({}, {"environment": "4", "environments": "3"}, "option 'environment' is '4'; expected a whole number from 1 to 3"),
        ({"topic": None}, {"topic": None, "environment": "2"}, "option 'environment' is '2' without option 'environments', so"),
        ({"topic": None}, {"topic": None, "environment": "2"}, "each task finds the topics in column 'topic' by itself"),
        ({"topic": None}, {"topic": None, "environment": "2"}, 'or to their queues, such as {"2": {"broker-a": [0]}}'),
        ({}, {"queueSelector": "no.such:selector"}, "option 'queueSelector' is 'no.such:selector'"),
        ({}, {"queueSelector": "os:sep"}, "expected a callable, found str"),
        ({}, {"topic": "bad topic"}, "option 'topic' is 'bad topic': "),
        ({"topic": None}, {"topic": None, "allowedTopics": "a,b.c"}, "option 'allowedTopics' is 'b.c': "),
        ({}, {"topic": "SCHEDULE_TOPIC_XXXX"}, "is forbidden"),
        ({"id": pa.float64()}, {"messageId": "id"}, "column 'id' is double; expected string or bigint"),
        ({"id": None, "ID": None}, {"messageId": "id"}, "several columns of the DataFrame have that name"),
    ],
)  # fmt: skip
def test_one_thing_wrong(columns, given, part):
    assert part in problems({"body": None, **columns}, **{"topic": "t", **given})


def test_numbered_environment_needs_writer_that_keeps_its_queues():
    """A batch is counted for by its driver, a stream's writer is made anew for each micro-batch."""
    by_number = sink_options("x:1", topic="t", environment="2")
    checks.check_sink(by_number, schema(body=None))
    with pytest.raises(OptionError, match=r"Spark creates the writer of a stream again .*foreach_batch_writer"):
        checks.check_sink(by_number, schema(body=None), is_stream=True)
    for more in ({"environments": "3"}, {"environmentMode": "suffix"}):
        options = sink_options("x:1", environment="2", **more)
        checks.check_sink(options, schema(body=None, topic=None), is_stream=True)
        assert checks.environment_queues(options) == {}


def test_the_driver_counts_the_queues_of_an_environment_once(use):
    client = use(Asked())
    client.all_queues = lambda topic, deadline: client.publish_queues(topic, deadline)
    options = sink_options("x:1", topic="t", environment="2", sendTimeout="100ms")
    assert checks.environment_queues(options) == {"t": (MessageQueue("t", "b", 0),)}
    client.error = ConnectionLost("no name server answers")
    assert checks.environment_queues(options) == {"t": (MessageQueue("t", "b", 0),)}
    use(Asked(error=client.error))
    with pytest.raises(ConnectionLost):
        checks.environment_queues(options)


def test_good_ones_are_found_by_their_names():
    columns = {"VALUE": pa.binary(), "ShardingKey": None, "queueid": pa.int16(), "order_no": pa.int64()}
    assert checks.check_sink(sink_options("x:1", topic="t", messageId="ORDER_NO"), schema(**columns)) == {
        "body": "VALUE", "shardingkey": "ShardingKey", "queueid": "queueid", "messageid": "order_no",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["batchMaxDelay", "group", "subscribe", "columns"])
def test_options_that_mean_nothing_to_a_sink_are_refused(name):
    with pytest.raises(OptionError, match=f"option '{name}' does not belong to a sink"):
        sink_options("x:1", **{name: "10"})


def test_the_sinks_settings():
    found = checks.producer_settings(
        sink_options("x:1", sendTimeout="12s", requireStoreOk="ok", totalBatchMaxBytes="1m")
    )
    assert (found.send_timeout_s, found.attempt_timeout_s, found.retries, found.pinned_retries) == (12, 2, None, None)
    assert found.store_must_be_ok
    assert found.send_latency_fault
    assert (found.max_async_bytes, found.max_async_messages, found.auto_create_topics) == (1 << 20, 1 << 10, False)
    assert (found.max_in_flight, found.max_in_flight_per_broker) == (None, None)
    assert found.failed_queues_stay_closed, "what a task sends after a batch that failed would overtake it in its queue"
    assert checks.producer_settings(sink_options("x:1", maxInFlight="7")).max_in_flight_per_broker == 7
    given = {"sendLatencyFault": "false", "latencyMax": "1s,2s", "notAvailableDuration": "0,9s"}
    found = checks.producer_settings(sink_options("x:1", **given))
    assert not found.send_latency_fault
    assert (found.fault_tables.latency_max_ms, found.fault_tables.not_available_ms) == ((1000, 2000), (0, 9000))
    assert (
        checks.producer_settings(sink_options("x:1", sendLatencyFault="4.x")).fault_tables.failure_latency_ms == 30_000
    )


class Asked:
    """A sender whose brokers are of some release, and whose topics are all missing if it is told so."""

    def __init__(self, version=codes.VERSION, error=None, brokers=False):
        self.asked = 0
        self.error = error
        self.versions = {"a": 513, "b": version}
        self.versions_asked = []
        self.brokers = brokers

    def has_broker(self):
        return self.brokers

    def with_similar_topics(self, error):
        return error

    def max_timer_delays_ms(self, topic, brokers, deadline):
        self.versions_asked.append((sorted(brokers), deadline.remaining() <= 3.0))
        return {
            name: 1000 * (v >= codes.FIRST_VERSION_WITH_TIMERS) for name, v in self.versions.items() if name in brokers
        }

    def publish_queues(self, topic, deadline, refresh=False):
        self.asked += 1
        error = self.error.pop(0) if isinstance(self.error, list) else self.error
        if error is not None:
            raise error
        return [MessageQueue("t", name, 0) for name in self.versions]


@pytest.fixture
def use(monkeypatch):
    process.entries(checks._TOPICS_KEY).clear()
    process.entries(checks._TIMERS_KEY).clear()
    process.entries(checks._NUMBERS_KEY).clear()

    def patch(client):
        sender = Fake(ports.Sender, client)
        monkeypatch.setattr(session, "sender", lambda options: sender)
        return client

    return patch


@pytest.mark.parametrize(
    ("columns", "taken", "message", "remedy"),
    [
        ({"shardingkey": "key"}, {"NORMAL"}, "type NORMAL; column 'key' of the", "=FIFO, or write without 'key'"),
        (
            {"shardingkey": "shardingKey"},
            {"DELAY"},
            "column 'shardingKey' of the DataFrame makes FIFO",
            "'shardingKey'",
        ),
        ({"delayms": "delayMs"}, {"FIFO"}, "column 'delayMs' of the DataFrame makes DELAY ones", "=DELAY"),
        ({"body": "value"}, {"FIFO"}, "the columns of the DataFrame make NORMAL ones", "add the columns"),
    ],
)
def test_a_type_of_messages_is_explained_with_the_columns_given(monkeypatch, columns, taken, message, remedy):
    monkeypatch.setattr(session, "message_types", lambda *given: frozenset(taken))
    with pytest.raises(OptionError) as caught:
        checks.check_types(sink_options("x:1", topic="t"), "t", columns)
    assert message in caught.value.message
    assert remedy in (caught.value.remedy or "")


class Numbered(Asked):
    """A sender whose topic has queues on these brokers, one list for each call, or an error."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)

    def partition_queues(self, topic, deadline):
        brokers = self.answers.pop(0)
        if isinstance(brokers, RocketMQError):
            raise brokers
        return [MessageQueue(topic, name.lower(), i) for name in brokers for i in range(4 if name.isupper() else 2)]


def test_partitions_wait_for_a_broker_that_is_not_listed(use):
    sender = use(Numbered(BrokerNotFound("no name server lists a"), "ab"))
    found = checks.partition_queues(sink_options("x:1", topic="t", retryInterval=1), {"partition": "partition"})
    assert [queue.broker_name for queue in found["t"]] == list("aabb")
    assert sender.answers == []


def test_a_warning_says_that_partitions_have_other_queues(use, caplog):
    sender = use(Numbered("bc", "bc", "bcd", "bd", "bd"))

    def warnings():
        caplog.clear()
        checks.numbered_queues(sender, "t", sink_options("x:1", topic="t"))
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert [warnings() for _ in range(3)] == [[], [], []]  # the last queues are new
    (told,) = warnings()
    assert "now 0 to 1 on b, 2 to 3 on d, before 0 to 1 on b, 2 to 3 on c, 4 to 5 on d" in told
    assert warnings() == []


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("bc", "bC", False),
        ("bc", "bCd", False),
        ("bC", "bc", True),
        ("bc", "Bc", True),
        ("bc", "b", True),
        ("bc", "", True),
        ("", "bc", False),
    ],
)
def test_partition_numbers_are_compared_by_brokers_and_counts(use, caplog, before, now, told):
    sender = use(Numbered(before, now))
    for _ in range(2):
        checks.numbered_queues(sender, "t", sink_options("x:1", topic="t"))
    assert bool(caplog.records) is told


def test_exactly_once_writes_warn_of_numbers_that_changed(use, caplog):
    """Their senders differ as soon as a broker gets the topic."""
    sender, options = Numbered("b", "ab"), sink_options("x:1", topic="t")
    for noted in ("b:0-1", "a:0-1 b:0-1"):
        use(sender)
        checks.numbered_queues(NotedQueuesSender(sender, qs(noted)), "t", options)
    (record,) = caplog.records
    assert "now 0 to 1 on a, 2 to 3 on b, before 0 to 1 on b" in record.getMessage()


def test_numbers_of_another_connection_are_not_compared(use, caplog):
    sender = use(Numbered("b", "ab", "b"))
    for name_server in ("x:1", "y:1", "x:1"):
        checks.numbered_queues(sender, "t", sink_options(name_server, topic="t"))
    assert not caplog.records


def test_numbers_of_partitions_take_little_memory(use, monkeypatch):
    """Options and servers decide how many topics there are, and how many queues each has."""
    monkeypatch.setattr(checks, "_MAX_KEPT_NUMBERS", 9)
    brokers = ["BC"] * 10
    sender = use(Numbered(*brokers, "bcdefghijklm"))
    for n in range(len(brokers)):
        checks.numbered_queues(sender, f"t{n}", sink_options("x:1"))
    kept = process.entries(checks._NUMBERS_KEY)
    assert {topic: numbers for (_, topic), numbers in kept.items()} == dict.fromkeys(
        ("t7", "t8", "t9"), (("b", 4), ("c", 4))
    )
    checks.numbered_queues(sender, "long", sink_options("x:1"))
    assert kept == {}


def test_two_names_of_a_topic_are_logged_once_in_little_memory(monkeypatch, caplog):
    process.entries(checks._NAMES_KEY).clear()
    monkeypatch.setattr(checks, "_MAX_KEPT_NAMES", 3)
    options = sink_options("x:1", topicNames="dotsToUnderscores")
    for names in (["a.a", "b.b"], ["c.c", "a.a"], ["d.d"]):
        checks.check_topic_names(options, names)
    assert list(process.entries(checks._NAMES_KEY).values()) == ["c.c", "a.a", "d.d"]
    checks.check_topic_names(options, ["b_b"])  # the other name is forgotten
    checks.check_topic_names(sink_options("y:1", topicNames="dotsToUnderscores"), ["d_d"])
    checks.check_topic_names(sink_options("x:1"), ["d_d"])
    assert not caplog.messages
    for names in (["e.e", "d_d"], ["d.d"], ["d_d"]):  # of two queries, perhaps, so none is an error
        checks.check_topic_names(options, names)
    (line,) = caplog.messages
    assert "rows of topic 'd_d' in topic d_d, and an earlier write of this process stored rows of topic 'd.d'" in line


@pytest.mark.parametrize("column", ["delayms", "deliverat"])
def test_timers_are_refused_by_brokers_that_would_ignore_them(use, column):
    use(Asked(OLD))
    with pytest.raises(OptionError, match=f"column '{column}' cannot be kept: b is older than RocketMQ 5.0"):
        checks.check_brokers(sink_options("x:1", topic="t"), {column: column})
    checks.check_brokers(sink_options("x:1", topic="t"), {"delaylevel": "delayLevel"})
    use(Asked())
    checks.check_brokers(sink_options("x:1", topic="t"), {column: column})


def test_stream_with_other_columns_is_checked_again(use):
    use(Asked(OLD))
    options = sink_options("x:1", topic="t")
    checks.check_brokers(options, {}, once_per_process=True)
    with pytest.raises(OptionError, match="b is older"):
        checks.check_brokers(options, {"delayms": "delayMs"}, once_per_process=True)


def test_batch_may_be_as_large_as_a_message():
    options = sink_options("x:1", topic="t", batchMaxBytes=1000, maxMessageSize=1000)
    assert checks.check_sink(options, schema(body=None)) == {"body": "body"}
    assert "more than 'maxMessageSize' 999" in problems(
        {"body": None}, topic="t", batchMaxBytes=1000, maxMessageSize=999
    )


def timers(client, brokers=None, name_server="x:1"):
    checks.check_timers(client, "t", sink_options(name_server, topic="t"), {"delayms": "delayMs"}, brokers)
    return [asked for asked, _ in client.versions_asked]


def test_each_broker_is_asked_once_for_its_release(use):
    client = use(Asked())
    for _ in range(3):
        assert timers(client) == [["a", "b"]]
    assert all(bounded for _, bounded in client.versions_asked), "no longer than a request takes"
    assert timers(client, name_server="y:1") == [["a", "b"]] * 2
    client.versions["c"] = OLD
    for _ in range(2):
        with pytest.raises(OptionError, match=r"c is older than RocketMQ 5\.0"):
            timers(client, {"a", "c"})
    assert [asked for asked, _ in client.versions_asked][2:] == [["c"], ["c"]]
    client.versions["c"] = codes.FIRST_VERSION_WITH_TIMERS
    assert timers(client, {"a", "c"})[4:] == [["c"]]
    assert timers(client, {"a", "c"})[5:] == []


def test_what_brokers_said_elsewhere_does_not_count(use):
    """Another address map may lead to other brokers of the same names, and other options may come from another user."""
    client = use(Asked())
    for extra in ({}, {"addressMap": '{"10.0.0.5:10911": "y:2"}'}, {}):
        checks.timer_cache(client, sink_options("x:1", topic="t", **extra)).brokers_without_timers(
            "t", {"b"}, Deadline.after(3)
        )
    assert [brokers for brokers, _ in client.versions_asked] == [["b"], ["b"]]


def test_broker_that_hangs_is_asked_again_after_a_while(use, monkeypatch):
    client = use(Asked())
    del client.versions["b"]
    for _ in range(3):
        assert timers(client, {"a", "b"}) == [["a", "b"]]
    monkeypatch.setattr(checks, "BrokerTimers", functools.partial(checks.BrokerTimers, retry_pause_s=0.0))
    process.entries(checks._TIMERS_KEY).clear()
    timers(client, {"a", "b"})
    client.versions["b"] = OLD
    with pytest.raises(OptionError, match="b is older"):
        timers(client, {"a", "b"})
    assert client.versions_asked[-1][0] == ["b"]


def test_topic_moved_mid_task_to_brokers_without_timers_fails(use, monkeypatch):
    """They would deliver at once what is due later."""
    monkeypatch.setattr(task, "ROUTE_REFRESH_S", 0.0)
    sender = use(ScriptedSender(Time()))
    sender.longest_timers["old"] = 0
    rows = frame(body=["x"], delayMs=[60_000])
    writer = task.TaskWriter(sink_options("x:1", topic="T"), {"body": "body", "delayms": "delayMs"})

    def batches():
        yield rows
        sender.routes["T"] = tuple(qs("old:0-1"))
        yield rows

    with pytest.raises(OptionError, match="column 'delayMs' cannot be kept: old is older"):
        writer.write(batches())
    (sent,) = sender.calls
    assert sent[1].broker_name in ("a", "b")


def test_the_versions_of_real_brokers_are_those_of_their_answers(rocketmq: LocalBroker, topic: str):
    options = sink_options(rocketmq.name_server)
    checks.check_timers(session.sender(options), topic, options, {"delayms": "delayMs"})


def test_a_stream_asks_once_and_a_batch_each_time(use):
    client = use(Asked())
    for _ in range(3):
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once_per_process=True)
    assert client.asked == 1
    for _ in range(3):
        checks.check_brokers(sink_options("x:1", topic="t"), {})
    assert client.asked == 4
    checks.check_brokers(sink_options("x:1"), {})
    assert client.asked == 4


def test_a_topic_of_another_namespace_is_another_one(monkeypatch):
    missing = RouteNotFound("no such topic", None, codes.Response.TOPIC_NOT_EXIST, "t")
    clients = {"": Asked(), "n": Asked(error=missing, brokers=True)}
    monkeypatch.setattr(session, "sender", lambda options: clients[options.namespace or ""])
    process.entries(checks._TOPICS_KEY).clear()
    checks.check_brokers(sink_options("x:1", topic="t"), {}, once_per_process=True)
    with pytest.raises(RouteNotFound):
        checks.check_brokers(sink_options("x:1", topic="t", namespace="n"), {}, once_per_process=True)


def test_a_stream_goes_on_when_nobody_can_tell(use):
    missing = RouteNotFound("no such topic", None, codes.Response.TOPIC_NOT_EXIST, "t")
    for error in (ConnectionLost("no name server"), missing):
        use(Asked(error=error))
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once_per_process=True)
    use(Asked(error=missing, brokers=True))
    with pytest.raises(RouteNotFound):
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once_per_process=True)


def test_batch_write_with_a_spool_starts_while_no_broker_answers(use, tmp_path):
    given = {"topic": "t", "sendTimeout": "200ms", "retryInterval": "1ms"}
    use(Asked(error=AWAY))
    checks.check_brokers(sink_options("x:1", **given, onSendFailure="spool", spoolDir=str(tmp_path)), {})
    with pytest.raises(ConnectionLost):
        checks.check_brokers(sink_options("x:1", **given), {})


def test_no_error_is_its_own_cause(use):
    unwritable = RouteNotFound("no write permission")
    use(Asked(error=unwritable, brokers=True))
    with pytest.raises(RouteNotFound) as e:
        checks.check_brokers(sink_options("x:1", topic="t"), {}, once_per_process=True)
    assert e.value is unwritable
    assert e.value.__cause__ is None


MISSING = RouteNotFound("no such topic", None, codes.Response.TOPIC_NOT_EXIST, "t")
AWAY = ConnectionLost("no name server answers: refused", "ns:1")


def waiting(client, send_timeout="30s", expected=False):
    checks.check_topic(
        client, "t", sink_options("x:1", topic="t", sendTimeout=send_timeout, retryInterval="1ms"), expected
    )
    return client.asked


def test_what_is_not_known_is_waited_for():
    outage = [AWAY, CallTimeout("late"), BrokerNotFound("no broker of the topic has a master now")]
    assert waiting(Asked(error=[*outage, MISSING, None])) == 5, "nobody was registered"
    assert waiting(Asked(error=[MISSING, MISSING, None], brokers=True)) == 3


def test_missing_topic_fails_with_brokers_unless_seen_before():
    client = Asked(error=[MISSING] * 4, brokers=True)
    with pytest.raises(RouteNotFound, match="no such topic") as e:
        waiting(client)
    assert (client.error, "waited" in e.value.message) == ([], False)
    assert waiting(Asked(error=[*[MISSING] * 6, None], brokers=True), expected=True) == 7
    client = Asked(error=[AWAY, *[MISSING] * 4], brokers=True)
    with pytest.raises(RouteNotFound, match="no such topic"):
        waiting(client)


def test_the_error_after_the_wait_is_the_first_one():
    client = Asked(error=AWAY)
    with pytest.raises(
        ConnectionLost, match=r"no name server answers: refused; waited for 0.2 s, option 'sendTimeout'"
    ):
        waiting(client, "200ms")
    assert client.asked > 1
    client = Asked(error=RouteNotFound("no write permission"))
    with pytest.raises(RouteNotFound, match="no write permission"):
        waiting(client)
    assert client.asked == 1
