"""Names as the broker judges them, and namespaces as the Java client wraps them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SYSTEM_GROUPS, SYSTEM_TOPICS
from rocketmq_spark.wire import names
from tests.harness import vectors


@pytest.mark.parametrize("case", vectors("names"), ids=lambda case: ascii(case["name"])[:40])
def test_names(case):
    """With the broker's texts, but for characters: there the text begins as the broker's."""
    name = case["name"]
    for problem, remark in (
        (names.topic_problem(name), case["topic_remark"]),
        (names.group_problem(name), case["group_remark"]),
    ):
        begin, illegal, _ = (remark or "").partition(" illegal characters")
        assert (problem or "").partition(" illegal characters")[0] == begin
        assert illegal or (problem or "") == (remark or "")
    assert (names.topic_problem(name) is None) == case["topic_valid"]
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


@pytest.mark.parametrize(
    ("name", "characters", "legal"),
    [
        ("dbserver1.inventory.orders", "'.'", "dbserver1_inventory_orders"),
        ("$Default", "'$'", "Default"),
        ("a b.c d", "' ', '.'", "a_b_c_d"),
        ("orders.", "'.'", "orders"),
        ("_a.b_", "'.'", "_a_b_"),
        ("тема", "'т', 'е', 'м', 'а'", None),
        ("заказы-1", "'з', 'а', 'к', 'ы'", "-1"),
        ("t\n", r"'\n'", "t"),
        ("x." + "t" * 200, "'.'", None),
    ],
)
def test_an_illegal_character_is_named_with_a_legal_name(name, characters, legal):
    for problem, kind, limit in ((names.topic_problem(name), "topic", 127), (names.group_problem(name), "group", 120)):
        found = problem.removeprefix(f"The specified {kind}: {name}, contains illegal characters: ")
        such = legal if len(name) < 128 else ("x_" + "t" * 200)[:limit]
        assert found == f"{characters}; expected letters, digits, '_', '-', '%' and '|'" + (
            f", such as {such!r}" if such else ""
        )
        assert not such or names.topic_problem(such) is None


@given(st.text(max_size=300))
def test_a_proposed_name_is_legal(name):
    legal = names.legal_name(name)
    assert not legal or names.topic_problem(legal) is None
    if names.topic_problem(name) is None and any(map(str.isalnum, name)):
        assert legal == name or name.startswith("%")  # retry topics may be longer


def test_the_length_counts_namespace_and_environment():
    scope = names.Scope("shop", "dev1")
    assert names.topic_problem("t" * 117, scope) is None
    assert names.topic_problem("t" * 118, scope) == (
        f"The specified topic: shop%{'t' * 118}_dev1, is longer than topic max length: 127"
    )
    assert names.group_problem("g" * 111, scope) is not None
    assert "illegal characters: '.'" in (names.topic_problem("t", names.Scope("a.b")) or "")


def test_retry_topics_of_pops_can_be_read():
    assert names.read_problem("%RETRY%group+orders") is None
    assert names.read_problem("%DLQ%a.b") is None
    assert names.topic_problem("%RETRY%group+orders") is not None
    assert names.read_problem("a.b") is not None


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


def test_the_topic_behind_a_retry_topic_of_pops():
    """Of both kinds; that of pushes holds messages of all topics, which say themselves where they belong."""
    for group, topic, normal in (
        ("g", "%RETRY%g+orders", "orders"),
        ("g", "%RETRY%g_orders", "orders"),
        ("g", "%RETRY%g", "%RETRY%g"),
        ("g", "%RETRY%other+orders", "%RETRY%other+orders"),
        ("n%g", "%RETRY%n%g_n%orders", "n%orders"),
        ("g", "orders", "orders"),
    ):
        assert names.normal_topic(topic, group) == normal


def test_topics_of_a_group():
    assert names.retry_topic("g") == "%RETRY%g"
    assert names.dlq_topic("g") == "%DLQ%g"


@pytest.mark.parametrize(
    ("scope", "name", "wire"),
    [
        (names.NO_SCOPE, "orders", "orders"),
        (names.Scope(suffix="dev1"), "topic_ABC", "topic_ABC_dev1"),  # the example of seed 003
        (names.Scope(suffix="dev1"), "%RETRY%billing", "%RETRY%billing_dev1"),
        (names.Scope(suffix="dev1"), "%DLQ%billing", "%DLQ%billing_dev1"),
        (names.Scope("shop", "dev1"), "orders", "shop%orders_dev1"),
        (names.Scope("shop", "dev1"), "%RETRY%billing", "%RETRY%shop%billing_dev1"),
    ],
)
def test_scope_names_topics_and_groups_and_back(scope: names.Scope, name: str, wire: str) -> None:
    assert scope.name_on_wire(name) == scope.name_on_wire(wire) == wire
    assert scope.has_affixes(wire)
    assert scope.user_name(wire) == name


@pytest.mark.parametrize("name", ["TBW102", "SCHEDULE_TOPIC_XXXX", "rmq_sys_TRACE", "CID_RMQ_SYS_TRANS", ""])
def test_a_suffix_leaves_the_names_of_the_system_alone(name: str) -> None:
    scope = names.Scope(suffix="dev1")
    assert scope.name_on_wire(name) == scope.user_name(name) == name
    assert not scope.has_affixes(name)


@pytest.mark.parametrize("name", ["orders", "orders_dev2", "orders_dev", "ordersdev1"])
def test_names_of_other_environments_are_not_of_the_scope(name: str) -> None:
    scope = names.Scope(suffix="dev1")
    assert not scope.has_affixes(name)
    assert scope.user_name(name) == name


@given(
    st.sampled_from(["", "ns"]),
    st.from_regex(r"[a-z_]{1,4}", fullmatch=True),
    st.from_regex(r"[a-z_%]{1,9}", fullmatch=True),
)
def test_what_stands_on_the_wire_is_of_its_scope(namespace: str, suffix: str, name: str) -> None:
    scope = names.Scope(namespace, suffix)
    wire = scope.name_on_wire(name)
    assert scope.has_affixes(wire) or names.namespace_of(wire) != namespace
    assert scope.name_on_wire(scope.user_name(wire)) == wire == scope.name_on_wire(wire)
