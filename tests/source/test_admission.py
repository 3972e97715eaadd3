"""How much a batch may read, by offsets and by bytes, and when it waits for more."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.source.admission import SAMPLED_QUEUES, Admission, Wanted

QUEUES = [MessageQueue("t", "b", i) for i in range(6)]


def never(queue):
    raise AssertionError("no sample is needed")


def test_offsets_are_passed_on():
    assert Admission(900, 0.0).most({QUEUES[0]: 10}, Wanted(), never, 0.0) is None
    assert Admission(900, 0.0).most({QUEUES[0]: 10}, Wanted(most=4), never, 0.0) == 4
    assert Admission(900, 0.0).most({}, Wanted(most=4, least=2, most_bytes=1), never, 0.0) == 4


def test_waits_for_enough_or_for_the_delay():
    admission = Admission(60.0, 0.0)
    few, many = {QUEUES[0]: 3}, {QUEUES[0]: 3, QUEUES[1]: 7}
    wanted = Wanted(least=10)
    assert admission.most(few, wanted, never, 0.0) == 0
    assert admission.most(many, wanted, never, 0.0) is None
    assert admission.most(few, wanted, never, 59.0) == 0
    assert admission.most(few, wanted, never, 60.0) is None
    # From then on the next delay runs.
    assert admission.most(few, wanted, never, 119.0) == 0
    assert admission.most(few, Wanted(least=10, most=2), never, 120.0) == 2


def test_bytes_become_offsets_by_samples():
    admission = Admission(900, 0.0)
    waiting = dict.fromkeys(QUEUES, 1000)
    asked = []

    def sample(queue):
        asked.append(queue)
        return 5000, 10

    assert admission.most(waiting, Wanted(most_bytes=100_000), sample, 0.0) == 200
    assert len(asked) == SAMPLED_QUEUES
    assert admission.most(waiting, Wanted(most_bytes=100_000, most=30), sample, 0.0) == 30
    assert admission.most(waiting, Wanted(most_bytes=10), sample, 0.0) == 1, "a batch makes progress"


def test_sizes_are_learnt_slowly():
    admission = Admission(900, 0.0)
    wanted = Wanted(most_bytes=100_000)
    assert admission.most({QUEUES[0]: 5}, wanted, lambda queue: (1000, 10), 0.0) == 1000
    # A fifth of the way from 100 to 600 bytes.
    assert admission.most({QUEUES[0]: 5}, wanted, lambda queue: (6000, 10), 0.0) == 500


def test_the_queues_with_most_are_sampled():
    asked = []
    waiting = {queue: 10 * (i + 1) for i, queue in enumerate(QUEUES)}
    Admission(900, 0.0).most(waiting, Wanted(most_bytes=1), lambda queue: asked.append(queue) or (1, 1), 0.0)
    assert asked == QUEUES[:1:-1]


@pytest.mark.parametrize("most", [None, 7])
def test_without_a_sample_nothing_is_limited_by_bytes(most):
    wanted = Wanted(most=most, most_bytes=100)
    assert Admission(900, 0.0).most({QUEUES[0]: 5}, wanted, lambda queue: (0, 0), 0.0) == most
