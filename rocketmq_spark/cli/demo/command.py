"""``rocketmq-spark demo``: sends orders through a broker and Spark and back, kills Spark's driver meanwhile, and counts all."""

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
    from rocketmq_spark.cli.demo.environment import DemoEnvironment
    from rocketmq_spark.cli.demo.run import DemoResult


def _say(output: Output, text: str) -> None:
    """Print a line of progress, for people only."""
    if not output.is_for_programs:
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

    With --transport grpc, delivery is at least once: a repeated batch may store totals twice."""
    uses_grpc = transport == "grpc"
    if (proxy_endpoint is not None) != (uses_grpc and name_server is not None):
        raise click.UsageError(
            "--proxy-endpoint requires --transport grpc and --name-server, and these two together require --proxy-endpoint"
        )
    # This line must precede the import of PySpark. At this import, rocketmq_spark checks the Python in PYSPARK_PYTHON.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    import pyspark  # noqa: F401 - fails here, not in the driver's process, if PySpark is missing

    from rocketmq_spark.localbroker.java import find_java

    find_java()  # called before anything is printed, because it raises an error without Java
    began_s = time.monotonic()
    _say(output, f"Starting {'RocketMQ' if name_server is None else 'on ' + name_server} ...")
    from rocketmq_spark.cli.demo.environment import demo_environment, interruptible

    with interruptible(), demo_environment(name_server, uses_grpc, proxy_endpoint) as environment:
        _say(output, f"Name server {environment.name_server}, {time.monotonic() - began_s:.1f} s. Starting Spark ...")
        try:
            environment.create_topics()
            result = _run(output, environment, seconds, rate)
            _print_result(output, environment, result, time.monotonic() - began_s)
        except BaseException:
            if not environment.starts_broker:
                topics, commands = f"{environment.orders} and {environment.totals}", _delete_commands(environment)
                output.warning(
                    f"Topics {topics} stay on the cluster, if they exist. Delete them: {'; '.join(commands)}"
                )
            raise
        if environment.starts_broker:
            _say(output, "Stopping RocketMQ, which may take 20 s ...")
    if not result.accounts.balanced:
        raise RocketMQError(
            f"the result is wrong: {'; '.join(result.accounts.problems())}",
            remedy=environment.remedy,
        )


def _run(output: Output, environment: DemoEnvironment, seconds: float, rate: float) -> DemoResult:
    from rocketmq_spark.cli.demo.driver import SparkDriver
    from rocketmq_spark.cli.demo.order_writer import OrderWriter
    from rocketmq_spark.cli.demo.run import DemoRun
    from rocketmq_spark.cli.demo.view import view
    from rocketmq_spark.cli.demo.watch import DemoWatch

    with (
        SparkDriver(environment) as driver,
        OrderWriter(environment.name_server, environment.orders, rate, seconds) as writer,
        # The innermost block: the picture ends before the other blocks close.
        view(output, seconds, rate) as demo_view,
    ):
        return DemoRun(driver, DemoWatch(environment, driver), writer, demo_view, seconds).run(
            exactly_once=environment.exactly_once
        )


def _print_result(output: Output, environment: DemoEnvironment, result: DemoResult, elapsed_s: float) -> None:
    accounts, state, kill = result.accounts, result.state, result.kill
    batch_count, median_ms = len(state.batch_ms), int(statistics.median(state.batch_ms))
    commands = _next_commands(environment)
    document = {
        "event": "result",
        "accounts": accounts.document(),
        "kill": asdict(kill),
        "topics": [environment.orders, environment.totals],
        "data": str(environment.folder),
        "seconds": round(elapsed_s, 1),
        "batches": batch_count,
        "medianBatchMs": median_ms,
        "next": commands,
    }
    through_proxy = f" through the Proxy at {environment.proxy}" if environment.proxy else ""
    lines = [
        "",
        f"A producer wrote orders to topic {environment.orders}. A streaming query summed them up per window and region",
        f"in {batch_count} batches (median {median_ms} ms) and wrote the totals to topic {environment.totals}{through_proxy}.",
        f"In between: {kill}.",
        "",
        *("  " + line for line in accounts.lines()),
        "",
        accounts.verdict(),
        "",
        f"Data, checkpoint and Spark's log: {environment.folder}",
        "Try next:",
        *("  " + command for command in commands),
        *_activation_hint(),
        "",
    ]
    output.item(document, *lines)


def _activation_hint() -> list[str]:
    """If ``rocketmq-spark`` is not on PATH, as after ``make demo``, return a line about how to activate its virtual
    environment.
    """
    if shutil.which("rocketmq-spark"):
        return []
    folder = os.path.dirname(sys.executable)
    return [f"(rocketmq-spark is in {folder}: . {shlex.quote(os.path.join(folder, 'activate'))} first)"]


def _next_commands(environment: DemoEnvironment) -> list[str]:
    tail, describe = f"tail {environment.totals} --from earliest --no-follow", f"topic describe {environment.orders}"
    if not environment.starts_broker:
        return [_command(environment, tail), _command(environment, describe), *_delete_commands(environment)]
    start = f"broker start --data {shlex.quote(str(environment.broker_data))}"
    return [_command(environment, command) for command in (start, tail, describe)]


def _delete_commands(environment: DemoEnvironment) -> list[str]:
    return [_command(environment, f"topic delete {topic} --yes") for topic in (environment.orders, environment.totals)]


def _command(environment: DemoEnvironment, command: str) -> str:
    """Return a command for the cluster of the run. The command has no address for the demo's own broker, because commands by
    default use the broker that ``broker start`` has started.
    """
    server_option = "" if environment.starts_broker else f" --name-server {shlex.quote(environment.name_server)}"
    return f"rocketmq-spark {command}{server_option}"
