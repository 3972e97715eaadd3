"""``rocketmq-spark doctor``: one line for each check, with a remedy where the check fails.

Asks the machine, the name servers and the brokers, in this order; ``findings``, ``servers`` and ``proxies`` judge the
answers. A check that depends on one that failed is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from rocketmq_spark.admin import deadline
from rocketmq_spark.admin.groups import QueuePositions, committed_offsets, new_group_remedy, queue_lags
from rocketmq_spark.base import folders
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, Response
from rocketmq_spark.base.logs import escaped
from rocketmq_spark.cli import lag, query
from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.doctor import findings, servers
from rocketmq_spark.cli.doctor.findings import Finding, advice, broken, failed
from rocketmq_spark.cli.lag_view import under_way
from rocketmq_spark.cli.output import Output, width_of, wrapped
from rocketmq_spark.client import topic_readers
from rocketmq_spark.client.rpc import error_from_response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    GroupNotFound,
    LocalBrokerError,
    NotSupported,
    OffsetError,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
)
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.model import BrokerData, MessageQueue, TopicRoute
from rocketmq_spark.spark import conf
from rocketmq_spark.wire import bodies, rpc

if TYPE_CHECKING:
    from rocketmq_spark.options import Options
    from rocketmq_spark.session import Client
    from rocketmq_spark.wire.header import Command

_PACKAGES = ("rocketmq-spark", "pyspark", "pyarrow", "numpy", "pandas")
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined beside the servers."""

    topics: Sequence[str] = ()
    group: str | None = None
    checkpoint: str | None = None
    exactly_once: bool = False


def examine(target: Target, subject: Subject) -> Iterator[Finding]:
    """Every check as it is done."""
    yield from of_machine()
    yield from findings.of_proxies(target, subject.topics)
    brokers = findings.at_brokers(target)
    if brokers is not None:
        yield from of_cluster(brokers, subject)
    elif subject.group or subject.checkpoint:
        yield advice(
            "readers",
            "a Proxy does not report offsets over gRPC",
            "Name a name server, too, for --group and --checkpoint",
        )


def of_cluster(target: Target, subject: Subject) -> Iterator[Finding]:
    """Name servers, brokers, and what is asked of them."""
    target = replace(target, of_query=True)  # such as 'sql', which a broker must be set for
    try:
        options, client = target.options(), target.client()
    except RocketMQError as e:
        yield failed("options", e, "Look at docs/options.md")
        return
    servers_asked = list(of_name_servers(client, options))
    yield from (finding for finding, _ in servers_asked)
    if not any(usable for _, usable in servers_asked):
        return
    yield from of_brokers(client, options)
    yield from of_advertised(client, options, subject.topics)
    for topic in subject.topics:
        yield from of_topic(client, options, topic, subject.group)
    yield from of_readers(target, client, subject)
    if subject.exactly_once:
        yield of_exactly_once(target, subject)


def of_machine() -> Iterator[Finding]:
    try:
        java = find_java()
        yield findings.java((str(java.path), java.major))
    except LocalBrokerError as e:
        yield findings.java(e)
    versions = {name: _version(name) for name in _PACKAGES}
    yield findings.python(platform.python_version(), versions)
    if (pyspark := versions["pyspark"]) is not None and not conf.has_data_sources():
        yield findings.no_data_sources(pyspark)
    program = os.environ.get("PYSPARK_PYTHON") or "python3"
    yield findings.workers(program, sys.executable, conf.can_import(program))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def of_name_servers(client: Client, options: Options) -> Iterator[tuple[Finding, bool]]:
    """Each, and whether it can be used."""
    for address in options.name_server:
        error = _refused(client, address, rpc.GET_BROKER_CLUSTER_INFO.request())
        if isinstance(error, NotSupported) and not client.admin.name_servers.serves_routes(address):
            yield servers.of_a_broker(address), False
            continue
        usable = error is None or isinstance(error, AccessDenied | NotSupported)
        yield servers.name_server(address, error, options.tls), usable


def _refused(client: Client, address: str, command: Command) -> RocketMQError | None:
    try:
        client.calls.request(address, command)
    except RocketMQError as e:
        return e
    return None


def of_brokers(client: Client, options: Options) -> Iterator[Finding]:
    try:
        cluster: Mapping[str, BrokerData] = client.routes.cluster()
    except (AccessDenied, NotSupported):  # said of the name server already
        return
    yield servers.brokers(cluster)
    for name, data in sorted(cluster.items()):
        for address in data.addresses.values():
            yield from _of_broker(client, options, name, address)
    if not all(client.calls.is_private(address) for data in cluster.values() for address in data.addresses.values()):
        yield servers.unrequested_settings()


