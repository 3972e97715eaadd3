"""Message traces of a producer: records of sends, decisions and cancellations in the trace topic.

Mirrors ``AsyncTraceDispatcher`` and its hooks. Tracing does not delay the traced calls, because a timer sends the collected
records. An error of tracing does not make a traced call fail. If the trace topic does not accept records, these are dropped and
the loss is logged. Unlike in Java, each message of a batch has its own record, so that a search for the message's id finds the
record.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from rocketmq_spark.base.clock import Deadline, RateLimit
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.errors import CallTimeout, ClosedError, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import HalfCheck, HalfPlace, TransactionState
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.at_exit import register_at_exit
from rocketmq_spark.producer.engine import Unsent
from rocketmq_spark.producer.outgoing import NonblockingCallback, Outcome, messages_in_batch
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire import traces
from rocketmq_spark.wire.identifiers import OffsetMessageId
from rocketmq_spark.wire.properties import decode_properties
from rocketmq_spark.wire.traces import Acknowledgement, MessageKind, TracedMessage, TraceRecord

logger = logging.getLogger(__name__)

_producer_numbers = itertools.count()
_MAX_GROUP_CHARACTERS = 80  # how much of the traced group's name is in the name of the tracing group

# Records are sent when there are ``FLUSH_RECORDS``, or ``FLUSH_S`` after the first record. As in Java, the number of records that
# are not stored yet is limited.
FLUSH_RECORDS = traces.MAX_RECORDS
FLUSH_S = 1.0
MAX_BUFFERED_RECORDS = 20_480
# The records of a batch are created later, and the batch stays in memory until its records are created. So a batch counts as at
# least one record for each ``BYTES_PER_RECORD`` bytes.
BYTES_PER_RECORD = 4096
SEND_TIMEOUT_S = 5.0
MAX_EXIT_S = 2.0  # how long the end of the program may wait for the last records
LOSS_LOG_INTERVAL_S = 60.0
NOT_TRACED_LOG_INTERVAL_S = 3600.0  # how often the log says that a server has tracing disabled

# Names in Java's ``LocalTransactionState``.
_STATE_NAMES = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",
}


class Records(Protocol):
    """Trace records that may be created only when they are read. ``len`` returns their maximum number."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[TraceRecord]: ...


class _BatchRecords:
    """The records of a batch. The thread that sends the records creates them, because creating thousands of records would delay
    the thread that reads answers.
    """

    def __init__(self, size: int, make: Callable[[], Iterable[TraceRecord]]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TraceRecord]:
        records = capture(lambda: list(self._make()))
        if isinstance(records, Failure):
            records.log(logger, "trace records could not be created")
            return iter(())
        return iter(records)


