"""Limits of the bytes that wait in a process."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import session
from rocketmq_spark.base import budget
from rocketmq_spark.base.budget import Budget


def test_what_exceeds_the_limit_is_rejected_until_something_is_released() -> None:
    held = Budget(10)
    first, second = held.claim(6), held.claim(4)
    assert first is not None
    assert second is not None
    assert held.claim(1) is None
    first()
    assert held.claim(6) is not None
    assert held.used == 10


def test_something_larger_than_the_limit_waits_only_alone() -> None:
    held = Budget(10)
    large = held.claim(50)
    assert large is not None
    assert held.claim(0) is None
    large()
    assert held.claim(1) is not None
    assert held.claim(50) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
def test_used_is_the_sum_of_what_is_not_released(steps: list[tuple[bool, int]]) -> None:
    held = Budget(20)
    claims: list[tuple[int, Callable[[], None]]] = []
    for claims_more, number in steps:
        if claims_more:
            release = held.claim(number)
            if release is not None:
                claims.append((number, release))
        elif claims:
            _, release = claims.pop(number % len(claims))
            release()
            release()  # a second release has no effect
        assert held.used == sum(size for size, _ in claims)


def test_purposes_have_a_budget_each_that_a_process_shares() -> None:
    session.close_all()
    assert budget.of(budget.REQUESTS) is budget.of(budget.REQUESTS)
    assert budget.of(budget.REQUESTS) is not budget.of(budget.HALF_MESSAGES)
    assert budget.of(budget.REQUESTS).limit + budget.of(budget.HALF_MESSAGES).limit == 64 << 20
