from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.errors import CallTimeout
from tests.consumer.group import GroupBench
from tests.consumer.messages import QUEUE, message, messages, offsets
from tests.models import SteppingMachine, model_test, step
from tests.queues import q


def filled(*at: int) -> ProcessQueue:
    queue = ProcessQueue(QUEUE)
    assert queue.put(messages(*at)) == len(at)
    return queue


def test_what_is_removed_tells_the_offset_that_may_be_committed() -> None:
    queue = filled(100, 101, 102, 103, 104)
    assert queue.remove(messages(102)) == 100
    assert queue.remove(messages(100, 101)) == 103
    assert queue.remove(messages(103, 104)) == 105
    assert queue.remove(messages(104)) is None


def test_offsets_that_a_filter_left_out_are_not_waited_for() -> None:
    queue = filled(100, 105)
    assert queue.remove(messages(105)) == 100
    assert queue.remove(messages(100)) == 106


def test_the_offset_goes_on_where_the_last_message_was() -> None:
    queue = filled(10)
    assert queue.remove(messages(10)) == 11
    queue.put(messages(11, 12))
    assert queue.remove(messages(12)) == 11
    assert queue.remove(messages(11)) == 13


def test_the_cache_is_sorted_by_offset_and_repeats_count_once() -> None:
    queue = filled(5, 3, 9)
    assert queue.put(messages(3, 4)) == 1
    assert (queue.count, queue.bytes, queue.span, queue.offsets) == (4, 16, 6, (3, 9))
    assert offsets(queue.take(10)) == [3, 4, 5, 9]


def test_offset_span_ends_at_the_last_waiting_message() -> None:
    queue = filled(1, 2, 5, 6, 7)
    queue.remove(messages(5, 6, 7))
    assert (queue.span, queue.offsets) == (1, (1, 2))
    queue.put(messages(8))
    assert queue.offsets == (1, 8)


def test_taken_messages_are_committed_or_keep_their_retry_count() -> None:
    queue = filled(1, 2, 3)
    assert offsets(queue.take(2)) == [1, 2]
    assert (queue.waiting_count, queue.count) == (1, 3)
    queue.put_back([message(1, times=1)])
    assert [m.reconsume_times for m in queue.take(1)] == [1]
    assert queue.commit() == 3
    assert (queue.waiting_count, queue.count, queue.bytes) == (1, 1, 4)
    assert queue.commit() is None


def test_a_rollback_puts_back_everything_since_the_last_commit() -> None:
    queue = filled(1, 2, 3, 4)
    queue.take(1)
    queue.commit()
    queue.take(1)
    queue.take(1)
    queue.rollback()
    assert offsets(queue.take(9)) == [2, 3, 4]


def test_waiting_message_is_replaced_but_a_finished_one_is_not() -> None:
    queue = filled(1, 2)
    queue.remove(messages(1))
    queue.replace(message(1, times=1))
    queue.replace(message(2, times=1))
    assert (queue.count, [m.reconsume_times for m in queue.take(9)]) == (1, [1])
    assert message(1) not in queue


def test_the_lock_is_ours_for_thirty_seconds() -> None:
    lock = ProcessQueue(QUEUE).lock
    assert not lock.is_held(0, 1)
    lock.grant(0, 1)
    assert [lock.is_held(at, 1) for at in (0, 30_000, 30_001)] == [True, True, False]
    lock.grant(40_000, 1)
    lock.mark_lost()
    assert (lock.is_held(40_000, 1), lock.requested_ms) == (False, 40_000)
    lock.grant(50_000, 1)
    assert lock.is_held(50_000, 1)


def test_lock_is_held_only_on_the_connection_that_granted_it() -> None:
    """A broker that restarts has forgotten its locks."""
    lock = ProcessQueue(QUEUE).lock
    lock.grant(0, 1)
    assert [lock.is_held(0, connection) for connection in (1, 2, None)] == [True, False, False]
    lock.grant(0, None)  # it broke behind the answer
    assert not lock.is_held(0, None)


