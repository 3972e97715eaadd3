"""What brokers say of timers and of consumers, asked through the sender."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import AccessDenied, CallTimeout
from rocketmq_spark.wire.header import Command
from tests import mockbroker as mb
from tests.client.conftest import Parts, elsewhere
from tests.mockbroker import MockBroker, ok, route

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC


def test_a_broker_that_does_not_answer_has_no_version(broker: MockBroker, parts: Parts) -> None:
    """It is not waited for longer than the others."""
    broker.on(ROUTE, route(1, {"broker-a": broker.address, "b": "127.0.0.1:1"}))
    parts.routes.get("t")
    broker.on(Request.GET_MAX_OFFSET, [mb.never, replace(ok(offset=1), version=409)])
    assert parts.sender.max_timer_delays_ms("t", ["broker-a", "b", "x"], parts.soon.within(0.05)) == {}
    assert parts.sender.max_timer_delays_ms("t", ["broker-a"], parts.soon) == {"broker-a": 0}


@pytest.mark.parametrize(
    ("config", "longest_ms"),
    [
        (ok(b"timerWheelEnable=true\ntimerMaxDelaySec=60\n"), 60_000),
        (ok(b"timerWheelEnable=false\ntimerMaxDelaySec=60\n"), 0),
        (ok(b"timerMaxDelaySec=abc\n"), 1000 * codes.TIMER_MAX_DELAY_S),
        (ok(b"timerMaxDelaySec=-5\n"), 1000 * codes.TIMER_MAX_DELAY_S),
        (ok(b"timerMaxDelaySec=" + b"9" * 5000 + b"\n"), 1000 * codes.TIMER_MAX_DELAY_S),
        (ok(b"brokerName=broker-a\n"), 259_200_000),
        (mb.refuse(Response.NO_PERMISSION, "not yours"), 259_200_000),
    ],
    ids=["told", "off", "no number", "negative", "long", "older", "denied"],
)
def test_what_timers_do_is_what_the_broker_is_configured_to(
    broker: MockBroker, parts: Parts, config: Command, longest_ms: int
) -> None:
    broker.on(ROUTE, route(1, {"broker-a": broker.address}))
    parts.routes.get("t")
    broker.on(Request.GET_MAX_OFFSET, ok(offset=1))
    broker.on(Request.GET_BROKER_CONFIG, config)
    assert parts.sender.max_timer_delays_ms("t", ["broker-a"], parts.soon) == {"broker-a": longest_ms}


def test_timer_limits_are_defaults_over_an_unencrypted_network(broker: MockBroker, parts: Parts) -> None:
    broker.on(ROUTE, route(1, {"broker-a": broker.address}))
    parts.routes.get("t")
    broker.on(Request.GET_MAX_OFFSET, ok(offset=1))
    broker.on(Request.GET_BROKER_CONFIG, ok(b"timerWheelEnable=true\ntimerMaxDelaySec=60\n"))
    parts.pool.connect_options = replace(parts.pool.connect_options, address_map=elsewhere(broker))
    assert parts.sender.max_timer_delays_ms("t", ["broker-a"], parts.soon) == {"broker-a": 259_200_000}
    assert broker.seen(Request.GET_BROKER_CONFIG) == []


def slowly(answer: Command) -> Callable[[mb.Call], None]:
    """It takes a moment, in which a deadline that is over is seen to be."""
    return lambda call: threading.Timer(0.1, call.answer, [answer]).start()


def test_a_broker_that_hangs_leaves_time_to_ask_the_others(broker: MockBroker, parts: Parts) -> None:
    """Who has timers is asked for more, and else was taken for one with RocketMQ's defaults; so it is with who consumes."""
    with MockBroker({Request.GET_MAX_OFFSET: mb.never, Request.QUERY_TOPIC_CONSUME_BY_WHO: mb.never}) as hangs:
        broker.on(ROUTE, route(1, {"broker-a": broker.address, "b": hangs.address}))
        parts.routes.get("t")
        broker.on(Request.GET_MAX_OFFSET, ok(offset=1))
        broker.on(Request.GET_BROKER_CONFIG, slowly(ok(b"timerWheelEnable=false\n")))
        assert parts.sender.max_timer_delays_ms("t", ["broker-a", "b"], parts.soon.within(3)) == {"broker-a": 0}
        broker.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(b'{"groupList":["g"]}'))
        broker.on(Request.GET_CONSUMER_CONNECTION_LIST, slowly(ok(b'{"subscriptionTable":{"t":{"subString":"*"}}}')))
        assert parts.sender.has_online_consumer("t", parts.soon.within(3))


def test_no_answer_to_the_second_question_is_none(broker: MockBroker, parts: Parts) -> None:
    broker.on(ROUTE, route(1, {"broker-a": broker.address}))
    parts.routes.get("t")
    broker.on(Request.GET_MAX_OFFSET, ok(offset=1))
    broker.on(Request.GET_BROKER_CONFIG, mb.never)
    assert parts.sender.max_timer_delays_ms("t", ["broker-a"], parts.soon.within(0.1)) == {}
    broker.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(b'{"groupList":["g"]}'))
    broker.on(Request.GET_CONSUMER_CONNECTION_LIST, mb.never)
    with pytest.raises(CallTimeout):
        parts.sender.has_online_consumer("t", parts.soon.within(0.1))


def test_whether_a_topic_is_consumed(broker: MockBroker, parts: Parts) -> None:
    broker.on(ROUTE, route(1, {"broker-a": broker.address}))
    broker.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(b'{"groupList":["gone","other","g"]}'))
    offline = mb.refuse(Response.CONSUMER_NOT_ONLINE, "nobody")
    wants = {name: ok(b'{"subscriptionTable":{"%s":{"subString":"*"}}}' % name.encode()) for name in ("t", "u")}
    broker.on(Request.GET_CONSUMER_CONNECTION_LIST, [offline, wants["u"], offline])
    assert not parts.sender.has_online_consumer("t", parts.soon)
    broker.on(Request.GET_CONSUMER_CONNECTION_LIST, [offline, wants["u"], wants["t"]])
    assert parts.sender.has_online_consumer("t", parts.soon)
    broker.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, mb.refuse(Response.NO_PERMISSION, "not yours"))
    with pytest.raises(AccessDenied):
        parts.sender.has_online_consumer("t", parts.soon)
