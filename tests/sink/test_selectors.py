"""A queue for every row."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import SelectorError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.producer.rows.routing import ByCallable, ByColumn, ByHash, TopicRows
from rocketmq_spark.queues.selection import select
from tests.live.writes import frame
from tests.queues import qs

QUEUES = qs("a:0-3 b:0-1 c:7")


def chosen(selector, batch, which=None):
    bad_rows = BadRows()
    found = selector(TopicRows(batch, "T", which, 100), QUEUES, bad_rows).tolist()
    return [[*QUEUES, None][i] for i in found], dict(bad_rows.reasons_by_row())


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30))
def test_hash_is_what_one_message_gets(keys):
    found, bad_rows = chosen(ByHash({"shardingkey": "k"}), frame(k=keys))
    assert found == [select("hash", QUEUES, None, key) for key in keys]
    assert bad_rows == {}


ANY = None  # any queue


def test_rows_without_a_key_may_go_to_any_queue():
    rows = frame(k=["x", None, "y", None, ""])
    found, bad_rows = chosen(ByHash({"shardingkey": "k"}), rows)
    assert found == [select("hash", QUEUES, None, "x"), ANY, select("hash", QUEUES, None, "y"), ANY, ANY]
    assert chosen(ByHash({"shardingkey": "k"}), rows, np.array([4, 2]))[0] == [ANY, found[2]]
    found, _ = chosen(ByHash({"shardingkey": "k"}), rows, np.array([0, 3]))
    assert found == [select("hash", QUEUES, None, "x"), ANY]
    assert bad_rows == {}


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 7, 8, -1, None]), st.sampled_from(["a", "b", "c", "d", None])),
        min_size=1,
    )
)
def test_column_with_brokers(rows):
    batch = frame(q=pa.array([i for i, _ in rows], pa.int32()), b=pa.array([b for _, b in rows], pa.string()))
    found, bad_rows = chosen(ByColumn({"queueid": "q", "brokername": "b"}), batch)
    for at, (queue_id, broker) in enumerate(rows):
        if queue_id is None and broker is None:
            assert found[at] is ANY
            assert at not in bad_rows
            continue
        wanted = MessageQueue("T", broker, queue_id) if broker is not None and queue_id is not None else None
        assert (at in bad_rows) == (wanted not in QUEUES)
        if wanted in QUEUES:
            assert found[at] == wanted


def test_a_queue_that_a_row_names_by_half_is_an_error():
    batch = frame(q=pa.array([None, 1], pa.int32()), b=["a", None])
    _, bad_rows = chosen(ByColumn({"queueid": "q", "brokername": "b"}), batch)
    assert bad_rows == {
        0: "q is null, and b is 'a'; expected both or neither",
        1: "b is null, and q is 1; expected both or neither",
    }


def test_column_without_brokers():
    found, bad_rows = chosen(ByColumn({"queueid": "q"}), frame(q=pa.array([2, 7, 0, 99, None, -1], pa.int16())))
    assert found[:2] == [MessageQueue("T", "a", 2), MessageQueue("T", "c", 7)]
    assert found[4] is ANY
    assert bad_rows == {
        2: "queue 0 of topic 'T' is on several brokers; name the broker too",
        3: "topic 'T' has no queue 99 that accepts messages; its queues: rocketmq-spark topic describe T",
        5: "topic 'T' has no queue -1 that accepts messages; its queues: rocketmq-spark topic describe T",
    }


def test_a_callable_gets_copies_and_its_answer_is_checked():
    seen = []

    def pick(queues, message, key):
        seen.append((message.topic, message.body, message.tags, key))
        queues.clear()
        return QUEUES[-1]

    rows = frame(body=["1", "2", "3"], k=["x", None, ""])
    found, _ = chosen(ByCallable({"body": "body", "shardingkey": "k"}, pick), rows)
    assert found == [QUEUES[-1]] * 3
    assert seen == [("T", b"1", None, "x"), ("T", b"2", None, None), ("T", b"3", None, None)]
    with pytest.raises(SelectorError, match=r"row 100: .*chose no queue; nothing of its Arrow batch was sent"):
        chosen(ByCallable({"body": "body"}, lambda queues, message, key: None), frame(body=["1"]))
