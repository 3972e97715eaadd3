"""How a LocalBroker ends: closed, forgotten, interrupted, killed; nothing may be left of it in any case."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from rocketmq_spark import Admin
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import LocalBroker, distribution
from rocketmq_spark.localbroker.cluster_servers import ClusterServers
from rocketmq_spark.localbroker.processes import DATA_FLAG
from tests.fix_clusters import WITHOUT_TIMERS
from tests.helpers import awaited
from tests.localbroker.processes import alive

_START = """
import json, sys, time
from rocketmq_spark.localbroker import LocalBroker
mq = LocalBroker(quiet=True, conf={'timerWheelEnable': False})
mq.start()
print(json.dumps({"data": str(mq.data), "pids": [mq.pid("namesrv"), mq.pid("broker-a")]}), flush=True)
"""
_WAIT = "sys.stdin.read()\n"


class Script:
    """A Python process with a LocalBroker in it, and what it told of that."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self) -> tuple[Path, list[int]]:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        told = json.loads(output.readline())
        return Path(told["data"]), told["pids"]


@pytest.fixture
def script() -> Iterator[Callable[[str], Script]]:
    on_started: list[Script] = []

    def start(code: str) -> Script:
        on_started.append(Script(code))
        return on_started[-1]

    yield start
    for one in on_started:
        one.process.kill()
        one.process.communicate()


def _recorded(data: Path) -> bool:
    """Whether a claim on ``data`` is on record; other processes of this user may have theirs beside."""
    return any(str(data) in _text(path) for path in (distribution.cache_folder() / "run").glob("*.json"))


def _gone(data: Path, pids: list[int]) -> bool:
    return not data.exists() and not any(map(alive, pids))


def test_closed() -> None:
    mq = LocalBroker(conf=WITHOUT_TIMERS)
    mq.start()
    data, pids = mq.data, [mq.pid(name) or 0 for name in ("namesrv", "broker-a")]
    assert _recorded(data)
    mq.close()
    assert _gone(data, pids)
    assert not _recorded(data)
    mq.close()


def test_started_again() -> None:
    mq = LocalBroker(conf=WITHOUT_TIMERS)
    for _ in range(2):
        with mq:
            mq.create_topic("t")
            assert len(mq.admin.route("t").readable_queues()) == 8


def test_an_exception_inside_the_block() -> None:
    mq = LocalBroker(conf=WITHOUT_TIMERS)
    seen = []

    def fail() -> None:
        with mq:
            seen.append((mq.data, [mq.pid("namesrv") or 0, mq.pid("broker-a") or 0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _gone(*seen[0])


def test_data_can_be_kept() -> None:
    with LocalBroker(keep=True, conf=WITHOUT_TIMERS) as mq:
        data, pids = mq.data, [mq.pid("namesrv") or 0]
        mq.kill("broker-a")
    assert not any(map(alive, pids))
    assert (data / "broker-a" / "store").is_dir()
    shutil.rmtree(data)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LocalBrokerError, match="broker-a ran out of memory"):
        LocalBroker(heap_mb=8, data=tmp_path).start()
    assert not _recorded(tmp_path)
    assert not _marked(tmp_path)


def test_an_interrupted_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may go on, as in a notebook."""
    start, seen = ClusterServers.bring_up_all, []

    def interrupted(members: ClusterServers, *arguments: Any) -> None:
        start(members, *arguments)
        seen.extend(_marked(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterServers, "bring_up_all", interrupted)
    mq = LocalBroker(data=tmp_path, conf=WITHOUT_TIMERS)
    with pytest.raises(KeyboardInterrupt):
        mq.start()
    assert seen
    assert not mq.running
    assert not _marked(tmp_path)
    assert not _recorded(tmp_path)


def _marked(data: Path) -> list[Path]:
    """Processes of a cluster with this folder."""
    return [p for p in Path("/proc").glob("[0-9]*/cmdline") if f"{DATA_FLAG}{data}" in _text(p)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_fork_does_not_close_its_parents_broker() -> None:
    with LocalBroker(conf=WITHOUT_TIMERS) as mq:
        _in_a_fork(mq.close)
        mq.create_topic("t")
        _in_a_fork(lambda: _refused_in_a_fork(mq))
        assert mq.pid("broker-a")


def test_a_fork_that_starts_it_ends_it() -> None:
    mq = LocalBroker(conf=WITHOUT_TIMERS)

    def run() -> None:
        with mq:
            data, pid = mq.data, mq.pid("broker-a")
        assert pid is not None
        assert not alive(pid)
        assert not data.exists()

    _in_a_fork(run)


def _in_a_fork(run: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - the parent sees the exit code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _refused_in_a_fork(mq: LocalBroker) -> None:
    """It took the servers for dead: ``kill`` killed none, and ``create_topic`` waited for threads that a fork has not."""
    for ask in (
        lambda: mq.pid("broker-a"),
        lambda: mq.kill("broker-a"),
        lambda: mq.stop("broker-a"),
        lambda: mq.restart("broker-a"),
        lambda: mq.add_broker(),
        lambda: mq.create_topic("t"),
        lambda: mq.admin,
    ):
        with pytest.raises(LocalBrokerError, match=r"belongs to process .*, from which this one was forked"):
            ask()
    with Admin(mq.name_server) as admin:
        assert admin.topics() == ["t"]


def test_python_ends_without_closing(script: Callable[[str], Script]) -> None:
    one = script(_START)
    data, pids = one.told()
    _, errors = one.process.communicate(timeout=180)
    assert one.process.returncode == 0
    assert errors == ""
    assert _gone(data, pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_python_is_killed(script: Callable[[str], Script], number: signal.Signals) -> None:
    one = script(_START + _WAIT)
    data, pids = one.told()
    one.process.send_signal(number)
    one.process.wait()
    awaited(lambda: not any(map(alive, pids)))
    with LocalBroker(conf=WITHOUT_TIMERS):  # any later start, of anybody with this cache
        assert not data.exists()
    assert not _recorded(data)


def test_ctrl_c(script: Callable[[str], Script]) -> None:
    """It looks around now and then: a signal just before a system call that waits is not handled before that call returns."""
    one = script(
        f"{_START.replace('mq.start()', 'mq.__enter__()')}import select\n"
        "try:\n    while not select.select([sys.stdin], [], [], 0.5)[0]: pass\nfinally: mq.close()\n"
    )
    data, pids = one.told()
    one.process.send_signal(signal.SIGINT)
    _, errors = one.process.communicate(timeout=180)
    assert "KeyboardInterrupt" in errors
    assert _gone(data, pids)


def test_ctrl_c_while_starting(script: Callable[[str], Script], tmp_path: Path) -> None:
    one = script(f"from rocketmq_spark.localbroker import LocalBroker\nLocalBroker(data={str(tmp_path)!r}).start()")
    awaited(lambda: (tmp_path / "namesrv" / "out.txt").exists())
    one.process.send_signal(signal.SIGINT)
    _, errors = one.process.communicate(timeout=180)
    assert "KeyboardInterrupt" in errors
    assert not _marked(tmp_path)


def test_two_at_once_do_not_meet(script: Callable[[str], Script]) -> None:
    on_started = [script(_START + _WAIT) for _ in range(2)]
    told = [one.told() for one in on_started]
    assert told[0][0] != told[1][0]
    assert all(alive(pid) for _, pids in told for pid in pids)


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalBrokerError, match=r"Java 17 or newer is needed, and there is none"):
        LocalBroker(conf=WITHOUT_TIMERS).start()