def of_advertised(client: Client, options: Options, topics: Sequence[str]) -> Iterator[Finding]:
    """The addresses in a Proxy's routes of ``topics``, by default of a topic that brokers have. Brokers are checked by name."""
    if not any(map(client.calls.pool.is_proxy, options.name_server)):
        return
    queue_of: dict[tuple[str, str], MessageQueue] = {}
    for topic in topics or (AUTO_CREATE_TOPIC,):
        try:
            route = client.routes.get(topic, 0.0)
        except RocketMQError as e:
            if not topics:  # otherwise the checks of the topic report it
                yield servers.unchecked_addresses(e)
            continue
        queue_of |= {
            (address, data.broker_name): MessageQueue(topic, data.broker_name, 0)
            for data in route.queues
            if (address := route.brokers[data.broker_name].master)
        }
    places = sorted(queue_of)
    ask = client.brokers.broker_client.for_queue
    asked = [(place[0], ask(rpc.GET_MAX_OFFSET, queue_of[place]).command) for place in places]
    answers = client.calls.invoke_each(asked, deadline(client))
    errors: dict[str, dict[str, RocketMQError]] = {address: {} for address, _ in places}
    for (address, broker_name), answer in zip(places, answers, strict=True):
        if not isinstance(answer, RocketMQError) and answer.code == Response.SYSTEM_ERROR:
            answer = error_from_response(answer, address)
        if isinstance(answer, RocketMQError) and not isinstance(answer, AccessDenied):
            errors[address][broker_name] = answer
    for address, of_address in errors.items():
        yield from servers.advertised(address, of_address, options.tls)


def _of_broker(client: Client, options: Options, name: str, address: str) -> Iterator[Finding]:
    runtime: Mapping[str, str] = {}
    error: RocketMQError | None = None
    try:
        runtime = bodies.runtime_info(
            client.calls.request(address, rpc.GET_BROKER_RUNTIME_INFO.request(bname=name)).body
        )
    except RocketMQError as e:
        error = e
    answered = isinstance(error, BrokerError)  # it says no, but it was reached, and that is the question
    if isinstance(error, NotSupported):
        yield servers.not_a_broker(name, error)
        return
    dialled = client.calls.pool.connect_options.reachable(address)
    yield servers.reached(name, address, dialled, None if answered else error, options.tls)
    if error is not None and not answered:
        return
    if isinstance(error, AccessDenied):
        yield servers.locked_out(name, error)
        return
    if error is not None:
        yield servers.untold_state(name, error)
    now_ms = time.time_ns() // 1_000_000
    judged = (servers.version(name, runtime), servers.disk(name, runtime), servers.clock(name, runtime, now_ms))
    yield from (finding for finding in judged if finding is not None)
    if not client.calls.is_private(address):
        return  # the network could read the answer, which contains passwords
    try:
        config = bodies.read_config(client.calls.request(address, rpc.GET_BROKER_CONFIG.request(bname=name)).body)
    except RocketMQError as e:
        yield servers.untold(name, e)
        return
    yield from servers.settings(name, config, bool(options.sql))


def of_topic(client: Client, options: Options, topic: str, group: str | None) -> Iterator[Finding]:
    try:
        route = client.routes.get_existing(topic, 0.0)
    except RocketMQError as e:
        yield failed(f"topic {topic}", e, "Check its name")
        return
    yield from servers.topic(route, _attributes(client, route))
    answers: dict[str, RocketMQError | None] = {}
    if queues := [queue for queue in route.readable() if route.brokers[queue.broker_name].master]:
        answers["source"] = findings.to_read(client, route, queues, group or options.group)
    try:
        writable = route.writable()
    except RemoteProtocolError as e:
        yield failed(f"topic {topic}", e, "Correct it with RocketMQ's own tool: mqadmin updateOrderConf")
        writable = []
    if writable:
        answers["sink"] = findings.to_write(client, route, writable)
    yield from servers.rights(topic, options.access_key, answers)


def _attributes(client: Client, route: TopicRoute) -> dict[str, str] | None:
    """Of all its brokers; None where one does not tell: it is away, as was said, or the user may not ask, as is said next."""
    found: dict[str, str] = {}
    try:
        for data in route.queues:
            found |= client.admin.topic_config(route.topic, data.broker_name).attributes
    except RocketMQError:
        return None
    return found


