"""OpenTelemetry spans and metrics of producers and consumers (option ``openTelemetry``; docs/opentelemetry.md).

The methods of a producer or consumer are replaced by wrapped ones, so the option costs nothing when it is off. Spans follow
OpenTelemetry's conventions for messaging; metrics have the names that rocketmq-clients gives them. Errors of OpenTelemetry are
logged, and change neither sends nor the outcomes of listeners.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

import rocketmq_spark
from rocketmq_spark.base.clock import RateLimit, epoch_ms
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.process import OwnerProcess
from rocketmq_spark.base.threads import Failure, KeyedExecutor, capture, safe_text
from rocketmq_spark.consumer.listener import (
    DeferredListener,
    Listener,
    OrderedAction,
    OrderedContext,
    OutcomeCallback,
    judge_concurrent_outcome,
    judge_ordered_outcome,
    observed_listener,
)
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message, ReceivedMessage, SendResult
from rocketmq_spark.wire.properties import is_reserved

logger = logging.getLogger(__name__)

_SCOPE_NAME, _MESSAGE_ID_ATTRIBUTE = "rocketmq_spark", "messaging.message.id"
# The spans of asynchronous sends end on a separate thread, because an exporter may block. At most this many spans wait for this
# thread.
_END_EXECUTOR_KEY, MAX_WAITING_SPANS = "spans", 10_000
END_SPANS_TIMEOUT_S = 1.0  # how long ``flush`` and ``close`` wait for the ends of spans
LOG_PERIOD_S = 60.0  # the minimum time between two warnings of lost spans
_STATUS_LABELS = {True: {"invocation_status": "success"}, False: {"invocation_status": "failure"}}
MAX_PROPERTIES, MAX_PROPERTIES_BYTES = 128, 16_384  # a Proxy's default limits for the user properties of a message
Attributes = dict[str, Any]


def _call_safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``. A failure is logged, and None is returned, because OpenTelemetry must not affect messages."""
    outcome = capture(function, *args)
    if isinstance(outcome, Failure):
        outcome.log(logger, "OpenTelemetry failed")
        return None
    return outcome


# The labels of consumers whose cached messages are counted. The variable is global, because a meter accepts only one callback
# for each metric name.
_observed_consumers: weakref.WeakKeyDictionary[Any, Attributes] = weakref.WeakKeyDictionary()


def _observe_cached_messages(options: CallbackOptions) -> Iterator[Observation]:
    for consumer, labels in list(_observed_consumers.items()):
        if (stats := _call_safely(consumer.stats)) is not None:
            yield Observation(stats.cached, labels)


def instrumentation(group: str, client_id: str, namespace: str | None) -> Instrumentation | None:
    """Return the instrumentation; None if OpenTelemetry fails, so that sends work without it."""
    new_instrumentation: Instrumentation | None = _call_safely(Instrumentation, group, client_id, namespace)
    return new_instrumentation


