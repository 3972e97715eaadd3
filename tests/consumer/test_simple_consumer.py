"""A consumer that asks for messages, over a port that answers as it is told."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.simple import MIN_WAIT_S, BaseSimpleConsumer
from rocketmq_spark.errors import AccessDenied, ClosedError, ConnectionLost, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter
from rocketmq_spark.model.message import GroupPolicy, Place, PoppedMessage
from tests.consumer.pop import arrival
from tests.helpers import raising
from tests.test_popped import popped


class Scripted:
    """Implements ``ports.PopMember``: topics have so many places, each of which gives what ``waiting`` has for it."""

    client_id = "me"

    def __init__(self, **places: int) -> None:
        self.counts = places
        self.waiting: dict[tuple[str, int], list[PoppedMessage]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[Mapping[str, Filter]] = []
        self.error: Exception | None = None
        self.closed = 0

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(filters)

    def policy(self) -> GroupPolicy:
        return GroupPolicy(17, False, (10.0,))

    def places(self, topic: str, deadline: Deadline) -> int:
        if topic not in self.counts:
            raise RouteNotFound("no such topic", topic=topic)
        return self.counts[topic]

    def receive(
        self, place: Place, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        self.asked.append((*place, count, invisible_s))
        assert deadline.remaining() > wait_s >= MIN_WAIT_S  # less is an error of the Proxy: 40018
        found, self.waiting[place] = self.waiting.get(place, []), []
        return found

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        self.asked.append(("ack", message.msg_id))

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        self.asked.append(("change", message.msg_id, invisible_s))
        message.receipt += "'"

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        self.asked.append(("dlq", message.msg_id))

    def close(self, deadline: Deadline) -> None:
        self.closed += 1


def test_receive_asks_places_in_turn_until_message_or_timeout():
    member = Scripted(t=2, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u", tags="a || b")
    assert member.told[-1] == {"t": NO_FILTER, "u": Filter("a || b")}
    assert [consumer.receive(5, "20s", 0) for _ in range(3)] == [[], [], []]
    assert member.asked == [("t", 0, 5, 20.0), ("t", 1, 5, 20.0), ("u", 0, 5, 20.0)]
    member.waiting["u", 0] = [popped()]
    member.asked.clear()
    assert consumer.receive(wait="1m") == [popped()]
    assert [each[:2] for each in member.asked] == [("t", 0), ("t", 1), ("u", 0)]


def test_what_is_not_wanted_any_more_is_not_asked_for():
    member = Scripted(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    for topic in "tu":
        consumer.subscribe(topic, sql="a > 1")
    consumer.unsubscribe("t")
    assert member.told[-1] == {"u": Filter("a > 1", "SQL92")}
    consumer.receive(wait=0)
    assert [each[0] for each in member.asked] == ["u"]


def test_a_subscription_that_no_proxy_heard_of_is_none():
    member = Scripted(t=1)
    member.error = ConnectionLost("away")
    consumer = BaseSimpleConsumer(member, "g")
    with pytest.raises(ConnectionLost):
        consumer.subscribe("t")
    with pytest.raises(OptionError, match=r"expected subscribe\(\)"):
        consumer.receive()


@pytest.mark.parametrize("error", [ConnectionLost("away"), AccessDenied("no")])
def test_failed_filter_change_restores_previous_filter(error):
    """Also at the member, by which messages are asked for."""
    member = Scripted(t=1)
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
    assert member.told == [{"t": Filter("a")}, {"t": Filter("b")}, {"t": Filter("a")}]


def test_missing_topic_does_not_block_receiving_other_topics():
    member = Scripted(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    for topic in ("t", "gone", "u"):
        consumer.subscribe(topic)
    for topic in ("t", None, "u", "t", None):
        member.waiting = {("t", 0): [popped()], ("u", 0): [popped()]}
        with pytest.raises(RouteNotFound) if topic is None else contextlib.nullcontext():
            assert len(consumer.receive()) == 1
            assert member.asked[-1][0] == topic


def test_unsubscribed_topic_is_not_asked_for_when_proxy_is_away():
    member = Scripted(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u")
    member.error = ConnectionLost("away")
    with pytest.raises(ConnectionLost):
        consumer.unsubscribe("t")
    consumer.receive(wait=0)
    assert [each[0] for each in member.asked] == ["u"]


@pytest.mark.parametrize("left", [["t"], ["t", "u"]])
def test_topic_unsubscribed_during_receive_is_asked_for_no_more(left):
    member = Scripted(t=1, u=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    consumer.subscribe("u")
    ask = member.receive

    def leaving(topic: str, *args: Any) -> Sequence[PoppedMessage]:
        for each in left:
            consumer.unsubscribe(each)
        if len(member.asked) == 2:
            consumer.close()
        return ask(topic, *args)

    member.receive = leaving
    assert consumer.receive(wait="1m") == []
    assert [each[0] for each in member.asked] == ["t", "u", "u"][: 1 if len(left) == 2 else 3]


def test_concurrent_subscriptions_of_two_threads_are_received():
    member = Scripted(t=1, u=1)
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
    assert member.told[-1] == {"t": NO_FILTER, "u": NO_FILTER}
    consumer.receive(wait=0)
    consumer.receive(wait=0)
    assert [each[0] for each in member.asked] == ["t", "u"]


@pytest.mark.parametrize("verb", ["subscribe", "unsubscribe"])
def test_subscription_change_waiting_during_close_is_refused(verb):
    member = Scripted(t=1, u=1)
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
    assert len(outcomes) == len(member.told) == 1


@pytest.mark.parametrize("verb", ["subscribe", "unsubscribe"])
def test_close_during_subscription_change_leaves_no_member(verb):
    member = Scripted(t=1)
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
    member = Scripted(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.ack(popped(msg_id="A"))
    consumer.change_invisible(kept := popped(msg_id="B"), "1m")
    assert kept.receipt == "receipt'"  # with which it is acknowledged then
    consumer.change_invisible(popped(msg_id="C"), "0s")
    consumer.forward_to_dlq(popped(msg_id="D"))
    assert member.asked == [("ack", "A"), ("change", "B", 60.0), ("change", "C", 0.0), ("dlq", "D")]
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
    consumer = BaseSimpleConsumer(Scripted(t=1), "g")
    consumer.subscribe("t")
    with pytest.raises(OptionError, match=said):
        consumer.receive(**given)


@pytest.mark.parametrize("topic", ["", "a b"])
def test_names_are_checked(topic):
    with pytest.raises(OptionError, match="topic is"):
        BaseSimpleConsumer(Scripted(), "g").subscribe(topic)
    with pytest.raises(OptionError, match="option 'group'"):
        BaseSimpleConsumer(Scripted(), topic)


def test_it_is_closed_once_and_says_so():
    member = Scripted(t=1)
    with BaseSimpleConsumer(member, "g") as consumer:
        pass
    consumer.close()
    assert member.closed == 1
    for call in (consumer.receive, lambda: consumer.ack(popped()), lambda: consumer.subscribe("t")):
        with pytest.raises(ClosedError):
            call()


def test_a_question_that_another_thread_ends_by_closing_says_so(monkeypatch):
    member = Scripted(t=1)
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
    member, message = Scripted(t=1), popped()
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
        assert (member.closed, len(member.told), member.asked) == (0, 1, [])

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
    member = Scripted(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    with monkeypatch.context() as patch:
        patch.setattr(member, "close", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            consumer.close()
    consumer.close()
    consumer.close()
    assert member.closed == 1


CALLS: dict[str, tuple[str, Callable[[BaseSimpleConsumer], object]]] = {
    "subscribe": ("subscribe", lambda consumer: consumer.subscribe("t")),
    "unsubscribe": ("subscribe", lambda consumer: consumer.unsubscribe("t")),
    "receive": ("receive", lambda consumer: consumer.receive(wait=60)),
    "ack": ("ack", lambda consumer: consumer.ack(popped())),
    "change_invisible": ("change_invisible", lambda consumer: consumer.change_invisible(popped(), 30)),
    "forward_to_dlq": ("forward_to_dlq", lambda consumer: consumer.forward_to_dlq(popped())),
    "close": ("close", lambda consumer: consumer.close()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_handler_may_close_above_any_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may hold a lock of gRPC's that the close needs."""
    member = Scripted(t=1)
    consumer = BaseSimpleConsumer(member, "g")
    consumer.subscribe("t")
    name, made = CALLS[call]
    real, handled = getattr(member, name), []

    def signalled(*given: Any) -> Any:
        if not handled:
            handled.append(consumer.close())
            assert member.closed == 0
        return real(*given)

    monkeypatch.setattr(member, name, signalled)
    made(consumer)
    assert (handled, member.closed) == ([None], 1)
    with pytest.raises(ClosedError):
        consumer.receive()
    consumer.close()
    assert member.closed == 1
