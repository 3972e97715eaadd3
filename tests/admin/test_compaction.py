"""Compaction topics, of which brokers keep messages below the minimum that they report: nothing of them is passed over, or called
lost.
"""

from __future__ import annotations

import pytest

from rocketmq_spark.admin import groups, messages
from rocketmq_spark.base.codes import COMPACTION, Request, Response
from rocketmq_spark.cli.checkpoint import compare_with_brokers
from rocketmq_spark.errors import AccessDenied
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.checkpoints.offset_log import LoggedBatch
from rocketmq_spark.spark.checkpoints.rewind import DriftState
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.client.test_broker import stats
from tests.decode.fetching import stored
from tests.mockbroker import Call, MockBroker, ok, refuse, topic_config

KIND, PULL = Request.GET_TOPIC_CONFIG, Request.PULL_MESSAGE
QUEUE = MessageQueue("t", "broker-a", 0)
# When what is kept was stored, by offset; statistics say that the queue has 100 to 106.
KEPT = {40: 1000, 70: 2000, 105: 3000}
FIRST, END = 100, 106


@pytest.fixture
def table(broker: MockBroker, tools: Parts) -> Parts:
    broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats((FIRST, END), last_ms=3000)))
    broker.on(KIND, topic_config(cleanup_policy=COMPACTION))
    broker.on(Request.GET_MAX_OFFSET, ok(offset=END))
    broker.on(
        Request.SEARCH_OFFSET_BY_TIMESTAMP, lambda call: rpc.SEARCH_OFFSET_BY_TIMESTAMP.reply(call.command, offset=END)
    )
    broker.on(Request.QUERY_CONSUMER_OFFSET, refuse(Response.QUERY_NOT_FOUND))
    broker.on(PULL, pulled)
    return tools


def pulled(call: Call) -> Command:
    at = int(call.ext("queueOffset"))
    part = [offset for offset in KEPT if offset >= at][: int(call.ext("maxMsgNums"))]
    ext = {
        "nextBeginOffset": part[-1] + 1 if part else END,
        "minOffset": FIRST,
        "maxOffset": END,
        "suggestWhichBrokerId": 0,
    }
    body = b"".join(
        stored(b"%d" % n, topic="t", queue_id=int(call.ext("queueId")), queue_offset=n, store_ms=KEPT[n]) for n in part
    )
    code = Response.SUCCESS if part else Response.PULL_NOT_FOUND
    return Command(code, ext={name: str(value) for name, value in ext.items()}, body=body)


def test_messages_of_a_time(table: Parts) -> None:
    assert [m.queue_offset for m in messages.messages_of_time(table, "t", None, 5000, 10)] == [40, 70, 105]
    assert [m.queue_offset for m in messages.messages_of_time(table, "t", 1500, 2500, 10)] == [70]


@pytest.mark.parametrize(
    ("wanted", "after"), [("earliest", 40), ("latest", END), (1500, 41), ({QUEUE: -2}, 40), ({QUEUE: 50}, 50)]
)
def test_where_a_group_is_set_to(table: Parts, wanted: groups.OffsetTarget, after: int) -> None:
    assert [change.after for change in groups.offset_changes(table, "g", ["t"], wanted)] == [after]


def test_every_queue_is_looked_at(broker: MockBroker, table: Parts) -> None:
    broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats((FIRST, END), (FIRST, END), last_ms=3000)))
    changes = groups.offset_changes(table, "g", ["t"], "earliest")
    assert [(change.queue.queue_id, change.after) for change in changes] == [(0, 40), (1, 40)]


def test_a_reader_has_lost_nothing(broker: MockBroker, table: Parts) -> None:
    for position, lag in ((20, 86), (50, 56), (FIRST, 6)):
        (row,) = groups.queue_lags(table, {QUEUE: position}).rows
        assert (row.lost, row.lag) == (0, lag)
    assert len(broker.seen(KIND)) == 2, "who is not behind the minimum is not asked about"
    (row,) = groups.queue_lags(table, {QUEUE: None}, {QUEUE}).rows
    assert (row.position, row.lag) == (40, 66), "a queue that no batch has read begins at its first message"


def test_where_it_is_not_known_nothing_is_said(broker: MockBroker, table: Parts) -> None:
    broker.on(PULL, refuse(Response.NO_PERMISSION, "no permission to access Group:rocketmq-spark-cli"))
    look = groups.queue_lags(table, {QUEUE: 50})
    assert [(row.lost, row.lag) for row in look.rows] == [(None, None)]
    assert isinstance(look.errors[0], AccessDenied)
    with pytest.raises(AccessDenied):
        groups.offset_changes(table, "g", ["t"], "earliest")


def test_a_query_has_lost_nothing(table: Parts) -> None:
    batch = LoggedBatch(3, {0: Offsets({QUEUE: 50})})
    (one,), errors = compare_with_brokers(table, batch)  # type: ignore[arg-type]
    assert (one.state, one.offsets, errors) == (DriftState.BEHIND, 56, [])
