"""Pulls of a pull consumer over several threads: each message is handed over once, whoever answers."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import operator
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import ConnectionLost, OffsetError, OptionError, RocketMQError
from rocketmq_spark.model import MessageQueue, PullAnswer, PullRequest, PullStatus, ReceivedMessage
from tests.consumer.pull_bench import AT_ONCE, A, B, Hand, Rows, as_rows, made
from tests.consumer.test_pull_interrupted import Interrupted, places
from tests.fakes.group_member import Done, QueueMember
from tests.helpers import raising, unlike_ctrl_c
from tests.mockbroker import WAIT_S

QUEUES = [MessageQueue("t", "b", i) for i in range(4)]


def polls(fake: QueueMember, **settings: float) -> Polls:
    subscriptions = Subscriptions("g", False, lambda: 1)
    return Polls(fake, ConsumerSettings(group="g", **settings), subscriptions, Clock())  # type: ignore[arg-type]


def test_messages_that_come_on_many_threads_are_each_given_once() -> None:
    fake = QueueMember(QUEUES)
    one = polls(fake)
    one.assign(dict.fromkeys(QUEUES, StartOffset(0)))
    arriving = [threading.Thread(target=lambda q=q: [fake.add(q) for _ in range(50)]) for q in QUEUES]
    for thread in arriving:
        thread.start()
    found: dict[MessageQueue, list[int]] = {queue: [] for queue in QUEUES}
    deadline = Deadline.after(WAIT_S)
    while sum(map(len, found.values())) < 200:
        for part in one.wait(deadline, 3):
            for message in part.read():
                found[message.queue].append(message.queue_offset)
    for thread in arriving:
        thread.join()
    assert found == {queue: list(range(50)) for queue in QUEUES}


def test_a_failed_pull_is_made_again_while_somebody_waits() -> None:
    fake = QueueMember(QUEUES[:1], high=1)
    fake.errors = [ConnectionLost("gone")]
    one = polls(fake, pull_delay_on_error_s=0.05)
    one.assign({QUEUES[0]: StartOffset(0)})
    assert len(one.wait(Deadline.after(WAIT_S), 1)) == 1


def test_seek_moves_queues_still_assigned_or_none_of_named_ones() -> None:
    """One may go to another member while its broker is asked where to."""
    fake = QueueMember(QUEUES[:3], high=9)
    one = polls(fake)
    starts = dict.fromkeys(QUEUES[:3], StartOffset(0))

    def goes(queue: MessageQueue) -> int:
        one.assign({known: None for known in QUEUES[:3] if known != QUEUES[1]})
        return 5

    def sought() -> list[int | None]:
        return [info.commit_offset for _, info in sorted(one.queue_infos().items())]

    one.assign(starts)
    one.seek([], goes)
    assert sought() == [5, 5]
    one.assign(starts)
    with pytest.raises(OffsetError, match="not assigned"):
        one.seek(QUEUES[:2], lambda queue: goes(queue) + 1)
    assert sought() == [5, 5]


@pytest.mark.parametrize("queues", [A, [("t", "b", 0)], "t", [A, None]])
def test_what_is_no_queue_is_not_assigned(queues: Any) -> None:
    with made(QueueMember([A])) as consumer:
        with pytest.raises(OptionError, match=r"a queue is .*; expected a MessageQueue, such as queues\(\) returns"):
            consumer.assign(queues)
        assert consumer.assignment() == []


def test_who_is_woken_comes_back_once() -> None:
    one = polls(QueueMember(QUEUES[:1]))
    one.assign({QUEUES[0]: StartOffset(0)})
    one.wake()
    assert one.wait(Deadline.after(WAIT_S), 1) == []
    short = Deadline.after(0.02)
    assert one.wait(short, 1) == []
    assert short.expired


@pytest.mark.parametrize("how", ["poll", "poll_arrow"])
def test_poll_keeps_its_timeout_whatever_unwanted_messages_come(how: str) -> None:
    """Of a batch topic brokers give all messages, of any tag: more may come than are looked at."""

    class Unwanted(QueueMember):
        def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
            def none(answer: PullAnswer | RocketMQError) -> None:
                found = isinstance(answer, PullAnswer) and answer.status is PullStatus.FOUND
                done(replace(answer, read_messages=tuple) if found else answer)  # type: ignore[type-var]

            super().pull(request, deadline, none)

    fake = Unwanted([A], high=6400)
    with made(fake) as consumer:
        consumer.assign([A])
        before = len(fake.pulls)
        assert places(consumer, how) == []
        assert len(fake.pulls) <= before + 32
        while fake.stored.get(A) != 6400:
            assert places(consumer, how) == []
            consumer.commit()


def test_a_loop_that_goes_on_above_a_commit_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a coroutine does, where the commit was cancelled: its thread goes on."""
    fake = QueueMember([A], high=3)
    with made(fake) as consumer:
        consumer.assign([A])
        loop = iter(consumer)
        assert next(loop).queue_offset == 0
        ready = consumer._polls._queues.ready_parts
        real, found = ready.mark_returned_up_to, list[int]()

        def give_up_to(next_offset: int) -> None:
            found.extend(message.queue_offset for message in itertools.islice(loop, 0 if found else 1))
            real(next_offset)

        monkeypatch.setattr(ready, "mark_returned_up_to", give_up_to)
        for committed in (1, 2):
            consumer.commit()
            assert (found, fake.stored[A]) == ([1], committed)
        assert [offset for _, offset in places(consumer, "poll")] == [2]


