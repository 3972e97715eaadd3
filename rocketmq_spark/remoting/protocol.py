"""The Remoting protocol on one connection, without sockets, threads or clocks.

``receive`` turns received bytes into events, and ``send`` turns requests into bytes to write. The flag of a frame, not its
number, decides whether the frame is an answer, because a server's own requests may have the same numbers as the client's. A
broken stream or a lost connection fails every waiting request at once. Each request gets its own copy of the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from rocketmq_spark.base import codes
from rocketmq_spark.base.budget import ReceiveAccount, ReceiveBudget
from rocketmq_spark.errors import ConnectionLost, RemoteProtocolError, RocketMQError, copy_error
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command, FrameSplitter, Peer

W = TypeVar("W")

OPAQUE_MASK = 0x7FFFFFFF
# ``AbstractRemotingActivity.writeResponse`` of a Proxy adds these fields to each answer. A broker adds these fields only to
# answers to sends.
_PROXY_FIELDS = {codes.Property.MSG_REGION, codes.Property.TRACE_ON}
_SEND_REQUESTS = {
    codes.Request.SEND_MESSAGE,
    codes.Request.SEND_MESSAGE_V2,
    codes.Request.SEND_BATCH_MESSAGE,
    codes.Request.SEND_REPLY_MESSAGE_V2,
}
# A broker answers these requests with REQUEST_CODE_NOT_SUPPORTED.
_NAME_SERVER_REQUESTS = {
    codes.Request.GET_ROUTEINFO_BY_TOPIC,
    codes.Request.GET_BROKER_CLUSTER_INFO,
    codes.Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
}
_NAME_SERVER_ANSWERS = {codes.Response.SUCCESS, codes.Response.TOPIC_NOT_EXIST}

# A gRPC server first sends a SETTINGS frame of HTTP/2 with fewer than 256 bytes, on stream 0. ``_HTTP2_SETTINGS`` has the bytes
# before and after the last byte of the frame's length.
_HTTP2_SETTINGS = (b"\x00\x00", b"\x04\x00\x00\x00\x00\x00")
_HTTP2_FRAME_HEADER_BYTES = 9
_GRPC_PORT_REMEDY = (
    "It is the gRPC port of a Proxy: use transport=grpc with option 'proxyEndpoint'; or give as option 'nameServer' the brokers' "
    "name server (port 9876), or the Remoting port (8080) of a Proxy in CLUSTER mode. In LOCAL mode (mqbroker --enable-proxy) a "
    "Proxy serves only gRPC"
)

# If a request of a server has more than ``MAX_PUSHED_BYTES`` bytes, it is rejected, and its body is discarded. If messages may be
# larger (option 'maxMessageSize'), the limit is larger, too.
MAX_PUSHED_BYTES = 16 << 20
_PROPERTIES_BYTES = 256 << 10  # the maximum bytes of a request besides the body of its message
# Estimated memory of a server's request, besides its body: for the object, for each field, and for each character of the header.
_REQUEST_BYTES, _FIELD_BYTES, _CHARACTER_BYTES = 2000, 200, 4

# The header of a frame with more than ``LARGE_FRAME_BYTES`` bytes is checked before the body arrives. At least
# ``LARGE_FRAME_BYTES`` bytes of such a frame must arrive in each period of ``QUIET_TICKS`` ticks.
LARGE_FRAME_BYTES = 1 << 20
QUIET_TICKS = 150
SMALL_BODY_BYTES = 16 << 10
# Small requests in the queue are joined to writes of about ``WRITE_BYTES`` bytes.
WRITE_BYTES = 64 << 10


class ResponseReceived(NamedTuple, Generic[W]):
    """The answer to a request of the client, with the request's waiter."""

    waiter: W
    command: Command


