"""Frames of TCP, the commands in them with their two header encodings, and the signature of a command.

``FrameSplitter`` cuts the byte stream of a connection into frames, and reads only their length fields. After an error,
``FrameSplitter`` cannot find the next frame, so every further call raises an error, and the caller must close the connection.

A ``Command`` is a request or a response: a code, a map of strings and a body. Each frame says whether its header is JSON or
binary, and peers do not negotiate the encoding, so both decoders are needed. This module does not know what a code or field
means. The layouts are those of ``RemotingCommand`` and ``RocketMQSerializable`` of the Java client.

``sign`` signs a request with an access key, as brokers with access control require. The signature covers the values of all fields
and the body, but neither the code nor the request number. So the signature authenticates the client, but does not prevent the
replay of a captured request. A request must be signed last, when every field has its final text. The algorithm is that of
``AclClientRPCHook`` for ACL 1.0 and 2.0.
"""

from __future__ import annotations

import base64
import enum
import hmac
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any

from rocketmq_spark.base.codes import MAX_FRAME_BYTES, VERSION, Flag, LanguageCode, SerializeType
from rocketmq_spark.errors import LocalProtocolError, RemoteProtocolError

_LENGTH_BYTES = 4


class FrameSplitter:
    """Collects bytes until frames are complete. ``max_frame`` limits the memory that a peer can make this client use."""

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()
        self._bytes_to_skip = 0  # bytes of a discarded frame that have not arrived yet
        self._error: RemoteProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes of the incomplete frame that have arrived."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the frames that ``data`` completes, without their length fields.

        If a length field is above the limit, raises an error before any byte of that frame is kept. Every later call raises
        this error again.
        """
        if self._error is not None:
            raise self._error
        if self._bytes_to_skip:
            skipped_bytes = min(self._bytes_to_skip, len(data))
            self._bytes_to_skip -= skipped_bytes
            data = data[skipped_bytes:]
        self._buffer += data
        frames: list[bytes] = []
        position = 0
        available_bytes = len(self._buffer)
        with memoryview(self._buffer) as view:
            while available_bytes - position >= _LENGTH_BYTES:
                start = position + _LENGTH_BYTES
                length = int.from_bytes(view[position:start], "big")
                if length > self.max_frame:
                    self._error = RemoteProtocolError(
                        f"The peer announces a frame of {length} bytes, the limit is {self.max_frame}"
                    )
                    break
                if available_bytes - start < length:
                    break
                position = start + length
                frames.append(bytes(view[start:position]))
        if self._error is not None:
            self._buffer.clear()
            raise self._error
        del self._buffer[:position]
        return frames

    def partial_header(self, min_bytes: int) -> bytes | None:
        """Return the header of the incomplete frame.

        Returns None if the header has not arrived completely, if the frame has at most ``min_bytes`` bytes, or if no frame is
        incomplete.
        """
        start, buffer = _LENGTH_BYTES, self._buffer
        if len(buffer) < start + _PREFIX_BYTES or int.from_bytes(buffer[:start], "big") <= min_bytes:
            return None
        length = int.from_bytes(buffer[start + 1 : start + _PREFIX_BYTES], "big")
        if length > _MAX_RECEIVED_HEADER_BYTES:
            self._buffer.clear()
            self._error = RemoteProtocolError(f"The header of a frame has {length} bytes")
            raise self._error
        end = start + _PREFIX_BYTES + length
        return bytes(buffer[start:end]) if len(buffer) >= end else None

    @property
    def incomplete_bytes(self) -> int:
        """The size of the incomplete frame; 0 before its length has arrived."""
        return int.from_bytes(self._buffer[:_LENGTH_BYTES], "big") if len(self._buffer) >= _LENGTH_BYTES else 0

    def skip(self) -> None:
        """Discard the incomplete frame: the bytes that have arrived, and the bytes that are still to come."""
        self._bytes_to_skip = _LENGTH_BYTES + self.incomplete_bytes - len(self._buffer)
        self._buffer.clear()


Bytes = bytes | memoryview

_PREFIX = struct.Struct(">II")  # length, then one byte of header type and three of header length
_PREFIX_BYTES = 4  # header type and header length, which count as a part of the frame's length
_MAX_HEADER_BYTES = 0xFFFFFF
# In memory, the fields of a header need ten to twenty times its bytes. Headers of real servers have at most about ten KiB.
_MAX_RECEIVED_HEADER_BYTES = 1 << 20
_INT32_BITS = 31
_INT16_BITS = 15

_FIXED_FIELDS = struct.Struct(">hBhii")  # code, language, version, opaque, flag
_VALUE_LENGTH = struct.Struct(">i")
_NAME_LENGTH = struct.Struct(">h")

_LANGUAGE_NAMES = {language.value: language.name for language in LanguageCode}
_LANGUAGES = {language.name: language.value for language in LanguageCode}

_quote = json.encoder.encode_basestring


class Peer(enum.Enum):
    """The kind of a server, as its answers show it."""

    UNKNOWN = "unknown"  # in most cases a broker
    NAME_SERVER = "name server"
    PROXY = "Proxy"


@dataclass(slots=True)
class Command:
    """A request or response. The connection sets ``opaque``; the caller sets everything else.

    ``received_s`` is the monotonic time at which an answer arrived; it is set only for requests to several servers at once.
    ``peer`` is the kind of server that sent an answer. A Proxy does not forward every request that it answers with success.
    """

    code: int
    ext: dict[str, str] = field(default_factory=dict)
    body: Bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: int = LanguageCode.PYTHON
    version: int = VERSION
    received_s: float = field(default=0.0, compare=False)
    peer: Peer = field(default=Peer.UNKNOWN, compare=False)

    @property
    def is_from_proxy(self) -> bool:
        return self.peer is Peer.PROXY

    @property
    def is_response(self) -> bool:
        return bool(self.flag & Flag.RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & Flag.ONEWAY)


def encode(
    command: Command, serialize_type: int = SerializeType.JSON, max_frame: int | None = MAX_FRAME_BYTES
) -> bytes:
    """The whole frame, with its length field. Raises as ``encode_header`` does."""
    return b"".join((encode_header(command, serialize_type, max_frame), command.body))


def encode_header(
    command: Command, serialize_type: int = SerializeType.JSON, max_frame: int | None = MAX_FRAME_BYTES
) -> bytes:
    """The part of the frame before ``command.body``, so that the body is not copied. The length field includes the body.

    Raises an error for a request above ``max_frame``, because the server would close the connection. Responses have no limit,
    nor do requests with ``max_frame=None``.
    """
    if not (_fits_bits(command.opaque) and _fits_bits(command.flag) and _fits_bits(command.code)):
        raise LocalProtocolError(f"Code, opaque and flag must fit 32 bits: {command.code}, {command.opaque}")
    try:
        header = _encode_json(command) if serialize_type == SerializeType.JSON else _encode_binary(command)
    except (UnicodeEncodeError, TypeError, AttributeError, struct.error) as exc:
        raise LocalProtocolError(f"The header of request code {command.code} cannot be encoded: {exc}") from exc
    length = _PREFIX_BYTES + len(header) + len(command.body)
    if len(header) > _MAX_HEADER_BYTES:
        raise LocalProtocolError(f"A header of {len(header)} bytes does not fit a frame")
    if max_frame is not None and length > max_frame and not command.is_response:
        raise LocalProtocolError(f"A request of {length} bytes exceeds the {max_frame} bytes that servers accept")
    return _PREFIX.pack(length, serialize_type << 24 | len(header)) + header


def decode(frame: Bytes) -> Command:
    """The command in a frame without its length field. The body is a slice of ``frame``: a view if ``frame`` is a view."""
    if len(frame) < _PREFIX_BYTES:
        raise RemoteProtocolError(f"A frame of {len(frame)} bytes has no room for a header")
    header_type = frame[0]
    end = _PREFIX_BYTES + int.from_bytes(frame[1:_PREFIX_BYTES], "big")
    if end > len(frame):
        raise RemoteProtocolError(f"A header of {end - _PREFIX_BYTES} bytes does not fit its frame of {len(frame)}")
    if end - _PREFIX_BYTES > _MAX_RECEIVED_HEADER_BYTES:
        raise RemoteProtocolError(
            f"A header of {end - _PREFIX_BYTES} bytes; expected at most {_MAX_RECEIVED_HEADER_BYTES}"
        )
    header = bytes(frame[_PREFIX_BYTES:end])
    try:
        if header_type == SerializeType.JSON:
            return _decode_json(header, frame[end:])
        if header_type == SerializeType.ROCKETMQ:
            return _decode_binary(header, frame[end:])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error) as exc:
        raise RemoteProtocolError(f"Unreadable header: {exc or type(exc).__name__}") from exc
    raise RemoteProtocolError(f"Unknown header type {header_type}")


def _encode_json(command: Command) -> bytes:
    # The text is joined here, because the general encoder takes three times as long, which matters for a million pulls.
    ext = ",".join([f"{_quote(name)}:{_quote(value)}" for name, value in command.ext.items()])
    ext = f'"extFields":{{{ext}}},' if ext else ""
    remark = f'"remark":{_quote(command.remark)},' if command.remark is not None else ""
    language = _LANGUAGE_NAMES.get(command.language, LanguageCode.OTHER.name)
    return (
        f'{{"code":{int(command.code)},{ext}"flag":{int(command.flag)},"language":"{language}",'
        f'"opaque":{int(command.opaque)},{remark}"serializeTypeCurrentRPC":"JSON","version":{int(command.version)}}}'
    ).encode()


def _decode_json(header: bytes, body: Bytes) -> Command:
    fields = json.loads(header)
    if not isinstance(fields, dict):
        raise ValueError("it is not an object")
    ext = fields.get("extFields") or {}
    if not isinstance(ext, dict):
        raise ValueError("extFields is not an object")
    remark = fields.get("remark")
    return Command(
        code=_int32(fields["code"]),
        ext={name: _text(value) for name, value in ext.items() if value is not None},
        body=body,
        opaque=_int32(fields["opaque"]),
        flag=_int32(fields.get("flag") or 0),
        remark=None if remark is None else _text(remark),
        language=_LANGUAGES.get(_text(fields.get("language")), LanguageCode.OTHER),
        version=_int32(fields.get("version") or 0),
    )


def _fits_bits(number: int, bits: int = _INT32_BITS) -> bool:
    # ``number in range(...)`` would be slow: if the number is a member of an enumeration, Python compares every number of the
    # range.
    return -(1 << bits) <= number < 1 << bits


def _int32(value: Any) -> int:
    number = int(value)
    if not _fits_bits(number):
        raise ValueError(f"{number} does not fit 32 bits")
    return number


def _text(value: Any) -> str:
    """The value of a field as the string that Java would make of it. Servers send strings; other peers may send numbers."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _encode_binary(command: Command) -> bytes:
    if not _fits_bits(command.code, _INT16_BITS):
        raise LocalProtocolError(f"Request code {command.code} does not fit a binary header; use a JSON header")
    remark = (command.remark or "").encode()
    parts: list[bytes] = []
    for name, value in command.ext.items():
        if not value:  # the server would decode it as null, and then the request's signature would not match
            continue
        key, text = name.encode(), value.encode()
        parts += (_NAME_LENGTH.pack(len(key)), key, _VALUE_LENGTH.pack(len(text)), text)
    ext = b"".join(parts)
    fixed_fields = _FIXED_FIELDS.pack(command.code, command.language, command.version, command.opaque, command.flag)
    return b"".join((fixed_fields, _VALUE_LENGTH.pack(len(remark)), remark, _VALUE_LENGTH.pack(len(ext)), ext))


