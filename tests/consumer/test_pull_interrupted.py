"""Polls that are interrupted and loops that are left: what was not given comes first next time, and is not finished."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.prefetch import BacklogReader
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.pull import BasePullConsumer, next_answer, take_messages
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.upkeep import Upkeep
from rocketmq_spark.errors import ClosedError, LocalProtocolError, OffsetError, OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, PullAnswer, PullStatus
from rocketmq_spark.model.membership import ResetOffsets
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, as_rows, bodies, made
from tests.consumer.reads import COUNT, Reads
from tests.fakes.group_member import QueueMember, numbered
from tests.helpers import RAISED, raising, unlike_ctrl_c, waits_in
from tests.mockbroker import eventually

ENDS = ["break", "islice", "exception"]


def some(consumer: BasePullConsumer, count: int, how: str) -> list[int]:
    """So many messages of a loop that is left then."""
    found: list[int] = []
    if how == "islice":
        return bodies(itertools.islice(consumer, count))
    try:
        for one in consumer:
            found += bodies([one])
            if len(found) == count:
                if how == "break":
                    break
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return found


@pytest.mark.parametrize("how", ENDS)
def test_a_loop_that_is_left_goes_on_behind_its_last_message(
    fake: QueueMember, consumer: BasePullConsumer, hand: Hand, how: str
) -> None:
    fake.add(A, 96)
    consumer.assign([A])
    assert some(consumer, 12, how) == list(range(12))
    hand.now += 5
    assert some(consumer, 30, how) == list(range(12, 42))
    assert fake.commits == [{A: 0}, {A: 12}]
    assert bodies(consumer.poll(AT_ONCE)) == list(range(42, 64))
    assert some(consumer, 8, how) == list(range(64, 72))
    assert bodies(consumer.poll_arrow(AT_ONCE).messages) == list(range(72, 96))
    consumer.close()
    assert fake.stored == {A: 72}
    with made(fake) as again:
        again.assign([A])
        assert bodies(again.poll(AT_ONCE))[0] == 72


@pytest.mark.parametrize("how", ENDS)
def test_what_was_read_ahead_stays_too(fake: QueueMember, how: str) -> None:
    fake.add(A, 1000)
    reads = Reads()
    ahead = BacklogReader(
        reads.begin, lambda queue, start, end, stored: [numbered(queue, start + i) for i in range(len(stored))]
    )
    settings = ConsumerSettings(
        group="g", consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST), pull_batch_size=COUNT, thresholds=Thresholds(40)
    )
    with BasePullConsumer(fake, settings, as_rows, Clock(), ahead) as consumer:  # type: ignore[arg-type]
        consumer.assign([A])
        eventually(lambda: reads.given > 2)
        found: list[int] = []
        while len(found) < 999:
            found += some(consumer, 3, how)
        assert found == list(range(999))
        consumer.commit()
        assert fake.stored == {A: 999}


def test_a_commit_in_a_loop_is_of_what_was_yielded(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 5)
    consumer.assign([A])
    for one in consumer:
        consumer.commit()
        assert fake.stored == {A: one.queue_offset + 1}
        if one.queue_offset == 4:
            break
    assert fake.stored == {A: 5}


def test_a_loop_goes_on_beside_polls_and_gives_nothing_twice(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 64)
    consumer.assign([A])
    loop = iter(consumer)
    assert bodies(itertools.islice(loop, 3)) == [0, 1, 2]
    assert bodies(consumer.poll(AT_ONCE)) == list(range(3, 32))
    assert bodies(itertools.islice(loop, 2)) == [32, 33]
    other = iter(consumer)
    assert bodies(itertools.islice(other, 2)) == [34, 35]
    assert bodies(itertools.islice(loop, 2)) == [36, 37]


def test_a_loop_follows_a_seek_and_a_pause(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 40)
    fake.add(B, 2)
    consumer.assign([A, B])
    loop = iter(consumer)
    assert bodies(itertools.islice(loop, 2)) == [0, 1]
    consumer.seek(A, 30)
    assert [(m.queue, m.queue_offset) for m in itertools.islice(loop, 3)] == [(B, 0), (B, 1), (A, 30)]
    consumer.pause(A)
    fake.add(B, 2)
    assert [(m.queue, m.queue_offset) for m in itertools.islice(loop, 2)] == [(B, 2), (B, 3)]
    consumer.resume(A)
    assert next(loop).queue_offset == 31


def test_a_loop_that_is_left_at_a_queues_end_has_finished_it(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 4)
    consumer.assign([A])
    assert some(consumer, 4, "break") == [0, 1, 2, 3]
    consumer.commit()
    assert (fake.stored, consumer.poll(AT_ONCE)) == ({A: 4}, [])


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["poll", "poll_arrow", "loop"])
def test_what_was_taken_by_a_poll_that_did_not_end_comes_again(
    fake: QueueMember, consumer: BasePullConsumer, how: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(A, 100)
    consumer.assign([A])
    ask: dict[str, Callable[[], Any]] = {
        "poll": lambda: consumer.poll(AT_ONCE),
        "poll_arrow": lambda: consumer.poll_arrow(AT_ONCE).messages,
        "loop": lambda: list(itertools.islice(consumer, 32)),
    }
    read, fails = FetchedPart.read, [1]

    def interrupted(part: FetchedPart) -> Any:
        if fails:
            raise fails.pop() and error
        return read(part)

    monkeypatch.setattr(FetchedPart, "read", interrupted)
    with pytest.raises(type(error)):
        ask[how]()
    consumer.commit()
    assert fake.stored == {A: 0}
    assert bodies(ask[how]())[:32] == list(range(32))


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_what_is_broken_off_is_not_finished(
    fake: QueueMember, consumer: BasePullConsumer, error: BaseException
) -> None:
    fake.add(A, 9)
    consumer.assign([A])
    with pytest.raises(type(error)):
        take_messages(
            consumer, (raising(error)() if one.queue_offset == 3 else one for one in next_answer(consumer)), 9
        )
    consumer.commit()
    assert fake.stored == {A: 0}
    assert bodies(consumer.poll(AT_ONCE)) == list(range(9))


UNPARTED = ("with ", "yield message")


class Interrupted:
    """Raises Ctrl-C at the n-th line of the consumer's modules, but not where the interpreter itself lets nothing come between:
    at the end of a block of ``with``, whose line is seen once more then, and between a store and a ``return`` or ``yield``.
    """

    def __init__(self, consumer: BasePullConsumer, at: int) -> None:
        self.consumer, self.left = consumer, at

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        if "/rocketmq_spark/consumer/" not in path:
            return None
        parted = not linecache.getline(path, frame.f_lineno).lstrip().startswith(UNPARTED)
        if event == "line" and parted and not unlike_ctrl_c(frame):
            if self.left == 0 and not self.consumer._polls.has_returned_all:
                self.left = -1
                raise KeyboardInterrupt
            self.left -= self.left > 0
        return self

    def over(self) -> bool:
        return self.left > 0


@pytest.mark.parametrize("how", ["poll", "poll_arrow", "loop"])
def test_ctrl_c_at_any_line_loses_nothing(how: str) -> None:
    for at in itertools.count():
        fake, found = QueueMember([A, B]), []
        fake.add(A, 40)
        fake.add(B, 3)
        consumer = made(fake)
        consumer.assign([A, B])
        interrupt = Interrupted(consumer, at)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            if how == "loop":
                for one in consumer:
                    found.append((one.queue, one.queue_offset))
                    if len(found) == 34:
                        break
            else:
                found += places(consumer, how)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        while more := places(consumer, "poll"):
            found += more
        assert sorted(found) == [*((A, i) for i in range(40)), *((B, i) for i in range(3))], at
        consumer.commit()
        assert fake.stored == {A: 40, B: 3}, at
        consumer.close()
        if interrupt.over():
            assert at > 50
            return


def places(consumer: BasePullConsumer, how: str) -> list[tuple[MessageQueue, int]]:
    found = consumer.poll(AT_ONCE) if how == "poll" else consumer.poll_arrow(AT_ONCE).messages
    return [(one.queue, one.queue_offset) for one in found]


# --- what is subscribed to is said once


def test_a_poll_without_queues_is_an_error(consumer: BasePullConsumer) -> None:
    for ask in (consumer.poll, consumer.poll_arrow, lambda: next(iter(consumer))):
        with pytest.raises(OptionError, match=r"expected subscribe\(\) or assign\(\) before a poll"):
            ask()
    consumer.subscribe("t")
    assert consumer.poll(AT_ONCE) == []
    consumer.unsubscribe("t")
    with pytest.raises(OptionError):
        consumer.poll(AT_ONCE)
    consumer.assign([])
    assert consumer.poll(AT_ONCE) == []


def test_assigned_queues_ignore_filters_of_past_subscriptions(fake: QueueMember, consumer: BasePullConsumer) -> None:
    consumer.subscribe("t", tags="a")
    consumer.poll(AT_ONCE)
    assert {request.filter for request in fake.pulls} == {Filter("a")}
    consumer.unsubscribe("t")
    fake.calls.clear()
    consumer.assign([A])
    assert [request.filter for request in fake.pulls] == [NO_FILTER]


def test_a_subscription_that_fails_changes_nothing(fake: QueueMember, consumer: BasePullConsumer, hand: Hand) -> None:
    consumer.subscribe("t", tags="a")
    consumer.poll(AT_ONCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "queues", lambda *given, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            consumer.subscribe("t", tags="b")
    fake.has_members("me", "x")
    hand.now += 20
    consumer.poll(AT_ONCE)
    assert consumer.assignment() == [A]
    assert {request.filter for request in fake.pulls} == {Filter("a")}
    assert fake.memberships[-1].subscriptions == {"t": Filter("a")}


def test_what_came_by_one_filter_is_given_by_it(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """As with Java's: messages and rows alike, whatever is subscribed to when they are polled."""
    parts: list[FetchedPart] = []
    consumer._to_arrow = lambda found: parts.extend(found) or as_rows(found)
    consumer.subscribe("t", tags="a")
    consumer.poll(AT_ONCE)
    fake.add(A, 1)
    consumer.subscribe("t", tags="b")
    consumer.poll_arrow(AT_ONCE)
    assert [part.filter for part in parts] == [Filter("a")]
    fake.add(A, 1)
    assert fake.pulls[-1].filter == Filter("b")


