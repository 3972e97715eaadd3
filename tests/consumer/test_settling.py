from __future__ import annotations

import threading
from dataclasses import replace

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ConnectionLost, NotFound
from rocketmq_spark.model.membership import ConsumerStats
from rocketmq_spark.model.message import PoppedMessage
from tests.consumer.pop import SETTINGS, PopBench, arrival, of
from tests.mockbroker import eventually


def renewed(bench: PopBench) -> None:
    """A look, to its end."""
    bench.settling.renew()
    eventually(lambda: not bench.settling._renew_threads, 60)


def test_the_proxy_is_told_and_the_message_is_out_of_hand():
    bench = PopBench()
    done, dead, later = bench.lent(of("A"), of("B"), of("C"))
    assert all(
        [bench.settling.ack(done), bench.settling.forward_to_dlq(dead), bench.settling.redeliver_later(later, 10.0)]
    )
    assert bench.proxy.told == [("ack", "A"), ("dlq", "B"), ("change", "C", 10.0)]
    assert bench.in_hand.stats() == ConsumerStats(sent_back=1)


def test_what_cannot_be_told_is_said_and_comes_again(caplog):
    bench = PopBench()
    for lent, verb, ask in zip(
        bench.lent(of("A"), of("B"), of("C")),
        ("ack", "dlq", "change"),
        (bench.settling.ack, bench.settling.forward_to_dlq, lambda one: bench.settling.redeliver_later(one, 10.0)),
        strict=True,
    ):
        bench.proxy.failing[verb] = ConnectionLost("away")
        assert not ask(lent)
        assert f"message {lent.message.msg_id} could not be" in caplog.text
    assert bench.in_hand.stats() == ConsumerStats()


def test_what_stays_in_hand_gets_more_time_before_it_needs_it():
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    bench.time.advance(9)
    renewed(bench)
    assert bench.proxy.told == []
    for _ in range(5):
        bench.time.advance(10)
        renewed(bench)
    assert bench.proxy.told == [("change", "A", 30.0)] * 5
    assert bench.in_hand.start_call(lent, bench.timer.lease_ms() + 29_999)


def test_more_time_counts_from_when_it_was_asked_for():
    """The Proxy's began at that moment or later; another member may have the message when it is over."""
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    change = bench.proxy.change_invisible

    def slow(*given):
        change(*given)
        bench.time.advance(4)  # the answer is on its way

    bench.proxy.change_invisible = slow
    bench.time.advance(10)
    renewed(bench)
    assert bench.in_hand.start_call(lent, bench.timer.lease_ms() + 25_999)
    assert not bench.in_hand.start_call(lent, bench.timer.lease_ms() + 26_000)


def test_a_proxy_that_is_away_for_a_moment_is_asked_again():
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    bench.proxy.failing["change"] = ConnectionLost("away")
    bench.time.advance(10)
    renewed(bench)
    bench.proxy.failing.clear()
    bench.time.advance(10)
    renewed(bench)
    assert bench.proxy.told == [("change", "A", 30.0)]
    assert bench.in_hand.start_call(lent, bench.timer.lease_ms() + 29_999)


def test_what_is_somebody_elses_already_goes_to_no_listener(caplog):
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    bench.proxy.failing["change"] = NotFound("gone")
    bench.time.advance(10)
    renewed(bench)
    assert "the invisible time of message A is over" in caplog.text
    assert not bench.in_hand.start_call(lent, bench.timer.lease_ms())


def test_a_listener_that_hangs_keeps_its_message_from_nobody(caplog):
    bench = PopBench(replace(SETTINGS, consume_timeout_s=15.0))
    hangs, _waits = bench.lent(of("A"), of("B"))
    bench.in_hand.start_call(hangs, bench.timer.lease_ms())
    for _ in range(2):
        bench.time.advance(10)
        renewed(bench)
    assert bench.proxy.told == [("change", "A", 30.0), ("change", "B", 30.0), ("change", "B", 30.0)]
    assert "the listener has had message A for too long" in caplog.text


