"""Brokers that die while a query writes or reads: it goes on when they come back, and says so when they do not."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter

import pytest
from click.testing import CliRunner

from rocketmq_spark import explain, progress, session
from rocketmq_spark.cli.command import app
from rocketmq_spark.model import MessageQueue
from tests.fix_spark import wait_until
from tests.helpers import WAIT_S, killed
from tests.reading import feed, names
from tests.spark.pipelines import once, read, read_stream, rows_of, write
from tests.witness import java_send

# Large enough that rows do not wait in the buffers between Python and the JVM.
ROWS, SIZE = 3000, 8 << 10
GATE_AT = ROWS // 2


@pytest.fixture
def topic(lone):
    (name,) = names(1, "outage")
    lone.create_topic(name, 8)
    return name


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


def stored(mq, topic):
    return sum(bounds.max_offset for bounds in mq.admin.describe_topic(topic).values())


class Writing(threading.Thread):
    """A batch write in the background."""

    def __init__(self, frame, name_server, topic, **options):
        super().__init__()
        self.error: Exception | None = None
        self._spark = frame.sparkSession
        self._write = lambda: write(frame, name_server, topic=topic, **options)
        self.start()

    def run(self):
        # In a new thread Spark looks for a writer's format in the active session, of which there is none.
        self._spark._jvm.SparkSession.setActiveSession(self._spark._jsparkSession)
        try:
            self._write()
        except Exception as e:  # noqa: BLE001 - handed to the test
            self.error = e


def kill_in_the_middle(mq, topic, gate, writing, already=0):
    """After the first rows are stored, and while the rest is still to come."""
    while not stored(mq, topic) > already:
        assert writing.is_alive(), writing.error
        time.sleep(0.02)
    killed(mq, "broker-a")
    gate.touch()


pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")


def test_a_write_outlives_its_broker(spark, lone, topic, small_batches, tmp_path):
    gate = tmp_path / "gate"
    writing = Writing(gated(spark, gate), lone.name_server, topic)
    kill_in_the_middle(lone, topic, gate, writing)
    writing.join(3)
    assert writing.is_alive(), "nothing can be written now"
    lone.restart("broker-a")
    writing.join(WAIT_S)
    assert not writing.is_alive()
    assert writing.error is None
    found = numbers(read(spark, lone.name_server, topic))
    assert found.keys() == set(range(ROWS))
    # Only what was under way when the broker died may be there twice.
    assert found.total() - ROWS < ROWS // 2


def test_a_write_whose_broker_stays_away_fails_in_time(spark, lone, topic, small_batches, tmp_path):
    """What was reported as written before that is there afterwards."""
    before = spark.range(1000).selectExpr("concat(lpad(cast(id + 500000 as string), 6, '0'), 'x') body")
    write(before, lone.name_server, topic=topic)
    gate = tmp_path / "gate"
    writing = Writing(gated(spark, gate), lone.name_server, topic, sendTimeout="6s")
    kill_in_the_middle(lone, topic, gate, writing, already=1000)
    writing.join(240)  # three attempts of the task; each would take two minutes by default
    assert not writing.is_alive()
    text = str(writing.error)
    assert re.search(r"ROCKETMQ_(SEND_FAILED|ROUTE_NOT_FOUND)", text)
    assert "Acknowledged before that: " in text
    lone.restart("broker-a")
    found = numbers(read(spark, lone.name_server, topic))
    assert {number: found[number] for number in range(500_000, 501_000)} == dict.fromkeys(range(500_000, 501_000), 1)
    assert found.keys() <= {*range(500_000, 501_000), *range(ROWS)}


def test_a_stream_waits_for_its_broker(spark, lone, topic, tmp_path):
    """No error and no loss while nobody answers; afterwards it goes on by itself."""
    sent = java_send(lone.name_server, topic, 40)
    batches: dict[int, list] = {}
    query = (
        read_stream(spark, lone.name_server, topic, startingOffsets="earliest", requestTimeout="1s")
        .writeStream.foreachBatch(lambda frame, number: batches.update({number: rows_of(frame)}))
        .option("checkpointLocation", str(tmp_path))
        .start()
    )

    def seen():
        return once(row for rows in list(batches.values()) for row in rows)

    try:
        wait_until(query, lambda: len(seen()) == 40)
        killed(lone, "broker-a")
        # The stream has asked meanwhile: it says itself who does not answer.
        wait_until(query, lambda: (progress(query) or {}).get("brokersAway") == ["broker-a"], 90.0)
        lone.restart("broker-a")
        sent += java_send(lone.name_server, topic, 40, first=40)
        wait_until(query, lambda: len(seen()) == 80)
    finally:
        query.stop()
    assert seen().keys() == {record.id for record in sent}


class Killing:
    """A query over two brokers, one of which is killed when a batch is planned and not read yet."""

    def __init__(self, spark, mq, folder, **options):
        (self.topic,) = names(1, "killed")
        mq.create_topic(self.topic, 1)
        self.mq, self.folder, self.spark = mq, folder, spark
        self.options = {"minPartitions": 2, **options}  # one task would be read by the driver while it plans
        self.queues = [MessageQueue(self.topic, f"broker-{name}", 0) for name in "ab"]
        self.batches: dict[int, list] = {}
        self.kill = False
        self.fed = threading.Event()
        self.query = self.start()

    def start(self):
        rows = read_stream(self.spark, self.mq.name_server, self.topic, startingOffsets="earliest", **self.options)
        stream = rows.writeStream.foreachBatch(self.batch).option("checkpointLocation", str(self.folder))
        return stream.start()

    def batch(self, frame, number):
        if self.kill:
            self.kill = False
            assert self.fed.wait(WAIT_S)  # who feeds it asks the broker whether all can be read
            killed(self.mq, "broker-b")
        self.batches[number] = [row.body.decode() for row in frame.select("body").collect()]

    def read(self):
        return Counter(body for bodies in list(self.batches.values()) for body in bodies)

    def feed(self, *queues):
        self.fed.clear()
        made = feed(self.mq, self.topic, 4 * len(queues), queues=queues)
        self.fed.set()
        return made

    def command(self, *arguments):
        session.close_all()
        return CliRunner().invoke(app, [*arguments, "--name-server", self.mq.name_server, "--json"])

    def waits_for(self):
        told = json.loads(self.command("lag", "--checkpoint", str(self.folder)).stdout.splitlines()[0])
        return (told["underWay"] or {}).get("waitsFor")


def test_batch_of_a_killed_broker_waits_and_progress_shows_it(spark, pair, tmp_path):
    # Each batch has messages of both: the broker dies before its own are read.
    of = Killing(spark, pair, tmp_path, requestTimeout="1s", minOffsetsPerTrigger=8)
    try:
        wait_until(of.query, lambda: of.batches)  # the first batch waits for nothing
        sent = of.feed(*of.queues)
        wait_until(of.query, lambda: of.read() == Counter(sent))
        of.kill = True
        sent += of.feed(*of.queues)
        wait_until(of.query, lambda: of.waits_for() == ["broker-b"], 90.0)
        assert progress(of.query)["underWay"]
        pair.restart("broker-b")
        wait_until(of.query, lambda: of.read() == Counter(sent), 90.0)
    finally:
        of.query.stop()


def test_query_rewound_after_a_broker_loss_continues_without_it(spark, pair, tmp_path):
    of = Killing(spark, pair, tmp_path, requestTimeout="1s", readDeadline="3s")
    a, b = of.queues
    try:
        sent = of.feed(a, b)
        wait_until(of.query, lambda: of.read() == Counter(sent))
        of.kill = True
        lost = of.feed(b)
        with pytest.raises(Exception) as caught:
            of.query.awaitTermination(WAIT_S)
        text = explain(caught.value)
        assert f"queue {of.topic}/broker-b/0" in text
        assert "Nothing is lost: a task waits for broker broker-b" in text
        assert "checkpoint rewind" in text
        last = max(of.batches)
        rewind = ("checkpoint", "rewind", str(tmp_path), "--to-batch", str(last), "--yes", "--force", "--json")
        assert CliRunner().invoke(app, rewind).exit_code == 0
        of.query = of.start()
        sent += of.feed(a)
        wait_until(of.query, lambda: of.read() == Counter(sent), 90.0)
        pair.restart("broker-b")
        wait_until(of.query, lambda: of.read() == Counter([*sent, *lost]), 90.0)
    finally:
        of.query.stop()
