"""What an answer covers."""

from __future__ import annotations

from rocketmq_spark.pull.fetched import FetchedAnswer, offset_count


def test_answer_covers_the_asked_offsets_the_broker_reached() -> None:
    whole, short, beyond = (
        FetchedAnswer(0, 10, 42, 42, 0, 9),
        FetchedAnswer(0, 42, 74, 50, 9, 12),
        FetchedAnswer(1, 0, 32, 40, 12, 30),
    )
    assert [offset_count([answer]) for answer in (whole, short, beyond)] == [32, 8, 32]
    assert offset_count([whole, short, beyond]) == 72
    assert offset_count([]) == 0
