"""Spark's readers as Spark calls them: small pickles, cold starts, calls in any order."""

from __future__ import annotations

import json
import pickle

import pytest
from pyspark import cloudpickle

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.spark.compat import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from rocketmq_spark.spark.source.planning import TriggerLimits
from tests.reading import Run, batch_reader, bodies, feed, plan, positions, ranges_of, read, rows, stream_reader

SECRET = "s3cr3t-of-the-user"
KEYS = {"accessKey": "k", "secretKey": SECRET}


@pytest.mark.parametrize("make", [batch_reader, stream_reader])
def test_pickles_are_small_and_show_no_secret(rocketmq, topic, make):
    reader = make(rocketmq, subscribe=topic, **KEYS)
    assert len(cloudpickle.dumps(reader)) < 10_000
    assert SECRET not in repr(reader) + repr(vars(reader))


def test_partitions_are_small_and_show_no_secret(rocketmq, topic):
    feed(rocketmq, topic, 800)
    partitions = batch_reader(rocketmq, subscribe=topic, numPartitions=8, **KEYS).partitions()
    assert len(partitions) == 8
    for partition in partitions:
        assert len(pickle.dumps(partition)) < 600
        assert SECRET.encode() not in pickle.dumps(partition)
        assert SECRET not in repr(partition) + repr(partition.value)


def test_a_reader_that_was_used_still_travels(rocketmq, topic):
    sent = feed(rocketmq, topic, 16)
    for reader in (
        batch_reader(rocketmq, subscribe=topic),
        Run(rocketmq, subscribe=topic, startingOffsets="earliest").reader,
    ):
        if hasattr(reader, "initialOffset"):
            start = reader.initialOffset()
            partitions = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        else:
            partitions = reader.partitions()
        again = cloudpickle.loads(cloudpickle.dumps(reader))
        assert sorted(bodies(rows(again, partitions))) == sorted(sent)


def test_a_batch_between_offsets(rocketmq, make_topic):
    topic = make_topic(queues=2)
    feed(rocketmq, topic, 20)
    by_queue = lambda a, b: json.dumps({topic: {"broker-a": {"0": a, "1": b}}})  # noqa: E731
    found = plan(
        rocketmq, subscribe=topic, startingOffsets=by_queue(2, -2), endingOffsets=by_queue(5, -1), numPartitions=2
    )
    assert [[(r.queue.queue_id, r.start, r.end) for r in task] for task in found] == [[(0, 2, 5)], [(1, 0, 10)]]
    with pytest.raises(OffsetError, match=f"the start is after the end in {topic}/broker-a/0"):
        plan(rocketmq, subscribe=topic, startingOffsets=by_queue(5, 0), endingOffsets=by_queue(4, 0))


def test_empty_batch_has_no_partitions_and_task_reads_nothing(rocketmq, topic):
    reader = batch_reader(rocketmq, subscribe=topic)
    assert list(reader.partitions()) == []
    assert list(reader.read(None)) == []


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": 5}, ReadMaxRows(5)),
        ({"maxBytesPerTrigger": "1k"}, ReadMaxBytes(1024)),
        ({"minOffsetsPerTrigger": 3}, ReadMinRows(3)),
        ({"maxOffsetsPerTrigger": 5, "maxBytesPerTrigger": "1k", "minOffsetsPerTrigger": 3}, ReadMaxRows(5)),
    ],
)
def test_limits(rocketmq, topic, options, limit):
    assert stream_reader(rocketmq, subscribe=topic, **options).getDefaultReadLimit() == limit


def test_the_limits_that_spark_does_not_hand_back_hold_too():
    limits = {"maxOffsetsPerTrigger": 5, "maxBytesPerTrigger": "1k", "minOffsetsPerTrigger": 3}
    reader = stream_reader("127.0.0.1:9", subscribe="t", **limits)
    assert reader._trigger_limits(reader.getDefaultReadLimit()) == TriggerLimits(
        max_offsets=5, max_bytes=1024, min_offsets=3
    )


def test_trigger_once_reads_everything(rocketmq, topic):
    sent = feed(rocketmq, topic, 40)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    assert len(run.batch()) == 8
    assert len(run.batch(ReadAllAvailable())) == 32
    assert sorted(run.read) == sorted(sent)


