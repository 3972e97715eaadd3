"""A stream of pipelined pulls: one connection, one thread, and one tuple per answer.

Requests are formatted from a template with three placeholders. Answers are received into one large buffer, and only the
positions of their bodies are recorded. The owner of the stream reads the bodies in place. The owner passes the bodies that must
stay to ``compact``, which frees the rest. docs/design.md explains why this is not a ``Connection``.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocketmq_spark.base import codes
from rocketmq_spark.base.budget import ReceiveBudget
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ConnectionLost, RemoteProtocolError
from rocketmq_spark.remoting.transport import TlsSettings, closed_by_peer_error, connect, to_rocketmq_error
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LENGTHS = struct.Struct(">II")
_PREFIX_BYTES = 8
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
_MAX_FRAME = 256 << 20
BUFFER_BYTES = 16 << 20
# Free bytes after the last body, because decoders may read a few words beyond the end of a body.
SLACK_BYTES = 64
_ACCOUNT_CHECK_INTERVAL_S = 0.5

_LONG_LIMIT = 1 << 63
# Matches the header of nearly every answer. Other headers, such as headers with longer numbers, are parsed as JSON.
_FOUND_HEADER = re.compile(
    rb'\{"code":0,"extFields":\{"suggestWhichBrokerId":"(\d{1,18})","groupSysFlag":"\d+","nextBeginOffset":"(\d{1,18})",'
    rb'"maxOffset":"(\d+)","minOffset":"(-?\d{1,18})","topicSysFlag":"\d+"\},"flag":1,"language":"JAVA",'
    rb'"opaque":(\d{1,18}),'
)


@dataclass(frozen=True, slots=True)
class EmptyAnswer:
    """An answer without messages. ``next_offset`` and ``suggested_broker`` are the broker's suggestions for the next pull."""

    code: int
    remark: str
    next_offset: int | None
    min_offset: int | None
    max_offset: int | None
    suggested_broker: int | None
    forbidden_type: int | None = None


# Access key, secret key, security token.
Keys = tuple[str, str, str | None]


class PullTemplate:
    """Formats the frames of pulls that differ only in request number, offset and count, and signs them with credentials."""

    def __init__(self, pull_command: Command, credentials: Keys | Callable[[], Keys] | None = None) -> None:
        self._pull_command = pull_command
        self._read_keys = credentials if callable(credentials) else None
        self._keys = credentials() if callable(credentials) else credentials
        self._set_header(pull_command, self._keys)

    def renew(self) -> bool:
        """Read the keys again, because they may expire during a long task. Returns whether they have changed."""
        if self._read_keys is None or (keys := self._read_keys()) == self._keys:
            return False
        self._keys = keys
        self._set_header(self._pull_command, keys)
        return True

    def _set_header(self, pull_command: Command, credentials: Keys | None) -> None:
        ext = dict(pull_command.ext)
        self._secret = b""
        if credentials:
            ext["AccessKey"] = credentials[0]
            if credentials[2]:
                ext["SecurityToken"] = credentials[2]
            self._secret = credentials[1].encode()
        fixed_fields = {name: value for name, value in ext.items() if name not in ("queueOffset", "maxMsgNums")}
        fields = json.dumps(fixed_fields).encode()[1:-1].replace(b"%", b"%%")
        self._signature = b',"Signature":"%s"' if credentials else b""
        # Java sorts the fields by name and signs only the values.
        placeholders = {"queueOffset": "%(offset)d", "maxMsgNums": "%(count)d"}
        signed_content = "".join(
            placeholders.get(name) or value.replace("%", "%%")
            for name, value in sorted({**ext, **placeholders}.items())
        )
        self._signed_content = signed_content.encode()
        self._header = (
            b'{"code":%d,"flag":0,"language":"PYTHON","version":%d,' % (pull_command.code, pull_command.version)
            + b'"serializeTypeCurrentRPC":"JSON","opaque":%d,"extFields":{"queueOffset":"%d","maxMsgNums":"%d",'
            + fields
            + self._signature
            + b"}}"
        )

    def frame(self, opaque: int, offset: int, count: int) -> bytes:
        if self._signature:
            signed_content = self._signed_content % {b"offset": offset, b"count": count}
            signature = base64.b64encode(hmac.digest(self._secret, signed_content, "sha1"))
            header_text = self._header % (opaque, offset, count, signature)
        else:
            header_text = self._header % (opaque, offset, count)
        return _LENGTHS.pack(len(header_text) + 4, len(header_text)) + header_text


# An answer with messages: (request number, next offset, suggested broker, start of body, end of body, minimum offset of the
# queue as digits)
FoundAnswer = tuple[int, int, int, int, int, bytes]


