"""Automatic batches of producers: one accumulator per name, its timer, and one future per message.

Mirrors ``ProduceAccumulator``. Producers with the same name share an accumulator. In Java (``MQClientManager``), producers with
the same client id share one. Java polls with two guard threads; here a timer sends the oldest batch when it is due. A
synchronous sender also sends its own batch if the batch is overdue, so that no sender depends on the timer's thread. Java's
accumulator is closed when the first of its producers leaves. This accumulator is closed when its last producer leaves. Whenever
a producer leaves, all waiting batches are sent.

A plain message has no queue, delay or priority, and its topic does not store a batch as one message. Such a message waits
unencoded in its promise, and is encoded with the other messages when its batch is sent. A plain message gets the same checks as
in ``encoding.prepare``. All other messages go to ``encoding.prepare``, which raises an error for a message that every broker
would reject.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from rocketmq_spark.base import codes, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.errors import CallTimeout, ClosedError, MessageIllegal, MessageRefused, RocketMQError, SendFailed
from rocketmq_spark.model import Message, MessageQueue, SendResult
from rocketmq_spark.model.send import BatchStorage, MessageEncoder
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.accumulator import Accumulator, BatchEntry, BatchKey, MessageBatch, PlainEntry, has_key
from rocketmq_spark.producer.encoding import How, PreparedMessage, check_topic
from rocketmq_spark.producer.futures import FutureRegistry, Promise
from rocketmq_spark.producer.outgoing import Callback, Outcome, split_result
from rocketmq_spark.producer.routing import RouteCache
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import encode_properties

logger = logging.getLogger(__name__)

# A synchronous sender waits this much longer than its batch may take, so that it raises the error of the batch, which is more
# specific than a timeout.
_BATCH_ERROR_GRACE_S = 1.0
_UNKNOWN_STORAGE = BatchStorage(as_one_message=True)
# The maximum number of cached templates, one for each combination of topic and tag.
_MAX_TEMPLATES = 1024


class PlainTemplate(NamedTuple):
    """The common part of the plain messages of a topic and tag: the text of their common properties, and the number of
    bytes that a message without a body adds to a batch (``empty_item_bytes``). Further properties of a message may have at most
    ``free_properties_bytes`` bytes.
    """

    key: BatchKey
    properties_text: str
    empty_item_bytes: int
    free_properties_bytes: int


_SAMPLE_ID = "0" * 32
_BLANK, _KEYS_START, _ID_START = codes.KEY_SEPARATOR, f"{Property.KEYS}\x01", f"{Property.UNIQ_KEY}\x01"
_ONLY_STR = {str}  # ``encoding.prepare`` handles messages with other types, such as None
_RESERVED_PROPERTIES, _TRANSIENT_PREFIX = codes.RESERVED_PROPERTIES, codes.TRANSIENT_PROPERTY_PREFIX


def plain_template(
    topic: Any, tag: Any, waits_for_store: Any, encoder: MessageEncoder, scope: Scope | None = None
) -> PlainTemplate | None:
    """Return the template of a topic and tag. None if messages of this topic are sent separately, or if every broker would reject
    them.
    """
    if not isinstance(topic, str) or not isinstance(tag, str | None) or not isinstance(waits_for_store, bool):
        return None
    if topic.startswith(codes.RETRY_PREFIX):
        return None
    try:
        check_topic(topic, scope)
        text = encode_properties({Property.TAGS: tag or None, Property.WAIT: "true" if waits_for_store else "false"})
        all_properties = encode_properties({Property.UNIQ_KEY: _SAMPLE_ID}) + text
        empty_item_bytes = len(encoder.encode_item(topic, b"", all_properties, 0, 0))
    except MessageRefused:
        return None
    free_properties_bytes = codes.SINGLE_MAX_PROPERTIES_BYTES - len(all_properties.encode())
    return (
        None
        if free_properties_bytes < 0
        else PlainTemplate(
            BatchKey(topic, None, waits_for_store, tag or None, False), text, empty_item_bytes, free_properties_bytes
        )
    )


def encode_plain_properties(message: Message, template: PlainTemplate) -> tuple[str, int] | None:
    """Return the text of all properties except the id, and the number of bytes by which it is longer than the template's text.
    None if the message is not plain.
    """
    flag, keys, properties = message.flag, message.keys, message.properties
    if message.priority is not None or type(flag) is not int or not -(2**31) <= flag < 2**31:
        return None
    text = ""
    try:
        if keys:
            words = _BLANK.join(keys)
            if words.count(_BLANK) >= len(keys):
                return None
            text = f"{_KEYS_START}{words}\x02"
        if properties:
            values = properties.values()
            if (
                not ({*map(type, properties), *map(type, values)} <= _ONLY_STR)
                or "" in properties
                or "" in values
                or not _RESERVED_PROPERTIES.isdisjoint(properties)
            ):
                return None
            text += "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
        size = len(text) if text.isascii() else len(text.encode())
    except (TypeError, AttributeError, UnicodeEncodeError):
        return None
    property_count = bool(keys) + (len(properties) if properties else 0)
    is_plain = text.count("\x01") == property_count == text.count("\x02") and _TRANSIENT_PREFIX not in text
    return (text + template.properties_text, size) if is_plain and size <= template.free_properties_bytes else None


def encode_batch_messages(
    batch: MessageBatch, create_ids: Callable[[int], Sequence[str]], encoder: MessageEncoder, now_ms: int
) -> None:
    """Create the ids of a batch's plain messages, and encode the messages, when the batch is about to be sent."""
    if not batch.has_plain_messages:
        return
    topic, encode_item = batch.key.topic, encoder.encode_item
    items: list[Sized] = []
    for entry, msg_id in zip(batch.entries, create_ids(len(batch.entries)), strict=True):
        if isinstance(entry, BatchEntry):
            items.append(entry.item)
            continue
        entry.msg_id = msg_id
        items.append(
            encode_item(topic, entry.body, f"{entry.properties_text}{_ID_START}{msg_id}\x02", entry.flag, now_ms)
        )
        entry.body, entry.properties_text = b"", ""  # frees the message, even if the user keeps the future
    batch.encoded_items, batch.has_plain_messages = items, False


