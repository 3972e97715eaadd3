"""A producer for coroutines on a sender that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rocketmq_spark import aio
from rocketmq_spark.consumer.listener import Context, DeferredListener, ListenerCall
from rocketmq_spark.session import producers
from tests.consumer.messages import QUEUE
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time

WAIT_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    """For what no event says: the event loop has its turns meanwhile."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> ScriptedSender:
    made = ScriptedSender(Time())
    monkeypatch.setattr(producers, "sender", lambda options: made)
    return made


@asynccontextmanager
async def producing(**options: Any) -> AsyncIterator[aio.Producer]:
    async with aio.Producer("h:1", "g", **{"send_timeout": "60s", **options}) as producer:
        yield producer


def run(body: Callable[[], Awaitable[None]]) -> None:
    """The body of a test in an event loop, within a time."""

    async def timed() -> None:
        async with asyncio.timeout(WAIT_S):
            await body()

    asyncio.run(timed())


class Heard(ListenerCall):
    """A call whose outcome ``heard`` gets."""

    def __init__(self, messages: object, heard: Callable[[object], None]) -> None:
        super().__init__(messages, Context(QUEUE))
        self._heard = heard

    def __call__(self, outcome: object) -> None:
        self._heard(outcome)


def waits(code: DeferredListener, messages: object, heard: Callable[[object], None], first: bool = False) -> None:
    """A call waits for its turn; ``heard`` gets its outcome."""
    code.submit(lambda: Heard(messages, heard), 1, first)
