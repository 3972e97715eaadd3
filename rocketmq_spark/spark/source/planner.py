"""What a batch reads, and in which partitions: arithmetic over positions, bounds and limits. Pure.

Queues become Spark partitions by RocketMQ's allocation strategies, whose consumers are the partitions; then partitions are
split as Spark's Kafka source does. Java leaves it to the group's members that a queue has exactly one owner. Here the plan
ensures it: a queue that is given to several partitions is read by the first, and a queue that is given to none is not read
at all.

Tasks cannot report back to a Python source, so the size of messages is estimated from samples of unread messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import Any

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.queues.allocation import allocate_all
from rocketmq_spark.queues.environment import Environment, environment_of
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions

Task = list[OffsetRange]

# What one more task must be worth: it costs 25-30 ms of latency, in which a task reads about so many messages.
ROWS_PER_TASK = 20_000
# Spark's driver holds all tasks of a batch; offsets are numbers that a broker reports.
MAX_TASKS = 10_000
# Strategies that give every queue to a consumer, whatever the queues are called.
_COMPLETE = frozenset({"averagely", "averagelyByCircle", "consistentHash", "environment"})


def partition_id(number: int) -> str:
    return f"partition-{number:05d}"


def covered(
    options: Options,
    queues: Sequence[MessageQueue],
    kept: Collection[MessageQueue] = (),
    may_lack: Container[str] = (),
    there: Sequence[MessageQueue] | None = None,
) -> tuple[list[MessageQueue], frozenset[MessageQueue]]:
    """The queues that the source reads, and those that the strategy gives to no consumer.

    ``kept`` are those that its environment had before, ``may_lack`` topics of which it may have none at the moment. Where
    ``queues`` are assigned ones, ``there`` are all of their topics, among which an environment counts. Raises
    ``OptionError`` for one of another environment.
    """
    mine = environment_of(options)
    if mine is not None:
        owned = mine.owned(queues if there is None else there, kept, may_lack)
        if there is not None:
            owned = _own(mine, queues, owned)
        left = frozenset(queues) - set(owned) if options.allocation_strategy == "environment" else frozenset()
        if left:
            return owned, left
        queues = owned
    if reads_all(options) or not queues:
        return sorted(queues), frozenset()
    count = options.num_partitions or len(queues)
    shared = {queue for share in _shares(options, queues, count) for queue in share}
    return sorted(shared), frozenset(queues) - shared


def reads_all(options: Options) -> bool:
    """Whether the strategy gives every queue of the source's topics, or of its environment, to a partition."""
    return options.allocation_strategy in _COMPLETE


def _own(mine: Environment, assigned: Sequence[MessageQueue], owned: Collection[MessageQueue]) -> list[MessageQueue]:
    others = sorted(set(assigned) - set(owned))
    if others:
        raise OptionError(
            f"option 'assign' names {', '.join(map(str, others))}, which environment {mine.name!r} does not own; expected "
            f"any of {', '.join(map(str, owned)) or 'none'}"
        )
    return sorted(assigned)


def _shares(options: Options, queues: Sequence[MessageQueue], count: int) -> list[list[MessageQueue]]:
    """What each partition is given, over all topics. Java allocates topic by topic."""
    if options.allocation_strategy == "environment":  # gives all of them to everybody
        return [sorted(queues)]
    consumers = [partition_id(i) for i in range(count)]
    config = _config(options, consumers)
    shares: dict[str, list[MessageQueue]] = {consumer: [] for consumer in consumers}
    for _, of_topic in groupby(sorted(queues), key=lambda queue: queue.topic):
        for consumer, share in allocate_all(options.allocation_strategy, list(of_topic), consumers, **config).items():
            shares[consumer] += share
    return [shares[consumer] for consumer in consumers]


def _config(options: Options, consumers: Sequence[str]) -> dict[str, Any]:
    rooms = options.partition_rooms
    config: dict[str, Any] = {
        "allocationConfig": options.allocation_config,
        "machineRooms": list(options.machine_rooms) or None,
        "partitionRooms": dict(zip(consumers, cycle(rooms), strict=False)) if rooms else None,
        "environment": options.environment,
        "environments": options.environments,
    }
    return {name: value for name, value in config.items() if value is not None}


