"""Message traces of a consumer: one record before and one record after each call of a listener.

Mirrors ``ConsumeMessageTraceHookImpl``. Unlike Java, this module also traces messages that were sent as a batch. Java skips
messages of a batch, because they have no region.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rocketmq_spark.base.clock import epoch_ms
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.consumer.listener import (
    DeferredListener,
    Listener,
    OrderedAction,
    OutcomeCallback,
    judge_concurrent_outcome,
    judge_ordered_outcome,
    observed_listener,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire import traces
from rocketmq_spark.wire.identifiers import UniqKeys
from rocketmq_spark.wire.traces import ConsumeReturn, TracedMessage, TraceRecord

logger = logging.getLogger(__name__)

_uniq_keys = UniqKeys()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ListenerTraces:
    """Traces the calls of a listener. ``append`` queues records without blocking. ``close`` sends the queued records; its
    argument is the timeout in seconds.
    """

    append: Callable[[Sequence[TraceRecord]], None]
    close: Callable[[float], object]

    def wrap(self, listener: Listener, settings: ConsumerSettings) -> Listener:
        """Return a listener that traces the calls of ``listener``, with the same return values and exceptions as ``listener``."""
        if isinstance(listener, DeferredListener):
            return observed_listener(listener, functools.partial(self._start_deferred, settings))
        return functools.partial(self._call_with_traces, listener, settings)

    def _start_deferred(self, settings: ConsumerSettings, messages: Any, context: Any) -> OutcomeCallback:
        call = _call_or_none(_TracedCall, settings, messages, context)
        if call is None:
            return lambda outcome: None
        self._append(call.records_before_call)
        return functools.partial(self._append, call.records_after_call)

    def _call_with_traces(self, listener: Listener, settings: ConsumerSettings, messages: Any, context: Any) -> object:
        call = _call_or_none(_TracedCall, settings, messages, context)
        if call is None:
            return listener(messages, context)
        self._append(call.records_before_call)

        def on_outcome(outcome: object) -> None:
            self._append(call.records_after_call, outcome)

        try:
            outcome = listener(messages, context)
        except BaseException as e:
            on_outcome(Failure(e))
            raise
        on_outcome(outcome)
        return outcome

    def _append(self, make_records: Callable[..., Sequence[TraceRecord]], *args: object) -> None:
        _call_or_none(lambda: self.append(make_records(*args)))


def _call_or_none(make: Callable[..., T], *args: Any) -> T | None:
    """Return the result of a call. If the call raises, log the error and return None, because traces must not affect the
    listener.
    """
    result = capture(make, *args)
    if isinstance(result, Failure):
        result.log(logger, "a trace record could not be created")
        return None
    return result


class _TracedCall:
    """Creates the trace records of one call of a listener."""

    def __init__(self, settings: ConsumerSettings, messages: Sequence[ReceivedMessage], context: Any) -> None:
        self._settings = settings
        self._messages = messages
        self._context = context
        self._started_ms = epoch_ms()
        self._trace_id = _uniq_keys.next(self._started_ms)
        self._traced_messages = [
            (i, TracedMessage.from_properties(m.topic, m.properties)._replace(msg_id=m.msg_id or ""), m.reconsume_times)
            for i, m in enumerate(messages)
            if m.properties.get(Property.TRACE_ON) != "false"
        ]

    def records_before_call(self) -> list[TraceRecord]:
        group = self._settings.group
        return [
            traces.consume_start_record(message, group, self._trace_id, self._started_ms, reconsume_times)
            for _, message, reconsume_times in self._traced_messages
        ]

    def records_after_call(self, outcome: object) -> list[TraceRecord]:
        now_ms, group = epoch_ms(), self._settings.group
        duration_ms = now_ms - self._started_ms
        cost_ms = duration_ms // max(1, len(self._messages))
        done_count = self._done_count(outcome)
        failure_result = ConsumeReturn.EXCEPTION if isinstance(outcome, Failure) else ConsumeReturn.FAILED
        timed_out = duration_ms >= 1000 * self._settings.consume_timeout_s
        return [
            traces.consume_end_record(
                message, group, self._trace_id, now_ms, cost_ms,
                failure_result if i >= done_count else ConsumeReturn.TIME_OUT if timed_out else ConsumeReturn.SUCCESS,
            )
            for i, message, _ in self._traced_messages
        ]  # fmt: skip

    def _done_count(self, outcome: object) -> int:
        """Return how many messages are done, counted from the first message of the call."""
        size = len(self._messages)
        if not self._settings.ordered:
            return judge_concurrent_outcome(outcome, self._context, size).done_count
        action = judge_ordered_outcome(outcome, self._context, 0).action
        return size if action in (OrderedAction.COMMIT, OrderedAction.CONTINUE) else 0
