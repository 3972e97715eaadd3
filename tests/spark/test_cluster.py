"""Executors that are processes of their own: everything travels by pickle, and nothing is shared with the driver."""

from __future__ import annotations

import pyspark

from tests.scale import scaled
from tests.spark.pipelines import records
from tests.witness import java_read, java_send

COPY = """
    name_server, source, target, checkpoint = sys.argv[1:]
    spark = new_session("local-cluster[2,1,1024]", spark_executor_memory="512m")

    def options(builder, **more):
        return builder.option("nameServer", name_server).options(**more)

    def read(topic):
        frame = options(spark.read.format("rocketmq"), subscribe=topic, numPartitions=4).load()
        return sorted(row.msgId for row in frame.select("msgId").collect())

    processes = spark.range(0, 8, 1, 8).mapInArrow(where, "pid bigint").distinct().collect()
    ids = read(source)
    copied = options(spark.read.format("rocketmq"), subscribe=source, numPartitions=4).load()
    copied = copied.select("body", "tags", "keys", "properties")
    options(copied.write.format("rocketmq"), topic=target).mode("append").save()
    stream = options(spark.readStream.format("rocketmq"), subscribe=source, startingOffsets="earliest")
    stream = stream.option("maxOffsetsPerTrigger", len(ids) // 3).load().select("body", "tags", "keys", "properties")
    query = options(stream.writeStream.format("rocketmq"), topic=target).option("checkpointLocation", checkpoint)
    finish(query.trigger(availableNow=True).start())
    report({"ids": ids, "executors": len(processes)})
    spark.stop()
"""

# Of the process that runs the executor: the parent of the parent of a Python worker.
WHERE = """
    import os
    import pyarrow as pa

    def where(batches):
        for batch in batches:
            daemon = int(open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1])
            yield pa.RecordBatch.from_pydict({"pid": [daemon] * len(batch)})
"""


def test_the_same_read_and_write_on_two_executors(broker_cluster, make_topic, run_script, tmp_path):
    name_server, source, target = broker_cluster.name_server, make_topic(), make_topic()
    sent = java_send(name_server, source, scaled(10_000), batch=20)
    done = run_script(
        WHERE + COPY,
        name_server,
        source,
        target,
        tmp_path / "checkpoint",
        SPARK_HOME=pyspark.__path__[0],
        SPARK_WORKER_DIR=str(tmp_path / "work"),
    ).report
    assert done["executors"] == 2
    assert done["ids"] == sorted(records(sent))
    seen = sorted(record.content for record in java_read(name_server, target))
    assert seen == sorted(record.content for record in sent for _ in range(2))
