"""OpenTelemetry spans and metrics of producers and consumers (option ``openTelemetry``; docs/opentelemetry.md).

Methods of one object are replaced by wrapped ones, so that the option costs nothing when it is off. Spans follow OpenTelemetry's
conventions for messaging; metrics have the names that rocketmq-clients gives them. Errors in OpenTelemetry are logged and affect
neither sends nor outcomes.
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
    judge_concurrent,
    judge_ordered,
    observed_listener,
)
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message, ReceivedMessage, SendResult
from rocketmq_spark.wire.properties import is_reserved

logger = logging.getLogger(__name__)

_SCOPE, _ID = "rocketmq_spark", "messaging.message.id"
# Spans of asynchronous sends end on a separate thread, because an exporter may block. Limits: waiting spans, seconds of a close.
_ENDS, MOST_ENDS, ENDS_S, LOG_S = "spans", 10_000, 1.0, 60.0
_STATUS = {True: {"invocation_status": "success"}, False: {"invocation_status": "failure"}}
MOST_PROPERTIES, MOST_BYTES = 128, 16_384  # limits of a Proxy for a message's user properties, by default
Attributes = dict[str, Any]


def _guarded(code: Callable[..., Any], *of: Any) -> Any:
    """Call ``code``; logs a failure and returns None, because it must not affect messages."""
    made = capture(code, *of)
    if isinstance(made, Failure):
        made.log(logger, "OpenTelemetry failed")
        return None
    return made


# Consumers whose caches are observed, and their labels. Global, because a meter accepts one callback per metric name.
_observed: weakref.WeakKeyDictionary[Any, Attributes] = weakref.WeakKeyDictionary()


def _cached(options: CallbackOptions) -> Iterator[Observation]:
    for consumer, labels in list(_observed.items()):
        if (stats := _guarded(consumer.stats)) is not None:
            yield Observation(stats.cached, labels)


def instrumentation(group: str, client_id: str, namespace: str | None) -> Instrumentation | None:
    """Return the instrumentation; None if OpenTelemetry fails, so that sends work without it."""
    made: Instrumentation | None = _guarded(Instrumentation, group, client_id, namespace)
    return made


class Instrumentation:
    """Makes the spans and metrics of one producer or consumer."""

    proxied = False  # whether it sends to a Proxy

    def __init__(self, group: str, client_id: str, namespace: str | None) -> None:
        self._tracer = trace.get_tracer(_SCOPE, rocketmq_spark.__version__)
        self._meter = metrics.get_meter(_SCOPE, rocketmq_spark.__version__)
        self._group = group
        self._client_id = client_id
        self._common: Attributes = {"messaging.system": "rocketmq", "messaging.client.id": client_id}
        if namespace:
            self._common["messaging.rocketmq.namespace"] = namespace
        histogram = self._meter.create_histogram
        self._aside, self._complaint, self._owner = KeyedExecutor(MOST_ENDS), RateLimit(LOG_S), OwnerProcess("producer")
        self._send_cost = histogram("rocketmq_send_cost_time", "ms", "Duration of a send with all its attempts")
        self._delivery = histogram("rocketmq_delivery_latency", "ms", "From the broker's store to the consumer")
        self._process = histogram("rocketmq_process_time", "ms", "Duration of a listener's call")

    def instrument_producer(self, producer: Any) -> None:
        """Wrap the methods that send."""
        producer.send = self._around_send(producer.send)
        producer.send_async = self._around_send_async(producer.send_async)
        producer.send_oneway = self._around_send(producer.send_oneway)
        producer.send_batch = self._around_send_batch(producer.send_batch)
        producer.send_half = self._around_send(producer.send_half)
        producer.request_async = self._around_send_async(producer.request_async)
        producer.flush, producer.close = self._behind(producer.flush), self._behind(producer.close)

    def _behind(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``code`` wrapped: it first waits for the spans that are about to end."""

        @functools.wraps(code)
        def waiting(*args: Any, **named: Any) -> Any:
            try:
                return code(*args, **named)
            finally:
                if self._owner.is_current:  # in a fork, the lock may be held by a thread that does not exist there
                    self._aside.wait(_ENDS, ENDS_S)

        return waiting

    def _around_send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def traced(message: Message, *args: Any, **named: Any) -> Any:
            sending = _Sending(self, (message,))
            result = sending.begin(lambda messages: send(messages[0], *args, **named))
            sending.end(getattr(result, "result", result))  # a half message has its result inside
            return result

        return traced

    def _around_send_batch(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def traced(messages: Iterable[Message], *args: Any, **named: Any) -> Any:
            sending = _Sending(self, tuple(messages))
            result = sending.begin(lambda messages: send(messages, *args, **named))
            sending.end(result)
            return result

        return traced

    def _around_send_async(self, send: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        @functools.wraps(send)
        def traced(message: Message, *args: Any, **named: Any) -> Future[Any]:
            sending = _Sending(self, (message,))
            future: Future[Any] = sending.begin(lambda messages: send(messages[0], *args, **named))
            future.add_done_callback(lambda done: sending.end(_outcome(done), aside=True))
            return future

        return traced

    def send_span(self, messages: Sequence[Message]) -> Span:
        """Start the span of a send."""
        topic = messages[0].topic
        attributes = {**self._named("send", topic), **_of_sent(messages)}
        return self._tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes)

    def sent(self, topic: str, ok: bool, cost_ms: float) -> None:
        """Record the metrics of a send."""
        self._send_cost.record(cost_ms, {"topic": topic, "client_id": self._client_id, **_STATUS[ok]})

    def end_aside(self, end: Callable[[], None]) -> None:
        """Run ``end`` on another thread, because this one may read answers. If too many wait, the span is dropped."""
        made = capture(self._aside.run, _ENDS, end)
        if isinstance(made, Failure) and self._complaint.due():
            logger.warning("spans of sends are lost: an exporter is slow, or no thread can be started: %s", made)

    def instrument_consumer(self, consumer: Any, name: str) -> None:
        """Wrap the listener that method ``name`` of the consumer gets at the start, and observe the consumer's cache.

        Listeners of record batches have no spans, because record batches have no trace context.
        """
        start = getattr(consumer, name)
        model = "clustering" if consumer.settings.clustering else "broadcasting"
        common = {"messaging.rocketmq.consumption_model": model}

        @functools.wraps(start)
        def traced(listener: Listener) -> Any:
            if isinstance(listener, DeferredListener):
                return start(observed_listener(listener, functools.partial(self._in_turn, common)))
            return start(functools.partial(self._listen, listener, common))

        if not consumer.settings.arrow:
            setattr(consumer, name, traced)
        _observed[consumer] = self._labels_of_group()
        _guarded(self._meter.create_observable_gauge, "rocketmq_consumer_cached_messages", [_cached], "{message}")

    def _in_turn(self, common: Mapping[str, Any], messages: Any, context: Any) -> OutcomeCallback:
        """Process a listener's call in the task of a coroutine that handled another call before."""
        call = _guarded(_Processing, self, messages, context, common)
        _guarded(contexts.attach, Context() if call is None else call.context)
        return (lambda outcome: None) if call is None else call.end

    def _listen(self, listener: Listener, common: Mapping[str, Any], messages: Any, context: Any) -> object:
        call = _guarded(_Processing, self, messages, context, common)
        if call is None:
            return listener(messages, context)
        token = contexts.attach(call.context)
        try:
            outcome = listener(messages, context)
        except BaseException as e:
            call.end(e)
            raise
        finally:
            contexts.detach(token)
        call.end(outcome)
        return outcome

    def begin_process(self, messages: Sequence[ReceivedMessage], common: Mapping[str, Any]) -> tuple[Span, Context]:
        """Start the span of a listener's call: in the trace of its single message, or linked to the traces of several."""
        topic = messages[0].topic
        origins = _origins(messages)
        parent, links = (origins[0], []) if len(messages) == 1 else (Context(), _links(origins))
        attributes = {**self._of_group("process", topic), **common, **_of_received(messages)}
        span = self._tracer.start_span(f"process {topic}", parent, SpanKind.CONSUMER, attributes, links)
        _guarded(self._received, topic, messages)
        return span, trace.set_span_in_context(span, parent)

    def processed(self, topic: str, ok: bool, cost_ms: float) -> None:
        """Record the metrics of a listener's call."""
        self._process.record(cost_ms, {"topic": topic, **self._labels_of_group(), **_STATUS[ok]})

    def instrument_receives(
        self, consumer: Any, name: str, messages_of: Callable[[Any], Sequence[ReceivedMessage]] = lambda answer: answer
    ) -> None:
        """Wrap the method that returns messages, or something that has them."""
        receive = getattr(consumer, name)

        @functools.wraps(receive)
        def traced(*args: Any, **named: Any) -> Any:
            began_ns = time.time_ns()
            answer = receive(*args, **named)
            if messages := messages_of(answer):
                _guarded(self._record_receive, messages, began_ns)
            return answer

        setattr(consumer, name, traced)

    def _record_receive(self, messages: Sequence[ReceivedMessage], began_ns: int) -> None:
        topic = messages[0].topic
        attributes = {**self._of_group("receive", topic), **_of_received(messages)}
        links = _links(_origins(messages))
        self._tracer.start_span(f"receive {topic}", None, SpanKind.CLIENT, attributes, links, began_ns).end()
        self._received(topic, messages)

    def _received(self, topic: str, messages: Sequence[ReceivedMessage]) -> None:
        now_ms, labels = epoch_ms(), {"topic": topic, **self._labels_of_group()}
        for each in messages:
            stored_ms = getattr(each, "store_timestamp", None)  # a Proxy may not report it
            if stored_ms:
                self._delivery.record(max(0, now_ms - stored_ms), labels)

    def _named(self, what: str, topic: str) -> Attributes:
        operation = {"messaging.operation.name": what, "messaging.operation.type": what}
        return {**self._common, **operation, "messaging.destination.name": topic}

    def _of_group(self, what: str, topic: str) -> Attributes:
        return {**self._named(what, topic), "messaging.consumer.group.name": self._group}

    def _labels_of_group(self) -> Attributes:
        return {"client_id": self._client_id, "consumer_group": self._group}


class _Sending:
    """A send in progress. Its messages have the context of its span in their properties, unless adding it failed."""

    def __init__(self, telemetry: Instrumentation, messages: Sequence[Message]) -> None:
        self._telemetry = telemetry
        self._began = time.monotonic()
        self._messages = messages
        self._topic = messages[0].topic if messages else ""
        self._span: Span | None = _guarded(telemetry.send_span, messages) if messages else None
        self._carrying = None if self._span is None else _guarded(_carrying, self._span, messages, telemetry.proxied)

    def begin(self, send: Callable[[Sequence[Message]], Any]) -> Any:
        """Call ``send`` and return its result. If messages are rejected with the context in their properties, for example as too
        large, they are sent without it, which is safe: rejected messages were not sent.
        """
        try:
            if self._carrying is not None:
                with contextlib.suppress(MessageRefused):
                    return send(self._carrying)
            return send(self._messages)
        except BaseException as e:
            self.end(e)
            raise

    def end(self, outcome: object, aside: bool = False) -> None:
        cost_ms = 1000 * (time.monotonic() - self._began)
        _guarded(self._telemetry.sent, self._topic, not isinstance(outcome, BaseException), cost_ms)
        if self._span is not None:
            end = functools.partial(_guarded, _end_send, self._span, outcome, time.time_ns())
            self._telemetry.end_aside(end) if aside else end()


class _Processing:
    """A listener's call in progress, and the context in which the listener runs."""

    def __init__(self, telemetry: Instrumentation, messages: Any, context: Any, common: Mapping[str, Any]) -> None:
        self._telemetry = telemetry
        self._given, self._count, self._topic = context, len(messages), messages[0].topic
        self._began = time.monotonic()
        self._span, self.context = telemetry.begin_process(messages, common)

    def end(self, outcome: object) -> None:
        _guarded(self._end, outcome)

    def _end(self, outcome: object) -> None:
        cost_ms = 1000 * (time.monotonic() - self._began)
        raised = isinstance(outcome, BaseException | Failure)
        why: object = None
        if raised or not _all_done(outcome, self._given, self._count):
            why = outcome if raised else f"the listener returned {type(outcome).__name__}"
        _guarded(self._telemetry.processed, self._topic, why is None, cost_ms)
        _end(self._span, why)


def _carrying(span: Span, messages: Sequence[Message], proxied: bool) -> Sequence[Message] | None:
    """Return the messages with those fields of the span's context that properties can contain; None if none can be added."""
    carrier: dict[Any, Any] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    fit = {name: value for name, value in carrier.items() if _fits(name) and _fits(value) and not is_reserved(name)}
    made = [replace(each, properties={**(each.properties or {}), **fit}) for each in messages]
    return made if fit and (not proxied or all(_is_taken(each.properties or {}) for each in made)) else None


def _is_taken(properties: Mapping[str, str]) -> bool:
    size = sum(len(name.encode()) + len((value or "").encode()) for name, value in properties.items())
    return len(properties) <= MOST_PROPERTIES and size <= MOST_BYTES


def _fits(text: object) -> bool:
    return isinstance(text, str) and text != "" and not {*text} & {"\x01", "\x02"}


def _all_done(outcome: object, context: Any, count: int) -> bool:
    if isinstance(context, OrderedContext):
        return judge_ordered(outcome, context, 0).action in (OrderedAction.COMMIT, OrderedAction.CONTINUE)
    return judge_concurrent(outcome, context, count).done_count == count


def _end_send(span: Span, outcome: object, at_ns: int) -> None:
    if isinstance(outcome, SendResult):
        span.set_attribute(_ID, outcome.msg_id)
        if outcome.queue is not None:
            span.set_attribute("messaging.destination.partition.id", str(outcome.queue.queue_id))
    _end(span, outcome, at_ns)


def _end(span: Span, why: object, at_ns: int | None = None) -> None:
    """End a span; ``why`` is its error: an exception, a ``Failure``, or a sentence. None without an error."""
    error = why.error if isinstance(why, Failure) else why
    try:
        if isinstance(error, BaseException):
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, safe_text(error, str)))
            span.record_exception(error)
        elif isinstance(error, str):
            span.set_attribute("error.type", "not_done")
            span.set_status(Status(StatusCode.ERROR, error))
    finally:
        span.end(at_ns)


