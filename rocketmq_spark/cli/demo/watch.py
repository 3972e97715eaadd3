"""The figures that the demo shows: counts from Spark's progress, offsets from the broker, and the newest totals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.cli.reading import TopicReader, earliest
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.monitoring.queries import ends_of
from rocketmq_spark.spark.source.offsets import Offsets

OBSERVED = "totals"


@dataclass(slots=True)
class DemoState:
    """The demo at one moment. ``sent`` and ``phase`` are filled in by the writer of the orders."""

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
        ends = [end for report in reports for end in ends_of(report) if end]
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
