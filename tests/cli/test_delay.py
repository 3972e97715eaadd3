"""``rocketmq-spark delay serve``: a process that is told to end, and wrong usage."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import Message, Producer
from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.cli import spool
from rocketmq_spark.cli.command import app
from rocketmq_spark.delay import node
from rocketmq_spark.delay.node import NodeSettings
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.cli.conftest import documents
from tests.helpers import stored
from tests.live.delay.serving import Command

Run = Callable[..., Result]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(
    rocketmq: LocalBroker, make_topic: Any, tmp_path: Path, number: signal.Signals
) -> None:
    inner, target, dead = make_topic(queues=1), make_topic(queues=1), make_topic(queues=1)
    arguments = ("--inner-topic", inner, "--dead-topic", dead, "--group", f"delay_{inner}")
    command = Command(rocketmq, tmp_path / "node", *arguments)
    with Producer(name_server=rocketmq.name_server, group="g_cli") as producer:
        for name, due_ms in (("now", 1), ("far", 1 << 50)):
            body = Envelope(target, due_ms, name, 1, 0, f"UNIQ_KEY\x01{name}\x02", name.encode()).pack()
            producer.send(Message(inner, body))
    assert [message.body for message in stored(rocketmq, target, 1)] == [b"now"]

    def settled() -> bool:
        return rocketmq.admin.consume_stats(f"delay_{inner}_stored", inner) != {}

    assert wait_until(settled, Deadline.after(20), 0.1)
    begun, ended = documents(command.end(number))
    assert (begun["group"], begun["waiting"]) == (f"delay_{inner}", 0)
    assert ended == {"stored": 2, "sent": 1, "waiting": 1}


def test_what_is_given_reaches_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without its environment a node would deliver to topics of another one."""
    opened: list[object] = []

    def opens(place: NodeSettings, **options: Any) -> Any:
        opened.extend((place, options))
        return SimpleNamespace(waiting_count=0, stored_count=0, sent_count=0, run=lambda over: opened.append("runs"))

    monkeypatch.setattr(node, "open_node", opens)
    monkeypatch.setattr(spool, "tune_gc", lambda: opened.append("dedicated"))
    given = ("--data", str(tmp_path), "--topic", "orders-*", "--topic", "t", "--inner-topic", "i", "--dead-topic", "d")
    where = ("--name-server", "h:1", "--environment", "dev", "-o", "environmentMode=suffix", "-o", "namespace=shop")
    assert CliRunner().invoke(app, ["delay", "serve", *given, "--group", "g", "--dead", *where]).exit_code == 0
    place = NodeSettings(tmp_path, "i", "d", topics=("orders-*", "t"), resends_dead_letters=True)
    options = {
        "name_server": "h:1",
        "environment": "dev",
        "environment_mode": "suffix",
        "namespace": "shop",
        "group": "g",
    }
    assert opened == [place, options, "dedicated", "runs"]


def test_wrong_usage_is_told_at_once(run: Run, tmp_path: Path) -> None:
    assert "Missing option '--data'" in run("delay", "serve", "--topic", "*").output
    assert "Missing option '--topic'" in run("delay", "serve", "--data", str(tmp_path / "d")).output
    refused = run("delay", "serve", "--topic", "*", "--data", str(tmp_path / "d"), "--group", "a b")
    assert (refused.exit_code, "option 'group' is 'a b'" in refused.output) == (1, True)
    assert "delay" in run("--help").output
