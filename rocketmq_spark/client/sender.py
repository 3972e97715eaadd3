"""The ``Sender`` port over remoting: one attempt per call, on the queue it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import BrokerNotFound, NotSupported, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

AUTO_CREATE_TOPIC = "TBW102"

_STATUS = {
    Response.SUCCESS: SendStatus.SEND_OK,
    Response.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    Response.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    Response.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
# Their queue offset is the internal topic's.
_DELAYING = ("DELAY\x01", "TIMER_DELAY_SEC\x01", "TIMER_DELAY_MS\x01", "TIMER_DELIVER_MS\x01")


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

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        address = self._routes.address(queue.broker_name)
        answer = self._calls.ask(address, _command(queue, request), deadline, _STATUS)
        return _result(queue, request, answer)

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        try:
            address = self._routes.address(queue.broker_name)
            command = _command(queue, request)
        except RocketMQError as e:
            done(e)
            return

        def answered(answer: Command | RocketMQError) -> None:
            if isinstance(answer, RocketMQError):
                done(answer)
            elif answer.code in _STATUS:
                done(_result(queue, request, answer))
            else:
                done(refused(answer, address, queue.topic, str(queue)))

        self._calls.ask_async(address, command, deadline, answered)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        command = _command(queue, request, oneway=True)
        self._calls.tell(self._routes.address(queue.broker_name), command, deadline)

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        command = rpc.RECALL_MESSAGE.request(topic=topic, recallHandle=handle, producerGroup=group, bname=broker_name)
        answer = self._calls.ask(self._routes.address(broker_name), command, deadline)
        return str(rpc.RECALL_MESSAGE.answer(answer)["msgId"])

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        try:
            command = rpc.GET_MAX_OFFSET.request(topic=topic, queueId=0, bname=broker_name)
            self._calls.ask(self._routes.address(broker_name), command, deadline)
        except RocketMQError:
            return False
        return True

    def heartbeat(self, client_id: str, producer_groups: Sequence[str], deadline: Deadline) -> None:
        body = bodies.heartbeat(client_id, producer_groups)
        for address in self._masters():
            self._quietly(address, rpc.HEART_BEAT.request(body), deadline)

    def unregister(self, client_id: str, producer_group: str, deadline: Deadline) -> None:
        for address in self._masters():
            command = rpc.UNREGISTER_CLIENT.request(clientID=client_id, producerGroup=producer_group)
            self._quietly(address, command, deadline)

    def refresh_routes(self, deadline: Deadline) -> None:
        for topic in self._routes.known():
            try:
                self._routes.get(topic, 0.0, deadline)
            except RocketMQError as e:
                logger.info("the route of %s stays as it is: %s", topic, e)

    def _masters(self) -> list[str]:
        return self._routes.masters()

    def _quietly(self, address: str, command: Command, deadline: Deadline) -> None:
        try:
            self._calls.ask(address, command, deadline)
        except NotSupported:
            logger.debug("%s takes no heartbeats", address)
        except (RocketMQError, BrokerNotFound) as e:
            logger.info("heartbeat to %s failed: %s", address, e)


def _command(queue: MessageQueue, request: SendRequest, oneway: bool = False) -> Command:
    row = rpc.SEND_BATCH_MESSAGE if request.batch else rpc.SEND_MESSAGE_V2
    make = row.oneway if oneway else row.request
    return make(
        request.body,
        producerGroup=request.group,
        topic=queue.topic,
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


def _result(queue: MessageQueue, request: SendRequest, answer: Command) -> SendResult:
    fields = rpc.SEND_MESSAGE_V2.answer(answer)
    delayed = any(name in request.properties for name in _DELAYING)
    return SendResult(
        status=_STATUS[Response(answer.code)],
        msg_id="",
        queue=MessageQueue(queue.topic, queue.broker_name, fields["queueId"] if fields["queueId"] is not None else -1),
        queue_offset=None if delayed else fields["queueOffset"],
        offset_msg_id=fields["msgId"],
        transaction_id=fields["transactionId"],
        recall_handle=fields["recallHandle"],
    )
