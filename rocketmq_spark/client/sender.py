"""The ``Sender`` port over remoting. Each call makes one attempt to send to the given queue."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import (
    AUTO_CREATE_TOPIC,
    SENDABLE_SYS_FLAGS,
    Perm,
    Property,
    Response,
    SysFlag,
)
from rocketmq_spark.base.threads import KeyedExecutor
from rocketmq_spark.client import topic_attributes, transactions
from rocketmq_spark.client.instance import ClientInstance, RegisteredMember
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.client.topic_attributes import TopicAttributesCache
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    LocalProtocolError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import BatchStorage, HalfCheck, HalfPlace, TransactionState
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Bytes, Command
from rocketmq_spark.wire.messages import encode_item
from rocketmq_spark.wire.properties import encode_properties

logger = logging.getLogger(__name__)

OnSent = Callable[[SendResult | RocketMQError], None]

# While a broker has no known address, the route of the topic is requested again, at most once in this time.
ROUTE_REQUEST_PAUSE_S = 1.0

_STATUS_BY_CODE = {
    Response.SUCCESS: SendStatus.SEND_OK,
    Response.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    Response.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    Response.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
# If a message has one of these properties, the queue offset in the answer belongs to an internal topic.
_DELAY_PROPERTIES = tuple(
    f"\x02{name}\x01"
    for name in (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
)


class ItemEncoder:
    """Implements ``model.send.MessageEncoder``: a batch is the encoded messages, one after the other."""

    def encode_item(self, topic: str, body: Bytes, properties: str, flag: int, born_ms: int) -> bytes:
        return encode_item(body, properties, flag)

    def encode_batch(self, items: Iterable[bytes]) -> bytes:
        return b"".join(items)


class RemotingSender:
    """Implements ``ports.Sender``."""

    def __init__(
        self, rpc_client: RpcClient, routes: Routes, instance: ClientInstance, attributes: TopicAttributesCache
    ) -> None:
        self._rpc_client = rpc_client
        self._routes = routes
        self._instance = instance
        self._attributes = attributes
        self._executor = KeyedExecutor()

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        route = self._routes.recent_route(topic, deadline, refresh)
        if not route.publish_set:
            if any(data.perm & Perm.WRITE and data.write_queues for data in route.queues):
                raise BrokerNotFound("no broker of the topic has a master now", topic=topic)
            raise RouteNotFound("no queue of the topic is writable: no write permission", topic=topic)
        return route.publish_set

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return self._routes.recent_route(topic, deadline).readable_queues()

    def partition_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        try:
            route = self._routes.recent_route(topic, deadline.within(deadline.remaining() / 2), refresh=True)
        except (ConnectionLost, CallTimeout):
            route = self._routes.recent_route(topic, deadline)
        if unlisted_queues := self._routes.unlisted_queues(topic, deadline.within(self._rpc_client.request_timeout_s)):
            broker_names = ", ".join(sorted({queue.broker_name for queue in unlisted_queues}))
            raise BrokerNotFound(
                f"partitions cannot be numbered yet: no name server lists {broker_names}, which had queues of the topic and may "
                "be up",
                topic=topic,
                remedy="After a restart of a name server, brokers register within half a minute. If a broker stays unlisted, "
                "look into its log",
            )
        return route.partition_queues()

    def max_timer_delays_ms(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> dict[str, int]:
        masters = {name: address for name, address in self._routes.masters().items() if name in set(brokers)}
        return topic_attributes.max_timer_delays_ms(self._rpc_client, topic, masters, deadline)

    def has_online_consumer(self, topic: str, deadline: Deadline) -> bool:
        masters = [data.master for data in self._routes.recent_route(topic, deadline).brokers.values() if data.master]
        return topic_attributes.has_online_consumer(self._rpc_client, topic, masters, deadline)

    def batch_storage(self, topic: str, deadline: Deadline) -> BatchStorage | None:
        try:
            brokers = dict.fromkeys(queue.broker_name for queue in self.publish_queues(topic, deadline))
        except RocketMQError:  # the next send will report this error
            return None
        return self._attributes.batch_storage(topic, brokers, deadline)

    def has_broker(self) -> bool:
        return self._routes.has_broker()

    def has_master(self) -> bool:
        return self._routes.has_master()

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        return self._routes.with_similar_topics(error)

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        command = _command(self._rpc_client, queue, request)
        address = _address(self._routes, queue, deadline)
        answer = self._rpc_client.invoke(address, command, deadline)
        return _result(queue, request, answer, address)

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: OnSent,
    ) -> None:
        try:
            command = _command(self._rpc_client, queue, request)
            send = functools.partial(self._send_async, queue, request, command, deadline, done)
            if _is_connected(self._rpc_client, self._routes, queue) and not self._executor.has_work(queue.broker_name):
                send()
            else:  # the lookup of this broker and the connection to it must not delay sends to other brokers
                self._executor.run(queue.broker_name, send)
        except RocketMQError as e:
            done(e)
        except RuntimeError as e:
            done(_no_thread_error(e, queue))

    def _send_async(
        self, queue: MessageQueue, request: SendRequest, command: Command, deadline: Deadline, done: OnSent
    ) -> None:
        try:
            address = _address(self._routes, queue, deadline)
        except RocketMQError as e:
            e.unsent = True
            done(e)
            return

        def on_answer(answer: Command | RocketMQError) -> None:
            result: SendResult | RocketMQError
            try:
                result = answer if isinstance(answer, RocketMQError) else _result(queue, request, answer, address)
            except RocketMQError as e:
                result = e
            done(result)

        try:
            self._rpc_client.invoke_async(address, command, deadline, on_answer)
        except RuntimeError as e:
            done(_no_thread_error(e, queue))

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        command = _command(self._rpc_client, queue, request, is_oneway=True)
        self._rpc_client.invoke_oneway(_address(self._routes, queue, deadline), command, deadline)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        command = rpc.RECALL_MESSAGE.request(
            topic=self._rpc_client.name_on_wire(topic),
            recallHandle=handle,
            producerGroup=self._rpc_client.name_on_wire(group),
            bname=broker_name,
        )
        address = self._routes.address(broker_name)
        answer = self._rpc_client.invoke(address, command, deadline)
        if answer.code != Response.SUCCESS:
            raise error_from_response(answer, address, topic)
        return str(rpc.RECALL_MESSAGE.answer(answer)["msgId"])

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        try:
            command = rpc.GET_MAX_OFFSET.request(
                topic=self._rpc_client.name_on_wire(topic), queueId=0, bname=broker_name
            )
            self._rpc_client.request(self._routes.address(broker_name), command, deadline)
        except RocketMQError:
            return False
        return True

    @property
    def encoder(self) -> ItemEncoder:
        return ItemEncoder()

    @property
    def client_id(self) -> str:
        return self._instance.client_id

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        try:
            address = self._routes.address(place.broker_name)
        except RocketMQError as e:
            e.unsent = True
            raise
        try:
            return transactions.send_decision(self._rpc_client, address, place, decision, deadline)
        except RuntimeError as e:
            connection_error = ConnectionLost(f"no connection can be made: {e}", address, topic=place.topic)
            connection_error.unsent = True
            raise connection_error from e

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        half_checks = None if check is None else transactions.HalfChecks(self._rpc_client, group, check)
        request_handler = None if half_checks is None else half_checks.on_check
        member = RegisteredMember(group, heartbeat_s, request_handler, needs_all_brokers=request_handler is not None)
        self._instance.join(member)

        def leave(deadline: Deadline) -> None:
            if half_checks is not None:
                half_checks.leave()
            self._instance.leave(member, deadline)

        return leave

    def refresh_routes(self, deadline: Deadline) -> None:
        for topic in self._routes.cached_topics():
            try:
                self._routes.get(topic, 0.0, deadline)
            except RocketMQError as e:
                logger.info("the route of %s cannot be refreshed: %s", topic, e)


def _is_connected(rpc_client: RpcClient, routes: Routes, queue: MessageQueue) -> bool:
    try:
        return rpc_client.pool.is_connected(routes.address(queue.broker_name))
    except BrokerNotFound:
        return False


def _address(routes: Routes, queue: MessageQueue, deadline: Deadline) -> str:
    """The address of the queue's broker. If the user named a queue whose route is not cached, the route is requested once."""
    try:
        return routes.address(queue.broker_name)
    except BrokerNotFound:
        routes.get(queue.topic, ROUTE_REQUEST_PAUSE_S, deadline)
        return routes.address(queue.broker_name)