def _outcome(future: Future[Any]) -> object:
    if future.cancelled():
        return RuntimeError("the send was cancelled")
    return future.exception() or future.result()


def _origins(messages: Iterable[ReceivedMessage]) -> list[Context]:
    """The contexts in the messages. The current context is ignored: in a coroutine's task it is that of the previous call."""
    return [propagate.extract(each.properties, Context()) for each in messages]


def _links(origins: Iterable[Context]) -> list[Link]:
    spans = [trace.get_current_span(origin).get_span_context() for origin in origins]
    return [Link(span) for span in spans if span.is_valid]


def _of_sent(messages: Sequence[Message]) -> Attributes:
    return _of_all(messages, lambda one: _of_one(one.tags, one.keys, None))


def _of_received(messages: Sequence[ReceivedMessage]) -> Attributes:
    group = messages[0].properties.get(Property.SHARDING_KEY)
    return _of_all(messages, lambda one: {_ID: one.msg_id or "", **_of_one(one.tags, one.keys, group)})


def _of_all(messages: Sequence[Any], of_one: Callable[[Any], Attributes]) -> Attributes:
    more = {"messaging.batch.message_count": len(messages)} if len(messages) > 1 else of_one(messages[0])
    return {"messaging.message.body.size": sum(len(each.body) for each in messages), **more}


def _of_one(tag: str | None, keys: Sequence[str] | None, group: str | None) -> Attributes:
    found = {"tag": tag, "keys": list(keys or ()), "group": group}
    return {f"messaging.rocketmq.message.{name}": value for name, value in found.items() if value}
