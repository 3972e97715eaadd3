"""``rocketmq-spark lag``: how far a consumer group, or a query by its checkpoint, is behind."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliCommand, on_ctrl_c
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output, one_line, safe
from rocketmq_spark.errors import OptionError, RocketMQError

if TYPE_CHECKING:
    from rocketmq_spark.cli.lag_view import LagSnapshot
    from rocketmq_spark.cli.positions import QueuePositions

DEFAULT_HOST = "127.0.0.1"


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise click.BadParameter(f"{value!r} is not [HOST:]PORT, such as 9464 or 0.0.0.0:9464")
    return host or DEFAULT_HOST, int(port)


@click.command(cls=CliCommand)
@click.option("--group", metavar="NAME", help="A consumer group.")
@click.option("--topic", "topics", multiple=True, help="Only this topic (may be repeated).")
@click.option(
    "--checkpoint", metavar="FOLDER", help="The checkpointLocation of a query: what its last finished batch has read."
)
@click.option("--watch", is_flag=True, help="Look again and again, with rates, until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--prometheus", "as_metrics", is_flag=True, help="Print Prometheus' text format.")
@click.option(
    "--serve",
    metavar="[HOST:]PORT",
    callback=_address,
    help="Serve that at /metrics until Ctrl-C; each request looks anew. Without a host on this machine only.",
)
@connected
@click.pass_obj
def lag(output: Output, /, target: Target, watch: bool, interval_s: float, as_metrics: bool, **what: Any) -> None:
    """How many messages a group or a query has not read yet, by queue, and for how long the next one has waited.

    With --json one object a look: lag, lost, behindMs, readPerSecond, writtenPerSecond, catchUpMs, and queues; for a
    checkpoint underWay, the batch that is not done: batchId, forMs, and waitsFor, brokers that it reads and that do not
    answer. What is not
    known is null: rates at the first look, the lag of a checkpoint's queue whose broker is away. Then what the others said is
    shown, and the exit code is 1; a group's offsets lie on the brokers themselves, and one that is away is an error.
    """
    from rocketmq_spark.cli.lag_view import LagSnapshot, prometheus

    group, checkpoint, topics = what["group"], what["checkpoint"], what["topics"]
    if (group is None) == (checkpoint is None):
        raise OptionError("lag needs either --group NAME or --checkpoint FOLDER")
    ask = _of_group(target, group, topics) if group is not None else _of_checkpoint(target, checkpoint, topics)
    if what["serve"] is not None:
        _serve(output, what["serve"], lambda: prometheus(_complete(*ask())))
    elif watch:
        _watch(output, ask, interval_s)
    else:
        about, look = ask()
        sight = LagSnapshot(about, look.rows, _now_ms())
        if as_metrics:
            click.echo(prometheus(sight), nl=False)
        else:
            _show(output, sight)
        if look.errors:
            raise look.errors[0]


Ask = Callable[[], tuple[dict[str, object], "QueuePositions"]]


def _of_group(target: Target, group: str, topics: tuple[str, ...]) -> Ask:
    from rocketmq_spark.cli import positions

    client, own = target.client(), positions.own_group(target, group)
    return lambda: ({"group": own}, positions.look(client, positions.of_group(client, own, topics)))


def _of_checkpoint(target: Target, name: str, topics: tuple[str, ...]) -> Ask:
    from rocketmq_spark.cli import positions
    from rocketmq_spark.cli.lag_view import under_way

    def ask() -> tuple[dict[str, object], QueuePositions]:
        reached = positions.of_checkpoint(name, topics)
        client = target.within(reached.reads).client()
        about: dict[str, object] = {"checkpoint": name, "batchId": reached.batch, "underWay": None}
        if (read := reached.under_way) is not None:
            silent = positions.silent(client, {part.queue for part in read.ranges})
            about["underWay"] = under_way(read, silent, _now_ms())
        return about, positions.look(client, reached.positions)

    return ask


def _complete(about: dict[str, object], look: QueuePositions) -> LagSnapshot:
    """For who cannot be told a part: what a broker did not say is an error."""
    from rocketmq_spark.cli.lag_view import LagSnapshot

    if look.errors:
        raise look.errors[0]
    return LagSnapshot(about, look.rows, _now_ms())


def _show(output: Output, sight: LagSnapshot) -> None:
    from rocketmq_spark.cli.lag_view import document, screen, summary, table
    from rocketmq_spark.lag import total

    if output.machine:
        output.item(document(sight), "")
        return
    if sys.stdout.isatty():
        click.echo(safe("\n".join(screen(sight, shutil.get_terminal_size().columns))))
    else:
        click.echo(safe("\n".join(table(sight))))
        output.note(", ".join(summary(sight)))
    every = total(sight.rows, sight.now_ms)
    if every.lost:
        output.note(f"{every.lost} messages were removed before they were read: the topic's retention is too short")
    if every.unknown_queues:
        output.note(f"queues whose lag is not known, for want of an offset or of their broker: {every.unknown_queues}")


def _watch(output: Output, ask: Ask, interval_s: float) -> None:
    """Until Ctrl-C. A broker that is away for a while does not end it; the first look must succeed."""
    from rocketmq_spark.cli.lag_view import LagSnapshot

    over = threading.Event()
    before: LagSnapshot | None = None
    taken_s = 0.0
    with on_ctrl_c(over.set, (signal.SIGTERM,)), _view(output) as show:
        while True:
            trouble: RocketMQError | None = None
            try:
                about, look = ask()
                now_s = time.monotonic()
                rows = before.rows if before is not None else ()
                before = LagSnapshot(about, look.rows, _now_ms(), rows, now_s - taken_s)
                taken_s = now_s
                trouble = look.errors[0] if look.errors else None
            except RocketMQError as e:
                if before is None or not e.retriable:
                    raise
                trouble = e
            show(before, trouble)
            if over.wait(interval_s):
                return


Show = Callable[["LagSnapshot", RocketMQError | None], None]


@contextlib.contextmanager
def _view(output: Output) -> Iterator[Show]:
    """A picture on a terminal, else a line a look."""
    from rocketmq_spark.cli.lag_view import document, folded, screen, summary

    def tell(sight: LagSnapshot, trouble: RocketMQError | None) -> None:
        output.item(document(sight), ", ".join(summary(sight)))
        if trouble is not None:
            output.failure(trouble)

    if output.machine or not sys.stdout.isatty():
        yield tell
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def draw(sight: LagSnapshot, trouble: RocketMQError | None) -> None:
        said = folded([one_line(trouble)], console.width) if trouble is not None else []
        lines = screen(sight, console.width, console.height - len(said) - 1)
        live.update(Text(safe("\n".join([*lines, *said])), no_wrap=True, overflow="crop"), refresh=True)

    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield draw


def _serve(output: Output, address: tuple[str, int], text: Callable[[], str]) -> None:
    from rocketmq_spark.cli.metrics_server import serving

    over = threading.Event()
    with on_ctrl_c(over.set, (signal.SIGTERM,)), serving(address, text) as url:
        output.item({"url": url}, f"Serving {url} until Ctrl-C")
        over.wait()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
