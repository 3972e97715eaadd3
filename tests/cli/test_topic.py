import os
import pty
import subprocess
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rocketmq_spark.admin import topics
from rocketmq_spark.cli.command import app
from rocketmq_spark.model import QueueBounds
from tests.cli.conftest import COMMAND, documents
from tests.helpers import awaited
from tests.reading import feed


@pytest.fixture
def name():
    return f"cli-{uuid.uuid4().hex[:8]}"


def test_create_list_describe_delete(run, name):
    assert run("topic", "create", name, "--queues", "3").stdout == f"Topic {name} has 3 queues on broker-a\n"
    assert name in run("topic", "list").stdout.splitlines()
    run("produce", name, input="a\nb\n")
    described = awaited(lambda: run("topic", "describe", name), lambda done: done.stderr == "2 messages in 3 queues\n")
    heading, *queues = (line.split() for line in described.stdout.splitlines())
    assert heading[:5] == ["BROKER", "QUEUE", "FIRST", "END", "MESSAGES"]
    assert [queue[:3] for queue in queues] == [["broker-a", str(i), "0"] for i in range(3)]
    assert sorted(queue[4] for queue in queues) == ["0", "1", "1"]
    assert run("topic", "delete", name, "--yes").stdout == f"Topic {name} is deleted\n"
    assert name not in run("topic", "list").stdout.splitlines()


def test_messages_are_those_that_are_still_kept(run, rocketmq, name, monkeypatch):
    rocketmq.create_topic(name, 1)
    found = topics.describe
    kept = QueueBounds(4, 9, 0)
    monkeypatch.setattr(
        topics, "describe", lambda *asked: replace(there := found(*asked), queues=dict.fromkeys(there.queues, kept))
    )
    (row,) = documents(run("topic", "describe", name, "--json").stdout)
    assert (row["minOffset"], row["maxOffset"], row["messages"]) == (4, 9, 5)
    assert run("topic", "describe", name).stderr == "5 messages in 1 queues\n"


def test_a_batch_topic_is_described_as_one(run, name):
    assert run("topic", "create", name, "--batch", "--queues", "1").exit_code == 0
    assert run("topic", "describe", name).stderr == "0 messages in 1 queues of a batch topic\n"
    (queue,) = documents(run("topic", "describe", name, "--json").stdout)
    assert (queue["batch"], queue["type"]) == (True, "NORMAL")


def test_a_topic_that_is_there_is_not_created_over(run, rocketmq, name):
    """Eight queues became two once, and sixty of eighty messages went out of sight without a word."""
    rocketmq.create_topic(name, 8)
    for queues in ("2", "8", "9"):
        done = run("topic", "create", name, "--queues", queues)
        assert done.exit_code == 1
        assert f"topic {name} exists already; its queues: 8 on broker-a" in done.stderr
        assert "Use it as it is" in done.stderr
        assert f"rocketmq-spark topic widen {name} --queues N, or topic shrink" in done.stderr
    assert len(rocketmq.admin.describe_topic(name)) == 8


def test_a_topic_gets_more_queues_and_keeps_what_it_is(run, rocketmq, name):
    rocketmq.create_topic(name, 2, attributes={"message.type": "FIFO"})
    rocketmq.admin.create_topic(name, 2, perm=4)
    assert run("topic", "widen", name, "--queues", "5").stdout == f"Topic {name} has 5 queues on broker-a\n"
    config = rocketmq.admin.topic_config(name, "broker-a")
    assert (config.read_queues, config.write_queues, config.perm) == (5, 5, 4)
    assert config.attributes == {"message.type": "FIFO"}
    assert run("topic", "widen", name, "--queues", "5").exit_code == 0
    done = run("topic", "widen", name, "--queues", "4")
    assert (done.exit_code, len(rocketmq.admin.describe_topic(name))) == (1, 5)
    assert f"--queues is 4, fewer than topic {name} has: 5 on broker-a. Use: rocketmq-spark topic shrink" in done.stderr


