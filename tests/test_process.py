"""What a process keeps, and that a forked one begins with nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.base import process


@pytest.fixture(autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.node.name
    process.entries(request.node.name).clear()


def test_a_thing_is_made_once(kind: str) -> None:
    made = [process.get_or_create(kind, "a", object) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    assert process.get_or_create(kind, "b", object) is not made[0]
    assert process.get_or_create(f"other {kind}", "a", object) is not made[0]
    process.entries(kind).pop("a")
    assert process.get_or_create(kind, "a", object) is not made[0]


def test_a_thing_may_need_another_one(kind: str) -> None:
    outer = process.get_or_create(kind, "outer", lambda: [process.get_or_create(kind, "inner", object)])
    assert outer == [process.entries(kind)["inner"]]


def test_what_cannot_be_made_is_not_kept(kind: str) -> None:
    with pytest.raises(ZeroDivisionError):
        process.get_or_create(kind, "a", lambda: 1 // 0)
    assert process.entries(kind) == {}


def test_several_threads_have_one(kind: str) -> None:
    barrier, found = threading.Barrier(8), list[object]()

    def ask() -> None:
        barrier.wait()
        found.append(process.get_or_create(kind, "a", object))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_only_those_wait_who_want_what_is_being_made(kind: str) -> None:
    """A server that somebody's options name may be asked for it, and never answer."""
    begun, answered, found = threading.Event(), threading.Event(), list[object]()

    def make() -> object:
        begun.set()
        assert answered.wait(60)
        return object()

    threads = [
        threading.Thread(target=lambda: found.append(process.get_or_create(kind, "slow", make))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    done = threading.Event()

    def others() -> None:
        process.get_or_create(kind, "other", object)
        process.get_or_create(f"other {kind}", "slow", object)
        process.entries(kind)
        with process.registry_lock():
            done.set()

    beside = threading.Thread(target=others, daemon=True)
    beside.start()
    assert done.wait(20)
    assert found == []
    answered.set()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(map(id, found))) == 1
    assert not process._registry.entry_locks  # the locks are forgotten


def test_after_a_failure_the_next_one_that_waits_makes_it(kind: str) -> None:
    attempts, waits = [], threading.Event()

    def make() -> str:
        attempts.append(threading.current_thread())
        begun.set()
        if len(attempts) == 1:
            assert waits.wait(60)
            raise ZeroDivisionError
        return "made"

    begun = threading.Event()

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            process.get_or_create(kind, "a", make)

    first = threading.Thread(target=fail)
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=process.get_or_create, args=(kind, "a", make))
    second.start()
    waits.set()
    first.join()
    second.join()
    assert attempts == [first, second]
    assert process.entries(kind) == {"a": "made"}


def test_forked_process_makes_new_objects_even_if_lock_was_held(kind: str) -> None:
    mine = process.get_or_create(kind, "a", object)
    held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with process.registry_lock():
            held.set()
            may_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        theirs = process.get_or_create(kind, "a", object)
        os._exit(0 if theirs is not mine and process._registry.inherited_registry is not None else 1)
    may_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.get_or_create(kind, "a", object) is mine


def test_everything_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_registry", process._Registry())
    one = process.get_or_create("x", "a", object)
    process.entries("y")["b"] = 1
    assert process.clear_registry() == {"x": {"a": one}, "y": {"b": 1}}
    assert process.clear_registry() == {"x": {}, "y": {}}
    assert process.get_or_create("x", "a", object) is not one


def test_collections_are_rare_in_the_runner_of_a_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "set_threshold", lambda *numbers: calls.append(numbers))
    process.tune_gc_of_runner()
    assert calls == []
    monkeypatch.setattr(process, "_main_module", lambda: process._RUNNER_MODULE)
    process.tune_gc_of_runner()
    assert calls == ["freeze", process.GC_THRESHOLDS]


PLANTED = "open({marker!r}, 'w').close()"


@pytest.mark.parametrize("paths", ["", ":", ".", "theirs", ":/x", "/x:"])
def test_another_python_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str
) -> None:
    """Other users may write there. An empty part of PYTHONPATH is the current folder."""
    for folder in (tmp_path, tmp_path / "theirs"):
        folder.mkdir(exist_ok=True)
        for name in ("planted", "sitecustomize"):
            (folder / f"{name}.py").write_text(PLANTED.format(marker=str(tmp_path / "marker")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", paths)
    tried = "try:\n import planted\nexcept ModuleNotFoundError:\n print('safe')"
    done = subprocess.run(**process.python_call("-c", tried), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "safe\n", done.stderr
    assert not (tmp_path / "marker").exists()


def test_another_python_keeps_whole_paths_and_its_own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/b:c::/d")
    call = process.python_call("-m", "x", program="bin/python", first_import_folders=["/a"])
    assert call["args"] == [str(tmp_path / "bin" / "python"), "-m", "x"]
    assert (call["env"]["PYTHONPATH"], call["cwd"]) == ("/a:/b:/d", "/")
    monkeypatch.setenv("PYTHONPATH", ":")
    assert "PYTHONPATH" not in process.python_call()["env"]


def test_live_objects_are_known_until_collected_but_not_in_child() -> None:
    class Thing:
        pass

    living: process.LiveObjects[Thing] = process.LiveObjects(10.0)
    one, other = living.add(Thing()), living.add(Thing())
    assert set(living.due(100.0)) == {one, other}
    assert living.due(109.0) == []
    del other
    gc.collect()
    assert living.due(110.0) == [one]
    if (child := os.fork()) == 0:
        os._exit(len(living.all()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert living.all() == [one]
