"""What exactly-once is refused with, and the settings and times that it needs."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext, SparkFiles
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import exactly_once_conf, foreach_batch_writer, session
from rocketmq_spark.base import extras, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar.encode.content_ids import BatchName, RowHash
from rocketmq_spark.errors import (
    ClosedError,
    OptionError,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session.stored_ids import noted_stored_ids
from rocketmq_spark.spark import context_settings
from rocketmq_spark.spark.sink import checks, exactly_once, exactly_once_checks
from rocketmq_spark.spark.sink.exactly_once import ExactlyOncePlan
from rocketmq_spark.spark.sink.writer import RocketMQStreamWriter
from rocketmq_spark.stored.ends import QueueEnds
from tests.live.writes import frame, sink_options


@pytest.mark.parametrize(
    ("given", "columns", "why"),
    [
        ({"transport": "grpc", "proxyEndpoint": "x:1"}, {}, "'transport' is 'grpc'"),
        ({"onSendFailure": "spool", "spoolDir": "/tmp/s"}, {}, "a spooled row is sent later"),
        ({"requireStoreOk": "ok"}, {}, "would be stored once more"),
        ({}, {"delayLevel": [1]}, "column 'delaylevel' delays rows"),
        ({"topic": None}, {"topic": ["t"]}, "option 'allowedTopics' must list all of them"),
        ({"allowedTopics": "t"}, {}, "has no effect with option 'topic'"),
        ({"exactlyOnceSettle": "3999ms"}, {}, "expected at least 4 s, because"),
        ({"deliveryGuarantee": "at-least-once", "exactlyOnceSettle": "9s"}, {}, "without 'deliveryGuarantee' exactly-once"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_refused_with_its_reason(
    given: dict[str, Any], columns: dict[str, Any], why: str
) -> None:
    chosen = {"topic": "t", "deliveryGuarantee": "exactly-once", **given}
    options = sink_options("x:1", **{name: value for name, value in chosen.items() if value is not None})
    with pytest.raises(OptionError, match=why):
        checks.check_sink(options, from_arrow_schema(frame(body=["x"], **columns).schema))


def test_without_xxhash_it_is_refused_and_its_command_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the driver when the write is planned, and on a worker that lacks it."""
    options = sink_options("x:1", topic="t", deliveryGuarantee="exactly-once")
    columns = from_arrow_schema(frame(body=["x"]).schema)
    checks.check_sink(options, columns)
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "xxhash")
    with pytest.raises(OptionError, match=r"xxhash, which hashes rows, is not installed: pip install .*'xxhash>="):
        checks.check_sink(options, columns)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(
        OptionError, match=r"needs xxhash, which a Spark worker.*On all workers: pip install .*'xxhash>="
    ):
        RowHash(b"query")


@pytest.mark.parametrize(("killed", "settle_s"), [(None, 4.0), ("2s", 4.0), ("2000", 4.0), ("8s", 10.0), ("1m", 62.0)])
def test_cancelled_tasks_are_gone_when_the_settle_time_is_over(killed: str | None, settle_s: float) -> None:
    exactly_once_checks.check_settle({"spark.python.task.killTimeout": killed}.get, settle_s)


@pytest.mark.parametrize(
    ("killed", "settle_s"), [("2001", 4.0), ("9s", 10.0), ("1m", 60.0), ("1d", 60.0), ("1min", 600.0)]
)
def test_settle_time_below_task_kill_timeout_is_refused(killed: str, settle_s: float) -> None:
    with pytest.raises(OptionError, match=f"killTimeout is {killed}"):
        exactly_once_checks.check_settle({"spark.python.task.killTimeout": killed}.get, settle_s)


@pytest.mark.parametrize(
    ("given", "streaming", "lacks"),
    [
        ({}, True, None),
        ({"spark.speculation": None}, True, None),
        ({"spark.speculation": "False"}, True, None),
        ({"spark.speculation": "true"}, False, "spark.speculation=false .it is true"),
        ({"spark.stage.maxConsecutiveAttempts": None}, False, "maxConsecutiveAttempts=1 .it is not set"),
        ({"spark.stage.ignoreDecommissionFetchFailure": None}, True, "ignoreDecommissionFetchFailure=false"),
        ({exactly_once_checks.ADAPTIVE_SETTING: None}, True, "stateless.enabled=false"),
        ({exactly_once_checks.ADAPTIVE_SETTING: None}, False, None),
    ],
)
def test_spark_settings_unsafe_for_exactly_once_are_refused(
    given: dict[str, str | None], streaming: bool, lacks: str | None
) -> None:
    get = {**exactly_once_conf(), **given}.get
    if lacks is None:
        exactly_once_checks.check_settings(get, streaming, "it")
        return
    with pytest.raises(OptionError, match=lacks):
        exactly_once_checks.check_settings(get, streaming, "it")


def test_settings_that_register_saw_are_checked_before_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    exactly_once_checks.check_registered_settings()  # without ``register`` nothing is known
    for context, settings in (("/earlier", {}), ("/files", exactly_once_conf()), ("/files", {})):
        exactly_once_checks.check_registered_settings()  # what another context had says nothing about this one
        monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda context=context: context)
        monkeypatch.setenv(context_settings.SETTINGS_VARIABLE, context_settings.encoded_settings(settings.get))
        monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: "/files")
    with pytest.raises(OptionError, match=r"the Spark context lacks spark.stage.maxConsecutiveAttempts=1") as e:
        exactly_once_checks.check_registered_settings()
    assert exactly_once_checks.ADAPTIVE_SETTING not in str(e.value), "a session may still set it"


