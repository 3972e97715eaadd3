"""Typed keywords of constructors and writers. Written by ``make docs`` from the table of options; do not edit.

Durations are milliseconds, or text such as ``3s``; sizes are bytes, or text such as ``4m``. An option that is not
given has the default in docs/options.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class AdminOptions(TypedDict, total=False):
    """Keywords of ``Admin``, which all the other classes and functions take, too."""

    proxy_endpoint: str
    """``host:port`` of the gRPC port of a Proxy, several (at most 100) separated by ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """Where to connect instead of at advertised addresses: ``nameServer``, for a Proxy as name server (docs/hosted.md), or
    JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers; not over gRPC.
    """
    access_key: str
    """Access key (user name); every request is signed."""
    secret_key: str
    """Secret key of the user of ``accessKey``."""
    security_token: str
    """Temporary token that belongs to the keys."""
    credentials_file: str
    """File with the lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…`` (optional); read again every minute of use.
    The old keys stay in use while the file cannot be read.
    """
    credentials_provider: str
    """``module:callable`` that returns access key, secret key and token (or None); called again every minute of use. The old
    keys stay in use while the call fails.
    """
    tls: bool | str
    """Use TLS for name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of the key of ``tlsCertFile``."""
    tls_key_password: str
    """Password of the key file; not over gRPC."""
    tls_check_hostname: bool | str
    """Whether a certificate must name the host or address of the connection; ``false`` needs ``tlsCaFile``."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it differs from the host name."""
    namespace: str
    """Namespace, prefixed to topics and groups as in the Java client. A ``nameServer`` such as ``MQ_INST_a_b.host:port`` sets
    it; an empty text means none, also there.
    """
    transport: str
    """``remoting``: directly to brokers, or through the Remoting port of a Proxy given as ``nameServer``; ``grpc``: through
    the Proxy at ``proxyEndpoint``, only for sinks, ``Producer``, ``Consumer`` and ``SimpleConsumer`` (docs/grpc.md).
    """
    connect_timeout: float | str
    """Timeout of opening one connection."""
    request_timeout: float | str
    """Timeout of one request."""
    max_connections: int | str
    """Maximum number of connections of one client to name servers and brokers. At the limit, connections that have been idle
    for longest are closed for new ones, and requests wait while all are in use.
    """
    num_retries: int | str
    """How often a failed metadata request is repeated. A start without a checkpoint that reaches no server makes as many more
    attempts, and then fails; once all servers have answered, ``readDeadline`` bounds the start.
    """
    retry_interval: float | str
    """Pause before the first of ``numRetries``; doubles, with jitter."""
    environment: str
    """Read and write only what belongs to one environment: its number (from 1), or its name, which requires ``environments``
    as JSON or ``environmentMode=suffix``. With ``environmentMode=queues``, consumers of ``dev`` are members of the group
    ``<group>_env_dev``, which has its own retries and dead letters.
    """
    environment_mode: str
    """What belongs to an environment: some ``queues`` of each topic, or with ``suffix`` its own topics and groups, whose names
    on the brokers end in ``_`` and the name of the environment.
    """
    environments: Mapping[str, Any] | str
    """How many environments share the queues of a topic: of n, environment N owns queue ids N-1, N-1+n, … of each broker; or
    JSON ``{"test":{"broker-a":[0,1]}}``. Without it, environment N owns only the Nth queue of a topic, and neither a
    stream's sink nor a sink without option ``topic`` accepts a number as ``environment``.
    """


