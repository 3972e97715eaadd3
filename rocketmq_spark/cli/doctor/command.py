"""``rocketmq-spark doctor``: one line for each check, with a remedy where the check fails.

It checks the machine, the Proxies, the name servers and the brokers, in this order. ``findings`` and ``servers`` turn answers
into findings. A check that depends on a failed check is skipped.
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
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.doctor import findings, servers
from rocketmq_spark.cli.doctor.findings import Finding, advice_finding, broken_finding, failed_finding
from rocketmq_spark.cli.lag_view import unfinished_batch
from rocketmq_spark.cli.output import Output, width_of, wrap
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
from rocketmq_spark.spark import conf, workers
from rocketmq_spark.wire import bodies, rpc

if TYPE_CHECKING:
    from rocketmq_spark.options import Options
    from rocketmq_spark.session import Client
    from rocketmq_spark.wire.header import Command

_REPORTED_PACKAGES = ("rocketmq-spark", "pyspark", "pyarrow", "numpy", "pandas")
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Subject:
    """The topics, reader and guarantee that the command checks besides the servers."""

    topics: Sequence[str] = ()
    group: str | None = None
    checkpoint: str | None = None
    exactly_once: bool = False


def examine(target: Target, subject: Subject) -> Iterator[Finding]:
    """Yield the finding of each check when it is done."""
    yield from check_machine()
    yield from findings.check_proxies(target, subject.topics)
    broker_target = findings.broker_target(target)
    if broker_target is not None:
        yield from check_cluster(broker_target, subject)
    elif subject.group or subject.checkpoint:
        yield advice_finding(
            "readers",
            "a Proxy does not report offsets over gRPC",
            "Name a name server, too, for --group and --checkpoint",
        )


def check_cluster(target: Target, subject: Subject) -> Iterator[Finding]:
    """Check name servers, brokers, and the topics and readers of ``subject``."""
    target = replace(target, allows_query_options=True)  # the checks use some options of queries, such as 'sql'
    try:
        options, client = target.options(), target.client()
    except RocketMQError as e:
        yield failed_finding("options", e, "Look at docs/options.md")
        return
    name_server_results = list(check_name_servers(client, options))
    yield from (finding for finding, _ in name_server_results)
    if not any(is_usable for _, is_usable in name_server_results):
        return
    yield from check_brokers(client, options)
    yield from check_advertised_addresses(client, options, subject.topics)
    for topic in subject.topics:
        yield from check_topic(client, options, topic, subject.group)
    yield from check_readers(target, client, subject)
    if subject.exactly_once:
        yield check_exactly_once(target, subject)


def check_machine() -> Iterator[Finding]:
    try:
        java = find_java()
        yield findings.java_finding((str(java.path), java.major_version))
    except LocalBrokerError as e:
        yield findings.java_finding(e)
    versions = {name: _version(name) for name in _REPORTED_PACKAGES}
    yield findings.python_finding(platform.python_version(), versions)
    if (pyspark_version := versions["pyspark"]) is not None and not conf.has_data_sources():
        yield findings.no_data_sources_finding(pyspark_version)
    program = os.environ.get("PYSPARK_PYTHON") or "python3"
    yield findings.workers_finding(program, sys.executable, workers.can_import(program))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_name_servers(client: Client, options: Options) -> Iterator[tuple[Finding, bool]]:
    """Yield a finding for each name server, and whether this name server can be used."""
    for address in options.name_server:
        error = _request_error(client, address, rpc.GET_BROKER_CLUSTER_INFO.request())
        if isinstance(error, NotSupported) and not client.admin.name_servers.serves_routes(address):
            yield servers.not_a_name_server_finding(address), False
            continue
        is_usable = error is None or isinstance(error, AccessDenied | NotSupported)
        yield servers.name_server_finding(address, error, options.tls), is_usable


def _request_error(client: Client, address: str, command: Command) -> RocketMQError | None:
    try:
        client.rpc_client.request(address, command)
    except RocketMQError as e:
        return e
    return None


def check_brokers(client: Client, options: Options) -> Iterator[Finding]:
    try:
        cluster: Mapping[str, BrokerData] = client.routes.cluster()
    except (AccessDenied, NotSupported):  # ``check_name_servers`` reports the error
        return
    yield servers.brokers_finding(cluster)
    for name, data in sorted(cluster.items()):
        for address in data.addresses.values():
            yield from _check_broker(client, options, name, address)
    if not all(
        client.rpc_client.is_private(address) for data in cluster.values() for address in data.addresses.values()
    ):
        yield servers.unrequested_settings_finding()


def check_advertised_addresses(client: Client, options: Options, topics: Sequence[str]) -> Iterator[Finding]:
    """Check the addresses in a Proxy's routes of ``topics``, by default of TBW102. Each broker behind an address is checked."""
    if not any(map(client.rpc_client.pool.is_proxy, options.name_server)):
        return
    queue_by_broker: dict[tuple[str, str], MessageQueue] = {}
    for topic in topics or (AUTO_CREATE_TOPIC,):
        try:
            route = client.routes.get(topic, 0.0)
        except RocketMQError as e:
            if not topics:  # for a named topic, ``check_topic`` reports the error
                yield servers.unchecked_addresses_finding(e)
            continue
        queue_by_broker |= {
            (address, data.broker_name): MessageQueue(topic, data.broker_name, 0)
            for data in route.queues
            if (address := route.brokers[data.broker_name].master)
        }
    addresses_and_brokers = sorted(queue_by_broker)
    make_queue_command = client.offset_reader.broker_client.queue_command
    requests = [
        (address_and_broker[0], make_queue_command(rpc.GET_MAX_OFFSET, queue_by_broker[address_and_broker]).command)
        for address_and_broker in addresses_and_brokers
    ]
    answers = client.rpc_client.invoke_each(requests, deadline(client))
    errors: dict[str, dict[str, RocketMQError]] = {address: {} for address, _ in addresses_and_brokers}
    for (address, broker_name), answer in zip(addresses_and_brokers, answers, strict=True):
        if not isinstance(answer, RocketMQError) and answer.code == Response.SYSTEM_ERROR:
            answer = error_from_response(answer, address)
        if isinstance(answer, RocketMQError) and not isinstance(answer, AccessDenied):
            errors[address][broker_name] = answer
    for address, errors_by_broker in errors.items():
        yield from servers.advertised_address_findings(address, errors_by_broker, options.tls)


