"""``minPartitions`` over skewed queues, by the cases of Spark's calculator: as many tasks as there, and no offset is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.model import MessageQueue, OffsetRange
from tests.mockbroker import MockBroker
from tests.reading import Run, plan, ranges_of
from tests.source.scripted import route, stats


@pytest.fixture
def scripted() -> Iterator[MockBroker]:
    """Name server and broker-a in one."""
    with MockBroker() as broker:
        yield broker
    session.close_all()


@pytest.mark.parametrize(
    ("sizes", "least"),
    [
        pytest.param((1, 1, 1), 3, id="as many as queues"),
        pytest.param((4, 20), 4, id="skewed"),
        pytest.param((1, 1000), 4, id="very skewed"),
        pytest.param((10_000, 15_000, 20_000), 9, id="three large"),
        pytest.param((500, 12_000, 15_001), 6, id="one small, two large"),
        pytest.param((1, 1, 10_000), 6, id="two small, one large"),
    ],
)
def test_skewed_queues_are_as_many_tasks_as_in_kafka_s_source(scripted, sizes, least):
    queues = [MessageQueue("t", "broker-a", number) for number in range(len(sizes))]
    bounds = {queue: (7, 7 + size) for queue, size in zip(queues, sizes, strict=True)}
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: scripted.address}}, queues=len(sizes)))
    scripted.on(Request.GET_TOPIC_STATS_INFO, stats(bounds))
    given = {"subscribe": "t", "minPartitions": least}
    of_stream = Run(scripted.address, startingOffsets="earliest", **given)
    for tasks in (plan(scripted.address, **given), ranges_of(of_stream.plan(of_stream.ahead()))):
        assert len(tasks) == least
        ranges = Counter(part for task in tasks for part in task)
        assert set(ranges.values()) == {1}
        assert joined(ranges) == [OffsetRange(queue, *bounds[queue]) for queue in queues]


def joined(ranges: Counter[OffsetRange]) -> list[OffsetRange]:
    """Neighbours as one; what overlaps or has a hole between stays apart."""
    found: list[OffsetRange] = []
    for part in sorted(ranges):
        if found and (found[-1].queue, found[-1].end) == (part.queue, part.start):
            found[-1] = OffsetRange(part.queue, found[-1].start, part.end)
        else:
            found.append(part)
    return found
