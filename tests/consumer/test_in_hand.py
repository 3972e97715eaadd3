from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import pop
from rocketmq_spark.consumer.pop import UnackedMessages, ordering_key_of
from rocketmq_spark.model.membership import ConsumerStats
from tests.consumer.pop import of
from tests.helpers import waits_in


def test_unacked_messages_and_their_outcomes_are_counted():
    hand = UnackedMessages()
    done, failed, waits = hand.add("t", [of("A"), of("B"), of("C")], 30_000, 0)
    for lent in (done, failed):
        assert hand.start_call(lent, 1000)
    hand.record_outcome(done, True, 1500)
    hand.record_outcome(failed, False, 2500)
    hand.remove(done)
    hand.remove(failed, sent_back=True)
    assert hand.stats() == ConsumerStats(consumed=1, failed=1, sent_back=1, cached=1)
    assert hand.all_messages() == [waits]
    figures = hand.figures(["t", "u"], 3000)
    assert (figures["t"].consume_ms, figures["t"].failed, figures["t"].pull_ms) == (1000.0, 1, None)
    assert figures["u"].consume_ms is None


def test_what_lay_too_long_is_somebody_elses():
    hand = UnackedMessages()
    (lent,) = hand.add("t", [of("A")], 30_000, 0)
    assert not hand.start_call(lent, 30_000)
    assert hand.stats() == ConsumerStats(lag=None)


def test_there_is_room_while_few_wait_for_a_listener():
    hand = UnackedMessages()
    first, second = hand.add("t", [of("A"), of("B")], 30_000, 0)
    assert hand.wait_for_room("t", 3, 0)
    assert not hand.wait_for_room("t", 2, 0)
    threading.Thread(target=hand.start_call, args=(first, 1)).start()
    assert hand.wait_for_room("t", 2, 30)
    assert not hand.wait_for_room("t", 1, 0)
    hand.start_call(second, 1)
    assert hand.wait_for_room("t", 1, 0)


def test_messages_waiting_for_a_retry_take_no_room():
    hand = UnackedMessages(ordering_key_of)
    first, behind = hand.add("t", [of("A", "a"), of("B", "a")], 30_000, 0)
    assert not hand.wait_for_room("t", 1, 0)
    hand.start_call(first, 1)
    hand.requeue(first, 5)
    assert hand.wait_for_room("t", 1, 0)
    first.message.message_group = "what a listener made of it"
    hand.remove(first)
    assert not hand.wait_for_room("t", 1, 0)
    hand.remove(behind)
    assert hand.wait_for_room("t", 1, 0)


@pytest.mark.parametrize("body", [b"x" * 1000, b""], ids=["large", "many"])
def test_what_waits_behind_one_that_takes_long_has_a_limit(monkeypatch, body):
    """A hostile Proxy lends more and more of a queue that waits."""
    monkeypatch.setattr(pop, "MAX_WAITING_BYTES", 100_000)
    hand = UnackedMessages(ordering_key_of)
    (first,) = hand.add("t", [of("A", "a")], 30_000, 0)
    hand.start_call(first, 1)
    lent = []
    for _ in range(100):
        assert hand.wait_for_room("t", 1, 0)
        assert hand._waiting_bytes["t"] < 100_000
        lent += hand.add("t", [replace(of(str(len(lent) + n), "a"), body=body) for n in range(10)], 30_000, 0)
    assert 30 < len(lent) < 300
    assert hand.all_messages() == [first]
    assert {one.body for one in lent} == {b""}
    assert hand.wait_for_room("u", 1, 0)
    hand.remove(first)
    assert not any(hand.start_call(one, 1) for one in lent)
    assert hand.wait_for_room("t", 1, 0)
    assert not hand._waiting_bytes["t"]
    (again,) = hand.add("t", [of("B", "a")], 30_000, 0)  # the line goes on
    assert hand.start_call(again, 1)


