"""A pull consumer as its user sees it, over queues in memory."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.pull import BasePullConsumer, PolledMessages
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    ClosedError,
    DecodeError,
    LocalProtocolError,
    OffsetError,
    OptionError,
    ServerFault,
)
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import (
    GetConsumedOffsets,
    GetRunningInfo,
    MembersChanged,
    QueueInfo,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire import messages
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, Rows, as_rows, bodies, made
from tests.fakes.group_member import QueueMember
from tests.mockbroker import WAIT_S


def test_messages_come_in_the_order_of_their_queue(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 40)
    consumer.assign([A])
    assert bodies(consumer.poll(AT_ONCE)) == list(range(32))
    assert bodies(consumer.poll(AT_ONCE)) == list(range(32, 40))
    assert consumer.poll(AT_ONCE) == []


def test_a_poll_waits_for_messages(fake: QueueMember, consumer: BasePullConsumer) -> None:
    consumer.assign([A])
    comes = threading.Timer(0.05, fake.add, (A,))
    comes.start()
    assert bodies(consumer.poll(WAIT_S)) == [0]
    comes.join()


def test_queue_starts_at_group_offset_or_consume_from_option(fake: QueueMember) -> None:
    fake.add(A, 10)
    fake.low[A] = 3
    for where, stored, expected in (
        (ConsumeFrom(ConsumeFromWhere.LATEST), 7, 7),
        (ConsumeFrom(ConsumeFromWhere.LATEST), None, 10),
        (ConsumeFrom(ConsumeFromWhere.EARLIEST), None, 3),
        (ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 6), None, 6),
        (ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 1), None, 3),
    ):
        fake.stored.clear()
        fake.stored.update({} if stored is None else {A: stored})
        with made(fake, consume_from=where) as consumer:
            consumer.assign([A])
            fake.calls.clear()
            found = bodies(consumer.poll(AT_ONCE))
        assert found[:1] == ([expected] if expected < 10 else [])


def test_question_that_fails_assigns_nothing(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.unknown[B] = ServerFault("ill")
    with pytest.raises(ServerFault, match="ill"):
        consumer.assign([A, B])
    assert consumer.assignment() == []
    assert fake.pulls == []


def test_what_a_poll_gave_is_committed_by_a_later_one(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    fake.add(A, 40)
    consumer.assign([A])
    consumer.poll(AT_ONCE)
    hand.now += 5
    consumer.poll(AT_ONCE)
    assert fake.commits == [{A: 0}, {A: 32}]
    hand.now += 4.9
    consumer.poll(AT_ONCE)
    assert fake.commits == [{A: 0}, {A: 32}]
    consumer.close()
    assert fake.commits == [{A: 0}, {A: 32}, {A: 40}]


def test_only_finished_messages_of_a_poll_are_committed(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 4)
    consumer.assign([A])
    polled = PolledMessages(consumer, AT_ONCE)
    for count in (0, 1, 3):
        assert polled.is_current
        polled.mark_finished(count)
        consumer.commit()
        assert fake.stored[A] == count
    polled = PolledMessages(consumer, AT_ONCE)
    assert bodies(polled.messages) == [3]
    polled.mark_finished(1)
    consumer.commit()
    assert fake.stored[A] == 4
    assert PolledMessages(consumer, AT_ONCE).messages == []


def test_poll_of_a_large_answer_finishes_only_what_it_returned(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    fake.add(A, 3)
    consumer.assign([A])
    polled = PolledMessages(consumer, AT_ONCE)
    polled.mark_finished(1)
    consumer.commit()
    assert (bodies(polled.messages), fake.stored[A]) == ([0], 1)
    assert bodies(consumer.poll(AT_ONCE)) == [1]


@pytest.mark.parametrize("event", ["revoked", "regained", "sought"])
def test_messages_polled_before_a_queue_moved_change_no_offset(
    fake: QueueMember, consumer: BasePullConsumer, event: str
) -> None:
    fake.add(A, 4)
    consumer.assign([A])
    polled = PolledMessages(consumer, AT_ONCE)
    if event == "sought":
        consumer.seek(A, 3)
    else:
        consumer.assign([B])
        fake.stored[A] = 3
        consumer.assign([A, B] if event == "regained" else [B])
    assert not polled.is_current
    polled.mark_finished(2)
    consumer.commit()
    assert fake.stored[A] == 3


def test_large_answer_comes_in_several_polls_and_commits_by_poll(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    fake.add(A, 4)
    consumer.assign([A])
    assert bodies(consumer.poll(AT_ONCE)) == [0]
    assert bodies(consumer.poll(AT_ONCE)) == [1]
    consumer.commit()
    assert consumer.committed(A) == 2
    monkeypatch.setattr(messages, "PORTION_BYTES", 1000)
    assert bodies(consumer.poll(AT_ONCE)) == [2, 3]
    assert consumer.poll(AT_ONCE) == []
    consumer.commit()
    assert consumer.committed(A) == 4
    consumer.seek(A, 0)
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    assert bodies(consumer.poll(AT_ONCE)) == [0]
    consumer.seek(A, 3)
    assert bodies(consumer.poll(AT_ONCE)) == [3]


def test_a_poll_that_nothing_follows_is_not_committed(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 3)
    consumer.assign([A])
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1, 2]
    consumer.close()
    assert fake.commits == [{A: 0}]
    with made(fake) as again:
        again.assign([A])
        assert bodies(again.poll(AT_ONCE)) == [0, 1, 2]


def test_without_auto_commit_nothing_is_committed_but_by_hand(fake: QueueMember, hand: Hand) -> None:
    fake.add(A, 3)
    with made(fake, hand, auto_commit=False) as consumer:
        consumer.assign([A])
        consumer.poll(AT_ONCE)
        hand.now += 60
        consumer.poll(AT_ONCE)
        assert fake.commits == []
        consumer.commit()
        assert consumer.committed(A) == 3
        consumer.commit({B: 7})
        assert consumer.committed(B) == 7
    assert fake.commits == [{A: 3}, {B: 7}]


def test_a_commit_that_fails_is_raised_and_tried_again(
    fake: QueueMember, consumer: BasePullConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    fake.add(A, 3)
    consumer.assign([A])
    consumer.poll(AT_ONCE)
    fake.refused[A] = ServerFault("full")
    with pytest.raises(ServerFault):
        consumer.commit()
    assert "offsets cannot be stored on broker b" in caplog.text
    fake.refused.clear()
    consumer.commit()
    assert fake.stored == {A: 3}


def test_seeking(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 10)
    fake.add(B, 4)
    fake.brokers.old, fake.low[A] = True, 2
    consumer.assign([A])
    consumer.seek(A, 7)
    assert bodies(consumer.poll(AT_ONCE)) == [7, 8, 9]
    consumer.seek_to_beginning()
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 10))
    consumer.seek_to_timestamp(8, A)
    assert bodies(consumer.poll(AT_ONCE)) == [8, 9]
    consumer.seek_to_end(A)
    assert consumer.poll(AT_ONCE) == []
    fake.add(A)
    assert bodies(consumer.poll(AT_ONCE)) == [10]
    with pytest.raises(OffsetError, match="seek to offset 1; expected one from 2 to 11"):
        consumer.seek(A, 1)
    with pytest.raises(OffsetError, match="not assigned"):
        consumer.seek(B, 1)


@pytest.mark.parametrize("offset", [-5, 2**63, 1.5, "7", None, True])
def test_an_offset_that_is_none_is_refused_by_name(fake: QueueMember, consumer: BasePullConsumer, offset: Any) -> None:
    fake.add(A, 9)
    consumer.assign([A])
    for use in (lambda: consumer.commit({B: 3, A: offset}), lambda: consumer.seek(A, offset)):
        with pytest.raises(OffsetError, match=f"is {re.escape(repr(offset))}; expected a whole number from 0 to"):
            use()
    assert fake.stored == {A: 0}
    assert bodies(consumer.poll(AT_ONCE)) == list(range(9))


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, 1e300, "5s", None, True])
def test_a_timeout_that_is_none_is_refused_by_name(
    fake: QueueMember, consumer: BasePullConsumer, timeout_s: Any
) -> None:
    fake.add(A, 1)
    consumer.assign([A])
    for poll in (consumer.poll, consumer.poll_arrow):
        with pytest.raises(OptionError, match=f"is {re.escape(repr(timeout_s))}; expected a number of seconds up to"):
            poll(timeout_s)
    assert bodies(consumer.poll(-1)) == [0]


def test_pausing(fake: QueueMember, consumer: BasePullConsumer) -> None:
    consumer.assign([A, B])
    consumer.pause(A)
    fake.add(A, 2)
    fake.add(B, 3)
    assert [bodies(consumer.poll(AT_ONCE)) for _ in range(2)] == [[0, 1, 2], []]
    consumer.resume(A)
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1]
    with pytest.raises(OffsetError, match="not assigned"):
        consumer.pause(MessageQueue("other", "b", 0))


def test_a_queue_is_pulled_ahead_as_far_as_the_threshold(fake: QueueMember) -> None:
    fake.add(A, 1000)
    with made(fake, thresholds=Thresholds(50), pull_batch_size=20) as consumer:
        consumer.assign([A])
        assert [request.offset for request in fake.pulls] == [0, 20, 40]


def test_what_may_pass_is_tried_again_and_the_rest_is_raised(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    fake.add(A, 2)
    fake.errors = [BrokerBusy("busy"), AccessDenied("no")]
    consumer.assign([A])
    assert consumer.poll(AT_ONCE) == []
    hand.now += 0.02
    with pytest.raises(AccessDenied):
        consumer.poll(AT_ONCE)
    hand.now += 1
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1]


def test_the_messages_of_all_queues_as_rows(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 2)
    fake.add(B, 3)
    consumer.assign([A, B])
    assert bodies(consumer.poll_arrow(AT_ONCE).messages) == [0, 1, 0, 1, 2]
    assert consumer.poll_arrow(AT_ONCE).num_rows == 0


def test_rows_that_cannot_be_made_come_again(fake: QueueMember) -> None:
    fake.add(A, 2)
    fails = [True]

    def rows(parts: Any) -> tuple[Rows, int | None]:
        if parts and fails.pop(0):
            raise DecodeError("bad")
        return as_rows(parts)

    with BasePullConsumer(
        fake,
        ConsumerSettings(group="g", consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST)),
        rows,
        Hand().clock,  # type: ignore[arg-type]
    ) as consumer:
        consumer.assign([A])
        with pytest.raises(DecodeError):
            consumer.poll_arrow(AT_ONCE)
        fails.append(False)
        assert bodies(consumer.poll_arrow(AT_ONCE).messages) == [0, 1]


def test_rows_before_an_undecodable_answer_are_returned_first(fake: QueueMember) -> None:
    fake.add(A, 40)

    def rows(parts: Sequence[FetchedPart]) -> tuple[Rows, int | None]:
        made, left = as_rows(parts)
        if 33 in bodies(made.messages):
            raise DecodeError("bad")
        return made, left

    settings = ConsumerSettings(group="g", consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST), pull_batch_size=4)
    with BasePullConsumer(fake, settings, rows, Hand().clock) as consumer:  # type: ignore[arg-type]
        consumer.assign([A])
        found: list[int] = []
        with pytest.raises(DecodeError):  # noqa: PT012 - how many polls it takes means nothing
            while True:
                found += bodies(consumer.poll_arrow(AT_ONCE).messages)
        assert found == list(range(32))
        consumer.seek(A, 36)
        assert bodies(consumer.poll_arrow(AT_ONCE).messages) == [36, 37, 38, 39]


def test_rows_that_become_many_come_in_several_polls(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1000)  # a message counts as an object, too
    fake.add(A, 5)
    fake.add(B, 2)
    consumer.assign([A, B])
    found = [bodies(consumer.poll_arrow(AT_ONCE).messages) for _ in range(4)]
    assert sorted(found) == [[0, 1], [0, 1], [2, 3], [4]]
    assert consumer.poll_arrow(AT_ONCE).num_rows == 0
    consumer.commit()
    assert (consumer.committed(A), consumer.committed(B)) == (5, 2)


def test_a_loop_over_messages_ends_with_the_consumer(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 40)
    consumer.assign([A])
    assert bodies(itertools.islice(consumer, 35)) == list(range(35))
    consumer.close()
    assert fake.stored == {A: 32}
    assert list(consumer) == []
    with pytest.raises(ClosedError):
        consumer.poll()


def test_who_waits_when_the_consumer_is_closed_gets_nothing(consumer: BasePullConsumer) -> None:
    consumer.assign([A])
    waits, waiting = consumer._polls.wait, threading.Event()
    consumer._polls.wait = lambda *given: (waiting.set(), waits(*given))[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as beside:
        polled = beside.submit(consumer.poll, 3 * WAIT_S)
        assert (waiting.wait(WAIT_S), polled.done()) == (True, False)
        consumer.close()
        assert polled.result(WAIT_S) == []


# --- with others


def test_subscriber_has_its_share(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> None:
    fake.has_members("me", "other")
    fake.add(A, 2)
    fake.add(B, 2)
    consumer.subscribe("t", tags="a || b")
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1]
    assert consumer.assignment() == [A]
    assert [(told.subscriptions, told.consume_type) for told in fake.memberships] == [
        ({"t": Filter("a || b")}, "CONSUME_ACTIVELY")
    ]
    assert fake.pulls[0].filter == Filter("a || b")
    fake.has_members("me")
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A]
    hand.now += 20
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A, B]


def test_change_that_brokers_tell_is_followed_at_once(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(B, 1)
    fake.has_members("me", "other")
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    assert fake.asked is not None
    fake.has_members("me")
    assert fake.asked("b:1", MembersChanged()) is None
    assert bodies(consumer.poll(WAIT_S)) == [0]
    fake.has_members("a", "me")
    fake.asked("b:1", MembersChanged())
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [B]
    assert fake.asked("b:1", GetConsumedOffsets("t")) == {B: 1}


def test_changes_are_followed_while_nobody_polls(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> None:
    fake.add(A, 2)
    fake.add(B, 2)
    consumer.subscribe("t")
    hand.time.advance(1)
    assert consumer.assignment() == [A, B]
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1]
    assert bodies(consumer.poll(AT_ONCE)) == [0, 1]
    fake.has_members("a", "me")
    assert fake.asked is not None
    fake.asked("b:1", MembersChanged())
    hand.time.run_due()
    assert (consumer.assignment(), fake.stored) == ([B], {A: 2, B: 0})
    fake.has_members("me")
    hand.now += 20
    hand.time.advance(20)
    assert consumer.assignment() == [A, B]


def test_after_the_close_nothing_is_followed(fake: QueueMember, hand: Hand) -> None:
    with made(fake, hand) as consumer:
        consumer.subscribe("t")
    hand.time.advance(100)
    assert consumer.assignment() == []


def test_the_strategy_of_the_settings_shares_the_queues(fake: QueueMember) -> None:
    fake.has_members("me", "other")
    with made(fake, allocate=lambda me, queues, members: list(queues)[1:]) as consumer:
        consumer.subscribe("t")
        consumer.poll(AT_ONCE)
        assert consumer.assignment() == [B]


def test_offsets_that_are_reset_are_followed_and_stored(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 9)
    consumer.subscribe("t")
    assert bodies(consumer.poll(AT_ONCE)) == list(range(9))
    assert fake.asked is not None
    assert fake.asked("b:1", ResetOffsets("t", {A: 4, MessageQueue("t", "b", 7): 1})) is None
    assert fake.stored == {A: 4, B: 0}
    assert bodies(consumer.poll(AT_ONCE)) == [4, 5, 6, 7, 8]


def test_the_member_tells_what_it_has(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 40)
    consumer.subscribe("t", tags="a")
    consumer.poll(AT_ONCE)
    consumer.poll(AT_ONCE)
    assert fake.asked is not None
    told = fake.asked("b:1", GetRunningInfo(includes_stacks=True))
    assert isinstance(told, RunningInfo)
    assert told.membership.subscriptions == {"t": Filter("a")}
    assert told.membership.consume_type == "CONSUME_ACTIVELY"
    assert told.queues[B] == QueueInfo(commit_offset=0)
    assert told.queues[A].commit_offset == 32
    assert told.stacks is not None
    assert "MainThread" in told.stacks


def test_queue_that_goes_has_its_offset_stored(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 2)
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    fake.has_members("a", "me")
    assert fake.asked is not None
    fake.asked("b:1", MembersChanged())
    consumer.poll(AT_ONCE)
    assert (consumer.assignment(), fake.stored) == ([B], {A: 2, B: 0})


def test_nobody_known_changes_nothing(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> None:
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    fake.members = lambda *given: []  # type: ignore[method-assign]
    hand.now += 20
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A, B]


def test_queue_without_a_start_is_left_for_a_second(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> None:
    fake.unknown[B] = ServerFault("ill")
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A]
    fake.unknown.clear()
    hand.now += 1
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A, B]


def test_unsubscribing_gives_queues_up(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 2)
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    consumer.poll(AT_ONCE)
    consumer.unsubscribe("t")
    assert consumer.assignment() == []
    assert fake.stored == {A: 2, B: 0}
    assert fake.memberships[-1].subscriptions == {}
    consumer.close()
    assert not fake.joined


def test_what_does_not_go_together(consumer: BasePullConsumer) -> None:
    with pytest.raises(OptionError, match="at most one"):
        consumer.subscribe("t", tags="a", sql="a > 1")
    with pytest.raises(OptionError, match="one or several"):
        consumer.subscribe("t", tags="||")
    consumer.subscribe("t", sql="a > 1")
    with pytest.raises(LocalProtocolError, match="mutually exclusive"):
        consumer.assign([A])
    consumer.unsubscribe("t")
    consumer.assign([A])
    with pytest.raises(LocalProtocolError, match="mutually exclusive"):
        consumer.subscribe("t")


def test_consumer_of_an_environment_has_its_queues_only(fake: QueueMember) -> None:
    with made(fake, environment=Environment.of("2", "2")) as consumer:
        assert consumer.queues("t") == [B]
        with pytest.raises(OptionError, match="queue t/b/0 does not belong to environment '2'"):
            consumer.assign([A])
        consumer.subscribe("t")
        consumer.poll(AT_ONCE)
        assert consumer.assignment() == [B]


def test_subscribe_refuses_an_environment_without_queues(fake: QueueMember) -> None:
    with made(fake, environment=Environment.of("3", "3")) as consumer:
        with pytest.raises(OptionError, match="option 'environments' is 3; expected at most 2"):
            consumer.subscribe("t")
        assert not fake.joined
