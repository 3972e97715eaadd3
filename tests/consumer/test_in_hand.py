from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.pop import in_hand as in_hand_module
from rocketmq_spark.consumer.pop.in_hand import InHand, line_of
from rocketmq_spark.model.membership import ConsumerStats
from tests.consumer.pop import of
from tests.helpers import waits_in


def test_what_is_in_hand_and_what_became_of_the_others_is_counted():
    hand = InHand()
    done, failed, waits = hand.came("t", [of("A"), of("B"), of("C")], 30_000, 0)
    for lent in (done, failed):
        assert hand.begin(lent, 1000)
    hand.called(done, True, 1500)
    hand.called(failed, False, 2500)
    hand.end(done)
    hand.end(failed, sent_back=True)
    assert hand.stats() == ConsumerStats(consumed=1, failed=1, sent_back=1, cached=1)
    assert hand.all() == [waits]
    figures = hand.figures(["t", "u"], 3000)
    assert (figures["t"].consume_ms, figures["t"].failed, figures["t"].pull_ms) == (1000.0, 1, None)
    assert figures["u"].consume_ms is None


def test_what_lay_too_long_is_somebody_elses():
    hand = InHand()
    (lent,) = hand.came("t", [of("A")], 30_000, 0)
    assert not hand.begin(lent, 30_000)
    assert hand.stats() == ConsumerStats(lag=None)


def test_there_is_room_while_few_wait_for_a_listener():
    hand = InHand()
    first, second = hand.came("t", [of("A"), of("B")], 30_000, 0)
    assert hand.room("t", 3, 0)
    assert not hand.room("t", 2, 0)
    threading.Thread(target=hand.begin, args=(first, 1)).start()
    assert hand.room("t", 2, 30)
    assert not hand.room("t", 1, 0)
    hand.begin(second, 1)
    assert hand.room("t", 1, 0)


def test_what_waits_to_be_tried_again_takes_no_room_until_it_is_through():
    hand = InHand(line_of)
    first, behind = hand.came("t", [of("A", "a"), of("B", "a")], 30_000, 0)
    assert not hand.room("t", 1, 0)
    hand.begin(first, 1)
    hand.waits(first, 5)
    assert hand.room("t", 1, 0)
    first.message.message_group = "what a listener made of it"
    hand.end(first)
    assert not hand.room("t", 1, 0)
    hand.end(behind)
    assert hand.room("t", 1, 0)


@pytest.mark.parametrize("body", [b"x" * 1000, b""], ids=["large", "many"])
def test_what_waits_behind_one_that_takes_long_has_a_limit(monkeypatch, body):
    """A hostile Proxy lends more and more of a queue that waits."""
    monkeypatch.setattr(in_hand_module, "_MOST_BYTES", 100_000)
    hand = InHand(line_of)
    (first,) = hand.came("t", [of("A", "a")], 30_000, 0)
    hand.begin(first, 1)
    lent = []
    for _ in range(100):
        assert hand.room("t", 1, 0)
        assert hand._bytes["t"] < 100_000
        lent += hand.came("t", [replace(of(str(len(lent) + n), "a"), body=body) for n in range(10)], 30_000, 0)
    assert 30 < len(lent) < 300
    assert hand.all() == [first]
    assert {one.body for one in lent} == {b""}
    assert hand.room("u", 1, 0)
    hand.end(first)
    assert not any(hand.begin(one, 1) for one in lent)
    assert hand.room("t", 1, 0)
    assert not hand._bytes["t"]
    (again,) = hand.came("t", [of("B", "a")], 30_000, 0)  # the line goes on
    assert hand.begin(again, 1)


@pytest.mark.parametrize("state", ["retry", "slow"])
def test_large_messages_of_one_client_do_not_stop_other_queues(monkeypatch, state):
    """Each in a line of its own; it is enough that a listener fails, or takes long."""
    monkeypatch.setattr(in_hand_module, "_MOST_BYTES", 100_000)
    hand = InHand(line_of)
    lent = []
    for n in range(9):
        assert hand.room("t", 1, 0)
        lent += hand.came("t", [replace(of(f"A{n}", f"a{n}"), body=b"x" * 30_000)], 30_000, 0)
        hand.begin(lent[-1], 1)
        if state == "retry":
            hand.waits(lent[-1], 2)
    (small,) = hand.came("t", [of("B", "b")], 30_000, 0)
    hand.begin(small, 1)
    hand.waits(small, 2)
    assert hand.room("t", 1, 0)
    assert small in hand.all()  # those with most are given up
    assert hand._bytes["t"] < 100_000
    assert all(hand.begin(one, 3) == (state == "slow" or one in hand.all()) for one in lent if one.caller is None)


def test_a_message_that_was_given_up_is_not_consumed_after_a_renewal(monkeypatch):
    monkeypatch.setattr(in_hand_module, "_MOST_BYTES", 1000)
    hand = InHand(line_of)
    (lent,) = hand.came("t", [replace(of("A", "a"), body=b"x" * 2000)], 30_000, 0)
    hand.begin(lent, 1)
    hand.waits(lent, 2)
    assert hand.room("t", 1, 0)
    lent.until_ms = 60_000
    assert not hand.begin(lent, 3)
    assert hand.stats().cached == 0


def test_how_many_wait_is_not_counted_anew_for_each_who_asks(monkeypatch):
    """With a poller for each of 64 queues that took the whole interpreter: 70 messages a second came through."""
    asked: list[object] = []
    hand = InHand(lambda message: (asked.append(message), message.message_group)[1])
    lent = hand.came("t", [of(str(n), str(n)) for n in range(64)], 30_000, 0)
    for one in lent[:32]:
        hand.begin(one, 1)
        assert not hand.room("t", 32, 0)
        hand.end(one)
    assert len(asked) == 64


def test_the_end_waits_for_what_others_have():
    hand = InHand()
    mine, theirs, waits = hand.came("t", [of("A"), of("B"), of("C")], 30_000, 0)
    other = threading.Thread(target=hand.begin, args=(theirs, 0))
    other.start()
    other.join()
    assert [message.msg_id for message in hand.finish(Deadline.after(0))] == ["B"]
    for lent in (mine, theirs, waits):
        threading.Thread(target=hand.end, args=(lent,)).start()
    assert hand.finish(Deadline.after(30)) == []


def test_the_end_waits_for_what_no_listener_has_yet():
    hand = InHand()
    (waits,) = hand.came("t", [of("A")], 30_000, 0)
    end = threading.Thread(target=hand.finish, args=(Deadline.after(30),), daemon=True)
    end.start()
    waits_in(end, threading.Condition.wait)
    hand.end(waits)
    end.join(60)
    assert not end.is_alive()


def test_a_listener_that_ends_its_own_consumer_waits_for_no_turn_behind_it():
    hand = InHand()
    mine, _ = hand.came("t", [of("A"), of("B")], 30_000, 0)
    hand.begin(mine, 0)
    deadline = Deadline.after(30)
    assert [message.msg_id for message in hand.finish(deadline)] == ["A"]
    assert not deadline.expired


def test_what_waits_behind_one_that_fails_is_in_no_other_topics_way():
    hand = InHand()
    hand.came("t", [of("A"), of("B")], 30_000, 0)
    assert not hand.room("t", 2, 0)
    assert hand.room("u", 2, 0)
