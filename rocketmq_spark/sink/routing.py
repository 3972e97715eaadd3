"""An Arrow batch to shares: runs of rows that go to one topic, and to one queue where rows say which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.encode.bad_rows import BadRows
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.producer.encoding import check_topic
from rocketmq_spark.queues.named import resolve
from rocketmq_spark.queues.selection import in_rooms
from rocketmq_spark.sink.selectors import ByCallable, ByColumn, ByHash, RowSelector, TopicRows
from rocketmq_spark.transport import GRPC

Queues = Sequence[MessageQueue]
Candidates = Callable[[Queues], Queues]


class RowRange(NamedTuple):
    """Rows ``start`` to ``end`` in the order of the plan; without a queue they may go to any."""

    topic: str
    queue: MessageQueue | None
    start: int
    end: int


class RoutingPlan(NamedTuple):
    """``order`` None leaves the rows as they are."""

    order: npt.NDArray[np.intp] | None
    shares: list[RowRange]

    def rows(self, share: RowRange) -> npt.NDArray[np.intp]:
        """Those of a share, as they are numbered in the Arrow batch."""
        return np.arange(share.start, share.end) if self.order is None else self.order[share.start : share.end]


def selector_of(options: Options, columns: Mapping[str, str]) -> str | Callable[..., object]:
    """The selector in force: the one given, or the column's when there is a column ``queueId``.

    Over gRPC a sharding key makes a message group, whose order is kept by what goes one after the other.
    """
    if options.transport == GRPC and "shardingkey" in columns:
        return "hash"
    if "queue_selector" not in options.given and "queueid" in columns:
        return "column"
    chosen: str | Callable[..., object] = options.queue_selector
    return chosen


def row_selector(options: Options, columns: Mapping[str, str]) -> RowSelector | None:
    """The selector that looks at rows; None when batches go anywhere."""
    match selector_of(options, columns):
        case "hash":
            return ByHash(columns)
        case "column":
            return ByColumn(columns)
        case "roundRobin" | "random" | "machineRoom" | "environment":
            return None
        case given:
            return ByCallable(columns, resolve(given, "queueSelector"))


def candidates(options: Options) -> Candidates | None:
    """What batches that may go anywhere choose from at random; None for going round."""
    if options.queue_selector == "machineRoom":
        return lambda queues: in_rooms(queues, options.machine_rooms)
    return _all if options.queue_selector == "random" else None


def _all(queues: Queues) -> Queues:
    return queues


class Router:
    """Plans the Arrow batches of one task.

    ``queues`` gives a topic's queues, after a look at its route if it is told so. They are asked for once per task, so
    that a key keeps its queue for as long as the task lives.
    """

    def __init__(self, options: Options, columns: Mapping[str, str], queues: Callable[[str, bool], Queues]) -> None:
        self._topic = options.topic
        self._column = columns.get("topic")
        self._selector = row_selector(options, columns)
        self._ask = queues
        self._queues: dict[str, Queues] = {}

    @property
    def loops(self) -> bool:
        """Whether rows must all be good before they are planned."""
        return self._selector is not None and self._selector.loops

    def topics(self, batch: pa.RecordBatch, bad_rows: BadRows, first: int) -> list[TopicRows]:
        """The rows of each topic; rows without one, or with one that takes no messages, are bad."""
        if not len(batch):
            return []
        if self._topic is not None:
            return [TopicRows(batch, self._topic, None, first)]
        assert self._column is not None
        column = arrow.plain(batch.column(self._column))
        named = pc.fill_null(pc.greater(pc.binary_length(column), 0), False)
        bad_rows.add(~arrow.flags(named), "there is no topic")
        parts = []
        names = [name for name in pc.unique(column).to_pylist() if name]
        for name in names:
            here = None if len(names) == 1 else pc.indices_nonzero(pc.equal(column, name)).to_numpy().astype(np.intp)
            rows = TopicRows(batch, name, here, first)
            try:
                check_topic(name)
            except MessageRefused as e:
                bad_rows.rows(rows.numbers(), f"topic {name!r}: {e.message}")
            else:
                parts.append(rows)
        return parts

    def plan(self, topics: Sequence[TopicRows], bad_rows: BadRows) -> RoutingPlan:
        """The shares of the rows, in which the rows of a queue keep their order."""
        if len(topics) == 1 and topics[0].which is None and self._selector is None:
            return RoutingPlan(None, [RowRange(topics[0].topic, None, 0, len(topics[0].batch))])
        orders, shares = [], []
        at = 0
        for rows in topics:
            order, parts = self._of_topic(rows, bad_rows)
            orders.append(order)
            shares += [RowRange(rows.topic, queue, at + start, at + end) for queue, start, end in parts]
            at += len(order)
        return RoutingPlan(np.concatenate(orders) if orders else None, shares)

    def _of_topic(
        self, rows: TopicRows, bad_rows: BadRows
    ) -> tuple[npt.NDArray[np.intp], list[tuple[MessageQueue | None, int, int]]]:
        numbers = rows.numbers()
        if self._selector is None:
            return numbers, [(None, 0, len(numbers))]
        queues, chosen = self._choose(rows, bad_rows)
        narrow = chosen.astype(np.int16) if len(queues) < 1 << 15 else chosen  # sorted by digits, which is quick
        order = np.argsort(narrow, kind="stable")
        counts = np.bincount(chosen, minlength=len(queues))
        ends = np.cumsum(counts)
        parts: list[tuple[MessageQueue | None, int, int]] = [
            (queues[i], int(ends[i] - counts[i]), int(ends[i])) for i in np.flatnonzero(counts).tolist()
        ]
        return numbers[order], parts

    def _choose(self, rows: TopicRows, bad_rows: BadRows) -> tuple[Queues, npt.NDArray[np.int64]]:
        assert self._selector is not None
        queues = self._queues.get(rows.topic)
        if queues is None:
            queues = self._queues[rows.topic] = self._ask(rows.topic, False)
        if isinstance(self._selector, ByColumn):
            trial = BadRows()
            chosen = self._selector(rows, queues, trial)
            if not trial.found():
                return queues, chosen
            queues = self._queues[rows.topic] = self._ask(rows.topic, True)  # it may have more queues by now
        return queues, self._selector(rows, queues, bad_rows)
