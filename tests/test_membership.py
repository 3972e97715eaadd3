"""What a member of a group tells: the texts that Java's enumerations have, and values that can be compared."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import Filter
from rocketmq_spark.model.membership import DirectOutcome, Membership, QueueInfo


@pytest.mark.parametrize("outcome", DirectOutcome, ids=lambda one: one.name)
def test_outcomes_have_the_names_of_java(outcome: DirectOutcome) -> None:
    assert outcome.value == f"CR_{outcome.name}"


def test_memberships_are_equal_when_they_tell_the_same() -> None:
    def member(tags: str) -> Membership:
        return Membership({"t": Filter(tags)}, versions_ms={"t": 5})

    assert member("a") == member("a")
    assert member("a") != member("b")


def test_what_a_queue_does_not_have_is_not_zero() -> None:
    fresh = QueueInfo()
    assert (fresh.commit_offset, fresh.cached_min_offset, fresh.last_pull_ms) == (None, None, None)
