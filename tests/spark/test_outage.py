"""Brokers that die while a query writes or reads: it goes on when they come back, and says so when they do not."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter

import pytest

from tests.fix_spark import wait_until
from tests.spark.pipelines import once, read, read_stream, rows_of, write
from tests.witness import java_send

# Large enough that rows do not wait in the buffers between Python and the JVM.
ROWS, SIZE = 3000, 8 << 10
GATE_AT = ROWS // 2


@pytest.fixture
def broker(make_cluster):
    mq = make_cluster()
    mq.create_topic("t", 8)
    return mq


@pytest.fixture
def small_batches(spark):
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def gated(spark, gate):
    """Rows of which the second half come only when the file ``gate`` exists."""

    def rows(batches):
        import time
        from pathlib import Path

        import pyarrow as pa

        for i in range(0, ROWS, 50):
            while i >= GATE_AT and not Path(gate).exists():
                time.sleep(0.01)
            yield pa.RecordBatch.from_pydict({"body": [b"%06d" % j + b"x" * SIZE for j in range(i, i + 50)]})

    return spark.range(0, 1, 1, 1).mapInArrow(rows, "body binary")


def numbers(frame):
    """How often each number is there."""
    found = frame.selectExpr("cast(substr(cast(body as string), 1, 6) as int) number").collect()
    return Counter(row.number for row in found)


def stored(mq):
    return sum(bounds.max_offset for bounds in mq.admin.describe_topic("t").values())


class Writing(threading.Thread):
    """A batch write in the background."""

    def __init__(self, frame, name_server, **options):
        super().__init__()
        self.error: Exception | None = None
        self._spark = frame.sparkSession
        self._write = lambda: write(frame, name_server, topic="t", **options)
        self.start()

    def run(self):
        # In a new thread Spark looks for a writer's format in the active session, of which there is none.
        self._spark._jvm.SparkSession.setActiveSession(self._spark._jsparkSession)
        try:
            self._write()
        except Exception as e:  # noqa: BLE001 - handed to the test
            self.error = e


def kill_in_the_middle(mq, gate, writing, already=0):
    """After the first rows are stored, and while the rest is still to come."""
    while not stored(mq) > already:
        assert writing.is_alive(), writing.error
        time.sleep(0.02)
    mq.kill("broker-a")
    gate.touch()


pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


def test_a_write_outlives_its_broker(spark, broker, small_batches, tmp_path):
    gate = tmp_path / "gate"
    writing = Writing(gated(spark, gate), broker.name_server)
    kill_in_the_middle(broker, gate, writing)
    writing.join(3)
    assert writing.is_alive(), "nothing can be written now"
    broker.restart("broker-a")
    writing.join(60)
    assert not writing.is_alive()
    assert writing.error is None
    found = numbers(read(spark, broker.name_server, "t"))
    assert found.keys() == set(range(ROWS))
    # Only what was under way when the broker died may be there twice.
    assert found.total() - ROWS < ROWS // 2


def test_a_write_whose_broker_stays_away_fails_in_time(spark, broker, small_batches, tmp_path):
    """What was reported as written before that is there afterwards."""
    before = spark.range(1000).selectExpr("concat(lpad(cast(id + 500000 as string), 6, '0'), 'x') body")
    write(before, broker.name_server, topic="t")
    gate = tmp_path / "gate"
    writing = Writing(gated(spark, gate), broker.name_server, sendTimeout="6s")
    kill_in_the_middle(broker, gate, writing, already=1000)
    killed_at = time.monotonic()
    writing.join(90)
    took = time.monotonic() - killed_at
    assert not writing.is_alive()
    text = str(writing.error)
    assert re.search(r"ROCKETMQ_(SEND_FAILED|ROUTE_NOT_FOUND)", text)
    assert "Acknowledged before that: " in text
    # Three attempts of the task, each with sendTimeout and ten seconds.
    assert took < 3 * (6 + 10)
    broker.restart("broker-a")
    found = numbers(read(spark, broker.name_server, "t"))
    assert {number: found[number] for number in range(500_000, 501_000)} == dict.fromkeys(range(500_000, 501_000), 1)
    assert found.keys() <= {*range(500_000, 501_000), *range(ROWS)}


def test_a_stream_waits_for_its_broker(spark, broker, tmp_path):
    """No error and no loss while nobody answers; afterwards it goes on by itself."""
    sent = java_send(broker.name_server, "t", 40)
    batches: dict[int, list] = {}
    query = (
        read_stream(spark, broker.name_server, "t", startingOffsets="earliest", requestTimeout="1s")
        .writeStream.foreachBatch(lambda frame, number: batches.update({number: rows_of(frame)}))
        .option("checkpointLocation", str(tmp_path))
        .start()
    )

    def seen():
        return once(row for rows in list(batches.values()) for row in rows)

    try:
        wait_until(query, lambda: len(seen()) == 40)
        broker.kill("broker-a")
        # Until it is back, which takes its time, several questions get no answer.
        broker.restart("broker-a")
        sent += java_send(broker.name_server, "t", 40, first=40)
        wait_until(query, lambda: len(seen()) == 80)
    finally:
        query.stop()
    assert seen().keys() == {record.id for record in sent}
