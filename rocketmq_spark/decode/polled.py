"""Answers that a consumer polled as one batch, through the decoder that Spark's tasks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.decode.decoder import Decoder
from rocketmq_spark.decode.schema import BASIC, arrow_schema
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.pull.fetched import Fetched, Piece

SLACK_BYTES = 64  # behind the messages, as in a reader's buffer: decoders look ahead


# Queue, the offset asked for, of each answer in a row the next offset and where its bytes end, stored messages.
Answered = tuple[MessageQueue, int, Sequence[tuple[int, int]], bytes | memoryview]


def batch_of(
    parts: Iterable[tuple[Answered, Filter]], begun: Mapping[MessageQueue, int] | None = None
) -> pa.RecordBatch:
    """The messages of answers, each with the filter of its request, in the basic columns.

    Of queues in ``begun`` those before an offset are left out: a loop over messages gave them. Raises ``DecodeError`` with queue
    and offset of a bad message.
    """
    of_filter: dict[Filter, list[Answered]] = {}
    for answered, wanted in parts:
        of_filter.setdefault(wanted, []).append(answered)
    batches = [_batch(found, wanted) for wanted, found in of_filter.items()]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=arrow_schema(BASIC))
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    for queue, offset in (begun or {}).items():
        batch = batch.filter(~_is_before(batch, queue, offset))
    return batch


def _is_before(batch: pa.RecordBatch, queue: MessageQueue, offset: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are of ``queue`` and before an offset."""
    before = np.asarray(batch.column("queueOffset")) < offset
    for column, value in zip(("topic", "brokerName", "queueId"), queue, strict=True):
        before &= np.asarray(pc.equal(batch.column(column), value).to_numpy(zero_copy_only=False), bool)
    return before


def _batch(parts: Iterable[Answered], wanted: Filter) -> pa.RecordBatch:
    queues: list[MessageQueue] = []
    pieces: list[Piece] = []
    stored: list[bytes | memoryview] = []
    end = 0
    for number, (queue, start, ends, messages) in enumerate(parts):
        queues.append(queue)
        stored.append(messages)
        begin, base = end, end
        for next_offset, end_of_answer in ends:
            end = base + end_of_answer
            pieces.append(Piece(number, start, next_offset, next_offset, begin, end))
            start, begin = next_offset, end
    buffer = np.frombuffer(b"".join([*stored, bytes(SLACK_BYTES)]), np.uint8)
    return Decoder(queues, filtered=wanted)(Fetched(buffer, pieces))
