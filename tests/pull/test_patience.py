"""How long a read waits: for a word, for a connection, for something to be read."""

from __future__ import annotations

import logging

import pytest

from rocketmq_spark.errors import AccessDenied, CallTimeout, ConnectionLost
from rocketmq_spark.pull.progress_timeout import MAX_BROKER_SILENCE_S, ProgressTimeout
from tests.pull.pull_model import Time

LOST = ConnectionLost("the connection broke while pulling", "h:1")
REFUSED = ConnectionLost("cannot connect: Connection refused", "h:2")


def place() -> str:
    return "broker b: t/b/0 from offset 7 on"


def patience(deadline_s: float = 30.0) -> tuple[ProgressTimeout, Time]:
    time = Time()
    return ProgressTimeout(deadline_s, time.clock), time


def test_patience_ends_and_begins_anew_when_something_was_read() -> None:
    patient, time = patience()
    time.advance(29)
    assert patient.remaining_s() == 1
    time.advance(2)
    assert patient.remaining_s() == 0
    patient.restart()
    assert patient.remaining_s() == 30


def test_a_word_is_not_something_to_read() -> None:
    patient, time = patience(100.0)
    time.advance(MAX_BROKER_SILENCE_S + 1)
    assert patient.is_broker_silent
    patient.record_answer()
    assert not patient.is_broker_silent
    assert patient.remaining_s() == 100 - MAX_BROKER_SILENCE_S - 1


@pytest.mark.parametrize(
    ("left", "due_in", "wait"),
    [(30, None, 1.0), (0.4, None, 0.4), (30, 0.25, 0.25), (30, 5, 1.0), (30, -5, 0.001), (0, None, 0.0)],
)
def test_a_receipt_waits_for_what_comes_first(left: float, due_in: float | None, wait: float) -> None:
    patient, time = patience()
    time.advance(30 - left)
    due = None if due_in is None else time.now + due_in
    assert patient.receive_wait_s(due) == pytest.approx(wait)


@pytest.mark.parametrize(("max_s", "seconds"), [(None, 30), (5, 5), (50, 30)])
def test_a_connection_must_stand_before_patience_ends(max_s: float | None, seconds: float) -> None:
    patient, _ = patience()
    assert patient.connect_deadline(max_s).remaining() == pytest.approx(seconds, abs=1)


def test_pauses_grow_until_the_broker_gives_something() -> None:
    patient, time = patience()
    pauses = []
    for _ in range(3):
        begun = time.now
        patient.pause_or_raise(LOST, place)
        pauses.append(time.now - begun)
    patient.record_progress()
    begun = time.now
    patient.pause_or_raise(LOST, place)
    assert pauses == pytest.approx([0.02, 0.04, 0.08])
    assert time.now - begun == pytest.approx(0.02)


def test_a_pause_is_not_longer_than_patience() -> None:
    patient, time = patience(0.01)
    patient.pause_or_raise(LOST, place)
    assert time.now == pytest.approx(1000.01)


def test_what_no_waiting_heals_is_raised_as_it_is() -> None:
    patient, _ = patience()
    denied = AccessDenied("no")
    patient.pause_or_raise(LOST, place)
    with pytest.raises(AccessDenied) as caught:
        patient.pause_or_raise(denied, place)
    assert caught.value is denied
    assert denied.__cause__ is None


def test_when_patience_is_over_the_first_cause_is_raised() -> None:
    """With the last one that came in time: a question that the deadline cut short explains nothing."""
    patient, time = patience()
    patient.pause_or_raise(LOST, place)
    time.advance(29)
    patient.pause_or_raise(REFUSED, place)
    time.advance(1)
    cut_short = CallTimeout("no name server answered in time", "ns:1")
    with pytest.raises(
        ConnectionLost,
        match=r"broke while pulling; tried 3 times in 30.1 s.*at last: cannot connect: Connection refused$",
    ) as e:
        patient.pause_or_raise(cut_short, place)
    assert e.value.__cause__ is cut_short


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_wait_for_broker_is_logged_at_once_and_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    patient, time = patience(120.0)
    time.advance(1)
    patient.pause_or_raise(LOST, place)
    assert said(caplog) == [
        "the read waits for broker b: t/b/0 from offset 7 on, for 1 s of 120 s (option 'readDeadline'): "
        "[ROCKETMQ_CONNECTION_LOST] the connection broke while pulling (at h:1)"
    ]
    time.advance(9.9)
    patient.pause_or_raise(REFUSED, place)
    assert said(caplog) == []
    time.advance(0.2)
    patient.log_wait(place)
    assert [(" for 11 s of 120 s" in line, "Connection refused" in line) for line in said(caplog)] == [(True, True)]
    patient.log_wait(place)
    time.advance(9.9)
    patient.log_wait(place)
    assert said(caplog) == []
    patient.record_progress()
    assert said(caplog) == ["the read continues after 21 s"]
    patient.record_progress()
    assert said(caplog) == []


def test_a_read_that_waits_for_a_moment_only_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Of the driver, which tries what a task reads then: the time that it names is not that of the option."""
    patient, _ = patience(1.0)
    patient.pause_or_raise(LOST, place)
    assert said(caplog) == []


def test_a_broker_that_says_nothing_is_told_of_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    patient, time = patience(120.0)
    time.advance(9.9)
    patient.log_wait(place)
    assert said(caplog) == []
    time.advance(0.1)
    patient.log_wait(place)
    assert [line.rpartition(": ")[2] for line in said(caplog)] == ["it does not answer"]
    patient.record_refusal("16 no permission")
    time.advance(10)
    patient.log_wait(place)
    assert [line.rpartition(": ")[2] for line in said(caplog)] == ["16 no permission"]


def test_a_connection_that_is_back_at_once_is_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    patient, _ = patience()
    patient.pause_or_raise(LOST, place)
    patient.record_progress()
    assert len(said(caplog)) == 1


def test_what_was_said_before_something_came_explains_nothing() -> None:
    patient, time = patience()
    patient.pause_or_raise(LOST, place)
    patient.record_progress()
    time.advance(60)
    with pytest.raises(ConnectionLost) as e:
        patient.pause_or_raise(REFUSED, place)
    assert (e.value, e.value.__cause__) == (REFUSED, None)


def test_the_error_at_the_end_says_what_the_broker_said() -> None:
    patient, _ = patience()
    patient.record_refusal("21 OFFSET_RESET")
    error = patient.timeout_error("h:1")
    assert isinstance(error, CallTimeout)
    assert (error.message, error.addr, error.remark) == ("no message came within 30 s", "h:1", "21 OFFSET_RESET")