def test_a_reset_forgets_everything() -> None:
    queue = filled(1, 2, 3)
    queue.mark_dead_letters(queue.take(1))
    queue.clear()
    assert (queue.count, queue.bytes, queue.waiting_count, queue.span, queue.first_item(), queue.offsets) == (
        0,
        0,
        0,
        0,
        None,
        None,
    )
    assert queue.remove(messages(2)) is None
    queue.put(messages(7))
    assert queue.remove(messages(7)) == 8
    queue.put(messages(1))
    queue.take(1)
    queue.rollback()
    assert queue.waiting_count == 1, "it was a dead letter before"


class QueueMachine(SteppingMachine):
    """Against two dictionaries, two sets and a number. Offsets are asked for once and come in any order, as after a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ProcessQueue(QUEUE)
        self.waiting: dict[int, bytes] = {}
        self.taken: dict[int, bytes] = {}
        self.dead: set[int] = set()
        self.alone: set[int] = set()
        self.last_new = -1

    @step(offset=st.integers(0, 30), size=st.integers(0, 3))
    def put(self, offset: int, size: int) -> None:
        known = offset in self.waiting or offset in self.taken
        body = {**self.waiting, **self.taken}.get(offset, b"x" * size)
        assert self.queue.put([message(offset, body)]) == (not known)
        if not known:
            self.waiting[offset] = body
            self.last_new = offset
        self.did["known" if known else "new"] += 1

    @step(data=st.data(), other=st.integers(0, 30))
    def remove(self, data: st.DataObject, other: int) -> None:
        """Some of what waits, and one that may not."""
        self.put(other, 1)
        gone = [*some(data, self.waiting), other]
        found = self.queue.remove(messages(*gone))
        if not self.waiting:
            assert found is None
            return
        for offset in gone:
            self.did["removed"] += self.waiting.pop(offset, None) is not None
        self.did["held_up"] += bool(self.waiting)
        assert found == (min(self.waiting) if self.waiting else self.last_new + 1)

    @step(count=st.integers(1, 4), offset=st.integers(0, 30))
    def take(self, count: int, offset: int) -> None:
        self.put(offset, 1)
        expected = sorted(self.waiting)[:count]
        if alone := [at for at, each in enumerate(expected) if each in self.alone]:
            expected = expected[: max(1, alone[0])]
            self.did["alone"] += 1
        assert offsets(self.queue.take(count)) == expected
        self.taken |= {offset: self.waiting.pop(offset) for offset in expected}
        self.did["taken"] += len(expected)

    @step()
    def commit(self) -> None:
        done = [offset for offset in self.taken if not self.waiting or offset < min(self.waiting)]
        assert self.queue.commit() == (max(done) + 1 if done else None)
        self.did["committed"] += bool(done)
        self.did["not_passed"] += len(done) < len(self.taken)
        for offset in done:
            del self.taken[offset]
        self.dead -= set(done)
        self.alone -= set(done)

    @step(data=st.data(), alone=st.booleans(), count=st.integers(1, 4), offset=st.integers(0, 30))
    def put_back(self, data: st.DataObject, alone: bool, count: int, offset: int) -> None:
        """Some of what is taken, or of what is taken now."""
        if not self.taken.keys() - self.dead:
            self.take(count, offset)
        back = some(data, self.taken.keys() - self.dead)
        self.queue.put_back([message(offset, self.taken[offset], times=1) for offset in back], alone)
        self.waiting |= {offset: self.taken.pop(offset) for offset in back}
        self.alone |= set(back if alone else ())
        self.did["put_back"] += len(back)

    @step(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        dead = some(data, self.taken.keys() - self.dead)
        self.queue.mark_dead_letters(messages(*dead))
        self.dead |= set(dead)
        self.did["buried"] += len(dead)

    @step()
    def rollback(self) -> None:
        self.did["rolled_back"] += len(self.taken.keys() - self.dead)
        self.queue.rollback()
        self.waiting |= {offset: self.taken.pop(offset) for offset in self.taken.keys() - self.dead}

    @step(seldom=st.integers(0, 3))
    def clear(self, seldom: int) -> None:
        if seldom:
            return
        self.queue.clear()
        for part in (self.waiting, self.taken, self.dead, self.alone):
            part.clear()

    @invariant()
    def agrees(self) -> None:
        everything = {**self.waiting, **self.taken}
        assert self.queue.count == len(everything)
        assert self.queue.bytes == sum(map(len, everything.values()))
        assert self.queue.waiting_count == len(self.waiting)
        ends = (min(self.waiting), max(self.waiting)) if self.waiting else None
        assert self.queue.offsets == ends
        assert self.queue.span == (ends[1] - ends[0] if ends else 0)


def some(data: st.DataObject, things: Iterable[int]) -> list[int]:
    """A few of them, none where there are none."""
    among = sorted(things)
    return data.draw(st.lists(st.sampled_from(among), min_size=1, max_size=4, unique=True)) if among else []


TestQueue = model_test(
    QueueMachine,
    settings(max_examples=50, stateful_step_count=40),
    new=200,
    known=60,
    removed=100,
    held_up=15,
    taken=130,
    alone=6,
    committed=10,
    not_passed=1,
    put_back=60,
    buried=7,
    rolled_back=10,
)


def test_a_commit_does_not_pass_what_waits_before_a_dead_letter() -> None:
    queue = filled(0, 1, 2, 3)
    queue.take(2)
    queue.mark_dead_letters(queue.take(1))
    queue.rollback()
    assert offsets(queue.take(1)) == [0]
    assert queue.commit() == 1
    assert offsets(queue.take(5)) == [1, 3]
    assert (queue.commit(), queue.count) == (4, 0)


def test_what_is_to_be_taken_alone_is() -> None:
    queue = filled(0, 1, 2, 3)
    queue.put_back(queue.take(4)[1:3], one_by_one=True)
    queue.rollback()
    assert [offsets(queue.take(5)) for _ in range(5)] == [[0], [1], [2], [3], []]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("inside", [b"", None, 7, {"a": 1}])
def test_a_listener_may_put_something_else_in_a_message(group: GroupBench, ordered: bool, inside: Any) -> None:
    """Else what is cached would seem to grow with each one, until its queue is not pulled any more."""

    def listener(messages: Any, context: Any) -> None:
        messages[0].body = inside

    consumer, _ = group.start(listener, ordered=ordered, thresholds=Thresholds(max_bytes=100))
    group.time.advance(2)
    for number in range(60):
        group.brokers.send(q("a:0"), b"%05d" % number)
        group.time.advance(1)
    assert (len(group.got), consumer.stats().cached, consumer.stats().consumed) == (60, 0, 60)
    assert consumer.stop() == []
    assert group.brokers.offsets[q("a:0")] == 60


@pytest.mark.parametrize(
    ("how", "failing"),
    [
        ({"ordered": True}, ()),
        ({"ordered": True, "max_retries": 1}, ()),
        ({"max_retries": 1}, ("send_back", "send_to_retry")),
        ({"max_retries": 0}, ("send_back",)),
        ({"max_retries": 0, "consume_timeout_s": 5.0}, ("send_back",)),
    ],
)
def test_what_failed_is_given_again_as_it_came_and_copied_so(group: GroupBench, how: Any, failing: Any) -> None:
    """Whatever its listener made of it, which could do nothing with that."""
    late = "consume_timeout_s" in how

    def listener(messages: Any, context: Any) -> None:
        messages[0].body = json.loads(messages[0].body)
        if late:
            group.time.advance(11)
        raise ConnectionError("no database")

    group.start(listener, **how)
    group.time.advance(2)
    group.brokers.failing |= {verb: CallTimeout("late") for verb in failing}
    group.brokers.send(q("a:0"), b"[1]")
    group.time.advance(6)
    group.brokers.failing.clear()
    group.time.advance(20)
    assert set(group.bodies()) == {b"[1]"}
    assert len(group.got) > 1 or how["max_retries"] == 0
    assert {each.body for each in group.brokers.dead} == ({b"[1]"} if "max_retries" in how else set())
