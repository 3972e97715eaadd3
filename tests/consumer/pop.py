"""Parts of a consumer that pops, on a Proxy in memory and without threads of their own."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.pop import Acknowledger, InvisibleMessage, UnackedMessages
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.simple import MIN_WAIT_S
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.message import PoppedMessage
from tests.consumer.group import ManualWorkers
from tests.fakes.pop_member import FakeProxy
from tests.fakes.timer import ManualTimer, Time
from tests.test_popped import popped

SETTINGS = ConsumerSettings(group="g", uses_pop=True)
INVISIBLE_MS = 30_000


def arrival(holder: Any, lock: str, who: threading.Thread) -> threading.Event:
    """Set when ``who`` wants this lock."""
    arrived, held = threading.Event(), getattr(holder, lock)

    class Watched:
        def __enter__(self) -> None:
            if threading.current_thread() is who:
                arrived.set()
            held.acquire()

        def __exit__(self, *_: object) -> None:
            held.release()

    setattr(holder, lock, Watched())
    return arrived


@dataclass
class PopBench:
    """The parts of a consumer without threads: work is done, and time passes, when the test says so."""

    settings: ConsumerSettings = SETTINGS
    places: int = 1

    def __post_init__(self) -> None:
        self.time = Time()
        self.proxy = FakeProxy(self.time.monotonic, t=self.places)
        self.timer = ManualTimer(self.time)
        self.workers = ManualWorkers(self.time)
        self.in_hand = UnackedMessages()
        self.settling = Acknowledger(self.proxy, self.settings, self.in_hand, self.timer)

    def lent(self, *messages: PoppedMessage) -> list[InvisibleMessage]:
        self.proxy.put(*messages)
        found = self.proxy.receive(
            ("t", 0), len(messages), INVISIBLE_MS / 1000, MIN_WAIT_S, Deadline.after(2 * MIN_WAIT_S)
        )
        now_ms = self.timer.lease_ms()
        return self.in_hand.add("t", found, now_ms + INVISIBLE_MS, now_ms)


def of(msg_id: str, group: str | None = None, attempt: int = 1, queue_id: int = 0) -> PoppedMessage:
    return replace(popped(attempt, msg_id, group=group), queue=MessageQueue("t", "broker-a", queue_id))
