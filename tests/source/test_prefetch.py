"""The rows of a small batch go to Spark with its plan, or the batch is left to a task."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import read_int
from pyspark.sql.pandas.serializers import ArrowStreamSerializer
from pyspark.sql.streaming import python_streaming_source_runner as runner
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructField, StructType

from rocketmq_spark import Message
from rocketmq_spark import options as options_table
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark import compat
from rocketmq_spark.spark.conf import READ_BY_TASKS
from rocketmq_spark.spark.source import prefetch
from rocketmq_spark.spark.source.partition_reader import RangePartition
from rocketmq_spark.spark.source.prefetch import MAX_PREFETCH_BYTES, MAX_PREFETCH_ROWS, Prefetch, enable_prefetch
from tests.reading import Run, data_source, feed, handed_over, post

QUEUE = MessageQueue("T", "broker-a", 0)


def partition(rows: int) -> RangePartition:
    return RangePartition((OffsetRange(QUEUE, 5, 5 + rows),))


class Reads:
    """Stands in for the reading of a task: ``batches``, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.error: Exception | None = None
        self.lost = False
        self.asked: list[Any] = []
        monkeypatch.setattr(prefetch, "read_partition", self)

    def of_bytes(self, *sizes: int) -> None:
        self.batches = [pa.record_batch({"body": pa.array([bytes(size)])}) for size in sizes]

    def __call__(self, options: Any, columns: Any, partition: Any, is_streaming: bool, on_loss: Any) -> Any:
        self.asked.append(options)
        yield from self.batches
        if self.lost and on_loss is not None:  # else it is as 'failOnDataLoss' says, which may be to go on
            on_loss(partition.ranges[0], Cause.TRUNCATED)
        if self.error is not None:
            raise self.error


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


def driver(**given: Any) -> Prefetch:
    options = options_table.parse({"nameServer": "127.0.0.1:9", "subscribe": "T", **given})
    return Prefetch(options.for_role("stream source"), ())


def test_a_small_batch_of_one_task_is_read(reads):
    reads.of_bytes(10, 20)
    assert driver()([partition(MAX_PREFETCH_ROWS)]) == reads.batches


@pytest.mark.parametrize("planned", [[], [partition(MAX_PREFETCH_ROWS + 1)], [partition(1), partition(1)]])
def test_others_are_not_even_tried(reads, planned):
    assert driver()(planned) is None
    assert reads.asked == []


@pytest.mark.parametrize("what", [{"error": CallTimeout("late")}, {"error": OSError("no more files")}, {"lost": True}])
def test_what_goes_wrong_is_left_to_the_task(reads, what):
    """It has the time to wait, and judges by option 'failOnDataLoss' whether messages are lost."""
    reads.of_bytes(10)
    for name, value in what.items():
        setattr(reads, name, value)
    assert driver()([partition(2)]) is None


def test_prefetch_backs_off_to_tasks_after_repeated_failures(reads):
    """A broker that takes longer than the driver waits would cost a second with every batch."""
    one = driver()
    reads.of_bytes(10)
    reads.error = CallTimeout("late")
    tried = []
    for _ in range(75):
        one([partition(1)])
        tried.append(len(reads.asked))
    assert [tried.index(n) for n in range(1, 7)] == [0, 2, 6, 14, 30, 62]
    reads.error = None
    while one([partition(1)]) is None:
        assert len(reads.asked) == 6
    assert one([partition(1)]) == reads.batches


def test_it_waits_briefly_and_keeps_little_under_way(reads):
    driver(readDeadline="2m", maxBytesInFlight="64m")([partition(1)])
    assert (reads.asked[0].read_deadline, reads.asked[0].max_bytes_in_flight) == (1.0, MAX_PREFETCH_BYTES)
    driver(readDeadline="100ms", maxBytesInFlight="64k")([partition(1)])
    assert (reads.asked[1].read_deadline, reads.asked[1].max_bytes_in_flight) == (0.1, 64 << 10)


def test_prefetch_leaves_large_rows_to_tasks_then_tries_again(reads):
    one, most = driver(), MAX_PREFETCH_BYTES // 2
    reads.of_bytes(most, most, most)  # together more than a batch may have: half of a MiB each, as far as is known then
    assert one([partition(3)]) is None
    assert len(reads.asked) == 1
    reads.of_bytes(most)
    assert one([partition(1)]) == reads.batches
    assert one([partition(4)]) is None
    assert len(reads.asked) == 2
    reads.of_bytes(10, 10, 10, 10)
    tried = 0
    while (got := one([partition(4)])) is None:
        tried += 1
        assert tried < 20
    assert got == reads.batches
    assert tried >= 3
    assert one([partition(MAX_PREFETCH_ROWS)]) == reads.batches


@pytest.mark.parametrize("version", ["3.5.9", "4.4.0", "5.0.0"])
def test_a_version_that_was_not_tried_reads_by_tasks(monkeypatch, version):
    monkeypatch.setattr(prefetch.pyspark, "__version__", version)
    assert not enable_prefetch(type("Some", (), {}))


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(READ_BY_TASKS, "1")
    assert not enable_prefetch(type("Some", (), {}))


