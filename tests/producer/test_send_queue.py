"""What is under way, without anybody who sends it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import ClosedError, ConnectionLost, MessageIllegal, SendFailed
from rocketmq_spark.model import SendRequest, SendResult, SendStatus
from rocketmq_spark.options.transport import TransportFeatures
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.retry import RetryAttempt, RetryPolicy
from rocketmq_spark.producer.send_queue import CompletionEffects, SendQueue
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.timer import ManualTimer
from tests.helpers import waits_in
from tests.producer.bench import Bench
from tests.queues import q

OK = SendResult(SendStatus.SEND_OK, "", q("a:0"), 1)
LOST = ConnectionLost("broken")


def under_way(bench: Bench, **settings: Any) -> SendQueue:
    return SendQueue(ProducerSettings(group="g", **settings), ManualTimer(bench.time))


def sending(body: bytes = b"x", timeout: float = 3.0, **how: Any) -> OutgoingSend:
    outgoing = OutgoingSend("T", SendRequest("g", body), timeout, **how)
    outgoing.reset_attempts(RetryPolicy())
    return outgoing


def ordered(name: str = "a:0") -> OutgoingSend:
    return sending(queue=q(name), ordered=True)


def test_an_outcome_lets_the_next_one_of_the_queue_go(bench: Bench) -> None:
    found = under_way(bench)
    first, second, other = ordered(), ordered(), ordered("b:0")
    for each in (first, second, other):
        assert found.put(each, 2) is None
    assert found.take_ready() == [first, other]
    assert found.record_verdict(first, OK) == CompletionEffects([], True)
    assert (first.finished, found.window.request_count) == (True, 2)
    assert found.take_ready() == [second]
    assert found.record_verdict(other, OK) == CompletionEffects([], False)


def test_retried_send_blocks_its_queue_and_stays_first(bench: Bench) -> None:
    found = under_way(bench)
    first, second = ordered(), ordered()
    for each in (first, second):
        found.put(each, 1)
    found.take_ready()
    assert found.record_verdict(first, RetryAttempt(0.5, refresh=True)) == CompletionEffects([], False)
    assert (first.refresh_route, first.finished, found.window.request_count) == (True, False, 2)
    assert found.take_ready() == []
    bench.time.advance(0.5)
    assert found.take_ready() == [first]


@pytest.mark.parametrize("stays", [True, False])
def test_sends_behind_a_failure_fail_and_queue_may_stay_closed(bench: Bench, stays: bool) -> None:
    found = under_way(bench, failed_queues_stay_closed=stays)
    first, second, free = ordered(), ordered(), sending()
    for each in (first, second, free):
        found.put(each, 1)
    found.take_ready()
    assert found.record_verdict(free, LOST) == CompletionEffects([], False)
    assert found.record_verdict(first, LOST) == CompletionEffects([second], False)
    assert (second.finished, found.window.request_count, found.window.byte_count) == (True, 0, 0)
    assert found.put(ordered(), 1) is (LOST if stays else None)
    assert found.put(ordered("a:1"), 1) is None
    assert found.window.request_count == (1 if stays else 2)


def test_failure_closes_queue_to_every_call_with_sends_behind_it(bench: Bench) -> None:
    """What follows would overtake what was given up. A call that had nothing there is another one's order."""
    found, calls = under_way(bench), [dict[Any, Any]() for _ in range(3)]

    def next_of(shut: dict[Any, Any]) -> OutgoingSend:
        return sending(queue=q("a:0"), ordered=True, failed_queues=shut)

    first, second = map(next_of, calls[:2])
    for each in (first, second):
        assert found.put(each, 1) is None
    found.take_ready()
    assert found.record_verdict(first, LOST) == CompletionEffects([second], False)
    assert [found.put(next_of(shut), 1) for shut in calls] == [LOST, LOST, None]


def test_refused_message_fails_its_group_but_not_other_groups(
    bench: Bench,
) -> None:
    found = under_way(bench, features=TransportFeatures(queue_choice_problem="the server does"))
    grouped = [sending(ordered=True, ordering_key=("T", "group")) for _ in range(2)]
    mixed = [ordered() for _ in range(2)]
    for each in (*grouped, *mixed):
        found.put(each, 1)
    assert found.take_ready() == [grouped[0], mixed[0]]
    assert found.record_verdict(grouped[0], MessageIllegal("too large")) == CompletionEffects([grouped[1]], False)
    assert found.record_verdict(mixed[0], MessageIllegal("too large")) == CompletionEffects([], True)
    assert found.take_ready() == [mixed[1]]


def test_closing_gives_up_everything_and_takes_nothing_more(bench: Bench) -> None:
    found = under_way(bench)
    first, second, blocking = ordered(), ordered(), sending()
    for each in (first, second):
        found.put(each, 1)
    found.take_ready()
    found.add_blocking_send(blocking)
    assert not found.wait_until_idle(Deadline.after(0.5))
    assert found.close() == ([first, second], [blocking])
    assert found.record_verdict(first, OK) is None, "its answer is too late"
    assert found.window.request_count == 0
    with pytest.raises(ClosedError):
        found.put(ordered(), 1)
    assert found.has_room(1000, False), "so that nobody waits"
    found.remove_blocking_send(blocking)
    assert found.wait_until_idle(Deadline.after(0.0))


def test_room_is_waited_for_within_the_deadline(bench: Bench) -> None:
    found = under_way(bench, max_async_bytes=5)
    first = sending(b"xxx")
    found.wait_for_room(first)
    found.put(first, 1)
    late = sending(b"yyy", timeout=2.0)
    begin = bench.time.now
    with pytest.raises(SendFailed, match="1 asynchronous sends with 3 bytes are not answered yet"):
        found.wait_for_room(late)
    assert bench.time.now - begin == 2.0


def test_thread_waiting_for_room_wakes_on_outcome_and_on_close() -> None:
    for end in ("outcome", "close"):
        found = SendQueue(ProducerSettings(group="g", max_async_messages=1), Timer("test"))
        first = sending()
        found.put(first, 1)
        found.take_ready()
        waiter = threading.Thread(target=found.wait_for_room, args=(sending(timeout=60.0),))
        waiter.start()
        waits_in(waiter, threading.Condition.wait)
        if end == "outcome":
            found.record_verdict(first, OK)
        else:
            found.close()
        waiter.join(60)
        assert not waiter.is_alive()


def test_the_number_at_brokers_follows_what_they_acknowledge(bench: Bench) -> None:
    found = under_way(bench, max_in_flight=None)
    waiting = [sending() for _ in range(20)]
    for each in waiting:
        found.put(each, 1)
    out = found.take_ready()
    assert out == waiting[:4]
    for each in out:
        each.retry_state.next_action(q("a:0"), OK, (), 1.0)
        assert found.record_verdict(each, OK) == CompletionEffects([], True)
    assert len(found.take_ready()) == 8
