"""Replies that a test lets arrive."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Message, ReceivedMessage, Reply

YES = Reply(b"yes", {})


class FakeReplies:
    """Implements ``ports.Replies``."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.expected: dict[str, Callable[[Reply | RocketMQError], object]] = {}

    def join(self, group: str, heartbeat_s: float) -> Callable[[Deadline], None]:
        self.events.append(("join", group))
        return lambda deadline: self.events.append(("leave", group))

    def announce(self, deadline: Deadline) -> None:
        self.events.append("announce")

    def expect(self, correlation_id: str, done: Callable[[Reply | RocketMQError], object]) -> Callable[[], None]:
        self.expected[correlation_id] = done
        return lambda: self.expected.pop(correlation_id, None) and None

    def reply(self, request: ReceivedMessage, reply: Message, group: str, deadline: Deadline) -> None:
        self.events.append(("reply", request.msg_id, reply.body, dict(reply.properties or {}), group))

    def arrive(self, correlation_id: str, reply: Reply | RocketMQError = YES) -> None:
        self.expected.pop(correlation_id)(reply)
