"""When a message that always fails comes again, how often, and where it ends; RocketMQ's own client sees the same."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Producer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX, FIRST_RETRY_LEVEL, RETRY_PREFIX
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed
from tests.scale import SCALE
from tests.witness import java_read

# Seconds by level. Neighbours differ, so that a level taken twice or left out shows in the times; after two failures there
# is time to stop.
LEVELS = (1, 2, 1, 3, *((1, 2) * 7))
TRIES = 16 if SCALE >= 1 else 5  # 16 are the default of both clients
SCHEDULED = "SCHEDULE_TOPIC_XXXX"  # one queue for each level: what the broker holds back
FEW = 5
JAVA_GROUP = "g-java"


@pytest.fixture(scope="module")
def hasty() -> Iterator[LocalBroker]:
    """A broker whose delays are short."""
    with LocalBroker(conf={"messageDelayLevel": " ".join(f"{seconds}s" for seconds in LEVELS)}, quiet=True) as mq:
        yield mq


@pytest.fixture
def make_members(hasty: LocalBroker) -> Iterator:
    made: list[Members] = []

    def make(topic: str) -> Members:
        made.append(Members(hasty, topic))
        # Java's client takes a minute to notice a topic that was not there when it started.
        for name in (topic, RETRY_PREFIX + made[-1].group, RETRY_PREFIX + JAVA_GROUP):
            hasty.create_topic(name, queues=1)
        return made[-1]

    yield make
    for members in made:
        for consumer in members.all:
            consumer.stop(5)


class Fails:
    """A listener that never succeeds; ``got`` is how often each message had come before, and when it came, in ms."""

    def __init__(self) -> None:
        self.got: list[tuple[int, float]] = []

    def __call__(self, messages: list[ReceivedMessage], context: object) -> None:
        self.got += [(message.reconsume_times, 1000 * time.time()) for message in messages]
        raise RuntimeError("never")

    def times(self) -> list[int]:
        return [times for times, _ in self.got]


def levels_used(mq: LocalBroker) -> dict[int, int]:
    """How many messages each level has held back so far."""
    bounds = mq.admin.describe_topic(SCHEDULED)
    return {queue.queue_id + 1: found.max_offset for queue, found in bounds.items() if found.max_offset}


def dead(members: Members, group: str) -> list[str]:
    return [record.id for record in java_read(members.mq.name_server, DLQ_PREFIX + group, 1)]


def never_early(came: list[float]) -> None:
    for times, (before, after) in enumerate(itertools.pairwise(came)):
        assert after - before >= 1000 * LEVELS[FIRST_RETRY_LEVEL + times - 1], f"repetition {times + 1} came early"


def test_message_takes_javas_retry_levels_then_is_dead_letter(
    make_members,
) -> None:
    members = make_members("poison")
    before = levels_used(members.mq)
    listener = Fails()
    with members.java(fail=True, group=JAVA_GROUP, **({} if TRIES == 16 else {"tries": TRIES})) as theirs:
        members.start(listener, **({} if TRIES == 16 else {"max_retries": TRIES}))
        feed(members.mq, members.topic, 1)
        expected = list(range(TRIES + 1))
        eventually(lambda: listener.times()[TRIES:] != [] and len(theirs.got()) > TRIES, 180)
        eventually(lambda: members.all[0].stats().sent_back == TRIES + 1, 60)
        (ours_dead,), (theirs_dead,) = dead(members, members.group), dead(members, JAVA_GROUP)
    assert members.all[0].stop() == []
    assert listener.times() == [each["times"] for each in theirs.got()] == expected
    never_early([at for _, at in listener.got])
    never_early([each["at"] for each in theirs.got()])
    assert {each["id"] for each in theirs.got()} == {ours_dead} == {theirs_dead}
    assert {message.msg_id for _, message in members.got} == {ours_dead}
    held_back = {level: count - before.get(level, 0) for level, count in levels_used(members.mq).items()}
    assert held_back == {FIRST_RETRY_LEVEL + times: 2 for times in range(TRIES)}  # one of each group


@pytest.mark.parametrize("first", ["ours", "java"])
def test_counts_go_on_where_a_member_of_the_other_kind_left_them(make_members, first: str) -> None:
    members = make_members(f"poison-{first}")
    mq, before = members.mq, sum(levels_used(members.mq).values())
    dead_letters = DLQ_PREFIX + members.group
    retried = MessageQueue(RETRY_PREFIX + members.group, "broker-a", 0)

    def failed_twice() -> bool:
        return sum(levels_used(mq).values()) - before >= 2

    def finished() -> bool:
        """The last offset is stored, which comes after the dead letter."""
        return mq.admin.offset_reader.committed(members.group, [retried], Deadline.after(10))[retried] == FEW

    def ours(over: Callable[[], bool]) -> list[int]:
        listener = Fails()
        consumer = members.start(listener, max_retries=FEW)
        eventually(over, 60)
        assert consumer.stop() == []
        return listener.times()

    def java(over: Callable[[], bool]) -> list[int]:
        with members.java(fail=True, tries=FEW) as theirs:
            eventually(over, 60)
        return [each["times"] for each in theirs.got()]

    (body,) = feed(mq, members.topic, 1)
    turns = (ours, java) if first == "ours" else (java, ours)
    early, late = turns[0](failed_twice), turns[1](finished)
    assert early[:2] == [0, 1]
    assert early + late == list(range(FEW + 1))
    (found,) = java_read(mq.name_server, dead_letters, 1, bodies=True)
    assert found.body.decode() == body


def test_ordered_message_is_dead_letter_after_last_local_try(make_members) -> None:
    """And comes no more: nothing of it is held back to be delivered again behind later messages."""
    members, tries = make_members("ordered-poison"), 3
    group = "g-java-ordered"
    before = levels_used(members.mq)
    listener = Fails()

    def fails_first(messages: list[ReceivedMessage], context: object) -> None:
        if messages[0].body.decode() == poison:
            listener(messages, context)

    (poison,) = feed(members.mq, members.topic, 1)
    consumer = members.start(fails_first, ordered=True, max_retries=tries, suspend_time_s=0.1)
    with members.java(fail=True, group=group, ordered="true", tries=tries) as theirs:
        eventually(lambda: len(theirs.got()) > tries and len(listener.got) > tries, 120)
        (ours_dead,), (theirs_dead,) = dead(members, members.group), dead(members, group)
    (good,) = feed(members.mq, members.topic, 1)
    eventually(lambda: members.bodies()[-1] == good, 60)
    assert consumer.stop() == []
    assert listener.times() == [each["times"] for each in theirs.got()] == list(range(tries + 1))
    assert members.bodies() == [*[poison] * (tries + 1), good]
    assert {ours_dead, theirs_dead} == {each["id"] for each in theirs.got()}
    assert levels_used(members.mq) == before


def test_inner_batch_messages_are_retried_one_by_one(make_members, caplog) -> None:
    """Brokers take back whole batches only, and refuse these: a copy goes instead."""
    members = make_members("batched-poison")
    members.mq.create_topic("whole-poison", queues=1, batch=True)
    members.topic = "whole-poison"
    with Producer(name_server=members.mq.name_server, group="p_whole") as producer:
        producer.send_batch([Message(members.topic, b"%d" % i) for i in range(4)])

    def picky(messages: list[ReceivedMessage], context: Any) -> Any:
        (one,) = messages
        if one.body == b"3":
            return context.retry(-1)
        return context.retry() if one.body == b"1" and one.reconsume_times < 2 else None

    members.start(picky)
    came = Counter({"0": 1, "1": 3, "2": 1, "3": 1})
    eventually(lambda: Counter(members.bodies()) == came, 60)
    (found,) = java_read(members.mq.name_server, DLQ_PREFIX + members.group, 1, bodies=True)
    assert found.body == b"3"
    assert members.all[0].stop() == []
    assert Counter(members.bodies()) == came
    assert not [record for record in caplog.records if "could not be" in record.getMessage()]


def test_message_of_hanging_listener_returns_and_queue_goes_on(make_members) -> None:
    members = make_members("stuck")
    go_on, left = threading.Event(), threading.Event()

    def hangs(messages: list[ReceivedMessage], context: object) -> None:
        if messages[0].body.decode() == stuck and not messages[0].reconsume_times:
            go_on.wait(120)
            left.set()

    (stuck,) = feed(members.mq, members.topic, 1)
    consumer = members.start(hangs, consume_timeout_s=3.0, persist_interval_s=0.5)
    try:
        (other,) = feed(members.mq, members.topic, 1)
        came = Counter({stuck: 2, other: 1})
        eventually(lambda: Counter(members.bodies()) == came, 60)
        eventually(lambda: set(members.stored().values()) == {2}, 60)
        assert not left.is_set(), "it hangs no more"
        assert consumer.stats().sent_back == 1
        assert max(message.reconsume_times for _, message in members.got) == 1
    finally:
        go_on.set()
    assert consumer.stop() == []
    assert Counter(members.bodies()) == came
