"""Dead letters: shown, chosen by key and time, and sent again when it is really wanted."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import Result

from rocketmq_spark import session
from rocketmq_spark.cli.dlq import Wanted
from rocketmq_spark.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.options import parse
from rocketmq_spark.session import Producer, PullConsumer
from tests.cli.conftest import documents, eventually
from tests.cli.test_tail import MESSAGE

Run = Callable[..., Result]


@pytest.fixture
def dead(rocketmq: LocalBroker, topic: str, run: Run) -> str:
    """A group that could not consume the messages a and b of a topic."""
    group = f"g_{uuid.uuid4().hex[:8]}"
    connection = {"name_server": rocketmq.name_server, "group": group}
    with Producer(**connection) as producer:
        for text in "ab":
            producer.send(Message(topic, text.encode(), tags="t", keys=[f"k-{text}"], properties={"mine": "1"}))
    member = session.client(parse({"nameServer": rocketmq.name_server}).for_role("producer")).member
    with PullConsumer(**connection, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        for message in itertools.islice(consumer, 2):
            member.send_back(group, message, -1, 16, Deadline.after(10))
    eventually(lambda: documents(run("dlq", "show", group, "--json").stdout), lambda found: len(found) == 2)
    return group


def shown(run: Run, *arguments: str) -> list[str]:
    done = run("dlq", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return sorted(one["body"] for one in documents(done.stdout))


def test_1_24_dead_letters_are_shown_with_the_topic_they_came_from(run: Run, dead: str, topic: str) -> None:
    done = run("dlq", "show", dead)
    assert done.exit_code == 0, done.output
    assert all(text.startswith(f"{topic}  ") for text in done.stdout.splitlines())
    assert f"2 dead letters of group {dead}" in done.stderr
    first, second = documents(run("dlq", "show", dead, "--json").stdout)
    assert {first["topic"], second["topic"]} == {topic}
    assert {first["body"], second["body"]} == {"a", "b"}


def test_letters_are_chosen_by_key_id_and_time(run: Run, dead: str) -> None:
    assert shown(run, "show", dead, "--key", "k-a") == ["a"]
    first, _ = documents(run("dlq", "show", dead, "--json").stdout)
    assert shown(run, "show", dead, "--key", first["msgId"]) == [first["body"]]
    assert shown(run, "show", dead, "--since", first["storeTimestamp"]) == ["a", "b"]
    assert shown(run, "show", dead, "--until", first["storeTimestamp"]) == []
    assert run("dlq", "show", dead, "--since", "yesterday").exit_code == 2


def test_nothing_is_sent_again_unless_it_is_really_wanted(run: Run, dead: str, topic: str) -> None:
    dry = run("dlq", "resend", dead, "--key", "k-a")
    assert (dry.exit_code, "1 would be sent; --send does it" in dry.stderr) == (0, True)
    assert dry.stdout.rstrip().endswith(f" to {topic}")
    (told,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--send", "--json").stdout)
    assert (told["topic"], told["sent"]) == (topic, True)
    found = eventually(
        lambda: documents(run("tail", topic, "--no-follow", "--json").stdout), lambda found: len(found) == 3
    )
    (again,) = (one for one in found if one["msgId"] == told["newMsgId"])
    assert (again["body"], again["tags"], again["keys"], again["properties"]) == ("a", "t", ["k-a"], {"mine": "1"})


def test_a_group_without_dead_letters(run: Run) -> None:
    done = run("dlq", "show", "no_such_group")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "has no dead letters" in done.stderr


def test_times_begin_with_the_first_and_end_before_the_last() -> None:
    died = replace(MESSAGE, store_timestamp=100)
    for since, until, wanted in ((100, None, True), (101, None, False), (None, 100, False), (None, 101, True)):
        assert Wanted(frozenset(), since, until)(died) == wanted
    assert Wanted(frozenset({"k2"}), None, None)(died)
    assert not Wanted(frozenset({"k3"}), None, None)(died)