class ProducerOptions(AdminOptions, total=False):
    """Keywords of ``Producer``."""

    send_timeout: float | str
    """Timeout of one batch, including all retries. In the sink only round-robin, random and machine room batches may move to
    another broker; the others wait for their queue.
    """
    max_message_size: int | str
    """Maximum size of a body; a larger one is an error that names the row. A sink may have sent rows of other Arrow batches."""
    send_latency_fault: bool | str
    """Avoid brokers that are slow or fail: ``true``, ``false``, or a preset of durations: ``current``, ``4.x``."""
    latency_max: str
    """Latency thresholds of ``sendLatencyFault``, ascending, such as ``50ms,100ms,550ms``."""
    not_available_duration: str
    """How long to avoid a broker after each latency: one value for each of ``latencyMax``."""
    auto_batch: bool | str
    """Combine single messages into batches. If false, the sink sends every row as a message of its own."""
    batch_max_bytes: int | str
    """Size of one batch on the wire (sink), or the size of the bodies at which a batch is sent (``Producer``)."""
    batch_max_delay: float | str
    """How long a batch waits for more messages."""
    total_batch_max_bytes: int | str
    """Maximum size of waiting bodies (``Producer``), or of all unacknowledged batches of a task (sink)."""
    compress_above: int | str
    """Compress bodies from this size on if they are sent alone; never batches (of the sink, of ``autoBatch``), nor over gRPC."""
    compression: str
    """``none``, ``zlib``, ``lz4`` or ``zstd`` (``lz4`` and ``zstd`` need pyarrow); not over gRPC."""
    require_store_ok: str
    """``any`` accepts messages that are stored but not yet flushed or copied to a slave; ``ok`` sends them again, which may
    store them twice, and fails if no attempt is stored safely.
    """
    on_send_failure: str
    """If a send fails temporarily: ``fail`` raises an error, ``spool`` stores it in ``spoolDir`` and sends it later
    (docs/spool.md).
    """
    spool_dir: str
    """Required with ``onSendFailure=spool``: a folder on a disk that outlives the process and, in a sink, the worker. Each
    ``Producer`` needs a folder of its own; worker processes of a sink use subfolders.
    """
    spool_sync: str
    """How a SPOOLED message is flushed to disk before its send returns: ``always`` flushes for each send, ``batch`` once for
    all waiting sends. ``never`` leaves the flush to the operating system: messages survive a crash of the process, but not
    of the machine.
    """
    spool_max_bytes: int | str
    """Size of the spool, dead letters included, at which sends fail."""
    long_delay: str
    """What to do with delays that brokers do not support (longer than ``timerMaxDelaySec``, timers switched off, or brokers
    before 5.0): raise an ``error``, or use the delay service, which must run (``dmq``, docs/delay.md).
    """
    exactly_once_settle: float | str
    """How long earlier requests may still arrive at a broker: messages that it lacks count as not stored only after this time.
    Sink with ``exactly-once``: at least 4s, and 2s more than ``spark.python.task.killTimeout``; ``Producer`` with
    ``confirmAmbiguous``: more than 2s. Can be set only with one of these two options.
    """
    confirm_ambiguous: bool | str
    """If a send has no answer, check whether the broker stored the message before sending it again (docs/exactly-once.md).
    Requires a ``sendTimeout`` above ``requestTimeout`` plus ``exactlyOnceSettle``, such as 15s; not over gRPC, nor with
    ``onSendFailure=spool`` or ``requireStoreOk=ok``.
    """
    enable_trace: bool | str
    """Write message traces, which RocketMQ's dashboard and ``mqadmin queryMsgTraceById`` show (docs/traces.md)."""
    trace_topic: str
    """Topic of the message traces; brokers create the default one with ``traceTopicEnable=true``."""
    open_telemetry: bool | str
    """Create OpenTelemetry spans and metrics, and propagate trace contexts in messages' properties (docs/opentelemetry.md)."""


