"""Every number and every name that RocketMQ uses on the wire, each defined once.

``wire/`` encodes them; ``errors.py`` and the modules that import it handle errors. The names follow the Java classes
(RequestCode, ResponseCode, MessageSysFlag, MessageConst), so that a reader can look them up there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

# The version that this client reports, and to which servers adapt: 513 is 5.5.0. From 401 on, name servers write routes as
# standard JSON. Above 475, a server that shuts down answers GO_AWAY before it closes connections.
VERSION = 513
FIRST_VERSION_WITH_TIMERS = 412  # 5.0.0; older brokers take timer properties for user properties, and ignore the delay
FIRST_VERSION_WITH_SEARCH_BOUNDARY = 440  # 5.1.4; older brokers answer a search by time with the nearest message
FIRST_VERSION_WITH_ATTRIBUTES = FIRST_VERSION_WITH_TIMERS  # older brokers ignore attributes of topics
# 5.3.2; a broker of 5.3.0 or 5.3.1 reports success, but does not change the user.
FIRST_VERSION_THAT_UPDATES_USERS = 476
TIMER_MAX_DELAY_S = 3 * 24 * 3600  # a broker's timerMaxDelaySec unless it is configured otherwise
# Half of Java's largest long. A broker adds the current time to a delay; if the sum overflows to a negative number, the broker
# delivers the message at once.
LONGEST_DELAY_MS = 1 << 62


class SerializeType(enum.IntEnum):
    """The encoding of a frame's header; one byte of each frame says which encoding it is."""

    JSON = 0
    ROCKETMQ = 1


class LanguageCode(enum.IntEnum):
    """The peer's implementation language, one byte in a binary header and a name in a JSON header."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


class Flag(enum.IntFlag):
    """Bits of a header's ``flag``. The flag of a request that waits for an answer is 0."""

    RESPONSE = 1
    ONEWAY = 2


class Request(enum.IntEnum):
    """Request codes. If a code has no comment, clients send this request to servers. ``wire/rpc.py`` has the fields of all
    requests.
    """

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39  # broker to client
    NOTIFY_CONSUMER_IDS_CHANGED = 40  # broker to client
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    RESET_CONSUMER_CLIENT_OFFSET = 220  # broker to client
    GET_CONSUMER_STATUS_FROM_CLIENT = 221  # broker to client
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    GET_CONSUMER_RUNNING_INFO = 307  # both directions
    CONSUME_MESSAGE_DIRECTLY = 309  # both directions
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326  # broker to client
    GET_TOPIC_CONFIG = 351
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_LIST_ACL = 3010


# Limits for the JSON bodies of answers. The second limit is for answers with an entry for each queue: statistics of 200,000
# queues have 40 MiB.
MAX_JSON_BYTES, MAX_TABLE_BYTES = 8 << 20, 64 << 20
_MAX_UNREAD_BODY_BYTES = 64 << 10  # for answers whose body no code reads
_MAX_ANSWER_BYTES_BY_REQUEST: Mapping[int, int] = {
    **dict.fromkeys(
        (
            Request.GET_TOPIC_STATS_INFO,
            Request.GET_CONSUME_STATS,
            Request.INVOKE_BROKER_TO_RESET_OFFSET,
            Request.GET_CONSUMER_RUNNING_INFO,
        ),
        MAX_TABLE_BYTES,
    ),
    **dict.fromkeys(
        (
            Request.SEND_MESSAGE,
            Request.SEND_MESSAGE_V2,
            Request.SEND_BATCH_MESSAGE,
            Request.SEND_REPLY_MESSAGE_V2,
            Request.RECALL_MESSAGE,
            Request.END_TRANSACTION,
            Request.CONSUMER_SEND_MSG_BACK,
            Request.HEART_BEAT,
            Request.UNREGISTER_CLIENT,
            Request.QUERY_CONSUMER_OFFSET,
            Request.UPDATE_CONSUMER_OFFSET,
            Request.SEARCH_OFFSET_BY_TIMESTAMP,
            Request.GET_MAX_OFFSET,
            Request.GET_MIN_OFFSET,
            Request.GET_EARLIEST_MSG_STORETIME,
        ),
        _MAX_UNREAD_BODY_BYTES,
    ),
}
# Requests whose answers are messages. These answers are limited only by the largest frame.
_REQUESTS_ANSWERED_WITH_MESSAGES = frozenset({Request.PULL_MESSAGE, Request.QUERY_MESSAGE, Request.VIEW_MESSAGE_BY_ID})


def max_answer_bytes(request_code: int) -> int | None:
    """The most bytes that the body of an answer to a request may have; None for messages."""
    return (
        None
        if request_code in _REQUESTS_ANSWERED_WITH_MESSAGES
        else _MAX_ANSWER_BYTES_BY_REQUEST.get(request_code, MAX_JSON_BYTES)
    )