@pytest.mark.parametrize("how", ["poll", "poll_arrow"])
def test_ctrl_c_while_a_poll_returns_loses_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older Pythons stop behind some calls. No code of Python's is called here where the signal comes: that would be a stop."""
    comes = staticmethod(partial(operator.contains, map(_thread.interrupt_main, [signal.SIGINT]), None))  # gives True
    many, number = type("Many", (list,), {"__bool__": comes}), type("Number", (int,), {"__bool__": comes})

    def rows(parts: Sequence[FetchedPart]) -> tuple[Rows, int | None]:
        found, left = as_rows(parts)
        found.num_rows = number(found.num_rows)
        return found, left

    def portion(messages: Iterable[ReceivedMessage]) -> tuple[list[ReceivedMessage], None]:
        return many(messages), None

    fake = QueueMember([A], high=40)
    with made(fake) as consumer:
        consumer.assign([A])
        got: list[tuple[MessageQueue, int]] = []
        with monkeypatch.context() as patched:
            patched.setattr("rocketmq_spark.consumer.pull.first_portion", portion)
            patched.setattr(consumer, "_to_arrow", rows)
            found: Any = []
            with contextlib.suppress(KeyboardInterrupt):
                found = consumer.poll(AT_ONCE) if how == "poll" else consumer.poll_arrow(AT_ONCE)
                sum(())  # the last place where it is raised
        got += [(A, one.queue_offset) for one in (found if how == "poll" or found == [] else found.messages)]
        while more := places(consumer, "poll"):
            got += more
        assert [offset for _, offset in got] == list(range(40))


STEPS = {step.__code__ for step in vars(threading.Condition).values() if hasattr(step, "__code__")}


@pytest.mark.parametrize(
    ("how", "least"), [("poll", 4), ("poll_arrow", 4), ("close", 4), ("commit", 0), ("assignment", 0)]
)
def test_ctrl_c_leaves_the_lock_of_no_call_held(how: str, least: int) -> None:
    """The steps of a condition are Python's, and its lock is taken and let go between them. ``least`` is how many there are."""

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code not in STEPS:
            return None
        if event == "line" and not unlike_ctrl_c(frame):
            left -= 1
            if left < 0:
                sys.settrace(before)
                raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    at = 0
    while True:
        left = at
        with made(QueueMember([A])) as consumer:
            consumer.assign([A])
            calls = {
                "poll": partial(consumer.poll, 0.001),
                "poll_arrow": partial(consumer.poll_arrow, 0.001),
                "close": consumer.close,
                "commit": consumer.commit,
                "assignment": consumer.assignment,
            }
            sys.settrace(interrupt)
            try:
                calls[how]()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert not consumer._polls._condition._is_owned(), at  # type: ignore[attr-defined]
        if left < 0:
            at += 1
        elif at - left >= least:  # with fewer steps its time was over before it waited
            break


def test_ctrl_c_between_two_steps_of_a_wait_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = QueueMember([A])
    with made(fake) as consumer:
        consumer.assign([A])
        changed = consumer._polls._condition
        let_go = changed._release_save  # type: ignore[attr-defined]
        monkeypatch.setattr(changed, "_release_save", lambda: (let_go(), raising(KeyboardInterrupt())()))
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(60)
        monkeypatch.undo()
        fake.add(A, 1)
        assert places(consumer, "poll") == [(A, 0)]


def test_after_the_close_nothing_is_pulled() -> None:
    fake = QueueMember(QUEUES[:1])
    one = polls(fake)
    one.assign({QUEUES[0]: StartOffset(0)})
    one.close()
    assert one.assign({}) == {}
    count = len(fake.pulls)
    fake.add(QUEUES[0])
    assert len(fake.pulls) == count


@pytest.mark.parametrize("how", ["assign", "rebalance"])
def test_ctrl_c_during_a_queue_change_leaves_no_queue_unread(how: str, hand: Hand) -> None:
    for at in itertools.count():
        fake = QueueMember([A, B])
        fake.add(A, 40)
        fake.add(B, 3)
        consumer = made(fake, hand)
        if how == "assign":
            consumer.assign([A, B])
        else:
            consumer.subscribe("t")
            consumer._upkeep.rebalance()
            fake.has_members("Me", "me")
        assert len(places(consumer, "poll")) == 32
        consumer.commit()
        interrupt, before = Interrupted(consumer, at), sys.gettrace()
        sys.settrace(interrupt)
        try:
            if how == "assign":
                consumer.assign([B])
            else:
                consumer._upkeep.rebalance()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        found: list[tuple[MessageQueue, int]] = []
        hand.now += 21
        while more := places(consumer, "poll"):
            found += more
        assert [offset for queue, offset in found if queue == B] == [0, 1, 2], at
        consumer.close()
        if interrupt.over():
            assert at > 20
            return