def of_readers(target: Target, client: Client, subject: Subject) -> Iterator[Finding]:
    """The group and the checkpoint."""
    if subject.group is not None:
        own = lag.own_group(target, subject.group)
        try:
            yield from _of_group(client, own, subject.topics)
        except OffsetError as e:
            yield advice(f"group {own}", e.message, e.remedy or new_group_remedy(own, subject.topics))
        except GroupNotFound as e:
            yield failed(f"group {own}", e, new_group_remedy(own, subject.topics))
        except RocketMQError as e:
            yield failed(f"group {own}", e, "Look at the brokers")
    if subject.checkpoint is not None:
        try:
            yield from _of_checkpoint(target, subject.checkpoint, () if subject.exactly_once else subject.topics)
        except RocketMQError as e:
            yield failed(f"checkpoint {subject.checkpoint}", e, "Look at the folder")


def _of_group(client: Client, group: str, topics: Sequence[str]) -> Iterator[Finding]:
    subscribed: set[str] = set()
    try:
        wanted = topic_readers.member_subscriptions(client.calls, client.admin, group)
    except NotSupported as e:
        yield servers.unknown_members(group, e)
    else:
        yield servers.subscriptions(group, wanted)
        subscribed = {topic for filters in wanted.values() for topic in filters or ()}
    yield from servers.consume_modes(
        group, client.member.consume_modes(group, sorted({*topics, *subscribed}), deadline(client))
    )
    found = committed_offsets(client, group, topics)
    yield _kept(client, f"group {group}", queue_lags(client, found))


