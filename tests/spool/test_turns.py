"""Of which targets records may be handed out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from rocketmq_spark.spool.turns import ANSWERING_MS, Admission, InFlightRecord, TargetStates, Window

SLOTS, LARGE = 64, 1 << 62


def taken(turns: Admission, asked: Iterable[str]) -> dict[str, int]:
    """How many records of each target are accepted, asked in this order for as long as any is."""
    counts: dict[str, int] = {}
    targets, more = list(asked), True
    while more:
        more = False
        for target in filter(turns.accepts, targets):
            turns.add_in_flight(target, 1)
            counts[target], more = counts.get(target, 0) + 1, True
    return counts


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def after(*, failed: Iterable[str] = (), succeeded: Iterable[str] = ()) -> TargetStates:
    targets = TargetStates(SLOTS)
    for target in succeeded:
        targets.record_success(target, 0)
    for target in failed:
        targets.record_failure(target, 0, is_counted=True)
    return targets


def test_a_target_gets_what_its_window_allows() -> None:
    windows = {
        "a": Window(2),
        "paused": Window(1, 3, 50),
        "sooner": Window(1, 3, 40),
        "": Window(1),
        "fails": Window(1),
    }
    turns = Admission(windows, {"a", "b"}, SLOTS, 30)
    turns.add_in_flight("a", 1)
    assert taken(turns, ["a", "new", "", "paused", "sooner", "fails"]) == {"a": 1, "new": 1, "": 1, "fails": 1}
    assert turns.refused_targets == {"a", "new", "", "paused", "sooner", "fails"}
    assert turns.next_pause_end_ms == 40


@pytest.mark.parametrize("target", ["a", ""])
def test_a_target_that_answers_leaves_an_eighth(target: str) -> None:
    assert taken(after(succeeded=["a"]).admission((), 0, LARGE), [target]) == {target: 56}


def test_targets_that_stop_answering_leave_room_for_others() -> None:
    turns = after(succeeded=["a", "b", "c"]).admission([InFlightRecord("a", 1)] * 56, 0, LARGE)
    assert taken(turns, ["b"]) == {"b": 7}
    assert taken(turns, ["c"]) == {"c": 1}


@pytest.mark.parametrize(("failing", "new"), [(2, 0), (900, 0), (0, 900), (900, 900)])
def test_new_and_failing_targets_leave_room_for_one_that_answers(failing: int, new: int) -> None:
    targets = after(failed=names("failing", failing), succeeded=["answers"])
    turns = targets.admission((), 1000, LARGE)
    turns.choose_failing_targets(lambda ready: ready)
    counts = taken(turns, [*names("failing", failing), *names("new", new)])
    assert set(counts.values()) == {1}
    assert len(counts) == min(failing, 32) + min(new, 24)
    assert turns.accepts("answers")
    assert turns.accepts("another") == (new < 24), "the first message of a new target does not wait for failing ones"


def test_failing_targets_take_turns() -> None:
    """Each is tried as often as the others, whichever record is due first."""
    targets, tried = after(failed=names("t", 100)), dict.fromkeys(names("t", 100), 0)
    for now_ms in range(2000, 2000 + 3000 * 25, 3000):
        turns = targets.admission((), now_ms, LARGE)
        turns.choose_failing_targets(lambda ready: ready)
        for target in taken(turns, tried):
            tried[target] += 1
            targets.record_failure(target, now_ms + 1000, is_counted=True)
    assert set(tried.values()) == {8}


@pytest.mark.parametrize("due", [[], ["t99"]])
def test_failing_targets_without_due_records_have_no_turn(due: list[str]) -> None:
    turns = after(failed=names("t", 100)).admission((), 1000, LARGE)
    asked: list[Collection[str]] = []

    def are_due(ready: Collection[str]) -> Collection[str]:
        asked.append(ready)
        return due

    turns.choose_failing_targets(are_due)
    assert len(asked[0]) == 100
    assert taken(turns, due) == dict.fromkeys(due, 1)


def test_a_turn_is_repeated_if_chosen_targets_had_no_record() -> None:
    turns = after(failed=names("t", 100)).admission((), 1000, LARGE)
    turns.choose_failing_targets(lambda ready: names("t", 100))
    assert not turns.accepts("t99")
    assert turns.should_choose_again
    taken(turns, names("t", 100))
    assert not turns.should_choose_again


def test_a_large_record_occupies_several_slots() -> None:
    turns = after(succeeded=["a"]).admission(
        [InFlightRecord("a", 99), InFlightRecord("a", 101), InFlightRecord("b", 0)], 0, 6400
    )
    assert (turns.free_slots, turns.free_bytes) == (60, 6000)
    turns.add_in_flight("a", 6000)
    assert not turns.accepts("a")
    assert not turns.accepts("c")


def test_an_answer_proves_nothing_about_a_target_that_failed() -> None:
    targets = after(failed=names("t", 40))
    targets.record_answers([*names("t", 40), "b"], 0)
    assert len(taken(targets.admission((), 1000, LARGE), names("t", 40))) == 32
    targets.record_success("t0", 0)
    assert taken(targets.admission((), 1000, LARGE), ["t0", "b"])["t0"] == 2
    targets.record_other_failure("b")
    assert taken(targets.admission((), 1000, LARGE), ["b"])["b"] == 1


def test_a_target_without_an_answer_for_a_minute_is_new() -> None:
    """Hundreds that became unavailable meanwhile, with many due messages each, would else take all slots."""
    targets = after(succeeded=["a"])
    assert taken(targets.admission((), ANSWERING_MS - 1, LARGE), ["a"])["a"] == 56
    assert taken(targets.admission((), ANSWERING_MS, LARGE), ["a"])["a"] == 1
