"""A scripted broker and name server over real loopback sockets, built on our own ``wire/``.

Answers come from a script, by request code: a command, a function of the ``Call``, or a list of these, whose last one
stays. A function may answer late, several times, out of order or never, tear a frame, send requests of its own, or
close. Everything that arrives is recorded. It knows nothing of topics: what it says is what the script says.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag, Request, Response, SerializeType
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire import header, rpc
from rocketmq_spark.wire.header import Command, FrameSplitter
from tests.helpers import between_looks

WAIT_S = 60.0
MAX_FRAME = 64 << 20


@dataclass(frozen=True, eq=False)
class Call:
    """One request that arrived, and the way back to who sent it."""

    broker: MockBroker
    peer: Peer
    command: Command

    def answer(self, reply: Command) -> None:
        """Send ``reply`` as the answer to this request."""
        self.peer.send(self.frame(reply))

    def frame(self, reply: Command) -> bytes:
        return self.broker.encode(replace(reply, opaque=self.command.opaque, flag=Flag.RESPONSE))

    def ext(self, name: str) -> str:
        return self.command.ext[name]


Reply = Command | Callable[[Call], Command | None]
Script = Reply | Sequence[Reply]


class Peer:
    """One accepted connection."""

    def __init__(self, broker: MockBroker, sock: socket.socket) -> None:
        self.broker = broker
        self.sock = sock
        self._lock = threading.Lock()
        self.gone = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def send(self, data: bytes) -> None:
        with self._lock:
            try:
                self.sock.sendall(data)
            except OSError:
                self.gone.set()

    def close(self, reset: bool = False) -> None:
        """End of stream, or with ``reset`` the violent end. Our thread wakes up and closes the socket."""
        try:
            if reset:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
        except OSError:
            pass

    def _run(self) -> None:
        splitter = FrameSplitter(MAX_FRAME)
        try:
            if self.broker.tls is not None:
                self.sock = self.broker.tls.wrap_socket(self.sock, server_side=True)
            while data := self.sock.recv(1 << 16):
                for frame in splitter.feed(data):
                    self.broker.arrived(Call(self.broker, self, header.decode(frame)))
                self.broker.may_read.wait(WAIT_S)
        except (OSError, RemoteProtocolError):  # as a real one: closed without a word
            pass
        finally:
            self.gone.set()
            self.sock.close()


class MockBroker:
    """Listens while it is entered. ``script`` maps request codes to replies; what it misses is answered with code 3."""

    def __init__(
        self,
        script: Mapping[int, Script] | None = None,
        serialize: SerializeType = SerializeType.JSON,
        tls: ssl.SSLContext | None = None,
        receive_buffer: int | None = None,
    ) -> None:
        self.script: dict[int, Script] = dict(script or {})
        self.serialize = serialize
        self.tls = tls
        self.requests: list[Command] = []
        self.replies: list[Command] = []
        self.peers: list[Peer] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self._receive_buffer = receive_buffer
        self._changed = threading.Condition()
        self._used: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._listener = socket.socket()
        if self._receive_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.refuse_connections()
        self.may_read.set()
        self.drop()
        for peer in self.peers:
            peer.thread.join(WAIT_S)

    # --- what a test does

    def on(self, code: int, reply: Script) -> None:
        self.script[code] = reply
        self._used.pop(code, None)

    def drop(self, reset: bool = False) -> None:
        """Close all connections."""
        for peer in list(self.peers):
            peer.close(reset)

    def refuse_connections(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._listener.close()
        self._thread.join(WAIT_S)

    def ask(self, command: Command) -> None:
        """Send a request of our own to every client."""
        for peer in list(self.peers):
            peer.send(self.encode(command))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds; looked at whenever something arrives."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "the mock broker waited in vain"

    def seen(self, code: int) -> list[Command]:
        return [command for command in self.requests if command.code == code]

    # --- how it works

    def encode(self, command: Command) -> bytes:
        return header.encode(command, self.serialize, None)

    def arrived(self, call: Call) -> None:
        with self._changed:
            (self.replies if call.command.is_response else self.requests).append(call.command)
            reply = self._next(call.command)
            self._changed.notify_all()
        if reply is None or call.command.is_response:
            return
        answer = reply(call) if callable(reply) else reply
        if answer is not None and not call.command.is_oneway:
            call.answer(answer)

    def _next(self, command: Command) -> Reply | None:
        script = self.script.get(command.code, refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "not in the script"))
        if not isinstance(script, Sequence):
            return script
        at = self._used.get(command.code, 0)
        self._used[command.code] = at + 1
        return script[min(at, len(script) - 1)]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self.peers.append(Peer(self, sock))
                self._changed.notify_all()


# --- replies


def ok(body: bytes = b"", **ext: object) -> Command:
    return Command(Response.SUCCESS, {name: str(value) for name, value in ext.items()}, body)


def refuse(code: int, remark: str = "", **ext: object) -> Command:
    return Command(code, {name: str(value) for name, value in ext.items()}, remark=remark)


# What a Proxy adds to each answer, and a broker to answers to sends.
OF_PROXY = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


def of_proxy(answer: Command) -> Command:
    """The answer as a Proxy gives it."""
    return replace(answer, ext={**answer.ext, **OF_PROXY})


def never(call: Call) -> None:
    """No answer."""


def close(call: Call) -> None:
    call.peer.close()


def reset(call: Call) -> None:
    call.peer.close(reset=True)


def torn(answer: Command, keep: int) -> Callable[[Call], None]:
    """Die after ``keep`` bytes of the answer."""

    def reply(call: Call) -> None:
        call.peer.send(call.frame(answer)[:keep])
        call.peer.close()

    return reply


def raw(data: bytes) -> Callable[[Call], None]:
    """These bytes in place of an answer."""
    return lambda call: call.peer.send(data)


def late(event: threading.Event, answer: Command) -> Callable[[Call], None]:
    """Answer when ``event`` is set; other requests are answered meanwhile."""

    def reply(call: Call) -> None:
        def send() -> None:
            event.wait(WAIT_S)
            call.answer(answer)

        threading.Thread(target=send, daemon=True).start()

    return reply


class Held:
    """Keeps requests until the test answers them, in the order it likes."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._changed = threading.Condition()

    def __call__(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Call]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S), "requests did not come"
            return list(self.calls)