def test_a_shrunk_topic_reports_the_messages_out_of_sight(run, rocketmq, name):
    rocketmq.create_topic(name, 8)
    feed(rocketmq, name, 80)
    done = run("topic", "shrink", name, "--queues", "2", input="y\n")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert f"Take 6 queues away from topic {name}: 60 messages go out of sight. There is no terminal" in said
    assert len(rocketmq.admin.describe_topic(name)) == 8
    done = run("topic", "shrink", name, "--queues", "2", "--yes", "--json")
    assert documents(done.stdout) == [{"topic": name, "brokers": ["broker-a"], "queues": 2, "outOfSight": 60}]
    assert len(rocketmq.admin.describe_topic(name)) == 2
    assert "--queues is 3, more than topic" in run("topic", "shrink", name, "--queues", "3", "--yes").stderr
    run("topic", "widen", name, "--queues", "8")
    assert sum(bounds.max_offset for bounds in rocketmq.admin.describe_topic(name).values()) == 80


def test_a_topic_is_updated_and_keeps_the_rest(run, rocketmq, name):
    rocketmq.create_topic(name, 2, attributes={"message.type": "FIFO"})
    done = run("topic", "update", name, "--permission", "r", "--queues", "4")
    assert done.stdout == f"Topic {name} has 4 queues on broker-a: permission R, type FIFO\n", done.stderr
    done = run(
        "topic",
        "update",
        name,
        "--order",
        "--attribute",
        "message.type=NORMAL",
        "--attribute",
        "reserve.time=60000",
        "--json",
    )
    assert documents(done.stdout) == [
        {
            "topic": name, "brokerName": "broker-a", "queues": 4, "permission": "R", "type": "NORMAL", "order": True,
            "attributes": {"message.type": "NORMAL", "reserve.time": "60000"},
        }
    ]  # fmt: skip
    assert run("topic", "update", name, "--permission", "RW", "--no-order").exit_code == 0
    config = rocketmq.admin.topic_config(name, "broker-a")
    assert (config.read_queues, config.write_queues, config.perm, config.order) == (4, 4, 6, False)
    for arguments, code, said in (
        ([], 2, "Give what is to change"),
        (["--queues", "3"], 1, f"--queues is 3, fewer than topic {name} has: 4 on broker-a"),
        (["--attribute", "queue.type=BatchCQ"], 1, "'queue.type' of topic"),
        (["--attribute", "colour=red"], 1, "a broker rejects colour=red"),
        (["--attribute", "message.type=ROUND"], 1, "a broker rejects message.type=ROUND"),
    ):
        done = run("topic", "update", name, *arguments)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (code, True), done.stderr
    assert rocketmq.admin.topic_config(name, "broker-a") == config


def test_json(run, name):
    created = run("topic", "create", name, "--queues", "2", "--broker", "broker-a", "--json")
    assert documents(created.stdout) == [{"topic": name, "brokers": ["broker-a"], "queues": 2}]
    assert {"topic": name} in documents(run("topic", "list", "--json").stdout)
    queues = documents(run("topic", "describe", name, "--json").stdout)
    assert [(q["brokerName"], q["queueId"], q["messages"], q["lastUpdate"]) for q in queues] == [
        ("broker-a", 0, 0, None),
        ("broker-a", 1, 0, None),
    ]
    assert documents(run("topic", "delete", name, "--yes", "--json").stdout) == [{"topic": name, "deleted": True}]


def test_attributes_arrive(run, rocketmq, name):
    assert run("topic", "create", name, "--attribute", "message.type=FIFO").exit_code == 0
    assert "FIFO" in str(rocketmq.admin.topic_config(name, "broker-a"))


def test_a_batch_topic(run, rocketmq, name):
    assert run("topic", "create", name, "--batch", "--attribute", "message.type=NORMAL").exit_code == 0
    assert rocketmq.admin.topic_config(name, "broker-a").attributes == {
        "queue.type": "BatchCQ", "message.type": "NORMAL",
    }  # fmt: skip
    done = run("topic", "create", name, "--batch", "--attribute", "queue.type=SimpleCQ")
    assert done.exit_code == 1
    assert "attribute 'queue.type' is 'SimpleCQ', but that of a batch topic is 'BatchCQ'" in done.stderr


def test_system_topics_are_shown_on_request(run):
    everything = run("topic", "list", "--all").stdout.splitlines()
    assert "BenchmarkTest" in everything
    assert "BenchmarkTest" not in run("topic", "list").stdout.splitlines()


@pytest.mark.parametrize(
    "verb",
    [
        ["describe"],
        ["delete", "--yes"],
        ["update", "--permission", "RW"],
        ["widen", "--queues", "9"],
        ["shrink", "--queues", "1", "--yes"],
    ],
)
def test_a_misspelt_topic_is_told_with_the_nearest(run, topic, verb):
    done = run("topic", verb[0], topic + "x", *verb[1:])
    assert done.exit_code == 1
    assert f"Did you mean {topic}" in done.stderr
    assert done.stderr.endswith("? All names: rocketmq-spark topic list\n")
    assert done.stderr.count("\n") == 1


