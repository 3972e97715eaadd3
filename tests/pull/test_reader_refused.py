"""Reads that end with an error: it is the one of what was refused or lost, however little was left to be read."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import AccessDenied, BrokerError, DataLossError, GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.requests import PullSettings
from rocketmq_spark.pull.verdict import Cause
from rocketmq_spark.remoting.bulk import Answer
from tests.pull.pull_model import Model, Queue, read


@pytest.mark.parametrize("end", [1, 5, 500])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Response.NO_PERMISSION, AccessDenied),
        (Response.SUBSCRIPTION_GROUP_NOT_EXIST, GroupNotFound),
        (Response.SYSTEM_ERROR, BrokerError),
    ],
)
def test_a_refusal_is_the_error_also_of_a_read_of_one_pull(code: int, kind: type[RocketMQError], end: int) -> None:
    model = Model([Queue(0, end)])
    model.answer = lambda queue, start, count: Answer(code, "no", None, None, None, None)  # type: ignore[method-assign]
    error = read(model, [(0, end)]).error
    assert isinstance(error, kind)
    assert (error.topic, error.queue, error.remark) == ("t", "t/b/0", "no")


@pytest.mark.parametrize("ranges", [[(0, 8)], [(20, 30), (0, 8)], [(0, 8), (20, 30)]])
@pytest.mark.parametrize("queue", [Queue(8, 40), Queue(0, 0), Queue(0, 40, deleted_at=0.0)])
def test_a_loss_is_the_error_also_where_it_is_all_that_was_left(queue: Queue, ranges: list[tuple[int, int]]) -> None:
    """With ``failOnDataLoss=fail`` who is told raises."""

    def fail(part: OffsetRange, cause: Cause) -> None:
        raise DataLossError("gone", topic=part.queue.topic, queue=str(part.queue))

    model = Model([queue, queue])
    parts = [OffsetRange(MessageQueue("t", "b", i), *bounds) for i, bounds in enumerate(ranges)]
    with pytest.raises(DataLossError, match="gone"):
        list(model.reader(parts, PullSettings(), fail).fetch())
    assert all(stream.closed for stream in model.streams)
