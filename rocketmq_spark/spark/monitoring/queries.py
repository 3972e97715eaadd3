"""``progress(query)`` returns the figures of a running query, which its sources report to Spark (``source.progress``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery

    from rocketmq_spark.spark.sink.foreach import ForeachBatchWriter


_SUMMED_FIGURES = ("lag", "queues", "queuesAway")
_FIGURES = (*_SUMMED_FIGURES, "behindMs", "brokersAway", "losses")


def progress(query: StreamingQuery, writer: ForeachBatchWriter | None = None) -> dict[str, Any] | None:
    """Return the figures of the rocketmq sources in the last progress of ``query``.

    ``lag``: unread messages after the end of the batch (gaps in the offsets count too). ``behindMs``: ms since this run first saw
    the oldest unread message; 0 if all messages are read, None while the query reads messages that are older than the run.
    ``queues``: the number of queues whose brokers answer. ``queuesAway`` and ``brokersAway``: the number of queues, and the names
    of brokers, that do not answer now; their lag is not counted. ``losses``: for each cause, how many ``ranges`` and ``offsets``
    the driver skipped in this run. ``sources``: the same figures for each rocketmq source. ``batchId``, ``timestamp``, ``rows``,
    ``batchMs`` and ``sinkRows`` describe the last batch. Unknown values are None. PySpark 4.0 and 4.1 do not ask sources for
    their state, so all figures of sources are None there; ``rocketmq-spark lag --checkpoint`` shows the lag.

    All figures describe the end of the last batch, which was ``ageMs`` ms ago. ``underWay`` is whether the next batch is
    running now. If ``underWay`` stays True and ``ageMs`` grows, the batch is large or waits for a broker.

    With ``writer``, ``sink`` has the counts of all batches of this writer: ``rows`` is the sum of ``sent`` (acknowledged) and
    ``confirmed`` (not acknowledged, but found in the topic). ``already_stored`` rows, not included in ``rows``, had been stored
    by an earlier attempt; ``unmatched`` messages of earlier attempts match no row of the repeat.

    Args:
        query: A query of this session.
        writer: The ``foreach_batch_writer`` of the query.

    Returns:
        The figures by name; None before the first progress.
    """
    last_progress = query.lastProgress
    if last_progress is None:
        return None
    raw_progress = json.loads(last_progress.json)
    age_ms = _age_ms(raw_progress, datetime.now(UTC))
    return {
        **figures_of_progress(raw_progress),
        "underWay": _is_running(query.status),
        "ageMs": age_ms,
        **sink_counts(writer),
    }


def sink_counts(writer: ForeachBatchWriter | None) -> dict[str, Any]:
    """Return ``{"sink": totals of the writer}``; empty without a writer."""
    return {} if writer is None else {"sink": {"sent": writer.total.sent, **asdict(writer.total)}}


def _is_running(status: Mapping[str, Any]) -> bool:
    """Whether a batch is running. An active trigger alone does not show this, because a trigger is also active while Spark
    requests the latest offsets.
    """
    return bool(status.get("isTriggerActive")) and str(status.get("message", "")).startswith("Processing")


def _age_ms(progress: Mapping[str, Any], now: datetime) -> int | None:
    """How long ago the last trigger ended, computed from its start and duration, which Spark reports."""
    try:
        started_at = datetime.fromisoformat(progress["timestamp"])
        duration = timedelta(milliseconds=progress["durationMs"]["triggerExecution"])
    except (KeyError, TypeError, ValueError):
        return None
    return max(0, round((now - started_at - duration) / timedelta(milliseconds=1)))


def end_offsets(progress: StreamingQueryProgress) -> list[Any]:
    """Return the end offset of the batch for each source, from Spark's JSON.

    The attribute ``endOffset`` is not used: on PySpark 4.0 and 4.1 it may be the ``str`` of a dict, which is not JSON.
    """
    return [source.get("endOffset") for source in json.loads(progress.json)["sources"]]


def figures_of_progress(raw_progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of ``progress`` from Spark's JSON of a progress."""
    sources = [figures_of_source(source.get("latestOffset")) for source in raw_progress.get("sources", ())]
    own_sources = [source for source in sources if source is not None]
    sink_rows = raw_progress.get("sink", {}).get("numOutputRows", -1)
    return {
        "batchId": raw_progress.get("batchId"),
        "timestamp": raw_progress.get("timestamp"),
        "rows": raw_progress.get("numInputRows"),
        "batchMs": raw_progress.get("durationMs", {}).get("triggerExecution"),
        "sinkRows": sink_rows if sink_rows >= 0 else None,
        **{name: _sum(source[name] for source in own_sources) for name in _SUMMED_FIGURES},
        "behindMs": _largest([source["behindMs"] for source in own_sources]),
        "brokersAway": _all_names([source["brokersAway"] for source in own_sources]),
        "losses": _summed_losses([source["losses"] for source in own_sources]),
        "sources": own_sources,
    }


def figures_of_source(reported_figures: Any) -> dict[str, Any] | None:
    """Return the figures that a source reported, without the ends of its queues; None if it is not a rocketmq source.

    All figures are None on PySpark 4.0 and 4.1: these versions do not ask the source for its figures, and pass the end of the
    batch instead.
    """
    if isinstance(reported_figures, str):
        try:
            reported_figures = json.loads(reported_figures)
        except ValueError:
            return None
    if not isinstance(reported_figures, dict) or not {"topics", "v"} <= reported_figures.keys():
        return None
    return {name: reported_figures.get(name) for name in _FIGURES}


def _sum(values: Iterable[int | None]) -> int | None:
    all_values = list(values)
    numbers = [value for value in all_values if value is not None]
    return sum(numbers) if all_values and len(numbers) == len(all_values) else None


def _largest(values: list[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return max(numbers) if values and len(numbers) == len(values) else None


def _all_names(reports: Sequence[Iterable[str] | None]) -> list[str] | None:
    known_reports = [report for report in reports if report is not None]
    return sorted({name for report in known_reports for name in report}) if len(known_reports) == len(reports) else None


def _summed_losses(
    reports: Sequence[Mapping[str, Mapping[str, int | None]] | None],
) -> dict[str, dict[str, int | None]] | None:
    known_reports = [report for report in reports if report is not None]
    if len(known_reports) < len(reports):
        return None
    causes_and_counts = [(cause, counts) for report in known_reports for cause, counts in report.items()]
    return {
        cause: {
            name: _sum(counts[name] for cause_of_count, counts in causes_and_counts if cause_of_count == cause)
            for name in ("ranges", "offsets")
        }
        for cause in sorted({cause for cause, _ in causes_and_counts})
    }
