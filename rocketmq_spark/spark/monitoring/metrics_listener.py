"""``MetricsListener`` serves or writes the metrics of queries as Prometheus text or as JSON lines.

Every metric is one row of ``METRICS``; conf/grafana-dashboard.json shows them. The listener contacts no broker: the metrics come
from the progress of queries (``queries.progress``) and from the counts of a ``foreach_batch_writer``. A metric whose value is
unknown is omitted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from rocketmq_spark.base import exposition, folders
from rocketmq_spark.errors import OptionError
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.monitoring.queries import figures_of_progress, sink_counts

if TYPE_CHECKING:
    from prometheus_client import Metric as CollectedMetric

    from rocketmq_spark.spark.sink.foreach import ForeachBatchWriter

logger = logging.getLogger(__name__)


# How many ended queries are still exported, so that a scrape shows a query that failed. If more queries have ended, the oldest of
# them are dropped.
_MAX_ENDED_QUERIES = 100


class Metric(NamedTuple):
    """One row of the metrics table: name, Prometheus type (``gauge`` or ``counter``) and meaning."""

    name: str
    kind: str
    help: str


METRICS = (
    Metric("rocketmq_spark_query_active", "gauge", "1 while the query runs, 0 after its end"),
    Metric(
        "rocketmq_spark_progress_timestamp_seconds", "gauge", "When the last progress was made, in seconds since 1970"
    ),
    Metric(
        "rocketmq_spark_idle_timestamp_seconds",
        "gauge",
        "When the query was last idle: while this and the last progress are old, a batch is running",
    ),
    Metric("rocketmq_spark_lag_messages", "gauge", "Unread messages after the last batch, gaps in offsets included"),
    Metric("rocketmq_spark_behind_seconds", "gauge", "Seconds since this run first saw the oldest unread message"),
    Metric("rocketmq_spark_queues", "gauge", "Queues that answer"),
    Metric("rocketmq_spark_queues_away", "gauge", "Queues that do not answer, whose lag is unknown"),
    Metric("rocketmq_spark_brokers_away", "gauge", "Brokers none of whose queues answers"),
    Metric(
        "rocketmq_spark_lost_ranges_total",
        "counter",
        "Ranges of lost offsets that the driver skipped, by cause",
    ),
    Metric("rocketmq_spark_lost_offsets_total", "counter", "Lost offsets that were skipped, if their number is known"),
    Metric("rocketmq_spark_rows_total", "counter", "Rows read from all sources of the query"),
    Metric("rocketmq_spark_batches_total", "counter", "Micro-batches"),
    Metric("rocketmq_spark_batch_seconds", "gauge", "How long the last micro-batch took"),
    Metric("rocketmq_spark_sink_rows_total", "counter", "Rows that the sink acknowledged"),
    Metric("rocketmq_spark_sink_bytes_total", "counter", "Acknowledged bytes on the wire (foreach_batch_writer)"),
    Metric("rocketmq_spark_sink_batches_total", "counter", "Requests with acknowledged rows (foreach_batch_writer)"),
    Metric("rocketmq_spark_sink_retries_total", "counter", "Attempts that were repeated (foreach_batch_writer)"),
    Metric("rocketmq_spark_sink_spooled_total", "counter", "Rows spooled instead of sent (foreach_batch_writer)"),
    Metric(
        "rocketmq_spark_sink_already_stored_total",
        "counter",
        "Rows stored by an earlier attempt, which were not sent again (foreach_batch_writer, exactly-once)",
    ),
    Metric(
        "rocketmq_spark_sink_confirmed_total",
        "counter",
        "Rows whose acknowledgement was lost, and which proved to be stored (foreach_batch_writer, exactly-once)",
    ),
    Metric(
        "rocketmq_spark_sink_unmatched_total",
        "counter",
        "Messages of earlier attempts that match no row of the repeat (foreach_batch_writer, exactly-once)",
    ),
    Metric("rocketmq_spark_sink_broker_rows_total", "counter", "Rows acknowledged, by broker (foreach_batch_writer)"),
    Metric("rocketmq_spark_sink_broker_failures_total", "counter", "Failed attempts, by broker (foreach_batch_writer)"),
)
_SINK_COUNTS = ("bytes", "batches", "retries", "spooled", "already_stored", "confirmed", "unmatched")

Sample = tuple[str, Mapping[str, str], float]


class QueryMetrics:
    """The metrics of one run of a query. Counters start at 0 with each run, as Prometheus expects."""

    def __init__(self, query: str, writer: ForeachBatchWriter | None = None) -> None:
        self.query = query
        self.is_active = True
        self._writer = writer
        self._rows = self._batches = self._sink_rows = 0
        self._last_batch_id: int | None = None
        self._last_progress: dict[str, Any] = {}
        self._progress_at_s: float | None = None
        self._idle_at_s: float | None = None

    def record_idle(self, now_s: float) -> None:
        """Note that Spark reported the query as idle."""
        self._idle_at_s = now_s

    def record_progress(self, raw_progress: Mapping[str, Any], now_s: float) -> dict[str, Any]:
        """Add a progress to the metrics. Returns the object for the JSON line."""
        self._last_progress, self._progress_at_s = figures_of_progress(raw_progress), now_s
        self._rows += self._last_progress["rows"] or 0
        if self._last_progress["batchId"] != self._last_batch_id:
            self._last_batch_id = self._last_progress["batchId"]
            self._batches += 1
            self._sink_rows += self._last_progress["sinkRows"] or 0
        return {"query": self.query, **self._last_progress, **sink_counts(self._writer)}

    def samples(self) -> Iterator[Sample]:
        """Yield the name, the labels except ``query``, and the value of each metric whose value is known."""
        last_progress, metric_name = self._last_progress, "rocketmq_spark_{}".format
        yield metric_name("query_active"), {}, float(self.is_active)
        if self._idle_at_s is not None:
            yield metric_name("idle_timestamp_seconds"), {}, self._idle_at_s
        if not last_progress:
            return
        values = {
            "progress_timestamp_seconds": self._progress_at_s,
            "lag_messages": last_progress["lag"],
            "behind_seconds": None if last_progress["behindMs"] is None else last_progress["behindMs"] / 1000,
            "queues": last_progress["queues"],
            "queues_away": last_progress["queuesAway"],
            "brokers_away": len(last_progress["brokersAway"])
            if last_progress["sources"] and last_progress["brokersAway"] is not None
            else None,
            "rows_total": self._rows,
            "batches_total": self._batches,
            "batch_seconds": None if last_progress["batchMs"] is None else last_progress["batchMs"] / 1000,
        }
        yield from ((metric_name(metric), {}, float(value)) for metric, value in values.items() if value is not None)
        reports_losses = last_progress["sources"] and last_progress["losses"] is not None
        for cause in (cause.name.lower() for cause in Cause if reports_losses):
            counts = last_progress["losses"].get(cause, {"ranges": 0, "offsets": 0})
            yield metric_name("lost_ranges_total"), {"cause": cause}, float(counts["ranges"])
            if counts["offsets"] is not None:
                yield metric_name("lost_offsets_total"), {"cause": cause}, float(counts["offsets"])
        yield from self._sink_samples()

    def _sink_samples(self) -> Iterator[Sample]:
        if self._writer is None:
            if self._last_progress["sinkRows"] is not None:
                yield "rocketmq_spark_sink_rows_total", {}, float(self._sink_rows)
            return
        total = self._writer.total
        yield "rocketmq_spark_sink_rows_total", {}, float(total.rows)
        for count in _SINK_COUNTS:
            yield f"rocketmq_spark_sink_{count}_total", {}, float(getattr(total, count))
        for broker, broker_counts in total.brokers.items():
            yield "rocketmq_spark_sink_broker_rows_total", {"broker": broker}, float(broker_counts.rows)
            yield "rocketmq_spark_sink_broker_failures_total", {"broker": broker}, float(broker_counts.failures)


def metric_families(queries: Iterable[QueryMetrics]) -> list[exposition.Family]:
    """Return the metrics of ``queries``, grouped by name for the text format."""
    samples_by_name: dict[str, list[tuple[dict[str, str], float]]] = {metric.name: [] for metric in METRICS}
    for metrics in queries:
        for name, labels, value in metrics.samples():
            samples_by_name[name].append(({"query": metrics.query, **labels}, value))
    return [
        exposition.Family(*metric, samples_by_name[metric.name]) for metric in METRICS if samples_by_name[metric.name]
    ]


def metrics_table() -> str:
    """Return the table of metrics in docs/metrics.md."""
    lines = ["## Figures", "", "| name | kind | |", "| --- | --- | --- |"]
    lines += [f"| `{metric.name}` | {metric.kind} | {metric.help} |" for metric in METRICS]
    return "\n".join(lines) + "\n"


class MetricsListener(StreamingQueryListener):
    """Exports metrics of all queries of a session: ``spark.streams.addListener(MetricsListener(port=9108))``.

    The metrics are served to Prometheus, or written to files. Metrics change when Spark reports on a query: rarely while the
    query is idle, and not during a batch. If a file cannot be written, the failure is logged and no query is affected. To add the
    metrics to a registry of prometheus-client, too, call ``REGISTRY.register(listener)``.

    Args:
        port: Serve the metrics at ``/metrics`` on this port; 0 takes a free port. The attribute ``url`` has the address.
        host: The address to listen on: loopback by default, ``0.0.0.0`` for all interfaces.
        prometheus: A file in Prometheus' text format, replaced atomically each time, for node_exporter's textfile collector.
        json_lines: A file to which each progress appends one line of JSON. Each line has the query's name as ``query``, and the
            values of ``progress(query)`` except ``underWay`` and ``ageMs``. This file needs no prometheus-client.
        writer: A ``foreach_batch_writer`` whose counts are exported, too.
        writer_query: The name of the query of ``writer``. Without it, the writer's counts are exported for every query.

    Raises:
        OptionError: No ``port``, ``prometheus`` or ``json_lines`` is given, the port is taken, or prometheus-client is missing.
    """

    url: str | None = None

    def __init__(
        self,
        prometheus: str | Path | None = None,
        json_lines: str | Path | None = None,
        writer: ForeachBatchWriter | None = None,
        writer_query: str | None = None,
        *,
        port: int | None = None,
        host: str = exposition.DEFAULT_HOST,
    ) -> None:
        if prometheus is None and json_lines is None and port is None:
            raise OptionError("MetricsListener needs port=…, or prometheus=… or json_lines=…: the file to write to")
        if (prometheus is not None or port is not None) and (command := exposition.install_command()):
            raise OptionError("MetricsListener needs prometheus-client, which is not installed", remedy=command)
        self._prometheus_path = None if prometheus is None else Path(prometheus)
        self._json_lines_path = None if json_lines is None else Path(json_lines)
        self._writer, self._writer_query = writer, writer_query
        # The keys are run ids. Spark reports a start immediately, but queues other events, so events of the previous run may come
        # after the start of the next run.
        self._metrics_by_run: dict[str, QueryMetrics] = {}
        self._replaced_runs: deque[str] = deque(maxlen=_MAX_ENDED_QUERIES)
        self._lock = threading.Lock()
        self._server = contextlib.ExitStack()
        if port is not None:
            self.url = self._serve(host, port)

    def close(self) -> None:
        """Stop serving the metrics. A second call does nothing."""
        self._server.close()

    def collect(self) -> Iterator[CollectedMetric]:
        """Return the metrics in the form that a registry of prometheus-client reads."""
        return exposition.metrics(self._families())

    def _families(self) -> list[exposition.Family]:
        with self._lock:
            return metric_families(self._metrics_by_run.values())

    def _serve(self, host: str, port: int) -> str:
        try:
            return self._server.enter_context(exposition.serve((host, port), lambda: exposition.text(self._families())))
        except OSError as e:
            raise OptionError(
                f"MetricsListener cannot listen on {host}:{port}: {e.strerror}",
                remedy="Choose another port, or stop what uses it",
            ) from e

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Begin the metrics of the query of ``event``, with counters of 0."""
        with self._lock:
            self._start_run(event)
        self._write()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Update the metrics of the query with the figures of the batch of ``event``, and write the files."""
        raw_progress = json.loads(event.progress.json)
        run_id = str(event.progress.runId)
        with self._lock:
            if run_id not in self._metrics_by_run and run_id not in self._replaced_runs:
                # The query was running when the listener was added.
                self._start_run(event.progress)
            metrics = self._metrics_by_run.get(run_id) or self._new_metrics(event.progress)
            line_values = metrics.record_progress(raw_progress, time.time())
        self._write(json.dumps(line_values, separators=(",", ":")) + "\n")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Note that the query of ``event`` runs no batch, because it has nothing to read."""
        with self._lock:
            if (metrics := self._metrics_by_run.get(str(event.runId))) is None:
                return
            metrics.record_idle(time.time())
        self._write()

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Note that the query of ``event`` ended. The metrics of the query stay until a query of the same name starts, or until
        100 other queries have ended.
        """
        with self._lock:
            if (metrics := self._metrics_by_run.get(str(event.runId))) is not None:
                metrics.is_active = False
            ended_runs = [
                run_id for run_id, metrics_of_run in self._metrics_by_run.items() if not metrics_of_run.is_active
            ]
            for run_id in ended_runs[:-_MAX_ENDED_QUERIES]:
                del self._metrics_by_run[run_id]
        self._write()

    def _start_run(self, event: QueryStartedEvent | StreamingQueryProgress) -> None:
        """Begin the metrics of a run, and remove the metrics of an earlier run with the same query name. The earlier metrics
        are removed even if that run had another checkpoint, because the label ``query`` would be the same for both runs.
        """
        metrics = self._new_metrics(event)
        for run_id in [
            run_id for run_id, other_metrics in self._metrics_by_run.items() if other_metrics.query == metrics.query
        ]:
            del self._metrics_by_run[run_id]
            self._replaced_runs.append(run_id)
        self._metrics_by_run[str(event.runId)] = metrics

    def _new_metrics(self, event: QueryStartedEvent | StreamingQueryProgress) -> QueryMetrics:
        name = event.name or str(event.id)
        return QueryMetrics(name, self._writer if self._writer_query in (None, name) else None)

    def _write(self, line: str = "") -> None:
        try:
            if self._prometheus_path is not None:
                replace_readable_file(self._prometheus_path, exposition.text(self._families()).encode())
            if self._json_lines_path is not None and line:
                with open(folders.open_to_append(self._json_lines_path), "a", encoding="utf-8") as file:
                    file.write(line)
        except OSError:
            logger.exception("the metrics of queries cannot be written")


def replace_readable_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, readable for all users, through a temporary file with a unique name."""
    descriptor, temporary_path = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # changed by descriptor: the owner of the folder could put a link at the path
            file.write(data)
        Path(temporary_path).replace(path)
    except BaseException:
        Path(temporary_path).unlink(missing_ok=True)
        raise
