"""A group's offsets on the broker: what was finished, when it changed, and nothing without a group."""

from __future__ import annotations

import itertools
import uuid

import pytest
from pyspark import cloudpickle

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import AccessDenied, GroupNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source.group_offsets import GroupOffsets
from tests.mockbroker import Held, MockBroker, never, of_proxy, ok, refuse, route
from tests.reading import Run, ranges_of
from tests.source.scripted import cluster, stats

A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)


def options(name_server, **given):
    made = {"nameServer": name_server, "subscribe": "t", **given}
    return options_table.parse(made).for_role("stream source")


@pytest.fixture
def scripted():
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, refuse(Response.SYSTEM_ERROR, "no consumer for this group"))
        broker.on(Request.UPDATE_CONSUMER_OFFSET, ok())
        yield broker
    session.close_all()


def stored(broker):
    return [(c.ext["consumerGroup"], c.ext["commitOffset"]) for c in broker.seen(Request.UPDATE_CONSUMER_OFFSET)]


def test_nothing_without_a_group(scripted):
    GroupOffsets(options(scripted.address)).commit({A: 5})
    assert scripted.requests == []


def test_only_changes_are_stored(scripted):
    group_offsets = GroupOffsets(options(scripted.address, group="g"))
    for offset in (5, 5, 7, 7):
        group_offsets.commit({A: offset})
    assert stored(scripted) == [("g", "5"), ("g", "7")]


def test_batch_end_is_committed_when_the_next_batch_is_requested(scripted):
    """What is planned moves nothing, also where it is planned again after a restart: its tasks may fail."""
    scripted.on(Request.GET_TOPIC_STATS_INFO, stats({A: (0, 9)}))
    begin, how = '{"topics":{"t":{"broker-a":{"0":5}}},"v":1}', {"subscribe": "t", "group": "g", "numRetries": 0}
    run = Run(scripted.address, begin, **how)
    end = run.ahead()
    for each in (run, Run(scripted.address, begin, **how)):
        assert ranges_of(each.plan(end)) == [[OffsetRange(A, 5, 9)]]
    assert stored(scripted) == [("g", "5")]
    run.offset = end
    run.latest()
    assert stored(scripted) == [("g", "5"), ("g", "9")]


def test_a_broker_that_does_not_answer_is_asked_next_time(scripted, caplog):
    group_offsets = GroupOffsets(options(scripted.address, group="g", requestTimeout="1s"))
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, never)
    group_offsets.commit({A: 5})
    assert "the offsets of group g are committed later" in caplog.text
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    group_offsets.commit({A: 6})
    assert stored(scripted)[-1] == ("g", "6")


def test_a_broker_that_hangs_delays_nobody(scripted):
    with MockBroker({Request.GET_CONSUMER_LIST_BY_GROUP: refuse(Response.SYSTEM_ERROR, "no consumer")}) as deaf:
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address, "broker-b": deaf.address}))
        held = Held()
        deaf.on(Request.UPDATE_CONSUMER_OFFSET, held)
        group_offsets = GroupOffsets(options(scripted.address, group="g", requestTimeout="60s"))
        for offset in (5, 6, 7):  # it would take three minutes
            group_offsets.commit({A: offset, B: offset})
        assert stored(scripted) == [("g", "5"), ("g", "6"), ("g", "7")]
        assert len(held.wait(1)) == 1
        held.calls[0].answer(ok())


def test_refused_commit_is_logged_once_and_repeated_after_pause(scripted, caplog):
    now = [100.0]
    group_offsets = GroupOffsets(options(scripted.address, group="g"), lambda: now[0])
    queue_b = MessageQueue("t", "broker-a", 1)
    busy = refuse(Response.SYSTEM_BUSY, "busy")
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, lambda c: ok() if c.ext("queueId") == "0" else busy)
    for _ in range(5):
        group_offsets.commit({A: 5, queue_b: 5})
    assert [c.ext["queueId"] for c in scripted.seen(Request.UPDATE_CONSUMER_OFFSET)] == ["0", "1"]
    now[0] += 1.0
    group_offsets.commit({A: 5, queue_b: 5})
    group_offsets.commit({A: 5, queue_b: 6})  # something newer does not wait
    assert [c.ext["queueId"] for c in scripted.seen(Request.UPDATE_CONSUMER_OFFSET)] == ["0", "1", "1", "1"]
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    now[0] += 4.0
    group_offsets.commit({A: 5, queue_b: 6})
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the offsets of group")]
    assert len(lines) == 2
    assert "are committed later: " in lines[0]
    assert lines[1] == "the offsets of group g are committed now, after earlier failures"


