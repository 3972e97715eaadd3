"""Hooks before and after each attempt, on which tracing can be built (``SendMessageHook``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.failures import Failure, attempt
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SendContext:
    """One attempt as a hook sees it. ``result`` or ``error`` and ``latency_ms`` are set for the hook after it.

    ``message`` is None for a batch; ``mode`` is sync, async or oneway, which has neither result nor error.
    """

    group: str
    queue: MessageQueue
    request: SendRequest
    mode: str
    attempt: int
    message: Message | None = None
    msg_ids: Sequence[str] = ()
    latency_ms: int = 0
    result: SendResult | None = None
    error: RocketMQError | None = None


Hook = Callable[[SendContext], None]


class Hooks:
    """The registered hooks. What they raise is logged and changes nothing."""

    def __init__(self) -> None:
        self._before: list[Hook] = []
        self._after: list[Hook] = []

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    def add(self, before: Hook | None = None, after: Hook | None = None) -> None:
        if before is not None:
            self._before.append(before)
        if after is not None:
            self._after.append(after)

    def before(self, context: SendContext) -> None:
        self._call(self._before, context)

    def after(self, context: SendContext, outcome: SendResult | RocketMQError | None, latency_ms: int) -> None:
        context.latency_ms = latency_ms
        if isinstance(outcome, SendResult):
            context.result = outcome
        else:
            context.error = outcome
        self._call(self._after, context)

    def _call(self, hooks: Sequence[Hook], context: SendContext) -> None:
        for hook in hooks:
            called = attempt(hook, context)
            if isinstance(called, Failure):
                called.log(logger, "a send hook failed")
