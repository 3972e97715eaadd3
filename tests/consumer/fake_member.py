"""A group's member over queues in memory: pulls wait until there is something, as long polls do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import LocalProtocolError, RocketMQError, RouteNotFound, ServerFault, error_for
from rocketmq_spark.model import Filter, MessageQueue, PullAnswer, PullRequest, PullStatus, QueueBounds, ReceivedMessage
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.wire.messages import first_portion
from tests.fakes.timer import ManualTimer, Time

Done = Callable[[PullAnswer | RocketMQError], None]

A, B = (MessageQueue("t", "b", i) for i in range(2))
AT_ONCE = 0.0


def message(queue: MessageQueue, offset: int) -> ReceivedMessage:
    return ReceivedMessage(
        queue.topic, queue, offset, 0, str(offset).encode(), {}, 0, 0, 0, 0, "", "", 0, 0, 0, f"{queue}@{offset}"
    )


def bodies(messages: Iterable[ReceivedMessage]) -> list[int]:
    return [int(one.body) for one in messages]


class FakeMember:
    """``ports.GroupMember``, without sending back and locks. A queue has the offsets ``[low, high)``."""

    client_id = "me"
    has_notices = True

    def __init__(self, queues: Sequence[MessageQueue], high: int = 0) -> None:
        self.old = False  # before 5.1.4
        self.low = dict.fromkeys(queues, 0)
        self.high = dict.fromkeys(queues, high)
        self.stored: dict[MessageQueue, int] = {}
        self.commits: list[dict[MessageQueue, int]] = []
        self.ids = ["me"]
        self.modes: dict[str, str] = {}  # those that an operator set, by topic
        self.errors: list[RocketMQError] = []
        self.refused: dict[MessageQueue, RocketMQError] = {}
        self.unknown: dict[MessageQueue, RocketMQError] = {}
        self.waiting: list[tuple[PullRequest, Done]] = []
        self.pulls: list[PullRequest] = []
        self.memberships: list[Membership] = []
        self.asked: Asked | None = None
        self._membership: Callable[[], Membership] | None = None

    def add(self, queue: MessageQueue, count: int = 1) -> None:
        """Messages come, and pulls that wait are answered."""
        self.high[queue] += count
        waiting, self.waiting = self.waiting, []
        for request, done in waiting:
            self._answer(request, done)

    def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
        self.pulls.append(request)
        if self.errors:
            done(self.errors.pop(0))
        else:
            self._answer(request, done)

    def _answer(self, request: PullRequest, done: Done) -> None:
        queue, at = request.queue, request.offset
        if queue not in self.high:
            known = any(queue.topic == other.topic for other in self.high)
            code = Response.INVALID_PARAMETER if known else Response.TOPIC_NOT_EXIST
            done(error_for(code)("there is no such queue", "a:1", code, queue.topic))
            return
        low, high = self.low[queue], self.high[queue]
        end = min(at + request.count, high)
        if not low <= at <= high:
            done(PullAnswer(PullStatus.OFFSET_ILLEGAL, min(max(at, low), high), low, high))
        elif at == high:
            self.waiting.append((request, done))
        elif request.filter.expression == "rare":  # messages are of every tag but this one
            done(PullAnswer(PullStatus.NO_MATCHED_MSG, end, low, high))
        else:
            found = [message(queue, offset) for offset in range(at, end)]
            done(PullAnswer(PullStatus.FOUND, end, low, high, read=lambda: found))

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        found = sorted(queue for queue in self.high if queue.topic == topic)
        if not found:
            raise RouteNotFound("no such topic", topic=topic)
        return found

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, young_at_zero: bool = True) -> int | None:
        if queue in self.unknown:
            raise self.unknown[queue]
        return self.stored.get(queue, 0 if young_at_zero and not self.low[queue] else None)

    def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
        return QueueBounds(self.low.get(queue, 0), self.high.get(queue, 0), 0)

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        """Message n was stored in the n-th millisecond. Of an old broker who does not look at messages gets one that is near."""
        return min(epoch_ms, self.high.get(queue, 0)) + (self.old and not group)

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        done = {queue: offset for queue, offset in offsets.items() if queue not in self.refused}
        self.commits.append(done)
        self.stored.update(done)
        return {queue: error for queue, error in self.refused.items() if queue in offsets}

    def join(
        self, group: str, membership: Callable[[], Membership], asked: Asked, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        if self._membership is not None:
            raise LocalProtocolError(f"consumer group {group!r} has a member in this process already")
        self._membership, self.asked = membership, asked

        def leave(deadline: Deadline) -> None:
            self._membership = None

        return leave

    @property
    def joined(self) -> bool:
        return self._membership is not None

    def heartbeat(self, deadline: Deadline) -> None:
        assert self._membership is not None
        self.memberships.append(self._membership())

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        self._check_online()
        return list(self.ids)

    def consume_modes(self, group: str, topics: Iterable[str], deadline: Deadline) -> dict[tuple[str, str], str]:
        wanted = set(topics)
        return {(q.topic, q.broker_name): self.modes.get(q.topic, "PULL") for q in self.high if q.topic in wanted}

    def filters(self, group: str, topic: str, deadline: Deadline, broker_name: str = "") -> dict[str, Filter]:
        self._check_online()
        return dict(self.memberships[-1].subscriptions)

    def _check_online(self) -> None:
        if not self.joined or not self.memberships:
            raise ServerFault("no consumer for this group", "a:1", Response.SYSTEM_ERROR)


class Rows:
    """In place of a record batch."""

    def __init__(self, messages: Sequence[ReceivedMessage]) -> None:
        self.messages = messages
        self.num_rows = len(messages)


def as_rows(parts: Sequence[FetchedPart]) -> tuple[Rows, int | None]:
    """As ``decode.polled.batch_of`` does."""
    found, left = first_portion(one for part in parts for one in part.read())
    return Rows(found), None if left is None else found[-1].queue_offset + 1


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.time = Time()  # of the thread that follows the group

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now)


def made(fake: FakeMember, hand: Hand | None = None, **settings: Any) -> BasePullConsumer:
    settings = {"consume_from": ConsumeFrom(ConsumeFromWhere.EARLIEST), **settings}
    wanted = ConsumerSettings(group="g", **settings)
    hand = hand or Hand()
    return BasePullConsumer(fake, wanted, as_rows, hand.clock, make_timer=lambda _: ManualTimer(hand.time))  # type: ignore[arg-type]


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def fake() -> FakeMember:
    return FakeMember([A, B])


@pytest.fixture
def consumer(fake: FakeMember, hand: Hand) -> Iterator[BasePullConsumer]:
    with made(fake, hand) as one:
        yield one
