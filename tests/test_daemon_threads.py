"""Threads for all work, which do not keep a process from ending."""

from __future__ import annotations

import threading

import pytest

from rocketmq_spark.base import threads as module
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import DaemonThreadPool
from tests.helpers import awaited, no_more_threads


def test_calls_run_on_daemon_threads_up_to_the_limit() -> None:
    made, go = DaemonThreadPool(2, "rocketmq-some"), threading.Event()
    seen = [made.submit(lambda: (go.wait(30), threading.current_thread())[1]) for _ in range(6)]
    assert not made.wait_until_idle(Deadline.after(0.05))
    go.set()
    ran_on = {one.result(30) for one in seen}
    assert len(ran_on) == 2
    assert all(thread.daemon and thread.name.startswith("rocketmq-some") for thread in ran_on)
    assert made.wait_until_idle(Deadline.after(30))
    assert made.submit(threading.current_thread).result(30) in ran_on  # an idle one, not another
    made.shutdown()
    awaited(lambda: not any(thread.is_alive() for thread in ran_on))


def test_an_error_of_any_kind_is_the_outcome_and_ends_no_thread() -> None:
    made = DaemonThreadPool(1, "some")
    for kind in (ValueError, SystemExit, KeyboardInterrupt):
        with pytest.raises(kind):
            made.submit(lambda kind=kind: (_ for _ in ()).throw(kind())).result(30)  # type: ignore[misc]
    assert made.submit(lambda a, b: a + b, 1, b=2).result(30) == 3
    made.shutdown()


def test_a_cancelled_call_does_not_run() -> None:
    made, go, ran = DaemonThreadPool(1, "some"), threading.Event(), []
    first, second = made.submit(go.wait, 30), made.submit(ran.append, 1)
    assert second.cancel()
    go.set()
    assert first.result(30)
    made.shutdown()
    assert ran == []


def test_a_call_without_a_thread_is_refused_and_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made, go, ran = DaemonThreadPool(2, "some"), threading.Event(), []
    first = made.submit(go.wait, 30)
    with monkeypatch.context() as patched:
        no_more_threads(patched)
        with pytest.raises(RuntimeError, match="thread"):
            made.submit(ran.append, "refused")
    made.submit(ran.append, "later").result(30)
    go.set()
    assert first.result(30)
    made.shutdown()
    assert ran == ["later"]
    with pytest.raises(RuntimeError, match="shut down"):
        made.submit(ran.append, "after")


def test_threads_without_work_end_and_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_TIMEOUT_S", 0.01)
    made = DaemonThreadPool(2, "some")
    first = made.submit(threading.current_thread).result(30)
    awaited(lambda: not first.is_alive())
    assert made.submit(threading.current_thread).result(30) is not first
    made.shutdown()


def test_a_shutdown_lets_work_that_waits_run() -> None:
    made, go, ran = DaemonThreadPool(1, "some"), threading.Event(), []
    made.submit(go.wait, 30)
    made.submit(ran.append, 1)
    made.shutdown(wait=False)
    go.set()
    made.shutdown()
    assert ran == [1]
