"""Writing from the driver's side, in every output mode, with counts that come back."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import rocketmq_spark
from rocketmq_spark import foreach_batch_writer, session, write_rocketmq
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.spark.sink import foreach
from rocketmq_spark.spark.sink.report import BrokerCounts, Written
from tests.fix_spark import finish
from tests.helpers import stored
from tests.live.writes import Make, bodies, by_queue, frame
from tests.mockbroker import MockBroker, ok, route
from tests.sink.test_notes import checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_frame_is_written_without_a_save_mode_and_counts_return(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    frame = spark.range(0, 1000, 1, 3).selectExpr("cast(id as string) body", "concat('k', id % 5) shardingKey")
    with caplog.at_level(logging.INFO, "rocketmq_spark"):
        done = write_rocketmq(
            frame, name_server=rocketmq.name_server, topic=topic, queue_selector="hash", batch_max_bytes=5_000
        )
    assert (done.rows, done.retries) == (1000, 0)
    broker = rocketmq.brokers[0]
    assert done.brokers == {broker: BrokerCounts(1000, done.bytes, done.batches)}
    assert sorted(map(int, bodies(stored(rocketmq, topic, 1000)))) == list(range(1000))
    assert f"written: 1000 rows in {done.batches} batches" in caplog.text
    assert f"({broker} 1000 rows in {done.batches} batches)" in caplog.text


def test_the_selector_may_be_a_function(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    frame = spark.range(20).selectExpr("cast(id as string) body")
    write_rocketmq(frame, nameServer=rocketmq.name_server, topic=topic, queueSelector=lambda queues, m, k: queues[3])
    assert set(by_queue(stored(rocketmq, topic, 20))) == {3}


@pytest.mark.parametrize(
    ("column", "given"),
    [
        ("if(id % 2 = 0, 'k', null) shardingKey", {}),
        ("if(id % 2 = 0, 'k', null) shardingKey", {"queueSelector": "hash"}),
        ("if(id % 2 = 0, 1, null) queueId", {}),
    ],
)
def test_rows_that_choose_no_queue_go_to_queues_in_turn(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, column: str, given: dict[str, str]
) -> None:
    frame = spark.range(0, 400, 1, 1).selectExpr("cast(id as string) body", column)
    foreach_batch_writer(name_server=rocketmq.name_server, topic=topic, batch_max_bytes=400, **given)(frame, 0)
    found = stored(rocketmq, topic, 400)
    assert sorted(map(int, bodies(found))) == list(range(400))
    assert len(by_queue([row for row in found if int(row.body) % 2])) > 1
    assert len(by_queue([row for row in found if not int(row.body) % 2])) == 1


def test_two_tasks_that_name_one_topic_in_two_ways_are_an_error(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    rocketmq.create_topic(f"{topic}_x", 1)
    frame = spark.range(0, 2, 1, 2).selectExpr("'x' body", f"if(id = 0, '{topic}.x', '{topic}_x') topic")
    write = foreach_batch_writer(name_server=rocketmq.name_server, topic_names="dotsToUnderscores")
    write(frame.where("topic like '%.x'"), 0)
    with pytest.raises(
        OptionError, match=r"are both .* tasks of this write have stored rows of both names in this one topic"
    ):
        write(frame, 1)
    write(frame.where("topic like '%\\_x'"), 2)
    assert f"an earlier write of this process stored rows of topic '{topic}.x' in the same topic" in caplog.text


def test_nothing_to_write_is_no_error(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    empty = spark.createDataFrame([], "body string")
    assert write_rocketmq(empty, name_server=rocketmq.name_server, topic=topic).rows == 0


def test_wrong_columns_and_topics_are_refused_before_any_job(
    spark: SparkSession, rocketmq: LocalBroker, topic: str
) -> None:
    spark.sparkContext.setJobGroup("refused", "nothing may run")
    frame = spark.range(3)
    with pytest.raises(OptionError, match="column 'id' is unknown"):
        write_rocketmq(frame, name_server=rocketmq.name_server, topic=topic)
    with pytest.raises(RouteNotFound, match="Did you mean"):
        write_rocketmq(frame.selectExpr("cast(id as string) body"), name_server=rocketmq.name_server, topic=f"{topic}-")
    assert spark.sparkContext.statusTracker().getJobIdsForGroup("refused") == []
    with pytest.raises(OptionError, match="option 'topics' is unknown; did you mean 'topic'"):
        foreach_batch_writer(name_server="x:1", topics="t")


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_every_output_mode(
    spark: SparkSession, rocketmq: LocalBroker, make_topic: Make, tmp_path: Path, mode: str
) -> None:
    """Each trigger reads one file; each action on the micro-batch is a job of its own, so there must be one."""
    topic = make_topic(queues=1)
    folder = tmp_path / "in"
    folder.mkdir()
    for i, words in enumerate((["a", "b", "a"], ["b", "c"])):
        (folder / f"{i}.json").write_text("".join(json.dumps({"word": word}) + "\n" for word in words))
        os.utime(folder / f"{i}.json", (1_700_000_000 + i,) * 2)  # the order in which they are read
    lines = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).json(str(folder))
    if mode == "append":
        rows = lines.selectExpr("word body")
    else:
        rows = lines.groupBy("word").count().selectExpr("concat(word, count) body")
    writer = foreach_batch_writer(name_server=rocketmq.name_server, topic=topic)
    reports: list[int] = []

    def write(df: Any, batch_id: int) -> None:
        writer(df, batch_id)
        assert writer.last_report is not None
        reports.append(writer.last_report.rows)

    query = (
        rows.writeStream.outputMode(mode).option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True).foreachBatch(write).start()
    )  # fmt: skip
    finish(query)
    expected = {
        "append": (["a", "a", "b", "b", "c"], [3, 2]),
        "update": (["a2", "b1", "b2", "c1"], [2, 2]),
        "complete": (["a2", "a2", "b1", "b2", "c1"], [2, 3]),
    }[mode]
    assert (sorted(bodies(stored(rocketmq, topic, len(expected[0])))), sorted(reports)) == (
        expected[0],
        sorted(expected[1]),
    )
    assert writer.last_report is not None
    assert writer.last_report.rows == reports[-1]


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_one_action_reads_the_source_once(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    seen = spark.sparkContext.accumulator(0)

    def count(batches: Any) -> Any:
        for batch in batches:
            seen.add(batch.num_rows)
            yield batch

    frame = spark.range(100).selectExpr("cast(id as string) body").mapInArrow(count, "body string")
    foreach_batch_writer(name_server=rocketmq.name_server, topic=topic)(frame, 0)
    assert seen.value == 100


class Frame:
    """A DataFrame of one row, whose task begins in a process of its own, once ``before`` has happened."""

    schema = from_arrow_schema(frame(body=["mine"]).schema)
    sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))

    def __init__(self, before: Callable[[], object]) -> None:
        self._before = before
        self.begun = False

    def mapInArrow(self, send: Any, schema: str) -> Any:
        self._before()
        self.begun = True
        session.close_all()
        done = pickle.loads(pickle.dumps(send))(iter([frame(body=["mine"])]))
        return SimpleNamespace(collect=lambda: [row for batch in done for row in batch.to_pylist()])


def test_task_keeps_the_queue_its_driver_counted_for_it() -> None:
    """The number of an environment would be another one's queue among those that are left."""
    script = {Request.SEND_BATCH_MESSAGE: ok(msgId="x", queueId=0, queueOffset=0)}
    with MockBroker() as names, MockBroker(script) as mine, MockBroker(script) as others:
        both = {"broker-a": mine.address, "broker-b": others.address}
        names.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, both))
        given: dict[str, Any] = {"topic": "t", "environment": "1"}
        writer = foreach_batch_writer(names.address, **given)
        writer(Frame(lambda: None), 0)  # type: ignore[arg-type]
        assert (writer.total.rows, len(mine.seen(Request.SEND_BATCH_MESSAGE))) == (1, 1)
        left = Frame(lambda: names.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-b": others.address})))
        with pytest.raises(RocketMQError):
            foreach_batch_writer(names.address, send_timeout="3s", **given)(left, 1)  # type: ignore[arg-type]
        assert left.begun
        assert others.seen(Request.SEND_BATCH_MESSAGE) == []
    session.close_all()


def test_speculation_is_warned_of(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    frame = spark.range(1).selectExpr("cast(id as string) body")
    write_rocketmq(frame, name_server=rocketmq.name_server, topic=topic)
    assert "spark.speculation" not in caplog.text
    real = type(spark.conf).get
    answers = lambda conf, key, *rest: "true" if key == "spark.speculation" else real(conf, key, *rest)  # noqa: E731
    monkeypatch.setattr(type(spark.conf), "get", answers)
    write_rocketmq(frame, name_server=rocketmq.name_server, topic=topic)
    assert "spark.speculation is on: a task that runs twice writes its rows twice" in caplog.text


def test_readers_drop_repeated_rows_by_their_id(
    spark: SparkSession, rocketmq: LocalBroker, make_topic: Make, tmp_path: Path
) -> None:
    """The recipe of docs/guarantees.md."""
    topic = make_topic(queues=2)
    frame = spark.range(300).selectExpr("concat('row ', id) body", "id order_no")
    for _ in range(3):
        write_rocketmq(frame, name_server=rocketmq.name_server, topic=topic, message_id="order_no")
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def keep(df: Any, batch_id: int) -> None:
        with lock:
            found.update(row["id"] for row in df.collect())

    query = (
        spark.readStream.format("rocketmq")
        .options(nameServer=rocketmq.name_server, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=200)
        .option("propertyColumns", "SPARK_ROW_ID:string").load()
        .selectExpr("SPARK_ROW_ID id", "properties['SPARK_ROW_ID'] again", "storeTimestamp").where("id = again")
        .withWatermark("storeTimestamp", "10 minutes").dropDuplicatesWithinWatermark(["id"])
        .writeStream.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).foreachBatch(keep).start()
    )  # fmt: skip
    finish(query)
    assert found == Counter({str(i): 1 for i in range(300)})


def test_batch_begun_for_other_topics_gets_no_second_name(
    spark: SparkSession, rocketmq: LocalBroker, make_topic: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write without a name is called after its topics, and what is stored would be sent again under another name."""
    monkeypatch.setattr(foreach, "_check_context", lambda *given: None)
    monkeypatch.setattr(foreach, "_run_write", lambda df, options, names, plan, what: Written(rows=int(plan.is_repeat)))
    one, two, three = (make_topic(queues=1) for _ in range(3))
    given: dict[str, Any] = {"delivery_guarantee": "exactly-once", "exactly_once_settle": "4s"}
    given["checkpoint_location"] = str(checkpoint(tmp_path / "checkpoint"))

    def begun(run: SparkSession, topics: str, **more: Any) -> bool:
        frame = run.createDataFrame([], "body string, topic string")
        writer = foreach_batch_writer(rocketmq.name_server, allowed_topics=topics, **given, **more)
        writer(frame, 0)
        return writer.total.rows == 1

    first, second = spark.newSession(), spark.newSession()
    assert not begun(first, f"{one},{two}")
    assert not begun(first, one), "another write of the same run"
    with pytest.raises(OptionError, match=f"batch 0 was begun for .*{one}.*, and the query now writes to .*{three}"):
        begun(second, f"{one},{three}")
    assert not begun(second, three), "it has no topic of these"
    assert not begun(second, f"{one},{three}", write_name="mine")
    assert begun(second, f"{one},{two}")


def test_checkpoint_with_a_finished_batch_is_of_another_query(tmp_path: Path) -> None:
    """Spark Connect does not tell tasks which query they belong to: rows that are equal to those of the batch that is done
    would be taken for stored.
    """
    path = checkpoint(tmp_path / "checkpoint")
    frame: Any = SimpleNamespace(sparkSession=object())  # it has no context, as on Spark Connect
    batch = foreach.QueryBatch(str(path), "mine", 0)
    with foreach._registered_write(frame, batch, ["orders"]):
        (path / "commits").mkdir()
    (path / "commits" / "0").write_text("v1\n{}")
    for number in (0, None):
        with (
            pytest.raises(OptionError, match=r"has already finished batch 0") as e,
            foreach._registered_write(frame, batch._replace(number=number, write_name="other"), ["orders"]),
        ):
            pytest.fail("it is not begun")
        assert "checkpoint_location" in str(e.value.remedy)


def test_both_are_public() -> None:
    assert {"foreach_batch_writer", "write_rocketmq"} <= set(rocketmq_spark.__all__)
