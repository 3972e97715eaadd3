"""A query's progress is read as its sources told it; with a real query in tests/spark/test_progress.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from rocketmq_spark.spark.monitoring.queries import figures_of_progress, figures_of_source
from rocketmq_spark.spark.monitoring.queries import progress as query_progress


def told(**more):
    report = {"lag": 4, "behindMs": 70, "queues": 2, "queuesAway": 0, "brokersAway": [], "losses": {}}
    return {**report, **more, "topics": {"t": {"b": {"0": 5}}}, "v": 1}


def progress(*sources, **more):
    every = [{"description": "d", "latestOffset": json.dumps(source)} for source in sources]
    return {
        "batchId": 3,
        "timestamp": "T",
        "numInputRows": 9,
        "durationMs": {"triggerExecution": 50},
        "sources": every,
        **more,
    }


def test_one_source():
    found = figures_of_progress(progress(told(), sink={"numOutputRows": 9}))
    source = {name: value for name, value in told().items() if name not in ("topics", "v")}
    assert found == {
        "batchId": 3,
        "timestamp": "T",
        "rows": 9,
        "batchMs": 50,
        "sinkRows": 9,
        **source,
        "sources": [source],
    }


def test_several_sources_are_summed_up():
    lost = {"truncated": {"ranges": 1, "offsets": 5}}
    unknown = {"truncated": {"ranges": 2, "offsets": None}, "queue_gone": {"ranges": 1, "offsets": 2}}
    found = figures_of_progress(
        progress(
            told(losses=lost, brokersAway=["b"]),
            {"kafka": {"0": 1}},
            told(losses=unknown, brokersAway=["a", "b"], behindMs=9),
        )
    )
    assert (found["lag"], found["behindMs"], found["queues"], found["brokersAway"]) == (8, 70, 4, ["a", "b"])
    assert found["losses"] == {"queue_gone": {"ranges": 1, "offsets": 2}, "truncated": {"ranges": 3, "offsets": None}}
    assert len(found["sources"]) == 2


def test_what_one_source_does_not_know_is_not_known_of_all():
    found = figures_of_progress(progress(told(), told(lag=None, behindMs=None)))
    assert (found["lag"], found["behindMs"], found["queues"]) == (None, None, 4)


class Query:
    def __init__(self, told, status):
        self.lastProgress, self.status = told and SimpleNamespace(json=json.dumps(told)), status


RUNS = {"message": "Processing new data", "isDataAvailable": True, "isTriggerActive": True}


@pytest.mark.parametrize(
    ("status", "under_way"),
    [
        (RUNS, True),
        ({**RUNS, "isTriggerActive": False}, False),
        ({**RUNS, "message": "Getting offsets from PythonMicroBatchStream"}, False),
        ({**RUNS, "message": "Waiting for data to arrive"}, False),
        ({}, False),
    ],
)
def test_whether_a_batch_is_under_way(status, under_way):
    """The figures are of the one before: they stand while it waits for a broker."""
    minute_ago = (datetime.now(UTC) - timedelta(minutes=1)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    found = query_progress(Query(progress(told(), timestamp=minute_ago), status))
    assert (found["lag"], found["underWay"]) == (4, under_way)
    assert 59_900 <= found["ageMs"] < 600_000


@pytest.mark.parametrize("more", [{"timestamp": "T"}, {"durationMs": {}}, {"timestamp": None}])
def test_an_age_that_spark_does_not_tell(more):
    moment = {"timestamp": "2026-01-31T12:00:00.000Z", **more}
    assert query_progress(Query(progress(told(), **moment), RUNS))["ageMs"] is None
    assert query_progress(Query(None, RUNS)) is None


def test_without_a_source_of_ours_nothing_is_known():
    found = figures_of_progress(progress({"kafka": {"0": 1}}, sink={"numOutputRows": -1}))
    assert (found["lag"], found["queues"], found["sinkRows"], found["sources"]) == (None, None, None, [])


def test_figures_that_spark_does_not_ask_for_are_null():
    """PySpark 4.0 and 4.1 show the end of the batch."""
    end = {"marks": {}, "reads": {}, "topics": {"t": {"broker-a": {"0": 4}}}, "v": 1}
    figures = dict.fromkeys(("lag", "behindMs", "queues", "queuesAway", "brokersAway", "losses"))
    found = figures_of_progress(progress(end))
    assert {name: found[name] for name in figures} == figures
    assert found["sources"] == [figures]
    assert figures_of_progress(progress(end, told()))["losses"] is None
    assert figures_of_progress(progress(end, told()))["brokersAway"] is None


@pytest.mark.parametrize("odd", [None, "17", "-", "{", "[]", {"topics": {}}, '{"topic": {}, "v": 1}'])
def test_other_reports_are_none(odd):
    assert figures_of_source(odd) is None
