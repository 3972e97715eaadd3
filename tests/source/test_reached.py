"""Where batches start if Spark calls ``latestOffset()`` without a start, in all orders of Spark's calls.

The model is the micro-batch executor of PySpark 4.0 and 4.1, with its offset log and commit log. Committed batches have every
message once, in order, whichever drivers are killed, and whichever batches are pruned or planned again.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from rocketmq_spark import options
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source import planning
from rocketmq_spark.spark.source.offsets import OffsetLogCache, Offsets
from rocketmq_spark.spark.source.partition_reader import RangePartition
from rocketmq_spark.spark.source.planning import TriggerLimits
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader
from tests.models import SteppingMachine, model_test, step

QUEUE = MessageQueue("t", "broker-a", 0)


class Topic:
    """One queue, and the group's offsets that the driver committed."""

    def __init__(self) -> None:
        self.end = 0
        self.committed: list[int] = []


class PlannedStream:
    """A fake of ``Stream`` with one queue and without brokers."""

    def __init__(self, topic: Topic, latest: bool) -> None:
        self.offset_log = OffsetLogCache()
        self._topic = topic
        self._first = topic.end if latest else 0  # a new run resolves it anew
        self._initial: Offsets | None = None

    def initialOffset(self) -> Offsets:
        if self._initial is None:
            self._initial = Offsets({QUEUE: self._first})
        return self._initial

    def latestOffset(self, begin: Offsets, limits: TriggerLimits, finished: bool) -> Offsets:
        at = begin.positions[QUEUE]
        if finished:
            self._topic.committed.append(at)
        end = min(self._topic.end, at + (limits.max_offsets or self._topic.end))
        if end == at:
            return begin
        return Offsets({QUEUE: end}, {QUEUE: at} if begin is self._initial else {})

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        return [RangePartition((r,)) for r in planning.ranges(start, end)]

    def reportLatestOffset(self) -> dict[str, Any]:
        return {"lag": self._topic.end}


def reader(topic: Topic, latest: bool = False, **given: object) -> RocketMQStreamReader:
    parsed = options.parse({"nameServer": "127.0.0.1:1", "subscribe": "t", **given}).for_role("stream source")
    made = RocketMQStreamReader(parsed, BASIC_COLUMNS, supports_prefetch=False)
    made._stream = PlannedStream(topic, latest)
    return made


def ranges(partitions: Any) -> list[tuple[int, int]]:
    return [(r.start, r.end) for partition in partitions for r in partition.ranges]


class Spark:
    """Spark's executor of one query, over all of its runs. The logs survive a killed driver."""

    def __init__(self, topic: Topic, latest: bool, **given: object) -> None:
        self.topic, self._latest, self._given = topic, latest, given
        self.ends: list[str] = []  # the offset log
        self.starts: list[str] = []
        self.read: list[list[tuple[int, int]]] = []  # by committed batch: its length is that of the commit log
        self._reader: RocketMQStreamReader | None = None

    def run(self) -> RocketMQStreamReader:
        """The reader of the current run. A new run makes the calls of Spark's ``populateStartOffsets`` first."""
        if self._reader is None:
            self._reader = reader(self.topic, self._latest, **self._given)
            if self.ends:
                newest = json.loads(self.ends[-1])
                assert self._reader.partitions(newest, newest) == []
        return self._reader

    def kill(self) -> None:
        self._reader = None

    @property
    def unfinished(self) -> bool:
        return len(self.ends) > len(self.read)

    def construct(self) -> bool:
        """Logs the next batch. Returns whether there is one."""
        end = json.dumps(self.run().latestOffset())
        if self.ends and end == self.ends[-1]:
            return False
        self.ends.append(end)
        if len(self.ends) > 1:
            self.run().commit(json.loads(self.ends[-2]))
        return True

    def start_of_last(self) -> str:
        if len(self.ends) > 1:
            return self.ends[-2]
        return json.dumps(self.run().initialOffset())

    def finish(self, pruned: bool = False) -> None:
        """Runs the last logged batch and commits it. A ``pruned`` batch is not planned, because its rows are not used."""
        start = self.start_of_last()
        self.starts[len(self.read) :] = [start]
        if pruned:
            at = json.loads(start)["topics"]["t"]["broker-a"]["0"]
            begun = json.loads(self.ends[-1]).get("start", {}).get("t", {}).get("broker-a", {}).get("0", at)
            end = json.loads(self.ends[-1])["topics"]["t"]["broker-a"]["0"]
            self.read.append([(begun, end)] if end > begun else [])
        else:
            self.read.append(ranges(self.run().partitions(json.loads(start), json.loads(self.ends[-1]))))


