"""``group``, ``message`` and ``cluster`` on a real broker."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from click.testing import CliRunner

from rocketmq_spark import Message, Producer, PullConsumer
from rocketmq_spark.admin import brokers, groups, messages, topics
from rocketmq_spark.admin.groups import GRPC_MEMBERS_HINT
from rocketmq_spark.cli.cluster import _row
from rocketmq_spark.cli.command import app
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.admin import BrokerState, GroupDescription, OffsetChange, QueueLag, UserAccount
from rocketmq_spark.queues.environment import Environment
from tests.cli.conftest import documents
from tests.helpers import awaited, raising, total

NOWHERE = ("--name-server", "127.0.0.1:1")


@pytest.fixture
def consumed(rocketmq, make_topic):
    """A topic with ten messages of which a group, of the topic's name, has read four of queue 0."""
    topic = make_topic(queues=1)
    with Producer(rocketmq.name_server, "p") as producer:
        sent = [producer.send(Message(topic, b"%d" % n, tags="a", keys=["all", f"k{n}"])) for n in range(10)]
    total(rocketmq, topic, 10)
    with PullConsumer(rocketmq.name_server, topic, auto_commit=False) as consumer:
        consumer.assign([sent[0].queue])
        consumer.seek(sent[0].queue, 4)
        consumer.commit()
    return topic, sent


def test_a_group_is_listed_described_and_deleted(run, rocketmq, consumed):
    name, _ = consumed
    assert name in run("group", "list").stdout.splitlines()
    assert {"group": name} in documents(run("group", "list", "--json").stdout)
    (found,) = documents(run("group", "describe", name, "--json").stdout)
    assert (found["group"], found["members"], found["consumeType"], found["lag"]) == (name, [], None, 6)
    assert [(q["topic"], q["offset"], q["maxOffset"], q["lag"]) for q in found["queues"]] == [(name, 4, 10, 6)]
    assert found["settings"]["broker-a"]["retryMaxTimes"] == 16
    shown = run("group", "describe", name)
    assert shown.stdout.startswith(f"Group {name}: 0 members\n")
    assert shown.stderr == f"{GRPC_MEMBERS_HINT}\nlag: 6 in 1 queues\n"
    assert run("group", "delete", name).exit_code == 2
    assert run("group", "delete", name, "--yes").stdout == f"Group {name} is deleted\n"
    assert name not in run("group", "list").stdout.splitlines()


def test_queues_without_a_lag_are_not_counted(monkeypatch):
    rows = [QueueLag(MessageQueue("t", "a", number), 0, at, 75) for number, at in enumerate((70, None, 1205))]
    monkeypatch.setattr(groups, "describe", lambda *_: GroupDescription("g", {}, [], None, None, {}, rows))
    shown = CliRunner().invoke(app, ["group", "describe", "g", "--name-server", "127.0.0.1:1"])
    assert (shown.exit_code, shown.stderr) == (0, f"{GRPC_MEMBERS_HINT}\nlag: 5 in 1 of 3 queues\n")


def test_a_group_with_members(run, rocketmq, topic):
    name = f"g{uuid.uuid4().hex[:6]}"
    with PullConsumer(rocketmq.name_server, name) as consumer:
        consumer.subscribe(topic, "a")
        consumer.poll(0.1)
        (found,) = awaited(
            lambda: documents(run("group", "describe", name, "--json").stdout), lambda rows: rows and rows[0]["members"]
        )
        assert [member["clientId"] for member in found["members"]] == [consumer.client_id]
        assert found["subscriptions"] == [{"topic": topic, "expression": "a", "kind": "TAG"}]
        assert consumer.client_id in run("group", "describe", name).stdout
        done = run("group", "delete", name, "--yes")
        assert (done.exit_code, "use --force" in done.stderr) == (1, True)
    assert run("group", "delete", name, "--yes", "--force", "--topics").exit_code == 0


@pytest.mark.parametrize(
    ("more", "topics", "force"), [([], False, False), (["--topics"], True, False), (["--force"], False, True)]
)
def test_dead_letters_of_a_group_are_deleted_only_on_request(monkeypatch, more, topics, force):
    """Nor is anything deleted of which nobody looked whether it has members."""
    asked = []
    monkeypatch.setattr(groups, "check_deletable", lambda client, *given: asked.append(("check", *given)))
    monkeypatch.setattr(groups, "delete", lambda client, *given: asked.append(("delete", *given)))
    done = CliRunner().invoke(app, ["group", "delete", "g", "--yes", *more, "--name-server", "127.0.0.1:1"])
    assert (done.exit_code, asked) == (0, [("check", "g", force), ("delete", "g", topics, force)]), done.output


