"""Offsets of a group's queues: what is asked, and what a failure says."""

from __future__ import annotations

import pytest

from rocketmq_spark.consumer.pull.polls import Positions
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OffsetError, ServerFault
from rocketmq_spark.model import MessageQueue
from tests.consumer.fake_member import FakeMember

QUEUE = MessageQueue("t", "b", 0)


@pytest.fixture
def fake() -> FakeMember:
    one = FakeMember([QUEUE], high=9)
    one.low[QUEUE] = 2
    return one


@pytest.fixture
def positions(fake: FakeMember) -> Positions:
    return Positions(fake, ConsumerSettings(group="g"))  # type: ignore[arg-type]


def test_4_24_a_queue_begins_at_its_stored_offset_or_its_end(fake: FakeMember, positions: Positions) -> None:
    assert positions.start(QUEUE) == StartOffset(9, False)
    fake.stored[QUEUE] = 4
    assert positions.start(QUEUE) == StartOffset(4)


def test_4_25_a_question_that_fails_is_no_answer(fake: FakeMember, positions: Positions) -> None:
    fake.unknown[QUEUE] = ServerFault("ill")
    with pytest.raises(ServerFault):
        positions.start(QUEUE)


def test_times_are_clamped_to_what_there_is(positions: Positions) -> None:
    assert [positions.at_time(QUEUE, ms) for ms in (0, 5, 50)] == [2, 5, 9]


def test_offsets_that_are_sought_must_be_there(positions: Positions) -> None:
    assert [positions.checked(QUEUE, offset) for offset in (2, 9)] == [2, 9]
    with pytest.raises(OffsetError, match="expected one from 2 to 9"):
        positions.checked(QUEUE, 10)


def test_what_cannot_be_stored_is_logged_and_told(
    fake: FakeMember, positions: Positions, caplog: pytest.LogCaptureFixture
) -> None:
    assert positions.store({}) == {}
    assert fake.commits == []
    fake.refused[QUEUE] = ServerFault("full")
    for _ in range(3):
        assert list(positions.store({QUEUE: 5})) == [QUEUE]
    assert caplog.text.count("group g: offsets of queues of b cannot be stored, they are sent again: ") == 1
    assert positions.stored(QUEUE) is None
