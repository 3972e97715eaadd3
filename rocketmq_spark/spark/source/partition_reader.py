"""Reads the ranges of one partition in a task, as record batches. Spark passes only the partition to the task."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.columnar.decode import kafka
from rocketmq_spark.columnar.decode.schema import BadMessages, Column
from rocketmq_spark.errors import BrokerNotFound, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader, RouteReader
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.spark.compat import InputPartition
from rocketmq_spark.spark.source import data_loss, subscription
from rocketmq_spark.spark.source.offsets import Offsets

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)

_TARGET_BATCH_BYTES = 1 << 20
_SLAVE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class RangePartition(InputPartition):
    """The ranges that one task reads, and the addresses of the brokers, as far as the driver knows them.

    For queues in ``mismatched_queues``, the slave has other messages than the master. For each range of a stream, ``queue_ends``
    has the end of the batch in the range's queue, and ``newest_store_ms`` the newest store time of the queue that the plan saw
    (0 if unknown). With ``kafkaColumns``, ``partition_numbers`` has Kafka's partition number of the queue for each range.
    """

    ranges: tuple[OffsetRange, ...]
    addresses: tuple[tuple[str, str], ...] = ()
    mismatched_queues: frozenset[MessageQueue] = frozenset()
    queue_ends: tuple[int, ...] = ()
    newest_store_ms: tuple[int, ...] = ()
    partition_numbers: tuple[int, ...] = ()

    @property
    def value(self) -> Any:
        return self.ranges

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the ranges as columns, which takes a quarter of the time of pickling each range. A batch may have 100,000
        ranges.
        """
        queues = [r.queue for r in self.ranges]
        columns = [[queue[i] for queue in queues] for i in range(3)] + [[r[i] for r in self.ranges] for i in (1, 2)]
        return _partition_from_columns, (
            *columns,
            self.addresses,
            self.mismatched_queues,
            self.queue_ends,
            self.newest_store_ms,
            self.partition_numbers,
        )


def _partition_from_columns(
    topics: Sequence[str],
    broker_names: Sequence[str],
    queue_ids: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    *other_fields: Any,
) -> RangePartition:
    ranges = map(OffsetRange, map(MessageQueue, topics, broker_names, queue_ids), starts, ends)
    return RangePartition(tuple(ranges), *other_fields)


def replica_mismatches(
    options: Options, route_reader: RouteReader, offset_reader: OffsetReader, ranges: Iterable[OffsetRange]
) -> frozenset[MessageQueue]:
    """Return the queues that must be read from the master, because the slave may have another message than the master at the
    start of the range.

    If a topic was deleted and created again on its master only, the slave still has the old messages. If a broker answers with an
    error, or if a slave does not answer, its queues are returned, too. If a master does not answer, its queues are not returned,
    because only the slave can be read.
    """
    if options.read_from == "master":
        return frozenset()
    has_both_replicas = functools.cache(functools.partial(_has_master_and_slave, route_reader))
    starts = {r.queue: r.start for r in ranges if has_both_replicas(r.queue.broker_name)}
    if not starts:
        return frozenset()
    deadline = Deadline.after(options.request_timeout)
    mismatched_queues: set[MessageQueue] = set()

    def note_master_error(error: RocketMQError, queue: MessageQueue) -> None:
        if error.broker_code is not None:
            mismatched_queues.add(queue)

    def note_slave_error(error: RocketMQError, queue: MessageQueue) -> None:
        mismatched_queues.add(queue)

    master_times_ms = offset_reader.store_times_ms(options.group, starts, deadline, on_error=note_master_error)
    # Unless only slaves are read, tasks can read the master, so a slave that hangs must not delay each batch for long.
    slave_deadline = deadline if options.read_from == "slave" else deadline.within(_SLAVE_TIMEOUT_S)
    slave_times_ms = offset_reader.store_times_ms(options.group, starts, slave_deadline, "slave", note_slave_error)
    return frozenset(
        mismatched_queues.union(queue for queue, ms in slave_times_ms.items() if master_times_ms.get(queue, ms) != ms)
    )


def _has_master_and_slave(route_reader: RouteReader, broker_name: str) -> bool:
    """Whether both a master and a slave of a broker are up now."""
    try:
        return route_reader.address(broker_name) != route_reader.address(broker_name, "slave")
    except BrokerNotFound:
        return False


