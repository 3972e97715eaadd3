"""Which roles and options each transport (option ``transport``) supports, and why it does not support the others. Pure.

Over gRPC the Proxy chooses queues and implements no requests about offsets. Options that choose queues, or need such requests,
are rejected here, before a connection is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rocketmq_spark.base.codes import TopicType

REMOTING, GRPC = "remoting", "grpc"
_REMOTING_REMEDY = (
    "use transport=remoting, with the brokers' name server or the Remoting port of a Proxy (8080 unless it was changed)"
)
_READ_REMEDY = f"{_REMOTING_REMEDY} as nameServer"
_ADMIN_REMEDY = "use transport=remoting, with the brokers' name server as nameServer"
_NO_OFFSETS = "over gRPC a Proxy rejects pulls and requests about offsets (UNIMPLEMENTED)"
_NO_RANGES = (
    f"reads ranges of offsets, and {_NO_OFFSETS}; a Proxy hands out messages (POP), but the same batch never twice"
)
# Why a role cannot use gRPC, and what to do.
_ROLE_PROBLEMS = {
    "batch source": f"{_NO_RANGES}; {_READ_REMEDY}",
    "stream source": f"{_NO_RANGES}; {_READ_REMEDY}",
    "pull consumer": f"seeks and commits offsets, and {_NO_OFFSETS}; {_READ_REMEDY}",
    "cluster admin": f"sends requests that a Proxy rejects over gRPC (UNIMPLEMENTED); {_ADMIN_REMEDY}",
}
NO_ADMINISTRATION = (
    "offsets, topics and groups are read and changed by requests that a Proxy rejects over gRPC (UNIMPLEMENTED); "
    f"{_ADMIN_REMEDY}"
)
# Selectors that do not require a queue of the user's choice.
SELECTORS = ("roundRobin", "random", "hash")
PROXY_CHOOSES = "over gRPC the Proxy chooses the queue"
NO_REPLIES = "request and reply need transport=remoting: a Proxy passes no replies on over gRPC (UNIMPLEMENTED)"


class TransportFeatures(NamedTuple):
    """Everything that producers and the sink know about a transport.

    Args:
        queue_choice_problem: Why no queue can be named, as a part of a sentence; None if queues can be named. If no queue can
            be named, a producer differs in three points: a queue is an ordered stream of messages, the selectors are
            ``SELECTORS``, and a hash key is a message group.
        supports_priorities: Whether messages may have a priority.
        accepts_compressed: Whether the transport tells readers how a body is compressed.
        creates_topics: Whether the first message to a missing topic may create it.
        knows_timers: Whether the client can find out which delays the timers of brokers support.
        knows_offsets: Whether the client can find out where queues end, and where a message is stored.
        max_single_requests: The largest number of messages with groups or priorities in one send; None for any number. If the
            number is limited, each of these messages is a separate request: unless all requests finish within one attempt, all
            messages are sent again.
        restricts_characters: Whether control characters in properties, and ``|`` in tags, fail a request with all its messages.
        server_added_bytes: The most bytes that the server adds to each message of a batch; these bytes count towards the
            brokers' limit.
    """

    queue_choice_problem: str | None = None
    supports_priorities: bool = False
    accepts_compressed: bool = True
    creates_topics: bool = True
    knows_timers: bool = True
    knows_offsets: bool = True
    max_single_requests: int | None = None
    restricts_characters: bool = False
    server_added_bytes: int = 0


FEATURES = {
    REMOTING: TransportFeatures(),
    GRPC: TransportFeatures(
        queue_choice_problem=PROXY_CHOOSES,
        supports_priorities=True,
        accepts_compressed=False,
        creates_topics=False,
        knows_timers=False,
        knows_offsets=False,
        # An attempt of three seconds, as in producers and spools, suffices for 16 messages even if a Proxy takes 180 ms for each
        # message.
        max_single_requests=16,
        restricts_characters=True,
        # RECONSUME_TIME, BORN_TIMESTAMP, __BORNHOST (a host name of at most 255 bytes) and PGROUP (the topic, at most 127).
        server_added_bytes=448,
    ),
}

# Options that require another option, by field. Without the other option, the first option has no effect.
REQUIRED_OPTIONS = {
    "tls_ca_file": ("tlsCaFile", "tls", "tls"),
    "tls_cert_file": ("tlsCertFile", "tls", "tls"),
    "tls_check_hostname": ("tlsCheckHostname", "tls", "tls"),
    "tls_server_name": ("tlsServerName", "tls", "tls"),
    "tls_key_file": ("tlsKeyFile", "tls_cert_file", "tlsCertFile"),
    "tls_key_password": ("tlsKeyPassword", "tls_cert_file", "tlsCertFile"),
    "access_key": ("accessKey", "secret_key", "secretKey"),
    "secret_key": ("secretKey", "access_key", "accessKey"),
    "security_token": ("securityToken", "access_key", "accessKey"),
    "trace_topic": ("traceTopic", "enable_trace", "enableTrace"),
}

# Reasons for rejecting a consumer's options about queues, by field of ``Options``.
_NO_QUEUES = "over gRPC a consumer has no queues: the Proxy hands out messages"
_NO_REQUESTS = "over gRPC a consumer never answers such requests"
_ONE_MESSAGE = "over gRPC a listener gets one message at a time"
_GROUP_SETTING = "over gRPC this is a setting of the group, which brokers store"
_CONSUMER_PROBLEMS = {
    "model": ("model", "over gRPC members share messages; broadcasting is not available"),
    "auto_commit": (
        "autoCommit",
        "over gRPC each message is acknowledged by itself, and there are no offsets to commit",
    ),
    "consume_from_where": ("consumeFromWhere", f"{_GROUP_SETTING}: a new group begins where the brokers decide"),
    "max_reconsume_times": ("maxReconsumeTimes", f"{_GROUP_SETTING} as its retryMaxTimes"),
    "arrow": ("arrow", _ONE_MESSAGE),
    "consume_message_batch_max_size": ("consumeMessageBatchMaxSize", _ONE_MESSAGE),
    "allocation_strategy": ("allocationStrategy", _NO_QUEUES),
    "allocation_config": ("allocationConfig", _NO_QUEUES),
    "machine_rooms": ("machineRooms", _NO_QUEUES),
    "rebalance_interval": ("rebalanceInterval", _NO_QUEUES),
    "pull_interval": ("pullInterval", _NO_QUEUES),
    "pull_batch_size_in_bytes": ("pullBatchSizeInBytes", _NO_QUEUES),
    "pull_threshold_for_queue": ("pullThresholdForQueue", _NO_QUEUES),
    "pull_threshold_size_for_queue": ("pullThresholdSizeForQueue", _NO_QUEUES),
    "pull_threshold_for_topic": ("pullThresholdForTopic", _NO_QUEUES),
    "pull_threshold_size_for_topic": ("pullThresholdSizeForTopic", _NO_QUEUES),
    "consume_concurrently_max_span": ("consumeConcurrentlyMaxSpan", _NO_QUEUES),
    "persist_consumer_offset_interval": ("persistConsumerOffsetInterval", _NO_QUEUES),
    "post_subscription_when_pull": ("postSubscriptionWhenPull", _NO_QUEUES),
    "local_offsets_dir": ("localOffsetsDir", _NO_QUEUES),
    "answer_stacks": ("answerStacks", _NO_REQUESTS),
    "answer_direct_messages": ("answerDirectMessages", _NO_REQUESTS),
}


def features(options: Any) -> TransportFeatures:
    """Return the features of the transport in ``options``."""
    return FEATURES[options.transport]


def message_type(is_delayed: bool, has_group: bool, has_priority: bool) -> str:
    """Return the type that a message has for a Proxy; this type must equal the topic's attribute ``message.type``."""
    flags_with_types = ((is_delayed, TopicType.DELAY), (has_group, TopicType.FIFO), (has_priority, TopicType.PRIORITY))
    return next((type_name for is_set, type_name in flags_with_types if is_set), TopicType.NORMAL)


