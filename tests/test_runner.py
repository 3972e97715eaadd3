"""How the process of a stream ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import process


@pytest.mark.parametrize(
    ("name", "quiet"),
    [(process._RUNNER, True), ("pyspark.daemon", False), (None, False)],
    ids=["runner", "worker", "script"],
)
def test_11_24_only_a_runner_stops_telling_that_nobody_listens(monkeypatch, capsys, name, quiet):
    spec = SimpleNamespace(name=name) if name else None
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    process.suppress_broken_pipes()
    for error in (BrokenPipeError(32, "Broken pipe"), ConnectionResetError(), ValueError("still told")):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert "still told" in said
    assert ("BrokenPipeError" not in said and "ConnectionResetError" not in said) is quiet


@pytest.mark.parametrize(("name", "frozen"), [(process._RUNNER, True), ("pyspark.daemon", False)])
def test_12_7_only_a_runner_freezes_what_was_imported(monkeypatch, name, frozen):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=name)))
    calls = []
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append(name))
    monkeypatch.setattr(process.gc, "set_threshold", lambda *numbers: None)  # it is this process's own
    process.tune_gc_of_runner()
    assert bool(calls) is frozen


def test_a_process_of_one_work_collects_seldom_and_not_what_it_loaded(monkeypatch):
    calls = []
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(process.gc, "set_threshold", lambda *numbers: calls.append(numbers))
    process.tune_gc()
    assert calls == ["freeze", process.GC_THRESHOLDS]
