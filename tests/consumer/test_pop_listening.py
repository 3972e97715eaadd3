from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.consumer.pop import FifoConsumeService, StandardConsumeService, redelivery_pause_s
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model.membership import ConsumerStats
from rocketmq_spark.model.message import GroupPolicy
from tests.consumer.pop import INVISIBLE_MS, PopBench, of
from tests.helpers import raising

POLICY = GroupPolicy(3, True, (10.0, 30.0))


class Listens:
    """A listener that notes what it gets, and then does what it is told for a message; a bench without threads round it."""

    def __init__(self, **does: Callable[[Any], object]) -> None:
        self.bench = PopBench()
        self.got: list[tuple[str, int]] = []
        self.does = does

    def __call__(self, messages: Any, context: Any) -> object:
        (message,) = messages
        assert context.queue == message.queue
        self.got.append((message.msg_id, message.reconsume_times))
        does = self.does.get(message.msg_id)
        return does(context) if does else None

    def in_any_order(self) -> StandardConsumeService:
        b = self.bench
        return StandardConsumeService(self, b.proxy, b.in_hand, b.settling, b.workers, b.timer)

    def in_order(self) -> FifoConsumeService:
        b = self.bench
        return FifoConsumeService(self, b.proxy, b.settings, b.in_hand, b.settling, (b.workers, b.timer))


def raises(context: Any) -> None:
    raise ValueError("poison")


def none_done(context: Any) -> None:
    context.ack_index = -1


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (lambda context: None, ("ack", "A")),
        (lambda context: context.retry(), ("change", "A", 10.0)),
        (lambda context: context.retry(5), ("change", "A", 60.0)),
        (lambda context: context.retry(-1), ("dlq", "A")),
        (none_done, ("change", "A", 10.0)),
        (raises, ("change", "A", 10.0)),
        (raising(SystemExit()), ("change", "A", 10.0)),
        (lambda context: context.retry("3"), ("change", "A", 10.0)),
        (lambda context: "done", ("change", "A", 10.0)),
    ],
)
def test_the_proxy_hears_what_the_listener_made_of_a_message(does, told):
    listens = Listens(A=does)
    listens.in_any_order().submit(listens.bench.lent(of("A")))
    listens.bench.time.run_due()
    assert listens.bench.proxy.told == [told]
    done, back = told[0] == "ack", told[0] == "change"
    assert listens.bench.in_hand.stats() == ConsumerStats(consumed=int(done), failed=int(not done), sent_back=int(back))


