"""Dead letters: shown, chosen by key and time, and sent again when it is really wanted."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import Producer, PullConsumer, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.cli import message, topic_reader
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.message import DeadLetterFilter, _new_message
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import AccessDenied, CallTimeout, OptionError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.options import parse
from rocketmq_spark.session import producers
from tests.cli.conftest import documents
from tests.cli.test_tail import MESSAGE
from tests.helpers import awaited, stored_now, total
from tests.mockbroker import NO_ROUTE, MockBroker, ok

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
    awaited(lambda: documents(run("dlq", "show", group, "--json").stdout), lambda found: len(found) == 2)
    return group


def shown(run: Run, *arguments: str) -> list[str]:
    done = run("dlq", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return sorted(one["body"] for one in documents(done.stdout))


def stored(run: Run, topic: str) -> list[dict[str, Any]]:
    return documents(run("tail", topic, "--no-follow", "--json").stdout)


def test_dead_letters_are_shown_with_their_original_topics(run: Run, dead: str, topic: str) -> None:
    done = run("dlq", "show", dead)
    assert done.exit_code == 0, done.output
    ids = [letter["msgId"] for letter in documents(run("dlq", "show", dead, "--json").stdout)]
    shown = [text.split("  ")[:2] for text in done.stdout.splitlines()]
    assert shown == [[topic, msg_id] for msg_id in ids], "the id is what --key takes"
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
    for verb in ("show", "resend"):
        assert shown(run, verb, dead, "--since", "2999-01-01") == []
        assert run("dlq", verb, dead, "--since", "yesterday").exit_code == 2
    everything, none = (run("dlq", "resend", dead, *more) for more in ((), ("--until", first["storeTimestamp"])))
    assert [len(done.stdout.splitlines()) for done in (everything, none)] == [2, 0]


def test_nothing_is_sent_again_unless_it_is_really_wanted(run: Run, dead: str, topic: str) -> None:
    dry = run("dlq", "resend", dead, "--key", "k-a")
    assert (dry.exit_code, "1 would be sent; use --yes to apply" in dry.stderr) == (0, True)
    other = run("dlq", "resend", dead, "--send")
    assert (other.exit_code, "There is no --send" in other.stderr) == (2, True)
    assert dry.stdout.rstrip().endswith(f" to {topic}")
    (told,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--yes", "--json").stdout)
    assert (told["topic"], told["sent"]) == (topic, True)
    found = awaited(lambda: stored(run, topic), lambda found: len(found) == 3)
    (again,) = (one for one in found if one["msgId"] == told["newMsgId"])
    assert (again["body"], again["tags"], again["properties"]) == ("a", "t", {"mine": "1"})
    assert again["keys"] == ["k-a", f"dlq:{told['msgId']}"]


def test_a_letter_is_sent_again_once_unless_it_is_said_twice(run: Run, dead: str, topic: str) -> None:
    (first,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--yes", "--json").stdout)

    def dry() -> list[dict[str, object]]:
        return sorted(documents(run("dlq", "resend", dead, "--json").stdout), key=lambda told: "sentBefore" in told)

    b, a = awaited(dry, lambda told: "sentBefore" in told[-1])  # the index is built behind the acknowledgement
    assert ("sentBefore" in b, a["sent"], a["sentBefore"]) == (False, False, first["newMsgId"])
    (kept,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--yes", "--json").stdout)
    assert (kept["sent"], kept["sentBefore"]) == (False, first["newMsgId"])
    done = run("dlq", "resend", dead, "--yes")
    assert done.exit_code == 0
    assert f"{a['msgId']} to {topic} is skipped: it was resent before, as {first['newMsgId']}" in done.stdout
    assert "1 sent\n1 were resent before and are skipped: --again resends them" in done.stderr
    awaited(lambda: stored(run, topic), lambda found: len(found) == 4)
    (more,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--yes", "--again", "--json").stdout)
    assert (more["sent"], more["newMsgId"] != first["newMsgId"]) == (True, True)


def test_a_letter_resent_twice_has_only_the_last_key() -> None:
    letter = replace(MESSAGE, properties={"KEYS": "k dlq:01", "UNIQ_KEY": "02", "mine": "1"}, flag=7)
    copy = _new_message(letter)
    assert (copy.keys, copy.properties, copy.flag) == (["k", "dlq:02"], {"mine": "1"}, 7)


def test_what_cannot_be_sent_leaves_the_others_to_be_sent(
    run: Run, dead: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = message._new_message
    monkeypatch.setattr(
        message, "_new_message", lambda letter: replace(whole(letter), tags="a\x01b" if letter.body == b"a" else "t")
    )
    done = run("dlq", "resend", dead, "--yes")
    assert (done.exit_code, "1 sent" in done.stderr) == (1, True), done.stderr
    assert "is skipped: [ROCKETMQ_" in done.stderr
    awaited(lambda: [one["body"] for one in stored(run, topic)], lambda found: sorted(found) == ["a", "b", "b"])
    (left,) = documents(run("dlq", "resend", dead, "--key", "k-a", "--yes", "--json").stdout)
    assert (left["topic"], left["sent"], "ROCKETMQ_" in left["leftOut"]) == (topic, False, True)


def test_letters_of_a_deleted_topic_do_not_stop_the_others(
    run: Run, dead: str, topic: str, rocketmq: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the topic made again, as brokers do on demand."""
    gone = f"gone_{uuid.uuid4().hex[:8]}"
    letters = message._dead_letters
    monkeypatch.setattr(
        message,
        "_dead_letters",
        lambda *given: (replace(one, topic=gone) if one.body == b"a" else one for one in letters(*given)),
    )
    for again in ((), ("--again",)):
        done = run("dlq", "resend", dead, "--yes", *again)
        assert (done.exit_code, "1 sent" in done.stderr) == (1, True), done.output
        assert f"to {gone}, is skipped: [ROCKETMQ_ROUTE_NOT_FOUND]" in done.stderr
    assert gone not in rocketmq.admin.topics()
    awaited(lambda: [one["body"] for one in stored(run, topic)], lambda found: sorted(found) == ["a", "b", "b", "b"])