def problems(options: Any, role: str) -> list[str]:
    """Return what the transport does not support in the options of a role: sentences without a full stop."""
    texts = [
        f"option {name!r} has no effect without {other_name!r}: {_remedy(other_name)}"
        for field, (name, other_field, other_name) in REQUIRED_OPTIONS.items()
        if field in options.given_fields and other_field not in options.given_fields
    ]
    if options.transport == GRPC:
        return texts + _grpc_problems(options, role)
    if not options.name_server:
        texts.append("option 'nameServer' is required: give host:port of a RocketMQ name server")
    if options.proxy_endpoint:
        texts.append("option 'proxyEndpoint' has no effect without transport=grpc")
    if options.tls_server_name:
        texts.append("option 'tlsServerName' has no effect without transport=grpc; see option 'tlsCheckHostname'")
    if options.tls and not options.tls_check_hostname and not options.tls_ca_file:
        texts.append(
            "option 'tlsCheckHostname' is false without option 'tlsCaFile': every certificate of a public authority would be "
            "accepted, whoever has it. Name the authority of your servers with 'tlsCaFile'"
        )
    return texts


def _remedy(option_name: str) -> str:
    return "set tls=true, or tls=false for plain text" if option_name == "tls" else f"give {option_name}, too"


def _grpc_problems(options: Any, role: str) -> list[str]:
    if role in _ROLE_PROBLEMS:
        return [f"option 'transport' is 'grpc', but a {role} {_ROLE_PROBLEMS[role]}"]
    texts = []
    if role == "consumer":
        rejected_options = [_CONSUMER_PROBLEMS[field] for field in _CONSUMER_PROBLEMS if field in options.given_fields]
        texts += [
            f"option {name!r} cannot be used with transport=grpc: {why}. Omit it, or {_READ_REMEDY}"
            for name, why in rejected_options
        ]
    if not options.proxy_endpoint:
        texts.append("option 'proxyEndpoint' is required with transport=grpc: give host:port of the Proxy's gRPC port")
    selector = options.queue_selector
    if role == "sink" and selector not in SELECTORS:
        texts.append(
            f"option 'queueSelector' is {selector!r}, but {PROXY_CHOOSES}; expected one of {', '.join(SELECTORS)}, or "
            f"{_READ_REMEDY}"
        )
    if options.environment is not None and options.environment_mode == "queues":
        texts.append(
            f"option 'environment' names queues, but {PROXY_CHOOSES}; give environmentMode=suffix, or use transport=remoting"
        )
    if options.long_delay == "dmq":
        texts.append(
            "option 'longDelay' is 'dmq', but a Proxy does not report the limits of brokers' timers; expected error"
        )
    if options.enable_trace:
        texts.append(f"option 'enableTrace' is true, but clients of a Proxy write no traces; {_READ_REMEDY}")
    if options.address_map:
        texts.append("option 'addressMap' has no effect with transport=grpc: clients connect to proxyEndpoint only")
    if options.tls_key_password:
        texts.append("option 'tlsKeyPassword' cannot be used with gRPC; give a key file without a password")
    if not options.tls_check_hostname:
        texts.append(
            "option 'tlsCheckHostname' cannot be false with gRPC; give the certificate's name as 'tlsServerName'"
        )
    return texts
