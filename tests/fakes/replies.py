"""Replies that a test lets arrive."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import MessageRefused, RocketMQError, ServerFault
from rocketmq_spark.model import Message, ReceivedMessage, Reply

YES = Reply(b"yes", {})
REQUEST_PROPERTIES = {Property.CLUSTER, Property.REPLY_TO_CLIENT, Property.CORRELATION_ID}


class FakeReplies:
    """Implements ``ports.Replies`` for client ``me``. Replies to requests of other clients are only recorded."""

    client_id = "me"  # as of ``ScriptedSender``

    def __init__(self) -> None:
        self.events: list[object] = []
        self.groups: list[str] = []
        self.expected: dict[str, Callable[[Reply | RocketMQError], object]] = {}

    def join(self, group: str, heartbeat_s: float) -> Callable[[Deadline], None]:
        self.events.append(("join", group))
        self.groups.append(group)
        return lambda deadline: self._leave(group)

    def _leave(self, group: str) -> None:
        self.events.append(("leave", group))
        self.groups.remove(group)

    def announce(self, deadline: Deadline) -> None:
        self.events.append("announce")

    def expect(self, correlation_id: str, done: Callable[[Reply | RocketMQError], object]) -> Callable[[], None]:
        self.expected[correlation_id] = done
        return lambda: self.expected.pop(correlation_id, None) and None

    def reply(self, request: ReceivedMessage, reply: Message, group: str, deadline: Deadline) -> None:
        if not request.properties.keys() >= REQUEST_PROPERTIES:
            raise MessageRefused(f"message {request.msg_id} is not a request")
        self.events.append(("reply", request.msg_id, reply.body, dict(reply.properties or {}), group))
        if request.properties[Property.REPLY_TO_CLIENT] != self.client_id:
            return
        if not self.groups:
            raise ServerFault("the requester has left")
        self.arrive(request.properties[Property.CORRELATION_ID], Reply(bytes(reply.body), dict(reply.properties or {})))

    def arrive(self, correlation_id: str, reply: Reply | RocketMQError = YES) -> None:
        """Let a reply arrive, which is ignored if no request waits for it."""
        done = self.expected.pop(correlation_id, None)
        if done is not None:
            done(reply)
