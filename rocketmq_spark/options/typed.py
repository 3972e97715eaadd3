"""Keywords of constructors and writers, with their types. Written by ``make docs`` from the table of options.

Durations are milliseconds, or text such as ``3s``; sizes are bytes, or text such as ``4m``. What is not given has the
default that docs/options.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class ProducerOptions(TypedDict, total=False):
    """Keywords of ``Producer``."""

    proxy_endpoint: str
    """``host:port`` of a Proxy's gRPC port, several with ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers."""
    access_key: str
    """User of the ACL; every request is signed."""
    secret_key: str
    """Its secret."""
    security_token: str
    """Temporary token that goes with the keys."""
    credentials_file: str
    """File with lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…``, read where a connection is made."""
    credentials_provider: str
    """``module:callable`` that gives access key, secret key and token (or None), called where a connection is made."""
    tls: bool | str
    """Talk TLS to name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of its key."""
    tls_key_password: str
    """Password of the key file."""
    tls_check_hostname: bool | str
    """Certificates must name the host or address that was dialled."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it is not the host's."""
    namespace: str
    """Prefixed to topics and groups as the Java client does."""
    transport: str
    """``remoting``: brokers directly, or through the Remoting port of a Proxy in cluster mode given as
    ``nameServer``; ``grpc``: the Proxy at ``proxyEndpoint``, for all that sends and for POP consumers, not for
    sources (docs/grpc.md).
    """
    connect_timeout: float | str
    """For one connection."""
    request_timeout: float | str
    """For one request."""
    num_retries: int | str
    """How often a failed metadata question is asked again."""
    retry_interval: float | str
    """First pause between these; it doubles, with jitter."""
    environment: str
    """Read and write only what belongs to one environment: its number or name. Consumers of environment ``dev``
    are members of group ``<group>_env_dev``, whose retries and dead letters are its own.
    """
    environment_mode: str
    """What belongs to it: some ``queues`` of each topic, or with ``suffix`` topics and groups of its own, whose
    names brokers know with ``_`` and the environment's name behind them.
    """
    environments: Mapping[str, Any] | str
    """How many share the queues, or JSON ``{"test":{"broker-a":[0,1]}}``; by default each has one. A stream's sink
    needs it.
    """
    send_timeout: float | str
    """Whole time for one batch with all its retries. In the sink only round-robin, random and machine room batches
    may move to another broker; the others wait for their queue.
    """
    max_message_size: int | str
    """A larger body is an error that names the row; checked before sending."""
    send_latency_fault: bool | str
    """Avoid brokers that are slow or failing: ``true``, ``false``, or a table of durations by name: ``current``,
    ``4.x``.
    """
    latency_max: str
    """Latencies of that table, ascending, such as ``50ms,100ms,550ms``."""
    not_available_duration: str
    """How long a broker of each latency is avoided, as many as ``latencyMax``."""
    auto_batch: bool | str
    """Messages sent one by one travel in batches; without it every row of a sink is a message that travels alone."""
    batch_max_bytes: int | str
    """Size of one batch on the wire (sink), or of the bodies that fill one (``Producer``)."""
    batch_max_delay: float | str
    """How long a message waits for company; rows never wait."""
    total_batch_max_bytes: int | str
    """Bound of the bodies that wait, or in a task of a sink of everything not acknowledged yet."""
    compress_above: int | str
    """Bodies from this size on are compressed when they travel alone; in batches never, as in Java."""
    compression: str
    """``none``, ``zlib``, ``lz4`` or ``zstd``."""
    require_store_ok: str
    """``any`` accepts messages that are stored but not yet flushed or copied, ``ok`` sends them again."""
    on_send_failure: str
    """What cannot be sent for passing reasons: an error, or it is kept in ``spoolDir`` and sent later
    (docs/spool.md).
    """
    spool_dir: str
    """Folder of the spool, which is made: one for each ``Producer``; of a sink each worker process has one below it."""
    spool_sync: str
    """Before SPOOLED is said the disk has it: each send by itself, or those of a moment together; ``never``
    survives the process and not the machine.
    """
    spool_max_bytes: int | str
    """How much a spool may hold, dead letters included; then sends fail."""
    long_delay: str
    """Delays that the timers of brokers do not serve (longer than ``timerMaxDelaySec``, switched off, older than
    5.0): an error, or through the delay service, which must run (docs/delay.md).
    """
    exactly_once_settle: float | str
    """For how long earlier requests may still arrive, before a row counts as not stored: above 2s, 4s in a sink."""
    confirm_ambiguous: bool | str
    """A send whose answer is lost is looked up at its broker before it is repeated (docs/exactly-once.md)."""


