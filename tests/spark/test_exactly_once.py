"""What exactly-once asks of Spark: settings that are there when the context starts, and names for writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rocketmq_spark import explain, register, write_rocketmq
from rocketmq_spark.errors import OptionError
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_spark import Finished
from tests.helpers import stored
from tests.live.writes import bodies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCRIPT = """
    from rocketmq_spark import exactly_once_conf, foreach_batch_writer, write_rocketmq
    from concurrent.futures import ThreadPoolExecutor

    name_server, topic, folder = sys.argv[1:]
    spark = new_session("local[2]", **{k.replace(".", "_"): v for k, v in exactly_once_conf().items()})
    given = {"topic": topic, "delivery_guarantee": "exactly-once", "exactly_once_settle": "4s"}
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2).load()
    frame = rows.selectExpr("cast(value as string) body")
    said = {}

    def run(name, write):
        checkpoint = f"{folder}/{name}"
        query = frame.writeStream.option("checkpointLocation", checkpoint).foreachBatch(write(checkpoint))
        query = query.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            said[name] = "done"
        except Exception as e:
            said[name] = str(e)

    def twice(first, second):
        def write(checkpoint):
            named = [foreach_batch_writer(name_server, checkpoint_location=checkpoint, write_name=n, **given)
                     for n in (first, second)]
            return lambda df, number: [each(df.limit(10), number) for each in named]
        return write

    def by_format(checkpoint):
        return lambda df, number: df.write.format("rocketmq").options(
            nameServer=name_server, topic=topic, deliveryGuarantee="exactly-once").mode("append").save()

    def by_function(checkpoint):
        def write(df, number):
            report = write_rocketmq(df, name_server, checkpoint_location=checkpoint, write_name="mine", **given)
            said["report"] = [report.sent, report.already_stored, report.confirmed, report.unmatched]
        return write

    def beside(checkpoint):
        write = foreach_batch_writer(name_server, checkpoint_location=checkpoint, **given)
        def both(df, number):
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _: write(df.limit(10), number), range(2)))
        return both

    def dies_after(checkpoint):
        write = foreach_batch_writer(name_server, checkpoint_location=checkpoint, **given)
        def once(df, number):
            with ThreadPoolExecutor(1) as pool:  # whose threads know nothing of the query
                pool.submit(write, df.limit(10), number).result()
            if "first" not in said:
                said["first"] = write.last_report.sent
                raise ValueError("after the write")
            said.setdefault("second", write.last_report.already_stored)
        return once

    run("same", twice(None, None))
    run("beside", beside)
    run("dies", dies_after)
    run("dies", dies_after)
    run("named", twice("one", "two"))
    run("format", by_format)
    run("function", by_function)
    report(said)
"""


def test_settings_are_asked_for_before_anything_is_sent(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    frame = spark.range(3).selectExpr("cast(id as string) body")
    with pytest.raises(
        OptionError, match=r"the Spark context lacks spark.stage.maxConsecutiveAttempts=1 \(it is not set\)"
    ):
        write_rocketmq(frame, rocketmq.name_server, topic=topic, delivery_guarantee="exactly-once")
    writer = frame.write.format("rocketmq").option("nameServer", rocketmq.name_server).option("topic", topic)
    with pytest.raises(Exception, match="maxConsecutiveAttempts") as e:
        writer.option("deliveryGuarantee", "exactly-once").mode("append").save()
    assert "Start the Spark context with exactly_once_conf()" in str(explain(e.value))
    register(spark)
    with pytest.raises(Exception, match="maxConsecutiveAttempts") as e:
        writer.option("deliveryGuarantee", "exactly-once").mode("append").save()
    assert "the Spark context lacks" in str(explain(e.value)), "no task should have run"
    assert sum(bounds.max_offset for bounds in rocketmq.admin.describe_topic(topic).values()) == 0


def test_each_write_of_a_batch_needs_a_name_and_df_write_fails(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run_script: Callable[..., Finished], tmp_path: Path
) -> None:
    topic = make_topic(queues=2)
    said = run_script(SCRIPT, rocketmq.name_server, topic, tmp_path / "checkpoints").report
    assert "Give each write of the batch a write_name of its own" in said["same"]
    assert "Give each write of the batch a write_name of its own" in said["beside"]
    assert (said["dies"], said["first"], said["second"]) == ("done", 10, 10), "a restart in the same process"
    assert said["named"] == said["function"] == "done"
    assert "Write with foreach_batch_writer" in said["format"]
    assert said["report"] == [10, 0, 0, 0]
    counts = Counter(bodies(stored(rocketmq, topic, 70)))
    assert {counts[str(i)] for i in range(10)} == {6}, counts


# A stream of all types of columns, then the same rows as an Arrow batch of this program: an attempt that finds them all stored.
EVERY_TYPE = """
    import pathlib
    import pyarrow as pa, pyarrow.parquet
    from rocketmq_spark import exactly_once_conf, options, register
    from rocketmq_spark.spark.sink import checks, exactly_once, task
    from pyspark.sql.pandas.types import from_arrow_schema

    name_server, topic, folder = sys.argv[1:]
    spark = new_session("local[2]", **{k.replace(".", "_"): v for k, v in exactly_once_conf().items()})
    register(spark)
    rows = pa.table({
        "body": pa.array([b"1", b"\\x00\\xff" * 40, "é🚀".encode(), b"4"], pa.binary()),
        "tags": pa.array(["a", None, "标签", ""]),
        "keys": pa.array([["k1", "k2"], None, [], ["schlüssel"]], pa.list_(pa.string())),
        "properties": pa.array([[("a", "1"), ("b", "2")], None, [], [("é", "日本")]], pa.map_(pa.string(), pa.string())),
        "shardingKey": pa.array(["s", None, "", "ü"]),
    })
    source = pathlib.Path(folder, "rows")
    source.mkdir()
    pyarrow.parquet.write_table(rows, source / "rows.parquet")
    given = {"nameServer": name_server, "topic": topic, "deliveryGuarantee": "exactly-once", "exactlyOnceSettle": "4s",
             "queueSelector": "hash"}
    checkpoint = folder + "/checkpoint"
    frame = spark.readStream.schema(from_arrow_schema(rows.schema)).parquet(str(source))
    writer = frame.writeStream.format("rocketmq").options(**given).option("checkpointLocation", checkpoint)
    finish(writer.trigger(availableNow=True).start())

    parsed = options.parse(given).for_role("sink")
    plan = exactly_once.plan_batch(parsed, checkpoint, number=0)
    names = checks.check_sink(parsed, from_arrow_schema(rows.schema))
    attempt = exactly_once.ExactlyOnceTask(parsed, plan)
    found = task.TaskWriter(parsed, names, 0, checks.environment_queues(parsed), attempt)
    done = found.write(rows.to_batches())
    report([done.already_stored, done.sent, done.unmatched])
"""


def test_ids_are_the_same_however_spark_passes_rows(
    rocketmq: LocalBroker, topic: str, run_script: Callable[..., Finished], tmp_path: Path
) -> None:
    """Also for a PySpark without Arrow writers of streams: another version may repeat the batch."""
    assert run_script(EVERY_TYPE, rocketmq.name_server, topic, tmp_path).report == [4, 0, 0]
