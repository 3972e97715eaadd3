"""Plans the tasks of a batch: which Spark partition reads which part of each queue. Pure.

RocketMQ's allocation strategies allocate queues to Spark partitions as if the partitions were consumers. Then partitions are
split as in Spark's Kafka source. If a strategy allocates a queue to several partitions, the first of them reads the queue. If a
strategy allocates a queue to no partition, the queue is not read.

A repeated batch must have the tasks of its first attempt, because ids of exactly-once contain the number of the task. So the
tasks depend only on the logged ranges and on a ``Partitioning``, which the end offset of the batch contains.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, groupby
from typing import Any

from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import TABLE, Options
from rocketmq_spark.options.parsing import integer
from rocketmq_spark.options.table import MAX_TASKS
from rocketmq_spark.queues.allocation import allocate_all
from rocketmq_spark.queues.environment import Environment, environment_of

Task = list[OffsetRange]

# A task should read at least this number of messages. A task takes 25-30 ms to start, and about the same time to read so many
# messages.
ROWS_PER_TASK = 20_000
# Strategies that allocate every queue to a consumer, whatever the names of the brokers are.
_COMPLETE_STRATEGIES = frozenset({"averagely", "averagelyByCircle", "consistentHash", "environment"})


@dataclass(frozen=True, slots=True)
class Partitioning:
    """What determines the tasks of a batch besides its ranges: options, and the constants of this release."""

    allocation_strategy: Any
    max_records_per_partition: int
    rows_per_task: int
    max_tasks: int
    num_partitions: int | None = None
    min_partitions: int | None = None
    allocation_config: str | None = None
    machine_rooms: tuple[str, ...] = ()
    partition_rooms: tuple[str, ...] = ()
    environment: str | None = None
    environments: str | None = None

    @classmethod
    def of(cls, options: Options) -> Partitioning:
        values = {field: getattr(options, field) for field in _OPTION_ROWS}
        return cls(**values, rows_per_task=ROWS_PER_TASK, max_tasks=MAX_TASKS)

    def to_json(self) -> dict[str, Any]:
        """Return the values as an end offset records them. Default values are recorded, too, because another release may have
        other defaults.
        """
        values = {name: getattr(self, field) for name, field in _FIELD_BY_NAME.items()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(values.items())
            if value is not None and value != ()
        }


# The rows of the options that are fields of ``Partitioning``. The other fields of ``Partitioning`` are constants.
_OPTION_ROWS = {row.field: row for row in TABLE if row.field in {field.name for field in fields(Partitioning)}}
_CONSTANTS = {"rowsPerTask": "rows_per_task", "maxTasks": "max_tasks"}
_FIELD_BY_NAME = {row.name: row.field for row in _OPTION_ROWS.values()} | _CONSTANTS
# The names whose values this release always records. If one of these values is missing, another release planned the batch.
_REQUIRED_NAMES = ("allocationStrategy", "maxRecordsPerPartition", *_CONSTANTS)


def logged_partitioning(
    partitioning_json: Mapping[str, Any], present_partitioning: Partitioning
) -> tuple[Partitioning, list[str]]:
    """Return the partitioning that the end offset of a batch records as ``partitioning_json``, and the names that this release
    cannot use.

    If another release planned the batch, values may be missing, or have unknown names. Missing values come from
    ``present_partitioning``, the partitioning of the present options. Raises ``OffsetError`` for a value that cannot be used.
    """
    if not partitioning_json:
        return present_partitioning, sorted(_FIELD_BY_NAME)
    values = {
        _FIELD_BY_NAME[name]: _parse_value(name, value)
        for name, value in partitioning_json.items()
        if name in _FIELD_BY_NAME
    }
    missing_names = {name for name in _REQUIRED_NAMES if name not in partitioning_json}
    # A checkpoint must not choose code to run: a callable in the log is called only if the options name the same callable.
    strategy = values.get("allocation_strategy", "")
    if ":" in strategy and strategy != present_partitioning.allocation_strategy:
        missing_names.add("allocationStrategy")
    values |= {_FIELD_BY_NAME[name]: getattr(present_partitioning, _FIELD_BY_NAME[name]) for name in missing_names}
    return Partitioning(**values), sorted(missing_names | (partitioning_json.keys() - _FIELD_BY_NAME.keys()))


def _parse_value(name: str, value: Any) -> Any:
    parse = integer(1) if name in _CONSTANTS else _OPTION_ROWS[_FIELD_BY_NAME[name]].parse
    try:
        return parse(value if isinstance(value, str) else json.dumps(value))
    except ValueError as e:
        raise OffsetError(
            f"plan/{name}: {value!r} cannot be used; expected {e}",
            remedy="If a newer rocketmq-spark planned this batch, finish it with that version",
        ) from e


def partition_id(number: int) -> str:
    return f"partition-{number:05d}"


def allocated_queues(
    options: Options,
    queues: Sequence[MessageQueue],
    earlier_owned_queues: Collection[MessageQueue] = (),
    possibly_empty_topics: Container[str] = (),
    all_topic_queues: Sequence[MessageQueue] | None = None,
) -> tuple[list[MessageQueue], frozenset[MessageQueue]]:
    """Return the queues that the source reads, and the queues that the strategy allocates to no partition.

    ``earlier_owned_queues`` are the queues that the environment of the source owned earlier. ``possibly_empty_topics`` are topics
    for which it is no error that the environment owns no queue now. If ``queues`` come from option ``assign``,
    ``all_topic_queues`` has all queues of their topics, which determine the queues of the environment. Raises ``OptionError``
    for an assigned queue of another environment.
    """
    environment = environment_of(options)
    if environment is not None:
        owned_queues = environment.owned(
            queues if all_topic_queues is None else all_topic_queues, earlier_owned_queues, possibly_empty_topics
        )
        if all_topic_queues is not None:
            owned_queues = _assigned_queues_of_environment(environment, queues, owned_queues)
        unallocated_queues = (
            frozenset(queues) - set(owned_queues) if options.allocation_strategy == "environment" else frozenset()
        )
        if unallocated_queues:
            return owned_queues, unallocated_queues
        queues = owned_queues
    if allocates_every_queue(options.allocation_strategy) or not queues:
        return sorted(queues), frozenset()
    consumer_count = options.num_partitions or len(queues)
    queues_with_partition = {
        queue
        for queues_of_partition in _allocate_partitions(Partitioning.of(options), queues, consumer_count)
        for queue in queues_of_partition
    }
    return sorted(queues_with_partition), frozenset(queues) - queues_with_partition


def allocates_every_queue(allocation_strategy: object) -> bool:
    """Whether the strategy allocates every queue of the source's topics, or of its environment, to a partition."""
    return allocation_strategy in _COMPLETE_STRATEGIES


