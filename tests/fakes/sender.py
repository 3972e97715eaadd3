"""A sender that answers from a script."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.sender import ItemEncoder
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound, error_for
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import BatchStorage, HalfCheck, HalfPlace, TransactionState
from rocketmq_spark.wire.messages import decode_batch
from tests.fakes.timer import Time
from tests.queues import qs

Outcome = SendResult | RocketMQError
Answer = Outcome | Callable[[MessageQueue, SendRequest], Outcome | None]


def ok(queue: MessageQueue, request: SendRequest, offset: int = 100) -> SendResult:
    count = len(decode_batch(bytes(request.body))) if request.batch else 1
    offset_ids = ",".join(f"OFF{offset + i}" for i in range(count))
    return SendResult(SendStatus.SEND_OK, "", queue, offset, offset_ids)


def status(kind: SendStatus) -> Answer:
    return lambda queue, request: SendResult(kind, "", queue, 7, "OFF7")


def refused(code: Response) -> RocketMQError:
    return error_for(code)("the server refused the request", "host:1", code)


class ScriptedSender:
    """Implements ``ports.Sender``. ``script`` gives the outcomes in turn, then every send succeeds.

    An entry of None leaves an asynchronous send without an answer until ``answer`` is called.
    """

    def __init__(self, time: Time, queues: str = "a:0-1 b:0-1") -> None:
        self.time = time
        self.routes: dict[str, Any] = {"T": tuple(qs(queues))}
        self.masters: bool | RocketMQError = True
        self.read_only: tuple[MessageQueue, ...] = ()
        self.script: list[Answer | None] = []
        self.by_broker: dict[str, Callable[[], Answer]] = {}
        self.latency_s: dict[str, float] = {}
        self.calls: list[tuple[str, MessageQueue, SendRequest]] = []
        self.deadlines: list[float] = []
        self.waiting: list[tuple[MessageQueue, SendRequest, Callable[[Outcome], None]]] = []
        self.events: list[tuple[str, Any]] = []
        self.offsets: Iterator[int] = itertools.count(100, 100)
        self.probes: dict[str, bool] = {}
        self.batch_topics: dict[str, bool] = {}
        self.compaction_topics: set[str] = set()
        self.silent = False
        self.longest_timers: dict[str, int] = {"a": 259_200_000, "b": 259_200_000}
        self.consumed_topics: set[str] = set()
        self.check: HalfCheck | None = None
        self.ends: list[RocketMQError] = []
        self.proves = True

    encoder = ItemEncoder()

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        self.events.append(("route", (topic, refresh)))
        found = self.routes.get(topic)
        if isinstance(found, RocketMQError):
            raise found
        if found is None:
            raise RouteNotFound("the name server knows no such topic", "ns:9876", Response.TOPIC_NOT_EXIST, topic)
        queues: Sequence[MessageQueue] = found
        return queues

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        return error

    def has_broker(self) -> bool:
        return self.has_master()

    def has_master(self) -> bool:
        if isinstance(self.masters, RocketMQError):
            raise self.masters
        return self.masters

    def max_timer_delays_ms(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> dict[str, int]:
        self.events.append(("timers", sorted(brokers)))
        return {name: self.longest_timers[name] for name in brokers if name in self.longest_timers}

    def has_online_consumer(self, topic: str, deadline: Deadline) -> bool:
        self.events.append(("consumed", topic))
        self.publish_queues(topic, deadline)
        return topic in self.consumed_topics

    def all_queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        return sorted((*self.publish_queues(topic, deadline), *self.read_only))

    partition_queues = all_queues

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        outcome = self._outcome("sync", queue, request, deadline)
        assert outcome is not None
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Outcome], None]
    ) -> None:
        outcome = self._outcome("async", queue, request, deadline)
        if outcome is None:
            self.waiting.append((queue, request, done))
        else:
            done(outcome)

    def send_oneway(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> None:
        self._outcome("oneway", queue, request, deadline)

    def answer(self, index: int = 0, outcome: Answer | None = None) -> None:
        """The answer to an asynchronous send that waits for it."""
        queue, request, done = self.waiting.pop(index)
        done(self._resolve(outcome, queue, request) or ok(queue, request, next(self.offsets)))

    def recall(self, topic: str, broker_name: str, handle: str, group: str, deadline: Deadline) -> str:
        self.events.append(("recall", (topic, broker_name, handle, group)))
        return "ID"

    def probe(self, broker_name: str, topic: str, deadline: Deadline) -> bool:
        self.events.append(("probe", (broker_name, topic, round(deadline.remaining(), 3))))
        return self.probes.get(broker_name, self._knows(broker_name))

    def batch_storage(self, topic: str, deadline: Deadline) -> BatchStorage | None:
        return (
            None if self.silent else BatchStorage(self.batch_topics.get(topic, False), topic in self.compaction_topics)
        )

    client_id = "me"

    def end_transaction(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        self.events.append(("end", (place, decision)))
        if self.ends:
            raise self.ends.pop(0)
        return self.proves

    def join(self, group: str, heartbeat_s: float, check: HalfCheck | None = None) -> Callable[[Deadline], None]:
        self.check = check
        self.events.append(("join", (group, heartbeat_s)))
        return lambda deadline: self.events.append(("leave", group))

    def refresh_routes(self, deadline: Deadline) -> None:
        self.events.append(("refresh", round(self.time.now - 1000, 3)))

    def seen(self, kind: str) -> list[Any]:
        return [value for name, value in self.events if name == kind]

    @property
    def brokers(self) -> str:
        return " ".join(queue.broker_name for _, queue, _ in self.calls)

    @property
    def requests(self) -> list[SendRequest]:
        return [request for _, _, request in self.calls]

    def _outcome(self, mode: str, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> Outcome | None:
        self.calls.append((mode, queue, request))
        self.deadlines.append(round(deadline.remaining(), 6))
        self.time.now += self.latency_s.get(queue.broker_name, 0.0)
        if self.script:
            answer = self.script.pop(0)
            return None if answer is None else self._resolve(answer, queue, request)
        if queue.broker_name in self.by_broker:
            return self._resolve(self.by_broker[queue.broker_name](), queue, request)
        if not self._knows(queue.broker_name):
            return BrokerNotFound(f"no address of broker {queue.broker_name!r} is known")
        return ok(queue, request, next(self.offsets))

    def _knows(self, broker_name: str) -> bool:
        """Whether it is one of a route, or stands in the test's own tables: one that a route had before."""
        queues = [queue for found in self.routes.values() if isinstance(found, tuple) for queue in found]
        known = {queue.broker_name for queue in (*queues, *self.read_only)} | self.by_broker.keys() | self.probes.keys()
        return broker_name in known

    def _resolve(self, answer: Answer | None, queue: MessageQueue, request: SendRequest) -> Outcome | None:
        return answer(queue, request) if callable(answer) else answer
