"""Protobuf messages of the Proxy's protocol: as classes, and as bytes for fields that are written once per message of a batch.
Also the errors for the Proxy's status codes and those of gRPC.

The classes are made from the table in ``facts``, in a separate pool, so that they do not collide with messages of the same names
that another library registers in the common pool. The file's edition distinguishes unset fields from zeros, and
rejects text that is not UTF-8. Enumerations are plain numbers: they have the same bytes, and values newer than the table are
accepted.

``field_key``, ``number`` and ``content_field`` write fields as bytes, because protobuf's objects cost 8 µs a message in Python, several
times the time that the Proxy needs. Fields may be in any order, so fields that many messages share are encoded once.

``error_from_status`` and ``error_from_grpc`` are pure. They return the classes in ``errors``, so that callers can treat both transports alike. The
numbers are the Proxy's.
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
_CACHED_NUMBERS = 1 << 14


class _Varints(dict[int, bytes]):
    """Numbers in protobuf's encoding; small ones, which are needed often, are cached."""

    def __missing__(self, number: int) -> bytes:
        encoded, rest = bytearray(), number
        while rest > 0x7F:
            encoded.append(rest & 0x7F | 0x80)
            rest >>= 7
        encoded.append(rest)
        varint = bytes(encoded)
        if number < _CACHED_NUMBERS:
            self[number] = varint
        return varint


# Encoded lengths and other numbers that are not negative.
VARINTS = _Varints()


@functools.cache
def field_key(message: str, name: str) -> bytes:
    """The encoded key of a field; its length and content, or its number, follow."""
    (field,) = (one for one in FIELDS if (one.message, one.name) == (message, name))
    delimited = field.kind not in ("enum", "int32", "int64", "bool")
    return VARINTS[field.number << 3 | (_LENGTH_DELIMITED if delimited else _VARINT)]


def number_field(message: str, name: str, value: int) -> bytes:
    """An encoded field of kind ``enum``, or with a number that is not negative."""
    return field_key(message, name) + VARINTS[value]


def content_field(message: str, name: str, data: bytes) -> bytes:
    """An encoded field whose content is UTF-8 text, bytes, or the fields of another message."""
    return field_key(message, name) + VARINTS[len(data)] + data


# An entry of a map is a message of two fields.
MAP_KEY, MAP_VALUE = (VARINTS[which << 3 | _LENGTH_DELIMITED] for which in (1, 2))


_FILE = "rocketmq_spark/grpc_proxy.proto"
# Waits of more than some centuries are errors in locks and clocks, and no caller needs more than a year.
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
    """The class of a message in the table."""
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
    """Set a field of kind ``time``."""
    timestamp.seconds, rest = divmod(epoch_ms, 1000)
    timestamp.nanos = rest * 1_000_000


def get_ms(timestamp: Any) -> int:
    """The value of a field of kind ``time``, in ms since 1970."""
    return int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000


def set_seconds(duration: Any, seconds: float) -> None:
    """Set a field of kind ``duration``."""
    us = round(seconds * 1_000_000)
    duration.seconds, rest = divmod(us, 1_000_000)
    duration.nanos = rest * 1000


def get_seconds(duration: Any) -> float:
    """The value of a field of kind ``duration`` in seconds, from 0 to a year."""
    return float(min(max(0.0, duration.seconds + duration.nanos / 1e9), _MAX_SECONDS))


REMOTING_REMEDY = "Use the Proxy's Remoting port: transport=remoting, with it as nameServer"
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
    Code.ILLEGAL_DELIVERY_TIME: "A Proxy takes delays up to its maxDelayTimeMills, a day unless it is configured otherwise",
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: "A topic takes messages of one type, its attribute message.type: NORMAL unless it "
    "was made with FIFO (message groups), DELAY, PRIORITY or TRANSACTION",
    Code.UNAUTHORIZED: "Check options 'accessKey' and 'secretKey'",
    Code.FORBIDDEN: "Check what this user may do, and options 'accessKey' and 'secretKey'",
    Code.CONSUMER_GROUP_NOT_FOUND: "Create the group: Admin.create_group at the brokers' name server (port 9876), or "
    "mqadmin updateSubGroup",
    Code.TOO_MANY_REQUESTS: "The Proxy or its broker is overloaded: send less, or give it more",
    Code.NOT_IMPLEMENTED: REMOTING_REMEDY,
    Code.UNSUPPORTED: REMOTING_REMEDY,
}
_NAME_MISMATCH = ("Hostname Verification Check failed", "Peer name")
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed")
_NO_TLS = ("WRONG_VERSION_NUMBER", "wrong version number")
_BATCH_TOO_LARGE = "message body size exceeded"  # for a batch; a retry would fail, too
_ILLEGAL_MESSAGE = (
    "the message is illegal",
    "timer message illegal",
)  # texts of brokers, with a Proxy's internal error code
# For a topic that a Proxy does not know, or cannot request from brokers; for one whose masters are down, or without the
# permission.
_UNKNOWN_TOPIC, _NO_QUEUE = "the expected type is UNSPECIFIED", ("no writable queue", "no readable queue")
_MESSAGE_TOO_LARGE = "larger than max"
_REQUEST_TOO_LARGE = "exceeds maximum size"  # in the answer of a server
_NO_GROUP = "group not found"
_INVALID_HEADERS = "Invalid metadata"  # for an access key or token with a line break, for example from a file
_RESET, _REQUEST_LIMIT = "RST_STREAM with error code 8", "its grpcMaxInboundMessageSize (130 MiB)"
_SOCKET_CLOSED = "Socket closed"
# gRPC could not connect, or did not resolve the address; the last text is that of older versions.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")


