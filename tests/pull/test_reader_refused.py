"""Reads that end with an error: it is the one of what was refused or lost, however little was left to be read."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import AccessDenied, BrokerError, DataLossError, GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.remoting.bulk import EmptyAnswer
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
    model.answer = lambda queue, start, count: EmptyAnswer(code, "no", None, None, None, None)  # type: ignore[method-assign]
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


@pytest.mark.parametrize("queue", [Queue(0, 40), Queue(0, 60, deleted_at=0.0)])
def test_loss_is_reported_when_deadline_is_below_the_grace_time(queue: Queue) -> None:
    """Else it would be an error that the broker does not answer, each time anew, and ``failOnDataLoss=warn`` of no use."""
    model = Model([queue])
    model.buffer_bytes = 1 << 20
    result = read(model, [(0, 60)], PullSettings(grace_s=15.0, read_deadline_s=4.0))
    assert result.error is None
    assert sorted(result.lost_offsets() + result.delivered) == [(0, n) for n in range(60)]
    assert 2 <= model.time.now - 1000 < 4


def test_answer_without_progress_is_repeated_with_growing_pauses() -> None:
    model = Model([Queue(0, 40)])
    model.max_asked, plain = 200, model.answer  # twelve for each of what is asked for at once
    model.answer = lambda *asked: ([], asked[1]) if model.time.now < 1005 else plain(*asked)  # type: ignore[method-assign]
    assert read(model, [(0, 40)]).of(0) == list(range(40))


@pytest.mark.parametrize(
    "refusal",
    [
        EmptyAnswer(Response.TOPIC_NOT_EXIST, "topic[t] not exist", None, None, None, 0),
        EmptyAnswer(Response.INVALID_PARAMETER, "queueId[0] is illegal", None, None, None, 0),
        EmptyAnswer(Response.SERVICE_NOT_AVAILABLE, "shutting down", None, None, None, 0),
    ],
    ids=["topic deleted", "queue gone", "not available"],
)
def test_the_route_is_asked_for_after_pauses_not_for_each_pull(refusal: EmptyAnswer) -> None:
    """A task of thousands of messages has hundreds of pulls, each of which the broker refuses again and again."""
    model = Model([Queue(0, 4000)])
    plain = model.answer
    model.answer = lambda *asked: refusal if model.time.now < 1010 else plain(*asked)  # type: ignore[method-assign]
    assert read(model, [(0, 4000)]).of(0) == list(range(4000))
    # The pauses grow to a second, less up to half of it.
    assert 10 <= len(model.streams) <= 30
