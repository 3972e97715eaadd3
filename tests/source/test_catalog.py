"""What exists now, on a real broker and on one that says what the test wants; brokers that die are in tests/live/loss."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import (
    CallTimeout,
    CheckpointMismatch,
    ConnectionLost,
    OptionError,
    RouteNotFound,
    ServiceNotAvailable,
)
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source import kafka_partitions
from rocketmq_spark.spark.source.catalog import OffsetCache
from rocketmq_spark.spark.source.offsets import Offsets
from tests.harness import store
from tests.mockbroker import NO_ROUTE, Held, MockBroker, close, eventually, never, ok, refuse, route, topic_config
from tests.reading import feed
from tests.source.scripted import cluster
from tests.source.scripted import stats as scripted_stats

STATS = (
    b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:'
    b'{"lastUpdateTimestamp":7,"maxOffset":9,"minOffset":2}}}'
)


GONE = refuse(Response.TOPIC_NOT_EXIST, "topic[t] not exist")


def catalog(name_server, clock=None, **given):
    made = {"nameServer": name_server, "routeRefresh": 0, "numRetries": 0, "requestTimeout": "1s", **given}
    if not made.keys() & {"subscribePattern", "assign"}:
        made.setdefault("subscribe", "t")
    return OffsetCache(options_table.parse(made).for_role("stream source"), clock)


@pytest.fixture
def scripted():
    """Name server and broker in one: topic ``t`` with one queue from 2 to 9."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
        yield broker
    session.close_all()


@pytest.mark.parametrize(
    "answer", [scripted_stats({MessageQueue("t", "a", 0): (0, 1)}), refuse(Response.SYSTEM_BUSY, "busy"), never, close]
)
def test_a_broker_that_is_not_listed_keeps_its_numbers(scripted, answer):
    with MockBroker({Request.GET_TOPIC_STATS_INFO: answer}) as first:
        both = route(1, {"a": first.address, "broker-a": scripted.address})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [both, route(1, {"broker-a": scripted.address})])
        session.routes(catalog(scripted.address)._options).get("t")
        later = catalog(scripted.address)
        later.fetch_all()
        assert set(later.known_routes["t"].brokers) == {"broker-a"}
        numbers = kafka_partitions.partition_numbers(
            kafka_partitions.with_new_queues({}, later.partition_queues({"t"}))
        )
        assert numbers == {MessageQueue("t", "a", 0): 0, MessageQueue("t", "broker-a", 0): 1}


def test_brokers_of_many_topics_keep_their_numbers(scripted):
    """A stream whose name server starts anew, and lists one broker of two for a while."""
    topics = [f"t{n}" for n in range(80)]
    with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(b'{"offsetTable":{}}')}) as first:
        both = route(1, {"a": first.address, "broker-a": scripted.address})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, both)
        source = catalog(scripted.address, subscribe=",".join(topics))
        for answer in (both, NO_ROUTE, route(1, {"broker-a": scripted.address})):
            scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, answer)
            source.refresh_routes()
        source.known_routes = {topic: source.routes.get(topic) for topic in topics}
        assert {name for known in source.known_routes.values() for name in known.brokers} == {"broker-a"}
        there = source.partition_queues(topics)
        assert sorted(there) == sorted(MessageQueue(topic, name, 0) for topic in topics for name in ("a", "broker-a"))


def test_only_new_numbers_wait_for_a_broker_that_does_not_answer(scripted):
    with MockBroker({Request.GET_TOPIC_STATS_INFO: never}) as first:
        both = route(1, {"a": first.address, "broker-a": scripted.address})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [both, route(1, {"broker-a": scripted.address})])
        session.routes(catalog(scripted.address)._options).get("t")
        later = catalog(scripted.address)
        later.fetch_all()
        assert later.partition_queues({"t"}, numbered_topics={"t"}) == [MessageQueue("t", "broker-a", 0)]
        assert first.seen(Request.GET_TOPIC_STATS_INFO) == []


def queues(topic, count):
    return [MessageQueue(topic, "broker-a", i) for i in range(count)]


def test_all_queues_with_their_bounds(broker_cluster, make_topic):
    one, two = make_topic(queues=2), make_topic(queues=3)
    feed(broker_cluster, two, 6)
    bounds = catalog(broker_cluster.name_server, subscribe=f"{one},{two}").fetch_all().bounds
    assert set(bounds) == {*queues(one, 2), *queues(two, 3)}
    assert [bounds[queue].max_offset for queue in queues(two, 3)] == [2, 2, 2]
    assert all(of.min_offset == 0 for of in bounds.values())