def error_from_status(status: Any, addr: str, topic: str | None = None) -> RocketMQError:
    """The error for a status that is not a success."""
    code, remark = int(status.code), str(status.message) or None
    if code == Code.TOPIC_NOT_FOUND:
        return RouteNotFound("the Proxy knows no such topic", addr, Response.TOPIC_NOT_EXIST, topic, remark=remark)
    if code == Code.INTERNAL_SERVER_ERROR and _BATCH_TOO_LARGE in (remark or ""):
        text = "with what the Proxy adds to each message, the batch is larger than brokers take"
        return MessageIllegal(text, addr, code, topic, remark=remark, remedy="Send fewer messages in a batch")
    if code == Code.INTERNAL_SERVER_ERROR and any(part in (remark or "") for part in _ILLEGAL_MESSAGE):
        return MessageIllegal("the broker refuses the message", addr, code, topic, remark=remark)
    if code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE and _UNKNOWN_TOPIC in (remark or ""):
        text = "the Proxy does not know the topic: there is no such one, or none of its brokers is up"
        return RouteNotFound(text, addr, Response.TOPIC_NOT_EXIST, topic, remark=remark)
    if code == Code.FORBIDDEN and any(part in (remark or "") for part in _NO_QUEUE):
        text = "no master of the topic is up, or it lacks the permission"
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
    return f"the Proxy refused: {name.lower().replace('_', ' ')}"


def error_from_grpc(status: str, details: str, addr: str, tls: bool) -> RocketMQError:
    """The error for a call without an answer; ``status`` is the name of gRPC's code, ``details`` its text."""
    error = _error_from_grpc(status, details, addr, tls)
    error.unsent = status == "UNAVAILABLE" and any(part in details for part in _NO_CONNECTION)
    return error


def _error_from_grpc(status: str, details: str, addr: str, tls: bool) -> RocketMQError:
    match status:
        case "DEADLINE_EXCEEDED":
            return CallTimeout("the Proxy did not answer in time", addr)
        case "UNIMPLEMENTED":
            return NotSupported(
                "the Proxy does not implement this over gRPC", addr, remark=details, remedy=REMOTING_REMEDY
            )
        case "UNAVAILABLE" if any(part in details for part in _NAME_MISMATCH):  # gRPC checks the name after the chain
            return CertificateRefused(
                "the certificate of the Proxy has another name",
                addr,
                remark=details,
                remedy="Connect to a name in the certificate, or set option 'tlsServerName' to one",
            )
        case "UNAVAILABLE" if any(part in details for part in _UNTRUSTED):
            return CertificateRefused(
                "the certificate of the Proxy is not trusted",
                addr,
                remark=details,
                remedy="Name its authority with option 'tlsCaFile'",
            )
        case "UNAVAILABLE" if tls and any(part in details for part in _NO_TLS):
            return ConnectionLost(
                "the server at this address does not support TLS", addr, remark=details, remedy="See option 'tls'"
            )
        case "UNAVAILABLE" | "CANCELLED":
            remedy = "See whether the Proxy runs and its gRPC port is reachable from here"
            remedy += "" if tls else "; if it wants TLS, set option 'tls'"
            if (
                _SOCKET_CLOSED in details
            ):  # by a remoting server, which reads the first bytes of HTTP/2 as a frame's length
                remedy += (
                    ". The port of a broker or name server ends connections so: expected the Proxy's for gRPC, 8081"
                )
            if _RESET in details:
                remedy += f". If it runs: a Proxy ends so the request that is larger than it takes, {_REQUEST_LIMIT}"
            return ConnectionLost("no connection to the Proxy", addr, remark=details, remedy=remedy)
        case "RESOURCE_EXHAUSTED" if _MESSAGE_TOO_LARGE in details:
            return LocalProtocolError("a message larger than gRPC accepts", addr, remark=details)
        case "RESOURCE_EXHAUSTED" if _REQUEST_TOO_LARGE in details:
            return LocalProtocolError(
                "a request larger than the Proxy accepts", addr, remark=details, remedy=f"See {_REQUEST_LIMIT}"
            )
        case "RESOURCE_EXHAUSTED":
            return BrokerBusy("the Proxy is overloaded", addr, remark=details)
        case "INTERNAL" if _INVALID_HEADERS in details:
            return LocalProtocolError(
                "gRPC does not send these headers",
                addr,
                remedy="Remove line ends and non-ASCII letters from the keys",
            )
        case "INVALID_ARGUMENT" if _NO_GROUP in details:
            # The answer to the first telemetry of a member: a Proxy in LOCAL mode creates no groups.
            code = Code.CONSUMER_GROUP_NOT_FOUND
            return GroupNotFound(
                "the Proxy does not know the group", addr, code, remark=details, remedy=_REMEDIES[code]
            )
        case "UNAUTHENTICATED" | "PERMISSION_DENIED":
            return AccessDenied("the Proxy denies access", addr, remark=details)
        case _:
            return RemoteProtocolError(f"gRPC failed with {status}: is this a RocketMQ Proxy?", addr, remark=details)
