from __future__ import annotations

from typing import Any

import pytest

from tests.consumer.group import GroupBench
from tests.queues import q, qs

A = q("a:0")
ALL = qs("a:0-1 b:0-1")


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    consumer, port = group.start(listener, ordered=True, **how)
    group.time.advance(1.6)
    return consumer, port


def test_queues_are_locked_before_they_are_pulled_and_again_every_twenty_seconds(group: GroupBench) -> None:
    _, port = started(group)
    assert group.brokers.locks == dict.fromkeys(ALL, "m1")
    order = [verb for verb, _ in port.calls]
    assert order.index("lock") < order.index("committed") < order.index("pull")
    before = len(port.seen("lock"))
    group.time.advance(60)
    assert len(port.seen("lock")) - before == 3


def test_a_failed_message_is_tried_again_in_place_and_holds_up_its_queue_only(group: GroupBench) -> None:
    consumer, port = started(
        group, lambda messages, context: 1 / 0 if messages[0].body == b"1" and messages[0].reconsume_times < 2 else None
    )
    group.brokers.send(A, b"1", b"2")
    group.brokers.send(q("a:1"), b"other")
    group.time.advance(1.5)
    assert group.bodies() == [b"1", b"other", b"1"]
    group.time.advance(2)
    assert [entry for entry in group.got if entry[1] != b"other"] == [
        ("m1", b"1", 0), ("m1", b"1", 1), ("m1", b"1", 2), ("m1", b"2", 0),
    ]  # fmt: skip
    assert port.seen("send_back") == []
    consumer.stop()
    assert group.brokers.offsets[A] == 2


def test_a_queue_waits_for_as_long_as_the_listener_says(group: GroupBench) -> None:
    started(group, lambda messages, context: None if messages[0].reconsume_times else context.suspend(5000))
    group.brokers.send(A, b"1")
    group.time.advance(4.9)
    assert len(group.got) == 1
    group.time.advance(0.3)
    assert len(group.got) == 2


def test_1_24_after_its_last_try_a_message_goes_to_the_retry_topic_and_the_queue_on(group: GroupBench) -> None:
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].body == b"bad" else None, max_tries=2)
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(5)
    assert port.seen("send_back") == [(b"bad", 0, 2)]
    assert group.bodies() == [b"bad", b"bad", b"bad", b"good"]


def test_a_commit_by_hand_finishes_all_since_the_last_one_and_a_rollback_repeats_them(group: GroupBench) -> None:
    answers = iter([None, None, "rollback", None, None, "commit", None])

    def listener(messages: Any, context: Any) -> Any:
        word = next(answers)
        return getattr(context, word)() if word else None

    consumer, _ = started(group, listener, auto_commit=False)
    group.brokers.send(A, b"1", b"2", b"3", b"4")
    group.time.advance(0.5)
    assert group.bodies() == [b"1", b"2", b"3"]
    assert consumer.stats()["cached"] == 4
    group.time.advance(1)
    assert group.bodies()[3:] == [b"1", b"2", b"3", b"4"]
    consumer.stop()
    assert group.brokers.offsets[A] == 3


def test_4_18_who_leaves_stores_offsets_before_the_locks_are_free(group: GroupBench) -> None:
    consumer, port = started(group)
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    consumer.stop()
    order = [verb for verb, _ in port.calls]
    assert len(order) - order[::-1].index("commit") < order.index("unlock") + 1 < order.index("leave") + 1
    assert group.brokers.locks == {}


def test_4_19_a_queue_that_somebody_else_has_locked_is_taken_when_it_is_free(group: GroupBench) -> None:
    group.brokers.locks[A] = "somebody"
    consumer, port = started(group)
    assert group.owned(consumer) == ALL[1:]
    assert not [request for request in port.seen("pull") if request.queue == A]
    del group.brokers.locks[A]
    group.time.advance(1.1)
    assert group.owned(consumer) == ALL


def test_4_18_a_queue_changes_hands_only_when_its_listener_is_through(group: GroupBench) -> None:
    first, _port = started(group)
    held = first._running.held.queues[q("b:0")]
    first._running._consuming._calling.add(held)
    second, _ = started(group)
    assert (group.owned(first), group.owned(second)) == (ALL[:2], [q("b:1")])
    assert held.dropped
    first._running._consuming._calling.discard(held)
    first._running._consuming.left()
    group.time.advance(2.1)
    assert group.owned(second) == ALL[2:]


def test_4_18_a_listener_that_hangs_does_not_keep_a_queue_for_ever(group: GroupBench) -> None:
    first, _ = started(group)
    held = first._running.held.queues[q("b:0")]
    first._running._consuming._calling.add(held)
    second, _ = started(group)
    group.time.advance(24)
    assert group.owned(second) == ALL[2:]


def test_a_lock_that_is_lost_stops_the_queue_until_it_is_granted_again(group: GroupBench) -> None:
    consumer, _ = started(group)
    group.brokers.locks[A] = "somebody"
    group.time.advance(20)
    assert not consumer._running.held.queues[A].lock.held(int(group.time.now * 1000))
    group.brokers.send(A, b"1")
    group.time.advance(1)
    assert group.got == []
    group.brokers.locks[A] = "m1"
    group.time.advance(4)
    assert group.bodies() == [b"1"]


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_a_queue_come_one_after_the_other(group: GroupBench, size: int) -> None:
    running: list[int] = []

    def listener(messages: Any, context: Any) -> None:
        assert not running
        running.append(1)
        running.pop()

    started(group, listener, consume_batch_max_size=size)
    group.brokers.send(A, *(b"%d" % i for i in range(100)))
    group.time.advance(1)
    assert group.bodies() == [b"%d" % i for i in range(100)]


def test_a_broadcasting_member_needs_no_locks(group: GroupBench, tmp_path) -> None:
    _, port = started(group, clustering=False, offsets_folder=tmp_path)
    group.brokers.send(A, b"1", b"2")
    group.time.advance(30)
    assert group.bodies() == [b"1", b"2"]
    assert port.seen("lock") == port.seen("unlock") == []
