"""What reads ask: the remoting client on a real broker, and the fakes of these ports.

Each test is one for both, so that what the source is given in memory is of the kind that a broker says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rocketmq_spark import Message, Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, QueueBounds
from tests.fakes.offset_reader import offset_reader
from tests.fakes.pull_source import pull_source
from tests.fakes.route_reader import QUEUES, route_reader
from tests.helpers import total


class Case:
    """Messages with bodies of ten bytes lie in ``queue`` from its first offset to before its last; the group has an offset."""

    topic: str
    queue: MessageQueue
    group: str
    ports: Mapping[str, Any]


def soon() -> Deadline:
    return Deadline.after(20)


def of_fakes() -> Case:
    case = Case()
    case.topic, case.queue, case.group = "t", QUEUES[0], "g"
    case.ports = {"routes": route_reader(), "offsets": offset_reader(), "pulls": pull_source()}
    return case


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "in memory"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param != "real":
        return of_fakes()
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    case = Case()
    case.topic = make_topic(queues=2)
    case.queue, case.group = MessageQueue(case.topic, mq.brokers[0], 0), f"g-{case.topic}"
    with Producer(name_server=mq.name_server, group="contracts") as producer:
        for _ in range(7):
            producer.send(Message(case.topic, b"0123456789"), queue=case.queue)
    total(mq, case.topic, 7)
    made = options.parse({"nameServer": mq.name_server, "subscribe": case.topic}).for_role("batch source")
    case.ports = {"routes": session.routes(made), "offsets": session.offsets(made), "pulls": session.pulls(made)}
    committer = session.committer(made)
    committer.create_group(case.group, {case.queue: 4})
    assert committer.commit_each(case.group, {case.queue: 4}, soon()) == {}
    return case


def test_routes_name_the_brokers_of_a_topic(case: Case) -> None:
    routes = case.ports["routes"]
    routes.refresh([case.topic], 0.0)
    route = routes.get(case.topic)
    assert route.topic == case.topic
    (of_broker,) = route.queues
    assert (of_broker.broker_name, of_broker.read_queues) == (case.queue.broker_name, 2)
    address = routes.address(case.queue.broker_name)
    assert routes.cluster()[case.queue.broker_name].addresses[0] == address
    assert address.rpartition(":")[2].isdecimal()
    assert case.topic in routes.topics()


def test_offsets_are_numbers_within_the_queue(case: Case) -> None:
    offsets, queue = case.ports["offsets"], case.queue
    (bounds,) = offsets.bounds([queue], soon()).values()
    assert isinstance(bounds, QueueBounds)
    assert bounds.max_offset - bounds.min_offset == 7
    assert bounds.last_update_ms > 0
    assert offsets.committed(case.group, [queue], soon()) == {queue: 4}
    (found,) = offsets.search_offsets({queue: 0}, soon()).values()
    assert found <= bounds.max_offset
    assert offsets.store_time_ms(case.group, queue, bounds.min_offset, soon()) > 0
    size, count = offsets.sample(case.group, queue, bounds.min_offset, soon())
    assert size >= 10 * count > 0
    assert offsets.late_brokers == frozenset()
    assert offsets.connection(queue.broker_name) == offsets.connection(queue.broker_name)


def test_what_brokers_are(case: Case) -> None:
    offsets, queue = case.ports["offsets"], case.queue
    assert not offsets.is_proxy(case.topic, queue.broker_name, soon())
    offsets.check_filter(queue.broker_name, case.group, case.topic, "a > 1", soon())
    assert not case.ports["pulls"].stores_batches(queue)