def _check_broker(client: Client, options: Options, name: str, address: str) -> Iterator[Finding]:
    runtime_info: Mapping[str, str] = {}
    error: RocketMQError | None = None
    try:
        runtime_info = bodies.runtime_info(
            client.rpc_client.request(address, rpc.GET_BROKER_RUNTIME_INFO.request(bname=name)).body
        )
    except RocketMQError as e:
        error = e
    is_from_broker = isinstance(error, BrokerError)
    if isinstance(error, NotSupported):
        yield servers.not_a_broker_finding(name, error)
        return
    connected_address = client.rpc_client.pool.connect_options.reachable_address(address)
    yield servers.broker_address_finding(
        name, address, connected_address, None if is_from_broker else error, options.tls
    )
    if error is not None and not is_from_broker:
        return
    if isinstance(error, AccessDenied):
        yield servers.unknown_user_finding(name, error)
        return
    if error is not None:
        yield servers.unreadable_state_finding(name, error)
    now_ms = time.time_ns() // 1_000_000
    checks = (
        servers.version_finding(name, runtime_info),
        servers.disk_finding(name, runtime_info),
        servers.clock_finding(name, runtime_info, now_ms),
    )
    yield from (finding for finding in checks if finding is not None)
    if not client.rpc_client.is_private(address):
        return  # others on the network could read the passwords in the answer
    try:
        config = bodies.read_config(client.rpc_client.request(address, rpc.GET_BROKER_CONFIG.request(bname=name)).body)
    except RocketMQError as e:
        yield servers.unreadable_settings_finding(name, e)
        return
    yield from servers.settings_findings(name, config, bool(options.sql))


def check_topic(client: Client, options: Options, topic: str, group: str | None) -> Iterator[Finding]:
    try:
        route = client.routes.get_existing(topic, 0.0)
    except RocketMQError as e:
        yield failed_finding(f"topic {topic}", e, "Check its name")
        return
    yield from servers.topic_findings(route, _attributes(client, route))
    errors_by_role: dict[str, RocketMQError | None] = {}
    if queues := [queue for queue in route.readable_queues() if route.brokers[queue.broker_name].master]:
        errors_by_role["source"] = findings.worst_read_error(client, route, queues, group or options.group)
    try:
        writable_queues = route.writable_queues()
    except RemoteProtocolError as e:
        yield failed_finding(f"topic {topic}", e, "Correct it with RocketMQ's own tool: mqadmin updateOrderConf")
        writable_queues = []
    if writable_queues:
        errors_by_role["sink"] = findings.worst_write_error(client, route, writable_queues)
    yield from servers.rights_findings(topic, options.access_key, errors_by_role)


