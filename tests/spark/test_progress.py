"""A real query: the figures of ``progress`` and ``MetricsListener``, and ``explain`` for its errors."""

from __future__ import annotations

import json
import re

import pytest

from rocketmq_spark import MetricsListener, explain, foreach_batch_writer, progress
from rocketmq_spark.notebook import LagChart
from tests.fix_spark import ONE_BATCH, finish, wait_until
from tests.reading import feed
from tests.spark.pipelines import read_stream, write

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


def test_a_query_reports_its_lag_and_its_written_rows(spark, rocketmq, make_topic, tmp_path):
    topic, out = make_topic(queues=2), make_topic(queues=2)
    feed(rocketmq, topic, 40)
    writer = foreach_batch_writer(name_server=rocketmq.name_server, topic=out)
    figures, lines = tmp_path / "q.prom", tmp_path / "q.jsonl"
    listener = MetricsListener(figures, lines, writer, "copied")
    spark.streams.addListener(listener)
    rows = read_stream(spark, rocketmq.name_server, topic, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    stream = rows.select("body").writeStream.queryName("copied").option("checkpointLocation", str(tmp_path / "c"))
    query = stream.foreachBatch(writer).start()
    try:
        chart = LagChart(query, every_s=0.05)
        query.processAllAvailable()
        wait_until(query, lambda: lines.exists() and '"batchId":4' in lines.read_text())
        told = progress(query, writer)
        chart.stop()
    finally:
        query.stop()
        spark.streams.removeListener(listener)
    # Before 4.2, Spark does not ask for these figures.
    known = (None,) * 5 if ONE_BATCH else (0, 0, 2, [], {})
    assert (told["lag"], told["behindMs"], told["queues"], told["brokersAway"], told["losses"]) == known
    assert (told["sink"]["sent"], told["sink"]["already_stored"]) == (40, 0)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    batches = {line["batchId"]: line for line in found if line["rows"]}
    assert [batches[number]["lag"] for number in range(5)] == ([None] * 5 if ONE_BATCH else [32, 24, 16, 8, 0])
    assert {line["query"] for line in found} == {"copied"}
    assert found[-1]["sink"]["rows"] == 40
    shown = dict(re.findall(r'^rocketmq_spark_(\w+)\{query="copied"\} (\S+)$', figures.read_text(), re.MULTILINE))
    assert (shown["rows_total"], shown["sink_rows_total"]) == ("40.0", "40.0")
    assert shown.get("lag_messages") == (None if ONE_BATCH else "0.0")
    summary = chart.summary()
    assert (summary["batches"], summary["rows"]) == (5, 40)
    assert summary["lag"] == ({"largest": None, "last": None} if ONE_BATCH else {"largest": 32, "last": 0})
    assert len(chart.figure.axes[1].collections[0].get_segments()) == 5


def test_errors_of_tasks_and_sources_end_in_one_line(spark, rocketmq, topic, tmp_path):
    def raised(act):
        with pytest.raises(Exception) as caught:
            act()
        return explain(caught.value)

    server = rocketmq.name_server

    def stream(name):
        sink = read_stream(spark, server, name).writeStream.format("noop").trigger(availableNow=True)
        finish(sink.option("checkpointLocation", str(tmp_path / name)).start())

    frame = spark.range(0, 10, 1, 1).selectExpr("if(id = 3, null, 'b') body")
    in_a_task = raised(lambda: write(frame, server, topic=topic))
    assert re.fullmatch(
        r"\[ROCKETMQ_MESSAGE_REFUSED\] 1 rows of partition 0 cannot be sent.*: row 3: body is null\. "
        r"Acknowledged before that: 0 rows .* Rows are counted from 0 within their partition\. "
        r"Option 'emptyBodies' = mark sends rows whose body is null or empty",
        in_a_task,
    )
    missing = raised(lambda: stream(f"{topic}x"))
    assert re.fullmatch(rf"\[ROCKETMQ_ROUTE_NOT_FOUND\].*rocketmq-spark topic create {topic}x", missing)
    wrong = raised(lambda: write(frame, server, topic=topic, tls="j", sendTimeout="x"))
    assert wrong.startswith("[ROCKETMQ_OPTION] option 'tls' is 'j'; expected true or false; option 'sendTimeout'")
    default = raised(lambda: frame.write.format("rocketmq").option("nameServer", server).option("topic", topic).save())
    assert 'Write with .mode("append")' in default
