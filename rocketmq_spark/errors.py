"""The errors of this package. All errors are subclasses of ``RocketMQError``.

``code`` is stable (``ROCKETMQ_…``) and safe to match on; ``broker_code`` is the number that a broker or name server sent. All
constructor arguments may be given by position, because Python rebuilds an exception from its ``args``. Python rebuilds an
exception when Spark sends the exception to the driver, and when this package copies the exception for several callers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from rocketmq_spark.base import codes
from rocketmq_spark.base.logs import escaped


class RocketMQError(Exception):
    """Base class of all errors of this package. Parts that are unknown are None and are omitted from the text.

    Args:
        message: What happened.
        addr: The server, ``host:port``.
        broker_code: The response code of the server.
        topic: The topic concerned.
        queue: The queue concerned.
        remark: The text that the server sent.
        remedy: How to fix the problem: a sentence without its full stop.

    Class attributes: ``code`` names the error in logs; ``retriable`` is whether the same request may succeed later;
    ``refresh_route`` is whether to refresh the route before a retry.
    """

    code: ClassVar[str] = "ROCKETMQ_ERROR"
    retriable: ClassVar[bool] = False
    refresh_route: ClassVar[bool] = False
    _is_remark_multiline: ClassVar[bool] = False
    unsent = False  # whether it is certain that no byte of the request left this process
    # After a send of several requests, the results of the acknowledged messages, by message id.
    stored: Mapping[str, Any] = MappingProxyType({})
    # Ids of messages that were not sent, because an earlier message in their order was rejected.
    skipped_ids: Collection[str] = ()

    def __init__(
        self,
        message: str = "",
        addr: str | None = None,
        broker_code: int | None = None,
        topic: str | None = None,
        queue: str | None = None,
        remark: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, addr, broker_code, topic, queue, remark, remedy)
        self.message = message
        self.addr = addr
        self.broker_code = broker_code
        self.topic = topic
        self.queue = queue
        self.remark = remark
        self.remedy = remedy

    def __str__(self) -> str:
        facts = [
            f"{name} {escaped(str(value))}"
            for name, value in (
                ("at", self.addr),
                ("topic", self.topic),
                ("queue", self.queue),
                ("broker code", self.broker_code),
            )
            if value is not None
        ]
        text = f"[{self.code}] {self._shown_message()}"
        if facts:
            text += f" ({', '.join(facts)})"
        if self.remark:
            text += f": {self.remark if self._is_remark_multiline else escaped(str(self.remark))}"
        return f"{text}. {escaped(str(self.remedy))}" if self.remedy else text

    def _shown_message(self) -> str:
        return escaped(str(self.message))


def copy_error(error: RocketMQError) -> RocketMQError:
    """Return a copy of an exception, for an object that stores the exception, or for one of several callers. The copies share
    the cause.

    Copy and cause have no traceback, because a traceback keeps the frames of the first caller, and their objects, alive.
    """
    error_copy = copy.copy(error)
    error_copy.__cause__ = error.__cause__
    if error_copy.__cause__ is not None:
        error_copy.__cause__.__traceback__ = None
    return error_copy


class BrokerError(RocketMQError):
    """A broker or name server answered with a code that is not success."""

    code = "ROCKETMQ_BROKER"


class BrokerBusy(BrokerError):
    """Flow control (code 2 and similar): the request was not executed; retry after a pause."""

    code = "ROCKETMQ_BUSY"
    retriable = True


class ServiceNotAvailable(BrokerError):
    """The broker accepts no writes: its disk is full, it is a slave, or it is shutting down."""

    code = "ROCKETMQ_NOT_AVAILABLE"
    retriable = True
    refresh_route = True


class ServerFault(BrokerError):
    """Code 1: an exception on the server. Often permanent (a malformed field), sometimes a start-up race."""

    code = "ROCKETMQ_SYSTEM_ERROR"


class AccessDenied(BrokerError):
    """Authentication, authorization or a permission bit of the broker or topic denies the request."""

    code = "ROCKETMQ_ACCESS_DENIED"


class NotReadable(BrokerError):
    """The broker or the topic has no read permission at the moment; the permission may come back."""

    code = "ROCKETMQ_NOT_READABLE"
    retriable = True


class TopicNotFound(BrokerError):
    """A broker does not know the topic although a route names the broker; it may be starting, or the topic was deleted."""

    code = "ROCKETMQ_TOPIC_NOT_FOUND"
    retriable = True
    refresh_route = True
    silent_name_servers: Collection[str] = ()  # name servers that did not answer, and may know the topic


class MessageIllegal(BrokerError):
    """The broker rejects this message permanently because of its size, properties or delay."""

    code = "ROCKETMQ_MESSAGE_ILLEGAL"


class InvalidParameter(BrokerError):
    """The queue id, topic name or group name is invalid."""

    code = "ROCKETMQ_INVALID_PARAMETER"
    refresh_route = True


class NotFound(BrokerError):
    """The broker has no such committed offset, index entry or message."""

    code = "ROCKETMQ_NOT_FOUND"


class GroupNotFound(BrokerError):
    """The broker does not know the consumer group."""

    code = "ROCKETMQ_GROUP_NOT_FOUND"


class NotSupported(BrokerError):
    """The server does not implement the request: wrong kind of server, or too old."""

    code = "ROCKETMQ_NOT_SUPPORTED"


class GoAway(BrokerError):
    """The server is shutting down and rejects all requests on this connection; the next request opens a new connection."""

    code = "ROCKETMQ_GO_AWAY"
    retriable = True
    refresh_route = True


class RouteNotFound(RocketMQError):
    """The name server knows no route: the topic does not exist, or all its brokers are down."""

    code = "ROCKETMQ_ROUTE_NOT_FOUND"
    retriable = True
    refresh_route = True


class BrokerNotFound(RocketMQError):
    """A broker name has no usable address in the route at the moment."""

    code = "ROCKETMQ_BROKER_NOT_FOUND"
    retriable = True
    refresh_route = True


class ConnectionLost(RocketMQError):
    """The connection could not be made, or broke before the answer came."""

    code = "ROCKETMQ_CONNECTION_LOST"
    retriable = True
    refresh_route = True


class CertificateRefused(ConnectionLost):
    """The server's certificate is not trusted or has another name. This error is never retried, like Kafka's
    ``SslAuthenticationException``.
    """

    code = "ROCKETMQ_CERTIFICATE_REFUSED"
    retriable = False
    refresh_route = False


class CallTimeout(RocketMQError):
    """No answer arrived in time. The server may have executed the request."""

    code = "ROCKETMQ_TIMEOUT"
    retriable = True
    refresh_route = True  # the server may come back with another address


class ReplyTimeout(CallTimeout):
    """A request was stored, but no reply arrived in time. A consumer may have processed the request, or may process it later."""

    code = "ROCKETMQ_REPLY_TIMEOUT"
    retriable = False
    refresh_route = False


class LocalProtocolError(RocketMQError):
    """The request cannot be encoded, or the object is in a state that does not permit it. Nothing was sent."""

    code = "ROCKETMQ_LOCAL_PROTOCOL"


class RemoteProtocolError(RocketMQError):
    """The peer sent bytes that are not RocketMQ's remoting protocol."""

    code = "ROCKETMQ_REMOTE_PROTOCOL"


