"""The ``Sender`` port over gRPC. The Proxy chooses the queue of a message, so a ``MessageQueue`` here means a lane to an
endpoint.

Like a queue, a lane keeps the order of its messages, and messages of one group use the same lane. The Proxy does not report
the queue of a message, so results name lane -1 of their endpoint.
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
from rocketmq_spark.base.threads import Failure, Latch, attempt
from rocketmq_spark.errors import MessageIllegal, RemoteProtocolError, RocketMQError, RouteNotFound
from rocketmq_spark.grpc_proxy.encoder import ProxyEncoder, ProxySendRequest
from rocketmq_spark.grpc_proxy.protos import STORED, proto, refused
from rocketmq_spark.grpc_proxy.proxy import Proxy
from rocketmq_spark.grpc_proxy.tables import QUERY_ROUTE, RECALL_MESSAGE, SEND_MESSAGE, Code, MessageType, Permission
from rocketmq_spark.grpc_proxy.transactions import ProxyTransactions
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import BatchStorage, HalfCheck, HalfPlace, SentMessage, TransactionState

logger = logging.getLogger(__name__)

Done = Callable[[SendResult | RocketMQError], None]
# Requests of one message group are sent one after the other. This many groups may be in flight at once, for each endpoint.
LANES = 16
UNKNOWN_QUEUE = -1
ROUTE_S = 30.0
# Chains of one batch that are in flight at once, if its messages are of many groups.
_AT_ONCE = 32
# Number of other topics that are looked up when one is missing. It is small, because every failed send does that.
_LOOKED_FOR = 8
_WRITABLE = (Permission.WRITE, Permission.READ_WRITE)


class _Route(NamedTuple):
    """The Proxy's answer about a topic."""

    types: frozenset[MessageType]
    lanes: tuple[MessageQueue, ...]
    until: float


