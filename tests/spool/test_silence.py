"""What answers again is called at once, and not without end."""

from __future__ import annotations

from rocketmq_spark.spool.schedule import FORGOTTEN_MS, UnreachableTargets


def test_what_failed_and_answers_is_called_once() -> None:
    silences = UnreachableTargets()
    assert not silences
    silences.failed("a", 0)
    assert silences
    assert silences.answered(["b"], 10) == set()
    assert silences.answered(["a", "b"], 10) == {"a"}
    assert silences.answered(["a"], 11) == set()


def test_each_call_that_was_in_vain_puts_the_next_one_off() -> None:
    silences, now_ms, pauses = UnreachableTargets(), 0, []
    silences.failed("a", now_ms)
    for _ in range(5):
        asked_ms = now_ms
        while not silences.answered(["a"], now_ms):
            now_ms += 500
        pauses.append((now_ms - asked_ms) // 1000)
        silences.failed("a", now_ms)
    assert pauses == [0, 3, 5, 30, 60]


def test_a_failure_long_after_the_last_one_begins_anew() -> None:
    silences = UnreachableTargets()
    silences.failed("a", 0)
    silences.answered(["a"], 0)
    silences.failed("a", 1000)
    assert silences.answered(["a"], 1001) == set()
    silences.failed("a", 1000 + FORGOTTEN_MS)
    assert silences.answered(["a"], 1000 + FORGOTTEN_MS) == {"a"}


def test_when_nothing_waits_all_is_forgotten() -> None:
    silences = UnreachableTargets()
    silences.failed("a", 0)
    silences.forget()
    assert not silences
