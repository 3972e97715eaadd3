"""One socket, one daemon reader thread, one mutex round the conversation.

Callers of any thread share a connection; answers are handed over outside the mutex. The socket does not block: reader
and writers wait with ``poll`` and hold the lock only while bytes move, so that TLS, which allows one user at a time,
works the same way. Nothing above this file sees an ``OSError``.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.remoting.endpoint import TlsSettings, closed_by_peer, connect, mapped
from rocketmq_spark.remoting.protocol import Answered, Asked, Conversation
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20
RECEIVE_BYTES = 256 << 10
# How late the expiry of an asynchronous request may be noticed.
TICK_S = 0.1

Done = Callable[[Command | RocketMQError], None]
OnRequest = Callable[[Command], Command | None]


class _Waiter:
    """Who waits for an answer, and until when."""

    __slots__ = ("deadline", "done", "opaque")

    def __init__(self, done: Done, deadline: Deadline) -> None:
        self.done = done
        self.deadline = deadline
        self.opaque = -1


class Connection:
    """A connected conversation. Thread-safe; ``close`` fails what still waits."""

    def __init__(
        self,
        address: str,
        deadline: Deadline,
        tls: TlsSettings | None = None,
        on_request: OnRequest | None = None,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self.address = address
        self._sock = connect(address, deadline, tls)
        self._sock.setblocking(False)
        self._on_request = on_request
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._io_lock = threading.Lock()
        self._conversation: Conversation[_Waiter] = Conversation(max_frame)
        self._error: RocketMQError | None = None
        self._answered = False
        self._reader = threading.Thread(target=self._read, name=f"rocketmq-{address}", daemon=True)
        self._reader.start()

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def waiting(self) -> int:
        """Requests without an answer so far."""
        return self._conversation.waiting

    def call(self, command: Command, deadline: Deadline) -> Command:
        """Send and wait for the answer, whatever its code. Raises ``ConnectionLost`` or ``CallTimeout``."""
        arrived = threading.Lock()
        arrived.acquire()
        result: list[Command | RocketMQError] = []

        def done(answer: Command | RocketMQError) -> None:
            result.append(answer)
            arrived.release()

        waiter = self._submit(command, deadline, done)
        if not arrived.acquire(timeout=max(0.0, deadline.remaining())):
            with self._lock:
                mine = self._conversation.give_up(waiter.opaque)
            if mine is not None:
                raise CallTimeout(f"no answer to request {command.code} in time", self.address)
            arrived.acquire()  # the answer came in the same moment: its hand-over is under way
        if isinstance(result[0], RocketMQError):
            raise result[0]
        return result[0]

    def call_async(self, command: Command, deadline: Deadline, done: Done) -> None:
        """Send; ``done`` gets the answer or the error, once, on the reader's thread. Never raises."""
        try:
            self._submit(command, deadline, done)
        except RocketMQError as e:
            done(e)

    def send_oneway(self, command: Command, deadline: Deadline) -> None:
        """Hand a request to the socket; nothing is awaited."""
        with self._lock:
            self._check_open()
            self._conversation.send_oneway(command)
        self._flush(deadline)

    def close(self) -> None:
        self._fail(ConnectionLost("the connection was closed on our side", self.address))

    def _submit(self, command: Command, deadline: Deadline, done: Done) -> _Waiter:
        waiter = _Waiter(done, deadline)
        with self._lock:
            self._check_open()
            waiter.opaque = self._conversation.send(command, waiter)
        self._flush(deadline)
        return waiter

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error

    def _flush(self, deadline: Deadline) -> None:
        """Write what is queued, one writer at a time. A write that fails ends the connection: frames are never torn."""
        with self._write_lock:
            with self._lock:
                chunks = self._conversation.take_outgoing()
            try:
                for chunk in chunks:
                    self._write(memoryview(chunk), deadline)
            except TimeoutError:
                self._fail(CallTimeout("the server does not take our requests", self.address))
            except OSError as e:
                self._fail(mapped(e, self.address, "the connection broke while writing"), e)

    def _write(self, data: memoryview, deadline: Deadline) -> None:
        while data:
            try:
                with self._io_lock:
                    sent = self._sock.send(data)
                data = data[sent:]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as e:
                event = select.POLLIN if isinstance(e, ssl.SSLWantReadError) else select.POLLOUT
                if self._error is not None or not _wait(self._sock, event, deadline.remaining()):
                    raise TimeoutError from e

    def _read(self) -> None:
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        try:
            while self._error is None:
                if not self._pending() and not _wait(self._sock, select.POLLIN, TICK_S if self.waiting else 1.0):
                    self._expire()
                    continue
                count = self._receive(view)
                if count == 0:
                    self._fail(closed_by_peer(self.address, first=not self._answered))
                elif count > 0:
                    self._handle(view[:count])
                    if self.waiting:
                        self._expire()
        except OSError as e:
            self._fail(mapped(e, self.address, "the connection broke"), e)
        except RemoteProtocolError as e:
            e.addr = self.address
            self._fail(e)
        except Exception as e:  # a thread's root: the waiters must hear of it
            logger.exception("the reader of %s failed", self.address)
            self._fail(ConnectionLost(f"the reader failed: {e!r}", self.address), e)
        finally:
            with self._io_lock:
                self._sock.close()

    def _pending(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def _receive(self, view: memoryview) -> int:
        """Bytes read, 0 at the end of the stream, -1 when there is nothing yet."""
        try:
            with self._io_lock:
                return self._sock.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1
        except ssl.SSLZeroReturnError:
            return 0

    def _handle(self, data: memoryview) -> None:
        with self._lock:
            events = self._conversation.receive(data)
        for event in events:
            if isinstance(event, Answered):
                self._answered = True
                event.waiter.done(event.command)
            else:
                self._answer(event)

    def _answer(self, asked: Asked) -> None:
        reply = (self._on_request(asked.command) if self._on_request else None) or asked.reply
        if reply is None or asked.command.is_oneway:
            return
        with self._lock:
            self._conversation.send_oneway(reply)
        self._flush(Deadline.after(3.0))

    def _expire(self) -> None:
        with self._lock:
            late = self._conversation.expired(lambda waiter: waiter.deadline.expired)
        for waiter in late:
            waiter.done(CallTimeout("no answer in time", self.address))

    def _fail(self, error: RocketMQError, cause: BaseException | None = None) -> None:
        """Close for good: every waiter hears of it now, later callers when they come."""
        error.__cause__ = cause
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = self._conversation.connection_lost(error)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes the socket
        except OSError:
            logger.debug("%s was closed already", self.address)
        for waiter, own in lost:
            waiter.done(own)


def _wait(sock: socket.socket, event: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))
