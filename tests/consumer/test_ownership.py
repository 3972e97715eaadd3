from __future__ import annotations

import pytest

from rocketmq_spark.consumer.start_offset import ConsumeFrom, Where
from rocketmq_spark.errors import CallTimeout, ServerFault
from tests.consumer.group import GroupBench
from tests.queues import q, qs

A = q("a:0")
ALL = qs("a:0-1 b:0-1")


@pytest.mark.parametrize("error", [ServerFault("code 1"), CallTimeout("late")])
def test_4_22_4_25_a_queue_whose_offset_is_not_known_waits_a_second(group: GroupBench, error, caplog) -> None:
    group.brokers.send(A, b"1")
    group.brokers.failing["committed a"] = error
    consumer, port = group.start()
    assert group.owned(consumer) == ALL[2:]
    assert "queue T/a/0 is not begun yet" in caplog.text
    del group.brokers.failing["committed a"]
    group.time.advance(1)
    assert group.owned(consumer) == ALL
    assert not [request for request in port.seen("pull") if request.offset < 0]


def test_a_broker_that_hangs_is_asked_once_a_run(group: GroupBench) -> None:
    group.brokers.failing["committed a"] = CallTimeout("late")
    _, port = group.start()
    assert [queue for queue in port.seen("committed") if queue.broker_name == "a"] == [A]


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        (ConsumeFrom(), []),
        (ConsumeFrom(Where.EARLIEST), [b"0", b"1", b"2"]),
        (ConsumeFrom(Where.TIMESTAMP, 2), [b"2"]),
    ],
)
def test_4_23_a_new_group_begins_where_it_says_and_goes_on_from_there(group: GroupBench, mode, first) -> None:
    group.brokers.send(A, b"0", b"1", b"2")
    consumer, _ = group.start(consume_from=mode)
    group.time.advance(1)
    assert group.bodies() == first
    consumer.stop()
    group.brokers.send(A, b"3")
    group.start(consume_from=ConsumeFrom())
    group.time.advance(1)
    assert group.bodies() == [*first, b"3"]


def test_4_20_what_was_in_memory_is_forgotten_when_a_queue_comes(group: GroupBench) -> None:
    consumer, _port = group.start()
    group.time.advance(1)
    held = consumer._running.held
    consumer._running._ownership.drop([A])
    group.brokers.offsets[A] = 0
    group.brokers.send(A, b"1")
    held.offsets.put(A, 99)
    assert consumer._running._ownership.add([A]) == ([A], False)
    assert held.offsets.get(A) == 0
    group.time.advance(1)
    assert group.bodies() == [b"1"]


def test_4_21_a_queue_is_begun_once_however_often_it_is_added(group: GroupBench) -> None:
    consumer, port = group.start()
    ownership = consumer._running._ownership
    assert ownership.add(ALL) == ([], False)
    group.time.advance(1)
    assert len(port.seen("pull")) == len(ALL)


def test_an_offset_that_cannot_be_stored_does_not_keep_a_queue(group: GroupBench) -> None:
    consumer, _ = group.start()
    group.time.advance(1)
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    group.brokers.failing["commit a"] = CallTimeout("late")
    assert consumer._running._ownership.drop([A])
    assert A not in consumer._running.held.queues