def test_assigned_queues_only(broker_cluster, make_topic):
    topic = make_topic(queues=4)
    assign = f'{{"{topic}":{{"broker-a":[3,1]}}}}'
    assert sorted(catalog(broker_cluster.name_server, assign=assign).fetch_all().bounds) == [
        queues(topic, 4)[i] for i in (1, 3)
    ]
    with pytest.raises(OptionError, match=f"option 'assign' names queues that do not exist: {topic}/broker-a/9"):
        catalog(broker_cluster.name_server, assign=f'{{"{topic}":{{"broker-a":[1,9]}}}}').fetch_all()


def test_topics_that_match_in_full(broker_cluster):
    for name in ("cat-one", "cat-two", "a-cat-three"):
        broker_cluster.create_topic(name, 1)
    assert catalog(broker_cluster.name_server, subscribePattern="cat-.*").topics() == ("cat-one", "cat-two")
    everything = catalog(broker_cluster.name_server, subscribePattern=".*").topics()
    assert {"cat-one", "a-cat-three"} <= set(everything)
    internal = {"TBW102", "broker-a", "DefaultCluster", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"}
    assert not internal & set(everything)
    assert catalog(broker_cluster.name_server, subscribePattern="nosuch.*").fetch_all().bounds == {}


def test_a_missing_topic_is_waited_for(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, NO_ROUTE, route(1, {"broker-a": scripted.address})])
    assert list(catalog(scripted.address, topicWait="20s").fetch_all().bounds) == queues("t", 1)


def test_a_missing_topic_is_an_error_at_once_by_default(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    with pytest.raises(RouteNotFound, match="topic t"):
        catalog(scripted.address).fetch_all()


def test_a_start_needs_all_answers(scripted):
    scripted.on(Request.GET_TOPIC_STATS_INFO, never)
    with pytest.raises(CallTimeout):
        catalog(scripted.address, requestTimeout="100ms").fetch_all()
    with pytest.raises(ConnectionLost):
        catalog("127.0.0.1:1").fetch_all()


def test_a_running_stream_waits_for_answers(scripted, caplog):
    one = catalog(scripted.address)
    assert one.fetch_all().bounds
    one._poll_interval_s = 0.0
    scripted.on(Request.GET_TOPIC_STATS_INFO, never)
    assert one.latest().bounds == {}
    assert "the source waits" in caplog.text
    one._poll_interval_s = 0.0
    scripted.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
    assert list(one.latest().bounds) == queues("t", 1)


def test_one_sweep_serves_several_questions(scripted):
    one = catalog(scripted.address)
    one._poll_interval_s = 60.0
    one.fetch_all()
    one._poll_interval_s = 60.0
    assert one.latest() is one.latest()
    assert len(scripted.seen(Request.GET_TOPIC_STATS_INFO)) == 1


def test_what_a_plan_saw_serves_the_rest_of_its_batch(scripted):
    now = [100.0]
    one = catalog(scripted.address, Clock(now=lambda: now[0]))
    seen = one.fetch_all()
    now[0] += 0.9
    assert one.latest(same_batch=True) is seen
    one._routes_are_stale = True
    assert one.latest(same_batch=True) is not seen
    now[0] += 1.1
    one.latest(same_batch=True)
    assert len(scripted.seen(Request.GET_TOPIC_STATS_INFO)) == 3


@pytest.mark.parametrize("ask", [OffsetCache.fetch_all, OffsetCache.latest])
def test_routes_fetched_together_are_not_fetched_again_singly(scripted, ask):
    """They are as old as that, whatever age is allowed: with thousands of topics each would wait for a round trip."""
    one = catalog(scripted.address, subscribe="t,u,v")
    scripted.on(
        Request.GET_TOPIC_STATS_INFO, lambda call: ok(STATS.replace(b'"t"', b'"%s"' % call.ext("topic").encode()))
    )
    assert len(ask(one).bounds) == 3
    assert len(scripted.seen(Request.GET_ROUTEINFO_BY_TOPIC)) == 3


def test_a_view_is_waited_for_until_it_is_due_and_not_too_long(scripted):
    slept: list[float] = []
    one = catalog(scripted.address, Clock(now=lambda: 100.0, sleep=slept.append))
    one.fetch_all()
    one._poll_interval_s = 60.0
    one.wait_for_next_poll(0.1)
    one._poll_duration_s = 0.2
    one.wait_for_next_poll(0.1)
    one._poll_duration_s = 3.0
    one.wait_for_next_poll(0.1)
    one._poll_interval_s = 0.05
    one.wait_for_next_poll(0.1)
    one._polled_at_s = float("-inf")
    one.wait_for_next_poll(0.1)
    assert slept == [0.1, 0.2, 0.25, pytest.approx(0.05), 0]


def test_a_quiet_topic_is_asked_less_often(scripted):
    one = catalog(scripted.address)
    one.fetch_all()
    rests = []
    for _ in range(12):
        one._keep_view(one._view, 0.001)
        rests.append(one._poll_interval_s)
    assert rests == sorted(rests)
    assert rests[-1] >= 0.25


A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)