class OptionError(RocketMQError, ValueError):
    """One or more options are wrong. The message lists all problems."""

    code = "ROCKETMQ_OPTION"
    problems: Sequence[str] = ()  # empty if there is only one problem, which is the message

    @classmethod
    def of(cls, problems: Sequence[str]) -> OptionError:
        """One error for all ``problems``, each a full sentence without its full stop."""
        if len(problems) == 1:
            return cls(problems[0])
        error = cls(_bulleted_list(problems))
        error.problems = tuple(problems)
        return error

    def _shown_message(self) -> str:
        return _bulleted_list(map(escaped, self.problems)) if self.problems else super()._shown_message()


def _bulleted_list(problems: Iterable[str]) -> str:
    return "".join(f"\n  - {problem}" for problem in problems)


class CheckpointMismatch(OptionError):
    """The checkpoint belongs to another query: to another cluster, namespace, environment or set of topics."""

    code = "ROCKETMQ_CHECKPOINT_MISMATCH"


class MessageRefused(RocketMQError, ValueError):
    """Every broker would reject these rows or messages, so they were not sent. Other messages of the same call or write may be
    sent.
    """

    code = "ROCKETMQ_MESSAGE_REFUSED"


class SelectorError(RocketMQError, ValueError):
    """A queue selector failed, or chose no queue. The message was not sent. Other messages of the same call may be sent."""

    code = "ROCKETMQ_SELECTOR"


