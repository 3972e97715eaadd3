"""Offsets of a group's queues: what is asked, and what a failure says."""

from __future__ import annotations

import pytest

from rocketmq_spark.consumer.offsets import OffsetRequests
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OffsetError, ServerFault
from rocketmq_spark.model import MessageQueue
from tests.fakes.group_member import QueueMember

QUEUE = MessageQueue("t", "b", 0)


@pytest.fixture
def fake() -> QueueMember:
    one = QueueMember([QUEUE], high=9)
    one.low[QUEUE] = 2
    return one


@pytest.fixture
def positions(fake: QueueMember) -> OffsetRequests:
    return OffsetRequests(fake, ConsumerSettings(group="g"))  # type: ignore[arg-type]


def test_queue_begins_at_its_stored_offset_or_its_end(fake: QueueMember, positions: OffsetRequests) -> None:
    assert positions.start_offset_of(QUEUE) == StartOffset(9, False)
    fake.stored[QUEUE] = 4
    assert positions.start_offset_of(QUEUE) == StartOffset(4)


def test_question_that_fails_is_no_answer(fake: QueueMember, positions: OffsetRequests) -> None:
    fake.unknown[QUEUE] = ServerFault("ill")
    with pytest.raises(ServerFault):
        positions.start_offset_of(QUEUE)


def test_times_are_clamped_to_what_there_is(positions: OffsetRequests) -> None:
    assert [positions.offset_at_time(QUEUE, ms) for ms in (0, 5, 50)] == [2, 5, 9]


def test_offsets_that_are_sought_must_be_there(positions: OffsetRequests) -> None:
    assert [positions.checked_offset(QUEUE, offset) for offset in (2, 9)] == [2, 9]
    with pytest.raises(OffsetError, match="expected one from 2 to 9"):
        positions.checked_offset(QUEUE, 10)


def test_what_cannot_be_stored_is_logged_and_told(
    fake: QueueMember, positions: OffsetRequests, caplog: pytest.LogCaptureFixture
) -> None:
    assert positions.commit({}) == {}
    assert fake.commits == []
    fake.refused[QUEUE] = ServerFault("full")
    for _ in range(3):
        assert list(positions.commit({QUEUE: 5})) == [QUEUE]
    assert caplog.text.count("group g: offsets cannot be stored on broker b, they are sent again: ") == 1
    assert positions.committed(QUEUE) is None
