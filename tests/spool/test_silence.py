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


def test_an_answer_that_comes_too_early_for_the_next_call_is_one_at_its_time() -> None:
    silences = UnreachableTargets()
    silences.failed("a", 0)
    silences.answered(["a"], 0)
    silences.failed("a", 100, since_ms=50)
    assert (silences.next_ms(), silences.due(10_000)) == (None, set())
    assert silences.answered(["a"], 200) == set()
    assert silences.next_ms() == 3100
    assert (silences.due(3099), silences.due(3100), silences.due(3101)) == (set(), {"a"}, set())


def test_an_answer_counts_until_what_was_tried_after_it_fails() -> None:
    for since_ms, called in ((10, {"a"}), (11, set())):
        silences = UnreachableTargets()
        silences.failed("a", 0)
        silences.answered(["a"], 10)
        silences.failed("a", 100, since_ms)
        assert silences.due(3100) == called
    silences = UnreachableTargets()
    silences.failed("a", 0)
    silences.answered(["a"], 10)
    silences.failed("a", 100, 20)
    silences.answered(["a"], 110)
    silences.failed("a", 120)  # of what was sent meanwhile, nobody knows since when
    assert silences.due(10_000) == set()


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
