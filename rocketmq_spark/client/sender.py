"""The ``Sender`` port over remoting: one attempt per call, on the queue it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import AUTO_CREATE_TOPIC, SENDABLE_SYS_FLAGS, Property, Response
from rocketmq_spark.errors import LocalProtocolError, NotSupported, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

_STATUS = {
    Response.SUCCESS: SendStatus.SEND_OK,
    Response.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    Response.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    Response.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
# Their queue offset is the internal topic's.
_DELAYING = tuple(
    f"\x02{name}\x01"
    for name in (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
)


class RemotingSender:
    """Implements ``ports.Sender``."""

    def __init__(self, calls: Calls, routes: Routes, route_age_s: float = 30.0) -> None:
        self._calls = calls
        self._routes = routes
        self._route_age_s = route_age_s
        self._published: dict[str, tuple[object, tuple[MessageQueue, ...]]] = {}

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        route = self._routes.get(topic, 0.0 if refresh else self._route_age_s, deadline)
        known = self._published.get(topic)
        if known is None or known[0] is not route:
            known = (route, tuple(route.writable()))
            self._published[topic] = known
        if not known[1]:
            raise RouteNotFound(
                "no queue of the topic may be written to: no write permission, or no master is up", topic=topic
            )
        return known[1]

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return self._routes.get(topic, self._route_age_s, deadline).readable()

    def versions(self, topic: str, deadline: Deadline) -> dict[str, int]:
        """The release (``MQVersion``) of every broker that ``topic`` is sent to; those that do not answer are left out."""
        found = {}
        for broker in sorted({queue.broker_name for queue in self.publish_queues(topic, deadline)}):
            command = rpc.GET_MAX_OFFSET.request(topic=self._calls.on_wire(topic), queueId=0, bname=broker)
            try:
                found[broker] = self._calls.ask(self._routes.address(broker), command, deadline).version
            except RocketMQError as e:
                logger.info("%s does not tell its version: %s", broker, e)
        return found

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        address = self._routes.address(queue.broker_name)
        answer = self._calls.exchange(address, self._command(queue, request), deadline)
        return _result(queue, request, answer, address)

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        try:
            address = self._routes.address(queue.broker_name)
            command = self._command(queue, request)
        except RocketMQError as e:
            done(e)
            return

        def answered(answer: Command | RocketMQError) -> None:
            result: SendResult | RocketMQError
            try:
                result = answer if isinstance(answer, RocketMQError) else _result(queue, request, answer, address)
            except RocketMQError as e:
                result = e
            done(result)

        self._calls.ask_async(address, command, deadline, answered)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        command = self._command(queue, request, oneway=True)
        self._calls.tell(self._routes.address(queue.broker_name), command, deadline)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        command = rpc.RECALL_MESSAGE.request(
            topic=self._calls.on_wire(topic),
            recallHandle=handle,
            producerGroup=self._calls.on_wire(group),
            bname=broker_name,
        )
        address = self._routes.address(broker_name)
        answer = self._calls.exchange(address, command, deadline)
        if answer.code != Response.SUCCESS:
            raise refused(answer, address, topic)
        return str(rpc.RECALL_MESSAGE.answer(answer)["msgId"])

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        try:
            command = rpc.GET_MAX_OFFSET.request(topic=self._calls.on_wire(topic), queueId=0, bname=broker_name)
            self._calls.ask(self._routes.address(broker_name), command, deadline)
        except RocketMQError:
            return False
        return True

    def heartbeat(self, client_id: str, producer_groups: Sequence[str], deadline: Deadline) -> None:
        body = bodies.heartbeat(client_id, [self._calls.on_wire(group) for group in producer_groups])
        for name, address in self._routes.masters().items():
            self._quietly(address, rpc.HEART_BEAT.request(body, bname=name), deadline)

    def unregister(self, client_id: str, producer_group: str, deadline: Deadline) -> None:
        for name, address in self._routes.masters().items():
            command = rpc.UNREGISTER_CLIENT.request(
                clientID=client_id, producerGroup=self._calls.on_wire(producer_group), bname=name
            )
            self._quietly(address, command, deadline)

    def refresh_routes(self, deadline: Deadline) -> None:
        for topic in self._routes.known():
            try:
                self._routes.get(topic, 0.0, deadline)
            except RocketMQError as e:
                logger.info("the route of %s cannot be refreshed: %s", topic, e)

    def _command(self, queue: MessageQueue, request: SendRequest, oneway: bool = False) -> Command:
        # A broker does not clear the bits that describe a stored message: it acknowledges, loses the message, and its
        # queue is shifted for ever.
        if request.sys_flag & ~int(SENDABLE_SYS_FLAGS):  # of a flag, ~ keeps to the bits that have names
            raise LocalProtocolError(
                f"sysFlag {request.sys_flag:#x} has bits that no request may carry", topic=queue.topic, queue=str(queue)
            )
        row = rpc.SEND_BATCH_MESSAGE if request.batch else rpc.SEND_MESSAGE_V2
        make = row.oneway if oneway else row.request
        return make(
            request.body,
            producerGroup=self._calls.on_wire(request.group),
            topic=self._calls.on_wire(queue.topic),
            defaultTopic=AUTO_CREATE_TOPIC,
            defaultTopicQueueNums=request.default_topic_queues,
            queueId=queue.queue_id,
            sysFlag=request.sys_flag,
            bornTimestamp=request.born_timestamp_ms,
            flag=request.flag,
            properties=request.properties,
            reconsumeTimes=request.reconsume_times,
            unitMode=False,
            maxReconsumeTimes=request.max_reconsume_times,
            batch=request.batch,
            brokerName=queue.broker_name,
        )

    def _quietly(self, address: str, command: Command, deadline: Deadline) -> None:
        try:
            self._calls.ask(address, command, deadline.within(self._calls.request_timeout_s))
        except NotSupported:
            logger.debug("%s takes no heartbeats", address)
        except RocketMQError as e:
            logger.info("request %s to %s failed: %s", command.code, address, e)


def _result(queue: MessageQueue, request: SendRequest, answer: Command, address: str) -> SendResult:
    if answer.code not in _STATUS:
        raise refused(answer, address, queue.topic, str(queue))
    fields = rpc.SEND_MESSAGE_V2.answer(answer)
    properties = "\x02" + request.properties
    delayed = any(name in properties for name in _DELAYING)
    queue_id = fields["queueId"]
    return SendResult(
        status=_STATUS[Response(answer.code)],
        msg_id="",
        queue=MessageQueue(queue.topic, queue.broker_name, queue.queue_id if queue_id is None else queue_id),
        queue_offset=None if delayed else fields["queueOffset"],
        offset_msg_id=fields["msgId"],
        transaction_id=fields["transactionId"],
        recall_handle=fields["recallHandle"],
    )
