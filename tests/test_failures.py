"""Whatever code of others raises is a value, and threads outlive it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from rocketmq_spark.base.threads import Failure, TracebackLimit, capture, safe_text, start_thread
from tests.helpers import RAISED, no_more_threads, raising
from tests.mockbroker import eventually


class Textless(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even a text")

    __repr__ = __str__


def beside(code: Callable[[], object]) -> object:
    """What ``code`` returns on a thread of its own."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(code()))
    thread.start()
    thread.join(60)
    return found[0]


def test_one_traceback_a_minute_is_logged_of_each_failure() -> None:
    """A listener that fails for each message filled logs with the same traceback."""
    now_s = [100.0]
    tracebacks = TracebackLimit(lambda: now_s[0])

    def failing(error: BaseException) -> object:
        return capture(raising(error))

    first = failing(ValueError("message 1"))
    assert isinstance(first, Failure)
    assert tracebacks.due(first) is first.error
    assert [tracebacks.due(failing(ValueError(f"message {n}"))) for n in range(5)] == [None] * 5
    assert isinstance(tracebacks.due(failing(KeyError("another kind"))), KeyError)
    assert isinstance(tracebacks.due(capture(int, "another place")), ValueError)
    now_s[0] += 60.0
    assert isinstance(tracebacks.due(failing(ValueError("later"))), ValueError)
    assert tracebacks.due("no failure") is None


def test_what_is_returned_is_returned() -> None:
    assert capture(divmod, 7, 2) == (3, 1)
    assert capture(dict, a=1) == {"a": 1}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_is_a_value(error: BaseException) -> None:
    found = beside(lambda: capture(raising(error)))
    assert isinstance(found, Failure)
    assert found.error is error
    assert str(found).startswith(type(error).__name__)


def test_ctrl_c_in_the_main_thread_is_the_users_and_exit_is_not() -> None:
    with pytest.raises(KeyboardInterrupt):
        capture(raising(KeyboardInterrupt()))
    assert isinstance(capture(raising(SystemExit())), Failure)


def test_what_has_no_text_has_one() -> None:
    assert safe_text("a") == "'a'"
    assert safe_text(Textless()) == "<Textless without a text>"
    assert str(Failure(Textless())) == "Textless: <Textless without a text>"


@pytest.mark.parametrize("error", [*RAISED, Textless()], ids=lambda error: type(error).__name__)
def test_a_loop_that_fails_is_logged_and_begins_again(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[BaseException | None] = [error, error, None]
    ended = threading.Event()

    def loop() -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    start_thread("t-1", loop, ended.set).join(60)
    assert ended.is_set()
    assert outcomes == []
    said = [record.getMessage() for record in caplog.records if record.name == "rocketmq_spark.base.threads"]
    assert len(said) == 2
    assert said[0].startswith(f"the work of thread t-1 failed: {type(error).__name__}")


def test_a_loop_that_runs_once_is_cleaned_up_behind(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    start_thread("t-1", raising(SystemExit()), lambda: ended.append(1), restart=False).join(60)
    assert ended == [1]
    assert "the work of thread t-1 failed: SystemExit" in caplog.text


def test_where_there_are_no_more_threads_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    no_more_threads(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread("t-1", print, lambda: ended.append(1))
    assert ended == []


def test_a_log_that_fails_ends_no_thread() -> None:
    class Breaks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit

    handler, turns, done = Breaks(), [1, 1], threading.Event()

    def loop() -> None:
        if turns:
            turns.pop()
            raise ValueError
        done.set()

    log = logging.getLogger("rocketmq_spark.base.threads")
    log.addHandler(handler)
    try:
        start_thread("t-1", loop)
        eventually(done.is_set)
    finally:
        log.removeHandler(handler)
