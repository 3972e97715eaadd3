import dataclasses
import io
import json
import sys

import pytest
from rich.console import Console

from rocketmq_spark.cli.demo.view import _batches, _LineView, _picture, _PictureView, view
from rocketmq_spark.cli.demo.watch import DemoState
from rocketmq_spark.cli.output import Json, Text

STATE = DemoState(
    phase="writing orders", elapsed_s=12.34, sent=6000, read=5800, totals_seen=10, orders_in_totals=2500,
    lag={"broker-a/0": 120, "broker-a/1": 80}, batch_ms=[4000, 300, 600], window="2026-01-31T12:00:05.000Z",
    window_totals={"asia": (500, "1,234.50"), "africa": (480, "999.00")},
)  # fmt: skip


def test_one_plain_line(capsys):
    _LineView(Text()).show(STATE)
    assert capsys.readouterr().out == (
        "  12 s  writing orders: 6000 orders in, 5800 read, 10 totals out, batch 600 ms, "
        "lag broker-a/0:120 broker-a/1:80\n"
    )


def test_nothing_is_said_twice_and_each_event_once(capsys):
    lines = _LineView(Text())
    lines.show(STATE)
    capsys.readouterr()
    lines.show(dataclasses.replace(STATE, elapsed_s=17.0))
    assert capsys.readouterr().out == ""
    later = dataclasses.replace(STATE, sent=6001, events=["kill -9 of Spark's driver"])
    lines.show(later)
    lines.show(later)
    out = capsys.readouterr().out.splitlines()
    assert (len(out), out[0], out[1][:6]) == (2, "kill -9 of Spark's driver", "  12 s")


def test_before_the_first_batch(capsys):
    _LineView(Text()).show(DemoState())
    assert "batch -, lag -" in capsys.readouterr().out
    assert _batches([]) == "batches: none yet"


def test_json(capsys):
    _LineView(Json()).show(STATE)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "event": "progress", "phase": "writing orders", "elapsedSeconds": 12.3, "ordersWritten": 6000,
        "ordersRead": 5800, "totalsOut": 10, "ordersInTotals": 2500,
        "lag": {"broker-a/0": 120, "broker-a/1": 80}, "batches": 3, "lastBatchMs": 600,
    }  # fmt: skip


def test_the_picture_shows_counts_lag_totals_and_batches():
    console = Console(file=io.StringIO(), width=120)
    console.print(_picture("demo", dataclasses.replace(STATE, events=["kill -9 of the driver"])))
    text = console.file.getvalue()
    for part in (
        "12 s",
        "6,000",
        "broker-a/1",
        "12:00:05",
        "1,234.50",
        "last 600 ms  ▂▃  (longest 4000 ms",
        "kill -9 of the driver",
    ):
        assert part in text


@pytest.mark.parametrize(("name", "encoding"), [("dumb", "utf-8"), ("xterm", "latin-1"), ("xterm", None)])
def test_lines_are_for_terminals_that_cannot_show_the_picture(monkeypatch, name, encoding):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding is not None else None
    if output is not None:
        monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("TERM", name)
    with view(Text(), 1, 1) as shown:
        assert isinstance(shown, _LineView)


def test_the_picture_is_for_terminals_only(monkeypatch):
    with view(Text(), 1, 1) as shown:
        assert isinstance(shown, _LineView)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with view(Json(), 1, 1) as shown:
        assert isinstance(shown, _LineView)
    with view(Text(), 1, 1) as shown:
        assert isinstance(shown, _PictureView)
        shown.show(STATE)
