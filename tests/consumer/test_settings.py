from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import options
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OptionError
from rocketmq_spark.queues.environment import scope_of
from tests.harness import in_one_test
from tests.queues import qs, read


def test_the_defaults_are_those_of_java() -> None:
    found = ConsumerSettings(group="g")
    assert (found.threads, found.consume_batch_max_size, found.pull_batch_size) == (20, 1, 32)
    assert found.thresholds == Thresholds(1000, 100 << 20, 2000)
    assert (found.consume_timeout_s, found.persist_interval_s) == (900, 5)


def test_how_often_a_message_comes_again() -> None:
    assert ConsumerSettings(group="g").max_reconsume_times == 16
    assert ConsumerSettings(group="g", ordered=True).max_reconsume_times == 2**31 - 1
    assert ConsumerSettings(group="g", ordered=True, max_retries=0).max_reconsume_times == 0


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"group": "a b"}, "option 'group' is 'a b'"),
        ({"threads": 0}, "'consumeThreadMin' is 0; expected 1 to 1000"),
        ({"consume_batch_max_size": 1025}, "expected 1 to 1024"),
        ({"pull_batch_size": 1025}, "option 'pullBatchSize' is 1025"),
        ({"uses_pop": True, "pull_batch_size": 33}, "option 'pullBatchSize' is 33; expected 1 to 32"),
        ({"pull_interval_s": 66.0}, "option 'pullInterval' is 66.0; expected 0 to 65.535"),
    ],
)
def test_ranges_are_checked_at_the_start(wrong, expected):
    with pytest.raises(OptionError, match=expected):
        ConsumerSettings(**{"group": "g", **wrong})


SERVER = {"nameServer": "a:9876", "group": "g"}
# Each option with a value of its own, and what it becomes.
GIVEN = {
    "model": ("broadcasting", "clustering", False),
    "ordered": ("true", "ordered", True),
    "arrow": ("true", "arrow", True),
    "autoCommit": ("false", "auto_commit", False),
    "consumeFromWhere": ("1970-01-01T00:00:01Z", "consume_from", ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 1000)),
    "consumeThreadMin": ("7", "threads", 7),
    "consumeMessageBatchMaxSize": ("7", "consume_batch_max_size", 7),
    "pullBatchSize": ("7", "pull_batch_size", 7),
    "pullBatchSizeInBytes": ("7k", "pull_batch_size_in_bytes", 7168),
    "pullInterval": ("7s", "pull_interval_s", 7.0),
    "pullTimeDelayWhenException": ("7s", "pull_delay_on_error_s", 7.0),
    "pullThresholdForQueue": ("7", "thresholds", Thresholds(max_count=7)),
    "pullThresholdSizeForQueue": ("7k", "thresholds", Thresholds(max_bytes=7168)),
    "consumeConcurrentlyMaxSpan": ("7", "thresholds", Thresholds(max_span=7)),
    "pullThresholdForTopic": ("7", "topic_max_count", 7),
    "pullThresholdSizeForTopic": ("7k", "topic_max_bytes", 7168),
    "maxReconsumeTimes": ("7", "max_reconsume_times", 7),
    "suspendCurrentQueueTime": ("7s", "suspend_time_s", 7.0),
    "consumeTimeout": ("7s", "consume_timeout_s", 7.0),
    "persistConsumerOffsetInterval": ("7s", "persist_interval_s", 7.0),
    "rebalanceInterval": ("7s", "rebalance_interval_s", 7.0),
    "postSubscriptionWhenPull": ("true", "post_subscription_when_pull", True),
    "answerStacks": ("false", "answer_stacks", False),
    "answerDirectMessages": ("false", "answer_direct_messages", False),
    "localOffsetsDir": ("/o", "offsets_folder", Path("/o")),
}
# Those are used by ``allocate``, which is tested below, or by the connection.
ELSEWHERE = {
    "group",
    "allocationStrategy",
    "allocationConfig",
    "machineRooms",
    "environment",
    "environments",
    "environmentMode",
    "enableTrace",
    "traceTopic",
    "openTelemetry",
}