class BatchOwner(Protocol):
    """The methods of a producer that its batches call."""

    def enqueue_batch(self, batch: MessageBatch, done: Callable[[Outcome], None]) -> bool:
        """Add ``batch`` at the end of its ordered queue, without blocking. Returns False if the producer is closed; otherwise
        ``done`` is called once.
        """

    def dispatch_ready(self, on_other_thread: bool = False) -> None:
        """Send enqueued batches. With ``on_other_thread``, another thread sends them, because the calling thread may be one
        that reads answers and must not block.
        """


class Batcher:
    """The accumulator of one name, with its timer. A lock guards the accumulator, and is held while due batches are enqueued."""

    def __init__(self, timer: Timer) -> None:
        self.accumulator = Accumulator()
        self.producer_count = 0
        self._next_call_ms: int | None = None  # time of the timer's next call
        self._closed = False
        self._timer = timer
        self._lock = threading.Lock()

    def join(self, settings: ProducerSettings) -> None:
        """Add a producer. Limits in the producer's ``settings`` apply to all producers of the accumulator."""
        with self._lock:
            self.producer_count += 1
            self.accumulator.limits = settings.batch_limits(self.accumulator.limits)

    def add(self, key: BatchKey, entry: BatchEntry, owner: BatchOwner) -> MessageBatch | None:
        """Return the batch that contains the message, or None if the message must be sent directly. The batch may already be in
        flight.

        If an error is raised after the message joined a batch, the message stays in the batch. If the message joined no batch,
        its promise is withdrawn.
        """
        now_ms = self._timer.now_ms()
        batch = None
        try:
            with self._lock:
                batch = None if self._closed else self.accumulator.add(key, entry, owner, now_ms)
                has_ready_batch = self.accumulator.has_ready_batch(now_ms)
                needs_call = batch is not None and (len(batch.entries) == 1 or self._next_call_ms is None)
                call_s = self._seconds_to_next_call(now_ms) if needs_call else None
        finally:
            if batch is None:
                entry.promise.registry.discard()
        if call_s is not None:
            self._schedule_call(call_s)
        if has_ready_batch:
            self.flush()
        return batch

    def add_plain_message(
        self, key: BatchKey, entry: PlainEntry, body_bytes: int, added_bytes: int, owner: BatchOwner
    ) -> bool:
        """Add a plain message. Returns False if the message must be sent directly. Errors have the same effect as in ``add``."""
        now_ms = self._timer.now_ms()
        batch = call_s = None
        has_ready_batch = False
        try:
            with self._lock:
                if not self._closed:
                    batch = self.accumulator.add_plain_message(key, entry, body_bytes, added_bytes, owner, now_ms)
                if batch is not None:
                    has_ready_batch = bool(self.accumulator.closed_batches) or batch.due_ms <= now_ms
                    if len(batch.entries) == 1 or self._next_call_ms is None:
                        call_s = self._seconds_to_next_call(now_ms)
        finally:
            if batch is None:
                entry.promise.registry.discard()
        if call_s is not None:
            self._schedule_call(call_s)
        if has_ready_batch:
            self.flush()
        return batch is not None

    def wall_ms(self) -> int:
        return self._timer.wall_ms()

    def flush(self) -> None:
        """Send the batches that are due."""
        for owner in self._enqueue_due():
            owner.dispatch_ready()

    def _enqueue_due(self) -> Iterable[BatchOwner]:
        """Add due batches to the queues of their producers. Returns these producers; the caller must call ``dispatch_ready`` of
        each producer.
        """
        owners: dict[int, BatchOwner] = {}
        rejected_completions = []
        now_ms = self._timer.now_ms()
        with self._lock:  # held until all batches are enqueued, so that no batch overtakes another
            for batch in self.accumulator.take_ready(now_ms):
                complete = self._completion_of(batch)
                if batch.owner.enqueue_batch(batch, complete):
                    owners[id(batch.owner)] = batch.owner
                else:
                    rejected_completions.append(complete)
        for complete in rejected_completions:
            complete(ClosedError("not sent, because the producer that started the message's batch was closed"))
        return owners.values()

    def wait(self, batch: MessageBatch, future: Future[SendResult], seconds: float) -> bool:
        """Wait up to ``seconds`` after the batch is due. Returns whether ``future`` is set.

        When the batch is due, the calling thread sends it, unless another thread has sent it.
        """
        if not self._timer.wait(future, max(0, batch.due_ms - self._timer.now_ms()) / 1000):
            self.flush()
        return self._timer.wait(future, seconds)

    def send_all(self) -> None:
        """Send all waiting batches."""
        with self._lock:
            self.accumulator.close_all()
        self.flush()

    def leave(self) -> None:
        """Remove a producer, and send all waiting batches."""
        try:
            self.send_all()
        finally:
            with self._lock:
                self.producer_count -= 1

    def close(self) -> None:
        """Accept no more messages, and fail those added after the last producer left."""
        with self._lock:
            self._closed = True
        self.send_all()
        self._timer.close()

    def _on_timer(self) -> None:
        """Enqueue the due batches, and let their producers send them. The timer calls this method."""
        with self._lock:
            self._next_call_ms = None
        try:
            self.flush()
        finally:
            with self._lock:
                call_s = self._seconds_to_next_call(self._timer.now_ms())
            if call_s is not None:
                self._schedule_call(call_s)

    def _schedule_call(self, seconds: float) -> None:
        try:
            self._timer.call_later(seconds, self._on_timer)
        except BaseException:  # no thread can start, or Ctrl-C: the next message schedules the call again
            with self._lock:
                self._next_call_ms = None
            raise

    def _seconds_to_next_call(self, now_ms: int) -> float | None:
        """Return the seconds until the timer must call ``_on_timer``. Returns None if no batch is open, or if a call that is
        early enough is scheduled already. The caller holds the lock, and schedules the call after it has released the lock.
        """
        due_ms, call_ms = self.accumulator.due_ms, self._next_call_ms
        if due_ms is None or (call_ms is not None and call_ms <= due_ms):
            return None
        self._next_call_ms = due_ms
        return max(0, due_ms - now_ms) / 1000

    def _completion_of(self, batch: MessageBatch) -> Callable[[Outcome], None]:
        def done(outcome: Outcome) -> None:
            must_split = _may_split(outcome, batch)
            with self._lock:
                (self.accumulator.split if must_split else self.accumulator.release)(batch)
            if must_split:
                for owner in self._enqueue_due():
                    owner.dispatch_ready(on_other_thread=True)
                return
            outcomes, promises = (
                _outcomes_by_message(outcome, batch.entries),
                [entry.promise for entry in batch.entries],
            )
            for registry, promises_and_outcomes in _group_by_registry(promises, outcomes).items():
                capture_result = capture(registry.resolve, *promises_and_outcomes)
                if isinstance(capture_result, Failure):  # an error at one producer must not affect other producers
                    capture_result.log(logger, "results could not be set")

        return done