def input_partitions(
    route_reader: RouteReader,
    tasks: Sequence[Iterable[OffsetRange]],
    mismatched_queues: Collection[MessageQueue] = (),
    end: Offsets | None = None,
    numbers: Mapping[MessageQueue, int] = MappingProxyType({}),
) -> list[RangePartition]:
    """Return the partitions of a batch, each with the addresses that its task needs. ``end`` is the end of a stream's batch, and
    ``numbers`` are the partition numbers of the queues with ``kafkaColumns``.
    """
    addresses_by_broker: dict[str, str] = {}
    for broker_name in {r.queue.broker_name for task in tasks for r in task}:
        try:
            addresses_by_broker[broker_name] = route_reader.address(broker_name)
        except RocketMQError as e:
            logger.info("tasks look up broker %s themselves: %s", broker_name, e)
    partitions = []
    for task in tasks:
        broker_names = sorted({r.queue.broker_name for r in task} & addresses_by_broker.keys())
        mismatched_queues_of_task = frozenset(r.queue for r in task if r.queue in mismatched_queues)
        addresses = tuple((name, addresses_by_broker[name]) for name in broker_names)
        ends_and_times = (
            () if end is None else [(end.positions[r.queue], end.newest_store_ms.get(r.queue, 0)) for r in task]
        )
        queue_ends, newest_store_ms = zip(*ends_and_times, strict=True) if ends_and_times else ((), ())
        numbers_of_task = tuple(numbers[r.queue] for r in task) if numbers else ()
        partitions.append(
            RangePartition(
                tuple(task), addresses, mismatched_queues_of_task, queue_ends, newest_store_ms, numbers_of_task
            )
        )
    return partitions


