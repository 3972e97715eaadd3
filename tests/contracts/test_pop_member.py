"""``ports.PopMember``: the client of a real Proxy, and the Proxy in memory of the consumers' tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.simple import MIN_INVISIBLE_S, MIN_WAIT_S
from rocketmq_spark.errors import NotFound, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import NO_FILTER, Message
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.ports import PopMember
from tests.fakes.pop_member import FakeProxy
from tests.fakes.timer import Time
from tests.helpers import awaited
from tests.live.grpc.proxied import new_topic, producer
from tests.test_popped import popped


def soon() -> Deadline:
    return Deadline.after(30)


class Case:
    """A consumer of ``topic``, whose messages come from one place; it is empty."""

    topic: str
    port: PopMember

    def send(self, *bodies: bytes) -> None:
        raise NotImplementedError

    def pass_time(self) -> None:
        """A second."""

    def outlast(self) -> None:
        """All that was handed out, where that is for nothing."""

    def receive(self, count: int) -> list[PoppedMessage]:
        """What comes next, at most so many, once there is something, for the shortest time."""

        def ask() -> list[PoppedMessage]:
            self.pass_time()
            return list(self.port.receive((self.topic, 0), count, MIN_INVISIBLE_S, MIN_WAIT_S, soon()))

        return awaited(ask)

    def received(self, *bodies: bytes) -> list[PoppedMessage]:
        """These and no others come, each once; in the order of the bodies here."""
        found: list[PoppedMessage] = []
        while len(found) < len(bodies):
            found += self.receive(len(bodies) + 9)
        assert sorted(message.body for message in found) == sorted(bodies)
        return sorted(found, key=lambda message: bodies.index(message.body))


class Real(Case):
    def __init__(self, mq: LocalBroker) -> None:
        self.topic = new_topic(mq, queues=1)
        given = {"transport": "grpc", "proxyEndpoint": mq.proxy_grpc, "group": f"pop-{self.topic}"}
        self.port = session.pop_member(options.parse(given).for_role("simple consumer"))
        self.port.subscribe({self.topic: NO_FILTER}, soon())
        self.producer = producer(mq)

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            self.producer.send(Message(self.topic, body))


class InMemory(Case):
    def __init__(self) -> None:
        self.time = Time()
        self.topic = "t"
        self.fake = FakeProxy(self.time.monotonic, t=1)
        self.port = self.fake

    def send(self, *bodies: bytes) -> None:
        self.fake.put(*(replace(popped(msg_id=body.decode()), body=body) for body in bodies))

    def pass_time(self) -> None:
        self.time.advance(1.0)

    def outlast(self) -> None:
        self.time.advance(MIN_INVISIBLE_S + 1.0)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("proxied")), "in memory"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Real(request.getfixturevalue("proxied")) if request.param == "real" else InMemory()
    yield made
    made.port.close(soon())
    if isinstance(made, Real):
        made.producer.close()


def test_unacknowledged_message_is_delivered_anew_after_lease(case: Case) -> None:
    case.send(b"0", b"1")
    late, done = case.received(b"0", b"1")
    assert [message.delivery_attempt for message in (late, done)] == [1, 1]
    first = late.receipt
    case.port.change_invisible(late, 1.0, soon())
    assert len({first, late.receipt, done.receipt}) == 3
    case.port.ack(done, soon())
    (again,) = case.received(b"0")
    assert (again.msg_id, again.delivery_attempt) == (late.msg_id, 2)
    assert again.receipt not in (first, late.receipt)
    with pytest.raises(NotFound):
        case.port.ack(late, soon())
    with pytest.raises(NotFound):
        case.port.change_invisible(late, MIN_INVISIBLE_S, soon())
    case.port.ack(again, soon())


def test_a_receipt_that_was_replaced_settles_nothing(case: Case) -> None:
    """It is no error either, in its own time: the message comes again, and once more than it should where more time was asked."""
    case.send(b"0", b"1")
    messages = case.received(b"0", b"1")
    before = [replace(message) for message in messages]
    case.port.change_invisible(messages[0], 1.0, soon())
    case.port.ack(before[0], soon())
    case.port.change_invisible(messages[1], 3 * MIN_INVISIBLE_S, soon())
    case.port.change_invisible(before[1], 1.0, soon())
    assert [message.delivery_attempt for message in case.received(b"0", b"1")] == [2, 2]


def test_what_is_done_stays_done(case: Case) -> None:
    case.send(b"0", b"1", b"2")
    done, dead, later = case.received(b"0", b"1", b"2")
    for _ in range(2):
        case.port.ack(done, soon())
        case.port.forward_to_dlq(dead, soon())
    case.port.change_invisible(later, 1.0, soon())
    (again,) = case.received(b"2")
    case.port.ack(again, soon())
    case.outlast()
    case.send(b"3", b"4")
    (one,) = case.receive(1)
    (other,) = case.receive(9)
    assert sorted((one.body, other.body)) == [b"3", b"4"]


def test_a_topic_that_is_not_there_has_no_places(case: Case) -> None:
    assert case.port.target_count(case.topic, soon()) == 1
    with pytest.raises(RouteNotFound):
        case.port.target_count("no-such-topic", soon())
