"""``ports.Replies``: two remoting clients on a real broker, and the fake of the producer's tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import MessageRefused, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, Reply
from rocketmq_spark.ports import Replies
from tests.consumer.messages import message
from tests.fakes.replies import FakeReplies
from tests.queues import q

_numbers = itertools.count()


class Case(NamedTuple):
    """A requester that has joined a group and is announced, and a replier in another process."""

    requester: Replies
    client_id: str
    leave: Callable[[Deadline], None]
    replier: Replies
    queue: MessageQueue

    def request(self, correlation_id: str) -> ReceivedMessage:
        """Return a request of the requester, as a consumer receives it."""
        properties = {
            Property.CLUSTER: "DefaultCluster",
            Property.REPLY_TO_CLIENT: self.client_id,
            Property.CORRELATION_ID: correlation_id,
        }
        return dataclasses.replace(message(0, queue=self.queue), properties=properties)

    def reply(self, correlation_id: str, body: bytes) -> None:
        answer = Message("ignored", body, properties={"by": "replier"})
        self.replier.reply(self.request(correlation_id), answer, "contracts", soon())


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "in memory"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param != "real":
        fake = FakeReplies()
        yield Case(fake, fake.client_id, fake.join("g", 30.0), fake, q("a:0"))
        return
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    requester, replier = own_client(mq), own_client(mq)
    queue = MessageQueue(make_topic(queues=1), mq.brokers[0], 0)
    leave = requester.replies.join(f"g-{queue.topic}", 30.0)
    requester.replies.announce(soon())
    yield Case(requester.replies, requester.instance.client_id, leave, replier.replies, queue)
    leave(soon())


def own_client(mq: LocalBroker) -> session.Client:
    """A client that shares no connection and no client id with another one."""
    parsed = options.parse({"nameServer": mq.name_server, "requestTimeout": 20_000 + next(_numbers)})
    return session.client(parsed.for_role("producer"))


Outcomes = SimpleQueue[Reply | RocketMQError]


def test_each_request_gets_its_own_reply(case: Case) -> None:
    first, second = Outcomes(), Outcomes()
    case.requester.expect("first", first.put)
    case.requester.expect("second", second.put)
    case.reply("second", b"2")
    case.reply("first", b"1")
    for outcomes, body in ((first, b"1"), (second, b"2")):
        reply = outcomes.get(timeout=60)
        assert isinstance(reply, Reply)
        assert (reply.body, dict(reply.properties)) == (body, {"by": "replier"})


def test_only_the_first_reply_to_a_request_counts(case: Case) -> None:
    outcomes, last = Outcomes(), Outcomes()
    case.requester.expect("answered twice", outcomes.put)
    case.requester.expect("last", last.put)
    case.reply("answered twice", b"1")
    case.reply("answered twice", b"2")
    case.reply("last", b"3")
    last.get(timeout=60)
    reply = outcomes.get_nowait()
    assert isinstance(reply, Reply)
    assert reply.body == b"1"
    assert outcomes.empty()


def test_a_cancelled_request_gets_no_reply(case: Case) -> None:
    outcomes, last = Outcomes(), Outcomes()
    cancel = case.requester.expect("cancelled", outcomes.put)
    case.requester.expect("last", last.put)
    cancel()
    case.reply("cancelled", b"1")
    case.reply("last", b"2")
    last.get(timeout=60)
    assert outcomes.empty()


@pytest.mark.parametrize("name", [Property.CLUSTER, Property.REPLY_TO_CLIENT, Property.CORRELATION_ID])
def test_a_message_that_is_no_request_cannot_be_answered(case: Case, name: str) -> None:
    request = case.request("no request")
    others = {key: value for key, value in request.properties.items() if key != name}
    with pytest.raises(MessageRefused):
        case.replier.reply(
            dataclasses.replace(request, properties=others), Message("ignored", b"x"), "contracts", soon()
        )


def test_requester_that_left_gets_no_reply(case: Case) -> None:
    outcomes = Outcomes()
    case.requester.expect("late", outcomes.put)
    case.leave(soon())
    with pytest.raises(RocketMQError):
        case.reply("late", b"x")
    assert outcomes.empty()
