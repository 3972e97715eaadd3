from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.pop import InvisibleMessage, Pollers, UnackedMessages
from rocketmq_spark.consumer.settings import Subscriptions
from rocketmq_spark.errors import ConnectionLost, ServiceNotAvailable
from rocketmq_spark.model import NO_FILTER
from tests.consumer.pop import SETTINGS, PopBench, of
from tests.helpers import no_more_threads, waits_in
from tests.mockbroker import eventually


class Asks:
    """Asks a Proxy in memory, on threads of its own, and keeps what comes."""

    def __init__(self, threads: int = 20) -> None:
        settings = replace(SETTINGS, threads=threads, pull_delay_on_error_s=0.01)
        self.bench = PopBench(settings, places=2)
        self.proxy = self.bench.proxy
        self.got: list[InvisibleMessage] = []
        self.subscriptions = Subscriptions("g", False, self.bench.timer.wall_ms)
        self.popping = Pollers(
            self.proxy, settings, self.subscriptions, self.bench.in_hand, self.bench.timer, self._came
        )

    def look(self, *topics: str) -> None:
        """A look while these are subscribed to."""
        for topic in self.subscriptions.filters():
            self.subscriptions.remove(topic)
        for topic in topics:
            self.subscriptions.add(topic, NO_FILTER)
        self.popping.update_pollers()

    def _came(self, lent: Sequence[InvisibleMessage]) -> None:
        self.got += lent

    def ids(self) -> list[str]:
        return sorted(lent.message.msg_id for lent in self.got)

    def threads(self) -> int:
        return sum(thread.name.startswith("rocketmq-g-pop-") for thread in threading.enumerate())


@pytest.fixture
def asks() -> Iterator[Asks]:
    made = Asks()
    yield made
    made.popping.close()
    made.proxy.close(Deadline.after(0))
    made.popping.join(Deadline.after(30))
    assert made.threads() == 0


def test_every_broker_is_asked_and_what_comes_is_handed_on(asks):
    asks.look("t")
    eventually(lambda: asks.proxy.waiting == 2, 60)
    asks.proxy.put(of("A"), of("B"))
    asks.proxy.put(of("C"), place=1)
    eventually(lambda: asks.ids() == ["A", "B", "C"], 60)
    asks.look("t")
    assert asks.threads() == 2
    assert asks.bench.in_hand.stats().cached == 3


def test_an_error_is_said_and_the_broker_asked_again(asks, caplog):
    asks.proxy.failing["receive"] = ConnectionLost("away")
    asks.look("t")
    asks.proxy.put(of("A"))
    eventually(lambda: asks.ids() == ["A"], 60)
    assert "cannot receive messages of t now, retrying: " in caplog.text


def test_an_error_that_lasts_is_one_line_and_its_end_another(asks, caplog, monkeypatch):
    """A Proxy may be away for hours, and there is a thread for each broker, or queue, of a topic."""
    asks.proxy.counts["t"] = 1
    errors = [ConnectionLost("away")] * 3 + [ServiceNotAvailable("it starts", "p:1", 50001)] * 3
    receive = asks.proxy.receive

    def failing(*given):
        if errors:
            raise errors.pop(0)
        return receive(*given)

    monkeypatch.setattr(asks.proxy, "receive", failing)
    caplog.set_level("INFO")
    asks.look("t")
    asks.proxy.put(of("A"))
    eventually(lambda: asks.ids() == ["A"], 60)
    asks.proxy.put(of("B"))
    eventually(lambda: asks.ids() == ["A", "B"], 60)
    levels = [line.levelname for line in caplog.records if "cannot receive messages of t" in line.message]
    assert levels == ["WARNING", "INFO", "INFO"] * 2
    assert caplog.text.count("messages of t are received again") == 1


def test_a_thread_that_ends_is_started_again_by_the_next_look(asks, caplog):
    asks.proxy.failing["receive"] = SystemExit("a bug")
    asks.look("t")
    eventually(lambda: asks.threads() == asks.proxy.waiting == 1, 60)
    assert "-pop-t-" in caplog.text
    assert "failed: SystemExit: a bug" in caplog.text
    asks.look("t")
    eventually(lambda: asks.threads() == asks.proxy.waiting == 2, 60)


def test_thread_that_failed_to_start_is_started_at_next_check(asks, monkeypatch):
    with monkeypatch.context() as patch:
        no_more_threads(patch, "rocketmq-g-pop-t-1")
        with pytest.raises(RuntimeError):
            asks.look("t")
    asks.look("t")
    eventually(lambda: asks.threads() == asks.proxy.waiting == 2, 60)


def test_missing_topic_is_awaited_and_known_ones_survive_errors(asks):
    asks.look("u")
    assert asks.threads() == 0
    asks.proxy.counts["u"] = 1
    asks.look("u")
    eventually(lambda: asks.proxy.waiting == 1, 60)
    asks.proxy.failing["target_count"] = ConnectionLost("away")
    asks.look("u")
    asks.proxy.put(replace(of("A"), topic="u"))
    eventually(lambda: asks.ids() == ["A"], 60)


def test_what_is_not_wanted_any_more_goes_to_no_listener(asks):
    asks.look("t")
    eventually(lambda: asks.proxy.waiting == 2, 60)
    asks.look()
    asks.proxy.put(of("A"))
    asks.proxy.put(of("B"), place=1)
    eventually(lambda: asks.threads() == 0, 60)
    assert asks.got == []


def test_a_topic_is_asked_for_no_more_from_the_moment_it_is_left(asks):
    """Not when the next look comes, before which a Proxy hears of it: the question would be for all of the topic."""
    asks.look("t")
    eventually(lambda: asks.proxy.waiting == 2, 60)
    asks.subscriptions.remove("t")
    asks.proxy.put(of("A"))
    asks.proxy.put(of("B"), place=1)
    eventually(lambda: asks.threads() == 0, 60)
    assert asks.got == []


def test_while_many_wait_for_a_listener_nothing_is_asked_for():
    asks = Asks(threads=1)
    (full,) = asks.bench.lent(of("A"))
    asks.look("t")
    asks.proxy.put(of("B"))
    assert asks.threads() == 2
    for thread in asks.popping._threads.values():
        waits_in(thread, UnackedMessages.wait_for_room)
    assert (asks.proxy.waiting, asks.got) == (0, [])
    asks.bench.in_hand.start_call(full, asks.bench.timer.lease_ms())
    eventually(lambda: asks.ids() == ["B"], 60)
    asks.popping.close()
    asks.proxy.close(Deadline.after(0))
    asks.popping.join(Deadline.after(30))