def test_a_writer_of_a_context_without_the_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = partial(
        foreach_batch_writer,
        "h:1",
        topic="t",
        delivery_guarantee="exactly-once",
        checkpoint_location=str(tmp_path / "c"),
    )
    for settings, lacks in ((exactly_once_conf(), None), ({}, "maxConsecutiveAttempts=1"), (None, None)):
        context = None if settings is None else SimpleNamespace(getConf=lambda found=settings: found)
        monkeypatch.setattr(SparkContext, "_active_spark_context", context)
        if lacks is None:
            writer()
            continue
        with pytest.raises(OptionError, match=lacks):
            writer()


def test_task_of_another_query_or_batch_than_its_note_is_refused() -> None:
    names, here = {"query": "q", "batch": "b"}, {"q": "query-1", "b": "7"}
    exactly_once_checks.check_batch(here.get, "query-1", 7, names)
    exactly_once_checks.check_batch({}.get, "query-1", 7, names)  # Spark Connect does not say it
    for query, number, said in (("query-2", 7, "query-1"), ("query-1", 6, "7")):
        with pytest.raises(OptionError, match=f"Spark says that . is {said}"):
            exactly_once_checks.check_batch(here.get, query, number, names)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (exactly_once._QUERY_PROPERTY, "query-2", "Spark says that sql.streaming.queryId is query-2"),
        (exactly_once._BATCH_PROPERTY, "8", "Spark says that streaming.sql.batchId is 8"),
        ("spark.python.task.killTimeout", "1m", "killTimeout is 1m"),
        ("spark.speculation", "true", "the Spark context of this task lacks spark.speculation=false"),
    ],
)
def test_each_task_looks_where_it_runs(monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str) -> None:
    """With the note of another batch its rows would get the ids of that one's, and those that are equal would be left out."""
    here = {**exactly_once_conf(), exactly_once._QUERY_PROPERTY: "query-1", exactly_once._BATCH_PROPERTY: "7"}
    task = SimpleNamespace(getLocalProperty=here.get)
    monkeypatch.setattr(exactly_once, "TaskContext", SimpleNamespace(get=lambda: task))
    stream = ExactlyOncePlan(BatchName("query-1", 0, 7, b"", "sink"), QueueEnds({}, {}))
    job = replace(stream, is_streaming=False)
    exactly_once.check_task(stream, 4.0)
    with pytest.raises(OptionError, match="cannot see, inside a streaming query, that a batch is repeated"):
        exactly_once.check_task(job, 4.0)
    here[name] = value
    with pytest.raises(OptionError, match=why):
        exactly_once.check_task(stream, 4.0)


def test_a_look_ends_with_its_task() -> None:
    """It would wait for its broker, on a thread of a worker that goes on with other tasks."""
    queue = MessageQueue("t", "a", 0)
    options = sink_options("127.0.0.1:1", topic="t", deliveryGuarantee="exactly-once")
    looking = noted_stored_ids(options, QueueEnds({queue: 0}, {"a": "127.0.0.1:1"}))
    looking.stop()
    with pytest.raises(ClosedError, match="the producer was closed"):
        looking.find_stored({queue: 0}, "127.0.0.1:1", {"id"}, Deadline.after(20))


def test_a_stream_must_say_where_its_checkpoint_is() -> None:
    options = sink_options("x:1", topic="t", deliveryGuarantee="exactly-once")
    with pytest.raises(OptionError, match=r"Give the writer .option\('checkpointLocation', ...\)"):
        RocketMQStreamWriter(options, from_arrow_schema(frame(body=["x"]).schema))


def test_topics_are_checked_once_in_each_place(monkeypatch):
    """The same name may be a compaction topic elsewhere, or one that this user may not read."""
    checked = []
    monkeypatch.setattr(session, "client", lambda options: SimpleNamespace(routes=None, offset_reader=None))
    monkeypatch.setattr(exactly_once, "fetch_ends", lambda *given: QueueEnds({}, {}))
    monkeypatch.setattr(exactly_once, "_check_topics", lambda options, ends: checked.append(options) is None)
    process.entries(exactly_once._CHECKED_TOPICS_KEY).clear()
    ways = [{"addressMap": '{"10.0.0.5:10911": "y:2"}'}, {"accessKey": "a", "secretKey": "b"}, {"tls": "true"}]
    suffixes = [{"environment": name, "environmentMode": "suffix"} for name in ("dev", "test")]
    places = [{}, {"namespace": "n"}, *suffixes, *ways, {"nameServer": "y:1"}, {"topic": "u"}]
    for place in (*places, *places):
        exactly_once.snapshot_queue_ends(
            sink_options("x:1", **{"topic": "t", "deliveryGuarantee": "exactly-once", **place})
        )
    assert len(checked) == len(places)
    process.entries(exactly_once._CHECKED_TOPICS_KEY).clear()


def test_server_that_never_answers_a_check_blocks_only_its_query(monkeypatch):
    """Somebody else's options name it, in a process with the queries of several users."""
    asked, answers = threading.Event(), threading.Event()

    def check(options, ends):
        asked.set()
        return answers.wait(60)

    monkeypatch.setattr(exactly_once, "fetch_ends", lambda *given: QueueEnds({}, {}))
    monkeypatch.setattr(exactly_once, "_check_topics", check)
    hostile = sink_options("127.0.0.1:1", topic="t", deliveryGuarantee="exactly-once")
    theirs = threading.Thread(target=exactly_once.snapshot_queue_ends, args=(hostile,))
    theirs.start()
    assert asked.wait(60)
    mine = threading.Thread(target=session.client, args=(sink_options("127.0.0.1:2", topic="t"),), daemon=True)
    mine.start()
    mine.join(20)
    went_on = not mine.is_alive()
    answers.set()
    theirs.join()
    process.entries(exactly_once._CHECKED_TOPICS_KEY).clear()
    assert went_on