class RequestReceived(NamedTuple):
    """A request of the server. ``reply`` is the answer if no handler accepts the request; None for one-way requests.

    ``held_bytes`` is the memory that the request needs while it waits. None means that the request was dropped while it
    arrived; then ``drop_reason`` says why, and ``command`` may lack its body.
    """

    command: Command
    reply: Command | None
    held_bytes: int | None = 0
    drop_reason: str = ""


class ResponseDropped(NamedTuple, Generic[W]):
    """An answer that was dropped while it arrived, with the waiter of its request."""

    waiter: W
    error: RocketMQError


_TOO_LARGE_REASON = "it is too large"
_NO_ROOM_REASON = "other arriving frames fill the memory limit"
_TOO_SLOW_REASON = f"less than {LARGE_FRAME_BYTES >> 20} MiB of it arrived in 15 s"


@dataclass(slots=True)
class _LargeFrame:
    """A large frame that is arriving. It makes progress when ``LARGE_FRAME_BYTES`` more than ``progress_bytes`` have arrived;
    then ``progress_bytes`` is set to the number of arrived bytes.
    """

    command: Command
    size: int
    progress_bytes: int = 0
    quiet_ticks: int = 0

    @property
    def answered_opaque(self) -> int | None:
        return self.command.opaque if self.command.is_response else None


def max_pushed_frame_bytes(max_message_bytes: int) -> int:
    """Return the maximum size in bytes of a frame that a server pushes, if messages may have ``max_message_bytes``."""
    return max(MAX_PUSHED_BYTES, max_message_bytes + _PROPERTIES_BYTES)


