"""Automatic batching: messages for one destination wait a short time and are sent as one batch.

Mirrors ``ProduceAccumulator``. Pure: the clock is an argument, and the caller locks and sends. Messages with the same
``BatchKey`` share a batch. The key has the topic, the queue if the caller chose one, the wait flag (``waitStoreMsgOK``) and the
tag. The key also says whether the sender waits for the result (``sender_waits``). Java has two maps instead: one for senders
that wait, and one for the others. A batch is due when its bodies have more than ``max_bytes``, or when it is ``max_delay_ms``
old. (Java's code also compares with "more than", although Java's proposal says "or equal".) This module closes gaps in Java's
code:

* A batch is removed from the map when it is closed, so nothing has to be cleaned up. The number of open batches is limited.
* The bytes of a batch are counted until its answer arrives, and are released exactly once. A message that joins no batch is not
  counted.
* The encoded size and the size of the joined KEYS are limited, too. If only bodies were limited, large properties could make the
  broker reject a whole batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rocketmq_spark.base import codes
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue

MAX_KEYWORD_BYTES = 24_000  # for all keys of a batch; the batch's properties need room for a tag and an id, too


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is sent, and how many bytes may wait. The allowed values are those of Java's setters."""

    max_bytes: int = 32 * 1024
    max_delay_ms: int = 10
    total_max_bytes: int = 32 * 1024 * 1024
    max_encoded_bytes: int = codes.MAX_BATCH_BYTES
    max_open_batches: int = 1024
    max_messages_per_queue: int | None = None  # the maximum for a batch whose queue is chosen

    def __post_init__(self) -> None:
        problems = [
            f"option {name!r} is {value}; expected {expected}"
            for name, value, is_valid, expected in (
                ("batchMaxBytes", self.max_bytes, 1 <= self.max_bytes <= 2097152, "between 1B and 2MB"),
                ("batchMaxDelay", self.max_delay_ms, 1 <= self.max_delay_ms <= 30000, "between 1ms and 30s"),
                ("totalBatchMaxBytes", self.total_max_bytes, self.total_max_bytes >= 1, "at least 1 byte"),
            )
            if not is_valid
        ]
        if problems:
            raise OptionError.of(problems)


class BatchKey(NamedTuple):
    """Messages with equal keys share a batch."""

    topic: str
    queue: MessageQueue | None
    wait_store_ok: bool
    tag: str | None
    sender_waits: bool


class BatchEntry(NamedTuple):
    """One message of a batch: its encoded item, its id and keys, and the ``promise`` of its caller."""

    item: Sized
    body_bytes: int
    msg_id: str
    keys: Sequence[str]
    promise: Any


class PlainEntry(Protocol):
    """A message that is encoded when its batch is sent. ``properties_text`` has the message's properties without an id."""

    body: bytes
    properties_text: str
    flag: int
    msg_id: str
    keys: Sequence[str]

    @property
    def promise(self) -> Any:
        """The promise of the caller."""


@dataclass(slots=True, eq=False)
class MessageBatch:
    """Messages that are sent together, at ``due_ms`` at the latest.

    ``owner`` is the producer that started the batch. The owner sends the batch, also if other producers have added messages. If
    ``has_plain_messages`` is set, some of the ``entries`` are plain messages, and ``batching.encode_batch_messages`` sets
    ``encoded_items`` for all entries.
    """

    key: BatchKey
    owner: Any
    created_ms: int
    due_ms: int
    entries: list[BatchEntry | PlainEntry] = field(default_factory=list)
    body_bytes: int = 0
    encoded_bytes: int = 0
    keywords: dict[str, None] = field(default_factory=dict)
    keyword_bytes: int = 0
    is_open: bool = True
    has_plain_messages: bool = False
    encoded_items: list[Sized] | None = None

    def __post_init__(self) -> None:
        self.keyword_bytes = len((self.key.tag or "").encode())

    def add(self, entry: BatchEntry, max_encoded_bytes: int) -> bool:
        """Add ``entry``. Returns False, and changes nothing, if the broker would reject the larger batch."""
        encoded_bytes = self.encoded_bytes + len(entry.item)
        if encoded_bytes > max_encoded_bytes or (entry.keys and not self._add_keywords(entry.keys)):
            return False
        self.entries.append(entry)
        self.body_bytes += entry.body_bytes
        self.encoded_bytes = encoded_bytes
        return True

    def items(self) -> list[Sized]:
        """The encoded messages of the batch."""
        return self.encoded_items or [entry.item for entry in self.entries if isinstance(entry, BatchEntry)]

    def part(self, positions: slice) -> MessageBatch:
        """A closed batch of the messages at these ``positions``. The messages must be encoded."""
        part = MessageBatch(self.key, self.owner, self.created_ms, self.due_ms, self.entries[positions], is_open=False)
        part.encoded_items = self.items()[positions]
        part.encoded_bytes = sum(map(len, part.encoded_items))
        for entry in part.entries:
            part._add_keywords(entry.keys)
        return part

    def _add_keywords(self, keys: Sequence[str]) -> bool:
        keywords = self.keywords
        if new_keywords := {word: None for word in key_words(keys) if word not in keywords}:
            keyword_bytes = self.keyword_bytes + len(codes.KEY_SEPARATOR.join(new_keywords).encode()) + 1
            if keyword_bytes > MAX_KEYWORD_BYTES:
                return False
            keywords.update(new_keywords)
            self.keyword_bytes = keyword_bytes
        return True


