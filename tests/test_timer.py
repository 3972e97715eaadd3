from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.threads import Timer
from tests.helpers import RAISED, WAIT_S, no_more_threads, raising


@pytest.fixture
def timer() -> Any:
    made = Timer("test-timer")
    yield made
    made.close()


def test_calls_run_in_the_order_of_their_times_on_one_thread(timer: Timer) -> None:
    ran: list[tuple[str, str]] = []
    gate, done = threading.Event(), threading.Event()
    timer.call_later(-10, gate.wait)  # holds the thread while the others are queued
    for delay, name in ((-1, "c"), (-3, "a"), (-2, "b")):
        timer.call_later(delay, lambda name=name: ran.append((name, threading.current_thread().name)))
    timer.call_later(0, done.set)
    gate.set()
    assert done.wait(60)
    assert ran == [("a", "test-timer"), ("b", "test-timer"), ("c", "test-timer")]


def test_no_thread_before_the_first_call() -> None:
    made = Timer("unused-timer")
    assert not [thread.name for thread in threading.enumerate() if "unused-timer" in thread.name]
    called = threading.Event()
    made.call_later(0, called.set)
    assert called.wait(60)
    assert [thread.name for thread in threading.enumerate() if "unused-timer" in thread.name]
    made.close()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_failing_call_is_logged_and_the_next_one_runs(
    timer: Timer, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        timer.call_later(0, raising(error))
        timer.call_later(0, done.set)
        assert done.wait(60)
    assert f"the work of thread test-timer failed: {type(error).__name__}: mine" in caplog.text


def test_next_call_starts_thread_that_failed_to_start(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    done = threading.Event()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        with pytest.raises(RuntimeError):
            timer.call_later(0, lambda: called.append("refused"))
    timer.call_later(0, done.set)
    assert done.wait(60)
    assert called == []


def test_timer_started_early_runs_calls_without_new_threads(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        with pytest.raises(RuntimeError):
            timer.start()
    timer.start()
    no_more_threads(monkeypatch)
    timer.start()
    timer.call_later(0, done.set)
    assert done.wait(60)


def test_a_closed_one_begins_nothing() -> None:
    made = Timer("closed-timer")
    made.close()
    made.start()
    assert not [thread.name for thread in threading.enumerate() if "closed-timer" in thread.name]


def test_what_is_due_in_centuries_holds_up_nothing(timer: Timer) -> None:
    done = threading.Event()
    timer.call_later(1e15, done.set)
    timer.call_later(0, done.set)
    assert done.wait(60)


def test_a_call_that_is_due_before_the_others_wakes_the_thread(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    done, asleep, woken = threading.Event(), threading.Event(), timer._wakeups

    def get(timeout: float | None) -> None:
        if timeout is not None and woken.empty():  # it knows of the later call, and nothing else wakes it
            asleep.set()
        woken.get(timeout=timeout)

    monkeypatch.setattr(timer, "_wakeups", SimpleNamespace(put=woken.put, get=get))
    timer.call_later(1e6, done.set)
    assert asleep.wait(WAIT_S)
    timer.call_later(0, done.set)
    assert done.wait(WAIT_S)


def test_interrupted_call_later_does_not_delay_next_call(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    done, asleep, woken = threading.Event(), threading.Event(), timer._wakeups

    def get(timeout: float | None) -> None:
        asleep.set()
        woken.get(timeout=timeout)

    monkeypatch.setattr(timer, "_wakeups", SimpleNamespace(put=raising(KeyboardInterrupt()), get=get))
    timer.start()
    assert asleep.wait(WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        timer.call_later(0, done.set)
    monkeypatch.setattr(timer, "_wakeups", woken)
    timer.call_later(0, done.set)
    assert done.wait(WAIT_S)


def test_every_goes_on_after_a_failure(timer: Timer) -> None:
    turns: list[float] = []
    done = threading.Event()

    def turn() -> None:
        turns.append(time.monotonic())
        if len(turns) == 3:
            done.set()
        raise ValueError("on purpose")

    timer.call_repeatedly(0.001, turn, 0.0)
    assert done.wait(60)


def test_close_forgets_what_is_due_and_ends_the_thread(timer: Timer) -> None:
    ran: list[int] = []
    timer.call_later(60, lambda: ran.append(1))
    timer.close()
    timer.call_later(0, lambda: ran.append(2))
    timer.drain(0.01)
    assert ran == []
    assert "test-timer" not in [thread.name for thread in threading.enumerate()]


def test_close_and_drain_on_timer_thread_do_not_deadlock(timer: Timer) -> None:
    done = threading.Event()

    def end() -> None:
        timer.drain(30)
        timer.close()
        done.set()

    timer.call_later(0, end)
    assert done.wait(60)


def test_drain_waits_for_calls_that_are_due(timer: Timer) -> None:
    ran: list[int] = []
    timer.call_later(0, lambda: (time.sleep(0.02), ran.append(1))[1])
    timer.drain(30)
    assert ran == [1]


def test_wait_and_hold_end_early_or_in_time(timer: Timer) -> None:
    future: Future[int] = Future()
    assert not timer.wait(future, 0.001)
    timer.call_later(0, lambda: future.set_result(1))
    assert timer.wait(future, 30)
    failed: Future[int] = Future()
    failed.set_exception(ValueError())
    assert timer.wait(failed, 0)
    changed = threading.Condition()
    with changed:
        timer.wait_notified(changed, 0.001)
    start = timer.now_ms()
    timer.pause(0.002)
    assert timer.now_ms() - start >= 1
    assert abs(timer.wall_ms() - time.time() * 1000) < 5000


def test_lease_clock_continues_while_machine_sleeps(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 7_000_000, time.CLOCK_MONOTONIC: 1_000_000}
    monkeypatch.setattr(time, "clock_gettime_ns", clocks.__getitem__)
    assert timer.lease_ms() == 7
