"""Which topics and queues the options mean, which filter belongs to a topic, and what is refused before anything is asked."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CheckpointMismatch, OffsetError, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, BrokerData, Filter, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.spark.source import checkpoint_identity, subscription
from rocketmq_spark.spark.source.offsets import Offsets


def options(name_server="h:1", **given):
    return options_table.parse({"nameServer": name_server, "subscribe": "t,u", **given}).for_role("batch source")


@pytest.mark.parametrize(
    ("given", "of_t", "of_u"),
    [
        ({}, NO_FILTER, NO_FILTER),
        ({"tags": "*"}, NO_FILTER, NO_FILTER),
        ({"tags": "b||  a || b"}, Filter("a || b", "TAG"), Filter("a || b", "TAG")),
        ({"tags": '{"t": "a", "u": "*"}'}, Filter("a", "TAG"), NO_FILTER),
        ({"sql": "x > 5"}, Filter("x > 5", "SQL92"), Filter("x > 5", "SQL92")),
        ({"sql": '{"u": "x > 5"}'}, NO_FILTER, Filter("x > 5", "SQL92")),
    ],
)
def test_of_topic(given, of_t, of_u):
    found = options(**given)
    assert (subscription.filter_of_topic(found, "t"), subscription.filter_of_topic(found, "u")) == (of_t, of_u)


def test_no_filter_is_false():
    assert not NO_FILTER
    assert Filter("a")


def test_two_kinds_exclude_each_other():
    with pytest.raises(OptionError, match="options 'tags' and 'sql' are mutually exclusive"):
        subscription.check_subscription(options(tags="a", sql="x > 5"))


@pytest.mark.parametrize("tags", ["||", " || ||", '{"t": "||"}'])
def test_tags_that_are_none(tags):
    with pytest.raises(OptionError, match=r"expected tags separated by \|\|"):
        subscription.check_subscription(options(tags=tags))


@pytest.mark.parametrize("tags", ["*", "a", "a||b", '{"t": "a", "u": "*"}'])
def test_tags_that_are_fine(tags):
    subscription.check_subscription(options(tags=tags))


def kept(**given):
    """What offsets record, without what they record of every source of these tests."""
    record = checkpoint_identity.source_identity(options(**given))
    usual = {"namespace": "", "subscribe": ["t", "u"]}
    return {name: value for name, value in record.items() if usual.get(name) != value}


def test_offsets_remember_the_filter():
    assert kept() == kept(tags="*") == {}
    assert kept(tags="a || b", namespace="n") == {"namespace": "n", "tags": "a || b"}
    assert kept(group="g") == {"group": "g"}
    assert kept(sql='{"t":"x > 5"}') == {"sql": {"t": "x > 5"}}
    assert checkpoint_identity.filter_of({"namespace": "n", "environment": "e", "tags": "a"}) == {"tags": "a"}
    assert checkpoint_identity.filter_of({"sql": "x > 5"}) == {"sql": "x > 5"}


@pytest.mark.parametrize(
    ("given", "record", "topics"),
    [
        ({"subscribe": "u,t,u"}, {"subscribe": ["t", "u"]}, {"t", "u"}),
        (
            {"subscribe": None, "assign": '{"u":{"broker-a":[3,1]},"t":{"broker-b":[0]}}'},
            {"assign": {"t": {"broker-b": [0]}, "u": {"broker-a": [1, 3]}}, "newQueues": False},
            {"t", "u"},
        ),
        ({"subscribe": None, "subscribePattern": "t|u"}, {"subscribePattern": "t|u"}, set()),
    ],
)
def test_offsets_remember_the_topics_that_are_named(given, record, topics):
    found = checkpoint_identity.source_identity(options(**given))
    assert found == {"namespace": "", **record}
    assert checkpoint_identity.recorded_topics(json.loads(json.dumps(found))) == topics
    assert checkpoint_identity.recorded_topics({"namespace": ""}) == set(), "of an earlier release"


def test_a_damaged_record_of_assigned_queues_is_an_error():
    of = Offsets(
        {},
        source_identity={"newQueues": False, "assign": {"t": 3}},
        partitioning_json={"allocationStrategy": "averagely"},
    )
    with pytest.raises(OffsetError, match=r"reads/assign: {'t': 3} cannot be used; expected JSON such as"):
        checkpoint_identity.queues_of_next_batch(of, ZERO_TO_FIVE)


def test_offsets_remember_which_new_queues_are_read():
    assert kept(subscribe=None, subscribePattern="or.*") == {"subscribePattern": "or.*"}
    internal = {"subscribePattern": "%DLQ%.*", "includeInternal": True}
    assert kept(subscribe=None, **internal) == internal
    assert kept(subscribe=None, assign='{"t":{"broker-a":[0]}}')["newQueues"] is False
    for strategy in ("averagely", "averagelyByCircle", "consistentHash"):
        assert kept(allocationStrategy=strategy) == {}
    assert kept(allocationStrategy="machineRoom", machineRooms="a") == {"newQueues": False}


ZERO_TO_FIVE = [MessageQueue("t", broker, number) for broker in ("broker-a", "broker-b") for number in range(3)]


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ({}, None, [0, 1, 2, 3, 4, 5]),
        ({"newQueues": False}, None, [1]),
        ({"newQueues": False, "assign": {"t": {"broker-b": [0, 2]}}}, None, [1, 3, 5]),
        ({"environment": "x", "environmentMode": "suffix"}, None, [0, 1, 2, 3, 4, 5]),
        ({"environment": "2", "environments": 3}, None, [1, 4]),
        ({"environment": "dev", "environments": ["*:1", "broker-b:0"]}, None, [1, 3, 4]),
        ({"environment": "2"}, {ZERO_TO_FIVE[1]: 2}, [1]),
        ({"environment": "dev", "environments": {}}, None, [1]),  # as older releases wrote it
        ({"environment": "dev"}, None, [1]),
    ],
)
def test_offsets_say_which_queues_are_read_next(given, environment, expected):
    strategy = {"allocationStrategy": "averagely"}
    of = Offsets(
        {ZERO_TO_FIVE[1]: 5}, source_identity=given, environment_numbers=environment or {}, partitioning_json=strategy
    )
    assert checkpoint_identity.queues_of_next_batch(of, ZERO_TO_FIVE) == [ZERO_TO_FIVE[i] for i in expected]


def test_a_new_topic_has_the_queue_of_an_environments_number():
    of = Offsets({ZERO_TO_FIVE[1]: 5}, source_identity={"environment": "2"}, environment_numbers={ZERO_TO_FIVE[1]: 2})
    new = [MessageQueue("u", "broker-a", number) for number in range(3)]
    assert checkpoint_identity.queues_of_next_batch(of, [*ZERO_TO_FIVE, *new]) == [ZERO_TO_FIVE[1], new[1]]


def validate(broker_cluster, topic, sql):
    found = options(broker_cluster.name_server, subscribe=topic, sql=sql)
    session.routes(found).get(topic)
    subscription.check_sql(
        session.offsets(found), found, [MessageQueue(topic, "broker-a", 0)], Deadline.after(10), lambda _: False
    )


def test_a_broker_compiles_the_expression(broker_cluster, topic):
    validate(broker_cluster, topic, "a > 5 AND region IN ('eu', 'us')")


def test_an_expression_that_a_broker_refuses(broker_cluster, topic):
    """Sent with a pull it would be answered with every message."""
    with pytest.raises(OptionError, match="option 'sql' is 'a >'; the broker rejects it") as caught:
        validate(broker_cluster, topic, "a >")
    assert caught.value.topic == topic
    assert "Encountered" in str(caught.value), str(caught.value)


def test_sql_of_a_topic_matched_later_is_compiled_at_the_start(broker_cluster, topic):
    """Its messages are pulled as soon as it is there."""
    for other, refused in ((f"{topic}-later", True), ("elsewhere", False)):
        found = options(broker_cluster.name_server, subscribePattern=f"{topic}.*", sql=json.dumps({other: "a >"}))
        session.routes(found).get(topic)
        queues = [MessageQueue(topic, "broker-a", 0)]
        with pytest.raises(OptionError, match="option 'sql' is 'a >'") if refused else nullcontext():
            subscription.check_sql(session.offsets(found), found, queues, Deadline.after(10), lambda _: False)


# --- topics and queues


A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)


def meaning(**given):
    found = {
        "nameServer": "h:1",
        **({} if given.keys() & {"assign", "subscribePattern"} else {"subscribe": "t"}),
        **given,
    }
    return options_table.parse(found).for_role("stream source")


def route(read=2, perm=6, addresses=None):
    brokers = {"a": BrokerData("a", "c", addresses or {0: "h:2"})}
    return TopicRoute("t", (QueueData("a", read, read, perm),), brokers)


LISTED = ["orders-eu", "orders-us", "prices", "%RETRY%orders-g", "%DLQ%orders-g", "orders-cluster", "TBW102"]


@pytest.mark.parametrize(
    ("pattern", "internal_too", "expected"),
    [
        ("orders-.*", False, ("orders-eu", "orders-us")),
        ("orders-e", False, ()),  # the whole name
        (".*orders-.*", True, ("orders-eu", "orders-us", "%RETRY%orders-g", "%DLQ%orders-g")),
        (".*", False, ("orders-eu", "orders-us", "prices")),
    ],
)
def test_a_pattern_means_topics_of_users(pattern, internal_too, expected):
    made = meaning(subscribePattern=pattern, includeInternal=internal_too)
    assert subscription.matching_topics(made, LISTED, {"orders-cluster"}) == expected


@pytest.mark.parametrize(("internal_too", "more"), [(False, ("orders-us",)), (True, ("%DLQ%orders-g", "orders-us"))])
def test_unlisted_topics_with_checkpoint_offsets_are_queried(internal_too, more):
    made = meaning(subscribePattern=".*orders.*", includeInternal=internal_too)
    known = ["orders-us", "orders-eu", "prices", "%DLQ%orders-g"]
    assert subscription.with_checkpoint_topics(made, ("orders-eu",), known) == ("orders-eu", *more)
    assert subscription.with_checkpoint_topics(made, ("orders-eu",), ["orders-eu"]) == ("orders-eu",)


def test_queues_that_are_read():
    assert subscription.readable_queues(meaning(), route(), False) == [A0, A1]
    assigned = meaning(assign='{"t":{"a":[1]}}')
    assert subscription.readable_queues(assigned, route(), False) == [A1]


def test_absent_assigned_queues_are_an_error_only_at_a_start():
    assigned = meaning(assign='{"t":{"a":[1],"b":[0]}}')
    with pytest.raises(OptionError, match="option 'assign' names queues that do not exist: t/b/0"):
        subscription.readable_queues(assigned, route(), False)
    assert subscription.readable_queues(assigned, route(), True) == [A1]
    assert subscription.readable_queues(assigned, route(), False, {B0}) == [A1], (
        "its broker left: a checkpoint waits for it"
    )
    assert subscription.readable_queues(meaning(assign='{"t":{"b":[0]}}'), route(), False, {B0}) == []


def test_a_topic_without_read_permission():
    with pytest.raises(RouteNotFound, match="no read permission"):
        subscription.readable_queues(meaning(), route(perm=2), False)
    assert subscription.readable_queues(meaning(), route(perm=2), True) == []


@pytest.mark.parametrize(
    ("known", "queue", "reason"),
    [
        (None, A0, "the route does not name its broker"),
        (route(), B0, "the route does not name its broker"),
        (route(perm=2), A0, "no read permission"),
        (route(read=1), A1, "the route says that its broker does not read it any more"),
        (route(addresses={1: "h:3"}), A0, "its master is down, and the slave lacks messages"),
        (route(), A0, "its broker does not answer, or the options do not choose it"),
    ],
)
def test_why_a_queue_is_absent(known, queue, reason):
    assert subscription.unavailable_reason(known, queue) == reason
    assert subscription.is_removed_queue(known, queue) == (
        reason == "the route says that its broker does not read it any more"
    )


@pytest.mark.parametrize(
    ("was", "now", "refused"),
    [
        (["east"], ["west"], True),
        (["east"], ["east", "west"], False),
        (["east"], [], False),  # a server that does not say it
        (None, ["west"], False),  # an older checkpoint
        ("east", ["west"], False),
    ],
)
def test_a_checkpoint_of_another_cluster(was, now, refused, caplog):
    begin = Offsets({QUEUE: 1}, source_identity={} if was is None else {"clusters": was})
    checkpoint_identity.check_clusters(options(failOnDataLoss="warn"), begin, now)
    text = "the checkpoint is of cluster east, and this query of cluster west"
    assert (text in caplog.text) == refused
    with pytest.raises(CheckpointMismatch, match=text) if refused else nullcontext():
        checkpoint_identity.check_clusters(options(), begin, now)


class Compiler:
    """Brokers, or a Proxy, to which expressions are sent."""

    def __init__(self, compiles=True):
        self.compiles = compiles

    def check_filter(self, broker_name, group, topic, sql, deadline):
        return self.compiles


def test_an_expression_for_a_batch_topic_is_refused():
    """Brokers would compare it with the properties of whole batches."""
    with pytest.raises(OptionError, match=r"t is a batch topic.*Filter with option 'tags'"):
        subscription.check_sql(
            Compiler(), options(sql="a > 5"), [MessageQueue("t", "b", 0)], Deadline.after(1), lambda _: True
        )


def test_an_expression_that_a_proxy_did_not_compile_is_refused():
    with pytest.raises(OptionError, match="a Proxy does not check the expression"):
        subscription.check_sql(
            Compiler(False), options(sql="a >"), [MessageQueue("t", "b", 0)], Deadline.after(1), lambda _: False
        )


NAMED = {"environment": "dev", "environments": '{"dev": [0], "test": {"broker-a": [1]}}'}
SUFFIX = {"environment": "dev", "environmentMode": "suffix"}
QUEUE, OTHER, DEAD = (MessageQueue(topic, "broker-a", number) for topic, number in (("t", 0), ("t", 1), ("%DLQ%g", 3)))


@pytest.mark.parametrize(
    ("given", "record"),
    [
        (NAMED, {"environment": "dev", "environments": ["*:0"]}),
        ({"environment": "2", "environments": "3"}, {"environment": "2", "environments": 3}),
        ({"environment": "2"}, {"environment": "2"}),
        (SUFFIX, {"environment": "dev", "environmentMode": "suffix"}),
    ],
)
def test_offsets_remember_the_environment(given, record):
    found = options(**given)
    assert kept(**given) == record
    checkpoint_identity.check_checkpoint(found, Offsets({OTHER: 1}, source_identity=record))


@pytest.mark.parametrize(
    ("given", "begin", "problem"),
    [
        ({"environments": "4"}, Offsets({OTHER: 1}, source_identity={"environment": "2", "environments": 2}), "'2' of 2, and"),
        ({"environments": "2"}, Offsets({QUEUE: 1}, source_identity={"environment": "2"}), "by its number alone, and"),
        ({}, Offsets({OTHER: 1}, source_identity={"environment": "2", "environments": 2}), "of environment '2' by its number"),
        (
            {"environments": '{"2": [1, 2]}'},
            Offsets({OTHER: 1}, source_identity={"environment": "2", "environments": ["*:1"]}),
            r"with the queues \*:1, and this query of environment '2' with the queues \*:1, \*:2",
        ),
        ({"environments": "2"}, Offsets({OTHER: 1}, source_identity={"environment": "2"}), None),  # as it was written before
        (
            {"environments": '{"2": [1], "9": [9]}'},
            Offsets({OTHER: 1}, source_identity={"environment": "2", "environments": ["*:1"]}),
            None,
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_layout_is_refused(given, begin, problem):
    """It would leave queues unread, and read those of others."""
    with nullcontext() if problem is None else pytest.raises(CheckpointMismatch, match=problem):
        checkpoint_identity.check_checkpoint(options(environment="2", **given), begin)


@pytest.mark.parametrize(
    ("given", "offsets", "problem"),
    [
        (
            {},
            Offsets({QUEUE: 1}, source_identity={"environment": "dev"}),
            "of environment 'dev', and this query of no environment",
        ),
        (
            NAMED,
            Offsets({QUEUE: 1}, source_identity={"environment": "test"}),
            "of environment 'test', and this query of env",
        ),
        (NAMED, Offsets({QUEUE: 1, OTHER: 1}), "of no environment, and this query of environment 'dev'"),
        (
            {"environment": "1"},
            Offsets({QUEUE: 1}, source_identity={"namespace": ""}),
            "of no environment, and this query of environment '1'",
        ),
        (
            {"environment": "1"},
            Offsets({QUEUE: 1}, environment_numbers={QUEUE: 2}),
            "and this query of environment '1'",
        ),
        (SUFFIX, Offsets({QUEUE: 1}), "and this query of environment 'dev' with 'suffix'"),
        (
            NAMED,
            Offsets({QUEUE: 1}, source_identity=checkpoint_identity.source_identity(options(**SUFFIX))),
            "of environment 'dev' with 'suffix', and",
        ),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused(given, offsets, problem):
    with pytest.raises(CheckpointMismatch, match=problem):
        checkpoint_identity.check_checkpoint(options(**given), offsets)


@pytest.mark.parametrize(
    ("given", "offsets"),
    [
        ({}, Offsets({QUEUE: 1, OTHER: 2})),
        (SUFFIX, Offsets({})),
        (NAMED, Offsets({QUEUE: 1, DEAD: 1})),  # positions from before the environment was written down
        ({"environment": "2"}, Offsets({QUEUE: 1}, environment_numbers={QUEUE: 2})),
    ],
)
def test_a_checkpoint_of_the_same_environment_is_taken(given, offsets):
    checkpoint_identity.check_checkpoint(options(**given), offsets)


@pytest.mark.parametrize(
    ("begin", "owned", "problem"),
    [
        (Offsets({QUEUE: 1, DEAD: 2}), {QUEUE, DEAD}, None),
        (Offsets({QUEUE: 1}, source_identity={"tags": "a"}), {QUEUE, MessageQueue("u", "broker-a", 5)}, None),
        (Offsets({}), {QUEUE}, None),
        (Offsets({OTHER: 1}), {QUEUE}, "positions of t/broker-a/1; this query of environment '1' reads t/broker-a/0"),
        (
            Offsets({QUEUE: 1, OTHER: 1}),
            {QUEUE},
            "positions of t/broker-a/0, t/broker-a/1; this query of environment '1' reads t/",
        ),
        (Offsets({QUEUE: 1}), set(), "reads none of these topics"),
        # What is written down was compared before.
        (Offsets({OTHER: 1}, environment_numbers={OTHER: 1}), {QUEUE}, None),
        (Offsets({OTHER: 1}, source_identity={"namespace": ""}), {QUEUE}, None),
    ],
)
def test_offsets_from_before_environments_are_compared_by_queue(begin, owned, problem):
    found = options(environment="1")
    if _older(begin):
        checkpoint_identity.check_checkpoint(found, begin)
    if problem is None:
        checkpoint_identity.check_environment_queues(found, begin, owned)
        checkpoint_identity.check_environment_queues(options(), begin, set())
        return
    with pytest.raises(CheckpointMismatch, match=problem):
        checkpoint_identity.check_environment_queues(found, begin, owned)


def _older(begin):
    return not begin.environment_numbers and "namespace" not in begin.source_identity


HERE, THERE = {"namespace": "here"}, {"namespace": "there"}


@pytest.mark.parametrize(
    ("given", "record", "problem"),
    [
        (
            {},
            HERE,
            "is of namespace 'here', and this query of no namespace. Start the query with option 'namespace' as before",
        ),
        (THERE, HERE, "is of namespace 'here', and this query of namespace 'there'"),
        (HERE, {"namespace": ""}, "is of no namespace, and this query of namespace 'here'"),
        (
            {**HERE, **NAMED},
            {"namespace": "", "environment": "test"},
            "is of no namespace and environment 'test', and this query of namespace 'here' and environment 'dev'. "
            r"Start the query with an empty option 'namespace' and option 'environment' "
            r"\(or variable ROCKETMQ_ENVIRONMENT\) as before, "
            "or with a new checkpointLocation",
        ),
    ],
)
@pytest.mark.parametrize("policy", ["fail", "warn"])
def test_a_checkpoint_of_another_namespace_is_refused(given, record, problem, policy):
    """Its positions mean nothing there, whatever the user says of losses."""
    with pytest.raises(CheckpointMismatch, match=problem):
        checkpoint_identity.check_checkpoint(
            options(failOnDataLoss=policy, **given), Offsets({QUEUE: 1}, source_identity=record)
        )
    with pytest.raises(CheckpointMismatch, match=problem):  # it waits for its first topic
        checkpoint_identity.check_checkpoint(
            options(failOnDataLoss=policy, **given), Offsets({}, source_identity=record)
        )


@pytest.mark.parametrize(("given", "record"), [(HERE, HERE), (HERE, {}), ({}, {"tags": "a"}), ({"tags": "a"}, {})])
def test_checkpoint_of_same_namespace_or_without_one_is_accepted(given, record):
    checkpoint_identity.check_checkpoint(options(**given), Offsets({QUEUE: 1}, source_identity=record))
    checkpoint_identity.check_checkpoint(options(**given), Offsets({}, source_identity=record))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"subscribe": "v,w"}, "topics v, w"),
        ({"subscribe": "v"}, "topic v"),
        ({"assign": '{"v":{"broker-a":[0]}}'}, "topic v"),
        ({"subscribePattern": "v.*"}, "topics that match 'v.*'"),
    ],
)
def test_checkpoint_of_other_topics_is_refused_unless_loss_is_ok(given, named):
    found = Offsets({MessageQueue(topic, "broker-a", 0): 1 for topic in "tu"})
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint_identity.check_checkpoint(meaning(**given), found)
    assert f"the checkpoint is of topics t, u, and this query of {named}. Start the query with a new" in str(
        caught.value
    )
    assert "With failOnDataLoss=warn" in str(caught.value)
    checkpoint_identity.check_checkpoint(meaning(**given, failOnDataLoss="warn"), found)


@pytest.mark.parametrize(
    "given",
    [{"subscribe": "v,u"}, {"assign": '{"v":{"broker-a":[0]},"u":{"broker-b":[1]}}'}, {"subscribePattern": "u|v"}],
)
def test_one_topic_in_common_is_enough(given):
    """The others are left, or come anew."""
    checkpoint_identity.check_checkpoint(meaning(**given), Offsets({MessageQueue(t, "broker-a", 0): 1 for t in "tu"}))


@pytest.mark.parametrize("given", [NAMED, {"environment": "2", "environments": "3"}])
def test_recorded_environments_own_the_same_queues(given):
    """What ``recorded`` writes is what ``read_next`` reads."""
    found = options(**given)
    of = Offsets({ZERO_TO_FIVE[0]: 1}, source_identity=checkpoint_identity.source_identity(found))
    assert checkpoint_identity.queues_of_next_batch(of, ZERO_TO_FIVE) == environment_of(found).owned(ZERO_TO_FIVE)
