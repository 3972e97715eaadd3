"""Answers that jump over what is gone from the commit log: every offset is delivered or told as lost, once, in order."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import PullSettings
from tests.pull.pull_model import Model, Queue, holes, read
from tests.pull.test_reader import FAST, rows


def jumping(size: int = 600) -> Model:
    """Offsets 100 to 249 are gone from the commit log and stand in the index still; answers go on behind them."""
    return Model([Queue(0, size, gaps=frozenset(range(100, 250)))])


def test_jump_over_removed_messages_is_a_loss_after_grace_time() -> None:
    model = jumping()
    result = read(model, [(0, 600)], FAST, dense=True)
    assert sorted(result.lost_offsets()) == rows((100, 250))
    assert {cause for _, cause in result.lost} == {Cause.TRUNCATED}
    assert result.of(0) == [*range(100), *range(250, 600)]
    assert 15 <= model.time.now - 1000 < 20


def test_loss_is_reported_before_later_messages_are_handed_out() -> None:
    model = jumping()
    lost: list[OffsetRange] = []
    ranges = [OffsetRange(MessageQueue("t", "b", 0), 0, 600)]
    reader = model.reader(ranges, FAST, lambda part, _: lost.append(part))
    for fetched in reader.fetch():
        usable = reader.count_usable_answers(holes(model, fetched))
        if any(answer.limit > 250 for answer in fetched.answers[:usable]):
            break
    assert (min(part.start for part in lost), max(part.end for part in lost)) == (100, 250)


def test_loss_is_reported_at_once_and_whole_when_minimum_follows() -> None:
    model = Model([Queue(0, 600, gaps=frozenset(range(250)), truncate=(1000.5, 250))])
    result = read(model, [(0, 600)], dense=True)
    assert [(part.start, part.end, cause) for part, cause in result.lost] == [(0, 250, Cause.TRUNCATED)]
    assert result.of(0) == list(range(250, 600))
    assert model.time.now - 1000 < 3


def test_what_the_broker_gives_after_all_is_read_in_order() -> None:
    model = jumping()
    whole = Queue(0, 600)
    real = model.answer
    model.answer = lambda *a: whole.pull(model.time.now, *a[1:]) if model.time.now > 1005 else real(*a)  # type: ignore[method-assign]
    result = read(model, [(0, 600)], FAST, dense=True)
    assert (result.of(0), result.lost) == (list(range(600)), [])


def test_holes_at_the_end_of_several_ranges() -> None:
    model = Model([Queue(0, 300, gaps=frozenset(range(290, 300))), Queue(0, 300, gaps=frozenset({0, 7, 299}))])
    result = read(model, [(0, 295), (0, 300)], FAST, dense=True)
    assert sorted(result.lost_offsets()) == [*rows((290, 295)), (1, 0), (1, 7), (1, 299)]
    assert sorted(result.delivered + result.lost_offsets()) == rows((0, 295), (0, 300))


@pytest.mark.parametrize(("low", "lost"), [(0, []), (40, []), (41, [(40, 41)]), (90, [(40, 90)])])
def test_filtered_answer_below_the_minimum_hides_a_loss(low: int, lost: list[tuple[int, int]]) -> None:
    model = Model([Queue(0, 100, gaps=frozenset(range(0, 100, 2)))])
    model.lows[0] = low
    result = read(model, [(40, 100)], PullSettings(has_filter=True))
    assert [(part.start, part.end) for part, _ in result.lost] == lost
    assert result.of(0) == [n for n in range(40, 100) if n % 2 and n >= low]
