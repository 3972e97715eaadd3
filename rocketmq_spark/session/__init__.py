"""Creates the implementations of the ports for given options. Only this package chooses a transport.

All readers, writers and tasks of a process that have the same connection options share a client. ``base.process`` keeps the
clients of a process: a forked worker creates its own clients, and never uses the connections of its parent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rocketmq_spark import options as options_table
from rocketmq_spark.base import extras, process
from rocketmq_spark.base.budget import MAX_WAITING_BYTES, Budget
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.broker_client import BrokerClient
from rocketmq_spark.client.committer import RemotingCommitter
from rocketmq_spark.client.credentials import credentials_of
from rocketmq_spark.client.instance import ClientInstance, MemberRegistry
from rocketmq_spark.client.long_polls import LongPolls
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.client.name_servers import NameServers
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.pull_source import RemotingPulls
from rocketmq_spark.client.replies import AwaitedReplies, RemotingReplies
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.client.topic_attributes import TopicAttributesCache
from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.model.admin import RETENTION_NOT_KNOWN
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.parsing import AT_NAME_SERVER
from rocketmq_spark.ports import (
    GroupMember,
    OffsetCommitter,
    OffsetReader,
    PopMember,
    PullSource,
    Replies,
    RouteReader,
    Sender,
    SourcePorts,
)
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.remoting.protocol import max_pushed_frame_bytes
from rocketmq_spark.remoting.transport import (
    DEFAULT_UNDELIVERED_POLICY,
    MAX_UNCONFIRMED_S,
    DropUnsent,
    TlsSettings,
    UndeliveredPolicy,
)
from rocketmq_spark.session import proxy_clients
from rocketmq_spark.wire import bodies
from rocketmq_spark.wire.names import topic_problem

if TYPE_CHECKING:
    from rocketmq_spark.columnar.encode.encoder import Encoder
    from rocketmq_spark.producer.tracing import TraceProducer
    from rocketmq_spark.pull.puller import Puller
    from rocketmq_spark.session.telemetry import Instrumentation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """Implements the ports for one set of connection options. Other packages use only the ports; commands and tests also use the
    other fields.
    """

    rpc_client: RpcClient
    routes: Routes
    offset_reader: RemotingOffsetReader
    instance: ClientInstance
    sender: RemotingSender
    committer: RemotingCommitter
    member: RemotingMember
    pulls: RemotingPulls
    topic_attributes: TopicAttributesCache
    replies: RemotingReplies
    admin: BaseAdmin
    retry: Retry


_CLIENTS_KIND = "clients"
# The kind of entry in ``base.process`` for warnings that are logged once for each cluster.
_LOGGED_ONCE_KIND = "logged once"
# The kind of entry in ``base.process`` for spools, which ``close_all`` closes, too.
SPOOLS_KIND = "spools"


def client(options: Options) -> Client:
    """Return the client for these connection options in this process, created on first use."""
    if options.transport == transport.GRPC:
        raise OptionError(f"option 'transport' is 'grpc': {transport.NO_ADMINISTRATION}")
    return process.get_or_create(_CLIENTS_KIND, connection_key(options), lambda: _create_client(options))


def connection_key(options: Options) -> object:
    """Return the options that determine which servers are reached, and with which rights. A process stores facts about servers
    under these options, because a server's name is not enough: with other options, the same name may mean another server.
    """
    if options.transport == transport.GRPC:
        return proxy_clients.connection_key(options)
    return (
        options.name_server,
        _address_map(options),
        (options.access_key, options.secret_key, options.security_token),
        (options.credentials_file, options.credentials_provider, scope_of(options)),
        _tls(options),
        _allows_plain_text(options),
        options.connect_timeout,
        options.request_timeout,
        options.num_retries,
        options.retry_interval,
        _undelivered_policy(options),
        max_pushed_frame_bytes(options.max_message_size),
        options.max_connections,
    )


def _create_client(options: Options) -> Client:
    awaited_replies = AwaitedReplies()
    registry = MemberRegistry(awaited_replies.on_reply)
    pool = Pool(_connect_options(options), registry.on_request)
    rpc_client = RpcClient(pool, options.request_timeout, credentials_of(options), scope_of(options))
    routes = Routes(NameServers(rpc_client, options.name_server))
    instance = ClientInstance(registry, rpc_client, routes)
    broker_client, admin = BrokerClient(rpc_client, routes), BaseAdmin(options.name_server, rpc_client)
    topic_attributes = TopicAttributesCache(rpc_client, routes)
    sender_ = RemotingSender(rpc_client, routes, instance, topic_attributes)
    polls = LongPolls(rpc_client, routes, topic_attributes)
    retry = Retry(options.num_retries, options.retry_interval)
    return Client(
        rpc_client=rpc_client,
        routes=routes,
        offset_reader=RemotingOffsetReader(broker_client),
        instance=instance,
        sender=sender_,
        committer=RemotingCommitter(broker_client, admin, polls),
        member=RemotingMember(broker_client, routes, instance, sender_, polls),
        pulls=RemotingPulls(rpc_client, routes, topic_attributes, retry),
        topic_attributes=topic_attributes,
        replies=RemotingReplies(rpc_client, routes, instance, awaited_replies),
        admin=admin,
        retry=retry,
    )


def sender(options: Options) -> Sender:
    return proxy_clients.sender(options) if options.transport == transport.GRPC else client(options).sender


def row_encoder(options: Options) -> Callable[..., Encoder]:
    """Return the function that creates the sink's encoder of columns for a transport; its arguments are those of ``Encoder``."""
    if options.transport == transport.GRPC:
        return proxy_clients.row_encoder(options)
    from rocketmq_spark.columnar.encode.encoder import Encoder

    return Encoder


