"""Spark Connect: a real server, a client that has no JVM, and our source, sink and batch functions between them."""

from __future__ import annotations

from tests.reading import bodies, feed, read

SCRIPT = """
    import os
    from tests.fix_spark import CONF
    from pyspark.sql import SparkSession
    from rocketmq_spark import exactly_once_conf

    name_server, topic, out, by_hand, by_batch, repeated, folder = sys.argv[1:]
    builder = SparkSession.builder.remote("local[2]")
    for name, value in {**CONF, **exactly_once_conf()}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    assert type(spark).__module__.startswith("pyspark.sql.connect"), type(spark)

    def texts(frame):
        return sorted(row[0] for row in frame.selectExpr("cast(body as string)").collect())

    source = dict(nameServer=name_server, subscribe=topic)
    report(texts(spark.read.format("rocketmq").options(**source).load()))

    frame = spark.createDataFrame([(f"written-{i}",) for i in range(20)], "body string")
    frame.write.format("rocketmq").option("nameServer", name_server).option("topic", out).mode("append").save()
    report(texts(spark.read.format("rocketmq").options(nameServer=name_server, subscribe=out).load()))

    stream = spark.readStream.format("rocketmq").options(**source, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    writer = stream.load().select("body").writeStream.format("rocketmq").option("nameServer", name_server)
    writer = writer.option("topic", out).option("checkpointLocation", folder).trigger(availableNow=True)
    query = writer.start()
    finish(query)
    report(texts(spark.read.format("rocketmq").options(nameServer=name_server, subscribe=out).load()))

    from rocketmq_spark import explain, foreach_batch_writer, progress, write_rocketmq

    report([(done["lag"], done["queues"]) for done in [progress(query)]])

    counts = write_rocketmq(frame, name_server=name_server, topic=by_hand)
    report([counts.rows, texts(spark.read.format("rocketmq").options(nameServer=name_server, subscribe=by_hand).load())])

    stream = spark.readStream.format("rocketmq").options(**source, startingOffsets="earliest", maxOffsetsPerTrigger=8)
    writer = stream.load().select("body").writeStream
    writer = writer.foreachBatch(foreach_batch_writer(name_server=name_server, topic=by_batch))
    finish(writer.option("checkpointLocation", folder + "-batches").trigger(availableNow=True).start())
    report(texts(spark.read.format("rocketmq").options(nameServer=name_server, subscribe=by_batch).load()))

    try:
        spark.read.format("rocketmq").options(nameServer=name_server, subscribe=topic + "x").load().collect()
    except Exception as e:
        report(explain(e))

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("numPartitions", 2).load()
    write = foreach_batch_writer(name_server, topic=repeated, checkpoint_location=folder + "-once",
                                 delivery_guarantee="exactly-once", exactly_once_settle="4s")

    def once(df, number):  # in a process of the server, another one for each run of the query
        write(df, number)
        with open(folder + "-once/said", "a") as said:
            print(number, write.last_report.sent, write.last_report.already_stored, file=said)
        if not os.path.exists(folder + "-once/died"):
            open(folder + "-once/died", "w").close()
            raise ValueError("after the write")

    def run():
        query = rows.selectExpr("cast(value as string) body").writeStream.foreachBatch(once)
        query = query.option("checkpointLocation", folder + "-once").trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            return "done"
        except Exception as e:
            return "after the write" if os.path.exists(folder + "-once/died") else str(e)

    report([run(), run(), open(folder + "-once/said").read().splitlines()])
    spark.stop()
"""


def test_connect_session_streams_and_stores_repeated_batch_once(rocketmq, topic, make_topic, run_script, tmp_path):
    out = make_topic(queues=2)
    sent = feed(rocketmq, topic, 24)
    by_hand, by_batch, repeated = (make_topic(queues=2) for _ in range(3))
    done = run_script(SCRIPT, rocketmq.name_server, topic, out, by_hand, by_batch, repeated, tmp_path / "checkpoint")
    assert done.code == 0, done.err[-4000:]
    written = [f"written-{i}" for i in range(20)]
    found, stored, streamed, told, handed, batched, error, (first, second, said) = done.reports
    assert found == sorted(sent)
    assert stored == sorted(written)
    assert streamed == sorted([*written, *sent])
    assert told == [[0, len(rocketmq.admin.describe_topic(topic))]]
    assert handed == [20, sorted(written)]
    assert batched == sorted(sent)
    assert error.startswith("[ROCKETMQ_ROUTE_NOT_FOUND]")
    assert f"rocketmq-spark topic create {topic}x" in error
    assert sorted(bodies(read(rocketmq, subscribe=out))) == streamed
    # Tasks of Connect are told neither their query nor their batch.
    assert (first, second) == ("after the write", "done")
    assert said[:2] == ["0 10 0", "0 0 10"]
    found = bodies(read(rocketmq, subscribe=repeated))
    assert len(found) == len(set(found)) >= 10
