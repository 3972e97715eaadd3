"""What runs in a task: the ranges of one partition as record batches. Only the partition travels there."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from rocketmq_spark import session
from rocketmq_spark.decode.bad import Bad
from rocketmq_spark.decode.schema import Column
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import NO_FILTER, Filter, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.pull.heads import Edge, Heads, OnLoss, bounded
from rocketmq_spark.pull.reader import RangeReader
from rocketmq_spark.pull.verdict import Cause
from rocketmq_spark.pull.window import Hole, Piece, Window
from rocketmq_spark.source import filters, loss

logger = logging.getLogger(__name__)

_PORTION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RangePartition(InputPartition):
    """What one task reads: ranges, and the addresses of their brokers as far as the driver knew them."""

    ranges: tuple[OffsetRange, ...]
    addresses: tuple[tuple[str, str], ...] = ()

    @property
    def value(self) -> Any:
        return self.ranges


def partitions(client: session.Client, tasks: Sequence[Iterable[OffsetRange]]) -> list[RangePartition]:
    """The tasks of a batch, each with the addresses that it needs."""
    known: dict[str, str] = {}
    for broker_name in {r.queue.broker_name for task in tasks for r in task}:
        try:
            known[broker_name] = client.routes.address(broker_name)
        except RocketMQError as e:
            logger.info("tasks look up broker %s themselves: %s", broker_name, e)
    found = []
    for task in tasks:
        names = sorted({r.queue.broker_name for r in task} & known.keys())
        found.append(RangePartition(tuple(task), tuple((name, known[name]) for name in names)))
    return found


def read(options: Options, columns: tuple[Column, ...], partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    """The messages of a partition: one stream of pulls per broker, queue after queue.

    Where nothing was planned Spark runs one task without a partition.
    """
    if not isinstance(partition, RangePartition):
        return
    from rocketmq_spark.decode.decoder import Decoder  # drivers, a new process for every stream, need not wait for it

    one = session.client(options)
    addresses = dict(partition.addresses)
    bad = Bad(options.bad_message)
    by_place = sorted(partition.ranges, key=lambda r: (r.queue.broker_name, r.queue, r.start))
    for (broker_name, filtered), group in groupby(by_place, key=lambda r: _stream_of(options, r)):
        ranges = list(group)
        queues = [r.queue for r in ranges]
        open_reader = functools.partial(_reader, options, addresses.get(broker_name))
        lost = functools.partial(_lost, options)
        edge = on_beyond = None
        if filtered:
            heads = Heads(open_reader, one.compacted)
            edge = Edge(ranges, heads, lost)
            on_beyond = functools.partial(bounded, queues=queues, heads=heads)
        reader = open_reader(ranges, edge.lost if edge else lost, filtered)
        on_holes = functools.partial(_holes, one, ranges, reader)
        decoder = Decoder(queues, columns, options.include_properties, filtered, on_holes, on_beyond, bad)
        for window in _watched(reader, edge):
            yield from filter(len, decoder.batches(window, _PORTION_BYTES))
    bad.summary()


def _reader(
    options: Options,
    address: str | None,
    ranges: Sequence[OffsetRange],
    on_loss: OnLoss,
    filtered: Filter = NO_FILTER,
) -> RangeReader:
    """Ranges of one broker, first from the address that the plan knew."""
    one, queue = session.client(options), ranges[0].queue
    dial = one.bulk(queue.broker_name, queue.topic, address, options.read_from)
    templates = [one.pull_template(r.queue, options.group, filtered) for r in ranges]
    settings = session.pull_settings(options, bool(filtered))
    return RangeReader(ranges, dial, templates, settings, on_loss, on_hint=dial.hint)


def _watched(reader: RangeReader, edge: Edge | None) -> Iterator[Window]:
    for window in reader.windows():
        if edge is not None:
            edge.read(window)
        yield window
    if edge is not None:
        edge.end()


def _holes(
    one: session.Client,
    ranges: Sequence[OffsetRange],
    reader: RangeReader,
    pieces: Sequence[Piece],
    holes: Sequence[Hole],
) -> int:
    """How many answers of a window may be used, where some jump over offsets. Only compaction makes that right."""
    holes = [hole for hole in holes if not one.compacted(ranges[pieces[hole.piece].number].queue)]
    return reader.doubt(holes) if holes else len(pieces)


def _stream_of(options: Options, r: OffsetRange) -> tuple[str, Filter]:
    return r.queue.broker_name, filters.of_topic(options, r.queue.topic)


def _lost(options: Options, part: OffsetRange, cause: Cause) -> None:
    loss.report(options.fail_on_data_loss, [(part, cause)])
