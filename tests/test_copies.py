"""Questions about copies of one thing: who is asked, what is said about which copy, and what is remembered of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import pytest

from rocketmq_spark.base import copies as copies_module
from rocketmq_spark.base.copies import CheckCoalescer
from tests.helpers import RAISED, no_more_threads, raising
from tests.mockbroker import eventually


class Bench:
    """What is said about copies, each time done for certain or not; functions are asked on threads."""

    def __init__(self, proves: bool = True, sharing_key: Hashable = None) -> None:
        self.proves = proves
        self.said: list[tuple[str, str]] = []
        self.copies = CheckCoalescer[str, str](
            self._answer, lambda place: "broker", "take", "drop", "unknown", sharing_key
        )
        self.asked: list[str] = []
        self.may_end, self.called = threading.Event(), threading.Event()

    def _answer(self, place: str, decision: str) -> bool:
        self.said.append((place, decision))
        return self.proves

    def question(self, what: str, place: str, decide: Callable[[], str]) -> str | None:
        """To its end."""
        found = self.copies.request_decision(what, place, decide)
        eventually(lambda: not self.copies._newest_places)
        return found

    def slow(self, what: str) -> Callable[[], str]:
        def decide() -> str:
            self.asked.append(what)
            self.called.set()
            assert self.may_end.wait(60)
            return "take"

        return decide


def test_check_soon_after_commit_is_dropped_without_new_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    assert bench.question("a", "a1", lambda: "take") is None
    assert bench.question("a", "a2", raising(AssertionError("it is known"))) == "drop"
    assert bench.said == [("a1", "take")]
    monkeypatch.setattr(copies_module, "RACE_WINDOW_S", 0.0)  # of those that come from now on
    for place in ("b1", "b2"):
        assert bench.question("b", place, lambda: "take") is None
    assert bench.said[1:] == [("b1", "take"), ("b2", "take")], "its broker has lost that"


def test_a_copy_that_comes_while_another_is_taken_is_dropped() -> None:
    """Its message would be delivered twice."""
    bench = Bench()

    def answer(place: str, decision: str) -> bool:
        if place == "1":
            assert bench.copies.request_decision("a", "2", raising(AssertionError("it is decided"))) is None
        return bench._answer(place, decision)

    bench.copies._send = answer
    bench.question("a", "1", lambda: "take")
    assert bench.said == [("1", "take"), ("2", "drop")]


@pytest.mark.parametrize(("decision", "proves"), [("unknown", True), ("drop", True), ("take", False)])
def test_what_was_not_taken_for_certain_is_asked_about_again(decision: str, proves: bool) -> None:
    """A commit that did not arrive, and a thing nobody knew of yet, would be dropped."""
    bench = Bench(proves)
    for place in ("1", "2"):
        assert bench.question("a", place, lambda: decision) is None
    assert bench.said == [("1", decision), ("2", decision)]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_function_that_raises_knows_nothing_and_is_asked_again(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.question("a", "1", raising(error))
    bench.question("a", "2", lambda: "take")
    assert bench.said == [("1", "unknown"), ("2", "take")]
    assert "a could not be decided" in caplog.text


def test_what_has_no_thread_is_left_for_the_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        assert bench.copies.request_decision("a", "1", lambda: "take") is None
    assert "ignored until brokers repeat them, such as the check of a: can't start new thread" in caplog.text
    bench.question("a", "2", lambda: "take")
    assert bench.said == [("2", "take")]


def test_no_more_bytes_wait_for_a_slow_function_than_may(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    held = bench.copies._memory_budget
    bench.copies.request_decision("a", "a1", bench.slow("a"), held.limit // 2 - 10)
    assert bench.called.wait(60)
    bench.copies.request_decision("b", "b1", bench.slow("b"), 11)
    bench.copies.request_decision("c", "c1", bench.slow("c"), 10)
    bench.copies.request_decision("a", "a2", bench.slow("a"), 1 << 40)  # a copy needs nothing: its message is not kept
    assert "the check of b: too many checks, or too many bytes, wait" in caplog.text
    bench.may_end.set()
    eventually(lambda: not bench.copies._newest_places)
    assert (bench.asked, held.used_bytes) == (["a", "c"], 0)


def test_what_is_dropped_releases_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        bench.copies.request_decision("x", "x1", lambda: "take", 5)
    bench.copies.request_decision("a", "a1", bench.slow("a"), 10)
    assert bench.called.wait(60)
    bench.copies.request_decision("b", "b1", bench.slow("b"), 10)
    bench.copies.leave()
    bench.may_end.set()
    eventually(lambda: bench.copies._memory_budget.used_bytes == 0)


def test_no_more_wait_for_a_slow_function_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "MAX_WAITING_CHECKS", 2)  # with the one that the function has
    bench = Bench()
    bench.copies.request_decision("a", "a1", bench.slow("a"))
    assert bench.called.wait(60)
    for what in "bcb":
        assert bench.copies.request_decision(what, f"{what}1", bench.slow(what)) is None
    bench.may_end.set()
    eventually(lambda: not bench.copies._newest_places)
    assert bench.said == [("a1", "take"), ("b1", "take")]
    bench.question("c", "c2", bench.slow("c"))
    assert bench.asked == ["a", "b", "c"]


def test_what_waits_when_its_producer_leaves_is_not_asked() -> None:
    bench = Bench()
    bench.copies.request_decision("a", "a1", bench.slow("a"))
    assert bench.called.wait(60)
    bench.copies.request_decision("b", "b1", bench.slow("b"))
    bench.copies.leave()
    bench.may_end.set()
    eventually(lambda: not bench.copies._newest_places)
    assert (bench.asked, bench.said) == (["a"], [("a1", "take")])


def test_what_comes_after_its_producer_has_left_is_not_asked() -> None:
    """A question may arrive while the producer leaves: what its function would look at may be gone."""
    bench = Bench()
    bench.copies.leave()
    assert bench.copies.request_decision("a", "a1", bench.slow("a")) is None
    bench.may_end.set()
    eventually(lambda: not bench.copies._decide_executor.has_work(None))
    assert (bench.asked, bench.said, bench.copies._newest_places) == ([], [], {})


def test_a_copy_is_answered_by_the_one_whose_broker_asked() -> None:
    """The one whose function is called may be closed meanwhile, and with it its connection."""
    group = object()
    benches = one, two = Bench(sharing_key=group), Bench(sharing_key=group)
    one.copies.request_decision("a", "a1", one.slow("a"))
    assert one.called.wait(60)
    two.copies.request_decision("a", "a2", two.slow("a"))
    one.may_end.set()
    eventually(lambda: not one.copies._newest_places)
    assert [(bench.asked, bench.said) for bench in benches] == [(["a"], []), ([], [("a2", "take")])]


def test_only_so_many_are_remembered_and_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "MAX_COMMITTED_KEYS", 2)
    bench = Bench()
    for what in "abc":
        bench.question(what, f"{what}1", lambda: "take")
    assert [bench.question(what, f"{what}2", lambda: "take") for what in "cba"] == ["drop", "drop", None]
    monkeypatch.setattr(copies_module, "RACE_WINDOW_S", 0.01)
    bench = Bench()
    bench.question("a", "a1", lambda: "take")
    (until,) = bench.copies._rollback_deadlines.values()
    eventually(lambda: until.expired)
    bench.question("b", "b1", lambda: "take")
    assert bench.copies._rollback_deadlines.keys() == {"b"}