class Response(enum.IntEnum):
    """Response codes. The meaning of a code depends on the request, so match on (request, code): "not found" is 1, 17 or 22."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    LMQ_QUOTA_EXCEEDED = 2017
    LITE_QUOTA_EXCEEDED = 2018
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


class SysFlag(enum.IntFlag):
    """Bits of a message's system flag. Compute the flag for each send, and never copy it from a received message: if the flag's
    address bits do not fit the connection, the broker acknowledges the message and then loses it.
    """

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    BORNHOST_V6 = 0x10
    STOREHOST_V6 = 0x20
    NEED_UNWRAP = 0x40
    INNER_BATCH = 0x80
    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300


COMPRESSION_MASK = 0x700
TRANSACTION_MASK = 0xC
# As in Java, a body is unpacked only if both flags are set.
INNER_BATCH_MASK = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH
OFFSET_RESET = "OFFSET_RESET"  # the remark of an answer to a pull, if an operator has reset the group's offset
READ_FORBIDDEN_TYPES = frozenset({1, 3})  # ``forbiddenType`` of a pull: the broker or the topic has no read permission
# Brokers before 5.0 return this remark instead of ``forbiddenType``.
PULL_FORBIDDEN_REMARK = "pulling message is forbidden"
MAX_INT = (1 << 31) - 1  # the largest number in a field of four bytes
SENDABLE_SYS_FLAGS = SysFlag.COMPRESSED | COMPRESSION_MASK | SysFlag.TRANSACTION_PREPARED


class PullSysFlag(enum.IntFlag):
    """Bits of a pull request. A reader that keeps its offsets itself sends only SUBSCRIPTION."""

    COMMIT_OFFSET = 0x1
    SUSPEND = 0x2
    SUBSCRIPTION = 0x4
    CLASS_FILTER = 0x8
    LITE_PULL = 0x10


class Perm(enum.IntFlag):
    """Permission bits of a topic in a route."""

    INHERIT = 0x1
    WRITE = 0x2
    READ = 0x4


MESSAGE_MAGIC_V1 = 0xDAA320A7
MESSAGE_MAGIC_V2 = 0xDAA320AB
BLANK_MAGIC = 0xCBD43194  # padding at the end of a data file, never sent to clients

# The attribute of compaction topics and its value. Brokers keep only the last message of each key of such a topic.
CLEANUP_POLICY, COMPACTION = "cleanup.policy", "COMPACTION"
QUEUE_TYPE, BATCH_QUEUE = "queue.type", "BatchCQ"
MESSAGE_TYPE = "message.type"  # its value is a ``TopicType``; a topic without this attribute is NORMAL

# Limits, in characters for names and in bytes otherwise. The broker enforces the limits; the client checks a message before it
# sends the message.
MAX_TOPIC_LENGTH = 127
MAX_RETRY_OR_DLQ_TOPIC_LENGTH = 255
MAX_GROUP_LENGTH = 120
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_BATCH_BYTES = MAX_BODY_BYTES
# The maximum number of queues of a topic on all brokers. No real topic has so many queues, so a larger number in an answer is a
# mistake or an attack.
MAX_QUEUES = 200_000
MAX_FRAME_BYTES = 16 * 1024 * 1024 - 4  # what a server accepts as ``length``; its answers may be larger
MAX_PROPERTIES_BYTES = 32767
BROKER_PROPERTIES_RESERVE = 256  # what the broker may add to the properties of a single message
SINGLE_MAX_PROPERTIES_BYTES = MAX_PROPERTIES_BYTES - BROKER_PROPERTIES_RESERVE
# The property in which the sink stores a row's id (option ``messageId``). Readers show it, because it is a user property.
ROW_ID = "SPARK_ROW_ID"
# The broker multiplies the number of messages of a pull by 20. If the product were above the largest int, the broker would
# search fewer offsets.
MAX_PULL_MESSAGES = 107_374_182

DELAY_LEVELS = (
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h",
)  # fmt: skip
# The delay level after a message's first failure; each further failure increases the level by one.
FIRST_RETRY_LEVEL = 3


class TopicType:
    """Values of a topic's attribute ``message.type``: which messages a Proxy accepts for the topic."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    PRIORITY = "PRIORITY"