class BatchingClient:
    """Adds the messages of one producer to an accumulator. ``owner`` sends the batches that this producer starts, even if other
    producers add messages to these batches.
    """

    def __init__(
        self,
        batcher: Batcher,
        owner: BatchOwner,
        futures: FutureRegistry,
        routes: RouteCache,
        settings: ProducerSettings,
        encoder: MessageEncoder,
    ) -> None:
        self.batcher = batcher
        self._routes = routes
        self._owner = owner
        self._futures = futures
        self._encoder, self._scope = encoder, settings.scope
        self._send_timeout_s = settings.send_timeout_s
        # If a Proxy chooses queues, messages with different tags share a batch. With a batch for each tag, the messages of a
        # group could get out of order. Each message keeps its own tag.
        self._mixes_tags = settings.features.queue_choice_problem is not None
        self._max_body_bytes = settings.max_message_size
        self._templates: dict[tuple[str, str | None, bool], PlainTemplate] = {}

    def is_batchable(self, prepared: PreparedMessage, how: How) -> bool:
        """Whether the message may join a batch (``DefaultMQProducer.canBatch``). A message with a priority must be sent alone.
        A message without a key for a compaction topic must be sent alone, too: the broker rejects such a message, but would
        drop it from a batch without an error.
        """
        message = prepared.message
        must_be_alone = prepared.delayed or message.priority is not None or message.topic.startswith(codes.RETRY_PREFIX)
        if how.timeout_s is not None or must_be_alone:
            return False
        # The topic's ``BatchStorage`` is fetched here, because the thread that sends the batch must not wait for an answer.
        if message.topic not in self._routes.storage:
            self._routes.fetch_storage(message.topic, Deadline.after(self._send_timeout_s))
        return has_key(message.keys) or not self._routes.is_compaction_topic(message.topic)

    def try_add_plain_message(self, message: Message, callback: Callback | None) -> Promise | None:
        """Add a plain message to a batch and return its future. Returns None if the message is wrong or not plain. The caller
        then passes the message to ``encoding.prepare``, which reports what is wrong, and to ``add``.
        """
        if not isinstance(message, Message):
            return None  # type: ignore[unreachable]  # ``encoding.prepare`` reports it
        body, topic, tag, waits_for_store = message.body, message.topic, message.tags, message.wait_store_ok
        if self._mixes_tags:
            return None
        try:
            # If no broker has answered, ``storage`` is None, and the topic counts as an ordinary topic.
            storage = self._routes.storage.get(topic, _UNKNOWN_STORAGE)
            if storage is not None and (storage.as_one_message or storage.is_compacted):
                return None
            template = self._templates.get((topic, tag, waits_for_store)) or self._template(topic, tag, waits_for_store)
        except TypeError:  # a topic or tag that is not a str
            return None
        if template is None or type(body) is not bytes or not 0 < len(body) <= self._max_body_bytes:
            return None
        text, size = template.properties_text, template.empty_item_bytes + len(body)
        flag = message.flag
        if message.keys or message.properties or flag or type(flag) is not int or message.priority is not None:
            encoded = encode_plain_properties(message, template)
            if encoded is None:
                return None
            text, added_bytes = encoded
            size += added_bytes
        promise = self._futures.create(callback)
        promise.body, promise.properties_text, promise.flag = body, text, flag
        return promise if self.batcher.add_plain_message(template.key, promise, len(body), size, self._owner) else None

    def _template(self, topic: str, tag: str | None, waits_for_store: bool) -> PlainTemplate | None:
        if (template := plain_template(topic, tag, waits_for_store, self._encoder, self._scope)) is not None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[topic, tag, waits_for_store] = template
        return template

    def add(
        self,
        prepared: PreparedMessage,
        queue: MessageQueue | None,
        sender_waits: bool,
        callback: Callback | None = None,
    ) -> tuple[Promise, MessageBatch | None]:
        """Return the future, and the message's batch. The batch is None if the message must be sent directly."""
        message = prepared.message
        wait_store_ok_and_tag = (True, None) if self._mixes_tags else (message.wait_store_ok, message.tags or None)
        key = BatchKey(message.topic, queue, *wait_store_ok_and_tag, sender_waits)
        item = encoding.batch_item(prepared, self._encoder, self.batcher.wall_ms())
        promise = self._futures.create(callback, prepared.msg_id)
        entry = BatchEntry(item, len(message.body), prepared.msg_id, message.keys, promise)
        return promise, self.batcher.add(key, entry, self._owner)

    def result(self, batch: MessageBatch, future: Future[SendResult]) -> SendResult:
        """Wait for the result of a message in ``batch``."""
        if not self.batcher.wait(batch, future, self._send_timeout_s + _BATCH_ERROR_GRACE_S):
            raise CallTimeout("the batch has no answer in time; it may have been stored", topic=batch.key.topic)
        return future.result()


