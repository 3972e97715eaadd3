from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from rocketmq_spark.clockwork import Clockwork


@pytest.fixture
def clockwork() -> Any:
    made = Clockwork("test-clockwork")
    yield made
    made.close()


def test_calls_run_in_the_order_of_their_times_on_one_thread(clockwork: Clockwork) -> None:
    ran: list[tuple[str, str]] = []
    gate, done = threading.Event(), threading.Event()
    clockwork.later(-10, gate.wait)  # holds the thread while the others are queued
    for delay, name in ((-1, "c"), (-3, "a"), (-2, "b")):
        clockwork.later(delay, lambda name=name: ran.append((name, threading.current_thread().name)))
    clockwork.later(0, done.set)
    gate.set()
    assert done.wait(5)
    assert ran == [("a", "test-clockwork"), ("b", "test-clockwork"), ("c", "test-clockwork")]


def test_no_thread_before_the_first_call() -> None:
    before = threading.active_count()
    made = Clockwork("unused")
    assert threading.active_count() == before
    made.close()


def test_a_failing_call_is_logged_and_the_next_one_runs(clockwork: Clockwork, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        clockwork.later(0, lambda: 1 / 0)
        clockwork.later(0, done.set)
        assert done.wait(5)
    assert "ZeroDivisionError" in caplog.text


def test_every_goes_on_after_a_failure(clockwork: Clockwork) -> None:
    turns: list[float] = []
    done = threading.Event()

    def turn() -> None:
        turns.append(time.monotonic())
        if len(turns) == 3:
            done.set()
        raise ValueError("on purpose")

    clockwork.every(0.001, turn, 0.0)
    assert done.wait(5)


def test_close_forgets_what_is_due_and_ends_the_thread(clockwork: Clockwork) -> None:
    ran: list[int] = []
    clockwork.later(60, lambda: ran.append(1))
    clockwork.close()
    clockwork.later(0, lambda: ran.append(2))
    clockwork.drain(0.01)
    assert ran == []
    assert "test-clockwork" not in [thread.name for thread in threading.enumerate()]


def test_close_and_drain_from_its_own_thread_do_not_wait_for_themselves(clockwork: Clockwork) -> None:
    done = threading.Event()

    def end() -> None:
        clockwork.drain(5)
        clockwork.close()
        done.set()

    clockwork.later(0, end)
    assert done.wait(5)


def test_drain_waits_for_calls_that_are_due(clockwork: Clockwork) -> None:
    ran: list[int] = []
    clockwork.later(0, lambda: (time.sleep(0.02), ran.append(1))[1])
    clockwork.drain(5)
    assert ran == [1]


def test_wait_and_hold_end_early_or_in_time(clockwork: Clockwork) -> None:
    future: Future[int] = Future()
    assert not clockwork.wait(future, 0.001)
    clockwork.later(0, lambda: future.set_result(1))
    assert clockwork.wait(future, 5)
    failed: Future[int] = Future()
    failed.set_exception(ValueError())
    assert clockwork.wait(failed, 0)
    changed = threading.Condition()
    with changed:
        clockwork.hold(changed, 0.001)
    start = clockwork.now_ms()
    clockwork.pause(0.002)
    assert clockwork.now_ms() - start >= 1
    assert abs(clockwork.wall_ms() - time.time() * 1000) < 5000
