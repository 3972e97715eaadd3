"""Shares of an Arrow batch."""

import logging

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import MessageRefused, OptionError, SelectorError
from rocketmq_spark.producer.rows.calls import BadRowsOfCall, BadRowsOfReader
from rocketmq_spark.producer.rows.routing import (
    Router,
    RoutingPlan,
    RowRange,
    log_choice,
    queue_filter,
    row_selector,
    selector_of,
)
from rocketmq_spark.queues.selection import select
from tests.live.writes import frame, sink_options
from tests.queues import qs

QUEUES = {"T": qs("a:0-3 b:0-3"), "U": qs("a:0-1", topic="U")}
KEYED = {"shardingkey": "k", "topic": "t"}


def options(**given):
    return sink_options("x:1", **given)


def router(columns, asked=None, **given):
    def queues(topic, refresh):
        if asked is not None:
            asked.append((topic, refresh))
        return QUEUES[topic]

    return Router(options(**given), columns, queues)


def planned(made, batch):
    bad_rows = BadRows()
    plan = made.plan(made.topics(batch, bad_rows, 0), bad_rows)
    return plan, dict(bad_rows.reasons_by_row())


def test_without_a_look_at_rows_there_is_one_share():
    assert planned(router({}, topic="T"), frame(body=["x"] * 5))[0] == RoutingPlan(None, [RowRange("T", None, 0, 5)])
    assert planned(router({"topic": "t"}), frame(t=["T"] * 3))[0] == RoutingPlan(None, [RowRange("T", None, 0, 3)])
    assert planned(router({}, topic="T"), frame(body=[]))[0] == RoutingPlan(None, [])


@given(st.lists(st.tuples(st.sampled_from("TU"), st.text("abcdef", max_size=2)), min_size=1, max_size=40))
def test_rows_of_a_queue_keep_their_order(rows):
    batch = frame(t=[topic for topic, _ in rows], k=[key for _, key in rows])
    plan, bad_rows = planned(router(KEYED, queueSelector="hash"), batch)
    assert bad_rows == {}
    assert sorted(plan.order.tolist()) == list(range(len(rows)))
    at = 0
    for topic, queue, start, end in plan.ranges:
        assert start == at < end
        at = end
        mine = plan.order[start:end].tolist()
        assert mine == sorted(mine)
        for of_topic, key in (rows[i] for i in mine):
            assert (of_topic, queue) == (topic, select("hash", QUEUES[topic], None, key) if key else None)
    assert at == len(rows)
    assert len({(share.topic, share.queue) for share in plan.ranges}) == len(plan.ranges)
    names, codes = plan.topics(len(rows))
    named = [names[0]] * len(rows) if codes is None else [names[code] for code in codes]
    assert named == [topic for topic, _ in rows]


@pytest.mark.parametrize("count", [1 << 15, 40_000])
def test_more_queues_than_two_bytes_can_number(count):
    queues = qs(f"a:0-{count - 1}")
    ids = [count - 1, 0, count - 1, 5, count - 2, 0]
    made = Router(options(topic="T"), {"queueid": "i"}, lambda topic, refresh: queues)
    plan, bad_rows = planned(made, frame(i=pa.array(ids, pa.int32())))
    assert bad_rows == {}
    rows = plan.order.tolist()
    found = {share.queue.queue_id: rows[share.start : share.end] for share in plan.ranges}
    assert found == {0: [1, 5], 5: [3], count - 2: [4], count - 1: [0, 2]}


def test_topic_queues_are_fetched_once_and_for_an_unknown_queue():
    asked = []
    hashing = router(KEYED, asked, queueSelector="hash")
    for _ in range(3):
        planned(hashing, frame(t=["T"], k=["x"]))
    assert asked == [("T", False)]
    asked.clear()
    naming = router({"queueid": "queueId", "topic": "t"}, asked)
    assert planned(naming, frame(t=["U"], queueId=[1]))[1] == {}
    text = "topic 'U' has no queue 9 that accepts messages; its queues: rocketmq-spark topic describe U"
    assert planned(naming, frame(t=["U"], queueId=[9]))[1] == {0: text}
    assert asked == [("U", False), ("U", True)]


def test_bad_topics_are_faults():
    batch = frame(t=["T", None, "", "no/slash", "SELF_TEST_TOPIC"])
    bad_rows = planned(router({"topic": "t"}), batch)[1]
    assert bad_rows[1] == bad_rows[2] == "t is null or empty; expected the name of a topic"
    assert "contains illegal characters" in bad_rows[3]
    assert "is forbidden" in bad_rows[4]


