"""The table of all options: name, parser, default, the roles that accept the option, and its meaning.

A row is a field of ``Options``; its public name is the field's name in camelCase. Parsing collects all problems into one
``OptionError``. The constructor of the data source only parses (``parse``). Whatever depends on the role (source or sink, batch
or stream) is checked when the reader or writer is created (``for_role``). No other module reads raw options.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocketmq_spark.base.codes import TRACE_TOPIC
from rocketmq_spark.base.secret import Secret
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import names, paths, transport
from rocketmq_spark.options import parsing as p
from rocketmq_spark.options.topic_names import EXACT, RULES, with_rocketmq_names

logger = logging.getLogger(__name__)

SOURCE_ROLES = ("batch source", "stream source")
ROLES = (*SOURCE_ROLES, "sink", "producer", "consumer", "pull consumer", "simple consumer", "cluster admin")
DEFAULT_GROUP = "rocketmq_spark"
ENVIRONMENT_VARIABLE = "ROCKETMQ_ENVIRONMENT"
# Spark's driver keeps all tasks of a batch in memory. Without this limit, an option, or the offsets that a broker reports, could
# ask for any number of tasks.
MAX_TASKS = 10_000
# Environment variables that give a field its value if the option is not set.
_VARIABLE_BY_FIELD = {"environment": ENVIRONMENT_VARIABLE}

# Options with paths of files and folders that the package opens. The variable ``ROCKETMQ_SPARK_PATHS`` confines these paths. The
# code that opens a file checks its path again.
_PATH_FIELDS = frozenset(
    {"credentials_file", "tls_ca_file", "tls_cert_file", "tls_key_file", "spool_dir", "local_offsets_dir"}
)

# Options that Spark itself passes to a source or sink besides the user's.
TOLERATED_OPTIONS = frozenset(
    {"checkpointlocation", "queryname", "outputmode", "triggerinterval", "serializationformat"}
    # properties of a table in Spark's catalogue
    | {"provider", "owner", "location", "comment", "external", "is_managed_location", "collation"}
)


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table. ``default`` may differ by role; ``default_text`` shows the default in the docs."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    roles: tuple[str, ...]
    help: str
    aliases: tuple[str, ...]
    default_text: str
    accepts_callables: bool

    def default_for(self, role: str) -> Any:
        return self.default.get(role) if isinstance(self.default, DefaultByRole) else self.default


class DefaultByRole(dict[str, Any]):
    """A default that depends on the role."""


def _option(
    parse: Callable[[str], Any],
    default: Any,
    roles: tuple[str, ...],
    help: str,
    *,
    default_text: str | None = None,
    aliases: tuple[str, ...] = (),
    accepts_callables: bool = False,
) -> Any:
    if default_text is None:
        text = str(default) if isinstance(default, str | int) else "–"
        default_text = text.lower() if isinstance(default, bool) else text
    row = dict(  # noqa: C408
        parse=parse,
        default=default,
        roles=roles,
        help=help,
        aliases=aliases,
        default_text=default_text,
        accepts_callables=accepts_callables,
    )
    # ``for_role`` sets a default that depends on the role.
    fixed_default = None if isinstance(default, DefaultByRole) else default
    return dataclasses.field(default_factory=lambda: fixed_default, metadata=row)


_ALL, _SOURCE, _BATCH, _STREAM = ROLES, SOURCE_ROLES, ("batch source",), ("stream source",)
_WRITE = ("sink", "producer")
_TIMES_EXAMPLE = '{"orders":{"broker-a":{"0":1767225600000}}}'
_PULL = ("pull consumer",)
_PUSH = ("consumer",)
_CONSUME = ("consumer", "pull consumer")
# The roles of ``_ALL`` in another order. An option whose roles equal ``_ALL`` is a connection option, and options about queues
# are not connection options.
_QUEUES = (*_CONSUME, *_SOURCE, *_WRITE, "simple consumer", "cluster admin")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parsed options of one source, sink or producer. ``given_fields`` has the names of the fields that were set.
    ``fields_from_variables`` has the names of the fields that an environment variable set.
    """

    # Connection
    name_server: tuple[str, ...] = _option(
        p.name_servers,
        (),
        _ALL,
        "`host:port`, several (at most 100) separated by `;` or `,`; if one fails, the next one is tried. `http://` before it is "
        "ignored, and `MQ_INST_a_b.host:port` also sets `namespace`, as in the Java client",
        default_text="required, except with `transport=grpc`",
        aliases=("namesrvAddr",),
    )
    proxy_endpoint: tuple[str, ...] = _option(
        p.addresses,
        (),
        _ALL,
        "`host:port` of the gRPC port of a Proxy, several (at most 100) separated by `;`; for `transport=grpc`",
    )
    address_map: dict[str, str] | str = _option(
        p.address_map,
        {},
        _ALL,
        "where to connect instead of at advertised addresses: `nameServer`, for a Proxy as name server (docs/hosted.md), or JSON "
        '`{"advertised:port": "reachable:port"}` for NAT and containers; not over gRPC',
    )
    access_key: str | None = _option(p.string, None, _ALL, "access key (user name); every request is signed")
    secret_key: Secret | None = _option(p.secret, None, _ALL, "secret key of the user of `accessKey`")
    security_token: Secret | None = _option(p.secret, None, _ALL, "temporary token that belongs to the keys")
    credentials_file: str | None = _option(
        p.string,
        None,
        _ALL,
        "file with the lines `accessKey=…`, `secretKey=…`, `securityToken=…` (optional); read again every minute of use. "
        "The old keys stay in use while the file cannot be read",
    )
    credentials_provider: str | None = _option(
        p.callable_name,
        None,
        _ALL,
        "`module:callable` that returns access key, secret key and token (or None); called again every minute of "
        "use. The old keys stay in use while the call fails",
    )
    tls: bool = _option(p.boolean, False, _ALL, "use TLS for name servers and brokers")
    tls_ca_file: str | None = _option(
        p.string, None, _ALL, "PEM file of the authorities to trust (default: the system's)"
    )
    tls_cert_file: str | None = _option(p.string, None, _ALL, "PEM file of the client's certificate")
    tls_key_file: str | None = _option(p.string, None, _ALL, "PEM file of the key of `tlsCertFile`")
    tls_key_password: Secret | None = _option(p.secret, None, _ALL, "password of the key file; not over gRPC")
    tls_check_hostname: bool = _option(
        p.boolean,
        True,
        _ALL,
        "whether a certificate must name the host or address of the connection; `false` needs `tlsCaFile`",
    )
    tls_server_name: str | None = _option(
        p.string, None, _ALL, "for `transport=grpc`: the name in the certificate, if it differs from the host name"
    )
    namespace: str | None = _option(
        p.namespace,
        None,
        _ALL,
        "namespace, prefixed to topics and groups as in the Java client. A `nameServer` such as `MQ_INST_a_b.host:port` sets it; "
        "an empty text means none, also there",
    )
    transport: str = _option(
        p.choice("remoting", "grpc"),
        "remoting",
        _ALL,
        "`remoting`: directly to brokers, or through the Remoting port of a Proxy given as `nameServer`; `grpc`: through the "
        "Proxy at `proxyEndpoint`, only for sinks, `Producer`, `Consumer` and `SimpleConsumer` (docs/grpc.md)",
    )
    connect_timeout: float = _option(
        p.positive_duration, 3.0, _ALL, "timeout of opening one connection", default_text="3s"
    )
    request_timeout: float = _option(p.positive_duration, 3.0, _ALL, "timeout of one request", default_text="3s")
    max_connections: int = _option(
        p.integer(1),
        1024,
        _ALL,
        "maximum number of connections of one client to name servers and brokers. At the limit, connections that have been idle "
        "for longest are closed for new ones, and requests wait while all are in use",
    )
    num_retries: int = _option(
        p.integer(0),
        3,
        _ALL,
        "how often a failed metadata request is repeated. A start without a checkpoint that reaches no server makes as many more "
        "attempts, and then fails; once all servers have answered, `readDeadline` bounds the start",
    )
    retry_interval: float = _option(
        p.positive_duration,
        0.5,
        _ALL,
        "pause before the first of `numRetries`; doubles, with jitter",
        default_text="500ms",
    )
    route_refresh: float = _option(
        p.duration, 10.0, _SOURCE, "maximum age of a route when a batch is planned", default_text="10s"
    )

    # Source
    subscribe: tuple[str, ...] = _option(
        p.names, (), _SOURCE, "topics to read; required, or `subscribePattern`/`assign`"
    )
    subscribe_pattern: str | None = _option(
        p.regex, None, _SOURCE, "regular expression for whole topic names, without system, retry and dead-letter topics"
    )
    assign: tuple[MessageQueue, ...] = _option(
        p.assignment, (), _SOURCE, 'queues to read, JSON `{"t":{"broker-a":[0,1]}}`; only those of the `environment`'
    )
    topic_names: str = _option(
        p.choice(*RULES),
        EXACT,
        (*_SOURCE, "sink"),
        "`dotsToUnderscores`: replaces `.` with `_` in topics of the options and of the sink's column `topic`, because RocketMQ "
        "allows no dots: `server.shop.orders` is topic `server_shop_orders`. Two names for one topic are an error. An error with "
        "`subscribePattern`, which matches RocketMQ's names; the source's column `topic` has RocketMQ's names, too",
    )
    include_internal: bool = _option(
        p.boolean, False, _SOURCE, "let `subscribePattern` also match retry and dead-letter topics"
    )
    tags: str | dict[str, str] | None = _option(
        p.topic_filters,
        None,
        _SOURCE,
        "tags to read, `a || b`, filtered by the broker and checked again by the reader; JSON for a filter per topic. A filter "
        "leaves gaps in the offsets, which is normal",
        default_text="`*`",
    )
    sql: str | dict[str, str] | None = _option(
        p.topic_filters,
        None,
        _SOURCE,
        "SQL92 expression over properties, instead of `tags`; JSON for one per topic. Requires `enablePropertyFilter=true` on "
        "brokers (not their default); not through a Proxy, nor for batch topics",
    )
    starting_offsets: str | p.OffsetsByQueue = _option(
        p.offsets("earliest", "latest", "committed"),
        DefaultByRole({"batch source": "earliest", "stream source": "latest"}),
        _SOURCE,
        '`earliest`, `latest`, `committed` (with `group`), or JSON `{"t":{"broker-a":{"0":17,"1":-2}}}` (−2 earliest, −1 '
        'latest) for every queue, or `{"t":"earliest"}` for all queues of a topic, also mixed. '
        "A stream's checkpoint overrides it; a batch cannot start at the end",
        default_text="stream `latest`, batch `earliest`",
    )
    committed_fallback: str = _option(
        p.choice("error", "earliest", "latest"),
        "error",
        _SOURCE,
        "where a queue without a committed offset of the group starts: `earliest` or `latest`; `error` raises instead",
    )
    starting_timestamp: int | None = _option(
        p.timestamp,
        None,
        _SOURCE,
        "first message stored from a time on (ISO-8601 or epoch ms); overrides `startingOffsets`, `startingOffsetsByTimestamp`",
    )
    starting_offsets_by_timestamp: dict[MessageQueue, int] | None = _option(
        p.queue_numbers(_TIMES_EXAMPLE, 0),
        None,
        _SOURCE,
        'first message stored at or after a time, in epoch ms: JSON `{"t":{"broker-a":{"0":1767225600000}}}` for every queue; '
        "overrides `startingOffsets`",
    )
    starting_offsets_by_timestamp_strategy: str = _option(
        p.choice("error", "latest"),
        "error",
        _SOURCE,
        "if all messages of a queue are older than the starting time: `latest` starts at its end, `error` raises; for "
        "`startingTimestamp`, too. An empty queue starts at its end",
    )
    ending_offsets: str | p.OffsetsByQueue = _option(
        p.offsets("latest"),
        "latest",
        _BATCH,
        '`latest`, or JSON `{"t":{"broker-a":{"0":17,"1":-1}}}` (−1 latest) for every queue: the first offset not to read; '
        '`{"t":"latest"}` for all queues of a topic',
    )
    ending_timestamp: int | None = _option(
        p.timestamp,
        None,
        _BATCH,
        "messages stored before this time; overrides the two other ending options. A queue that starts after its end is an "
        "error, except with `startingOffsets=committed`",
    )
    ending_offsets_by_timestamp: dict[MessageQueue, int] | None = _option(
        p.queue_numbers(_TIMES_EXAMPLE, 0),
        None,
        _BATCH,
        'messages stored before a time, in epoch ms: JSON `{"t":{"broker-a":{"0":1767225600000}}}` for every queue; overrides '
        "`endingOffsets`",
    )
    fail_on_data_loss: str = _option(
        lambda v: {"true": "fail", "false": "ignore"}.get(v.strip().lower()) or p.choice("fail", "warn", "ignore")(v),
        "fail",
        _SOURCE,
        "what to do if offsets no longer exist when they are to be read: `fail`/`true`, `warn` or `ignore`/`false`",
    )
    max_offsets_per_trigger: int | None = _option(
        p.integer(1), None, _STREAM, "maximum number of offsets in a batch, divided among queues by their backlog"
    )
    min_offsets_per_trigger: int | None = _option(
        p.integer(1),
        None,
        _STREAM,
        "wait until this many offsets are unread, or until `maxTriggerDelay` has passed; what is unread when a run "
        "starts is read at once",
    )
    max_trigger_delay: float = _option(
        p.positive_duration, 900.0, _STREAM, "longest wait for `minOffsetsPerTrigger`", default_text="15m"
    )
    max_bytes_per_trigger: int | None = _option(
        p.size(1), None, _STREAM, "maximum size of a batch in bytes, estimated from samples of unread messages"
    )
    allocation_strategy: Any = _option(
        p.strategy,
        "averagely",
        (*_SOURCE, *_CONSUME),
        "how queues are assigned to Spark partitions: `averagely`, `averagelyByCircle`, `consistentHash`, `config`, "
        "`machineRoom`, `machineRoomNearby`, `environment`, or `module:callable`. For the strategy, partitions are consumers "
        "named `partition-00000`, …; a queue that it assigns to no partition (as `config`, `machineRoom` or a callable may) is "
        "not read, and a warning names it. In a `Consumer` or `PullConsumer`: how queues are assigned to the members of the "
        "group, with the same strategies except `machineRoomNearby`",
        accepts_callables=True,
    )
    allocation_config: str | None = _option(
        p.string,
        None,
        (*_SOURCE, *_CONSUME),
        'queues for the strategy `config`: JSON `{"orders":{"broker-a":[0,1]}}`, or the same by partition: '
        '`{"partition-00000":{"orders":{"broker-a":[0]}}}`',
    )
    machine_rooms: tuple[str, ...] = _option(
        p.names,
        (),
        (*_SOURCE, "sink", *_CONSUME),
        "rooms whose queues the strategy or selector `machineRoom` uses; brokers are named `room@name`",
    )
    partition_rooms: tuple[str, ...] = _option(
        p.names_with_repeats,
        (),
        _SOURCE,
        "for `machineRoomNearby`: room of each partition in order, repeated for further ones; brokers are named `room@name`",
    )
    num_partitions: int | None = _option(
        p.auto_integer(MAX_TASKS),
        None,
        _SOURCE,
        f"number of partitions to which the strategy assigns queues, at most {MAX_TASKS:,}; `auto`: one per 20,000 offsets, at "
        "most one per queue",
        default_text="auto",
    )
    min_partitions: int | None = _option(p.integer(1), None, _SOURCE, "split large ranges into about this many tasks")
    max_records_per_partition: int = _option(
        p.integer(1),
        500_000,
        _SOURCE,
        "maximum number of offsets of a task; larger ranges are split. Tasks are larger if more than 10,000 would be needed",
    )
    predicate_pushdown: bool = _option(
        p.boolean,
        False,
        _BATCH,
        "let Spark predicates on topic, brokerName, queueId, queueOffset and tags shorten the read, if "
        "`spark.sql.python.filterPushdown.enabled` is set; for times use `startingTimestamp` and `endingTimestamp`. Only for "
        "DataFrames that are used once: if a DataFrame is used again, Spark reads only the range of the first predicate",
    )
    columns: tuple[str, ...] = _option(
        p.names,
        (),
        _SOURCE,
        "columns to build, any of the schema; other columns are not decoded",
        default_text="all basic",
    )
    include_properties: str = _option(
        p.choice("none", "user", "all"),
        "user",
        _SOURCE,
        "content of `properties`: `none` (null), `user` (the properties of the user), or `all` (also those of RocketMQ)",
    )
    property_columns: tuple[tuple[str, str], ...] = _option(
        p.property_columns,
        (),
        _SOURCE,
        "properties as additional typed columns: `amount:bigint, region:string`; null if absent or not of the type",
    )
    metadata: str = _option(
        p.choice("basic", "full"),
        "basic",
        _SOURCE,
        "`full` adds offsetMsgId, flag, sysFlag, reconsumeTimes, bornHost, storeHost, commitLogOffset, storeSize",
    )
    kafka_columns: bool = _option(
        p.boolean,
        False,
        (*_SOURCE, "sink"),
        "columns of Spark's Kafka connector instead of RocketMQ's: `key`, `value`, `topic`, `partition`, `offset`, "
        "`timestamp`, `timestampType`, and with `includeHeaders` `headers`; a sink takes `key`, `value`, `topic`, "
        "`partition` and `headers` (docs/coming-from-kafka.md). In exactly-once queries, do not change it while a batch is "
        "unfinished",
    )
    include_headers: bool = _option(
        p.boolean,
        False,
        _SOURCE,
        "a column `headers` with the properties, an array of names and binary values; null without any. Needs `kafkaColumns`, "
        "and `includeProperties` other than `none`",
    )
    topic_wait: float = _option(
        p.duration,
        0.0,
        _SOURCE,
        "how long a start waits until topics of `subscribe` or `assign` exist, or one that matches `subscribePattern`. After "
        "that the start fails, except that a stream with `subscribePattern` starts, and waits for its first topic. While a start "
        "waits for a topic, `numRetries` and `readDeadline` do not count",
        default_text="0",
    )
    read_from: str = _option(
        p.choice("master", "hint", "slave"),
        "hint",
        _SOURCE,
        "`master`, a `slave` if there is one, or the replica that the broker suggests (`hint`)",
    )
    environment: str | None = _option(
        p.string,
        None,
        _QUEUES,
        "read and write only what belongs to one environment: its number (from 1), or its name, which requires `environments` "
        "as JSON or `environmentMode=suffix`. With `environmentMode=queues`, consumers of `dev` are members of the group "
        "`<group>_env_dev`, which has its own retries and dead letters",
        default_text="variable `ROCKETMQ_ENVIRONMENT`",
    )
    environment_mode: str = _option(
        p.choice("queues", "suffix"),
        "queues",
        _QUEUES,
        "what belongs to an environment: some `queues` of each topic, or with `suffix` its own topics and groups, whose names "
        "on the brokers end in `_` and the name of the environment",
    )
    environments: str | None = _option(
        p.string,
        None,
        _QUEUES,
        "how many environments share the queues of a topic: of n, environment N owns queue ids N-1, N-1+n, … of each broker; "
        'or JSON `{"test":{"broker-a":[0,1]}}`. Without it, environment N owns only the Nth queue of a topic, and neither a '
        "stream's sink nor a sink without option `topic` accepts a number as `environment`",
    )
    group: str = _option(
        p.string,
        DEFAULT_GROUP,
        (*_SOURCE, "producer", *_CONSUME, "simple consumer"),
        "consumer group under which messages are pulled; if given, finished positions are committed as its offsets. For a "
        "`Producer` the producer group, for consumers the consumer group; both require it",
        default_text=f"`{DEFAULT_GROUP}`",
    )
    max_bytes_in_flight: int = _option(
        p.size(64 << 10, 256 << 20),
        8 << 20,
        _SOURCE,
        "maximum bytes requested by the unanswered pulls of a task",
        default_text="8m",
    )
    pull_depth: int | None = _option(
        p.integer(1, 1024), None, _SOURCE, "maximum number of unanswered pulls of a task", default_text="adaptive"
    )
    pull_batch_size: int = _option(
        p.integer(1, 100_000),
        DefaultByRole({**dict.fromkeys(SOURCE_ROLES, 1024), "consumer": 32, "pull consumer": 32}),
        (*_SOURCE, *_CONSUME),
        "maximum number of messages to request per pull; the broker may send fewer. At most 1024 for consumers",
        default_text="source `1024`, consumers `32`",
    )
    bad_message: str = _option(
        p.choice("fail", "null", "skip"),
        "fail",
        _SOURCE,
        "for a message that cannot be decoded: `fail` raises an error that names the message and the remedies; `null` returns a"
        " row with a null body and the cause in `decodeError` (with `metadata=full`); `skip` counts and logs it",
    )
    read_deadline: float = _option(
        p.positive_duration,
        120.0,
        _SOURCE,
        "how long a task waits for a silent broker before it fails. It also bounds how long a start from a checkpoint waits for "
        "name servers and brokers, a first start for a master, and a batch of `availableNow` for the messages that it must read. "
        "Other batches do not wait: they leave out brokers that do not answer",
        default_text="2m",
    )

    # Sink and producer
    topic: str | None = _option(p.string, None, ("sink",), "topic of all rows; overrides the column `topic`")
    queue_selector: Any = _option(
        p.selector,
        "roundRobin",
        ("sink",),
        "`roundRobin`, `random`, `hash` (of column `shardingKey`, as in Java), `machineRoom`, `environment`, `column` "
        "(`queueId`, `brokerName`), or `module:callable(queues, message, key)`. If the option is not set, a column `queueId` "
        "selects `column`, and a column `shardingKey` selects `hash`. Rows whose `shardingKey` is null or empty, or whose "
        "`queueId` is null, go round robin; with both columns, a row without a `queueId` goes to the queue of its "
        "`shardingKey`, unless the option is set. With `kafkaColumns`, a column `partition` chooses the queue (then this "
        "option is an error), and a column `key` stands for `shardingKey`",
        accepts_callables=True,
    )
    send_timeout: float = _option(
        p.positive_duration,
        DefaultByRole({"sink": 120.0, "producer": 3.0}),
        _WRITE,
        "timeout of one batch, including all retries. In the sink only round-robin, random and machine room batches may move to"
        " another broker; the others wait for their queue",
        default_text="sink `2m`, `Producer` `3s`",
    )
    max_message_size: int = _option(
        p.size(1),
        4 << 20,
        _WRITE,
        "maximum size of a body; a larger one is an error that names the row. A sink may have sent rows of other Arrow batches",
        default_text="4m",
    )
    send_latency_fault: str = _option(
        p.fault_preset,
        DefaultByRole({"sink": "current", "producer": ""}),
        _WRITE,
        "avoid brokers that are slow or fail: `true`, `false`, or a preset of durations: `current`, `4.x`",
        default_text="sink `true`, `Producer` `false`",
    )
    latency_max: tuple[int, ...] = _option(
        p.durations_ms, (), _WRITE, "latency thresholds of `sendLatencyFault`, ascending, such as `50ms,100ms,550ms`"
    )
    not_available_duration: tuple[int, ...] = _option(
        p.durations_ms, (), _WRITE, "how long to avoid a broker after each latency: one value for each of `latencyMax`"
    )
    auto_batch: bool = _option(
        p.boolean,
        DefaultByRole({"sink": True, "producer": False}),
        _WRITE,
        "combine single messages into batches. If false, the sink sends every row as a message of its own",
        default_text="sink `true`, `Producer` `false`",
    )
    batch_max_bytes: int | None = _option(
        p.size(1),
        DefaultByRole({"sink": 1 << 20}),
        _WRITE,
        "size of one batch on the wire (sink), or the size of the bodies at which a batch is sent (`Producer`)",
        default_text="sink `1m`, `Producer` `32k`",
    )
    batch_max_delay: float | None = _option(
        p.positive_duration, None, ("producer",), "how long a batch waits for more messages", default_text="10ms"
    )
    batch_by_tag: str = _option(
        p.choice("auto", "true", "false"),
        "auto",
        ("sink",),
        "in a batch topic, put only rows of one tag into a batch, so that brokers can filter (docs/batch-topics.md). `true`: "
        "also if rows name their queues; order then holds within each tag only. `auto`: only if rows do not name queues, for up"
        " to 16 tags in an Arrow batch",
    )
    total_batch_max_bytes: int | None = _option(
        p.size(1),
        DefaultByRole({"sink": 32 << 20}),
        _WRITE,
        "maximum size of waiting bodies (`Producer`), or of all unacknowledged batches of a task (sink)",
        default_text="32m",
    )
    max_in_flight: int | None = _option(
        p.integer(1, 1024),
        None,
        ("sink",),
        "maximum number of unacknowledged batches of a task per broker; a queue whose order is kept has one at a time",
        default_text="adaptive",
    )
    compress_above: int = _option(
        p.size(0),
        4096,
        _WRITE,
        "compress bodies from this size on if they are sent alone; never batches (of the sink, of `autoBatch`), nor over gRPC",
        default_text="4k",
    )
    compression: str = _option(
        p.choice("none", "zlib", "lz4", "zstd"),
        "zlib",
        _WRITE,
        "`none`, `zlib`, `lz4` or `zstd` (`lz4` and `zstd` need pyarrow); not over gRPC",
    )
    require_store_ok: str = _option(
        p.choice("any", "ok"),
        "any",
        _WRITE,
        "`any` accepts messages that are stored but not yet flushed or copied to a slave; `ok` sends them again, which "
        "may store them twice, and fails if no attempt is stored safely",
    )
    on_send_failure: str = _option(
        p.choice("fail", "spool"),
        "fail",
        _WRITE,
        "if a send fails temporarily: `fail` raises an error, `spool` stores it in `spoolDir` and sends it later (docs/spool.md)",
    )
    spool_dir: str | None = _option(
        p.string,
        None,
        _WRITE,
        "required with `onSendFailure=spool`: a folder on a disk that outlives the process and, in a sink, the worker. Each "
        "`Producer` needs a folder of its own; worker processes of a sink use subfolders",
    )
    spool_sync: str = _option(
        p.choice("always", "batch", "never"),
        "always",
        _WRITE,
        "how a SPOOLED message is flushed to disk before its send returns: `always` flushes for each send, `batch` once for all "
        "waiting sends. `never` leaves the flush to the operating system: messages survive a crash of the process, but not of "
        "the machine",
    )
    spool_max_bytes: int = _option(
        p.size(1), 1 << 30, _WRITE, "size of the spool, dead letters included, at which sends fail", default_text="1g"
    )
    long_delay: str = _option(
        p.choice("error", "dmq"),
        "error",
        _WRITE,
        "what to do with delays that brokers do not support (longer than `timerMaxDelaySec`, timers switched off, or brokers "
        "before 5.0): raise an `error`, or use the delay service, which must run (`dmq`, docs/delay.md)",
    )
    message_id: str | None = _option(
        p.string,
        None,
        ("sink",),
        "column that identifies a row, sent as property `SPARK_ROW_ID`, by which readers can drop duplicates",
    )

    empty_bodies: str = _option(
        p.choice("refuse", "mark"),
        "refuse",
        ("sink",),
        "what the sink does with a row whose body is null or empty, which brokers refuse: `refuse` is an error; `mark` sends one "
        "zero byte with the property `deleted` (`null` or `empty`). The source with `kafkaColumns` returns null or an empty "
        "value. In exactly-once queries, do not change it while a batch is unfinished",
    )

    delivery_guarantee: str = _option(
        p.choice("at-least-once", "exactly-once"),
        "at-least-once",
        ("sink",),
        "`exactly-once`: a repeated batch or task omits rows that are already stored (docs/exactly-once.md)",
    )
    allowed_topics: tuple[str, ...] = _option(
        p.names,
        (),
        ("sink",),
        "topics that rows may name in column `topic`, if there is no option `topic`; `exactly-once` requires the complete list",
    )
    exactly_once_settle: float = _option(
        p.positive_duration,
        10.0,
        ("sink", "producer"),
        "how long earlier requests may still arrive at a broker: messages that it lacks count as not stored only after this "
        "time. Sink with `exactly-once`: at least 4s, and 2s more than `spark.python.task.killTimeout`; `Producer` with "
        "`confirmAmbiguous`: more than 2s. Can be set only with one of these two options",
        default_text="10s",
    )
    confirm_ambiguous: bool = _option(
        p.boolean,
        False,
        ("producer",),
        "if a send has no answer, check whether the broker stored the message before sending it again (docs/exactly-once.md). "
        "Requires a `sendTimeout` above `requestTimeout` plus `exactlyOnceSettle`, such as 15s; not over gRPC, nor with "
        "`onSendFailure=spool` or `requireStoreOk=ok`",
    )

    # Traces
    enable_trace: bool = _option(
        p.boolean,
        False,
        ("producer", "consumer"),
        "write message traces, which RocketMQ's dashboard and `mqadmin queryMsgTraceById` show (docs/traces.md)",
        aliases=("enableMsgTrace",),
    )
    trace_topic: str = _option(
        p.string,
        TRACE_TOPIC,
        ("producer", "consumer"),
        "topic of the message traces; brokers create the default one with `traceTopicEnable=true`",
        aliases=("customizedTraceTopic",),
    )

    open_telemetry: bool = _option(
        p.boolean,
        False,
        ("producer", *_CONSUME, "simple consumer"),
        "create OpenTelemetry spans and metrics, and propagate trace contexts in messages' properties (docs/opentelemetry.md)",
    )

    # Consumers
    consume_from_where: str | int = _option(
        p.consume_from_where,
        "latest",
        _CONSUME,
        "where a queue starts for which the group has no offset: `latest`, `earliest`, or the first message stored at or after "
        "a time (ISO-8601 or epoch ms)",
    )
    auto_commit: bool = _option(
        p.boolean,
        True,
        _CONSUME,
        "`PullConsumer`: `poll` commits offsets of messages from earlier polls, `close` those of all but the last poll. Ordered "
        "`Consumer`: messages are done when the listener returns None; if false, when it returns `context.commit()`",
    )
    auto_commit_interval: float = _option(
        p.positive_duration, 5.0, _PULL, "minimum time between commits", default_text="5s"
    )
    pull_threshold_for_queue: int = _option(
        p.integer(1, 65535),
        1000,
        _CONSUME,
        "a queue is not pulled while it has more unfinished messages (`Consumer`) or offsets that wait for a poll "
        "(`PullConsumer`) than this",
    )
    model: str = _option(
        p.choice("clustering", "broadcasting"),
        "clustering",
        _PUSH,
        "`clustering`: members of the group share the queues; `broadcasting`: each member gets all messages, and one that failed "
        "is not delivered again unless `ordered`",
    )
    ordered: bool = _option(
        p.boolean, False, _PUSH, "process messages of a queue one after the other; failed ones are retried in place"
    )
    arrow: bool = _option(
        p.boolean, False, _PUSH, "call the listener with Arrow record batches, which have the columns of `poll_arrow`"
    )
    consume_thread_min: int = _option(p.integer(1, 1000), 20, _PUSH, "number of threads that call the listener")
    consume_message_batch_max_size: int = _option(
        p.integer(1, 1024), 1, _PUSH, "most messages per call of the listener; with `arrow` the default is 1024 rows"
    )
    pull_batch_size_in_bytes: int = _option(
        p.size(1), 256 << 10, _PUSH, "most bytes to request per pull, if brokers support it", default_text="256k"
    )
    pull_interval: float = _option(p.duration, 0.0, _PUSH, "pause between two pulls of a queue", default_text="0")
    pull_time_delay_when_exception: float = _option(
        p.positive_duration, 1.0, _PUSH, "pause after a failed pull", default_text="1s"
    )
    pull_threshold_size_for_queue: int = _option(
        p.size(1, 1 << 30),
        100 << 20,
        _CONSUME,
        "a queue is not pulled while it has more waiting bytes",
        default_text="100m",
    )
    pull_threshold_for_topic: int | None = _option(
        p.integer(1, 6_553_500), None, _PUSH, "most unfinished messages of a topic, divided among its assigned queues"
    )
    pull_threshold_size_for_topic: int | None = _option(
        p.size(1, 102_400 << 20), None, _PUSH, "most unfinished bytes of a topic, divided among its assigned queues"
    )
    consume_concurrently_max_span: int = _option(
        p.integer(1, 65535),
        2000,
        _PUSH,
        "a queue is not pulled while its waiting offsets span more than this; not if `ordered`",
    )
    max_reconsume_times: int | None = _option(
        p.integer(0, (1 << 31) - 1),
        None,
        _PUSH,
        "how often a failed message is delivered again before it goes to the group's dead-letter topic, `%DLQ%<group>`",
        default_text="16; unlimited if `ordered`",
    )
    suspend_current_queue_time: float = _option(
        p.positive_duration,
        1.0,
        _PUSH,
        "how long an ordered queue pauses after a failure: 10ms to 30s",
        default_text="1s",
    )
    consume_timeout: float = _option(
        p.positive_duration,
        900.0,
        _PUSH,
        "a message that the listener has for longer is delivered again, or dropped with `model=broadcasting`, so that the offset "
        "of its queue can advance; the listener is not interrupted. Does not apply if `ordered`",
        default_text="15m",
    )
    persist_consumer_offset_interval: float = _option(
        p.positive_duration, 5.0, _PUSH, "how often offsets are committed", default_text="5s"
    )
    rebalance_interval: float = _option(
        p.positive_duration,
        20.0,
        _PUSH,
        "how often the assignment of queues is checked; at least 1s",
        default_text="20s",
    )
    post_subscription_when_pull: bool = _option(
        p.boolean, False, _PUSH, "send the filter with each pull, not only with heartbeats"
    )
    answer_stacks: bool = _option(
        p.boolean,
        True,
        _CONSUME,
        "whether a broker's request for the state of a member (`mqadmin consumerStatus -s`) may include the stacks of this "
        "process's threads, as in Java",
    )
    answer_direct_messages: bool = _option(
        p.boolean,
        True,
        _PUSH,
        "whether a broker may pass a message of a subscribed topic directly to the listener (`mqadmin queryMsgById -d`); the "
        "broker gets the text of the listener's exception, as in Java",
    )
    local_offsets_dir: str | None = _option(
        p.string,
        None,
        _PUSH,
        "where a broadcasting consumer stores its offsets, by host, group and name servers; give each consumer of a group on a "
        "machine its own folder",
        default_text="`~/.rocketmq_offsets`",
    )

    written_topics: tuple[str, ...] = ()  # ``allowed_topics`` as written, before ``topic_names`` changes names
    given_fields: frozenset[str] = frozenset()
    fields_from_variables: frozenset[str] = frozenset()
    keywords: bool = False  # whether the user gave the options as keywords of a Python call

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in sorted(self.given_fields))})"

    def for_role(self, role: str) -> Options:
        """Return the options with the defaults of ``role``. Raises ``OptionError`` for the options that the role does not
        accept.
        """
        problems = [
            f"option {(row.field if self.keywords else row.name)!r} does not belong to a {role}; "
            f"it is for: {', '.join(row.roles)}"
            for row in TABLE
            if row.field in self.given_fields and role not in row.roles
        ]
        problems[:0] = transport.problems(self, role)
        if problems:
            raise OptionError.of(problems)
        defaults = {row.field: row.default_for(role) for row in TABLE if row.field not in self.given_fields}
        if self.environment is not None:
            logger.info("%s: %s", role, self.environment_text)
        return dataclasses.replace(self, **defaults)

    @property
    def cluster(self) -> tuple[str, ...]:
        """The addresses that identify a cluster, as a key for cached values."""
        return self.proxy_endpoint if self.transport == transport.GRPC else self.name_server

    @property
    def environment_text(self) -> str:
        """The environment as a phrase for logs."""
        return f"environment {self.environment!r} ({self.environment_source}), environmentMode {self.environment_mode}"

    @property
    def environment_source(self) -> str:
        """Where the environment was set, for error messages: the option or a variable."""
        return (
            f"variable {ENVIRONMENT_VARIABLE}"
            if "environment" in self.fields_from_variables
            else "option 'environment'"
        )


