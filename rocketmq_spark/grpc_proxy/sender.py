"""The ``Sender`` port over gRPC.

The Proxy chooses the queue of a message. So a ``MessageQueue`` of this module is a virtual queue of an endpoint: its broker
name is the address of the endpoint. Like a queue, a virtual queue keeps the order of its messages, and messages of one group
use the same virtual queue. The Proxy does not report the queue of a message, so the queue of a result has the id -1.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.base.threads import Failure, Latch, capture
from rocketmq_spark.errors import MessageIllegal, RemoteProtocolError, RocketMQError, RouteNotFound
from rocketmq_spark.grpc_proxy.encoder import ProxyEncoder, ProxySendRequest
from rocketmq_spark.grpc_proxy.protos import SEND_STATUSES, error_from_status, proto
from rocketmq_spark.grpc_proxy.proxy import Proxy
from rocketmq_spark.grpc_proxy.tables import QUERY_ROUTE, RECALL_MESSAGE, SEND_MESSAGE, Code, MessageType, Permission
from rocketmq_spark.grpc_proxy.transactions import ProxyTransactions
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import BatchStorage, HalfCheck, HalfPlace, SentMessage, TransactionState

logger = logging.getLogger(__name__)

OnSent = Callable[[SendResult | RocketMQError], None]
# Virtual queues of each endpoint. A message group uses one virtual queue, and a virtual queue has only one request in flight, so
# at most this many groups have a request in flight at an endpoint.
QUEUES_PER_ENDPOINT = 16
UNKNOWN_QUEUE_ID = -1
ROUTE_MAX_AGE_S = 30.0
# Maximum number of chains of one batch in flight. A batch has many chains if its messages are of many groups.
_MAX_PARALLEL_CHAINS = 32
# Maximum number of topics whose routes ``has_master`` requests. The number is small, because every failed send calls
# ``has_master``.
_MAX_PROBED_TOPICS = 8
_WRITE_PERMISSIONS = (Permission.WRITE, Permission.READ_WRITE)


class _Route(NamedTuple):
    """The message types that a topic accepts, and its virtual queues. ``expires_at`` is a time of the monotonic clock."""

    types: frozenset[MessageType]
    queues: tuple[MessageQueue, ...]
    expires_at: float


class ProxySender:
    """Implements ``ports.Sender``.

    ``messages_of`` decodes the messages of a send whose body is bytes. ``unpack`` decompresses the body of a half message that
    the Proxy checks.
    """

    def __init__(
        self,
        proxy: Proxy,
        messages_of: Callable[[SendRequest], Sequence[SentMessage]],
        unpack: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._transactions = ProxyTransactions(proxy, unpack)
        self._proxy = proxy
        self._encoder = ProxyEncoder(proxy.name_on_wire, proxy.host, messages_of)
        self._routes: dict[str, _Route] = {}
        self._route = functools.partial(_route, proxy, self._routes)

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        return self._route(topic, deadline, refresh).queues

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return self._route(topic, deadline).queues

    partition_queues = all_queues

    def message_types(self, topic: str, deadline: Deadline) -> frozenset[str] | None:
        return frozenset(kind.name for kind in self._route(topic, deadline).types)

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        return error

    def has_broker(self) -> bool:
        return self.has_master()

    def has_master(self) -> bool:
        """Whether any broker seems to be up. A Proxy does not list brokers, so this method requests the routes of some topics for
        which it had a route earlier.
        """
        topics, timeout_s = list(self._routes)[:_MAX_PROBED_TOPICS], self._proxy.connect_options.request_timeout_s
        return not topics or any(_has_topic(self._route, topic, Deadline.after(timeout_s)) for topic in topics)

    def max_timer_delays_ms(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> dict[str, int]:
        return {}

    def has_online_consumer(self, topic: str, deadline: Deadline) -> bool:
        return False

    def batch_storage(self, topic: str, deadline: Deadline) -> BatchStorage:
        """Return what the message types in the cached route show, because the Proxy reports nothing else about the storage."""
        route = self._routes.get(topic)
        return BatchStorage(needs_group=route is not None and route.types == {MessageType.FIFO})

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        if request.sys_flag & SysFlag.TRANSACTION_PREPARED:
            address = self._proxy.channel(queue.broker_name).address
            self._transactions.announce(queue.topic, request.group, address, deadline)
        chains = self._encoder.batch_of(queue.topic, request).chains
        if len(chains) == len(chains[0]) == 1:
            return _send_blocking(self._proxy, queue, chains[0][0], deadline)
        outcomes: list[SendResult | RocketMQError] = []
        end_latch = Latch()

        def on_outcome(outcome: SendResult | RocketMQError) -> None:
            outcomes.append(outcome)
            end_latch.set()

        _ParallelSend(self._proxy, queue, deadline, on_outcome).send(chains)
        end_latch.wait()
        (outcome,) = outcomes
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: OnSent) -> None:
        try:
            chains = self._encoder.batch_of(queue.topic, request).chains
        except RocketMQError as e:
            done(e)
            return
        _ParallelSend(self._proxy, queue, deadline, done).send(chains)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        def on_outcome(outcome: SendResult | RocketMQError) -> None:
            if isinstance(outcome, RocketMQError):
                logger.info("a one-way message did not arrive: %s", outcome)

        self.send_async(queue, request, deadline, on_outcome)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        request = proto("RecallMessageRequest")(topic=self._proxy.resource(topic), recall_handle=handle)
        return str(self._proxy.request(RECALL_MESSAGE, request, deadline, topic).message_id)

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        request = proto("QueryRouteRequest")(topic=self._proxy.resource(topic), endpoints=self._proxy.endpoints())
        try:
            self._proxy.request(QUERY_ROUTE, request, deadline, topic, preferred_address=broker_name)
        except RocketMQError:
            return False
        return True

    @property
    def encoder(self) -> ProxyEncoder:
        return self._encoder

    @property
    def client_id(self) -> str:
        return self._proxy.client_id

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        return self._transactions.send_decision(place, decision, deadline)

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        if check is not None:
            return self._transactions.join(group, check)
        return lambda deadline: None  # a producer without transactions does not register with a Proxy

    def refresh_routes(self, deadline: Deadline) -> None:
        for topic in list(self._routes):
            try:
                self._route(topic, deadline, refresh=True)
            except RocketMQError as e:
                logger.info("the route of %s cannot be refreshed: %s", topic, e)


def _route(proxy: Proxy, routes: dict[str, _Route], topic: str, deadline: Deadline, refresh: bool = False) -> _Route:
    """Return the route of a topic. Requests the route if it is not cached or too old, or with ``refresh``."""
    cached_route = routes.get(topic)
    if cached_route is not None and not refresh and cached_route.expires_at > time.monotonic():
        return cached_route
    request = proto("QueryRouteRequest")(topic=proxy.resource(topic), endpoints=proxy.endpoints())
    answer = proxy.request(QUERY_ROUTE, request, deadline, topic)
    queues = [queue for queue in answer.message_queues if queue.permission in _WRITE_PERMISSIONS]
    if not queues:
        raise RouteNotFound("no queue of the topic is writable: no write permission", topic=topic)
    type_numbers = {number for queue in queues for number in queue.accept_message_types}
    types = frozenset(kind for kind in MessageType if kind in type_numbers)
    virtual_queues = cached_route.queues if cached_route else _virtual_queues(topic, proxy.addresses)
    routes[topic] = _Route(types, virtual_queues, time.monotonic() + ROUTE_MAX_AGE_S)
    return routes[topic]


def _has_topic(route: Callable[..., _Route], topic: str, deadline: Deadline) -> bool:
    try:
        route(topic, deadline, refresh=True)
    except RouteNotFound as e:
        return e.broker_code is None
    return True


def _virtual_queues(topic: str, addresses: Sequence[str]) -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, address, number) for number in range(QUEUES_PER_ENDPOINT) for address in addresses)


def _send_blocking(proxy: Proxy, queue: MessageQueue, request: ProxySendRequest, deadline: Deadline) -> SendResult:
    """Send one request on the calling thread. This is faster than ``_ParallelSend``, which needs a thread for the answer."""
    channel = proxy.channel(queue.broker_name)
    try:
        answer = channel.invoke(SEND_MESSAGE, request.data, deadline)
    except RocketMQError as e:
        proxy.record_result(channel.address, e)
        raise
    proxy.record_result(channel.address)
    outcome = _outcome(answer, request, queue.topic, channel.address)
    if isinstance(outcome, RocketMQError):
        raise outcome
    return outcome


class _ParallelSend:
    """One send of several requests, in chains that are sent in parallel. ``_lock`` guards its state.

    The outcome is a result for all messages, or an error with the results of the stored messages. A rejected message stops only
    its own chain. Any other failure stops all chains, and takes precedence as the outcome.
    """

    def __init__(self, proxy: Proxy, queue: MessageQueue, deadline: Deadline, on_sent: OnSent) -> None:
        self._proxy = proxy
        self._queue = queue
        self._deadline = deadline
        self._on_sent = on_sent
        self._lock = threading.Lock()
        self._waiting_chains: deque[deque[ProxySendRequest]] = deque()  # not in flight yet
        self._results: list[tuple[SendResult, str]] = []  # each with the ids of its messages
        self._error: RocketMQError | None = None
        self._unsent_ids: list[str] = []  # ids of the messages that follow a failed request in its chain
        self._open_chain_count = 0  # number of chains in flight

    def send(self, chains: Sequence[Sequence[ProxySendRequest]]) -> None:
        first_chains, later_chains = chains[:_MAX_PARALLEL_CHAINS], chains[_MAX_PARALLEL_CHAINS:]
        self._open_chain_count = len(first_chains)
        self._waiting_chains.extend(map(deque, later_chains))
        for chain in first_chains:
            self._send(deque(chain))

    def _send(self, chain: deque[ProxySendRequest]) -> None:
        """Send the next request of ``chain``."""
        request = chain.popleft()
        channel = self._proxy.channel(self._queue.broker_name)

        def on_answer(answer: Any) -> None:
            error = answer if isinstance(answer, RocketMQError) else None
            self._proxy.record_result(channel.address, error)
            self._on_outcome(chain, request, error or _outcome(answer, request, self._queue.topic, channel.address))

        try:
            channel.invoke_async(SEND_MESSAGE, request.data, self._deadline, on_answer)
        except RocketMQError as e:
            self._on_outcome(chain, request, e)

    def _on_outcome(
        self, chain: deque[ProxySendRequest], request: ProxySendRequest, outcome: SendResult | RocketMQError
    ) -> None:
        with self._lock:
            if isinstance(outcome, RocketMQError):
                self._unsent_ids += [msg_id for unsent in chain for msg_id in unsent.ids.split(",")]
                chain.clear()
                if self._error is None or (_concerns_one_message(self._error) and not _concerns_one_message(outcome)):
                    self._error = outcome
            else:
                self._results.append((outcome, request.ids))
            is_stopped = self._error is not None and not _concerns_one_message(self._error)
            next_chain = (
                None if is_stopped else chain or (self._waiting_chains.popleft() if self._waiting_chains else None)
            )
            if next_chain is None:
                self._open_chain_count -= 1
            is_over = self._open_chain_count == 0
        if next_chain is not None:
            self._send(next_chain)
        elif is_over and self._error is not None:
            self._error.stored, self._error.skipped_ids = _results_by_id(self._results), tuple(self._unsent_ids)
            self._on_sent(self._error)
        elif is_over:
            self._on_sent(_combined_result([result for result, _ in self._results]))


def _concerns_one_message(error: RocketMQError) -> bool:
    """Whether an error concerns one message only, so that other messages can still be sent."""
    return isinstance(error, MessageIllegal)


def _results_by_id(results: Sequence[tuple[SendResult, str]]) -> dict[str, SendResult]:
    """Return the result of each message of these requests, by message id."""
    return {
        msg_id: result._replace(
            msg_id=msg_id, queue_offset=None if result.queue_offset is None else result.queue_offset + number
        )
        for result, ids in results
        for number, msg_id in enumerate(ids.split(","))
    }


def _outcome(answer: Any, request: ProxySendRequest, topic: str, address: str) -> SendResult | RocketMQError:
    """Return the result or error of a request. An answer that cannot be decoded is an error, too, so that no caller waits
    forever.
    """
    result = capture(_result, answer, request, topic, address)
    if not isinstance(result, Failure):
        return result
    if isinstance(result.error, RocketMQError):
        return result.error
    return RemoteProtocolError(f"unreadable answer: {result}", address, topic=topic)


def _result(answer: Any, request: ProxySendRequest, topic: str, address: str) -> SendResult:
    """Return the result of one request. The answer has one entry for all messages, with joined ids, or one entry for each."""
    entry_statuses = [entry.status for entry in answer.entries]
    # MULTIPLE_RESULTS only says that the statuses of the entries differ.
    answer_statuses = [] if entry_statuses and answer.status.code == Code.MULTIPLE_RESULTS else [answer.status]
    for status in answer_statuses + entry_statuses:
        if status.code not in SEND_STATUSES:
            raise error_from_status(status, address, topic)
    if not answer.entries:
        raise RemoteProtocolError("the Proxy acknowledged nothing", address, topic=topic)
    # After a time-out of the flush or the replication, the messages are stored, but the Proxy returns no ids and no offsets.
    ids = [entry.message_id for entry in answer.entries if entry.status.code == Code.OK or entry.message_id]
    has_all_ids, joined_ids = len(ids) == len(answer.entries), ",".join(ids)
    is_expected = joined_ids == request.ids if has_all_ids else {*ids} <= {*request.ids.split(",")}
    if not is_expected and request.ids.strip(","):
        raise RemoteProtocolError(
            f"the Proxy acknowledged messages {joined_ids[:200]}; expected {request.ids[:200]}",
            address,
            topic=topic,
        )
    entry = answer.entries[0]
    return SendResult(
        status=max(
            (SEND_STATUSES[status.code] for status in answer_statuses + entry_statuses), key=list(SendStatus).index
        ),
        msg_id="",
        queue=MessageQueue(topic, address, UNKNOWN_QUEUE_ID),
        queue_offset=int(entry.offset) if has_all_ids and not request.is_delayed else None,
        transaction_id=entry.transaction_id or None,
        recall_handle=entry.recall_handle or None,
    )


def _combined_result(results: Sequence[SendResult]) -> SendResult:
    """Return one result for several requests: the worst status, and no offset, because the messages are in several queues."""
    if len(results) == 1:
        return results[0]
    status = max((result.status for result in results), key=list(SendStatus).index)
    return SendResult(status=status, msg_id="", queue=results[0].queue, queue_offset=None)