def read_partition(
    options: Options,
    columns: tuple[Column, ...],
    partition: InputPartition | None,
    is_streaming: bool = False,
    on_loss: OnLoss | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a partition: one broker after another, with one connection for each broker, and one queue after
    another.

    If no partition was planned, Spark runs one task with None. ``is_streaming`` only selects the remedy of errors. ``on_loss`` is
    called for lost ranges. Without ``on_loss``, option 'failOnDataLoss' decides what happens.
    """
    if not isinstance(partition, RangePartition):
        return
    # The import is here, because the driver starts a process for each stream, and such a process does not need the decoder.
    from rocketmq_spark.columnar.decode.decoder import Decoder

    decoded_columns = kafka.columns_to_decode(columns) if options.kafka_columns else columns
    partition_numbers = dict(zip((r.queue for r in partition.ranges), partition.partition_numbers, strict=False))
    puller = session.puller(options)
    addresses = dict(partition.addresses)
    bad_messages = BadMessages(options.bad_message)
    handle_loss = on_loss or functools.partial(_handle_loss, options, puller)
    # The filter of each topic is cached, because the answer of the broker may change, but all pulls of one connection need the
    # same filter.
    broker_filter = functools.cache(
        lambda broker, topic, pull_filter: puller.broker_filter(MessageQueue(topic, broker, 0), pull_filter)
    )
    ends_and_times = dict(
        zip(
            (r.queue for r in partition.ranges),
            zip(partition.queue_ends, partition.newest_store_ms, strict=True),
            strict=False,  # a batch read has no ends and times
        )
    )
    sorted_ranges = sorted(partition.ranges, key=lambda r: (r.queue.broker_name, r.queue, r.start))
    for (broker_name, topic_filter, pull_filter, is_mismatched), ranges_of_pull in groupby(
        sorted_ranges, key=lambda r: (*_pull_key(options, broker_filter, r), r.queue in partition.mismatched_queues)
    ):
        range_puller = replace(puller, read_from="master") if is_mismatched else puller
        ranges = list(ranges_of_pull)
        recreation_check = _recreation_check(options, ranges, ends_and_times)
        reading_of_ranges = reading.read(
            range_puller, ranges, handle_loss, pull_filter, addresses.get(broker_name), recreation_check
        )
        decoder = Decoder(
            reading_of_ranges.queues,
            decoded_columns,
            options.include_properties,
            topic_filter,
            reading_of_ranges.usable_answer_counter,
            reading_of_ranges.with_true_ends,
            bad_messages,
        )
        with _with_waiting_advice(broker_name, is_streaming):
            for buffer in reading_of_ranges.fetch():
                for batch in filter(len, decoder.batches(buffer, _TARGET_BATCH_BYTES)):
                    yield (
                        kafka.kafka_batch(batch, columns, broker_name, partition_numbers)
                        if options.kafka_columns
                        else batch
                    )
    bad_messages.log_summary()


def _recreation_check(
    options: Options, ranges: Sequence[OffsetRange], ends_and_times: Mapping[MessageQueue, tuple[int, int]]
) -> RecreatedTopics | None:
    newest_store_ms = [ends_and_times[r.queue][1] if r.queue in ends_and_times else 0 for r in ranges]
    if not any(newest_store_ms):
        return None
    # The import is here, because it needs numpy, and commands import this module.
    from rocketmq_spark.pull.recreated import RecreatedTopics

    return RecreatedTopics(
        ranges, newest_store_ms, lambda queue: _is_topic_recreated(options, queue, *ends_and_times[queue])
    )


def _is_topic_recreated(options: Options, queue: MessageQueue, end: int, newest_store_ms: int) -> bool:
    """Whether the topic was created again after the batch was planned: the queue now ends before ``end``, or its message before
    ``end`` is newer than ``newest_store_ms``, the newest time that the plan saw.
    """
    route_reader, offset_reader = session.routes(options), session.offsets(options)

    def has_newer_last_message() -> bool:
        deadline = Deadline.after(options.request_timeout)
        route_reader.get(queue.topic)  # fetches the route, because a task has no routes at first
        fetch_store_time_ms = functools.partial(offset_reader.store_time_ms, options.group, queue, end - 1, deadline)
        store_time_ms = fetch_store_time_ms()
        if store_time_ms is None:
            # If the queue ends before the offset of the message, the topic was created again. Otherwise, compaction may have
            # removed the message.
            bounds = offset_reader.bounds([queue], deadline).get(queue)
            if bounds is not None and bounds.max_offset < end:
                return True
            store_time_ms = fetch_store_time_ms()  # the new topic may have reached this offset since the first request
        return store_time_ms is not None and store_time_ms > newest_store_ms

    return Retry(options.num_retries, options.retry_interval).run(has_newer_last_message)


@contextlib.contextmanager
def _with_waiting_advice(broker_name: str, is_streaming: bool) -> Iterator[None]:
    """Add advice to the remedy of an error inside the block if the broker did not answer before the deadline."""
    try:
        yield
    except RocketMQError as e:
        if e.retriable:
            add_waiting_advice(e, f"broker {broker_name}", is_streaming)
        raise


def add_waiting_advice(error: RocketMQError, broker_text: str, is_streaming: bool) -> None:
    """Append ``waiting_advice`` to the remedy that ``error`` has, for example the remedy for an unreachable address."""
    error.remedy = f"{error.remedy or f'Start {broker_text}'}. {waiting_advice(broker_text, is_streaming)}"


def waiting_advice(broker_text: str, is_streaming: bool) -> str:
    """Return advice for a read whose broker did not answer within ``readDeadline``. The advice for a stream differs, because a
    stream cannot skip a planned batch.
    """
    remedy = (
        f"Nothing is lost: a task waits for {broker_text} as long as option 'readDeadline' says, and then Spark "
        "repeats the task. With master local[*] Spark does not repeat tasks, but with local[*,4] it does"
    )
    if not is_streaming:
        return remedy
    return (
        f"{remedy}. To continue without the broker, stop the query and run: rocketmq-spark checkpoint rewind "
        "(docs/operating.md)"
    )


def _pull_key(
    options: Options, broker_filter: Callable[[str, str, Filter], Filter], r: OffsetRange
) -> tuple[str, Filter, Filter]:
    queue, topic_filter = r.queue, subscription.filter_of_topic(options, r.queue.topic)
    return queue.broker_name, topic_filter, broker_filter(queue.broker_name, queue.topic, topic_filter)


def _handle_loss(options: Options, puller: Puller, lost_range: OffsetRange, cause: Cause) -> None:
    if cause is Cause.WENT_BACK:
        with contextlib.suppress(RocketMQError):  # if the broker does not answer, ``cause`` is reported unchanged
            cause = Cause.NOT_KEPT if puller.is_compacted(lost_range.queue) else cause
    data_loss.report_data_loss(options.fail_on_data_loss, [(lost_range, cause)])
