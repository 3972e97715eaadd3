"""How much may be under way."""

from typing import Any

import pytest

from rocketmq_spark.producer.send_queue import (
    INITIAL_REQUESTS_PER_BROKER,
    MAX_REQUESTS_PER_BROKER,
    TARGET_BYTES_IN_FLIGHT,
    SendWindow,
)
from rocketmq_spark.producer.settings import ProducerSettings


def bounds(**settings: Any) -> SendWindow:
    return SendWindow(ProducerSettings(**{"group": "g", "max_in_flight": None, **settings}))


def test_a_fixed_number_per_broker_stays() -> None:
    found = bounds(max_in_flight_per_broker=3)
    found.record_acknowledged(10, is_first_attempt=False)
    found.record_acknowledged(10, is_first_attempt=True)
    assert found.max_per_broker == 3


def test_it_grows_with_small_batches_to_a_limit() -> None:
    found = bounds()
    assert found.max_per_broker == INITIAL_REQUESTS_PER_BROKER
    for _ in range(1000):
        found.record_acknowledged(1000, is_first_attempt=True)
    assert found.max_per_broker == MAX_REQUESTS_PER_BROKER


def test_send_window_grows_only_to_target_bytes_per_connection() -> None:
    found = bounds()
    for _ in range(100):
        found.record_acknowledged(1 << 20, is_first_attempt=True)
    assert found.max_per_broker == TARGET_BYTES_IN_FLIGHT >> 20


def test_it_halves_when_a_broker_had_to_be_asked_again() -> None:
    found = bounds()
    sizes = []
    for _ in range(4):
        found.record_acknowledged(1000, is_first_attempt=False)
        sizes.append(found.max_per_broker)
    assert sizes == [2, 1, 1, 1]


def test_the_bound_per_broker_is_taken_times_the_brokers() -> None:
    found = bounds(max_in_flight_per_broker=3)
    assert found.has_limit_per_broker
    for brokers, max_out in ((0, 3), (1, 3), (5, 15)):
        found.broker_count = brokers
        assert found.max_concurrent == max_out


def test_a_total_is_a_total_and_never_changes() -> None:
    found = bounds(max_in_flight=7)
    found.broker_count = 5
    for clean in (True, False):
        found.record_acknowledged(10, clean)
        assert (found.max_concurrent, found.has_limit_per_broker) == (7, False)


@pytest.mark.parametrize("ordered", [True, False])
def test_requests_and_bytes_are_bounded_but_one_send_always_fits(ordered: bool) -> None:
    found = bounds(max_in_flight=1, max_async_messages=3, max_async_bytes=100)
    assert found.has_room(1000, ordered)
    found.add(60)
    assert found.has_room(40, ordered)
    assert not found.has_room(41, ordered)
    found.add(20)
    found.add(10)
    assert not found.has_room(1, ordered)
    found.remove(20)
    assert found.has_room(1, ordered)
    found.clear()
    assert (found.request_count, found.byte_count) == (0, 0)


def test_per_broker_bound_lets_only_ordered_sends_wait_inside() -> None:
    found = bounds(max_in_flight_per_broker=2, max_async_messages=None)
    for _ in range(2):
        assert found.has_room(1, ordered=False)
        found.add(1)
    assert not found.has_room(1, ordered=False)
    assert found.has_room(1, ordered=True)
    found.broker_count = 2
    assert found.has_room(1, ordered=False)
