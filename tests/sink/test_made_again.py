"""Topics that are deleted and made again within a batch, on a real broker: what a look would pass over is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import BrokerNotFound, UnprovedError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session.stored_ids import scan_tools
from rocketmq_spark.spark.checkpoints import batch_notes
from rocketmq_spark.spark.sink import exactly_once
from rocketmq_spark.spark.sink.exactly_once import plan_job
from rocketmq_spark.stored.ends import QueueEnds
from rocketmq_spark.stored.scan import NOTE_MAX_AGE_S, LiveStoredIds, ScanTools, StoredIdScan
from tests.helpers import indexed, stored
from tests.live.writes import Make, bodies, frame, sink_options
from tests.sink.test_once import KINDS, Sink, soon

__all__ = ["soon"]


@pytest.fixture
def sink(rocketmq: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """At a broker that deletes topics."""
    return Sink(rocketmq, tmp_path, monkeypatch)


def others(rocketmq: LocalBroker, topic: str, count: int = 5) -> None:
    with Producer(rocketmq.name_server, group="others") as producer:
        for _ in range(count):
            producer.send(Message(topic, b"other"))
    indexed(rocketmq)


def made_again(rocketmq: LocalBroker, topic: str, attributes: Any) -> None:
    rocketmq.admin.delete_topic(topic)
    rocketmq.create_topic(topic, queues=1, attributes=attributes)


@KINDS
def test_a_queue_that_others_filled_beyond_its_noted_end(
    rocketmq: LocalBroker, make_topic: Make, sink: Sink, attributes: Any
) -> None:
    topic = make_topic(queues=1, attributes=attributes)
    options = sink.options(topic=topic, sendTimeout="2s")
    rows = frame(body=["a", "b", "c"])
    others(rocketmq, topic)
    plan = sink.plan(options)
    made_again(rocketmq, topic, attributes)
    assert sink.attempt(plan, options, rows).sent == 3
    others(rocketmq, topic)
    with pytest.raises(UnprovedError, match="the topic was created again"):
        sink.plan(options)
    with pytest.raises(UnprovedError, match="the topic was created again"):
        sink.attempt(plan, options, rows, attempt=1)


@KINDS
def test_a_topic_that_is_the_same_and_what_a_note_says_of_it(
    rocketmq: LocalBroker, make_topic: Make, sink: Sink, attributes: Any
) -> None:
    topic = make_topic(queues=1, attributes=attributes)
    options = sink.options(topic=topic)
    rows = frame(body=["a", "b", "c"])
    others(rocketmq, topic)
    sink.attempt(sink.plan(options), options, rows)
    others(rocketmq, topic)
    assert sink.attempt(sink.plan(options), options, rows).already_stored == 3
    path: Path = sink.path / batch_notes.NOTES_FOLDER / "0" / "sink"
    noted = json.loads(path.read_text())
    assert noted["stored"][topic]["broker-a"]["0"] > 1_700_000_000_000
    del noted["stored"], noted["sum"], noted["settle"]
    path.write_text(json.dumps(noted))
    assert sink.attempt(sink.plan(options), options, rows).already_stored == 3, "as an earlier version noted it"
    assert bodies(stored(rocketmq, topic, 13)).count("a") == 1


def test_a_batch_write_whose_task_is_repeated(rocketmq: LocalBroker, make_topic: Make, sink: Sink) -> None:
    topic = make_topic(queues=1)
    options = sink.options(topic=topic, sendTimeout="2s")
    others(rocketmq, topic)
    plan = plan_job(options)
    made_again(rocketmq, topic, None)
    others(rocketmq, topic)
    with pytest.raises(UnprovedError, match="the topic was created again"):
        sink.attempt(plan, options, frame(body=["a"]), attempt=1)


def test_settle_time_of_an_earlier_run_is_still_waited_for(
    make_topic: Make, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart with a smaller ``exactlyOnceSettle`` shortens what is on its way no more."""
    topic = make_topic(queues=1)
    asked: list[float] = []

    def look(tools: ScanTools, since: QueueEnds) -> StoredIdScan:
        asked.append(tools.settle_s)
        return StoredIdScan(tools, since)

    monkeypatch.setattr(exactly_once, "StoredIdScan", look)
    for settle in ("1s", "0.3s"):
        sink.plan(sink.options(topic=topic, exactlyOnceSettle=settle))
    assert asked == [1.0]
    with monkeypatch.context() as patched:
        patched.setattr(exactly_once, "snapshot_queue_ends", away)
        sink.plan(sink.options(topic=topic, exactlyOnceSettle="1.5s"))
    sink.plan(sink.options(topic=topic))
    assert asked == [1.0, 1.5, 1.5], "also of a run that did not hear of new queues"


def away(options: object) -> QueueEnds:
    raise BrokerNotFound("a broker that has joined is away")


@pytest.mark.parametrize("later_s", [0.0, NOTE_MAX_AGE_S + 1], ids=["at once", "noted anew meanwhile"])
def test_a_producer_that_looks_what_is_stored(rocketmq: LocalBroker, make_topic: Make, later_s: float) -> None:
    """Its message may lie in the new topic before the end that was noted of the old one."""
    topic = make_topic(queues=1)
    options = sink_options(rocketmq.name_server, topic=topic, exactlyOnceSettle="3s")
    queue, now_s = MessageQueue(topic, "broker-a", 0), [100.0]
    ids = LiveStoredIds(
        lambda timeout_s, clock: scan_tools(options, timeout_s, clock), Clock(lambda: now_s[0], lambda seconds: None)
    )
    others(rocketmq, topic)
    offset, master = ids.end(queue)
    assert offset == 5
    assert ids.find_stored({queue: offset}, master, {"x"}, Deadline.after(5)) == set()
    made_again(rocketmq, topic, None)
    others(rocketmq, topic, 8)
    now_s[0] += later_s
    assert ids.end(queue).offset == (8 if later_s else 5)
    with pytest.raises(UnprovedError, match="the topic was created again"):
        ids.find_stored({queue: offset}, master, {"x"}, Deadline.after(1))


def test_what_retention_deleted_cannot_be_proved(rocketmq: LocalBroker, make_topic: Make, sink: Sink) -> None:
    topic = make_topic(queues=1)
    options = sink.options(topic=topic, sendTimeout="2s")
    sink.attempt(sink.plan(options), options, frame(body=["x"]))
    indexed(rocketmq)
    rocketmq.admin.delete_topic(topic)
    rocketmq.admin.create_topic(topic, queues=1)
    path = sink.path / batch_notes.NOTES_FOLDER / "0" / "sink"
    noted = json.loads(path.read_text())
    for ends in noted["topics"][topic].values():
        ends["0"] = 5
    del noted["sum"]
    path.write_text(json.dumps(noted))
    with pytest.raises(UnprovedError, match="ends at offset 0 now, and ended at 5 before"):
        sink.plan(options)
