"""A master that dies while its slave lives: reading goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import rpc
from tests.fix_clusters import all_running
from tests.helpers import killed
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, names, read, rows

SHORT = {"requestTimeout": "1s", "numRetries": 3}


@pytest.fixture(scope="module")
def mastered() -> Iterator[LocalBroker]:
    """A master and a slave that may be killed. It has timers, without which no topic is deleted."""
    with LocalBroker(slaves=1, quiet=True) as mq:
        yield mq


@pytest.fixture
def both(mastered: LocalBroker) -> LocalBroker:
    """Both run when a test begins."""
    return all_running(mastered)


@pytest.fixture
def topic(both: LocalBroker) -> str:
    (name,) = names(1, "orders")
    both.create_topic(name, 4)
    return name


def copied(mq: LocalBroker, topic: str, total: int) -> None:
    """Wait until the slave has so many messages of a topic."""
    calls, slave = mq.admin.offset_reader.rpc_client, mq.address(mq.slaves[0])

    def has() -> int:
        asked = [rpc.GET_MAX_OFFSET.request(topic=topic, queueId=i, bname="broker-a") for i in range(4)]
        answers = [calls.request(slave, one, Deadline.after(30.0)) for one in asked]
        return sum(rpc.GET_MAX_OFFSET.answer(answer)["offset"] for answer in answers)

    eventually(lambda: has() >= total, 60)


def test_a_killed_master_with_a_slave_goes_on_being_read(both, topic):
    first = feed(both, topic, 40)
    runs = {
        where: Run(both, subscribe=topic, startingOffsets="earliest", readFrom=where, **SHORT)
        for where in ("hint", "slave")
    }
    for run in runs.values():
        run.drain(first)
    second = feed(both, topic, 40)
    copied(both, topic, 80)
    planned = {where: run.ahead(40) for where, run in runs.items()}
    tasks = {where: run.plan(planned[where]) for where, run in runs.items()}
    killed(both, "broker-a")
    # A batch that was planned while the master lived ...
    for where, run in runs.items():
        assert Counter(bodies(rows(run.reader, tasks[where]))) == Counter(second)
    # ... a stream that goes on, one that starts again, and a batch.
    for run in runs.values():
        run.drain(second)
        assert sorted(run.read) == sorted([*first, *second])
        assert run.batch() == []
        again = Run(both, run.offset, subscribe=topic, readFrom="hint", **SHORT)
        assert again.batch() == []
    # What begins now cannot know what else the master had: never less in silence.
    with pytest.raises(BrokerNotFound, match=r"only slaves of broker-a are up.*option 'readDeadline'"):
        read(both, subscribe=topic, readDeadline="1s", **SHORT)
    with pytest.raises(BrokerNotFound, match="only slaves of broker-a are up"):
        Run(both, subscribe=topic, startingOffsets="earliest", readDeadline="1s", **SHORT)
    both.restart("broker-a")
    assert sorted(bodies(read(both, subscribe=topic, **SHORT))) == sorted([*first, *second])
    third = feed(both, topic, 40)
    for run in runs.values():
        run.drain(third)
        assert sorted(run.read) == sorted([*first, *second, *third])


def test_a_topic_that_is_made_again_is_new_on_slaves_too(both, topic):
    """Else its slave keeps the old index, and gives old messages when its master is down."""
    run = Run(both, subscribe=topic, startingOffsets="earliest", failOnDataLoss="ignore", **SHORT)
    run.drain(feed(both, topic, 40))
    copied(both, topic, 40)
    both.admin.delete_topic(topic)
    both.create_topic(topic, 4)
    run.read.clear()
    young = feed(both, topic, 12)
    run.drain(young)
    copied(both, topic, 12)
    last = feed(both, topic, 4)
    copied(both, topic, 16)
    killed(both, "broker-a")
    run.drain(last)
    assert Counter(run.read) == Counter([*young, *last])


def test_master_only_waits_for_the_master(both, topic, caplog):
    sent = feed(both, topic, 40)
    run = Run(both, subscribe=topic, startingOffsets="earliest", readFrom="master", **SHORT)
    run.drain(sent)
    waiting = feed(both, topic, 12)
    copied(both, topic, 52)  # the slave has what the master no longer gives
    killed(both, "broker-a")
    eventually(lambda: run.batch() == [] and f"cannot read now: {topic}/broker-a/0" in caplog.text, 60)
    assert sorted(run.read) == sorted(sent)
    assert set(run.positions) == {MessageQueue(topic, "broker-a", i) for i in range(4)}
    assert sum(run.positions.values()) == 40
    both.restart("broker-a")
    run.drain([*waiting, *feed(both, topic, 4)])
