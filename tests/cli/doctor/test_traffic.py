"""Topics, rights, groups and readers, by what brokers and members say."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from rocketmq_spark.admin import groups
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor import command, findings, servers
from rocketmq_spark.cli.doctor.command import Subject
from rocketmq_spark.cli.doctor.findings import Level
from rocketmq_spark.errors import AccessDenied, CallTimeout, GroupNotFound, OffsetError
from rocketmq_spark.model import BrokerData, Filter, MessageQueue, QueueBounds, QueueData, TopicRoute
from rocketmq_spark.model.admin import QueueLag
from rocketmq_spark.spark.checkpoints.rewind import drift

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
Q = MessageQueue("t", "a", 0)


def route(**perms: int) -> TopicRoute:
    return TopicRoute(
        "t", tuple(QueueData(name, 4, 4, perm) for name, perm in perms.items()),
        {name: BrokerData(name, "c", {0: "h:1"}) for name in perms},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("perms", "attributes", "expected"),
    [
        ({"a": 6}, {}, [(Level.OK, "queues: 4 on a; type NORMAL")]),
        ({"a": 6}, None, [(Level.OK, "type unknown")]),
        ({"a": 4}, {}, [(Level.OK, ""), (Level.BROKEN, "cannot be written on a")]),
        ({"a": 6, "b": 2}, {}, [(Level.OK, ""), (Level.ADVICE, "cannot be read on b")]),
        ({"a": 6}, {"message.type": "FIFO"}, [(Level.OK, "type FIFO"), (Level.ADVICE, "is of type FIFO")]),
        ({"a": 6}, {"queue.type": "BatchCQ"}, [(Level.OK, "type NORMAL, queue.type=BatchCQ")]),
        ({"a": 6}, {"cleanup.policy": "COMPACTION"}, [(Level.OK, ""), (Level.ADVICE, "last message of each key")]),
    ],
)
def test_a_topic(perms, attributes, expected) -> None:
    found = list(servers.topic_findings(route(**perms), attributes))
    assert [one.level for one in found] == [level for level, _ in expected]
    assert all(words in one.text for one, (_, words) in zip(found, expected, strict=True)), found


def test_rights_that_are_missing_are_named() -> None:
    denied = AccessDenied("access denied", remark="User:x has no permission")
    source, sink = servers.rights_findings("t", "x", {"source": denied, "sink": denied})
    assert (source.level, sink.level) == (Level.BROKEN, Level.ADVICE)
    assert "user x may not read t: User:x has no permission" in source.text
    assert "Grant Sub and Get on the topic, Sub on the group" in (source.remedy or "")
    assert "Grant Pub on the topic" in (sink.remedy or "")
    fine = servers.rights_findings("t", None, {"source": None, "sink": None})
    assert [one.level for one in fine] == [Level.OK, Level.OK]
    (away,) = servers.rights_findings("t", None, {"source": CallTimeout("no answer in time", "h:1")})
    assert (away.level, away.text) == (Level.BROKEN, "no answer in time (at h:1)")


def test_every_broker_is_checked_and_denials_count_before_errors(monkeypatch) -> None:
    denied, lacks = AccessDenied("access denied", "h:2"), GroupNotFound("no group", "h:1")
    said = {"a": lacks, "b": denied, "c": None}
    for name in ("_read_error", "_write_error"):
        monkeypatch.setattr(findings, name, lambda client, route, queue, *group: said[queue.broker_name])

    def asked(names):
        queues = [MessageQueue("t", name, n) for name in names for n in range(2)]
        return findings.worst_read_error(Mock(), Mock(), queues, "g"), findings.worst_write_error(
            Mock(), Mock(), queues
        )

    assert [asked(names) for names in ("abc", "ac", "c")] == [(denied, denied), (lacks, lacks), (None, None)]
    (told,) = servers.rights_findings("t", "x", {"source": denied})
    assert told.text == "user x may not read t: access denied (at h:2)"


A, B = {"t": Filter("x || y")}, {"t": Filter("y||x"), "u": Filter()}


@pytest.mark.parametrize(
    ("members", "level", "words"),
    [
        ({}, Level.OK, "no member"),
        ({"m": A, "n": {"t": Filter("y||x")}}, Level.OK, "2 members, all of which subscribe to t (x || y)"),
        ({"m": A}, Level.OK, "1 member, which subscribes to"),
        ({"m": A, "n": B}, Level.BROKEN, "m wants t (x || y); n wants t (y||x), u (*)"),
        ({"m": A, "n": {"t": Filter("x || y", "SQL92")}}, Level.BROKEN, "have different subscriptions"),
        ({"m": A, "n": None}, Level.ADVICE, "n did not say"),
    ],
)
def test_what_members_want(members, level, words) -> None:
    found = servers.subscriptions_finding("g", members)
    assert found.level is level
    assert words in found.text


def test_a_group_that_is_to_pop_is_advice_with_the_remedy() -> None:
    modes = {("t", "broker-a"): "POP", ("t", "broker-b"): "PULL", ("u", "broker-a"): "PULL", ("t", "broker-c"): "POP"}
    (found,) = servers.consume_modes_findings("g", modes)
    assert (found.check, found.level) == ("group g", Level.ADVICE)
    assert "consume mode for topic t is POP at broker-a, broker-c" in found.text
    assert "mqadmin setConsumeMode -m PULL" in str(found.remedy)
    assert not list(servers.consume_modes_findings("g", {("t", "broker-a"): "PULL"}))


@pytest.mark.parametrize(
    ("row", "kept_ms", "level", "words"),
    [
        (QueueLag(Q, 0, 10, 10), HOUR_MS, Level.OK, "0 messages behind; messages are kept for 1 h 0 m"),
        (QueueLag(Q, 0, 4, 10, NOW_MS - HOUR_MS // 4), HOUR_MS, Level.OK, "6 messages behind, the oldest for 15 m 0 s"),
        (QueueLag(Q, 0, 4, 10, NOW_MS - HOUR_MS // 2), HOUR_MS, Level.OK, "; messages are kept for 1 h 0 m"),
        (QueueLag(Q, 0, 4, 10, NOW_MS - HOUR_MS * 3 // 4), HOUR_MS, Level.ADVICE, "kept for 1 h 0 m"),
        (QueueLag(Q, 0, 4, 10, NOW_MS - HOUR_MS * 3 // 4), None, Level.OK, "6 messages behind"),
        (QueueLag(Q, 7, 4, 10), HOUR_MS, Level.BROKEN, "3 messages were removed"),
        (QueueLag(Q, 0, None, 10), HOUR_MS, Level.ADVICE, "not known"),
        (QueueLag(Q, 0, 12, 10), HOUR_MS, Level.BROKEN, "1 of 1 queues end before its offsets"),
    ],
)
def test_how_far_a_reader_is_next_to_retention(row, kept_ms, level, words) -> None:
    found = servers.retention_finding("group g", [row], kept_ms, NOW_MS)
    assert (found.check, found.level) == ("group g", level)
    assert words in found.text


@pytest.mark.parametrize(("whose", "option"), [("group g", False), ("checkpoint /c", True)])
def test_only_a_query_is_told_of_an_option_of_queries(whose: str, option: bool) -> None:
    """A group has no ``failOnDataLoss``: its members continue at the first message that is kept."""
    found = servers.retention_finding(whose, [QueueLag(Q, 7, 4, 10)], HOUR_MS, NOW_MS)
    assert ("failOnDataLoss=warn" in (found.remedy or "")) is option


def test_a_batch_that_waits_for_a_broker() -> None:
    told = {"batchId": 7, "forMs": 65_000, "waitsFor": ["broker-b"]}
    found = servers.unfinished_batch_finding("c", told)
    assert (found.level, found.text) == (
        Level.BROKEN,
        "batch 7 was begun 1 m 5 s ago and is not done: broker-b does not answer",
    )
    assert (found.remedy or "").startswith("Start broker-b: nothing is lost")
    fine = servers.unfinished_batch_finding("c", {**told, "waitsFor": []})
    assert (fine.level, fine.text) == (
        Level.OK,
        "batch 7 was begun 1 m 5 s ago and is not done: it runs, or its query has ended",
    )
    assert servers.unfinished_batch_finding("c", {**told, "waitsFor": [], "forMs": None}).level is Level.OK
    old = servers.unfinished_batch_finding("c", {**told, "waitsFor": [], "forMs": 300_000})
    assert (old.level, "start it: it repeats the batch" in (old.remedy or "")) == (Level.ADVICE, True)


def test_a_group_in_a_topic_that_was_made_again() -> None:
    rows = [QueueLag(Q, 0, 12, 10), QueueLag(Q._replace(queue_id=1), 0, 4, 10)]
    found = servers.retention_finding("group g", rows, None, NOW_MS)
    assert (found.level, found.text.partition(":")[0]) == (Level.BROKEN, "1 of 2 queues end before its offsets")
    assert "offsets set g --to earliest" in (found.remedy or "")
    known = servers.retention_finding("group g", [QueueLag(Q, None, 4, None), rows[1]], None, NOW_MS)
    assert known.text == "6 messages behind in 1 of 2 queues"


def test_a_new_group_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(client: object, group: str, topics: object) -> None:
        raise OffsetError(f"group {group} has no offsets", remedy=groups.new_group_remedy(group, ["t"]))

    monkeypatch.setattr(command, "_check_group", none)
    (found,) = command.check_readers(Target({"name_server": "127.0.0.1:1"}), Mock(), Subject(group="g"))
    assert (found.check, found.level, found.text) == ("group g", Level.ADVICE, "group g has no offsets")
    assert "rocketmq-spark offsets set g --topic t --to earliest --yes" in (found.remedy or "")


def test_a_checkpoint_of_another_topic() -> None:
    found = servers.reads_other_topics_finding("checkpoint c", {"b", "a"}, ["other"])
    assert (found.level, found.text) == (Level.ADVICE, "its query reads a, b, not other")


def test_a_checkpoint_next_to_brokers() -> None:
    bounds = {Q: QueueBounds(5, 10, 0)}
    (well,) = servers.checkpoint_drift_findings("c", drift({Q: 7}, bounds))
    assert well.level is Level.OK
    (lost,) = servers.checkpoint_drift_findings("c", drift({Q: 2}, bounds))
    assert (lost.level, lost.text) == (Level.BROKEN, "1 of 1 queues do not match what brokers have: t/a/0 lost")
    assert "reads a topic that was created again from its start" in (lost.remedy or "")


def test_brokers_that_a_checkpoint_waits_for_are_no_loss() -> None:
    other = Q._replace(broker_name="b")
    (silent,) = servers.checkpoint_drift_findings("c", drift({Q: 7}, {}, unavailable_brokers={"a"}))
    assert (silent.level, silent.text) == (Level.BROKEN, "a does not answer, and 1 of 1 queues wait for it")
    lost, down = servers.checkpoint_drift_findings(
        "c", drift({Q: 2, other: 3}, {Q: QueueBounds(5, 10, 0)}, unregistered_brokers={"b"})
    )
    assert "1 of 2 queues do not match what brokers have: t/a/0 lost" in lost.text
    assert (down.text, down.remedy) == (
        "b is not registered, and 1 of 2 queues wait for it", "Start it on its data; nothing is lost",
    )  # fmt: skip