def replies(options: Options) -> Replies | None:
    return None if options.transport == transport.GRPC else client(options).replies


def message_types(options: Options, topic: str, deadline: Deadline) -> frozenset[str] | None:
    """Return the message types that a topic accepts; None if the transport does not check types, as over remoting."""
    return proxy_clients.sender(options).message_types(topic, deadline) if options.transport == transport.GRPC else None


def routes(options: Options) -> RouteReader:
    return client(options).routes


def offsets(options: Options) -> OffsetReader:
    return client(options).offset_reader


def source_ports(options: Options) -> SourcePorts:
    remoting_client = client(options)
    return SourcePorts(remoting_client.routes, remoting_client.offset_reader)


def committer(options: Options) -> OffsetCommitter:
    return client(options).committer


def member(options: Options) -> GroupMember:
    return client(options).member


def pop_member(options: Options) -> PopMember:
    return proxy_clients.pop_member(options)


def pulls(options: Options) -> PullSource:
    return client(options).pulls


def _connect_options(options: Options) -> ConnectOptions:
    address_map, at_name_server = _address_map(options)
    return ConnectOptions(
        options.connect_timeout,
        _tls(options),
        dict(address_map),
        at_name_server,
        _undelivered_policy(options),
        _allows_plain_text(options),
        max_pushed_bytes := max_pushed_frame_bytes(options.max_message_size),
        options.max_connections,
        waiting_budget=Budget(max(MAX_WAITING_BYTES, 4 * max_pushed_bytes)),
    )


def _allows_plain_text(options: Options) -> bool:
    """Whether ``tls=false`` is given, and not just the default."""
    return "tls" in options.given_fields and not options.tls


def _address_map(options: Options) -> tuple[tuple[tuple[str, str], ...], bool]:
    """The pairs of option 'addressMap', and whether its value is ``nameServer``."""
    if isinstance(options.address_map, str):
        return (), options.address_map == AT_NAME_SERVER
    return tuple(sorted(options.address_map.items())), False


def _undelivered_policy(options: Options) -> UndeliveredPolicy:
    """Return the policy that limits how long a request may be in the network. A scan of stored ids waits longer than this limit
    before it reads the last ids, so that no earlier request arrives after the scan. The limit must hold even if the sending
    process dies, because the sink's next attempt runs in another process.
    """
    is_exactly_once = options.delivery_guarantee == "exactly-once"
    if not is_exactly_once and not options.confirm_ambiguous:
        return DEFAULT_UNDELIVERED_POLICY
    max_unconfirmed_s = min(MAX_UNCONFIRMED_S, max(0.1, options.exactly_once_settle - 1.0))
    return UndeliveredPolicy(max_unconfirmed_s, DropUnsent.ON_EXIT if is_exactly_once else DropUnsent.ON_CLOSE)


