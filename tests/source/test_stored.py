"""Checkpoints of every released form are read, and queries go on from them; with Spark in tests/spark/test_restart.py."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from rocketmq_spark.errors import CheckpointMismatch
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.checkpoints.files import open_folder
from rocketmq_spark.spark.checkpoints.offset_log import history, last_batch, uncommitted_batch
from tests.reading import Run, bodies, canonical, feed, rows
from tests.source.stored import QUERIES, STORED, VERSIONS, adopted


def test_there_are_some():
    assert {"6a4e494", "58300e6"} <= {*VERSIONS}
    assert all((STORED / version / query / "offsets").is_dir() for version in VERSIONS for query in QUERIES)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_each_batch_read(version):
    zero, one, prices = (
        MessageQueue(*of) for of in (("orders", "broker-a", 0), ("orders", "broker-a", 1), ("prices", "broker-a", 0))
    )
    found = history(open_folder(str(STORED / version / "filtered")))
    assert [(read.batch.number, read.ranges, read.queues_without_start, read.done_ms is None) for read in found] == [
        (0, [OffsetRange(zero, 0, 3), OffsetRange(one, 0, 3)], [], False),
        (1, [OffsetRange(zero, 3, 5), OffsetRange(prices, 0, 2)], [], False),
        (2, [OffsetRange(one, 3, 5)], [], True),
    ]
    assert found[-1] == uncommitted_batch(open_folder(str(STORED / version / "filtered")))
    (offsets,) = found[-1].batch.sources.values()
    assert offsets.source_identity["tags"] == "a"
    assert offsets.newest_store_ms.keys() == {zero, one, prices}
    assert last_batch(open_folder(str(STORED / version / "environment"))).positions == {one: 5}


@pytest.fixture
def filled(rocketmq, make_topic):
    """Topics with what the queries of ``stored`` read; then their names."""
    orders, prices = make_topic(queues=2), make_topic(queues=1)
    sent = {queue: feed(rocketmq, orders, 5, queues=[queue], tags="a") for queue in (0, 1)}
    feed(rocketmq, prices, 2, tags="a")
    return orders, prices, sent


def logged(path, number):
    """An offset as Spark hands it to a reader."""
    return canonical(json.loads((path / "offsets" / str(number)).read_text().splitlines()[-1]))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_query_goes_on_from_it(rocketmq, filled, tmp_path, version):
    orders, prices, sent = filled
    path = adopted(version, "filtered", tmp_path, orders=orders, prices=prices)
    run = Run(rocketmq, logged(path, 1), subscribe=f"{orders},{prices}", tags="a")
    assert Counter(bodies(rows(run.reader, run.plan(logged(path, 2))))) == Counter(sent[1][3:])
    run.offset = logged(path, 2)
    assert run.latest() == run.offset
    more = [*feed(rocketmq, orders, 6, tags="a"), *feed(rocketmq, prices, 2, tags="a")]
    run.drain(more)
    assert Counter(run.read) == Counter(more)
    assert json.loads(run.offset)["reads"] == {
        "clusters": ["DefaultCluster"],
        "namespace": "",
        "subscribe": sorted([orders, prices]),
        "tags": "a",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_query_of_an_environment_goes_on_from_it_and_no_other(rocketmq, filled, tmp_path, version):
    orders, _, _ = filled
    path = adopted(version, "environment", tmp_path, orders=orders)
    begin = logged(path, 1)
    with pytest.raises(CheckpointMismatch, match="the checkpoint"):
        Run(rocketmq, begin, subscribe=orders, environment=1).latest()
    for start, end in ((logged(path, 0), begin), (None, logged(path, 0))):
        with pytest.raises(CheckpointMismatch, match="the checkpoint"):
            Run(rocketmq, start, subscribe=orders, startingOffsets="earliest", environment=1).plan(end)
        assert Run(rocketmq, start, subscribe=orders, startingOffsets="earliest", environment=2).plan(end)
    run = Run(rocketmq, begin, subscribe=orders, environment=2)
    assert run.latest() == begin
    feed(rocketmq, orders, 3, queues=[0])
    more = feed(rocketmq, orders, 3, queues=[1])
    run.drain(more)
    assert Counter(run.read) == Counter(more)
    assert json.loads(run.offset)["environment"] == {orders: {"broker-a": {"1": 2}}}
    reads = {"clusters": ["DefaultCluster"], "environment": "2", "namespace": "", "subscribe": [orders]}
    assert json.loads(run.offset)["reads"] == reads


@pytest.mark.parametrize("version", VERSIONS)
def test_its_marks_recognise_a_topic_that_was_made_again(rocketmq, make_topic, tmp_path, version):
    """The messages of this broker were stored long after those that the query read."""
    orders, prices = make_topic(queues=2), make_topic(queues=1)
    path = adopted(version, "filtered", tmp_path, orders=orders, prices=prices)
    time_ms = json.loads(logged(path, 1))["marks"][orders]["broker-a"]["0"]
    assert time_ms <= time.time_ns() // 1_000_000
    feed(rocketmq, orders, 20)
    feed(rocketmq, prices, 9)
    run = Run(rocketmq, logged(path, 1), subscribe=f"{orders},{prices}", tags="a")
    with pytest.raises(Exception, match="offset went back"):
        run.plan(logged(path, 2))
