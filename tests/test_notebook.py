"""The chart of a running query, out of progress that Spark keeps; in a real notebook in tests/notebooks."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from rocketmq_spark.notebook import LagChart, Point, draw


def told(batch, rows, batch_ms, lag, behind_ms=None, second=0):
    report = {"lag": lag, "behindMs": behind_ms, "queues": 2, "queuesAway": 0, "brokersAway": [], "losses": {}}
    return {
        "batchId": batch,
        "timestamp": f"2026-01-31T12:00:{second:02}.500Z",
        "numInputRows": rows,
        "durationMs": {"triggerExecution": batch_ms},
        "sources": [{"latestOffset": json.dumps({**report, "topics": {}, "v": 1})}],
    }


class Query:
    """A query that says what a test wants, and each time that it is looked at."""

    def __init__(self, *progress):
        self.isActive = True
        self.progress = list(progress)
        self.looked = threading.Event()

    @property
    def recentProgress(self):
        self.looked.set()
        return [SimpleNamespace(json=json.dumps(one)) for one in self.progress]


@pytest.fixture
def charted():
    charts = []

    def start(query):
        charts.append(LagChart(query, every_s=0.01))
        return charts[-1]

    yield start
    for chart in charts:
        chart.stop()


def test_the_summary_of_what_ran(charted):
    query = Query(told(0, 100, 500, 900), told(1, 300, 300, 600, 70), told(2, 600, 200, 0, 0))
    query.isActive = False
    assert charted(query).summary() == {
        "batches": 3,
        "rows": 1000,
        "rowsPerSecond": 1000,
        "batchMs": {"median": 300, "longest": 500},
        "lag": {"largest": 900, "last": 0},
        "behindMs": {"largest": 70, "last": 0},
    }


def test_nothing_ran_yet(charted):
    found = charted(Query()).summary()
    assert (found["batches"], found["rows"], found["rowsPerSecond"]) == (0, 0, None)
    assert found["lag"] == {"largest": None, "last": None}


def test_chart_keeps_progress_dropped_by_spark_and_ignores_idle(charted):
    query = Query(told(0, 100, 500, 900))
    chart = charted(query)
    assert chart.summary()["rows"] == 100
    query.progress = [told(1, 7, 20, 0)]
    assert chart.summary()["rows"] == 107
    query.progress = [told(1, 0, 1, 0), told(2, 0, 1, 0)]
    assert (chart.summary()["rows"], chart.summary()["batches"]) == (107, 2)


def test_the_thread_ends_with_the_query_and_has_drawn(charted):
    query = Query(told(0, 100, 500, 900), told(1, 300, 300, 600, second=2))
    chart = charted(query)
    assert query.looked.wait(60)
    query.isActive = False
    chart._thread.join(60)
    assert not chart._thread.is_alive()
    above, below = chart.figure.axes
    assert above.lines[0].get_xydata().tolist() == [[0, 900], [2, 600]]
    assert [segment.tolist() for segment in below.collections[0].get_segments()] == [
        [[0, 0], [0, 500]],
        [[2, 0], [2, 300]],
    ]


def test_lost_session_stops_chart_and_keeps_its_summary(charted):
    class Gone:
        isActive = True

        @property
        def recentProgress(self):
            raise ConnectionError("the JVM is gone")

    chart = charted(Gone())
    chart.stop()
    assert chart.summary()["batches"] == 0


def test_lag_that_is_not_known_is_not_drawn():
    figure = Figure()
    draw(figure, [Point(0, 10.0, 5, 100, None, None), Point(1, 11.0, 5, 100, 3, None)])
    above, below = figure.axes
    assert above.lines[0].get_xydata().tolist() == [[1, 3]]
    assert [axes.get_ylabel() for axes in (above, below)] == ["messages behind", "batch (ms)"]
    assert above.get_ylim()[0] == below.get_ylim()[0] == 0