PROXY = {"transport": "grpc", "proxyEndpoint": "p:1", "group": "g"}


def of(server: dict[str, str] = SERVER, role: str = "consumer", **given: str) -> ConsumerSettings:
    return ConsumerSettings.from_options(options.parse({**server, **given}).for_role(role))


@pytest.mark.parametrize("name", GIVEN)
def test_every_option_becomes_setting_unlike_default(name: str) -> None:
    text, field, value = GIVEN[name]
    assert getattr(of(**{name: text}), field) == value != getattr(of(), field)


def test_every_option_of_a_consumer_is_among_them() -> None:
    rows = {row.name for row in options.TABLE if "consumer" in row.roles and row.roles != options.ROLES}
    assert rows == {*GIVEN, *ELSEWHERE}


@pytest.mark.parametrize(("server", "role"), [(SERVER, "consumer"), (SERVER, "pull consumer"), (PROXY, "consumer")])
def test_without_options_the_settings_are_the_defaults(server: dict[str, str], role: str) -> None:
    servers = () if server is PROXY else ("a:9876",)
    plain = ConsumerSettings(group="g", wire_group="g", name_servers=servers, allocate=print, uses_pop=server is PROXY)
    assert replace(of(server, role), allocate=print) == plain


def test_record_batch_listener_gets_up_to_1024_rows_by_default() -> None:
    assert of(arrow="true").consume_batch_max_size == 1024
    assert of(arrow="true", consumeMessageBatchMaxSize="7").consume_batch_max_size == 7


def test_an_ordered_listener_has_no_span() -> None:
    assert of(ordered="true").thresholds.max_span is None


def test_options_of_a_pull_consumer() -> None:
    made = of(
        role="pull consumer",
        autoCommit="false",
        autoCommitInterval="1s",
        pullBatchSize="7",
        pullThresholdForQueue="9",
        requestTimeout="2s",
    )
    assert (made.auto_commit, made.auto_commit_interval_s, made.pull_batch_size) == (False, 1.0, 7)
    assert (made.thresholds.max_count, made.request_timeout_s) == (9, 2.0)


def test_proxy_consumer_takes_options_and_no_retry_topic() -> None:
    made = of(
        PROXY,
        ordered="true",
        consumeThreadMin="3",
        pullBatchSize="8",
        suspendCurrentQueueTime="2s",
        consumeTimeout="1m",
        pullTimeDelayWhenException="4s",
        requestTimeout="5s",
    )
    assert (made.ordered, made.threads, made.pull_batch_size, made.suspend_time_s) == (True, 3, 8, 2.0)
    assert (made.consume_timeout_s, made.pull_delay_on_error_s, made.request_timeout_s) == (60.0, 4.0, 5.0)
    assert (made.uses_retry_topic, of().uses_retry_topic) == (False, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest", ConsumeFrom(ConsumeFromWhere.LATEST)),
        ("Earliest", ConsumeFrom(ConsumeFromWhere.EARLIEST)),
        ("1970-01-01T00:00:01Z", ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 1000)),
    ],
)
def test_where_to_begin(text: str, expected: ConsumeFrom) -> None:
    assert of(role="pull consumer", consumeFromWhere=text).consume_from == expected


@pytest.mark.parametrize(("server", "most"), [(SERVER, 1024), (PROXY, 32)])
def test_all_that_is_wrong_is_reported_at_once(server: dict[str, str], most: int) -> None:
    with pytest.raises(OptionError) as caught:
        of(server, group="a b", pullBatchSize="1025")
    assert "option 'group' is 'a b'" in caught.value.message
    assert f"option 'pullBatchSize' is 1025; expected 1 to {most}" in caught.value.message


