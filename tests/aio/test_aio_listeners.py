"""What calls of one coroutine listener have to do with each other: nothing, but for the order of their turns."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from rocketmq_spark.aio.loop import CoroutineListener, EventLoop
from rocketmq_spark.consumer.listener import Context, observed_listener
from rocketmq_spark.consumer.rows import batch_listener
from tests.aio.conftest import run, until, waits

_tenant: ContextVar[Any] = ContextVar("tenant", default=None)


class Odd:
    def __eq__(self, other: object) -> bool:
        raise ValueError("neither")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("make", [object, Odd])
def test_what_a_call_sets_in_its_context_no_other_call_sees(make: type) -> None:
    """Such as the words that a logger adds to each line."""
    before = make()
    seen: list[object] = []

    async def listener(messages: int, context: Context) -> None:
        seen.append(_tenant.get())
        if messages % 3 == 0:
            _tenant.set(make())
        await asyncio.sleep(0)
        if messages % 5 == 0:
            raise ZeroDivisionError("mine")

    async def body() -> None:
        _tenant.set(before)
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem))
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 2), list[object]()
        for number in range(30):
            waits(code, number, outcomes.append)
        await until(lambda: len(outcomes) == 30)
        assert set(map(id, seen)) == {id(before)}
        gc.collect()
        assert problems == []
        loop.close()

    run(body)


def test_calls_that_set_nothing_share_a_task() -> None:
    """A task for each would cost more than a quick listener takes."""
    tasks: set[object] = set()

    async def listener(messages: int, context: Context) -> None:
        tasks.add(asyncio.current_task())
        token = _tenant.set("mine")
        _tenant.reset(token)

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 2), list[object]()
        for number in range(30):
            waits(code, number, outcomes.append)
        await until(lambda: len(outcomes) == 30)
        assert len(tasks) <= 2
        loop.close()

    run(body)


@pytest.mark.parametrize(
    "around",
    [
        lambda code: code,
        lambda code: observed_listener(code, lambda messages, context: lambda outcome: None),
        lambda code: batch_listener(code, lambda messages: messages),
    ],
    ids=["plain", "watched", "batches"],
)
def test_a_call_may_go_before_those_that_wait(around: Callable[[Any], Any]) -> None:
    """One for which an operator waits."""
    may_end = asyncio.Event()
    begun: list[int] = []

    async def listener(messages: int, context: Context) -> None:
        begun.append(messages)
        await may_end.wait()

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = around(CoroutineListener(loop, listener, 1)), list[object]()
        for number in range(5):
            waits(code, number, outcomes.append)
        await until(lambda: begun)
        waits(code, 99, outcomes.append, first=True)
        may_end.set()
        await until(lambda: len(outcomes) == 6)
        assert begun == [0, 99, 1, 2, 3, 4]
        loop.close()

    run(body)


def test_refused_listener_calls_are_not_made_later() -> None:
    """Whoever let them wait has their messages returned to a broker."""
    called: list[str] = []

    async def listener(messages: str, context: Context) -> None:
        called.append(messages)

    loop, outcomes = EventLoop(), list[object]()
    code = CoroutineListener(loop, listener, 1)
    with pytest.raises(RuntimeError, match="there is no event loop yet"):
        waits(code, "refused", outcomes.append)

    async def body() -> None:
        loop.running_loop()
        waits(code, "taken", outcomes.append)
        await until(lambda: outcomes)
        await asyncio.sleep(0)
        assert (called, outcomes) == (["taken"], [None])
        loop.close()

    run(body)


def test_a_call_that_a_close_cancels_is_not_settled(caplog: pytest.LogCaptureFixture) -> None:
    """Its messages are redelivered, since the consumer has stopped: nothing is said of them."""
    begun = asyncio.Event()

    async def listener(messages: int, context: Context) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def body() -> None:
        loop, outcomes = EventLoop(), list[object]()
        loop.running_loop()
        waits(CoroutineListener(loop, listener, 1), 0, outcomes.append)
        await begun.wait()
        (task,) = loop._tasks
        loop.close()
        await asyncio.wait([task])
        assert outcomes == []

    run(body)
    assert caplog.text == ""


def test_work_scheduled_as_the_last_turn_ends_still_runs() -> None:
    """It would wait for the next one that is handed over: a send or a listener that hangs."""
    seen: list[str] = []

    class Line(deque[Callable[[], object]]):
        """Another thread comes in between a look that finds nothing and what follows it."""

        late = False

        def __bool__(self) -> bool:
            if self.late or len(self):
                return len(self) > 0
            self.late = True
            loop.schedule(lambda: seen.append("late"))
            return False

    async def body() -> None:
        loop.running_loop()
        loop.schedule(lambda: seen.append("first"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert seen == ["first", "late"]
        loop.close()

    loop = EventLoop()
    loop._ready_calls = Line()
    run(body)
