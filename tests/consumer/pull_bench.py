"""Pull consumers on queues in memory, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.wire.messages import first_portion
from tests.fakes.group_member import QueueMember
from tests.fakes.timer import ManualTimer, Time

A, B = (MessageQueue("t", "b", i) for i in range(2))
AT_ONCE = 0.0


def bodies(messages: Iterable[ReceivedMessage]) -> list[int]:
    return [int(one.body) for one in messages]


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


def made(fake: QueueMember, hand: Hand | None = None, **settings: Any) -> BasePullConsumer:
    settings = {"consume_from": ConsumeFrom(ConsumeFromWhere.EARLIEST), **settings}
    wanted = ConsumerSettings(group="g", **settings)
    hand = hand or Hand()
    return BasePullConsumer(fake, wanted, as_rows, hand.clock, make_timer=lambda _: ManualTimer(hand.time))  # type: ignore[arg-type]


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def fake() -> QueueMember:
    return QueueMember([A, B])


@pytest.fixture
def consumer(fake: QueueMember, hand: Hand) -> Iterator[BasePullConsumer]:
    with made(fake, hand) as one:
        yield one
