"""The ``PullSource`` port over remoting: the routes, keys and topic types that reads of offset ranges need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rocketmq_spark.base.clock import NO_TIMEOUT_S, Deadline
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.client.topic_attributes import TopicAttributesCache, is_compacted
from rocketmq_spark.errors import AccessDenied
from rocketmq_spark.model import (
    MessageQueue,
    TopicRoute,
)

T = TypeVar("T")


# The maximum age of cached attributes for a read. It is short, because a topic may be deleted and created again with another
# type.
ATTRIBUTES_MAX_AGE_S = 1.0


class RemotingPulls:
    """Implements ``ports.PullSource``."""

    def __init__(self, rpc_client: RpcClient, routes: Routes, attributes: TopicAttributesCache, retry: Retry) -> None:
        self._rpc_client = rpc_client
        self._routes = routes
        self._attributes = attributes
        self._retry = retry

    def name_on_wire(self, name: str) -> str:
        return self._rpc_client.name_on_wire(name)

    def signing_keys(self) -> tuple[str, str, str | None] | None:
        if self._rpc_client.credentials is None:
            return None
        keys = self._rpc_client.credentials.current()
        return keys.access_key, keys.secret_key, keys.security_token

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        return self._routes.get(topic, 0.0, deadline.within(self._rpc_client.request_timeout_s))

    def is_compacted(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        remedy = "Offsets without messages were found. Such offsets are right for compaction topics only"
        attributes = self._fetch_with_retries(
            lambda attempt_deadline: self._attributes.attributes(
                queue.topic, queue.broker_name, attempt_deadline, ATTRIBUTES_MAX_AGE_S
            ),
            remedy,
            deadline,
        )
        return is_compacted(attributes)

    def stores_batches(self, queue: MessageQueue, deadline: Deadline | None = None) -> bool:
        remedy = "Brokers do not filter the messages of a batch topic, or of a compaction topic, one by one"
        is_batch_topic = self._fetch_with_retries(
            lambda attempt_deadline: self._attributes.stores_batches(queue, attempt_deadline, ATTRIBUTES_MAX_AGE_S),
            remedy,
            deadline,
        )
        return is_batch_topic or self.is_compacted(queue, deadline)

    def _fetch_with_retries(self, fetch: Callable[[Deadline], T], remedy: str, deadline: Deadline | None) -> T:
        """Call ``fetch`` with retries. ``AccessDenied`` gets ``remedy``."""
        overall_deadline = deadline or Deadline.after(NO_TIMEOUT_S)
        try:
            return self._retry.run(
                lambda: fetch(overall_deadline.within(self._rpc_client.request_timeout_s)), overall_deadline
            )
        except AccessDenied as e:
            e.remedy = f"{remedy}. To determine the type of the topic, the reader needs the permission Get on the topic"
            raise