class Instrumentation:
    """Creates the spans and metrics of one producer or consumer."""

    uses_proxy = False  # whether the producer sends to a Proxy

    def __init__(self, group: str, client_id: str, namespace: str | None) -> None:
        self._tracer = trace.get_tracer(_SCOPE_NAME, rocketmq_spark.__version__)
        self._meter = metrics.get_meter(_SCOPE_NAME, rocketmq_spark.__version__)
        self._group = group
        self._client_id = client_id
        self._common_attributes: Attributes = {"messaging.system": "rocketmq", "messaging.client.id": client_id}
        if namespace:
            self._common_attributes["messaging.rocketmq.namespace"] = namespace
        create_histogram = self._meter.create_histogram
        self._end_executor, self._loss_log_limit = KeyedExecutor(MAX_WAITING_SPANS), RateLimit(LOG_PERIOD_S)
        self._owner = OwnerProcess("producer")
        self._send_cost_time = create_histogram(
            "rocketmq_send_cost_time", "ms", "Duration of a send with all its attempts"
        )
        self._delivery_latency = create_histogram(
            "rocketmq_delivery_latency", "ms", "From the broker's store to the consumer"
        )
        self._process_time = create_histogram("rocketmq_process_time", "ms", "Duration of a listener's call")

    def instrument_producer(self, producer: Any) -> None:
        """Wrap the methods that send."""
        producer.send = self._traced_send(producer.send)
        producer.send_async = self._traced_send_async(producer.send_async)
        producer.send_oneway = self._traced_send(producer.send_oneway)
        producer.send_batch = self._traced_send_batch(producer.send_batch)
        producer.send_half = self._traced_send(producer.send_half)
        producer.request_async = self._traced_send_async(producer.request_async)
        producer.flush, producer.close = self._after_span_ends(producer.flush), self._after_span_ends(producer.close)

    def _after_span_ends(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``method``, and then waits until the thread has ended the spans of asynchronous sends."""

        @functools.wraps(method)
        def call_and_wait(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                if self._owner.is_current:  # in a fork, the lock may stay locked if a thread of the parent held it
                    self._end_executor.wait(_END_EXECUTOR_KEY, END_SPANS_TIMEOUT_S)

        return call_and_wait

    def _traced_send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def traced(message: Message, *args: Any, **kwargs: Any) -> Any:
            send_in_progress = _SendInProgress(self, (message,))
            result = send_in_progress.send(lambda messages: send(messages[0], *args, **kwargs))
            # A half message has its ``SendResult`` in ``result``.
            send_in_progress.end(getattr(result, "result", result))
            return result

        return traced

    def _traced_send_batch(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def traced(messages: Iterable[Message], *args: Any, **kwargs: Any) -> Any:
            send_in_progress = _SendInProgress(self, tuple(messages))
            result = send_in_progress.send(lambda messages: send(messages, *args, **kwargs))
            send_in_progress.end(result)
            return result

        return traced

    def _traced_send_async(self, send: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        @functools.wraps(send)
        def traced(message: Message, *args: Any, **kwargs: Any) -> Future[Any]:
            send_in_progress = _SendInProgress(self, (message,))
            future: Future[Any] = send_in_progress.send(lambda messages: send(messages[0], *args, **kwargs))
            future.add_done_callback(
                lambda done_future: send_in_progress.end(_outcome(done_future), on_other_thread=True)
            )
            return future

        return traced

    def start_send_span(self, messages: Sequence[Message]) -> Span:
        """Start the span of a send."""
        topic = messages[0].topic
        attributes = {**self._operation_attributes("send", topic), **_sent_attributes(messages)}
        return self._tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes)

    def record_send(self, topic: str, ok: bool, cost_ms: float) -> None:
        """Record the metrics of a send."""
        self._send_cost_time.record(cost_ms, {"topic": topic, "client_id": self._client_id, **_STATUS_LABELS[ok]})

    def end_later(self, end_span: Callable[[], None]) -> None:
        """Run ``end_span`` on another thread, because this thread may read answers. If too many ends wait, the span is
        dropped.
        """
        outcome = capture(self._end_executor.run, _END_EXECUTOR_KEY, end_span)
        if isinstance(outcome, Failure) and self._loss_log_limit.due():
            logger.warning("spans of sends are lost: an exporter is slow, or no thread can be started: %s", outcome)

    def instrument_consumer(self, consumer: Any, method_name: str) -> None:
        """Wrap the listener that is passed to the consumer's method ``method_name``, and observe the number of cached messages.

        Calls with record batches have no spans, because record batches have no trace context.
        """
        start_consumer = getattr(consumer, method_name)
        model = "clustering" if consumer.settings.clustering else "broadcasting"
        consumer_attributes = {"messaging.rocketmq.consumption_model": model}

        @functools.wraps(start_consumer)
        def traced(listener: Listener) -> Any:
            if isinstance(listener, DeferredListener):
                return start_consumer(
                    observed_listener(listener, functools.partial(self._begin_coroutine_call, consumer_attributes))
                )
            return start_consumer(functools.partial(self._call_listener, listener, consumer_attributes))

        if not consumer.settings.arrow:
            setattr(consumer, method_name, traced)
        _observed_consumers[consumer] = self._group_labels()
        _call_safely(
            self._meter.create_observable_gauge,
            "rocketmq_consumer_cached_messages",
            [_observe_cached_messages],
            "{message}",
        )

    def _begin_coroutine_call(
        self, consumer_attributes: Mapping[str, Any], messages: Any, context: Any
    ) -> OutcomeCallback:
        """Start the span of a coroutine's call, and make the span's context the current context. In a task with several calls,
        the current context might otherwise be that of an earlier call.
        """
        process_span = _call_safely(_ProcessSpan, self, messages, context, consumer_attributes)
        _call_safely(contexts.attach, Context() if process_span is None else process_span.context)
        return (lambda outcome: None) if process_span is None else process_span.end

    def _call_listener(
        self, listener: Listener, consumer_attributes: Mapping[str, Any], messages: Any, context: Any
    ) -> object:
        process_span = _call_safely(_ProcessSpan, self, messages, context, consumer_attributes)
        if process_span is None:
            return listener(messages, context)
        token = contexts.attach(process_span.context)
        try:
            outcome = listener(messages, context)
        except BaseException as e:
            process_span.end(e)
            raise
        finally:
            contexts.detach(token)
        process_span.end(outcome)
        return outcome

    def start_process_span(
        self, messages: Sequence[ReceivedMessage], consumer_attributes: Mapping[str, Any]
    ) -> tuple[Span, Context]:
        """Start the span of a listener's call: in the trace of a single message, or linked to the traces of several messages."""
        topic = messages[0].topic
        message_contexts = _contexts_of(messages)
        parent, links = (message_contexts[0], []) if len(messages) == 1 else (Context(), _links(message_contexts))
        attributes = {
            **self._group_attributes("process", topic),
            **consumer_attributes,
            **_received_attributes(messages),
        }
        span = self._tracer.start_span(f"process {topic}", parent, SpanKind.CONSUMER, attributes, links)
        _call_safely(self._record_delivery, topic, messages)
        return span, trace.set_span_in_context(span, parent)

    def record_process(self, topic: str, ok: bool, cost_ms: float) -> None:
        """Record the metrics of a listener's call."""
        self._process_time.record(cost_ms, {"topic": topic, **self._group_labels(), **_STATUS_LABELS[ok]})

    def instrument_receives(
        self,
        consumer: Any,
        method_name: str,
        messages_of: Callable[[Any], Sequence[ReceivedMessage]] = lambda answer: answer,
    ) -> None:
        """Wrap the method ``method_name``, which receives messages. ``messages_of`` returns the messages in a result of this
        method.
        """
        receive = getattr(consumer, method_name)

        @functools.wraps(receive)
        def traced(*args: Any, **kwargs: Any) -> Any:
            started_ns = time.time_ns()
            answer = receive(*args, **kwargs)
            if messages := messages_of(answer):
                _call_safely(self._trace_receive, messages, started_ns)
            return answer

        setattr(consumer, method_name, traced)

    def _trace_receive(self, messages: Sequence[ReceivedMessage], started_ns: int) -> None:
        topic = messages[0].topic
        attributes = {**self._group_attributes("receive", topic), **_received_attributes(messages)}
        links = _links(_contexts_of(messages))
        self._tracer.start_span(f"receive {topic}", None, SpanKind.CLIENT, attributes, links, started_ns).end()
        self._record_delivery(topic, messages)

    def _record_delivery(self, topic: str, messages: Sequence[ReceivedMessage]) -> None:
        now_ms, labels = epoch_ms(), {"topic": topic, **self._group_labels()}
        for message in messages:
            stored_ms = getattr(message, "store_timestamp", None)  # a Proxy may not report the store time
            if stored_ms:
                self._delivery_latency.record(max(0, now_ms - stored_ms), labels)

    def _operation_attributes(self, operation_name: str, topic: str) -> Attributes:
        attributes = {"messaging.operation.name": operation_name, "messaging.operation.type": operation_name}
        return {**self._common_attributes, **attributes, "messaging.destination.name": topic}

    def _group_attributes(self, operation_name: str, topic: str) -> Attributes:
        return {**self._operation_attributes(operation_name, topic), "messaging.consumer.group.name": self._group}

    def _group_labels(self) -> Attributes:
        return {"client_id": self._client_id, "consumer_group": self._group}


class _SendInProgress:
    """A send in progress. The context of the send's span is added to the properties of the messages, if the properties can
    contain it.
    """

    def __init__(self, telemetry: Instrumentation, messages: Sequence[Message]) -> None:
        self._telemetry = telemetry
        self._started_s = time.monotonic()
        self._messages = messages
        self._topic = messages[0].topic if messages else ""
        self._span: Span | None = _call_safely(telemetry.start_send_span, messages) if messages else None
        self._traced_messages = (
            None if self._span is None else _call_safely(_with_span_context, self._span, messages, telemetry.uses_proxy)
        )

    def send(self, send: Callable[[Sequence[Message]], Any]) -> Any:
        """Call ``send`` and return its result. If messages with the context in their properties are rejected, for example as
        too large, they are sent without the context. This second attempt duplicates no message, because rejected messages were
        not sent.
        """
        try:
            if self._traced_messages is not None:
                with contextlib.suppress(MessageRefused):
                    return send(self._traced_messages)
            return send(self._messages)
        except BaseException as e:
            self.end(e)
            raise

    def end(self, outcome: object, on_other_thread: bool = False) -> None:
        cost_ms = 1000 * (time.monotonic() - self._started_s)
        _call_safely(self._telemetry.record_send, self._topic, not isinstance(outcome, BaseException), cost_ms)
        if self._span is not None:
            end = functools.partial(_call_safely, _end_send_span, self._span, outcome, time.time_ns())
            self._telemetry.end_later(end) if on_other_thread else end()


class _ProcessSpan:
    """A listener's call in progress. ``context`` is the context in which the listener runs."""

    def __init__(
        self, telemetry: Instrumentation, messages: Any, context: Any, consumer_attributes: Mapping[str, Any]
    ) -> None:
        self._telemetry = telemetry
        self._context, self._count, self._topic = context, len(messages), messages[0].topic
        self._started_s = time.monotonic()
        self._span, self.context = telemetry.start_process_span(messages, consumer_attributes)

    def end(self, outcome: object) -> None:
        _call_safely(self._finish, outcome)

    def _finish(self, outcome: object) -> None:
        cost_ms = 1000 * (time.monotonic() - self._started_s)
        has_raised = isinstance(outcome, BaseException | Failure)
        error: object = None
        if has_raised or not _are_all_done(outcome, self._context, self._count):
            error = outcome if has_raised else f"the listener returned {type(outcome).__name__}"
        _call_safely(self._telemetry.record_process, self._topic, error is None, cost_ms)
        _end_span(self._span, error)


def _with_span_context(span: Span, messages: Sequence[Message], uses_proxy: bool) -> Sequence[Message] | None:
    """Return the messages with the span's context in their properties, as far as properties can contain its fields. Return None
    if no field can be added.
    """
    carrier: dict[Any, Any] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    fields = {
        name: value
        for name, value in carrier.items()
        if _is_property_text(name) and _is_property_text(value) and not is_reserved(name)
    }
    traced_messages = [replace(message, properties={**(message.properties or {}), **fields}) for message in messages]
    return (
        traced_messages
        if fields
        and (not uses_proxy or all(_fits_proxy(traced_message.properties or {}) for traced_message in traced_messages))
        else None
    )


def _fits_proxy(properties: Mapping[str, str]) -> bool:
    size = sum(len(name.encode()) + len((value or "").encode()) for name, value in properties.items())
    return len(properties) <= MAX_PROPERTIES and size <= MAX_PROPERTIES_BYTES


def _is_property_text(text: object) -> bool:
    return isinstance(text, str) and text != "" and not {*text} & {"\x01", "\x02"}


def _are_all_done(outcome: object, context: Any, count: int) -> bool:
    if isinstance(context, OrderedContext):
        return judge_ordered_outcome(outcome, context, 0).action in (OrderedAction.COMMIT, OrderedAction.CONTINUE)
    return judge_concurrent_outcome(outcome, context, count).done_count == count


def _end_send_span(span: Span, outcome: object, ended_ns: int) -> None:
    if isinstance(outcome, SendResult):
        span.set_attribute(_MESSAGE_ID_ATTRIBUTE, outcome.msg_id)
        if outcome.queue is not None:
            span.set_attribute("messaging.destination.partition.id", str(outcome.queue.queue_id))
    _end_span(span, outcome, ended_ns)


def _end_span(span: Span, failure: object, ended_ns: int | None = None) -> None:
    """End a span. ``failure`` is an exception, a ``Failure`` or a sentence; another value, such as None, means success."""
    error = failure.error if isinstance(failure, Failure) else failure
    try:
        if isinstance(error, BaseException):
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, safe_text(error, str)))
            span.record_exception(error)
        elif isinstance(error, str):
            span.set_attribute("error.type", "not_done")
            span.set_status(Status(StatusCode.ERROR, error))
    finally:
        span.end(ended_ns)


