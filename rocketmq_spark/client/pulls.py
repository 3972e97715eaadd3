"""The ``PullSource`` port over remoting: what reads ask beside their pulls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rocketmq_spark import codes
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.client.kinds import Kinds
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import AccessDenied
from rocketmq_spark.model import MessageQueue, TopicRoute
from rocketmq_spark.retry import Retry

T = TypeVar("T")

# A topic may be deleted and made again as another kind; the offsets of a read are those of the new one then.
YOUNG_S = 1.0


class RemotingPulls:
    """Implements ``ports.PullSource``."""

    def __init__(self, calls: Calls, routes: Routes, kinds: Kinds, retry: Retry) -> None:
        self._calls = calls
        self._routes = routes
        self._kinds = kinds
        self._retry = retry

    def on_wire(self, name: str) -> str:
        return self._calls.on_wire(name)

    def keys(self) -> tuple[str, str, str | None] | None:
        if self._calls.credentials is None:
            return None
        keys = self._calls.credentials.current()
        return keys.access_key, keys.secret_key, keys.security_token

    def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        return self._routes.get(topic, 0.0, deadline.within(self._calls.request_timeout_s))

    def compacted(self, queue: MessageQueue) -> bool:
        why = "Offsets without messages were found, which is right for compaction topics only"
        found = self._known(lambda soon: self._kinds.attributes(queue.topic, queue.broker_name, soon, YOUNG_S), why)
        return (found or {}).get(codes.CLEANUP_POLICY) == codes.COMPACTION

    def batched(self, queue: MessageQueue) -> bool:
        why = "Brokers do not filter the messages of a batch topic one by one"
        return self._known(lambda soon: self._kinds.batched(queue, soon, YOUNG_S), why)

    def _known(self, ask: Callable[[Deadline], T], why: str) -> T:
        """``why`` it has to be known is told who may not ask."""
        try:
            return self._retry.run(lambda: ask(Deadline.after(self._calls.request_timeout_s)))
        except AccessDenied as e:
            e.remedy = f"{why}; to tell what it is, the reader needs Get on the topic's configuration"
            raise
