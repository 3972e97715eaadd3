"""Plans the tasks of a batch: which Spark partition reads which part of each queue. Pure.

RocketMQ's allocation strategies allocate queues to Spark partitions as if the partitions were consumers. Then partitions are
split as Spark's Kafka source does. A strategy may allocate a queue to several partitions, or to none: then the first partition
reads the queue, or no partition does.

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

# A task should read at least this many messages, because starting it takes 25-30 ms, in which a task reads about as many.
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
        values = {field: getattr(options, field) for field in _OPTIONS}
        return cls(**values, rows_per_task=ROWS_PER_TASK, max_tasks=MAX_TASKS)

    def to_json(self) -> dict[str, Any]:
        """Return the form in an end offset: each value that is set, also defaults, because another release may have others."""
        values = {name: getattr(self, field) for name, field in _FIELDS.items()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(values.items())
            if value is not None and value != ()
        }


# The options of a ``Partitioning``; its other fields are constants.
_OPTIONS = {row.field: row for row in TABLE if row.field in {field.name for field in fields(Partitioning)}}
_CONSTANTS = {"rowsPerTask": "rows_per_task", "maxTasks": "max_tasks"}
_FIELDS = {row.name: row.field for row in _OPTIONS.values()} | _CONSTANTS
# This release records all of these. If one is missing, another release planned the batch.
_REQUIRED = ("allocationStrategy", "maxRecordsPerPartition", *_CONSTANTS)


def logged_partitioning(plan: Mapping[str, Any], now: Partitioning) -> tuple[Partitioning, list[str]]:
    """Return the partitioning that the end offset of a batch records as ``plan``, and the names that this release cannot use.

    If another release planned the batch, values may be missing, or have unknown names. Missing values come from ``now``, the
    present options. Raises ``OffsetError`` for a value that cannot be used.
    """
    if not plan:
        return now, sorted(_FIELDS)
    values = {_FIELDS[name]: _parsed(name, value) for name, value in plan.items() if name in _FIELDS}
    missing = {name for name in _REQUIRED if name not in plan}
    # A checkpoint must not choose code to run: a callable in the log is called only if the options name the same callable.
    strategy = values.get("allocation_strategy", "")
    if ":" in strategy and strategy != now.allocation_strategy:
        missing.add("allocationStrategy")
    values |= {_FIELDS[name]: getattr(now, _FIELDS[name]) for name in missing}
    return Partitioning(**values), sorted(missing | (plan.keys() - _FIELDS.keys()))


def _parsed(name: str, value: Any) -> Any:
    parse = integer(1) if name in _CONSTANTS else _OPTIONS[_FIELDS[name]].parse
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
    owned_before: Collection[MessageQueue] = (),
    topics_without_queues: Container[str] = (),
    all_queues: Sequence[MessageQueue] | None = None,
) -> tuple[list[MessageQueue], frozenset[MessageQueue]]:
    """Return the queues that the source reads, and the queues that the strategy allocates to no partition.

    ``owned_before`` are queues that the environment of the source owned before. ``topics_without_queues`` are topics of which the
    environment may have no queue now. If ``queues`` come from option ``assign``, ``all_queues`` has all queues of their topics,
    which determine the queues of the environment. Raises ``OptionError`` for an assigned queue of another environment.
    """
    environment = environment_of(options)
    if environment is not None:
        owned = environment.owned(queues if all_queues is None else all_queues, owned_before, topics_without_queues)
        if all_queues is not None:
            owned = _assigned_of_environment(environment, queues, owned)
        unallocated = frozenset(queues) - set(owned) if options.allocation_strategy == "environment" else frozenset()
        if unallocated:
            return owned, unallocated
        queues = owned
    if allocates_every_queue(options.allocation_strategy) or not queues:
        return sorted(queues), frozenset()
    partitions = options.num_partitions or len(queues)
    allocated = {
        queue
        for of_partition in _allocate_partitions(Partitioning.of(options), queues, partitions)
        for queue in of_partition
    }
    return sorted(allocated), frozenset(queues) - allocated


def allocates_every_queue(allocation_strategy: object) -> bool:
    """Whether the strategy allocates every queue of the source's topics, or of its environment, to a partition."""
    return allocation_strategy in _COMPLETE_STRATEGIES


def _assigned_of_environment(
    environment: Environment, assigned: Sequence[MessageQueue], owned: Collection[MessageQueue]
) -> list[MessageQueue]:
    not_owned = sorted(set(assigned) - set(owned))
    if not_owned:
        raise OptionError(
            f"option 'assign' names {', '.join(map(str, not_owned))}, which environment {environment.name!r} does not own; "
            f"expected "
            f"any of {', '.join(map(str, owned)) or 'none'}"
        )
    return sorted(assigned)