class ProxySender:
    """Implements ``ports.Sender``. ``messages_of`` returns the messages of a send whose body is bytes.

    ``unpack`` decompresses the body of a half message that the Proxy checks.
    """

    def __init__(
        self,
        proxy: Proxy,
        messages_of: Callable[[SendRequest], Sequence[SentMessage]],
        unpack: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._transactions = ProxyTransactions(proxy, unpack)
        self._proxy = proxy
        self._encoder = ProxyEncoder(proxy.on_wire, proxy.host, messages_of)
        self._routes: dict[str, _Route] = {}
        self._route = functools.partial(_route, proxy, self._routes)

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        return self._route(topic, deadline, refresh).lanes

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return self._route(topic, deadline).lanes

    numbered_queues = all_queues

    def message_types(self, topic: str, deadline: Deadline) -> frozenset[str] | None:
        return frozenset(kind.name for kind in self._route(topic, deadline).types)

    def missing_topic(self, error: RouteNotFound) -> RouteNotFound:
        return error

    def any_broker(self) -> bool:
        return self.any_master()

    def any_master(self) -> bool:
        """Whether any broker seems to be up. A Proxy does not list brokers, so this looks up some topics that had a route."""
        known, seconds = list(self._routes)[:_LOOKED_FOR], self._proxy.access.request_timeout_s
        return not known or any(_is_there(self._route, topic, Deadline.after(seconds)) for topic in known)

    def timers(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> dict[str, int]:
        return {}

    def consumed(self, topic: str, deadline: Deadline) -> bool:
        return False

    def batch_storage(self, topic: str, deadline: Deadline) -> BatchStorage:
        """A Proxy reports only the types of messages that the topic accepts, in its route."""
        route = self._routes.get(topic)
        return BatchStorage(grouped=route is not None and route.types == {MessageType.FIFO})

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        if request.sys_flag & SysFlag.TRANSACTION_PREPARED:
            address = self._proxy.channel(queue.broker_name).address
            self._transactions.publish(queue.topic, request.group, address, deadline)
        made = self._encoder.encoded(queue.topic, request).chains
        if len(made) == len(made[0]) == 1:
            return _ask(self._proxy, queue, made[0][0], deadline)
        landed: list[SendResult | RocketMQError] = []
        there = Latch()

        def done(outcome: SendResult | RocketMQError) -> None:
            landed.append(outcome)
            there.set()

        _Requests(self._proxy, queue, deadline, done).send(made)
        there.wait()
        (outcome,) = landed
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def send_async(self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Done) -> None:
        try:
            made = self._encoder.encoded(queue.topic, request).chains
        except RocketMQError as e:
            done(e)
            return
        _Requests(self._proxy, queue, deadline, done).send(made)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        def done(outcome: SendResult | RocketMQError) -> None:
            if isinstance(outcome, RocketMQError):
                logger.info("a one-way message did not arrive: %s", outcome)

        self.send_async(queue, request, deadline, done)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        request = proto("RecallMessageRequest")(topic=self._proxy.resource(topic), recall_handle=handle)
        return str(self._proxy.ask(RECALL_MESSAGE, request, deadline, topic).message_id)

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        request = proto("QueryRouteRequest")(topic=self._proxy.resource(topic), endpoints=self._proxy.endpoints())
        try:
            self._proxy.ask(QUERY_ROUTE, request, deadline, topic, home=broker_name)
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
        return self._transactions.end(place, decision, deadline)

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        if check is not None:
            return self._transactions.join(group, check)
        return lambda deadline: None  # a producer without transactions does not register at a Proxy

    def refresh_routes(self, deadline: Deadline) -> None:
        for topic in list(self._routes):
            try:
                self._route(topic, deadline, refresh=True)
            except RocketMQError as e:
                logger.info("the route of %s cannot be refreshed: %s", topic, e)


def _route(proxy: Proxy, routes: dict[str, _Route], topic: str, deadline: Deadline, refresh: bool = False) -> _Route:
    """The route of a topic; requested if it is unknown or too old."""
    known = routes.get(topic)
    if known is not None and not refresh and known.until > time.monotonic():
        return known
    request = proto("QueryRouteRequest")(topic=proxy.resource(topic), endpoints=proxy.endpoints())
    answer = proxy.ask(QUERY_ROUTE, request, deadline, topic)
    queues = [queue for queue in answer.message_queues if queue.permission in _WRITABLE]
    if not queues:
        raise RouteNotFound("no queue of the topic is writable: no write permission", topic=topic)
    named = {number for queue in queues for number in queue.accept_message_types}
    types = frozenset(kind for kind in MessageType if kind in named)
    lanes = known.lanes if known else _lanes(topic, proxy.addresses)
    routes[topic] = _Route(types, lanes, time.monotonic() + ROUTE_S)
    return routes[topic]


def _is_there(route: Callable[..., _Route], topic: str, deadline: Deadline) -> bool:
    try:
        route(topic, deadline, refresh=True)
    except RouteNotFound as e:
        return e.broker_code is None
    return True


def _lanes(topic: str, addresses: Sequence[str]) -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, one, lane) for lane in range(LANES) for one in addresses)


def _ask(proxy: Proxy, queue: MessageQueue, request: ProxySendRequest, deadline: Deadline) -> SendResult:
    """Send one request on the calling thread, which saves waking another thread for the answer."""
    channel = proxy.channel(queue.broker_name)
    try:
        answer = channel.ask(SEND_MESSAGE, request.data, deadline)
    except RocketMQError as e:
        proxy.noted(channel.address, e)
        raise
    proxy.noted(channel.address)
    outcome = _outcome(answer, request, queue.topic, channel.address)
    if isinstance(outcome, RocketMQError):
        raise outcome
    return outcome


