"""What exists now, on a real broker and on one that says what the test wants; brokers that die are in tests/live/loss."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    CheckpointMismatch,
    ConnectionLost,
    OptionError,
    RouteNotFound,
    ServiceNotAvailable,
)
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source import kafka_partitions
from rocketmq_spark.spark.source.bounds_reader import BoundsReader
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.poll_interval import PollInterval
from rocketmq_spark.spark.source.waiting import WaitLimits, fetch_bounds_of_masters, retry_until
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


def options_of(name_server, **given):
    made = {"nameServer": name_server, "routeRefresh": 0, "numRetries": 0, "requestTimeout": "1s", **given}
    if not made.keys() & {"subscribePattern", "assign"}:
        made.setdefault("subscribe", "t")
    return options_table.parse(made).for_role("stream source")


def bounds_reader(name_server, clock=None, **given):
    return BoundsReader(options_of(name_server, **given), clock)


def fetch_at_start(one, **given):
    """What a start fetches, with its waits."""
    options = options_of("127.0.0.1:1", **given)
    limits = WaitLimits.of_start(options)
    return retry_until(one, lambda: fetch_bounds_of_masters(one, options, limits), limits)


@pytest.fixture
def scripted():
    """Name server and broker in one: topic ``t`` with one queue from 2 to 9."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
        yield broker
    session.close_all()


def test_first_connection_is_that_of_its_bounds(scripted):
    """The name server is another one, so nothing connected before. A plan that checked this poll need not ask brokers again."""
    with MockBroker({Request.GET_ROUTEINFO_BY_TOPIC: route(1, {"broker-a": scripted.address})}) as name_server:
        one = bounds_reader(name_server.address)
        first, second = one.fetch_complete_view(), one.fetch_complete_view()
        assert first.connections == second.connections
        ((before, after),) = first.connections.values()
        assert before == after == (scripted.address, before[1])


def test_bounds_without_a_master_connection_are_of_a_slave(scripted, monkeypatch):
    """Another stream of the program fetched a newer route, without the master, after this one had its own."""
    monkeypatch.setattr(RemotingOffsetReader, "connection", lambda self, broker_name: None)
    view = bounds_reader(scripted.address).fetch_complete_view()
    assert (view.brokers_without_master, view.master_bounds()) == ({"broker-a"}, {})


@pytest.mark.parametrize(
    "answer", [scripted_stats({MessageQueue("t", "a", 0): (0, 1)}), refuse(Response.SYSTEM_BUSY, "busy"), never, close]
)
def test_a_broker_that_is_not_listed_keeps_its_numbers(scripted, answer):
    with MockBroker({Request.GET_TOPIC_STATS_INFO: answer}) as first:
        both = route(1, {"a": first.address, "broker-a": scripted.address})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [both, route(1, {"broker-a": scripted.address})])
        session.routes(options_of(scripted.address)).get("t")
        later = bounds_reader(scripted.address)
        later.fetch_complete_view()
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
        source = bounds_reader(scripted.address, subscribe=",".join(topics))
        for answer in (both, NO_ROUTE, route(1, {"broker-a": scripted.address})):
            scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, answer)
            again(source)
        source.known_routes = {topic: source.ports.routes.get(topic) for topic in topics}
        assert {name for known in source.known_routes.values() for name in known.brokers} == {"broker-a"}
        there = source.partition_queues(topics)
        assert sorted(there) == sorted(MessageQueue(topic, name, 0) for topic in topics for name in ("a", "broker-a"))


def test_only_new_numbers_wait_for_a_broker_that_does_not_answer(scripted):
    with MockBroker({Request.GET_TOPIC_STATS_INFO: never}) as first:
        both = route(1, {"a": first.address, "broker-a": scripted.address})
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [both, route(1, {"broker-a": scripted.address})])
        session.routes(options_of(scripted.address)).get("t")
        later = bounds_reader(scripted.address)
        later.fetch_complete_view()
        assert later.partition_queues({"t"}, numbered_topics={"t"}) == [MessageQueue("t", "broker-a", 0)]
        assert first.seen(Request.GET_TOPIC_STATS_INFO) == []


def queues(topic, count):
    return [MessageQueue(topic, "broker-a", i) for i in range(count)]


def test_all_queues_with_their_bounds(broker_cluster, make_topic):
    one, two = make_topic(queues=2), make_topic(queues=3)
    feed(broker_cluster, two, 6)
    bounds = bounds_reader(broker_cluster.name_server, subscribe=f"{one},{two}").fetch_complete_view().bounds
    assert set(bounds) == {*queues(one, 2), *queues(two, 3)}
    assert [bounds[queue].max_offset for queue in queues(two, 3)] == [2, 2, 2]
    assert all(of.min_offset == 0 for of in bounds.values())


