from __future__ import annotations

import threading

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.workers import Workers


def test_1_28_so_many_threads_work_and_never_more_and_nobody_who_submits_waits() -> None:
    workers = Workers("w", 3)
    inside, go_on, done = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    running, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        inside.release()
        go_on.wait(10)
        with lock:
            running[0] -= 1
        done.release()

    for _ in range(50):
        workers.submit(work)
    for _ in range(3):
        assert inside.acquire(timeout=5)
    go_on.set()
    for _ in range(50):
        assert done.acquire(timeout=5)
    assert most == [3]
    assert workers.close(Deadline.after(5))


def test_no_thread_before_the_first_work_and_none_after_the_close() -> None:
    before = threading.active_count()
    workers = Workers("w", 5)
    assert threading.active_count() == before
    ran = threading.Event()
    workers.submit(ran.set)
    assert ran.wait(5)
    assert workers.close(Deadline.after(5))
    assert threading.active_count() == before
    workers.submit(lambda: pytest.fail("it was closed"))
    assert threading.active_count() == before


def test_work_that_raises_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    workers, ran = Workers("w", 1), threading.Event()
    workers.submit(lambda: 1 / 0)
    workers.submit(ran.set)
    assert ran.wait(5)
    assert workers.close(Deadline.after(5))
    assert "work of w failed" in caplog.text


def test_close_drops_what_was_not_begun_and_says_whether_the_rest_ended() -> None:
    workers, inside, go_on = Workers("w", 1), threading.Event(), threading.Event()
    begun: list[int] = []

    def work() -> None:
        begun.append(1)
        inside.set()
        go_on.wait(10)

    workers.submit(work)
    workers.submit(work)
    assert inside.wait(5)
    assert not workers.close(Deadline.after(0.05))
    go_on.set()
    assert workers.close(Deadline.after(5))
    assert begun == [1]


def test_a_worker_may_close_its_own_pool() -> None:
    workers, ended = Workers("w", 2), []
    done = threading.Event()

    def work() -> None:
        ended.append(workers.close(Deadline.after(5)))
        done.set()

    workers.submit(work)
    assert done.wait(10)
    assert ended == [True]
