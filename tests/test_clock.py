"""Deadlines and pauses. The clock is replaced: nothing here waits."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base import clock
from rocketmq_spark.base.clock import Deadline, backoff, wait_until


@pytest.fixture
def now(monkeypatch):
    """The monotonic clock as a list of one number."""
    time = [1000.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: time[0])
    return time


def test_a_deadline_runs_down_to_zero(now):
    deadline = Deadline.after(3.0)
    assert deadline.remaining() == 3.0
    now[0] += 2.0
    assert deadline.remaining() == 1.0
    assert not deadline.expired
    now[0] += 1.0
    assert deadline.expired
    now[0] += 100.0
    assert deadline.remaining() == 0.0


def test_an_attempt_gets_its_share_and_no_more(now):
    deadline = Deadline.after(3.0)
    assert deadline.within(1.0).remaining() == 1.0
    assert deadline.within(10.0) == deadline
    now[0] += 2.5
    assert deadline.within(1.0).remaining() == 0.5


def test_a_deadline_of_zero_has_passed(now):
    assert Deadline.after(0).expired


@given(st.floats(0.001, 10.0), st.floats(10.0, 60.0), st.integers(0, 2**32))
def test_pauses_double_up_to_their_limit_with_jitter(first, limit, seed):
    pauses = list(itertools.islice(backoff(first, limit, random.Random(seed)), 20))
    for turn, pause in enumerate(pauses):
        full = min(first * 2**turn, limit)
        assert full / 2 <= pause <= full


def test_pauses_come_from_the_given_randomness():
    one, two = (list(itertools.islice(backoff(1.0, 8.0, random.Random(7)), 5)) for _ in range(2))
    assert one == two
    assert len(set(one)) == 5


@pytest.fixture
def slept(now, monkeypatch):
    """What was slept; the clock goes on by it."""
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(clock.time, "sleep", sleep)
    return pauses


def test_pause_ends_at_deadline_but_has_minimum_length(slept):
    deadline = Deadline.after(3.0)
    deadline.pause(2.0)
    deadline.pause(2.0)
    deadline.pause(2.0)
    assert slept == [2.0, 1.0, clock._MIN_PAUSE_S]
    Deadline(math.inf).pause(5.0)
    assert slept[-1] == 5.0


def test_looking_until_it_is_done_or_too_late(slept):
    looks = []
    assert wait_until(lambda: looks.append(1) or len(looks) == 3, Deadline.after(10.0), 0.5)
    assert slept == [0.5, 0.5]
    assert not wait_until(lambda: looks.append(1), Deadline.after(1.0), 0.4)
    assert slept[2:] == pytest.approx([0.4, 0.4, 0.2])
    assert wait_until(lambda: True, Deadline.after(0.0), 9.0)
    assert len(slept) == 5
