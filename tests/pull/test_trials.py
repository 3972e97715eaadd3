"""What was tried in vain: when it counts as lost, when it is asked for again."""

from __future__ import annotations

from itertools import count

import pytest

from rocketmq_spark.pull.suspicions import LossSuspicion, LossSuspicions

HERE, THERE = (0, 100), (1, 100)


def trials() -> LossSuspicions:
    return LossSuspicions(15.0, lambda: iter(count(1)))


def test_a_trial_counts_from_its_first_suspicion() -> None:
    trial = LossSuspicion(iter([]))
    assert [trial.suspected_for_s(now) for now in (100.0, 103.5)] == [0.0, 3.5]


@pytest.mark.parametrize(("now", "lost"), [(100.0, False), (114.9, False), (115.0, True)])
def test_suspected_loss_is_confirmed_after_the_grace_time(now: float, lost: bool) -> None:
    known = trials()
    known.suspect_loss(HERE, 100.0)
    assert known.suspect_loss(HERE, now) is lost
    assert known.suspect_loss(THERE, now) is False


def test_what_is_not_believed_begins_the_time_of_grace_anew() -> None:
    known = trials()
    known.suspect_loss(HERE, 100.0)
    assert [
        known.suspect_loss(HERE, 120.0, is_reliable=False),
        known.suspect_loss(HERE, 134.9),
        known.suspect_loss(HERE, 135.0),
    ] == [
        False,
        False,
        True,
    ]


def test_address_change_keeps_suspicion_but_restarts_grace_time() -> None:
    known = trials()
    known.suspect_loss(HERE, 100.0)
    known.next_retry_at(THERE, 100.0)
    known.on_address_changed()
    assert known.has_suspicions
    assert [known.suspect_loss(HERE, now) for now in (120.0, 134.9, 135.0)] == [False, False, True]
    assert not known.suspect_loss(THERE, 120.0)


def test_retry_pauses_are_per_place_and_restart_after_an_answer() -> None:
    known = trials()
    assert [known.next_retry_at(HERE, 100.0), known.next_retry_at(HERE, 100.0), known.next_retry_at(THERE, 100.0)] == [
        101.0,
        102.0,
        101.0,
    ]
    known.clear(HERE)
    assert known.next_retry_at(HERE, 100.0) == 101.0


def test_waiting_alone_is_not_suspicious() -> None:
    known = trials()
    known.next_retry_at(HERE, 100.0)
    assert known.suspicions_by_position
    assert not known.has_suspicions
    known.suspect_loss(HERE, 100.0)
    assert known.has_suspicions
    known.clear(HERE)
    known.clear(HERE)
    assert not known.suspicions_by_position
    assert not known.has_suspicions
