"""Options to wired ports: the only room that knows everything below, and the only place that picks a transport.

Clients are shared by all readers, writers and tasks of a process that have the same connection options, and kept in
``process``: a forked worker makes its own connections and never touches those of its parent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rocketmq_spark import options as options_table
from rocketmq_spark import proxied
from rocketmq_spark.access import credentials, scope
from rocketmq_spark.base import extras, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.client.admin import Admin
from rocketmq_spark.client.broker import Brokers
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.client.groups import RemotingCommitter
from rocketmq_spark.client.instance import Groups, Instance
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.client.pulls import RemotingPulls, wanted_of
from rocketmq_spark.client.questions import BrokerQuestions
from rocketmq_spark.client.route import NameServers, Routes
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.client.topics import Kinds
from rocketmq_spark.consumer.ahead import ReadAhead
from rocketmq_spark.consumer.pop import simple_consumer
from rocketmq_spark.consumer.pull import pull_consumer
from rocketmq_spark.consumer.pull.assigned import FetchedPart
from rocketmq_spark.consumer.push import consumer as group_consumer
from rocketmq_spark.consumer.push.running import ConsumerTools
from rocketmq_spark.consumer.settings import ConsumerSettings, PopSettings, PullConsumerSettings
from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange, PullRequest, ReceivedMessage
from rocketmq_spark.options import Options, transport
from rocketmq_spark.ports import (
    GroupMember,
    OffsetCommitter,
    OffsetReader,
    PopMember,
    PullSource,
    RouteReader,
    Sender,
    Spool,
)
from rocketmq_spark.producer import producer as engine
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.remoting.connection import together
from rocketmq_spark.remoting.endpoint import TlsSettings
from rocketmq_spark.remoting.pool import Dialling, Pool
from rocketmq_spark.spool.folders import SpoolSettings, owner_of

if TYPE_CHECKING:
    from rocketmq_spark.options.typed import (
        ConsumerOptions,
        ProducerOptions,
        PullConsumerOptions,
        SimpleConsumerOptions,
    )
    from rocketmq_spark.pull.puller import Puller
    from rocketmq_spark.pull.reading import PlainRun
    from rocketmq_spark.spool.spool import RedeliveryPolicy, SendSpool
    from rocketmq_spark.spool.store import Store


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """What implements the ports of one set of connection options. Rooms above see the ports only; commands and tests more."""

    calls: Calls
    routes: Routes
    brokers: Brokers
    instance: Instance
    sender: RemotingSender
    committer: RemotingCommitter
    member: RemotingMember
    pulls: RemotingPulls
    kinds: Kinds
    admin: Admin
    retry: Retry


_CLIENTS = "clients"


def client(options: Options) -> Client:
    """The client of these connection options in this process, made on first use."""
    if options.transport == transport.GRPC:
        raise OptionError(f"option 'transport' is 'grpc': {transport.NO_ADMINISTRATION}")
    return process.once(_CLIENTS, _connection_key(options), lambda: _wire(options))


def _connection_key(options: Options) -> object:
    return (
        options.name_server,
        tuple(sorted(options.address_map.items())),
        (options.access_key, options.secret_key, options.security_token),
        (options.credentials_file, options.credentials_provider, scope(options)),
        _tls(options),
        options.connect_timeout,
        options.request_timeout,
        options.num_retries,
        options.retry_interval,
    )


def _wire(options: Options) -> Client:
    groups = Groups()
    pool = Pool(_dialling(options), groups.asked)
    calls = Calls(pool, options.request_timeout, credentials(options), scope(options))
    routes = Routes(NameServers(calls, options.name_server))
    instance = Instance(groups, calls, routes)
    questions, admin = BrokerQuestions(calls, routes), Admin(options.name_server, calls)
    kinds = Kinds(calls, routes)
    send = RemotingSender(calls, routes, instance, kinds)
    retry = Retry(options.num_retries, options.retry_interval)
    return Client(
        calls=calls,
        routes=routes,
        brokers=Brokers(questions),
        instance=instance,
        sender=send,
        committer=RemotingCommitter(questions, admin),
        member=RemotingMember(questions, routes, instance, send, kinds),
        pulls=RemotingPulls(calls, routes, kinds, retry),
        kinds=kinds,
        admin=admin,
        retry=retry,
    )


def sender(options: Options) -> Sender:
    return proxied.sender(options) if options.transport == transport.GRPC else client(options).sender


def message_types(options: Options, topic: str, deadline: Deadline) -> frozenset[str] | None:
    """Which types of messages a topic takes; None where the topic type is not checked, as at brokers."""
    return proxied.sender(options).message_types(topic, deadline) if options.transport == transport.GRPC else None


def routes(options: Options) -> RouteReader:
    return client(options).routes


def offsets(options: Options) -> OffsetReader:
    return client(options).brokers


def committer(options: Options) -> OffsetCommitter:
    return client(options).committer


def member(options: Options) -> GroupMember:
    return client(options).member


def pop_member(options: Options) -> PopMember:
    return proxied.pop_member(options)


def pulls(options: Options) -> PullSource:
    return client(options).pulls


def _dialling(options: Options) -> Dialling:
    return Dialling(options.connect_timeout, _tls(options), options.address_map)


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


def _parsed(role: str, name_server: str | None, group: str | None, keywords: Mapping[str, object]) -> Options:
    """Options of a public constructor; None is what is not given."""
    given = {"name_server": name_server, "group": group, **keywords}
    return options_table.parse(given, keywords=True).for_role(role)


class Producer(engine.BaseProducer):
    """Sends messages. Defaults are those of RocketMQ's Java client.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Producer group. Required.
        options: Options of a producer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a producer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[ProducerOptions]
    ) -> None:
        parsed = _parsed("producer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the producer group")
        settings, spool = ProducerSettings.of(parsed), SpoolSettings.of(parsed)
        send = sender(parsed)
        opened = None
        if spool is not None:
            opened = resending(_store(spool.folder, parsed, spool), send, settings)
        try:
            super().__init__(send, settings, spool=opened)
        except BaseException:
            if opened is not None:
                opened.close(Deadline.after(0))
            raise