def _attributes(client: Client, route: TopicRoute) -> dict[str, str] | None:
    """Return the attributes at all brokers; None if a broker is down or denies access, which other checks report."""
    attributes: dict[str, str] = {}
    try:
        for data in route.queues:
            attributes |= client.admin.topic_config(route.topic, data.broker_name).attributes
    except RocketMQError:
        return None
    return attributes


def check_readers(target: Target, client: Client, subject: Subject) -> Iterator[Finding]:
    """Check the group and the checkpoint."""
    if subject.group is not None:
        group = lag.own_group(target, subject.group)
        try:
            yield from _check_group(client, group, subject.topics)
        except OffsetError as e:
            yield advice_finding(f"group {group}", e.message, e.remedy or new_group_remedy(group, subject.topics))
        except GroupNotFound as e:
            yield failed_finding(f"group {group}", e, new_group_remedy(group, subject.topics))
        except RocketMQError as e:
            yield failed_finding(f"group {group}", e, "Look at the brokers")
    if subject.checkpoint is not None:
        try:
            yield from _check_checkpoint(target, subject.checkpoint, () if subject.exactly_once else subject.topics)
        except RocketMQError as e:
            yield failed_finding(f"checkpoint {subject.checkpoint}", e, "Look at the folder")


def _check_group(client: Client, group: str, topics: Sequence[str]) -> Iterator[Finding]:
    subscribed_topics: set[str] = set()
    try:
        filters_by_member = topic_readers.member_subscriptions(client.rpc_client, client.admin, group)
    except NotSupported as e:
        yield servers.unknown_members_finding(group, e)
    else:
        yield servers.subscriptions_finding(group, filters_by_member)
        subscribed_topics = {topic for filters in filters_by_member.values() for topic in filters or ()}
    yield from servers.consume_modes_findings(
        group, client.member.consume_modes(group, sorted({*topics, *subscribed_topics}), deadline(client))
    )
    committed_positions = committed_offsets(client, group, topics)
    yield _lag_finding(client, f"group {group}", queue_lags(client, committed_positions))


