"""Options to wired ports: the only room that knows everything below, and the only place that picks a transport.

Clients are shared by all readers, writers and tasks of a process that have the same connection options. The cache is
keyed by process id: a forked worker makes its own connections and never touches those of its parent.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from rocketmq_spark import codes
from rocketmq_spark import options as options_table
from rocketmq_spark.client.admin import Admin
from rocketmq_spark.client.broker import Brokers
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.client.credentials import Credentials, RotatingCredentials, from_file, from_provider
from rocketmq_spark.client.route import NameServers, Routes
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import AccessDenied, NotSupported, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.producer import producer as engine
from rocketmq_spark.producer.faults import tables as fault_tables
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.named import resolve
from rocketmq_spark.remoting.endpoint import TlsSettings
from rocketmq_spark.remoting.pool import Dialling, Pool
from rocketmq_spark.retry import Retry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """The ports of one set of connection options."""

    calls: Calls
    routes: Routes
    brokers: Brokers
    sender: RemotingSender
    admin: Admin
    retry: Retry
    kept: dict[tuple[str, str], str] = field(default_factory=dict)

    def compacted(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic keeps the last message of a key only, so that offsets without one are right."""
        key = queue.topic, queue.broker_name
        if key not in self.kept:
            self.kept[key] = self.retry.run(lambda: self._policy(*key))
        return self.kept[key] == codes.COMPACTION

    def _policy(self, topic: str, broker_name: str) -> str:
        try:
            return self.admin.topic_config(topic, broker_name).attributes.get(codes.CLEANUP_POLICY, "")
        except NotSupported:  # a broker that is too old for such topics, or a Proxy
            return ""
        except AccessDenied as e:
            e.remedy = (
                "Offsets without messages were found, which is right for compaction topics only; "
                "to tell what it is, the reader needs Get on the topic's configuration"
            )
            raise


_clients: dict[object, Client] = {}
_lock = threading.Lock()
_warned: set[str] = set()


def client(options: Options) -> Client:
    """The client of these connection options in this process, made on first use."""
    key = (os.getpid(), _connection_key(options))
    with _lock:
        made = _clients.get(key)
        if made is None:
            made = _clients[key] = _wire(options)
        return made


def _connection_key(options: Options) -> object:
    return (
        options.name_server,
        tuple(sorted(options.address_map.items())),
        (options.access_key, options.secret_key, options.security_token),
        (options.credentials_file, options.credentials_provider, options.namespace),
        _tls(options),
        options.connect_timeout,
        options.request_timeout,
        options.num_retries,
        options.retry_interval,
    )


def _wire(options: Options) -> Client:
    pool = Pool(Dialling(options.connect_timeout, _tls(options), options.address_map))
    calls = Calls(pool, options.request_timeout, _credentials(options), options.namespace or "")
    routes = Routes(NameServers(calls, options.name_server))
    return Client(
        calls=calls,
        routes=routes,
        brokers=Brokers(calls, routes),
        sender=RemotingSender(calls, routes),
        admin=Admin(options.name_server, calls),
        retry=Retry(options.num_retries, options.retry_interval),
    )


def _credentials(options: Options) -> Credentials | RotatingCredentials | None:
    """Keys from the options, or from a file or function that is asked again now and then."""
    if options.credentials_provider is not None:
        provider = resolve(options.credentials_provider, "credentialsProvider")
        return RotatingCredentials(lambda: from_provider(provider()))
    if options.credentials_file is not None:
        path = Path(options.credentials_file).expanduser()
        return RotatingCredentials(lambda: from_file(path))
    if options.access_key is None or options.secret_key is None:
        return None
    token = options.security_token
    return Credentials(options.access_key, options.secret_key.reveal(), token.reveal() if token else None)


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


class Producer(engine.Producer):
    """Sends messages: ``Producer(name_server="host:port", group="g", **options)``; see docs/options.md, "Producer".

    Option names in snake_case or camelCase. Defaults are those of RocketMQ's Java client.
    """

    def __init__(self, **options: object) -> None:
        parsed = options_table.parse(options).for_role("producer")
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the producer group")
        super().__init__(client(parsed).sender, producer_settings(parsed))


def environment(options: Options) -> Environment | None:
    """The environment whose queues alone are used, if there is one."""
    if options.environment is None:
        if options.environments is not None:
            raise OptionError("option 'environments' needs option 'environment', the one to use")
        return None
    found = Environment.of(options.environment, options.environments)
    if found.by_position and found.name not in _warned:
        _warned.add(found.name)
        logger.warning(
            "option 'environment' is %s without option 'environments': it counts the queues that a topic has when this starts. "
            "While a broker is away that may be a queue of another environment; say how many there are with 'environments'",
            found.name,
        )
    return found


def producer_settings(options: Options) -> ProducerSettings:
    return ProducerSettings(
        group=options.group,
        send_timeout_s=options.send_timeout,
        store_must_be_ok=options.require_store_ok == "ok",
        max_message_size=options.max_message_size,
        compress_above=options.compress_above,
        compression=options.compression,
        send_latency_fault=bool(options.send_latency_fault),
        fault_tables=fault_tables(
            options.send_latency_fault or "current", options.latency_max, options.not_available_duration
        ),
        environment=environment(options),
        auto_batch=options.auto_batch,
        batch_max_bytes=options.batch_max_bytes,
        batch_max_delay_ms=None if options.batch_max_delay is None else round(1000 * options.batch_max_delay),
        total_batch_max_bytes=options.total_batch_max_bytes,
    )


def pull_settings(options: Options) -> PullSettings:
    return PullSettings(
        max_bytes_in_flight=options.max_bytes_in_flight,
        depth=options.pull_depth,
        batch_size=options.pull_batch_size,
        read_deadline_s=options.read_deadline,
    )


def puller(options: Options, read_from: str | None = None) -> Puller:
    """What opens reads with these options; ``read_from`` instead of theirs."""
    one = client(options)
    settings = pull_settings(options)
    return Puller(one.calls, one.routes, one.compacted, options.group, settings, read_from or options.read_from)


def close_all() -> None:
    """Close the clients of this process: for tests and commands that end."""
    with _lock:
        mine = [key for key in _clients if isinstance(key, tuple) and key[0] == os.getpid()]
        gone = [_clients.pop(key) for key in mine]
    for one in gone:
        one.calls.pool.close()
