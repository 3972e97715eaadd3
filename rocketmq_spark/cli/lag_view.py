"""The output of ``rocketmq-spark lag`` as JSON, in Prometheus' text format, and as lines that fit a terminal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketmq_spark.base import exposition
from rocketmq_spark.cli.output import align
from rocketmq_spark.model.admin import Pace, QueueLag, pace, total

if TYPE_CHECKING:
    from rocketmq_spark.spark.checkpoints.offset_log import BatchRead


class LagSnapshot(NamedTuple):
    """The lag of a reader at ``now_ms`` (epoch ms). ``reader`` is ``{"group": …}`` or ``{"checkpoint": …, "batchId": …}``.

    ``rows_before`` has the rows of the previous snapshot, which was taken ``elapsed_s`` before this one. Rates are computed from
    the difference.
    """

    reader: Mapping[str, object]
    rows: Sequence[QueueLag]
    now_ms: int
    rows_before: Sequence[QueueLag] = ()
    elapsed_s: float = 0.0

    @property
    def pace(self) -> Pace:
        return pace(self.rows_before, self.rows, self.elapsed_s)


_HEADINGS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "minOffset": "FIRST",
    "position": "NEXT",
    "maxOffset": "END",
    "lag": "BEHIND",
    "age": "AGE",
    "read": "READ/S",
    "written": "SENT/S",
    "left": "DONE IN",
}
_RATE_COLUMNS = ("read", "written", "left")
# Columns that are omitted on a narrow terminal, in this order.
_DROP_ORDER = ("minOffset", "written", "maxOffset", "position", "left", "read", "age")
_COLUMN_GAP = 2


def unfinished_batch(batch_read: BatchRead, silent_brokers: Iterable[str], now_ms: int) -> dict[str, object]:
    """Describe the unfinished batch of a query: its number, its age, and the ``silent_brokers`` that it reads."""
    begun_ms = batch_read.batch.planned_ms
    age_ms = None if begun_ms is None else max(0, now_ms - begun_ms)
    return {"batchId": batch_read.batch.number, "forMs": age_ms, "waitsFor": sorted(silent_brokers)}


def unfinished_batch_text(batch_state: Mapping[str, Any]) -> str:
    """Return the result of ``unfinished_batch`` as a part of a sentence."""
    begun_text = (
        f"was begun {duration(batch_state['forMs'])} ago and is" if batch_state["forMs"] is not None else "is begun and"
    )
    silent_brokers = batch_state["waitsFor"]
    if not silent_brokers:
        return f"batch {batch_state['batchId']} {begun_text} not done: it runs, or its query has ended"
    verb = "does not answer" if len(silent_brokers) == 1 else "do not answer"
    return f"batch {batch_state['batchId']} {begun_text} not done: {', '.join(silent_brokers)} {verb}"


def document(snapshot: LagSnapshot) -> dict[str, object]:
    """Return the values of ``--json``. Unknown values are None."""
    totals = total(snapshot.rows, snapshot.now_ms)
    return {
        **snapshot.reader,
        "lag": totals.lag,
        "lost": totals.lost,
        "behindMs": totals.behind_ms,
        **_rates_document(snapshot.pace),
        "unknownQueues": totals.unknown_queues,
        "wentBackQueues": went_back_count(snapshot.rows),
        "queues": [_queue_document(row, snapshot) for row in snapshot.rows],
    }


def went_back_count(rows: Iterable[QueueLag]) -> int:
    """Return how many queues end before the position of the reader."""
    return sum(row.went_back for row in rows)


def lag_text(rows: Sequence[QueueLag], now_ms: int) -> str:
    """Return the lag of all queues as text, with the number of queues whose lag is known."""
    totals = total(rows, now_ms)
    if totals.lag is None:
        return f"lag unknown in {len(rows)} queues"
    counted_text = f"{len(rows) - totals.unknown_queues} of " if totals.unknown_queues else ""
    return f"{number(totals.lag)} messages behind in {counted_text}{len(rows)} queues"


def _queue_document(row: QueueLag, snapshot: LagSnapshot) -> dict[str, object]:
    return {
        "topic": row.queue.topic,
        "brokerName": row.queue.broker_name,
        "queueId": row.queue.queue_id,
        "minOffset": row.min_offset,
        "position": row.position,
        "maxOffset": row.max_offset,
        "lag": row.lag,
        "lost": row.lost,
        "behindMs": row.behind_ms(snapshot.now_ms),
        **_rates_document(pace(snapshot.rows_before, [row], snapshot.elapsed_s)),
    }


def _rates_document(rates: Pace) -> dict[str, object]:
    catch_up_ms = None if rates.catch_up_s is None else round(rates.catch_up_s * 1000)
    return {"readPerSecond": rates.read_per_s, "writtenPerSecond": rates.written_per_s, "catchUpMs": catch_up_ms}


_METRICS = {
    "lag_messages": ("Messages that the reader has not read.", "lag"),
    "lag_seconds": ("Age of the next message that the reader reads.", "behindMs"),
    "lost_messages": ("Messages that were removed before the reader read them.", "lost"),
    "position": ("The offset that the reader reads next.", "position"),
    "first_offset": ("The first offset that is kept.", "minOffset"),
    "end_offset": ("The offset that is written next.", "maxOffset"),
}


def prometheus(snapshot: LagSnapshot) -> str:
    """Return the metrics in Prometheus' text format, one sample for each queue. Unknown values have no sample."""
    reader_kind = next(name for name in ("group", "checkpoint") if name in snapshot.reader)
    queues = [_queue_document(row, snapshot) for row in snapshot.rows]

    def samples(key: str) -> Iterator[tuple[dict[str, str], float]]:
        for queue in queues:
            value = queue[key]
            if value is not None:
                assert isinstance(value, int)
                labels = {"topic": queue["topic"], "broker": queue["brokerName"], "queue": queue["queueId"]}
                text_labels = {
                    name: str(label) for name, label in {reader_kind: snapshot.reader[reader_kind], **labels}.items()
                }
                yield text_labels, value / 1000 if key == "behindMs" else value

    return exposition.text(
        [
            exposition.Family(f"rocketmq_spark_reader_{name}", "gauge", help_text, list(samples(key)))
            for name, (help_text, key) in _METRICS.items()
        ]
    )


