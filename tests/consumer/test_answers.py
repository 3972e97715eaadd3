from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from rocketmq_spark.errors import ClosedError, MessageRefused
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import (
    ConsumeDirectly,
    DirectOutcome,
    GetConsumedOffsets,
    GetRunningInfo,
    ResetOffsets,
)
from tests.consumer.group import GroupBench
from tests.consumer.messages import message
from tests.fakes.group_member import FakeMember
from tests.helpers import raising
from tests.queues import q, qs

A = q("a:0")
NO_POP = "AttributeError: 'tuple' object has no attribute 'pop'"


def test_reset_continues_at_the_new_offset_and_drops_the_cache(group: GroupBench) -> None:
    group.brokers.offsets[A] = 0
    group.brokers.send(A, *(b"%d" % i for i in range(10)))
    consumer, port = group.start()
    group.time.advance(1)
    assert len(group.got) == 10
    group.workers[0].held = True
    group.brokers.send(A, b"cached")
    group.time.advance(0.1)
    group.got.clear()
    assert port.asked("a:1", ResetOffsets("T", {A: 8, q("z:0"): 3})) is None
    group.time.advance(0.1)
    group.workers[0].let_go()
    group.time.advance(3)
    assert group.bodies() == [b"8", b"9", b"cached"]
    assert q("z:0") not in group.brokers.offsets
    consumer.stop()
    assert group.brokers.offsets[A] == 11


def test_of_two_resets_within_a_second_the_later_one_holds(group: GroupBench) -> None:
    """The queue is on its way back when the second one comes."""
    _, port = group.start()
    group.time.advance(3)
    group.brokers.send(A, *(b"%d" % i for i in range(10)))
    group.time.advance(15)
    group.got.clear()
    port.asked("a:1", ResetOffsets("T", {A: 9}))
    port.asked("a:1", ResetOffsets("T", {A: 7}))
    group.time.advance(3)
    assert group.bodies() == [b"7", b"8", b"9"]


