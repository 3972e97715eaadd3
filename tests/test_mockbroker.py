"""The scripted broker itself, spoken to with a plain socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rocketmq_spark.base.codes import Response, SerializeType
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command, FrameSplitter
from tests import mockbroker as mb
from tests.mockbroker import PING, MockBroker, ok, ping, refuse


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker() as one:
        yield one


class Client:
    """Reads whole commands from a plain socket."""

    def __init__(self, broker: MockBroker) -> None:
        host, port = broker.address.split(":")
        self.sock = socket.create_connection((host, int(port)), 10)
        self._splitter = FrameSplitter(1 << 20)
        self._frames: list[bytes] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, command: Command, opaque: int) -> None:
        command.opaque = opaque
        self.sock.sendall(header.encode(command))

    def read(self) -> Command | None:
        while not self._frames:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._frames += self._splitter.feed(data)
        return header.decode(self._frames.pop(0))


def test_answers_by_code_and_records(broker: MockBroker) -> None:
    broker.on(PING, ok(b"body", a=1))
    with Client(broker) as client:
        client.send(ping(x="y"), 77)
        answer = client.read()
    assert answer is not None
    assert (answer.code, answer.opaque, answer.ext, bytes(answer.body)) == (0, 77, {"a": "1"}, b"body")
    assert answer.is_response
    assert [command.ext for command in broker.seen(PING)] == [{"x": "y"}]


def test_what_the_script_misses_is_not_supported(broker: MockBroker) -> None:
    with Client(broker) as client:
        client.send(Command(999), 1)
        answer = client.read()
    assert answer is not None
    assert answer.code == Response.REQUEST_CODE_NOT_SUPPORTED


def test_a_list_is_used_up_and_its_last_reply_stays(broker: MockBroker) -> None:
    broker.on(PING, [refuse(2), lambda call: ok(q=call.ext("q"))])
    with Client(broker) as client:
        codes = []
        for i in range(3):
            client.send(ping(q=str(i)), i)
            answer = client.read()
            assert answer is not None
            codes.append((answer.code, answer.ext.get("q")))
    assert codes == [(2, None), (0, "1"), (0, "2")]


def test_answers_out_of_order_and_late(broker: MockBroker) -> None:
    held, event = mb.Held(), threading.Event()
    broker.on(PING, held)
    broker.on(1000, mb.late(event, ok()))
    with Client(broker) as client:
        client.send(Command(1000), 1)
        client.send(ping(), 2)
        client.send(ping(), 3)
        for call in reversed(held.wait(2)):
            call.answer(ok())
        order = [client.read(), client.read()]
        event.set()
        order.append(client.read())
    assert [answer.opaque for answer in order if answer] == [3, 2, 1]


@pytest.mark.parametrize("how", [mb.close, mb.torn(ok(), 7)])
def test_dies_cleanly_or_within_a_frame(broker: MockBroker, how: mb.Reply) -> None:
    broker.on(PING, how)
    with Client(broker) as client:
        client.send(ping(), 1)
        assert client.read() is None


def test_resets(broker: MockBroker) -> None:
    broker.on(PING, mb.reset)
    with Client(broker) as client:
        client.send(ping(), 1)
        with pytest.raises(ConnectionResetError):
            client.read()


def test_never_answers_and_never_answers_one_way_requests(broker: MockBroker) -> None:
    broker.on(PING, mb.never)
    broker.on(1000, ok())
    with Client(broker) as client:
        client.send(ping(), 1)
        client.send(Command(1000, flag=2), 2)
        client.send(Command(1000), 3)
        answer = client.read()
    assert answer is not None
    assert answer.opaque == 3


def test_asks_and_records_replies(broker: MockBroker) -> None:
    with Client(broker) as client:
        broker.wait_for(lambda: bool(broker.peers))
        broker.ask(Command(40, {"consumerGroup": "g"}, opaque=9))
        asked = client.read()
        assert asked is not None
        assert (asked.code, asked.is_response) == (40, False)
        client.send(Command(3, flag=1), 9)
        broker.wait_for(lambda: bool(broker.replies))
    assert broker.replies[0].opaque == 9


def test_binary_headers() -> None:
    with MockBroker({PING: ok(x=1)}, SerializeType.ROCKETMQ) as broker, Client(broker) as client:
        client.send(ping(), 5)
        answer = client.read()
    assert answer is not None
    assert answer.ext == {"x": "1"}


def test_refuses_connections_after_it_was_told_to(broker: MockBroker) -> None:
    broker.refuse_connections()
    with pytest.raises(ConnectionRefusedError):
        Client(broker)