def table(snapshot: LagSnapshot) -> list[str]:
    """Return the lines for a file or a pipe: a heading, and one line for each queue."""
    return _table_lines([_cells(row, snapshot) for row in snapshot.rows], _headings(snapshot))


def screen(snapshot: LagSnapshot, width: int, height: int | None = None) -> list[str]:
    """Return the lines for a terminal: a summary, then the queues of each topic.

    Columns are omitted until the remaining columns fit into ``width``. With a ``height``, only the queues that are furthest
    behind are shown, and the number of other queues.
    """
    summary_lines = fold(summary(snapshot), width)
    rows, hidden_rows = list(snapshot.rows), list[QueueLag]()
    max_rows = (
        len(rows)
        if height is None
        else max(1, height - len(summary_lines) - 1 - len({row.queue.topic for row in rows}))
    )
    if len(rows) > max_rows:
        rows_by_lag = sorted(rows, key=lambda row: (-1 if row.lag is None else -row.lag, row.queue))
        rows, hidden_rows = sorted(rows_by_lag[: max(1, max_rows - 1)]), rows_by_lag[max(1, max_rows - 1) :]
    cells = [_cells(row, snapshot) for row in rows]
    lines = iter(_table_lines(cells, _fitting_columns(cells, _headings(snapshot), width)))
    table_body = [next(lines)]
    for topic, topic_cells in groupby(cells, key=lambda row: row["topic"]):
        table_body += [*fold([topic], width), *(next(lines) for _ in topic_cells)]
    return [*summary_lines, *table_body, *([_hidden_queues_text(hidden_rows)] if hidden_rows else [])]