def _assigned_queues_of_environment(
    environment: Environment, assigned_queues: Sequence[MessageQueue], owned_queues: Collection[MessageQueue]
) -> list[MessageQueue]:
    foreign_queues = sorted(set(assigned_queues) - set(owned_queues))
    if foreign_queues:
        raise OptionError(
            f"option 'assign' names {', '.join(map(str, foreign_queues))}, which environment {environment.name!r} does not own; "
            f"expected "
            f"any of {', '.join(map(str, owned_queues)) or 'none'}"
        )
    return sorted(assigned_queues)


def _allocate_partitions(
    partitioning: Partitioning, queues: Sequence[MessageQueue], consumer_count: int
) -> list[list[MessageQueue]]:
    """Return the queues of each partition. As in Java, the strategy allocates the queues of each topic separately."""
    if partitioning.allocation_strategy == "environment":  # strategy "environment" gives all queues to each consumer
        return [sorted(queues)]
    consumers = [partition_id(i) for i in range(consumer_count)]
    config = _strategy_config(partitioning, consumers)
    queues_by_consumer: dict[str, list[MessageQueue]] = {consumer: [] for consumer in consumers}
    for _, topic_queues in groupby(sorted(queues), key=lambda queue: queue.topic):
        for consumer, allocated_queues in allocate_all(
            partitioning.allocation_strategy, list(topic_queues), consumers, **config
        ).items():
            queues_by_consumer[consumer] += allocated_queues
    return [queues_by_consumer[consumer] for consumer in consumers]


def _strategy_config(partitioning: Partitioning, consumers: Sequence[str]) -> dict[str, Any]:
    rooms = partitioning.partition_rooms
    config: dict[str, Any] = {
        "allocationConfig": partitioning.allocation_config,
        "machineRooms": list(partitioning.machine_rooms) or None,
        "partitionRooms": dict(zip(consumers, cycle(rooms), strict=False)) if rooms else None,
        "environment": partitioning.environment,
        "environments": partitioning.environments,
    }
    return {name: value for name, value in config.items() if value is not None}


