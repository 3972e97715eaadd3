"""Names and numbers of the Proxy's protocol: package ``apache.rocketmq.v2``, service ``MessagingService``.

A test compares every row with the server reflection of a real Proxy. The tables contain only the fields that this package uses.
Other fields of an answer are ignored.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

PACKAGE = "apache.rocketmq.v2"
SERVICE = f"{PACKAGE}.MessagingService"


class ProtoField(NamedTuple):
    """A field of a message. ``kind`` is a scalar type, ``enum``, ``map`` (of strings), ``time``, ``duration`` or a message."""

    message: str
    name: str
    number: int
    kind: str
    repeated: bool


# Message, field, number, type; ``*`` after the type means repeated.
_TABLE = """
    Status                          code                     1 enum
    Status                          message                  2 string
    Resource                        resource_namespace       1 string
    Resource                        name                     2 string
    Address                         host                     1 string
    Address                         port                     2 int32
    Endpoints                       scheme                   1 enum
    Endpoints                       addresses                2 Address*
    Broker                          name                     1 string
    Broker                          id                       2 int32
    Broker                          endpoints                3 Endpoints
    MessageQueue                    topic                    1 Resource
    MessageQueue                    id                       2 int32
    MessageQueue                    permission               3 enum
    MessageQueue                    broker                   4 Broker
    MessageQueue                    accept_message_types     5 enum*
    FilterExpression                type                     1 enum
    FilterExpression                expression               2 string
    SubscriptionEntry               topic                    1 Resource
    SubscriptionEntry               expression               2 FilterExpression
    SystemProperties                tag                      1 string
    SystemProperties                keys                     2 string*
    SystemProperties                message_id               3 string
    SystemProperties                body_encoding            5 enum
    SystemProperties                message_type             6 enum
    SystemProperties                born_timestamp           7 time
    SystemProperties                born_host                8 string
    SystemProperties                store_timestamp          9 time
    SystemProperties                store_host              10 string
    SystemProperties                delivery_timestamp      11 time
    SystemProperties                receipt_handle          12 string
    SystemProperties                queue_id                13 int32
    SystemProperties                queue_offset            14 int64
    SystemProperties                delivery_attempt        16 int32
    SystemProperties                message_group           17 string
    SystemProperties                priority                22 int32
    Message                         topic                    1 Resource
    Message                         user_properties          2 map
    Message                         system_properties        3 SystemProperties
    Message                         body                     4 bytes
    QueryRouteRequest               topic                    1 Resource
    QueryRouteRequest               endpoints                2 Endpoints
    QueryRouteResponse              status                   1 Status
    QueryRouteResponse              message_queues           2 MessageQueue*
    SendMessageRequest              messages                 1 Message*
    SendResultEntry                 status                   1 Status
    SendResultEntry                 message_id               2 string
    SendResultEntry                 transaction_id           3 string
    SendResultEntry                 offset                   4 int64
    SendResultEntry                 recall_handle            5 string
    SendMessageResponse             status                   1 Status
    SendMessageResponse             entries                  2 SendResultEntry*
    RecallMessageRequest            topic                    1 Resource
    RecallMessageRequest            recall_handle            2 string
    RecallMessageResponse           status                   1 Status
    RecallMessageResponse           message_id               2 string
    EndTransactionRequest           topic                    1 Resource
    EndTransactionRequest           message_id               2 string
    EndTransactionRequest           transaction_id           3 string
    EndTransactionRequest           resolution               4 enum
    EndTransactionRequest           source                   5 enum
    EndTransactionResponse          status                   1 Status
    QueryAssignmentRequest          topic                    1 Resource
    QueryAssignmentRequest          group                    2 Resource
    QueryAssignmentRequest          endpoints                3 Endpoints
    Assignment                      message_queue            1 MessageQueue
    QueryAssignmentResponse         status                   1 Status
    QueryAssignmentResponse         assignments              2 Assignment*
    ReceiveMessageRequest           group                    1 Resource
    ReceiveMessageRequest           message_queue            2 MessageQueue
    ReceiveMessageRequest           filter_expression        3 FilterExpression
    ReceiveMessageRequest           batch_size               4 int32
    ReceiveMessageRequest           invisible_duration       5 duration
    ReceiveMessageRequest           auto_renew               6 bool
    ReceiveMessageRequest           long_polling_timeout     7 duration
    ReceiveMessageRequest           attempt_id               8 string
    ReceiveMessageResponse          status                   1 Status
    ReceiveMessageResponse          message                  2 Message
    AckMessageEntry                 message_id               1 string
    AckMessageEntry                 receipt_handle           2 string
    AckMessageRequest               group                    1 Resource
    AckMessageRequest               topic                    2 Resource
    AckMessageRequest               entries                  3 AckMessageEntry*
    AckMessageResultEntry           message_id               1 string
    AckMessageResultEntry           receipt_handle           2 string
    AckMessageResultEntry           status                   3 Status
    AckMessageResponse              status                   1 Status
    AckMessageResponse              entries                  2 AckMessageResultEntry*
    ChangeInvisibleDurationRequest  group                    1 Resource
    ChangeInvisibleDurationRequest  topic                    2 Resource
    ChangeInvisibleDurationRequest  receipt_handle           3 string
    ChangeInvisibleDurationRequest  invisible_duration       4 duration
    ChangeInvisibleDurationRequest  message_id               5 string
    ChangeInvisibleDurationResponse status                   1 Status
    ChangeInvisibleDurationResponse receipt_handle           2 string
    ForwardMessageToDeadLetterQueueRequest  group                  1 Resource
    ForwardMessageToDeadLetterQueueRequest  topic                  2 Resource
    ForwardMessageToDeadLetterQueueRequest  receipt_handle         3 string
    ForwardMessageToDeadLetterQueueRequest  message_id             4 string
    ForwardMessageToDeadLetterQueueRequest  delivery_attempt       5 int32
    ForwardMessageToDeadLetterQueueRequest  max_delivery_attempts  6 int32
    ForwardMessageToDeadLetterQueueResponse status                 1 Status
    HeartbeatRequest                group                    1 Resource
    HeartbeatRequest                client_type              2 enum
    HeartbeatResponse               status                   1 Status
    NotifyClientTerminationRequest  group                    1 Resource
    NotifyClientTerminationResponse status                   1 Status
    UA                              language                 1 enum
    UA                              version                  2 string
    UA                              platform                 3 string
    UA                              hostname                 4 string
    RetryPolicy                     max_attempts             1 int32
    RetryPolicy                     exponential_backoff      2 ExponentialBackoff
    RetryPolicy                     customized_backoff       3 CustomizedBackoff
    ExponentialBackoff              initial                  1 duration
    ExponentialBackoff              max                      2 duration
    ExponentialBackoff              multiplier               3 float
    CustomizedBackoff               next                     1 duration*
    Subscription                    group                    1 Resource
    Subscription                    subscriptions            2 SubscriptionEntry*
    Subscription                    fifo                     3 bool
    Subscription                    receive_batch_size       4 int32
    Subscription                    long_polling_timeout     5 duration
    Publishing                      topics                   1 Resource*
    Settings                        client_type              1 enum
    Settings                        access_point             2 Endpoints
    Settings                        backoff_policy           3 RetryPolicy
    Settings                        request_timeout          4 duration
    Settings                        publishing               5 Publishing
    Settings                        subscription             6 Subscription
    Settings                        user_agent               7 UA
    TelemetryCommand                status                   1 Status
    RecoverOrphanedTransactionCommand message                1 Message
    RecoverOrphanedTransactionCommand transaction_id         2 string
    TelemetryCommand                settings                 2 Settings
    TelemetryCommand                recover_orphaned_transaction_command 5 RecoverOrphanedTransactionCommand
