"""Work beside a thread: in order for a key, and no key waits for another."""

from __future__ import annotations

import itertools
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base import threads as aside_module
from rocketmq_spark.base.threads import KeyedExecutor, Latch, start_thread
from tests.helpers import RAISED, no_more_threads, raising
from tests.mockbroker import eventually


def test_a_key_keeps_its_order_and_others_do_not_wait() -> None:
    aside, gate, done = KeyedExecutor(), threading.Event(), []
    other = threading.Event()
    aside.run("slow", lambda: done.append(gate.wait(60)))
    for i in range(5):
        aside.run("slow", lambda i=i: done.append(i))  # type: ignore[misc]
    aside.run("other", other.set)
    assert other.wait(60)
    assert (done, aside.has_work("slow")) == ([], True)
    gate.set()
    eventually(lambda: not aside.has_work("slow"))
    assert done == [True, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_work_that_fails_does_not_keep_the_next_one(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    aside, gate, done = KeyedExecutor(), threading.Event(), threading.Event()
    aside.run("k", lambda: gate.wait(60))
    aside.run("k", raising(error))
    aside.run("k", done.set)
    gate.set()
    assert done.wait(60)
    eventually(lambda: not aside.has_work("k"))
    assert f"the work of thread rocketmq-aside-k failed: {type(error).__name__}: mine" in caplog.text


def test_where_there_are_no_more_threads_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    aside, done = KeyedExecutor(), threading.Event()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        with pytest.raises(RuntimeError):
            aside.run("k", done.set)
    assert not aside.has_work("k")
    aside.run("k", done.set)
    assert done.wait(60)


@pytest.mark.parametrize("started", [True, False], ids=["started", "not started"])
def test_ctrl_c_during_thread_start_leaves_no_work_or_thread(
    started: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aside, done, threads = KeyedExecutor(), [], []

    def interrupted(*given: Any) -> threading.Thread:
        if started:
            threads.append(start_thread(*given))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(aside_module, "start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            aside.run("k", lambda: done.append("interrupted"))
    assert not aside.has_work("k")
    aside.run("k", lambda: done.append("next"))
    eventually(lambda: not aside.has_work("k"))
    for thread in threads:
        thread.join(60)
    assert (done, caplog.text) == (["next"], "")
    assert not any(thread.is_alive() for thread in threads)


def test_no_more_waits_for_a_thread_than_may() -> None:
    aside, gate, done = KeyedExecutor(2), threading.Event(), []
    begun = threading.Event()
    aside.run("k", lambda: done.append(begun.set() or gate.wait(60)))
    assert begun.wait(60)
    for i in range(2):
        aside.run("k", lambda i=i: done.append(i))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="2 requests wait"):
        aside.run("k", lambda: done.append("never"))
    other = threading.Event()
    aside.run("other", other.set)
    assert other.wait(60)
    gate.set()
    eventually(lambda: not aside.has_work("k"))
    assert done == [True, 0, 1]


def test_a_latch_is_set_once_and_for_all_who_wait() -> None:
    latch = Latch()
    assert (latch.wait(0), latch.wait(-1), latch.wait(0.001)) == (False, False, False)
    waiting = [start_thread(f"waiting-{i}", latch.wait, restart=False) for i in range(3)]
    latch.set()
    latch.set()
    for thread in waiting:
        thread.join(60)
        assert not thread.is_alive()
    assert (latch.wait(), latch.wait(60), latch.wait(0)) == (True, True, True)


def test_a_latch_may_be_set_at_any_step_of_its_own() -> None:
    """By a signal handler, perhaps above another one."""
    for at in itertools.count():
        latch, left = Latch(), [at]

        def handler(frame: FrameType, event: str, arg: object, latch: Latch = latch, left: list[int] = left) -> Any:
            if frame.f_code.co_filename == aside_module.__file__ and event == "line":
                left[0] -= 1
                if left[0] == -1:
                    latch.set()
            return handler

        found: list[bool] = []

        def above(latch: Latch = latch, found: list[bool] = found, handler: Any = handler) -> None:
            sys.settrace(handler)
            latch.set()
            found.extend((latch.wait(60), latch.is_set(), latch.wait(0)))

        thread = threading.Thread(target=above, daemon=True)
        thread.start()
        thread.join(60)
        assert found == [True, True, True], at
        if left[0] >= 0:
            assert at > 6
            return
