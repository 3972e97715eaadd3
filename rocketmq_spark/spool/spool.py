"""The ``Spool`` port (``SendSpool``), the format of sends as records, and ``SpoolReading``, with which tools read a spool.

A ``SendSpool`` stores sends that failed for temporary reasons in a folder, and a thread sends them again. A send is stored in a
versioned binary form whose head is JSON, so that people can read a dump. ``SpoolReading`` takes no lock, so another process may
use the spool at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import DecodeError, MessageRefused, RocketMQError, SpoolError
from rocketmq_spark.model import MessageQueue, Resent, SendRequest, SpooledSend, SpoolMetrics
from rocketmq_spark.ports import Resender
from rocketmq_spark.queues.selection import is_built_in
from rocketmq_spark.spool.database import Damaged, Database
from rocketmq_spark.spool.lanes import Schedule, SteadyClock
from rocketmq_spark.spool.pending import all_pending_entries, first_due_ms
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING_PREFIX,
    MAX_TARGET_BYTES,
    NOTE,
    RECORD,
    TOTALS,
    Record,
    RecordState,
    SpoolOwner,
    Totals,
    area_end,
    decode_record,
    due_of_key,
    record_key,
    sequence_of,
)
from rocketmq_spark.spool.recovery import ALL_KEYS, complete_folder_of, find_contradiction
from rocketmq_spark.spool.redelivery import MAX_IN_FLIGHT, PAGE_SIZE, DeadLetters, Redelivery, TargetRules
from rocketmq_spark.spool.store import Store

SEND_KIND = "send"
SEND_VERSION = 1
_QUEUE_ID_LIMIT = 1 << 31  # in the protocol, a queue id is a signed 32-bit number

_HEAD = struct.Struct(">BI")
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_REQUEST_JSON = (
    '{"group":%s,"properties":%s,"sys_flag":%d,"flag":%d,"born_timestamp_ms":%d,"batch":%s,"reconsume_times":%d,'
    '"max_reconsume_times":%s,"default_topic_queues":%d}'
)


def record_of(send: SpooledSend, now_ms: int) -> Record:
    """The record of a send, with all data that a retry needs."""
    text = _head(send).encode()
    payload = b"".join((_HEAD.pack(SEND_VERSION, len(text)), text, send.request.data))
    return Record(SEND_KIND, payload, now_ms, target_of(send), lane_of(send))


def _head(send: SpooledSend) -> str:
    """Return the head of a stored send as JSON. This function formats the JSON itself, because a general encoder would make the
    addition of a record 10 % slower.
    """
    request, max_reconsume_times = send.request, send.request.max_reconsume_times
    request_json = _REQUEST_JSON % (
        _quoted(request.group),
        _quoted(request.properties),
        request.sys_flag,
        request.flag,
        request.born_timestamp_ms,
        "true" if request.batch else "false",
        request.reconsume_times,
        "null" if max_reconsume_times is None else int(max_reconsume_times),
        request.default_topic_queues,
    )
    ids = ",".join([_quoted(msg_id) for msg_id in send.msg_ids])
    further_fields = ""
    if send.queue is not None:
        further_fields = f',"queue":{_encode_json([send.queue.broker_name, send.queue.queue_id])}'
    if send.selector is not None:
        further_fields += f',"selector":{_quoted(send.selector)},"arg":{_encode_json(send.arg)}'
    return f'{{"topic":{_quoted(send.topic)},"msgIds":[{ids}],"request":{request_json}{further_fields}}}'


def send_of(record: Record) -> SpooledSend:
    """Return the send in a record. Raises ``DecodeError`` for a format that this release does not know."""
    data = record.payload
    try:
        version, length = _HEAD.unpack_from(data)
        if version != SEND_VERSION:
            raise DecodeError(f"a send of version {version}; this release reads version {SEND_VERSION}")
        body_start = _HEAD.size + length
        head = json.loads(data[_HEAD.size : body_start])
        queue = MessageQueue(head["topic"], *head["queue"]) if "queue" in head else None
        request = SendRequest(body=data[body_start:], **head["request"])
        selector = head.get("selector")
        if selector is not None and not is_built_in(selector):  # a changed file must not run code in this process
            raise DecodeError(
                f"selector {selector!r} is not a selector of RocketMQ, and code that a file names is not executed"
            )
        send = SpooledSend(head["topic"], request, queue, tuple(head["msgIds"]), selector, head.get("arg"))
        if not _has_types_of_a_send(send):
            raise DecodeError(f"a send of {len(data)} bytes has values of other types than this package writes")
        if not _has_valid_destination(send):
            raise DecodeError(f"a send of {len(data)} bytes has no topic or broker, or no valid queue id")
        if len(target_of(send).encode()) > MAX_TARGET_BYTES:
            raise DecodeError(f"a send of {len(data)} bytes has a longer topic or broker name than a record can have")
        return send
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as e:
        raise DecodeError(f"a send of {len(data)} bytes cannot be read: {e!r}") from e


def _has_types_of_a_send(send: SpooledSend) -> bool:
    """Whether the values, which may come from any JSON file, have the types of a send."""
    request, queue = send.request, send.queue
    texts = (send.topic, request.group, request.properties, *send.msg_ids, *(() if queue is None else queue[:2]))
    max_reconsume_times, queue_ids = request.max_reconsume_times, () if queue is None else (queue.queue_id,)
    numbers = (
        request.sys_flag,
        request.flag,
        request.born_timestamp_ms,
        request.reconsume_times,
        request.default_topic_queues,
        *queue_ids,
        *(() if max_reconsume_times is None else (max_reconsume_times,)),
    )
    return (
        all(type(text) is str for text in texts)
        and all(type(number) is int for number in numbers)
        and type(request.batch) is bool
    )


def _has_valid_destination(send: SpooledSend) -> bool:
    """Whether the topic, and the queue if one was chosen, can exist."""
    queue = send.queue
    return bool(send.topic) and (queue is None or (bool(queue.broker_name) and 0 <= queue.queue_id < _QUEUE_ID_LIMIT))


def lane_of(send: SpooledSend) -> bytes:
    """Return the lane of a send. Sends to the same queue have the same lane, and so keep their order. Sends with the same
    selector and the same ``arg`` have the same lane, too. A send without an order has an empty lane.
    """
    if send.queue is not None:
        return queue_lane(send.queue)
    if send.selector is not None:
        return f"{send.topic}?{send.selector}={json.dumps(send.arg, sort_keys=True)}".encode()
    return b""


def queue_lane(queue: MessageQueue) -> bytes:
    return str(queue).encode()


def target_of(send: SpooledSend) -> str:
    """Return the target for which a send waits after a failure: the broker of its queue, or any broker of its topic."""
    return broker_target(send.queue) if send.queue is not None else topic_target(send.topic)


def broker_target(queue: MessageQueue) -> str:
    return f"broker {queue.broker_name}"


def topic_target(topic: str) -> str:
    return f"topic {topic}"


logger = logging.getLogger(__name__)


class SpoolEntry(NamedTuple):
    """A record and its state. ``standing`` is ``pending``, ``behind`` (the record is behind another record of its lane) or
    ``dead``. A pending record has a due time (ms since 1970).
    """

    sequence: int
    standing: str
    due_ms: int | None
    state: RecordState | None
    record: Record | DecodeError


class SpoolReading:
    """The contents of a spool at the time of opening.

    If ``is_damaged`` is true after ``entries``, a repair may find other records than ``entries`` has yielded.
    """

    def __init__(self, path: Path) -> None:
        self._db = _open_to_read(path)

    @property
    def totals(self) -> Totals | None:
        """The totals; None if the totals cannot be read."""
        data = self._db.get(TOTALS)
        if data is None:
            return None if self.is_damaged else Totals()
        totals = Totals.decode(data)
        problem: str | None = "its totals are impossible"
        if totals is not None:
            try:
                problem = find_contradiction(self._db)
            except Damaged as e:
                problem = e.message
        self._db.damage = self._db.damage or problem
        return totals

    @property
    def owner(self) -> SpoolOwner:
        """The owner of the records."""
        return SpoolOwner.read(self._db.get)

    def lasting_notes(self) -> dict[bytes, bytes]:
        """Return the notes that have ``LASTING_PREFIX`` and a value, by name. These notes say which queues an environment has,
        and therefore where records are sent.
        """
        entries = self._db.scan(NOTE, area_end(NOTE))
        return {key[len(NOTE) :]: value for key, value in entries if value and key.startswith(NOTE + LASTING_PREFIX)}

    @property
    def is_damaged(self) -> bool:
        """Whether damage was found so far."""
        return bool(self._db.gaps or self._db.damage)

    @property
    def first_due_ms(self) -> int | None:
        """The first due time, in ms since 1970; None if no record is pending."""
        return first_due_ms(self._db)

    def entries(self) -> Iterator[SpoolEntry]:
        """Yield all records: first the pending records by due time, then the records behind them in their lanes, and then the
        dead records. The last two groups are in the order in which the records were stored.
        """
        dead_sequences = {sequence_of(key) for key, _ in self._db.scan(DEAD, area_end(DEAD))}
        due_keys = sorted((due_of_key(key), key) for key, _ in all_pending_entries(self._db))
        for due, key in due_keys:
            if due.sequence not in dead_sequences:
                state = _state(self._db.get(key) or b"")
                yield SpoolEntry(due.sequence, "pending", due.due_ms, state, self._record(due.sequence))
        pending_sequences = {due.sequence for due, _ in due_keys}
        # All keys are read, to find all damage. A repair may recover records that are not yielded here.
        for key, data in self._db.scan(*ALL_KEYS):
            if not key.startswith(RECORD):
                continue
            sequence = sequence_of(key)
            if sequence not in pending_sequences and sequence not in dead_sequences:
                yield SpoolEntry(sequence, "behind", None, None, decode_record(data))
        for sequence in sorted(dead_sequences):
            value = self._db.get(record_key(DEAD, sequence)) or b""
            yield SpoolEntry(sequence, "dead", None, _state(value), self._record(sequence))

    def stored_entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all readable keys with their values, as they are stored."""
        return self._db.scan(*ALL_KEYS)

    def close(self) -> None:
        self._db.close()

    def _record(self, sequence: int) -> Record | DecodeError:
        return decode_record(self._db.get(record_key(RECORD, sequence)))