class ConsumerOptions(AdminOptions, total=False):
    """Keywords of ``Consumer``."""

    allocation_strategy: Callable[..., Any] | str
    """How queues are assigned to Spark partitions: ``averagely``, ``averagelyByCircle``, ``consistentHash``, ``config``,
    ``machineRoom``, ``machineRoomNearby``, ``environment``, or ``module:callable``. For the strategy, partitions are
    consumers named ``partition-00000``, …; a queue that it assigns to no partition (as ``config``, ``machineRoom`` or a
    callable may) is not read, and a warning names it. In a ``Consumer`` or ``PullConsumer``: how queues are assigned to the
    members of the group, with the same strategies except ``machineRoomNearby``.
    """
    allocation_config: Mapping[str, Any] | str
    """Queues for the strategy ``config``: JSON ``{"orders":{"broker-a":[0,1]}}``, or the same by partition:
    ``{"partition-00000":{"orders":{"broker-a":[0]}}}``.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses; brokers are named ``room@name``."""
    pull_batch_size: int | str
    """Maximum number of messages to request per pull; the broker may send fewer. At most 1024 for consumers."""
    enable_trace: bool | str
    """Write message traces, which RocketMQ's dashboard and ``mqadmin queryMsgTraceById`` show (docs/traces.md)."""
    trace_topic: str
    """Topic of the message traces; brokers create the default one with ``traceTopicEnable=true``."""
    open_telemetry: bool | str
    """Create OpenTelemetry spans and metrics, and propagate trace contexts in messages' properties (docs/opentelemetry.md)."""
    consume_from_where: int | str
    """Where a queue starts for which the group has no offset: ``latest``, ``earliest``, or the first message stored at or
    after a time (ISO-8601 or epoch ms).
    """
    auto_commit: bool | str
    """``PullConsumer``: ``poll`` commits offsets of messages from earlier polls, ``close`` those of all but the last poll.
    Ordered ``Consumer``: messages are done when the listener returns None; if false, when it returns ``context.commit()``.
    """
    pull_threshold_for_queue: int | str
    """A queue is not pulled while it has more unfinished messages (``Consumer``) or offsets that wait for a poll
    (``PullConsumer``) than this.
    """
    model: str
    """``clustering``: members of the group share the queues; ``broadcasting``: each member gets all messages, and one that
    failed is not delivered again unless ``ordered``.
    """
    ordered: bool | str
    """Process messages of a queue one after the other; failed ones are retried in place."""
    arrow: bool | str
    """Call the listener with Arrow record batches, which have the columns of ``poll_arrow``."""
    consume_thread_min: int | str
    """Number of threads that call the listener."""
    consume_message_batch_max_size: int | str
    """Most messages per call of the listener; with ``arrow`` the default is 1024 rows."""
    pull_batch_size_in_bytes: int | str
    """Most bytes to request per pull, if brokers support it."""
    pull_interval: float | str
    """Pause between two pulls of a queue."""
    pull_time_delay_when_exception: float | str
    """Pause after a failed pull."""
    pull_threshold_size_for_queue: int | str
    """A queue is not pulled while it has more waiting bytes."""
    pull_threshold_for_topic: int | str
    """Most unfinished messages of a topic, divided among its assigned queues."""
    pull_threshold_size_for_topic: int | str
    """Most unfinished bytes of a topic, divided among its assigned queues."""
    consume_concurrently_max_span: int | str
    """A queue is not pulled while its waiting offsets span more than this; not if ``ordered``."""
    max_reconsume_times: int | str
    """How often a failed message is delivered again before it goes to the group's dead-letter topic, ``%DLQ%<group>``."""
    suspend_current_queue_time: float | str
    """How long an ordered queue pauses after a failure: 10ms to 30s."""
    consume_timeout: float | str
    """A message that the listener has for longer is delivered again, or dropped with ``model=broadcasting``, so that the
    offset of its queue can advance; the listener is not interrupted. Does not apply if ``ordered``.
    """
    persist_consumer_offset_interval: float | str
    """How often offsets are committed."""
    rebalance_interval: float | str
    """How often the assignment of queues is checked; at least 1s."""
    post_subscription_when_pull: bool | str
    """Send the filter with each pull, not only with heartbeats."""
    answer_stacks: bool | str
    """Whether a broker's request for the state of a member (``mqadmin consumerStatus -s``) may include the stacks of this
    process's threads, as in Java.
    """
    answer_direct_messages: bool | str
    """Whether a broker may pass a message of a subscribed topic directly to the listener (``mqadmin queryMsgById -d``); the
    broker gets the text of the listener's exception, as in Java.
    """
    local_offsets_dir: str
    """Where a broadcasting consumer stores its offsets, by host, group and name servers; give each consumer of a group on a
    machine its own folder.
    """


