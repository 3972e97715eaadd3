"""The source among other things of Spark: SQL, several clusters in one query, watermarks, progress, triggers, idle time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.spark import compat
from tests.fix_spark import ONE_BATCH, drain, finish, wait_until
from tests.reading import bodies, feed, names, post, read
from tests.spark import idle, pipelines
from tests.spark.pipelines import holds, holds_bodies, holds_lines


@pytest.fixture(scope="module")
def other() -> Iterator[LocalBroker]:
    """A second cluster, which closes connections that are idle for six seconds.

    So it closes one on which it owes an answer, too, when it stands still for so long: what is stored is sent again.
    """
    with LocalBroker(conf={"serverChannelMaxIdleTimeSeconds": 6}, quiet=True) as mq:
        yield mq


@pytest.fixture
def numbered(rocketmq, topic):
    """Forty messages with properties and tags."""
    made = names(40)
    post(
        rocketmq,
        [
            Message(topic, body.encode(), tags=("even", "odd")[n % 2], properties={"n": str(n)} if n else None)
            for n, body in enumerate(made)
        ],
    )
    return made


def test_sql_views_with_options(spark, rocketmq, topic, numbered):
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW messages USING rocketmq OPTIONS "
        f"(nameServer '{rocketmq.name_server}', subscribe '{topic}', propertyColumns 'n:int')"
    )
    found = spark.sql("SELECT cast(body AS string) AS body, n FROM messages WHERE n >= 30")
    holds(found, "body string, n int", ((numbered[n], n) for n in range(30, 40)))
    assert spark.sql("SELECT count(*) FROM messages").first()[0] == 40
    spark.catalog.dropTempView("messages")


def test_a_table_is_read_with_the_options_of_the_query(spark, rocketmq, topic, numbered):
    """Spark hands a table's own options over when it is made, and to no read."""
    where = f"'nameServer' = '{rocketmq.name_server}', 'subscribe' = '{topic}'"
    spark.sql("CREATE TABLE rocketmq_messages USING rocketmq OPTIONS (nameServer 'x:1', propertyColumns 'n:int')")
    try:
        one = spark.sql(
            f"SELECT body FROM rocketmq_messages WITH ({where}, 'tags' = 'odd', 'propertyColumns' = 'n:int')"
        )
        holds_bodies(one, numbered[1::2])
        assert "n" in spark.table("rocketmq_messages").columns
        with pytest.raises(AnalysisException, match="'nameServer' is required"):
            spark.sql("SELECT body FROM rocketmq_messages").collect()
    finally:
        spark.sql("DROP TABLE rocketmq_messages")
    with pytest.raises(AnalysisException, match="did you mean 'subscribe'"):
        spark.sql("CREATE TABLE rocketmq_messages USING rocketmq OPTIONS (nameServer 'x:1', subscrib 'y')")


PREDICATES = [
    "tags = 'odd'",
    "tags IN ('odd', 'none')",
    "tags <> 'odd'",
    "tags IS NULL",
    "tags = 'odd' OR n = 4",
    "tags = 'a || b'",
    "n > 20",
    "n = 7 AND tags = 'odd'",
    "n IS NULL",
    "n <=> NULL",
    "queueId IN (1, 2)",
    "queueId = 3 AND queueOffset >= 2",
    "queueOffset < 2",
    "queueOffset > 2 AND queueOffset <= 4",
    "queueOffset = 3 OR queueId = 0",
    "topic = 'another'",
    "brokerName = 'broker-a'",
    "storeTimestamp >= timestamp'2020-01-01 00:00:00'",
    "storeTimestamp < timestamp'2020-01-01 00:00:00'",
    "storeTimestamp BETWEEN timestamp'2020-01-01' AND timestamp'2100-01-01'",
    "bornTimestamp > timestamp'2020-01-01'",
    "NOT (tags = 'odd')",
    "tags LIKE 'od%' AND queueOffset > 1",
]


