"""What an answer covers."""

from __future__ import annotations

from rocketmq_spark.pull.answers import Piece, covered


def test_an_answer_covers_what_was_asked_as_far_as_the_broker_went() -> None:
    whole, short, beyond = Piece(0, 10, 42, 42, 0, 9), Piece(0, 42, 74, 50, 9, 12), Piece(1, 0, 32, 40, 12, 30)
    assert [covered([piece]) for piece in (whole, short, beyond)] == [32, 8, 32]
    assert covered([whole, short, beyond]) == 72
    assert covered([]) == 0
