"""Requests to the engine (``OutgoingSend``), their results (``SendCompletion``), and the result of each message of a batch.

Requests and completions are tuples, because creating a frozen dataclass takes eight times as long, and each single message needs
both. ``split_result`` makes one result for each message from a broker's answer to a batch
(``ProduceAccumulator.splitSendResults``).
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
    """``result`` with the client's ids: the joined ids of a batch, or ``batch_id`` if the batch is stored as one message.

    A topic of the kind BatchCQ stores a batch as one message, and its broker answers with one offset id.
    """
    is_stored_as_one = len(ids) > 1 and bool(
        result.msg_id or (result.offset_msg_id and _SEPARATOR not in result.offset_msg_id)
    )
    msg_id = (result.msg_id or batch_id or "") if is_stored_as_one else _SEPARATOR.join(ids)
    return result._replace(msg_id=msg_id)


def result_in_batch(batch_result: SendResult, index: int, msg_id: str, offset_msg_id: str | None) -> SendResult:
    """The result of message ``index`` of a batch, from the result of the batch and the ids of the message."""
    status, _, queue, first_offset, _, transaction_id, _, region_id = batch_result
    offset = None if first_offset is None else first_offset + index
    return SendResult(status, msg_id, queue, offset, offset_msg_id, transaction_id, None, region_id)


class BatchResults(Sequence[SendResult]):
    """The results of the messages of a batch. A result is created when it is read, because most results are never read, and the
    garbage collector visits existing objects again and again. A result does not reference the ids of the other messages.
    """

    __slots__ = ("batch_result", "ids", "offset_ids")

    def __init__(self, batch_result: SendResult, ids: Sequence[str], offset_ids: Sequence[str | None]) -> None:
        self.batch_result = batch_result._replace(msg_id="", offset_msg_id=None)
        self.ids, self.offset_ids = ids, offset_ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self.ids))[index]
        return result_in_batch(self.batch_result, index, self.ids[index], self.offset_ids[index])


def split_result(result: SendResult, count: int) -> Sequence[SendResult]:
    """The result of each of ``count`` messages of a batch. If the batch is stored as one message, all messages have the same
    result.

    A Proxy reports neither offset ids nor queues. If a look-up found the messages, their queue and offsets are unknown. So the
    results have no offset ids if a Proxy answered, or if a look-up found the messages.

    Raises ``SendFailed`` if the number of ids is not ``count``: the batch is stored, but the offsets of its messages are
    unknown.
    """
    if _SEPARATOR not in result.msg_id:
        return [result] * count
    ids = result.msg_id.split(_SEPARATOR)
    if result.status is SendStatus.SPOOLED:
        return [result._replace(msg_id=msg_id) for msg_id in ids]
    is_from_proxy = result.queue is not None and result.queue.queue_id < 0
    offset_ids = (
        [None] * len(ids)
        if is_from_proxy or result.queue_offset is None
        else (result.offset_msg_id or "").split(_SEPARATOR)
    )
    if len(ids) != count or len(offset_ids) != count:
        raise SendFailed(
            f"sendResult is illegal: {len(ids)} ids and {len(offset_ids)} offset ids for {count} messages; the batch "
            "was acknowledged, but the offsets of its messages are unknown",
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
    """An internal callback that never blocks. A ``NonblockingCallback`` is called on the thread that sets the outcome, not on the
    callback thread.
    """

    __slots__ = ("call",)

    def __init__(self, call: Callback) -> None:
        self.call = call

    def __call__(self, outcome: Outcome) -> None:
        self.call(outcome)


class SendCompletion(NamedTuple):
    """A completed request: the outcome, the number of attempts, and the brokers in the order in which they were tried.

    An attempt that failed before a queue was chosen counts, but has no broker. ``confirmed_count`` messages were not
    acknowledged, and a look-up found them stored.
    """

    outgoing: OutgoingSend
    outcome: Outcome
    attempts: int = 0
    brokers: Sequence[str] = ()
    confirmed_count: int = 0


def ignore_completion(completion: SendCompletion) -> None:
    """The ``done`` of callers that do not need the outcome."""


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
    """One request to the engine: a message or a batch. The fields of the tuple do not change; the engine keeps the request's
    state in further attributes.

    ``queue`` is the queue that the caller or a selector chose. Without ``queue``, each attempt chooses a queue. If
    ``filter_queues`` is given, each attempt chooses at random from the list that ``filter_queues`` returns. ``ordered`` requests
    with the same queue or ``ordering_key`` are sent one after the other. ``selection`` is the name and argument of a selector
    that a spool applies later, because there was no route yet. If ``spoolable`` is False, the request would be useless later, and
    never goes to a spool. An ``at_most_once`` request is not sent again while it may be stored. ``failed_queues`` has the ordered
    queues to which a request of the same call has failed, with the errors. Later requests of the call are not sent to these
    queues. ``timeout`` is a deadline, or the number of seconds after the start of the first attempt. Seconds do not include the
    time in which the request waits behind earlier requests of its queue. ``done`` is called once, on any thread, and must not
    block. Hooks get ``message`` and ``msg_ids``.
    """

    attempts_deadline: Deadline
    retry_state: RetryState
    refresh_route = False  # whether the route is fetched before the next attempt
    finished = False
    unconfirmed_request: SendRequest | None = None  # after a look-up, the request without the messages that are stored
    confirmed_count = 0  # messages that were not acknowledged, and that a look-up found stored
    lookup_start: QueueEnd | None = None  # where a look-up of the attempt starts, if the request may be looked up
    looked_up_attempt_number = -1  # the number of the last attempt that was looked up

    __eq__ = object.__eq__  # compared by identity: equal messages are different requests
    __hash__ = object.__hash__

    def reset_attempts(self, policy: RetryPolicy, rng: random.Random | None = None) -> None:
        """Forget earlier attempts, so that the next attempt counts as the first."""
        self.attempts_deadline = self.deadline_from_now
        self.retry_state = RetryState(policy, self.queue is not None, rng)

    @property
    def deadline_from_now(self) -> Deadline:
        """The deadline of all attempts if the first attempt starts now."""
        return self.timeout if isinstance(self.timeout, Deadline) else Deadline.after(self.timeout)

    @property
    def ordered_queue(self) -> Hashable:
        """The queue or ordering key within which requests keep their order; None if the request has no order."""
        return (self.ordering_key or self.queue) if self.ordered else None

    @property
    def size(self) -> int:
        """The bytes of body and properties."""
        return len(self.request.body) + len(self.request.properties)

    @property
    def next_request(self) -> SendRequest:
        """The request to send at the next attempt."""
        return self.unconfirmed_request or self.request


def messages_in_batch(request: SendRequest) -> Sequence[SentMessage]:
    """The messages of an encoded batch, over remoting or gRPC."""
    if not isinstance(request.body, bytes | memoryview):
        return request.body.messages()
    return [
        SentMessage(item.body, decode_properties(item.properties), item.flag) for item in decode_batch(request.body)
    ]


def to_storable(request: SendRequest) -> SendRequest:
    """Return the request with a body of bytes, because a spool stores bytes."""
    if isinstance(request.body, bytes | memoryview):
        return request
    items = [
        BatchItem(sent_message.body, encode_properties(sent_message.properties), sent_message.flag)
        for sent_message in request.body.messages()
    ]
    if len(items) == 1:
        body, properties, flag = items[0]
        return request._replace(body=bytes(body), properties=properties, flag=flag, batch=False)
    return request._replace(body=encode_batch(items))


def with_group_order(outgoing: OutgoingSend, orders_by_queue: bool) -> OutgoingSend:
    """The request, ordered behind earlier requests of its message group. With ``orders_by_queue``, the request is ordered behind
    all requests of its queue, because automatic batches for the queue may contain messages of the group.
    """
    group = decode_properties(outgoing.request.properties).get(Property.SHARDING_KEY)
    if group is None:
        return outgoing
    ordering_key = None if orders_by_queue else (outgoing.topic, group)
    return outgoing._replace(ordered=True, ordering_key=ordering_key, timeout=outgoing.deadline_from_now.remaining())
