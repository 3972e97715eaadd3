"""Decides which attempts may have stored their messages, and looks up which messages are stored.

Each broker has its own thread for look-ups. One look-up covers all ambiguous sends to the broker that are waiting when the
look-up starts.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import (
    BrokerNotFound,
    ClosedError,
    LocalProtocolError,
    MessageRefused,
    OptionError,
    RocketMQError,
    RouteNotFound,
    SendFailed,
    UnprovedError,
)
from rocketmq_spark.model import MessageQueue, QueueEnd, SendRequest, SendResult, SendStatus
from rocketmq_spark.producer.outgoing import Outcome, OutgoingSend, to_storable
from rocketmq_spark.producer.retry import OutOfTime
from rocketmq_spark.wire.messages import decode_batch, encode_item
from rocketmq_spark.wire.properties import decode_properties

logger = logging.getLogger(__name__)


class StoredIds(Protocol):
    """Finds stored messages, so that a producer does not send them again."""

    def end(self, queue: MessageQueue) -> QueueEnd:
        """Return the end offset that ``queue`` has now, or had at an earlier time. Raises ``RocketMQError`` if no end offset is
        cached and none can be fetched.
        """

    def find_stored(
        self, from_offsets: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> set[str]:
        """Return the ``ids`` of messages that one broker has stored after the offsets in ``from_offsets``. Returns only when none
        of the other messages can still arrive at the broker.

        Raises ``RocketMQError`` if it cannot be proved in time that no message arrives later, or if ``master`` is no longer the
        broker's master.
        """

    def stop(self) -> None:
        """Make ``find_stored`` return soon. May be called on any thread."""


class SendOutcomeKind(enum.Enum):
    """What is known about an attempt."""

    STORED = "stored"
    REJECTED = "refused before the store"
    AMBIGUOUS = "may be stored"


# Messages with one of these properties are stored in another topic until they are due.
_DELAY_PROPERTIES = frozenset(
    (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
)
# Errors that occur before anything is sent.
_LOCAL_ERRORS = (LocalProtocolError, MessageRefused, OptionError, ClosedError, OutOfTime, RouteNotFound, BrokerNotFound)
# A broker that returns one of these codes has stored nothing.
_REJECTED_CODES = frozenset(
    {
        Response.REQUEST_CODE_NOT_SUPPORTED,
        Response.MESSAGE_ILLEGAL,
        Response.SERVICE_NOT_AVAILABLE,
        Response.NO_PERMISSION,
        Response.TOPIC_NOT_EXIST,
        Response.INVALID_PARAMETER,
        Response.FLOW_CONTROL,
        Response.GO_AWAY,
    }
)
# A broker that returns one of these codes may have stored the message. If the answer begins with one of the texts of its code,
# the broker has stored nothing. The texts "[PC_SYNCHRONIZED]" and "in-sync replicas not enough" are not listed: a broker with a
# DLedger log also returns them if it has stored the message, but its followers did not confirm the message in time.
_REJECTED_TEXTS: Mapping[int, tuple[str, ...]] = {
    Response.SYSTEM_BUSY: (
        "[TIMEOUT_CLEAN_QUEUE]",
        "[PCBUSY_CLEAN_QUEUE]",
        "[REJECTREQUEST]",
        "[OVERLOAD]",
    ),
    Response.SYSTEM_ERROR: (
        "broker unable to service",
        "create mapped file failed",
    ),
}


def classify(outcome: SendResult | RocketMQError, has_queue: bool = True) -> SendOutcomeKind:
    """Classify the outcome of one attempt. If ``has_queue`` is False, the attempt failed before a queue was chosen, so nothing
    was sent.
    """
    if isinstance(outcome, SendResult):
        return SendOutcomeKind.STORED
    if not has_queue or outcome.unsent or isinstance(outcome, _LOCAL_ERRORS):
        return SendOutcomeKind.REJECTED
    code = outcome.broker_code
    if code in _REJECTED_CODES or (outcome.remark or "").startswith(_REJECTED_TEXTS.get(code or 0, ("\0",))):
        return SendOutcomeKind.REJECTED
    return SendOutcomeKind.AMBIGUOUS


# The stored ids, or the error of the look-up.
LookupResult = set[str] | RocketMQError


class RequestAfterLookup(NamedTuple):
    """The number of stored messages of a request, and a request with the messages that are not stored, or None if all are
    stored.
    """

    stored_count: int
    unconfirmed_request: SendRequest | None


class AmbiguousSend(NamedTuple):
    """A request that may be stored in ``queue``, after the offset ``lookup_start``. ``done`` receives the result of the
    look-up.
    """

    request: SendRequest
    queue: MessageQueue
    lookup_start: QueueEnd
    deadline: Deadline
    done: Callable[[LookupResult], None]


class AmbiguousSendResolver:
    """The look-ups of an engine, and the offsets at which these look-ups start. A lock guards the waiting sends and the offsets,
    but is not held during look-ups.
    """

    def __init__(self, stored_ids: StoredIds, timer: Timer) -> None:
        self._stored_ids = stored_ids
        self._timer = timer
        self._lookup_timers: dict[str, Timer] = {}
        self._lock = threading.Lock()
        # By queue and master: the end offset that was fetched, and the newest offset that an acknowledgement has shown.
        self._queue_ends: dict[tuple[MessageQueue, str], tuple[int, int]] = {}
        self._waiting_sends: dict[str, deque[AmbiguousSend]] = {}
        self._closed = False

    def record_lookup_start(self, outgoing: OutgoingSend, queue: MessageQueue) -> None:
        """Record, before an attempt, an offset from which a look-up finds all messages that the attempt stores. Raises
        ``RocketMQError`` if no such offset is cached and none can be fetched.
        """
        try:
            end = self._stored_ids.end(queue)
        except RocketMQError as e:
            e.unsent = True
            raise
        key = queue, end.master
        with self._lock:
            fetched_offset, acknowledged_offset = self._queue_ends.get(key, (-1, -1))
            if (
                fetched_offset != end.offset
            ):  # fetched again: drop the acknowledged offset, which may be from a deleted topic of the same name
                self._queue_ends[key] = end.offset, (acknowledged_offset := end.offset)
        outgoing.lookup_start = QueueEnd(max(end.offset, acknowledged_offset), end.master)

    def resolve_async(
        self,
        outgoing: OutgoingSend,
        queue: MessageQueue | None,
        outcome: Outcome,
        resume: Callable[[MessageQueue | None, Outcome], None],
    ) -> bool:
        """Return whether the outcome of an attempt is certain. If the outcome is ambiguous, a look-up starts, and ``resume`` gets
        the outcome once, on any thread.
        """
        if isinstance(outcome, SendResult):
            self._record_result(outgoing, outcome)
            return True
        attempt_number = outgoing.retry_state.attempt_count
        if (
            queue is None
            or outgoing.lookup_start is None
            or outgoing.looked_up_attempt_number == attempt_number
            or _is_definite(outcome)
        ):
            return True

        def done(result: LookupResult) -> None:
            outgoing.looked_up_attempt_number = attempt_number
            resume(queue, _outcome_after_lookup(outgoing, queue, outcome, result))

        return not self._enqueue_lookup(
            AmbiguousSend(outgoing.next_request, queue, outgoing.lookup_start, outgoing.attempts_deadline, done)
        )

    def resolve(self, outgoing: OutgoingSend, queue: MessageQueue | None, outcome: Outcome) -> Outcome:
        """Return the certain outcome of an attempt. If the outcome is ambiguous, the messages are looked up on the calling
        thread.
        """
        if isinstance(outcome, SendResult):
            self._record_result(outgoing, outcome)
            return outcome
        if queue is None or outgoing.lookup_start is None or _is_definite(outcome):
            return outcome
        ids = frozenset(msg_id for msg_id, _ in _ids_and_items(outgoing.next_request))
        logger.info("checking on %s which of %d messages are stored", queue.broker_name, len(ids))
        offset, master = outgoing.lookup_start
        return _outcome_after_lookup(
            outgoing, queue, outcome, self._find_stored({queue: offset}, master, ids, outgoing.attempts_deadline)
        )

    def _record_result(self, outgoing: OutgoingSend, result: SendResult) -> None:
        """Record the offset of a stored message, so that look-ups for later sends can start at this offset. An offset before
        ``lookup_start`` is recorded, too, because it shows that the queue was created again.
        """
        if outgoing.lookup_start is None or result.queue is None or result.queue_offset is None:
            return
        key = result.queue, outgoing.lookup_start.master
        with self._lock:
            fetched_offset, acknowledged_offset = self._queue_ends.get(key, (-1, -1))
            if result.queue_offset > acknowledged_offset or result.queue_offset < outgoing.lookup_start.offset:
                self._queue_ends[key] = fetched_offset, result.queue_offset

    def _enqueue_lookup(self, send: AmbiguousSend) -> bool:
        """Start a look-up. After ``close``, does nothing and returns False, because all requests already have outcomes."""
        broker_name = send.queue.broker_name
        with self._lock:
            if self._closed:
                return False
            self._waiting_sends.setdefault(broker_name, deque()).append(send)
            lookup_timer = self._lookup_timers.get(broker_name)
            if lookup_timer is None:
                lookup_timer = self._lookup_timers[broker_name] = self._timer.with_own_thread(f"confirm-{broker_name}")
        logger.info("checking on %s which of %d messages are stored", broker_name, len(_ids_and_items(send.request)))
        try:
            lookup_timer.call_later(0, lambda: self._look_up_broker(broker_name))
        except RuntimeError as e:  # no thread can start
            self._fail_lookup(send, SendFailed(f"cannot look up the message, because no thread can start: {e}"))
        return True

    def _fail_lookup(self, send: AmbiguousSend, error: RocketMQError) -> None:
        """Complete the look-up with an error, unless an earlier look-up has included the send."""
        with self._lock:
            waiting_sends = self._waiting_sends[send.queue.broker_name]
            other_sends = [other_send for other_send in waiting_sends if other_send is not send]
            if len(other_sends) == len(waiting_sends):
                return
            self._waiting_sends[send.queue.broker_name] = deque(other_sends)
        send.done(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._stored_ids.stop()
        for lookup_timer in self._lookup_timers.values():
            lookup_timer.close(wait_s=0)

    def _look_up_broker(self, broker_name: str) -> None:
        with self._lock:
            sends = list(self._waiting_sends.get(broker_name, ()))
            self._waiting_sends[broker_name] = deque()
        if not sends:  # an earlier look-up included all sends
            return
        for master in {send.lookup_start.master for send in sends}:
            self._look_up_master(master, [send for send in sends if send.lookup_start.master == master])

    def _look_up_master(self, master: str, sends: Sequence[AmbiguousSend]) -> None:
        from_offsets: dict[MessageQueue, int] = {}
        for send in sends:
            from_offsets[send.queue] = min(
                send.lookup_start.offset, from_offsets.get(send.queue, send.lookup_start.offset)
            )
        ids = frozenset(msg_id for send in sends for msg_id, _ in _ids_and_items(send.request))
        result = self._find_stored(from_offsets, master, ids, Deadline(max(send.deadline.end_s for send in sends)))
        for send in sends:
            send.done(result)

    def _find_stored(
        self, from_offsets: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> LookupResult:
        broker_name = next(iter(from_offsets)).broker_name
        try:
            stored_ids = self._stored_ids.find_stored(from_offsets, master, ids, deadline)
        except RocketMQError as e:
            return e
        except Exception as e:
            logger.exception("could not check which messages %s has stored", broker_name)
            return SendFailed(f"looking up what is stored failed: {type(e).__name__}: {e}")
        logger.warning("%s has stored %d of %d messages that got no answer", broker_name, len(stored_ids), len(ids))
        return stored_ids


def _is_definite(outcome: Outcome) -> bool:
    return classify(outcome) is not SendOutcomeKind.AMBIGUOUS


def _outcome_after_lookup(
    outgoing: OutgoingSend, queue: MessageQueue, outcome: RocketMQError, result: LookupResult
) -> Outcome:
    """The outcome of an attempt after its look-up. Also updates ``unconfirmed_request`` and ``confirmed_count`` of
    ``outgoing``.
    """
    if isinstance(result, RocketMQError):
        return unproved_error(outcome, result)
    request = outgoing.next_request
    stored_count, outgoing.unconfirmed_request = without_stored(request, result)
    outgoing.confirmed_count += stored_count
    if outgoing.unconfirmed_request is None:
        return SendResult(SendStatus.SEND_OK, "", queue, None)
    if not request.batch and not decode_properties(request.properties).keys().isdisjoint(_DELAY_PROPERTIES):
        return unproved_error(outcome, SendFailed("a delayed message is not in its topic before it is due"))
    return outcome


def unproved_error(error: RocketMQError, cause: RocketMQError) -> UnprovedError:
    """The error of a send that may be stored; ``cause`` is the reason why the look-up could not decide."""
    unproved_error_of_send = UnprovedError(
        f"the message may be stored, and its broker did not confirm whether it is: {error.message}; {cause.message}",
        error.addr,
        error.broker_code,
        error.topic,
        error.queue,
        error.remark,
        cause.remedy,
    )
    unproved_error_of_send.__cause__ = error
    return unproved_error_of_send


def without_stored(request: SendRequest, stored_ids: set[str]) -> RequestAfterLookup:
    """Remove the stored messages from a request."""
    items = _ids_and_items(request := to_storable(request))
    unconfirmed_items = [(msg_id, item) for msg_id, item in items if msg_id not in stored_ids]
    stored_count = len(items) - len(unconfirmed_items)
    if not unconfirmed_items:
        return RequestAfterLookup(stored_count, None)
    if not stored_count:
        return RequestAfterLookup(0, request)
    return RequestAfterLookup(stored_count, request._replace(body=b"".join(item for _, item in unconfirmed_items)))


def _ids_and_items(request: SendRequest) -> list[tuple[str, bytes]]:
    """The id and the encoded message for each message of a batch; for a single message, its id and no bytes."""
    request = to_storable(request)
    if not request.batch:
        return [(decode_properties(request.properties)[Property.UNIQ_KEY], b"")]
    return [
        (decode_properties(item.properties)[Property.UNIQ_KEY], encode_item(item.body, item.properties, item.flag))
        for item in decode_batch(request.data)
    ]
