"""Name servers that are away, and brokers that come back elsewhere, while a task or a producer begins."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Producer
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import RocketMQError, SendFailed
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.remoting import connection
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.wire.messages import decode_batch
from tests.fix_proxy import FaultyProxy
from tests.helpers import stored
from tests.live.writes import Writes, bodies, frame, numbered, sink_options
from tests.mockbroker import Call, Command, MockBroker, ok, route


class At(FaultyProxy):
    """A proxy at a port that is closed until it is entered."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> At:
        with pytest.MonkeyPatch.context() as patch:
            make = socket.create_server
            patch.setattr(socket, "create_server", lambda address: make((address[0], self.port)))
            super().__enter__()
        return self


@pytest.fixture(params=["nobody listens", "it hangs"])
def away(
    request: pytest.FixtureRequest, rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    """A name server that is back when it has been asked in vain, twice at least; without waiting nobody gets past it."""
    with contextlib.ExitStack() as stack:
        if request.param == "it hangs":
            proxy = stack.enter_context(FaultyProxy(rocketmq.name_server))
            proxy.swallows = 2
            yield proxy
            assert proxy.swallows == 0, "nobody missed it"
            return
        closed, refused, connect = At(rocketmq.name_server), itertools.count(1), connection.connect

        def noted(address: str, *given: Any) -> socket.socket:
            try:
                return connect(address, *given)
            except RocketMQError:
                if address == closed.address and next(refused) == 2:
                    stack.enter_context(closed)
                raise

        monkeypatch.setattr(connection, "connect", noted)
        yield closed
        assert next(refused) > 2, "nobody missed it"


IMPATIENT: dict[str, Any] = {"numRetries": 0, "requestTimeout": "300ms", "connectTimeout": "300ms"}


def test_task_waits_for_a_name_server(
    away: FaultyProxy, rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Writes(away.address, monkeypatch)(frame(body=numbered(50)), topic=topic, **IMPATIENT)
    assert done.rows == 50
    assert sorted(bodies(stored(rocketmq, topic, 50))) == numbered(50)


def test_driver_check_waits_for_a_batch_and_not_for_a_stream(away: FaultyProxy, topic: str) -> None:
    options = sink_options(away.address, topic=topic, **IMPATIENT)
    checks.check_brokers(options, {"delayms": "delayMs"}, once_per_process=True)
    checks.check_brokers(options, {"delayms": "delayMs"})


Sending = Callable[[Producer, Message], Any]
MODES: dict[str, Sending] = {
    "sync": lambda p, m: p.send(m),
    "async": lambda p, m: p.send_async(m).result(60),
    "oneway": lambda p, m: p.send_oneway(m),
    "batch": lambda p, m: p.send_batch([m]),
    "selector": lambda p, m: p.send_async(m, selector="hash", arg="k").result(60),
    "to a queue": lambda p, m: p.send(m, queue=MessageQueue(m.topic, "broker-a", 0)),
    "queues": lambda p, m: p.queues(m.topic) and p.send(m),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_first_send_of_a_producer_waits(away: FaultyProxy, rocketmq: LocalBroker, topic: str, mode: str) -> None:
    given = {**IMPATIENT, "requestTimeout": "301ms"}  # a client of its own
    with Producer(name_server=away.address, group="g_away", sendTimeout="20s", **given) as producer:
        MODES[mode](producer, Message(topic, mode.encode()))
        assert producer.flush()
    assert bodies(stored(rocketmq, topic, 1)) == [mode]


def test_the_error_of_a_producer_names_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = At("127.0.0.1:1").address
    with Producer(name_server=nobody, group="g_away", sendTimeout="300ms") as producer:
        for send in (MODES["sync"], MODES["selector"]):
            with pytest.raises(RocketMQError, match=r"no name server answers: cannot connect: Connection refused") as e:
                send(producer, Message("t", b"x"))
            assert "Check option 'nameServer'" in str(e.value)


def test_broker_that_comes_back_elsewhere_gets_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs when it is left, so that only time-outs tell."""
    kept: list[bytes] = []

    def keep(call: Call) -> Command:
        kept.extend(bytes(item.body) for item in decode_batch(call.command.body))
        return ok(msgId="x", queueId=call.ext("e"), queueOffset=0)

    with MockBroker() as names, MockBroker() as old, MockBroker() as new:
        names.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": old.address}))

        def move(call: Call) -> None:
            names.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": new.address}))

        old.on(Request.SEND_BATCH_MESSAGE, move)
        new.on(Request.SEND_BATCH_MESSAGE, keep)
        rows = frame(body=numbered(100), shardingKey=[f"k{i % 9}" for i in range(100)])
        done = Writes(names.address, monkeypatch)(rows, topic="t", queueSelector="hash", sendTimeout="12s")
    assert (done.rows, Counter(kept)) == (100, Counter(body.encode() for body in numbered(100)))


@pytest.mark.parametrize("then", ["left the route", "has no master"])
def test_a_task_waits_for_the_broker_of_its_environment(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts again, between two batches of a stream; brokers of others are there."""
    kept: list[bytes] = []

    def keep(call: Call) -> Command:
        kept.extend(bytes(item.body) for item in decode_batch(call.command.body))
        return ok(msgId="x", queueId=call.ext("e"), queueOffset=0)

    with MockBroker() as names, MockBroker() as mine, MockBroker() as other:
        away = {"broker-b": other.address, **({"broker-a": ""} if then == "has no master" else {})}
        back = {"broker-a": mine.address, "broker-b": other.address}
        names.on(Request.GET_ROUTEINFO_BY_TOPIC, [route(1, away), route(1, away), route(1, back)])
        mine.on(Request.SEND_BATCH_MESSAGE, keep)
        layout = '{"dev": {"broker-a": [0]}, "test": {"broker-b": [0]}}'
        given = {"topic": "t", "environment": "dev", "environments": layout, "sendTimeout": "20s"}
        done = Writes(names.address, monkeypatch)(frame(body=["x"]), **given)
        assert not other.seen(Request.SEND_BATCH_MESSAGE)
    assert (done.rows, kept) == (1, [b"x"])


def test_when_time_is_over_the_first_cause_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker refuses once, and then the name server and the broker are gone."""
    with MockBroker() as names, MockBroker() as broker:
        names.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))

        def die(call: Call) -> None:
            for one in (names, broker):
                threading.Thread(target=one.refuse_connections).start()
                one.drop()

        broker.on(Request.SEND_BATCH_MESSAGE, die)
        rows = frame(body=["x"], shardingKey=["k"])
        with pytest.raises(SendFailed, match=r"the server closed the connection|connection broke|reset") as e:
            Writes(names.address, monkeypatch)(rows, topic="t", queueSelector="hash", sendTimeout="2s")
        assert "name server" not in str(e.value)
