import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli import background
from rocketmq_spark.cli.command import app
from tests.cli.conftest import COMMAND, documents
from tests.helpers import awaited


@pytest.fixture
def cli(own_cache):
    """Commands with a cache of their own; a broker that was started in the background is killed at the end."""

    def invoke(*arguments, **kwargs):
        return CliRunner().invoke(app, arguments, **kwargs)

    yield invoke
    left = background.running_broker()
    if left is not None:
        os.kill(left.pid, signal.SIGKILL)


def test_a_life_in_the_background(cli, own_cache):
    (own_cache / "background").mkdir()
    (own_cache / "background" / "fcntl.py").write_text("raise SystemExit('Python files of the folder are imported')")
    (started,) = documents(cli("broker", "start", "--json").stdout)
    assert [server["name"] for server in started["servers"]] == ["namesrv", "broker-a"]
    assert started["data"] == str(own_cache / "background" / "data")

    # Commands find it by themselves, and it has no parent that waits for it.
    assert cli("topic", "create", "kept", "--queues", "1").exit_code == 0
    assert cli("produce", "kept", input="still here\n").exit_code == 0
    assert os.getpgid(started["pid"]) == started["pid"]

    again = cli("broker", "start")
    assert (again.exit_code, "running already: " + started["nameServer"] in again.stderr) == (1, True)
    (status,) = documents(cli("broker", "status", "--json").stdout)
    assert {server["name"]: server["up"] for server in status["servers"]} == {"namesrv": True, "broker-a": True}
    assert f"Name server  {started['nameServer']}" in cli("broker", "status").stdout
    assert "boot success" in cli("broker", "logs", "broker-a", "--lines", "0").stdout
    assert len(documents(cli("broker", "logs", "broker-a", "--lines", "3", "--json").stdout)) == 3
    unknown = cli("broker", "logs", "broker-b")
    assert (unknown.exit_code, "Name one of: namesrv, broker-a" in unknown.stderr) == (1, True)

    abort = Path(started["data"], "broker-a", "store", "abort")  # a broker removes it when it ends in order
    assert abort.exists()
    stopped = cli("broker", "stop")
    assert stopped.stdout == f"RocketMQ has stopped; its data stays in {started['data']}\n"
    assert stopped.stderr.startswith("Stopping RocketMQ, which may take")
    assert cli("broker", "status").exit_code == 1
    assert not abort.exists(), "killed, a broker loses the offsets that groups committed in the last seconds"

    # The data was kept, and so was the address.
    # A script reads it to its end: what runs in the background has none of its streams.
    script = subprocess.run(
        [*COMMAND, "broker", "start", "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    (second,) = documents(script.stdout)
    assert second["nameServer"] == started["nameServer"]
    tailed = awaited(lambda: cli("tail", "kept", "--no-follow").stdout, bool)
    assert tailed.endswith("still here\n")


def test_a_killed_process_leaves_nothing_that_disturbs(cli):
    (first,) = documents(cli("broker", "start", "--json").stdout)
    os.kill(first["pid"], signal.SIGKILL)
    awaited(background.running_broker, lambda found: found is None)
    assert cli("broker", "status", "--json").stdout == '{"running": false}\n'
    assert cli("broker", "start").exit_code == 0


def test_a_server_that_died_is_down(cli):
    (started,) = documents(cli("broker", "start", "--json").stdout)
    os.kill(next(s["pid"] for s in started["servers"] if s["name"] == "broker-a"), signal.SIGKILL)
    done = awaited(lambda: cli("broker", "status"), lambda done: "down" in done.stdout)
    assert [line.split()[-1] for line in done.stdout.splitlines()[-2:]] == ["up", "down"]
    assert (done.exit_code, "broker-a down. See: rocketmq-spark broker logs broker-a" in done.stderr) == (1, True)

    # The topics of a broker that is gone are not to be created by somebody else.
    said = "No broker is registered: start one"  # once the name server has noticed
    asked = awaited(lambda: cli("topic", "describe", "hello"), lambda asked: said in asked.stderr)
    assert asked.exit_code == 1


def test_a_failing_start_downloads_nothing_and_leaves_nothing(cli, monkeypatch):
    monkeypatch.setattr(background.distribution, "fetch", lambda: pytest.fail("fetched"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("broker", "start", "--port", str(port))
    assert done.exit_code == 1
    assert f"namesrv cannot listen: port {port} is in use. Stop what uses it" in done.stderr
    assert done.stderr.count("\n") == 1
    assert background.running_broker() is None


def test_settings_reach_the_broker(cli, tmp_path):
    data = tmp_path / "elsewhere"
    (started,) = documents(
        cli("broker", "start", "--json", "--brokers", "2", "--data", str(data), "--conf", "fileReservedTime=7").stdout
    )
    assert [server["name"] for server in started["servers"]] == ["namesrv", "broker-a", "broker-b"]
    assert "fileReservedTime=7" in (data / "broker-b" / "broker.conf").read_text().replace(" ", "")
    assert background.stored_brokers(data) == {"broker-a": 0, "broker-b": 0}
    assert background.running_broker().conf == ["fileReservedTime"]
    seen = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(started["pid"])], capture_output=True, text=True)
    assert "rocketmq_spark.cli.background" in seen.stdout
    assert "fileReservedTime" not in seen.stdout, "other users see it, and a setting may be a secret"


def test_without_java_the_first_line_says_how_to_get_it(cli, monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = cli("broker", "start")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Java 17 or newer is needed" in done.stderr
    assert "openjdk" in done.stderr


def test_nothing_to_stop_or_to_log(no_broker):
    for arguments in (["broker", "stop"], ["broker", "logs", "broker-a"]):
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, "Stopping" in done.stderr) == (1, False)
        assert "Start one with: rocketmq-spark broker start" in done.stderr