def _tls(options: Options) -> TlsSettings | None:
    if not options.tls:
        return None
    password = options.tls_key_password
    return TlsSettings(
        options.tls_ca_file,
        options.tls_cert_file,
        options.tls_key_file,
        password.reveal() if password else None,
        options.tls_check_hostname,
    )


def ensure_topic(options: Options, topic: str, queues: int = 8) -> None:
    """Create ``topic`` on all brokers unless it exists."""
    client_ = client(options)
    try:
        client_.routes.get(topic, 0.0)
    except RouteNotFound:
        client_.admin.create_topic(topic, queues)


def retention_ms(options: Options, broker_name: str) -> int | None:
    """Return the retention of a broker in ms; None if the broker does not report its retention."""
    try:
        hours = bodies.config_number(client(options).admin.broker_config(broker_name), "fileReservedTime")
    except OptionError as e:
        process.get_or_create(
            _LOGGED_ONCE_KIND, connection_key(options), partial(logger.warning, "%s: %s", RETENTION_NOT_KNOWN, e)
        )
        return None
    except RocketMQError as e:
        logger.info("broker %s does not report how long it keeps messages: %s", broker_name, e)
        return None
    return None if hours is None else hours * 3_600_000


def puller(options: Options, read_from: str | None = None) -> Puller:
    """Return the object that opens reads with these options; ``read_from`` overrides the option."""
    from rocketmq_spark.pull.pacing import PullSettings
    from rocketmq_spark.pull.puller import Puller

    settings = PullSettings.of(options)
    client_ = client(options)
    # Reads and answers of a client share one budget of memory, ``ConnectOptions.receive_budget``.
    connect_options = client_.rpc_client.pool.connect_options
    return Puller(client_.pulls, connect_options, options.group, settings, read_from or options.read_from)


def parse_options(role: str, name_server: str | None, group: str | None, keywords: Mapping[str, object]) -> Options:
    """Parse the options of a public constructor. An option with the value None counts as not given. Raises ``OptionError`` if a
    package is missing, before anything is opened.
    """
    values = {"name_server": name_server, "group": group, **keywords}
    options = options_table.parse(values, keywords=True).for_role(role)
    if options.open_telemetry and not extras.is_installed("opentelemetry"):
        raise OptionError(
            "option 'openTelemetry' needs opentelemetry-api, which is not installed",
            remedy=extras.install_command(extras.OTEL),
        )
    return options


def instrumentation(options: Options, client_id: str) -> Instrumentation | None:
    """Return the object that creates spans and metrics for a public class; None without option 'openTelemetry'."""
    if not options.open_telemetry:
        return None
    from rocketmq_spark.session import telemetry

    instruments = telemetry.instrumentation(options.group, client_id, options.namespace)
    if instruments is not None:
        instruments.uses_proxy = options.transport == transport.GRPC
    return instruments


def trace_producer(options: Options, group: str, kind: str) -> TraceProducer | None:
    """Return the object that sends message traces for a public class; None without option 'enableTrace'."""
    if not options.enable_trace:
        return None
    if problem := topic_problem(options.trace_topic, scope_of(options)):
        raise OptionError(f"option 'traceTopic' is {options.trace_topic!r}; expected the name of a topic ({problem})")
    from rocketmq_spark.producer.tracing import TraceProducer

    try:
        return TraceProducer(sender(options), group, kind, options.trace_topic)
    except RuntimeError as e:  # the system allows no more threads; the consumer starts without traces
        logger.warning("group %s is not traced: %s", group, e)
        return None


def close_all() -> None:
    """Close all clients of this process and empty its registry, for tests and for commands that end."""
    entries = process.clear_registry()
    for spool in entries.get(SPOOLS_KIND, {}).values():
        spool.close(Deadline.after(0))
    proxy_clients.close(entries)
    clients: dict[object, Client] = entries.get(_CLIENTS_KIND, {})
    for client in clients.values():
        client.instance.close()
        client.rpc_client.pool.close()
