"""Protobuf messages of the Proxy's protocol, as classes and as encoded fields, and the errors for its answers.

The classes are created from ``tables``. They are in a separate descriptor pool, because another library may register messages of
the same names in the default pool. The file's edition distinguishes unset fields from zeros, and rejects text that is not UTF-8.
Enums are declared as int32: their encoding is the same, and values that ``tables`` does not list are accepted.

``field_key``, ``number_field`` and ``content_field`` encode fields without protobuf's objects. In Python, these objects take 8 µs
per message, several times as long as the Proxy needs for a message. Fields may be in any order, so the fields that many messages
share are encoded once.

``error_from_status`` and ``error_from_grpc`` are pure. They return the classes in ``errors``, so that callers can treat both
transports alike. The codes of these errors are the Proxy's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerError,
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    GroupNotFound,
    InvalidParameter,
    LocalProtocolError,
    MessageIllegal,
    NotFound,
    NotSupported,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    ServerFault,
    ServiceNotAvailable,
)
from rocketmq_spark.grpc_proxy.tables import FIELDS, PACKAGE, Code, ProtoField
from rocketmq_spark.model import SendStatus

_VARINT, _LENGTH_DELIMITED = 0, 2
_CACHED_NUMBERS_LIMIT = 1 << 14


class _Varints(dict[int, bytes]):
    """Numbers in protobuf's encoding. Caches small numbers, which are needed often."""

    def __missing__(self, number: int) -> bytes:
        encoded_bytes, remaining_number = bytearray(), number
        while remaining_number > 0x7F:
            encoded_bytes.append(remaining_number & 0x7F | 0x80)
            remaining_number >>= 7
        encoded_bytes.append(remaining_number)
        varint = bytes(encoded_bytes)
        if number < _CACHED_NUMBERS_LIMIT:
            self[number] = varint
        return varint


# The encodings of lengths and other numbers that are not negative.
VARINTS = _Varints()


@functools.cache
def field_key(message: str, name: str) -> bytes:
    """Return the encoded key of a field. In a message, the value follows the key: a number, or the length and the bytes of the
    content.
    """
    (field,) = (field for field in FIELDS if (field.message, field.name) == (message, name))
    is_delimited = field.kind not in ("enum", "int32", "int64", "bool")
    return VARINTS[field.number << 3 | (_LENGTH_DELIMITED if is_delimited else _VARINT)]


def number_field(message: str, name: str, value: int) -> bytes:
    """Return an encoded field of kind ``enum``, or of a number that is not negative."""
    return field_key(message, name) + VARINTS[value]


def content_field(message: str, name: str, data: bytes) -> bytes:
    """Return an encoded field whose content is UTF-8 text, bytes, or the fields of another message."""
    return field_key(message, name) + VARINTS[len(data)] + data


# The keys of the two fields of a map's entry.
MAP_KEY, MAP_VALUE = (VARINTS[field_number << 3 | _LENGTH_DELIMITED] for field_number in (1, 2))


_FILE = "rocketmq_spark/grpc_proxy.proto"
# Locks and clocks raise an error for a wait of some centuries. No caller needs more than a year.
_MAX_SECONDS = 365 * 86_400
_WELL_KNOWN_TYPES = {"time": "google.protobuf.Timestamp", "duration": "google.protobuf.Duration"}
_TYPES: Mapping[str, Any] = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("string", "bytes", "bool", "int32", "int64", "float")
} | {"enum": descriptor_pb2.FieldDescriptorProto.TYPE_INT32}
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_OPTIONAL, _REPEATED = (
    descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
)


@functools.cache
def proto(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in (timestamp_pb2, duration_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.Add(_file())
    return pool


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="editions")
    file.edition = descriptor_pb2.EDITION_2023
    file.dependency.extend(module.DESCRIPTOR.name for module in (timestamp_pb2, duration_pb2))
    for name in dict.fromkeys(field.message for field in FIELDS):
        descriptor = file.message_type.add(name=name)
        for field in (field for field in FIELDS if field.message == name):
            _add_field(descriptor, field)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, field: ProtoField) -> None:
    descriptor = message.field.add(
        name=field.name, number=field.number, label=_REPEATED if field.repeated else _OPTIONAL
    )
    if field.kind in _TYPES:
        descriptor.type = _TYPES[field.kind]
        return
    descriptor.type = _MESSAGE
    if field.kind == "map":
        descriptor.label = _REPEATED
        entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for number, name in enumerate(("key", "value"), 1):
            entry.field.add(name=name, number=number, label=_OPTIONAL, type=_TYPES["string"])
        descriptor.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
    else:
        descriptor.type_name = "." + _WELL_KNOWN_TYPES.get(field.kind, f"{PACKAGE}.{field.kind}")


def set_ms(timestamp: Any, epoch_ms: int) -> None:
    """Set a field of kind ``time``, to ms since 1970."""
    timestamp.seconds, remaining_ms = divmod(epoch_ms, 1000)
    timestamp.nanos = remaining_ms * 1_000_000


