"""Names as the broker judges them, and namespaces as the Java client wraps them."""

import pytest

from rocketmq_spark.codes import SYSTEM_GROUPS, SYSTEM_TOPICS
from rocketmq_spark.wire import names
from tests.harness import vectors


@pytest.mark.parametrize("case", vectors("names"), ids=lambda case: ascii(case["name"])[:40])
def test_names(case):
    name = case["name"]
    assert names.topic_problem(name) == (case["topic_remark"] or None)
    assert (names.topic_problem(name) is None) == case["topic_valid"]
    assert names.group_problem(name) == (case["group_remark"] or None)
    assert (names.group_problem(name) is None) == case["group_valid"]
    assert names.is_system_topic(name) == case["system_topic"]
    assert names.is_send_forbidden(name) == case["send_forbidden"]


@pytest.mark.parametrize("case", vectors("namespaces"), ids=lambda case: f"{case['namespace']}+{case['resource']}")
def test_namespaces(case):
    namespace, name = case["namespace"], case["resource"]
    assert names.wrap_namespace(namespace, name) == case["wrapped"]
    assert names.strip_namespace(namespace, name) == case["without_namespace"]
    assert names.strip_any_namespace(name) == case["without_any"]
    assert names.namespace_of(name) == case["namespace_from_resource"]
    if case["wrapped_retry_group"] is not None:
        assert names.retry_topic(names.wrap_namespace(namespace, name)) == case["wrapped_retry_group"]


def test_a_trailing_line_break_is_no_legal_name():
    assert names.topic_problem("topic\n") is not None
    assert names.group_problem("group\n") is not None


@pytest.mark.parametrize("group", [*sorted(SYSTEM_GROUPS), "CID_RMQ_SYS_TRANS"])
def test_system_groups(group):
    assert names.is_system_group(group)
    assert not names.is_system_group(group.lower())


def test_topics_of_applications():
    everything = [*SYSTEM_TOPICS, "rmq_sys_x", "%RETRY%g", "%DLQ%g", "RMQ_SYS_NEW", "c_REPLY_TOPIC", "broker-a", "mine"]
    assert [name for name in everything if names.is_user_topic(name, {"broker-a"})] == ["mine"]


def test_topics_of_a_group():
    assert names.retry_topic("g") == "%RETRY%g"
    assert names.dlq_topic("g") == "%DLQ%g"
