"""The command: lines, JSON and exit codes. On brokers with faults: test_examine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import cast

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark.admin.groups import QueuePositions
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor import command
from rocketmq_spark.cli.doctor.command import Subject, finding_lines
from rocketmq_spark.cli.doctor.findings import advice_finding, broken_finding, ok_finding
from rocketmq_spark.client import topic_readers
from rocketmq_spark.errors import AccessDenied, CallTimeout, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.session import Client
from tests.cli.conftest import documents
from tests.helpers import awaited


@pytest.fixture(autouse=True)
def _workers_run_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)


def test_a_healthy_cluster(run: Callable[..., Result], topic: str) -> None:
    done = awaited(lambda: run("doctor", "--topic", topic, "--json"), lambda done: "its disk" in done.stdout)
    found = [(row["check"], row["level"]) for row in documents(done.stdout)]
    assert (done.exit_code, "broken" in {level for _, level in found}) == (0, False), done.stdout
    checks = list(dict.fromkeys(check for check, _ in found))
    assert checks == [
        "java", "python", "workers", "name server", "brokers", "broker broker-a", f"topic {topic}", "rights source",
        "rights sink",
    ]  # fmt: skip
    assert all(row["remedy"] for row in documents(done.stdout) if row["level"] != "ok")
    assert run("doctor", "--strict").exit_code == 1, "LocalBroker has the limits of a stock broker"
    text = run("doctor")
    assert re.fullmatch(r"0 broken, \d+ with advice, \d+ ok\n", text.stderr)
    assert len(text.stdout.splitlines()) == len(documents(run("doctor", "--json").stdout))


def test_the_rights_to_write_are_looked_at_without_a_trace(
    run: Callable[..., Result], rocketmq: LocalBroker, topic: str
) -> None:
    assert "ok      rights sink: a user without accessKey may write" in run("doctor", "--topic", topic).stdout
    assert {bounds.max_offset for bounds in rocketmq.admin.describe_topic(topic).values()} == {0}


def test_the_name_server_may_be_an_argument(rocketmq: LocalBroker, no_broker: object) -> None:
    done = CliRunner().invoke(app, ["doctor", rocketmq.name_server])
    assert (done.exit_code, f"name server: {rocketmq.name_server} answers" in done.stdout) == (0, True)
    nowhere = CliRunner().invoke(app, ["doctor"])
    assert (nowhere.exit_code, "broken  options: no name server is given" in nowhere.stdout) == (1, True)
    assert CliRunner().invoke(app, ["doctor", "a", "b"]).exit_code == 2


def test_what_is_given_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(command, "examine", lambda target, subject: asked.append((target.given_options, subject)) or [])
    given = [
        "--topic",
        "t",
        "--topic",
        "u",
        "--group",
        "g",
        "--checkpoint",
        "c",
        "--exactly-once",
        "--proxy-endpoint",
        "p:1",
    ]
    done = CliRunner(env={"ROCKETMQ_NAMESRV": "h:1"}).invoke(app, ["doctor", "h:2", *given])
    assert done.exit_code == 0, done.output
    assert asked == [({"name_server": "h:2", "proxy_endpoint": "p:1"}, Subject(("t", "u"), "g", "c", True))]
    asked.clear()
    assert CliRunner().invoke(app, ["doctor", "h:2", "--exactly-once"]).exit_code == 2
    assert asked == []


@pytest.mark.parametrize(
    ("found", "strict", "code"),
    [("broken ok", 0, 1), ("ok broken advice", 0, 1), ("advice ok", 0, 0), ("advice ok", 1, 1), ("ok", 1, 0)],
)
def test_the_exit_code_is_that_of_all_findings(
    monkeypatch: pytest.MonkeyPatch, found: str, strict: int, code: int
) -> None:
    kinds = {
        "ok": ok_finding("a", "fine"),
        "broken": broken_finding("b", "bad", "do"),
        "advice": advice_finding("c", "so so", "do"),
    }
    monkeypatch.setattr(command, "examine", lambda target, subject: [kinds[word] for word in found.split()])
    done = CliRunner().invoke(app, ["doctor", "h:1", *["--strict"] * strict])
    assert (done.exit_code, len(done.stdout.splitlines())) == (code, len(found.split())), done.output


def test_every_topic_is_examined_and_the_group_in_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of several name servers answers."""
    asked: list[object] = []
    well, bad = ok_finding("name server", "h:1 answers"), broken_finding("name server", "h:2 cannot be used", "do")
    monkeypatch.setattr(command, "check_name_servers", lambda *given: [(bad, False), (well, True)])
    monkeypatch.setattr(command, "check_brokers", lambda *given: [])
    monkeypatch.setattr(command, "check_topic", lambda client, options, *given: asked.append(given) or [])
    monkeypatch.setattr(topic_readers, "member_subscriptions", lambda *given: {})
    monkeypatch.setattr(command, "committed_offsets", lambda client, *given: asked.append(given) or {})
    monkeypatch.setattr(command, "queue_lags", lambda *given: QueuePositions([]))
    found = list(command.check_cluster(Target({"name_server": "h:2;h:1"}), Subject(("t", "u"), "g")))
    assert asked == [("t", "g"), ("u", "g"), ("g", ("t", "u"))]
    assert found[:2] == [bad, well]


@pytest.mark.parametrize(
    ("error", "usable"), [(None, True), (AccessDenied("no"), True), (CallTimeout("no answer in time"), False)]
)
def test_who_may_not_list_brokers_has_the_rest_examined(
    monkeypatch: pytest.MonkeyPatch, error: RocketMQError | None, usable: bool
) -> None:
    monkeypatch.setattr(command, "_request_error", lambda *given: error)
    options = Target({"name_server": "h:1"}).options()
    assert [may for _, may in command.check_name_servers(cast("Client", None), options)] == [usable]


def test_of_an_environment_its_own_group_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(command, "_check_group", lambda client, *given: asked.append(given) or [])
    target, client = Target({"name_server": "h:1", "environment": "2", "environments": "2"}), cast("Client", None)
    assert list(command.check_readers(target, client, Subject(("t",), "g"))) == []
    assert asked == [("g_env_2", ("t",))]


@pytest.mark.parametrize("width", [40, 80])
def test_lines_of_a_terminal_are_not_cut(width: int) -> None:
    finding = broken_finding(
        "broker a", "advertises 172.17.0.2:10911, which cannot be reached from here", "Let it " * 30
    )
    told = finding_lines(finding, width)
    assert len(told) > 1
    assert all(0 < len(line) <= width for line in told)
    assert [line[:8].strip() for line in told] == ["broken", *[""] * (len(told) - 1)]
    assert finding_lines(ok_finding("a", "fine"), None) == ["ok      a: fine"]
