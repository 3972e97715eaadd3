"""Members of a group on a real broker, in the ordinary course of things."""

from __future__ import annotations

from collections import Counter, defaultdict

from rocketmq_spark.codes import DLQ_PREFIX
from tests.live.consumer.members import Members
from tests.mockbroker import eventually
from tests.reading import feed


def test_1_12_1_13_two_members_share_the_queues_and_nothing_is_lost(members: Members) -> None:
    sent = feed(members.mq, members.topic, 200)
    first = members.start()
    eventually(lambda: len(members.bodies()) >= 200, 20)
    second = members.start()
    eventually(lambda: members.owned(first) == members.owned(second) == 4, 20)
    shared = feed(members.mq, members.topic, 80)
    sent += shared
    eventually(lambda: set(members.bodies()) == set(sent), 20)
    assert {who for who, message in members.got if message.body.decode() in shared} == {
        first.client_id,
        second.client_id,
    }
    assert second.stop() == []
    eventually(lambda: members.owned(first) == 8, 20)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: set(members.bodies()) == set(sent), 20)
    assert first.stop() == []
    repeated = {body for body, times in Counter(members.bodies()).items() if times > 1}
    assert repeated <= set(
        sent[:200]
    )  # their offsets were not stored yet when the second one came; who leaves stores them
    assert sum(offset or 0 for offset in members.stored().values()) == 360


def test_4_9_a_java_member_takes_its_part_and_gives_it_back(members: Members) -> None:
    ours = members.start()
    eventually(lambda: members.owned(ours) == 8, 20)
    with members.java() as theirs:
        eventually(lambda: members.owned(ours) == 4, 60)
        sent = feed(members.mq, members.topic, 160)
        eventually(lambda: {*members.bodies(), *theirs.bodies()} == set(sent), 30)
        mine = {message.queue.queue_id for _, message in members.got}
        assert mine.isdisjoint(theirs.queues())
        assert len(mine) == len(theirs.queues()) == 4
    eventually(lambda: members.owned(ours) == 8, 30)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: {*members.bodies(), *theirs.bodies()} == set(sent), 30)


def test_1_24_a_message_that_a_java_member_failed_comes_to_us_with_its_count(members: Members) -> None:
    with members.java(fail=True) as theirs:
        (body,) = feed(members.mq, members.topic, 1, queues=[0])
        eventually(lambda: theirs.bodies() == [body], 60)
        eventually(lambda: 1 in members.stored().values(), 30)  # so it has sent it back
    members.start()
    eventually(lambda: members.bodies() == [body], 60)
    ((_, message),) = members.got
    assert (message.reconsume_times, message.topic) == (1, members.topic)


def test_1_31_a_message_that_comes_while_the_broker_holds_the_pull_is_there_at_once(members: Members) -> None:
    members.start()
    feed(members.mq, members.topic, 8)
    eventually(lambda: len(members.bodies()) == 8, 20)
    feed(members.mq, members.topic, 8)
    eventually(lambda: len(members.bodies()) == 16, 20)
    feed(members.mq, members.topic, 8)
    eventually(lambda: len(members.bodies()) == 24, 10)  # a pull is held for 15 s


def test_1_20_1_24_a_failed_message_comes_again_and_ends_with_the_dead(members: Members, java_peer) -> None:
    def listener(messages, context):
        times = messages[0].reconsume_times
        return context.retry(1) if times < 2 else context.retry(-1)

    consumer = members.start(listener)
    (body,) = feed(members.mq, members.topic, 1, queues=[0])
    eventually(lambda: consumer.stats()["sent_back"] == 3, 90)
    assert [message.reconsume_times for _, message in members.got] == [0, 1, 2]
    assert {message.topic for _, message in members.got} == {members.topic}
    assert len({message.msg_id for _, message in members.got}) == 1
    (dead,) = java_peer.read(DLQ_PREFIX + members.group, 1)
    assert dead.body.decode() == body
    assert consumer.stop() == []
    assert members.stored()[members.got[0][1].queue] == 1


def test_4_18_ordered_members_keep_the_order_of_every_queue_while_it_changes_hands(members: Members) -> None:
    def order() -> dict[object, list[int]]:
        found = defaultdict(list)
        with members.lock:
            for _, message in members.got:
                found[message.queue].append(message.queue_offset)
        return found

    sent = feed(members.mq, members.topic, 160)
    first = members.start(ordered=True)
    eventually(lambda: len(members.bodies()) >= 160, 30)
    second = members.start(ordered=True)
    sent += feed(members.mq, members.topic, 160)
    eventually(lambda: members.owned(first) == members.owned(second) == 4, 30)
    sent += feed(members.mq, members.topic, 160)
    eventually(lambda: set(members.bodies()) == set(sent), 30)
    assert first.stop() == []
    eventually(lambda: members.owned(second) == 8, 30)
    sent += feed(members.mq, members.topic, 80)
    eventually(lambda: set(members.bodies()) == set(sent), 30)
    for queue, offsets in order().items():
        assert sorted(set(offsets)) == list(dict.fromkeys(offsets)), queue
