"""Answers that a consumer polled as one batch, through the decoder that Spark's tasks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.decode.decoder import Decoder
from rocketmq_spark.decode.schema import BASIC, arrow_schema
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.pull.fetched import Fetched, Piece
from rocketmq_spark.wire import messages

SLACK_BYTES = 64  # behind the messages, as in a reader's buffer: decoders look ahead


# Queue, the offset asked for, of each answer in a row the next offset and where its bytes end, stored messages.
Answered = tuple[MessageQueue, int, Sequence[tuple[int, int]], bytes | memoryview]


def batch_of(
    parts: Iterable[tuple[Answered, Filter]], begun: Mapping[MessageQueue, int] | None = None
) -> tuple[pa.RecordBatch, int | None]:
    """The messages of answers, each with the filter of its request, in the basic columns; and None, for these are all. Of what
    becomes more than ``PORTION_BYTES`` they are the first, at least one, and beside them is the offset behind the last.

    Of queues in ``begun`` those before an offset are left out: they were given. Raises ``DecodeError`` with queue and offset
    of a bad message.
    """
    of_filter: dict[Filter, list[Answered]] = {}
    for answered, wanted in parts:
        of_filter.setdefault(wanted, []).append(answered)
    found: list[pa.RecordBatch] = []
    room = messages.PORTION_BYTES
    for wanted, answers in of_filter.items():
        for batch in _batches(answers, wanted):
            for queue, offset in (begun or {}).items():
                batch = batch.filter(~_is_before(batch, queue, offset))
            if batch.num_rows and room <= 0:
                return (some := pa.concat_batches(found)), some.column("queueOffset")[-1].as_py() + 1
            if batch.num_rows or not found:
                found.append(batch)
                room -= batch.nbytes
    if not found:
        return pa.RecordBatch.from_pylist([], schema=arrow_schema(BASIC)), None
    return found[0] if len(found) == 1 else pa.concat_batches(found), None


def _is_before(batch: pa.RecordBatch, queue: MessageQueue, offset: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are of ``queue`` and before an offset."""
    before = np.asarray(batch.column("queueOffset")) < offset
    for column, value in zip(("topic", "brokerName", "queueId"), queue, strict=True):
        before &= np.asarray(pc.equal(batch.column(column), value).to_numpy(zero_copy_only=False), bool)
    return before


def _batches(parts: Iterable[Answered], wanted: Filter) -> Iterator[pa.RecordBatch]:
    queues: list[MessageQueue] = []
    pieces: list[Piece] = []
    stored: list[bytes | memoryview] = []
    end = 0
    for number, (queue, start, ends, answers) in enumerate(parts):
        queues.append(queue)
        stored.append(answers)
        begin, base = end, end
        for next_offset, end_of_answer in ends:
            end = base + end_of_answer
            pieces.append(Piece(number, start, next_offset, next_offset, begin, end))
            start, begin = next_offset, end
    buffer = np.frombuffer(b"".join([*stored, bytes(SLACK_BYTES)]), np.uint8)
    return Decoder(queues, filtered=wanted).batches(Fetched(buffer, pieces), messages.PORTION_BYTES)
