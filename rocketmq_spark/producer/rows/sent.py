"""The outcomes of the rows of one ``send_arrow``, or of the messages of one ``send_many``. Needs pyarrow and numpy.

There are few batches and many rows. So the outcome of each batch is kept with its row numbers, and the message ids are kept as
bytes. Columns, and results of single rows, are created when they are read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints
from rocketmq_spark.columnar.encode import buffers
from rocketmq_spark.errors import RocketMQError, SendFailed
from rocketmq_spark.model import SendResult
from rocketmq_spark.producer.outgoing import Outcome

_SEPARATOR = ","


class _SharedOutcome:
    """Rows that share an outcome, because they were in one request."""

    def __init__(self, rows: Ints, outcome: Outcome) -> None:
        self.rows = rows
        self.outcome = outcome

    @property
    def result(self) -> SendResult | None:
        return self.outcome if isinstance(self.outcome, SendResult) else None

    @functools.cached_property
    def offset_ids(self) -> Sequence[str | None]:
        """The offset message id of each row; the same id for all rows of a batch that is stored as one message."""
        joined_ids = None if self.result is None else self.result.offset_msg_id
        ids = (joined_ids or "").split(_SEPARATOR)
        return ids if len(ids) == len(self.rows) and joined_ids else [joined_ids] * len(self.rows)

    @property
    def first_offset(self) -> int | None:
        """The queue offset of the first row; None if it is unknown."""
        return None if self.result is None else self.result.queue_offset

    def results(self, msg_ids: Sequence[str]) -> Iterable[Outcome]:
        """The results of all rows."""
        result = self.result
        if result is None:
            return [self.outcome] * len(msg_ids)
        status, _, queue, first_offset, _, *other_fields = result
        offsets: Iterable[int | None] = (
            itertools.repeat(None) if first_offset is None else itertools.count(first_offset)
        )
        repeat = itertools.repeat
        return map(
            SendResult._make,
            zip(
                repeat(status),
                msg_ids,
                repeat(queue),
                offsets,
                self.offset_ids,
                *map(repeat, other_fields),
                strict=False,
            ),
        )

    def result_of(self, index: int, msg_id: str) -> Outcome:
        """The result of the row ``rows[index]``."""
        result = self.result
        if result is None:
            return self.outcome
        status, _, queue, first_offset, _, *other_fields = result
        return SendResult(
            status,
            msg_id,
            queue,
            None if first_offset is None else first_offset + index,
            self.offset_ids[index],
            *other_fields,
        )


class SentRows(Sequence[SendResult | RocketMQError]):
    """The outcomes of the rows of ``Producer.send_arrow``, or of the messages of ``Producer.send_many``, in the order of the rows
    or messages.

    Item ``i`` is the ``SendResult`` of row ``i``, or its error. Rows of one batch share their error. Only producers create
    these objects; ``parts`` and ``ids`` are internal.
    """

    def __init__(self, parts: Sequence[_SharedOutcome], ids: npt.NDArray[np.uint8]) -> None:
        not_sent_outcome = _SharedOutcome(np.empty(0, np.int64), SendFailed("the row was not sent"))
        self._parts = [*parts, not_sent_outcome]  # the outcome of rows that are in no other part
        self._ids = ids
        self._part_of_row = np.full(len(ids), len(parts), np.int32)
        self._place_in_part = np.zeros(len(ids), np.int64)
        for number, part in enumerate(parts):
            self._part_of_row[part.rows] = number
            self._place_in_part[part.rows] = np.arange(len(part.rows))

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, row: int) -> SendResult | RocketMQError: ...
    @overload
    def __getitem__(self, row: slice) -> list[SendResult | RocketMQError]: ...
    def __getitem__(self, row: int | slice) -> SendResult | RocketMQError | list[SendResult | RocketMQError]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        part, msg_id = self._parts[self._part_of_row[row]], str(self._ids[row].tobytes(), "ascii")
        outcome: Outcome = part.result_of(int(self._place_in_part[row]), msg_id)
        return outcome

    def __iter__(self) -> Iterator[SendResult | RocketMQError]:
        width = self._ids.shape[1]
        ids = self._ids.tobytes().decode()
        outcomes: list[SendResult | RocketMQError] = [self._parts[-1].outcome] * len(self)
        for part in self._parts:
            rows = part.rows.tolist()
            part_outcomes = part.results([ids[row * width : (row + 1) * width] for row in rows])
            for row, outcome in zip(rows, part_outcomes, strict=True):
                outcomes[row] = outcome
        return iter(outcomes)

    def __repr__(self) -> str:
        return f"SentRows({len(self)} rows, {len(self.failed)} of them failed)"

    @property
    def failed(self) -> npt.NDArray[np.int64]:
        """The numbers of the rows that failed, sorted. ``table.take(sent.failed)`` has these rows.

        A failed row may be stored nevertheless, unless its error says that it was not sent. If you send a failed row again, it
        may be stored twice.
        """
        return np.flatnonzero(self._values_of_rows([part.result is None for part in self._parts], np.bool_))

    def raise_for_failed(self) -> None:
        """Raise the error of the first failed row, if any row failed. The error has a note with the number of failed rows."""
        failed_rows = self.failed
        if not len(failed_rows):
            return
        error = self._parts[self._part_of_row[failed_rows[0]]].outcome
        assert isinstance(error, RocketMQError)
        note = f"{len(failed_rows)} of {len(self)} rows failed, the first of them row {failed_rows[0]}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise error

    @property
    def table(self) -> pa.Table:
        """The outcomes as a table with the columns ``status``, ``brokerName``, ``queueId``, ``queueOffset``, ``msgId`` and
        ``error``.

        In a failed row all columns except ``msgId`` and ``error`` are null. ``queueId`` is null over gRPC. The columns of
        the queue and the offset are null if ``queue`` or ``queue_offset`` of the ``SendResult`` is None.
        """
        results = [part.result for part in self._parts]
        queues = [None if result is None or result.queue is None else result.queue for result in results]
        columns = {
            "status": self._texts([None if result is None else result.status.value for result in results]),
            "brokerName": self._texts([None if queue is None else queue.broker_name for queue in queues]),
            "queueId": self._numbers([_queue_id(queue) for queue in queues], np.int32, pa.int32()),
            "queueOffset": self._offsets(),
            "msgId": buffers.fixed_width_column(self._ids).view(pa.string())
            if len(self._ids)
            else pa.nulls(0, pa.string()),
            "error": self._texts([None if part.result is not None else str(part.outcome) for part in self._parts]),
        }
        return pa.table(columns)

    def _values_of_rows(self, values: Sequence[Any], dtype: Any) -> npt.NDArray[Any]:
        return np.array(values, dtype)[self._part_of_row] if len(self._ids) else np.empty(0, dtype)

    def _texts(self, values: Sequence[str | None]) -> pa.Array:
        return pa.array(values, pa.string()).take(arrow.integers(self._part_of_row, pa.int32()))

    def _numbers(self, values: Sequence[int | None], dtype: Any, arrow_type: pa.DataType) -> pa.Array:
        numbers = self._values_of_rows([value or 0 for value in values], dtype)
        return pa.array(numbers, arrow_type, mask=self._values_of_rows([value is None for value in values], np.bool_))

    def _offsets(self) -> pa.Array:
        first_offsets = [part.first_offset for part in self._parts]
        numbers = self._values_of_rows([offset or 0 for offset in first_offsets], np.int64) + self._place_in_part
        return pa.array(
            numbers, pa.int64(), mask=self._values_of_rows([offset is None for offset in first_offsets], np.bool_)
        )


def _queue_id(queue: Any) -> int | None:
    return None if queue is None or queue.queue_id < 0 else int(queue.queue_id)


class OutcomeCollector:
    """Collects the outcomes of requests while rows are sent."""

    def __init__(self) -> None:
        self._parts: list[_SharedOutcome] = []
        self._ids: list[npt.NDArray[np.uint8]] = []
        self.row_count = 0

    def add_rows(self, ids: npt.NDArray[np.uint8]) -> None:
        """Add the rows that are sent next. ``ids`` are their message ids."""
        self._ids.append(ids)
        self.row_count += len(ids)

    def add_outcome(self, rows: Ints, outcome: Outcome) -> None:
        """Add the outcome of rows, which are numbered within the call."""
        self._parts.append(_SharedOutcome(rows, outcome))

    def result(self) -> SentRows:
        """The outcomes of all rows. If the error of a request names single messages (``stored`` or ``skipped_ids``), each row of
        the request gets a separate outcome.
        """
        ids = np.concatenate(self._ids) if self._ids else np.empty((0, 32), np.uint8)
        parts: list[_SharedOutcome] = []
        for part in self._parts:
            error = part.outcome
            if isinstance(error, RocketMQError) and (error.stored or error.skipped_ids):
                parts += _outcome_of_each(part.rows, error, ids)
            else:
                parts.append(part)
        return SentRows(parts, ids)


def _outcome_of_each(rows: Ints, error: RocketMQError, ids: npt.NDArray[np.uint8]) -> Iterator[_SharedOutcome]:
    """A separate outcome for each row of a request that failed with ``error``."""
    ids_behind = frozenset(error.skipped_ids)
    not_sent_error = SendFailed(
        f"not sent, because an earlier message of its group was rejected: {error.message}",
        error.addr, error.broker_code, error.topic, remark=error.remark, remedy=error.remedy,
    )  # fmt: skip
    not_sent_error.__cause__ = error
    for row in rows.tolist():
        msg_id = ids[row].tobytes().decode()
        outcome: Outcome = error.stored.get(msg_id, not_sent_error if msg_id in ids_behind else error)
        yield _SharedOutcome(np.array([row]), outcome)
