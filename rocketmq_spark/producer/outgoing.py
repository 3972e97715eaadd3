"""Requests to the engine (``OutgoingSend``), their results (``Ended``), and the result of each message of a batch.

These are tuples because there is one for every message that is sent alone: creating a frozen dataclass takes eight times as
long. ``split`` makes one result per message of a broker's answer to a batch (``ProduceAccumulator.splitSendResults``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import RocketMQError, SendFailed
from rocketmq_spark.model import Message, MessageQueue, QueueEnd, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import SentMessage
from rocketmq_spark.producer.retry import RetryPolicy, RetryState
from rocketmq_spark.wire.messages import BatchItem, decode_batch, encode_batch
from rocketmq_spark.wire.properties import decode_properties, encode_properties

_SEPARATOR = ","


def with_message_ids(result: SendResult, ids: Sequence[str], batch_id: str | None = None) -> SendResult:
    """``result`` with the client's ids: those of a batch joined, or ``batch_id`` if the batch is stored as one message.

    A topic of the kind BatchCQ stores a batch as one message and answers with one offset id.
    """
    stored_as_one = len(ids) > 1 and bool(
        result.msg_id or (result.offset_msg_id and _SEPARATOR not in result.offset_msg_id)
    )
    msg_id = (result.msg_id or batch_id or "") if stored_as_one else _SEPARATOR.join(ids)
    return result._replace(msg_id=msg_id)


def result_in_batch(batch: SendResult, index: int, msg_id: str, offset_msg_id: str | None) -> SendResult:
    """The result of the message at this place of a batch, from what the messages have in common and its own ids."""
    status, _, queue, first_offset, _, transaction_id, _, region_id = batch
    offset = None if first_offset is None else first_offset + index
    return SendResult(status, msg_id, queue, offset, offset_msg_id, transaction_id, None, region_id)


class BatchResults(Sequence[SendResult]):
    """The results of the messages of a batch. Each is created when it is read: most are never read, and the garbage collector
    looks again and again at those that exist.

    Who keeps one of them keeps ``batch`` and its ids, not those of the others, of which a batch may have thousands.
    """

    __slots__ = ("batch", "ids", "offset_ids")

    def __init__(self, batch: SendResult, ids: Sequence[str], offset_ids: Sequence[str | None]) -> None:
        self.batch = batch._replace(msg_id="", offset_msg_id=None)
        self.ids, self.offset_ids = ids, offset_ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self.ids))[index]
        return result_in_batch(self.batch, index, self.ids[index], self.offset_ids[index])


def split_result(result: SendResult, count: int) -> Sequence[SendResult]:
    """The result of each of ``count`` messages; the same one for all of a batch that is stored as one.

    A Proxy reports neither offset ids nor queues. Messages that a look-up found stored have no known places.

    Raises ``SendFailed`` if the number of ids differs: the batch is stored, but the places of its messages are unknown.
    """
    if _SEPARATOR not in result.msg_id:
        return [result] * count
    ids = result.msg_id.split(_SEPARATOR)
    if result.status is SendStatus.SPOOLED:
        return [result._replace(msg_id=msg_id) for msg_id in ids]
    has_no_places = result.queue is not None and result.queue.queue_id < 0
    offset_ids = (
        [None] * len(ids)
        if has_no_places or result.queue_offset is None
        else (result.offset_msg_id or "").split(_SEPARATOR)
    )
    if len(ids) != count or len(offset_ids) != count:
        raise SendFailed(
            f"sendResult is illegal: {len(ids)} ids and {len(offset_ids)} offset ids for {count} messages; the batch "
            "was acknowledged, its messages' places are unknown",
            topic=result.queue.topic if result.queue is not None else None,
            queue=str(result.queue),
        )
    return BatchResults(result, ids, offset_ids)


Outcome = SendResult | RocketMQError
Callback = Callable[[Outcome], None]


def outcome_with_ids(outcome: Outcome, ids: Sequence[str], batch_id: str | None = None) -> Outcome:
    return with_message_ids(outcome, ids, batch_id) if isinstance(outcome, SendResult) else outcome


Queues = Sequence[MessageQueue]


class NonblockingCallback:
    """An internal callback that never blocks: it is called where the outcome is noted, not on the callback thread."""

    __slots__ = ("call",)

    def __init__(self, call: Callback) -> None:
        self.call = call

    def __call__(self, outcome: Outcome) -> None:
        self.call(outcome)


class SendCompletion(NamedTuple):
    """The end of a request: the result or error, the number of attempts, and the brokers in the order in which they were tried.

    An attempt without a queue counts, and has no broker. ``confirmed`` messages were not acknowledged, and found stored.
    """

    outgoing: OutgoingSend
    outcome: Outcome
    attempts: int = 0
    brokers: Sequence[str] = ()
    confirmed_count: int = 0


def ignore_completion(ended: SendCompletion) -> None:
    """For callers that ignore the outcome."""


class _SendSpec(NamedTuple):
    topic: str
    request: SendRequest
    timeout: Deadline | float
    queue: MessageQueue | None = None
    ordered: bool = False
    filter_queues: Callable[[Queues], Queues] | None = None
    done: Callable[[SendCompletion], None] = ignore_completion
    message: Message | None = None
    msg_ids: Sequence[str] = ()
    selection: tuple[str, Any] | None = None
    spoolable: bool = True
    at_most_once: bool = False
    ordering_key: Hashable = None
    failed_queues: dict[Hashable, RocketMQError] | None = None


class OutgoingSend(_SendSpec):
    """One request: a message or a batch. The arguments do not change; the engine notes its state in the other fields.

    ``queue`` is chosen by the caller or a selector; without it each attempt chooses one, at random among the
    ``candidates`` of the topic's queues if given. ``ordered`` requests to one queue, or of one ``line``, are sent one after the
    other. ``selection``, a selector's name and argument, is for a spool, if no queue could be chosen yet. A request that is not
    ``spoolable`` is useless later. A request with ``once`` is not sent again while it may
    be stored. The requests of one call share ``shut``: the ordered queues to which one of them failed, with its error; the others
    are not sent there. ``timeout`` is a deadline, or seconds from the first attempt, so that waiting for
    earlier requests of the queue does not count. ``done`` is called once, on any thread, and must not block. Hooks get
    ``message`` and ``msg_ids``.

    ``attempts`` end at ``until``. With ``refresh`` the route is fetched before the next attempt. ``rest`` is the request without
    the ``confirmed`` messages, which were found stored. If its end may be looked up, ``since`` is an offset before all that an
    attempt stores, and ``looked`` is the number of the last attempt whose end was looked up.
    """

    attempts_deadline: Deadline
    retry_state: RetryState
    refresh_route = False
    finished = False
    unconfirmed: SendRequest | None = None
    confirmed_count = 0
    lookup_start: QueueEnd | None = None
    checked_attempt = -1

    __eq__ = object.__eq__  # compared by identity: equal messages are different requests
    __hash__ = object.__hash__

    def reset_attempts(self, policy: RetryPolicy, rng: random.Random | None = None) -> None:
        """Reset the attempts; the first one follows."""
        self.attempts_deadline = self.deadline_from_now
        self.retry_state = RetryState(policy, self.queue is not None, rng)

    @property
    def deadline_from_now(self) -> Deadline:
        """The deadline of all attempts if the first one starts now."""
        return self.timeout if isinstance(self.timeout, Deadline) else Deadline.after(self.timeout)

    @property
    def ordered_queue(self) -> Hashable:
        """The queue or line whose order the request keeps."""
        return (self.ordering_key or self.queue) if self.ordered else None

    @property
    def size(self) -> int:
        """Its bytes on the wire, without the header."""
        return len(self.request.body) + len(self.request.properties)

    @property
    def next_request(self) -> SendRequest:
        """The request that the next attempt sends."""
        return self.unconfirmed or self.request


def messages_in_batch(request: SendRequest) -> Sequence[SentMessage]:
    """The messages of a batch, whatever encoded them."""
    if not isinstance(request.body, bytes | memoryview):
        return request.body.messages()
    return [
        SentMessage(item.body, decode_properties(item.properties), item.flag) for item in decode_batch(request.body)
    ]


def to_storable(request: SendRequest) -> SendRequest:
    """The send with a body of bytes, as spools keep it."""
    if isinstance(request.body, bytes | memoryview):
        return request
    items = [BatchItem(each.body, encode_properties(each.properties), each.flag) for each in request.body.messages()]
    if len(items) == 1:
        body, properties, flag = items[0]
        return request._replace(body=bytes(body), properties=properties, flag=flag, batch=False)
    return request._replace(body=encode_batch(items))


def with_group_order(outgoing: OutgoingSend, by_queue: bool) -> OutgoingSend:
    """Order a request of a message group behind those of its group in flight; with ``by_queue`` behind all of its queue, because
    others of the group may be in batches for that queue.
    """
    group = decode_properties(outgoing.request.properties).get(Property.SHARDING_KEY)
    if group is None:
        return outgoing
    ordering_key = None if by_queue else (outgoing.topic, group)
    return outgoing._replace(ordered=True, ordering_key=ordering_key, timeout=outgoing.deadline_from_now.remaining())
