"""``with`` and ``close``."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rocketmq_spark.base.process import Closeable, defer_close, signal_safe


class Door(Closeable):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_end_of_the_block_closes_and_hides_no_error() -> None:
    with Door() as door:
        assert door.closed == 0
    assert door.closed == 1
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.closed == 2


def test_what_cannot_be_closed_says_so() -> None:
    with pytest.raises(NotImplementedError):
        Closeable().close()


class House:
    """Whose calls may be interrupted by what is given to them, as by a signal handler."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def close(self) -> None:
        if not defer_close(self.close):
            self.done.append("closed")

    @signal_safe
    def call(self, handler: Callable[[], object]) -> str:
        """One call."""
        handler()
        self.done.append("called")
        return "result"

    @signal_safe
    def outer(self, handler: Callable[[], object]) -> str:
        found = self.call(handler)
        self.done.append("outer")
        return found


def test_close_within_nested_calls_runs_when_outermost_call_ends() -> None:
    house = House()
    assert house.call(house.close) == "result"
    assert house.outer(house.close) == "result"
    house.close()
    assert house.done == ["called", "closed", "called", "outer", "closed", "closed"]


def test_a_close_above_a_call_that_raises_is_done() -> None:
    house = House()

    def handler() -> None:
        house.close()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        house.call(handler)
    assert house.done == ["closed"]


def test_close_within_call_of_another_object_runs_when_call_ends() -> None:
    first, second = House(), House()
    first.call(second.close)
    assert (first.done, second.done) == (["called"], ["closed"])


def test_a_close_by_another_thread_waits_for_no_call() -> None:
    house = House()

    def handler() -> None:
        thread = threading.Thread(target=house.close)
        thread.start()
        thread.join(60)

    house.call(handler)
    assert house.done == ["closed", "called"]


def test_a_call_keeps_its_name_and_its_text() -> None:
    assert (House.call.__name__, House.call.__doc__) == ("call", "One call.")
