"""``rocketmq-spark demo``: orders through a broker and Spark and back, with Spark's driver killed in between, and all counted."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.numbers import FloatRange
from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import RocketMQError

if TYPE_CHECKING:
    from rocketmq_spark.cli.demo.script import Result
    from rocketmq_spark.cli.demo.stage import Stage


def say(output: Output, text: str) -> None:
    """A line of the story, for people only."""
    if not output.machine:
        click.echo(text)


@click.command(cls=CliCommand)
@click.option(
    "--seconds", type=FloatRange(1), default=50.0, show_default=True, help="How long to write orders, in seconds."
)
@click.option("--rate", type=FloatRange(1, 5000), default=500.0, show_default=True, help="Orders per second.")
@click.option(
    "-n", "--name-server", metavar="HOST:PORT", help="Use this cluster and create two topics [default: a new broker]."
)
@click.option(
    "--transport",
    type=click.Choice(["remoting", "grpc"]),
    default="remoting",
    show_default=True,
    help="How the query writes: to brokers, or through a Proxy over gRPC.",
)
@click.option(
    "--proxy-endpoint", metavar="HOST:PORT", help="The gRPC endpoint of the cluster's Proxy [default: a new Proxy]."
)
@click.pass_obj
def demo(
    output: Output, seconds: float, rate: float, name_server: str | None, transport: str, proxy_endpoint: str | None
) -> None:
    """Write orders, sum them up with a streaming query, write the sums back, kill Spark's driver in the middle of a batch, and
    check that nothing is lost or stored twice.

    With --transport grpc, a batch that is repeated may store totals twice: see docs/grpc.md."""
    grpc = transport == "grpc"
    if (proxy_endpoint is not None) != (grpc and name_server is not None):
        raise click.UsageError("--proxy-endpoint goes with --transport grpc and --name-server, and with both only")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # before the import of PySpark, when this package checks it
    import pyspark  # noqa: F401 - the driver's process needs it; that it is missing must be said here

    from rocketmq_spark.localbroker.java import find_java

    find_java()  # its error must be the first thing that is said
    began = time.monotonic()
    say(output, f"Starting {'RocketMQ' if name_server is None else 'on ' + name_server} ...")
    from rocketmq_spark.cli.demo.stage import interruptible, stage

    with interruptible(), stage(name_server, grpc, proxy_endpoint) as made:
        say(output, f"Name server {made.name_server}, {time.monotonic() - began:.1f} s. Starting Spark ...")
        try:
            result = _play(output, made, seconds, rate)
        except BaseException:
            if made.broker_data is None:
                commands = "; ".join(_delete_commands(made))
                output.warning(f"Topics {made.orders} and {made.totals} stay on the cluster. Delete them: {commands}")
            raise
        _tell(output, made, result, time.monotonic() - began)
        if made.broker_data:
            say(output, "Ending RocketMQ, which takes some seconds ...")
    if not result.accounts.balanced:
        raise RocketMQError(
            f"the counts do not agree: {'; '.join(result.accounts.problems())}",
            remedy=f"Spark's messages are in {made.spark_log}",
        )


def _play(output: Output, made: Stage, seconds: float, rate: float) -> Result:
    from rocketmq_spark.cli.demo.driver import SparkDriver
    from rocketmq_spark.cli.demo.feed import Feed
    from rocketmq_spark.cli.demo.script import Script
    from rocketmq_spark.cli.demo.view import view
    from rocketmq_spark.cli.demo.watch import DemoWatch

    with (
        SparkDriver(made) as driver,
        Feed(made.name_server, made.orders, rate, seconds) as feed,
        view(output, seconds, rate) as shown,  # it ends first, and with it the picture, even if the end takes long
    ):
        return Script(driver, DemoWatch(made, driver), feed, shown, seconds).run(exactly_once=made.proxy is None)


def _tell(output: Output, made: Stage, result: Result, all_s: float) -> None:
    accounts, state, kill = result.accounts, result.state, result.kill
    typical = int(statistics.median(state.batch_ms)) if state.batch_ms else 0
    commands = _next_commands(made)
    document = {
        "event": "result",
        "accounts": accounts.document(),
        "kill": asdict(kill),
        "topics": [made.orders, made.totals],
        "data": str(made.folder),
        "seconds": round(all_s, 1),
        "batches": len(state.batch_ms),
        "medianBatchMs": typical,
        "next": commands,
    }
    way = f" through the Proxy at {made.proxy}" if made.proxy else ""
    lines = [
        "",
        f"A producer wrote orders to topic {made.orders}. A streaming query summed them up per window",
        f"and region in {len(state.batch_ms)} batches (median {typical} ms) and wrote the totals to topic {made.totals}{way}.",
        f"In between: {kill}.",
        "",
        *("  " + line for line in accounts.lines()),
        "",
        accounts.verdict(),
        "",
        f"Data, checkpoint and Spark's log: {made.folder}",
        "Try next:",
        *("  " + command for command in commands),
        *_where(),
        "",
    ]
    output.item(document, *lines)


def _where() -> list[str]:
    """``make demo`` runs in an environment that is not activated."""
    folder = os.path.dirname(sys.executable)
    return [] if shutil.which("rocketmq-spark") else [f"(rocketmq-spark is in {folder}: . {folder}/activate first)"]


def _next_commands(made: Stage) -> list[str]:
    tail, describe = f"tail {made.totals} --from earliest --no-follow", f"topic describe {made.orders}"
    if made.broker_data is None:
        return [_command(made, tail), _command(made, describe), *_delete_commands(made)]
    start = f"broker start --data {shlex.quote(str(made.broker_data))}"
    return [_command(made, command) for command in (start, tail, describe)]


def _delete_commands(made: Stage) -> list[str]:
    return [_command(made, f"topic delete {topic} --yes") for topic in (made.orders, made.totals)]


def _command(made: Stage, command: str) -> str:
    """A command for the cluster of the run. The demo's own broker needs no address: ``broker start`` starts it."""
    where = "" if made.broker_data else f" --name-server {shlex.quote(made.name_server)}"
    return f"rocketmq-spark {command}{where}"
