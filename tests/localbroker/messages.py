"""Sending and reading a few messages with the client's own verbs, for tests of the local broker."""

from __future__ import annotations

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.instance import ClientInstance, MemberRegistry
from rocketmq_spark.client.name_servers import NameServers
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.client.topic_attributes import TopicAttributesCache
from rocketmq_spark.model import MessageQueue, SendRequest, SendStatus
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.messages import decode_messages
from tests.helpers import awaited


def send(name_server: str, topic: str, *bodies: bytes) -> None:
    """To queue 0 of the first broker of the topic, each acknowledged, and in its queue when this returns."""
    calls = RpcClient(Pool(ConnectOptions()))
    routes = Routes(NameServers(calls, name_server.split(";")))
    queue = routes.get(topic, 0.0).writable_queues()[0]
    sender = RemotingSender(
        calls, routes, ClientInstance(MemberRegistry(), calls, routes), TopicAttributesCache(calls, routes)
    )
    try:
        for body in bodies:
            result = sender.send(queue, SendRequest("GID_test", body), Deadline.after(10))
            assert result.status is SendStatus.SEND_OK
        end = (result.queue_offset or 0) + 1 if bodies else 0
        master = routes.get(topic).brokers[queue.broker_name].master
        assert master is not None
        ask = rpc.GET_MAX_OFFSET.request(topic=topic, queueId=queue.queue_id, bname=queue.broker_name)
        awaited(lambda: rpc.GET_MAX_OFFSET.answer(calls.request(master, ask))["offset"], lambda found: found >= end)
    finally:
        calls.pool.close()


def read(admin: BaseAdmin, topic: str, address: str | None = None) -> list[bytes]:
    """All bodies of queue 0 at ``address`` (default: the master of its first broker), in order."""
    queue = admin.route(topic).readable_queues()[0]
    calls = RpcClient(Pool(ConnectOptions()))
    found: list[bytes] = []
    try:
        while True:
            answer = calls.request(
                address or _master(admin, topic, queue), _pull(queue, len(found)), accepted_codes=(0, 19, 21)
            )
            if answer.code != Response.SUCCESS:
                return found
            found += [message.body for message in decode_messages(answer.body)]
    finally:
        calls.pool.close()


def _master(admin: BaseAdmin, topic: str, queue: MessageQueue) -> str:
    address = admin.route(topic).brokers[queue.broker_name].master
    assert address is not None
    return address


def _pull(queue: MessageQueue, offset: int) -> rpc.Command:
    return rpc.PULL_MESSAGE.request(
        consumerGroup="GID_test",
        topic=queue.topic,
        queueId=queue.queue_id,
        queueOffset=offset,
        maxMsgNums=32,
        sysFlag=4,
        commitOffset=0,
        suspendTimeoutMillis=0,
        subscription="*",
        subVersion=0,
        expressionType="TAG",
        bname=queue.broker_name,
    )
