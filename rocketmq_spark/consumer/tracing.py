"""Message traces of a consumer: a record before and one after each call of a listener. Mirrors ``ConsumeMessageTraceHookImpl``.

Messages of a batch have no region, so Java does not trace them; this module does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rocketmq_spark.base.clock import epoch_ms
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.consumer.result import (
    DeferredListener,
    Listener,
    OrderedAction,
    OutcomeCallback,
    judge_concurrent,
    judge_ordered,
    observed_listener,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire import traces
from rocketmq_spark.wire.identifiers import UniqKeys
from rocketmq_spark.wire.traces import ConsumeReturn, TracedMessage, TraceRecord

logger = logging.getLogger(__name__)

_ids = UniqKeys()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListenerTraces:
    """What a consumer is traced with: ``append`` takes records and never waits, ``close`` sends those that wait, for so
    many seconds at most.
    """

    append: Callable[[Sequence[TraceRecord]], None]
    close: Callable[[float], object]

    def around(self, listener: Listener, settings: ConsumerSettings) -> Listener:
        """The same listener, traced. It returns and raises what the listener does."""
        if isinstance(listener, DeferredListener):
            return observed_listener(listener, functools.partial(self._in_turn, settings))
        return functools.partial(self._call, listener, settings)

    def _in_turn(self, settings: ConsumerSettings, messages: Any, context: Any) -> OutcomeCallback:
        call = _made(_Call, settings, messages, context)
        if call is None:
            return lambda outcome: None
        self._append(call.before)
        return functools.partial(self._append, call.after)

    def _call(self, listener: Listener, settings: ConsumerSettings, messages: Any, context: Any) -> object:
        call = _made(_Call, settings, messages, context)
        if call is None:
            return listener(messages, context)
        self._append(call.before)

        def ended(outcome: object) -> None:
            self._append(call.after, outcome)

        try:
            outcome = listener(messages, context)
        except BaseException as e:
            ended(Failure(e))
            raise
        ended(outcome)
        return outcome

    def _append(self, records: Callable[..., Sequence[TraceRecord]], *of: object) -> None:
        _made(lambda: self.append(records(*of)))


def _made(make: Callable[..., T], *of: Any) -> T | None:
    """None if it cannot be made, which is no matter of the listener."""
    made = attempt(make, *of)
    if isinstance(made, Failure):
        made.log(logger, "a trace record could not be made")
        return None
    return made


class _Call:
    """One call of a listener."""

    def __init__(self, settings: ConsumerSettings, messages: Sequence[ReceivedMessage], context: Any) -> None:
        self._settings = settings
        self._messages = messages
        self._context = context
        self._began_ms = epoch_ms()
        self._id = _ids.next(self._began_ms)
        self._traced = [
            (i, TracedMessage.of(m.topic, m.properties)._replace(msg_id=m.msg_id or ""), m.reconsume_times)
            for i, m in enumerate(messages)
            if m.properties.get(Property.TRACE_ON) != "false"
        ]

    def before(self) -> list[TraceRecord]:
        group = self._settings.group
        return [traces.consuming(about, group, self._id, self._began_ms, times) for _, about, times in self._traced]

    def after(self, outcome: object) -> list[TraceRecord]:
        now_ms, group = epoch_ms(), self._settings.group
        took_ms = now_ms - self._began_ms
        cost_ms = took_ms // max(1, len(self._messages))
        done = self._done(outcome)
        failed = ConsumeReturn.EXCEPTION if isinstance(outcome, Failure) else ConsumeReturn.FAILED
        late = took_ms >= 1000 * self._settings.consume_timeout_s
        return [
            traces.consumed(
                about, group, self._id, now_ms, cost_ms,
                failed if i >= done else ConsumeReturn.TIME_OUT if late else ConsumeReturn.SUCCESS,
            )
            for i, about, _ in self._traced
        ]  # fmt: skip

    def _done(self, outcome: object) -> int:
        """How many of the messages, from the first on, are done."""
        size = len(self._messages)
        if not self._settings.ordered:
            return judge_concurrent(outcome, self._context, size).done_count
        step = judge_ordered(outcome, self._context, 0).action
        return size if step in (OrderedAction.COMMIT, OrderedAction.CONTINUE) else 0
