"""Compaction topics, of which brokers keep the last message of each key: where reads of them begin, and what is loss there."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.consumer.offsets import OffsetRequests
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import BrokerBusy, DataLossError, OffsetError
from rocketmq_spark.model import MessageQueue, OffsetRange
from tests.harness import store
from tests.mockbroker import MockBroker, ok, refuse, topic_config
from tests.reading import Run, plan, ranges_of, read
from tests.source.scripted import route, stats

A = MessageQueue("t", "broker-a", 0)
QUICK = {"subscribe": "t", "numRetries": 2, "retryInterval": "10ms"}


class Table:
    """A queue that statistics tell to be from 500 to 600, and the offsets that are ``kept``, each stored at its number in ms."""

    def __init__(self, broker):
        self.kept, self.later_ms = [100, 250, 300, 599], 0
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: broker.address}}))
        broker.on(Request.GET_TOPIC_STATS_INFO, stats({A: (500, 600)}, newest_ms=599))
        broker.on(Request.GET_TOPIC_CONFIG, topic_config(cleanup_policy="COMPACTION"))
        broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, ok(offset=500))
        broker.on(Request.GET_MAX_OFFSET, ok(offset=600))
        broker.on(Request.PULL_MESSAGE, self.pull)

    def pull(self, call):
        asked = int(call.ext("queueOffset"))
        at = next((offset for offset in self.kept if offset >= asked), None)
        if at is None:
            return refuse(
                Response.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", nextBeginOffset=asked, minOffset=0, maxOffset=0
            )
        stored = store("t", b"x", queue_offset=at, store_ms=at + self.later_ms)
        return ok(stored, nextBeginOffset=at + 1, minOffset=0, maxOffset=600, suggestWhichBrokerId=0)


@pytest.fixture
def broker():
    with MockBroker() as broker:
        yield broker
    session.close_all()


@pytest.fixture
def table(broker):
    return Table(broker)


@pytest.mark.parametrize("at", [0, 200, 300])
def test_a_start_by_number_before_what_is_kept_is_no_loss(broker, table, at):
    table.kept = [300, 599]
    given = {**QUICK, "startingOffsets": {"t": {"broker-a": {"0": at}}}}
    assert plan(broker.address, **given) == [[OffsetRange(A, at, 600)]]
    run = Run(broker.address, **given)
    assert ranges_of(run.plan(run.latest())) == [[OffsetRange(A, at, 600)]]


def test_a_start_at_what_a_group_committed_is_no_loss(broker, table):
    broker.on(Request.QUERY_CONSUMER_OFFSET, ok(offset=50))
    given = {**QUICK, "startingOffsets": "committed", "group": "g"}
    assert plan(broker.address, **given) == [[OffsetRange(A, 50, 600)]]
    run = Run(broker.address, **given)
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, refuse(Response.SYSTEM_ERROR, "no consumer"))
    broker.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    assert ranges_of(run.plan(run.latest())) == [[OffsetRange(A, 50, 600)]]


def test_logged_first_batch_begins_at_its_planned_offset(broker, table):
    """Compaction went on since, and the start as it is resolved now lies behind it."""
    killed = Run(broker.address, startingOffsets="earliest", **QUICK)
    logged = killed.latest()
    table.kept = [300, 599]
    again = Run(broker.address, startingOffsets="earliest", **QUICK)
    assert again.positions == {A: 300}
    assert ranges_of(again.plan(logged)) == [[OffsetRange(A, 100, 600)]]


def test_start_time_lookup_repeats_while_topic_kind_is_unknown(broker, table):
    """Statistics and the broker's own lookup know nothing of what is kept before 500."""
    kind = topic_config(cleanup_policy="COMPACTION")
    for look in (
        lambda: plan(broker.address, startingTimestamp=200, **QUICK),
        lambda: [[OffsetRange(A, Run(broker.address, startingTimestamp=200, **QUICK).positions[A], 600)]],
    ):
        broker.on(Request.GET_TOPIC_CONFIG, [kind, refuse(Response.SYSTEM_BUSY, "busy"), kind])
        assert look() == [[OffsetRange(A, 101, 600)]]


def test_what_has_no_key_at_the_end_is_told_as_what_is_not_kept(broker, table, caplog):
    """Brokers take messages without a key in a batch, and do not put them into a compaction topic's log."""
    table.kept = [300, 597]
    given = {**QUICK, "startingOffsets": "earliest", "readDeadline": "2s"}
    with pytest.raises(DataLossError, match=r"t/broker-a/0 offsets 598 to 600 .*without a key"):
        read(broker.address, **given)
    found = read(broker.address, failOnDataLoss="warn", **given)
    assert [row["queueOffset"] for row in found] == [300, 597]
    assert "without a key" in caplog.text


def test_members_begin_and_seek_where_what_is_kept_begins(broker, table):
    broker.on(Request.GET_MIN_OFFSET, ok(offset=500))
    options = options_table.parse({"nameServer": broker.address, "subscribe": "t"}).for_role("stream source")
    positions = OffsetRequests(session.client(options).member, ConsumerSettings(group="g"))
    positions.queues("t")
    assert positions.bounds(A, for_group=True).min_offset == positions.offset_at_time(A, 0) == 100
    assert (positions.offset_at_time(A, 200), positions.checked_offset(A, 250)) == (101, 250)
    broker.on(Request.GET_TOPIC_CONFIG, topic_config())
    assert positions.bounds(A, for_group=True).min_offset == 500
    with pytest.raises(OffsetError, match="from 500 to 600"):
        positions.checked_offset(A, 250)
    broker.on(Request.GET_TOPIC_CONFIG, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(BrokerBusy):
        positions.checked_offset(A, 250)


@pytest.mark.parametrize("size", [600, 650])
def test_refilled_compaction_store_is_noticed_after_log_expiry(broker, table, size):
    """Of such a queue statistics tell no time: the last message that was read does."""
    broker.on(Request.GET_TOPIC_STATS_INFO, stats({A: (600, 600)}, newest_ms=-1))
    run = Run(broker.address, startingOffsets="earliest", **QUICK)
    run.offset = run.latest()
    assert json.loads(run.offset)["marks"] == {"t": {"broker-a": {"0": 599}}}
    table.kept, table.later_ms = list(range(size)), 1000
    broker.on(Request.GET_TOPIC_STATS_INFO, stats({A: (0, size)}, newest_ms=1000 + size))
    broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, ok(offset=0))
    with pytest.raises(DataLossError, match="offset went back"):
        run.ahead()