def again(one):
    """The next view, now."""
    one._polled_at_s = float("-inf")
    return one.latest()


@pytest.fixture
def two():
    """A name server and two brokers, each with one queue of topic ``t`` from 0 to 5."""
    with MockBroker() as name_server, MockBroker() as a, MockBroker() as b:
        name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": a.address, "broker-b": b.address}))
        a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({A: (0, 5)}))
        b.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({B: (0, 5)}))
        yield name_server, a, b
    session.close_all()


def test_topic_whose_broker_starts_between_queries_is_kept(scripted):
    one = catalog(scripted.address)
    one.fetch_all()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, route(1, {"broker-a": scripted.address})])
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    assert again(one).deleted_topics == frozenset()
    assert list(again(one).bounds) == queues("t", 1)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, route(1, {"broker-a": scripted.address})])
    one._routes_are_stale = True
    with pytest.raises(RouteNotFound):
        one.fetch_all()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == one.fetch_all().deleted_topics == {"t"}


@pytest.mark.parametrize("restarted", [False, True])
def test_topic_unknown_to_a_restarted_name_server_is_not_deleted(scripted, restarted):
    """Its broker is registered, and registers its topics in portions: it is asked itself."""
    one = catalog(scripted.address)
    one.fetch_all()
    if restarted:
        session.close_all()
        one = catalog(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    one._routes_are_stale = True
    assert again(one).deleted_topics == frozenset()
    with pytest.raises(RouteNotFound):
        one.fetch_all()
    for silence in (never, refuse(Response.SYSTEM_BUSY, "busy")):
        scripted.on(Request.GET_TOPIC_STATS_INFO, silence)
        assert again(one).deleted_topics == frozenset()
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == {"t"}


def test_routes_stay_valid_while_restarted_name_server_is_empty(scripted):
    one = catalog(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_all()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({}))
    view = again(one)
    assert (list(view.bounds), view.deleted_topics) == ([A], frozenset())


def test_topic_whose_last_route_had_no_master_is_not_deleted(scripted):
    """Whose word it would be is not known: the list of all has the master again, and the route is gone."""
    one = catalog(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_all()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": ""}))
    again(one)
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    assert again(one).deleted_topics == frozenset()


def test_pattern_topic_deleted_after_listing_is_left_out(scripted):
    """In a cluster that others work with a list is old as soon as it is there."""
    lists = [ok(json.dumps({"topicList": names}).encode()) for names in (["t", "gone"], ["t"])]
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lists)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    there = route(1, {"broker-a": scripted.address})
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda c: there if c.ext("topic") == "t" else NO_ROUTE)
    assert list(catalog(scripted.address, subscribePattern="t|gone").fetch_all().bounds) == queues("t", 1)
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lists[0])
    with pytest.raises(RouteNotFound, match="gone"):
        catalog(scripted.address, subscribePattern="t|gone").fetch_all()


def test_topic_is_not_deleted_while_a_broker_that_had_it_is_away(two):
    """The last route did not name that one any more."""
    name_server, a, b = two
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": a.address}))
    one = catalog(name_server.address)
    one.set_checkpoint_offsets(Offsets({A: 5, B: 5}))
    assert list(one.fetch_all().bounds) == [A]
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    a.on(Request.GET_TOPIC_STATS_INFO, GONE)
    for there in ({"broker-a": a}, {"broker-a": a, "broker-b": b}):
        name_server.on(Request.GET_BROKER_CLUSTER_INFO, cluster(there))
        assert again(one).deleted_topics == frozenset()
    b.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == {"t"}


def test_another_broker_at_a_reused_address_is_not_believed(two, caplog):
    """Another broker came up there, as containers do, before the name server forgot the first."""
    name_server, a, b = two
    one = catalog(name_server.address)
    one.set_checkpoint_offsets(Offsets({A: 5, B: 5}))
    assert set(one.fetch_all().bounds) == {A, B}
    a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({B: (0, 900)}))
    view = again(one)
    assert view.bounds == {B: QueueBounds(0, 5, 7)}
    assert "broker 'broker-b' answers where 'broker-a' was" in caplog.text
    a.on(Request.GET_TOPIC_STATS_INFO, GONE)
    for hands in ({"broker-b": a}, {"broker-a": a, "broker-b": a}, {"broker-a": b, "broker-b": b}):
        name_server.on(Request.GET_BROKER_CLUSTER_INFO, cluster(hands))
        view = again(one)
        assert (list(view.bounds), view.topics_missing_on_broker) == ([B], frozenset())
    assert "broker 'broker-a' may have left its address" in caplog.text
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    b.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == frozenset()
    name_server.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": a, "broker-b": b}))
    assert again(one).deleted_topics == {"t"}


