"""What the producer and others need of a transport, as small Protocols: the seam is at verbs, not at frames.

The remoting client implements them; another transport implements those it can offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult


class Sender(Protocol):
    """Verbs of a producer. Each raises ``RocketMQError`` subclasses only, and honours the deadline it is given."""

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """Queues that accept sends, in Java's publish order; raises ``RouteNotFound``.

        The sequence object stays identical while the route is unchanged, so that callers may cache by identity.
        """

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """Queues that are there to be read, sorted; some of them may take no sends now."""

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        """One attempt on one queue. ``SendResult.msg_id`` is left empty: ids are the producer's business."""

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        """One attempt; ``done`` is called exactly once, on any thread, and must not block. Never raises."""

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        """Hand the request to the socket; no answer is awaited."""

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        """Take back a timer message that has not fired; returns its id."""

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        """Whether the master of ``broker_name`` answers (GET_MAX_OFFSET of queue 0); False when it has no address."""

    def heartbeat(self, client_id: str, producer_groups: Sequence[str], deadline: Deadline) -> None:
        """Tell every known master which producer groups live here; failures of single brokers are logged."""

    def unregister(self, client_id: str, producer_group: str, deadline: Deadline) -> None:
        """Leave; failures of single brokers are logged."""

    def refresh_routes(self, deadline: Deadline) -> None:
        """Ask the name server again for all known topics and forget brokers that no route names any more."""
