from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import MessageQueue
from tests.fakes.group_member import FakeBrokers, FakeMember
from tests.fakes.timer import Time
from tests.helpers import RAISED, no_more_threads, raising
from tests.mockbroker import eventually
from tests.queues import q


def test_pool_never_exceeds_its_threads_or_blocks_submitters() -> None:
    workers = ListenerPool("w", 3)
    inside, go_on, done = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    running, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        inside.release()
        go_on.wait(60)
        with lock:
            running[0] -= 1
        done.release()

    for _ in range(50):
        workers.submit(work)
    for _ in range(3):
        assert inside.acquire(timeout=60)
    go_on.set()
    for _ in range(50):
        assert done.acquire(timeout=60)
    assert most == [3]
    assert workers.close(Deadline.after(30.0))


def test_a_thread_that_waits_holds_no_work() -> None:
    class Work:
        def __call__(self) -> None:
            pass

    workers, work = ListenerPool("w", 1), Work()
    held = weakref.ref(work)
    workers.submit(work)
    del work
    eventually(lambda: held() is None, 60)
    assert workers.close(Deadline.after(30.0))


def test_pool_has_no_thread_before_first_work_or_after_close() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "unused-pool" in thread.name]

    workers = ListenerPool("unused-pool", 5)
    assert threads() == []
    seen: list[list[str]] = []
    ran = threading.Event()
    workers.submit(lambda: (seen.append(threads()), ran.set()))
    assert ran.wait(60)
    assert 1 <= len(seen[0]) <= 5
    assert workers.close(Deadline.after(30.0))
    assert threads() == []
    workers.submit(lambda: pytest.fail("it was closed"))
    assert threads() == []


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_work_that_raises_is_logged_and_no_thread_ends(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    workers, ran = ListenerPool("w", 4), threading.Event()
    for _ in range(8):
        workers.submit(raising(error))
    workers.submit(ran.set)
    assert ran.wait(60)
    eventually(lambda: caplog.text.count(f"failed: {type(error).__name__}: mine") == 8)
    assert sum(thread.name.startswith("w-") for thread in threading.enumerate()) == 4
    assert workers.close(Deadline.after(30.0))


def test_threads_that_cannot_be_started_are_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers, ran = ListenerPool("w", 3), [threading.Event() for _ in range(3)]
    with monkeypatch.context() as patch:
        no_more_threads(patch, "w-1")
        workers.submit(ran[0].set)
        assert ran[0].wait(60)  # one is better than none
        workers.submit(ran[1].set)
        assert ran[1].wait(60)
    assert caplog.text.count("1 of 3 threads of w run, and no more can be started") == 1
    inside, free = threading.Event(), threading.Event()
    workers.submit(lambda: (inside.set(), free.wait(60)))
    assert inside.wait(60)
    workers.submit(ran[2].set)
    assert ran[2].wait(60)
    assert sum(thread.name.startswith("w-") for thread in threading.enumerate()) == 3
    free.set()
    assert workers.close(Deadline.after(30.0))


def test_work_submitted_without_threads_runs_when_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, ran = ListenerPool("w", 2), threading.Event()
    workers.start_missing_threads()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("w-")]
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        workers.submit(ran.set)
        workers.start_missing_threads()
    assert not ran.is_set()
    workers.start_missing_threads()
    assert ran.wait(60)
    assert workers.close(Deadline.after(30.0))


def test_close_drops_pending_work_and_reports_whether_rest_ended() -> None:
    workers, inside, go_on = ListenerPool("w", 1), threading.Event(), threading.Event()
    begun: list[int] = []

    def work() -> None:
        begun.append(1)
        inside.set()
        go_on.wait(60)

    workers.submit(work)
    workers.submit(work)
    assert inside.wait(60)
    assert not workers.close(Deadline.after(0.05))
    go_on.set()
    assert workers.close(Deadline.after(30.0))
    assert begun == [1]


def test_a_worker_may_close_its_own_pool() -> None:
    workers, ended = ListenerPool("w", 2), []
    done = threading.Event()

    def work() -> None:
        ended.append(workers.close(Deadline.after(30.0)))
        done.set()

    workers.submit(work)
    assert done.wait(60)
    assert ended == [True]


def test_broker_hanging_on_locks_blocks_no_listener_thread() -> None:
    brokers = FakeBrokers(Time(), {"T": "a:0 b:0"})
    hangs, asked, go_on, got = threading.Event(), threading.Event(), threading.Event(), []

    class Port(FakeMember):
        def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
            queues = list(queues)
            if hangs.is_set() and q("a:0") in queues:
                asked.set()
                go_on.wait(60)
            return super().lock(group, queues, deadline)

    def listener(messages: Any, context: Any) -> None:
        got.append(messages[0].body)
        if got == [b"1"]:
            hangs.set()
            consumer._running.state.queues[q("a:0")].lock.mark_lost()  # type: ignore[union-attr]

    brokers.offsets |= {q("a:0"): 0, q("b:0"): 0}
    brokers.send(q("a:0"), b"1", b"2")
    consumer = BaseConsumer(Port(brokers, "me"), ConsumerSettings(group="g", ordered=True, threads=1))
    consumer.subscribe("T")
    consumer.start(listener)
    assert asked.wait(60)
    brokers.send(q("b:0"), b"3")
    try:
        eventually(lambda: got == [b"1", b"3"], 30)
    finally:
        go_on.set()
    eventually(lambda: got == [b"1", b"3", b"2"], 60)
    assert consumer.stop(30) == []