def test_assigned_queues_only(broker_cluster, make_topic):
    topic = make_topic(queues=4)
    assign = f'{{"{topic}":{{"broker-a":[3,1]}}}}'
    assert sorted(bounds_reader(broker_cluster.name_server, assign=assign).fetch_complete_view().bounds) == [
        queues(topic, 4)[i] for i in (1, 3)
    ]
    with pytest.raises(OptionError, match=f"option 'assign' names queues that do not exist: {topic}/broker-a/9"):
        bounds_reader(broker_cluster.name_server, assign=f'{{"{topic}":{{"broker-a":[1,9]}}}}').fetch_complete_view()


def test_topics_that_match_in_full(broker_cluster):
    for name in ("cat-one", "cat-two", "a-cat-three"):
        broker_cluster.create_topic(name, 1)
    assert bounds_reader(broker_cluster.name_server, subscribePattern="cat-.*").topics_or_last_known() == (
        "cat-one",
        "cat-two",
    )
    everything = bounds_reader(broker_cluster.name_server, subscribePattern=".*").topics_or_last_known()
    assert {"cat-one", "a-cat-three"} <= set(everything)
    internal = {"TBW102", "broker-a", "DefaultCluster", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"}
    assert not internal & set(everything)
    assert bounds_reader(broker_cluster.name_server, subscribePattern="nosuch.*").fetch_complete_view().bounds == {}


def test_a_missing_topic_is_waited_for(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, NO_ROUTE, route(1, {"broker-a": scripted.address})])
    assert list(fetch_at_start(bounds_reader(scripted.address), topicWait="20s").bounds) == queues("t", 1)


def test_a_missing_topic_is_an_error_at_once_by_default(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    with pytest.raises(RouteNotFound, match="topic t"):
        fetch_at_start(bounds_reader(scripted.address))


def test_a_start_needs_all_answers(scripted):
    scripted.on(Request.GET_TOPIC_STATS_INFO, never)
    with pytest.raises(CallTimeout):
        bounds_reader(scripted.address, requestTimeout="100ms").fetch_complete_view()
    with pytest.raises(ConnectionLost):
        bounds_reader("127.0.0.1:1").fetch_complete_view()


def test_a_running_stream_waits_for_answers(scripted, caplog):
    one = bounds_reader(scripted.address)
    assert one.fetch_complete_view().bounds
    scripted.on(Request.GET_TOPIC_STATS_INFO, never)
    assert again(one).bounds == {}
    assert "the source waits" in caplog.text
    scripted.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
    assert list(again(one).bounds) == queues("t", 1)


def test_one_sweep_serves_several_questions(scripted):
    one = bounds_reader(scripted.address, Clock(now=lambda: 100.0))
    one.fetch_complete_view()
    assert one.latest_view() is one.latest_view()
    assert len(scripted.seen(Request.GET_TOPIC_STATS_INFO)) == 1


def test_what_a_plan_saw_serves_the_rest_of_its_batch(scripted):
    now = [100.0]
    one = bounds_reader(scripted.address, Clock(now=lambda: now[0]))
    seen = one.fetch_complete_view()
    now[0] += 0.9
    assert one.latest_view(is_same_batch=True) is seen
    one.note_retriable_error(CallTimeout("no answer"))
    assert one.latest_view(is_same_batch=True) is not seen
    now[0] += 1.1
    one.latest_view(is_same_batch=True)
    assert len(scripted.seen(Request.GET_TOPIC_STATS_INFO)) == 3


@pytest.mark.parametrize("ask", [BoundsReader.fetch_complete_view, BoundsReader.latest_view])
def test_routes_fetched_together_are_not_fetched_again_singly(scripted, ask):
    """They are as old as that, whatever age is allowed: with thousands of topics each would wait for a round trip."""
    one = bounds_reader(scripted.address, subscribe="t,u,v")
    scripted.on(
        Request.GET_TOPIC_STATS_INFO, lambda call: ok(STATS.replace(b'"t"', b'"%s"' % call.ext("topic").encode()))
    )
    assert len(ask(one).bounds) == 3
    assert len(scripted.seen(Request.GET_ROUTEINFO_BY_TOPIC)) == 3


@pytest.mark.parametrize(
    ("duration_s", "now_s", "wait_s"), [(0.0, 100.0, 0.1), (0.2, 100.0, 0.2), (3.0, 100.0, 0.25), (0.2, 200.0, 0)]
)
def test_next_poll_is_awaited_until_it_is_due(duration_s, now_s, wait_s):
    polls = PollInterval()
    for _ in range(12):
        polls.note_poll(100.0, duration_s, is_unchanged=True)
    assert polls.wait_s(now_s, 0.1) == wait_s
    assert polls.is_due(now_s) == (not wait_s)


def test_a_changed_view_is_polled_again_soon():
    polls = PollInterval()
    polls.note_poll(100.0, 0.0, is_unchanged=False)
    assert polls.wait_s(100.0, 0.1) == pytest.approx(0.01)


def test_a_quiet_topic_is_asked_less_often():
    polls, intervals = PollInterval(), []
    for _ in range(12):
        polls.note_poll(100.0, 0.001, is_unchanged=True)
        intervals.append(polls.interval_s)
    assert intervals == sorted(intervals)
    assert intervals[-1] == 0.25


def test_a_reader_waits_with_its_clock(scripted):
    slept: list[float] = []
    one = bounds_reader(scripted.address, Clock(now=lambda: 100.0, sleep=slept.append))
    one.fetch_complete_view()
    one.wait_for_next_poll(0.1)
    assert slept == [pytest.approx(0.01)]


A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)