def partition_count(options: Options, ranges: Sequence[OffsetRange]) -> int:
    """How many partitions the strategy has: as many as the backlog is worth, one per queue at most."""
    if options.num_partitions is not None:
        return options.num_partitions
    rows = _rows(ranges)
    return max(1, min(len(ranges), -(-rows // ROWS_PER_TASK)))


def tasks(options: Options, queues: Iterable[MessageQueue], ranges: Sequence[OffsetRange]) -> list[Task]:
    """The ranges as tasks, each range exactly once and none empty."""
    ranges = [r for r in ranges if r.size > 0]
    if not ranges:
        return []
    wanted = {r.queue: r for r in ranges}
    shares = _shares(options, sorted(dict.fromkeys((*queues, *wanted))), partition_count(options, ranges))
    planned: list[Task] = []
    left: Mapping[MessageQueue, OffsetRange] = dict(wanted)
    for share in shares:
        task = [left.pop(queue) for queue in dict.fromkeys(share) if queue in left]  # type: ignore[attr-defined]
        if task:
            planned.append(task)
    # A strategy may know fewer partitions now than when the queues were chosen: nothing planned is ever dropped.
    if left:
        planned.append(sorted(left.values()))
    return split(planned, options.min_partitions, options.max_records_per_partition)


def split(tasks: Sequence[Task], min_tasks: int | None, max_rows: int | None) -> list[Task]:
    """Cut tasks of more than ``max_rows``, then big ones until there are ``min_tasks``.

    The arithmetic is that of Spark's ``KafkaOffsetRangeCalculator``, with tasks in the place of its ranges: small tasks
    stay whole and do not count in the shares of the large ones.
    """
    if max_rows is not None:
        max_rows = max(max_rows, -(-sum(map(_rows, tasks)) // MAX_TASKS))
        tasks = [part for task in tasks for part in _cut(task, -(-_rows(task) // max_rows))]
    if min_tasks is None or min_tasks <= len(tasks):
        return list(tasks)
    total = sum(_rows(task) for task in tasks)
    whole = [task for task in tasks if _parts(_rows(task), total, min_tasks) == 1]
    small = {id(task) for task in whole}
    rest_rows = total - sum(_rows(task) for task in whole)
    rest_min_tasks = max(min_tasks - len(whole), 1)
    result: list[Task] = []
    for task in tasks:
        parts = 1 if id(task) in small else _parts(_rows(task), rest_rows, rest_min_tasks)
        result += _cut(task, parts)
    return result


def _parts(rows: int, total: int, min_tasks: int) -> int:
    return max(int(rows / total * min_tasks + 0.5), 1)


def _rows(task: Sequence[OffsetRange]) -> int:
    return sum(end - start for _, start, end in task)


def _cut(task: Task, parts: int) -> list[Task]:
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


# A sample says a fifth; the rest is what earlier ones said.
_LEARNING = 0.2
# What a message may have at most as brokers are delivered (maxMessageSize): taken for its size while there is no sample.
LARGEST_BYTES = 4 << 20
SAMPLED_QUEUES = 4


def next_end(begin: Offsets, ends: Positions, begins: Positions, max_offsets: int | None = None) -> Offsets:
    """Where a batch from ``begin`` ends, given the ``ends`` of queues and the ``begins`` of those that are new.

    Queues that stand still keep their position; a queue never moves back here. With ``max_offsets`` every queue gets its
    share of it in proportion to its backlog, at least one message, as in Spark's Kafka source. Gives ``begin`` itself
    when nothing is new.
    """
    positions = dict(begin.positions)
    fresh = {queue: begins[queue] for queue in ends if queue not in positions}
    positions.update(fresh)
    waiting = backlog(positions, ends)
    if not waiting and not fresh:
        return begin
    for queue, count in shares(waiting, max_offsets).items():
        positions[queue] += count
    return Offsets(positions, fresh)


def backlog(positions: Positions, ends: Positions) -> dict[MessageQueue, int]:
    """Offsets to read by queue, without the queues that have none."""
    return {q: end - at for q, end in ends.items() if (at := positions.get(q)) is not None and end > at}


def above_minimum(begin: Offsets, bounds: Bounds) -> Offsets:
    """``begin`` where messages still are: what retention deleted takes no share of a batch, however much it was."""
    low = {q: bounds[q].min_offset for q, p in begin.positions.items() if q in bounds and p < bounds[q].min_offset}
    return replace(begin, positions={**begin.positions, **low}, start={}) if low else begin


def shares(waiting: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """How much of its backlog each queue may read. Queues with little are not starved by those with much."""
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        return dict(waiting)
    return {queue: min(count, max(1, max_offsets * count // total)) for queue, count in sorted(waiting.items())}


def first_batch(initial: Offsets, end: Offsets) -> Offsets:
    """The end of the very first batch, which carries where that batch began."""
    return replace(end, start={**initial.positions, **end.start})


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """What lies between two offsets, sorted by queue, without empty ranges.

    A beginning that the end carries wins: see ``offsets``. A queue that ``end`` no longer names is not read.
    """
    between = []
    for queue in sorted(end.positions):
        begin, until = end.start.get(queue, start.positions.get(queue)), end.positions[queue]
        if begin is not None and until > begin:
            between.append(OffsetRange(queue, begin, until))
    return between


def went_back(positions: Positions, bounds: Bounds) -> list[OffsetRange]:
    """What lies between the end of a queue and the later position to go on from."""
    return [
        OffsetRange(queue, bounds[queue].max_offset, position)
        for queue, position in sorted((q, p) for q, p in positions.items() if q in bounds and bounds[q].max_offset < p)
    ]


def truncated(planned: Iterable[OffsetRange], bounds: Bounds) -> list[OffsetRange]:
    """The parts of ranges that lie before the minimum: deleted by retention."""
    return [
        OffsetRange(r.queue, r.start, min(r.end, bounds[r.queue].min_offset))
        for r in planned
        if (there := bounds.get(r.queue)) is not None and r.start < there.min_offset
    ]


def without(planned: Iterable[OffsetRange], lost: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The ranges after what was lost at their beginnings."""
    begins = {part.queue: part.end for part in lost}
    if not begins:
        return [r for r in planned if r.end > r.start]
    cut = [OffsetRange(r.queue, max(r.start, begins.get(r.queue, r.start)), r.end) for r in planned]
    return [r for r in cut if r.size > 0]


def marks(positions: Positions, before: Offsets, bounds: Bounds) -> dict[MessageQueue, int]:
    """The newest store time seen of every queue that was read at all; see ``offsets``.

    A mark that was known ``before`` serves on while nothing was read behind it that is still there. Messages that were
    may be younger: where the age is unknown, a mark would take them for another topic's. At the end of a queue the
    last message that was read is its newest one, also when a clock was put back.
    """
    marked = {}
    for queue, position in positions.items():
        known = before.marks.get(queue, 0)
        if (there := bounds.get(queue)) is not None:
            first, end, newest = there
            stays = position < end if newest > 0 else position in (before.positions.get(queue), first)
            known = max(newest, known if stays else 0)
        if position > 0 and known > 0:
            marked[queue] = known
    return marked


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """Limits of one batch; None means none."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None


class Admission:
    """State between batches: when the last one was admitted, and how large messages are."""

    def __init__(self, max_delay_s: float, now: float) -> None:
        self._max_delay_s = max_delay_s
        self._admitted_at = now
        self._message_bytes: float | None = None

    def max_offsets(
        self,
        waiting: Mapping[MessageQueue, int],
        wanted: TriggerLimits,
        sample: Callable[[MessageQueue], tuple[int, int]],
        now: float,
    ) -> int | None:
        """The most offsets of this batch, None without a limit, 0 to wait for more.

        ``sample`` gives bytes of some messages that wait in a queue, and how many offsets they take.
        """
        total = sum(waiting.values())
        if not total:
            return wanted.max_offsets
        if (
            wanted.min_offsets is not None
            and total < wanted.min_offsets
            and now - self._admitted_at < self._max_delay_s
        ):
            return 0
        self._admitted_at = now
        if wanted.max_bytes is None:
            return wanted.max_offsets
        self._learn(waiting, sample)
        fitting = max(1, int(wanted.max_bytes / (self._message_bytes or LARGEST_BYTES)))
        return fitting if wanted.max_offsets is None else min(wanted.max_offsets, fitting)

    @property
    def guesses(self) -> bool:
        """Whether there was no sample yet by which bytes could be made offsets."""
        return not self._message_bytes

    def _learn(self, waiting: Mapping[MessageQueue, int], sample: Callable[[MessageQueue], tuple[int, int]]) -> None:
        largest = sorted(waiting, key=lambda queue: -waiting[queue])[:SAMPLED_QUEUES]
        samples = [sample(queue) for queue in largest]
        messages = sum(count for _, count in samples)
        if not messages:
            return
        mean = sum(size for size, _ in samples) / messages
        known = self._message_bytes
        self._message_bytes = mean if known is None else known + _LEARNING * (mean - known)