class PullConsumerOptions(AdminOptions, total=False):
    """Keywords of ``PullConsumer``."""

    allocation_strategy: Callable[..., Any] | str
    """How queues are assigned to Spark partitions: ``averagely``, ``averagelyByCircle``, ``consistentHash``, ``config``,
    ``machineRoom``, ``machineRoomNearby``, ``environment``, or ``module:callable``. For the strategy, partitions are
    consumers named ``partition-00000``, …; a queue that it assigns to no partition (as ``config``, ``machineRoom`` or a
    callable may) is not read, and a warning names it. In a ``Consumer`` or ``PullConsumer``: how queues are assigned to the
    members of the group, with the same strategies except ``machineRoomNearby``.
    """
    allocation_config: Mapping[str, Any] | str
    """Queues for the strategy ``config``: JSON ``{"orders":{"broker-a":[0,1]}}``, or the same by partition:
    ``{"partition-00000":{"orders":{"broker-a":[0]}}}``.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses; brokers are named ``room@name``."""
    pull_batch_size: int | str
    """Maximum number of messages to request per pull; the broker may send fewer. At most 1024 for consumers."""
    open_telemetry: bool | str
    """Create OpenTelemetry spans and metrics, and propagate trace contexts in messages' properties (docs/opentelemetry.md)."""
    consume_from_where: int | str
    """Where a queue starts for which the group has no offset: ``latest``, ``earliest``, or the first message stored at or
    after a time (ISO-8601 or epoch ms).
    """
    auto_commit: bool | str
    """``PullConsumer``: ``poll`` commits offsets of messages from earlier polls, ``close`` those of all but the last poll.
    Ordered ``Consumer``: messages are done when the listener returns None; if false, when it returns ``context.commit()``.
    """
    auto_commit_interval: float | str
    """Minimum time between commits."""
    pull_threshold_for_queue: int | str
    """A queue is not pulled while it has more unfinished messages (``Consumer``) or offsets that wait for a poll
    (``PullConsumer``) than this.
    """
    pull_threshold_size_for_queue: int | str
    """A queue is not pulled while it has more waiting bytes."""
    answer_stacks: bool | str
    """Whether a broker's request for the state of a member (``mqadmin consumerStatus -s``) may include the stacks of this
    process's threads, as in Java.
    """


class SimpleConsumerOptions(AdminOptions, total=False):
    """Keywords of ``SimpleConsumer``."""

    open_telemetry: bool | str
    """Create OpenTelemetry spans and metrics, and propagate trace contexts in messages' properties (docs/opentelemetry.md)."""


