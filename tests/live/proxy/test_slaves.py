"""A master that dies while its slave lives: reading goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import rpc
from tests.fix_clusters import WITH_TIMERS
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, positions, read, rows

SHORT = {"requestTimeout": "1s", "numRetries": 3}


@pytest.fixture
def pair(make_cluster) -> LocalBroker:
    """A master and a slave that may be killed; topic ``orders``."""
    mq = make_cluster(slaves=1, conf=WITH_TIMERS)  # without which no topic is deleted
    mq.create_topic("orders", 4)
    return mq


def copied(mq: LocalBroker, topic: str, total: int) -> None:
    """Wait until the slave has so many messages of a topic."""
    calls, slave = mq.admin.brokers.calls, mq.address(mq.slaves[0])

    def has() -> int:
        asked = [rpc.GET_MAX_OFFSET.request(topic=topic, queueId=i, bname="broker-a") for i in range(4)]
        answers = [calls.ask(slave, one, Deadline.after(5)) for one in asked]
        return sum(rpc.GET_MAX_OFFSET.answer(answer)["offset"] for answer in answers)

    eventually(lambda: has() >= total, 60)


def test_a_killed_master_with_a_slave_goes_on_being_read(pair):
    first = feed(pair, "orders", 40)
    runs = {
        where: Run(pair, subscribe="orders", startingOffsets="earliest", readFrom=where, **SHORT)
        for where in ("hint", "slave")
    }
    for run in runs.values():
        run.drain(first)
    second = feed(pair, "orders", 40)
    copied(pair, "orders", 80)
    eventually(lambda: all(sum(positions(run.latest()).values()) == 80 for run in runs.values()), 30)
    planned = {where: run.latest() for where, run in runs.items()}
    tasks = {where: run.plan(planned[where]) for where, run in runs.items()}
    pair.kill("broker-a")
    # A batch that was planned while the master lived ...
    for where, run in runs.items():
        assert Counter(bodies(rows(run.reader, tasks[where]))) == Counter(second)
    # ... a stream that goes on, one that starts again, and a batch.
    for run in runs.values():
        run.drain(second)
        assert sorted(run.read) == sorted([*first, *second])
        assert run.batch() == []
        again = Run(pair, run.offset, subscribe="orders", readFrom="hint", **SHORT)
        assert again.batch() == []
    # What begins now cannot know what else the master had: never less in silence.
    with pytest.raises(BrokerNotFound, match=r"only slaves of broker-a are up.*option 'readDeadline'"):
        read(pair, subscribe="orders", readDeadline="1s", **SHORT)
    with pytest.raises(BrokerNotFound, match="only slaves of broker-a are up"):
        Run(pair, subscribe="orders", startingOffsets="earliest", readDeadline="1s", **SHORT)
    pair.restart("broker-a")
    assert sorted(bodies(read(pair, subscribe="orders", **SHORT))) == sorted([*first, *second])
    third = feed(pair, "orders", 40)
    for run in runs.values():
        run.drain(third)
        assert sorted(run.read) == sorted([*first, *second, *third])


def test_a_topic_that_is_made_again_is_new_on_slaves_too(pair):
    """Else its slave keeps the old index, and gives old messages when its master is down."""
    run = Run(pair, subscribe="orders", startingOffsets="earliest", failOnDataLoss="ignore", **SHORT)
    run.drain(feed(pair, "orders", 40))
    copied(pair, "orders", 40)
    pair.admin.delete_topic("orders")
    pair.create_topic("orders", 4)
    run.read.clear()
    young = feed(pair, "orders", 12)
    run.drain(young)
    copied(pair, "orders", 12)
    last = feed(pair, "orders", 4)
    copied(pair, "orders", 16)
    pair.kill("broker-a")
    run.drain(last)
    assert Counter(run.read) == Counter([*young, *last])


def test_master_only_waits_for_the_master(pair):
    sent = feed(pair, "orders", 40)
    run = Run(pair, subscribe="orders", startingOffsets="earliest", readFrom="master", **SHORT)
    run.drain(sent)
    copied(pair, "orders", 40)
    pair.kill("broker-a")
    assert run.batch() == []
    assert set(run.positions) == {MessageQueue("orders", "broker-a", i) for i in range(4)}
    pair.restart("broker-a")
    run.drain(feed(pair, "orders", 4))