@in_one_test("case", read("wire_allocation"))
def test_allocation_in_namespace_or_environment_equals_javas(case: dict[str, Any]) -> None:
    """Java's see the topic as it stands on the wire. Vectors are from its classes."""
    names = {"AVG": "averagely", "AVG_BY_CIRCLE": "averagelyByCircle", "CONSISTENT_HASH": "consistentHash"}
    given = {**SERVER, "allocationStrategy": names[case["strategy"]]}
    if case["namespace"]:
        given["namespace"] = case["namespace"]
    if case["suffix"]:
        given |= {"environment": case["suffix"], "environmentMode": "suffix"}
    queues = qs("broker-a:0-3 broker-b:0-3", case["topic"])
    for role in ("consumer", "pull consumer"):
        parsed = options.parse(given).for_role(role)
        name_on_wire = scope_of(parsed).name_on_wire
        assert name_on_wire(case["topic"]) == case["wire"]
        allocate = ConsumerSettings.from_options(parsed, name_on_wire).allocate
        for member, expected in case["result"].items():
            found = allocate(member, queues, list(case["result"]))
            assert [f"{queue.broker_name}:{queue.queue_id}" for queue in found] == expected
            assert {queue.topic for queue in found} <= {case["topic"]}


def test_same_group_name_in_two_namespaces_has_two_file_names() -> None:
    def named(**given: str) -> str | None:
        parsed = options.parse({**SERVER, **given}).for_role("consumer")
        return ConsumerSettings.from_options(parsed, scope_of(parsed).name_on_wire).wire_group

    suffix = {"environment": "dev", "environmentMode": "suffix"}
    assert named() == "g"
    assert named(namespace="INST") == "INST%g"
    assert named(**suffix) == "g_dev"
    assert named(namespace="INST", **suffix) == "INST%g_dev"
    assert named(environment="1", environments="2") == "g_env_1"


def test_strategies_come_with_their_configuration() -> None:
    queues, members = qs("a:0-1 b:0-1"), ["m1", "m2"]
    circle = of(allocationStrategy="averagelyByCircle").allocate("m1", queues, members)
    assert list(circle) == [queues[0], queues[2]]
    fixed = of(allocationStrategy="config", allocationConfig='{"T":{"b":[1]}}')
    assert list(fixed.allocate("m1", queues, members)) == [queues[3]]
    rooms = of(allocationStrategy="machineRoom", machineRooms="r").allocate("m1", qs("r@a:0 s@a:0"), ["m1"])
    assert list(rooms) == qs("r@a:0")
    with pytest.raises(OptionError, match="needs the room of each member"):
        of(allocationStrategy="machineRoomNearby")
    with pytest.raises(OptionError, match="needs option 'environment'"):
        of(allocationStrategy="environment")


def test_each_environment_has_a_group_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = of(environment="dev", environments='{"dev":[0],"test":[1]}', allocationStrategy="environment")
    assert (made.group, made.environment and made.environment.name) == ("g_env_dev", "dev")
    (line,) = caplog.messages
    assert line == "consumer: environment 'dev' (option 'environment'), environmentMode queues"
    assert list(made.allocate("m2", qs("a:0-3"), ["m1", "m2"])) == qs("a:2-3")
    assert (of().group, of().environment) == ("g", None)


def test_with_a_suffix_the_group_is_named_on_the_wire_alone() -> None:
    made = of(environment="dev", environmentMode="suffix")
    assert (made.group, made.environment) == ("g", None)
    with pytest.raises(OptionError, match="'allocationStrategy' is 'environment', which chooses among queues"):
        of(environment="dev", environmentMode="suffix", allocationStrategy="environment")


@pytest.mark.parametrize("number", ["0", "4", "x"])
def test_an_environment_that_there_is_not_is_refused(number: str) -> None:
    with pytest.raises(OptionError, match="expected a whole number from 1 to 3, the number of environments"):
        of(environment=number, environments="3")
    with pytest.raises(OptionError, match="contains illegal characters"):
        of(environment="dév", environments='{"dév":[0]}')
