"""Starting offsets of a source, and ending ones: ``earliest``, ``latest``, committed offsets, JSON, and times in three forms.

Asks brokers, decides by pure functions. A question that fails is an error, never a rewind: RocketMQ's own clients
turned some failures into "start at the end".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import EARLIEST, LATEST
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source.offsets import Bounds, Positions


def check(options: Options, role: str) -> None:
    """What can be said without a broker."""
    problems = []
    batch = role == "batch source"
    starting = options.starting_offsets
    if batch and starting == "latest":
        problems.append("option 'startingOffsets' is 'latest'; a batch that starts at the end reads nothing")
    if batch and isinstance(starting, dict):
        problems += [
            f"option 'startingOffsets': {queue} is -1; a batch that starts at the end reads nothing"
            for queue, number in starting.items()
            if number == LATEST
        ]
    if isinstance(options.ending_offsets, dict):
        problems += [
            f"option 'endingOffsets': {queue} is -2; a batch that ends at the beginning reads nothing"
            for queue, number in options.ending_offsets.items()
            if number == EARLIEST
        ]
    if starting == "committed" and "group" not in options.given:
        problems.append("option 'startingOffsets' is 'committed'; give the group with option 'group'")
    if problems:
        raise OptionError.of(problems)


def start(offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
    """Starting offsets. A time beats times by queue, which beat offsets, as in Spark's Kafka source."""
    if options.starting_timestamp is not None:
        times = dict.fromkeys(bounds, options.starting_timestamp)
        return _started_at(offsets, options, bounds, times, "startingTimestamp", deadline)
    if options.starting_offsets_by_timestamp is not None:
        times = options.starting_offsets_by_timestamp
        same_queues(times, bounds, "startingOffsetsByTimestamp")
        return _started_at(offsets, options, bounds, times, "startingOffsetsByTimestamp", deadline)
    if options.starting_offsets == "committed":
        return _committed(offsets, options, bounds, deadline)
    return resolve(options.starting_offsets, bounds, "startingOffsets")


def end(offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
    """Ending offsets, each one past the last message to be read."""
    if options.ending_timestamp is not None:
        times = dict.fromkeys(bounds, options.ending_timestamp)
        return at(offsets, options.group, bounds, times, deadline)
    if options.ending_offsets_by_timestamp is not None:
        times = options.ending_offsets_by_timestamp
        same_queues(times, bounds, "endingOffsetsByTimestamp")
        return at(offsets, options.group, bounds, times, deadline)
    return resolve(options.ending_offsets, bounds, "endingOffsets")


def at(
    offsets: OffsetReader, group: str, bounds: Bounds, times: Mapping[MessageQueue, int], deadline: Deadline
) -> dict[MessageQueue, int]:
    """First offset stored at or after each time, within bounds: a broker may answer below its minimum."""
    answered = offsets.search_offsets({queue: times[queue] for queue in bounds}, deadline, group=group)
    return {q: bounds[q].clamp(o) for q, o in answered.items()}


def _started_at(
    offsets: OffsetReader,
    options: Options,
    bounds: Bounds,
    times: Mapping[MessageQueue, int],
    option: str,
    deadline: Deadline,
) -> dict[MessageQueue, int]:
    starts = at(offsets, options.group, bounds, times, deadline)
    none_that_young = sorted(queue for queue, offset in starts.items() if offset >= bounds[queue].max_offset)
    if none_that_young and options.starting_offsets_by_timestamp_strategy == "error":
        raise OffsetError(
            f"option {option!r}: {listed(none_that_young)} {'has' if len(none_that_young) == 1 else 'have'} no message "
            "stored at or after the time",
            remedy="Give an earlier time, or set 'startingOffsetsByTimestampStrategy' to 'latest' to start at the end",
        )
    return starts


def _committed(offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline) -> dict[MessageQueue, int]:
    committed = offsets.committed(options.group, sorted(bounds), deadline)
    missing = sorted(queue for queue, offset in committed.items() if offset is None)
    if missing and options.committed_fallback == "error":
        raise OffsetError(
            f"option 'startingOffsets' is 'committed', but group {options.group!r} has no offset of {listed(missing)}",
            remedy="Set option 'committedFallback' to 'earliest' or 'latest'",
        )
    fallback = resolve(options.committed_fallback, bounds, "committedFallback") if missing else {}
    return {queue: fallback[queue] if offset is None else offset for queue, offset in committed.items()}


def resolve(wanted: str | Positions, bounds: Bounds, option: str) -> dict[MessageQueue, int]:
    """Offsets for ``earliest``, ``latest`` or JSON offsets (−2 earliest, −1 latest) within ``bounds``.

    JSON must name every queue and no other. A number below the minimum stays as it is: what is missing then is data
    loss, and reported as that.
    """
    if isinstance(wanted, str):
        lowest = wanted == "earliest"
        return {queue: b.min_offset if lowest else b.max_offset for queue, b in bounds.items()}
    same_queues(wanted, bounds, option)
    resolved = {}
    for queue, number in wanted.items():
        if number > bounds[queue].max_offset:
            raise OffsetError(
                f"option {option!r}: {queue} is {number}, but the queue ends at {bounds[queue].max_offset}",
                topic=queue.topic,
                remedy="Give an offset up to the end, or -1 for the end",
            )
        marks = {EARLIEST: bounds[queue].min_offset, LATEST: bounds[queue].max_offset}
        resolved[queue] = marks.get(number, number)
    return resolved


def same_queues(wanted: Iterable[MessageQueue], bounds: Bounds, option: str) -> None:
    """Raise ``OffsetError`` unless exactly the queues that are read are named."""
    named = set(wanted)
    if missing := bounds.keys() - named:
        raise OffsetError(f"option {option!r} must name every queue; it lacks {listed(missing)}")
    if unknown := named - bounds.keys():
        raise OffsetError(f"option {option!r} names queues that are not read: {listed(unknown)}")


def listed(queues: Iterable[MessageQueue]) -> str:
    """The first ten queues as text."""
    names = [str(queue) for queue in sorted(queues)]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
