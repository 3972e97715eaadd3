"""A consumer that asks for messages, on a Proxy in memory that answers at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.simple import BaseSimpleConsumer
from rocketmq_spark.errors import AccessDenied, ClosedError, ConnectionLost, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter
from rocketmq_spark.model.message import PoppedMessage
from tests.consumer.pop import arrival
from tests.fakes.pop_member import FakeProxy
from tests.helpers import raising
from tests.test_popped import popped


def proxy(**places: int) -> FakeProxy:
    """Topics with so many places each; a receive from an empty place is answered at once."""
    return FakeProxy(waits=False, **places)


def test_receive_asks_places_in_turn_until_message_or_timeout():
    member = proxy(t=2, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u", tags="a || b")
    assert member.filters[-1] == {"t": NO_FILTER, "u": Filter("a || b")}
    assert [consumer.receive(5, "20s", 0) for _ in range(3)] == [[], [], []]
    assert member.receives == [("t", 0, 5, 20.0), ("t", 1, 5, 20.0), ("u", 0, 5, 20.0)]
    member.put(popped(topic="u"))
    member.receives.clear()
    assert [message.msg_id for message in consumer.receive(wait="1m")] == ["ID"]
    assert [each[:2] for each in member.receives] == [("t", 0), ("t", 1), ("u", 0)]


def test_what_is_not_wanted_any_more_is_not_asked_for():
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    for topic in "tu":
        consumer.subscribe(topic, sql="a > 1")
    consumer.unsubscribe("t")
    assert member.filters[-1] == {"u": Filter("a > 1", "SQL92")}
    consumer.receive(wait=0)
    assert [each[0] for each in member.receives] == ["u"]


def test_a_subscription_that_no_proxy_heard_of_is_none():
    member = proxy(t=1)
    member.failing["subscribe"] = ConnectionLost("away")
    consumer = BaseSimpleConsumer(member, "g")
    with pytest.raises(ConnectionLost):
        consumer.subscribe("t")
    with pytest.raises(OptionError, match=r"expected subscribe\(\)"):
        consumer.receive()


@pytest.mark.parametrize("error", [ConnectionLost("away"), AccessDenied("no")])
def test_failed_filter_change_restores_previous_filter(error):
    """Also at the member, by which messages are asked for."""
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t", tags="a")
    tell, fails = member.subscribe, [error]

    def failing(filters: Mapping[str, Filter], deadline: Deadline) -> None:
        tell(filters, deadline)
        if fails:
            raise fails.pop()

    member.subscribe = failing
    with pytest.raises(type(error)):
        consumer.subscribe("t", tags="b")
    assert member.filters == [{"t": Filter("a")}, {"t": Filter("b")}, {"t": Filter("a")}]


def test_missing_topic_does_not_block_receiving_other_topics():
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    for topic in ("t", "gone", "u"):
        consumer.subscribe(topic)
    for topic in ("t", None, "u", "t", None):
        member.lying.clear()
        member.put(popped(), popped(topic="u"))
        with pytest.raises(RouteNotFound) if topic is None else contextlib.nullcontext():
            assert len(consumer.receive()) == 1
            assert member.receives[-1][0] == topic


def test_unsubscribed_topic_is_not_asked_for_when_proxy_is_away():
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u")
    member.failing["subscribe"] = ConnectionLost("away")
    with pytest.raises(ConnectionLost):
        consumer.unsubscribe("t")
    consumer.receive(wait=0)
    assert [each[0] for each in member.receives] == ["u"]


@pytest.mark.parametrize("left", [["t"], ["t", "u"]])
def test_topic_unsubscribed_during_receive_is_asked_for_no_more(left):
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u")
    ask = member.receive

    def leaving(*args: Any) -> Sequence[PoppedMessage]:
        answer = ask(*args)
        for each in left:
            consumer.unsubscribe(each)
        if len(member.receives) == 3:
            consumer.close()
        return answer

    member.receive = leaving
    assert consumer.receive(wait="1m") == []
    assert [each[0] for each in member.receives] == ["t", "u", "u"][: 1 if len(left) == 2 else 3]


def test_concurrent_subscriptions_of_two_threads_are_received():
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    second = threading.Thread(target=consumer.subscribe, args=("u",))
    arrived = arrival(consumer, "_change_lock", second)
    tell = member.subscribe

    def meanwhile(filters: Mapping[str, Filter], deadline: Deadline) -> None:
        if threading.current_thread() is second:
            arrived.set()
        else:
            second.start()
            assert arrived.wait(60)
        tell(filters, deadline)

    member.subscribe = meanwhile
    consumer.subscribe("t")
    second.join(60)
    assert member.filters[-1] == {"t": NO_FILTER, "u": NO_FILTER}
    consumer.receive(wait=0)
    consumer.receive(wait=0)
    assert [each[0] for each in member.receives] == ["t", "u"]


@pytest.mark.parametrize("verb", ["subscribe", "unsubscribe"])
def test_subscription_change_waiting_during_close_is_refused(verb):
    member = proxy(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    outcomes: list[Exception] = []

    def change() -> None:
        try:
            getattr(consumer, verb)("t")
        except ClosedError as e:
            outcomes.append(e)

    second = threading.Thread(target=change)
    arrived = arrival(consumer, "_change_lock", second)
    with consumer._change_lock:
        second.start()
        assert arrived.wait(60)
        consumer.close()
    second.join(60)
    assert len(outcomes) == len(member.filters) == 1


@pytest.mark.parametrize("verb", ["subscribe", "unsubscribe"])
def test_close_during_subscription_change_leaves_no_member(verb):
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    told: list[str] = []
    tell, leave = member.subscribe, member.close

    def meanwhile(filters: Any, deadline: Any) -> None:
        closes = threading.Thread(target=consumer.close)
        closes.start()
        closes.join(60)
        tell(filters, deadline)
        told.append("joined")

    def leaves(deadline: Any) -> None:
        leave(deadline)
        told.append("left")

    member.subscribe, member.close = meanwhile, leaves
    getattr(consumer, verb)("t")
    assert told == ["left", "joined", "left"]


def test_what_becomes_of_a_message():
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    member.put(*(popped(msg_id=name) for name in "ABCD"))
    done, kept, returned, dead = consumer.receive(4)
    consumer.ack(done)
    receipt = kept.receipt
    consumer.change_invisible(kept, "1m")
    assert kept.receipt != receipt  # with the new one it is acknowledged then
    consumer.change_invisible(returned, "0s")
    consumer.forward_to_dlq(dead)
    assert member.told == [("ack", "A"), ("change", "B", 60.0), ("change", "C", 0.0), ("dlq", "D")]
    with pytest.raises(OptionError, match="duration is '13h'; expected 0s to 12h"):
        consumer.change_invisible(popped(msg_id="E"), "13h")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_messages": 0}, "1 to 32"),
        ({"max_messages": 33}, "1 to 32"),
        ({"invisible": "9s"}, "10s to 12h"),
        ({"invisible": 50_000}, "10s to 12h"),
        ({"invisible": "soon"}, "invisible is 'soon'; expected a duration"),
        ({"wait": "-1s"}, "wait is '-1s'"),
    ],
)
def test_arguments_are_checked(given, said):
    consumer = BaseSimpleConsumer(proxy(t=1), "g")
    consumer.subscribe("t")
    with pytest.raises(OptionError, match=said):
        consumer.receive(**given)


@pytest.mark.parametrize("topic", ["", "a b"])
def test_names_are_checked(topic):
    with pytest.raises(OptionError, match="topic is"):
        BaseSimpleConsumer(proxy(), "g").subscribe(topic)
    with pytest.raises(OptionError, match="option 'group'"):
        BaseSimpleConsumer(proxy(), topic)


def test_it_is_closed_once_and_says_so():
    member = proxy(t=1)
    with BaseSimpleConsumer(member, "g") as consumer:
        pass
    consumer.close()
    assert member.closes == 1
    for call in (consumer.receive, lambda: consumer.ack(popped()), lambda: consumer.subscribe("t")):
        with pytest.raises(ClosedError):
            call()


def test_a_question_that_another_thread_ends_by_closing_says_so(monkeypatch):
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    monkeypatch.setattr(member, "receive", raising(ConnectionLost("away")))
    with pytest.raises(ConnectionLost):
        consumer.receive()

    def end(*_: object) -> None:
        closes = threading.Thread(target=consumer.close)
        closes.start()
        closes.join()
        raise ConnectionLost("the channel was closed")

    monkeypatch.setattr(member, "receive", end)
    with pytest.raises(ClosedError, match="the consumer is closed"):
        consumer.receive()


def test_a_fork_must_make_its_own():
    member, message = proxy(t=1), popped()
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    calls: list[Callable[[], object]] = [
        lambda: consumer.subscribe("t"),
        lambda: consumer.unsubscribe("t"),
        consumer.receive,
        lambda: consumer.ack(message),
        lambda: consumer.change_invisible(message, 1),
        lambda: consumer.forward_to_dlq(message),
    ]

    def forked() -> None:
        for call in calls:
            with pytest.raises(ClosedError, match="from which this one was forked"):
                call()
        consumer.close()
        assert (member.closes, len(member.filters), member.receives, member.told) == (0, 1, [], [])

    held, over = threading.Event(), threading.Event()
    threading.Thread(target=hold, args=(consumer._change_lock, held, over), daemon=True).start()
    assert held.wait(60)
    child = multiprocessing.get_context("fork").Process(target=forked)
    child.start()
    child.join(60)
    over.set()
    child.kill()  # one that waits for a lock of a thread that it does not have
    assert child.exitcode == 0


def hold(lock: Any, held: threading.Event, over: threading.Event) -> None:
    with lock:
        held.set()
        over.wait()


def test_a_close_that_is_interrupted_is_repeated_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    with monkeypatch.context() as patch:
        patch.setattr(member, "close", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            consumer.close()
    consumer.close()
    consumer.close()
    assert member.closes == 1


CALLS: dict[str, tuple[str, Callable[[BaseSimpleConsumer, PoppedMessage], object]]] = {
    "subscribe": ("subscribe", lambda consumer, message: consumer.subscribe("t")),
    "unsubscribe": ("subscribe", lambda consumer, message: consumer.unsubscribe("t")),
    "receive": ("receive", lambda consumer, message: consumer.receive(wait=60)),
    "ack": ("ack", lambda consumer, message: consumer.ack(message)),
    "change_invisible": ("change_invisible", lambda consumer, message: consumer.change_invisible(message, 30)),
    "forward_to_dlq": ("forward_to_dlq", lambda consumer, message: consumer.forward_to_dlq(message)),
    "close": ("close", lambda consumer, message: consumer.close()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_handler_may_close_above_any_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may hold a lock of gRPC's that the close needs."""
    member = proxy(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    member.put(popped())
    (message,) = consumer.receive()
    name, made = CALLS[call]
    real, handled = getattr(member, name), []

    def signalled(*given: Any) -> Any:
        if not handled:
            handled.append(consumer.close())
            assert member.closes == 0
        return real(*given)

    monkeypatch.setattr(member, name, signalled)
    made(consumer, message)
    assert (handled, member.closes) == ([None], 1)
    with pytest.raises(ClosedError):
        consumer.receive()
    consumer.close()
    assert member.closes == 1
