"""A broker that is killed under a stream: its batch waits and says for whom; what is planned while it is dead leaves it out."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from rocketmq_spark import session
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from tests.helpers import killed
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, names, positions, rows

SHORT = {"requestTimeout": "1s", "numRetries": 1, "readDeadline": "4s"}


@pytest.fixture
def topic(pair):
    (name,) = names(1, "killed")
    pair.create_topic(name, 1)
    return name


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("filtered", [{}, {"tags": "a"}])
def test_a_batch_that_waits_for_a_dead_broker_names_it(pair, topic, caplog, filtered, restarted):
    given = {"subscribe": topic, "startingOffsets": "earliest", **SHORT, **filtered}
    run = Run(pair, **given)
    sent = feed(pair, topic, 8, tags="a")
    end = run.ahead(8)
    tasks = None if restarted else run.plan(end)
    killed(pair, "broker-b")
    if restarted:
        session.close_all()
        run = Run(pair, run.offset, **given)
        tasks = run.plan(end)
    with pytest.raises(RocketMQError) as caught:
        rows(run.reader, tasks)
    text = str(caught.value)
    assert f"topic {topic}, queue {topic}/broker-b/0" in text
    assert "no name server answered in time" not in text
    assert "Nothing is lost: a task waits for broker broker-b " in text
    assert "local[*,4]" in text
    assert "rocketmq-spark checkpoint rewind" in text
    waits = [
        r for r in caplog.records if f"the read waits for broker broker-b: {topic}/broker-b/0 from" in r.getMessage()
    ]
    assert waits
    assert {record.levelno for record in waits} == {logging.WARNING}
    pair.restart("broker-b")
    assert Counter(bodies(rows(run.reader, tasks))) == Counter(sent)


def test_batch_planned_after_broker_death_reads_other_brokers(pair, topic):
    run = Run(pair, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=4, **SHORT)
    a, b = (MessageQueue(topic, f"broker-{name}", 0) for name in "ab")
    sent = feed(pair, topic, 40)
    run.batch()
    killed(pair, "broker-b")
    # The driver's view may be a moment old.
    eventually(lambda: positions(run.latest())[b] == run.positions[b], 60)
    run.until(lambda: run.positions[a] == 20)
    assert run.positions[b] < 20
    sent += feed(pair, topic, 4, queues=[a])
    run.drain(sent[-4:])
    pair.restart("broker-b")
    run.until(lambda: run.positions == {a: 24, b: 20})
    assert sorted(run.read) == sorted(sent)
