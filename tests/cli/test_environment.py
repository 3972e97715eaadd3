"""Who writes and reads which queue, of members that live and of groups that are away."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from click.testing import Result

from rocketmq_spark import Consumer, Producer, PullConsumer
from rocketmq_spark.cli.topic import _shown
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, ReceivedMessage
from tests.cli.conftest import documents
from tests.helpers import awaited

Run = Callable[..., Result]
ENVIRONMENTS = {"environments": "2"}


def fine(messages: list[ReceivedMessage], context: object) -> None:
    return None


def test_who_writes_and_reads_each_queue(rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run) -> None:
    topic, group = make_topic(queues=4), f"g{uuid.uuid4().hex[:6]}"
    connection = {"name_server": rocketmq.name_server}
    with Producer(**connection, group="p", environment="1", **ENVIRONMENTS) as producer:
        for _ in range(4):
            producer.send(Message(topic, b"x"))
    with PullConsumer(**connection, group=f"{group}-away", consume_from_where="earliest") as away:
        away.assign([queue for queue in away.queues(topic) if queue.queue_id == 2])
        awaited(lambda: len(away.poll(1.0)), lambda count: count > 0)
        away.commit()

    def ask(*more: str) -> list[dict[str, object]]:
        done = run("environment", "show", topic, "-o", "environments=2", "--json", *more)
        assert done.exit_code == 0, done.output
        return documents(done.stdout)

    with ExitStack() as stack:
        for name in ("1", "2"):
            consumer = stack.enter_context(Consumer(**connection, group=group, environment=name, **ENVIRONMENTS))
            consumer.subscribe(topic)
            consumer.start(fine)
        rows = awaited(ask, lambda found: all(len(row["readers"]) > (row["queueId"] == 2) for row in found))  # type: ignore[arg-type]
        text = run("environment", "show", topic, "-o", "environments=2")
    for row in rows:
        number = row["queueId"]
        assert (row["environment"], row["writable"]) == (str(number % 2 + 1), True)  # type: ignore[operator]
        assert row["messages"] == (2 if row["environment"] == "1" else 0)
        away_here = [{"group": f"{group}-away", "member": None, "environment": None, "foreign": True}]
        (mine,) = [one for one in row["readers"] if one not in away_here]  # type: ignore[attr-defined]
        assert mine.pop("member")
        assert mine == {
            "group": f"{group}_env_{row['environment']}",
            "environment": row["environment"],
            "foreign": False,
        }
        assert len(row["readers"]) == 1 + (number == 2)  # type: ignore[arg-type]
    assert text.stdout.splitlines()[0].split("  ")[0] == "BROKER"
    assert f"! {group}-away" in text.stdout
    assert "! reads what belongs to another environment" in text.stderr
    assert max(map(len, text.stdout.splitlines())) <= 80


def test_3_2_with_a_suffix_the_topic_is_the_environment_s(rocketmq: LocalBroker, run: Run) -> None:
    plain = f"t{uuid.uuid4().hex[:8]}"
    options = ("--environment", "dev", "-o", "environmentMode=suffix")
    assert run("topic", "create", plain, "--queues", "1", *options).exit_code == 0
    assert f"{plain}_dev" in rocketmq.admin.topics()
    done = run("environment", "show", plain, *options, "--json")
    (row,) = documents(done.stdout)
    assert (row["topic"], row["environment"], row["readers"]) == (plain, "dev", [])
    assert plain in run("topic", "list", *options).stdout.splitlines()
    missing = run("environment", "show", f"{plain}x", *options)
    assert missing.exit_code == 1
    assert f"Did you mean {plain}" in missing.stderr


def test_the_environment_comes_from_the_variable_and_is_said(
    run: Run, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKETMQ_ENVIRONMENT", "2")
    sent = run("produce", topic, "-o", "environments=2", "--json", input="a\nb\nc\n")
    assert {one["queueId"] % 2 for one in documents(sent.stdout)} == {1}
    alone = run("produce", topic, input="x\n")
    assert (alone.exit_code, "Set option 'environments'" in alone.stderr) == (1, True)
    text = run("produce", topic, "-o", "environments=2", input="d\n")
    assert "environment '2' (variable ROCKETMQ_ENVIRONMENT), environmentMode queues" in text.stderr
    shown = awaited(
        lambda: documents(run("tail", topic, "-o", "environments=2", "--no-follow", "--json").stdout),
        lambda found: len(found) == 4,
    )
    assert sorted(one["body"] for one in shown) == ["a", "b", "c", "d"]
    other = run("tail", topic, "--environment", "1", "-o", "environments=2", "--no-follow", "--json")
    assert documents(other.stdout) == []


def test_a_queue_that_takes_no_messages_is_written_by_nobody() -> None:
    shown = _shown({"environment": "1", "writable": False, "readers": []})
    assert (shown["environment"], shown["shown"]) == (None, None)
