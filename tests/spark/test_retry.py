"""Tasks that Spark tries again: readers give every message once all the same, writers leave none out."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.fix_spark import finish
from tests.helpers import awaited
from tests.scale import scaled
from tests.spark.faulty import FaultySource, strike
from tests.spark.pipelines import failed_tasks, once, read, records, rows_of, same, write
from tests.witness import java_read, java_send, md5

COUNT = scaled(20_000)


@pytest.fixture(scope="module")
def written(broker_cluster):
    broker_cluster.create_topic("spark-retry", 4)
    return "spark-retry", records(java_send(broker_cluster.name_server, "spark-retry", COUNT, batch=50))


@pytest.fixture
def faulty(spark):
    spark.dataSource.register(FaultySource)
    return "rocketmq_faulty"


@pytest.fixture
def struck(spark):
    """Fails a test in which no task has failed."""
    before = failed_tasks(spark)
    yield
    awaited(lambda: failed_tasks(spark) > before, seconds=60)


def kill_the_first_attempt(batches):
    """A user's function that takes its worker down with it, behind its first batch."""
    yield from itertools.islice(batches, 1)
    strike("killed")
    yield from batches


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_a_killed_function_of_the_user(spark, broker_cluster, written, struck):
    topic, expected = written
    frame = read(spark, broker_cluster.name_server, topic, columns="msgId", maxRecordsPerPartition=COUNT // 2)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        found = frame.mapInArrow(kill_the_first_attempt, frame.schema).collect()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert once((row.msgId, ()) for row in found).keys() == expected.keys()


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_reader_in_a_batch(spark, broker_cluster, written, faulty, fault, struck):
    topic, expected = written
    frame = spark.read.format(faulty).option("fault", fault)
    frame = frame.option("nameServer", broker_cluster.name_server).option("subscribe", topic)
    same(once(rows_of(frame.load())), expected)


def test_a_reader_in_a_stream(spark, broker_cluster, written, faulty, tmp_path, struck):
    topic, expected = written
    batches: dict[int, list] = {}
    query = (
        spark.readStream.format(faulty)
        .option("fault", "killed")
        .option("nameServer", broker_cluster.name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", len(expected) // 3)
        .load()
        .writeStream.foreachBatch(lambda batch, number: batches.update({number: rows_of(batch)}))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    finish(query)
    assert len(batches) >= 3
    same(once(row for rows in batches.values() for row in rows), expected)


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_writer_sends_again(spark, broker_cluster, topic, faulty, fault):
    """At least once: what the first attempt had acknowledged is there twice, and nothing is missing."""
    frame = spark.range(0, COUNT, 1, 2).selectExpr("cast(id as string) body")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(COUNT // 8))
    try:
        frame.write.format(faulty).option("fault", fault).option("nameServer", broker_cluster.name_server).option(
            "topic", topic
        ).mode("append").save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    times = Counter(record.md5 for record in java_read(broker_cluster.name_server, topic))
    assert times.keys() == {md5(b"%d" % i) for i in range(COUNT)}
    assert Counter(times.values()) == {1: COUNT // 2, 2: COUNT // 2}


def test_a_writer_that_never_succeeds_fails_the_write(spark, broker_cluster, topic):
    frame = spark.range(10).selectExpr("if(id = 7, null, cast(id as string)) body")
    with pytest.raises(Exception, match=r"1 rows of partition 1 cannot be sent.*: row 2: body is null"):
        write(frame, broker_cluster.name_server, topic=topic)
