"""Limits of the bytes that arrive or wait, and their fair shares."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.budget import Budget, ReceiveBudget


def test_a_holder_may_have_as_much_as_stays_free() -> None:
    held = Budget(10)
    first = held.claim("a", 5)
    assert first is not None
    assert held.claim("a", 1) is None
    second = held.claim("b", 2)
    assert second is not None
    assert held.claim("b", 1) is None
    first()
    assert held.claim("b", 3) is not None
    assert held.used_bytes == 5


def test_something_larger_than_the_limit_is_held_only_alone() -> None:
    held = Budget(10)
    large = held.claim("a", 50)
    assert large is not None
    assert held.claim("b", 1) is None
    large()
    assert held.claim("b", 1) is not None
    assert held.claim("a", 50) is None


def test_what_arrives_alone_may_have_any_size() -> None:
    room = ReceiveBudget(10)
    one = room.account("a")
    assert [one.resize(size) for size in (3, 8, 50)] == [True, True, True]
    other = room.account("b")
    assert other.resize(5)
    assert (one.is_revoked, one.resize(51), room.used_bytes) == (True, False, 5)
    assert one.resize(0)
    assert (one.is_revoked, one.resize(5), one.resize(6)) == (False, True, False)
    assert not other.is_revoked


def test_who_has_most_loses_its_largest_thing() -> None:
    room = ReceiveBudget(100)
    small, large, other = room.account("a"), room.account("a"), room.account("b")
    assert small.resize(20)
    assert large.resize(35)
    assert other.resize(45)
    assert other.resize(50)
    assert (small.is_revoked, large.is_revoked, room.used_bytes) == (False, True, 70)
    assert not small.resize(60)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 400)), max_size=60))
def test_a_fair_share_is_never_refused_nor_lost(steps: list[tuple[int, int]]) -> None:
    room = ReceiveBudget(900)
    things = [room.account(number) for number in range(9)]
    modest = room.account("modest")
    modest_has = 0
    for number, size in steps:
        if not things[number].resize(size):
            things[number].resize(0)
        modest_has = min(modest_has + 10, 90)
        assert modest.resize(modest_has)
        assert not modest.is_revoked
        assert room.used_bytes == sum(thing.size for thing in [*things, modest])
        assert room.used_bytes <= 900


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from("abc"))))
def test_used_is_the_sum_of_what_is_not_released(steps: list[tuple[bool, int, str]]) -> None:
    held = Budget(20)
    claims: list[tuple[int, Callable[[], None]]] = []
    for claims_more, number, holder in steps:
        if claims_more:
            release = held.claim(holder, number)
            if release is not None:
                claims.append((number, release))
        elif claims:
            _, release = claims.pop(number % len(claims))
            release()
            release()  # a second release has no effect
        assert held.used_bytes == sum(size for size, _ in claims)
    for _, release in claims:
        release()
    assert not held._bytes_by_holder