def test_names_that_no_broker_takes(run):
    done = run("topic", "create", "a b")
    assert done.exit_code == 1
    assert "illegal characters" in done.stderr


def test_deleting_asks_and_needs_a_terminal_for_that(run, topic):
    done = run("topic", "delete", topic, input="y\n")
    assert (done.exit_code, "--yes" in done.stderr) == (2, True)
    assert topic in run("topic", "list").stdout.splitlines()


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("", 1), ("y", 0)])
def test_on_a_terminal_it_asks_and_keeps_to_the_answer(run, rocketmq, topic, answer, code):
    terminal, inside = pty.openpty()
    command = [*COMMAND, "topic", "delete", topic, "--name-server", rocketmq.name_server]
    with subprocess.Popen(command, stdin=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        os.write(terminal, f"{answer}\n".encode())
        out, err = child.communicate()
    os.close(inside)
    os.close(terminal)
    assert (child.returncode, f"Delete topic {topic} with all its messages? [y/N]" in err) == (code, True), err
    assert ((topic in rocketmq.admin.topics()), out) == (
        (False, f"Topic {topic} is deleted\n") if code == 0 else (True, "")
    )


@pytest.mark.parametrize(
    ("command", "calls"),
    [
        (["create", "--attribute", "a=b"], [("create", 3, {"a": "b"}, False)]),
        (["widen"], [("widen", 3, "--queues")]),
        (
            ["shrink", "--yes"],
            [
                ("shrink", 3, {"preview": True, "argument_name": "--queues"}),
                ("shrink", 3, {"argument_name": "--queues"}),
            ],
        ),
        (["update", "--permission", "R"], [("update", topics.TopicChange(3, "R", None, {}), "--queues")]),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)
@pytest.mark.parametrize("named", [[], ["broker-a", "broker-c"]])
def test_only_brokers_that_are_named_are_changed(monkeypatch, command, calls, named):
    """Queues that are taken away on all of them hide their messages. A shrink is previewed first."""
    asked = []

    def record(verb):
        def done(client, name, what, only, *more, **how):
            asked.append((verb, name, what, only, *more, *([how] if how else [])))
            return SimpleNamespace(topic=name, brokers={}, write_queues=0, hidden=0)

        return done

    for verb in ("create", "widen", "shrink", "update"):
        monkeypatch.setattr(topics, verb, record(verb))
    verb, *more = command
    only = [word for broker in named for word in ("--broker", broker)]
    done = CliRunner().invoke(app, ["topic", verb, "t", "--queues", "3", *more, *only, "--name-server", "127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    assert asked == [(verb, "t", what, tuple(named) or None, *rest) for verb, what, *rest in calls]


def test_an_environment_removes_nothing_of_a_shared_topic(run, rocketmq, name, monkeypatch):
    rocketmq.create_topic(name, 4)
    feed(rocketmq, name, 8)
    verbs = (["delete", name, "--yes"], ["shrink", name, "--queues", "1", "--yes"])
    for verb in verbs:
        done = run("topic", *verb, "--environment", "2", "-o", "environments=2")
        assert (done.exit_code, "this would remove messages of all" in done.stderr) == (1, True), done.stderr
    for permission in ("R", "W"):
        done = run("topic", "update", name, "--permission", permission, "--environment", "2", "-o", "environments=2")
        assert (done.exit_code, "this would stop the producers or the consumers of all" in done.stderr) == (1, True)
    monkeypatch.setenv("ROCKETMQ_ENVIRONMENT", "2")
    done = run("topic", *verbs[0])
    assert "variable ROCKETMQ_ENVIRONMENT names one of them" in done.stderr
    monkeypatch.delenv("ROCKETMQ_ENVIRONMENT")
    assert sum(bounds.max_offset for bounds in rocketmq.admin.describe_topic(name).values()) == 8
    rocketmq.create_topic(f"{name}_2", 1)
    assert run("topic", "delete", name, "--yes", "--environment", "2", "-o", "environmentMode=suffix").exit_code == 0
    assert {name, f"{name}_2"} & set(rocketmq.admin.topics()) == {name}