def test_latest_is_resolved_once(rocketmq, topic):
    feed(rocketmq, topic, 8)
    reader = stream_reader(rocketmq, subscribe=topic)
    first = reader.initialOffset()
    feed(rocketmq, topic, 8)
    assert reader.initialOffset() == first
    assert set(positions(json.dumps(first)).values()) == {1}


def test_nothing_new_is_the_same_offset_to_the_letter(rocketmq, topic):
    feed(rocketmq, topic, 8)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.batch()
    written = json.loads(json.dumps(json.loads(run.offset), indent=1))
    assert run.reader.latestOffset(written, ReadAllAvailable()) is written


@pytest.mark.parametrize("available_now", [False, True])
def test_only_an_idle_stream_that_goes_on_holds_its_answer_back(rocketmq, topic, monkeypatch, available_now):
    feed(rocketmq, topic, 8)
    run = Run(rocketmq, available_now=available_now, subscribe=topic, startingOffsets="earliest")
    held_back = []
    monkeypatch.setattr(
        "rocketmq_spark.spark.source.bounds_reader.BoundsReader.wait_for_next_poll",
        lambda self, max_s: held_back.append(max_s),
    )
    run.until(lambda: len(run.read) == 8)
    assert run.batch() == []
    assert held_back == []
    assert run.batch() == []
    assert held_back == ([] if available_now else [0.1])


def test_available_now_reads_what_was_there_and_ends(rocketmq, topic):
    sent = feed(rocketmq, topic, 40)
    run = Run(rocketmq, available_now=True, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    feed(rocketmq, topic, 8)
    sizes = []
    while found := run.batch():
        sizes.append(len(found))
    assert sorted(run.read) == sorted(sent)
    assert sizes == [8] * 5


def test_partitions_may_be_the_first_call_of_all(rocketmq, topic):
    """A batch that was logged and not finished, in a new process."""
    sent = feed(rocketmq, topic, 16)
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    end = first.latest()
    cold = stream_reader(rocketmq, subscribe=topic)
    assert sorted(bodies(rows(cold, cold.partitions(json.loads(first.offset), json.loads(end))))) == sorted(sent)


def test_where_batch_0_began_is_in_its_end(rocketmq, topic):
    """A query that starts again before its first batch was committed asks for "latest" again, and later."""
    feed(rocketmq, topic, 8)
    first = Run(rocketmq, subscribe=topic)
    sent = feed(rocketmq, topic, 16)
    logged = first.ahead()
    feed(rocketmq, topic, 8)
    again = Run(rocketmq, subscribe=topic)
    assert again.offset != first.offset
    assert sorted(bodies(rows(again.reader, again.plan(logged)))) == sorted(sent)


def test_the_newest_offset_for_progress(rocketmq, topic):
    feed(rocketmq, topic, 16)
    reader = stream_reader(rocketmq, subscribe=topic)
    assert set(positions(json.dumps(reader.reportLatestOffset())).values()) == {2}


def test_commit_does_nothing(rocketmq, topic):
    assert stream_reader(rocketmq, subscribe=topic).commit({"topics": {}}) is None


def test_the_rows(rocketmq, topic):
    sent = feed(rocketmq, topic, 8, tags="vip", keys=("a", "b"), properties={"x": "1"})
    found = read(rocketmq, subscribe=topic)
    assert sorted(bodies(found)) == sorted(sent)
    assert [(row["tags"], row["keys"], row["properties"]) for row in found] == [("vip", ["a", "b"], [("x", "1")])] * 8


def test_repeated_batch_has_same_tasks_after_queues_changed(rocketmq, make_topic, monkeypatch):
    """A sink that leaves out what is stored compares within tasks."""
    topic = make_topic(queues=3)
    feed(rocketmq, topic, 60)
    given = {"subscribe": topic, "startingOffsets": "earliest", "numPartitions": 2, "minPartitions": 5}
    first = Run(rocketmq, **given)
    end = json.loads(first.latest())
    begin = json.loads(first.offset)
    planned = ranges_of(stream_reader(rocketmq, **given).partitions(begin, end))
    rocketmq.admin.create_topic(topic, queues=8)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert len(planned) > 2
    assert ranges_of(stream_reader(rocketmq, **given).partitions(begin, end)) == planned