@pytest.mark.parametrize("verb", [["describe"], ["delete", "--yes"]])
def test_a_misspelt_group_is_reported_with_the_nearest(run, consumed, verb):
    name, _ = consumed
    done = run("group", verb[0], name + "x", *verb[1:])
    assert (done.exit_code, f"Did you mean {name}" in done.stderr) == (1, True)


def test_messages_by_id_and_key(run, consumed):
    topic, sent = consumed
    one = sent[3]
    for arguments in ((one.offset_msg_id,), (one.msg_id, "--topic", topic)):
        (found,) = awaited(lambda a=arguments: documents(run("message", "get", *a, "--json").stdout))
        assert (found["msgId"], found["offsetMsgId"], found["body"]) == (one.msg_id, one.offset_msg_id, "3")
        assert (found["tags"], found["keys"], found["queueOffset"]) == ("a", ["all", "k3"], 3)
    assert f"id {one.msg_id}" in run("message", "get", one.offset_msg_id).stdout
    find = ("message", "find", "--topic", topic, "--key")
    rows = awaited(lambda: documents(run(*find, "all", "--json").stdout), lambda rows: len(rows) == 10)
    assert [row["body"] for row in rows] == [str(n) for n in range(10)]
    some = run(*find, "all", "--limit", "4")
    assert (len(some.stdout.splitlines()), some.stderr.split("; ")[0]) == (4, "4 messages with key all")
    assert "older ones may be omitted: raise --limit (up to 64)" in some.stderr
    assert run(*find, "k3").stderr == "1 messages with key k3\n"
    assert run(*find, "all", "--until", "2020-01-01T00:00:00Z").stderr == "0 messages with key all\n"
    done = run("message", "get", "nothing", "--topic", topic)
    assert (done.exit_code, "there is no message with id nothing" in done.stderr) == (1, True)


def test_messages_by_time(run, consumed):
    """In every form in which commands take a time."""
    topic, _ = consumed
    find = ("message", "find", "--topic", topic)
    rows = awaited(lambda: documents(run(*find, "--from", "1h", "--json").stdout), lambda rows: len(rows) == 10)
    times = [row["storeTimestamp"] for row in rows]
    assert times == sorted(times)
    assert sorted(row["body"] for row in rows) == sorted(str(n) for n in range(10))
    first, last = times[0], times[-1]
    for begin in (first, "2020-01-01", "@1577836800000"):
        assert documents(run(*find, "--from", begin, "--to", last, "--json").stdout) == rows
    assert run(*find, "--to", "1h").stderr == "0 messages of that time\n"
    assert run(*find, "--since", "0s", "--until", "2999-01-01").stderr == "0 messages of that time\n"
    few = (*find, "--to", last, "--limit", "3")
    assert documents(run(*few, "--json").stdout) == rows[:3]
    said = "3 messages of that time; there may be more: raise --limit, or set --from to the time of the last of these\n"
    assert (len((shown := run(*few)).stdout.splitlines()), shown.stderr) == (3, said)
    for arguments, code, said in (
        ([], 2, "Give --key, or a time"),
        (["--from", "yesterday"], 2, "'yesterday' is not a time: ISO-8601"),
        (["--from", "1577836800000"], 2, "a time; @1577836800000 is one in milliseconds since 1970"),
        (["--from", "@x"], 2, "'@x' is not a time: ISO-8601 (UTC without a zone), 1h (one hour ago), @milliseconds"),
        (["--from", "0s", "--to", "1h"], 1, "before it begins"),
        (["--from", "1h", "--limit", "10001"], 1, "limit is 10001; expected 1 to 10000"),
        (["--key", "all", "--limit", "65"], 1, "limit is 65; expected 1 to 64"),
    ):
        done = run(*find, *arguments)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (code, True), done.stderr
    assert "Did you mean" in run("message", "find", "--topic", topic + "x", "--from", "1h").stderr


def test_the_brokers_of_a_cluster(run, rocketmq):
    (found,) = documents(run("cluster", "--json").stdout)
    assert (found["brokerName"], found["brokerId"], found["address"]) == ("broker-a", 0, rocketmq.address("broker-a"))
    assert (found["version"], found["error"]) == ("V5_5_0", None)
    assert found["facts"]["brokerVersionDesc"] == "V5_5_0"
    heading, row = run("cluster").stdout.splitlines()
    assert (heading.split()[:3], row.split()[:2]) == (["CLUSTER", "NAME", "BROKER"], ["DefaultCluster", "broker-a"])