@pytest.mark.parametrize(
    ("does", "attempt", "dead"),
    [
        (lambda context: context.retry(), 2, False),
        (lambda context: context.retry(), 3, True),
        (lambda context: context.retry(-1), 1, True),
        (lambda context: None, 3, False),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_dead_letter_is_logged_once_the_proxy_has_accepted_it(does, attempt, dead, told, caplog):
    listens = Listens(A=does)
    if not told:
        listens.bench.proxy.failing |= dict.fromkeys(("change", "dlq", "ack"), ConnectionLost("away"))
    listens.in_any_order().submit(listens.bench.lent(of("A", attempt=attempt)))
    listens.bench.time.run_due()
    line = f"message A of t/broker-a/0 is a dead letter now, in topic %DLQ%g, after attempt {attempt}"
    assert (line in caplog.text) == (dead and told)


def test_what_the_listener_should_not_do_is_said(caplog):
    listens = Listens(A=raises, B=lambda context: "done")
    listens.in_any_order().submit(listens.bench.lent(of("A"), of("B")))
    listens.bench.time.run_due()
    assert "message A of" in caplog.text
    assert "raised ValueError: poison" in caplog.text
    assert "the listener returned 'done'; expected None or context.retry()" in caplog.text


@pytest.mark.parametrize("kind", ["in_any_order", "in_order"])
def test_what_waited_for_too_long_goes_to_no_listener(kind):
    listens = Listens()
    listening = getattr(listens, kind)()
    lent = listens.bench.lent(of("A"))
    listens.bench.time.advance(INVISIBLE_MS / 1000)
    listening.submit([*lent, *listens.bench.lent(of("B"))])
    listens.bench.time.run_due()
    # In order nothing overtakes it: what is behind it comes again, too.
    assert listens.got == ([("B", 0)] if kind == "in_any_order" else [])
    assert listens.bench.proxy.told == ([("ack", "B")] if kind == "in_any_order" else [])


@pytest.mark.parametrize("kind", ["in_any_order", "in_order"])
def test_what_waited_while_the_machine_slept_goes_to_no_listener(kind):
    """Others had it meanwhile, and in order what is behind it, too."""
    listens = Listens()
    listening = getattr(listens, kind)()
    lent = listens.bench.lent(of("A", "a"), of("B", "a"))
    listens.bench.time.slept_ms += INVISIBLE_MS
    listening.submit(lent)
    listens.bench.time.run_due()
    assert listens.got == []
    assert listens.bench.in_hand.stats().cached == 0


@pytest.mark.parametrize(
    ("level", "attempt", "seconds"),
    [(0, 1, 10.0), (0, 2, 30.0), (0, 9, 30.0), (1, 1, 1.0), (18, 1, 7200.0), (99, 1, 7200.0)],
)
def test_when_a_message_comes_again(level, attempt, seconds):
    assert redelivery_pause_s(level, attempt, POLICY) == seconds


def test_suspended_message_group_blocks_no_other_group():
    listens = Listens(A1=lambda context: context.suspend(20_000))
    listens.in_order().submit(listens.bench.lent(of("A1", "a"), of("A2", "a"), of("B1", "b"), of("B2", "b")))
    listens.bench.time.run_due()
    assert listens.got == [("A1", 0), ("B1", 0), ("B2", 0)]
    del listens.does["A1"]
    listens.bench.time.advance(19.9)
    assert len(listens.got) == 3
    listens.bench.time.advance(0.1)
    assert listens.got[3:] == [("A1", 1), ("A2", 0)]
    assert [told[1] for told in listens.bench.proxy.told] == ["B1", "B2", "A1", "A2"]
    assert listens.bench.in_hand.stats() == ConsumerStats(consumed=4, failed=1)


def test_without_a_group_the_queue_has_the_order():
    listens = Listens(A=raises)
    listens.in_order().submit(listens.bench.lent(of("A"), of("B"), of("C", queue_id=1)))
    listens.bench.time.run_due()
    assert listens.got == [("A", 0), ("C", 0)]


def test_last_attempt_is_a_dead_letter_and_its_group_goes_on(caplog):
    listens = Listens(A1=raises)
    listens.in_order().submit(listens.bench.lent(of("A1", "a", attempt=2), of("A2", "a")))
    listens.bench.time.advance(1)
    assert listens.got == [("A1", 1), ("A1", 2), ("A2", 0)]
    assert listens.bench.proxy.told == [("dlq", "A1"), ("ack", "A2")]
    assert caplog.text.count("is a dead letter now, in topic %DLQ%g, after attempt 3") == 1


def commits_later(context: Any) -> None:
    context.auto_commit = False


def test_listener_disabling_auto_commit_is_refused_and_retried(caplog):
    """None would then mean that the message is not done; 17 times at once, and it would be a dead letter."""
    listens = Listens(A=commits_later)
    listens.in_order().submit(listens.bench.lent(of("A", "a")))
    listens.bench.time.run_due()
    assert listens.got == [("A", 0)]
    assert "over gRPC each message is acknowledged by itself" in caplog.text
    listens.does["A"] = lambda context: setattr(context, "auto_commit", True)
    listens.bench.time.advance(1.0)
    assert listens.got == [("A", 0), ("A", 1)]
    assert listens.bench.proxy.told == [("ack", "A")]


def test_what_comes_while_a_group_waits_comes_behind_it():
    listens = Listens(A1=lambda context: context.suspend(5_000))
    listening = listens.in_order()
    listening.submit(listens.bench.lent(of("A1", "a")))
    listens.bench.time.run_due()
    listening.submit(listens.bench.lent(of("A2", "a")))
    listens.bench.time.run_due()
    assert listens.got == [("A1", 0)]
    del listens.does["A1"]
    listens.bench.time.advance(5)
    assert listens.got == [("A1", 0), ("A1", 1), ("A2", 0)]


def test_failed_ack_leaves_later_messages_for_redelivery():
    listens = Listens()
    listens.bench.proxy.failing["ack"] = ConnectionLost("away")
    listening = listens.in_order()
    listening.submit(listens.bench.lent(of("A1", "a"), of("A2", "a")))
    listens.bench.time.run_due()
    assert (listens.got, listens.bench.in_hand.all_messages()) == ([("A1", 0)], [])
    listens.bench.proxy.failing.clear()
    listening.submit(listens.bench.lent(of("A1", "a", attempt=2), of("A2", "a", attempt=2)))
    listens.bench.time.run_due()
    assert listens.got[1:] == [("A1", 1), ("A2", 1)]


@pytest.mark.parametrize("kind", ["in_any_order", "in_order"])
def test_unexpected_ack_error_redelivers_message_and_goes_on(kind, caplog):
    listens = Listens()
    listens.bench.proxy.failing["ack"] = SystemExit("a bug")
    listening = getattr(listens, kind)()
    listening.submit(listens.bench.lent(of("A", "a")))
    listens.bench.time.run_due()
    assert (listens.got, listens.bench.in_hand.all_messages()) == ([("A", 0)], [])
    assert "could not report the result of message A" in caplog.text
    listens.bench.proxy.failing.clear()
    listening.submit(listens.bench.lent(of("A", "a", attempt=2)))
    listens.bench.time.run_due()
    assert listens.got == [("A", 0), ("A", 1)]
    assert listens.bench.proxy.told == [("ack", "A")]


@pytest.mark.parametrize("kind", ["in_any_order", "in_order"])
def test_messages_cannot_be_taken_out_of_the_listeners_hands(kind):
    listens = Listens()
    seen = []
    listening = getattr(listens, kind)()
    listening._listener = lambda messages, context: seen.append(type(messages))
    listening.submit(listens.bench.lent(of("A", "a")))
    listens.bench.time.run_due()
    assert seen == [tuple]


def test_close_drops_failed_groups_and_finishes_other_messages():
    listens = Listens(A1=raises, B1=raises)
    listening = listens.in_order()
    listening.submit(listens.bench.lent(of("A1", "a"), of("A2", "a")))
    listens.bench.time.run_due()
    listening.close()
    assert listens.bench.in_hand.all_messages() == []
    listening.submit(listens.bench.lent(of("B1", "b"), of("B2", "b"), of("C1", "c"), of("C2", "c")))
    listens.bench.time.advance(5)
    assert listens.got == [("A1", 0), ("B1", 0), ("C1", 0), ("C2", 0)]
    assert listens.bench.in_hand.all_messages() == []


@pytest.mark.parametrize("done", [True, False])
def test_retry_pause_ending_during_close_delivers_nothing(done):
    listens = Listens(A=lambda context: context.suspend(1000))
    bench, listening = listens.bench, listens.in_order()
    listening.submit(bench.lent(of("A", "a"), of("B", "a")))
    bench.time.run_due()
    if done:
        del listens.does["A"]
    lock = listening._lock

    class Meanwhile:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            listening._lock = lock
            bench.time.advance(1.0)

    listening._lock = Meanwhile()
    listening.close()
    assert listens.got == [("A", 0)]
    assert bench.in_hand.stats().cached == 0
    assert bench.proxy.told == []


def test_what_is_tried_again_in_place_is_as_it_came() -> None:
    """Whatever the listener made of it."""
    bodies = []

    def listener(messages: Any, context: Any) -> None:
        bodies.append(messages[0].body)
        messages[0].body = None
        raise ConnectionError("no database")

    listens = Listens()
    b = listens.bench
    lent = b.lent(of("A"))
    came = lent[0].message.body
    FifoConsumeService(listener, b.proxy, b.settings, b.in_hand, b.settling, (b.workers, b.timer)).submit(lent)
    b.time.advance(60)
    assert bodies == [came] * 3