def again(one):
    """The next view, now."""
    one.poll_interval.expire()
    return one.latest_view()


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
    one = bounds_reader(scripted.address)
    one.fetch_complete_view()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, route(1, {"broker-a": scripted.address})])
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    assert again(one).deleted_topics == frozenset()
    assert list(again(one).bounds) == queues("t", 1)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, [NO_ROUTE, route(1, {"broker-a": scripted.address})])
    one.note_retriable_error(CallTimeout("no answer"))
    with pytest.raises(RouteNotFound):
        one.fetch_complete_view()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == one.fetch_complete_view().deleted_topics == {"t"}


@pytest.mark.parametrize("restarted", [False, True])
def test_topic_unknown_to_a_restarted_name_server_is_not_deleted(scripted, restarted):
    """Its broker is registered, and registers its topics in portions: it is asked itself."""
    one = bounds_reader(scripted.address)
    one.fetch_complete_view()
    if restarted:
        session.close_all()
        one = bounds_reader(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    one.note_retriable_error(CallTimeout("no answer"))
    assert again(one).deleted_topics == frozenset()
    with pytest.raises(RouteNotFound):
        one.fetch_complete_view()
    for silence in (never, refuse(Response.SYSTEM_BUSY, "busy")):
        scripted.on(Request.GET_TOPIC_STATS_INFO, silence)
        assert again(one).deleted_topics == frozenset()
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    assert again(one).deleted_topics == {"t"}


def test_routes_stay_valid_while_restarted_name_server_is_empty(scripted):
    one = bounds_reader(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_complete_view()
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({}))
    view = again(one)
    assert (list(view.bounds), view.deleted_topics) == ([A], frozenset())


def test_topic_whose_last_route_had_no_master_is_not_deleted(scripted):
    """Whose word it would be is not known: the list of all has the master again, and the route is gone."""
    one = bounds_reader(scripted.address)
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_complete_view()
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
    assert list(bounds_reader(scripted.address, subscribePattern="t|gone").fetch_complete_view().bounds) == queues(
        "t", 1
    )
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lists[0])
    with pytest.raises(RouteNotFound, match="gone"):
        bounds_reader(scripted.address, subscribePattern="t|gone").fetch_complete_view()


def test_topic_is_not_deleted_while_a_broker_that_had_it_is_away(two):
    """The last route did not name that one any more."""
    name_server, a, b = two
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": a.address}))
    one = bounds_reader(name_server.address)
    one.set_checkpoint_offsets(Offsets({A: 5, B: 5}))
    assert list(one.fetch_complete_view().bounds) == [A]
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
    one = bounds_reader(name_server.address)
    one.set_checkpoint_offsets(Offsets({A: 5, B: 5}))
    assert set(one.fetch_complete_view().bounds) == {A, B}
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
    one = bounds_reader(scripted.address, subscribePattern="t|other")
    one.set_checkpoint_offsets(Offsets({A: 5, MessageQueue("elsewhere", "broker-a", 0): 1}))
    assert one.topics_or_last_known() == ("other", "t")
    assert one.fetch_complete_view().deleted_topics == again(one).deleted_topics == {"t"}
    one.set_checkpoint_offsets(Offsets({}))
    assert one.topics_or_last_known() == ("other",)
    assert again(one).deleted_topics == frozenset()