"""


def _field(line: str) -> ProtoField:
    message, name, number, kind = line.split()
    return ProtoField(message, name, int(number), kind.rstrip("*"), kind.endswith("*"))


FIELDS = tuple(_field(line) for line in _TABLE.strip().splitlines())


class Rpc(NamedTuple):
    """An rpc of the service. A client-streaming rpc has many requests, a server-streaming rpc many answers."""

    name: str
    request: str
    response: str
    client_streaming: bool = False
    server_streaming: bool = False

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


def _rpc(name: str) -> Rpc:
    return Rpc(name, f"{name}Request", f"{name}Response")


QUERY_ROUTE = _rpc("QueryRoute")
SEND_MESSAGE = _rpc("SendMessage")
RECALL_MESSAGE = _rpc("RecallMessage")
END_TRANSACTION = _rpc("EndTransaction")
QUERY_ASSIGNMENT = _rpc("QueryAssignment")
RECEIVE_MESSAGE = Rpc("ReceiveMessage", "ReceiveMessageRequest", "ReceiveMessageResponse", server_streaming=True)
ACK_MESSAGE = _rpc("AckMessage")
CHANGE_INVISIBLE_DURATION = _rpc("ChangeInvisibleDuration")
FORWARD_TO_DEAD_LETTER_QUEUE = _rpc("ForwardMessageToDeadLetterQueue")
HEARTBEAT = _rpc("Heartbeat")
NOTIFY_CLIENT_TERMINATION = _rpc("NotifyClientTermination")
TELEMETRY = Rpc("Telemetry", "TelemetryCommand", "TelemetryCommand", True, True)

RPCS = (
    QUERY_ROUTE,
    SEND_MESSAGE,
    RECALL_MESSAGE,
    END_TRANSACTION,
    QUERY_ASSIGNMENT,
    RECEIVE_MESSAGE,
    ACK_MESSAGE,
    CHANGE_INVISIBLE_DURATION,
    FORWARD_TO_DEAD_LETTER_QUEUE,
    HEARTBEAT,
    NOTIFY_CLIENT_TERMINATION,
    TELEMETRY,
)


class Code(enum.IntEnum):
    """Status codes of answers."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    REQUEST_TIMEOUT = 40800
    TOO_MANY_REQUESTS = 42900
    INTERNAL_ERROR = 50000
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402
    UNSUPPORTED = 50500


class MessageType(enum.IntEnum):
    """The types of messages that a topic accepts; a message has exactly one type."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6


class Permission(enum.IntEnum):
    """Permissions of a queue in a route."""

    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4


class FilterType(enum.IntEnum):
    TAG = 1
    SQL = 2


class AddressScheme(enum.IntEnum):
    IPv4 = 1
    IPv6 = 2
    DOMAIN_NAME = 3


class Encoding(enum.IntEnum):
    """Encodings of a body. GZIP means any compression."""

    IDENTITY = 1
    GZIP = 2


class ClientType(enum.IntEnum):
    PRODUCER = 1
    SIMPLE_CONSUMER = 3


class TransactionResolution(enum.IntEnum):
    """Decisions on half messages."""

    COMMIT = 1
    ROLLBACK = 2


class TransactionSource(enum.IntEnum):
    """The cause of a decision: the producer decided, or it answers a check by the server."""

    SOURCE_CLIENT = 1
    SOURCE_SERVER_CHECK = 2


class Language(enum.IntEnum):
    PYTHON = 6


ENUMS: tuple[type[enum.IntEnum], ...] = (
    Code,
    MessageType,
    Permission,
    FilterType,
    AddressScheme,
    Encoding,
    ClientType,
    Language,
    TransactionResolution,
    TransactionSource,
)
