"""How long a read waits: for a word, for a connection, for something to be read."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import AccessDenied, CallTimeout, ConnectionLost
from rocketmq_spark.pull.patience import SILENCE_S, Patience
from tests.pull.pull_model import Time

LOST = ConnectionLost("the connection broke while pulling", "h:1")
REFUSED = ConnectionLost("cannot connect: Connection refused", "h:2")


def patience(deadline_s: float = 30.0) -> tuple[Patience, Time]:
    time = Time()
    return Patience(deadline_s, time.clock), time


def test_patience_ends_and_begins_anew_when_something_was_read() -> None:
    patient, time = patience()
    time.advance(29)
    assert patient.left() == 1
    time.advance(2)
    assert patient.left() == 0
    patient.renew()
    assert patient.left() == 30


def test_a_word_is_not_something_to_read() -> None:
    patient, time = patience(100.0)
    time.advance(SILENCE_S + 1)
    assert patient.silent
    patient.heard()
    assert not patient.silent
    assert patient.left() == 100 - SILENCE_S - 1


@pytest.mark.parametrize(
    ("left", "due_in", "wait"),
    [(30, None, 1.0), (0.4, None, 0.4), (30, 0.25, 0.25), (30, 5, 1.0), (30, -5, 0.001), (0, None, 0.0)],
)
def test_a_receipt_waits_for_what_comes_first(left: float, due_in: float | None, wait: float) -> None:
    patient, time = patience()
    time.advance(30 - left)
    due = None if due_in is None else time.now + due_in
    assert patient.wait_s(due) == pytest.approx(wait)


@pytest.mark.parametrize(("max_s", "seconds"), [(None, 30), (5, 5), (50, 30)])
def test_a_connection_must_stand_before_patience_ends(max_s: float | None, seconds: float) -> None:
    patient, _ = patience()
    assert patient.deadline(max_s).remaining() == pytest.approx(seconds, abs=1)


def test_pauses_grow_until_the_broker_gives_something() -> None:
    patient, time = patience()
    pauses = []
    for _ in range(3):
        begun = time.now
        patient.pause(LOST)
        pauses.append(time.now - begun)
    patient.hope()
    begun = time.now
    patient.pause(LOST)
    assert pauses == pytest.approx([0.02, 0.04, 0.08])
    assert time.now - begun == pytest.approx(0.02)


def test_a_pause_is_not_longer_than_patience() -> None:
    patient, time = patience(0.01)
    patient.pause(LOST)
    assert time.now == pytest.approx(1000.01)


def test_what_no_waiting_heals_is_raised_as_it_is() -> None:
    patient, _ = patience()
    denied = AccessDenied("no")
    patient.pause(LOST)
    with pytest.raises(AccessDenied) as caught:
        patient.pause(denied)
    assert caught.value is denied
    assert denied.__cause__ is None


def test_when_patience_is_over_the_first_cause_is_raised() -> None:
    patient, time = patience()
    patient.pause(LOST)
    time.advance(60)
    with pytest.raises(
        ConnectionLost, match=r"broke while pulling; tried 2 times in 60 s.*at last: cannot connect"
    ) as e:
        patient.pause(REFUSED)
    assert e.value.__cause__ is REFUSED


def test_what_was_said_before_something_came_explains_nothing() -> None:
    patient, time = patience()
    patient.pause(LOST)
    patient.hope()
    time.advance(60)
    with pytest.raises(ConnectionLost) as e:
        patient.pause(REFUSED)
    assert (e.value, e.value.__cause__) == (REFUSED, None)


def test_the_error_at_the_end_says_what_the_broker_said() -> None:
    patient, _ = patience()
    patient.refused("21 OFFSET_RESET")
    error = patient.timeout("h:1", "t/b/0")
    assert isinstance(error, CallTimeout)
    assert (error.message, error.addr, error.queue, error.remark) == (
        "no message came within 30 s",
        "h:1",
        "t/b/0",
        "21 OFFSET_RESET",
    )
    assert "readDeadline" in str(error)
