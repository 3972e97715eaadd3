"""The parts that need no running broker; with one: test_broker."""

import dataclasses
import fcntl
import json
import os
import signal

import pytest

from rocketmq_spark.cli import background
from rocketmq_spark.cli.background import RunningBroker, Wish
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.servers import NAME_SERVER

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
    assert background.running() is None
    with pytest.raises(LocalBrokerError, match=r"No local broker is running\. Start one with: rocketmq-spark broker"):
        background.stop()


def test_a_state_without_a_living_process_is_old(folder):
    write_state(folder)
    (folder / "lock").touch()
    assert background.running() is None


def test_the_state_of_a_living_process(held):
    write_state(held)
    assert background.running() == STATE
    assert not STATE.up(NAME_SERVER)


def test_a_process_that_is_still_starting_is_not_running_yet(held):
    assert background.running() is None
    with pytest.raises(LocalBrokerError, match="running already, and just starts or ends"):
        background.start(Wish(1, 0, str(held / "data"), {}, None))


def test_one_that_was_started_during_the_download_keeps_its_state(folder, monkeypatch):
    """Without it no command would find the broker, nor ``broker stop``."""
    with (folder / "lock").open("w") as lock:

        def fetch():
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_state(folder)

        monkeypatch.setattr(background.distro, "fetch", fetch)
        with pytest.raises(LocalBrokerError, match="running already: 127"):
            background.start(Wish(1, 0, str(folder / "data"), {}, None))
        assert background.running() == STATE


def test_stop_gives_up_on_a_process_that_does_not_end(held, monkeypatch):
    write_state(held)
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with pytest.raises(LocalBrokerError, match=r"did not end within 0\.1 s\. End it with: kill -9 1"):
        background.stop(timeout_s=0.1)
    assert sent == [(1, signal.SIGTERM)]
