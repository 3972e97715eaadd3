from __future__ import annotations

import logging

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.pending import Pending
from rocketmq_spark.timer import Timer
from tests.producer.scripted import Bench, ok
from tests.queues import q


def test_a_completion_completes_the_future_and_calls_back_on_the_callbacks_thread(bench: Bench) -> None:
    pending, seen = Pending(bench.timer("x-callback")), []
    future = pending.expect(seen.append)
    assert not future.cancel()
    error = ConnectionLost("x")
    pending.keep([(future, error)])
    assert future.exception(0) is error
    assert seen == []
    bench.time.run_due()
    assert seen == [error]


def test_none_left_waits_for_every_completion(bench: Bench) -> None:
    timer = bench.timer("x-callback")
    pending = Pending(timer)
    first = pending.expect()
    pending.expect()
    assert not pending.none_left(Deadline.after(1))
    pending.forget()
    result = ok(q("a:0"), SendRequest("g", b"x"))
    timer.later(0.5, lambda: pending.keep([(first, result)]))
    assert pending.none_left(Deadline.after(1))
    assert bench.time.now == pytest.approx(1001.5)


def test_close_lets_the_last_callbacks_run_even_when_one_fails(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    pending, seen = Pending(Timer("callbacks")), []
    first = pending.expect(lambda outcome: 1 / 0)  # type: ignore[arg-type, return-value]
    second = pending.expect(seen.append)
    with caplog.at_level(logging.ERROR):
        pending.keep([(first, ConnectionLost("x")), (second, ConnectionLost("y"))])
        pending.close()
    assert len(seen) == 1
    assert "ZeroDivisionError" in caplog.text
