"""``rocketmq-spark demo``: orders through a broker and Spark and back, watched, counted, and over in two or three minutes.

It shows itself in a live picture on a terminal, in one plain line a second elsewhere, or as JSON lines.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.numbers import FloatRange
from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import RocketMQError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from rocketmq_spark.cli.demo.feed import Accounts, Feed
    from rocketmq_spark.cli.demo.stage import Stage
    from rocketmq_spark.cli.demo.view import DemoView
    from rocketmq_spark.cli.demo.watch import DemoState, DemoWatch


def say(output: Output, text: str) -> None:
    """A line of the story, for people only."""
    if not output.machine:
        click.echo(text)


WINDOW = "5 seconds"
WATERMARK = "5 seconds"
# How long the query may stand still before its last orders are called missing.
_STILL_S = 180.0


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
    """Write orders, sum them up with a streaming query, write the sums back, and check that nothing is missing."""
    grpc = transport == "grpc"
    if (proxy_endpoint is not None) != (grpc and name_server is not None):
        raise click.UsageError("--proxy-endpoint goes with --transport grpc and --name-server, and with both only")
    from rocketmq_spark.localbroker.java import find_java

    find_java()  # its error must be the first thing that is said
    began = time.monotonic()
    say(output, f"Starting {'RocketMQ' if name_server is None else 'on ' + name_server} ...")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # before the import of PySpark, when this package checks it
    from rocketmq_spark.cli.demo.job import spark_session
    from rocketmq_spark.cli.demo.stage import one_ctrl_c, stage

    with one_ctrl_c(), stage(name_server, grpc, proxy_endpoint) as made:
        say(output, f"Name server {made.name_server}, {time.monotonic() - began:.1f} s. Starting Spark ...")
        with spark_session(made) as spark, _query(spark, made) as query:
            started_s = time.monotonic() - began
            way = f" through the Proxy at {made.proxy}" if made.proxy else ""
            say(output, f"Spark reads {made.orders} and writes {made.totals}{way}, {started_s:.1f} s")
            result = _play(output, _Play(spark, made, query, seconds, rate))
        _tell(output, made, result, started_s, time.monotonic() - began)
        if made.broker_data:
            say(output, "Ending RocketMQ, which takes some seconds ...")
    if not result.accounts.balanced:
        raise RocketMQError(
            f"the counts do not agree: {'; '.join(result.accounts.problems())}",
            remedy=f"Spark's messages are in {made.spark_log}",
        )


@dataclass(frozen=True, slots=True)
class _Play:
    spark: SparkSession
    made: Stage
    query: StreamingQuery
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class _Result:
    accounts: Accounts
    sight: DemoState


@contextlib.contextmanager
def _query(spark: SparkSession, made: Stage) -> Iterator[StreamingQuery]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as sf

    from rocketmq_spark.cli.demo.job import read_orders, region_totals, write_totals
    from rocketmq_spark.cli.demo.watch import OBSERVED

    orders = read_orders(spark, made.name_server, made.orders)
    totals = region_totals(orders, WINDOW, WATERMARK)
    counted = totals.observe(OBSERVED, sf.count("*").alias("totals"), sf.sum("orders").alias("orders"))
    checkpoint = str(made.folder / "checkpoint")
    writer = write_totals(counted, made.name_server, made.totals, checkpoint)
    if made.proxy:
        writer = writer.option("transport", "grpc").option("proxyEndpoint", made.proxy)
    query = writer.queryName("demo").trigger(processingTime="1 second").start()
    try:
        yield query
    finally:
        # The session ends next, which stops what did not stop in time; and an earlier failure must be reported instead.
        with contextlib.suppress(PySparkException, Py4JError):
            query.stop()


def _play(output: Output, play: _Play) -> _Result:
    from rocketmq_spark.cli.demo.feed import Feed
    from rocketmq_spark.cli.demo.view import view
    from rocketmq_spark.cli.demo.watch import DemoWatch

    watch = DemoWatch(play.made, play.query)
    with (
        view(output, play.seconds, play.rate) as shown,
        Feed(play.made.name_server, play.made.orders, play.rate, play.seconds) as feed,
    ):
        _show_until_read(play.query, watch, shown, feed)
        feed.end_windows()
        watch.sight.phase = "ending the last windows"
        shown.show(watch.sight)
        play.query.processAllAvailable()
        sight = replace(watch.look(), phase="done")
        shown.show(sight)
    return _Result(_accounts(play, feed, sight), sight)


def _show_until_read(query: StreamingQuery, watch: DemoWatch, shown: DemoView, feed: Feed) -> None:
    """Until all orders are written and read. The clock starts with the first batch, for which Spark starts Python."""
    last, still_since = -1, time.monotonic()
    begin = still_since
    while True:
        _check(query)
        done = feed.done
        sight = watch.look()
        if sight.batch_ms and not feed.started:
            feed.start()
            begin = time.monotonic()
        sight.sent, sight.elapsed_s = feed.sent, time.monotonic() - begin
        sight.phase = _phase(feed, done)
        shown.show(sight)
        if done and sight.read >= feed.sent:
            return
        if sight.read != last or (feed.started and not done):
            last, still_since = sight.read, time.monotonic()
        elif time.monotonic() - still_since > _STILL_S:
            raise RocketMQError(f"the query has read {sight.read} of {feed.sent} orders and makes no progress")
        time.sleep(shown.interval_s)


def _phase(feed: Feed, done: bool) -> str:
    if not feed.started:
        return "waiting for Spark's first batch"
    return "reading the rest" if done else "writing orders"


def _check(query: StreamingQuery) -> None:
    """Raises what ended the query."""
    error = query.exception()
    if error is None:
        return
    reason = str(error).splitlines()[0]
    # Spark gives a Python process ten seconds to start and has no setting to wait longer.
    busy = "failed to connect back" in str(error)
    remedy = "This machine was too busy to start Python within 10 s, Spark's limit: try again" if busy else None
    raise RocketMQError("the streaming query failed", remark=reason, remedy=remedy)


def _accounts(play: _Play, feed: Feed, sight: DemoState) -> Accounts:
    from pyspark.sql import functions as sf

    from rocketmq_spark.cli.demo.feed import CLOSING_ORDERS, Accounts
    from rocketmq_spark.cli.demo.job import read_totals

    returned = read_totals(play.spark, play.made.name_server, play.made.totals)
    sums = returned.agg(sf.count("*"), sf.sum("orders"), sf.sum("amount")).first()
    count, orders, amount = sums if sums is not None else (0, 0, 0)
    return Accounts(
        orders_written=feed.sent,
        orders_read=sight.read - CLOSING_ORDERS,
        orders_aggregated=sight.orders_aggregated,
        orders_returned=orders or 0,
        totals_written=sight.totals_written,
        totals_returned=count,
        cents_written=feed.cents,
        cents_returned=int((amount or 0) * 100),
        dropped_late=sight.dropped_late,
    )


def _tell(output: Output, made: Stage, result: _Result, started_s: float, all_s: float) -> None:
    accounts, sight = result.accounts, result.sight
    typical = int(statistics.median(sight.batch_ms)) if sight.batch_ms else 0
    commands = _next_commands(made)
    document = {
        "event": "result",
        "accounts": accounts.document(),
        "topics": [made.orders, made.totals],
        "data": str(made.folder),
        "startSeconds": round(started_s, 1),
        "seconds": round(all_s, 1),
        "batches": len(sight.batch_ms),
        "medianBatchMs": typical,
        "next": commands,
    }
    lines = [
        "",
        f"A producer wrote orders to topic {made.orders}; a streaming query summed them up per {WINDOW} and region",
        f"in {len(sight.batch_ms)} batches (median {typical} ms) and wrote the totals to topic {made.totals}.",
        "",
        *("  " + line for line in accounts.lines()),
        "",
        "All agree." if accounts.balanced else "They do not agree.",
        "(A last order, dated ahead, ended the windows that were open; its own window stays open and is in no total.)",
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
    where = "" if made.broker_data else f" --name-server {shlex.quote(made.name_server)}"
    see = f"rocketmq-spark tail {made.totals} --from earliest --no-follow{where}"
    if made.broker_data:
        start = f"rocketmq-spark broker start --data {shlex.quote(str(made.broker_data))}"
        return [start, see, f"rocketmq-spark topic describe {made.orders}"]
    describe = f"rocketmq-spark topic describe {made.orders}{where}"
    return [see, describe, f"rocketmq-spark topic delete {made.orders} --yes{where}"]
