"""What the demo shows, and what it watches for that.

What can be seen of the demo while it runs: counts from Spark's progress, offsets from the broker, newest totals.

How the demo shows itself: a live picture on a terminal, one plain line a second elsewhere, or JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import click
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.cli.output import Output
from rocketmq_spark.cli.reading import TopicReader, earliest
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source.offsets import Offsets

if TYPE_CHECKING:
    from rich.console import Group

OBSERVED = "totals"


@dataclass(slots=True)
class DemoState:
    """The demo at one moment. ``sent`` and ``phase`` are filled in by whoever writes the orders."""

    phase: str = "starting"
    elapsed_s: float = 0.0
    sent: int = 0
    read: int = 0
    totals_written: int = 0
    orders_aggregated: int = 0
    totals_seen: int = 0
    dropped_late: int = 0
    lag: dict[str, int] = field(default_factory=dict)
    batch_ms: list[int] = field(default_factory=list)
    window: str = ""
    window_totals: dict[str, tuple[int, str]] = field(default_factory=dict)

    def document(self) -> Mapping[str, object]:
        return {
            "event": "progress",
            "phase": self.phase,
            "elapsedSeconds": round(self.elapsed_s, 1),
            "messagesIn": self.sent,
            "messagesRead": self.read,
            "totalsOut": self.totals_written,
            "ordersAggregated": self.orders_aggregated,
            "lag": self.lag,
            "batches": len(self.batch_ms),
            "lastBatchMs": self.batch_ms[-1] if self.batch_ms else None,
        }


class DemoWatch:
    """Keeps a ``DemoState`` up to date. Not for several threads."""

    def __init__(self, made: Stage, query: StreamingQuery) -> None:
        self.sight = DemoState()
        self._query = query
        self._topic = made.orders
        options = options_table.parse({"name_server": made.name_server}).for_role("batch source")
        self._client = session.client(options)
        self._returned = TopicReader(options, made.totals, lambda part, cause: None)
        self._returned.seek(earliest)
        self._progress: dict[tuple[int, str], StreamingQueryProgress] = {}
        self._positions: Mapping[MessageQueue, int] = {}

    def look(self) -> DemoState:
        """Ask Spark and the broker. A broker that does not answer leaves its numbers as they were."""
        self._ask_spark()
        try:
            self._ask_broker()
        except RocketMQError as e:
            if not e.retriable:
                raise
        return self.sight

    def _ask_spark(self) -> None:
        for progress in self._query.recentProgress:
            self._progress[progress.batchId, progress.timestamp] = progress
        reports = list(self._progress.values())
        sight = self.sight
        sight.read = sum(p.numInputRows for p in reports)
        observed = [p.observedMetrics[OBSERVED].asDict() for p in reports if OBSERVED in p.observedMetrics]
        sight.totals_written = sum(row["totals"] or 0 for row in observed)
        sight.orders_aggregated = sum(row["orders"] or 0 for row in observed)
        sight.dropped_late = sum(o.numRowsDroppedByWatermark for p in reports for o in p.stateOperators)
        sight.batch_ms = [p.batchDuration for p in reports if p.numInputRows]
        ends = [p.sources[0].endOffset for p in reports if p.sources and p.sources[0].endOffset]
        if ends:
            self._positions = Offsets.from_json(ends[-1]).positions

    def _ask_broker(self) -> None:
        queues = self._client.routes.get(self._topic).readable()
        bounds = self._client.brokers.bounds(queues, Deadline.after(1.0))
        self.sight.lag = {
            f"{queue.broker_name}/{queue.queue_id}": max(0, b.max_offset - self._positions.get(queue, 0))
            for queue, b in bounds.items()
        }
        for message in self._returned.messages():
            self.sight.totals_seen += 1
            total = json.loads(message.body)
            if total["window_start"] > self.sight.window:
                self.sight.window = total["window_start"]
                self.sight.window_totals = {}
            if total["window_start"] == self.sight.window:
                self.sight.window_totals[total["region"]] = (total["orders"], f"{total['amount']:,.2f}")


_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_BATCHES = 40


class DemoView(Protocol):
    """Shows a ``DemoState`` every ``interval_s``."""

    interval_s: float

    def show(self, sight: DemoState) -> None: ...


@contextlib.contextmanager
def view(output: Output, seconds: float, rate: float) -> Iterator[DemoView]:
    """The view that fits where the output goes."""
    if output.machine or not sys.stdout.isatty():
        yield _Lines(output)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        yield _Picture(live, seconds, rate)


class _Lines:
    """One line a second."""

    interval_s = 1.0

    def __init__(self, output: Output) -> None:
        self._output = output

    def show(self, sight: DemoState) -> None:
        batch = f"{sight.batch_ms[-1]} ms" if sight.batch_ms else "-"
        lag = " ".join(f"{queue}:{count}" for queue, count in sight.lag.items())
        text = (
            f"{sight.elapsed_s:4.0f} s  {sight.phase}: {sight.sent} orders in, {sight.read} read, "
            f"{sight.totals_written} totals out, batch {batch}, lag {lag or '-'}"
        )
        self._output.item(sight.document(), text)


class _Picture:
    """The same on a terminal, drawn in place."""

    interval_s = 0.5

    def __init__(self, live: object, seconds: float, rate: float) -> None:
        self._live = live
        self._title = f"rocketmq-spark demo: {rate:g} orders a second for {seconds:g} s"

    def show(self, sight: DemoState) -> None:
        from rich.live import Live

        assert isinstance(self._live, Live)
        self._live.update(_picture(self._title, sight), refresh=True)


def _picture(title: str, sight: DemoState) -> Group:
    from rich.columns import Columns
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    counts = Table(title="messages", title_justify="left")
    counts.add_column()
    counts.add_column(justify="right")
    for name, count in (
        ("orders in", sight.sent),
        ("orders read", sight.read),
        ("totals out", sight.totals_written),
        ("orders in totals", sight.orders_aggregated),
    ):
        counts.add_row(name, f"{count:,}")
    lag = Table("queue", title="lag", title_justify="left")
    lag.add_column("messages", justify="right")
    for queue, behind in sight.lag.items():
        lag.add_row(queue, f"{behind:,}")
    newest = Table("region", title=f"newest window: {sight.window[11:19] or '-'}", title_justify="left")
    newest.add_column("orders", justify="right")
    newest.add_column("amount", justify="right")
    for region, (orders, amount) in sorted(sight.window_totals.items()):
        newest.add_row(region, f"{orders:,}", amount)
    head = Text(f"{title}  ·  {sight.elapsed_s:.0f} s  ·  {sight.phase}", style="bold")
    return Group(head, Columns([counts, lag, newest], padding=(0, 3)), Text(_batches(sight.batch_ms)))


def _batches(times_ms: list[int]) -> str:
    """The newest batches as little bars, and the last in numbers. The first one starts Python and would dwarf all."""
    if not times_ms:
        return "batches: none yet"
    shown = times_ms[1:][-_SHOWN_BATCHES:]
    top = max(shown, default=0)
    bars = "".join(_BARS[t * len(_BARS) // (top + 1)] for t in shown)
    return (
        f"batches: {len(times_ms)}, last {times_ms[-1]} ms  {bars}  (longest {top} ms after a first of {times_ms[0]})"
    )


def say(output: Output, text: str) -> None:
    """A line of the story, for people only."""
    if not output.machine:
        click.echo(text)