def _decode_binary(header: bytes, body: Bytes) -> Command:
    code, language, version, opaque, flag = _FIXED_FIELDS.unpack_from(header)
    remark, position = _read_text(header, _FIXED_FIELDS.size, _VALUE_LENGTH)
    (ext_length,) = _VALUE_LENGTH.unpack_from(header, position)
    position += _VALUE_LENGTH.size
    if ext_length != len(header) - position:
        raise ValueError(f"the fields take {len(header) - position} bytes instead of {ext_length}")
    ext: dict[str, str] = {}
    while position < len(header):
        name, position = _read_text(header, position, _NAME_LENGTH)
        value, position = _read_text(header, position, _VALUE_LENGTH)
        if value:
            ext[name] = value
    return Command(code, ext, body, opaque, flag, remark or None, language, version)


def _read_text(data: bytes, position: int, length_format: struct.Struct) -> tuple[str, int]:
    (length,) = length_format.unpack_from(data, position)
    start = position + length_format.size
    end = start + length
    if length < 0 or end > len(data):
        raise ValueError(f"a text of {length} bytes does not fit the header")
    return data[start:end].decode(), end


ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"
SIGNATURE = "Signature"


def sign(command: Command, access_key: str, secret_key: str, security_token: str | None = None) -> Command:
    """A copy of ``command`` with credentials and signature; the body is shared."""
    ext = {name: value for name, value in command.ext.items() if name != SIGNATURE}
    ext[ACCESS_KEY] = access_key
    if security_token:
        ext[SECURITY_TOKEN] = security_token
    digest = hmac.new(secret_key.encode(), signed_fields(ext), "sha1")
    digest.update(command.body)
    ext[SIGNATURE] = base64.b64encode(digest.digest()).decode()
    return replace(command, ext=ext)


def signed_fields(ext: dict[str, str]) -> bytes:
    """The values that a signature covers, in Java's order of their names, which compares UTF-16 code units."""
    # Python's order differs from Java's only for characters beyond the basic plane. Only users' own fields have names that are
    # not ASCII.
    is_ascii = all(map(str.isascii, ext))
    names = sorted(ext) if is_ascii else sorted(ext, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return "".join([ext[name] for name in names]).encode()