def test_reset_during_revocation_is_stored_before_other_requests(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next member asks at once where they begin; other queues and topics of this one may take seconds."""
    consumer, port = group.start()
    group.brokers.send(q("b:1"), b"0", b"1", b"2")
    group.time.advance(15)
    owns, gone, told = consumer._running._ownership, list[MessageQueue](), list[int]()
    drop, add = owns.drop, owns.add

    def dropped(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        if found := drop(queues):
            gone.extend(found)
            port.asked("a:1", ResetOffsets("T", dict.fromkeys(found, 1)))
        return found

    def added(queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        told.extend(group.brokers.offsets[queue] for queue in gone if len(told) < len(gone))
        return add(queues)

    monkeypatch.setattr(owns, "drop", dropped)
    monkeypatch.setattr(owns, "add", added)
    group.start()
    group.time.advance(2)
    assert q("b:1") in gone
    assert told == [1] * len(gone)


def _reset_between_rebalances(group: GroupBench, port: FakeMember) -> None:
    """Of queue A to 1; the next rebalance is most of a second away."""
    port.asked("a:1", ResetOffsets("T", {q("b:0"): 0}))
    group.time.advance(0.2)
    port.asked("a:1", ResetOffsets("T", {A: 1}))
    group.time.run_due()


def test_a_reset_holds_over_the_offset_that_a_pull_brought_along(group: GroupBench) -> None:
    """A broker stores that when it has read the messages for the pull: after the reset, which it stores at once."""
    _, port = group.start()
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(1)
    late, real = [], port.pull
    port.pull = lambda *given: late.append(given) if given[0].queue == A else real(*given)  # type: ignore[method-assign]
    group.brokers.send(A, b"3")
    group.time.advance(6)
    group.got.clear()
    _reset_between_rebalances(group, port)
    port.pull = real  # type: ignore[method-assign]
    ((request, _, done),) = late
    assert (group.brokers.offsets[A], request.commit_offset) == (1, 3)
    group.brokers.offsets[A] = request.commit_offset
    done(group.brokers.answer(request))
    group.time.advance(1)
    assert group.brokers.offsets[A] == 1
    group.time.advance(1)
    assert group.bodies() == [b"1", b"2", b"3"]


def test_messages_another_finished_after_a_reset_do_not_repeat(group: GroupBench) -> None:
    _, port = group.start()
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(6)
    group.got.clear()
    _reset_between_rebalances(group, port)
    other, _ = group.start(name="a")
    group.time.advance(3)
    other.stop()
    group.time.advance(3)
    assert group.got == [("a", b"1", 0), ("a", b"2", 0)]
    assert port.begun[A] == 2


def test_offsets_are_those_of_one_topic(group: GroupBench) -> None:
    group.brokers.topics["U"] = qs("a:0", "U")
    consumer, port = group.start()
    consumer.subscribe("U")
    group.time.advance(2)
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    assert port.asked("a:1", GetConsumedOffsets("T")) == {A: 1} | dict.fromkeys(qs("a:1 b:0-1"), 0)


def test_stacks_that_cannot_be_written_are_told_as_that(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", raising(OSError("the disk is full")))
    _, port = group.start()
    assert port.asked("a:1", GetRunningInfo(True)).stacks.endswith("temporary file: the disk is full")


@pytest.mark.parametrize("stacks", [True, False])
def test_running_info_shows_queues_and_stacks(group: GroupBench, stacks: bool) -> None:
    _, port = group.start()
    group.time.advance(1)
    group.workers[0].held = True
    group.brokers.send(A, b"1", b"2")
    group.time.advance(0.1)
    info = port.asked("a:1", GetRunningInfo(stacks))
    assert set(info.membership.subscriptions) == {"T", "%RETRY%g"}
    assert (info.ordered, info.threads) == (False, 20)
    found = info.queues[A]
    assert (found.cached_min_offset, found.cached_max_offset, found.cached_count) == (0, 1, 2)
    assert (found.commit_offset, found.locked, found.last_lock_ms) == (0, False, None)
    assert found.last_pull_ms == 1_700_000_000_000 + 1_001_000 + 100 - 100
    assert info.queues[q("a:1")].cached_min_offset is None
    if not stacks:
        assert info.stacks is None
        return
    _, _, rest = info.stacks.partition("hread MainThread (most recent call first):\n")
    assert "test_running_info" in rest.partition("\n\n")[0]


@pytest.mark.parametrize(
    ("does", "outcome", "remark"),
    [
        (lambda messages, context: None, DirectOutcome.SUCCESS, None),
        (lambda messages, context: context.retry(), DirectOutcome.LATER, None),
        (lambda messages, context: "nonsense", DirectOutcome.LATER, None),
        (lambda messages, context: 1 / 0, DirectOutcome.THROW_EXCEPTION, "ZeroDivisionError: division by zero"),
        (raising(SystemExit("mine")), DirectOutcome.THROW_EXCEPTION, "SystemExit: mine"),
        (lambda messages, context: messages.pop(), DirectOutcome.THROW_EXCEPTION, NO_POP),
    ],
)
def test_a_message_may_be_consumed_directly(group: GroupBench, does, outcome, remark) -> None:
    _, port = group.start(does)
    result = port.asked("a:1", ConsumeDirectly(message(7, b"direct")))
    assert (result.outcome, result.remark, result.ordered) == (outcome, remark, False)
    assert group.bodies() == [b"direct"]
    assert not port.seen("send_back")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_consumer_that_stops_consumes_nothing_directly(group: GroupBench, ordered: bool) -> None:
    """It is a member until its listeners are through."""
    consumer, port = group.start(ordered=ordered)
    asked = port.asked
    consumer.stop()
    with pytest.raises(ClosedError):
        asked("a:1", ConsumeDirectly(message(7, b"direct")))
    assert group.bodies() == []


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_an_ordered_listener_says_what_it_would_do(group: GroupBench, word: str) -> None:
    _, port = group.start(lambda messages, context: getattr(context, word)(), ordered=True, auto_commit=False)
    result = port.asked("a:1", ConsumeDirectly(message(7)))
    assert (result.outcome.name, result.ordered, result.auto_commit) == (word.upper(), True, False)


@pytest.mark.parametrize("ordered", [False, True])
def test_listener_can_reply_to_pulled_and_direct_messages(group: GroupBench, ordered: bool) -> None:
    _, port = group.start(lambda messages, context: context.reply(b"re:" + messages[0].body), ordered=ordered)
    group.time.advance(3)
    group.brokers.send(A, b"pulled")
    group.time.advance(1)
    port.asked("a:1", ConsumeDirectly(message(7, b"direct")))
    assert [(to.body, body, properties) for to, body, properties in group.replies] == [
        (b"pulled", b"re:pulled", None), (b"direct", b"re:direct", None)
    ]  # fmt: skip


@pytest.mark.parametrize("answer_stacks", [True, False])
def test_stacks_are_answered_only_if_the_member_agrees(group: GroupBench, answer_stacks: bool) -> None:
    _, port = group.start(answer_stacks=answer_stacks)
    info = port.asked("a:1", GetRunningInfo(True))
    assert (info.stacks is not None, info.threads) == (answer_stacks, 20)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_listener_gets_nothing_directly_if_the_member_refuses(group: GroupBench, ordered: bool) -> None:
    _, port = group.start(ordered=ordered, answer_direct_messages=False)
    with pytest.raises(MessageRefused, match="option 'answerDirectMessages' of this member is false"):
        port.asked("a:1", ConsumeDirectly(message(7, b"direct")))
    assert group.bodies() == []


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("stored_in", "topic", "passed"),
    [
        ("T", "T", True),
        ("%RETRY%g", "T", True),
        ("%RETRY%g", "payroll", False),
        ("payroll", "payroll", False),
        ("payroll", "T", False),
        ("%RETRY%other", "T", False),
        ("%DLQ%g", "%DLQ%g", False),
    ],
)
def test_direct_consume_accepts_only_subscribed_topics(
    group: GroupBench, ordered: bool, stored_in: str, topic: str, passed: bool
) -> None:
    _, port = group.start(ordered=ordered)
    planted = replace(message(7, b"direct"), topic=topic, queue=MessageQueue(stored_in, "a", 0))
    if passed:
        port.asked("a:1", ConsumeDirectly(planted))
    else:
        with pytest.raises(MessageRefused, match="group g is not subscribed to this topic"):
            port.asked("a:1", ConsumeDirectly(planted))
    assert group.bodies() == ([b"direct"] if passed else [])