def _check_checkpoint(target: Target, folder: str, topics: Sequence[str]) -> Iterator[Finding]:
    from rocketmq_spark.cli.checkpoint import compare_with_brokers
    from rocketmq_spark.spark.checkpoints.files import open_folder as open_checkpoint
    from rocketmq_spark.spark.checkpoints.offset_log import last_batch
    from rocketmq_spark.spark.checkpoints.offset_log import uncommitted_batch as unfinished_batch_of
    from rocketmq_spark.spark.checkpoints.owners import describe_exposure, owner_of
    from rocketmq_spark.spark.checkpoints.rewind import DriftState

    check = f"checkpoint {folder}"
    is_root = os.geteuid() == folders.ROOT_ID
    owner = owner_of(folder) if is_root else folders.ROOT_ID
    if (exposure_problem := describe_exposure(folder, owner)) is not None:
        # With this problem, root cannot start the query; another user only gets a warning.
        yield (broken_finding if is_root else advice_finding)(check, *exposure_problem)
    elif owner != folders.ROOT_ID:
        problem = f"belongs to {folders.user_text(owner)}, so root starts no query to RocketMQ with it"
        yield advice_finding(check, problem, "Run the query as that user")
    if (unfinished_read := unfinished_batch_of(open_checkpoint(folder))) is not None:
        silent_brokers = query.silent_brokers_of(
            target.in_checkpoint_scope(unfinished_read.batch.source_identities).client(), unfinished_read
        )
        yield servers.unfinished_batch_finding(
            check, unfinished_batch(unfinished_read, silent_brokers, time.time_ns() // 1_000_000)
        )
    batch = last_batch(open_checkpoint(folder))
    if batch is None or not batch.sources:
        yield broken_finding(
            check,
            "has no finished batch that read RocketMQ",
            "Wait for the first batch, or name the checkpoint of another query",
        )
        return
    client = target.in_checkpoint_scope(batch.source_identities).client()
    batch, other_clusters = batch.batch_of_clusters(query.clusters(client))
    if other_clusters:
        yield advice_finding(check, query.other_clusters_note(other_clusters), "Run it again with that name server")
    drifts, _ = compare_with_brokers(client, batch)
    read_topics = {drift.queue.topic for drift in drifts}
    if topics and not read_topics.intersection(topics):
        yield servers.reads_other_topics_finding(check, read_topics, topics)
    yield from servers.checkpoint_drift_findings(check, drifts)
    comparable_drifts = [drift for drift in drifts if drift.state.is_lossless or drift.state is DriftState.LOST]
    if comparable_drifts:
        new_queues = {drift.queue for drift in comparable_drifts if drift.state is DriftState.NEW}
        yield _lag_finding(
            client, check, queue_lags(client, {drift.queue: drift.position for drift in comparable_drifts}, new_queues)
        )


def check_exactly_once(target: Target, subject: Subject) -> Finding:
    """Check whether a sink can write the topics exactly once, with the checks that a sink makes in its first batch."""
    from rocketmq_spark import options as options_table
    from rocketmq_spark.spark.checkpoints import batch_notes, files
    from rocketmq_spark.spark.sink import exactly_once, exactly_once_checks

    check, topics = "exactly-once", list(dict.fromkeys(subject.topics))
    topic_options: dict[str, object] = (
        {"topic": topics[0]} if len(topics) == 1 else {"allowed_topics": ",".join(topics)}
    )
    given_options = {**target.settings(), **topic_options, "delivery_guarantee": exactly_once_checks.EXACTLY_ONCE}
    try:
        options = options_table.parse(given_options).for_role("sink")
        if problems := exactly_once_checks.option_problems(options, ()):
            raise OptionError.of(problems)
        queue_ends = exactly_once.snapshot_queue_ends(options)
        batch_note = ""
        if subject.checkpoint is not None:
            batch_note = (
                f"; {batch_notes.batch_status(files.checkpoint_folder(subject.checkpoint), exactly_once.SINK_WRITE)}"
            )
    except RocketMQError as e:
        return failed_finding(check, e, "See docs/exactly-once.md")
    queues_text = (
        f"{len(queue_ends.end_offsets)} queue{'s' * (len(queue_ends.end_offsets) != 1)} "
        f"of {', '.join(sorted(queue_ends.masters))}"
    )
    return findings.ok_finding(
        check,
        f"{', '.join(topics)}: {queues_text} say where they end, and what is stored there may be read{batch_note}. This command "
        "cannot see whether the Spark context was started with exactly_once_conf()",
    )


def _lag_finding(client: Client, reader: str, positions: QueuePositions) -> Finding:
    """Compare the lag of a reader with the shortest retention of its brokers."""
    if positions.errors:
        return failed_finding(reader, positions.errors[0], "Look at the broker")
    retention_hours: list[int | None] = []
    for name in {row.queue.broker_name for row in positions.rows}:
        with contextlib.suppress(
            RocketMQError
        ):  # after an error, the retention of this broker is unknown, and is not compared
            retention_hours.append(bodies.config_number(client.admin.broker_config(name), "fileReservedTime"))
    known_hours = [hours for hours in retention_hours if hours is not None]
    retention_ms = min(known_hours) * _HOUR_MS if known_hours else None
    return servers.retention_finding(reader, positions.rows, retention_ms, time.time_ns() // 1_000_000)


# The width of the level at the start of a finding's first line. Further lines are indented by it.
_LEVEL_WIDTH = 8


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
@with_connection_options
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
    **reader_options: str | None,
) -> None:
    """Diagnose problems of a cluster, a topic or a reader, and suggest fixes.

    NAME_SERVER is another way to give --name-server. The command changes nothing, and stores no message on a broker. Exit codes:
    0 if no check failed, 1 if one failed, 2 for wrong usage.
    """
    from rocketmq_spark.cli.doctor.findings import Level, exit_code

    if exactly_once and not topics:
        raise click.UsageError("--exactly-once needs the topics that are written: --topic NAME")
    if server is not None:
        target = replace(target, given_options={**target.given_options, "name_server": server})
    if proxy_endpoint is not None:
        target = replace(target, given_options={**target.given_options, "proxy_endpoint": proxy_endpoint})
    width = width_of(sys.stdout)
    all_findings = []
    checkpoint = reader_options["checkpoint"]
    subject = Subject(topics, reader_options["group"], checkpoint and os.path.expanduser(checkpoint), exactly_once)
    for finding in examine(target, subject):
        all_findings.append(finding)
        row = {"check": finding.check, "level": finding.level.value, "found": finding.text, "remedy": finding.remedy}
        output.item(row, *finding_lines(finding, width))
    counts = {level: sum(finding.level is level for finding in all_findings) for level in Level}
    output.note(f"{counts[Level.BROKEN]} broken, {counts[Level.ADVICE]} with advice, {counts[Level.OK]} ok")
    ctx.exit(exit_code(all_findings, strict))


def finding_lines(finding: Finding, width: int | None) -> list[str]:
    """Return the line of a finding, wrapped to the width of the terminal, with further lines indented."""
    text = f"{finding.level.value:<{_LEVEL_WIDTH}}{finding.check}: {finding.text}"
    text += f". {finding.remedy}" if finding.remedy else ""
    return wrap(escaped(text), width, _LEVEL_WIDTH)