class _UnregisteredSender:
    """A sender that does not register its group at brokers, because brokers send no requests to this group."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        return lambda deadline: None


class TraceProducer(BaseProducer):
    """Sends the trace records of one producer or consumer.

    Args:
        sender: Sends to the brokers of the cluster.
        group: The group that is traced.
        kind: ``PRODUCE`` or ``CONSUME``.
        topic: The trace topic.
    """

    def __init__(
        self, sender: Sender, group: str, kind: str, topic: str, make_timer: Callable[[str], Timer] = Timer
    ) -> None:
        name = f"_INNER_TRACE_PRODUCER-{group[:_MAX_GROUP_CHARACTERS]}-{kind}-{next(_producer_numbers)}"
        self.topic = topic
        self._flush_timer = make_timer(f"{name}-flush")
        self._records: list[Records] = []  # collected and not sent yet
        self._buffered_count = 0  # records that are not stored yet, also those that are being sent
        self._new_count = 0  # records since the last send
        self._lost_count = 0
        self._is_flush_scheduled = False  # whether the timer will send the records
        self._is_finished = False  # whether ``append`` ignores records
        self._records_lock = threading.Lock()
        self._loss_log_limit = RateLimit(LOSS_LOG_INTERVAL_S)
        settings = ProducerSettings(group=name, send_timeout_s=SEND_TIMEOUT_S, auto_create_topics=False, heartbeat_s=0)
        self._flush_timer.start()  # start the thread now: if it cannot start later, ``append`` would fail
        try:
            super().__init__(cast(Sender, _UnregisteredSender(sender)), settings, make_timer=make_timer)
        except BaseException:
            self._flush_timer.close()
            raise
        register_at_exit(self, close_last=True)

    def append(self, records: Records) -> None:
        """Add ``records``, or drop them if too many wait. Never blocks."""
        if not (count := len(records)):
            return
        with self._records_lock:
            if self._is_finished:
                return
            is_full = self._buffered_count + count > MAX_BUFFERED_RECORDS
            if not is_full:
                self._records.append(records)
                self._buffered_count += count
                self._new_count += count
            must_flush = self._new_count >= FLUSH_RECORDS
            must_schedule = not is_full and not self._is_flush_scheduled
            self._is_flush_scheduled = self._is_flush_scheduled or must_schedule
        if is_full:
            self._count_lost(
                count,
                ClosedError(f"{MAX_BUFFERED_RECORDS} records wait, because they are added faster than they are sent"),
            )
        elif must_flush:
            self._flush_timer.call_soon(self._send_records)
        elif must_schedule:
            self._flush_timer.call_later(FLUSH_S, self._send_records)

    def close(self, timeout_s: float | None = None) -> list[Unsent]:
        """Send the collected records and close, within ``timeout_s`` seconds, but at most within the send timeout."""
        deadline = self._deadline(timeout_s).within(SEND_TIMEOUT_S)
        try:
            self._finish(deadline)
        finally:
            unsent = super().close(deadline.remaining())
        return unsent

    def at_exit(self, deadline: Deadline) -> dict[str, RocketMQError]:
        """Send the collected records. Returns no failures: lost traces are not reported on the terminal."""
        deadline = deadline.within(MAX_EXIT_S)
        if self._finish(deadline):
            self._futures.wait_until_empty(deadline)
            self._engine.close(Deadline.after(0), wait_s=0.0)
        return {}

    def _finish(self, deadline: Deadline) -> bool:
        """Accept no more records and send the collected ones. Returns False if the producer was finished before, or in a forked
        process.
        """
        if not self._owner.is_current:
            return False
        with self._records_lock:
            was_finished, self._is_finished = self._is_finished, True
        if not was_finished:
            self._flush_timer.drain(deadline.remaining())  # wait for records that are being sent
            self._send_records(deadline)
            self._flush_timer.close(0)
        return not was_finished

    def _send_records(self, deadline: Deadline | None = None) -> None:
        """Send the collected records. Drops the records that are not sent by ``deadline``. Some records may not be sent in
        time, because a trace message may have to wait for a route, or for room within the limits.
        """
        with self._records_lock:
            records, self._records, self._new_count, self._is_flush_scheduled = self._records, [], 0, False
        for body, keys, count in traces.trace_messages(
            itertools.chain.from_iterable(map(self._create_records, records))
        ):
            on_sent = functools.partial(self._on_sent, count)
            if deadline is not None and deadline.expired:
                on_sent(CallTimeout("there was no time to send the records before the close", topic=self.topic))
                continue
            timeout_s = SEND_TIMEOUT_S if deadline is None else deadline.remaining()
            message = Message(self.topic, body.encode(), keys=keys)
            capture_result = capture(self.send_async, message, NonblockingCallback(on_sent), timeout_s=timeout_s)
            if isinstance(capture_result, Failure):
                on_sent(capture_result.error)

    def _create_records(self, records: Records) -> Sequence[TraceRecord]:
        created_records = tuple(records)
        with self._records_lock:
            self._buffered_count -= len(records) - len(created_records)
        return created_records

    def _on_sent(self, count: int, outcome: Outcome | BaseException) -> None:
        with self._records_lock:
            self._buffered_count -= count
        if isinstance(outcome, BaseException):
            self._count_lost(count, outcome)

    def _count_lost(self, count: int, error: BaseException) -> None:
        with self._records_lock:
            self._lost_count += count
            lost_count, is_log_due = self._lost_count, self._loss_log_limit.due()
        if is_log_due:
            hint = f"Topic {self.topic} needs brokers with traceTopicEnable=true, or must be created. "
            logger.warning(
                "%d trace records of %s are lost so far; the messages themselves are not affected. %sThe last error: %s",
                lost_count, self.settings.group, "" if isinstance(error, ClosedError) else hint, error,
            )  # fmt: skip


class TracedSender:
    """A sender that passes a record of each call to ``append``. A ``TracedSender`` raises the errors of the wrapped sender, and
    blocks as long as the wrapped sender. A ``TracedSender`` equals its wrapped sender, so that both use the objects that a
    process caches for a sender.
    """

    def __init__(
        self,
        sender: Sender,
        append: Callable[[Records], None],
        group: str,
        trace_topic: str,
        wall_ms: Callable[[], int],
    ) -> None:
        self._sender = sender
        self._append = append
        self._group = group
        self._trace_topic = trace_topic
        self._wall_ms = wall_ms
        self._not_traced_log_limit = RateLimit(NOT_TRACED_LOG_INTERVAL_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._sender == (other._sender if isinstance(other, TracedSender) else other))

    def __hash__(self) -> int:
        return hash(self._sender)

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        """Send a request, and record a trace when the request is stored."""
        start_ms = self._wall_ms()
        result = self._sender.send(queue, request, deadline)
        self._trace(lambda: self._records_of_send(queue, request, result, start_ms))
        return result

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        """Send a request without waiting, and record a trace when the request is stored."""
        start_ms = self._wall_ms()

        def traced_done(outcome: SendResult | RocketMQError) -> None:
            if isinstance(outcome, SendResult):
                self._trace(lambda: self._records_of_send(queue, request, outcome, start_ms))
            done(outcome)

        self._sender.send_async(queue, request, deadline, traced_done)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        """Recall a message, and record a trace when the broker has answered."""
        msg_id = self._sender.recall(topic, broker_name, handle, group, deadline)
        traced_message = TracedMessage(topic, msg_id, None, None, traces.DEFAULT_REGION)
        self._trace(lambda: [traces.recall_record(traced_message, self._group, self._wall_ms(), True)])
        return msg_id

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        """Send a decision, and record a trace when the broker has answered."""
        is_confirmed = self._sender.end_transaction(place, decision, deadline)
        traced_message = TracedMessage(place.topic, place.msg_id, None, None, traces.DEFAULT_REGION)
        self._trace(lambda: [self._decision_record(traced_message, place, decision, from_check=False)])
        return is_confirmed

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        """Register the group. Checks of half messages are traced with their answers."""
        return self._sender.join(
            group, heartbeat_s, None if check is None else functools.partial(self._traced_check, check)
        )

    def _traced_check(
        self, check: HalfCheck, message: Any, place: HalfPlace
    ) -> TransactionState | Callable[[], TransactionState]:
        traced_message = TracedMessage.from_properties(place.topic, message.properties)._replace(msg_id=place.msg_id)
        decision = check(message, place)
        if isinstance(decision, TransactionState):
            self._trace(lambda: [self._decision_record(traced_message, place, decision, from_check=True)])
            return decision

        def traced_decision() -> TransactionState:
            state = decision()
            self._trace(lambda: [self._decision_record(traced_message, place, state, from_check=True)])
            return state

        return traced_decision

    def _decision_record(
        self, traced_message: TracedMessage, place: HalfPlace, state: TransactionState, from_check: bool
    ) -> TraceRecord:
        now_ms = self._wall_ms()
        return traces.transaction_end_record(
            traced_message, self._group, now_ms, place.transaction_id, _STATE_NAMES[state], from_check
        )

    def _records_of_send(self, queue: MessageQueue, request: SendRequest, result: SendResult, start_ms: int) -> Records:
        if queue.topic == self._trace_topic:
            return ()
        if result.region_id is None:
            if self._not_traced_log_limit.due():
                logger.warning(
                    "sends of group %s to %s are not traced, because the server has traceOn=false. Set traceOn to true in "
                    "rmq-proxy.json of a Proxy (default: false), or in broker.conf of a broker",
                    self._group, queue,
                )  # fmt: skip
            return ()
        make = functools.partial(self._publish_records, queue, request, result, start_ms, self._wall_ms() - start_ms)
        count = (result.offset_msg_id or "").count(",") + 1
        return (
            _BatchRecords(max(count, len(request.body) // BYTES_PER_RECORD), make) if request.batch else tuple(make())
        )

    def _publish_records(
        self, queue: MessageQueue, request: SendRequest, result: SendResult, start_ms: int, cost_ms: int
    ) -> Iterable[TraceRecord]:
        offset_ids = (result.offset_msg_id or "").split(",")
        host = OffsetMessageId.parse(offset_ids[0]).host if offset_ids[0] else ""
        is_ok = result.status is SendStatus.SEND_OK
        for i, (properties, size) in enumerate(_messages_of(request)):
            traced_message = TracedMessage.from_properties(queue.topic, properties, result.region_id)
            offset_id = offset_ids[min(i, len(offset_ids) - 1)] or None
            acknowledgement = Acknowledgement(size, MessageKind.of(properties), host, offset_id, is_ok)
            yield traces.publish_record(traced_message, self._group, start_ms, cost_ms, acknowledgement)

    def _trace(self, make_records: Callable[[], Records]) -> None:
        """Append records. An error is logged and does not fail the send."""
        capture_result = capture(lambda: self._append(make_records()))
        if isinstance(capture_result, Failure):
            capture_result.log(logger, "a trace record could not be created")


def _messages_of(request: SendRequest) -> Iterable[tuple[Mapping[str, str], int]]:
    """The properties and body size of each message of a request."""
    if not request.batch:
        yield decode_properties(request.properties), len(request.body)
        return
    for message in messages_in_batch(request):
        if Property.UNIQ_KEY in message.properties:
            yield message.properties, len(message.body)