def matching(frame_of) -> list[list[str]]:
    """The bodies that each predicate leaves, in one query over DataFrames from ``frame_of``."""
    one = None
    for number, predicate in enumerate(PREDICATES):
        part = frame_of().where(predicate).selectExpr(f"{number} number", "cast(body as string) body")
        one = part if one is None else one.union(part)
    rows = one.collect()
    return [sorted(row["body"] for row in rows if row["number"] == i) for i in range(len(PREDICATES))]


@pytest.fixture
def pushing(spark):
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_predicates_without_spark_s_conf(spark, rocketmq, topic, numbered):
    frame = pipelines.read(spark, rocketmq.name_server, topic, propertyColumns="n:int", predicatePushdown=True)
    found = matching(lambda: frame)
    assert found[0] == sorted(numbered[1::2])
    assert found[3] == []
    assert found[8] == [numbered[0]]


def test_pushed_predicates_never_change_a_row(spark, rocketmq, topic, numbered, pushing):
    """Spark 4.2 and 4.3 read a frame that is used twice as one of its predicates left it: so that is not the default."""
    options = {"propertyColumns": "n:int"}
    shared = pipelines.read(spark, rocketmq.name_server, topic, **options)
    plain = matching(lambda: shared)
    assert plain[0] == sorted(numbered[1::2])
    assert shared.where("queueId = 3").count() == 5
    assert shared.count() == 40
    pruned = matching(lambda: pipelines.read(spark, rocketmq.name_server, topic, predicatePushdown=True, **options))
    assert pruned == plain


def test_a_frame_that_is_used_again_reads_the_same_offsets(spark, rocketmq, topic, numbered):
    """Spark keeps its plan, as docs/how-to/sql.md says; a frame that is loaded again has what was sent since."""
    frame = pipelines.read(spark, rocketmq.name_server, topic)
    assert frame.count() == len(numbered)
    late = feed(rocketmq, topic, 3)
    kept = compat.has_class("EqualTo")  # Spark that can push predicates keeps the reader; 4.0 plans each query anew
    assert frame.count() == frame.where("queueId >= 0").count() == len(numbered) + (0 if kept else len(late))
    holds_bodies(pipelines.read(spark, rocketmq.name_server, topic), [*numbered, *late])


def test_pushed_predicates_prune(spark, rocketmq, topic, numbered, pushing):
    def read_where(predicate: str):
        return pipelines.read(spark, rocketmq.name_server, topic, numPartitions=8, predicatePushdown=True).where(
            predicate
        )

    assert read_where("queueId >= 0").rdd.getNumPartitions() == 8
    one = read_where("queueId = 3 and queueOffset < 2")
    assert one.rdd.getNumPartitions() == (1 if compat.has_class("EqualTo") else 8)  # PySpark 4.0 pushes none
    assert read_where("queueId = 3 and queueOffset < 2").count() == 2
    assert read_where("queueOffset > 1000").count() == 0


def test_two_clusters_in_one_query(spark, rocketmq, topic, numbered, other):
    """Join, union and self-join of batches, and a stream of one cluster that is written to the other."""
    (there,) = names(1, "there")
    other.create_topic(there, 2)
    post(other, [Message(there, body.encode(), tags="copy") for body in numbered[:10]])
    ours = pipelines.read(spark, rocketmq.name_server, topic)
    theirs = pipelines.read(spark, other.name_server, there)
    holds_bodies(ours.alias("a").join(theirs.alias("b"), "body").select("a.body"), numbered[:10])
    holds_bodies(ours.select("body").union(theirs.select("body")), [*numbered, *numbered[:10]])
    holds_bodies(ours.alias("a").join(ours.alias("b"), "msgId").select("a.body"), numbered)


def test_streams_of_two_clusters_in_one_query(spark, rocketmq, topic, numbered, other, tmp_path):
    there, out = names(2, "there")
    other.create_topic(there, 2)
    rocketmq.create_topic(out, 2)  # not there: see `other`
    theirs = feed(other, there, 20)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 10}
    both = (
        pipelines.read_stream(spark, rocketmq.name_server, topic, **options)
        .select("body")
        .union(pipelines.read_stream(spark, other.name_server, there, **options).select("body"))
    )
    writer = both.writeStream.format("rocketmq").option("nameServer", rocketmq.name_server).option("topic", out)
    drain(writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start)
    assert Counter(bodies(read(rocketmq, subscribe=out))) == Counter({*numbered, *theirs})


