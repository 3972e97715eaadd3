"""A bench of consumers of one group, on brokers in memory and without threads of their own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import KeyedExecutor
from rocketmq_spark.consumer.listener import DeferredListener
from rocketmq_spark.consumer.listener_pool import ListenerPool, Work
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tools import ConsumerTools
from rocketmq_spark.consumer.tracing import ListenerTraces
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from tests.fakes.group_member import GROUP, FakeBrokers, FakeMember
from tests.fakes.timer import ManualTimer, Time


class AwaitedAside(KeyedExecutor):
    """Its threads are real, and have ended before time goes on: a key is busy until its thread has looked for more work."""

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        super().run(key, work)
        for thread in threading.enumerate():
            if thread.name == f"rocketmq-aside-{key}":
                thread.join(60)


class ManualWorkers(ListenerPool):
    """Work is done when time moves, each on its own: no threads."""

    def __init__(self, time: Time) -> None:
        super().__init__("manual", 0)
        self.timer = ManualTimer(time)
        self.held = False  # as if every thread were busy
        self.waiting: list[Work] = []
        self.unfinished_messages = False
        self.threads: list[threading.Thread] | None = None  # a list: work is done there, and time goes on meanwhile

    def submit(self, *work: Work) -> None:
        for each in work:
            self.timer.call_later(0, partial(self._do, each))

    def _do(self, work: Work) -> None:
        if self.held:
            self.waiting.append(work)
        elif self.threads is not None:
            self.threads.append(threading.Thread(target=work))
            self.threads[-1].start()
        else:
            work()

    def let_go(self) -> None:
        """All threads are free again."""
        self.held = False
        for work in self.waiting:
            self.timer.call_later(0, work)
        self.waiting.clear()

    def close(self, deadline: Deadline) -> bool:
        self.timer.close()
        return not self.unfinished_messages


class GroupBench:
    """Members of one group on brokers in memory; topic T has two queues on each of two brokers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = Time()
        monkeypatch.setattr(
            "rocketmq_spark.base.clock.time",
            SimpleNamespace(
                monotonic=self.time.monotonic,
                time_ns=lambda: int(self.time.now * 1e9),
            ),
        )
        self.brokers = FakeBrokers(self.time, {"T": "a:0-1 b:0-1"})
        self.workers: list[ManualWorkers] = []
        self.counts: list[int] = []  # how many threads each wanted
        self.got: list[tuple[str, bytes, int]] = []  # who, what, how often it had come before
        self.consumers: list[BaseConsumer] = []
        self.replies: list[tuple[ReceivedMessage, bytes, Mapping[str, str] | None]] = []
        self.traces: Callable[[], ListenerTraces | None] = lambda: None
        self.rows: RowsDecoder | None = None  # for listeners of record batches
        self.aside: Callable[[], KeyedExecutor] = AwaitedAside
        self.timers: dict[str, list[ManualTimer]] = {}  # by client id
        self.numbers = itertools.count(1)

    def consumer(self, name: str | None = None, **settings: Any) -> tuple[BaseConsumer, FakeMember]:
        port = FakeMember(self.brokers, name or f"m{next(self.numbers)}")
        timers = self.timers[port.client_id] = []

        def timer(_: str) -> ManualTimer:
            timers.append(ManualTimer(self.time))
            return timers[-1]

        def workers(name: str, count: int) -> ManualWorkers:
            one = self._workers(name, count)
            timers.append(one.timer)
            return one

        make = ConsumerTools(
            timer, workers, self.aside, None, lambda *given: self.replies.append(given), self.traces, self.rows
        )
        made = BaseConsumer(port, ConsumerSettings(**{"group": GROUP, "name_servers": ("ns:9876",), **settings}), make)
        self.consumers.append(made)
        return made, port

    def start(self, listener: Callable[..., Any] | None = None, **how: Any) -> tuple[BaseConsumer, FakeMember]:
        """A consumer of T that runs; its listener notes what it gets and then does what ``listener`` does. One that is called
        elsewhere notes nothing.
        """
        made, port = self.consumer(**how)
        made.subscribe("T")

        def noting(messages: Any, context: Any) -> Any:
            if self.rows is not None:
                self.got += [(port.client_id, body, -1) for body in messages.column("body").to_pylist()]
            else:
                self.got += [(port.client_id, each.body, each.reconsume_times) for each in messages]
            return listener(messages, context) if listener else None

        made.start(listener if isinstance(listener, DeferredListener) else noting)
        self.time.run_due()
        return made, port

    def die(self, consumer: BaseConsumer, port: FakeMember) -> None:
        """Without a word; the broker notices that the connection is gone, and keeps the locks."""
        for timer in self.timers[port.client_id]:
            timer.close()
        self.brokers.parked = [entry for entry in self.brokers.parked if entry not in port.parked]
        del self.brokers.members[port.client_id]
        self.consumers.remove(consumer)
        port.asked = None

    def bodies(self) -> list[bytes]:
        return [body for _, body, _ in self.got]

    def owned_queues(self, consumer: BaseConsumer, topic: str = "T") -> list[MessageQueue]:
        assert consumer._running is not None
        return sorted(h.queue for h in consumer._running.state.owned_queues() if h.queue.topic == topic)

    def _workers(self, name: str, count: int) -> ManualWorkers:
        self.workers.append(ManualWorkers(self.time))
        self.counts.append(count)
        return self.workers[-1]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupBench]:
    made = GroupBench(monkeypatch)
    yield made
    for consumer in made.consumers:
        consumer.stop(0.1)
