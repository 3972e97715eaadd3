"""How the process of a stream ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import process


@pytest.mark.parametrize(
    ("name", "quiet"),
    [(process._RUNNER_MODULE, True), ("pyspark.daemon", False), (None, False)],
    ids=["runner", "worker", "script"],
)
def test_only_runner_suppresses_broken_pipe_errors(monkeypatch, capsys, name, quiet):
    spec = SimpleNamespace(name=name) if name else None
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    process.suppress_broken_pipes()
    for error in (BrokenPipeError(32, "Broken pipe"), ConnectionResetError(), ValueError("still told")):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert "still told" in said
    assert ("BrokenPipeError" not in said and "ConnectionResetError" not in said) is quiet


@pytest.mark.parametrize(("name", "frozen"), [(process._RUNNER_MODULE, True), ("pyspark.daemon", False)])
def test_only_runner_freezes_imported_objects(monkeypatch, name, frozen):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=SimpleNamespace(name=name)))
    calls = []
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append(name))
    monkeypatch.setattr(process.gc, "set_threshold", lambda *numbers: None)  # it is this process's own
    process.tune_gc_of_runner()
    assert bool(calls) is frozen


def test_tune_gc_freezes_loaded_objects_and_collects_rarely(monkeypatch):
    calls = []
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(process.gc, "set_threshold", lambda *numbers: calls.append(numbers))
    process.tune_gc()
    assert calls == ["freeze", process.GC_THRESHOLDS]
