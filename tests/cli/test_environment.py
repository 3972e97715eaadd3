"""Who writes and reads which queue, of members that live and of groups that are away."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from click.testing import Result

from rocketmq_spark import Admin, Consumer, Producer, PullConsumer
from rocketmq_spark.cli.topic import _text_row
from rocketmq_spark.client import topic_readers
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.topic_readers import GroupReader
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, QueueBounds, ReceivedMessage
from tests.cli.conftest import COMMAND, documents
from tests.helpers import WAIT_S, awaited, stored, total

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


def test_silent_and_foreign_readers_are_reported(
    rocketmq: LocalBroker, topic: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocketmq.create_topic(f"{topic}_dev", 1)
    queue = MessageQueue(topic, "broker-a", 0)
    found = [
        GroupReader("mine", "m1", (queue,), True),
        GroupReader("others", "m2", (queue,), False),
        GroupReader("silent", "m3", None, True),
    ]
    monkeypatch.setattr(topic_readers, "readers", lambda *asked: found)
    monkeypatch.setattr(BaseAdmin, "describe_topic", lambda self, name: {queue: QueueBounds(4, 9, 0)})
    asked = ("environment", "show", topic, "--environment", "dev", "-o", "environmentMode=suffix")
    (row,) = documents(run(*asked, "--json").stdout)
    assert (row["environment"], row["messages"]) == ("dev", 5)
    assert [(one["group"], one["environment"], one["foreign"]) for one in row["readers"]] == [
        ("mine", "dev", False),
        ("others", None, True),
    ]
    text = run(*asked)
    assert "What m3 of group silent reads is not known: it did not answer" in text.stderr
    assert ("! others" in text.stdout, "silent" in text.stdout) == (True, False)


def test_suffix_mode_creates_and_shows_topic_of_environment(rocketmq: LocalBroker, run: Run) -> None:
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
    assert (other.exit_code, documents(other.stdout)) == (0, [])


def test_a_copy_ends_when_its_environment_is_copied(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run
) -> None:
    """It would wait for its group in the queues of the others, or for another group, without end."""
    source, destination, group = make_topic(queues=4), make_topic(queues=4), f"g{uuid.uuid4().hex[:6]}"
    for name in ("1", "2"):
        where = ("--environment", name, "-o", "environments=2")
        assert run("produce", source, *where, input="".join(f"{name}{n}\n" for n in range(4))).exit_code == 0
    total(rocketmq, source, 8)
    command = [*COMMAND, "copy", source, destination, "--group", group, *where, "--name-server", rocketmq.name_server]
    for copied in (4, 0):
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=WAIT_S)
        assert [row["copied"] for row in documents(done.stdout)] == [copied], done.stderr
    found = stored(rocketmq, destination, 4)
    assert sorted(one.body for one in found) == [b"20", b"21", b"22", b"23"]
    assert {one.queue_id % 2 for one in found} == {1}


def test_a_topic_is_not_copied_to_itself_by_its_two_names(rocketmq: LocalBroker, topic: str, run: Run) -> None:
    rocketmq.create_topic(f"shop%{topic}", 1)
    given = ("--group", f"g{uuid.uuid4().hex[:6]}", "--name-server", rocketmq.name_server)
    for source, destination, where in (
        (f"shop%{topic}", topic, ("--to-option", "namespace=shop")),
        (topic, f"shop%{topic}", ("-o", "namespace=shop", "--to-name-server", rocketmq.name_server)),
    ):
        done = run("copy", source, destination, *given, *where)
        assert (done.exit_code, "would be copied to itself" in done.stderr) == (1, True), done.output
    assert run("copy", topic, topic, *given, "--to-option", "namespace=shop").exit_code == 0


def test_commands_change_and_delete_the_environments_group(rocketmq: LocalBroker, topic: str, run: Run) -> None:
    """The group of the plain name is another one, whose readers would begin elsewhere."""
    group, where = f"g{uuid.uuid4().hex[:6]}", ("--environment", "2", "-o", "environments=2")
    assert run("produce", topic, *where, input="a\nb\n").exit_code == 0
    total(rocketmq, topic, 2)
    for more in ((), where):  # the others read nothing
        done = run("offsets", "set", group, "--topic", topic, "--to", "earliest", "--yes", *more)
        assert done.exit_code == 0, done.output
    assert run("offsets", "set", group, "--to", "latest", "--yes", *where).exit_code == 0
    with Admin(rocketmq.name_server) as admin:
        others, mine = (admin.offsets(name, [topic]) for name in (group, f"{group}_env_2"))
    assert set(others.values()) == {0}
    own = {queue: offset for queue, offset in mine.items() if offset is not None}
    assert ({queue.queue_id % 2 for queue in own}, sum(own.values())) == ({1}, 2)
    shown = documents(run("offsets", "show", group, "--json", *where).stdout)
    assert sum(row["offset"] or 0 for row in shown) == 2
    assert documents(run("lag", "--group", group, "--json", *where).stdout)[0]["lag"] == 0
    assert documents(run("group", "describe", group, "--json", *where).stdout)[0]["group"] == f"{group}_env_2"
    assert run("group", "delete", group, "--yes", *where).exit_code == 0
    names = run("group", "list").stdout.splitlines()
    assert (group in names, f"{group}_env_2" in names) == (True, False)


def test_commands_change_and_delete_within_the_namespace(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run
) -> None:
    """The topic and the group of the plain name are those of others."""
    topic, group = make_topic(queues=1, attributes={"message.type": "FIFO"}), f"g{uuid.uuid4().hex[:6]}"

    def done(*command: str, where: tuple[str, ...] = ("-o", "namespace=shop")) -> Result:
        found = run(*command, *where)
        assert found.exit_code == 0, found.output
        return found

    def queues() -> list[int]:
        return [len(rocketmq.admin.describe_topic(name)) for name in (topic, f"shop%{topic}")]

    done("topic", "create", topic, "--queues", "2")
    assert awaited(queues, lambda found: found[1] == 2) == [1, 2]
    done("topic", "update", topic, "--permission", "R", where=())
    done("topic", "widen", topic, "--queues", "3")
    assert awaited(queues, lambda found: found[1] == 3) == [1, 3]
    told = documents(done("topic", "describe", topic, "--json").stdout)
    assert {(row["type"], row["permission"]) for row in told} == {("NORMAL", "RW")}
    assert run("produce", topic, "-o", "namespace=shop", input="a\n").exit_code == 0
    total(rocketmq, f"shop%{topic}", 1)
    set_offsets = ("offsets", "set", group, "--topic", topic, "--yes", "--to")
    done(*set_offsets, "earliest", where=())
    done(*set_offsets, "latest")
    with Admin(rocketmq.name_server) as admin:
        assert set(admin.offsets(group, [topic]).values()) == {0}
        assert sorted(admin.offsets(f"shop%{group}", [f"shop%{topic}"]).values()) == [0, 0, 1]
    assert documents(done("lag", "--group", group, "--json").stdout)[0]["lag"] == 0
    rocketmq.admin.create_group(f"shop%{group}", settings={"retryMaxTimes": 3})
    (row,) = documents(done("group", "describe", group, "--json").stdout)
    assert row["settings"]["broker-a"]["retryMaxTimes"] == 3
    with PullConsumer(rocketmq.name_server, group, namespace="shop") as consumer:
        consumer.subscribe(topic)
        consumer.poll(0.1)
        awaited(lambda: documents(done("group", "describe", group, "--json").stdout)[0]["members"])
        for refused in (("group", "delete", group, "--yes"), (*set_offsets, "earliest")):
            assert run(*refused, "-o", "namespace=shop").exit_code == 1
    done("group", "delete", group, "--topics", "--yes")
    assert group in done("group", "list", where=()).stdout.splitlines()
    assert group not in done("group", "list").stdout.splitlines()
    done("topic", "delete", topic, "--yes")
    assert [name in rocketmq.admin.topics() for name in (topic, f"shop%{topic}")] == [True, False]
    assert len(rocketmq.admin.describe_topic(topic)) == 1


def test_what_is_consumed_and_copied_is_that_of_the_namespace(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run
) -> None:
    """Read as the group of the plain name, it would be missing for the readers of that."""
    topic, copied, group = make_topic(queues=1), make_topic(queues=1), f"g{uuid.uuid4().hex[:6]}"
    for name in (topic, copied):
        rocketmq.create_topic(f"shop%{name}", 1)
    where = ("-o", "namespace=shop")
    assert run("produce", topic, input="of\nothers\nmore\n").exit_code == 0
    assert run("produce", topic, *where, input="a\nb\n").exit_code == 0
    total(rocketmq, topic, 3)
    total(rocketmq, f"shop%{topic}", 2)
    read = run("consume", topic, "--group", group, "--from", "earliest", "--count", "2", *where)
    assert sorted(row["body"] for row in documents(read.stdout)) == ["a", "b"]
    told = documents(run("copy", topic, copied, "--group", f"{group}c", "--json", *where).stdout)
    assert [row["copied"] for row in told] == [2]
    total(rocketmq, f"shop%{copied}", 2)
    with Admin(rocketmq.name_server) as admin:
        for name in (group, f"{group}c"):
            assert set(admin.offsets(f"shop%{name}", [f"shop%{topic}"]).values()) == {2}
            assert name not in admin.groups()


def test_a_queue_that_takes_no_messages_is_written_by_nobody() -> None:
    shown = _text_row({"environment": "1", "writable": False, "readers": []})
    assert (shown["environment"], shown["shown"]) == (None, None)
