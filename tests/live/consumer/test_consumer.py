"""Members of a group on a real broker, in the ordinary course of things."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX
from rocketmq_spark.model import MessageQueue
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed


def test_two_members_share_the_queues_and_nothing_is_lost(members: Members) -> None:
    sent = feed(members.mq, members.topic, 200)
    first = members.start(persist_interval_s=0.2)
    eventually(lambda: len(members.bodies()) >= 200, 60)
    second = members.start()
    eventually(lambda: members.owned(first) == members.owned(second) == 4, 60)
    shared = feed(members.mq, members.topic, 80)
    sent += shared
    eventually(lambda: set(members.bodies()) == set(sent), 60)
    assert {who for who, message in members.got if message.body.decode() in shared} == {
        first.client_id,
        second.client_id,
    }
    assert second.stop() == []
    eventually(lambda: members.owned(first) == 8, 60)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: set(members.bodies()) == set(sent), 60)
    members.all_stored(360)
    assert first.stop() == []
    repeated = {body for body, times in Counter(members.bodies()).items() if times > 1}
    # Offsets of the first were not stored yet when the second one came. Who leaves stores them, but a broker may handle a pull
    # that was under way, with an older offset, after that.
    assert repeated <= set(sent[:280])
    assert sum(offset or 0 for offset in members.stored().values()) == 360


def test_java_member_takes_its_part_and_gives_it_back(members: Members) -> None:
    ours = members.start()
    eventually(lambda: members.owned(ours) == 8, 60)
    with members.java() as theirs:
        eventually(lambda: members.owned(ours) == 4, 60)
        sent = feed(members.mq, members.topic, 160)
        eventually(lambda: {*members.bodies(), *theirs.bodies()} == set(sent), 60)
        mine = {message.queue.queue_id for _, message in members.got}
        assert mine.isdisjoint(theirs.queues())
        assert len(mine) == len(theirs.queues()) == 4
    eventually(lambda: members.owned(ours) == 8, 60)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: {*members.bodies(), *theirs.bodies()} == set(sent), 60)


def test_message_failed_by_java_member_arrives_with_retry_count(members: Members) -> None:
    with members.java(fail=True) as theirs:
        (body,) = feed(members.mq, members.topic, 1, queues=[0])
        eventually(lambda: theirs.bodies() == [body], 60)
        eventually(lambda: 1 in members.stored().values(), 60)  # so it has sent it back
    members.start()
    eventually(lambda: members.bodies() == [body], 60)
    ((_, message),) = members.got
    assert (message.reconsume_times, message.topic) == (1, members.topic)


def test_message_arriving_during_held_pull_is_delivered_at_once(
    members: Members,
) -> None:
    """Long before the broker may say that there is nothing new, or the pull is given up.

    One time for all turns: what comes late comes late in each of them.
    """
    members.start(pull_suspend_s=250.0, pull_timeout_s=300.0)
    deadline = Deadline.after(60)
    for turn in range(1, 7):
        feed(members.mq, members.topic, 8)
        eventually(lambda count=8 * turn: len(members.bodies()) == count, deadline.remaining())


def test_failed_message_comes_again_and_ends_with_the_dead(members: Members, java_peer) -> None:
    def listener(messages, context):
        times = messages[0].reconsume_times
        return context.retry(1) if times < 2 else context.retry(-1)

    consumer = members.start(listener)
    (body,) = feed(members.mq, members.topic, 1, queues=[0])
    eventually(lambda: consumer.stats().sent_back == 3, 90)
    assert [message.reconsume_times for _, message in members.got] == [0, 1, 2]
    assert {message.topic for _, message in members.got} == {members.topic}
    assert len({message.msg_id for _, message in members.got}) == 1
    (dead,) = java_peer.read(DLQ_PREFIX + members.group, 1)
    assert dead.body.decode() == body
    assert consumer.stop() == []
    assert members.stored()[members.got[0][1].queue] == 1


def test_queue_locked_by_other_client_is_consumed_when_freed(members: Members) -> None:
    own = options.parse({"nameServer": members.mq.name_server, "connectTimeout": "2998ms"})
    other = session.member(own.for_role("producer"))
    queues = other.queues(members.topic, Deadline.after(30))
    taken = {queues[0], queues[3]}
    assert other.lock(members.group, taken, Deadline.after(30)) == taken
    sent = feed(members.mq, members.topic, 16)
    consumer = members.start(ordered=True)
    eventually(lambda: len(members.bodies()) == 12, 60)
    assert {message.queue for _, message in members.got} == set(queues) - taken
    assert members.owned(consumer) == 6
    other.unlock(members.group, taken, Deadline.after(30))
    eventually(lambda: sorted(members.bodies()) == sorted(sent), 60)
    assert members.owned(consumer) == 8


@pytest.mark.parametrize("ordered", [False, True])
def test_listener_exit_fails_its_message_and_consuming_goes_on(members: Members, ordered: bool) -> None:
    fails = Counter[str]()

    def exits(messages, context) -> None:
        fails[messages[0].body.decode()] += 1
        if fails[messages[0].body.decode()] == 1:
            sys.exit(3)

    consumer = members.start(exits, ordered=ordered, threads=2, suspend_time_s=0.01)
    # One for each queue: of two, a pull may bring the offset of the first, which a broker may store after the stop's.
    sent = feed(members.mq, members.topic, 8)
    eventually(lambda: fails == dict.fromkeys(sent, 2), 90)
    assert consumer.stop() == []
    assert sum(offset or 0 for offset in members.stored().values()) == 8


def test_ordered_members_keep_queue_order_during_handover(members: Members) -> None:
    """All offsets that came are compared: each queue's come one by one, from one member and then from the other.

    Who takes a queue over begins at the message that the other one had at that moment, or behind it.
    """
    sent = feed(members.mq, members.topic, 160)
    first = members.start(ordered=True, persist_interval_s=0.2)
    eventually(lambda: len(members.bodies()) >= 160, 60)
    second = members.start(ordered=True, persist_interval_s=0.2)
    sent += feed(members.mq, members.topic, 160)
    eventually(lambda: members.owned(first) == members.owned(second) == 4, 60)
    sent += feed(members.mq, members.topic, 160)
    eventually(lambda: set(members.bodies()) == set(sent), 60)
    members.all_stored(480)
    assert first.stop() == []
    eventually(lambda: members.owned(second) == 8, 60)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: set(members.bodies()) == set(sent), 60)
    members.all_stored(560)
    assert second.stop() == []
    found: dict[MessageQueue, list[tuple[str, int]]] = {queue: [] for queue in members.stored()}
    for who, message in members.got:
        found[message.queue].append((who, message.queue_offset))
    assert len(found) == 8
    for queue, came in found.items():
        owners = [who for who, _ in itertools.groupby(who for who, _ in came)]
        assert owners == [first.client_id, second.client_id], queue
        steps = [(who != before, offset - last) for (before, last), (who, offset) in itertools.pairwise(came)]
        assert set(steps) <= {(False, 1), (True, 0), (True, 1)}, (queue, came)
        assert (came[0][1], came[-1][1]) == (0, len(sent) // 8 - 1), queue
    assert members.stored() == dict.fromkeys(found, len(sent) // 8)