def _outcome(future: Future[Any]) -> object:
    if future.cancelled():
        return RuntimeError("the send was cancelled")
    return future.exception() or future.result()


def _contexts_of(messages: Iterable[ReceivedMessage]) -> list[Context]:
    """The contexts in the messages. The current context is ignored: in a coroutine's task, the current context belongs to the
    previous call.
    """
    return [propagate.extract(message.properties, Context()) for message in messages]


def _links(message_contexts: Iterable[Context]) -> list[Link]:
    span_contexts = [trace.get_current_span(message_context).get_span_context() for message_context in message_contexts]
    return [Link(span) for span in span_contexts if span.is_valid]


def _sent_attributes(messages: Sequence[Message]) -> Attributes:
    return _batch_attributes(messages, lambda message: _message_attributes(message.tags, message.keys, None))


def _received_attributes(messages: Sequence[ReceivedMessage]) -> Attributes:
    message_group = messages[0].properties.get(Property.SHARDING_KEY)
    return _batch_attributes(
        messages,
        lambda message: {
            _MESSAGE_ID_ATTRIBUTE: message.msg_id or "",
            **_message_attributes(message.tags, message.keys, message_group),
        },
    )


def _batch_attributes(messages: Sequence[Any], attributes_of: Callable[[Any], Attributes]) -> Attributes:
    further_attributes = (
        {"messaging.batch.message_count": len(messages)} if len(messages) > 1 else attributes_of(messages[0])
    )
    return {"messaging.message.body.size": sum(len(message.body) for message in messages), **further_attributes}


def _message_attributes(tag: str | None, keys: Sequence[str] | None, message_group: str | None) -> Attributes:
    values = {"tag": tag, "keys": list(keys or ()), "group": message_group}
    return {f"messaging.rocketmq.message.{name}": value for name, value in values.items() if value}