TABLE: tuple[Option, ...] = tuple(
    Option(name=names.camel_case(f.name), field=f.name, **f.metadata) for f in dataclasses.fields(Options) if f.metadata
)
# The options of sources and sinks.
SPARK_OPTIONS = frozenset(row.name for row in TABLE if not {*SOURCE_ROLES, "sink"}.isdisjoint(row.roles))
_OPTION_BY_NAME = {name.lower(): row for row in TABLE for name in (row.name, *row.aliases, row.field)}


def parse(
    raw_options: Mapping[str, object], variables: Mapping[str, str] = os.environ, *, keywords: bool = False
) -> Options:
    """Parse a user's options; names are case-insensitive, in camelCase or snake_case. One ``OptionError`` lists all problems.

    Options that are not given may come from environment ``variables``. No other code reads these variables; tasks receive the
    values. ``keywords`` says that the options are keywords of a Python call, so that errors name them in snake_case.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in p.merged_table_options(raw_options).items():
        if value is None or name.lower() in TOLERATED_OPTIONS:
            continue
        row = _OPTION_BY_NAME.get(name.lower())
        if row is None:
            problems.append(
                names.unknown_option(
                    name, {each.name: each.field if keywords else each.name for each in TABLE}, SPARK_OPTIONS
                )
            )
            continue
        shown_name = row.field if keywords else row.name
        if row.field in values:
            problems.append(f"option {shown_name!r} is given twice")
            continue
        try:
            values[row.field] = value if row.accepts_callables and callable(value) else row.parse(p.text(value))
            if row.field in _PATH_FIELDS and (problem := paths.length_problem(values[row.field])):
                problems.append(f"option {shown_name!r} is {paths.shortened(values[row.field])}; {problem}")
            elif row.field in _PATH_FIELDS and (
                problem := paths.confinement_problem(Path(values[row.field]), variables)
            ):
                problems.append(f"option {shown_name!r} is {value!r}; {problem}")
        except ValueError as e:
            is_long = isinstance(value, str) and len(value) > paths.MAX_PATH_BYTES
            value_text = "'***'" if row.parse is p.secret else paths.shortened(str(value)) if is_long else repr(value)
            problems.append(f"option {shown_name!r} is {value_text}; expected {e}")
    variable_values: dict[str, Any] = {}
    for field, variable in _VARIABLE_BY_FIELD.items():
        text = None if field in values else variables.get(variable)
        if text:
            try:
                variable_values[field] = _OPTION_BY_NAME[field].parse(text)
            except ValueError as e:
                problems.append(f"variable {variable} is {text!r}; expected {e}")
    written_topics = values.get("allowed_topics", ())
    for field, value in values.items():
        try:
            values[field] = with_rocketmq_names(field, value, values.get("topic_names", EXACT))
        except ValueError as e:
            problems.append(f"option {(field if keywords else _OPTION_BY_NAME[field].name)!r}: {e}; rename one of them")
    if problems:
        raise OptionError.of(problems)
    values |= variable_values
    instance = p.instance_of(values.get("name_server", ()))
    if instance is not None and "namespace" not in values and values.get("transport") != transport.GRPC:
        values["namespace"] = instance
    return Options(
        **values,
        written_topics=written_topics,
        given_fields=frozenset(values),
        fields_from_variables=frozenset(variable_values),
        keywords=keywords,
    )


def foreign_option(name: str) -> str | None:
    """Return the sentence of errors about an option of Spark's Kafka connector or of another client; None for other names."""
    return names.foreign_option_equivalent(name, SPARK_OPTIONS)


def option_name(field: str) -> str:
    """The public name of a field, for messages."""
    return _OPTION_BY_NAME[field].name