class RemotingProtocol(Generic[W]):
    """Matches answers to requests by number. ``W`` is the type of the waiters that callers pass with requests.

    An arriving large frame is dropped if no request waits for it, if ``account`` has no room for its bytes, or if it makes no
    progress.
    """

    def __init__(
        self, max_frame: int, max_pushed_bytes: int = MAX_PUSHED_BYTES, account: ReceiveAccount | None = None
    ) -> None:
        self._splitter = FrameSplitter(max_frame)
        self._max_pushed_bytes = max_pushed_bytes
        self._account = account or ReceiveBudget().account(None)
        self._large_frame: _LargeFrame | None = None
        self._first_bytes = b""  # the first bytes that the server sent
        self._waiters: dict[int, W] = {}
        self._max_body_bytes: dict[int, int | None] = {}  # limits of the answers' bodies, by number of the request
        self._next_opaque = 0
        self._outgoing: list[bytes | bytearray | memoryview] = []

    def send(self, command: Command, waiter: W) -> int:
        """Queue a request and keep ``waiter`` for its answer; returns the request's number."""
        while True:
            opaque = self._next_opaque
            self._next_opaque = (opaque + 1) & OPAQUE_MASK
            if opaque not in self._waiters:
                break
        command.opaque = opaque
        self._enqueue(command)
        self._waiters[opaque] = waiter
        self._max_body_bytes[opaque] = codes.max_answer_bytes(command.code)
        return opaque

    def send_oneway(self, command: Command) -> None:
        """Queue a request that is never answered, or a reply."""
        self._enqueue(command)

    def _enqueue(self, command: Command) -> None:
        head = header.encode_header(command)
        if len(command.body) < SMALL_BODY_BYTES:  # copying a small body costs less than a second write
            last_write = self._outgoing[-1] if self._outgoing else None
            if isinstance(last_write, bytearray) and len(last_write) < WRITE_BYTES:
                last_write += head + command.body
            else:
                self._outgoing.append(bytearray(head + command.body))
        else:
            self._outgoing += (head, command.body)

    def take_outgoing(self) -> list[bytes | bytearray | memoryview]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def receive(self, data: bytes | memoryview) -> list[ResponseReceived[W] | RequestReceived | ResponseDropped[W]]:
        """Return the events in ``data``. After a ``RemoteProtocolError`` the connection cannot be used any more."""
        if len(self._first_bytes) < _HTTP2_FRAME_HEADER_BYTES:
            self._first_bytes += bytes(data[: _HTTP2_FRAME_HEADER_BYTES - len(self._first_bytes)])
            if is_grpc(self._first_bytes):
                raise RemoteProtocolError("the server speaks gRPC, not the Remoting protocol", remedy=_GRPC_PORT_REMEDY)
        # All frames are decoded before the first event, because a malformed frame must fail all waiters.
        frames = self._splitter.feed(data)
        commands = [header.decode(frame) for frame in frames]
        events: list[ResponseReceived[W] | RequestReceived | ResponseDropped[W]] = []
        for frame, command in zip(frames, commands, strict=True):
            if command.is_response:
                # An unknown number belongs to a request that has timed out.
                max_bytes = self._max_body_bytes.get(command.opaque)
                waiter = self._remove_waiter(command.opaque)
                if waiter is not None:
                    size = len(command.body)
                    events.append(
                        ResponseReceived(waiter, command)
                        if max_bytes is None or size <= max_bytes
                        else ResponseDropped(waiter, _too_long_error(size, max_bytes))
                    )
            else:
                size = len(frame)
                is_small_enough = size <= self._max_pushed_bytes
                events.append(
                    _request_event(command, _held_bytes(command, size))
                    if is_small_enough
                    else _request_event(command, None, _TOO_LARGE_REASON)
                )
        if frames:
            self._release_large_frame()
        if (
            self._large_frame is None
            and (large_header := self._splitter.partial_header(min(LARGE_FRAME_BYTES, self._max_pushed_bytes)))
            is not None
        ):
            self._large_frame = _LargeFrame(header.decode(large_header), self._splitter.incomplete_bytes)
            self._drop_large_without_waiter()
            if (large_frame := self._large_frame) is not None:
                events += self._drop_too_large(large_frame, large_frame.size - len(large_header))
        if self._large_frame is not None and not self._account.resize(self._splitter.buffered_bytes):
            events += self._drop_large_frame(self._large_frame, _NO_ROOM_REASON)
        return events

    def tick(self) -> list[RequestReceived | ResponseDropped[W]]:
        """Drop a large frame that has made no progress for ``QUIET_TICKS`` calls of this method.

        Calls are counted instead of seconds, because a suspended process reads nothing while time passes.
        """
        large_frame = self._large_frame
        if large_frame is None:
            return []
        large_frame.quiet_ticks += 1
        if self._splitter.buffered_bytes - large_frame.progress_bytes >= LARGE_FRAME_BYTES:
            large_frame.progress_bytes, large_frame.quiet_ticks = self._splitter.buffered_bytes, 0
        if self._account.is_revoked:
            return self._drop_large_frame(large_frame, _NO_ROOM_REASON)
        return self._drop_large_frame(large_frame, _TOO_SLOW_REASON) if large_frame.quiet_ticks > QUIET_TICKS else []

    def _drop_too_large(self, large_frame: _LargeFrame, body_bytes: int) -> list[RequestReceived | ResponseDropped[W]]:
        if large_frame.answered_opaque is None:
            return (
                self._drop_large_frame(large_frame, _TOO_LARGE_REASON)
                if large_frame.size > self._max_pushed_bytes
                else []
            )
        max_bytes = self._max_body_bytes.get(large_frame.answered_opaque)
        if max_bytes is None or body_bytes <= max_bytes:
            return []
        waiter = self._remove_waiter(large_frame.answered_opaque)
        self._drop_large_frame(large_frame, "")
        return [] if waiter is None else [ResponseDropped(waiter, _too_long_error(body_bytes, max_bytes))]

    def _remove_waiter(self, opaque: int) -> W | None:
        """Remove and return the waiter of a request."""
        self._max_body_bytes.pop(opaque, None)
        return self._waiters.pop(opaque, None)

    def _drop_large_frame(self, large_frame: _LargeFrame, reason: str) -> list[RequestReceived | ResponseDropped[W]]:
        """Discard the received bytes of a large frame, and skip the rest."""
        self._splitter.skip()
        self._release_large_frame()
        if large_frame.answered_opaque is None:
            return [_request_event(large_frame.command, None, reason)]
        waiter = self._remove_waiter(large_frame.answered_opaque)
        if waiter is None:
            return []
        return [ResponseDropped(waiter, ConnectionLost(f"an answer of {large_frame.size} bytes was dropped: {reason}"))]

    def _release_large_frame(self) -> None:
        """Forget the large frame and release its memory."""
        if self._large_frame is not None:
            self._large_frame = None
            self._account.resize(0)

    def cancel(self, opaque: int) -> W | None:
        """Remove a request that has timed out. Returns its waiter, or None if the answer has already arrived."""
        waiter = self._remove_waiter(opaque)
        self._drop_large_without_waiter()
        return waiter

    def remove_expired(self, is_expired: Callable[[W], bool]) -> list[W]:
        """Remove and return all waiters that have expired."""
        expired_opaques = [opaque for opaque, waiter in self._waiters.items() if is_expired(waiter)]
        removed_waiters = [waiter for opaque in expired_opaques if (waiter := self._remove_waiter(opaque)) is not None]
        self._drop_large_without_waiter()
        return removed_waiters

    def _drop_large_without_waiter(self) -> None:
        """Drop the large frame if it answers a request that no longer waits."""
        large_frame = self._large_frame
        if (
            large_frame is not None
            and large_frame.answered_opaque is not None
            and large_frame.answered_opaque not in self._waiters
        ):
            self._drop_large_frame(large_frame, "")

    @property
    def waiting_count(self) -> int:
        return len(self._waiters)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def connection_lost(self, error: RocketMQError) -> list[tuple[W, RocketMQError]]:
        """Remove and return all waiters. Each gets its own copy of ``error``, because a shared exception would collect
        tracebacks.
        """
        lost_waiters = [(waiter, copy_error(error)) for waiter in self._waiters.values()]
        self._waiters.clear()
        self._max_body_bytes.clear()
        if self._large_frame is not None:
            self._drop_large_frame(self._large_frame, "")
        return lost_waiters