# While another process writes, files may be missing or incomplete, and look damaged for a moment.
_MAX_OPEN_ATTEMPTS, _OPEN_PAUSE_S = 4, 0.05


def _open_to_read(path: Path) -> Database:
    for _ in range(_MAX_OPEN_ATTEMPTS):
        with contextlib.suppress(Damaged):
            return Database(complete_folder_of(path), read_only=True, is_tolerant=False)
        time.sleep(_OPEN_PAUSE_S)
    return Database(complete_folder_of(path), read_only=True)


def _state(data: bytes) -> RecordState | None:
    with contextlib.suppress(DecodeError):
        return RecordState.decode(data)
    return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class RedeliveryPolicy(NamedTuple):
    """How records are sent again: a decoder for each kind, the maximum number of records in flight, and the schedule after
    failures. ``notes_of_sends`` returns the notes that are written with stored sends. ``dead_letters`` is for records that are
    given up; the kind of dead letters has a decoder, too. ``target_rules`` has the rules for the targets of records.
    """

    decoders: Mapping[str, Callable[[Record], SpooledSend]]
    max_in_flight: int = MAX_IN_FLIGHT
    schedule: Schedule = Schedule()
    notes_of_sends: Callable[[Sequence[SpooledSend]], Mapping[bytes, bytes]] | None = None
    dead_letters: DeadLetters | None = None
    target_rules: TargetRules | None = None


