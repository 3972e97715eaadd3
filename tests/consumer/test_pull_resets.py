"""Resets that brokers since 5.2.0 tell to one pull of a queue and to nobody else, and the queue is not here any more."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rocketmq_spark.consumer.assigned import FetchRequest
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.upkeep import Upkeep
from rocketmq_spark.model import MASTER_ID, MessageQueue, PullAnswer, PullStatus
from rocketmq_spark.model.membership import ResetOffsets
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, bodies
from tests.fakes.group_member import Done, QueueMember
from tests.helpers import raising, waits_in

OTHER = MessageQueue("u", "b", 0)


def finished(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> Done:
    """Nine messages are, and not stored yet; what tells the pull that waits."""
    fake.add(A, 9)
    consumer.subscribe("t")
    assert bodies(consumer.poll(AT_ONCE)) == list(range(9))
    assert consumer.poll(AT_ONCE) == []
    return next(done for request, done in fake.waiting if request.queue == A)


def reset(fake: QueueMember, done: Done, offset: int = 2) -> None:
    """The broker stores it, and tells the pull."""
    fake.stored[A] = offset
    done(PullAnswer(PullStatus.OFFSET_ILLEGAL, offset, 0, 9, is_reset=True))


@pytest.mark.parametrize("how", ["close", "rebalance"])
def test_reset_from_a_pull_during_queue_release_is_stored_last(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the offset from before it, whose commit is under way, would be."""
    done, real = finished(fake, consumer, hand), fake.commit

    def commit(group: str, offsets: Any, deadline: Any) -> Any:
        if offsets.get(A) == 9:
            reset(fake, done)
        return real(group, offsets, deadline)

    fake.commit = commit  # type: ignore[method-assign]
    if how == "close":
        consumer.close()
    else:
        fake.has_members("Me", "me")
        consumer._upkeep.rebalance()
        hand.time.run_due()
        assert consumer.assignment() == [B]
    assert {A: 9} in fake.commits
    assert fake.stored[A] == 2
    assert "was released, and its broker reset it to offset" in caplog.text


def test_reset_in_answer_to_a_pull_with_an_old_filter_is_applied(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    """Messages of such an answer are asked for again; a reset is told only once."""
    done = finished(fake, consumer, hand)
    consumer.subscribe("t", tags="a")
    reset(fake, done)
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))
    consumer.commit()
    assert fake.stored[A] == 9
    assert fake.commits[-1] == {A: 9}


def test_reset_of_queue_with_interrupted_release_is_stored_last(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    """What Ctrl-C kept from being stored is stored later, and is from before it."""
    done, real = finished(fake, consumer, hand), fake.commit
    fake.commit = raising(KeyboardInterrupt())  # type: ignore[method-assign]
    fake.has_members("Me", "me")
    with pytest.raises(KeyboardInterrupt):
        consumer._upkeep.rebalance()
    fake.commit = real  # type: ignore[method-assign]
    reset(fake, done)
    hand.time.run_due()
    consumer.close()
    assert fake.stored[A] == 2


@pytest.mark.parametrize("how", ["pull", "read ahead"])
def test_reset_of_a_former_queue_is_stored_for_its_next_member(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, how: str
) -> None:
    done = finished(fake, consumer, hand)
    fake.has_members("Me", "me")
    consumer._upkeep.rebalance()
    assert (consumer.assignment(), fake.stored[A]) == ([B], 9)
    if how == "pull":
        reset(fake, done)
    else:
        consumer._polls._queues.reset(FetchRequest(A, 9, MASTER_ID, 1), 2)
    fake.stored[A] = 9  # by the member that has it now, and was not told
    hand.time.run_due()
    assert fake.stored[A] == 2


def test_group_wide_reset_while_a_queue_is_assigned_is_applied(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it begins is known by then, from before the reset; nobody else has it."""
    fake.add(A, 9)
    fake.stored[A], real = 7, fake.committed

    def committed(*given: Any, **named: Any) -> int | None:
        fake.committed = real  # type: ignore[method-assign]
        offset = real(*given, **named)
        assert fake.asked is not None
        fake.asked("b:1", ResetOffsets("t", {A: 2, OTHER: 3}))
        return offset

    fake.committed = committed  # type: ignore[method-assign]
    consumer.subscribe("t")
    consumer._upkeep.rebalance_if_due()
    hand.time.run_due()
    assert fake.stored == {A: 2, B: 0}
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))
    assert "t/b/0 was assigned meanwhile: resetting it to offset 2" in caplog.text
    assert "u/b/0 has come" not in caplog.text


def test_timer_applies_a_reset_after_its_queue_was_assigned(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    """A poll looks at the group on a thread of its own: what follows the reset sooner finds no queue that is to be reset."""
    fake.add(A, 9)
    fake.stored[A], real = 7, fake.committed
    follows = threading.Thread(target=hand.time.run_due, daemon=True)

    def committed(*given: Any, **named: Any) -> int | None:
        fake.committed = real  # type: ignore[method-assign]
        offset = real(*given, **named)
        assert fake.asked is not None
        fake.asked("b:1", ResetOffsets("t", {A: 2}))
        follows.start()
        waits_in(follows, Upkeep._apply_resets_exclusively)
        return offset

    fake.committed = committed  # type: ignore[method-assign]
    consumer.subscribe("t")
    consumer._upkeep.rebalance_if_due()
    follows.join(60)
    assert fake.stored == {A: 2, B: 0}
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))


def test_a_queue_that_has_come_back_meanwhile_goes_on_there(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    done = finished(fake, consumer, hand)
    fake.has_members("Me", "me")
    consumer._upkeep.rebalance()
    fake.has_members("me")
    real = fake.committed

    def committed(*given: Any, **named: Any) -> int | None:
        offset = real(*given, **named)
        fake.committed = real  # type: ignore[method-assign]
        reset(fake, done)
        return offset

    fake.committed = committed  # type: ignore[method-assign]
    consumer._group.check_soon()
    consumer._upkeep.rebalance()
    hand.time.run_due()
    assert consumer.assignment() == [A, B]
    assert fake.stored[A] == 2
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))


def test_leftover_offset_of_a_regained_queue_overwrites_no_reset(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand
) -> None:
    """Ctrl-C came before its last offset was stored, and a member that had it meanwhile was told of a reset."""
    finished(fake, consumer, hand)
    fake.has_members("Me", "me")
    real = fake.commit
    fake.commit = raising(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        consumer._upkeep.rebalance()
    assert consumer.assignment() == [B]
    fake.commit, fake.stored[A] = real, 2  # type: ignore[method-assign]
    fake.has_members("me")
    consumer._upkeep.rebalance()
    assert consumer.assignment() == [A, B]
    assert fake.stored[A] == 2
    assert bodies(consumer.poll(AT_ONCE)) == list(range(2, 9))