class SendFailed(RocketMQError):
    """Messages were not acknowledged despite retries, not sent because others failed, or stored less safely than required.

    The text of the error says which of these happened.
    """

    code = "ROCKETMQ_SEND_FAILED"


class SpoolError(RocketMQError):
    """The spool cannot be opened, read or written: it is in use or damaged, or its disk fails."""

    code = "ROCKETMQ_SPOOL"


class SpoolFull(SpoolError):
    """The spool holds as much as option ``spoolMaxBytes`` allows, or its disk is full."""

    code = "ROCKETMQ_SPOOL_FULL"


class ClosedError(RocketMQError):
    """The object was closed, or belongs to the parent of this forked process."""

    code = "ROCKETMQ_CLOSED"


class OffsetError(RocketMQError, ValueError):
    """Offsets, an offset file or a checkpoint are malformed, unreadable, or do not fit the topic; or offsets cannot be set now.

    Offsets cannot be set while the consumer group has members, unless ``force`` is set. The ``seek`` methods, ``pause`` and
    ``resume`` of a ``PullConsumer`` raise this error for a queue that is not assigned to it.
    """

    code = "ROCKETMQ_OFFSET"


class DataLossError(RocketMQError):
    """A read needs offsets that no longer exist; see ``failOnDataLoss``."""

    code = "ROCKETMQ_DATA_LOSS"


class UnprovedError(RocketMQError):
    """It cannot be proved whether rows or messages are already stored, so none is sent again.

    This error occurs only with ``deliveryGuarantee`` exactly-once, or with ``confirmAmbiguous``.
    """

    code = "ROCKETMQ_UNPROVED"


class DecodeError(RocketMQError):
    """A stored message could not be decoded."""

    code = "ROCKETMQ_DECODE"


class LocalBrokerError(RocketMQError):
    """The local broker could not be downloaded, started or reached."""

    code = "ROCKETMQ_LOCAL_BROKER"
    _is_remark_multiline = True  # the end of a server's log


_CLASSES_BY_CODE: dict[int, type[BrokerError]] = {
    codes.Response.SYSTEM_ERROR: ServerFault,
    codes.Response.SYSTEM_BUSY: BrokerBusy,
    codes.Response.REQUEST_CODE_NOT_SUPPORTED: NotSupported,
    codes.Response.MESSAGE_ILLEGAL: MessageIllegal,
    codes.Response.SERVICE_NOT_AVAILABLE: ServiceNotAvailable,
    codes.Response.NO_PERMISSION: AccessDenied,
    codes.Response.TOPIC_NOT_EXIST: TopicNotFound,
    codes.Response.QUERY_NOT_FOUND: NotFound,
    codes.Response.SUBSCRIPTION_GROUP_NOT_EXIST: GroupNotFound,
    codes.Response.INVALID_PARAMETER: InvalidParameter,
    codes.Response.FLOW_CONTROL: BrokerBusy,
    codes.Response.GO_AWAY: GoAway,
}


# Brokers with ACL 1.0, and Proxies (Remoting port), have no code for denied access, and report the exception as a system error.
_DENIED_REMARK = re.compile(
    r"org\.apache\.rocketmq\.acl\.common\.AclException"
    r"|User:.* (has no permission|(is )?not found|is disable)|check signature failed|username cannot be null"
)


def error_for(broker_code: int, remark: str = "") -> type[BrokerError]:
    """Return the class for a broker's response code and text; ``BrokerError`` for codes without a class."""
    error_class = _CLASSES_BY_CODE.get(broker_code, BrokerError)
    return AccessDenied if error_class is ServerFault and _DENIED_REMARK.match(remark) else error_class
