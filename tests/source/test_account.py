"""What a run of a stream tells of itself, out of looks at the ends of its queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.progress import ProgressReporter

A, B = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)


def view(ends, begins=None, **more):
    return QueuesView({q: QueueBounds((begins or {}).get(q, 0), end, 7) for q, end in ends.items()}, **more)


def lag(told):
    return told["lag"], told["behindMs"]


def test_what_is_read_is_not_behind():
    told = ProgressReporter().report(view({A: 5, B: 7}), Offsets({A: 5, B: 7}), 1000)
    assert told == {"lag": 0, "behindMs": 0, "queues": 2, "queuesAway": 0, "brokersAway": [], "losses": {}}


def test_before_a_plan_nothing_is_known_of_lag():
    assert lag(ProgressReporter().report(view({A: 5}), None, 1000)) == (None, None)
    assert lag(ProgressReporter().report(view({}), Offsets({A: 5}), 1000)) == (None, None)


def test_a_message_waits_since_it_was_first_seen():
    account = ProgressReporter()
    account.report(view({A: 5, B: 5}), Offsets({A: 5, B: 5}), 1000)
    assert lag(account.report(view({A: 8, B: 5}), Offsets({A: 5, B: 5}), 2000)) == (3, 0)
    assert lag(account.report(view({A: 9, B: 6}), Offsets({A: 6, B: 5}), 3500)) == (4, 1500)
    assert lag(account.report(view({A: 9, B: 6}), Offsets({A: 8, B: 5}), 4000)) == (2, 500)
    assert lag(account.report(view({A: 9, B: 6}), Offsets({A: 9, B: 6}), 4500)) == (0, 0)


def test_lag_age_is_unknown_for_messages_from_before_the_run():
    account = ProgressReporter()
    assert lag(account.report(view({A: 5, B: 5}), Offsets({A: 2, B: 5}), 1000)) == (3, None)
    assert lag(account.report(view({A: 5, B: 6}), Offsets({A: 2, B: 5}), 2000)) == (4, None)
    assert lag(account.report(view({A: 6, B: 6}), Offsets({A: 5, B: 5}), 3000)) == (2, 1000)


def test_lag_of_expired_and_new_queues_counts_from_the_minimum():
    account = ProgressReporter()
    assert lag(account.report(view({A: 9, B: 4}, {A: 5, B: 1}), Offsets({A: 2}), 1000)) == (7, None)


def test_absent_brokers_are_named_and_their_lag_is_not_counted():
    told = ProgressReporter().report(view({A: 5}), Offsets({A: 4, B: 7}), 1000)
    assert (told["lag"], told["queues"], told["queuesAway"], told["brokersAway"]) == (1, 1, 1, ["b"])


def test_queue_hidden_by_a_living_broker_is_away_without_broker():
    hidden = MessageQueue("t", "a", 1)
    told = ProgressReporter().report(view({A: 5}), Offsets({A: 5, hidden: 7}), 1000)
    assert (told["queuesAway"], told["brokersAway"]) == (1, [])


def test_a_deleted_topic_is_not_away():
    told = ProgressReporter().report(
        view({A: 5}, deleted_topics=frozenset({"gone"})), Offsets({A: 5, MessageQueue("gone", "b", 0): 3}), 1000
    )
    assert (told["queuesAway"], told["brokersAway"]) == (0, [])


def test_losses_are_counted_by_cause_and_unknown_sizes_are_null():
    account = ProgressReporter()
    account.add_losses([(OffsetRange(A, 2, 5), Cause.TRUNCATED), (OffsetRange(B, 1, 3), Cause.TRUNCATED)])
    account.add_losses([(OffsetRange(A, 5, 5), Cause.WENT_BACK), (OffsetRange(A, 5, 9), Cause.WENT_BACK)])
    told = account.report(view({A: 5}), Offsets({A: 5}), 1000)["losses"]
    assert told == {"truncated": {"ranges": 2, "offsets": 5}, "went_back": {"ranges": 2, "offsets": None}}


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=200))
def test_an_age_is_never_more_than_it_is(steps):
    """Also when looks were thinned out: against a list of when each message was first seen."""
    account, seen = ProgressReporter(), []
    end = position = 0
    for now_ms, (more, read) in enumerate(steps):
        seen += [now_ms] * more
        end, position = end + more, min(end + more, position + read)
        told_lag, behind_ms = lag(account.report(view({A: end}), Offsets({A: position}), now_ms))
        assert told_lag == end - position
        if position == end:
            assert behind_ms == 0
        elif behind_ms is None:
            assert seen[position] == 0
        else:
            assert behind_ms <= now_ms - seen[position]


def test_many_looks_keep_the_age_of_what_waits_longest():
    account = ProgressReporter()
    account.report(view({A: 0}), Offsets({A: 0}), 0)
    for now_ms in range(1, 1001):
        told = account.report(view({A: now_ms}), Offsets({A: 0}), now_ms)
    assert told["behindMs"] == 999
    told = account.report(view({A: 1000}), Offsets({A: 500}), 1000)
    assert told["behindMs"] == pytest.approx(499, abs=100)


def test_few_looks_are_kept_of_very_many_queues():
    many = [MessageQueue("t", "a", number) for number in range(20_000)]
    account = ProgressReporter()
    for now_ms in range(10):
        told = account.report(view(dict.fromkeys(many, now_ms)), Offsets(dict.fromkeys(many, 0)), now_ms)
    assert lag(told) == (9 * 20_000, 8)
    assert len(account._samples) == 3
