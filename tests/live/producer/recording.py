"""What a producer asks of its brokers, recorded between the engine and the transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings


class RecordingSender(RemotingSender):
    """The remoting sender with a note of every send: when, to which queue, and the request."""

    def __init__(self, client: session.Client) -> None:
        super().__init__(client.rpc_client, client.routes, client.instance, client.topic_attributes)
        self.sends: list[tuple[float, MessageQueue, SendRequest]] = []

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        self._note(queue, request)
        return super().send(queue, request, deadline)

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        self._note(queue, request)
        super().send_async(queue, request, deadline, done)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        self._note(queue, request)
        super().send_oneway(queue, request, deadline)

    def brokers(self, since: float = 0.0) -> list[str]:
        """The brokers of all sends from a moment on."""
        return [queue.broker_name for at, queue, _ in self.sends if at >= since]

    def _note(self, queue: MessageQueue, request: SendRequest) -> None:
        self.sends.append((time.monotonic(), queue, request))


def recorded(name_server: str, **settings: Any) -> tuple[BaseProducer, RecordingSender]:
    """A producer and the record of what it sends."""
    client = session.client(options.parse({"nameServer": name_server}).for_role("producer"))
    sender = RecordingSender(client)
    return BaseProducer(sender, ProducerSettings(**{"group": "g_live", "send_timeout_s": 10.0, **settings})), sender