def _store(path: Path, options: Options, spool: SpoolSettings | None = None) -> Store:
    """The store of a folder, which holds sends of the cluster, namespace and environment of the options only."""
    from rocketmq_spark.spool.store import Store

    store = Store(path, spool.sync, spool.max_bytes) if spool is not None else Store(path)
    try:
        store.belong(owner_of(options))
    except BaseException:
        store.close()
        raise
    return store


def resending(
    store: Store,
    send: Sender,
    settings: ProducerSettings,
    clock: Callable[[], int] | None = None,
    trade: RedeliveryPolicy | None = None,
) -> SendSpool:
    """Redelivery of a store that was opened in the process that uses it."""
    from rocketmq_spark.producer.resending import EngineResender
    from rocketmq_spark.spool.spool import SENDS, SendSpool

    name = f"rocketmq-{settings.group}-spool"
    resender = EngineResender(send, settings, Timer(f"{name}-send"), together)
    return SendSpool(store, resender, Timer(name), clock, trade=trade or SENDS)


_SPOOLS = "spools"


def worker_spool(options: Options, settings: ProducerSettings) -> Spool | None:
    """The spool of this worker process, below ``spoolDir``; what dead processes left there is in it, too. None without one.

    It lives as long as the process, whatever tasks come and go, and sends meanwhile.
    """
    spool = SpoolSettings.of(options)
    if spool is None:
        return None
    from rocketmq_spark.spool import folders

    def make(path: Path) -> Store:
        return _store(path, options, spool)

    with process.lock():
        connection = options.transport, options.proxy_endpoint, _connection_key(options)
        key = (spool, owner_of(options), options.environments, connection, settings)
        spools: dict[object, SendSpool] = process.kept(_SPOOLS)
        if key not in spools:
            spools[key] = resending(folders.claim(spool.folder, make), sender(options), settings)
        mine = spools[key]
        if folders.adopt(spool.folder, mine.store, make, mine.now_ms()):
            mine.redelivery.begin()
    return mine


def drainer(path: Path, options: Options) -> SendSpool:
    """What sends all that lies in a folder, for commands."""
    return resending(_store(path, options), sender(options), ProducerSettings.of(options))


def ensure_topic(options: Options, topic: str, queues: int = 8) -> None:
    """Make ``topic`` on all brokers unless it is there."""
    made = client(options)
    try:
        made.routes.get(topic, 0.0)
    except RouteNotFound:
        made.admin.create_topic(topic, queues)


def kept_ms(options: Options, broker_name: str) -> int | None:
    """For how long a broker keeps messages; None where it does not tell."""
    try:
        hours = client(options).admin.broker_config(broker_name).get("fileReservedTime")
    except RocketMQError as e:
        logger.info("broker %s does not tell for how long it keeps messages: %s", broker_name, e)
        return None
    return None if hours is None else int(hours) * 3_600_000


