"""``progress(query)``: how a running query is doing, out of what its sources report to Spark (``account``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from rocketmq_spark.spark.sink.foreach import ForeachBatchWriter

_SUMS = ("lag", "queues", "queuesAway")


def progress(query: StreamingQuery, writer: ForeachBatchWriter | None = None) -> dict[str, Any] | None:
    """Return the figures of the rocketmq sources in the last progress of ``query``.

    ``lag``: unread messages after the end of the batch (gaps in the offsets count too). ``behindMs``: ms since this run first saw
    the oldest unread message; 0 if there is none, None while it reads messages that are older than the run. ``queues``:
    queues whose brokers answer. ``queuesAway`` and ``brokersAway``: queues and brokers that do not answer now; their lag is
    not counted. ``losses``: by cause, the ``ranges`` and ``offsets`` that the driver skipped in this run. ``sources``: the
    same for each rocketmq source. Also ``batchId``, ``timestamp``, ``rows``, ``batchMs`` and ``sinkRows``. Unknown values are
    None.

    All figures are of the end of the last batch, ``ageMs`` ms ago. ``underWay`` is whether the next batch is running now. If
    it stays True and ``ageMs`` grows, the batch is large or waits for a broker.

    With ``writer``, ``sink`` has what that writer wrote in all of its batches: ``rows`` is the sum of ``sent`` and ``confirmed``.
    ``already_stored`` rows had been stored by an earlier attempt; ``unmatched`` messages of earlier attempts match no row of the
    repeat.

    Args:
        query: A query of this session.
        writer: The ``foreach_batch_writer`` of the query.

    Returns:
        The figures by name; None before the first progress.
    """
    last = query.lastProgress
    if last is None:
        return None
    latest = json.loads(last.json)
    age = _age_ms(latest, datetime.now(UTC))
    return {**of_progress(latest), "underWay": _executes(query.status), "ageMs": age, **sink_counts(writer)}


def sink_counts(writer: ForeachBatchWriter | None) -> dict[str, Any]:
    """What a writer of micro-batches wrote in all, as ``sink``; nothing without one."""
    return {} if writer is None else {"sink": {"sent": writer.total.sent, **asdict(writer.total)}}


def _executes(status: Mapping[str, Any]) -> bool:
    """Between batches, while offsets are asked for, triggers are active, too."""
    return bool(status.get("isTriggerActive")) and str(status.get("message", "")).startswith("Processing")


def _age_ms(latest: Mapping[str, Any], now: datetime) -> int | None:
    """How long ago the last trigger ended: Spark gives its begin and how long it took."""
    try:
        begun = datetime.fromisoformat(latest["timestamp"])
        took = timedelta(milliseconds=latest["durationMs"]["triggerExecution"])
    except (KeyError, TypeError, ValueError):
        return None
    return max(0, round((now - begun - took) / timedelta(milliseconds=1)))


def of_progress(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a progress as Spark's JSON has it."""
    sources = [of_source(source.get("latestOffset")) for source in raw.get("sources", ())]
    ours = [source for source in sources if source is not None]
    rows = raw.get("sink", {}).get("numOutputRows", -1)
    return {
        "batchId": raw.get("batchId"),
        "timestamp": raw.get("timestamp"),
        "rows": raw.get("numInputRows"),
        "batchMs": raw.get("durationMs", {}).get("triggerExecution"),
        "sinkRows": rows if rows >= 0 else None,
        **{name: _sum(source[name] for source in ours) for name in _SUMS},
        "behindMs": _largest([source["behindMs"] for source in ours]),
        "brokersAway": sorted({name for source in ours for name in source["brokersAway"]}),
        "losses": _losses(source["losses"] for source in ours),
        "sources": ours,
    }


def of_source(latest: Any) -> dict[str, Any] | None:
    """What a source reports, without the ends of its queues; None where ``latest`` is not of a rocketmq source."""
    if isinstance(latest, str):
        try:
            latest = json.loads(latest)
        except ValueError:
            return None
    if not isinstance(latest, dict) or not {"topics", "lag", "behindMs"} <= latest.keys():
        return None
    return {name: value for name, value in latest.items() if name not in ("topics", "v")}


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    numbers = [value for value in known if value is not None]
    return sum(numbers) if known and len(numbers) == len(known) else None


def _largest(values: list[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return max(numbers) if values and len(numbers) == len(values) else None


def _losses(reports: Iterable[Mapping[str, Mapping[str, int | None]]]) -> dict[str, dict[str, int | None]]:
    every = [(cause, counts) for report in reports for cause, counts in report.items()]
    return {
        cause: {name: _sum(counts[name] for of, counts in every if of == cause) for name in ("ranges", "offsets")}
        for cause in sorted({cause for cause, _ in every})
    }