def _command(rpc_client: RpcClient, queue: MessageQueue, request: SendRequest, is_oneway: bool = False) -> Command:
    # A broker does not clear the bits that describe a stored message. A broker would acknowledge a message with such a bit, lose
    # the message, and shift the offsets of the queue for ever.
    if request.sys_flag & ~int(SENDABLE_SYS_FLAGS):  # as an int, because ~ of a flag inverts only the named bits
        raise LocalProtocolError(
            f"sysFlag {request.sys_flag:#x} has bits that a request must not have", topic=queue.topic, queue=str(queue)
        )
    group, properties = rpc_client.name_on_wire(request.group), request.properties
    if request.sys_flag & SysFlag.TRANSACTION_PREPARED:
        properties += encode_properties({Property.PRODUCER_GROUP: group})
    rpc_row = rpc.SEND_BATCH_MESSAGE if request.batch else rpc.SEND_MESSAGE_V2
    make_command = rpc_row.oneway if is_oneway else rpc_row.request
    return make_command(
        request.data,
        producerGroup=group,
        topic=rpc_client.name_on_wire(queue.topic),
        defaultTopic=AUTO_CREATE_TOPIC,
        defaultTopicQueueNums=request.default_topic_queues,
        queueId=queue.queue_id,
        sysFlag=request.sys_flag,
        bornTimestamp=request.born_timestamp_ms,
        flag=request.flag,
        properties=properties,
        reconsumeTimes=request.reconsume_times,
        unitMode=False,
        maxReconsumeTimes=request.max_reconsume_times,
        batch=request.batch,
        brokerName=queue.broker_name,
    )


def _no_thread_error(error: RuntimeError, queue: MessageQueue) -> ConnectionLost:
    return ConnectionLost(f"no connection can be made: {error}", topic=queue.topic, queue=str(queue))


def _result(queue: MessageQueue, request: SendRequest, answer: Command, address: str) -> SendResult:
    if answer.code not in _STATUS_BY_CODE:
        raise error_from_response(answer, address, queue.topic, str(queue))
    fields = rpc.SEND_MESSAGE_V2.answer(answer)
    properties = "\x02" + request.properties
    is_delayed = any(name in properties for name in _DELAY_PROPERTIES)
    queue_id = fields["queueId"]
    return SendResult(
        status=_STATUS_BY_CODE[Response(answer.code)],
        msg_id="",
        queue=MessageQueue(queue.topic, queue.broker_name, queue.queue_id if queue_id is None else queue_id),
        queue_offset=None if is_delayed else fields["queueOffset"],
        offset_msg_id=fields["msgId"],
        transaction_id=fields["transactionId"],
        recall_handle=fields["recallHandle"],
        region_id=None if fields[Property.TRACE_ON] is False else fields[Property.MSG_REGION],
    )
