"""The tasks of a batch: which partition reads which part of each queue. Pure.

Queues become Spark partitions by RocketMQ's allocation strategies, whose consumers are the partitions; then partitions are
split as Spark's Kafka source does. Java leaves it to the group's members that a queue has exactly one owner. Here the plan
ensures it: a queue that is given to several partitions is read by the first, and a queue that is given to none is not read
at all.

The tasks of a repeated batch must be those of its first attempt, because ids of exactly-once contain the number of the task.
They depend on the logged ranges of the batch and on a ``Partitioning``, which the end offset of the batch carries.
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
from rocketmq_spark.queues.allocation import allocate_all
from rocketmq_spark.queues.environment import Environment, environment_of

Task = list[OffsetRange]

# What one more task must be worth: it costs 25-30 ms of latency, in which a task reads about so many messages.
ROWS_PER_TASK = 20_000
# Spark's driver holds all tasks of a batch; offsets are numbers that a broker reports.
MAX_TASKS = 10_000
# Strategies that give every queue to a consumer, whatever the queues are called.
_COMPLETE_STRATEGIES = frozenset({"averagely", "averagelyByCircle", "consistentHash", "environment"})


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Everything besides the ranges of a batch that decides its tasks: options, and the constants of this release."""

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
        """The form in an end offset: each value that is set, also if it is a default, which another release may change."""
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
    """Return the partitioning that the end offset of a batch carries as ``plan``, and the names of values that do not fit.

    A value does not fit if it is missing, or unknown to this release, because another release planned the batch. Missing values
    are those of ``now``, the present options. Raises ``OffsetError`` for a value that cannot be used.
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
    kept: Collection[MessageQueue] = (),
    may_lack: Container[str] = (),
    there: Sequence[MessageQueue] | None = None,
) -> tuple[list[MessageQueue], frozenset[MessageQueue]]:
    """Return the queues that the source reads, and the queues that the strategy gives to no partition.

    ``kept`` are queues that the source's environment had before. ``may_lack`` are topics of which the environment may have no
    queue at the moment. If ``queues`` are those of option ``assign``, ``there`` are all queues of their topics, from which an
    environment takes its share. Raises ``OptionError`` for an assigned queue of another environment.
    """
    mine = environment_of(options)
    if mine is not None:
        owned = mine.owned(queues if there is None else there, kept, may_lack)
        if there is not None:
            owned = _assigned_of_environment(mine, queues, owned)
        left = frozenset(queues) - set(owned) if options.allocation_strategy == "environment" else frozenset()
        if left:
            return owned, left
        queues = owned
    if allocates_every_queue(options.allocation_strategy) or not queues:
        return sorted(queues), frozenset()
    count = options.num_partitions or len(queues)
    shared = {queue for share in _allocate_partitions(Partitioning.of(options), queues, count) for queue in share}
    return sorted(shared), frozenset(queues) - shared


def allocates_every_queue(allocation_strategy: object) -> bool:
    """Whether the strategy gives every queue of the source's topics, or of its environment, to a partition."""
    return allocation_strategy in _COMPLETE_STRATEGIES


def _assigned_of_environment(
    mine: Environment, assigned: Sequence[MessageQueue], owned: Collection[MessageQueue]
) -> list[MessageQueue]:
    others = sorted(set(assigned) - set(owned))
    if others:
        raise OptionError(
            f"option 'assign' names {', '.join(map(str, others))}, which environment {mine.name!r} does not own; expected "
            f"any of {', '.join(map(str, owned)) or 'none'}"
        )
    return sorted(assigned)


def _allocate_partitions(rules: Partitioning, queues: Sequence[MessageQueue], count: int) -> list[list[MessageQueue]]:
    """The queues of each partition, over all topics. As in Java, the strategy allocates topic by topic."""
    if rules.allocation_strategy == "environment":  # this strategy gives all queues to each consumer
        return [sorted(queues)]
    consumers = [partition_id(i) for i in range(count)]
    config = _strategy_config(rules, consumers)
    shares: dict[str, list[MessageQueue]] = {consumer: [] for consumer in consumers}
    for _, of_topic in groupby(sorted(queues), key=lambda queue: queue.topic):
        for consumer, share in allocate_all(rules.allocation_strategy, list(of_topic), consumers, **config).items():
            shares[consumer] += share
    return [shares[consumer] for consumer in consumers]