def test_only_vanished_pattern_topics_with_offsets_are_kept(scripted):
    """The clusters of the others would be taken for those that are read."""
    listed = ["t", "passing"]
    answers = dict.fromkeys(listed, route(1, {"broker-a": scripted.address}))
    scripted.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lambda c: ok(json.dumps({"topicList": listed}).encode()))
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted}))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda c: answers.get(c.ext("topic"), NO_ROUTE))
    one = bounds_reader(scripted.address, subscribePattern="t|passing")
    one.set_checkpoint_offsets(Offsets({A: 5}))
    one.fetch_complete_view()
    assert one.is_known_topic("passing")
    listed.clear()
    answers.clear()
    scripted.on(Request.GET_TOPIC_STATS_INFO, GONE)
    again(one)
    assert not one.is_known_topic("passing")
    assert list(one.known_routes) == ["t"]


def test_a_broker_that_hangs_does_not_delay_what_others_have(two, caplog):
    name_server, a, b = two
    one = bounds_reader(name_server.address, requestTimeout="60s")
    one.fetch_complete_view()
    held = Held()
    b.on(Request.GET_TOPIC_STATS_INFO, held)
    for newest in (6, 7, 8):
        a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({A: (0, newest)}))
        assert {queue: of.max_offset for queue, of in again(one).bounds.items()} == {A: newest, B: 5}
        assert one.poll_interval.interval_s <= 0.25
    assert len(held.wait(1)) == 1
    assert "the source waits" not in caplog.text
    b.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({B: (0, 9)}))
    held.calls[0].answer(scripted_stats({B: (0, 8)}))
    eventually(lambda: again(one).bounds[B].max_offset == 9)


def test_call_that_waits_for_all_uses_no_view_without_a_broker(two):
    """A progress report waits shortly for a broker. The next call of a run to the end needs the bounds of this broker."""
    name_server, _, b = two
    one = bounds_reader(name_server.address)
    one.fetch_complete_view()
    held = Held()
    b.on(Request.GET_TOPIC_STATS_INFO, held)
    view = again(one)
    assert view.timed_out_brokers == {"broker-b"}
    one.poll_interval.note_poll(one.clock.now() + 60, 0, is_unchanged=True)
    assert one.latest_view() is view
    b.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({B: (0, 9)}))
    held.calls[0].answer(scripted_stats({B: (0, 8)}))
    complete_view = one.latest_view(wait_for_all=True)
    assert not complete_view.timed_out_brokers
    assert complete_view.bounds[B].max_offset > 5


def test_while_no_name_server_answers_its_last_word_holds(two, caplog):
    name_server, a, _ = two
    one = bounds_reader(name_server.address)
    one.fetch_complete_view()
    name_server.refuse_connections()
    name_server.drop()
    for newest in (6, 7):
        a.on(Request.GET_TOPIC_STATS_INFO, scripted_stats({A: (0, newest)}))
        assert {queue: of.max_offset for queue, of in again(one).bounds.items()} == {A: newest, B: 5}
    assert caplog.text.count("the source waits") == 1


def test_what_is_waited_for_is_told_once_until_all_is_well(scripted, caplog):
    one = bounds_reader(scripted.address)
    one.fetch_complete_view()
    for count in (1, 2):
        scripted.on(Request.GET_TOPIC_STATS_INFO, refuse(Response.SYSTEM_BUSY, "busy"))
        for _ in range(4):
            assert again(one).bounds == {}
        assert caplog.text.count("the source waits") == count
        assert one.retriable_errors.retry_errors.attempt_count == 4
        scripted.on(Request.GET_TOPIC_STATS_INFO, ok(STATS))
        for _ in range(2):
            assert again(one).bounds
            assert one.retriable_errors.retry_errors.first_error is None


def test_error_that_comes_again_after_each_poll_is_logged_once(scripted, caplog):
    """A run to the end notes that a broker is away; the polls do not miss it."""
    one = bounds_reader(scripted.address)
    one.fetch_complete_view()
    for _ in range(4):
        one.note_retriable_error(BrokerNotFound("no broker answers"))
        assert again(one).bounds
    assert caplog.text.count("no broker answers") == 1


def only(*brokers):
    return route(1, {f"broker-{name}": broker.address for name, broker in brokers})