def test_a_watermark_on_the_born_time(spark, rocketmq, topic, tmp_path):
    sent = feed(rocketmq, topic, 20)
    frame = pipelines.read_stream(spark, rocketmq.name_server, topic, startingOffsets="earliest")
    seen = frame.withWatermark("bornTimestamp", "10 seconds").groupBy(f.window("bornTimestamp", "1 hour")).count()
    query = (
        seen.writeStream.outputMode("complete").format("memory").queryName("born")
        .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )  # fmt: skip
    finish(query)
    assert sum(row["count"] for row in spark.table("born").collect()) == len(sent)
    assert "watermark" in query.lastProgress["eventTime"]


def test_progress_shows_ends_and_trigger_once_ignores_caps(spark, rocketmq, topic, tmp_path):
    sent = feed(rocketmq, topic, 40)
    frame = pipelines.read_stream(
        spark, rocketmq.name_server, topic, startingOffsets="earliest", maxOffsetsPerTrigger=16
    )

    def query(**trigger):
        writer = frame.selectExpr("cast(body as string)").writeStream.format("text")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(**trigger)
        return writer.start(str(tmp_path / "out"))

    running = query(processingTime="1 hour")
    wait_until(running, lambda: running.lastProgress and running.lastProgress["numInputRows"])
    running.stop()
    # The objects of PySpark 4.0 have texts that are no JSON.
    (source,) = json.loads(running.lastProgress.json)["sources"]
    # Before 4.2, Spark shows the end of the batch.
    assert sum(_flat(source["latestOffset"])) == (16 if ONE_BATCH else 40)
    assert sum(_flat(source["endOffset"])) == 16
    sizes = []
    for _ in range(2):
        once = query(once=True)
        finish(once)
        sizes += [p["numInputRows"] for p in once.recentProgress if p["numInputRows"]]
    assert sizes == ([16, 8] if ONE_BATCH else [24])
    holds_lines(spark.read.text(str(tmp_path / "out")), sent)


def _flat(offset: object) -> list[int]:
    found = json.loads(offset) if isinstance(offset, str) else offset
    return [value for brokers in found["topics"].values() for queues in brokers.values() for value in queues.values()]


def test_idle_past_every_close_of_idle_connections(spark, other, tmp_path):
    """Past the broker's close (six seconds here) and past the end of idle workers, which Spark waits a minute for."""
    (topic,) = names(1, "quiet")
    other.create_topic(topic, 2)
    port = int(other.address("broker-a").rpartition(":")[2])
    frame = pipelines.read_stream(spark, other.name_server, topic, startingOffsets="earliest", group=f"g-{topic}")
    query = (
        frame.selectExpr("cast(body as string)").writeStream.format("text")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "out"))
    )  # fmt: skip
    sent: list[str] = []

    def more() -> None:
        sent.extend(feed(other, topic, 10))
        wait_until(query, lambda: committed(spark, tmp_path / "out") >= set(sent))

    try:
        more()
        wait_until(query, lambda: not any(idle.connections(pid, port) for pid in idle.workers()))
        more()
        ended = idle.workers()
        assert ended
        idle.end(ended)
        wait_until(query, lambda: not any(Path(f"/proc/{pid}").exists() for pid in ended))
        more()
    finally:
        query.stop()
    holds_lines(spark.read.text(str(tmp_path / "out")), sent)


def committed(spark, folder: Path) -> set[str]:
    """What the file sink has committed, read without Spark."""
    found: set[str] = set()
    for entry in folder.glob("_spark_metadata/[0-9]*"):
        for line in entry.read_text().splitlines()[1:]:
            found |= set(Path(json.loads(line)["path"].removeprefix("file://")).read_text().split())
    return found
