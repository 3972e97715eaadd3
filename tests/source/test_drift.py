"""What has become of queues."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.checkpoints.rewind import DriftState, drift

Q = MessageQueue("t", "broker-a", 0)
BOUNDS = QueueBounds(5, 10, 0)


@pytest.mark.parametrize(
    ("position", "bounds", "how", "expected"),
    [
        (10, BOUNDS, {}, (DriftState.READ, 0)),
        (7, BOUNDS, {}, (DriftState.BEHIND, 3)),
        (5, BOUNDS, {}, (DriftState.BEHIND, 5)),
        (4, BOUNDS, {}, (DriftState.LOST, 1)),
        (12, BOUNDS, {}, (DriftState.WENT_BACK, 2)),
        (7, BOUNDS, {"recreated_queues": [Q]}, (DriftState.RECREATED, 5)),
        (None, BOUNDS, {}, (DriftState.NEW, 5)),
        (7, None, {}, (DriftState.REMOVED, None)),
        (7, None, {"unavailable_brokers": {"broker-a"}}, (DriftState.UNAVAILABLE, None)),
        (
            7,
            None,
            {"unavailable_brokers": {"broker-a"}, "unregistered_brokers": {"broker-a"}},
            (DriftState.UNREGISTERED, None),
        ),
        (7, BOUNDS, {"unregistered_brokers": {"broker-a"}}, (DriftState.BEHIND, 3)),
    ],
)
def test_one_queue(position, bounds, how, expected) -> None:
    positions = {} if position is None else {Q: position}
    (found,) = drift(positions, {} if bounds is None else {Q: bounds}, **how)
    assert (found.state, found.offsets) == expected
    assert found[:3] == (Q, position, bounds)


def test_drift_lists_all_queues_in_order_and_the_lossless_states() -> None:
    later = Q._replace(queue_id=1)
    assert [one.queue for one in drift({later: 1}, {Q: BOUNDS})] == [Q, later]
    assert {state for state in DriftState if state.is_lossless} == {DriftState.READ, DriftState.BEHIND, DriftState.NEW}
    assert {state for state in DriftState if state.is_unavailable} == {DriftState.UNAVAILABLE, DriftState.UNREGISTERED}
