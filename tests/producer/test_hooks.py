from __future__ import annotations

import logging

import pytest

from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.settings import Hooks, SendContext
from tests.fakes.sender import ok
from tests.helpers import raising
from tests.queues import q


def context() -> SendContext:
    return SendContext("g", q("a:0"), SendRequest("g", b"x"), "sync", 1)


def test_hooks_see_the_attempt_and_its_outcome() -> None:
    hooks, seen = Hooks(), []
    assert not hooks
    hooks.add(before=lambda c: seen.append(("before", c.attempt)))
    hooks.add(after=lambda c: seen.append(("after", c.latency_ms)))
    assert hooks
    first, second, third = context(), context(), context()
    hooks.call_before(first)
    hooks.call_after(first, ok(q("a:0"), first.request), 7)
    assert first.result is not None
    hooks.call_after(second, ConnectionLost("x"), 8)
    assert isinstance(second.error, ConnectionLost)
    hooks.call_after(third, None, 0)
    assert (third.result, third.error) == (None, None)
    assert seen == [("before", 1), ("after", 7), ("after", 8), ("after", 0)]


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), SystemExit("mine")], ids=["error", "exit"])
def test_a_hook_that_fails_is_logged_and_the_others_run(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    hooks, seen = Hooks(), []
    hooks.add(before=raising(error))
    hooks.add(before=lambda c: seen.append(c.mode))
    with caplog.at_level(logging.ERROR):
        hooks.call_before(context())
    assert seen == ["sync"]
    assert type(error).__name__ in caplog.text
