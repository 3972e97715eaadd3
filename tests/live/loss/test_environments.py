"""Environments by their number while a broker is away: what is another's is never read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.mockbroker import eventually
from tests.reading import Run, feed

SHORT = {"subscribe": "orders", "requestTimeout": "1s", "numRetries": 3}
A, B = (MessageQueue("orders", f"broker-{name}", 0) for name in "ab")


@pytest.fixture
def pair() -> Iterator[LocalBroker]:
    """Two brokers with two queues of ``orders`` each, of which one may be killed."""
    with LocalBroker(brokers=2, quiet=True) as mq:
        mq.create_topic("orders", 2)
        yield mq


def test_an_environment_reads_its_own_queue_and_no_other_while_its_broker_is_away(pair, caplog):
    first = Run(pair, startingOffsets="earliest", environment=1, **SHORT)
    third = Run(pair, startingOffsets="earliest", environment=3, **SHORT)
    mine = feed(pair, "orders", 4, queues=[A])
    first.drain(mine)
    pair.kill("broker-a")
    eventually(lambda: "broker-a" not in pair.admin.routes.cluster(), 60)
    foreign = feed(pair, "orders", 70, queues=[B])
    third.drain(foreign)  # which would be called out of range by the two queues that are left
    again = Run(pair, first.offset, environment=1, **SHORT)
    for run in (first, again):
        for _ in range(5):
            assert run.batch() == []
    assert "cannot read now: orders/broker-a/0" in caplog.text
    pair.restart("broker-a")
    mine += feed(pair, "orders", 4, queues=[A])
    first.drain(mine)
    again.drain(mine[4:])
    assert sorted(first.read) == sorted(mine)
    assert sorted(again.read) == sorted(mine[4:])
    assert sorted(third.read) == sorted(foreign)