@pytest.mark.parametrize("state", ["retry", "slow"])
def test_large_messages_of_one_client_do_not_stop_other_queues(monkeypatch, state):
    """Each in a line of its own; it is enough that a listener fails, or takes long."""
    monkeypatch.setattr(pop, "MAX_WAITING_BYTES", 100_000)
    hand = UnackedMessages(ordering_key_of)
    lent = []
    for n in range(9):
        assert hand.wait_for_room("t", 1, 0)
        lent += hand.add("t", [replace(of(f"A{n}", f"a{n}"), body=b"x" * 30_000)], 30_000, 0)
        hand.start_call(lent[-1], 1)
        if state == "retry":
            hand.requeue(lent[-1], 2)
    (small,) = hand.add("t", [of("B", "b")], 30_000, 0)
    hand.start_call(small, 1)
    hand.requeue(small, 2)
    assert hand.wait_for_room("t", 1, 0)
    assert small in hand.all_messages()  # those with most are given up
    assert hand._waiting_bytes["t"] < 100_000
    assert all(
        hand.start_call(one, 3) == (state == "slow" or one in hand.all_messages())
        for one in lent
        if one.listener_thread is None
    )


def test_message_given_up_is_not_consumed_after_lease_renewal(monkeypatch):
    monkeypatch.setattr(pop, "MAX_WAITING_BYTES", 1000)
    hand = UnackedMessages(ordering_key_of)
    (lent,) = hand.add("t", [replace(of("A", "a"), body=b"x" * 2000)], 30_000, 0)
    hand.start_call(lent, 1)
    hand.requeue(lent, 2)
    assert hand.wait_for_room("t", 1, 0)
    lent.invisible_until_ms = 60_000
    assert not hand.start_call(lent, 3)
    assert hand.stats().cached == 0


def test_how_many_wait_is_not_counted_anew_for_each_who_asks(monkeypatch):
    """With a poller for each of 64 queues that took the whole interpreter: 70 messages a second came through."""
    asked: list[object] = []
    hand = UnackedMessages(lambda message: (asked.append(message), message.message_group)[1])
    lent = hand.add("t", [of(str(n), str(n)) for n in range(64)], 30_000, 0)
    for one in lent[:32]:
        hand.start_call(one, 1)
        assert not hand.wait_for_room("t", 32, 0)
        hand.remove(one)
    assert len(asked) == 64


def test_the_end_waits_for_what_others_have():
    hand = UnackedMessages()
    mine, theirs, waits = hand.add("t", [of("A"), of("B"), of("C")], 30_000, 0)
    other = threading.Thread(target=hand.start_call, args=(theirs, 0))
    other.start()
    other.join()
    assert [message.msg_id for message in hand.wait_until_settled(Deadline.after(0))] == ["B"]
    for lent in (mine, theirs, waits):
        threading.Thread(target=hand.remove, args=(lent,)).start()
    assert hand.wait_until_settled(Deadline.after(30)) == []


def test_the_end_waits_for_what_no_listener_has_yet():
    hand = UnackedMessages()
    (waits,) = hand.add("t", [of("A")], 30_000, 0)
    end = threading.Thread(target=hand.wait_until_settled, args=(Deadline.after(30),), daemon=True)
    end.start()
    waits_in(end, threading.Condition.wait)
    hand.remove(waits)
    end.join(60)
    assert not end.is_alive()


def test_listener_ending_its_consumer_awaits_no_queued_message():
    hand = UnackedMessages()
    mine, _ = hand.add("t", [of("A"), of("B")], 30_000, 0)
    hand.start_call(mine, 0)
    deadline = Deadline.after(30)
    assert [message.msg_id for message in hand.wait_until_settled(deadline)] == ["A"]
    assert not deadline.expired


def test_messages_waiting_in_one_topic_block_no_other_topic():
    hand = UnackedMessages()
    hand.add("t", [of("A"), of("B")], 30_000, 0)
    assert not hand.wait_for_room("t", 2, 0)
    assert hand.wait_for_room("u", 2, 0)
