"""The objects that Spark pickles: small, without anything open, and honest about what was written."""

from __future__ import annotations

import logging
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from rocketmq_spark.base import process
from rocketmq_spark.errors import OptionError, RouteNotFound
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.sink import checks, task
from rocketmq_spark.spark.sink import writer as writer_module
from rocketmq_spark.spark.sink.report import Written
from tests.live.writes import sink_options
from tests.schemas import struct

SCHEMA = struct("body string")


def source(name_server, **options):
    given = {"nameServer": name_server, "secretKey": "s3cr3t-of-the-user", "accessKey": "k", **options}
    return RocketMQDataSource({name: str(value) for name, value in given.items()})


@pytest.fixture(params=["batch", "stream"])
def writer(request, broker_cluster, topic):
    made = source(broker_cluster.name_server, topic=topic)
    return made.writer(SCHEMA, False) if request.param == "batch" else made.streamWriter(SCHEMA, False)


def batch(*bodies):
    return pa.RecordBatch.from_pydict({"body": list(bodies)})


def test_pickles_are_small_and_writers_travel(writer, broker_cluster):
    assert len(cloudpickle.dumps(writer)) < 6000
    again = pickle.loads(pickle.dumps(writer))
    commit = again.write(iter([batch("a", "b"), batch("c")]))
    done = commit.written
    assert (done.rows, done.retries) == (3, 0)
    assert pickle.loads(pickle.dumps(commit)).written == done


def test_secrets_are_not_shown(writer):
    assert "s3cr3t" not in repr(writer) + repr(vars(writer)) + repr(vars(writer._writer))


def test_an_empty_partition_has_a_commit_message_too(writer):
    assert writer.write(iter([])).written == Written()
    assert writer.write(iter([batch()])).written.rows == 0


def finish(writer, how, messages):
    numbered = "Stream" in type(writer).__name__
    getattr(writer, how)([done and task.TaskCommitMessage(done) for done in messages], *([7] if numbered else []))


def test_counts_are_logged(writer, caplog):
    caplog.set_level(logging.INFO, "rocketmq_spark")
    finish(writer, "commit", [Written(5, 100, 1), Written(2, 50, 1, 3)])
    assert "7 rows in 2 batches, 150 bytes, 3 retries" in caplog.text


def test_two_tasks_that_name_one_topic_in_two_ways_are_an_error():
    options = sink_options("x:1", topicNames="dotsToUnderscores", topic="t")
    writer = object.__new__(writer_module._DriverWriter)
    writer.options = options
    same = [task.TaskCommitMessage(Written(1), ("t", "a.b")) for _ in range(2)]
    writer.commit([*same, None], "written")
    with pytest.raises(OptionError, match=r"topics 'a.b' and 'a_b' are both 'a_b'.*tasks of this write have stored"):
        writer.commit([*same, task.TaskCommitMessage(Written(1), ("a_b",))], "written")


def test_two_writes_that_name_one_topic_in_two_ways_are_told(writer, caplog):
    """Two batch writes, or two micro-batches of a stream, whose writer Spark makes anew."""
    process.entries(checks._NAMES_KEY).clear()
    finish(writer, "commit", [])
    writer._writer.options = sink_options("x:1", topicNames="dotsToUnderscores")
    number = (7,) if isinstance(writer, writer_module.RocketMQStreamWriter) else ()
    for name in ("a.b", "a.b", "c_d", "a_b"):
        assert "in the same topic" not in caplog.text
        writer.commit([task.TaskCommitMessage(Written(1), (name,))], *number)
    text = "rows of topic 'a_b' in topic a_b, and an earlier write of this process stored rows of topic 'a.b' in"
    assert text in caplog.text


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_a_run_logs_once_that_a_key_chooses_the_queue(broker_cluster, topic, kind, caplog):
    """Spark makes a stream's writer anew for each micro-batch."""
    caplog.set_level(logging.INFO, "rocketmq_spark")
    keyed = struct("body string, shardingKey string")
    for _ in range(1 if kind == "writer" else 3):
        getattr(source(broker_cluster.name_server, topic=topic), kind)(keyed, False)
    lines = [text for text in caplog.messages if "queueSelector=hash" in text]
    assert len(lines) == 1
    assert f"topic {topic}: column 'shardingKey' chooses the queue of each row" in lines[0]


def test_a_failed_write_says_what_is_there_all_the_same(writer, caplog):
    caplog.set_level(logging.INFO, "rocketmq_spark")
    finish(writer, "abort", [None, Written(5, 100, 1), None])
    assert "failed; acknowledged before that: 5 rows" in caplog.text


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_overwriting_is_refused(broker_cluster, topic, kind):
    with pytest.raises(OptionError, match="cannot be overwritten"):
        getattr(source(broker_cluster.name_server, topic=topic), kind)(SCHEMA, True)


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_a_topic_that_does_not_exist_is_told_before_any_task(broker_cluster, kind):
    with pytest.raises(RouteNotFound, match="knows no such topic"):
        getattr(source(broker_cluster.name_server, topic="no-such-topic"), kind)(SCHEMA, False)


def test_a_stream_commits_whatever_became_of_its_topic(broker_cluster, monkeypatch, caplog):
    """Spark makes the writer anew for that, in another process, while the topic's brokers may be away and others there."""
    caplog.set_level(logging.INFO, "rocketmq_spark")
    monkeypatch.setitem(sys.modules, writer_module._COMMIT_WORKER, ModuleType(writer_module._COMMIT_WORKER))
    writer = source(broker_cluster.name_server, topic="no-such-topic").streamWriter(SCHEMA, False)
    finish(writer, "commit", [Written(5, 100, 1)])
    assert "batch 7: 5 rows" in caplog.text


@pytest.mark.parametrize(("attempt", "warned"), [(0, False), (1, True)])
def test_a_later_attempt_says_that_rows_may_be_there_twice(writer, caplog, monkeypatch, attempt, warned):
    """The planner sees no Spark configuration; the task knows its attempt."""
    running = SimpleNamespace(attemptNumber=lambda: attempt, partitionId=lambda: 3)
    monkeypatch.setattr(task, "TaskContext", SimpleNamespace(get=lambda: running))
    writer.write(iter([]))
    assert ("attempt 1 of partition 3 sends its rows again (a failure, or spark.speculation)" in caplog.text) == warned
