"""How much one batch of a stream may read, and what happens when offsets are gone."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import Message
from rocketmq_spark.spark.compat import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from tests.mockbroker import eventually
from tests.reading import Run, feed, names, post


def sizes(run: Run) -> list[int]:
    """Rows of all batches until nothing is left."""
    found = []
    while batch := run.batch():
        found.append(len(batch))
    return found


def test_max_offsets_per_trigger__caps_batch_and_starves_none(rocketmq, make_topic):
    topic = make_topic(queues=3)
    feed(rocketmq, topic, 90, queues=[0])
    feed(rocketmq, topic, 9, queues=[1])
    feed(rocketmq, topic, 1, queues=[2])
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    first = run.batch()
    by_queue = [sum(1 for row in first if row["queueId"] == i) for i in range(3)]
    assert by_queue == [9, 1, 1]  # a message more than allowed, rather than a queue that waits
    assert all(0 < size <= 12 for size in sizes(run))
    assert len(run.read) == 100


def test_max_offsets_per_trigger__yields_to_spark_limits(rocketmq, topic):
    everything = feed(rocketmq, topic, 64)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    assert run.limit == ReadMaxRows(8)
    assert len(run.batch()) == 8
    assert len(run.batch(ReadMaxRows(16))) == 16
    assert len(run.batch(ReadAllAvailable())) == 40  # Trigger.Once
    assert Counter(run.read) == Counter(everything)


def test_max_offsets_per_trigger__keeps_end_of_available_now(rocketmq, topic):
    everything = feed(rocketmq, topic, 40)
    run = Run(rocketmq, available_now=True, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=16)
    feed(rocketmq, topic, 8)
    assert all(size <= 16 for size in sizes(run))
    assert Counter(run.read) == Counter(everything)


def test_min_offsets_per_trigger__waits_until_so_many_are_there(rocketmq, topic):
    run = Run(rocketmq, subscribe=topic, minOffsetsPerTrigger=20)
    assert run.limit == ReadMinRows(20)
    assert run.batch() == []
    feed(rocketmq, topic, 16)
    eventually(lambda: run.batch() == [] and run.reader.reportLatestOffset()["lag"] == 16, 60)
    assert run.read == [], "it has seen them, and waits"
    feed(rocketmq, topic, 8)
    run.until(lambda: run.read)
    assert len(run.read) == 24


def test_min_offsets_per_trigger__first_batch_waits_for_nothing(rocketmq, topic):
    """Else a query that is started anew more often than `maxTriggerDelay` would never read a quiet topic."""
    given = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 20}
    sent = feed(rocketmq, topic, 16)
    run = Run(rocketmq, **given)
    run.until(lambda: run.read)
    assert Counter(run.read) == Counter(sent)
    late = feed(rocketmq, topic, 3)
    eventually(lambda: run.batch() == [] and run.reader.reportLatestOffset()["lag"] == 3, 60)
    again = Run(rocketmq, offset=run.offset, **given)
    again.until(lambda: again.read)
    assert Counter(again.read) == Counter(late)


def test_min_offsets_per_trigger__does_not_delay_available_now(rocketmq, topic):
    everything = feed(rocketmq, topic, 4)
    run = Run(rocketmq, available_now=True, subscribe=topic, startingOffsets="earliest", minOffsetsPerTrigger=20)
    run.batch()
    assert Counter(run.read) == Counter(everything)


def test_max_trigger_delay__ends_the_wait_for_the_minimum(rocketmq, topic):
    waits = Run(rocketmq, subscribe=topic, minOffsetsPerTrigger=1000)
    run = Run(rocketmq, subscribe=topic, minOffsetsPerTrigger=1000, maxTriggerDelay="2s")
    made = time.monotonic()
    assert waits.batch() == run.batch() == []
    feed(rocketmq, topic, 8)
    run.until(lambda: run.read)
    assert time.monotonic() - made >= 2
    assert len(run.read) == 8
    assert waits.batch() == []


def test_max_bytes_per_trigger__estimates_by_samples(rocketmq, make_topic):
    topic = make_topic(queues=2)
    post(rocketmq, [Message(topic, f"{name:<1000}".encode()) for name in names(400)])
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger="64k")
    assert run.limit == ReadMaxBytes(64 << 10)
    found = sizes(run)
    assert sum(found) == 400
    assert len(found) > 5
    # A message of 1000 bytes takes about 1150 in the log.
    assert all(40 <= size <= 64 for size in found[:-1])


def test_max_bytes_per_trigger__counts_messages_of_stored_batch(rocketmq, make_topic):
    topic = make_topic(queues=1, batch=True)
    for _ in range(4):
        post(rocketmq, [Message(topic, f"{name:<1000}".encode()) for name in names(100)])
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger="64k")
    found = sizes(run)
    assert sum(found) == 400
    assert len(found) > 5
    assert all(40 <= size <= 64 for size in found[:-1])


@pytest.mark.parametrize(
    ("policy", "level"), [("warn", logging.WARNING), ("ignore", logging.INFO), ("false", logging.INFO)]
)
def test_fail_on_data_loss__warns_or_is_quiet(rocketmq, topic, caplog, policy, level):
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.drain(feed(rocketmq, topic, 40))
    made_again(rocketmq, topic)
    fresh = feed(rocketmq, topic, 8)
    caplog.set_level(logging.INFO, "rocketmq_spark.spark.source.data_loss")
    again = Run(rocketmq, run.offset, subscribe=topic, failOnDataLoss=policy)
    again.drain(fresh)
    assert Counter(again.read) == Counter(fresh)
    (line,) = [r for r in caplog.records if "cannot be read any more" in r.getMessage()]
    assert line.levelno == level


@pytest.mark.parametrize("policy", [None, "fail", "true"])
def test_fail_on_data_loss__fails_by_default(rocketmq, topic, policy):
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.drain(feed(rocketmq, topic, 40))
    made_again(rocketmq, topic)
    again = Run(rocketmq, run.offset, subscribe=topic, **({"failOnDataLoss": policy} if policy else {}))
    with pytest.raises(DataLossError, match="failOnDataLoss") as e:
        again.until(lambda: False, 20)
    assert e.value.topic == topic


def made_again(mq, topic):
    mq.admin.delete_topic(topic)
    eventually(lambda: topic not in mq.admin.topics(), 60)
    mq.create_topic(topic, 8)


@pytest.mark.parametrize("limit", [2**63 - 1, 2**63, 10**30])
def test_max_offsets_per_trigger__may_be_larger_than_any_offset(rocketmq, topic, limit):
    feed(rocketmq, topic, 32)
    start = {topic: {"broker-a": {str(queue): 2 for queue in range(8)}}}
    run = Run(rocketmq, subscribe=topic, startingOffsets=start, maxOffsetsPerTrigger=limit)
    assert sizes(run) == [16]
    assert {*run.positions.values()} == {4}
