"""The driver's side of a stream over several runs: starts, changes of what is read, new queues, replays."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.errors import CheckpointMismatch, OffsetError, RocketMQError
from rocketmq_spark.model import MessageQueue
from tests.reading import Run, bodies, feed, positions, rows


@pytest.fixture
def topic(make_topic):
    return make_topic(queues=2)


def test_a_run_goes_on_where_the_last_one_ended(rocketmq, topic):
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    sent = feed(rocketmq, topic, 10)
    first.drain(sent)
    more = feed(rocketmq, topic, 10)
    second = Run(rocketmq, first.offset, subscribe=topic)
    second.drain(more)
    assert sorted(first.read + second.read) == sorted(sent + more)


def test_starting_options_have_no_effect_on_a_checkpoint(rocketmq, topic, caplog):
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    first.drain(feed(rocketmq, topic, 10))
    second = Run(rocketmq, first.offset, subscribe=topic, startingOffsets="earliest")
    assert second.batch() == []
    assert "the query continues from its checkpoint" in caplog.text


def test_a_changed_filter_is_reported(rocketmq, topic, caplog):
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest", tags="a")
    feed(rocketmq, topic, 4, tags="b")
    first.drain(feed(rocketmq, topic, 4, tags="a"))
    assert json.loads(first.offset)["reads"] == {
        "clusters": ["DefaultCluster"],
        "namespace": "",
        "subscribe": [topic],
        "tags": "a",
    }
    Run(rocketmq, first.offset, subscribe=topic, tags="a").batch()
    assert "the filter changed" not in caplog.text
    second = Run(rocketmq, first.offset, subscribe=topic, tags="b")
    second.drain(feed(rocketmq, topic, 4, tags="b"))
    assert "the filter changed from {'tags': 'a'} to {'tags': 'b'}" in caplog.text
    assert json.loads(second.offset)["reads"] == {
        "clusters": ["DefaultCluster"],
        "namespace": "",
        "subscribe": [topic],
        "tags": "b",
    }


@pytest.fixture
def in_shop(rocketmq, topic):
    """The same name inside of a namespace, with a run that read it."""
    rocketmq.create_topic(f"shop%{topic}", 2)
    run = Run(rocketmq, subscribe=topic, namespace="shop", startingOffsets="earliest")
    run.drain(feed(rocketmq, f"shop%{topic}", 10))
    feed(rocketmq, topic, 30)
    return run


def test_a_checkpoint_of_another_namespace_reads_nothing(rocketmq, topic, in_shop):
    forgotten = Run(rocketmq, in_shop.offset, subscribe=topic, failOnDataLoss="warn")
    with pytest.raises(CheckpointMismatch, match="of namespace 'shop', and this query of no namespace"):
        forgotten.latest()
    feed(rocketmq, f"shop%{topic}", 10)
    unfinished = in_shop.ahead()
    again = Run(rocketmq, in_shop.offset, subscribe=topic)
    with pytest.raises(CheckpointMismatch, match="of namespace 'shop', and this query of no namespace"):
        again.plan(unfinished)
    never_finished = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    with pytest.raises(CheckpointMismatch, match="of namespace 'shop', and this query of no namespace"):
        never_finished.plan(unfinished)
    assert len(rows(in_shop.reader, in_shop.plan(unfinished))) == 10


def test_what_an_older_version_did_not_write_down_is_filled_in(rocketmq, topic, in_shop):
    older = json.loads(in_shop.offset)
    del older["reads"]
    run = Run(rocketmq, json.dumps(older), subscribe=topic, namespace="shop", tags="a")
    run.drain(feed(rocketmq, f"shop%{topic}", 4, tags="a"))
    assert json.loads(run.offset)["reads"] == {
        "clusters": ["DefaultCluster"],
        "namespace": "shop",
        "subscribe": [topic],
        "tags": "a",
    }


def test_a_checkpoint_of_other_topics_reads_nothing(rocketmq, topic, make_topic, caplog):
    other = make_topic(queues=1)
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    first.drain(feed(rocketmq, topic, 4))
    feed(rocketmq, topic, 4)
    sent, unfinished = feed(rocketmq, other, 6), first.ahead()
    said = f"the checkpoint is of topic {topic}, and this query of topic {other}"
    with pytest.raises(CheckpointMismatch, match=said):
        Run(rocketmq, first.offset, subscribe=other).latest()
    for start in (first.offset, None):
        with pytest.raises(CheckpointMismatch, match=said):
            Run(rocketmq, start, subscribe=other).plan(unfinished)
    lenient = Run(rocketmq, first.offset, subscribe=other, failOnDataLoss="warn")
    lenient.drain(sent)
    assert f"topics that are no longer subscribed to are removed from the offsets: {topic}" in caplog.text


def test_a_filter_moves_on_over_what_it_leaves_out(rocketmq, topic):
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", tags="nobody")
    feed(rocketmq, topic, 10)
    run.until(lambda: set(run.positions.values()) == {5})
    assert run.read == []


def test_new_queues_are_read_from_their_beginning(rocketmq, topic):
    run = Run(rocketmq, subscribe=topic)
    feed(rocketmq, topic, 4)
    run.until(lambda: set(run.positions.values()) == {2})
    rocketmq.create_topic(topic, 4, resize=True)
    sent = feed(rocketmq, topic, 8)
    run.drain(sent)
    assert len(run.positions) == 4
    assert len(run.read) == len(set(run.read))


def test_topics_come_and_go(rocketmq, make_topic, caplog):
    old, new = make_topic(queues=1), make_topic(queues=1)
    first = Run(rocketmq, subscribe=old)
    before = feed(rocketmq, new, 3)
    first.drain(feed(rocketmq, old, 3))
    second = Run(rocketmq, first.offset, subscribe=f"{old},{new}")
    second.drain(before)
    assert f"topics that are not in the checkpoint start at their first offset: {new}" in caplog.text
    third = Run(rocketmq, second.offset, subscribe=new)
    third.drain(feed(rocketmq, new, 3))
    assert f"topics that are no longer subscribed to are removed from the offsets: {old}" in caplog.text
    assert set(third.positions) == {MessageQueue(new, "broker-a", 0)}


def test_a_batch_is_planned_again_as_it_was(rocketmq, topic):
    feed(rocketmq, topic, 20)
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=4)
    first.batch()
    start, end = first.offset, first.latest()
    as_planned = sorted(bodies(rows(first.reader, first.plan(end))))
    feed(rocketmq, topic, 20)
    again = Run(rocketmq, start, subscribe=topic)
    assert sorted(bodies(rows(again.reader, again.plan(end)))) == as_planned
    assert len(as_planned) == 4


def test_positions_never_go_back(rocketmq, topic):
    feed(rocketmq, topic, 20)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3)
    seen = run.positions
    while run.batch():
        assert all(run.positions[queue] >= offset for queue, offset in seen.items())
        seen = run.positions
    assert set(seen.values()) == {10}


def test_an_offset_that_nobody_can_read(rocketmq, topic):
    run = Run(rocketmq, '{"topics":{"t":7},"v":1}', subscribe=topic)
    with pytest.raises(OffsetError, match="7 is not a JSON object"):
        run.latest()


def test_errors_that_no_waiting_heals_end_the_query(rocketmq, topic):
    feed(rocketmq, topic, 4)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.batch()
    beyond = json.loads(run.offset)
    for number in beyond["topics"][topic]["broker-a"]:
        beyond["topics"][topic]["broker-a"][number] = 99
    again = Run(rocketmq, json.dumps(beyond), subscribe=topic)
    with pytest.raises(RocketMQError, match="offset went back"):
        again.latest()
    assert set(positions(json.dumps(beyond)).values()) == {99}


def test_available_now_run_ignores_topic_deleted_before_reading(rocketmq, topic):
    first = Run(rocketmq, subscribePattern=f"{topic}.*", startingOffsets="earliest")
    first.drain(feed(rocketmq, topic, 4))
    fleeting = f"{topic}-fleeting"
    rocketmq.create_topic(fleeting, 1)
    feed(rocketmq, fleeting, 3)
    more = feed(rocketmq, topic, 4)
    run = Run(rocketmq, first.offset, available_now=True, subscribePattern=f"{topic}.*", readDeadline="30s")
    rocketmq.admin.delete_topic(fleeting)
    run.drain(more)
    assert run.batch() == []


def test_logged_batch_names_a_topic_deleted_since_as_lost(rocketmq, topic, caplog):
    first = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    first.drain(feed(rocketmq, topic, 4))
    fleeting = f"{topic}-fleeting"
    rocketmq.create_topic(fleeting, 1)
    feed(rocketmq, fleeting, 3)
    more = feed(rocketmq, topic, 4)
    given = {"subscribe": f"{topic},{fleeting}", "failOnDataLoss": "warn"}
    logged = Run(rocketmq, first.offset, **given).ahead()
    assert {queue.topic for queue in positions(logged)} == {topic, fleeting}
    rocketmq.admin.delete_topic(fleeting)
    again = Run(rocketmq, first.offset, **given)
    assert sorted(bodies(rows(again.reader, again.plan(logged)))) == sorted(more)
    assert "(topic deleted)" in caplog.text
    again.offset = logged
    again.drain(feed(rocketmq, topic, 4))
    assert {queue.topic for queue in positions(again.offset)} == {topic}
