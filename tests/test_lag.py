"""How far a reader is behind."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.admin import Pace, QueueLag, Total, pace, total

Q = MessageQueue("t", "a", 0)
NOW_MS = 10_000


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (QueueLag(Q, 0, 4, 10, 9_000), (6, 0, 1_000)),
        (QueueLag(Q, 0, 10, 10), (0, 0, 0)),
        (QueueLag(Q, 0, 12, 10), (None, None, None)),  # the topic was made again: nobody knows what of it was read
        (QueueLag(Q, 5, 2, 10, 9_500), (5, 3, 500)),
        (QueueLag(Q, 12, 2, 12), (0, 10, 0)),
        (QueueLag(Q, 0, None, 10), (None, None, None)),
        (QueueLag(Q, 0, 4, 10), (6, 0, None)),
        (QueueLag(Q, 0, 4, 10, 11_000), (6, 0, 0)),  # another clock
        (QueueLag(Q, None, 4, None), (None, None, None)),  # its broker is away
    ],
)
def test_one_queue(row: QueueLag, expected: tuple[int | None, ...]) -> None:
    assert (row.lag, row.lost, row.behind_ms(NOW_MS)) == expected
    assert row.went_back == (row.position == 12)


def test_all_of_them() -> None:
    rows = [
        QueueLag(Q, 0, 4, 10, 9_000),
        QueueLag(Q, 5, 2, 10, 8_000),
        QueueLag(Q, 0, 3, 3),
        QueueLag(Q, 0, None, 3),
    ]
    assert total(rows, NOW_MS) == Total(11, 3, 2_000, 1)
    assert total([*rows, QueueLag(Q, 0, 1, 2)], NOW_MS) == Total(12, 3, None, 1)
    assert total([*rows, QueueLag(Q, 0, 5, 3)], NOW_MS) == Total(11, 3, 2_000, 2)
    assert total([rows[-1]], NOW_MS) == Total(None, None, None, 1)
    assert total([rows[0], QueueLag(Q, None, 4, None)], NOW_MS) == Total(6, 0, 1_000, 1)


R = Q._replace(queue_id=1)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([QueueLag(Q, 0, 0, 100)], [QueueLag(Q, 0, 60, 120)], Pace(30.0, 10.0, 3.0)),
        ([QueueLag(Q, 0, 0, 100)], [QueueLag(Q, 0, 10, 200)], Pace(5.0, 50.0, None)),  # it falls behind
        ([QueueLag(Q, 0, 0, 100)], [QueueLag(Q, 0, 10, 110)], Pace(5.0, 5.0, None)),  # it keeps its distance
        ([QueueLag(Q, 0, 0, 100)], [QueueLag(Q, 0, 100, 100)], Pace(50.0, 0.0, 0.0)),
        ([QueueLag(Q, 0, 50, 100)], [QueueLag(Q, 0, 20, 100)], Pace()),  # offsets were set
        ([QueueLag(Q, 0, 50, 100)], [QueueLag(Q, 0, 50, 60)], Pace()),  # the topic was made again
        ([QueueLag(Q, 0, None, 100)], [QueueLag(Q, 0, 20, 100)], Pace()),
        ([QueueLag(Q, 0, 0, 10), QueueLag(R, 0, 0, 10)], [QueueLag(Q, 0, 4, 10), QueueLag(R, 0, 2, 10)], Pace(3.0, 0.0, 14 / 3)),
        ([QueueLag(Q, 0, 0, 10)], [QueueLag(Q, 0, 4, 10), QueueLag(R, 0, 2, 10)], Pace(2.0, 0.0, 3.0)),  # a new queue
        ([], [QueueLag(Q, 0, 4, 10)], Pace()),
    ],
)  # fmt: skip
def test_the_pace_between_two_looks(before: list[QueueLag], now: list[QueueLag], expected: Pace) -> None:
    assert pace(before, now, 2.0) == expected
    assert pace(before, now, 0.0) == Pace()