class ConsumerOptions(TypedDict, total=False):
    """Keywords of ``Consumer``."""

    proxy_endpoint: str
    """``host:port`` of a Proxy's gRPC port, several with ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers."""
    access_key: str
    """User of the ACL; every request is signed."""
    secret_key: str
    """Its secret."""
    security_token: str
    """Temporary token that goes with the keys."""
    credentials_file: str
    """File with lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…``, read where a connection is made."""
    credentials_provider: str
    """``module:callable`` that gives access key, secret key and token (or None), called where a connection is made."""
    tls: bool | str
    """Talk TLS to name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of its key."""
    tls_key_password: str
    """Password of the key file."""
    tls_check_hostname: bool | str
    """Certificates must name the host or address that was dialled."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it is not the host's."""
    namespace: str
    """Prefixed to topics and groups as the Java client does."""
    transport: str
    """``remoting``: brokers directly, or through the Remoting port of a Proxy in cluster mode given as
    ``nameServer``; ``grpc``: the Proxy at ``proxyEndpoint``, for all that sends and for POP consumers, not for
    sources (docs/grpc.md).
    """
    connect_timeout: float | str
    """For one connection."""
    request_timeout: float | str
    """For one request."""
    num_retries: int | str
    """How often a failed metadata question is asked again."""
    retry_interval: float | str
    """First pause between these; it doubles, with jitter."""
    allocation_strategy: Callable[..., Any] | str
    """How queues are grouped into Spark partitions: ``averagely``, ``averagelyByCircle``, ``consistentHash``,
    ``config``, ``machineRoom``, ``machineRoomNearby``, ``environment``, or ``module:callable``. The consumers
    are ``partition-00000``, …; of consumers the members of their group, with the first three, ``config``,
    ``machineRoom``, ``environment`` (averagely within it) or a callable.
    """
    allocation_config: Mapping[str, Any] | str
    """Queues of the strategy ``config``: JSON ``{"orders":{"broker-a":[0,1]}}``, or that by partition:
    ``{"partition-00000":{"orders":{"broker-a":[0]}}}``.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses."""
    environment: str
    """Read and write only what belongs to one environment: its number or name. Consumers of environment ``dev``
    are members of group ``<group>_env_dev``, whose retries and dead letters are its own.
    """
    environment_mode: str
    """What belongs to it: some ``queues`` of each topic, or with ``suffix`` topics and groups of its own, whose
    names brokers know with ``_`` and the environment's name behind them.
    """
    environments: Mapping[str, Any] | str
    """How many share the queues, or JSON ``{"test":{"broker-a":[0,1]}}``; by default each has one. A stream's sink
    needs it.
    """
    pull_batch_size: int | str
    """Most messages asked for per pull; the broker decides what it sends. At most 1024 of consumers."""
    consume_from_where: int | str
    """Where a queue begins for which the group has no offset: ``latest``, ``earliest``, or the first message
    stored at or after a time (ISO-8601 or epoch ms).
    """
    auto_commit: bool | str
    """Offsets of what earlier polls gave are committed now and then by a poll, and at the close. Of an ordered
    ``Consumer``: messages are finished when the listener returns; else when it says ``context.commit()``.
    """
    pull_threshold_for_queue: int | str
    """A queue is not pulled on while more of its messages wait for listener or commit, or so many of its offsets
    to be polled.
    """
    model: str
    """Members of the group share the queues, or each gets all of them."""
    ordered: bool | str
    """Messages of a queue one after the other; what fails is tried again in place."""
    consume_thread_min: int | str
    """Threads that call the listener."""
    consume_message_batch_max_size: int | str
    """Most messages in one call of the listener."""
    pull_batch_size_in_bytes: int | str
    """Most bytes asked for per pull, where brokers know this."""
    pull_interval: float | str
    """Pause between two pulls of a queue."""
    pull_time_delay_when_exception: float | str
    """Pause after a pull that failed."""
    pull_threshold_size_for_queue: int | str
    """A queue is not pulled on while more bytes of it wait."""
    pull_threshold_for_topic: int | str
    """Messages that may wait of a topic, shared by its queues here."""
    pull_threshold_size_for_topic: int | str
    """Bytes that may wait of a topic, shared by its queues here."""
    consume_concurrently_max_span: int | str
    """A queue is not pulled on while the offsets that wait lie further apart; not where ``ordered``."""
    max_reconsume_times: int | str
    """How often a failed message comes again before it goes to ``%DLQ%`` and the group's name."""
    suspend_current_queue_time: float | str
    """Pause of a queue of an ordered consumer after a failure: 10ms to 30s."""
    consume_timeout: float | str
    """A message that the listener has for longer is sent back, so that the offset of its queue goes on."""
    persist_consumer_offset_interval: float | str
    """How often offsets are stored."""
    rebalance_interval: float | str
    """How often queues are shared out again while no broker reports a change; a second at least."""
    post_subscription_when_pull: bool | str
    """Pulls bring the filter along instead of trusting in the last heartbeat."""
    local_offsets_dir: str
    """Where a broadcasting consumer keeps its offsets, by host and group: each on a machine needs a folder of its
    own.
    """