# --- a name server's part


def cluster(servers: Mapping[str, Mapping[str, str]]) -> Command:
    """The answer to a question for the brokers of a cluster: of each broker the addresses by broker id."""
    table = {name: {"brokerName": name, "cluster": "c", "brokerAddrs": at} for name, at in servers.items()}
    return ok(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {}}).encode())


def route(topic_queues: int, masters: Mapping[str, str], perm: int = 6, **more: Any) -> Command:
    """The answer to a question for a route: the same number of queues on each of the brokers."""
    body = {
        "brokerDatas": [
            {"brokerName": name, "cluster": "c", "brokerAddrs": {"0": address} if address else {}}
            for name, address in masters.items()
        ],
        "queueDatas": [
            {"brokerName": name, "readQueueNums": topic_queues, "writeQueueNums": topic_queues, "perm": perm}
            for name in masters
        ],
        **more,
    }
    return ok(json.dumps(body).encode())


def topic_config(**attributes: str) -> Command:
    """The answer to a question for a topic's configuration: an ordinary one; ``_`` stands for ``.`` in names of attributes."""
    body = {
        "topicName": "t",
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": {name.replace("_", "."): value for name, value in attributes.items()},
    }
    return ok(json.dumps(body).encode())


def offsets(values: Mapping[int, int]) -> Callable[[Call], Command]:
    """GET_MAX_OFFSET and its kin, by queue id."""
    return lambda call: rpc.GET_MAX_OFFSET.reply(call.command, offset=values[int(call.ext("queueId"))])


NO_ROUTE = refuse(Response.TOPIC_NOT_EXIST, "No topic route info in name server for the topic: t\nSee https://faq")


def eventually(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """For what no event tells: looks again every few milliseconds, or less often if a look takes long."""
    deadline = Deadline.after(seconds)
    began = time.perf_counter()
    while not condition():
        assert not deadline.expired, "it did not happen in time"
        between_looks(began, 0.002)
        began = time.perf_counter()


PING = Request.GET_BROKER_RUNTIME_INFO


def ping(**ext: str) -> Command:
    """Some request."""
    return Command(PING, dict(ext))