SEND_POLICY = RedeliveryPolicy({SEND_KIND: send_of})


class SendSpool:
    """Implements ``ports.Spool`` over a ``Store``. Uses a steady clock unless ``clock`` is given. ``close`` closes the store and
    the resender. If the constructor fails, the store is closed.
    """

    def __init__(
        self,
        store: Store,
        resender: Resender,
        timer: Timer,
        clock: Callable[[], int] | None = None,
        schedule: Schedule | None = None,
        policy: RedeliveryPolicy = SEND_POLICY,
    ) -> None:
        self.store = store
        self._notes_of_sends = policy.notes_of_sends
        self._resender = resender
        try:
            timer.start()  # starts the thread here, so that the caller gets the error if the thread cannot start
            self._schedule = schedule or policy.schedule
            self._clock = clock or SteadyClock(_now_ms, _monotonic_ms, store.totals.last_recorded_ms)
            if policy.target_rules is not None:
                store.start_target_rules(policy.target_rules.fingerprint)
            handlers = {kind: functools.partial(self._handle, decode) for kind, decode in policy.decoders.items()}
            self._decoders = policy.decoders
            self.redelivery = Redelivery(
                store,
                handlers,
                self._clock,
                timer,
                self._schedule,
                policy.max_in_flight,
                policy.dead_letters,
                policy.target_rules,
            )
            self.redelivery.batch_policy.predicate = self._batch_predicate
            if len(store):
                self.redelivery.retry_earlier_records()
        except BaseException:  # also after Ctrl-C, because no other code closes the store
            timer.close(0)
            store.close()
            raise

    @property
    def path(self) -> Path:
        return self.store.path

    @property
    def needs_answers(self) -> bool:
        return self.redelivery.needs_answers

    def now_ms(self) -> int:
        """The time of the clock to which due times refer."""
        return self._clock()

    def has_earlier_record(self, send: SpooledSend) -> bool:
        lane = lane_of(send)
        return bool(lane) and self.store.holds_lane(lane)

    def keep(self, sends: Sequence[SpooledSend]) -> None:
        now_ms = self._clock()
        due_ms = self._schedule.due_ms(0, now_ms)
        assert due_ms is not None
        notes = None if self._notes_of_sends is None else self._notes_of_sends(sends)
        # A send that is behind another send of its lane has not been tried.
        tried_sends = [send for send in sends if not self.has_earlier_record(send)]
        self.store.add([(record_of(send, now_ms), due_ms) for send in sends], notes)
        for target in {target_of(send) for send in tried_sends}:
            self.redelivery.on_send_failed(target)
        self.redelivery.wake()

    def note_accepted_send(self, queue: MessageQueue) -> None:
        self.redelivery.on_answer((broker_target(queue), topic_target(queue.topic)))

    def metrics(self) -> SpoolMetrics:
        now_ms, trouble = self._clock(), self.redelivery.trouble
        try:
            first_due_ms = self.store.next_due_ms()
        except SpoolError as e:
            first_due_ms, trouble = None, str(e)
        totals = self.store.totals
        return SpoolMetrics(
            depth=totals.depth,
            bytes=totals.size,
            oldest_due_age_s=None if first_due_ms is None or first_due_ms > now_ms else (now_ms - first_due_ms) / 1000,
            dead=totals.dead,
            dead_bytes=totals.dead_bytes,
            give_ups=totals.give_ups,
            delivered=self.redelivery.delivered_count,
            trouble=trouble,
        )

    def send_all(self, timeout_s: float, dead: bool = False) -> int:
        """Send all records now, even records that are not due. With ``dead``, also send dead letters. Returns how many records
        remain.

        A failed record is tried again if it is due again, by the schedule, within ``timeout_s`` seconds.
        """
        deadline = Deadline.after(timeout_s)
        if dead:
            self.store.revive(self._clock())
        start = self.store.make_due(None, None, PAGE_SIZE, self._clock())
        while start is not None:
            start = self.store.make_due(None, start, PAGE_SIZE, self._clock())
        self.redelivery.drain(deadline)
        return len(self.store)

    def finish(self) -> int:
        """Close the spool without waiting. Returns the number of records that were sent."""
        self.close(Deadline.after(0))
        return self.redelivery.delivered_count

    def close(self, deadline: Deadline) -> None:
        try:
            with contextlib.ExitStack() as cleanup:
                # The resender is closed last, so that the sends that this close aborts do not count as failed.
                cleanup.callback(lambda: self._resender.close(deadline))
                cleanup.callback(lambda: self.redelivery.close(deadline))
                try:
                    self.redelivery.drain(deadline)
                except BaseException:  # after an interrupt (Ctrl-C), the remaining steps must not wait
                    deadline = Deadline.after(0)
                    raise
        except RocketMQError as e:  # records without a written result are due in the next process
            logger.error("the spool in %s was closed after a failure: %s", self.path, e)
        finally:
            self.store.close()

    def _batch_predicate(self, first: Record) -> Callable[[Record], bool]:
        """Return a function that decides whether the resender can send a record in one batch with ``first``, the first record of
        the same lane.

        A record that causes an error is sent alone, so that the error affects no other record.
        """
        decode = self._decoders.get(first.kind)
        if decode is None:
            return lambda record: False
        try:
            accepts = self._resender.batch_predicate(decode(first))
        except (RocketMQError, ValueError):
            return lambda record: False

        def may_join(record: Record) -> bool:
            try:
                return record.kind == first.kind and accepts(decode(record))
            except (RocketMQError, ValueError):
                return False

        return may_join

    def _handle(
        self, decode: Callable[[Record], SpooledSend], records: Sequence[Record], on_result: Callable[[Resent], None]
    ) -> str | None:
        try:
            sends = [decode(record) for record in records]
        except (DecodeError, MessageRefused) as e:  # every attempt would fail with this error
            on_result(Resent(None, e.message))
            return None
        if (target := target_of(sends[0])) != records[0].target:
            return target
        send = sends[0] if len(sends) == 1 else self._resender.join_sends(sends)
        self._resender.resend(send, functools.partial(self._on_resent, on_result))
        return None

    def _on_resent(self, on_result: Callable[[Resent], None], resent: Resent) -> None:
        on_result(resent)
        if resent.error is None and resent.queue is not None:
            self.note_accepted_send(resent.queue)
