"""Ctrl-C at any line of what writes: a server never takes the rest of one frame and the beginning of another for a message."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag
from rocketmq_spark.errors import ConnectionLost, RemoteProtocolError
from rocketmq_spark.remoting import transport
from rocketmq_spark.remoting.connection import Connection
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command
from tests.helpers import unlike_ctrl_c
from tests.mockbroker import PING

# More than a socket takes at a time.
BODY = bytes(range(251)) * 20_000
WRITING = (Connection._flush.__code__, Connection._fill_channel.__code__)
# Where the interpreter itself lets nothing come between.
UNPARTED = ("with ", "try:", "except", "if self._write_lock._is_owned()", "self._write_lock.release()")


class Server:
    """Answers each frame as soon as it is whole, as Netty does, whatever comes behind it; ``bodies`` came in those."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.bodies: list[bytes] = []
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(listener.accept()[0],), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock, sock.makefile("rwb") as stream:
            while (length := int.from_bytes(stream.read(4), "big")) and length < 2 * len(BODY):
                frame = stream.read(length)
                if len(frame) < length:
                    return
                try:
                    command = header.decode(frame)
                except RemoteProtocolError:
                    return
                self.bodies.append(bytes(command.body))
                answer = Command(0, {"n": command.ext["n"]}, opaque=command.opaque, flag=Flag.RESPONSE)
                stream.write(header.encode(answer))
                stream.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Server(listener)


def interrupted(at: int, call: Callable[[], object]) -> bool:
    """Whether Ctrl-C came at the ``at``-th line of what moves bytes."""
    left = itertools.count(at, -1)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in WRITING and code.co_filename != transport.__file__:
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith(UNPARTED) and not unlike_ctrl_c(frame) and next(left) == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def call(connection: Connection, n: int) -> Command:
    return connection.call(Command(PING, {"n": f"{n}"}, BODY), Deadline.after(60))


def test_write_after_ctrl_c_never_continues_a_partial_frame(server: Server, connect: Callable[..., Connection]) -> None:
    broken = 0
    for at in itertools.count():
        connection = connect(server.address)
        if not interrupted(at, lambda one=connection: call(one, 0)):  # type: ignore[misc]
            break
        try:
            answer = call(connection, at)
        except ConnectionLost:
            broken += 1
            answer = call(connect(server.address), at)
        assert answer.ext == {"n": f"{at}"}
        connection.close()
    assert broken > 10
    assert all(body == BODY for body in server.bodies)


class TakenAndInterrupted:
    """A lock that is taken at the moment when Ctrl-C comes, once."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.release, self._is_owned, self.left = lock, lock.release, lock._is_owned, 1

    def acquire(self, timeout: float) -> bool:
        taken: bool = self.lock.acquire(timeout=timeout)
        if self.left:
            self.left = 0
            raise KeyboardInterrupt
        return taken


def test_ctrl_c_on_taking_the_write_lock_does_not_block_writers(
    server: Server, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(server.address)
    monkeypatch.setattr(connection, "_write_lock", TakenAndInterrupted(connection._write_lock))
    with pytest.raises(KeyboardInterrupt):
        call(connection, 1)
    with ThreadPoolExecutor(1) as another:
        assert another.submit(call, connection, 2).result(60).ext == {"n": "2"}
    assert server.bodies == [BODY, BODY]


def test_signal_handler_during_a_write_does_not_write_into_frame(
    server: Server, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, outcomes = connect(server.address), list[object]()
    write = connection._channel.write

    def and_handler(deadline: Deadline) -> bool:
        """As the channel's, with the handler before it notes what went."""
        monkeypatch.setattr(connection._channel, "write", write)
        data = connection._channel._unsent[0]
        sent = connection._channel._sock.send(data[:10])
        connection.call_each([(Command(PING, {"n": "handler"}, BODY), outcomes.append)], deadline)
        connection._channel._unsent[0] = data[sent:]
        return True

    monkeypatch.setattr(connection._channel, "write", and_handler)
    assert call(connection, 1).ext == {"n": "1"}
    assert call(connection, 2).ext == {"n": "2"}
    assert server.bodies == [BODY, BODY, BODY]
    assert len(outcomes) == 1