@pytest.mark.parametrize("first", [ok(), refuse(Response.SYSTEM_BUSY, "busy")], ids=["well", "busy"])
def test_group_is_created_only_on_brokers_that_lack_it(scripted, first):
    """The other broker knows the group, with settings of an operator."""
    knows = {Request.GET_CONSUMER_LIST_BY_GROUP: refuse(Response.SYSTEM_ERROR, "no consumer")}
    made = []

    def make(call):
        made.append(call)
        return first if len(made) == 1 else ok()

    def commit(call):
        well = bool(made) and (first.code == 0 or len(made) > 1)
        return ok() if well else refuse(Response.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")

    with MockBroker({**knows, Request.UPDATE_CONSUMER_OFFSET: ok()}) as other:
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address, "broker-b": other.address}))
        scripted.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": scripted, "broker-b": other}))
        scripted.on(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, make)
        scripted.on(Request.UPDATE_CONSUMER_OFFSET, commit)
        now = [100.0]
        group_offsets = GroupOffsets(options(scripted.address, group="g"), lambda: now[0])
        group_offsets.commit({A: 5, B: 5})
        now[0] += 60.0
        group_offsets.commit({A: 6, B: 6})
        assert stored(scripted)[-1] == ("g", "6")
        assert stored(other)[-1] == ("g", "6")
        assert other.seen(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP) == []


def test_absent_broker_is_logged_once_while_others_commit(scripted, caplog):
    """Those that wait for its pause are not stored by not being sent."""
    now = [100.0]
    group_offsets = GroupOffsets(options(scripted.address, group="g"), lambda: now[0])
    away, busy = MessageQueue("t", "broker-a", 1), refuse(Response.SYSTEM_BUSY, "busy")
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, lambda c: ok() if c.command.ext["queueId"] == "0" else busy)
    for second in range(60):
        now[0] += 1.0
        group_offsets.commit({A: second, away: 5})
    sent = [c.ext["queueId"] for c in scripted.seen(Request.UPDATE_CONSUMER_OFFSET)]
    assert (sent.count("0"), sent.count("1")) == (60, 6)  # at once, and after 1, 2, 4, 8, 16 and 32 seconds
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    now[0] += 60.0
    group_offsets.commit({A: 60, away: 5})
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the offsets of group")]
    assert [text.partition(":")[0] for text in said] == [
        "the offsets of group g are committed later",
        "the offsets of group g are committed now, after earlier failures",
    ]


def test_what_waits_is_forgotten_with_its_queue(scripted, caplog):
    group_offsets = GroupOffsets(options(scripted.address, group="g"))
    gone, busy = MessageQueue("t", "broker-a", 1), refuse(Response.SYSTEM_BUSY, "busy")
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, lambda c: ok() if c.command.ext["queueId"] == "0" else busy)
    group_offsets.commit({A: 1, gone: 5})
    group_offsets.commit({A: 2})
    assert group_offsets._failed_offsets == {}
    assert "are committed now" not in caplog.text, "what waited was never stored"
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, busy)
    group_offsets.commit({A: 3})
    assert caplog.text.count("are committed later") == 2, "the next trouble is one of its own"


def test_a_queue_that_was_given_away_and_came_back_is_no_rival(scripted, caplog):
    """Nor is one whose commit was answered by nobody, and which the broker may have taken."""
    scripted.on(Request.QUERY_CONSUMER_OFFSET, [ok(offset=9), ok(offset=8)])
    other = MessageQueue("t", "broker-a", 1)
    now = itertools.count(100.0, 30.0)
    group_offsets = GroupOffsets(options(scripted.address, group="g", requestTimeout="1s"), lambda: next(now))
    group_offsets.commit({A: 5})
    group_offsets.commit({other: 5})
    group_offsets.commit({A: 9})
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, never)
    group_offsets.commit({A: 10})
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    group_offsets.commit({other: 6})
    group_offsets.commit({A: 11})
    assert "another query" not in caplog.text


def test_a_reader_with_refused_offsets_still_travels(scripted):
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, refuse(Response.SYSTEM_BUSY, "busy"))
    group_offsets = GroupOffsets(options(scripted.address, group="g"))
    group_offsets.commit({A: 5})
    assert cloudpickle.loads(cloudpickle.dumps(group_offsets))._failed_offsets == {A: 5}