def test_undecodable_letters_do_not_stop_the_others(
    run: Run, dead: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be decoded has the bytes that are stored, which no reader of its topic expects."""
    letters = message._dead_letters
    odd = {b"a": {"decode_error": "its body does not match its CRC"}}
    monkeypatch.setattr(
        message, "_dead_letters", lambda *given: (replace(one, **odd.get(one.body, {})) for one in letters(*given))
    )
    told = {one["sent"]: one for one in documents(run("dlq", "resend", dead, "--yes", "--json").stdout)}
    assert (told[False]["leftOut"], told[True]["topic"]) == ("its body does not match its CRC", topic)
    odd[b"a"] = {"topic": f"%DLQ%{dead}"}
    done = run("dlq", "resend", dead, "--yes", "--again")
    assert (done.exit_code, "is skipped: the topic in which the group read it is unknown" in done.stderr) == (
        0,
        True,
    ), done.output
    awaited(lambda: [one["body"] for one in stored(run, topic)], lambda found: sorted(found) == ["a", "b", "b", "b"])


def test_letters_that_nobody_may_read_are_not_none(run: Run, dead: str, rocketmq: LocalBroker) -> None:
    """An operator may have closed them. It said that there are 0."""
    letters = f"%DLQ%{dead}"
    assert run("topic", "update", letters, "--permission", "W").exit_code == 0
    for arguments in (("show", dead), ("resend", dead, "--yes")):
        done = run("dlq", *arguments)
        assert (done.exit_code, f"topic {letters} has no read permission on broker-a" in done.stderr) == (1, True), (
            done.output
        )
        assert f"rocketmq-spark topic update {letters} --permission RW" in done.stderr
    done = run("topic", "update", letters, "--permission", "RW")
    assert done.exit_code == 0, done.output
    assert shown(run, "show", dead) == ["a", "b"]


def test_a_letter_goes_to_the_queue_of_its_sharding_key(rocketmq: LocalBroker, topic: str) -> None:
    letter = replace(MESSAGE, topic=topic, properties={"UNIQ_KEY": "02", "__SHARDINGKEY": "k", "mine": "1"})
    with Producer(name_server=rocketmq.name_server, group="p") as producer:
        first = producer.send(Message(topic, b"x"), selector="hash", arg="k")
        assert message._resend(producer, letter)
    awaited(lambda: total(rocketmq, topic), lambda found: found == 2)
    assert first.queue is not None
    (again,) = (one for one in stored_now(rocketmq, topic) if one.body == MESSAGE.body)
    assert again.queue_id == first.queue.queue_id
    assert again.properties["__SHARDINGKEY"] == "k"


def test_a_topic_that_is_not_writable_is_of_its_letters_alone() -> None:
    """It ended the command each time, and letters of other topics behind it were never sent."""
    errors = iter([RouteNotFound("no queue of the topic is writable"), CallTimeout("no answer in time")])

    def send(*given: object, **how: object) -> None:
        raise next(errors)

    producer: Any = SimpleNamespace(send=send)
    assert isinstance(message._resend(producer, MESSAGE), RouteNotFound)
    with pytest.raises(CallTimeout):
        message._resend(producer, MESSAGE)


def test_letters_do_not_go_to_a_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    """From there they were not in their topic, and the next command sent them once more."""
    given: list[dict[str, object]] = []
    letter = replace(MESSAGE, topic="orders")

    def send(*asked: object, **how: object) -> None:
        raise CallTimeout("no answer in time")

    def made(**options: object) -> Any:
        given.append(options)
        return nullcontext(SimpleNamespace(send=send))

    monkeypatch.setattr(producers, "Producer", made)
    monkeypatch.setattr(message, "_dead_letters", lambda *asked: [letter])
    monkeypatch.setattr(message, "_resend_finder", lambda target: lambda letter: None)
    monkeypatch.setattr(message, "_topic_error_finder", lambda target: lambda topic: None)
    words = [
        "dlq",
        "resend",
        "g",
        "--yes",
        "-n",
        "127.0.0.1:1",
        "-o",
        "onSendFailure=spool",
        "-o",
        "spool_dir=work",
        "-o",
    ]
    done = CliRunner().invoke(app, [*words, "spoolSync=batch", "-o", "sendTimeout=1s"])
    assert (done.exit_code, "no answer in time" in done.output) == (1, True), done.output
    assert "onSendFailure=spool is ignored" in done.output
    assert given == [{"group": GROUP, "name_server": "127.0.0.1:1", "send_timeout": "1s"}]


def test_two_letters_of_one_id_and_other_topics_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = SimpleNamespace(messages_of_key=lambda *asked: [])
    find = message._resend_finder(SimpleNamespace(client=lambda: SimpleNamespace(admin=admin)))  # type: ignore[arg-type]
    assert [find(replace(MESSAGE, topic=name)) for name in "aab"] == [None, "another letter of this id", None]


def test_a_resend_at_any_time_since_the_letter_died_is_found() -> None:
    """Also long ago, and by clocks that are ahead of ours or behind."""
    asked: list[tuple[Any, ...]] = []
    admin = SimpleNamespace(messages_of_key=lambda *given: asked.append(given) or [MESSAGE])
    find = message._resend_finder(SimpleNamespace(client=lambda: SimpleNamespace(admin=admin)))  # type: ignore[arg-type]
    died_ms, now_ms = 1_600_000_000_000, time.time_ns() // 1_000_000
    assert find(replace(MESSAGE, store_timestamp=died_ms)) == "ID"
    ((topic, key, begin_ms, end_ms),) = asked
    assert (topic, key) == ("t", "dlq:ID")
    assert begin_ms < died_ms < now_ms < end_ms


def test_where_nobody_can_look_it_up_it_is_said_and_sent(run: Run, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: BaseAdmin, topic: str, *given: object) -> list[object]:
        raise AccessDenied("no")

    monkeypatch.setattr(BaseAdmin, "messages_of_key", denied)
    done = run("dlq", "resend", dead, "--yes")
    assert (done.exit_code, "2 sent" in done.stderr) == (0, True)
    assert done.stderr.count("was resent before: ") == 2
    told = documents(run("dlq", "resend", dead, "--json").stdout)
    assert [("no" in one["notLookedUp"], one["sent"]) for one in told] == [(True, False)] * 2, "programs get no notes"


def test_a_group_without_dead_letters(run: Run) -> None:
    done = run("dlq", "show", "no_such_group")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "has no dead letters" in done.stderr


def test_letters_of_an_environment_are_sent_in_it_or_not_at_all(rocketmq: LocalBroker, topic: str, run: Run) -> None:
    """Without it they would go to the queues of all environments."""
    group, where = f"g_{uuid.uuid4().hex[:8]}", {"environment": "2", "environments": "2"}
    connection = {"name_server": rocketmq.name_server, "group": group, **where}
    with Producer(**connection) as producer:
        producer.send(Message(topic, b"a"))
    member = session.client(parse({"nameServer": rocketmq.name_server}).for_role("producer")).member
    with PullConsumer(**connection, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        (message,) = itertools.islice(consumer, 1)
        member.send_back(f"{group}_env_2", message, -1, 16, Deadline.after(10))
    known = ("--environment", "2", "-o", "environments=2")
    awaited(lambda: documents(run("dlq", "show", group, *known, "--json").stdout), lambda found: len(found) == 1)
    refused = run("dlq", "resend", f"{group}_env_2", "--yes")
    assert (refused.exit_code, "option 'environment' is not set" in refused.stderr) == (1, True), refused.stderr
    assert "Omit the ending _env_2 of the group, and use --environment 2" in refused.stderr
    dry = run("dlq", "resend", f"{group}_env_2", "--any-queue")
    assert (dry.exit_code, "1 would be sent" in dry.stderr) == (0, True), dry.stderr
    for _ in range(4):  # a message without a key goes to any queue of those that are its
        assert run("dlq", "resend", group, *known, "--yes", "--again").exit_code == 0
    awaited(lambda: total(rocketmq, topic), lambda found: found == 5)
    assert {one.queue_id % 2 for one in stored_now(rocketmq, topic)} == {1}


def test_letters_of_a_namespace_go_back_to_its_topic(rocketmq: LocalBroker, topic: str, run: Run) -> None:
    rocketmq.create_topic(f"shop%{topic}", 1)
    group, known = f"g_{uuid.uuid4().hex[:8]}", ("-o", "namespace=shop")
    connection = {"name_server": rocketmq.name_server, "group": group, "namespace": "shop"}
    with Producer(**connection) as producer:
        producer.send(Message(topic, b"a"))
    where = {"nameServer": rocketmq.name_server, "namespace": "shop"}
    member = session.client(parse(where).for_role("producer")).member
    with PullConsumer(**connection, consume_from_where="earliest") as consumer:
        consumer.assign(consumer.queues(topic))
        (message,) = itertools.islice(consumer, 1)
        member.send_back(group, message, -1, 16, Deadline.after(10))
    (letter,) = awaited(lambda: documents(run("dlq", "show", group, *known, "--json").stdout), bool)
    assert letter["topic"] == topic
    (told,) = documents(run("dlq", "resend", group, *known, "--yes", "--json").stdout)
    assert (told["topic"], told["sent"]) == (topic, True)
    awaited(lambda: total(rocketmq, f"shop%{topic}"), lambda found: found == 2)
    assert total(rocketmq, topic) == 0
    dry = ("dlq", "resend", group, *known, "--json")
    (again,) = awaited(lambda: documents(run(*dry).stdout), lambda found: "sentBefore" in found[0])
    assert again["sentBefore"] == told["newMsgId"], "it is looked for where it was sent"
    rocketmq.admin.delete_topic(f"shop%{topic}")
    done = run("dlq", "resend", group, *known, "--yes", "--again")
    assert (done.exit_code, "0 sent" in done.stderr) == (1, True), done.output
    assert f"to {topic}, is skipped: [ROCKETMQ_ROUTE_NOT_FOUND]" in done.stderr, (
        "the topic of that name elsewhere is another one"
    )
    assert f"shop%{topic}" not in rocketmq.admin.topics()


@pytest.mark.parametrize("separator", "+_")
def test_popped_letters_of_a_namespace_have_their_original_topic(
    separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group has a retry topic for each topic that it pops; both names in it have the namespace."""
    letter = replace(MESSAGE, topic="%DLQ%g", properties={"RETRY_TOPIC": f"%RETRY%shop%g{separator}shop%t"})
    reader = SimpleNamespace(seek=lambda place: None, messages=lambda: iter([letter]))
    monkeypatch.setattr(BaseAdmin, "consumed_topics", lambda *asked: [])
    monkeypatch.setattr(topic_reader, "TopicReader", lambda *asked: reader)
    given = ["g", "-o", "namespace=shop", "--name-server", "127.0.0.1:1", "--json"]
    (told,) = documents(CliRunner().invoke(app, ["dlq", "show", *given]).stdout)
    assert told["topic"] == "t"


def test_a_letter_has_the_topic_that_only_its_broker_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as one without a topic of its own, and would not be sent again."""
    letter = replace(MESSAGE, topic="%DLQ%g", properties={"DLQ_ORIGIN_TOPIC": "orders"})
    reader = SimpleNamespace(seek=lambda place: None, messages=lambda: iter([letter]))
    monkeypatch.setattr(BaseAdmin, "consumed_topics", lambda *asked: [])
    monkeypatch.setattr(topic_reader, "TopicReader", lambda *asked: reader)
    (told,) = documents(CliRunner().invoke(app, ["dlq", "show", "g", "--name-server", "127.0.0.1:1", "--json"]).stdout)
    assert told["topic"] == "orders"


def give_up(rocketmq: LocalBroker, group: str, topic: str) -> None:
    """``group`` reads what there is of a topic, commits, and gives all of it up."""
    member = session.client(parse({"nameServer": rocketmq.name_server}).for_role("producer")).member
    expected = total(rocketmq, topic)
    given = {"name_server": rocketmq.name_server, "group": group, "consume_from_where": "earliest"}
    with PullConsumer(**given, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        for message in itertools.islice(consumer, expected):
            member.send_back(group, message, -1, 16, Deadline.after(10))
        consumer.commit()


def test_letters_read_from_letters_go_back_to_these(run: Run, dead: str, topic: str, rocketmq: LocalBroker) -> None:
    """They went to the first topic, and those of the first group were then skipped as sent."""
    second, letters = f"{dead}-second", f"%DLQ%{dead}"
    give_up(rocketmq, second, letters)
    show = ("dlq", "show", second, "--json")
    found = awaited(lambda: documents(run(*show).stdout), lambda found: len(found) == 2)
    assert {one["topic"] for one in found} == {letters}
    told = documents(run("dlq", "resend", second, "--yes", "--json").stdout)
    assert [(one["topic"], one["sent"]) for one in told] == [(letters, True)] * 2
    awaited(lambda: total(rocketmq, letters), lambda found: found == 4)
    assert total(rocketmq, topic) == 2
    first = documents(run("dlq", "resend", dead, "--yes", "--json").stdout)
    assert sorted((one["topic"], one["sent"]) for one in first) == [
        (letters, False), (letters, False), (topic, True), (topic, True),
    ]  # fmt: skip
    assert all("--to-topic" in one["leftOut"] for one in first if not one["sent"]), "the copies name no topic"
    awaited(lambda: total(rocketmq, topic), lambda found: found == 4)
    # Since the group reads the first topic, too, each letter may be of either.
    give_up(rocketmq, second, topic)
    found = awaited(lambda: documents(run(*show).stdout), lambda found: len(found) == 6)
    assert sorted(one["topic"] for one in found) == sorted([topic] * 2 + [f"%DLQ%{second}"] * 4)
    dry = documents(run("dlq", "resend", second, "--to-topic", topic, "--key", "k-a", "--again", "--json").stdout)
    assert {(one["topic"], "leftOut" in one) for one in dry} == {(topic, False)}


@pytest.mark.parametrize(
    ("consumed", "holding", "expected"),
    [
        ([], [], "t"),
        (["t"], [], "t"),
        (["%RETRY%g"], [], "t"),
        (["%DLQ%g"], [], "t"),  # its own
        (["%DLQ%a"], [], "%DLQ%a"),
        (["%DLQ%a", "%DLQ%b"], ["%DLQ%b"], "%DLQ%b"),
        (["%DLQ%a", "%DLQ%b"], [], None),
        (["%DLQ%a", "%DLQ%b"], ["%DLQ%a", "%DLQ%b"], None),
        (["t", "%DLQ%a"], [], "t"),
        (["t", "%DLQ%a"], ["%DLQ%a"], None),
        (["u", "%RETRY%g"], [], None),  # whoever may write dead letters claims it
    ],
)
def test_in_which_topic_a_group_read_a_letter(
    monkeypatch: pytest.MonkeyPatch, consumed: list[str], holding: list[str], expected: str | None
) -> None:
    admin = SimpleNamespace(consumed_topics=lambda group: consumed)
    target = SimpleNamespace(client=lambda: SimpleNamespace(admin=admin))
    monkeypatch.setattr(message, "_has_message", lambda target, topic, msg_id: topic in holding)
    letter = replace(MESSAGE, queue=MESSAGE.queue._replace(topic="%DLQ%g"))
    find = message._read_topic_finder(SimpleNamespace(), target, "g")  # type: ignore[arg-type]
    assert find(letter, "t") == expected


def test_without_the_right_to_look_the_first_topic_is_taken() -> None:
    def denied(group: str) -> list[str]:
        raise AccessDenied("access denied")

    notes: list[str] = []
    target = SimpleNamespace(client=lambda: SimpleNamespace(admin=SimpleNamespace(consumed_topics=denied)))
    find = message._read_topic_finder(SimpleNamespace(note=notes.append), target, "g")  # type: ignore[arg-type]
    assert [find(MESSAGE, "t"), find(MESSAGE, "t")] == ["t", "t"]
    assert ["Cannot check whether g reads dead letters of other groups" in note for note in notes] == [True]


def test_a_misspelt_group_is_told_with_the_nearest(run: Run, dead: str) -> None:
    done = run("dlq", "show", f"{dead}x")
    assert (done.exit_code, f"Did you mean {dead}" in done.stderr) == (0, True)


def test_times_begin_with_the_first_and_end_before_the_last() -> None:
    died = replace(MESSAGE, store_timestamp=100)
    for since, until, wanted in ((100, None, True), (101, None, False), (None, 100, False), (None, 101, True)):
        assert DeadLetterFilter(frozenset(), since, until)(died) == wanted
    assert DeadLetterFilter(frozenset({"k2"}), None, None)(died)
    assert not DeadLetterFilter(frozenset({"k3"}), None, None)(died)
    assert not DeadLetterFilter(frozenset(), 100, 100)(died)
    with pytest.raises(OptionError, match=r"--since is .*\.101Z, but --until is .*\.100Z"):
        DeadLetterFilter(frozenset(), 101, 100)


def test_without_any_broker_it_is_not_said_that_there_are_none() -> None:
    empty = ok(b'{"brokerAddrTable":{},"clusterAddrTable":{}}')
    with MockBroker({Request.GET_ROUTEINFO_BY_TOPIC: NO_ROUTE, Request.GET_BROKER_CLUSTER_INFO: empty}) as server:
        for arguments in (("show", "g"), ("resend", "g", "--yes")):
            done = CliRunner().invoke(app, ["dlq", *arguments, "--name-server", server.address])
            assert (done.exit_code, "No broker is registered" in done.stderr) == (1, True), done.output
    session.close_all()
