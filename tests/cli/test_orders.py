import itertools
import json
import random
import threading
import time
from datetime import datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.cli.produce import REGIONS, Order, Orders, due_counts, parse_rate


def test_an_order_as_a_message():
    message = Order("o-7", "asia", 1230, "web", 1_769_860_800.1234).message("orders")
    assert (message.topic, message.tags, list(message.keys)) == ("orders", "web", ["o-7"])
    assert json.loads(message.body) == {
        "order_id": "o-7", "region": "asia", "amount": 12.3, "ts": "2026-01-31T12:00:00.123Z",
    }  # fmt: skip


@given(st.integers(0, 10**11))
def test_amounts_are_exact_as_text(cents):
    body = json.loads(Order("o", "asia", cents, "web", 0.0).message("t").body, parse_float=Decimal)
    assert body["amount"] * 100 == cents


def test_orders_differ_and_never_go_back_in_time():
    supply = Orders(rng=random.Random(1))
    some = [supply.next() for _ in range(200)]
    assert [order.order_id for order in some] == [f"o-{i}" for i in range(1, 201)]
    assert {order.region for order in some} == set(REGIONS)
    times = [order.time_s for order in some]
    assert times == sorted(times)
    assert datetime.now().timestamp() - times[0] < 60


@pytest.mark.parametrize(("text", "rate"), [("100", 100), ("100/s", 100), ("30/m", 0.5), (" 2.5/s ", 2.5)])
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "-1", "fast", "3/h", "", "1 000"])
def test_no_rates(text):
    with pytest.raises(ValueError, match="is not a rate such as 100/s"):
        parse_rate(text)


def test_paced_sends_the_count_and_not_faster():
    begin = time.monotonic()
    assert sum(due_counts(1000, 101, threading.Event())) == 101
    assert time.monotonic() - begin >= 0.1


def test_paced_catches_up():
    groups = due_counts(1000, None, threading.Event())
    assert next(groups) == 1
    begin = time.monotonic()
    while time.monotonic() - begin < 0.05:
        pass
    assert next(groups) >= 50


def test_paced_stops_at_once():
    stop = threading.Event()
    groups = due_counts(0.001, None, stop)
    assert next(groups) == 1
    threading.Timer(0.05, stop.set).start()
    assert list(itertools.islice(groups, 1)) == []