def test_missing_pattern_topic_with_offsets_counts_as_deleted(scripted):
    topics = ok(json.dumps({"topicList": ["other"]}).encode())
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, topics)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    scripted.on(Request.GET_TOPIC_STATS_INFO, lambda c: ok(STATS) if c.ext("topic") == "other" else GONE)
    there = route(1, {"broker-a": scripted.address})
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda c: there if c.ext("topic") == "other" else NO_ROUTE)
    one = catalog(scripted.address, subscribePattern="t|other")
    one.set_checkpoint_offsets(Offsets({A: 5, MessageQueue("elsewhere", "broker-a", 0): 1}))
    assert one.topics() == ("other", "t")
    assert one.fetch_all().deleted_topics == again(one).deleted_topics == {"t"}
    one.set_checkpoint_offsets(Offsets({}))
    assert one.topics() == ("other",)
    assert again(one).deleted_topics == frozenset()


def test_only_vanished_pattern_topics_with_offsets_are_kept(scripted):
    """The clusters of the others would be taken for those that are read."""
    listed = ["t", "passing"]
    answers = dict.fromkeys(listed, route(1, {"broker-a": scripted.address}))
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lambda c: ok(json.dumps({"topicList": listed}).encode()))
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda c: answers.get(c.ext("topic"), NO_ROUTE))
    one = catalog(scripted.address, subscribePattern="t|passing")
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_all()
    assert one.is_known_topic("passing")
    listed.clear()
    answers.clear()
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    again(one)
    assert not one.is_known_topic("passing")
    assert list(one.known_routes) == ["t"]


def test_a_broker_that_hangs_does_not_delay_what_others_have(two, caplog):
    name_server, a, b = two
    one = catalog(name_server.address, requestTimeout="60s")
    one.fetch_all()
    held = Held()
    b.on(Request.GET_TOPIC_STATS_INFO, held)
    for newest in (6, 7, 8):
        a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({A: (0, newest)}))
        assert {queue: of.max_offset for queue, of in again(one).bounds.items()} == {A: newest, B: 5}
        assert one._poll_interval_s <= 0.25
    assert len(held.wait(1)) == 1
    assert "the source waits" not in caplog.text
    b.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({B: (0, 9)}))
    held.calls[0].answer(scripted_stats({B: (0, 8)}))
    eventually(lambda: again(one).bounds[B].max_offset == 9)


def test_while_no_name_server_answers_its_last_word_holds(two, caplog):
    name_server, a, _ = two
    one = catalog(name_server.address)
    one.fetch_all()
    name_server.refuse_connections()
    name_server.drop()
    for newest in (6, 7):
        a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({A: (0, newest)}))
        assert {queue: of.max_offset for queue, of in again(one).bounds.items()} == {A: newest, B: 5}
    assert caplog.text.count("the source waits") == 1


def test_what_is_waited_for_is_told_once_until_all_is_well(scripted, caplog):
    one = catalog(scripted.address)
    one.fetch_all()
    for count in (1, 2):
        scripted.on(Request.GET_TOPIC_STATS_INFO, refuse(Response.SYSTEM_BUSY, "busy"))
        for _ in range(4):
            assert again(one).bounds == {}
        assert caplog.text.count("the source waits") == count
        assert one.retriable_failures.attempt_count == 4
        scripted.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
        assert again(one).bounds
        assert one.retriable_failures.first_error is None


def only(*brokers):
    return route(1, {f"broker-{name}": broker.address for name, broker in brokers})


@pytest.mark.parametrize("kept", ["by the run", "by the checkpoint"])
def test_environment_keeps_its_queues_when_broker_leaves_route(two, kept):
    name_server, a, b = two
    one = catalog(name_server.address, environment="01")
    assert list(one.fetch_all().bounds) == [A]
    assert one.environment == {A: 1}
    if kept == "by the checkpoint":
        one = catalog(name_server.address, environment="01")
        one.set_checkpoint_offsets(Offsets({A: 3}, environment={A: 1}))
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("b", b)))
    assert one.fetch_all().bounds == again(one).bounds == {}  # broker-b's queue is the second environment's
    assert one.environment == {A: 1}
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a), ("b", b)))
    assert list(again(one).bounds) == [A]