class PullConsumerOptions(TypedDict, total=False):
    """Keywords of ``PullConsumer``."""

    proxy_endpoint: str
    """``host:port`` of a Proxy's gRPC port, several with ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers."""
    access_key: str
    """User of the ACL; every request is signed."""
    secret_key: str
    """Its secret."""
    security_token: str
    """Temporary token that goes with the keys."""
    credentials_file: str
    """File with lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…``, read where a connection is made."""
    credentials_provider: str
    """``module:callable`` that gives access key, secret key and token (or None), called where a connection is made."""
    tls: bool | str
    """Talk TLS to name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of its key."""
    tls_key_password: str
    """Password of the key file."""
    tls_check_hostname: bool | str
    """Certificates must name the host or address that was dialled."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it is not the host's."""
    namespace: str
    """Prefixed to topics and groups as the Java client does."""
    transport: str
    """``remoting``: brokers directly, or through the Remoting port of a Proxy in cluster mode given as
    ``nameServer``; ``grpc``: the Proxy at ``proxyEndpoint``, for all that sends and for POP consumers, not for
    sources (docs/grpc.md).
    """
    connect_timeout: float | str
    """For one connection."""
    request_timeout: float | str
    """For one request."""
    num_retries: int | str
    """How often a failed metadata question is asked again."""
    retry_interval: float | str
    """First pause between these; it doubles, with jitter."""
    allocation_strategy: Callable[..., Any] | str
    """How queues are grouped into Spark partitions: ``averagely``, ``averagelyByCircle``, ``consistentHash``,
    ``config``, ``machineRoom``, ``machineRoomNearby``, ``environment``, or ``module:callable``. The consumers
    are ``partition-00000``, …; of consumers the members of their group, with the first three, ``config``,
    ``machineRoom``, ``environment`` (averagely within it) or a callable.
    """
    allocation_config: Mapping[str, Any] | str
    """Queues of the strategy ``config``: JSON ``{"orders":{"broker-a":[0,1]}}``, or that by partition:
    ``{"partition-00000":{"orders":{"broker-a":[0]}}}``.
    """
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses."""
    environment: str
    """Read and write only what belongs to one environment: its number or name. Consumers of environment ``dev``
    are members of group ``<group>_env_dev``, whose retries and dead letters are its own.
    """
    environment_mode: str
    """What belongs to it: some ``queues`` of each topic, or with ``suffix`` topics and groups of its own, whose
    names brokers know with ``_`` and the environment's name behind them.
    """
    environments: Mapping[str, Any] | str
    """How many share the queues, or JSON ``{"test":{"broker-a":[0,1]}}``; by default each has one. A stream's sink
    needs it.
    """
    pull_batch_size: int | str
    """Most messages asked for per pull; the broker decides what it sends. At most 1024 of consumers."""
    consume_from_where: int | str
    """Where a queue begins for which the group has no offset: ``latest``, ``earliest``, or the first message
    stored at or after a time (ISO-8601 or epoch ms).
    """
    auto_commit: bool | str
    """Offsets of what earlier polls gave are committed now and then by a poll, and at the close. Of an ordered
    ``Consumer``: messages are finished when the listener returns; else when it says ``context.commit()``.
    """
    auto_commit_interval: float | str
    """How often, at most."""
    pull_threshold_for_queue: int | str
    """A queue is not pulled on while more of its messages wait for listener or commit, or so many of its offsets
    to be polled.
    """
    pull_threshold_size_for_queue: int | str
    """A queue is not pulled on while more bytes of it wait."""


class SimpleConsumerOptions(TypedDict, total=False):
    """Keywords of ``SimpleConsumer``."""

    proxy_endpoint: str
    """``host:port`` of a Proxy's gRPC port, several with ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers."""
    access_key: str
    """User of the ACL; every request is signed."""
    secret_key: str
    """Its secret."""
    security_token: str
    """Temporary token that goes with the keys."""
    credentials_file: str
    """File with lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…``, read where a connection is made."""
    credentials_provider: str
    """``module:callable`` that gives access key, secret key and token (or None), called where a connection is made."""
    tls: bool | str
    """Talk TLS to name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of its key."""
    tls_key_password: str
    """Password of the key file."""
    tls_check_hostname: bool | str
    """Certificates must name the host or address that was dialled."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it is not the host's."""
    namespace: str
    """Prefixed to topics and groups as the Java client does."""
    transport: str
    """``remoting``: brokers directly, or through the Remoting port of a Proxy in cluster mode given as
    ``nameServer``; ``grpc``: the Proxy at ``proxyEndpoint``, for all that sends and for POP consumers, not for
    sources (docs/grpc.md).
    """
    connect_timeout: float | str
    """For one connection."""
    request_timeout: float | str
    """For one request."""
    num_retries: int | str
    """How often a failed metadata question is asked again."""
    retry_interval: float | str
    """First pause between these; it doubles, with jitter."""
    environment: str
    """Read and write only what belongs to one environment: its number or name. Consumers of environment ``dev``
    are members of group ``<group>_env_dev``, whose retries and dead letters are its own.
    """
    environment_mode: str
    """What belongs to it: some ``queues`` of each topic, or with ``suffix`` topics and groups of its own, whose
    names brokers know with ``_`` and the environment's name behind them.
    """
    environments: Mapping[str, Any] | str
    """How many share the queues, or JSON ``{"test":{"broker-a":[0,1]}}``; by default each has one. A stream's sink
    needs it.
    """


