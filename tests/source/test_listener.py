"""The listener commits what a query has finished, as soon as Spark tells; with real queries in tests/live/group."""

from __future__ import annotations

import json
from types import SimpleNamespace
from uuid import UUID

import pytest
from pyspark.sql.streaming.listener import QueryProgressEvent

from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import ConnectionLost, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.monitoring.group_offset_listener import GroupOffsetListener
from rocketmq_spark.spark.source import checkpoint_identity
from tests.helpers import progress_json
from tests.mockbroker import MockBroker, ok, route

END = '{"topics":{"t":{"b":{"0":5}},"u":{"b":{"0":7}}},"v":1}'
T, U = MessageQueue("t", "b", 0), MessageQueue("u", "b", 0)


def progress(*ends, run=1):
    return SimpleNamespace(progress=SimpleNamespace(json=progress_json(*ends), runId=run))


@pytest.fixture
def listening(monkeypatch):
    def made(**options):
        listener = GroupOffsetListener(name_server="h:1", group="g", **options)
        committed = []
        monkeypatch.setattr(listener._group_offsets, "commit", lambda positions, _: committed.append(positions))
        return listener, committed

    return made


def test_a_group_is_needed():
    with pytest.raises(OptionError, match="option 'group' is required"):
        GroupOffsetListener(name_server="h:1")


def test_the_end_of_a_batch_is_committed(listening):
    listener, committed = listening()
    listener.onQueryProgress(progress(END))
    assert committed == [{T: 5, U: 7}]


def test_only_the_topics_that_are_named(listening):
    listener, committed = listening(subscribe="u")
    listener.onQueryProgress(progress(END))
    assert committed == [{U: 7}]


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ({}, {"namespace": "n"}),
        ({"namespace": "n"}, {"namespace": ""}),
        ({}, {"namespace": "", "environment": "dev"}),
        ({}, {"namespace": "", "group": "of-another-query"}),
        ({"environment": "1", "environments": "2"}, {"namespace": "", "environment": "2", "environments": 2}),
    ],
)
def test_listener_skips_other_namespaces_environments_and_groups(listening, given, theirs):
    """They have the same names there."""
    listener, committed = listening(**given)
    mine = checkpoint_identity.source_identity(listener._options)
    listener.onQueryProgress(progress(*(json.dumps({**json.loads(END), "reads": reads}) for reads in (theirs, mine))))
    assert committed == [{T: 5, U: 7}]


@pytest.mark.parametrize("theirs", [None, [], ["c"], ["c", "other"], ["other"]])
def test_queues_of_another_cluster_are_left_alone(theirs, caplog):
    """Two clusters may have topics and brokers of the same names. Older positions do not say of which they are."""
    reads = {} if theirs is None else {"reads": {"namespace": "", "clusters": theirs}}
    handler = {
        Request.UPDATE_CONSUMER_OFFSET: lambda call: ok(),
        Request.GET_CONSUMER_LIST_BY_GROUP: lambda call: ok(b"{}"),
    }
    with MockBroker(handler) as broker, caplog.at_level("INFO"):
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"b": broker.address}))
        listener = GroupOffsetListener(name_server=broker.address, group="g")
        listener.onQueryProgress(progress(json.dumps({**json.loads(END), **reads})))
        stored = [call.ext["topic"] for call in broker.seen(Request.UPDATE_CONSUMER_OFFSET)]
    assert sorted(stored) == ([] if theirs == ["other"] else ["t", "u"])
    assert ("is of cluster" in caplog.text) == (theirs == ["other"])


def test_ends_are_read_from_json_with_every_pyspark(listening):
    """Objects that PySpark 4.0 and 4.1 make of JSON, as with Spark Connect, have other texts."""
    unknown = dict.fromkeys(
        ("startOffset", "latestOffset", "numInputRows", "inputRowsPerSecond", "processedRowsPerSecond")
    )
    event = {
        **dict.fromkeys(("name", "timestamp", "batchId", "batchDuration", "numInputRows"), 0),
        **dict.fromkeys(("inputRowsPerSecond", "processedRowsPerSecond"), 0.0),
        "id": str(UUID(int=1)),
        "runId": str(UUID(int=2)),
        "durationMs": {},
        "eventTime": {},
        "observedMetrics": {},
        "stateOperators": [],
        "sources": [{**unknown, "description": "d", "metrics": {}, "endOffset": json.loads(END)}],
        "sink": {"description": "d", "numOutputRows": 0, "metrics": {}},
    }
    listener, committed = listening()
    listener.onQueryProgress(QueryProgressEvent.fromJson({"progress": event}))
    assert committed == [{T: 5, U: 7}]


@pytest.mark.parametrize("odd", ["17", "null", '{"kafka":{"0":5}}', None, '{"topics":7}'])
def test_other_formats_are_left_alone(listening, odd):
    listener, committed = listening()
    listener.onQueryProgress(progress(odd, END))
    assert committed == [{T: 5, U: 7}]


def test_a_query_does_not_suffer_from_a_broker(listening, monkeypatch, caplog):
    listener, _ = listening()

    def refuse(positions, clusters):
        raise ConnectionLost("no broker")

    monkeypatch.setattr(listener._group_offsets, "commit", refuse)
    listener.onQueryProgress(progress(END))
    assert "the offsets of a finished batch are not committed" in caplog.text


def test_refused_commit_is_repeated_while_the_query_is_idle(listening, monkeypatch):
    listener, committed = listening()
    monkeypatch.setattr(listener._group_offsets, "commit", lambda *_: None)  # later, it says
    listener.onQueryProgress(progress(END, run=1))
    monkeypatch.setattr(listener._group_offsets, "commit", lambda positions, _: committed.append(positions))
    listener.onQueryIdle(SimpleNamespace(runId=2))
    assert committed == []
    listener.onQueryIdle(SimpleNamespace(runId=1))
    assert committed == [{T: 5, U: 7}]
    listener.onQueryTerminated(SimpleNamespace(runId=1))
    listener.onQueryIdle(SimpleNamespace(runId=1))
    assert len(committed) == 1


def test_nothing_else_matters(listening):
    listener, committed = listening()
    for call in (listener.onQueryStarted, listener.onQueryIdle, listener.onQueryTerminated):
        call(SimpleNamespace(runId=1))
    assert committed == []