def _of_checkpoint(target: Target, folder: str, topics: Sequence[str]) -> Iterator[Finding]:
    from rocketmq_spark.cli.checkpoint import compare_with_brokers
    from rocketmq_spark.spark.checkpoints.files import open_folder as opened
    from rocketmq_spark.spark.checkpoints.offset_log import last_batch
    from rocketmq_spark.spark.checkpoints.offset_log import uncommitted_batch as not_done
    from rocketmq_spark.spark.checkpoints.owners import exposure, owner_of
    from rocketmq_spark.spark.checkpoints.rewind import DriftState

    check = f"checkpoint {folder}"
    is_root = os.geteuid() == folders.ROOT
    owner = owner_of(folder) if is_root else folders.ROOT
    if (exposed := exposure(folder, owner)) is not None:
        yield (broken if is_root else advice)(check, *exposed)  # as a query itself does
    elif owner != folders.ROOT:
        problem = f"belongs to {folders.user(owner)}, so root starts no query to RocketMQ with it"
        yield advice(check, problem, "Run the query as that user")
    if (read := not_done(opened(folder))) is not None:
        silent = query.waited_for(target.within(read.batch.source_identities).client(), read)
        yield servers.under_way(check, under_way(read, silent, time.time_ns() // 1_000_000))
    batch = last_batch(opened(folder))
    if batch is None or not batch.sources:
        yield broken(
            check, "has no finished batch that read RocketMQ", "Wait for the first one, or name another query's"
        )
        return
    client = target.within(batch.source_identities).client()
    batch, elsewhere = batch.of_clusters(query.clusters(client))
    if elsewhere:
        yield advice(check, query.left_out(elsewhere), "Run it again with that name server")
    found, _ = compare_with_brokers(client, batch)
    read_topics = {one.queue.topic for one in found}
    if topics and not read_topics.intersection(topics):
        yield servers.of_other_topics(check, read_topics, topics)
    yield from servers.drifted(check, found)
    fit = [one for one in found if one.state.is_lossless or one.state is DriftState.LOST]
    if fit:
        new = {one.queue for one in fit if one.state is DriftState.NEW}
        yield _kept(client, check, queue_lags(client, {one.queue: one.position for one in fit}, new))


def of_exactly_once(target: Target, subject: Subject) -> Finding:
    """Whether a query, or a batch write, can write the topics so: what its first batch would find."""
    from rocketmq_spark import options as options_table
    from rocketmq_spark.spark.checkpoints import batch_notes, files
    from rocketmq_spark.spark.sink import exactly_once, exactly_once_checks

    check, topics = "exactly-once", list(dict.fromkeys(subject.topics))
    named: dict[str, object] = {"topic": topics[0]} if len(topics) == 1 else {"allowed_topics": ",".join(topics)}
    given = {**target.settings(), **named, "delivery_guarantee": exactly_once_checks.EXACTLY_ONCE}
    try:
        options = options_table.parse(given).for_role("sink")
        if problems := exactly_once_checks.option_problems(options, ()):
            raise OptionError.of(problems)
        ends = exactly_once.snapshot_queue_ends(options)
        begun = ""
        if subject.checkpoint is not None:
            begun = (
                f"; {batch_notes.batch_status(files.checkpoint_folder(subject.checkpoint), exactly_once.SINK_WRITE)}"
            )
    except RocketMQError as e:
        return failed(check, e, "See docs/exactly-once.md")
    queues = f"{len(ends.queues)} queue{'s' * (len(ends.queues) != 1)} of {', '.join(sorted(ends.masters))}"
    return findings.ok(
        check,
        f"{', '.join(topics)}: {queues} say where they end, and what is stored there may be read{begun}. This command "
        "cannot see whether the Spark context was started with exactly_once_conf()",
    )


def _kept(client: Client, whose: str, look: QueuePositions) -> Finding:
    """Next to the shortest time for which one of the brokers keeps messages."""
    if look.errors:
        return failed(whose, look.errors[0], "Look at the broker")
    hours: list[int | None] = []
    for name in {row.queue.broker_name for row in look.rows}:
        with contextlib.suppress(RocketMQError):  # it does not tell, and nothing is claimed
            hours.append(bodies.config_number(client.admin.broker_config(name), "fileReservedTime"))
    known = [each for each in hours if each is not None]
    kept_ms = min(known) * _HOUR_MS if known else None
    return servers.retention(whose, look.rows, kept_ms, time.time_ns() // 1_000_000)


_INDENT = 8


@click.command(cls=CliCommand)
@click.argument("server", metavar="[NAME_SERVER]", required=False)
@click.option("--topic", "topics", multiple=True, help="A topic that is read or written (may be repeated).")
@click.option("--group", metavar="NAME", help="A consumer group to check.")
@click.option("--checkpoint", metavar="FOLDER", help="The checkpointLocation of a query to check.")
@click.option(
    "--exactly-once", is_flag=True, help="Check that the topics can be written with deliveryGuarantee=exactly-once."
)
@click.option(
    "--proxy-endpoint",
    metavar="HOST:PORT",
    help="gRPC endpoint of a Proxy; separate several by ';'. If no name server is given, brokers are not checked.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 also if there is only advice.")
@connected
@click.pass_obj
@click.pass_context
def doctor(
    ctx: click.Context,
    output: Output,
    /,
    target: Target,
    server: str | None,
    topics: tuple[str, ...],
    proxy_endpoint: str | None,
    strict: bool,
    exactly_once: bool,
    **readers: str | None,
) -> None:
    """Diagnose problems of a cluster, a topic or a reader, and suggest fixes.

    NAME_SERVER is another way to give --name-server. The command changes nothing, and stores no message on a broker. Exit codes:
    0 if no check failed, 1 if one failed, 2 for wrong usage.
    """
    from rocketmq_spark.cli.doctor.findings import Level, code

    if exactly_once and not topics:
        raise click.UsageError("--exactly-once needs the topics that are written: --topic NAME")
    if server is not None:
        target = replace(target, given={**target.given, "name_server": server})
    if proxy_endpoint is not None:
        target = replace(target, given={**target.given, "proxy_endpoint": proxy_endpoint})
    width = width_of(sys.stdout)
    found = []
    checkpoint = readers["checkpoint"]
    subject = Subject(topics, readers["group"], checkpoint and os.path.expanduser(checkpoint), exactly_once)
    for finding in examine(target, subject):
        found.append(finding)
        row = {"check": finding.check, "level": finding.level.value, "found": finding.found, "remedy": finding.remedy}
        output.item(row, *lines(finding, width))
    counts = {level: sum(one.level is level for one in found) for level in Level}
    output.note(f"{counts[Level.BROKEN]} broken, {counts[Level.ADVICE]} with advice, {counts[Level.OK]} ok")
    ctx.exit(code(found, strict))


def lines(finding: Finding, width: int | None) -> list[str]:
    """One line; where a terminal is narrower, more of them, the others indented."""
    text = f"{finding.level.value:<{_INDENT}}{finding.check}: {finding.found}"
    text += f". {finding.remedy}" if finding.remedy else ""
    return wrapped(escaped(text), width, _INDENT)