def test_message_arriving_after_a_filter_change_uses_new_filter(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """The answer by the one before passes over what is wanted now."""
    consumer.subscribe("t", tags="rare")
    consumer.poll(AT_ONCE)
    consumer.subscribe("t")
    fake.add(A, 1)
    assert bodies(consumer.poll(AT_ONCE)) == [0]
    consumer.commit()
    assert fake.stored[A] == 1


# --- resets, forks


def test_reset_in_answer_to_a_pull_with_an_old_filter_is_applied(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """Brokers tell it to one pull only."""
    fake.add(A, 9)
    consumer.subscribe("t", tags="rare")
    consumer.poll(AT_ONCE)
    ((request, done),) = [waiting for waiting in fake.waiting if waiting[0].queue == A]
    fake.waiting.remove((request, done))
    consumer.subscribe("t")
    done(PullAnswer(PullStatus.OFFSET_ILLEGAL, 7, 0, 9, is_reset=True))
    assert bodies(consumer.poll(AT_ONCE)) == [7, 8]


def test_an_offset_from_before_a_reset_does_not_come_after_it(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 50)
    consumer.subscribe("t")
    consumer.poll(AT_ONCE)
    real, entered, go_on = fake.commit, threading.Event(), threading.Event()

    def slow(group: str, offsets: Any, deadline: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert go_on.wait(60)
        return real(group, offsets, deadline)

    fake.commit = slow  # type: ignore[method-assign]
    commits = threading.Thread(target=consumer.commit)
    commits.start()
    assert entered.wait(60)
    asked = fake.asked
    assert asked is not None
    resets = threading.Thread(target=lambda: asked("b:1", ResetOffsets("t", {A: 0})))
    resets.start()
    eventually(lambda: consumer._polls.queue_infos()[A].commit_offset == 0)
    go_on.set()
    for thread in (commits, resets):
        thread.join(60)
    assert fake.stored[A] == 0


def test_reset_of_a_queue_being_released_is_stored_last(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """A commit that takes long holds up the one of what is given up, and the reset comes between."""
    fake.add(A, 50)
    consumer.subscribe("t")
    while bodies(consumer.poll(0.05)):
        pass
    real, entered, go_on = fake.commit, threading.Event(), threading.Event()

    def slow(group: str, offsets: Any, deadline: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert go_on.wait(60)
        return real(group, offsets, deadline)

    fake.commit = slow  # type: ignore[method-assign]
    commits = threading.Thread(target=consumer.commit, args=({B: 0},))
    commits.start()
    assert entered.wait(60)
    fake.has_members("Me", "me")
    gives_up = threading.Event()
    have = consumer._upkeep.apply_assignment
    consumer._upkeep.apply_assignment = lambda starts: (gives_up.set(), have(starts))  # type: ignore[assignment, method-assign]
    rebalances = threading.Thread(target=consumer._upkeep.rebalance)
    rebalances.start()
    assert gives_up.wait(60)
    waits_in(rebalances, Upkeep._commit_one_at_a_time)  # it waits for the other commit
    asked = fake.asked
    assert asked is not None
    resets = threading.Thread(target=lambda: asked("b:1", ResetOffsets("t", {A: 7})))
    resets.start()
    infos = consumer._polls.queue_infos
    eventually(lambda: A not in (now := infos()) or now[A].commit_offset == 7)
    go_on.set()
    for thread in (commits, rebalances, resets):
        thread.join(60)
    assert consumer.assignment() == [B]
    assert fake.stored[A] == 7


def test_a_fork_is_told_whose_the_consumer_is(
    fake: QueueMember, consumer: BasePullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.assign([A])
    monkeypatch.setattr("rocketmq_spark.base.process._pid", [-1])
    calls: list[Callable[[], object]] = [
        lambda: consumer.subscribe("t"),
        lambda: consumer.unsubscribe("t"),
        lambda: consumer.assign([A]),
        consumer.assignment,
        lambda: consumer.queues("t"),
        lambda: consumer.pause(A),
        lambda: consumer.resume(A),
        lambda: consumer.seek(A, 0),
        lambda: consumer.seek_to_beginning(A),
        lambda: consumer.seek_to_end(A),
        lambda: consumer.seek_to_timestamp(0, A),
        consumer.commit,
        lambda: consumer.committed(A),
        lambda: consumer.poll(AT_ONCE),
        lambda: consumer.poll_arrow(AT_ONCE),
        lambda: next(iter(consumer)),
    ]
    with consumer._polls._lock:  # held by a thread of the parent when it forked: nobody lets it go here
        for call in calls:
            with pytest.raises(ClosedError, match="belongs to process"):
                in_time(call)
        in_time(consumer.close)
    monkeypatch.undo()
    assert consumer.assignment() == [A]
    with pytest.raises(OffsetError):
        consumer.pause(B)


def in_time(call: Callable[[], object]) -> object:
    """On a thread of its own, which is not the one that has the lock."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as e:  # noqa: BLE001 - it is raised again
            found.append((None, e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    ((value, error),) = found
    if error is not None:
        raise error
    return value


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ValueError("mine")], ids=["ctrl-c", "another"])
def test_a_pull_that_was_interrupted_is_made_again(fake: QueueMember, raised: BaseException) -> None:
    """And so are those that were to come behind it, which nobody made: their queues would wait for answers for ever."""
    fake.add(A, 100)
    fake.add(B, 100)
    left, pull = [1], fake.pull

    def once(*how: Any) -> None:
        if left:
            left.pop()
            raise raised
        pull(*how)

    with BasePullConsumer(fake, ConsumerSettings(group="g", thresholds=Thresholds(32)), as_rows) as consumer:  # type: ignore[arg-type]
        consumer.assign([A, B])
        fake.pull = once  # type: ignore[method-assign]
        got: list[MessageQueue] = []
        with pytest.raises(type(raised)):
            consumer.poll(1.0)
        while found := consumer.poll(0.05):
            got += [message.queue for message in found]
    assert (got.count(A), got.count(B)) == (100, 100)


def test_reset_during_close_of_a_consumer_is_stored_last(fake: QueueMember) -> None:
    fake.add(A, 10)

    class Late(Timer):
        def close(self, wait_s: float = 5.0) -> None:
            assert fake.asked is not None
            fake.asked("a:1", ResetOffsets("t", {A: 3}))
            super().close(wait_s)

    consumer = BasePullConsumer(fake, ConsumerSettings(group="g"), as_rows, make_timer=Late)  # type: ignore[arg-type]
    consumer.subscribe("t")
    while bodies(consumer.poll(0.05)):  # all of it is finished when the last one begins
        pass
    consumer.close()
    assert fake.stored[A] == 3


def test_who_cannot_join_has_no_subscription(fake: QueueMember, consumer: BasePullConsumer) -> None:
    """It would have the queues of the member that is there: both are one client."""
    consumer.subscribe("t")
    with BasePullConsumer(fake, ConsumerSettings(group="g"), as_rows) as second:  # type: ignore[arg-type]
        with pytest.raises(LocalProtocolError):
            second.subscribe("t")
        with pytest.raises(OptionError, match="no queues"):
            second.poll(0.0)
