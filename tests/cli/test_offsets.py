"""Offsets of groups, shown and set on a real broker; what RocketMQ's own consumers then read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
from click.testing import Result

from rocketmq_spark import Consumer, Producer, PullConsumer
from rocketmq_spark.admin.groups import GRPC_MEMBERS_HINT
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.model.admin import OffsetChange
from tests.cli.conftest import documents
from tests.helpers import awaited, total

Run = Callable[..., Result]


class Group:
    """A group that has read six of ten messages of queue 1, and none of queue 0."""

    def __init__(self, mq: LocalBroker, topic: str) -> None:
        self.mq, self.topic, self.name = mq, topic, f"g{uuid.uuid4().hex[:6]}"
        self.queue = MessageQueue(topic, "broker-a", 1)
        with Producer(name_server=mq.name_server, group="p") as producer:
            self.ids = [producer.send(Message(topic, b"%d" % n), queue=self.queue).msg_id for n in range(10)]
        total(mq, topic, 10)
        with self.consumer() as consumer:
            consumer.assign([self.queue])
            consumer.seek(self.queue, 6)
            consumer.commit()

    def consumer(self) -> PullConsumer:
        return PullConsumer(name_server=self.mq.name_server, group=self.name, auto_commit=False)

    def next_id(self) -> str:
        """The message that a consumer of the group reads first."""
        with self.consumer() as consumer:
            consumer.assign([self.queue])
            return consumer.poll(30)[0].msg_id


@pytest.fixture
def group(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> Group:
    return Group(rocketmq, make_topic(queues=2))


def told(done: Result) -> list[tuple[int, int | None, int]]:
    assert done.exit_code == 0, done.output
    return [(row["queueId"], row["offset"], row["new"]) for row in documents(done.stdout)]


def test_shown(group: Group, run: Run) -> None:
    done = run("offsets", "show", group.name, "--json")
    assert [(row["queueId"], row["minOffset"], row["offset"], row["maxOffset"]) for row in documents(done.stdout)] == [
        (0, 0, None, 0), (1, 0, 6, 10),
    ]  # fmt: skip
    text = run("offsets", "show", group.name, "--topic", group.topic)
    assert [line.split() for line in text.stdout.splitlines()[1:]] == [
        [group.topic, "broker-a", "0", "0", "-", "0"], [group.topic, "broker-a", "1", "0", "6", "10"],
    ]  # fmt: skip
    assert text.stderr == f"The group has no member now\n{GRPC_MEMBERS_HINT}\n"


def test_set_is_a_dry_run_first(group: Group, run: Run) -> None:
    dry = run("offsets", "set", group.name, "--to", "earliest")
    assert "reads 6 again" in dry.stdout
    assert (
        dry.stderr
        == f"2 of 2 offsets would be set: use --yes to apply\n{GRPC_MEMBERS_HINT}. They continue at the new offsets\n"
    )
    assert group.next_id() == group.ids[6]
    told_dry = run("offsets", "set", group.name, "--to", "earliest", "--json")
    done = run("offsets", "set", group.name, "--to", "earliest", "--yes", "--json")
    assert [{row["applied"] for row in documents(one.stdout)} for one in (told_dry, done)] == [{False}, {True}]
    assert told(done) == [(0, None, 0), (1, 6, 0)]
    assert group.next_id() == group.ids[0]
    assert told(run("offsets", "set", group.name, "--to", "latest", "--yes", "--json")) == [(0, 0, 0), (1, 0, 10)]


def test_by_time(group: Group, run: Run) -> None:
    assert told(run("offsets", "set", group.name, "--to", "2020-01-01", "--json"))[1] == (1, 6, 0)
    assert told(run("offsets", "set", group.name, "--to", "@4102444800000", "--json"))[1] == (1, 6, 10)
    assert told(run("offsets", "set", group.name, "--to", "1h", "--json"))[1] == (1, 6, 0)
    assert told(run("offsets", "set", group.name, "--to", "0s", "--json"))[1] == (1, 6, 10)


def test_options_of_kafkas_tool_are_answered_with_ours(run: Run) -> None:
    for option, value in (("--shift-by", "-10"), ("--by-duration", "PT1H"), ("--to-datetime", "2026-01-01T00:00:00")):
        done = run("offsets", "set", "g", option, value)
        assert (done.exit_code, "Use --to for all of these: 1h (one hour ago)" in done.stderr) == (2, True), done.stderr


def test_by_json_of_some_queues(group: Group, run: Run) -> None:
    def to(offset: int, queue: str = "1") -> str:
        return json.dumps({group.topic: {"broker-a": {queue: offset}}})

    assert told(run("offsets", "set", group.name, "--to", to(2), "--yes", "--json")) == [(1, 6, 2)]
    assert group.next_id() == group.ids[2]
    assert told(run("offsets", "set", group.name, "--to", to(-2), "--json")) == [(1, 2, 0)]
    assert told(run("offsets", "set", group.name, "--to", to(-1), "--json")) == [(1, 2, 10)]
    for wanted, said in (
        (to(11), f"--to: {group.queue} is 11, but the queue has 0 to 10"),
        (to(0, "7"), f"--to names queues that do not exist: {group.topic}/broker-a/7"),
    ):
        wrong = run("offsets", "set", group.name, "--to", wanted, "--yes")
        assert (wrong.exit_code, said in wrong.stderr) == (1, True), wrong.stderr
    other = run("offsets", "set", group.name, "--topic", "other", "--to", to(2))
    assert (other.exit_code, f"--to names {group.topic}, which --topic excludes" in other.stderr) == (1, True)
    usage = run("offsets", "set", group.name, "--to", "yesterday")
    assert (usage.exit_code, "'yesterday' is not latest, earliest, or a time: ISO-8601" in usage.stderr) == (2, True)
    number = run("offsets", "set", group.name, "--to", "4102444800000")
    assert (number.exit_code, "@4102444800000 is one in milliseconds since 1970" in number.stderr) == (2, True)


def test_in_an_environment_the_queues_that_it_owns(group: Group, run: Run) -> None:
    """Its group has offsets of these only: in others nobody would ever move them."""
    where = ("--environment", "2", "-o", "environments=2", "--topic", group.topic)
    assert told(run("offsets", "set", group.name, *where, "--to", "latest", "--yes", "--json")) == [(1, None, 10)]


def test_a_group_that_has_none_begins_there(group: Group, run: Run) -> None:
    group.name = f"none{uuid.uuid4().hex}"  # a short one may be near to another test's, which the error then suggests
    missing = run("offsets", "set", group.name, "--to", "earliest")
    assert (missing.exit_code, f"group {group.name} has no offsets. Name the topics" in missing.stderr) == (1, True)
    chosen = ("--topic", group.topic, "--to", json.dumps({group.topic: {"broker-a": {"1": 4}}}))
    assert told(run("offsets", "set", group.name, *chosen, "--yes", "--json")) == [(1, None, 4)]
    assert group.next_id() == group.ids[4]
    assert run("offsets", "show", "nobody").exit_code == 1


def test_a_misspelt_group_is_told_with_the_nearest(group: Group, run: Run) -> None:
    slip = f"{group.name}x"
    for arguments in (("offsets", "show", slip), ("lag", "--group", slip), ("offsets", "set", slip, "--to", "latest")):
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"group {slip} has no offsets. Did you mean {group.name}" in done.stderr, arguments
    chosen = ("--topic", group.topic, "--to", "latest")
    dry = run("offsets", "set", slip, *chosen)
    assert (dry.exit_code, f"No broker has group {slip}. Did you mean {group.name}" in dry.stderr) == (0, True)
    done = run("offsets", "set", slip, *chosen, "--yes")
    assert f"No broker had group {slip}. Did you mean {group.name}" in done.stderr
    assert "Did you mean" not in run("offsets", "set", slip, *chosen, "--yes").stderr
    assert "Did you mean" not in run("offsets", "set", group.name, *chosen).stderr
    group.mq.admin.create_group(f"{slip}y")
    known = run("lag", "--group", f"{slip}y")
    assert f"group {slip}y has no offsets. A new group starts where option" in known.stderr


def test_while_members_live_they_would_overwrite_it(group: Group, run: Run) -> None:
    with Consumer(name_server=group.mq.name_server, group=group.name) as member:
        member.subscribe(group.topic)
        member.start(lambda messages, context: None)
        shown = awaited(lambda: run("offsets", "show", group.name), lambda done: "1 members: " in done.stderr)
        assert "1 members: " in shown.stderr
        refused = run("offsets", "set", group.name, "--to", "earliest", "--yes")
        assert (refused.exit_code, "has 1 members, which would overwrite" in refused.stderr) == (1, True)
        preview = run("offsets", "set", group.name, "--to", "latest")
        assert "1 members, which overwrite these offsets with their own" in preview.stderr
        assert run("offsets", "set", group.name, "--to", "latest", "--yes", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [(6, 2, "reads 4 again"), (2, 6, "skips 4"), (2, 2, "stays"), (None, 2, "begins there")],
)
def test_what_a_change_does(before: int | None, after: int, effect: str) -> None:
    assert OffsetChange(MessageQueue("t", "a", 0), before, after).effect == effect