class CallsOfSpark(SteppingMachine):
    @initialize(latest=st.booleans(), limit=st.sampled_from([None, 1, 3, 10]), there=st.integers(0, 12))
    def begin(self, latest: bool, limit: int | None, there: int) -> None:
        topic = Topic()
        topic.end = there
        self.limit = limit
        self.first = there if latest else 0
        self.spark = Spark(topic, latest, **({"maxOffsetsPerTrigger": str(limit)} if limit else {}))

    @step(count=st.integers(1, 8))
    def messages_arrive(self, count: int) -> None:
        self.spark.topic.end += count

    @step(stage=st.sampled_from(["done", "done", "done", "logged", "planned", "asked"]), pruned=st.booleans())
    def a_trigger_fires(self, stage: str, pruned: bool) -> None:
        """The driver may be killed after each of Spark's steps."""
        spark = self.spark
        new_run = spark._reader is None
        if new_run and spark.unfinished:
            self.did["batch 0 replayed" if not spark.read else "batch replayed"] += 1
        elif stage == "asked":
            spark.run().latestOffset()
            spark.kill()
            return
        elif not spark.construct():
            self.did["idle"] += 1
            return
        elif stage == "logged":
            spark.kill()
            self.did["killed after the log"] += 1
            return
        if stage == "planned":
            spark.run()
            ranges(spark.run().partitions(json.loads(spark.start_of_last()), json.loads(spark.ends[-1])))
            spark.kill()
            return
        spark.run()
        spark.finish(pruned)
        self.did["committed"] += 1
        self.did["pruned"] += pruned
        self.did["restarted after a commit"] += new_run

    @step()
    def the_driver_is_killed(self) -> None:
        self.spark.kill()

    @step(data=st.data())
    def a_batch_is_planned_again(self, data: st.DataObject) -> None:
        """A program kept the DataFrame of a batch, and reads it again."""
        spark = self.spark
        if not spark.read or spark._reader is None or spark.unfinished:
            return
        number = data.draw(st.integers(0, len(spark.read) - 1))
        again = spark.run().partitions(json.loads(spark.starts[number]), json.loads(spark.ends[number]))
        assert ranges(again) == spark.read[number]
        self.did["planned again"] += 1

    @invariant()
    def committed_batches_are_the_topic_in_order(self) -> None:
        spark = getattr(self, "spark", None)
        if spark is None or not spark.read:
            return
        at = None
        for batch in spark.read:
            for start, end in batch:
                assert at is None or start == at, spark.read
                assert self.limit is None or end - start <= self.limit
                at = end
        if at is not None:
            assert at == json.loads(spark.ends[len(spark.read) - 1])["topics"]["t"]["broker-a"]["0"]
            assert next(start for batch in spark.read for start, _ in batch) >= self.first

    @invariant()
    def a_group_has_offsets_of_finished_work_only(self) -> None:
        spark = getattr(self, "spark", None)
        if spark is None or not spark.topic.committed:
            return
        done = [json.loads(end)["topics"]["t"]["broker-a"]["0"] for end in spark.ends[: len(spark.read)]]
        assert spark.topic.committed[-1] in done
        self.did["group"] += 1


TestCallsOfSpark = model_test(
    CallsOfSpark,
    settings(max_examples=300, stateful_step_count=30, deadline=None),
    committed=300,
    idle=30,
    pruned=50,
    group=100,
    **{"killed after the log": 50, "batch 0 replayed": 20, "batch replayed": 30, "planned again": 50},
)


def test_a_new_query_is_read_in_batches_of_the_limit() -> None:
    topic = Topic()
    topic.end = 1000
    spark = Spark(topic, False, maxOffsetsPerTrigger="300")
    while spark.construct():
        spark.finish()
    assert spark.read == [[(0, 300)], [(300, 600)], [(600, 900)], [(900, 1000)]]
    assert topic.committed == [300, 600, 900, 1000]


def test_batch_0_of_latest_is_replayed_from_where_it_began() -> None:
    topic = Topic()
    topic.end = 10
    spark = Spark(topic, True)
    spark.run().initialOffset()  # the moment of the start
    spark.kill()
    topic.end = 60
    spark._latest = False
    spark.construct()
    spark.kill()
    spark._latest = True
    topic.end = 90
    spark.finish()
    assert spark.read == [[(0, 60)]]
    spark.construct()
    spark.finish()
    assert spark.read[1] == [(60, 90)]


def test_an_idle_query_returns_the_logged_text_unchanged() -> None:
    topic = Topic()
    topic.end = 5
    spark = Spark(topic, False)
    spark.construct()
    spark.finish()
    spark.kill()
    logged = json.dumps(json.loads(spark.ends[-1]))
    assert json.dumps(spark.run().latestOffset()) == logged
    assert not spark.construct()


WRAPPED = "triggerAvailableNowWrapper.enabled"


def test_an_end_asked_before_the_logged_one_is_an_error() -> None:
    """Spark's AvailableNow wrapper asks for the end first, also at a restart."""
    topic = Topic()
    topic.end = 100
    spark = Spark(topic, False)
    spark.construct()
    spark.finish()
    wrapped = reader(topic)
    wrapped.latestOffset()
    assert topic.committed == []
    with pytest.raises(OptionError, match=WRAPPED):
        wrapped.partitions(json.loads(spark.ends[0]), json.loads(spark.ends[0]))


def test_an_end_that_spark_only_reports_is_not_finished_work() -> None:
    """With this wrapper, a new query's only batch ends at the first end; Spark asks for another one only to report it."""
    topic = Topic()
    topic.end = 100
    wrapped = reader(topic, maxOffsetsPerTrigger="40")
    end = wrapped.latestOffset()
    start = wrapped.initialOffset()
    wrapped.latestOffset()
    assert ranges(wrapped.partitions(start, end)) == [(0, 40)]
    wrapped.latestOffset()
    assert topic.committed == []


def test_a_start_that_spark_passes_is_used() -> None:
    """PySpark 4.2 and newer pass the start; ends that the reader returned before do not matter."""
    topic = Topic()
    topic.end = 100
    made = reader(topic, maxOffsetsPerTrigger="10")
    start = made.initialOffset()
    first = made.latestOffset(start)
    assert made.latestOffset(start) == first
    assert ranges(made.partitions(start, first)) == [(0, 10)]