def get_ms(timestamp: Any) -> int:
    """Return the value of a field of kind ``time``, in ms since 1970."""
    return int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000


def set_seconds(duration: Any, seconds: float) -> None:
    """Set a field of kind ``duration``."""
    microseconds = round(seconds * 1_000_000)
    duration.seconds, remaining_microseconds = divmod(microseconds, 1_000_000)
    duration.nanos = remaining_microseconds * 1000


def get_seconds(duration: Any) -> float:
    """Return the value of a field of kind ``duration`` in seconds: at least 0, and at most a year."""
    return float(min(max(0.0, duration.seconds + duration.nanos / 1e9), _MAX_SECONDS))


REMOTING_REMEDY = "Use the Proxy's Remoting port: set transport=remoting and nameServer to this port"
_ERROR_CLASSES: dict[int, type[BrokerError]] = {
    Code.UNAUTHORIZED: AccessDenied,
    Code.FORBIDDEN: AccessDenied,
    Code.MESSAGE_NOT_FOUND: NotFound,
    Code.CONSUMER_GROUP_NOT_FOUND: GroupNotFound,
    Code.ILLEGAL_CONSUMER_GROUP: InvalidParameter,
    Code.INVALID_RECEIPT_HANDLE: NotFound,
    Code.REQUEST_TIMEOUT: ServiceNotAvailable,
    Code.TOO_MANY_REQUESTS: BrokerBusy,
    Code.INTERNAL_ERROR: ServiceNotAvailable,
    Code.INTERNAL_SERVER_ERROR: ServiceNotAvailable,
    Code.NOT_IMPLEMENTED: NotSupported,
    Code.UNSUPPORTED: NotSupported,
    Code.PROXY_TIMEOUT: ServiceNotAvailable,
}
SEND_STATUSES = {
    Code.OK: SendStatus.SEND_OK,
    Code.MASTER_PERSISTENCE_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    Code.SLAVE_PERSISTENCE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    Code.HA_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}
_REMEDIES: dict[int, str] = {
    Code.ILLEGAL_DELIVERY_TIME: "A Proxy accepts delays up to its maxDelayTimeMills, by default a day",
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: "A topic accepts messages of one type, its attribute message.type: by default "
    "NORMAL; others are FIFO (message groups), DELAY, PRIORITY and TRANSACTION",
    Code.UNAUTHORIZED: "Check options 'accessKey' and 'secretKey'",
    Code.FORBIDDEN: "Check the permissions of this user, and options 'accessKey' and 'secretKey'",
    Code.CONSUMER_GROUP_NOT_FOUND: "Create the group: Admin.create_group at the brokers' name server (port 9876), or "
    "mqadmin updateSubGroup",
    Code.TOO_MANY_REQUESTS: "The Proxy or its broker is overloaded: send less, or give it more resources",
    Code.NOT_IMPLEMENTED: REMOTING_REMEDY,
    Code.UNSUPPORTED: REMOTING_REMEDY,
}
_NAME_MISMATCH = ("Hostname Verification Check failed", "Peer name")
_UNTRUSTED_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed")
_NO_TLS = ("WRONG_VERSION_NUMBER", "wrong version number")
# Texts of brokers, which the Proxy returns with INTERNAL_SERVER_ERROR, although a retry would fail, too.
_BATCH_TOO_LARGE = "message body size exceeded"
_ILLEGAL_MESSAGE = ("the message is illegal", "timer message illegal")
# ``_UNKNOWN_TOPIC`` means that the Proxy does not know the topic, or cannot request it from brokers. ``_NO_QUEUE`` means that the
# topic's masters are down, or that the topic lacks the permission.
_UNKNOWN_TOPIC, _NO_QUEUE = "the expected type is UNSPECIFIED", ("no writable queue", "no readable queue")
_MESSAGE_TOO_LARGE = "larger than max"
_REQUEST_TOO_LARGE = "exceeds maximum size"  # from the server; ``_MESSAGE_TOO_LARGE`` is from gRPC in this process
_NO_GROUP = "group not found"
_INVALID_HEADERS = "Invalid metadata"  # an access key or token has a line break, for example from the end of a file
_RESET, _REQUEST_LIMIT = "RST_STREAM with error code 8", "its grpcMaxInboundMessageSize (130 MiB)"
_SOCKET_CLOSED = "Socket closed"
# gRPC could not connect, or could not resolve the address. Older versions of gRPC report "DNS resolution failed".
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")