@pytest.mark.parametrize("error", [None, CallTimeout("no answer in time")])
def test_cluster_exits_with_1_unless_all_brokers_answer(monkeypatch, error):
    state = BrokerState("b", "c", 0, "127.0.0.1:1", None, None, None, None, None, None, error)
    for states, code in (([state], int(error is not None)), ([], 1)):
        monkeypatch.setattr(brokers, "states", lambda client, states=states: states)
        assert CliRunner().invoke(app, ["cluster", *NOWHERE]).exit_code == code


def test_a_slave_that_does_not_answer_is_told_and_no_success(monkeypatch):
    master = BrokerState("b", "c", 0, "h:1", None, None, None, None, None, {}, None)
    slave = replace(master, broker_id=1, facts=None, error=CallTimeout("no answer in time"))
    monkeypatch.setattr(brokers, "states", lambda client: [master, slave])
    done = CliRunner().invoke(app, ["cluster", "--json", *NOWHERE])
    assert done.exit_code == 1
    assert [row["error"] for row in documents(done.stdout)] == [None, "[ROCKETMQ_TIMEOUT] no answer in time"]


def test_what_brokers_do_not_tell_of_a_group_is_no_success(monkeypatch):
    """Those that are away may have the offsets of which none are shown."""
    away, queue = CallTimeout("no answer in time"), MessageQueue("t", "a", 0)
    asked = []
    monkeypatch.setattr(groups, "committed_offsets", lambda client, *given: asked.append(given) or {queue: 1})
    monkeypatch.setattr(groups, "members", lambda *given: [])
    for errors in ([], [away]):
        monkeypatch.setattr(groups, "bounds_of", lambda client, found, errors=errors: ({}, errors))
        shown = CliRunner().invoke(app, ["offsets", "show", "g", "--topic", "t", "--topic", "u", *NOWHERE])
        assert (shown.exit_code, "no answer in time" in shown.stderr) == (len(errors), bool(errors)), shown.output
    assert asked == [("g", ("t", "u"))] * 2
    monkeypatch.setattr(groups, "describe", lambda *given: GroupDescription("g", {}, [], None, None, {}, []))
    monkeypatch.setattr(groups, "require_masters", raising(away))
    assert CliRunner().invoke(app, ["group", "describe", "g", *NOWHERE]).exit_code == 1


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("store_offsets", ["offsets", "set", "g", "--to", "latest", "--yes"]),
        ("delete", ["group", "delete", "g", "--yes"]),
        ("delete_topic", ["topic", "delete", "t", "--yes"]),
        ("delete_user", ["user", "delete", "u", "--yes"]),
        ("delete_policy", ["policy", "delete", "u", "Topic:t", "--yes"]),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_fails_is_not_said_to_be_done(monkeypatch, verb, command, form):
    monkeypatch.setattr(groups, "offset_changes", lambda *given: [OffsetChange(MessageQueue("t", "a", 0), 3, 9)])
    monkeypatch.setattr(groups, "members", lambda *given: [])
    monkeypatch.setattr(groups, "check_deletable", lambda *given: None)
    monkeypatch.setattr(Routes, "get_existing", lambda *given: None)
    of_brokers = verb in ("delete_user", "delete_policy")
    where, name = (topics, "delete") if verb == "delete_topic" else (brokers if of_brokers else groups, verb)
    monkeypatch.setattr(where, name, raising(CallTimeout("no answer in time")))
    done = CliRunner().invoke(app, [*command, *form, *NOWHERE])
    assert (done.exit_code, done.stdout, "no answer in time" in done.stderr) == (1, "", True), done.output


def test_offsets_that_members_would_overwrite_are_not_set(monkeypatch):
    """A member that has nothing to commit would read from there all the same, when it starts again."""
    monkeypatch.setattr(groups, "offset_changes", lambda *given: [OffsetChange(MessageQueue("t", "a", 0), 3, 9)])
    monkeypatch.setattr(groups, "members", lambda *given: ["one"])
    kept = []
    monkeypatch.setattr(groups, "store_offsets", lambda client, group, offsets: kept.append(offsets))
    command = ["offsets", "set", "g", "--to", "latest", *NOWHERE]
    for more, code, stored in ((["--yes"], 1, 0), (["--force"], 0, 0), (["--yes", "--force"], 0, 1)):
        done = CliRunner().invoke(app, [*command, *more])
        assert (done.exit_code, len(kept)) == (code, stored), done.output


