"""What users of Spark's Kafka connector rely on in whole queries: unions, self-joins, restarts, and counts of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

from tests.fix_spark import finish
from tests.reading import bodies, feed, read
from tests.spark import pipelines
from tests.spark.pipelines import holds_bodies

EARLIEST = {"startingOffsets": "earliest"}


class Failing:
    """A ``foreachBatch`` that keeps the bodies of each try of each batch, and fails in those of ``fails`` so often."""

    def __init__(self, fails: Mapping[int, int]) -> None:
        self.tries: list[tuple[int, list[str]]] = []
        self._left = dict(fails)

    def __call__(self, frame: Any, number: int) -> None:
        texts = frame.selectExpr("cast(body as string) text").collect()
        self.tries.append((number, sorted(row.text for row in texts)))
        self._left[number] = self._left.get(number, 0) - 1
        if self._left[number] >= 0:
            raise RuntimeError("on purpose")


def started(frame: Any, sink: Callable[..., None], folder: Path) -> Any:
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(folder))
    return writer.trigger(availableNow=True).start()


def fails(frame: Any, sink: Callable[..., None], folder: Path) -> None:
    with pytest.raises(Exception, match="on purpose"):
        finish(started(frame, sink, folder))


def read_rows(query: Any) -> list[list[int]]:
    """Rows of each source, batch by batch."""
    return [[source["numInputRows"] for source in progress["sources"]] for progress in query.recentProgress]


def test_two_limited_streams_go_on_after_a_failed_batch(spark, rocketmq, make_topic, tmp_path):
    """SPARK-22956: one of them is exhausted first, and the batch that failed comes again as it was."""
    short, long = make_topic(queues=1), make_topic(queues=1)
    few, many = feed(rocketmq, short, 10), feed(rocketmq, long, 25)

    def union() -> Any:
        parts = [
            pipelines.read_stream(spark, rocketmq.name_server, topic, maxOffsetsPerTrigger=5, **EARLIEST)
            for topic in (short, long)
        ]
        return parts[0].union(parts[1])

    batches = Failing({1: 1})
    fails(union(), batches, tmp_path)
    many += feed(rocketmq, long, 5)
    query = started(union(), batches, tmp_path)
    finish(query)
    expected = [(n, sorted([*few[5 * n : 5 * n + 5], *many[5 * n : 5 * n + 5]])) for n in range(6)]
    assert batches.tries == [*expected[:2], *expected[1:]]
    assert [counts for counts in read_rows(query) if any(counts)] == [[5, 5], *[[0, 5]] * 4]


def test_a_failed_first_batch_is_the_same_after_new_queues(spark, rocketmq, make_topic, tmp_path):
    """SPARK-53560: with available now Spark plans the logged batch again, and only then what came since."""
    topic = make_topic(queues=1)
    batches = Failing({0: 2})

    def frame() -> Any:
        return pipelines.read_stream(spark, rocketmq.name_server, topic, **EARLIEST)

    first = feed(rocketmq, topic, 8)
    fails(frame(), batches, tmp_path)
    rocketmq.create_topic(topic, 3, resize=True)
    later = feed(rocketmq, topic, 9)
    fails(frame(), batches, tmp_path)
    later += feed(rocketmq, topic, 2, queues=[2])
    finish(started(frame(), batches, tmp_path))
    assert batches.tries == [(0, sorted(first))] * 3 + [(1, sorted(later))]
    logged = json.loads((tmp_path / "offsets" / "1").read_text().splitlines()[-1])
    assert logged["topics"] == {topic: {"broker-a": {"0": 11, "1": 3, "2": 5}}}


def test_progress_counts_the_rows_that_the_sink_wrote(spark, rocketmq, make_topic, tmp_path):
    """Of a query that reads in limited batches and leaves rows out, one batch entirely."""
    source, target = make_topic(queues=1), make_topic(queues=2)
    sent = [feed(rocketmq, source, count, tags=tag)
            for tag, count in (("a", 3), ("b", 2), ("b", 5), ("a", 2))]  # fmt: skip
    frame = pipelines.read_stream(spark, rocketmq.name_server, source, maxOffsetsPerTrigger=5, **EARLIEST)
    query = (
        frame.where("tags = 'a'").select("body").writeStream.format("rocketmq")
        .option("nameServer", rocketmq.name_server).option("topic", target)
        .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )  # fmt: skip
    finish(query)
    written = [(p["numInputRows"], p["sink"]["numOutputRows"]) for p in query.recentProgress if p["numInputRows"]]
    assert written == [(5, 3), (5, 0), (2, 2)]
    assert sorted(bodies(read(rocketmq, subscribe=target))) == sorted([*sent[0], *sent[3]])


def test_a_self_join_has_one_source(spark, rocketmq, make_topic, tmp_path):
    """Its rows are read for each side, or once where Spark reuses the exchange: the figures of its Kafka connector."""
    topic = make_topic(queues=1)
    sent = feed(rocketmq, topic, 4)

    def joined(reuse: str) -> list[list[int]]:
        spark.conf.set("spark.sql.exchange.reuse", reuse)
        frame = pipelines.read_stream(spark, rocketmq.name_server, topic, **EARLIEST)
        frame = frame.selectExpr("cast(body as string) body")
        batches = Failing({})
        query = started(frame.join(frame, "body"), batches, tmp_path / reuse)
        finish(query)
        assert [text for _, texts in batches.tries for text in texts] == sorted(sent)
        return [counts for counts in read_rows(query) if any(counts)]

    try:
        assert [joined("false"), joined("true")] == [[[8]], [[4]]]
    finally:
        spark.conf.unset("spark.sql.exchange.reuse")


def test_streams_may_have_the_largest_limit_of_spark(spark, rocketmq, make_topic, tmp_path):
    """SPARK-26718: a position and the limit are more than a long. A limit beyond a long is none."""
    topics = [make_topic(queues=1) for _ in range(2)]
    sent = [feed(rocketmq, topic, 6) for topic in topics]
    frames = [
        pipelines.read_stream(
            spark, rocketmq.name_server, topic, maxOffsetsPerTrigger=limit,
            startingOffsets=json.dumps({topic: {"broker-a": {"0": 2}}}),
        )
        for topic, limit in zip(topics, (2**63 - 1, 2**63), strict=True)
    ]  # fmt: skip
    batches = Failing({})
    finish(started(frames[0].union(frames[1]), batches, tmp_path))
    assert batches.tries == [(0, sorted([*sent[0][2:], *sent[1][2:]]))]


def test_an_unresolved_star_is_written_and_read_in_a_union(spark, rocketmq, topic):
    """SPARK-20496: the plan that is written is the analysed one. The frame that reads it is used on both sides."""
    rows = spark.range(1, 200).select(f.to_json(f.struct("*")).alias("value"))
    pipelines.write(rows, rocketmq.name_server, topic=topic)
    frame = pipelines.read(spark, rocketmq.name_server, topic)
    holds_bodies(frame.union(frame), [json.dumps({"id": n}, separators=(",", ":")) for n in range(1, 200)] * 2)