def _allocate_partitions(
    partitioning: Partitioning, queues: Sequence[MessageQueue], count: int
) -> list[list[MessageQueue]]:
    """Return the queues of each partition. As in Java, the strategy allocates the queues of each topic separately."""
    if partitioning.allocation_strategy == "environment":  # this strategy gives all queues to each consumer
        return [sorted(queues)]
    consumers = [partition_id(i) for i in range(count)]
    config = _strategy_config(partitioning, consumers)
    queues_of: dict[str, list[MessageQueue]] = {consumer: [] for consumer in consumers}
    for _, of_topic in groupby(sorted(queues), key=lambda queue: queue.topic):
        for consumer, queues_of_topic in allocate_all(
            partitioning.allocation_strategy, list(of_topic), consumers, **config
        ).items():
            queues_of[consumer] += queues_of_topic
    return [queues_of[consumer] for consumer in consumers]


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
    """Return the number of partitions: enough for the backlog, at most one per queue."""
    if partitioning.num_partitions is not None:
        return partitioning.num_partitions
    rows = _rows(ranges)
    return max(1, min(len(ranges), -(-rows // partitioning.rows_per_task)))


def plan_tasks(partitioning: Partitioning, queues: Iterable[MessageQueue], ranges: Sequence[OffsetRange]) -> list[Task]:
    """Return the tasks. Each range is in exactly one task, and no task is empty."""
    ranges = [r for r in ranges if r.size > 0]
    if not ranges:
        return []
    range_of = {r.queue: r for r in ranges}
    partitions = _allocate_partitions(
        partitioning, sorted(dict.fromkeys((*queues, *range_of))), partition_count(partitioning, ranges)
    )
    planned: list[Task] = []
    unplanned: Mapping[MessageQueue, OffsetRange] = dict(range_of)
    for of_partition in partitions:
        task = [unplanned.pop(queue) for queue in dict.fromkeys(of_partition) if queue in unplanned]  # type: ignore[attr-defined]
        if task:
            planned.append(task)
    # With fewer partitions than at the start of the run, the strategy may omit queues; they get a task of their own.
    if unplanned:
        planned.append(sorted(unplanned.values()))
    return split(planned, partitioning.min_partitions, partitioning.max_records_per_partition, partitioning.max_tasks)


def split(tasks: Sequence[Task], min_tasks: int | None, max_rows: int | None, max_tasks: int = MAX_TASKS) -> list[Task]:
    """Split tasks of more than ``max_rows``, then large tasks until there are ``min_tasks``, but never into more than
    ``max_tasks``.

    The arithmetic is that of Spark's ``KafkaOffsetRangeCalculator``, with tasks instead of ranges: small tasks are not split, and
    do not count when the number of parts of large tasks is computed.
    """
    if max_rows is not None:
        max_rows = max(max_rows, -(-sum(map(_rows, tasks)) // max_tasks))
        tasks = [part for task in tasks for part in _split_task(task, -(-_rows(task) // max_rows))]
    if min_tasks is None or min_tasks <= len(tasks):
        return list(tasks)
    total = sum(_rows(task) for task in tasks)
    unsplit = [task for task in tasks if _part_count(_rows(task), total, min_tasks) == 1]
    small = {id(task) for task in unsplit}
    split_rows = total - sum(_rows(task) for task in unsplit)
    split_min_tasks = max(min_tasks - len(unsplit), 1)
    result: list[Task] = []
    for task in tasks:
        parts = 1 if id(task) in small else _part_count(_rows(task), split_rows, split_min_tasks)
        result += _split_task(task, parts)
    return result


def _part_count(rows: int, total: int, min_tasks: int) -> int:
    return max(int(rows / total * min_tasks + 0.5), 1)


def _rows(task: Sequence[OffsetRange]) -> int:
    return sum(end - start for _, start, end in task)


def _split_task(task: Task, parts: int) -> list[Task]:
    """Split a task into ``parts`` tasks of nearly equal size, in order."""
    if parts <= 1:
        return [task]
    rows = _rows(task)
    parts_by_index: dict[int, Task] = defaultdict(list)
    bounds, remaining, part_end = [], rows, 0
    for part in range(parts):
        size = remaining // (parts - part)
        remaining -= size
        part_end += size
        bounds.append(part_end)
    part, rows_before = 0, 0
    for r in task:
        start = r.start
        while start < r.end:
            while bounds[part] <= rows_before:
                part += 1
            size = min(r.end - start, bounds[part] - rows_before)
            parts_by_index[part].append(OffsetRange(r.queue, start, start + size))
            start += size
            rows_before += size
    return [parts_by_index[part] for part in sorted(parts_by_index)]