def test_hanging_ordered_listener_keeps_lease_of_its_message(caplog):
    """A broker hands out nothing of a queue while what is behind the message is somebody's."""
    bench = PopBench(replace(SETTINGS, consume_timeout_s=15.0, ordered=True))
    hangs, _waits = bench.lent(of("A", "a"), of("B", "a"))
    bench.in_hand.start_call(hangs, bench.timer.lease_ms())
    for _ in range(2):
        bench.time.advance(10)
        renewed(bench)
    assert bench.proxy.told == [("change", "A", 30.0), ("change", "B", 30.0)] * 2
    assert "the listener has had message A for too long: its queue waits" in caplog.text


def test_what_is_settled_meanwhile_is_not_asked_for_again():
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    bench.in_hand.all_messages = lambda: [lent]  # as it was when the look began
    bench.time.advance(10)
    bench.settling.ack(lent)
    renewed(bench)
    assert bench.proxy.told == [("ack", "A")]


def test_ack_during_lease_renewal_is_sent_after_it():
    """Each request makes the receipt of the others worthless: the message would come again although it was done."""
    bench = PopBench()
    (lent,) = bench.lent(of("A"))
    inside, go_on, change = threading.Event(), threading.Event(), bench.proxy.change_invisible

    def slowly(message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        inside.set()
        go_on.wait(60)
        change(message, invisible_s, deadline)

    bench.proxy.change_invisible = slowly
    settles = threading.Thread(target=bench.settling.ack, args=(lent,), daemon=True)
    arrived = arrival(lent, "request_lock", settles)
    bench.time.advance(10)
    bench.settling.renew()
    assert inside.wait(60)
    settles.start()
    assert arrived.wait(60)
    go_on.set()
    settles.join(60)
    eventually(lambda: not bench.settling._renew_threads, 60)
    assert bench.proxy.told == [("change", "A", 30.0), ("ack", "A")]
    assert not bench.proxy.lent, "it comes again"


def test_an_endpoint_that_hangs_keeps_no_other_from_being_asked():
    bench = PopBench()
    slow, quick = of("A"), of("B")
    slow.endpoint, quick.endpoint = "one:8081", "two:8081"
    held, asked = threading.Event(), threading.Event()
    change = bench.proxy.change_invisible

    def hanging(message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        if message.endpoint == "one:8081":
            asked.set()
            held.wait(60)
        change(message, invisible_s, deadline)

    bench.proxy.change_invisible = hanging
    (hangs,) = bench.lent(slow)
    bench.time.advance(10)
    bench.settling.renew()  # that of nobody else is due
    assert asked.wait(60)
    (other,) = bench.lent(quick)
    for n in range(1, 4):
        bench.time.advance(10)
        bench.settling.renew()
        eventually(lambda n=n: bench.proxy.told == [("change", "B", 30.0)] * n, 60)
        eventually(lambda: len(bench.settling._renew_threads) == 1, 60)
    assert bench.in_hand.start_call(other, bench.timer.lease_ms() + 29_999)
    held.set()
    eventually(lambda: not bench.settling._renew_threads, 60)
    assert not bench.in_hand.start_call(hangs, bench.timer.lease_ms())


def test_many_leases_are_renewed_by_several_threads_once_each():
    """One by one, at 25 ms each, that took longer than their time for 1280 of an ordered consumer."""
    bench = PopBench()
    lent = bench.lent(*[of(f"{n}") for n in range(400)])
    change, together = bench.proxy.change_invisible, threading.Barrier(8)
    first = threading.local()

    def slowly(message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        if not hasattr(first, "was"):
            first.was = together.wait(60)
        change(message, invisible_s, deadline)

    bench.proxy.change_invisible = slowly
    bench.time.advance(10)
    renewed(bench)
    assert sorted(bench.proxy.told) == sorted(("change", f"{n}", 30.0) for n in range(400))
    bench.settling._renew_all(lent)  # a thread that was slower than the look after it
    assert len(bench.proxy.told) == 400
