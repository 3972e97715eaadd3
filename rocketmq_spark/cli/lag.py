"""``rocketmq-spark lag``: shows how far a consumer group or a query (by its checkpoint) is behind, once or repeatedly.

The command also serves Prometheus metrics. Each request for metrics sends new requests to the brokers.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click

from rocketmq_spark.base import exposition
from rocketmq_spark.base.process import on_signals
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.numbers import FloatRange
from rocketmq_spark.cli.output import Output, one_line, safe, safe_labels
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.options.parsing import split_address

if TYPE_CHECKING:
    from rocketmq_spark.admin.groups import QueuePositions
    from rocketmq_spark.cli.lag_view import LagSnapshot


def _parse_address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host = value.rpartition(":")[0]
    try:
        return split_address(value if host else f"{exposition.DEFAULT_HOST}:{value.removeprefix(':')}", lowest_port=0)
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not [HOST:]PORT, such as 9464 or 0.0.0.0:9464 ({e})") from e


@click.command(cls=CliCommand)
@click.option("--group", metavar="NAME", help="A consumer group.")
@click.option("--topic", "topics", multiple=True, help="Only this topic (may be repeated).")
@click.option(
    "--checkpoint",
    metavar="FOLDER",
    help="The checkpointLocation of a query. Its lag counts from the end of the last finished batch, and includes queues and"
    " topics that the query has not read yet.",
)
@click.option("--watch", is_flag=True, help="Refresh until Ctrl-C, with rates.")
@click.option(
    "--interval",
    "interval_s",
    type=FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between refreshes.",
)
@click.option("--prometheus", "as_metrics", is_flag=True, help="Print the Prometheus text format.")
@click.option(
    "--serve",
    metavar="[HOST:]PORT",
    callback=_parse_address,
    help="Serve Prometheus metrics at /metrics until Ctrl-C; each request asks brokers. Without HOST, on loopback only.",
)
@with_connection_options
@click.pass_obj
def lag(output: Output, /, target: Target, watch: bool, interval_s: float, as_metrics: bool, **arguments: Any) -> None:
    """Show how many messages a group or a query has not read yet, by queue, and the age of the oldest unread message.

    Give either --group or --checkpoint.

    --json prints one object per refresh: lag (unread messages), lost (messages that were removed before they were read), behindMs
    (age of the oldest unread message), readPerSecond, writtenPerSecond, catchUpMs (time until lag is 0 at these rates),
    unknownQueues (number of queues whose lag is unknown), wentBackQueues (number of queues that end before the position of the
    group or query), and queues. Unknown values, such as the rates of the first refresh, are null.

    With --checkpoint, --json also prints batchId (the last finished batch), newQueues (number of queues that no finished batch
    has read, such as queues of new topics of a pattern, or of a topic that was created again; the lag of such a queue counts from
    the offset at which the query will begin), otherClusters (clusters that the query reads and the command does not contact),
    and underWay, the unfinished batch: its batchId, forMs (time since the batch began) and waitsFor (brokers from which the
    batch reads and which do not answer). A checkpoint does not show whether its query runs.

    If a broker is unavailable, --checkpoint shows '-' (JSON: null) for the queues of that broker and exits with 1; --group fails,
    because the brokers store the offsets of a group.

    If a queue ends before the position of the group or query, its lag is unknown: its topic was created again, or its broker lost
    messages. The exit code is also 1 if a queue ends before the position of the group or query.
    """
    from rocketmq_spark.cli.lag_view import LagSnapshot, prometheus, went_back_count

    group, checkpoint, topics = arguments["group"], arguments["checkpoint"], arguments["topics"]
    if (group is None) == (checkpoint is None):
        raise click.UsageError("lag needs either --group NAME or --checkpoint FOLDER")
    if (as_metrics or arguments["serve"] is not None) and (command := exposition.install_command()):
        raise OptionError("--prometheus and --serve need prometheus-client, which is not installed", remedy=command)
    fetch = _group_lag(target, group, topics) if group is not None else _checkpoint_lag(target, checkpoint, topics)
    if arguments["serve"] is not None:
        _serve(output, arguments["serve"], lambda: prometheus(_complete_snapshot(*fetch())))
    elif watch:
        _watch(output, fetch, interval_s)
    else:
        reader, positions = fetch()
        snapshot = LagSnapshot(reader, positions.rows, _now_ms())
        if as_metrics:
            click.echo(safe_labels(prometheus(snapshot)), nl=False)
        else:
            _show(output, snapshot)
        if positions.errors:
            raise positions.errors[0]
        if went_back_count(positions.rows):
            click.get_current_context().exit(1)


FetchLag = Callable[[], tuple[dict[str, object], "QueuePositions"]]


def _group_lag(target: Target, group: str, topics: tuple[str, ...]) -> FetchLag:
    from rocketmq_spark.admin import groups

    client, group_in_environment = target.client(), own_group(target, group)
    return lambda: (
        {"group": group_in_environment},
        groups.queue_lags(client, groups.committed_offsets(client, group_in_environment, topics)),
    )


def _checkpoint_lag(target: Target, name: str, topics: tuple[str, ...]) -> FetchLag:
    from rocketmq_spark.admin.groups import queue_lags
    from rocketmq_spark.cli.lag_view import unfinished_batch
    from rocketmq_spark.cli.query import next_positions, silent_brokers_of

    def fetch() -> tuple[dict[str, object], QueuePositions]:
        client, query_positions = next_positions(target, name, topics)
        reader: dict[str, object] = {
            "checkpoint": name,
            "batchId": query_positions.finished_batch_number,
            "underWay": None,
        }
        reader["otherClusters"] = list(query_positions.other_clusters)
        reader["newQueues"] = len(query_positions.new_queues)
        if (unfinished_read := query_positions.unfinished_batch) is not None:
            reader["underWay"] = unfinished_batch(
                unfinished_read, silent_brokers_of(client, unfinished_read), _now_ms()
            )
        positions = queue_lags(client, query_positions.positions, query_positions.new_queues)
        return reader, replace(positions, errors=[*positions.errors, *query_positions.errors])

    return fetch


def _complete_snapshot(reader: dict[str, object], positions: QueuePositions) -> LagSnapshot:
    """Return the snapshot. Raises the error if a broker has not answered, because Prometheus must not get partial values."""
    from rocketmq_spark.cli.lag_view import LagSnapshot

    if positions.errors:
        raise positions.errors[0]
    return LagSnapshot(reader, positions.rows, _now_ms())


def _show(output: Output, snapshot: LagSnapshot) -> None:
    from rocketmq_spark.cli.lag_view import document, screen, summary, table, went_back_count
    from rocketmq_spark.cli.query import other_clusters_note
    from rocketmq_spark.model.admin import total

    if output.is_for_programs:
        output.item(document(snapshot), "")
        return
    if sys.stdout.isatty():
        click.echo(safe("\n".join(screen(snapshot, shutil.get_terminal_size().columns))))
    else:
        click.echo(safe("\n".join(table(snapshot))))
        output.note(", ".join(summary(snapshot)))
    if other_clusters := snapshot.reader.get("otherClusters"):
        output.note(other_clusters_note(cast("list[str]", other_clusters)))
    if new_queues := snapshot.reader.get("newQueues"):
        output.note(
            f"new queues: {new_queues}; no finished batch has read them, and the query reads them from their first message"
        )
    totals = total(snapshot.rows, snapshot.now_ms)
    if totals.lost:
        output.note(f"{totals.lost} messages were removed before they were read: the topic's retention is too short")
    if went_back_queues := went_back_count(snapshot.rows):
        remedy = (
            "checkpoint diff {checkpoint}" if "checkpoint" in snapshot.reader else "offsets set {group} --to earliest"
        )
        output.note(
            f"{went_back_queues} queues end before the position: their topic was created again, or their broker lost messages. "
            f"See: rocketmq-spark {remedy.format(**snapshot.reader)}"
        )
    if unknown_queues := totals.unknown_queues - went_back_queues:
        output.note(
            f"queues whose lag is not known, because they have no offset or their broker does not answer: {unknown_queues}"
        )


def _watch(output: Output, fetch: FetchLag, interval_s: float) -> None:
    """Refresh until Ctrl-C. The first request must succeed; later ones may fail with retriable errors."""
    from rocketmq_spark.cli.lag_view import LagSnapshot

    stop_latch = Latch()
    last_snapshot: LagSnapshot | None = None
    fetched_at_s = 0.0
    with on_signals(stop_latch.set, signal.SIGINT, signal.SIGTERM), _view(output) as show:
        while True:
            error: RocketMQError | None = None
            try:
                reader, positions = fetch()
                now_s = time.monotonic()
                rows_before = last_snapshot.rows if last_snapshot is not None else ()
                last_snapshot = LagSnapshot(reader, positions.rows, _now_ms(), rows_before, now_s - fetched_at_s)
                fetched_at_s = now_s
                error = positions.errors[0] if positions.errors else None
            except RocketMQError as e:
                if last_snapshot is None or not e.retriable:
                    raise
                error = e
            show(last_snapshot, error)
            if stop_latch.wait(interval_s):
                return


ShowLag = Callable[["LagSnapshot", RocketMQError | None], None]


@contextlib.contextmanager
def _view(output: Output) -> Iterator[ShowLag]:
    """Yield the function that shows a snapshot: a screen on a terminal, otherwise one line."""
    from rocketmq_spark.cli.lag_view import document, fold, screen, summary

    def print_line(snapshot: LagSnapshot, error: RocketMQError | None) -> None:
        output.item(document(snapshot), ", ".join(summary(snapshot)))
        if error is not None:
            output.failure(error)

    if output.is_for_programs or not sys.stdout.isatty():
        yield print_line
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def draw(snapshot: LagSnapshot, error: RocketMQError | None) -> None:
        error_lines = fold([one_line(error)], console.width) if error is not None else []
        lines = screen(snapshot, console.width, console.height - len(error_lines) - 1)
        live.update(Text(safe("\n".join([*lines, *error_lines])), no_wrap=True, overflow="crop"), refresh=True)

    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield draw


def _serve(output: Output, address: tuple[str, int], make_metrics: Callable[[], str]) -> None:
    stop_latch = Latch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_signals(stop_latch.set, signal.SIGINT, signal.SIGTERM))
        try:
            url = stack.enter_context(
                exposition.serve(address, make_metrics, failure_types=RocketMQError, format_failure=one_line)
            )
        except OSError as e:
            raise OptionError(
                f"--serve {address[0]}:{address[1]}: {e.strerror}", remedy="Choose another port, or stop what uses it"
            ) from e
        output.item({"url": url}, f"Serving {url} until Ctrl-C")
        stop_latch.wait()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def own_group(target: Target, group: str) -> str:
    """The group's name in the environment of the command."""
    from rocketmq_spark.consumer.settings import group_in_environment
    from rocketmq_spark.options import parse

    return group_in_environment(parse({**target.settings(), "group": group}).for_role("pull consumer"))[1]