def partition_count(partitioning: Partitioning, ranges: Sequence[OffsetRange]) -> int:
    """Return the value of option ``numPartitions`` or, without this option, the number of partitions that the ranges need, at
    most one per range.
    """
    if partitioning.num_partitions is not None:
        return partitioning.num_partitions
    rows = _row_count(ranges)
    return max(1, min(len(ranges), -(-rows // partitioning.rows_per_task)))


def plan_tasks(partitioning: Partitioning, queues: Iterable[MessageQueue], ranges: Sequence[OffsetRange]) -> list[Task]:
    """Return the tasks that read ``ranges``. Each range is in exactly one task, and no task is empty."""
    ranges = [r for r in ranges if r.size > 0]
    if not ranges:
        return []
    range_by_queue = {r.queue: r for r in ranges}
    partitions = _allocate_partitions(
        partitioning, sorted(dict.fromkeys((*queues, *range_by_queue))), partition_count(partitioning, ranges)
    )
    tasks: list[Task] = []
    unplanned_ranges = dict(range_by_queue)
    for queues_of_partition in partitions:
        task = [
            unplanned_ranges.pop(queue) for queue in dict.fromkeys(queues_of_partition) if queue in unplanned_ranges
        ]
        if task:
            tasks.append(task)
    # If there are fewer partitions than at the start of the run, the strategy may omit queues. All omitted queues together get
    # one more task.
    if unplanned_ranges:
        tasks.append(sorted(unplanned_ranges.values()))
    return split_tasks(
        tasks, partitioning.min_partitions, partitioning.max_records_per_partition, partitioning.max_tasks
    )


def split_tasks(
    tasks: Sequence[Task], min_tasks: int | None, max_rows: int | None, max_tasks: int = MAX_TASKS
) -> list[Task]:
    """Split tasks that have more than ``max_rows``. Then split large tasks until there are ``min_tasks``. ``max_tasks`` limits
    the number of tasks.

    The numbers are computed as in Spark's ``KafkaOffsetRangeCalculator``, with tasks instead of ranges: small tasks are not
    split, and the number of parts of a large task is computed from the rows of the large tasks only.
    """
    if max_rows is not None:
        max_rows = max(max_rows, -(-sum(map(_row_count, tasks)) // max_tasks))
        tasks = [part for task in tasks for part in _split_task(task, -(-_row_count(task) // max_rows))]
    if min_tasks is None or min_tasks <= len(tasks):
        return list(tasks)
    total_rows = sum(_row_count(task) for task in tasks)
    unsplit_tasks = [task for task in tasks if _part_count(_row_count(task), total_rows, min_tasks) == 1]
    unsplit_ids = {id(task) for task in unsplit_tasks}
    rows_to_split = total_rows - sum(_row_count(task) for task in unsplit_tasks)
    min_new_tasks = max(min_tasks - len(unsplit_tasks), 1)
    new_tasks: list[Task] = []
    for task in tasks:
        part_count = 1 if id(task) in unsplit_ids else _part_count(_row_count(task), rows_to_split, min_new_tasks)
        new_tasks += _split_task(task, part_count)
    return new_tasks


def _part_count(rows: int, total_rows: int, min_tasks: int) -> int:
    return max(int(rows / total_rows * min_tasks + 0.5), 1)


def _row_count(task: Sequence[OffsetRange]) -> int:
    return sum(end - start for _, start, end in task)


def _split_task(task: Task, part_count: int) -> list[Task]:
    """Split a task into ``part_count`` tasks of nearly equal size, in order."""
    if part_count <= 1:
        return [task]
    rows = _row_count(task)
    parts_by_index: dict[int, Task] = defaultdict(list)
    part_ends, remaining_rows, part_end = [], rows, 0
    for part_index in range(part_count):
        size = remaining_rows // (part_count - part_index)
        remaining_rows -= size
        part_end += size
        part_ends.append(part_end)
    part_index, rows_before = 0, 0
    for r in task:
        start = r.start
        while start < r.end:
            while part_ends[part_index] <= rows_before:
                part_index += 1
            size = min(r.end - start, part_ends[part_index] - rows_before)
            parts_by_index[part_index].append(OffsetRange(r.queue, start, start + size))
            start += size
            rows_before += size
    return [parts_by_index[part_index] for part_index in sorted(parts_by_index)]