class SourceOptions(AdminOptions, total=False):
    """Keywords of ``read_rocketmq``."""

    route_refresh: float | str
    """Maximum age of a route when a batch is planned."""
    subscribe: Sequence[str] | str
    """Topics to read; required, or ``subscribePattern``/``assign``."""
    subscribe_pattern: str
    """Regular expression for whole topic names, without system, retry and dead-letter topics."""
    assign: Mapping[str, Any] | str
    """Queues to read, JSON ``{"t":{"broker-a":[0,1]}}``; only those of the ``environment``."""
    topic_names: str
    """``dotsToUnderscores``: replaces ``.`` with ``_`` in topics of the options and of the sink's column ``topic``, because
    RocketMQ allows no dots: ``server.shop.orders`` is topic ``server_shop_orders``. Two names for one topic are an error.
    An error with ``subscribePattern``, which matches RocketMQ's names; the source's column ``topic`` has RocketMQ's names,
    too.
    """
    include_internal: bool | str
    """Let ``subscribePattern`` also match retry and dead-letter topics."""
    tags: Mapping[str, str] | str
    """Tags to read, ``a || b``, filtered by the broker and checked again by the reader; JSON for a filter per topic. A filter
    leaves gaps in the offsets, which is normal.
    """
    sql: Mapping[str, str] | str
    """SQL92 expression over properties, instead of ``tags``; JSON for one per topic. Requires ``enablePropertyFilter=true`` on
    brokers (not their default); not through a Proxy, nor for batch topics.
    """
    starting_offsets: Mapping[str, Any] | str
    """``earliest``, ``latest``, ``committed`` (with ``group``), or JSON ``{"t":{"broker-a":{"0":17,"1":-2}}}`` (−2 earliest,
    −1 latest) for every queue, or ``{"t":"earliest"}`` for all queues of a topic, also mixed. A stream's checkpoint
    overrides it; a batch cannot start at the end.
    """
    committed_fallback: str
    """Where a queue without a committed offset of the group starts: ``earliest`` or ``latest``; ``error`` raises instead."""
    starting_timestamp: int | str
    """First message stored from a time on (ISO-8601 or epoch ms); overrides ``startingOffsets``,
    ``startingOffsetsByTimestamp``.
    """
    starting_offsets_by_timestamp: Mapping[str, Any] | str
    """First message stored at or after a time, in epoch ms: JSON ``{"t":{"broker-a":{"0":1767225600000}}}`` for every queue;
    overrides ``startingOffsets``.
    """
    starting_offsets_by_timestamp_strategy: str
    """If all messages of a queue are older than the starting time: ``latest`` starts at its end, ``error`` raises; for
    ``startingTimestamp``, too. An empty queue starts at its end.
    """
    ending_offsets: Mapping[str, Any] | str
    """``latest``, or JSON ``{"t":{"broker-a":{"0":17,"1":-1}}}`` (−1 latest) for every queue: the first offset not to read;
    ``{"t":"latest"}`` for all queues of a topic.
    """
    ending_timestamp: int | str
    """Messages stored before this time; overrides the two other ending options. A queue that starts after its end is an error,
    except with ``startingOffsets=committed``.
    """
    ending_offsets_by_timestamp: Mapping[str, Any] | str
    """Messages stored before a time, in epoch ms: JSON ``{"t":{"broker-a":{"0":1767225600000}}}`` for every queue; overrides
    ``endingOffsets``.
    """
    fail_on_data_loss: bool | str
    """What to do if offsets no longer exist when they are to be read: ``fail``/``true``, ``warn`` or ``ignore``/``false``."""
    allocation_strategy: Callable[..., Any] | str
    """How queues are assigned to Spark partitions: ``averagely``, ``averagelyByCircle``, ``consistentHash``, ``config``,
    ``machineRoom``, ``machineRoomNearby``, ``environment``, or ``module:callable``. For the strategy, partitions are
    consumers named ``partition-00000``, …; a queue that it assigns to no partition (as ``config``, ``machineRoom`` or a
    callable may) is not read, and a warning names it. In a ``Consumer`` or ``PullConsumer``: how queues are assigned to the
    members of the group, with the same strategies except ``machineRoomNearby``.
    """
    allocation_config: Mapping[str, Any] | str
    """Queues for the strategy ``config``: JSON ``{"orders":{"broker-a":[0,1]}}``, or the same by partition:
    ``{"partition-00000":{"orders":{"broker-a":[0]}}}``.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses; brokers are named ``room@name``."""
    partition_rooms: Sequence[str] | str
    """For ``machineRoomNearby``: room of each partition in order, repeated for further ones; brokers are named ``room@name``."""
    num_partitions: int | str
    """Number of partitions to which the strategy assigns queues, at most 10,000; ``auto``: one per 20,000 offsets, at most one
    per queue.
    """
    min_partitions: int | str
    """Split large ranges into about this many tasks."""
    max_records_per_partition: int | str
    """Maximum number of offsets of a task; larger ranges are split. Tasks are larger if more than 10,000 would be needed."""
    predicate_pushdown: bool | str
    """Let Spark predicates on topic, brokerName, queueId, queueOffset and tags shorten the read, if
    ``spark.sql.python.filterPushdown.enabled`` is set; for times use ``startingTimestamp`` and ``endingTimestamp``. Only
    for DataFrames that are used once: if a DataFrame is used again, Spark reads only the range of the first predicate.
    """
    columns: Sequence[str] | str
    """Columns to build, any of the schema; other columns are not decoded."""
    include_properties: str
    """Content of ``properties``: ``none`` (null), ``user`` (the properties of the user), or ``all`` (also those of RocketMQ)."""
    property_columns: Mapping[str, str] | str
    """Properties as additional typed columns: ``amount:bigint, region:string``; null if absent or not of the type."""
    metadata: str
    """``full`` adds offsetMsgId, flag, sysFlag, reconsumeTimes, bornHost, storeHost, commitLogOffset, storeSize."""
    kafka_columns: bool | str
    """Columns of Spark's Kafka connector instead of RocketMQ's: ``key``, ``value``, ``topic``, ``partition``, ``offset``,
    ``timestamp``, ``timestampType``, and with ``includeHeaders`` ``headers``; a sink takes ``key``, ``value``, ``topic``,
    ``partition`` and ``headers`` (docs/coming-from-kafka.md). In exactly-once queries, do not change it while a batch is
    unfinished.
    """
    include_headers: bool | str
    """A column ``headers`` with the properties, an array of names and binary values; null without any. Needs ``kafkaColumns``,
    and ``includeProperties`` other than ``none``.
    """
    topic_wait: float | str
    """How long a start waits until topics of ``subscribe`` or ``assign`` exist, or one that matches ``subscribePattern``.
    After that the start fails, except that a stream with ``subscribePattern`` starts, and waits for its first topic. While
    a start waits for a topic, ``numRetries`` and ``readDeadline`` do not count.
    """
    read_from: str
    """``master``, a ``slave`` if there is one, or the replica that the broker suggests (``hint``)."""
    max_bytes_in_flight: int | str
    """Maximum bytes requested by the unanswered pulls of a task."""
    pull_depth: int | str
    """Maximum number of unanswered pulls of a task."""
    pull_batch_size: int | str
    """Maximum number of messages to request per pull; the broker may send fewer. At most 1024 for consumers."""
    bad_message: str
    """For a message that cannot be decoded: ``fail`` raises an error that names the message and the remedies; ``null`` returns
    a row with a null body and the cause in ``decodeError`` (with ``metadata=full``); ``skip`` counts and logs it.
    """
    read_deadline: float | str
    """How long a task waits for a silent broker before it fails. It also bounds how long a start from a checkpoint waits for
    name servers and brokers, a first start for a master, and a batch of ``availableNow`` for the messages that it must
    read. Other batches do not wait: they leave out brokers that do not answer.
    """


