"""The spool of an engine: which failures are temporary, and the outcome of a send that is spooled.

A separate thread writes asynchronous sends to the spool. The outcomes of these sends may arrive on the thread that reads
answers, which must not wait for a disk. One call writes all waiting sends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, timer_due_ms
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import (
    BrokerBusy,
    BrokerNotFound,
    CallTimeout,
    ClosedError,
    ConnectionLost,
    GoAway,
    MessageRefused,
    RocketMQError,
    RouteNotFound,
    SendFailed,
    ServiceNotAvailable,
    SpoolError,
)
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus, SpooledSend
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer.outgoing import Outcome, OutgoingSend, Queues, to_storable
from rocketmq_spark.queues.selection import Selector, is_built_in, select
from rocketmq_spark.wire.properties import decode_properties, encode_properties

logger = logging.getLogger(__name__)

_TRANSIENT_ERRORS = (CallTimeout, ConnectionLost, BrokerBusy, ServiceNotAvailable, GoAway, BrokerNotFound)
_MAX_DRAIN_S = 60.0
_RELATIVE_DELAY_PROPERTIES = (Property.TIMER_DELAY_MS, Property.TIMER_DELAY_SEC)
# Seconds for one request about a topic that seems to be missing.
TOPIC_REQUEST_S = 3.0
# The lane of a record (``spool.spool.lane_of``) contains topic, selector and argument, and may have at most 65,535 bytes.
_MAX_ARG_BYTES = 60_000


def is_transient(error: RocketMQError, sender: Sender) -> bool:
    """Whether the same send may succeed later, because the error is a timeout, a lost connection, a busy broker, or a missing
    name server or master.

    If the error is a missing route, the route is requested again. If there is still no route, although a broker has a master, the
    error is permanent. If no name server answers, the error counts as temporary.
    """
    error = cause_of(error)
    if not isinstance(error, RouteNotFound):
        return isinstance(error, _TRANSIENT_ERRORS) and error.retriable
    if error.broker_code is None:
        return False
    try:
        if not sender.has_master():
            return True
        # The topic may have been registered meanwhile.
        sender.publish_queues(error.topic or "", Deadline.after(TOPIC_REQUEST_S), refresh=True)
    except RouteNotFound:
        return False
    except RocketMQError:
        pass
    return True


def cause_of(error: RocketMQError) -> RocketMQError:
    """The error of the last attempt of a send."""
    while isinstance(error, SendFailed) and isinstance(error.__cause__, RocketMQError):
        error = error.__cause__
    return error


def is_storable_selector(selector: str | Selector | None, arg: object) -> bool:
    """Whether a spool can store a selector and its argument: the selector is built in, and JSON can represent the argument."""
    try:
        text = json.dumps(arg, sort_keys=True)
        is_built_in_name = isinstance(selector, str) and is_built_in(selector) and bool(json.loads(text) == arg)
        return is_built_in_name and len(text) <= _MAX_ARG_BYTES and bool(json.dumps(arg, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        return False


def selector_function(topic: str, selector: str, arg: Any) -> Callable[[Queues], Queues]:
    """Return a function that applies a selector to the queues of ``topic``."""
    message = Message(topic, b"")
    return lambda queues: (select(selector, queues, message, arg),)


class SpoolBridge:
    """Passes the failed sends of an engine to its spool."""

    def __init__(self, spool: Spool, sender: Sender, timer: Timer) -> None:
        self._spool = spool
        self._sender = sender
        self._timer = timer.with_own_thread("spool")
        self._lock = threading.Lock()
        self._waiting_sends: deque[tuple[OutgoingSend, RocketMQError | None, Callable[[Outcome], None]]] = deque()

    def must_follow_spool(self, outgoing: OutgoingSend) -> bool:
        """Whether the spool holds earlier records of the request's queue, so that the request must go to the spool, too."""
        if outgoing.queue is None and outgoing.selection is None:
            return False
        return self._spool.has_earlier_record(_lane_send(outgoing))

    def final_outcome(self, outgoing: OutgoingSend, outcome: Outcome) -> Outcome:
        """The outcome for the caller after the last attempt. Waits for the disk if the request is spooled."""
        if isinstance(outcome, SendResult):
            if self._spool.needs_answers:
                self.report_success(outcome)
            return outcome
        return self.spool([(outgoing, outcome)])[0]

    def report_success(self, result: SendResult) -> None:
        """Tell the spool that a broker has accepted a message."""
        if self._spool.needs_answers and result.queue is not None:
            self._spool.note_accepted_send(result.queue)

    def spool(self, sends_and_errors: Sequence[tuple[OutgoingSend, RocketMQError | None]]) -> list[Outcome]:
        """Spool requests that were not sent or failed for a temporary reason. Returns the outcome of each request."""
        outcomes: list[Outcome | None] = [
            error if error is not None and not is_transient(error, self._sender) else None
            for _, error in sends_and_errors
        ]
        spool_indexes = [i for i, outcome in enumerate(outcomes) if outcome is None]
        error_of_all = self._write(sends_and_errors, spool_indexes)
        for i in spool_indexes:  # if the spool has no room for all requests, it may have room for some of them
            spool_error = (
                error_of_all if error_of_all is None or len(spool_indexes) == 1 else self._write(sends_and_errors, [i])
            )
            outcomes[i] = _outcome_after_spooling(*sends_and_errors[i], spool_error)
        return [outcome for outcome in outcomes if outcome is not None]

    def spool_async(self, outgoing: OutgoingSend, error: RocketMQError | None, done: Callable[[Outcome], None]) -> None:
        """As ``spool`` for one request, without blocking. ``done`` receives the outcome."""
        with self._lock:
            self._waiting_sends.append((outgoing, error, done))
        self._timer.call_soon(self._spool_waiting)

    def drain(self) -> None:
        """Wait until all sends that were passed to ``spool_async`` are written."""
        self._timer.drain(_MAX_DRAIN_S)

    def close(self) -> None:
        self._timer.close()

    def _spool_waiting(self) -> None:
        with self._lock:
            waiting_sends = list(self._waiting_sends)
            self._waiting_sends.clear()
        outcomes = self.spool([(outgoing, error) for outgoing, error, _ in waiting_sends])
        for (_, _, done), outcome in zip(waiting_sends, outcomes, strict=True):
            done(outcome)

    def _write(
        self, sends_and_errors: Sequence[tuple[OutgoingSend, RocketMQError | None]], indexes: Sequence[int]
    ) -> RocketMQError | None:
        """Write the sends at these ``indexes`` of ``sends_and_errors``. Returns the error if the write fails."""
        try:
            if indexes:
                self._spool.keep([_spooled_send(sends_and_errors[i][0]) for i in indexes])
        except RocketMQError as e:
            return e
        except Exception as e:  # each send must get an outcome
            logger.exception("spooling failed in an unexpected way")
            return SpoolError(f"spooling failed in an unexpected way: {type(e).__name__}: {e}")
        return None


