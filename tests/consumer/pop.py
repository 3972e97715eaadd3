"""A Proxy in memory: it lends what is put into it, and notes what it is told.

A question for messages waits until something comes, or the Proxy closes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.in_hand import InHand, Lent
from rocketmq_spark.consumer.pop_settings import PopSettings
from rocketmq_spark.consumer.settling import Settling
from rocketmq_spark.errors import ClosedError, RocketMQError, RouteNotFound
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.popped import GroupPolicy, PoppedMessage
from tests.consumer.group import ManualWorkers
from tests.producer.scripted import ManualTimer, Time
from tests.test_popped import popped

SETTINGS = PopSettings(group="g")
INVISIBLE_MS = 30_000


class FakeProxy:
    """Implements ``ports.PopMember``; ``failing`` has errors by verb."""

    client_id = "me"

    def __init__(self, **places: int) -> None:
        self.counts = dict(places)
        self.told: list[tuple[Any, ...]] = []
        self.failing: dict[str, RocketMQError] = {}
        self.said = GroupPolicy(3, True, (10.0, 30.0))
        self.filters: list[Mapping[str, Filter]] = []
        self.lying: defaultdict[tuple[str, int], list[PoppedMessage]] = defaultdict(list)
        self.waiting = 0
        self.changed = threading.Condition()
        self.closed = False

    def put(self, *messages: PoppedMessage, place: int = 0) -> None:
        with self.changed:
            for message in messages:
                self.lying[message.topic, place].append(message)
            self.changed.notify_all()

    def subscribe(self, filters: Mapping[str, Filter], deadline: Deadline) -> None:
        self._note("subscribe")
        self.filters.append(dict(filters))

    def policy(self) -> GroupPolicy:
        return self.said

    def places(self, topic: str, deadline: Deadline) -> int:
        if "places" in self.failing:
            raise self.failing["places"]
        if topic not in self.counts:
            raise RouteNotFound("no such topic", topic=topic)
        return self.counts[topic]

    def receive(
        self, topic: str, place: int, count: int, invisible_s: float, wait_s: float, deadline: Deadline
    ) -> Sequence[PoppedMessage]:
        with self.changed:
            if "receive" in self.failing:
                raise self.failing.pop("receive")
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.closed or self.lying[topic, place], wait_s)
            self.waiting -= 1
            if self.closed:
                raise ClosedError("the channel was closed")
            found = self.lying[topic, place][:count]
            del self.lying[topic, place][:count]
        return found

    def ack(self, message: PoppedMessage, deadline: Deadline) -> None:
        self._note("ack", message.msg_id)

    def change_invisible(self, message: PoppedMessage, invisible_s: float, deadline: Deadline) -> None:
        self._note("change", message.msg_id, invisible_s)

    def forward_to_dlq(self, message: PoppedMessage, deadline: Deadline) -> None:
        self._note("dlq", message.msg_id)

    def close(self, deadline: Deadline) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _note(self, verb: str, *what: Any) -> None:
        if verb in self.failing:
            raise self.failing[verb]
        self.told.append((verb, *what))


@dataclass
class PopBench:
    """The parts of a consumer without threads: work is done, and time passes, when the test says so."""

    settings: PopSettings = SETTINGS
    proxy: FakeProxy = field(default_factory=lambda: FakeProxy(t=1))

    def __post_init__(self) -> None:
        self.time = Time()
        self.timer = ManualTimer(self.time)
        self.workers = ManualWorkers(self.time)
        self.in_hand = InHand()
        self.settling = Settling(self.proxy, self.settings, self.in_hand, self.timer)

    def lent(self, *messages: PoppedMessage) -> list[Lent]:
        now_ms = self.timer.now_ms()
        return self.in_hand.came("t", messages, now_ms + INVISIBLE_MS, now_ms)


def of(msg_id: str, group: str | None = None, attempt: int = 1, queue_id: int = 0) -> PoppedMessage:
    return replace(popped(attempt, msg_id, group=group), queue=MessageQueue("t", "broker-a", queue_id))
