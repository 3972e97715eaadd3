"""What runs in a task: the ranges of one partition as record batches. Only the partition travels there."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from rocketmq_spark import session
from rocketmq_spark.decode.bad import Bad
from rocketmq_spark.decode.schema import Column
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.ports import RouteReader
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.verdict import Cause
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


def partitions(routes: RouteReader, tasks: Sequence[Iterable[OffsetRange]]) -> list[RangePartition]:
    """The tasks of a batch, each with the addresses that it needs."""
    known: dict[str, str] = {}
    for broker_name in {r.queue.broker_name for task in tasks for r in task}:
        try:
            known[broker_name] = routes.address(broker_name)
        except RocketMQError as e:
            logger.info("tasks look up broker %s themselves: %s", broker_name, e)
    planned = []
    for task in tasks:
        names = sorted({r.queue.broker_name for r in task} & known.keys())
        planned.append(RangePartition(tuple(task), tuple((name, known[name]) for name in names)))
    return planned


def read(options: Options, columns: tuple[Column, ...], partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    """The messages of a partition: one stream of pulls per broker, queue after queue.

    Where nothing was planned Spark runs one task without a partition.
    """
    if not isinstance(partition, RangePartition):
        return
    from rocketmq_spark.decode.decoder import Decoder  # drivers, a new process for every stream, need not wait for it

    puller = session.puller(options)
    addresses = dict(partition.addresses)
    bad = Bad(options.bad_message)
    lost = functools.partial(_lost, options)
    batched = functools.cache(lambda broker_name, topic: puller.batched(MessageQueue(topic, broker_name, 0)))
    by_place = sorted(partition.ranges, key=lambda r: (r.queue.broker_name, r.queue, r.start))
    for (broker_name, filtered, _), group in groupby(by_place, key=lambda r: _stream_of(options, batched, r)):
        pulls = reading.read(puller, list(group), lost, filtered, addresses.get(broker_name))
        decoder = Decoder(
            pulls.queues, columns, options.include_properties, filtered, pulls.on_holes, pulls.bounded, bad
        )
        for fetched in pulls.fetch():
            yield from filter(len, decoder.batches(fetched, _PORTION_BYTES))
    bad.summary()


def _stream_of(options: Options, batched: Callable[[str, str], bool], r: OffsetRange) -> tuple[str, Filter, bool]:
    queue, filtered = r.queue, filters.of_topic(options, r.queue.topic)
    return queue.broker_name, filtered, bool(filtered) and batched(queue.broker_name, queue.topic)


def _lost(options: Options, part: OffsetRange, cause: Cause) -> None:
    loss.report(options.fail_on_data_loss, [(part, cause)])