def _strategy_config(rules: Partitioning, consumers: Sequence[str]) -> dict[str, Any]:
    rooms = rules.partition_rooms
    config: dict[str, Any] = {
        "allocationConfig": rules.allocation_config,
        "machineRooms": list(rules.machine_rooms) or None,
        "partitionRooms": dict(zip(consumers, cycle(rooms), strict=False)) if rooms else None,
        "environment": rules.environment,
        "environments": rules.environments,
    }
    return {name: value for name, value in config.items() if value is not None}


def partition_count(rules: Partitioning, ranges: Sequence[OffsetRange]) -> int:
    """How many partitions the strategy has: as many as the backlog is worth, one per queue at most."""
    if rules.num_partitions is not None:
        return rules.num_partitions
    rows = _rows(ranges)
    return max(1, min(len(ranges), -(-rows // rules.rows_per_task)))


def plan_tasks(rules: Partitioning, queues: Iterable[MessageQueue], ranges: Sequence[OffsetRange]) -> list[Task]:
    """The ranges as tasks, each range exactly once and none empty."""
    ranges = [r for r in ranges if r.size > 0]
    if not ranges:
        return []
    wanted = {r.queue: r for r in ranges}
    shares = _allocate_partitions(rules, sorted(dict.fromkeys((*queues, *wanted))), partition_count(rules, ranges))
    planned: list[Task] = []
    left: Mapping[MessageQueue, OffsetRange] = dict(wanted)
    for share in shares:
        task = [left.pop(queue) for queue in dict.fromkeys(share) if queue in left]  # type: ignore[attr-defined]
        if task:
            planned.append(task)
    # A strategy may know fewer partitions now than when the queues were chosen: nothing planned is ever dropped.
    if left:
        planned.append(sorted(left.values()))
    return split(planned, rules.min_partitions, rules.max_records_per_partition, rules.max_tasks)


def split(tasks: Sequence[Task], min_tasks: int | None, max_rows: int | None, max_tasks: int = MAX_TASKS) -> list[Task]:
    """Cut tasks of more than ``max_rows``, then big ones until there are ``min_tasks``; ``max_tasks`` beats ``max_rows``.

    The arithmetic is that of Spark's ``KafkaOffsetRangeCalculator``, with tasks in the place of its ranges: small tasks
    stay whole and do not count in the shares of the large ones.
    """
    if max_rows is not None:
        max_rows = max(max_rows, -(-sum(map(_rows, tasks)) // max_tasks))
        tasks = [part for task in tasks for part in _split_task(task, -(-_rows(task) // max_rows))]
    if min_tasks is None or min_tasks <= len(tasks):
        return list(tasks)
    total = sum(_rows(task) for task in tasks)
    whole = [task for task in tasks if _part_count(_rows(task), total, min_tasks) == 1]
    small = {id(task) for task in whole}
    rest_rows = total - sum(_rows(task) for task in whole)
    rest_min_tasks = max(min_tasks - len(whole), 1)
    result: list[Task] = []
    for task in tasks:
        parts = 1 if id(task) in small else _part_count(_rows(task), rest_rows, rest_min_tasks)
        result += _split_task(task, parts)
    return result


def _part_count(rows: int, total: int, min_tasks: int) -> int:
    return max(int(rows / total * min_tasks + 0.5), 1)


def _rows(task: Sequence[OffsetRange]) -> int:
    return sum(end - start for _, start, end in task)


def _split_task(task: Task, parts: int) -> list[Task]:
    """``parts`` tasks of nearly equal size, in order; the last takes what rounding leaves."""
    if parts <= 1:
        return [task]
    rows = _rows(task)
    pieces: dict[int, Task] = defaultdict(list)
    bounds, remaining, at = [], rows, 0
    for part in range(parts):
        size = remaining // (parts - part)
        remaining -= size
        at += size
        bounds.append(at)
    part, seen = 0, 0
    for r in task:
        start = r.start
        while start < r.end:
            while bounds[part] <= seen:
                part += 1
            size = min(r.end - start, bounds[part] - seen)
            pieces[part].append(OffsetRange(r.queue, start, start + size))
            start += size
            seen += size
    return [pieces[part] for part in sorted(pieces)]