@pytest.fixture
def patient(monkeypatch):
    """The driver does not leave to its task what a slow machine reads in more than a second."""
    monkeypatch.setattr(prefetch, "_PREFETCH_DEADLINE_S", 60.0)


class Runner:
    """PySpark's own runner of a source, called as Spark's JVM calls it."""

    def __init__(self, mq: Any, **options: Any) -> None:
        self.run = Run(mq, **options)
        self.source, self.schema = data_source({"nameServer": mq.name_server, **options})

    def plan(self, end: str) -> tuple[int, int, list[dict[str, Any]]]:
        """How many tasks, PySpark's code for what is handed over, and the rows."""
        given, answer = io.BytesIO(), io.BytesIO()
        for offset in (self.run.offset, end):
            data = offset.encode()
            given.write(len(data).to_bytes(4, "big") + data)
        given.seek(0)
        runner.partitions_func(self.run.reader, self.source, self.schema, 10_000, given, answer)
        answer.seek(0)
        count = read_int(answer)
        for _ in range(count):
            answer.read(read_int(answer))
        code = read_int(answer)
        if code != runner.NON_EMPTY_PYARROW_RECORD_BATCHES:
            assert not answer.read()
            return count, code, []
        read_int(answer)
        return count, code, [row for batch in ArrowStreamSerializer().load_stream(answer) for row in batch.to_pylist()]


def test_pyspark_takes_the_rows_and_asks_the_reader_as_before(rocketmq, topic, patient):
    sent = feed(rocketmq, topic, 20, tags="t", properties={"a": "1"})
    made = Runner(rocketmq, subscribe=topic, startingOffsets="earliest")
    flags, again, report = io.BytesIO(), io.BytesIO(), io.BytesIO()
    supports = getattr(runner, "check_support_func", lambda *_: None)  # PySpark 4.0 and 4.1 do not ask
    supports(made.run.reader, flags)
    end = made.run.ahead()
    count, code, found = made.plan(end)
    assert (count, code) == (1, runner.NON_EMPTY_PYARROW_RECORD_BATCHES)
    assert sorted(row["body"].decode() for row in found) == sorted(sent)
    supports(made.run.reader, again)
    assert again.getvalue() == flags.getvalue()
    assert (flags.getvalue() != b"") == compat.has_class("SupportsTriggerAvailableNow")
    ask = getattr(runner, "report_latest_offset_func", runner.latest_offset_func)
    ask(made.run.reader, report)
    assert json.loads(report.getvalue()[4:])["topics"] == json.loads(end)["topics"]


def test_prefetched_batch_with_all_rows_filtered_out_is_empty(rocketmq, topic, patient):
    feed(rocketmq, topic, 3, tags="t")
    made = Runner(rocketmq, subscribe=topic, startingOffsets="earliest", tags="other")
    assert made.plan(made.run.ahead()) == (1, runner.EMPTY_PYARROW_RECORD_BATCHES, [])


def test_what_tasks_should_read_is_not_handed_over(rocketmq, topic):
    feed(rocketmq, topic, 20)
    made = Runner(rocketmq, subscribe=topic, startingOffsets="earliest", numPartitions=2)
    assert made.plan(made.run.ahead()) == (2, runner.PREFETCHED_RECORDS_NOT_FOUND, [])


@pytest.mark.parametrize(
    "given",
    [
        {"metadata": {"comment": "c"}},
        {"nullable": False},
        {"name": "keys", "dataType": ArrayType(StringType(), False)},
        {"name": "properties", "dataType": MapType(StringType(), StringType(), False)},
    ],
)
def test_columns_spark_would_not_recognise_are_read_by_tasks(rocketmq, topic, given):
    """The schema of the rows has no comments, and all of its columns are nullable, and what is in them."""
    feed(rocketmq, topic, 3)
    made = Runner(rocketmq, subscribe=topic, startingOffsets="earliest")
    column = {"name": "body", "dataType": BinaryType(), **given}
    made.run.reader = made.source.streamReader(StructType([StructField(**column)]))
    assert made.plan(made.run.ahead()) == (1, runner.PREFETCHED_RECORDS_NOT_FOUND, [])


def test_rows_that_nobody_took_do_not_stay_for_the_next_batch(rocketmq, topic, patient):
    feed(rocketmq, topic, 4)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    end = run.ahead()
    run.plan(end)
    run.offset = end
    later = feed(rocketmq, topic, 4)
    run.plan(run.ahead())
    assert sorted(row["body"].decode() for row in handed_over(run.reader) or ()) == sorted(later)
    assert handed_over(run.reader) is None


def test_messages_of_a_megabyte_are_read_once_and_by_the_task(rocketmq, topic):
    post(rocketmq, [Message(topic, bytes(900_000)) for _ in range(2)])
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    planned = run.plan(run.ahead())
    assert len(planned) == 1
    assert handed_over(run.reader) is None
