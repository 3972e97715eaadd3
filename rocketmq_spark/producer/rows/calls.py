"""One call of ``send_arrow`` or ``send_many``: sends the rows in portions, and collects the outcome of each row.

The calling thread encodes the rows, submits requests while they are within the limits, and waits for their outcomes. A call has
the limits of a task of the sink: a limit for each broker, which adapts, and ``totalBatchMaxBytes``. The producer's own limits
apply, too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar.encode.batch_tags import Rows
from rocketmq_spark.columnar.encode.ids import RecordingIds
from rocketmq_spark.columnar.encode.properties import TIMER_COLUMNS, BadRows
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.options import Options
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.delays import BrokerTimers, no_timers_error
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.routing import Destinations, SpoolFallback
from rocketmq_spark.producer.rows.routing import QueueList
from rocketmq_spark.producer.rows.sender import LOOKUP_STEPS, LOST_SEND_S, RowSender, RowTools
from rocketmq_spark.producer.rows.sent import OutcomeCollector, SentRows
from rocketmq_spark.producer.send_queue import SendWindow
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT_BYTES = 32 << 20
# The approximate memory that Python's objects need for a request, in addition to its bytes.
REQUEST_OVERHEAD_BYTES = 1 << 10


class BadRowsOfCall(BadRows):
    """The bad rows of a call. No row of the call was sent."""

    unsent_text, numbering_text = "this call", "Rows are counted from 0 within the call"
    is_of_sink = False


class BadMessagesOfCall(BadRowsOfCall):
    noun, numbering_text = "message", "Messages are counted from 0 within the call"


class BadRowsOfReader(BadRows):
    """The bad rows of one batch of a reader. Earlier batches may have been sent."""

    numbering_text = "Rows are counted from 0 within the call. The Arrow batches before theirs were sent"
    is_of_sink = False


class BadMessagesOfIterator(BadRows):
    noun, unsent_text = "message", "their portion"
    numbering_text = "Messages are counted from 0 within the call. The portions before theirs were sent"
    is_of_sink = False


class Portion(NamedTuple):
    """Rows that are encoded together, and the names of their columns by role."""

    batch: pa.RecordBatch
    columns: Mapping[str, str]


class CallTools(NamedTuple):
    """What a call needs from its producer. ``is_closing`` returns whether the close of the producer has begun."""

    row_tools: RowTools
    destinations: Destinations
    timers: BrokerTimers
    spool_fallback: SpoolFallback | None
    is_closing: Callable[[], bool]


class RowCall:
    """One call that sends rows; implements ``sender.RowOwner``. ``make_bad_rows`` takes the number of a portion's first row, and
    returns the collector of the portion's bad rows.
    """

    def __init__(self, tools: CallTools, options: Options, make_bad_rows: Callable[[int], BadRows]) -> None:
        self._tools, self._make_bad_rows, self._options = tools, make_bad_rows, options
        self._row_tools = tools.row_tools._replace(options=options)
        self._engine = tools.row_tools.engine
        self._ids = RecordingIds(os.urandom(8), self._engine.timer.wall_ms)
        self._window = SendWindow(_window_settings(tools.row_tools.settings, options))
        self._senders: dict[tuple[tuple[str, str], ...], RowSender] = {}
        self._failed_queues: dict[Hashable, RocketMQError] = {}  # shared by all requests of the call
        self._queues: dict[str, QueueList] = {}  # by topic; unchanged during the call, so that a key keeps its queue
        self._checked_topics: set[tuple[str, bool]] = set()  # with whether the rows had columns of delays
        self._timer_columns: list[str] = []  # columns of delays in the current portion
        # ``with`` enters this lock, not the condition: Ctrl-C can interrupt the entry to a condition halfway, but not the entry
        # to a lock.
        self._completions_lock = threading.RLock()
        self._completions_changed = threading.Condition(self._completions_lock)
        self._completions: deque[tuple[Rows, SendCompletion]] = deque()  # not processed yet
        self._in_flight: set[OutgoingSend] = set()  # submitted, and their completions are not processed
        self._outcomes = OutcomeCollector()

    def run(self, groups: Iterable[Sequence[Portion]]) -> SentRows:
        """Send everything. All portions of a group are checked before any of them is sent."""
        try:
            for group in groups:
                if self._tools.is_closing():  # rows that were read before the close need an outcome
                    self._fail_rows(sum(len(portion.batch) for portion in group))
                else:
                    self._send(group)
            while self._in_flight:
                self._process_completion()
        except Exception as e:  # no request may be in flight after the call ends
            while self._in_flight:
                self._process_completion()
            if self._outcomes.row_count:
                e.add_note(f"Before that: {self._outcomes.result()!r}")
            raise
        result = self._outcomes.result()
        if count := len(result.failed):
            logger.warning("%d of %d rows were not sent, or have no acknowledgement", count, len(result))
        return result

    def check_topic(self, topic: str) -> None:
        """Check a topic when its first rows are about to be sent. Later rows of the call need no second check."""
        key = topic, bool(self._timer_columns)
        if key in self._checked_topics:
            return
        encoding.check_topic(topic, self._tools.row_tools.settings.scope)
        deadline = Deadline.after(self._options.send_timeout)
        queues = self._tools.destinations.queues_or_empty(topic, deadline)
        if self._timer_columns and (
            brokers_without_timers := self._tools.timers.brokers_without_timers(
                topic, {q.broker_name for q in queues}, deadline
            )
        ):
            raise no_timers_error(
                f"column {' and '.join(map(repr, self._timer_columns))}", brokers_without_timers, topic
            )
        self._checked_topics.add(key)

    def is_transient(self, error: RocketMQError) -> bool:
        """Whether the error is temporary, and the producer has a spool for sends that fail with a temporary error."""
        return self._tools.spool_fallback is not None and self._tools.spool_fallback.is_transient(error)

    def submit(self, outgoing: OutgoingSend) -> None:
        """Submit a request to the engine. While the limits are reached, waits for completions of this call and processes them."""
        size, ordered = outgoing.size, outgoing.ordered_queue is not None
        self._window.broker_count = len(self._engine.routes.brokers())
        while self._completions or (self._in_flight and not self._has_room(size, ordered)):
            self._process_completion()
        self._in_flight.add(outgoing)
        self._window.add(size)
        try:
            self._engine.submit(outgoing)
        except RocketMQError as e:  # for example if other callers left no room within the limits until the timeout
            if ordered:
                self._failed_queues.setdefault(outgoing.ordered_queue, e)
            outgoing.done(SendCompletion(outgoing, e))

    def on_completion(self, rows: Rows, completion: SendCompletion) -> None:
        """Queue a completion, which the calling thread processes."""
        with self._completions_lock:
            self._completions.append((rows, completion))
            self._completions_changed.notify_all()

    def _send(self, group: Sequence[Portion]) -> None:
        first_row, checked_portions = self._outcomes.row_count, []
        for portion in group:
            self._timer_columns = [portion.columns[name] for name in TIMER_COLUMNS if name in portion.columns]
            checked_portions.append(
                self._sender_of(portion).check(portion.batch, self._make_bad_rows(first_row), first_row)
            )
            first_row += len(portion.batch)
        for portion, rows_and_plan in zip(group, checked_portions, strict=True):
            if self._tools.is_closing():
                self._fail_rows(len(portion.batch))
            else:
                sender, first_row = self._sender_of(portion), self._outcomes.row_count
                encoded = sender.join(portion.batch, *rows_and_plan)
                self._outcomes.add_rows(self._ids.last_ids)
                sender.send(portion.batch, *rows_and_plan, encoded, first_row)

    def _sender_of(self, portion: Portion) -> RowSender:
        key = tuple(portion.columns.items())
        if key not in self._senders:
            self._senders[key] = RowSender(
                self._row_tools, portion.columns, self._ids, self, self._failed_queues, self._queues
            )
        return self._senders[key]

    def _has_room(self, size: int, ordered: bool) -> bool:
        return self._window.has_room(size, ordered) and self._engine.has_room(size, ordered)

    def _process_completion(self) -> None:
        """Wait for one completion, and process it."""
        rows, completion = self._next_completion()
        self._in_flight.discard(completion.outgoing)
        size, outcome = completion.outgoing.size, completion.outcome
        self._window.remove(size)
        if isinstance(outcome, SendResult):
            self._window.record_acknowledged(
                size, completion.attempts == 1 and outcome.status is not SendStatus.SPOOLED
            )
        self._outcomes.add_outcome(rows, outcome)

    def _next_completion(self) -> tuple[Rows, SendCompletion]:
        """Wait for the next completion. A completion arrives within the send timeout, unless requests wait for requests of other
        callers, or an error in this package has lost a request. Raises ``SendFailed`` for a lost request.
        """
        timeout_count = 1 if self._engine.ambiguity_resolver is None else LOOKUP_STEPS
        patience_s = timeout_count * self._options.send_timeout + LOST_SEND_S
        deadline = Deadline.after(patience_s)
        with self._completions_lock:
            while not self._completions:
                if deadline.expired:
                    if not self._engine.waits_for_others(self._in_flight):
                        break
                    deadline = Deadline.after(patience_s)
                self._engine.timer.wait_notified(self._completions_changed, deadline.remaining())
            if self._completions:
                return self._completions.popleft()
        lost_count = len(self._in_flight)
        self._in_flight.clear()
        raise SendFailed(
            f"{lost_count} batches have had no outcome for much longer than 'sendTimeout' allows",
            remedy="This is a bug of rocketmq-spark: please report it with the log",
        )

    def _fail_rows(self, row_count: int) -> None:
        error = ClosedError("the producer was closed before the row was sent")
        self._ids.fill(np.empty((row_count, RecordingIds.width), np.uint8))
        self._outcomes.add_outcome(np.arange(self._outcomes.row_count, self._outcomes.row_count + row_count), error)
        self._outcomes.add_rows(self._ids.last_ids)


def _window_settings(settings: ProducerSettings, options: Options) -> ProducerSettings:
    """The settings of a call's send window: the limits of a task of the sink."""
    total = options.total_batch_max_bytes or MAX_IN_FLIGHT_BYTES
    return dataclasses.replace(
        settings,
        max_in_flight=None,
        max_in_flight_per_broker=None,
        max_async_messages=max(1, total // REQUEST_OVERHEAD_BYTES),
        max_async_bytes=total,
    )