def error_from_status(status: Any, addr: str, topic: str | None = None) -> RocketMQError:
    """Return the error for a status that is not a success."""
    code, remark = int(status.code), str(status.message) or None
    if code == Code.TOPIC_NOT_FOUND:
        return RouteNotFound("the Proxy knows no such topic", addr, Response.TOPIC_NOT_EXIST, topic, remark=remark)
    if code == Code.INTERNAL_SERVER_ERROR and _BATCH_TOO_LARGE in (remark or ""):
        text = "with the properties that the Proxy adds to each message, the batch is larger than brokers accept"
        return MessageIllegal(text, addr, code, topic, remark=remark, remedy="Send fewer messages in a batch")
    if code == Code.INTERNAL_SERVER_ERROR and any(part in (remark or "") for part in _ILLEGAL_MESSAGE):
        return MessageIllegal("the broker rejects the message", addr, code, topic, remark=remark)
    if code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE and _UNKNOWN_TOPIC in (remark or ""):
        text = "the Proxy does not know the topic: it does not exist, or none of its brokers is up"
        return RouteNotFound(text, addr, Response.TOPIC_NOT_EXIST, topic, remark=remark)
    if code == Code.FORBIDDEN and any(part in (remark or "") for part in _NO_QUEUE):
        text = "no master of the topic is up, or the topic lacks the permission"
        return ServiceNotAvailable(text, addr, code, topic, remark=remark)
    if code in _ERROR_CLASSES:
        error_class: type[BrokerError] = _ERROR_CLASSES[code]
    elif Code.BAD_REQUEST <= code < Code.INTERNAL_ERROR:
        error_class = MessageIllegal
    else:
        error_class = ServerFault
    return error_class(_rejection_text(code), addr, code, topic, remark=remark, remedy=_REMEDIES.get(code))


def _rejection_text(code: int) -> str:
    name = Code(code).name if code in list(Code) else str(code)
    return f"the Proxy rejected the request: {name.lower().replace('_', ' ')}"


def error_from_grpc(status: str, details: str, addr: str, uses_tls: bool) -> RocketMQError:
    """Return the error for a call without an answer. ``status`` is the name of gRPC's status code, ``details`` its text."""
    error = _error_from_grpc(status, details, addr, uses_tls)
    error.unsent = status == "UNAVAILABLE" and any(part in details for part in _NO_CONNECTION)
    return error


def _error_from_grpc(status: str, details: str, addr: str, uses_tls: bool) -> RocketMQError:
    match status:
        case "DEADLINE_EXCEEDED":
            return CallTimeout("the Proxy did not answer in time", addr)
        case "UNIMPLEMENTED":
            return NotSupported(
                "the Proxy does not implement this over gRPC", addr, remark=details, remedy=REMOTING_REMEDY
            )
        # This case is the first, because gRPC checks the name after the chain of certificates.
        case "UNAVAILABLE" if any(part in details for part in _NAME_MISMATCH):
            return CertificateRefused(
                "the certificate of the Proxy has another name",
                addr,
                remark=details,
                remedy="Connect to a name in the certificate, or set option 'tlsServerName' to such a name",
            )
        case "UNAVAILABLE" if any(part in details for part in _UNTRUSTED_CERTIFICATE):
            return CertificateRefused(
                "the certificate of the Proxy is not trusted",
                addr,
                remark=details,
                remedy="Name the authority of the certificate with option 'tlsCaFile'",
            )
        case "UNAVAILABLE" if uses_tls and any(part in details for part in _NO_TLS):
            return ConnectionLost(
                "the server at this address does not support TLS", addr, remark=details, remedy="See option 'tls'"
            )
        case "UNAVAILABLE" | "CANCELLED":
            remedy = "Check that the Proxy runs and its gRPC port is reachable from here"
            remedy += "" if uses_tls else "; if it requires TLS, set option 'tls'"
            # A remoting server closes the connection, because it reads the first bytes of HTTP/2 as the length of a frame.
            if _SOCKET_CLOSED in details:
                remedy += (
                    ". If this is the port of a broker or name server, use the Proxy's port for gRPC, by default 8081"
                )
            if _RESET in details:
                remedy += f". If it runs, the request may be larger than the Proxy accepts, {_REQUEST_LIMIT}"
            return ConnectionLost("no connection to the Proxy", addr, remark=details, remedy=remedy)
        case "RESOURCE_EXHAUSTED" if _MESSAGE_TOO_LARGE in details:
            return LocalProtocolError("the message is larger than gRPC accepts", addr, remark=details)
        case "RESOURCE_EXHAUSTED" if _REQUEST_TOO_LARGE in details:
            return LocalProtocolError(
                "the request is larger than the Proxy accepts", addr, remark=details, remedy=f"See {_REQUEST_LIMIT}"
            )
        case "RESOURCE_EXHAUSTED":
            return BrokerBusy("the Proxy is overloaded", addr, remark=details)
        case "INTERNAL" if _INVALID_HEADERS in details:
            return LocalProtocolError(
                "gRPC cannot send these headers",
                addr,
                remedy="Remove line breaks and non-ASCII characters from the keys",
            )
        case "INVALID_ARGUMENT" if _NO_GROUP in details:
            # A Proxy in LOCAL mode creates no groups. So it may give this answer to the first settings of a member.
            code = Code.CONSUMER_GROUP_NOT_FOUND
            return GroupNotFound(
                "the Proxy does not know the group", addr, code, remark=details, remedy=_REMEDIES[code]
            )
        case "UNAUTHENTICATED" | "PERMISSION_DENIED":
            return AccessDenied("the Proxy denies access", addr, remark=details)
        case _:
            return RemoteProtocolError(f"gRPC failed with {status}: is this a RocketMQ Proxy?", addr, remark=details)