def summary(snapshot: LagSnapshot) -> list[str]:
    """Return the parts of the sentence about all queues."""
    totals, rates = total(snapshot.rows, snapshot.now_ms), snapshot.pace
    reader_text = " ".join(
        f"{name} {snapshot.reader[name]}" for name in ("group", "checkpoint") if name in snapshot.reader
    )
    parts = [reader_text, lag_text(snapshot.rows, snapshot.now_ms)]
    if totals.behind_ms:
        parts.append(f"the oldest for {duration(totals.behind_ms)}")
    if rates.read_per_s is not None:
        parts += [f"read {rate(rates.read_per_s)}/s", f"sent {rate(rates.written_per_s)}/s"]
        parts.append("not catching up" if rates.catch_up_s is None else f"done in {duration(rates.catch_up_s * 1000)}")
    if went_back_queues := went_back_count(snapshot.rows):
        parts.append(f"{went_back_queues} queues went back")
    if batch_state := snapshot.reader.get("underWay"):
        assert isinstance(batch_state, dict)
        parts.append(unfinished_batch_text(batch_state))
    return parts


def _cells(row: QueueLag, snapshot: LagSnapshot) -> dict[str, str]:
    rates = pace(snapshot.rows_before, [row], snapshot.elapsed_s)
    cells = {
        key: str(value) if isinstance(value, str) else number(value)
        for key, value in _queue_document(row, snapshot).items()
    }
    return {
        **cells,
        "age": duration(row.behind_ms(snapshot.now_ms)),
        "read": rate(rates.read_per_s),
        "written": rate(rates.written_per_s),
        "left": duration(None if rates.catch_up_s is None else rates.catch_up_s * 1000),
    }


def _headings(snapshot: LagSnapshot) -> dict[str, str]:
    return {key: heading for key, heading in _HEADINGS.items() if snapshot.rows_before or key not in _RATE_COLUMNS}


def _fitting_columns(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str], width: int) -> dict[str, str]:
    """Return the columns that fit. The column of the topic is omitted, because the topic has a separate line."""
    fitting_columns = {key: heading for key, heading in columns.items() if key != "topic"}
    for key in _DROP_ORDER:
        if _table_width(cells, fitting_columns) > width:
            fitting_columns.pop(key, None)
    return fitting_columns


def _table_lines(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> list[str]:
    rows = [list(columns.values()), *([row[key] for key in columns] for row in cells)]
    return list(align(rows, [key not in ("topic", "brokerName") for key in columns]))


def _table_width(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> int:
    widths = [max([len(heading), *(len(row[key]) for row in cells)]) for key, heading in columns.items()]
    return sum(widths) + _COLUMN_GAP * (len(widths) - 1)


def _hidden_queues_text(hidden_rows: Sequence[QueueLag]) -> str:
    behind_count = sum(bool(row.lag) for row in hidden_rows)
    return f"and {len(hidden_rows)} more queues, {behind_count} of them behind"


def fold(parts: Sequence[str], width: int) -> list[str]:
    """Join parts by commas, on as many lines as needed. A part that is longer than a line is wrapped."""
    lines = [""]
    for part in parts:
        extended_line = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(extended_line) <= width - 1 or not lines[-1]:
            lines[-1] = extended_line
        else:
            lines[-1] += ","
            lines.append(part)
    return [piece for line in lines for piece in textwrap.wrap(line, width)]


def number(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}"


_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def duration(ms: float | None) -> str:
    """Return a duration in its two largest units, such as ``3 h 12 m``; below 10 s, in tenths of a second."""
    if ms is None:
        return "-"
    if ms < 9_950:
        return f"{ms / 1000:.1f} s" if ms else "0 s"
    total_seconds = round(ms / 1000)
    for index, (unit, seconds) in enumerate(_UNITS[:-1]):
        if total_seconds >= seconds:
            smaller_unit, smaller_seconds = _UNITS[index + 1]
            return f"{total_seconds // seconds} {unit} {total_seconds % seconds // smaller_seconds} {smaller_unit}"
    return f"{total_seconds} s"
