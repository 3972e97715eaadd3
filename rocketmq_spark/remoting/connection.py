"""A connection: one socket, one daemon thread that reads, and one mutex around the ``RemotingProtocol``.

All threads share a connection. Callbacks run outside of the mutex. The socket does not block. The reader and the writers wait
with ``poll``, and hold the channel's lock only while they read or write, because a TLS socket allows only one user at a time. A
writer waits until its deadline. If bytes remain after the deadline, the reader sends them, even from the middle of a frame.
Ctrl-C during a write closes the connection. No module above this one sees an ``OSError``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rocketmq_spark.base.budget import MAX_WAITING_BYTES, Budget, ReceiveBudget
from rocketmq_spark.base.clock import Deadline, RateLimit
from rocketmq_spark.base.codes import Flag
from rocketmq_spark.base.threads import Failure, capture, may_block
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError, copy_error
from rocketmq_spark.remoting.protocol import (
    MAX_PUSHED_BYTES,
    RemotingProtocol,
    RequestReceived,
    ResponseDropped,
    ResponseReceived,
    peer_after_answer,
)
from rocketmq_spark.remoting.transport import (
    DEFAULT_UNDELIVERED_POLICY,
    TICK_S,
    DropUnsent,
    SocketChannel,
    TlsSettings,
    UndeliveredPolicy,
    closed_by_peer_error,
    connect,
    to_rocketmq_error,
)
from rocketmq_spark.wire.header import Command, Peer

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20
OTHER_TRANSPORTS_REMEDY = "use the brokers' name server (port 9876), or transport=grpc"
_PROXY_TIMEOUT_REMEDY = (
    "A Proxy does not answer while it cannot reach the broker of a request. In LOCAL mode (mqbroker --enable-proxy), it does "
    "not answer either: " + OTHER_TRANSPORTS_REMEDY
)
RECEIVE_BUFFER_BYTES = 256 << 10
# A connection is closed if its server accepts no byte for ``STALL_S``, or sends nothing for ``SILENCE_S`` while requests time
# out.
STALL_S = 15.0
SILENCE_S = 10.0
CLOSE_TIMEOUT_S = 1.0
# While a server reads nothing, this client's answers to the server wait. If more than ``MAX_UNREAD_BYTES`` bytes wait,
# further answers are dropped. An answer counts as its body and ``_ANSWER_OVERHEAD_BYTES``.
MAX_UNREAD_BYTES, _ANSWER_OVERHEAD_BYTES = 8 << 20, 500
LOG_PAUSE_S = 10.0  # pause between log lines about rejected requests of the server

OnResponse = Callable[[Command | RocketMQError], None]

_NO_WAIT = Deadline(0.0)


class _DelayedWrites(threading.local):
    """Connections whose writes this thread delays, each with its last deadline; None outside ``batch_writes``."""

    connections: dict[Connection, Deadline] | None = None


_delayed_writes = _DelayedWrites()


@contextlib.contextmanager
def batch_writes() -> Iterator[None]:
    """Delay this thread's asynchronous requests to the end of the block, and send them in as few writes as possible."""
    if _delayed_writes.connections is not None:
        yield
        return
    _delayed_writes.connections = deadlines = {}  # type: ignore[var-annotated]
    try:
        yield
    finally:
        _delayed_writes.connections = None
        for connection, deadline in deadlines.items():
            connection._flush(deadline)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request of a server. Any thread may answer. For a one-way request, no answer is sent.

    Even for a one-way request, the handler must call ``answer`` or ``reject``, because until this call the request's bytes
    count against the limit.
    """

    address: str
    command: Command
    send: Callable[[Command], None]
    rejection: Command | None
    release: Callable[[], None] = lambda: None

    def answer(self, reply: Command) -> None:
        try:
            if self.rejection is not None:
                self.send(replace(reply, opaque=self.command.opaque, flag=Flag.RESPONSE))
        finally:
            self.release()

    def reject(self) -> None:
        """Answer that no handler accepts the request."""
        try:
            if self.rejection is not None:
                self.send(self.rejection)
        finally:
            self.release()


# Called on the reader's thread. Returns whether a handler accepted the request and will answer it, now or later.
OnRequest = Callable[[ServerRequest], bool]


class _Waiter:
    """A caller that waits for an answer, with its deadline."""

    __slots__ = ("code", "deadline", "done", "opaque")

    def __init__(self, code: int, done: OnResponse, deadline: Deadline) -> None:
        self.code = code
        self.done = done
        self.deadline = deadline
        self.opaque = -1

    def set_result(self, result: Command | RocketMQError) -> None:
        outcome = capture(self.done, result)
        if isinstance(outcome, Failure):  # user code: an error must not affect the answers of other waiters
            outcome.log(logger, "the receiver of an answer failed")


class _ReaderThread(threading.Thread):
    """The thread of a connection.

    This thread never waits for the socket to accept bytes, because the server may accept no bytes until this thread reads.
    """


class Connection:
    """An open connection. Thread-safe; after ``close``, all waiting requests fail.

    ``peer`` is the kind of the server: the caller states it, or the server's answers show it. It is also the ``Command.peer``
    of each answer. ``receive_budget`` is the client's memory budget for arriving frames. ``waiting_budget`` is the client's
    memory budget for waiting requests of servers.
    """

    def __init__(
        self,
        address: str,
        deadline: Deadline,
        tls: TlsSettings | None = None,
        on_request: OnRequest | None = None,
        max_frame: int = MAX_FRAME,
        undelivered_policy: UndeliveredPolicy = DEFAULT_UNDELIVERED_POLICY,
        peer: Peer = Peer.UNKNOWN,
        max_pushed_bytes: int = MAX_PUSHED_BYTES,
        receive_budget: ReceiveBudget | None = None,
        waiting_budget: Budget | None = None,
    ) -> None:
        self.address = address
        self.peer = peer
        self._channel = SocketChannel(connect(address, deadline, tls, undelivered_policy))
        self._drops_unsent_bytes = undelivered_policy.drop_unsent is not DropUnsent.NEVER
        self._may_have_unsent_bytes = False  # whether a request timed out before all of its bytes were sent
        self._on_request = on_request
        self._lock = threading.Lock()
        self._write_lock = (
            threading.RLock()
        )  # reentrant, because only such a lock can tell whether this thread holds it
        account = (receive_budget or ReceiveBudget()).account(address)
        self._protocol: RemotingProtocol[_Waiter] = RemotingProtocol(max_frame, max_pushed_bytes, account)
        self._error: RocketMQError | None = None  # why the connection is closed; None while it is open
        self._server_has_answered = False  # whether the server has answered a request
        # The time since which requests wait and the server has sent nothing; None if no request waits.
        self._silent_since: float | None = None
        self._next_tick_s = 0.0
        self._log_limit = RateLimit(LOG_PAUSE_S)
        self._waiting_budget = waiting_budget or Budget(MAX_WAITING_BYTES)
        self._unread_bytes = 0  # answers of this client since the server last accepted bytes
        self._reader = _ReaderThread(target=self._read, name=f"rocketmq-{address}", daemon=True)
        try:
            self._reader.start()
        except BaseException:  # the system allows no more threads
            self._channel.close()
            raise

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def waiting_count(self) -> int:
        """The number of requests without an answer."""
        return self._protocol.waiting_count

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its answer, or bytes wait to be sent."""
        return bool(self.waiting_count or self._protocol.has_outgoing or self._channel.has_unsent_bytes)

    def call(self, command: Command, deadline: Deadline) -> Command:
        """Send a request and return its answer, with any code. Raises ``ConnectionLost`` or ``CallTimeout``."""
        arrival_lock = threading.Lock()
        arrival_lock.acquire()
        result: list[Command | RocketMQError] = []

        def on_response(answer: Command | RocketMQError) -> None:
            result.append(answer)
            arrival_lock.release()

        with self._lock:
            waiter = self._enqueue(command, deadline, on_response)
        self._flush(deadline)
        if not arrival_lock.acquire(timeout=deadline.remaining()):
            with self._lock:
                canceled_waiter = self._protocol.cancel(waiter.opaque)
                self._may_have_unsent_bytes = self._may_have_unsent_bytes or canceled_waiter is not None
            if canceled_waiter is not None:
                self._check_silence()
                raise self._timeout_error(f"no answer to request {command.code} in time")
            arrival_lock.acquire()  # the answer arrived at the same moment and is being delivered
        if isinstance(result[0], RocketMQError):
            raise result[0]
        return result[0]

    def call_each(self, calls: Sequence[tuple[Command, OnResponse]], deadline: Deadline) -> None:
        """Send all requests in as few writes as possible. Never raises.

        Each ``done`` is called once, with the answer or the error. If its request was not sent, ``done`` is called before this
        method returns, otherwise on the reader's thread.
        """
        failures: list[tuple[OnResponse, RocketMQError]] = []
        with self._lock:
            for command, done in calls:
                try:
                    self._enqueue(command, deadline, done)
                except RocketMQError as e:
                    failures.append((done, e))
        if _delayed_writes.connections is None:
            self._flush(deadline)
        else:
            _delayed_writes.connections[self] = deadline
        for done, error in failures:
            done(error)

    def send_oneway(self, command: Command, deadline: Deadline) -> None:
        """Write a request to the socket without waiting for an answer."""
        with self._lock:
            self._check_open()
            self._protocol.send_oneway(command)
        self._flush(deadline)

    def close(self) -> None:
        """Close the connection, and wait up to ``CLOSE_TIMEOUT_S`` until the reader has closed the socket."""
        self.close_nowait()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_TIMEOUT_S)

    def close_nowait(self) -> None:
        """As ``close``, without waiting."""
        self._fail(ConnectionLost("the connection was closed on our side", self.address))

    def _enqueue(self, command: Command, deadline: Deadline, done: OnResponse) -> _Waiter:
        """Queue a request. The caller holds the lock, and calls ``_flush`` afterwards."""
        waiter = _Waiter(command.code, done, deadline)
        self._check_open()
        waiter.opaque = self._protocol.send(command, waiter)
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return waiter

    def _check_open(self) -> None:
        if self._error is not None:
            raise copy_error(self._error)

    # --- writing

    def _flush(self, deadline: Deadline) -> None:
        """Write queued bytes until ``deadline``, one writer at a time."""
        if isinstance(threading.current_thread(), _ReaderThread) or not may_block():
            deadline = _NO_WAIT  # the reader writes the rest
        if self._write_lock._is_owned():  # type: ignore[attr-defined]
            return  # this is a signal handler; the write that it interrupted also writes these bytes
        is_writing = False
        try:
            # If the lock is not free in time, the current writer, or the reader, writes these bytes.
            if self._write_lock.acquire(timeout=deadline.remaining()):
                is_writing = True
                while self._error is None and self._fill_channel() and self._channel.write(deadline):
                    pass
        except OSError as e:
            self._fail(
                to_rocketmq_error(e, self.address, "the connection broke while writing", not self._server_has_answered),
                e,
            )
        except BaseException as e:
            # The write was interrupted, for example by Ctrl-C, perhaps in the middle of a frame. The server would read the next
            # bytes as the rest of this frame, so the connection must be closed.
            if is_writing:
                self._fail(ConnectionLost("a write was interrupted", self.address), e)
            raise
        finally:
            # The result of ``acquire`` is not used here, because Ctrl-C may have come between the call and the assignment.
            if self._write_lock._is_owned():  # type: ignore[attr-defined]
                self._write_lock.release()

    def _fill_channel(self) -> bool:
        with self._lock:
            self._channel.add(self._protocol.take_outgoing())
        return self._channel.has_unsent_bytes

    # --- reading

    def _read(self) -> None:
        view = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        try:
            while self._error is None:
                if self._await_bytes():
                    count = self._channel.receive(view)
                    if count == 0:
                        self._fail(closed_by_peer_error(self.address, is_first_request=not self._server_has_answered))
                    elif count > 0:
                        self._handle(view[:count])
                self._tick()
        except OSError as e:
            self._fail(to_rocketmq_error(e, self.address, "the connection broke", not self._server_has_answered), e)
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
            events = self._protocol.receive(data)
            self._silent_since = time.monotonic() if self._protocol.waiting_count else None
        self._dispatch(events)

    def _dispatch(
        self, events: Iterable[ResponseReceived[_Waiter] | RequestReceived | ResponseDropped[_Waiter]]
    ) -> None:
        for event in events:
            if isinstance(event, ResponseReceived):
                self._server_has_answered = True
                self.peer = peer_after_answer(self.peer, event.waiter.code, event.command)
                event.command.peer = self.peer
                event.waiter.set_result(event.command)
            elif isinstance(event, ResponseDropped):
                event.error.addr = self.address
                event.waiter.set_result(event.error)
            else:
                self._handle_request(event)

    def _handle_request(self, event: RequestReceived) -> None:
        release = None if event.held_bytes is None else self._waiting_budget.claim(self.address, event.held_bytes)
        if release is None:
            self._reject(event)
            return
        request = ServerRequest(self.address, event.command, self._reply, event.reply, release)

        def handle() -> None:
            if self._on_request is None or not self._on_request(request):
                request.reject()

        outcome = capture(handle)
        if isinstance(outcome, Failure):  # user code, see ``_Waiter.set_result``
            release()
            text = "the request %s of %s could not be handled"
            outcome.log(logger, text, event.command.code, self.address)

    def _reject(self, event: RequestReceived) -> None:
        if event.reply is not None:
            self._reply(event.reply)
        if self._log_limit.due():  # a server may send thousands of such requests
            reason = event.drop_reason or f"requests of {self._waiting_budget.used_bytes} bytes wait"
            logger.warning("request %s of %s is rejected: %s", event.command.code, self.address, reason)

    def _reply(self, reply: Command) -> None:
        with self._lock:
            if self._error is not None:  # the connection is closed, so nobody waits for the reply
                return
            is_blocked = self._channel.blocked_since is not None
            self._unread_bytes = self._unread_bytes + len(reply.body) + _ANSWER_OVERHEAD_BYTES if is_blocked else 0
            if self._unread_bytes > MAX_UNREAD_BYTES:
                return
            self._protocol.send_oneway(reply)
        self._flush(_NO_WAIT)

    def _tick(self) -> None:
        """Expire requests and check for stalls, every ``TICK_S``."""
        now = time.monotonic()
        if now < self._next_tick_s:
            return
        self._next_tick_s = now + TICK_S
        if self.waiting_count:
            self._expire()
        with self._lock:
            drop_events = self._protocol.tick()
        self._dispatch(drop_events)
        if self._protocol.has_outgoing:  # a writer timed out while another thread was writing
            self._flush(_NO_WAIT)
        blocked_since = self._channel.blocked_since
        if blocked_since is not None and now - blocked_since > STALL_S:
            self._fail(CallTimeout("the server does not read requests", self.address))

    def _expire(self) -> None:
        with self._lock:
            expired_waiters = self._protocol.remove_expired(lambda waiter: waiter.deadline.expired)
            self._may_have_unsent_bytes = self._may_have_unsent_bytes or bool(expired_waiters)
        for waiter in expired_waiters:
            waiter.set_result(self._timeout_error("no answer in time"))
        if expired_waiters:
            self._check_silence()

    def _timeout_error(self, message: str) -> CallTimeout:
        return CallTimeout(message, self.address, remedy=_PROXY_TIMEOUT_REMEDY if self.peer is Peer.PROXY else None)

    def _check_silence(self) -> None:
        """Close the connection if the server has sent nothing for ``SILENCE_S``. Called after a request has timed out."""
        silent_since = self._silent_since
        if silent_since is not None and time.monotonic() - silent_since > SILENCE_S:
            self._fail(ConnectionLost(f"the server sent nothing for {SILENCE_S:g} s", self.address))

    def _fail(self, error: RocketMQError, cause: BaseException | None = None) -> None:
        """Close the connection. Waiters get the error now, and later calls raise it."""
        if cause is not None:
            error.__cause__ = cause
        with self._lock:
            if self._error is not None:
                return
            self._error = copy_error(error)
            lost_waiters = self._protocol.connection_lost(error)
        try:
            if self._drops_unsent_bytes and (lost_waiters or self._may_have_unsent_bytes):
                self._channel.drop_unsent()
            self._channel.shutdown()  # the reader wakes and closes it
        except OSError:
            logger.debug("%s was closed already", self.address)
        for waiter, own_error in lost_waiters:
            waiter.set_result(own_error)
