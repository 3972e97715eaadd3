"""Batches that are stored whole: which rows go together, and what is said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.batch_tags import BatchTagKeys
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.producer.rows.routing import RoutingPlan, RowRange
from rocketmq_spark.producer.rows.sender import MAX_TAGS, group_by_tag
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.helpers import stored
from tests.live.writes import Make, Writes, bodies, by_queue, frame, numbered, writes
from tests.witness import JavaPeer

__all__ = ["writes"]

QUEUE = MessageQueue("t", "a", 0)
SHARES = st.lists(
    st.tuples(
        st.sampled_from("tu"), st.sampled_from([None, QUEUE]), st.lists(st.sampled_from(["", "a", "b"]), min_size=1)
    ),
    max_size=5,
)


@given(SHARES, st.sampled_from(["auto", "true", "false"]), st.booleans())
def test_rows_are_reordered_where_they_may_be(made, by_tag, reordered):
    tags = [tag for _, _, mine in made for tag in mine]
    order = np.arange(len(tags))[::-1] if reordered else None
    ends = np.cumsum([0, *(len(mine) for _, _, mine in made)]).tolist()
    shares = [RowRange(topic, queue, *ends[i : i + 2]) for i, (topic, queue, _) in enumerate(made)]
    plan = RoutingPlan(order, shares)
    about = BatchTagKeys(frame(tags=tags), {"tags": "tags"}, 100)
    found = group_by_tag(plan, about, lambda topic: topic == "t", by_tag)
    assert [share.start for share in found.ranges] == [0, *(share.end for share in found.ranges)][:-1]
    for share in shares:
        mine = [one for one in found.ranges if share.start <= one.start < share.end]
        assert {one[:2] for one in mine} == {share[:2]}
        got, rows = [found.rows(one).tolist() for one in mine], plan.rows(share).tolist()
        assert sorted(row for one in got for row in one) == sorted(rows)
        if share.topic == "t" and by_tag != "false" and (share.queue is None or by_tag == "true"):
            assert [len({tags[row] for row in one}) for one in got] == [1] * len({tags[row] for row in rows})
            assert all([row for row in rows if row in one] == one for one in got)
        else:
            assert got == [rows]


@pytest.mark.parametrize(
    ("count", "by_tag", "parts"), [(MAX_TAGS, "auto", MAX_TAGS), (MAX_TAGS + 1, "auto", 1), (40, "true", 40)]
)
def test_auto_is_for_few_tags(count: int, by_tag: str, parts: int) -> None:
    tags = [f"t{i % count}" for i in range(100)]
    plan = RoutingPlan(None, [RowRange("t", None, 0, 100)])
    found = group_by_tag(plan, BatchTagKeys(frame(tags=tags), {"tags": "tags"}, 100), lambda topic: True, by_tag)
    assert len(found.ranges) == parts


def outer(writes: Writes) -> list[dict[str, str]]:
    return [decode_properties(request.properties) for _, request in writes.requests]


def test_tag_rows_share_a_batch_and_queue_rows_keep_their_order(
    rocketmq: LocalBroker, make_topic: Make, writes: Writes
) -> None:
    tags = [("a", "b", None)[i % 3] for i in range(300)]
    rows = frame(body=numbered(300), tags=tags, shardingKey=[f"{i % 5}" for i in range(300)])
    found = {}
    for selector, by_tag in (("roundRobin", "auto"), ("roundRobin", "false"), ("hash", "auto"), ("hash", "true")):
        topic = make_topic(queues=2, batch=True)
        writes(rows, topic=topic, queueSelector=selector, batchByTag=by_tag)
        found[selector, by_tag] = Counter(said.get("TAGS") for said in outer(writes))
        assert len({said["UNIQ_KEY"] for said in outer(writes)}) == len(writes.requests)
        read = stored(rocketmq, topic, 300)
        assert sorted(bodies(read)) == numbered(300)
        assert all(tags[int(message.body)] == message.tags for message in read)
        if selector == "hash":
            for mine in by_queue(read).values():
                of_tag = [[body for body in mine if tags[int(body)] == tag] for tag in ("a", "b", None)]
                assert (mine == sorted(mine)) == (by_tag == "auto")
                assert all(some == sorted(some) for some in of_tag)
    assert found == {
        ("roundRobin", "auto"): {"a": 1, "b": 1, None: 1},
        ("roundRobin", "false"): {None: 1},
        ("hash", "auto"): {None: 2},
        ("hash", "true"): {"a": 2, "b": 2, None: 2},
    }


def test_a_batch_topic_stores_each_batch_as_one_message(
    rocketmq: LocalBroker, make_topic: Make, writes: Writes, java_peer: JavaPeer
) -> None:
    topic = make_topic(queues=1, batch=True)
    rows = frame(body=numbered(50), keys=[[f"k{i % 4}"] for i in range(50)], tags=["t"] * 50, flag=list(range(50)))
    done = writes(rows, topic=topic)
    assert (done.rows, done.batches) == (50, 1)
    (said,) = outer(writes)
    assert said == {"UNIQ_KEY": said["UNIQ_KEY"], "TAGS": "t", "KEYS": "k0 k1 k2 k3"}
    read = stored(rocketmq, topic, 50)
    assert {message.commit_log_offset for message in read} == {read[0].commit_log_offset}
    assert [(int(message.body), message.queue_offset, message.flag, message.keys) for message in read] == [
        (i, i, i, [f"k{i % 4}"]) for i in range(50)
    ]
    assert java_peer.query(topic, "k3") != []


def test_what_cannot_travel_in_a_batch_travels_alone(rocketmq: LocalBroker, make_topic: Make, writes: Writes) -> None:
    """A delay is a message's own, and so is compression; without batches nothing is stored whole."""
    topic = make_topic(queues=1, batch=True)
    delays = [1 if i % 2 else None for i in range(6)]
    writes(frame(body=numbered(6), delayLevel=delays, keys=[[f"k{i}"] for i in range(6)]), topic=topic)
    assert [(request.batch, "KEYS" in request.properties) for _, request in writes.requests] == [(False, True)] * 3 + [
        (True, True)
    ]
    assert outer(writes)[-1]["KEYS"] == "k0 k2 k4"
    assert sorted(bodies(stored(rocketmq, topic, 6))) == numbered(6)
    writes(frame(body=["x" * 9_000]), topic=topic, batchMaxBytes=1_000)
    writes(frame(body=["y"]), topic=topic, autoBatch="false")
    assert sorted(bodies(stored(rocketmq, topic, 8)))[6:] == ["x" * 9_000, "y"]