def test_another_query_that_uses_the_group_is_warned_about_once(scripted, caplog):
    answers = [ok(offset=5), ok(offset=3), ok(offset=3)]
    scripted.on(Request.QUERY_CONSUMER_OFFSET, answers)
    now = itertools.count(100.0, 5.0)  # looked at now and then, not at each batch
    group_offsets = GroupOffsets(options(scripted.address, group="g"), lambda: next(now))
    for offset in (5, 6):
        group_offsets.commit({A: offset})
    assert "another query" not in caplog.text
    for offset in (7, 8, 9, 10):
        group_offsets.commit({A: offset})
    assert len(scripted.seen(Request.QUERY_CONSUMER_OFFSET)) == 2
    assert caplog.text.count("group g: the offset of t/broker-a/0 was stored as 6 by this query and is 3 now") == 1
    assert "give each a group of its own" in caplog.text


def test_a_listener_that_stored_the_same_first_is_no_rival(scripted, caplog):
    """As ``GroupOffsetListener`` does at once, beside a source with the same group."""
    scripted.on(Request.QUERY_CONSUMER_OFFSET, ok(offset=6))
    now = itertools.count(100.0, 30.0)
    group_offsets = GroupOffsets(options(scripted.address, group="g"), lambda: next(now))
    group_offsets.commit({A: 5})
    group_offsets.commit({A: 6})
    assert len(scripted.seen(Request.QUERY_CONSUMER_OFFSET)) == 1
    assert "another query" not in caplog.text


def test_access_denied_is_an_error(scripted):
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, refuse(Response.NO_PERMISSION, "no Sub on the group"))
    with pytest.raises(AccessDenied):
        GroupOffsets(options(scripted.address, group="g")).commit({A: 5})


def test_live_members_are_named(scripted, caplog):
    scripted.on(Request.GET_CONSUMER_LIST_BY_GROUP, ok(b'{"consumerIdList":["10.0.0.1@7","10.0.0.2@8"]}'))
    group_offsets = GroupOffsets(options(scripted.address, group="g"))
    group_offsets.commit({A: 5})
    group_offsets.commit({A: 6})
    assert caplog.text.count("group g has 2 live members (10.0.0.1@7, 10.0.0.2@8)") == 1


def test_members_that_a_proxy_does_not_see_are_warned_of_once(scripted, caplog):
    text = "through a Proxy, which does not see members that are connected to brokers"
    GroupOffsets(options(scripted.address, group="g")).commit({A: 5})
    assert text not in caplog.text
    scripted.on(
        Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(refuse(Response.SYSTEM_ERROR, "no consumer for this group"))
    )
    group_offsets = GroupOffsets(options(scripted.address, group="g"))
    for offset in (6, 7):
        group_offsets.commit({A: offset})
    assert caplog.text.count(text) == 1


def test_a_group_that_may_not_be_created(scripted):
    scripted.on(Request.UPDATE_CONSUMER_OFFSET, refuse(Response.SUBSCRIPTION_GROUP_NOT_EXIST, "no group"))
    scripted.on(Request.GET_BROKER_CLUSTER_INFO, ok(
        b'{"brokerAddrTable":{"broker-a":{"brokerName":"broker-a","cluster":"c","brokerAddrs":{"0":"%s"}}},'
        b'"clusterAddrTable":{"c":["broker-a"]}}' % scripted.address.encode()
    ))  # fmt: skip
    scripted.on(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, refuse(Response.NO_PERMISSION, "admins only"))
    with pytest.raises(GroupNotFound, match=r"the broker does not know group 'g'.*mqadmin updateSubGroup -g g"):
        GroupOffsets(options(scripted.address, group="g")).commit({A: 5})


def test_on_a_real_broker(rocketmq, make_topic):
    topic, group = make_topic(queues=2), f"g-{uuid.uuid4().hex[:8]}"
    queues = [MessageQueue(topic, "broker-a", i) for i in range(2)]
    made = options(rocketmq.name_server, subscribe=topic, group=group, requestTimeout="10s")
    group_offsets = GroupOffsets(made)
    group_offsets.commit({queues[0]: 0, queues[1]: 0})
    group_offsets.commit({queues[0]: 0, queues[1]: 3})
    assert session.offsets(made).committed(group, queues, Deadline.after(10)) == {queues[0]: 0, queues[1]: 3}