_PromisesAndOutcomes = tuple[Sequence[Promise], Sequence[Outcome]]


def _group_by_registry(
    promises: Sequence[Promise], outcomes: Sequence[Outcome]
) -> Mapping[FutureRegistry, _PromisesAndOutcomes]:
    """Group promises and outcomes by producer."""
    if len(registries := {promise.registry for promise in promises}) == 1:
        return dict.fromkeys(registries, (promises, outcomes))
    outcomes_by_registry: dict[FutureRegistry, tuple[list[Promise], list[Outcome]]] = {
        registry: ([], []) for registry in registries
    }
    for promise, outcome in zip(promises, outcomes, strict=True):
        own_promises, own_outcomes = outcomes_by_registry[promise.registry]
        own_promises.append(promise)
        own_outcomes.append(outcome)
    return outcomes_by_registry


def _may_split(outcome: Outcome, batch: MessageBatch) -> bool:
    """Whether the batch is sent again in two halves, because a broker rejected it for one of its messages and stored nothing. A
    batch for a chosen queue is not split, because the order of its messages would be lost.
    """
    is_rejected = isinstance(outcome, MessageIllegal) and not outcome.stored
    return is_rejected and len(batch.entries) > 1 and batch.key.queue is None


def _outcomes_by_message(outcome: Outcome, entries: Sequence[BatchEntry | PlainEntry]) -> Sequence[Outcome]:
    """The outcome of each message. Each failed message gets its own error object: if several callers raised one object, their
    tracebacks would mix.
    """
    if isinstance(outcome, SendResult):
        try:
            return split_result(outcome, len(entries))
        except RocketMQError as e:
            outcome = e
    outcomes: list[Outcome] = []
    for entry in entries:
        message_outcome = outcome.stored.get(entry.msg_id)
        if message_outcome is None and entry.msg_id in outcome.skipped_ids:
            message_outcome = SendFailed(
                f"not sent, because an earlier message of its group was rejected: {outcome.message}",
                outcome.addr, outcome.broker_code, outcome.topic, remark=outcome.remark, remedy=outcome.remedy,
            )  # fmt: skip
            message_outcome.__cause__ = outcome
        elif message_outcome is None:
            message_outcome = copy.copy(outcome)
            message_outcome.__cause__, message_outcome.stored, message_outcome.skipped_ids = outcome.__cause__, {}, ()
        outcomes.append(message_outcome)
    return outcomes


_ACCUMULATORS = "accumulators"


def join_accumulator(name: str, settings: ProducerSettings, make_timer: Callable[[], Timer]) -> Batcher:
    """Join the accumulator of ``name`` in this process. The first call for a name creates the accumulator."""
    with process.entry_lock(_ACCUMULATORS, name):
        batcher = process.get_or_create(_ACCUMULATORS, name, lambda: Batcher(make_timer()))
        batcher.join(settings)
        return batcher


def leave_accumulator(name: str, batcher: Batcher) -> None:
    """Leave the accumulator. The last producer closes it."""
    try:
        batcher.leave()
    finally:
        with process.entry_lock(_ACCUMULATORS, name):
            if batcher.producer_count == 0:
                process.entries(_ACCUMULATORS).pop(name, None)
                batcher.close()
