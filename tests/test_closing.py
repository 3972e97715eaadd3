"""``with`` and ``close``."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.lifecycle import Closing


class Door(Closing):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_end_of_the_block_closes_and_hides_no_error() -> None:
    with Door() as door:
        assert door.closed == 0
    assert door.closed == 1
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.closed == 2


def test_what_cannot_be_closed_says_so() -> None:
    with pytest.raises(NotImplementedError):
        Closing().close()
