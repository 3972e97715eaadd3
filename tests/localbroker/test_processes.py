"""A server process: ends with its parent, however that ends; a failed start is one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.java import Archive, find_java
from rocketmq_spark.localbroker.processes import Program, Server, spawn, start_error
from tests.helpers import awaited
from tests.localbroker.processes import alive

_PARENT = """
import pathlib, sys
from rocketmq_spark.localbroker.processes import spawn
child = spawn(["/bin/sh", "-c", "trap '' TERM; echo begun; exec sleep 600"], pathlib.Path(sys.argv[1]))
print(child.pid, flush=True)
sys.stdin.read()
"""


def _program(home: Path, main: str = "no.such.Main", arguments: tuple[str, ...] = ()) -> Program:
    return Program("broker-a", home, (20_000, 19_998, 20_001), main, arguments, (), 32)


def _server(home: Path, main: str, *arguments: str) -> Server:
    return Server(_program(home, main, arguments), find_java(), Archive(home, find_java(), ()), home)


@pytest.mark.parametrize("how", ["the kernel", "a watcher"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(tmp_path: Path, how: str, number: signal.Signals) -> None:
    env = {**os.environ, **({"ROCKETMQ_SPARK_GUARD_WATCHES": "1"} if how == "a watcher" else {})}
    log = tmp_path / "log"
    command = [sys.executable, "-c", _PARENT, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        awaited(lambda: "begun" in log.read_text())  # before that, it would end by itself
        assert alive(child)
        parent.send_signal(number)
    try:
        awaited(lambda: not alive(child), seconds=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def test_a_child_that_starts_during_ctrl_c_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process goes on after it."""
    real, main = subprocess.Popen, threading.main_thread().ident
    assert main is not None

    def interrupted(*args: Any, **how: Any) -> subprocess.Popen[bytes]:
        signal.pthread_kill(main, signal.SIGINT)
        return real(*args, **how)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    known: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyboardInterrupt):
        spawn(["/bin/sleep", "60"], tmp_path / "log", on_started=known.append)
    (child,) = known
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_watched_child_hears_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_GUARD_WATCHES", "1")
    script = "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
    with spawn(["/bin/sh", "-c", script], tmp_path / "log") as child:
        awaited(lambda: "ready" in (tmp_path / "log").read_text())
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait(60) == 3
    assert "asked" in (tmp_path / "log").read_text()


def test_a_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    children: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: children.append(spawn(["/bin/sleep", "60"], tmp_path / "log")))
    thread.start()
    thread.join()
    with children[0] as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.kill()


def test_ctrl_c_of_the_terminal_does_not_reach_a_child(tmp_path: Path) -> None:
    with spawn(["/bin/sleep", "60"], tmp_path / "log") as child:
        assert os.getpgid(child.pid) != os.getpgid(0)
        child.kill()


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        spawn(["/bin/true"], tmp_path / "missing" / "log")


def test_a_command_that_cannot_be_started_holds_up_no_other(tmp_path: Path) -> None:
    asked = ThreadPoolExecutor(1).submit(spawn, ["/bin/true", "a\0b"], tmp_path / "log")
    with pytest.raises(ValueError, match="null byte"):
        asked.result(30)
    assert spawn(["/bin/true"], tmp_path / "log").wait() == 0


def test_a_server_that_ends_tells_its_last_words(tmp_path: Path) -> None:
    server = _server(tmp_path, "no.such.Main")
    server.start()
    with pytest.raises(
        LocalBrokerError, match=r"broker-a ended while starting; the end of its output: \n(.*\n)*.*no\.such\.Main"
    ):
        server.wait_until(lambda: False, Deadline.after(30))
    assert server.pid is None
    server.kill()


def test_a_server_that_is_late(tmp_path: Path) -> None:
    server = _server(tmp_path, "no.such.Main")
    server._child = spawn(["/bin/sleep", "60"], tmp_path / "out.txt")
    with pytest.raises(LocalBrokerError, match="broker-a was not ready in time"):
        server.wait_until(lambda: False, Deadline.after(0.05))
    assert server.pid is not None
    server.kill()
    assert server.pid is None


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    server = _server(tmp_path, "no.such.Main")
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    server._child = spawn(["/bin/sh", "-c", script], tmp_path / "out.txt")
    awaited(lambda: "ready" in server.log())
    server.ask_to_stop()
    server.wait_stopped(Deadline.after(0.3))
    assert server.pid is None


def test_only_this_start_counts(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("boot success\n")
    server = _server(tmp_path, "no.such.Main")
    server.start()
    assert "boot success" not in server.output_since_start()
    assert "boot success" in server.log()
    server.kill()


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        (
            "java.net.BindException: Address already in use",
            "broker-a cannot listen: port 20000 or 19998 or 20001 is in use. "
            "Stop what uses it, choose another (ports=, or --port of broker start), or name none: a free one is found",
        ),
        (
            "java.io.IOException: No space left on device\n\tat x",
            "broker-a could not write to {home}: No space left on device. "
            "Free some space, or choose another folder (data=)",
        ),
        (
            "java.io.FileNotFoundException: /x (Read-only file system)",
            "broker-a could not write to {home}: Read-only file system. "
            "Free some space, or choose another folder (data=)",
        ),
        (
            "java.lang.RuntimeException: Lock failed,MQ already started",
            "broker-a is already running on {home}. Stop it, or choose another folder (data=)",
        ),
        (
            "java.lang.OutOfMemoryError: Java heap space",
            "broker-a ran out of memory. Raise heap_mb=, or close other programs",
        ),
        (
            "Error occurred during initialization of VM\nCould not reserve enough space for object heap",
            "broker-a ran out of memory. Raise heap_mb=, or close other programs",
        ),
    ],
)
def test_known_causes_are_one_sentence(tmp_path: Path, printed: str, sentence: str) -> None:
    error = start_error(_program(tmp_path), "ended while starting", printed, "")
    assert str(error) == "[ROCKETMQ_LOCAL_BROKER] " + sentence.format(home=tmp_path)
    assert str(start_error(_program(tmp_path), "ended while starting", "", printed)) == str(error)


def test_a_child_does_not_get_the_keys_of_who_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "hush")
    monkeypatch.setenv("ROCKETMQ_NEW_PASSWORD", "hush")
    monkeypatch.setenv("ROCKETMQ_OTHER", "kept")
    log = tmp_path / "log"
    spawn(
        [sys.executable, "-c", "import os; print(sorted(name for name in os.environ if 'ROCKETMQ_' in name))"], log
    ).wait(60)
    names = log.read_text("utf-8")
    assert "ROCKETMQ_OTHER" in names
    assert "ROCKETMQ_SECRET_KEY" not in names
    assert "ROCKETMQ_NEW_PASSWORD" not in names
