"""Resolves the options that say where a source starts and ends. The values of these options are words, JSON offsets or times; a
source can also start at committed offsets.

A failed request is an error, and never changes the start. In contrast, RocketMQ's own clients start at the end of a queue after
some failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rocketmq_spark.base.clock import Deadline, utc_text
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import EARLIEST, LATEST
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source.offsets import Bounds, Positions, queues_text


def check_start_and_end(options: Options, role: str) -> None:
    """Check the starting and ending options without a broker. Raises ``OptionError`` with all problems."""
    problems = []
    is_batch = role == "batch source"
    starting_value = options.starting_offsets
    if is_batch and starting_value == "latest":
        problems.append("option 'startingOffsets' is 'latest'; a batch that starts at the end reads nothing")
    if is_batch and isinstance(starting_value, dict):
        problems += [
            f"option 'startingOffsets': {name} is {'latest' if isinstance(name, str) else LATEST}; a batch that starts at the "
            "end reads nothing"
            for name, number in starting_value.items()
            if number == LATEST
        ]
    if isinstance(options.ending_offsets, dict):
        problems += [
            f"option 'endingOffsets': {queue} is {EARLIEST}; a batch that ends at the beginning reads nothing"
            for queue, number in options.ending_offsets.items()
            if number == EARLIEST
        ]
    if starting_value == "committed" and "group" not in options.given_fields:
        problems.append("option 'startingOffsets' is 'committed'; give the group with option 'group'")
    problems += _time_order_problems(options)
    if problems:
        raise OptionError.of(problems)


def starting_option(options: Options) -> str:
    """Return the name of the option that decides where the source starts. As in Spark's Kafka source, one time for all queues
    overrides times by queue, and both override offsets.
    """
    if options.starting_timestamp is not None:
        return "startingTimestamp"
    return "startingOffsets" if options.starting_offsets_by_timestamp is None else "startingOffsetsByTimestamp"


def ending_option(options: Options) -> str:
    """Return the name of the option that decides where a batch read ends."""
    if options.ending_timestamp is not None:
        return "endingTimestamp"
    return "endingOffsets" if options.ending_offsets_by_timestamp is None else "endingOffsetsByTimestamp"


def _time_order_problems(options: Options) -> list[str]:
    """Return the problem if a starting time is after the ending time, either for all queues or for one queue."""
    times_of_all_queues = options.starting_timestamp, options.ending_timestamp
    times_by_queue = options.starting_offsets_by_timestamp or {}, options.ending_offsets_by_timestamp or {}
    for queue in [None] if None not in times_of_all_queues else sorted({*times_by_queue[0], *times_by_queue[1]}):
        start, end = (
            time_of_all_queues if time_of_all_queues is not None or queue is None else times.get(queue)
            for time_of_all_queues, times in zip(times_of_all_queues, times_by_queue, strict=True)
        )
        if start is not None and end is not None and start > end:
            return [
                f"option {starting_option(options)!r} is {f'{queue}: ' if queue else ''}{utc_text(start)}, but option "
                f"{ending_option(options)!r} ends before that, at {utc_text(end)}; expected a start that is not after the end"
            ]
    return []


def starting_offsets(
    offset_reader: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    """Return the starting offset of each queue."""
    option = starting_option(options)
    times = _times_by_queue(options.starting_timestamp, options.starting_offsets_by_timestamp, bounds, option)
    if times is not None:
        return _starts_at_times(offset_reader, options, bounds, times, option, deadline)
    if options.starting_offsets == "committed":
        return _starts_at_committed_offsets(offset_reader, options, bounds, deadline)
    return resolve_offsets(options.starting_offsets, bounds, option)


def ending_offsets(
    offset_reader: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    """Return the ending offset of each queue: one more than the offset of the last message to read."""
    option = ending_option(options)
    times = _times_by_queue(options.ending_timestamp, options.ending_offsets_by_timestamp, bounds, option)
    if times is not None:
        return _offsets_at_times(offset_reader, options.group, bounds, times, deadline)
    return resolve_offsets(options.ending_offsets, bounds, option)


def check_start_before_end(options: Options, starts: Positions, ends: Positions, bounds: Bounds) -> None:
    """Raise ``OffsetError`` for queues that would end before they start.

    If the starting offset comes from a group, and the group has already read past the ending time of the batch, the queue has
    no messages left to read. This is no error.
    """
    start_option, end_option = starting_option(options), ending_option(options)
    if (start_option, options.starting_offsets) == ("startingOffsets", "committed") and end_option != "endingOffsets":
        ends = {queue: queue_bounds.max_offset for queue, queue_bounds in bounds.items()}
    if backward_queues := sorted(queue for queue, start in starts.items() if start > ends[queue]):
        first_queue = backward_queues[0]
        raise OffsetError(
            f"the start is after the end in {queues_text(backward_queues)}: {first_queue} starts at offset {starts[first_queue]} "
            f"(option {start_option!r}) and ends at {ends[first_queue]} (option {end_option!r})",
            topic=first_queue.topic,
            remedy="Give an earlier start, or a later end",
        )


def _times_by_queue(
    time_of_all_queues: int | None, times_by_queue: Mapping[MessageQueue, int] | None, bounds: Bounds, option: str
) -> Mapping[MessageQueue, int] | None:
    """Return the time of each queue; None if the options have no time."""
    if time_of_all_queues is not None:
        return dict.fromkeys(bounds, time_of_all_queues)
    if times_by_queue is not None:
        check_same_queues(times_by_queue, bounds, option)
    return times_by_queue


def _offsets_at_times(
    offset_reader: OffsetReader, group: str, bounds: Bounds, times: Mapping[MessageQueue, int], deadline: Deadline
) -> dict[MessageQueue, int]:
    """Return the offset of the first message that was stored at or after the time of each queue. The offsets are limited to the
    bounds, because a broker may answer with an offset below its minimum offset.
    """
    found_offsets = offset_reader.search_offsets({queue: times[queue] for queue in bounds}, deadline, group=group)
    return {queue: bounds[queue].clamp(offset) for queue, offset in found_offsets.items()}


def _starts_at_times(
    offset_reader: OffsetReader,
    options: Options,
    bounds: Bounds,
    times: Mapping[MessageQueue, int],
    option: str,
    deadline: Deadline,
) -> dict[MessageQueue, int]:
    starts = _offsets_at_times(offset_reader, options.group, bounds, times, deadline)
    # An empty queue has no message that is older than the time, so it is no error that this queue starts at its end.
    queues_before_time = sorted(
        q for q, offset in starts.items() if bounds[q].min_offset < bounds[q].max_offset <= offset
    )
    if queues_before_time and options.starting_offsets_by_timestamp_strategy == "error":
        raise OffsetError(
            f"option {option!r}: {queues_text(queues_before_time)} "
            f"{'has' if len(queues_before_time) == 1 else 'have'} no message stored at or after the time",
            remedy="Give an earlier time, or set 'startingOffsetsByTimestampStrategy' to 'latest' to start at the end",
        )
    return starts


def _starts_at_committed_offsets(
    offset_reader: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    committed_offsets = offset_reader.committed(options.group, sorted(bounds), deadline)
    queues_without_offset = sorted(queue for queue, offset in committed_offsets.items() if offset is None)
    if queues_without_offset and options.committed_fallback == "error":
        raise OffsetError(
            f"option 'startingOffsets' is 'committed', but group {options.group!r} has no offset of "
            f"{queues_text(queues_without_offset)}",
            remedy="Set option 'committedFallback' to 'earliest' or 'latest'",
        )
    fallback_offsets = (
        resolve_offsets(options.committed_fallback, bounds, "committedFallback") if queues_without_offset else {}
    )
    return {queue: fallback_offsets[queue] if offset is None else offset for queue, offset in committed_offsets.items()}


def resolve_offsets(
    option_value: str | Mapping[MessageQueue | str, int], bounds: Bounds, option: str
) -> dict[MessageQueue, int]:
    """Return the offsets for ``earliest``, ``latest`` or JSON offsets (−2 earliest, −1 latest) within ``bounds``.

    JSON must name every queue or its topic, and no other queues or topics. A number below the minimum offset is returned
    unchanged, so that the missing messages are reported as data loss.
    """
    if isinstance(option_value, str):
        is_earliest = option_value == "earliest"
        return {queue: b.min_offset if is_earliest else b.max_offset for queue, b in bounds.items()}
    number_by_queue = _number_by_queue(option_value, bounds, option)
    check_same_queues(number_by_queue, bounds, option)
    resolved_offsets = {}
    for queue, number in number_by_queue.items():
        if number > bounds[queue].max_offset:
            raise OffsetError(
                f"option {option!r}: {queue} is {number}, but the queue ends at {bounds[queue].max_offset}",
                topic=queue.topic,
                remedy="Give an offset up to the end, or -1 for the end",
            )
        sentinels = {EARLIEST: bounds[queue].min_offset, LATEST: bounds[queue].max_offset}
        resolved_offsets[queue] = sentinels.get(number, number)
    return resolved_offsets


def _number_by_queue(
    option_value: Mapping[MessageQueue | str, int], bounds: Bounds, option: str
) -> dict[MessageQueue, int]:
    """Return the number of each queue. A number that the option gives for a topic applies to all queues of the topic."""
    number_by_topic = {topic: number for topic, number in option_value.items() if isinstance(topic, str)}
    if unknown_topics := sorted(number_by_topic.keys() - {queue.topic for queue in bounds}):
        raise OffsetError(f"option {option!r} names topics that are not read: {', '.join(unknown_topics)}")
    number_by_queue = {queue: number_by_topic[queue.topic] for queue in bounds if queue.topic in number_by_topic}
    return number_by_queue | {queue: number for queue, number in option_value.items() if not isinstance(queue, str)}


_REMEDY_OF_MISSING_QUEUES = {
    "startingOffsets": "Add them, with -2 for the first message that is kept, or -1 for the end; or name their topics with "
    "'earliest' or 'latest'",
    "endingOffsets": "Add them, with -1 for the end; or name their topics with 'latest'",
}


def check_same_queues(queues: Iterable[MessageQueue], bounds: Bounds, option: str) -> None:
    """Raise ``OffsetError`` unless ``queues`` has exactly the queues that the source reads."""
    named_queues = set(queues)
    if missing_queues := bounds.keys() - named_queues:
        raise OffsetError(
            f"option {option!r} must name every queue; it lacks {queues_text(missing_queues)}",
            remedy=_REMEDY_OF_MISSING_QUEUES.get(option, "Add them, each with a time"),
        )
    if unknown_queues := named_queues - bounds.keys():
        raise OffsetError(f"option {option!r} names queues that are not read: {queues_text(unknown_queues)}")
