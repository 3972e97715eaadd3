"""Work beside a thread: in order for a key, and no key waits for another."""

from __future__ import annotations

import threading

from rocketmq_spark.client.aside import Aside
from tests.mockbroker import eventually


def test_a_key_keeps_its_order_and_others_do_not_wait() -> None:
    aside, gate, done = Aside(), threading.Event(), []
    other = threading.Event()
    aside.run("slow", lambda: done.append(gate.wait(10)))
    for i in range(5):
        aside.run("slow", lambda i=i: done.append(i))  # type: ignore[misc]
    aside.run("other", other.set)
    assert other.wait(10)
    assert (done, aside.busy("slow")) == ([], True)
    gate.set()
    eventually(lambda: not aside.busy("slow"))
    assert done == [True, 0, 1, 2, 3, 4]


def test_work_that_fails_does_not_keep_the_next_one(caplog) -> None:  # type: ignore[no-untyped-def]
    aside, done = Aside(), threading.Event()

    def fail() -> None:
        raise ValueError("no")

    aside.run("k", fail)
    aside.run("k", done.set)
    assert done.wait(10)
    eventually(lambda: not aside.busy("k"))
    assert "work for k failed" in caplog.text