class Accumulator:
    """The open batches, and the ``closed_batches``, which wait until they are taken. ``limits`` may be replaced at any time."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.limits = limits or BatchLimits()
        self.buffered_bytes = 0
        self._open_batches: dict[BatchKey, MessageBatch] = {}
        self._batches_by_age: list[tuple[int, int, MessageBatch]] = []
        self._sequence_numbers = itertools.count()
        self.closed_batches: list[MessageBatch] = []
        self._taken_batches: set[MessageBatch] = set()
        self._last_batch_start_ms = 0

    @property
    def open_count(self) -> int:
        return len(self._open_batches)

    def add(self, key: BatchKey, entry: BatchEntry, owner: Any, now_ms: int) -> MessageBatch | None:
        """Return the batch that contains the message. None if the message must be sent alone, because the limits are reached or
        the message is too large.
        """
        limits = self.limits
        if self.buffered_bytes >= limits.total_max_bytes or len(entry.item) > limits.max_encoded_bytes:
            return None
        batch = self._open_batches.get(key)
        if batch is not None and not batch.add(entry, limits.max_encoded_bytes):
            self._close(batch)
            batch = None
        if batch is None:
            batch = self._start(key, owner, now_ms)
            if len(self._open_batches) > limits.max_open_batches or not batch.add(entry, limits.max_encoded_bytes):
                self._remove_open(batch)
                return None
        self.buffered_bytes += len(entry.item)
        is_full = key.queue is not None and len(batch.entries) == limits.max_messages_per_queue
        if is_full or batch.body_bytes > limits.max_bytes:
            self._close(batch)
        return batch

    def add_plain_message(
        self, key: BatchKey, entry: PlainEntry, body_bytes: int, added_bytes: int, owner: Any, now_ms: int
    ) -> MessageBatch | None:
        """Add a plain message, which has no queue. Unlike ``add``, does not add the message's keys to the batch. ``added_bytes``
        is the number of bytes by which the message makes the batch larger.
        """
        limits = self.limits
        if self.buffered_bytes >= limits.total_max_bytes:
            return None
        batch = self._open_batches.get(key)
        if batch is not None and batch.encoded_bytes + added_bytes > limits.max_encoded_bytes:
            self._close(batch)
            batch = None
        if batch is None:
            if len(self._open_batches) >= limits.max_open_batches or added_bytes > limits.max_encoded_bytes:
                return None
            batch = self._start(key, owner, now_ms)
        batch.entries.append(entry)
        batch.has_plain_messages = True
        batch.body_bytes += body_bytes
        batch.encoded_bytes += added_bytes
        self.buffered_bytes += added_bytes
        if batch.body_bytes > limits.max_bytes:
            self._close(batch)
        return batch

    @property
    def due_ms(self) -> int | None:
        """When the oldest open batch must be sent; None if no batch is open."""
        batches_by_age = self._batches_by_age
        while batches_by_age and not batches_by_age[0][2].is_open:
            heapq.heappop(batches_by_age)
        return batches_by_age[0][0] if batches_by_age else None

    def has_ready_batch(self, now_ms: int) -> bool:
        """Whether ``take_ready`` would return any batch."""
        return bool(self.closed_batches) or ((due_ms := self.due_ms) is not None and due_ms <= now_ms)

    def take_ready(self, now_ms: int) -> list[MessageBatch]:
        """The batches to send now, oldest first. The caller passes each batch to ``release`` or ``split`` once."""
        while (due_ms := self.due_ms) is not None and due_ms <= now_ms:
            self._close(self._batches_by_age[0][2])
        ready, self.closed_batches = self.closed_batches, []
        self._taken_batches.update(ready)
        return sorted(ready, key=lambda batch: batch.created_ms)

    def close_all(self) -> None:
        """Close all open batches, so that ``take_ready`` returns them."""
        for batch in list(self._open_batches.values()):
            self._close(batch)

    def release(self, batch: MessageBatch) -> None:
        """Stop counting the bytes of a batch, because the batch has its outcome. A second call changes nothing."""
        if batch in self._taken_batches:
            self._taken_batches.discard(batch)
            self.buffered_bytes -= batch.encoded_bytes

    def split(self, batch: MessageBatch) -> None:
        """Replace a taken batch by its two halves, which ``take_ready`` returns later."""
        self._taken_batches.discard(batch)
        middle = len(batch.entries) // 2
        self.closed_batches += [batch.part(slice(None, middle)), batch.part(slice(middle, None))]

    def _start(self, key: BatchKey, owner: Any, now_ms: int) -> MessageBatch:
        # Batches are sent in the order of their start times, so these times must not decrease. ``now_ms`` may be too small,
        # because the caller read the clock before it waited for the lock.
        now_ms = self._last_batch_start_ms = max(now_ms, self._last_batch_start_ms)
        batch = MessageBatch(key, owner, now_ms, now_ms + self.limits.max_delay_ms)
        self._open_batches[key] = batch
        heapq.heappush(self._batches_by_age, (batch.due_ms, next(self._sequence_numbers), batch))
        return batch

    def _close(self, batch: MessageBatch) -> None:
        self._remove_open(batch)
        self.closed_batches.append(batch)

    def _remove_open(self, batch: MessageBatch) -> None:
        batch.is_open = False
        del self._open_batches[batch.key]


def key_words(keys: Sequence[str] | None) -> list[str]:
    """The words that a broker indexes. A key with spaces has several words."""
    return [word for key in keys or () for word in key.split(codes.KEY_SEPARATOR) if word]


def has_key(keys: Sequence[str] | None) -> bool:
    """Whether a compaction topic stores a message with these keys. The topic's broker ignores keys that consist only of
    whitespace.
    """
    return any(key.strip() for key in keys or ())
