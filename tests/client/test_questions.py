"""Questions about queues: many at a time, answers in order, the first error after all have ended."""

from __future__ import annotations

import json
import threading

import pytest

from rocketmq_spark.base.codes import Request
from rocketmq_spark.client.broker_client import BrokerCommand, first_queues
from rocketmq_spark.errors import BrokerBusy, BrokerNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import rpc
from tests import mockbroker as mb
from tests.client.conftest import Parts
from tests.mockbroker import Call, MockBroker, ok, refuse


@pytest.fixture
def routed(parts: Parts) -> Parts:
    parts.routes.get("t")
    return parts


def questions(count: int) -> list[BrokerCommand]:
    rows = [rpc.GET_MAX_OFFSET.request(topic="t", queueId=i, bname="broker-a") for i in range(count)]
    return [BrokerCommand("broker-a", row, "t", MessageQueue("t", "broker-a", i)) for i, row in enumerate(rows)]


class TestAskAll:
    def test_all_are_under_way_at_once_and_answers_are_in_order(self, broker: MockBroker, routed: Parts) -> None:
        held = mb.Held()
        broker.on(Request.GET_MAX_OFFSET, held)

        def answer() -> None:
            for call in reversed(held.wait(50)):  # all came before the first was answered
                call.answer(ok(offset=call.ext("queueId")))

        thread = threading.Thread(target=answer)
        thread.start()
        answers = routed.broker_client.request_all(questions(50), routed.soon)
        thread.join()
        assert [int(a.ext["offset"]) for a in answers] == list(range(50))

    def test_the_first_error_is_raised_after_all_have_ended(self, broker: MockBroker, routed: Parts) -> None:
        ended = []

        def answer(call: Call) -> None:
            ended.append(call.ext("queueId"))
            call.answer(refuse(2, f"busy {call.ext('queueId')}") if call.ext("queueId") != "0" else ok(offset=1))

        broker.on(Request.GET_MAX_OFFSET, answer)
        with pytest.raises(BrokerBusy, match="busy 1") as caught:
            routed.broker_client.request_all(questions(5), routed.soon)
        assert (caught.value.topic, caught.value.queue) == ("t", "t/broker-a/1")
        assert len(ended) == 5

    def test_a_broker_without_address_is_an_error_of_its_questions(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MAX_OFFSET, ok(offset=1))
        stray = BrokerCommand("nowhere", rpc.GET_MAX_OFFSET.request(topic="t", queueId=0, bname="nowhere"), "t")
        with pytest.raises(BrokerNotFound, match="nowhere"):
            routed.broker_client.request_all([*questions(1), stray], routed.soon)

    def test_codes_that_are_answers(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MAX_OFFSET, refuse(22))
        assert routed.broker_client.request_all(questions(1), routed.soon, (0, 22))[0].code == 22

    def test_no_questions(self, routed: Parts) -> None:
        assert routed.broker_client.request_all([], routed.soon) == []

    def test_a_connection_that_breaks_fails_those_that_wait(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MAX_OFFSET, [ok(offset=1), mb.never, mb.close])
        with pytest.raises(RocketMQError, match="closed the connection"):
            routed.broker_client.request_all(questions(3), routed.soon)


def test_the_lowest_queue_of_each_broker_and_topic() -> None:
    a, b, c, d = (MessageQueue(t, n, i) for t, n, i in (("t", "a", 2), ("t", "a", 1), ("t", "b", 0), ("u", "a", 3)))
    assert first_queues([a, b, c, d]) == {("a", "t"): b, ("b", "t"): c, ("a", "u"): d}


def test_many_questions_at_once(real: Parts, topic: str) -> None:
    queue = real.sender.publish_queues(topic, real.soon)[0]
    row = rpc.GET_MAX_OFFSET.request
    many = [BrokerCommand(queue.broker_name, row(topic=topic, queueId=i % 8, bname="x"), topic) for i in range(500)]
    answers = real.broker_client.request_all(many, real.soon)
    assert json.dumps([a.ext["offset"] for a in answers]).count('"0"') == 500