def _uninitialised(size: int) -> npt.NDArray[np.uint8]:
    import numpy as np  # only bulk reads need numpy, which may not be installed

    return np.empty(size, np.uint8)


class BulkStream:
    """The connection with its receive buffer. ``received_bytes`` is the number of bytes received so far.

    The buffer grows with the bytes that arrive, not with the announced size of a frame. Bytes of the buffer beyond its
    first size and ``spare_bytes`` count against ``receive_budget``, the budget of the client.
    """

    def __init__(
        self,
        address: str,
        deadline: Deadline,
        tls: TlsSettings | None,
        buffer_bytes: int = BUFFER_BYTES,
        spare_bytes: int = 0,
        receive_budget: ReceiveBudget | None = None,
    ) -> None:
        self.address = address
        self._sock: socket.socket = connect(address, deadline, tls)
        self._sock.settimeout(None)
        # Encrypted sockets do not support flags.
        self._is_nonblocking = bool(_NO_WAIT) and tls is None
        self._buffer_bytes = buffer_bytes
        self.buffer: npt.NDArray[np.uint8] = _uninitialised(buffer_bytes + SLACK_BYTES)
        self._view = memoryview(self.buffer.data)
        self._spare_bytes = spare_bytes  # bytes that do not count against ``receive_budget``
        self._account = (receive_budget or ReceiveBudget()).account(address)
        self._is_growth_refused = False  # whether the memory for a larger buffer was denied
        self._filled_bytes = 0  # bytes in the buffer
        self._scanned_bytes = 0  # number of filled bytes whose answers ``scan`` has returned
        self.received_bytes = 0

    @property
    def filled_bytes(self) -> int:
        return self._filled_bytes

    @property
    def free_bytes(self) -> int:
        """Free bytes at the end of the buffer."""
        return len(self.buffer) - SLACK_BYTES - self._filled_bytes

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, so that ``compact`` must make room. False if the buffer was denied the memory to grow;
        then ``receive`` raises an error.
        """
        return self.free_bytes == 0 and not self._is_out_of_memory

    @property
    def _is_out_of_memory(self) -> bool:
        return self._is_growth_refused or self._account.is_revoked

    def send(self, frames: list[bytes], timeout_s: float) -> None:
        """Write requests. Raises ``ConnectionLost`` or ``CallTimeout``."""
        data = b"".join(frames)
        try:
            sent_bytes = self._try_nonblocking(lambda: self._sock.send(data, _NO_WAIT)) or 0
            if sent_bytes < len(data):
                with self._socket_timeout(timeout_s):
                    self._sock.sendall(memoryview(data)[sent_bytes:])
        except OSError as e:
            raise to_rocketmq_error(
                e, self.address, "pulls cannot be sent", is_first_request=self.received_bytes == 0
            ) from e

    def receive(self, timeout_s: float) -> bool:
        """Read once into the buffer; False if nothing arrived in time. The buffer must not be full."""
        if self._is_out_of_memory:
            problem = f"an answer to a pull was dropped after {self._filled_bytes - self._scanned_bytes} bytes"
            raise ConnectionLost(f"{problem}: other arriving frames fill the memory limit", self.address)
        free_view = self._view[self._filled_bytes : len(self.buffer) - SLACK_BYTES]
        try:
            count = self._try_nonblocking(lambda: self._sock.recv_into(free_view, 0, _NO_WAIT))
            if count is None:
                # A stream that uses the shared budget checks often whether other connections need the memory.
                with self._socket_timeout(
                    min(timeout_s, _ACCOUNT_CHECK_INTERVAL_S) if self._account.size else timeout_s
                ):
                    count = self._sock.recv_into(free_view)
        except TimeoutError:
            return False
        except OSError as e:
            raise to_rocketmq_error(
                e, self.address, "the connection broke while pulling", is_first_request=self.received_bytes == 0
            ) from e
        if count == 0:
            raise closed_by_peer_error(self.address, is_first_request=self.received_bytes == 0)
        self._filled_bytes += count
        self.received_bytes += count
        return True

    def _try_nonblocking(self, call: Callable[[], int]) -> int | None:
        """Make the call without waiting, which takes one system call; a call with a timeout takes three. Returns None if the
        call would block.
        """
        if not self._is_nonblocking:
            return None
        try:
            return call()
        except BlockingIOError:
            return None

    @contextlib.contextmanager
    def _socket_timeout(self, timeout_s: float) -> Iterator[None]:
        self._sock.settimeout(max(0.001, timeout_s))
        try:
            yield
        finally:
            self._sock.settimeout(None)

    def scan(self) -> tuple[list[FoundAnswer], list[tuple[int, EmptyAnswer]]]:
        """Return the newly completed answers: those with messages, and the other answers with their request numbers."""
        found_answers: list[FoundAnswer] = []
        other_answers: list[tuple[int, EmptyAnswer]] = []
        view, position, filled_bytes = self._view, self._scanned_bytes, self._filled_bytes
        unpack, match_header = _LENGTHS.unpack_from, _FOUND_HEADER.match
        while filled_bytes - position >= _PREFIX_BYTES:
            length, kind_and_header_bytes = unpack(view, position)
            frame_end = position + 4 + length
            if length > _MAX_FRAME:
                raise RemoteProtocolError(f"the server announced a frame of {length} bytes", self.address)
            if frame_end > filled_bytes:
                break
            header_start = position + _PREFIX_BYTES
            body_start = (
                header_start + kind_and_header_bytes
            )  # the word's first byte is the encoding, which is 0 for JSON, so the word is the header's length
            header_match = match_header(view, header_start, body_start) if body_start <= frame_end else None
            if header_match is not None:
                opaque, next_offset, suggested_broker, min_offset = header_match.group(5, 2, 1, 4)
                found_answers.append(
                    (int(opaque), int(next_offset), int(suggested_broker), body_start, frame_end, min_offset)
                )
            else:
                self._parse_frame(view[position + 4 : frame_end], frame_end, found_answers, other_answers)
            position = frame_end
        self._scanned_bytes = position
        return found_answers, other_answers

    def _parse_frame(
        self,
        frame: memoryview,
        frame_end: int,
        found_answers: list[FoundAnswer],
        other_answers: list[tuple[int, EmptyAnswer]],
    ) -> None:
        try:
            command = header.decode(frame)
            answer = _empty_answer(command)
        except RemoteProtocolError as e:
            e.addr = self.address
            raise
        if not command.is_response:
            return  # ignored: a broker sends requests only to registered clients, and this connection is not registered
        if command.code == codes.Response.SUCCESS and answer.next_offset is not None:
            suggested_broker = answer.suggested_broker or 0
            min_offset = b"%d" % (answer.min_offset or 0)
            found_answers.append(
                (
                    command.opaque,
                    answer.next_offset,
                    suggested_broker,
                    frame_end - len(command.body),
                    frame_end,
                    min_offset,
                )
            )
        else:
            other_answers.append((command.opaque, answer))

    def compact(self, kept_bodies: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Move the bodies in ``kept_bodies``, and the incomplete last frame, to the beginning of the buffer, and free the rest.

        Returns the new start of each body by its old start.
        """
        sorted_bodies = sorted(kept_bodies)
        incomplete_bytes = self._filled_bytes - self._scanned_bytes
        kept_bytes = sum(end - start for start, end in sorted_bodies) + incomplete_bytes
        # The new buffer has room for an incomplete frame of twice the bytes that have arrived.
        size = max(self._buffer_bytes, kept_bytes + incomplete_bytes + (self._buffer_bytes >> 2))
        self._is_growth_refused = not self._account.resize(max(0, size - self._buffer_bytes - self._spare_bytes))
        if self._is_growth_refused:
            size = max(self._buffer_bytes, kept_bytes)
        old_view = self._view
        if len(old_view) != size + SLACK_BYTES:  # the buffer grows for one large frame, or shrinks to its usual size
            self.buffer = _uninitialised(size + SLACK_BYTES)
            self._view = memoryview(self.buffer.data)
        new_view = self._view
        position = 0
        new_starts = {}
        for start, end in sorted_bodies:  # in the order of their positions, because moves within one buffer may overlap
            new_view[position : position + end - start] = old_view[start:end]
            new_starts[start] = position
            position += end - start
        new_view[position : position + incomplete_bytes] = old_view[self._scanned_bytes : self._filled_bytes]
        self._scanned_bytes, self._filled_bytes = position, position + incomplete_bytes
        return new_starts

    def close(self) -> None:
        self._sock.close()
        # Errors may refer to the stream, so free the memory of its buffer now.
        self.buffer = _uninitialised(SLACK_BYTES)
        self._view = memoryview(self.buffer.data)
        self._filled_bytes = self._scanned_bytes = 0
        self._account.resize(0)


def _empty_answer(command: Command) -> EmptyAnswer:
    def number(name: str) -> int | None:
        text = command.ext.get(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            value = _LONG_LIMIT
        if not -_LONG_LIMIT <= value < _LONG_LIMIT:
            raise RemoteProtocolError(f"the answer to a pull has {name} = {text[:80]!r}, which is no 64-bit number")
        return value

    return EmptyAnswer(
        command.code,
        command.remark or "",
        number("nextBeginOffset"),
        number("minOffset"),
        number("maxOffset"),
        number("suggestWhichBrokerId"),
        number("forbiddenType"),
    )