@pytest.mark.parametrize("command", [["user", "delete", "u"], ["policy", "delete", "u", "Topic:t"]])
def test_users_and_policies_are_deleted_when_it_is_confirmed(monkeypatch, command):
    asked = []
    for name in ("delete_user", "delete_policy"):
        monkeypatch.setattr(brokers, name, lambda client, *given: asked.append(given))
    for more, code in (([], 2), (["--yes"], 0)):
        assert asked == []
        done = CliRunner().invoke(app, [*command, *more, *NOWHERE])
        assert (done.exit_code, "There is no terminal for the confirmation" in " ".join(done.stderr.split())) == (
            code,
            code == 2,
        )
    assert asked == [tuple(command[2:])]


def test_users_and_policies_are_set_as_it_is_said(monkeypatch):
    """A denial that is dropped would be a permission."""
    asked = []
    for name in ("set_user", "set_policy", "policies"):
        monkeypatch.setattr(brokers, name, lambda client, *given: asked.append(given) or [])
    for command in (
        ["user", "set", "u", "--super", "--disable"],
        ["user", "set", "u", "--normal", "--enable"],
        ["policy", "set", "u", "Topic:t", "Pub", "Get", "--deny", "--source", "10.0.0.1", "--source", "::1"],
        ["policy", "set", "u", "Topic:t", "Sub"],
        ["policy", "list", "--user", "u"],
    ):
        assert CliRunner(env={"ROCKETMQ_NEW_PASSWORD": "secret"}).invoke(app, [*command, *NOWHERE]).exit_code == 0
    assert asked == [
        ("u", "secret", True, False),
        ("u", "secret", False, True),
        ("u", "Topic:t", ("Pub", "Get"), False, ("10.0.0.1", "::1")),
        ("u", "Topic:t", ("Sub",), True, ()),
        ("u",),
    ]


def test_an_unknown_property_of_a_user_is_shown_as_unknown(monkeypatch):
    monkeypatch.setattr(brokers, "set_user", lambda client, *given: [UserAccount("u", None, None, ("a",))])
    set_user = ["user", "set", "u", "--password", "secret", *NOWHERE]
    (row,) = documents(CliRunner().invoke(app, [*set_user, "--json"]).stdout)
    assert row == {"user": "u", "type": None, "status": None, "brokers": ["a"]}
    assert CliRunner().invoke(app, set_user).stdout.split() == ["USER", "TYPE", "STATUS", "BROKERS", "u", "-", "-", "a"]


def test_who_may_do_everything_and_who_may_not_connect_is_shown(monkeypatch):
    accounts = [UserAccount("root", True, False, ("a",)), UserAccount("u", False, True, ("a",))]
    monkeypatch.setattr(brokers, "users", lambda client: accounts)
    found = documents(CliRunner().invoke(app, ["user", "list", "--json", *NOWHERE]).stdout)
    assert [(row["user"], row["type"], row["status"]) for row in found] == [
        ("root", "super", "disabled"),
        ("u", "normal", "enabled"),
    ]


def test_find_searches_the_period_and_the_environment(monkeypatch):
    asked = []
    for name in ("messages_by_key", "messages_of_time"):
        monkeypatch.setattr(messages, name, lambda client, *given: asked.append(given) or [])
    find = ("message", "find", "--topic", "t", "--from", "@5", "--to", "@9", "--limit", "7", *NOWHERE)
    where = ("--environment", "2", "-o", "environments=2")
    for more in (("--key", "k"), (), where):
        assert CliRunner().invoke(app, [*find, *more]).exit_code == 0
    assert asked == [("t", "k", 5, 9, 7), ("t", 5, 9, 7, None), ("t", 5, 9, 7, Environment.of("2", 2))]


def test_the_rates_of_a_broker_have_one_decimal():
    state = BrokerState("b", "c", 0, "127.0.0.1:1", "V5_5_0", 0, 19.99400179946016, 0.0, 0.25, {}, None)
    shown = _row(state, for_programs=False)
    assert (shown["putPerSecond"], shown["getPerSecond"], shown["diskUsed"]) == ("20.0", "0.0", "25%")
    assert _row(state, for_programs=True)["putPerSecond"] == 19.99400179946016
    assert _row(replace(state, put_per_s=None), for_programs=False)["putPerSecond"] is None


def test_a_topic_is_described_with_its_type_and_permission(run, rocketmq, make_topic):
    topic = make_topic(queues=1, attributes={"message.type": "FIFO"})
    (row,) = documents(run("topic", "describe", topic, "--json").stdout)
    assert (row["type"], row["permission"]) == ("FIFO", "RW")
    assert run("topic", "describe", topic).stdout.splitlines()[1].split()[-2:] == ["FIFO", "RW"]