class _Requests:
    """The requests of one send, in chains that are sent in parallel. The outcome is the first failure, with the messages that
    were stored. A message that is permanently rejected stops only its own chain; any other failure takes precedence as the
    outcome.
    """

    def __init__(self, proxy: Proxy, queue: MessageQueue, deadline: Deadline, done: Done) -> None:
        self._proxy = proxy
        self._queue = queue
        self._deadline = deadline
        self._done = done
        self._lock = threading.Lock()
        self._waiting: deque[deque[ProxySendRequest]] = deque()
        self._results: list[tuple[SendResult, str]] = []  # each with the ids of its messages
        self._error: RocketMQError | None = None
        self._behind: list[str] = []
        self._left = 0

    def send(self, chains: Sequence[Sequence[ProxySendRequest]]) -> None:
        first, later = chains[:_AT_ONCE], chains[_AT_ONCE:]
        self._left = len(first)
        self._waiting.extend(map(deque, later))
        for chain in first:
            self._send(deque(chain))

    def _send(self, chain: deque[ProxySendRequest]) -> None:
        """Send the next request of a chain."""
        request = chain.popleft()
        channel = self._proxy.channel(self._queue.broker_name)

        def answered(answer: Any) -> None:
            error = answer if isinstance(answer, RocketMQError) else None
            self._proxy.noted(channel.address, error)
            self._landed(chain, request, error or _outcome(answer, request, self._queue.topic, channel.address))

        try:
            channel.ask_async(SEND_MESSAGE, request.data, self._deadline, answered)
        except RocketMQError as e:
            self._landed(chain, request, e)

    def _landed(
        self, chain: deque[ProxySendRequest], request: ProxySendRequest, outcome: SendResult | RocketMQError
    ) -> None:
        with self._lock:
            if isinstance(outcome, RocketMQError):
                self._behind += [msg_id for waiting in chain for msg_id in waiting.ids.split(",")]
                chain.clear()
                if self._error is None or (_of_one(self._error) and not _of_one(outcome)):
                    self._error = outcome
            else:
                self._results.append((outcome, request.ids))
            stops = self._error is not None and not _of_one(self._error)
            following = None if stops else chain or (self._waiting.popleft() if self._waiting else None)
            if following is None:
                self._left -= 1
            over = self._left == 0
        if following is not None:
            self._send(following)
        elif over and self._error is not None:
            self._error.stored, self._error.behind = _each(self._results), tuple(self._behind)
            self._done(self._error)
        elif over:
            self._done(_together([result for result, _ in self._results]))


def _of_one(error: RocketMQError) -> bool:
    """Whether an error is about one message only, so that others may still be sent."""
    return isinstance(error, MessageIllegal)


def _each(results: Sequence[tuple[SendResult, str]]) -> dict[str, SendResult]:
    """The result of each message of these requests, by its id."""
    return {
        msg_id: result._replace(
            msg_id=msg_id, queue_offset=None if result.queue_offset is None else result.queue_offset + number
        )
        for result, ids in results
        for number, msg_id in enumerate(ids.split(","))
    }


def _outcome(answer: Any, request: ProxySendRequest, topic: str, address: str) -> SendResult | RocketMQError:
    """The result or error of a request. An answer that cannot be decoded is an error, too, so that every waiting call ends."""
    found = attempt(_result, answer, request, topic, address)
    if not isinstance(found, Failure):
        return found
    if isinstance(found.error, RocketMQError):
        return found.error
    return RemoteProtocolError(f"unreadable answer: {found}", address, topic=topic)


def _result(answer: Any, request: ProxySendRequest, topic: str, address: str) -> SendResult:
    """The result of one request. The answer has one entry for all messages, with their ids joined, or one entry for each."""
    of_entries = [entry.status for entry in answer.entries]
    # With several entries, the status of the answer may only say that theirs differ.
    whole = [] if of_entries and answer.status.code == Code.MULTIPLE_RESULTS else [answer.status]
    for status in whole + of_entries:
        if status.code not in STORED:
            raise refused(status, address, topic)
    if not answer.entries:
        raise RemoteProtocolError("the Proxy acknowledged nothing", address, topic=topic)
    # For messages that are stored less safely (flush or replication time-out), a Proxy returns only a status: no id, no offset.
    named = [entry.message_id for entry in answer.entries if entry.status.code == Code.OK or entry.message_id]
    all_named, acknowledged = len(named) == len(answer.entries), ",".join(named)
    good = acknowledged == request.ids if all_named else {*named} <= {*request.ids.split(",")}
    if not good and request.ids.strip(","):
        raise RemoteProtocolError(
            f"the Proxy acknowledged messages {acknowledged[:200]}; expected {request.ids[:200]}",
            address,
            topic=topic,
        )
    entry = answer.entries[0]
    return SendResult(
        status=max((STORED[status.code] for status in whole + of_entries), key=list(SendStatus).index),
        msg_id="",
        queue=MessageQueue(topic, address, UNKNOWN_QUEUE),
        queue_offset=int(entry.offset) if all_named and not request.delayed else None,
        transaction_id=entry.transaction_id or None,
        recall_handle=entry.recall_handle or None,
    )


def _together(results: Sequence[SendResult]) -> SendResult:
    """One result for several requests: the least safe status, and no offset, because they are in several queues."""
    if len(results) == 1:
        return results[0]
    status = max((one.status for one in results), key=list(SendStatus).index)
    return SendResult(status=status, msg_id="", queue=results[0].queue, queue_offset=None)
