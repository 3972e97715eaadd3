"""Which queue each row goes to, for the selectors that look at rows: a whole column at once where that is possible. Pure.

A choice is an index into the topic's queues, for each of the rows asked for. Rows for which there is none go to the
bad rows and get the first queue, which nobody will see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints
from rocketmq_spark.encode.bad_rows import BadRows
from rocketmq_spark.errors import SelectorError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.queues.hash_columns import hash_codes
from rocketmq_spark.queues.selection import Select, custom

UNKNOWN, AMBIGUOUS = -1, -2


class TopicRows(NamedTuple):
    """The rows of one topic in an Arrow batch; ``which`` None means all. ``first`` is the number of the batch's first row."""

    batch: pa.RecordBatch
    topic: str
    which: npt.NDArray[np.intp] | None
    first: int

    def numbers(self) -> npt.NDArray[np.intp]:
        return np.arange(len(self.batch)) if self.which is None else self.which

    def column(self, name: str) -> pa.Array:
        column = arrow.plain(self.batch.column(name))
        return column if self.which is None else column.take(pa.array(self.which))


class RowSelector(Protocol):
    """Chooses for every row. ``loops`` when it must not be asked for rows that are faulty already."""

    loops: bool

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        """An index into ``queues`` per row."""


class ByHash:
    """``SelectMessageQueueByHash`` of the sharding key."""

    loops = False

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._column = columns["shardingkey"]

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        keys = rows.column(self._column)
        missing = arrow.nulls(keys)
        if missing is not None:
            bad_rows.rows(rows.numbers()[missing], f"{self._column} is null, and queueSelector 'hash' needs a key")
            keys = pc.fill_null(keys, "")
        chosen: Ints = np.abs(hash_codes(keys).astype(np.int64)) % len(queues)
        return chosen


class ByColumn:
    """The queue that the row names."""

    loops = False

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._id = columns["queueid"]
        self._broker = columns.get("brokername")

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        ids = pc.fill_null(rows.column(self._id).cast(pa.int64()), -1).to_numpy()
        brokers = rows.column(self._broker) if self._broker is not None else None
        chosen = self._look_up(ids, brokers, queues)
        bad = np.flatnonzero(chosen < 0)
        if len(bad):
            numbers = rows.numbers()
            for at in bad.tolist():
                broker = brokers[at].as_py() if brokers is not None else None
                reason = _missing(rows.topic, int(ids[at]), broker, ambiguous=chosen[at] == AMBIGUOUS)
                if brokers is not None and broker is None:
                    reason = f"{self._broker} is null"
                bad_rows.rows(numbers[at : at + 1], reason)
            chosen = np.maximum(chosen, 0)
        return chosen

    def _look_up(self, ids: Ints, brokers: pa.Array | None, queues: Sequence[MessageQueue]) -> Ints:
        """Through a table of brokers and queue ids; its last row and column stand for all that is unknown."""
        max_id = 1 + max(queue.queue_id for queue in queues)
        names: list[str | None]
        if brokers is None:
            names, lines = [None], np.zeros(len(ids), np.int64)
        else:
            coded = brokers.dictionary_encode()
            names = coded.dictionary.to_pylist()
            lines = pc.fill_null(coded.indices.cast(pa.int64()), len(names)).to_numpy()
        table = np.full((len(names) + 1, max_id + 1), UNKNOWN, np.int64)
        for at, queue in enumerate(queues):
            for line, name in enumerate(names):
                if name is None:
                    known = table[line, queue.queue_id] != UNKNOWN
                    table[line, queue.queue_id] = AMBIGUOUS if known else at
                elif name == queue.broker_name:
                    table[line, queue.queue_id] = at
        chosen: Ints = table[lines, np.where((ids < 0) | (ids > max_id), max_id, ids)]
        return chosen


def _missing(topic: str, queue_id: int, broker: str | None, ambiguous: bool) -> str:
    if queue_id < 0:
        return "queueId is null or negative, and queueSelector 'column' needs one"
    if ambiguous:
        return f"queue {queue_id} of topic {topic!r} is on several brokers; name the broker too"
    where = f" on broker {broker!r}" if broker is not None else ""
    return f"topic {topic!r} has no queue {queue_id}{where} that takes messages"


class ByCallable:
    """A user's function, called row by row with the queues, the message and its sharding key."""

    loops = True

    def __init__(self, columns: Mapping[str, str], function: Select) -> None:
        self._columns = columns
        self._function = function

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        values = {name: self._values(rows, name) for name in ("body", "tags", "keys", "properties", "shardingkey")}
        places = {queue: at for at, queue in enumerate(queues)}
        chosen = np.empty(len(values["body"]), np.int64)
        for at, (body, tags, keys, properties, key) in enumerate(zip(*values.values(), strict=True)):
            message = Message(rows.topic, body, tags, keys or (), dict(properties or ()))
            try:
                chosen[at] = places[custom(self._function, queues, message, key)]
            except SelectorError as e:
                row = rows.first + int(rows.numbers()[at])
                raise SelectorError(f"row {row}: {e.message}; nothing of its Arrow batch was sent") from e
        return chosen

    def _values(self, rows: TopicRows, name: str) -> list[Any]:
        if name not in self._columns:
            return [None] * len(rows.numbers())
        column = rows.column(self._columns[name])
        values: list[Any] = (arrow.as_bytes(column) if name == "body" else column).to_pylist()
        return values
