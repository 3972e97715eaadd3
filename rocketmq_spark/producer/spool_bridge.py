"""The spool of an engine: which failures are temporary, and the outcome of a send that is spooled.

Asynchronous sends are written to the spool on a separate thread, because their outcomes may arrive on the thread that reads
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
from rocketmq_spark.queues.selection import Select, is_built_in, select
from rocketmq_spark.wire.properties import decode_properties, encode_properties

logger = logging.getLogger(__name__)

_TRANSIENT = (CallTimeout, ConnectionLost, BrokerBusy, ServiceNotAvailable, GoAway, BrokerNotFound)
_DRAIN_S = 60.0
_RELATIVE_DELAYS = (Property.TIMER_DELAY_MS, Property.TIMER_DELAY_SEC)
# Seconds for one request about a topic that seems to be missing.
TOPIC_REQUEST_S = 3.0
# A lane is named by topic, selector and argument, in at most 65,535 bytes.
_MAX_ARG_BYTES = 60_000


def is_transient(error: RocketMQError, sender: Sender) -> bool:
    """Whether the same send may succeed later: time-out, lost connection, busy, no name server, no master.

    A topic without a route is missing if there is a master. This sends a request; without an answer it is unknown.
    """
    error = cause_of(error)
    if not isinstance(error, RouteNotFound):
        return isinstance(error, _TRANSIENT) and error.retriable
    if error.broker_code is None:
        return False
    try:
        if not sender.any_master():
            return True
        sender.publish_queues(
            error.topic or "", Deadline.after(TOPIC_REQUEST_S), refresh=True
        )  # it may have appeared meanwhile
    except RouteNotFound:
        return False
    except RocketMQError:
        pass
    return True


def cause_of(error: RocketMQError) -> RocketMQError:
    """The error of a send's last attempt."""
    while isinstance(error, SendFailed) and isinstance(error.__cause__, RocketMQError):
        error = error.__cause__
    return error


def is_storable_selector(selector: str | Select | None, arg: object) -> bool:
    """Whether a spool can store the choice: a built-in selector with an argument that JSON can represent."""
    try:
        text = json.dumps(arg, sort_keys=True)
        is_built_in_name = isinstance(selector, str) and is_built_in(selector) and bool(json.loads(text) == arg)
        return is_built_in_name and len(text) <= _MAX_ARG_BYTES and bool(json.dumps(arg, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        return False


def selector_function(topic: str, selector: str, arg: Any) -> Callable[[Queues], Queues]:
    """Return a function that applies a selector when there are queues."""
    message = Message(topic, b"")
    return lambda queues: (select(selector, queues, message, arg),)


class SpoolBridge:
    """The spool of an engine."""

    def __init__(self, spool: Spool, sender: Sender, timer: Timer) -> None:
        self._spool = spool
        self._sender = sender
        self._timer = timer.beside("spool")
        self._lock = threading.Lock()
        self._waiting: deque[tuple[OutgoingSend, RocketMQError | None, Callable[[Outcome], None]]] = deque()

    def must_follow_spool(self, outgoing: OutgoingSend) -> bool:
        """Whether the spool holds records of its queue that it must not overtake."""
        if outgoing.queue is None and outgoing.selection is None:
            return False
        return self._spool.holds(_lane_send(outgoing))

    def final_outcome(self, outgoing: OutgoingSend, outcome: Outcome) -> Outcome:
        """The caller's outcome after the last attempt; waits for the disk."""
        if isinstance(outcome, SendResult):
            if self._spool.listens:
                self.report_success(outcome)
            return outcome
        return self.spool([(outgoing, outcome)])[0]

    def report_success(self, result: SendResult) -> None:
        """Tell the spool that a broker accepted a message."""
        if self._spool.listens and result.queue is not None:
            self._spool.answered(result.queue)

    def spool(self, failed: Sequence[tuple[OutgoingSend, RocketMQError | None]]) -> list[Outcome]:
        """The outcome of each failed or unsent request: spooled if the failure is temporary and the spool accepts it."""
        outcomes: list[Outcome | None] = [
            error if error is not None and not is_transient(error, self._sender) else None for _, error in failed
        ]
        to_spool = [i for i, outcome in enumerate(outcomes) if outcome is None]
        error_of_all = self._write(failed, to_spool)
        for i in to_spool:  # if not all fit, some may
            spool_error = error_of_all if error_of_all is None or len(to_spool) == 1 else self._write(failed, [i])
            outcomes[i] = _outcome(*failed[i], spool_error)
        return [outcome for outcome in outcomes if outcome is not None]

    def spool_async(self, outgoing: OutgoingSend, error: RocketMQError | None, done: Callable[[Outcome], None]) -> None:
        """The same, without blocking."""
        with self._lock:
            self._waiting.append((outgoing, error, done))
        self._timer.soon(self._spool_waiting)

    def drain(self) -> None:
        """Wait until all sends passed to ``later`` are written."""
        self._timer.drain(_DRAIN_S)

    def close(self) -> None:
        self._timer.close()

    def _spool_waiting(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        outcomes = self.spool([(outgoing, error) for outgoing, error, _ in waiting])
        for (_, _, done), outcome in zip(waiting, outcomes, strict=True):
            done(outcome)

    def _write(
        self, failed: Sequence[tuple[OutgoingSend, RocketMQError | None]], indexes: Sequence[int]
    ) -> RocketMQError | None:
        """Write these sends. Returns the error if that fails."""
        try:
            if indexes:
                self._spool.keep([_spooled_send(failed[i][0]) for i in indexes])
        except RocketMQError as e:
            return e
        except Exception as e:  # whatever it is, each send must have an outcome
            logger.exception("spooling failed in an unexpected way")
            return SpoolError(f"spooling failed in an unexpected way: {type(e).__name__}: {e}")
        return None


def _spooled_send(outgoing: OutgoingSend) -> SpooledSend:
    return dataclasses.replace(_lane_send(outgoing), request=_with_due_time(to_storable(outgoing.request)))


def _lane_send(outgoing: OutgoingSend) -> SpooledSend:
    """The parts of the send that determine its lane, without the body, which may not be encoded for a spool."""
    selector, arg = outgoing.selection or (None, None)
    return SpooledSend(outgoing.topic, outgoing.request, outgoing.queue, outgoing.msg_ids, selector, arg)


def _with_due_time(request: SendRequest) -> SendRequest:
    """Set the due time now, so that the delay does not start only when a broker accepts the message."""
    if not any(name in request.properties for name in _RELATIVE_DELAYS):
        return request
    properties = decode_properties(request.properties)
    due_ms = timer_due_ms(properties, request.born_timestamp_ms)
    if due_ms is None:  # a text that the user set
        return request
    for name in _RELATIVE_DELAYS:
        properties.pop(name, None)
    with contextlib.suppress(MessageRefused):  # unchanged if the additional bytes do not fit
        return request._replace(properties=encode_properties({**properties, Property.TIMER_DELIVER_MS: str(due_ms)}))
    return request


def spooled_result(queue: MessageQueue | None) -> SendResult:
    return SendResult(SendStatus.SPOOLED, "", queue, None)


def _outcome(outgoing: OutgoingSend, error: RocketMQError | None, spool_error: RocketMQError | None) -> Outcome:
    if spool_error is None:
        return spooled_result(outgoing.queue)
    if not isinstance(spool_error, ClosedError):
        logger.error("a send to %s could not be spooled: %s", outgoing.topic, spool_error)
    if error is None:
        return spool_error
    error.add_note(f"The spool could not keep it: {spool_error}")
    return error
