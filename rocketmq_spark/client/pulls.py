"""The ``PullSource`` port over remoting: what reads ask beside their pulls."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark import codes
from rocketmq_spark.client.admin import Admin
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import AccessDenied, NotSupported
from rocketmq_spark.model import MessageQueue, TopicRoute
from rocketmq_spark.retry import Retry


class RemotingPulls:
    """Implements ``ports.PullSource``."""

    def __init__(self, calls: Calls, routes: Routes, admin: Admin, retry: Retry) -> None:
        self._calls = calls
        self._routes = routes
        self._admin = admin
        self._retry = retry
        self._attributes: dict[tuple[str, str], Mapping[str, str]] = {}

    def on_wire(self, name: str) -> str:
        return self._calls.on_wire(name)

    def keys(self) -> tuple[str, str, str | None] | None:
        if self._calls.credentials is None:
            return None
        keys = self._calls.credentials.current()
        return keys.access_key, keys.secret_key, keys.security_token

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        return self._routes.get(topic, 0.0, deadline.within(self._calls.request_timeout_s))

    def attributes(self, topic: str, broker_name: str) -> Mapping[str, str]:
        return self._admin.topic_config(topic, broker_name).attributes

    def compacted(self, queue: MessageQueue) -> bool:
        why = "Offsets without messages were found, which is right for compaction topics only"
        return self._known(queue, why).get(codes.CLEANUP_POLICY) == codes.COMPACTION

    def batched(self, queue: MessageQueue) -> bool:
        why = "Brokers do not filter the messages of a batch topic one by one"
        return self._known(queue, why).get(codes.QUEUE_TYPE) == codes.BATCH_QUEUE

    def _known(self, queue: MessageQueue, why: str) -> Mapping[str, str]:
        """Asked once; ``why`` it has to be known is told who may not ask."""
        key = queue.topic, queue.broker_name
        if key not in self._attributes:
            try:
                self._attributes[key] = self._retry.run(lambda: self.attributes(*key))
            except NotSupported:  # a broker that is too old for such topics, or a Proxy
                self._attributes[key] = {}
            except AccessDenied as e:
                e.remedy = f"{why}; to tell what it is, the reader needs Get on the topic's configuration"
                raise
        return self._attributes[key]