@pytest.mark.parametrize("kept", ["by the run", "by the checkpoint"])
def test_environment_keeps_its_queues_when_broker_leaves_route(two, kept):
    name_server, a, b = two
    one = bounds_reader(name_server.address, environment="01")
    assert list(one.fetch_complete_view().bounds) == [A]
    assert one.owned_queues.environment_numbers == {A: 1}
    if kept == "by the checkpoint":
        one = bounds_reader(name_server.address, environment="01")
        one.set_checkpoint_offsets(Offsets({A: 3}, environment_numbers={A: 1}))
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("b", b)))
    assert one.fetch_complete_view().bounds == again(one).bounds == {}  # broker-b's queue is the second environment's
    assert one.owned_queues.environment_numbers == {A: 1}
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a), ("b", b)))
    assert list(again(one).bounds) == [A]


def test_a_checkpoint_of_another_environment_is_refused(two):
    one = bounds_reader(two[0].address, environment=2)
    with pytest.raises(
        CheckpointMismatch, match="the checkpoint is of no environment, and this query of environment '2'"
    ):
        one.set_checkpoint_offsets(Offsets({A: 3}, environment_numbers={A: 1}))
    with pytest.raises(
        CheckpointMismatch, match="the checkpoint is of environment '1', and this query of environment '2'"
    ):
        one.set_checkpoint_offsets(Offsets({A: 3}, source_identity={"environment": "1"}))


@pytest.mark.parametrize(
    "given", [{"environment": 2}, {"environment": "x", "environments": '{"x": {"broker-b": [0]}}'}]
)
def test_an_environment_whose_broker_is_away_waits(two, given):
    name_server, a, b = two
    one = bounds_reader(name_server.address, **given)
    assert list(one.fetch_complete_view().bounds) == [B]
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a)))
    assert again(one).bounds == {}
    with pytest.raises(OptionError, match="option 'environment"):  # new, it may be a slip of the pen
        bounds_reader(name_server.address, **given).fetch_complete_view()
    restarted = bounds_reader(name_server.address, **given)
    restarted.set_checkpoint_offsets(Offsets({B: 3}, environment_numbers=one.owned_queues.environment_numbers))
    assert restarted.fetch_complete_view().bounds == {}
    name_server.on(Request.GET_ROUTEINFO_BY_TOPIC, only(("a", a), ("b", b)))
    assert list(again(one).bounds) == list(again(restarted).bounds) == [B]


def test_topic_was_known_by_its_positions_or_by_its_route(scripted):
    """What was there is waited for; a slip of the pen is not. After a restart there are positions and no route yet."""
    one = bounds_reader(scripted.address)
    assert not one.is_known_topic("t")
    one.set_checkpoint_offsets(Offsets({A: 5}))
    assert one.is_known_topic("t")
    assert not one.is_known_topic(None)
    fresh = bounds_reader(scripted.address)
    fresh.fetch_complete_view()
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
        one = bounds_reader(scripted.address)
        assert one.fetch_complete_view().bounds == {self.T0: QueueBounds(1, 9, 7)}
        one.set_checkpoint_offsets(Offsets({self.T0: 1}))
        assert one.latest_view().bounds == {self.T0: QueueBounds(1, 9, 7)}
        other = bounds_reader(scripted.address)
        other.set_checkpoint_offsets(Offsets({self.T0: 0}))  # nothing is lost: compaction removed what was there
        assert other.latest_view().bounds == {self.T0: QueueBounds(0, 9, 7)}

    def test_broker_is_not_asked_when_nothing_before_the_log_is_read(self, scripted):
        one = bounds_reader(scripted.address)
        one.set_checkpoint_offsets(Offsets({self.T0: 2}))
        assert one.latest_view().bounds == {self.T0: QueueBounds(2, 9, 7)}
        assert scripted.seen(Request.GET_TOPIC_CONFIG) == scripted.seen(Request.PULL_MESSAGE) == []

    def test_an_ordinary_topic_begins_with_its_log(self, scripted):
        scripted.on(Request.GET_TOPIC_CONFIG, topic_config())
        assert bounds_reader(scripted.address).fetch_complete_view().bounds == {self.T0: QueueBounds(2, 9, 7)}
        scripted.on(Request.GET_TOPIC_CONFIG, refuse(Response.NO_PERMISSION, "no"))
        assert bounds_reader(scripted.address).fetch_complete_view().bounds == {self.T0: QueueBounds(2, 9, 7)}

    @pytest.mark.parametrize("silent", [Request.GET_TOPIC_CONFIG, Request.PULL_MESSAGE])
    def test_unknown_topic_kind_delays_a_stream_but_fails_a_start(self, scripted, silent):
        scripted.on(silent, refuse(Response.SERVICE_NOT_AVAILABLE, "starting"))
        assert bounds_reader(scripted.address).latest_view().bounds == {}
        with pytest.raises(ServiceNotAvailable):
            bounds_reader(scripted.address).fetch_complete_view()