def _too_long_error(body_bytes: int, max_bytes: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"an answer has {body_bytes} bytes; expected at most {max_bytes}")


def is_grpc(first_bytes: bytes) -> bool:
    """Whether the first bytes of a server are those of HTTP/2."""
    bytes_before_length, bytes_after_length = _HTTP2_SETTINGS
    return first_bytes.startswith(bytes_before_length) and first_bytes[3:].startswith(bytes_after_length)


def peer_after_answer(known_peer: Peer, request_code: int, answer: Command) -> Peer:
    """The kind of server according to this answer and earlier answers. The first answer of a Proxy may not show its kind."""
    if known_peer is Peer.PROXY or (request_code not in _SEND_REQUESTS and answer.ext.keys() >= _PROXY_FIELDS):
        return Peer.PROXY
    is_name_server = request_code in _NAME_SERVER_REQUESTS and answer.code in _NAME_SERVER_ANSWERS
    return Peer.NAME_SERVER if is_name_server else known_peer


def _request_event(command: Command, held_bytes: int | None, drop_reason: str = "") -> RequestReceived:
    return RequestReceived(
        command, None if command.is_oneway else _not_supported_answer(command), held_bytes, drop_reason
    )


def _held_bytes(command: Command, frame_bytes: int) -> int:
    body_bytes = len(command.body)
    fields_bytes = _CHARACTER_BYTES * (frame_bytes - body_bytes) + _FIELD_BYTES * len(command.ext)
    return _REQUEST_BYTES + fields_bytes + body_bytes


def _not_supported_answer(command: Command) -> Command:
    """The answer to an unknown request. Without an answer, administrative tools would wait until they time out."""
    return Command(
        codes.Response.REQUEST_CODE_NOT_SUPPORTED,
        opaque=command.opaque,
        flag=codes.Flag.RESPONSE,
        remark=f"request type {command.code} not supported",
    )