class Consumer(group_consumer.BaseConsumer):
    """Consumes as a member of a group. Defaults are those of RocketMQ's Java client.

    With ``transport="grpc", proxy_endpoint="host:port"`` a Proxy hands out the messages (docs/grpc.md).

    Args:
        name_server: ``host:port``, several separated by ``;``. Required unless ``transport`` is ``grpc``.
        group: Consumer group. Required.
        options: Options of a consumer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or text
            (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[ConsumerOptions]
    ) -> None:
        parsed = _parsed("consumer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        if parsed.transport == transport.GRPC:
            pop = PopSettings.of(parsed)
            super().__init__(pop_member(parsed), pop)
            return
        settings = ConsumerSettings.of(parsed, scope(parsed).on_wire)
        super().__init__(member(parsed), settings, ConsumerTools(read_ahead=_read_ahead(parsed, settings.group)))


class PullConsumer(pull_consumer.BasePullConsumer):
    """Reads queues that its group shares, or that its user names, whenever it is polled.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required.
        group: Consumer group. Required.
        options: Options of a pull consumer (docs/options.md), in snake_case or camelCase. Durations are milliseconds or
            text (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a pull consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[PullConsumerOptions]
    ) -> None:
        parsed = _parsed("pull consumer", name_server, group, options)
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        settings = PullConsumerSettings.of(parsed, scope(parsed).on_wire)
        super().__init__(member(parsed), settings, _arrow, read_ahead=_read_ahead(parsed, settings.group))


class SimpleConsumer(simple_consumer.BaseSimpleConsumer):
    """Receives messages from a Proxy and acknowledges each by itself (docs/grpc.md).

    Args:
        name_server: Not used over gRPC; give ``proxy_endpoint``.
        group: Consumer group. Required.
        options: Options of a simple consumer (docs/options.md), in snake_case or camelCase; ``proxy_endpoint`` is required.
            Durations are milliseconds or text (``3s``), sizes bytes or text (``4m``).

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to a simple consumer. Lists all problems.
    """

    def __init__(
        self, name_server: str | None = None, group: str | None = None, **options: Unpack[SimpleConsumerOptions]
    ) -> None:
        options.setdefault("transport", transport.GRPC)
        parsed = _parsed("simple consumer", name_server, group, options)
        if parsed.transport != transport.GRPC:
            raise OptionError(
                "option 'transport' of a SimpleConsumer is 'grpc'; expected no other: it speaks with a Proxy"
            )
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the consumer group")
        super().__init__(pop_member(parsed), parsed.group, parsed.request_timeout)


def _arrow(parts: Sequence[FetchedPart]) -> tuple[Any, int | None]:
    from rocketmq_spark.columnar.decode.decoder import batch_of  # here, for who polls messages needs no Arrow

    begun = {part.queue: part.begun for part in parts if part.begun > part.start}
    return batch_of((((part.queue, part.start, part.ends, part.stored), part.filter) for part in parts), begun)


def _read_ahead(options: Options, group: str) -> ReadAhead | None:
    """How a consumer reads ahead; None where numpy is not installed, which that needs: 13 MiB, loaded by the first backlog."""
    if not extras.installed("numpy"):
        return None
    inside = scope(options)

    @cache
    def runs() -> Callable[[Sequence[OffsetRange], int, int], PlainRun]:
        from rocketmq_spark.pull.reading import PlainRun

        return partial(PlainRun, replace(puller(options, "hint"), group=group))

    def messages(queue: MessageQueue, start: int, stored: bytes | memoryview) -> Iterator[ReceivedMessage]:
        return wanted_of(PullRequest(group, queue, start), stored, inside)

    return ReadAhead(lambda ranges, offsets, size: runs()(ranges, offsets, size), messages)


def puller(options: Options, read_from: str | None = None) -> Puller:
    """What opens reads with these options; ``read_from`` instead of theirs."""
    from rocketmq_spark.pull.puller import Puller
    from rocketmq_spark.pull.requests import PullSettings  # here, for reads need numpy, and a producer does not

    settings = PullSettings.of(options)
    return Puller(pulls(options), _dialling(options), options.group, settings, read_from or options.read_from)


def close_all() -> None:
    """Close the clients of this process and forget all that it keeps: for tests and commands that end."""
    kept = process.forget()
    for spool in kept.get(_SPOOLS, {}).values():
        spool.close(Deadline.after(0))
    proxied.close(kept)
    gone: dict[object, Client] = kept.get(_CLIENTS, {})
    for client in gone.values():
        client.instance.close()
        client.calls.pool.close()