class SinkOptions(AdminOptions, total=False):
    """Keywords of ``foreach_batch_writer`` and ``write_rocketmq``."""

    topic_names: str
    """``dotsToUnderscores``: replaces ``.`` with ``_`` in topics of the options and of the sink's column ``topic``, because
    RocketMQ allows no dots: ``server.shop.orders`` is topic ``server_shop_orders``. Two names for one topic are an error.
    An error with ``subscribePattern``, which matches RocketMQ's names; the source's column ``topic`` has RocketMQ's names,
    too.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses; brokers are named ``room@name``."""
    kafka_columns: bool | str
    """Columns of Spark's Kafka connector instead of RocketMQ's: ``key``, ``value``, ``topic``, ``partition``, ``offset``,
    ``timestamp``, ``timestampType``, and with ``includeHeaders`` ``headers``; a sink takes ``key``, ``value``, ``topic``,
    ``partition`` and ``headers`` (docs/coming-from-kafka.md). In exactly-once queries, do not change it while a batch is
    unfinished.
    """
    topic: str
    """Topic of all rows; overrides the column ``topic``."""
    queue_selector: Callable[..., Any] | str
    """``roundRobin``, ``random``, ``hash`` (of column ``shardingKey``, as in Java), ``machineRoom``, ``environment``,
    ``column`` (``queueId``, ``brokerName``), or ``module:callable(queues, message, key)``. If the option is not set, a
    column ``queueId`` selects ``column``, and a column ``shardingKey`` selects ``hash``. Rows whose ``shardingKey`` is null
    or empty, or whose ``queueId`` is null, go round robin; with both columns, a row without a ``queueId`` goes to the queue
    of its ``shardingKey``, unless the option is set. With ``kafkaColumns``, a column ``partition`` chooses the queue (then
    this option is an error), and a column ``key`` stands for ``shardingKey``.
    """
    send_timeout: float | str
    """Timeout of one batch, including all retries. In the sink only round-robin, random and machine room batches may move to
    another broker; the others wait for their queue.
    """
    max_message_size: int | str
    """Maximum size of a body; a larger one is an error that names the row. A sink may have sent rows of other Arrow batches."""
    send_latency_fault: bool | str
    """Avoid brokers that are slow or fail: ``true``, ``false``, or a preset of durations: ``current``, ``4.x``."""
    latency_max: str
    """Latency thresholds of ``sendLatencyFault``, ascending, such as ``50ms,100ms,550ms``."""
    not_available_duration: str
    """How long to avoid a broker after each latency: one value for each of ``latencyMax``."""
    auto_batch: bool | str
    """Combine single messages into batches. If false, the sink sends every row as a message of its own."""
    batch_max_bytes: int | str
    """Size of one batch on the wire (sink), or the size of the bodies at which a batch is sent (``Producer``)."""
    batch_by_tag: str
    """In a batch topic, put only rows of one tag into a batch, so that brokers can filter (docs/batch-topics.md). ``true``:
    also if rows name their queues; order then holds within each tag only. ``auto``: only if rows do not name queues, for up
    to 16 tags in an Arrow batch.
    """
    total_batch_max_bytes: int | str
    """Maximum size of waiting bodies (``Producer``), or of all unacknowledged batches of a task (sink)."""
    max_in_flight: int | str
    """Maximum number of unacknowledged batches of a task per broker; a queue whose order is kept has one at a time."""
    compress_above: int | str
    """Compress bodies from this size on if they are sent alone; never batches (of the sink, of ``autoBatch``), nor over gRPC."""
    compression: str
    """``none``, ``zlib``, ``lz4`` or ``zstd`` (``lz4`` and ``zstd`` need pyarrow); not over gRPC."""
    require_store_ok: str
    """``any`` accepts messages that are stored but not yet flushed or copied to a slave; ``ok`` sends them again, which may
    store them twice, and fails if no attempt is stored safely.
    """
    on_send_failure: str
    """If a send fails temporarily: ``fail`` raises an error, ``spool`` stores it in ``spoolDir`` and sends it later
    (docs/spool.md).
    """
    spool_dir: str
    """Required with ``onSendFailure=spool``: a folder on a disk that outlives the process and, in a sink, the worker. Each
    ``Producer`` needs a folder of its own; worker processes of a sink use subfolders.
    """
    spool_sync: str
    """How a SPOOLED message is flushed to disk before its send returns: ``always`` flushes for each send, ``batch`` once for
    all waiting sends. ``never`` leaves the flush to the operating system: messages survive a crash of the process, but not
    of the machine.
    """
    spool_max_bytes: int | str
    """Size of the spool, dead letters included, at which sends fail."""
    long_delay: str
    """What to do with delays that brokers do not support (longer than ``timerMaxDelaySec``, timers switched off, or brokers
    before 5.0): raise an ``error``, or use the delay service, which must run (``dmq``, docs/delay.md).
    """
    message_id: str
    """Column that identifies a row, sent as property ``SPARK_ROW_ID``, by which readers can drop duplicates."""
    empty_bodies: str
    """What the sink does with a row whose body is null or empty, which brokers refuse: ``refuse`` is an error; ``mark`` sends
    one zero byte with the property ``deleted`` (``null`` or ``empty``). The source with ``kafkaColumns`` returns null or an
    empty value. In exactly-once queries, do not change it while a batch is unfinished.
    """
    delivery_guarantee: str
    """``exactly-once``: a repeated batch or task omits rows that are already stored (docs/exactly-once.md)."""
    allowed_topics: Sequence[str] | str
    """Topics that rows may name in column ``topic``, if there is no option ``topic``; ``exactly-once`` requires the complete
    list.
    """
    exactly_once_settle: float | str
    """How long earlier requests may still arrive at a broker: messages that it lacks count as not stored only after this time.
    Sink with ``exactly-once``: at least 4s, and 2s more than ``spark.python.task.killTimeout``; ``Producer`` with
    ``confirmAmbiguous``: more than 2s. Can be set only with one of these two options.
    """
