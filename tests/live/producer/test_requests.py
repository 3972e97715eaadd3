"""Request and reply on real brokers, with RocketMQ's own client as requester and as replier."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rocketmq_spark import Consumer, Context, Message, MessageQueue, Producer, ReceivedMessage, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import capture
from rocketmq_spark.errors import ReplyTimeout, ServerFault
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_spark import ROOT
from tests.helpers import awaited, killed
from tests.live.consumer.members import Members, members
from tests.mockbroker import eventually
from tests.witness import JavaPeer

__all__ = ["members"]


def answer(messages: tuple[ReceivedMessage, ...], context: Context) -> None:
    """Answers each message with what it says, and by whom."""
    for message in messages:
        context.reply(b"ours:" + message.body, to=message, properties={"by": "ours"})


@contextmanager
def replier(mq: LocalBroker, topic: str, listener: Callable[..., Any] = answer, **options: Any) -> Iterator[Consumer]:
    with Consumer(mq.name_server, f"of-{topic}", consume_from_where="earliest", **options) as consumer:
        consumer.subscribe(topic)
        consumer.start(listener)
        yield consumer


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "ordered"])
def test_each_request_gets_its_own_reply(rocketmq: LocalBroker, topic: str, ordered: bool) -> None:
    with replier(rocketmq, topic, ordered=ordered), Producer(rocketmq.name_server, "askers") as producer:
        asked = [producer.request_async(Message(topic, b"%d" % i), timeout_s=60) for i in range(500)]
        got = [future.result(60) for future in asked]
        assert [reply.body for reply in got] == [b"ours:%d" % i for i in range(500)]
        assert {reply.properties["by"] for reply in got} == {"ours"}
        large = bytes(1_000_000)
        assert producer.request(Message(topic, large), timeout_s=60).body == b"ours:" + large
        with ThreadPoolExecutor(4) as threads:
            each = threads.map(lambda i: producer.request(Message(topic, b"t%d" % i), timeout_s=60).body, range(100))
            assert list(each) == [b"ours:t%d" % i for i in range(100)]


def test_java_asks_and_is_answered(rocketmq: LocalBroker, topic: str, java_peer: JavaPeer) -> None:
    with replier(rocketmq, topic):
        assert java_peer.request(topic, 20) == [f"ours:{i} by ours" for i in range(20)]


def test_java_answers(members: Members) -> None:
    with members.java(reply="true") as java, Producer(members.mq.name_server, "askers") as producer:
        got = [producer.request(Message(members.topic, b"%d" % i), timeout_s=60) for i in range(20)]
        assert [(reply.body, reply.properties["by"]) for reply in got] == [(b"java:%d" % i, "java") for i in range(20)]
        bodies = awaited(java.bodies, lambda found: len(found) >= 20)  # Java prints what it has answered
        assert Counter(bodies) == Counter(str(i) for i in range(20))


def test_late_reply_is_dropped_and_replier_gets_error(rocketmq: LocalBroker, topic: str) -> None:
    """A request without a reply was stored, and a reply without a requester is an error of its listener's."""
    with (
        Producer(rocketmq.name_server, "askers") as producer,
        pytest.raises(ReplyTimeout, match="was stored, but no reply arrived in time"),
    ):
        producer.request(Message(topic, b"early"), timeout_s=3.0)  # it is to be stored, on a slow machine too
    failed: list[BaseException] = []

    def late(messages: tuple[ReceivedMessage, ...], context: Context) -> None:
        try:
            context.reply(b"late")
        except ServerFault as e:
            failed.append(e)

    with replier(rocketmq, topic, late):
        awaited(lambda: failed)
    assert "Perhaps the requester has ended" in str(failed[0])


def test_the_page_s_program_prints_what_it_says(rocketmq: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "request-reply.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "page", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "b'42 for apples'"


def test_closing_another_producer_costs_no_reply(rocketmq: LocalBroker, topic: str) -> None:
    """They share a connection, which a broker forgets with the first group that leaves it."""
    with replier(rocketmq, topic), Producer(rocketmq.name_server, "askers") as producer:
        assert producer.request(Message(topic, b"1"), timeout_s=60).body == b"ours:1"
        with Producer(rocketmq.name_server, "others") as other:
            other.request(Message(topic, b"2"), timeout_s=60)
        assert producer.request(Message(topic, b"3"), timeout_s=60).body == b"ours:3"


def test_nor_does_one_that_closed_before_the_first_request(rocketmq: LocalBroker, topic: str) -> None:
    with replier(rocketmq, topic), Producer(rocketmq.name_server, "askers") as producer:
        with Producer(rocketmq.name_server, "others") as other:
            for one in (producer, other):
                one.send(Message(topic, b"0"))
            given = options.parse({"nameServer": rocketmq.name_server})
            session.client(given.for_role("producer")).instance.heartbeat(Deadline.after(60))
        assert producer.request(Message(topic, b"1"), timeout_s=10).body == b"ours:1"


def test_replies_come_again_after_a_broker_was_killed(pair: LocalBroker) -> None:
    """It knows the requester's connection no more, until it hears of it."""
    pair.create_topic("prices", 1)
    with replier(pair, "prices"), Producer(pair.name_server, "askers") as producer:
        first, second = producer.queues("prices")

        def ask(queue: MessageQueue, body: bytes) -> None:
            reply = producer.request(Message("prices", body), queue=queue, timeout_s=60)
            assert reply.body == b"ours:" + body

        ask(first, b"1")
        ask(second, b"2")
        killed(pair, first.broker_name)
        ask(second, b"3")
        pair.restart(first.broker_name)
        # A request to one queue has one attempt, which fails at once for a moment after a connection was refused.
        eventually(lambda: capture(ask, first, b"4") is None, 60)