class Property:
    """Names of message properties as they are stored."""

    KEYS = "KEYS"
    TAGS = "TAGS"
    WAIT = "WAIT"
    DELAY = "DELAY"
    SHARDING_KEY = "__SHARDINGKEY"
    UNIQ_KEY = "UNIQ_KEY"
    PRODUCER_GROUP = "PGROUP"
    INSTANCE_ID = "INSTANCE_ID"

    TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
    TIMER_DELAY_LEVEL = "TIMER_DELAY_LEVEL"
    TIMER_OUT_MS = "TIMER_OUT_MS"
    TIMER_ENQUEUE_MS = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES = "TIMER_ROLL_TIMES"
    TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"

    TRANSACTION_PREPARED = "TRAN_MSG"
    TRANSACTION_ID = "__transactionId__"
    TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
    CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"

    RETRY_TOPIC = "RETRY_TOPIC"
    ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
    ORIGIN_GROUP = "ORIGIN_GROUP"
    RECONSUME_TIME = "RECONSUME_TIME"
    MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
    DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
    CONSUME_START_TIME = "CONSUME_START_TIME"

    REAL_TOPIC = "REAL_TOPIC"
    REAL_QUEUE_ID = "REAL_QID"
    MSG_REGION = "MSG_REGION"
    TRACE_ON = "TRACE_ON"
    TRACE_CONTEXT = "TRACE_CONTEXT"
    CLUSTER = "CLUSTER"
    MESSAGE_TYPE = "MSG_TYPE"
    PRIORITY = "_SYS_MSG_PRIORITY_"
    BORN_HOST = "__BORNHOST"
    BORN_TIMESTAMP = "BORN_TIMESTAMP"
    LITE_TOPIC = "__LITE_TOPIC"
    CRC32 = "__CRC32#"

    BUYER_ID = "BUYER_ID"
    TRANSFER_FLAG = "TRANSFER_FLAG"
    CORRECTION_FLAG = "CORRECTION_FLAG"
    MQ2_FLAG = "MQ2_FLAG"
    REDIRECT = "REDIRECT"
    EXTEND_UNIQ_INFO = "EXTEND_UNIQ_INFO"
    DUP_INFO = "DUP_INFO"
    FORWARD_QUEUE_ID = "PROPERTY_FORWARD_QUEUE_ID"

    CORRELATION_ID = "CORRELATION_ID"
    REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
    TTL = "TTL"
    ARRIVE_TIME = "ARRIVE_TIME"
    PUSH_REPLY_TIME = "PUSH_REPLY_TIME"

    POP_CK = "POP_CK"
    POP_CK_OFFSET = "POP_CK_OFFSET"
    FIRST_POP_TIME = "1ST_POP_TIME"

    INNER_NUM = "INNER_NUM"
    INNER_BASE = "INNER_BASE"
    INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"

    MIN_OFFSET = "MIN_OFFSET"
    MAX_OFFSET = "MAX_OFFSET"
    TRANSIENT_TOPIC_SYS_FLAG = "__RMQ.TRANSIENT.TOPIC_SYS_FLAG"
    TRANSIENT_GROUP_SYS_FLAG = "__RMQ.TRANSIENT.GROUP_SYS_FLAG"


TRANSIENT_PROPERTY_PREFIX = "__RMQ.TRANSIENT."
KEY_SEPARATOR = " "

# Names that RocketMQ reserves: readers omit them from the user's properties, and producers reject them in messages.
RESERVED_PROPERTIES = frozenset(
    value for name, value in vars(Property).items() if not name.startswith("__") and isinstance(value, str)
)

RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
NAMESPACE_SEPARATOR = "%"
REPLY_SUFFIX = "_REPLY_TOPIC"  # ends the name of a cluster's topic for replies

AUTO_CREATE_TOPIC = "TBW102"  # template of automatically created topics
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
NO_SEND_TOPICS = frozenset(  # topics to which brokers reject each send with code 16
    (
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    )
)
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
SYSTEM_TOPICS = NO_SEND_TOPICS | {AUTO_CREATE_TOPIC, "BenchmarkTest", TRACE_TOPIC, "CHECKPOINT_TOPIC"}

SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
SYSTEM_GROUPS = frozenset(
    (
        "DEFAULT_PRODUCER",
        "DEFAULT_CONSUMER",
        "TOOLS_CONSUMER",
        "SCHEDULE_CONSUMER",
        "FILTERSRV_CONSUMER",
        "__MONITOR_CONSUMER",
        "CLIENT_INNER_PRODUCER",
        "SELF_TEST_P_GROUP",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PULL",
    )
)


def timer_due_ms(properties: Mapping[str, str], born_ms: int) -> int | None:
    """Return when a message with a timer is due (ms since 1970); a delay counts from ``born_ms``. None if the message has no
    timer.
    """
    if Property.TIMER_DELIVER_MS in properties:
        return int(properties[Property.TIMER_DELIVER_MS])
    if Property.TIMER_DELAY_MS in properties:
        return born_ms + int(properties[Property.TIMER_DELAY_MS])
    if Property.TIMER_DELAY_SEC in properties:
        return born_ms + 1000 * int(properties[Property.TIMER_DELAY_SEC])
    return None