def test_ordinary_topics_get_the_bytes_they_always_got(make_topic: Make, writes: Writes) -> None:
    rows = frame(body=numbered(30), tags=[("a", "b")[i % 2] for i in range(30)], keys=[["k"]] * 30)
    writes(rows, topic=make_topic(queues=1), batchByTag="true")
    ((_, request),) = writes.requests
    assert request.properties == ""
    assert [bytes(item.body).decode() for item in decode_batch(bytes(request.body))] == numbered(30)


def test_topics_of_both_kinds_in_one_batch(
    rocketmq: LocalBroker, make_topic: Callable[..., str], writes: Writes
) -> None:
    whole, single = make_topic(queues=1, batch=True), make_topic(queues=1)
    names = [whole if i % 2 else single for i in range(40)]
    writes(frame(body=numbered(40), topic=names, tags=[f"t{i % 4}" for i in range(40)]))
    of_topic = {queue.topic: [] for queue, _ in writes.requests}
    for queue, request in writes.requests:
        said = decode_properties(request.properties)
        assert ("UNIQ_KEY" in said) == (queue.topic == whole)
        of_topic[queue.topic].append(said.get("TAGS"))
    assert of_topic == {single: [None], whole: ["t1", "t3"]}
    for topic, first in ((whole, 1), (single, 0)):
        assert sorted(bodies(stored(rocketmq, topic, 20))) == numbered(40)[first::2]
