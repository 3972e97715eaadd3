"""One socket, one daemon reader thread, one mutex round the conversation.

Callers of any thread share a connection; answers are handed over outside the mutex. The socket does not block: reader
and writers wait with ``poll`` and hold the lock only while bytes move, so that TLS, which allows one user at a time,
works the same way. A writer waits no longer than its own deadline; what it leaves behind, in the middle of a frame or
not, the reader sends. A writer that Ctrl-C interrupts ends the connection. Nothing above this file sees an ``OSError``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag
from rocketmq_spark.base.threads import Failure, attempt, may_wait
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.remoting.endpoint import (
    TICK_S,
    UNDELIVERED,
    Drops,
    SocketChannel,
    TlsSettings,
    Undelivered,
    closed_by_peer,
    connect,
    mapped,
)
from rocketmq_spark.remoting.protocol import Answered, Asked, Conversation, copy_of
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20
RECEIVE_BYTES = 256 << 10
# A server that takes no byte for so long, or says nothing while requests time out, is gone: others get a new chance.
STALL_S = 15.0
SILENCE_S = 10.0
CLOSING_S = 1.0

Done = Callable[[Command | RocketMQError], None]

_NO_WAIT = Deadline(0.0)


class _Together(threading.local):
    """Connections whose writes this thread puts off, each with its last deadline; None while it puts nothing off."""

    connections: dict[Connection, Deadline] | None = None


_together = _Together()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What this thread sends in the block and does not wait for goes in as few writes as there can be, at its end."""
    if _together.connections is not None:
        yield
        return
    _together.connections = held = {}  # type: ignore[var-annotated]
    try:
        yield
    finally:
        _together.connections = None
        for connection, deadline in held.items():
            connection._flush(deadline)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """What a server asks, and the way back to it, on any thread. Nothing is sent for a one-way request."""

    address: str
    command: Command
    send: Callable[[Command], None]
    refusal: Command | None

    def answer(self, reply: Command) -> None:
        if self.refusal is not None:
            self.send(replace(reply, opaque=self.command.opaque, flag=Flag.RESPONSE))

    def refuse(self) -> None:
        """Reject the request: no handler takes it."""
        if self.refusal is not None:
            self.send(self.refusal)


# Whether the request was taken: then who took it answers, now or later. It is called on the reader's thread.
OnRequest = Callable[[ServerRequest], bool]


class _Waiter:
    """Who waits for an answer, and until when."""

    __slots__ = ("deadline", "done", "opaque")

    def __init__(self, done: Done, deadline: Deadline) -> None:
        self.done = done
        self.deadline = deadline
        self.opaque = -1

    def tell(self, result: Command | RocketMQError) -> None:
        outcome = attempt(self.done, result)
        if isinstance(outcome, Failure):  # a user's code: it must not cost the other waiters their answers
            outcome.log(logger, "the receiver of an answer failed")


class _Reader(threading.Thread):
    """The thread of a connection. It never waits for a socket to take bytes: servers that wait for it would too."""


