"""What ``rocketmq-spark lag`` shows: values for programs, Prometheus' text format, and lines that fit a terminal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketmq_spark.base import exposition
from rocketmq_spark.cli.output import aligned
from rocketmq_spark.model.admin import Pace, QueueLag, pace, total

if TYPE_CHECKING:
    from rocketmq_spark.spark.checkpoints.offset_log import BatchRead


class LagSnapshot(NamedTuple):
    """One look: whose (``{"group": …}`` or ``{"checkpoint": …, "batchId": …}``), the queues, when (epoch ms), and the look
    before it with the seconds since.
    """

    about: Mapping[str, object]
    rows: Sequence[QueueLag]
    now_ms: int
    before: Sequence[QueueLag] = ()
    seconds: float = 0.0

    @property
    def pace(self) -> Pace:
        return pace(self.before, self.rows, self.seconds)


_COLUMNS = {
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
_OF_PACE = ("read", "written", "left")
# What goes first where a terminal is too narrow.
_SPARE = ("minOffset", "written", "maxOffset", "position", "left", "read", "age")
_GAP = 2


def unfinished_batch(read: BatchRead, silent: Iterable[str], now_ms: int) -> dict[str, object]:
    """The batch of a query that is not done: its number, for how long, and the ``silent`` brokers that it reads."""
    begun_ms = read.batch.planned_ms
    for_ms = None if begun_ms is None else max(0, now_ms - begun_ms)
    return {"batchId": read.batch.number, "forMs": for_ms, "waitsFor": sorted(silent)}


def unfinished_batch_text(state: Mapping[str, Any]) -> str:
    """That of ``unfinished_batch`` as a part of a sentence."""
    begun = f"was begun {duration(state['forMs'])} ago and is" if state["forMs"] is not None else "is begun and"
    silent = state["waitsFor"]
    if not silent:
        return f"batch {state['batchId']} {begun} not done: it runs, or its query has ended"
    answers = "does not answer" if len(silent) == 1 else "do not answer"
    return f"batch {state['batchId']} {begun} not done: {', '.join(silent)} {answers}"


def document(sight: LagSnapshot) -> dict[str, object]:
    """For programs. What is not known is null."""
    every = total(sight.rows, sight.now_ms)
    return {
        **sight.about,
        "lag": every.lag,
        "lost": every.lost,
        "behindMs": every.behind_ms,
        **_pace(sight.pace),
        "unknownQueues": every.unknown_queues,
        "wentBackQueues": went_back(sight.rows),
        "queues": [_queue(row, sight) for row in sight.rows],
    }


def went_back(rows: Iterable[QueueLag]) -> int:
    """How many queues end before the position of the reader."""
    return sum(row.went_back for row in rows)


def behind_in(rows: Sequence[QueueLag], now_ms: int) -> str:
    """How far behind all queues are, and how many of them that counts."""
    every = total(rows, now_ms)
    if every.lag is None:
        return f"lag unknown in {len(rows)} queues"
    known = f"{len(rows) - every.unknown_queues} of " if every.unknown_queues else ""
    return f"{number(every.lag)} messages behind in {known}{len(rows)} queues"


def _queue(row: QueueLag, sight: LagSnapshot) -> dict[str, object]:
    return {
        "topic": row.queue.topic,
        "brokerName": row.queue.broker_name,
        "queueId": row.queue.queue_id,
        "minOffset": row.min_offset,
        "position": row.position,
        "maxOffset": row.max_offset,
        "lag": row.lag,
        "lost": row.lost,
        "behindMs": row.behind_ms(sight.now_ms),
        **_pace(pace(sight.before, [row], sight.seconds)),
    }


def _pace(of: Pace) -> dict[str, object]:
    catch_up_ms = None if of.catch_up_s is None else round(of.catch_up_s * 1000)
    return {"readPerSecond": of.read_per_s, "writtenPerSecond": of.written_per_s, "catchUpMs": catch_up_ms}


_METRICS = {
    "lag_messages": ("Messages that the reader has not read.", "lag"),
    "lag_seconds": ("Age of the next message that it reads.", "behindMs"),
    "lost_messages": ("Messages that were removed before it read them.", "lost"),
    "position": ("The offset that it reads next.", "position"),
    "first_offset": ("The first offset that is kept.", "minOffset"),
    "end_offset": ("The offset that is written next.", "maxOffset"),
}


def prometheus(sight: LagSnapshot) -> str:
    """In Prometheus' text format, one sample a queue. What is not known has none."""
    whose = next(name for name in ("group", "checkpoint") if name in sight.about)
    queues = [_queue(row, sight) for row in sight.rows]

    def samples(key: str) -> Iterator[tuple[dict[str, str], float]]:
        for queue in queues:
            value = queue[key]
            if value is not None:
                assert isinstance(value, int)
                labels = {"topic": queue["topic"], "broker": queue["brokerName"], "queue": queue["queueId"]}
                shown = {name: str(label) for name, label in {whose: sight.about[whose], **labels}.items()}
                yield shown, value / 1000 if key == "behindMs" else value

    return exposition.text(
        [
            exposition.Family(f"rocketmq_spark_reader_{name}", "gauge", help_text, list(samples(key)))
            for name, (help_text, key) in _METRICS.items()
        ]
    )


