"""``consume`` on a real broker: what is printed, and where the group is then."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rocketmq_spark import Admin, Message, Producer
from rocketmq_spark.admin import groups
from rocketmq_spark.cli import tail
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.output import Json
from rocketmq_spark.consumer.pull import PolledMessages
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.admin import OffsetChange
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.session import consumers
from tests.cli.conftest import COMMAND, documents
from tests.cli.test_tail import MESSAGE
from tests.consumer.pull_bench import AT_ONCE, A, B, made
from tests.fakes.group_member import QueueMember
from tests.helpers import awaited, total


@pytest.fixture
def filled(rocketmq, make_topic):
    """Twenty messages in four queues, tags in turn, so that each queue has one tag only."""
    topic = make_topic(queues=4)
    with Producer(rocketmq.name_server, "p") as producer:
        queues = producer.queues(topic)
        for n in range(20):
            producer.send(Message(topic, b"%d" % n, tags="ab"[n % 2], keys=["k"]), queue=queues[n % 4])
    total(rocketmq, topic, 20)
    return topic


@pytest.fixture
def group():
    return f"g{uuid.uuid4().hex[:6]}"


def bodies(text):
    return sorted(int(row["body"]) for row in documents(text))


def test_lines_are_json_and_the_group_goes_on(run, filled, group):
    first = run("consume", filled, "--group", group, "--from", "earliest", "--count", "7")
    assert (first.exit_code, first.stderr) == (0, "")
    row = documents(first.stdout)[0]
    assert (row["topic"], row["keys"], row["reconsumeTimes"]) == (filled, ["k"], 0)
    rest = run("consume", filled, "--group", group, "--from", "earliest", "--count", "13")
    assert sorted(bodies(first.stdout) + bodies(rest.stdout)) == list(range(20))
    assert len(bodies(first.stdout)) == 7
    none = run("consume", filled, "--group", group, "--from", "earliest", "--idle", "1")
    assert (none.exit_code, none.stdout) == (0, "")


def test_a_queue_in_which_nothing_came_has_an_offset_too(rocketmq, run, filled, group):
    """Or what comes while no member runs would be skipped, for a group begins at the end."""
    assert bodies(run("consume", filled, "--group", group, "--idle", "0").stdout) == []
    with Admin(rocketmq.name_server) as admin:
        assert set(admin.offsets(group, [filled]).values()) == {5}
    with Producer(rocketmq.name_server, "p") as producer:
        for n in range(4):
            producer.send(Message(filled, b"%d" % (100 + n)))
    assert bodies(run("consume", filled, "--group", group, "--count", "4").stdout) == [100, 101, 102, 103]


@pytest.mark.parametrize("members", [[], ["one"]])
def test_start_offsets_are_stored_unless_the_group_has_members(monkeypatch, members):
    """They may have begun elsewhere and have committed nothing yet: who follows them would miss what they did not finish."""
    first, second = (MessageQueue("t", "broker-a", number) for number in range(2))
    changes, kept, asked = [OffsetChange(first, None, 9), OffsetChange(second, 3, 9)], [], []
    monkeypatch.setattr(groups, "offset_changes", lambda client, *given: asked.append(given) or changes)
    monkeypatch.setattr(groups, "members", lambda client, group, queues: asked.append(group) or members)
    monkeypatch.setattr(groups, "store_offsets", lambda client, group, offsets: kept.append((group, offsets)))
    warned = []
    monkeypatch.setattr(groups, "warn_of_unseen_members", lambda client, group, queues: warned.append((group, queues)))
    given = Target({"name_server": "h:1", "environment": "2", "environments": "2"})
    reads = SimpleNamespace(client=lambda: None, options=given.options)
    target = SimpleNamespace(for_role=lambda role: reads, settings=given.settings)
    tail._store_start_offsets(target, "t", {"group": "g", "begin": "latest"})
    assert asked == [("g_env_2", ["t"], "latest", Environment.of("2", "2"), "--from"), "g_env_2"], "not another group"
    assert kept == warned == ([] if members else [("g_env_2", {first: 9})])


def test_a_queue_that_is_added_later_begins_where_it_is_said(monkeypatch):
    """What came to it before the group noticed it would be passed over; only queues that are there now have an offset stored."""
    asked = []
    made = SimpleNamespace(subscribe=lambda *given: asked.append(given))
    monkeypatch.setattr(tail, "_store_start_offsets", lambda *given: None)
    monkeypatch.setattr(consumers, "PullConsumer", lambda **given: asked.append(given) or made)
    how = {"begin": "earliest", "group": "g", "tags": "a", "sql": None}
    where = {"name_server": "h:1", "namespace": "shop", "environment": "2", "environments": "2"}
    given = {**where, "access_key": "me", "secret_key": "hush", "tls": True}
    assert tail.subscribed_consumer(Target(given), "t", how) is made
    options = {**given, "consume_from_where": "earliest", "group": "g", "auto_commit": False}
    assert asked == [options, ("t", "a", None)], "not the topic and the group of another"


@pytest.mark.parametrize(("back", "committed"), [([A, B], 6), ([B], 6), (None, 1)])
def test_a_queue_that_moves_while_lines_are_written_is_no_error(capsys, back, committed):
    """A pipe may block for minutes. What is left of a poll must take the group back to its offset only where the queue stayed."""
    brokers = QueueMember([A, B], 4)
    with made(brokers, auto_commit=False) as consumer:
        consumer.assign([A])
        polled = PolledMessages(consumer, AT_ONCE)
        if back is not None:
            consumer.assign([B])
            brokers.stored[A] = 6
            brokers.high[A] = 6
            consumer.assign(back)
        tail._print(Json(), consumer, polled, 1)
        assert [row["queueOffset"] for row in documents(capsys.readouterr().out)] == [0]
        assert brokers.stored[A] == committed


def test_tags(rocketmq, run, filled, group):
    command = ("consume", filled, "--group", group, "--from", "earliest", "--tags", "a")
    assert bodies(run(*command, "--count", "10").stdout) == list(range(0, 20, 2))
    with Admin(rocketmq.name_server) as admin:

        def passed_over() -> set[int | None]:
            assert run(*command, "--idle", "0.2").stdout == ""
            return set(admin.offsets(group, [filled]).values())

        awaited(passed_over, lambda offsets: offsets == {5})


@pytest.mark.parametrize("command", ["consume", "copy"])
def test_sql(run, filled, group, make_topic, command):
    where = (filled,) if command == "consume" else (filled, to := make_topic(queues=1))
    done = run(command, *where, "--group", group, "--from", "earliest", "--sql", "TAGS = 'a'", "--count", "10")
    assert done.exit_code == 0, done.output
    out = (
        done
        if command == "consume"
        else awaited(lambda: run("tail", to, "--no-follow", "--json"), lambda seen: len(documents(seen.stdout)) == 10)
    )
    assert bodies(out.stdout) == list(range(0, 20, 2))


def test_after_a_kill_uncommitted_messages_are_printed_again(rocketmq, run, topic, group):
    """More than a pipe holds, so that some is not printed yet."""
    with Producer(rocketmq.name_server, "p") as producer:
        for n in range(20):
            producer.send(Message(topic, b"%d" % n, properties={"more": "x" * 20_000}))
    total(rocketmq, topic, 20)
    arguments = ["consume", topic, "--group", group, "--from", "earliest", "--name-server", rocketmq.name_server]
    seen: Counter[int] = Counter()
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(3):
            seen[int(json.loads(child.stdout.readline())["body"])] += 1
        child.kill()
        seen.update(int(json.loads(line)["body"]) for line in child.stdout.read().splitlines() if line.endswith("}"))
    assert (child.returncode, len(seen) < 20) == (-signal.SIGKILL, True), "there was nothing left to print"

    def rest() -> list[int]:
        seen.update(bodies(run(*arguments, "--idle", "1").stdout))
        return sorted(seen)

    awaited(rest, lambda found: found == list(range(20)))


def test_a_message_restarts_the_time_of_idle(monkeypatch):
    """One that ended between two messages would leave what comes next to a command that nobody starts."""
    polls = iter([(0.0, []), (4.0, [MESSAGE]), (8.0, []), (9.5, [])])
    at_s = [0.0]

    def poll(timeout_s):
        at_s[0], messages = next(polls)
        return messages

    polls_of = SimpleNamespace(has_returned_all=True, returned_up_to=None)
    consumer = SimpleNamespace(poll=poll, commit=lambda: None, _polls=polls_of)
    monkeypatch.setattr(tail, "subscribed_consumer", lambda *given: nullcontext(consumer))
    monkeypatch.setattr(tail, "time", SimpleNamespace(monotonic=lambda: at_s[0]))
    done = CliRunner().invoke(app, ["consume", "t", "--group", "g", "--idle", "5", "--name-server", "127.0.0.1:1"])
    assert (done.exit_code, len(documents(done.stdout)), next(polls, None)) == (0, 1, None), done.output


def test_it_goes_on_until_ctrl_c(rocketmq, start, filled, group):
    process = start("consume", filled, "--group", group, "--from", "earliest", "--name-server", rocketmq.name_server)
    lines = [json.loads(process.child.stdout.readline()) for _ in range(20)]
    assert sorted(int(line["body"]) for line in lines) == list(range(20))
    assert process.ctrl_c() == ("", "")
    assert process.code == 130
    with Admin(rocketmq.name_server) as admin:
        assert set(admin.offsets(group, [filled]).values()) == {5}


@pytest.mark.parametrize(
    "arguments", [["--from", "yesterday"], ["--count", "0"], ["--tags", "a", "--sql", "TAGS = 'a'"]]
)
def test_wrong_usage(run, filled, group, arguments):
    assert run("consume", filled, "--group", group, "--idle", "0", *arguments).exit_code in (1, 2)
    assert run("consume", filled).exit_code == 2
    options = ("--idle", "0", "-o", "pullThresholdForQueue=10", "-o", "connectTimeout=5s")
    assert run("consume", filled, "--group", group, *options).exit_code == 0


def test_a_misspelt_topic(run, filled, group):
    done = run("consume", filled + "x", "--group", group)
    assert (done.exit_code, f"Did you mean {filled}" in done.stderr) == (1, True)