class Connection:
    """A connected conversation. Thread-safe; ``close`` fails what still waits."""

    def __init__(
        self,
        address: str,
        deadline: Deadline,
        tls: TlsSettings | None = None,
        on_request: OnRequest | None = None,
        max_frame: int = MAX_FRAME,
        undelivered: Undelivered = UNDELIVERED,
    ) -> None:
        self.address = address
        self._channel = SocketChannel(connect(address, deadline, tls, undelivered))
        self._drops = undelivered.drops is not Drops.NEVER
        self._in_doubt = False  # whether a request was given up that may not be sent yet
        self._on_request = on_request
        self._lock = threading.Lock()
        self._write_lock = threading.RLock()  # which knows its owner
        self._conversation: Conversation[_Waiter] = Conversation(max_frame)
        self._error: RocketMQError | None = None
        self._answered = False
        self._silent_since: float | None = None
        self._next_tick = 0.0
        self._reader = _Reader(target=self._read, name=f"rocketmq-{address}", daemon=True)
        try:
            self._reader.start()
        except BaseException:  # there can be no more threads
            self._channel.close()
            raise

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

        with self._lock:
            waiter = self._queue(command, deadline, done)
        self._flush(deadline)
        if not arrived.acquire(timeout=deadline.remaining()):
            with self._lock:
                mine = self._conversation.give_up(waiter.opaque)
                self._in_doubt = self._in_doubt or mine is not None
            if mine is not None:
                self._check_silence()
                raise CallTimeout(f"no answer to request {command.code} in time", self.address)
            arrived.acquire()  # the answer came in the same moment: its hand-over is under way
        if isinstance(result[0], RocketMQError):
            raise result[0]
        return result[0]

    def call_each(self, calls: Sequence[tuple[Command, Done]], deadline: Deadline) -> None:
        """Send all, in as few writes as there can be. Never raises.

        Each ``done`` gets the answer or the error, once: on the reader's thread, or before this returns if nothing was sent.
        """
        failed: list[tuple[Done, RocketMQError]] = []
        with self._lock:
            for command, done in calls:
                try:
                    self._queue(command, deadline, done)
                except RocketMQError as e:
                    failed.append((done, e))
        if _together.connections is None:
            self._flush(deadline)
        else:
            _together.connections[self] = deadline
        for done, error in failed:
            done(error)

    def send_oneway(self, command: Command, deadline: Deadline) -> None:
        """Hand a request to the socket; nothing is awaited."""
        with self._lock:
            self._check_open()
            self._conversation.send_oneway(command)
        self._flush(deadline)

    def close(self) -> None:
        """End the connection; when this returns the socket is closed, unless a receiver of answers hangs."""
        self._fail(ConnectionLost("the connection was closed on our side", self.address))
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSING_S)

    def _queue(self, command: Command, deadline: Deadline, done: Done) -> _Waiter:
        """To be called with the lock, and ``_flush`` after that."""
        waiter = _Waiter(done, deadline)
        self._check_open()
        waiter.opaque = self._conversation.send(command, waiter)
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return waiter

    def _check_open(self) -> None:
        if self._error is not None:
            raise copy_of(self._error)

    # --- writing

    def _flush(self, deadline: Deadline) -> None:
        """Write what is queued, one writer at a time, as far as it goes until ``deadline``."""
        if isinstance(threading.current_thread(), _Reader) or not may_wait():
            deadline = _NO_WAIT  # the reader writes the rest
        if self._write_lock._is_owned():  # type: ignore[attr-defined]
            return  # a signal handler above a write, which takes ours along
        writing = False
        try:
            # If not, who writes now takes ours along, or else the reader does.
            if self._write_lock.acquire(timeout=deadline.remaining()):
                writing = True
                while self._error is None and self._load() and self._channel.write(deadline):
                    pass
        except OSError as e:
            self._fail(mapped(e, self.address, "the connection broke while writing", not self._answered), e)
        except BaseException as e:
            # Ctrl-C: it is not known how much of a frame went, and what is written next would be taken for the rest of it.
            if writing:
                self._fail(ConnectionLost("a write was interrupted", self.address), e)
            raise
        finally:
            # Not by what ``acquire`` gave: Ctrl-C may have come in its place.
            if self._write_lock._is_owned():  # type: ignore[attr-defined]
                self._write_lock.release()

    def _load(self) -> bool:
        with self._lock:
            self._channel.add(self._conversation.take_outgoing())
        return self._channel.has_unsent

    # --- reading

    def _read(self) -> None:
        view = memoryview(bytearray(RECEIVE_BYTES))
        try:
            while self._error is None:
                if self._await_bytes():
                    count = self._channel.receive(view)
                    if count == 0:
                        self._fail(closed_by_peer(self.address, first=not self._answered))
                    elif count > 0:
                        self._handle(view[:count])
                self._tick()
        except OSError as e:
            self._fail(mapped(e, self.address, "the connection broke", not self._answered), e)
        except RemoteProtocolError as e:
            e.addr = self.address
            self._fail(e)
        except BaseException as e:
            logger.exception("the reader of %s failed", self.address)
            self._fail(ConnectionLost(f"the reader failed: {e!r}", self.address), e)
        finally:
            self._channel.close()

    def _await_bytes(self) -> bool:
        readable, writable = self._channel.wait(TICK_S)
        if writable:
            self._flush(_NO_WAIT)
        return readable

    def _handle(self, data: memoryview) -> None:
        with self._lock:
            events = self._conversation.receive(data)
            self._silent_since = time.monotonic() if self._conversation.waiting else None
        for event in events:
            if isinstance(event, Answered):
                self._answered = True
                event.waiter.tell(event.command)
            else:
                self._answer(event)

    def _answer(self, asked: Asked) -> None:
        request = ServerRequest(self.address, asked.command, self._reply, asked.reply)

        def hand_on() -> None:
            if self._on_request is None or not self._on_request(request):
                request.refuse()

        outcome = attempt(hand_on)
        if isinstance(outcome, Failure):  # a user's code, see ``_Waiter.tell``
            text = "the request %s of %s could not be handled"
            outcome.log(logger, text, asked.command.code, self.address)

    def _reply(self, reply: Command) -> None:
        with self._lock:
            if self._error is not None:  # no waiter is left
                return
            self._conversation.send_oneway(reply)
        self._flush(_NO_WAIT)

    def _tick(self) -> None:
        """What must happen now and then, but not at every answer."""
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        if self.waiting:
            self._expire()
        if self._conversation.has_outgoing:  # its writer's time was over before its turn came
            self._flush(_NO_WAIT)
        blocked_since = self._channel.blocked_since
        if blocked_since is not None and now - blocked_since > STALL_S:
            self._fail(CallTimeout("the server does not read requests", self.address))

    def _expire(self) -> None:
        with self._lock:
            late = self._conversation.expired(lambda waiter: waiter.deadline.expired)
            self._in_doubt = self._in_doubt or bool(late)
        for waiter in late:
            waiter.tell(CallTimeout("no answer in time", self.address))
        if late:
            self._check_silence()

    def _check_silence(self) -> None:
        """Called when a request timed out: is it the request, or is the server gone?"""
        silent_since = self._silent_since
        if silent_since is not None and time.monotonic() - silent_since > SILENCE_S:
            self._fail(ConnectionLost(f"the server sent nothing for {SILENCE_S:g} s", self.address))

    def _fail(self, error: RocketMQError, cause: BaseException | None = None) -> None:
        """Close for good: every waiter hears of it now, later callers when they come."""
        if cause is not None:
            error.__cause__ = cause
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = self._conversation.connection_lost(error)
        try:
            if self._drops and (lost or self._in_doubt):
                self._channel.drop_unsent()
            self._channel.shutdown()  # the reader wakes and closes it
        except OSError:
            logger.debug("%s was closed already", self.address)
        for waiter, own in lost:
            waiter.tell(own)