def table(sight: LagSnapshot) -> list[str]:
    """Lines for a file or a pipe: a heading, then a queue on each."""
    return _aligned([_shown(row, sight) for row in sight.rows], _columns(sight))


def screen(sight: LagSnapshot, width: int, height: int | None = None) -> list[str]:
    """Lines for a terminal: head, then queues, topic by topic. Columns are left out until all fit; with a ``height`` the queues
    that are furthest behind are shown, and how many others there are.
    """
    head = folded(summary(sight), width)
    rows, hidden = list(sight.rows), list[QueueLag]()
    room = len(rows) if height is None else max(1, height - len(head) - 1 - len({row.queue.topic for row in rows}))
    if len(rows) > room:
        ranked = sorted(rows, key=lambda row: (-1 if row.lag is None else -row.lag, row.queue))
        rows, hidden = sorted(ranked[: max(1, room - 1)]), ranked[max(1, room - 1) :]
    cells = [_shown(row, sight) for row in rows]
    lines = iter(_aligned(cells, _fitting(cells, _columns(sight), width)))
    body = [next(lines)]
    for topic, mine in groupby(cells, key=lambda row: row["topic"]):
        body += [*folded([topic], width), *(next(lines) for _ in mine)]
    return [*head, *body, *([_others(hidden)] if hidden else [])]


def summary(sight: LagSnapshot) -> list[str]:
    """Parts of the sentence about all queues."""
    every, at = total(sight.rows, sight.now_ms), sight.pace
    whose = " ".join(f"{name} {sight.about[name]}" for name in ("group", "checkpoint") if name in sight.about)
    parts = [whose, behind_in(sight.rows, sight.now_ms)]
    if every.behind_ms:
        parts.append(f"the oldest for {duration(every.behind_ms)}")
    if at.read_per_s is not None:
        parts += [f"read {rate(at.read_per_s)}/s", f"sent {rate(at.written_per_s)}/s"]
        parts.append("not catching up" if at.catch_up_s is None else f"done in {duration(at.catch_up_s * 1000)}")
    if back := went_back(sight.rows):
        parts.append(f"{back} queues went back")
    if state := sight.about.get("underWay"):
        assert isinstance(state, dict)
        parts.append(unfinished_batch_text(state))
    return parts


def _shown(row: QueueLag, sight: LagSnapshot) -> dict[str, str]:
    at = pace(sight.before, [row], sight.seconds)
    cells = {key: str(value) if isinstance(value, str) else number(value) for key, value in _queue(row, sight).items()}
    return {
        **cells,
        "age": duration(row.behind_ms(sight.now_ms)),
        "read": rate(at.read_per_s),
        "written": rate(at.written_per_s),
        "left": duration(None if at.catch_up_s is None else at.catch_up_s * 1000),
    }


def _columns(sight: LagSnapshot) -> dict[str, str]:
    return {key: heading for key, heading in _COLUMNS.items() if sight.before or key not in _OF_PACE}


def _fitting(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str], width: int) -> dict[str, str]:
    """Without the topic, which has a line of its own, and without what can be spared where it is narrow."""
    kept = {key: heading for key, heading in columns.items() if key != "topic"}
    for key in _SPARE:
        if _width(cells, kept) > width:
            kept.pop(key, None)
    return kept


def _aligned(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> list[str]:
    rows = [list(columns.values()), *([row[key] for key in columns] for row in cells)]
    return list(aligned(rows, [key not in ("topic", "brokerName") for key in columns]))


def _width(cells: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> int:
    widths = [max([len(heading), *(len(row[key]) for row in cells)]) for key, heading in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def _others(hidden: Sequence[QueueLag]) -> str:
    behind = sum(bool(row.lag) for row in hidden)
    return f"and {len(hidden)} more queues, {behind} of them behind"


def folded(parts: Sequence[str], width: int) -> list[str]:
    """Parts joined by commas, on as many lines as it takes; one that is longer than a line is broken."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(longer) <= width - 1 or not lines[-1]:
            lines[-1] = longer
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
    """The two largest units: ``3 h 12 m``; tenths of a second below ten."""
    if ms is None:
        return "-"
    if ms < 9_950:
        return f"{ms / 1000:.1f} s" if ms else "0 s"
    left = round(ms / 1000)
    for at, (unit, seconds) in enumerate(_UNITS[:-1]):
        if left >= seconds:
            smaller, size = _UNITS[at + 1]
            return f"{left // seconds} {unit} {left % seconds // size} {smaller}"
    return f"{left} s"
