"""One call of ``send_arrow`` or ``send_many``: rows in, portion by portion, and the end of each row out.

A driver: the calling thread encodes, hands over while there is room, and waits for the ends. What a call has out is bounded as
a task of the sink bounds it: at each broker adaptively, and by ``totalBatchMaxBytes``; the producer's own bounds hold, too.
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
from rocketmq_spark.columnar.encode.batch import KeptIds, Rows
from rocketmq_spark.columnar.encode.properties import TIMERS, BadRows
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.options import Options
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.destination import Destinations, Later
from rocketmq_spark.producer.in_flight import InFlight
from rocketmq_spark.producer.long_delays import Timers, no_timers
from rocketmq_spark.producer.outgoing import Ended, Outgoing
from rocketmq_spark.producer.rows.routing import QueueList
from rocketmq_spark.producer.rows.sender import LAST_RESORT_S, LOOKS, RowSender, RowTools
from rocketmq_spark.producer.rows.sent import Ends, SentRows
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

TOTAL_BYTES = 32 << 20
# What a request takes beside its bytes, roughly: Python's objects.
REQUEST_BYTES = 1 << 10


class RowsOfCall(BadRows):
    """Those of a call, of which nothing was sent."""

    of_what, counted = "this call", "Rows are counted from 0 within the call"
    of_sink = False


class MessagesOfCall(RowsOfCall):
    noun, counted = "message", "Messages are counted from 0 within the call"


class RowsOfReader(BadRows):
    """Those of one batch of a reader: what came before may be sent."""

    counted = "Rows are counted from 0 within the call. The Arrow batches before theirs were sent"
    of_sink = False


class MessagesOfIterator(BadRows):
    noun, of_what = "message", "their portion"
    counted = "Messages are counted from 0 within the call. The portions before theirs were sent"
    of_sink = False


class Portion(NamedTuple):
    """Rows that are encoded together; their columns by role."""

    batch: pa.RecordBatch
    columns: Mapping[str, str]


class CallTools(NamedTuple):
    """What a producer gives its calls. ``later`` is that of its spool; ``closing`` whether its close has begun."""

    rows: RowTools
    destinations: Destinations
    timers: Timers
    later: Later | None
    closing: Callable[[], bool]


class RowCall:
    """Implements ``sender.RowOwner``. ``bad_rows`` makes what collects the bad rows of a portion, from its first row's number."""

    def __init__(self, tools: CallTools, options: Options, bad_rows: Callable[[int], BadRows]) -> None:
        self._tools, self._bad_rows, self._options = tools, bad_rows, options
        self._rows = tools.rows._replace(options=options)
        self._engine = tools.rows.engine
        self._ids = KeptIds(os.urandom(8), self._engine.timer.wall_ms)
        self._window = InFlight(_bounds(tools.rows.settings, options))
        self._senders: dict[tuple[tuple[str, str], ...], RowSender] = {}
        self._shut: dict[Hashable, RocketMQError] = {}
        self._queues: dict[str, QueueList] = {}
        self._seen: set[tuple[str, bool]] = set()
        self._timed: list[str] = []
        self._changing = threading.RLock()  # in ``with`` itself, for Ctrl-C (as in consumer.polls)
        self._changed = threading.Condition(self._changing)
        self._landed: deque[tuple[Rows, Ended]] = deque()
        self._out: set[Outgoing] = set()
        self._ends = Ends()

    def run(self, groups: Iterable[Sequence[Portion]]) -> SentRows:
        """Send everything. All portions of a group are checked before any of them is sent."""
        try:
            for group in groups:
                if self._tools.closing():  # what was read before it ends has an outcome, too
                    self._give_up(sum(len(portion.batch) for portion in group))
                else:
                    self._send(group)
            while self._out:
                self._settle()
        except Exception as e:  # nothing of the call goes on after it
            while self._out:
                self._settle()
            if self._ends.rows:
                e.add_note(f"Before that: {self._ends.result()!r}")
            raise
        sent = self._ends.result()
        if count := len(sent.failed):
            logger.warning("%d of %d rows were not sent, or have no acknowledgement", count, len(sent))
        return sent

    def check_topic(self, topic: str) -> None:
        """Once for each topic of the call."""
        key = topic, bool(self._timed)
        if key in self._seen:
            return
        encoding.check_topic(topic, self._tools.rows.settings.scope)
        deadline = Deadline.after(self._options.send_timeout)
        queues = self._tools.destinations.at_hand(topic, deadline)
        if self._timed and (without := self._tools.timers.missing(topic, {q.broker_name for q in queues}, deadline)):
            raise no_timers(f"column {' and '.join(map(repr, self._timed))}", without, topic)
        self._seen.add(key)

    def may_pass(self, error: RocketMQError) -> bool:
        """Whether a spool keeps what fails for it."""
        return self._tools.later is not None and self._tools.later.may_pass(error)

    def submit(self, outgoing: Outgoing) -> None:
        """Hand over what is noted when it ends; while there is no room for it, wait for ends of this call."""
        size, ordered = outgoing.size, outgoing.ordered_queue is not None
        self._window.brokers = len(self._engine.topics.brokers())
        while self._landed or (self._out and not self._has_room(size, ordered)):
            self._settle()
        self._out.add(outgoing)
        self._window.add(size)
        try:
            self._engine.submit(outgoing)
        except RocketMQError as e:  # others have filled the room during the whole send timeout
            if ordered:
                self._shut.setdefault(outgoing.ordered_queue, e)
            outgoing.done(Ended(outgoing, e))

    def note(self, rows: Rows, ended: Ended) -> None:
        """Count it later, on the calling thread."""
        with self._changing:
            self._landed.append((rows, ended))
            self._changed.notify_all()

    def _send(self, group: Sequence[Portion]) -> None:
        first, checked = self._ends.rows, []
        for portion in group:
            self._timed = [portion.columns[name] for name in TIMERS if name in portion.columns]
            checked.append(self._sender_of(portion).check(portion.batch, self._bad_rows(first), first))
            first += len(portion.batch)
        for portion, parts in zip(group, checked, strict=True):
            if self._tools.closing():
                self._give_up(len(portion.batch))
            else:
                sender, first = self._sender_of(portion), self._ends.rows
                encoded = sender.join(portion.batch, *parts)
                self._ends.begin(self._ids.last)
                sender.send(portion.batch, *parts, encoded, first)

    def _sender_of(self, portion: Portion) -> RowSender:
        key = tuple(portion.columns.items())
        if key not in self._senders:
            self._senders[key] = RowSender(self._rows, portion.columns, self._ids, self, self._shut, self._queues)
        return self._senders[key]

    def _has_room(self, size: int, ordered: bool) -> bool:
        return self._window.has_room(size, ordered) and self._engine.has_room(size, ordered)

    def _settle(self) -> None:
        """Wait for the end of one request."""
        rows, ended = self._end()
        self._out.discard(ended.outgoing)
        size, outcome = ended.outgoing.size, ended.outcome
        self._window.remove(size)
        if isinstance(outcome, SendResult):
            self._window.answered(size, ended.attempts == 1 and outcome.status is not SendStatus.SPOOLED)
        self._ends.add(rows, outcome)

    def _end(self) -> tuple[Rows, Ended]:
        """The next one. Of what is out something ends within the send timeout, unless it waits behind what others have sent,
        which may take longer, or was forgotten.
        """
        looks = 1 if self._engine.confirming is None else LOOKS
        patience_s = looks * self._options.send_timeout + LAST_RESORT_S
        until = Deadline.after(patience_s)
        with self._changing:
            while not self._landed:
                if until.expired:
                    if not self._engine.behind_others(self._out):
                        break
                    until = Deadline.after(patience_s)
                self._engine.timer.hold(self._changed, until.remaining())
            if self._landed:
                return self._landed.popleft()
        forgotten = len(self._out)
        self._out.clear()
        raise SendFailed(
            f"{forgotten} batches have had no outcome for much longer than 'sendTimeout' allows",
            remedy="This is a bug of rocketmq-spark: please report it with the log",
        )

    def _give_up(self, rows: int) -> None:
        error = ClosedError("the producer was closed before the row was sent")
        self._ids.fill(np.empty((rows, KeptIds.width), np.uint8))
        self._ends.add(np.arange(self._ends.rows, self._ends.rows + rows), error)
        self._ends.begin(self._ids.last)


def _bounds(settings: ProducerSettings, options: Options) -> ProducerSettings:
    """How a call bounds what it has out: as a task of the sink."""
    total = options.total_batch_max_bytes or TOTAL_BYTES
    return dataclasses.replace(
        settings,
        max_in_flight=None,
        max_in_flight_per_broker=None,
        max_async_messages=max(1, total // REQUEST_BYTES),
        max_async_bytes=total,
    )