def test_a_checkpoint_of_another_environment_is_refused(two):
    one = catalog(two[0].address, environment=2)
    with pytest.raises(
        CheckpointMismatch, match="the checkpoint is of no environment, and this query of environment '2'"
    ):
        one.set_checkpoint_offsets(Offsets({A: 3}, environment={A: 1}))
    with pytest.raises(
        CheckpointMismatch, match="the checkpoint is of environment '1', and this query of environment '2'"
    ):
        one.set_checkpoint_offsets(Offsets({A: 3}, source_identity={"environment": "1"}))


@pytest.mark.parametrize(
    "given", [{"environment": 2}, {"environment": "x", "environments": '{"x": {"broker-b": [0]}}'}]
)
def test_an_environment_whose_broker_is_away_waits(two, given):
    name_server, a, b = two
    one = catalog(name_server.address, **given)
    assert list(one.fetch_all().bounds) == [B]
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a)))
    assert again(one).bounds == {}
    with pytest.raises(OptionError, match="option 'environment"):  # new, it may be a slip of the pen
        catalog(name_server.address, **given).fetch_all()
    restarted = catalog(name_server.address, **given)
    restarted.set_checkpoint_offsets(Offsets({B: 3}, environment=one.environment))
    assert restarted.fetch_all().bounds == {}
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a), ("b", b)))
    assert list(again(one).bounds) == list(again(restarted).bounds) == [B]


def test_topic_was_known_by_its_positions_or_by_its_route(scripted):
    """What was there is waited for; a slip of the pen is not. After a restart there are positions and no route yet."""
    one = catalog(scripted.address)
    assert not one.is_known_topic("t")
    one.set_checkpoint_offsets(Offsets({A: 5}))
    assert one.is_known_topic("t")
    assert not one.is_known_topic(None)
    fresh = catalog(scripted.address)
    fresh.fetch_all()
    assert fresh.is_known_topic("t")


class TestACompactionTopicKeepsWhatItsLogHasNot:
    """Its queue is from 2 to 9 by statistics; a pull finds the message at 1."""

    T0 = MessageQueue("t", "broker-a", 0)

    @pytest.fixture(autouse=True)
    def kept(self, scripted):
        scripted.on(Request.GET_TOPIC_CONFIG, topic_config(cleanup_policy="COMPACTION"))
        first = store("t", b"x", queue_offset=1)
        scripted.on(
            Request.PULL_MESSAGE, ok(first, nextBeginOffset=2, minOffset=1, maxOffset=9, suggestWhichBrokerId=0)
        )

    def test_reads_begin_there(self, scripted):
        one = catalog(scripted.address)
        assert one.fetch_all().bounds == {self.T0: QueueBounds(1, 9, 7)}
        one.set_checkpoint_offsets(Offsets({self.T0: 1}))
        assert one.latest().bounds == {self.T0: QueueBounds(1, 9, 7)}
        other = catalog(scripted.address)
        other.set_checkpoint_offsets(Offsets({self.T0: 0}))  # nothing is lost: compaction removed what was there
        assert other.latest().bounds == {self.T0: QueueBounds(0, 9, 7)}

    def test_broker_is_not_asked_when_nothing_before_the_log_is_read(self, scripted):
        one = catalog(scripted.address)
        one.set_checkpoint_offsets(Offsets({self.T0: 2}))
        assert one.latest().bounds == {self.T0: QueueBounds(2, 9, 7)}
        assert scripted.seen(Request.GET_TOPIC_CONFIG) == scripted.seen(Request.PULL_MESSAGE) == []

    def test_an_ordinary_topic_begins_with_its_log(self, scripted):
        scripted.on(Request.GET_TOPIC_CONFIG, topic_config())
        assert catalog(scripted.address).fetch_all().bounds == {self.T0: QueueBounds(2, 9, 7)}
        scripted.on(Request.GET_TOPIC_CONFIG, refuse(Response.NO_PERMISSION, "no"))
        assert catalog(scripted.address).fetch_all().bounds == {self.T0: QueueBounds(2, 9, 7)}

    @pytest.mark.parametrize("silent", [Request.GET_TOPIC_CONFIG, Request.PULL_MESSAGE])
    def test_unknown_topic_kind_delays_a_stream_but_fails_a_start(self, scripted, silent):
        scripted.on(silent, refuse(Response.SERVICE_NOT_AVAILABLE, "starting"))
        assert catalog(scripted.address).latest().bounds == {}
        with pytest.raises(ServiceNotAvailable):
            catalog(scripted.address).fetch_all()