@pytest.mark.parametrize(("kind", "is_named"), [(BadRows, True), (BadRowsOfCall, False), (BadRowsOfReader, False)])
def test_an_option_of_the_sink_is_named_to_its_users(kind, is_named):
    bad_rows = kind()
    router({"topic": "t"}).topics(frame(t=["a.b", "c.d"]), bad_rows, 0)
    with pytest.raises(MessageRefused) as caught:
        bad_rows.raise_if_any()
    remedy = "Option 'topicNames' = dotsToUnderscores replaces dots"
    assert str(caught.value).count(remedy) == is_named


def test_the_selector_in_force():
    assert selector_of(options(), {}) == "roundRobin"
    assert selector_of(options(), {"queueid": "q"}) == "column"
    assert selector_of(options(), KEYED) == "hash"
    assert selector_of(options(), {"queueid": "q", **KEYED}) == "column"
    assert selector_of(options(queueSelector="roundRobin"), KEYED) == "roundRobin"
    assert row_selector(options(queueSelector="roundRobin"), KEYED) is None
    assert selector_of(options(queueSelector="RANDOM"), {}) == "random"
    assert row_selector(options(queueSelector="machineRoom"), {}) is None
    with pytest.raises(OptionError, match="module:callable that can be imported"):
        row_selector(options(queueSelector="no.such:thing"), {})


ROWS = {"queueId": pa.array([3, None, None, 0], pa.int32()), "k": ["x", "y", None, None]}


@pytest.mark.parametrize(("given", "by_key"), [({}, True), ({"queueSelector": "column"}, False)])
def test_a_row_without_a_queue_goes_to_the_queue_of_its_key(given, by_key):
    """As in Kafka; with queueSelector=column the user has chosen that only queue ids count."""
    made = Router(
        options(topic="T", **given), {"queueid": "queueId", "shardingkey": "k"}, lambda topic, refresh: QUEUES["T"][:4]
    )
    plan, bad_rows = planned(made, frame(**ROWS))
    assert bad_rows == {}
    found = {row: share.queue for share in plan.ranges for row in plan.rows(share).tolist()}
    of_key = select("hash", QUEUES["T"][:4], None, "y") if by_key else None
    assert found == {0: QUEUES["T"][3], 1: of_key, 2: None, 3: QUEUES["T"][0]}


def test_a_key_keeps_its_queue_when_a_row_names_one_that_is_new():
    """The queues of the first look decide over keys, although a row that names a new queue causes another look."""
    routes = [QUEUES["T"][:3], QUEUES["T"]]
    columns = {"queueid": "q", "brokername": "b", "shardingkey": "k"}
    made = Router(options(topic="T"), columns, lambda topic, refresh: routes[refresh])

    def found(queue_id, broker):
        plan, bad_rows = planned(
            made, frame(q=pa.array([queue_id, *[None] * 8], pa.int32()), b=[broker, *[None] * 8], k=list("xabcdefgh"))
        )
        assert bad_rows == {}
        queues = {row: share.queue for share in plan.ranges for row in plan.rows(share).tolist()}
        return [queues[row] for row in range(9)]

    before = found(0, "a")
    assert before[1:] == [select("hash", routes[0], None, key) for key in "abcdefgh"]
    assert found(3, "b") == [QUEUES["T"][7], *before[1:]]
    assert found(0, "a") == before


@pytest.mark.parametrize(
    ("given", "columns", "line"),
    [
        ({}, KEYED, "column 'k' chooses the queue of each row; rows in which it is null or empty"),
        (
            {"topic": "V", "kafkaColumns": "true"},
            KEYED,
            "column 'k' chooses the queue of each row; rows in which it is null",
        ),
        ({}, {"queueid": "q"}, "column 'q' chooses the queue of each row; rows in which it is null"),
        (
            {"topic": "U"},
            {"queueid": "q", **KEYED},
            "column 'q' chooses the queue of each row; rows in which it is null",
        ),
        ({}, {"topic": "t"}, ""),
        ({"queueSelector": "hash"}, KEYED, ""),
        ({"queueSelector": "roundRobin"}, KEYED, ""),
    ],
)
def test_a_line_says_which_column_chose_the_selector(given, columns, line, caplog):
    caplog.set_level(logging.INFO, "rocketmq_spark")
    for _ in range(2):
        log_choice(options(**{"topic": "T", **given}), columns, once=True)
    lines = [record.getMessage().partition(" go round robin")[0] for record in caplog.records]
    assert lines == ([f"topic {given.get('topic', 'T')}: {line}"] if line else [])


def test_batches_that_go_anywhere_are_narrowed():
    assert queue_filter(options()) is None
    everywhere = queue_filter(options(queueSelector="random"))
    assert everywhere is not None
    assert everywhere(QUEUES["T"]) == QUEUES["T"]
    rooms = queue_filter(options(queueSelector="machineRoom", machineRooms="r1"))
    assert rooms is not None
    assert rooms(qs("r1@a:0 r2@b:0")) == qs("r1@a:0")
    with pytest.raises(SelectorError, match="no broker is in r1"):
        rooms(QUEUES["T"])
