"""Finds stored messages by id, by key, and by store time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from rocketmq_spark.admin import AdminTools, deadline, request_each, with_kept_minimums
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.broker_client import PULL_CODES, BrokerClient, BrokerCommand
from rocketmq_spark.client.broker_requests import with_stored_names, with_user_names
from rocketmq_spark.client.long_polls import pull_command, to_pull_answer
from rocketmq_spark.client.pulled_messages import requested_messages
from rocketmq_spark.errors import LocalProtocolError, NotFound, OptionError
from rocketmq_spark.model import MessageQueue, PullAnswer, PullRequest, ReceivedMessage
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.queues.environment import Environment, EnvironmentQueues
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.identifiers import OffsetMessageId
from rocketmq_spark.wire.messages import DecodeBudget, UnwrapBudget, decode_leniently, decompressed
from rocketmq_spark.wire.names import Scope

# A broker returns at most 64 messages for one request, by default 32 (maxMsgsNumBatch).
MAX_MESSAGES_BY_KEY = 64
_MAX_STORE_TIME_MS = (1 << 63) - 1
# An index stores times as whole seconds after its begin timestamp.
_INDEX_RESOLUTION_MS = 1000
_MAX_RESULT_BYTES = 256 << 20  # memory for the messages of one search; further messages stay compressed


class IndexSearch(NamedTuple):
    """A request to the index of a broker. With ``is_message_id``, the key is an id that a producer assigned."""

    key: str
    begin_ms: int
    end_ms: int
    limit: int
    is_message_id: bool = False


def message_by_id(tools: AdminTools, message_id: str, topic: str | None = None) -> ReceivedMessage:
    """Return the message with an offset message id or, with ``topic``, with an id that its producer assigned.

    Offset message ids and ids of producers have the same form. An offset message id contains a broker's address. If no broker of
    this cluster has the address in the id, a producer assigned the id. Raises ``NotFound``. Mirrors
    ``DefaultMQAdminExtImpl.queryMessage``.
    """
    offset_id = _parse_offset_id(message_id)
    broker = None if offset_id is None else _broker_at(tools, offset_id.host)
    if offset_id is not None and broker is not None:
        message = _message_at(tools, broker, offset_id, topic)
        if message is not None:
            return message
    if topic is None:
        if broker is not None:
            raise _not_found_error(message_id)
        raise NotFound(
            f"id {message_id} does not belong to a message of these brokers",
            remedy="If a producer assigned the id, give the topic, too. An offset message id must contain a broker's address",
        )
    search = IndexSearch(message_id, 0, _MAX_STORE_TIME_MS, MAX_MESSAGES_BY_KEY, True)
    matching_messages = [m for m in _search_indexes(tools, topic, search) if m.msg_id == message_id]
    if not matching_messages:
        raise _not_found_error(message_id, topic)
    return min(matching_messages, key=lambda message: message.store_timestamp)


def messages_by_key(
    tools: AdminTools, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, limit: int = 32
) -> list[ReceivedMessage]:
    """Return the messages of a topic with this key, or with this id that the producer assigned, oldest first. Returns at most
    ``limit`` messages of each broker: the newest messages that were stored from ``begin_ms`` to ``end_ms``.
    """
    if not 0 < limit <= MAX_MESSAGES_BY_KEY:
        raise OptionError(
            f"limit is {limit}; expected 1 to {MAX_MESSAGES_BY_KEY}, the most that a broker returns for one request"
        )
    first_ms, last_ms = _period(begin_ms, end_ms)
    # Times in an index are up to a second too early, so a broker may return messages that were stored after the end. The
    # messages after the end are dropped below. So that ``limit`` messages remain, the search asks for the maximum number.
    search = IndexSearch(
        key, max(0, first_ms - _INDEX_RESOLUTION_MS), last_ms, limit if end_ms is None else MAX_MESSAGES_BY_KEY
    )
    # An index compares hashes of keys, so compare the keys here.
    matching_messages = [
        m
        for m in _search_indexes(tools, topic, search)
        if (key in m.keys or key == m.msg_id) and first_ms <= m.store_timestamp <= last_ms
    ]
    newest_messages: list[ReceivedMessage] = []
    count_by_broker: Counter[str] = Counter()
    for message in reversed(matching_messages):
        count_by_broker[message.broker_name] += 1
        newest_messages += [message] if count_by_broker[message.broker_name] <= limit else []
    return newest_messages[::-1]


def _period(begin_ms: int | None, end_ms: int | None) -> tuple[int, int]:
    first_ms, last_ms = begin_ms or 0, _MAX_STORE_TIME_MS if end_ms is None else end_ms
    if first_ms > last_ms:
        raise OptionError(f"the time ends at {last_ms}, before it begins at {first_ms}")
    return first_ms, last_ms


def _parse_offset_id(message_id: str) -> OffsetMessageId | None:
    try:
        return OffsetMessageId.parse(message_id)
    except LocalProtocolError:
        return None


def _broker_at(tools: AdminTools, host: str) -> str | None:
    """Return the name of the broker at an address; None if no broker of the cluster has this address."""
    for name, data in tools.admin.cluster().items():
        if host in data.addresses.values():
            return name
    return None


def _message_at(
    tools: AdminTools, broker: str, offset_id: OffsetMessageId, topic: str | None
) -> ReceivedMessage | None:
    name_on_wire = None if topic is None else tools.rpc_client.name_on_wire(topic)
    command = rpc.VIEW_MESSAGE_BY_ID.request(offset=offset_id.offset, topic=name_on_wire, bname=broker)
    # SYSTEM_ERROR with "can not find message by the offset" means that there is no such message.
    answer = tools.rpc_client.request(offset_id.host, command, accepted_codes=(Response.SUCCESS, Response.SYSTEM_ERROR))
    if answer.code != Response.SUCCESS:
        return None
    # If the offset is not the start of a message, the broker returns arbitrary bytes. The broker may also return a message of a
    # topic outside the namespace.
    scope, decoded_messages = (
        tools.rpc_client.scope,
        decode_leniently(answer.body, broker, budget=DecodeBudget(_MAX_RESULT_BYTES)),
    )
    matching_messages = [
        m for m in decoded_messages if m.commit_log_offset == offset_id.offset and scope.is_reversible(m.topic)
    ]
    if not matching_messages:
        return None
    stored_message = with_stored_names(matching_messages[0], scope)
    # A caller with the id of a retried message may know only the original topic of the message, so this topic is accepted, too.
    # The result has the topic in which the message is stored.
    return (
        stored_message
        if topic in (None, stored_message.topic, with_user_names(matching_messages[0], scope).topic)
        else None
    )


def _search_indexes(tools: AdminTools, topic: str, search: IndexSearch) -> list[ReceivedMessage]:
    """Return the messages that the indexes of the topic's brokers find, sorted by store time. If a master is not registered,
    its slave gets the request.

    An index compares hashes of topic and key, so it may also find messages of other topics, which are omitted.
    """
    route, name_on_wire = tools.admin.routes.get_existing(topic, 0.0), tools.rpc_client.name_on_wire(topic)
    requests = {
        name: (
            address,
            rpc.QUERY_MESSAGE.request(
                topic=name_on_wire,
                key=search.key,
                maxNum=search.limit,
                beginTimestamp=search.begin_ms,
                endTimestamp=search.end_ms,
                _UNIQUE_KEY_QUERY=search.is_message_id or None,
                bname=name,
            ),
        )
        for name, data in sorted(route.brokers.items())
        if (address := data.replica("hint"))
    }
    answers = request_each(tools, requests, (Response.SUCCESS, Response.QUERY_NOT_FOUND))
    decode_budget = DecodeBudget(_MAX_RESULT_BYTES)
    decoded_messages = (
        decode_leniently(a.body, name, budget=decode_budget) for name, a in answers if a.code == Response.SUCCESS
    )
    matching_messages = [
        with_stored_names(m, tools.rpc_client.scope)
        for m in chain.from_iterable(decoded_messages)
        if m.topic == name_on_wire
    ]
    return sorted(matching_messages, key=lambda message: _store_order(message.store_timestamp, message))


def _store_order(stored_ms: int, message: ReceivedMessage) -> tuple[int, str, int]:
    """Return the sort key for the order of storing. If a broker has stored several messages in one millisecond, they have the
    order of its commit log.
    """
    return stored_ms, message.broker_name, message.commit_log_offset


def _not_found_error(message_id: str, topic: str | None = None) -> NotFound:
    remedy = (
        "Brokers do not index the ids of batches in batch topics: search by key or by time"
        if topic is not None
        else None
    )
    return NotFound(f"there is no message with id {message_id}", topic=topic, remedy=remedy)


# The maximum number of messages of one search by time, and the memory in bytes for messages that are read ahead.
MAX_MESSAGES_BY_TIME, _MAX_READ_AHEAD_BYTES = 10_000, 64 << 20
_MESSAGES_PER_PULL = 32


class _QueueReader:
    """Reads the messages of one queue that were stored in a period, oldest first. ``head`` is the next message, with its store
    time.

    Like brokers, this class assumes that the store times in a queue never decrease. A message that cannot be decoded is returned
    if its store time is in the period. If the store time of a message that cannot be decoded is after the period, the reading
    continues, because this time may be damaged.
    """

    def __init__(
        self, queue: MessageQueue, start: int, end: int, begin_ms: int, end_ms: int, decode_budget: UnwrapBudget
    ) -> None:
        self.queue = queue
        self._decode_budget = decode_budget
        self.head: tuple[int, ReceivedMessage] | None = None
        self._next_offset, self._end = start, end
        self._begin_ms, self._end_ms = begin_ms, end_ms
        self._decoded_messages: Iterator[tuple[int, ReceivedMessage]] = iter(())

    @property
    def needs_pull(self) -> bool:
        """Whether a pull is necessary to get the next message."""
        return self.head is None and self._next_offset < self._end

    def request(self, max_bytes: int) -> PullRequest:
        count = min(_MESSAGES_PER_PULL, self._end - self._next_offset)
        return PullRequest(
            GROUP,
            self.queue,
            self._next_offset,
            count,
            post_filter=True,
            suspend_s=0.0,
            max_bytes=max_bytes,
            decoded=False,
        )

    def add_answer(self, request: PullRequest, answer: PullAnswer, scope: Scope) -> None:
        self._next_offset = self._end if answer.next_offset <= self._next_offset else answer.next_offset
        self._decoded_messages = self._messages_in_period(
            requested_messages(request, answer.stored_messages, scope, answer.next_offset, self._decode_budget)
        )
        self.advance()

    def advance(self) -> None:
        self.head = next(self._decoded_messages, None)

    def _messages_in_period(self, messages: Iterable[ReceivedMessage]) -> Iterator[tuple[int, ReceivedMessage]]:
        for message in messages:
            stored_ms = message.store_timestamp
            if message.queue_offset >= self._end or (
                stored_ms > self._end_ms and decompressed(message).decode_error is None
            ):
                self._next_offset = self._end
                return
            if self._begin_ms <= stored_ms <= self._end_ms:
                yield stored_ms, message


def messages_of_time(
    tools: AdminTools,
    topic: str,
    begin_ms: int | None,
    end_ms: int | None,
    limit: int,
    environment: Environment | None = None,
) -> list[ReceivedMessage]:
    """Return the first ``limit`` messages of a topic that were stored from ``begin_ms`` to ``end_ms``, in the order of storing.

    Reads all queues of the topic, or with ``environment``, the queues of this environment. Pulls from masters, as the group
    ``rocketmq-spark-cli``.
    """
    if not 0 < limit <= MAX_MESSAGES_BY_TIME:
        raise OptionError(f"limit is {limit}; expected 1 to {MAX_MESSAGES_BY_TIME}, or a key")
    first_ms, last_ms = _period(begin_ms, end_ms)
    queues = EnvironmentQueues(environment)(tools.routes.get_existing(topic, 0.0).stored_queues())
    bounds = with_kept_minimums(tools, tools.offset_reader.bounds(queues, deadline(tools)))
    times_ms = {} if begin_ms is None else dict.fromkeys(bounds, first_ms)
    start_offsets = tools.offset_reader.search_offsets(times_ms, deadline(tools), group=GROUP)
    decode_budget, read_ahead_budget = DecodeBudget(_MAX_RESULT_BYTES), UnwrapBudget(_MAX_READ_AHEAD_BYTES)
    readers = [
        _QueueReader(
            queue,
            queue_bounds.clamp(start_offsets.get(queue, queue_bounds.min_offset)),
            queue_bounds.max_offset,
            first_ms,
            last_ms,
            read_ahead_budget,
        )
        for queue, queue_bounds in sorted(bounds.items())
    ]
    found_messages: list[ReceivedMessage] = []
    next_messages: list[tuple[tuple[int, str, int], int, ReceivedMessage]] = []
    indexes_to_pull = range(len(readers))
    while len(found_messages) < limit:
        _pull_heads(
            tools,
            [readers[index] for index in indexes_to_pull],
            _MAX_READ_AHEAD_BYTES // len(readers) if readers else 0,
        )
        for index in indexes_to_pull:
            if head := readers[index].head:
                heapq.heappush(next_messages, (_store_order(*head), index, head[1]))
        if not next_messages:
            break
        _, index, message = heapq.heappop(next_messages)
        message = decode_budget.decompress(message)
        found_messages.append(
            message if message.topic == message.queue.topic else replace(message, topic=message.queue.topic)
        )
        readers[index].advance()
        indexes_to_pull = range(index, index + 1)
    return found_messages


def _pull_heads(tools: AdminTools, readers: Sequence[_QueueReader], max_bytes: int) -> None:
    """Pull messages for all readers in parallel, until each reader has a head or has read all of its messages."""
    broker_client = BrokerClient(tools.rpc_client, tools.routes)
    while waiting_readers := [reader for reader in readers if reader.needs_pull]:
        requests = [reader.request(max_bytes) for reader in waiting_readers]
        commands = [
            BrokerCommand(r.queue.broker_name, pull_command(r, tools.rpc_client, True), r.queue.topic, r.queue)
            for r in requests
        ]
        answers = broker_client.request_all(commands, deadline(tools), PULL_CODES)
        for reader, request, answer in zip(waiting_readers, requests, answers, strict=True):
            reader.add_answer(
                request,
                to_pull_answer(request, answer, request.queue.broker_name, tools.rpc_client.scope),
                tools.rpc_client.scope,
            )