class SinkOptions(TypedDict, total=False):
    """Keywords of ``foreach_batch_writer`` and ``write_rocketmq``."""

    proxy_endpoint: str
    """``host:port`` of a Proxy's gRPC port, several with ``;``; for ``transport=grpc``."""
    address_map: Mapping[str, str] | str
    """JSON ``{"advertised:port": "reachable:port"}`` for NAT and containers."""
    access_key: str
    """User of the ACL; every request is signed."""
    secret_key: str
    """Its secret."""
    security_token: str
    """Temporary token that goes with the keys."""
    credentials_file: str
    """File with lines ``accessKey=…``, ``secretKey=…``, ``securityToken=…``, read where a connection is made."""
    credentials_provider: str
    """``module:callable`` that gives access key, secret key and token (or None), called where a connection is made."""
    tls: bool | str
    """Talk TLS to name servers and brokers."""
    tls_ca_file: str
    """PEM file of the authorities to trust (default: the system's)."""
    tls_cert_file: str
    """PEM file of the client's certificate."""
    tls_key_file: str
    """PEM file of its key."""
    tls_key_password: str
    """Password of the key file."""
    tls_check_hostname: bool | str
    """Certificates must name the host or address that was dialled."""
    tls_server_name: str
    """For ``transport=grpc``: the name in the certificate, if it is not the host's."""
    namespace: str
    """Prefixed to topics and groups as the Java client does."""
    transport: str
    """``remoting``: brokers directly, or through the Remoting port of a Proxy in cluster mode given as
    ``nameServer``; ``grpc``: the Proxy at ``proxyEndpoint``, for all that sends and for POP consumers, not for
    sources (docs/grpc.md).
    """
    connect_timeout: float | str
    """For one connection."""
    request_timeout: float | str
    """For one request."""
    num_retries: int | str
    """How often a failed metadata question is asked again."""
    retry_interval: float | str
    """First pause between these; it doubles, with jitter."""
    machine_rooms: Sequence[str] | str
    """Rooms whose queues the strategy or selector ``machineRoom`` uses."""
    environment: str
    """Read and write only what belongs to one environment: its number or name. Consumers of environment ``dev``
    are members of group ``<group>_env_dev``, whose retries and dead letters are its own.
    """
    environment_mode: str
    """What belongs to it: some ``queues`` of each topic, or with ``suffix`` topics and groups of its own, whose
    names brokers know with ``_`` and the environment's name behind them.
    """
    environments: Mapping[str, Any] | str
    """How many share the queues, or JSON ``{"test":{"broker-a":[0,1]}}``; by default each has one. A stream's sink
    needs it.
    """
    topic: str
    """Where rows go; beats the column ``topic``."""
    queue_selector: Callable[..., Any] | str
    """``roundRobin``, ``random``, ``hash`` (of column ``shardingKey``, as Java does), ``machineRoom``,
    ``environment``, ``column`` (``queueId``, ``brokerName``; the default when there is such a column), or
    ``module:callable(queues, message, key)``.
    """
    send_timeout: float | str
    """Whole time for one batch with all its retries. In the sink only round-robin, random and machine room batches
    may move to another broker; the others wait for their queue.
    """
    max_message_size: int | str
    """A larger body is an error that names the row; checked before sending."""
    send_latency_fault: bool | str
    """Avoid brokers that are slow or failing: ``true``, ``false``, or a table of durations by name: ``current``,
    ``4.x``.
    """
    latency_max: str
    """Latencies of that table, ascending, such as ``50ms,100ms,550ms``."""
    not_available_duration: str
    """How long a broker of each latency is avoided, as many as ``latencyMax``."""
    auto_batch: bool | str
    """Messages sent one by one travel in batches; without it every row of a sink is a message that travels alone."""
    batch_max_bytes: int | str
    """Size of one batch on the wire (sink), or of the bodies that fill one (``Producer``)."""
    batch_by_tag: str
    """Rows of one tag share a batch in a batch topic, so that brokers can filter (docs/batch-topics.md): ``true``
    also where rows name their queues, whose order is then that of each tag; ``auto`` where they do not, for up
    to 16 tags in an Arrow batch.
    """
    total_batch_max_bytes: int | str
    """Bound of the bodies that wait, or in a task of a sink of everything not acknowledged yet."""
    max_in_flight: int | str
    """Batches of a task not acknowledged yet, per broker; a queue whose order is kept has one at a time."""
    compress_above: int | str
    """Bodies from this size on are compressed when they travel alone; in batches never, as in Java."""
    compression: str
    """``none``, ``zlib``, ``lz4`` or ``zstd``."""
    require_store_ok: str
    """``any`` accepts messages that are stored but not yet flushed or copied, ``ok`` sends them again."""
    on_send_failure: str
    """What cannot be sent for passing reasons: an error, or it is kept in ``spoolDir`` and sent later
    (docs/spool.md).
    """
    spool_dir: str
    """Folder of the spool, which is made: one for each ``Producer``; of a sink each worker process has one below it."""
    spool_sync: str
    """Before SPOOLED is said the disk has it: each send by itself, or those of a moment together; ``never``
    survives the process and not the machine.
    """
    spool_max_bytes: int | str
    """How much a spool may hold, dead letters included; then sends fail."""
    long_delay: str
    """Delays that the timers of brokers do not serve (longer than ``timerMaxDelaySec``, switched off, older than
    5.0): an error, or through the delay service, which must run (docs/delay.md).
    """
    message_id: str
    """Column that identifies a row; sent as property ``SPARK_ROW_ID``: readers drop repeated rows."""
    delivery_guarantee: str
    """``exactly-once``: a repeated batch or task leaves out the rows that are stored already (docs/exactly-once.md)."""
    allowed_topics: Sequence[str] | str
    """Topics that rows may name in column ``topic``; ``exactly-once`` needs them all."""
    exactly_once_settle: float | str
    """For how long earlier requests may still arrive, before a row counts as not stored: above 2s, 4s in a sink."""
