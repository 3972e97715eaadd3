"""Starts and stops of a ``BaseConsumer`` that are interrupted, and stops in signal handlers that come above either."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base.threads import Latch
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OptionError
from tests.consumer.group import GroupBench
from tests.fakes.group_member import FakeBrokers, FakeMember
from tests.fakes.timer import Time
from tests.helpers import frames_of_threads, waits_in
from tests.mockbroker import eventually
from tests.queues import q


def interrupted_once(monkeypatch: pytest.MonkeyPatch, whose: Any, name: str) -> None:
    """Ctrl-C comes before the first call of it does anything."""
    real: Callable[..., Any] = getattr(whose, name)
    left = [KeyboardInterrupt()]

    def call(*given: Any) -> Any:
        if left:
            raise left.pop()
        return real(*given)

    monkeypatch.setattr(whose, name, call)


@pytest.mark.parametrize("where", ["_pulling", "_workers", "_upkeep_timer", "_ownership", "_leave_group"])
def test_a_stop_that_is_interrupted_is_continued_by_the_next(
    group: GroupBench, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, port = group.start(ordered=True)
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(1)
    running: Any = consumer._running
    if where == "_leave_group":
        interrupted_once(monkeypatch, running, where)
    else:
        interrupted_once(monkeypatch, getattr(running, where), "leave" if where == "_ownership" else "close")
    assert group.brokers.locks
    with pytest.raises(KeyboardInterrupt):
        consumer.stop()
    assert where == "_leave_group" or port.seen("leave") == ["g"]  # also where nobody calls stop again
    assert where in ("_upkeep_timer", "_ownership") or not group.brokers.locks
    assert consumer.stop() == consumer.stop() == []
    assert (port.seen("leave"), port.asked, group.brokers.locks) == (["g"], None, {})
    assert group.brokers.offsets[q("a:0")] == 1
    assert all(timer._closed for timer in (running._pull_timer, running._upkeep_timer, running._lock_timer))


@pytest.mark.parametrize("timeout_s", ["30s", None, math.nan])
def test_a_stop_with_a_timeout_that_is_none_changes_nothing(group: GroupBench, timeout_s: Any) -> None:
    consumer, port = group.start()
    with pytest.raises(OptionError, match=f"timeout_s is {timeout_s!r}; expected a number of seconds"):
        consumer.stop(timeout_s)
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(1)
    assert group.bodies() == [b"1"]
    assert consumer.stop() == []
    assert port.seen("leave") == ["g"]


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, -1])
def test_a_stop_may_wait_for_ever_or_not_at_all(timeout_s: float) -> None:
    port = FakeMember(FakeBrokers(Time(), {"T": "a:0"}), "me")
    consumer = BaseConsumer(port, ConsumerSettings(group="g"))
    consumer.subscribe("T")
    consumer.start(print)
    running: Any = consumer._running
    eventually(lambda: port.seen("pull"))
    port.brokers.send(q("a:0"), b"1")  # so that there are threads to wait for
    eventually(lambda: running._workers._threads)
    assert consumer.stop(timeout_s) == []
    assert port.seen("leave") == ["g"]


def test_a_second_stop_waits_no_longer_than_it_is_told(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.start()
    inside, go_on = threading.Event(), threading.Event()
    running: Any = consumer._running
    monkeypatch.setattr(running._pulling, "close", lambda wait_s: (inside.set(), go_on.wait(60)))
    first = threading.Thread(target=consumer.stop)
    first.start()
    assert inside.wait(60)
    assert consumer.stop(0.01) == []
    assert port.seen("leave") == []
    go_on.set()
    first.join(60)
    assert port.seen("leave") == ["g"]


def in_time(call: Callable[[], object]) -> BaseException | None:
    """What it raises; fails where it hangs."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as e:  # noqa: BLE001 - it is given
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert raised, "it hangs"
    return raised[0]


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("where", ["queues", "join", "heartbeat"])
def test_a_signal_handler_may_stop_a_consumer_that_starts(
    group: GroupBench, where: str, exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    real = getattr(port, where)

    def signalled(*given: Any) -> Any:
        assert consumer.stop(2) == []
        if exits:
            raise SystemExit
        return real(*given)

    monkeypatch.setattr(port, where, signalled)
    raised = in_time(lambda: consumer.start(print))
    assert isinstance(raised, SystemExit) if exits else raised is None
    joined = port.seen("join")
    assert (port.seen("leave"), port.asked, group.brokers.members) == (joined, None, {})
    assert consumer.stop() == []
    group.time.advance(60)
    assert port.seen("leave") == joined
    assert port.seen("pull") == port.seen("members") == []


def test_a_signal_handler_may_stop_a_consumer_that_stops(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = group.start()
    running: Any = consumer._running
    monkeypatch.setattr(running._pulling, "close", lambda wait_s: consumer.stop(30))
    assert in_time(consumer.stop) is None
    assert port.seen("leave") == ["g"]


@pytest.mark.parametrize("call", ["subscribe", "unsubscribe", "stats"])
def test_signal_handler_may_stop_a_consumer_during_other_calls(
    group: GroupBench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call holds a lock that the stop needs."""
    consumer, port = group.start()
    group.time.advance(1)
    running: Any = consumer._running
    whose, name = (running.state, "stats") if call == "stats" else (port, "heartbeat")
    real, stopped, held = getattr(whose, name), [], running.state.lock

    def signalled(*given: Any) -> Any:
        if not stopped:
            with held:
                stopped.append(consumer.stop(2))
        return real(*given)

    monkeypatch.setattr(whose, name, signalled)
    calls: dict[str, Callable[[], object]] = {
        "subscribe": lambda: consumer.subscribe("U"),
        "unsubscribe": lambda: consumer.unsubscribe("T"),
        "stats": consumer.stats,
    }
    assert in_time(calls[call]) is None
    assert (stopped, port.seen("leave"), port.asked) == ([[]], ["g"], None)
    assert consumer._stop_requested.is_set()
    assert consumer.stop() == []
    assert port.seen("leave") == ["g"]


def test_a_stop_that_does_not_wait_for_the_start_is_made_by_it(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    inside, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(port, "heartbeat", lambda deadline: (inside.set(), go_on.wait(60)))
    starts = threading.Thread(target=consumer.start, args=(print,))
    starts.start()
    assert inside.wait(60)
    assert consumer.stop(0.01) == []
    assert port.seen("leave") == []
    go_on.set()
    starts.join(60)
    assert port.seen("leave") == ["g"]


def test_a_start_whose_end_is_interrupted_is_ended_by_the_stop(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, port = group.consumer()
    consumer.subscribe("T")
    real = port.heartbeat

    def heartbeat(deadline: Any) -> None:
        real(deadline)
        running: Any = consumer._running
        interrupted_once(monkeypatch, running, "_leave_group")
        raise KeyboardInterrupt

    monkeypatch.setattr(port, "heartbeat", heartbeat)
    with pytest.raises(KeyboardInterrupt):
        consumer.start(print)
    assert port.seen("leave") == []
    assert consumer.stop() == []
    assert port.seen("leave") == ["g"]


def runs(signals: Callable[[], object]) -> FakeMember:
    """A consumer that runs here until it is left by ``signals``, which another thread sends when it waits for them."""
    port = FakeMember(FakeBrokers(Time(), {"T": "a:0"}), "me")
    consumer = BaseConsumer(port, ConsumerSettings(group="g"))
    consumer.subscribe("T")
    main, real = threading.current_thread(), consumer.start

    def place() -> tuple[FrameType, int]:
        frame = frames_of_threads()[main.ident or 0]
        return frame, frame.f_lasti

    def send() -> None:
        waits_in(main, Latch.wait)
        at = None
        while at != (at := place()):  # and stands there: it is within its lock
            time.sleep(0.02)
        signals()

    def started(listener: Any) -> None:
        real(listener)
        threading.Thread(target=send, daemon=True).start()

    consumer.start = started  # type: ignore[method-assign]
    consumer.run(print)
    return port


def test_a_run_ends_where_another_thread_takes_the_signal() -> None:
    """Of two at once the second one may go there, and the first one, too: the main thread is not woken."""
    port = runs(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
    assert port.seen("leave") == ["g"]


@pytest.mark.parametrize("at", range(3))
def test_second_signal_inside_a_handler_still_ends_the_run(at: int) -> None:
    inside: list[int] = []

    def handler(frame: FrameType, event: str, arg: object) -> Any:
        by_wait = frame.f_back is not None and frame.f_back.f_code is Latch.wait.__code__  # of the start, too
        if frame.f_code is Latch.set.__code__ and not by_wait and event == "line":
            inside.append(frame.f_lineno)
            if len(inside) == at + 1:
                signal.raise_signal(signal.SIGTERM)
        return handler

    before = sys.gettrace()
    sys.settrace(handler)
    try:
        port = runs(lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        sys.settrace(before)
    assert len(inside) > at
    assert port.seen("leave") == ["g"]
