"""The parts that need no running broker; with one: test_broker."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import signal
import stat
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli import background
from rocketmq_spark.cli.background import RunningBroker, StartRequest
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.servers import NAME_SERVER
from tests.helpers import awaited, frames_of_threads, raising
from tests.users import give_away

STATE = RunningBroker(1, "127.0.0.1:9876", "/data", 5, {NAME_SERVER: ("127.0.0.1:1", 2)})


@pytest.fixture
def folder(no_broker):
    found = no_broker / "background"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def held(folder):
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def write_state(folder):
    (folder / "state.json").write_text(json.dumps(dataclasses.asdict(STATE)))


def test_nothing_runs_without_a_lock(no_broker):
    assert background.running_broker() is None
    with pytest.raises(LocalBrokerError, match=r"No local broker is running\. Start one with: rocketmq-spark broker"):
        background.stop()


def test_a_lock_of_another_user_is_no_running_broker(folder, monkeypatch):
    write_state(folder)
    monkeypatch.setattr("rocketmq_spark.base.folders.open_private", raising(PermissionError(13, "Permission denied")))
    assert background.running_broker() is None


def test_a_state_without_a_living_process_is_old(folder):
    write_state(folder)
    (folder / "lock").touch()
    assert background.running_broker() is None


def test_the_state_of_a_living_process(held):
    write_state(held)
    assert background.running_broker() == STATE
    assert not STATE.is_up(NAME_SERVER)


@pytest.mark.parametrize("name", ["lock", "state.json", "log.txt"])
def test_files_that_another_user_left_are_not_used(folder, name, monkeypatch):
    (folder / name).touch()
    monkeypatch.setattr(background.distribution, "cache_folder", lambda: folder.parent)
    give_away(monkeypatch, folder / name)
    with pytest.raises(LocalBrokerError, match=rf"does not use files of another user: .*{name}.*\. Remove "):
        (background.running_broker(), background._state_path(), background.log_path())


@pytest.fixture
def any_mode():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("any_mode")
def test_lock_and_state_are_private_whatever_the_umask_is(folder):
    for made in (folder, folder.parent):
        made.chmod(0o755)  # a cache to which others may write is refused
    (folder / "lock").touch(0o666)  # of an older version
    mq = SimpleNamespace(name_server="x:1", brokers=[], slaves=[], data="/d", address=lambda _: "x:1", pid=lambda _: 1)
    with background._lock():
        background._write_state(mq, [])
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
            "lock": 0o600,
            "state.json": 0o600,
        }


def test_a_state_that_others_may_write_is_not_believed(held):
    """Commands would connect, with their keys, where others want."""
    write_state(held)
    (held / "state.json").chmod(0o666)
    with pytest.raises(
        LocalBrokerError, match=r"Others may write to .*state\.json\. Stop the local broker, and remove"
    ):
        background.running_broker()


def test_nothing_starts_beside_files_of_another_user(folder, monkeypatch):
    """Of a time when others could write to the folder."""
    for unused in ("find_java", "_ports"):
        monkeypatch.setattr(background, unused, lambda *_: {})
    monkeypatch.setattr(background.distribution, "fetch", lambda: None)
    (folder / "data").mkdir()
    (folder / "fcntl.py").touch()
    give_away(monkeypatch, folder / "fcntl.py")
    monkeypatch.setattr(background.distribution, "cache_folder", lambda: folder.parent)
    monkeypatch.setattr(background, "_spawn", raising(AssertionError("started")))
    with pytest.raises(LocalBrokerError, match=r"files of another user: .*Remove .*"):
        background.start(StartRequest(1, 0, str(folder / "data"), {}, None))


def test_a_process_that_is_still_starting_is_not_running_yet(held):
    assert background.running_broker() is None
    with pytest.raises(LocalBrokerError, match="running already and is starting or stopping"):
        background.start(StartRequest(1, 0, str(held / "data"), {}, None))


def test_a_broker_started_during_the_download_keeps_its_state(folder, monkeypatch):
    """Without it no command would find the broker, nor ``broker stop``."""
    with (folder / "lock").open("w") as lock:

        def fetch():
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_state(folder)

        monkeypatch.setattr(background.distribution, "fetch", fetch)
        with pytest.raises(LocalBrokerError, match="running already: 127"):
            background.start(StartRequest(1, 0, str(folder / "data"), {}, None))
        assert background.running_broker() == STATE


def test_stop_gives_up_on_a_process_that_does_not_end(held, monkeypatch):
    write_state(held)
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with pytest.raises(LocalBrokerError, match=r"did not end within 0\.1 s\. End it with: kill -9 1"):
        background.stop(timeout_s=0.1)
    assert sent == [(1, signal.SIGTERM)]


@pytest.fixture
def wishes(monkeypatch):
    """What is started, which nothing is."""
    asked = []

    def start(wish):
        asked.append(wish)
        return STATE

    monkeypatch.setattr(background, "start", start)
    return asked


def stored(data, *homes):
    for home in homes:
        (data / home).mkdir(parents=True)
        (data / home / "broker.conf").touch()
    return data


def broker(*arguments):
    return CliRunner().invoke(app, ["broker", *arguments])


def test_a_start_takes_every_broker_that_the_folder_has(no_broker, tmp_path, wishes):
    data = stored(tmp_path / "d", "broker-a", "broker-a-slave-1", "broker-b", "broker-b-slave-1", "namesrv")
    assert broker("start", "--data", str(data)).exit_code == 0
    assert broker("start", "--data", str(data), "--brokers", "3", "--slaves", "0").exit_code == 0
    assert broker("start", "--data", str(tmp_path / "new")).exit_code == 0
    assert broker("start").exit_code == 0
    assert [(wish.brokers, wish.slaves) for wish in wishes] == [(2, 1), (3, 0), (1, 0), (1, 0)]


def test_a_start_without_a_broker_of_the_folder_is_refused(no_broker, tmp_path, wishes):
    data = stored(tmp_path / "d", "broker-a", "broker-b", "broker-c")
    done = broker("start", "--data", str(data), "--brokers", "1")
    assert (done.exit_code, wishes) == (1, [])
    assert f"{data} has the data of 3 brokers: the queues of broker-b, broker-c would be missing" in done.stderr


@pytest.mark.parametrize(
    ("data", "conf", "command"),
    [
        ("default", [], "rocketmq-spark broker start"),
        ("/data two", ["a", "b"], "rocketmq-spark broker start --data '/data two', with the same --conf a, b"),
    ],
)
def test_a_server_that_is_down_is_started_again_as_it_was(no_broker, monkeypatch, data, conf, command):
    folder = str(background.default_data()) if data == "default" else data
    there = dataclasses.replace(STATE, data=folder, conf=conf)
    monkeypatch.setattr(background, "running_broker", lambda: there)
    done = broker("status")
    assert done.exit_code == 1
    assert done.stderr.endswith(
        f"rocketmq-spark broker logs namesrv; then: rocketmq-spark broker stop, and: {command}\n"
    )


def test_what_is_given_reaches_the_servers(no_broker, tmp_path, wishes, monkeypatch):
    given = ("--data", str(tmp_path), "--brokers", "2", "--slaves", "1", "--port", "9876", "--conf", "a=b=c")
    assert broker("start", *given).exit_code == 0
    assert wishes == [StartRequest(2, 1, str(tmp_path), {"a": "b=c"}, 9876)]
    made = []
    monkeypatch.setattr(background, "LocalBroker", lambda **how: made.append(how))
    background._servers(wishes[0])
    (how,) = made
    assert (how["brokers"], how["slaves"], how["data"]) == (2, 1, str(tmp_path))
    assert (how["conf"], how["ports"]) == ({"a": "b=c"}, {NAME_SERVER: 9876})


def test_a_folder_is_that_of_who_names_it(no_broker, tmp_path, wishes, monkeypatch):
    """The process in the background works in a folder of its own, where the same name may be other data."""
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "d", "broker-a", "broker-b")
    assert broker("start", "--data", "d").exit_code == 0
    assert [(wish.data, wish.brokers) for wish in wishes] == [(str(tmp_path / "d"), 2)]


def test_a_second_signal_does_not_interrupt_the_end(monkeypatch):
    """``broker stop`` takes a while, and who is impatient gives it again: servers would be left, or not end cleanly."""
    handlers = []
    monkeypatch.setattr(background.signal, "signal", lambda *given: handlers.append(given))
    with pytest.raises(SystemExit) as ended:
        background._exit_on_sigterm(signal.SIGTERM, None)
    assert (handlers, ended.value.code) == ([(signal.SIGTERM, signal.SIG_IGN)], 0)


def test_a_start_that_is_interrupted_leaves_no_process_behind(folder, monkeypatch):
    """It would go on to start its servers, and nobody would know of them."""
    done = []
    monkeypatch.setattr(
        background.subprocess,
        "Popen",
        lambda *given, **how: SimpleNamespace(
            stdin=io.BytesIO(), terminate=lambda: done.append("terminated"), wait=lambda: done.append("gone")
        ),
    )
    monkeypatch.setattr(background.json, "loads", raising(KeyboardInterrupt()))
    with (folder / "log").open("w") as log, pytest.raises(KeyboardInterrupt):
        background._spawn(StartRequest(1, 0, str(folder), {}, None), log)
    assert done == ["terminated", "gone"]


def test_the_process_has_the_commands_cache_wherever_it_runs(folder, monkeypatch):
    started = []

    def popen(**how):
        started.append(how)
        raise OSError("not started")

    monkeypatch.setattr(background.subprocess, "Popen", popen)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("ROCKETMQ_SPARK_CACHE", "relative")
    with (folder / "log").open("w") as log, pytest.raises(OSError, match="not started"):
        background._spawn(StartRequest(1, 0, str(folder), {}, None), log)
    assert started[0]["env"]["ROCKETMQ_SPARK_CACHE"] == str(folder.parent / "relative")
    assert started[0]["cwd"] == "/"


def test_it_ends_where_the_signal_does_not_wake_it(folder, monkeypatch):
    """It may come just before the process begins to wait for it: ``broker stop`` would give up after 40 s."""
    monkeypatch.setattr(background, "_servers", lambda wish: contextlib.nullcontext(wish))
    monkeypatch.setattr(background, "_write_state", lambda mq, conf: None)
    main, ended, hung = threading.get_ident(), threading.Event(), []

    def take():
        """Another thread takes the signal, and that interrupts no system call of the main thread."""
        awaited(lambda: frames_of_threads()[main].f_code in (background._run.__code__, Latch.wait.__code__))
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if not ended.wait(30):
            hung.append(True)
            signal.pthread_kill(main, signal.SIGTERM)

    # No file: those close themselves once more when they go, and the signal would end the tests.
    answers = SimpleNamespace(write=print, close=lambda: threading.Thread(target=take, daemon=True).start())
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            background._run(answers, StartRequest(1, 0, str(folder), {}, None))
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, before)
    assert not hung