def _spooled_send(outgoing: OutgoingSend) -> SpooledSend:
    return dataclasses.replace(_lane_send(outgoing), request=_with_due_time(to_storable(outgoing.request)))


def _lane_send(outgoing: OutgoingSend) -> SpooledSend:
    """The parts of a send that determine its lane in the spool. The body of the request is not converted, because the lane does
    not depend on the body.
    """
    selector, arg = outgoing.selection or (None, None)
    return SpooledSend(outgoing.topic, outgoing.request, outgoing.queue, outgoing.msg_ids, selector, arg)


def _with_due_time(request: SendRequest) -> SendRequest:
    """Replace a relative delay by the due time. A relative delay would start only when a broker accepts the message."""
    if not any(name in request.properties for name in _RELATIVE_DELAY_PROPERTIES):
        return request
    properties = decode_properties(request.properties)
    due_ms = timer_due_ms(properties, request.born_timestamp_ms)
    if due_ms is None:  # the user set a text that is not a number
        return request
    for name in _RELATIVE_DELAY_PROPERTIES:
        properties.pop(name, None)
    # If the properties become too large, the request keeps its relative delay.
    with contextlib.suppress(MessageRefused):
        return request._replace(properties=encode_properties({**properties, Property.TIMER_DELIVER_MS: str(due_ms)}))
    return request


def spooled_result(queue: MessageQueue | None) -> SendResult:
    return SendResult(SendStatus.SPOOLED, "", queue, None)


def _outcome_after_spooling(
    outgoing: OutgoingSend, error: RocketMQError | None, spool_error: RocketMQError | None
) -> Outcome:
    if spool_error is None:
        return spooled_result(outgoing.queue)
    if not isinstance(spool_error, ClosedError):
        logger.error("a send to %s could not be spooled: %s", outgoing.topic, spool_error)
    if error is None:
        return spool_error
    error.add_note(f"The spool could not keep it: {spool_error}")
    return error
