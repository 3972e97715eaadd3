"""Offsets in Spark's offset log, and the starting and ending offsets of a source.

An entry is ``{"topics":{"t":{"broker-a":{"0":12}}},"v":1}``: for each queue, the offset after the last message read. Keys are
sorted, because Spark compares entries as texts. Further keys hold what else a restart needs:

* ``start``: the start offsets of queues that the previous entry does not name, or whose topic was created again. Spark does not
  log the starts of batch 0: without them, a restart before the first commit would resolve "latest" again and skip messages.
* ``marks``: the store time (epoch ms) of the newest message of each queue. They show that a topic was deleted and created again
  even if it has grown past the old position.
* ``plan``: the values that, with the ranges, determine the tasks of the batch that ends here (``partitioning``). A repeated batch
  has the same tasks, whatever the options are now. Entries of earlier releases have no ``plan``.
* ``partitions``: with ``kafkaColumns``, the numbers of queues as Kafka's partitions (``kafka_partitions``).
* ``environment``: the queues of a topic that an environment owns by its number, with the number. Without them, a broker that is
  away would shift the environment onto queues of another one.
* ``reads``: what the source reads: clusters, namespace, environment and filter, by which the source recognises the checkpoint of
  another query; ``subscribe`` or ``assign``, by which it tells a topic that was deleted, and has no positions any more, from a
  misspelt one; and the group whose offsets follow the query. For commands it also has the pattern of topics, and ``newQueues``,
  which is false if queues that are created later stay unread. Entries of earlier releases may lack ``namespace`` or ``clusters``,
  and then fit any, and they lack ``subscribe`` and ``assign``; the earliest releases call this key ``filter``.

A source starts and ends at ``earliest``, ``latest``, committed offsets, JSON, or times in three forms. This module asks brokers
for the offsets, and decides by pure functions. A request that fails is an error, never a rewind: RocketMQ's own clients turned
some failures into "start at the end".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from rocketmq_spark.base.clock import Deadline, utc_text
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import EARLIEST, LATEST, QUEUE_ID, json_document
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.source import kafka_partitions

VERSION = 1

Positions = Mapping[MessageQueue, int]
Bounds = Mapping[MessageQueue, QueueBounds]


@dataclass(frozen=True, slots=True)
class Offsets:
    """Positions by queue, and what goes with them."""

    positions: Positions
    start: Positions = field(default_factory=dict)
    marks: Positions = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[MessageQueue, int] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    partitions: kafka_partitions.QueueRuns = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What a reader hands to Spark; key order is canonical."""
        log_entry: dict[str, Any] = {}
        if self.environment:
            log_entry["environment"] = _to_nested_json(self.environment)
        if self.marks:
            log_entry["marks"] = _to_nested_json(self.marks)
        if self.partitions:
            log_entry["partitions"] = {topic: list(map(list, runs)) for topic, runs in self.partitions.items()}
        if self.plan:
            log_entry["plan"] = dict(self.plan)
        if self.reads:
            log_entry["reads"] = json.loads(json.dumps(self.reads, sort_keys=True))
        if self.start:
            log_entry["start"] = _to_nested_json(self.start)
        log_entry["topics"] = _to_nested_json(self.positions)
        log_entry["v"] = VERSION
        return log_entry

    @classmethod
    def from_json(cls, logged: object) -> Offsets:
        """From Spark's log, or from a person's text. Raises ``OffsetError`` saying what is wrong and where."""
        if isinstance(logged, str):
            try:
                logged = json_document(logged)
            except ValueError as e:
                raise OffsetError(f"an offset must be JSON: {e}", remedy=_REMEDY) from e
        if not isinstance(logged, Mapping) or not isinstance(logged.get("topics"), Mapping):
            raise OffsetError('an offset must be a JSON object with "topics"', remedy=_REMEDY)
        version = logged.get("v", VERSION)
        if type(version) is not int or not 1 <= version <= VERSION:
            newer = type(version) is int and version > VERSION
            raise OffsetError(
                f"the offset has version {version!r}; this package reads version {VERSION}",
                remedy="The checkpoint was written by a newer rocketmq-spark: upgrade this one" if newer else _REMEDY,
            )
        return cls(
            _from_nested_json(logged["topics"]),
            _from_nested_json(logged.get("start") or {}),
            _from_nested_json(logged.get("marks") or {}),
            dict(_json_items(logged.get("reads", logged.get("filter")) or {}, "reads")),
            _from_nested_json(logged.get("environment") or {}),
            dict(_json_items(logged.get("plan") or {}, "plan")),
            _partitions_from_json(logged.get("partitions", {})),
        )


class OffsetLogCache:
    """Offsets of a run as they go to Spark's log and come back. An idle query hands the same over many times a second, and a
    batch begins where the last one ended: the last two are not read again. Who gets an entry does not change it.
    """

    def __init__(self) -> None:
        self._recent: tuple[tuple[dict[str, Any], Offsets], ...] = ()

    def to_log(self, end: Offsets) -> dict[str, Any]:
        log_entry = end.to_json()
        self._remember(log_entry, replace(end, reads=log_entry.get("reads", {})))
        return log_entry

    def from_log(self, log_entry: dict[str, Any]) -> Offsets:
        for entry, offsets in self._recent:
            if entry == log_entry:
                return self._remember(entry, offsets)
        return self._remember(log_entry, Offsets.from_json(log_entry))

    def _remember(self, log_entry: dict[str, Any], offsets: Offsets) -> Offsets:
        self._recent = ((log_entry, offsets), *(one for one in self._recent if one[0] is not log_entry))[:2]
        return offsets


_REMEDY_OF_PARTITIONS = (
    'Expected {"orders":[["broker-a",0,4],["broker-b",0,4]]}: broker, first queue id, number of queues. Restore the file, or '
    'delete the key "partitions": queues are then numbered again, perhaps differently'
)
_REMEDY = 'It looks like {"topics":{"orders":{"broker-a":{"0":12,"1":9}}},"v":1}'


def _to_nested_json(positions: Positions) -> dict[str, dict[str, dict[str, int]]]:
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (topic, broker_name), queues in groupby(sorted(positions), key=itemgetter(0, 1)):
        nested.setdefault(topic, {})[broker_name] = {str(queue.queue_id): positions[queue] for queue in queues}
    return nested


def _from_nested_json(topics: object) -> dict[MessageQueue, int]:
    positions = {}
    for topic, brokers in _json_items(topics, "topics"):
        for broker, queues in _json_items(brokers, topic):
            for queue_id, offset in _json_items(queues, f"{topic}/{broker}"):
                if (
                    not QUEUE_ID.fullmatch(queue_id)
                    or not isinstance(offset, int)
                    or isinstance(offset, bool)
                    or offset < 0
                ):
                    raise OffsetError(f"{topic}/{broker}/{queue_id}: {offset!r} is not an offset", remedy=_REMEDY)
                positions[MessageQueue(topic, broker, int(queue_id))] = offset
    return positions


def _partitions_from_json(logged: object) -> kafka_partitions.QueueRuns:
    try:
        return kafka_partitions.runs_of_log(logged)
    except ValueError as e:
        raise OffsetError(f'"partitions" of an offset: {e}', remedy=_REMEDY_OF_PARTITIONS) from e


def _json_items(value: object, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise OffsetError(f"{where}: {value!r} is not a JSON object", remedy=_REMEDY)
    return [(str(name), item) for name, item in value.items()]


def check_start_and_end(options: Options, role: str) -> None:
    """What can be said without a broker."""
    problems = []
    batch = role == "batch source"
    starting = options.starting_offsets
    if batch and starting == "latest":
        problems.append("option 'startingOffsets' is 'latest'; a batch that starts at the end reads nothing")
    if batch and isinstance(starting, dict):
        problems += [
            f"option 'startingOffsets': {of} is {'latest' if isinstance(of, str) else LATEST}; a batch that starts at the end "
            "reads nothing"
            for of, number in starting.items()
            if number == LATEST
        ]
    if isinstance(options.ending_offsets, dict):
        problems += [
            f"option 'endingOffsets': {queue} is {EARLIEST}; a batch that ends at the beginning reads nothing"
            for queue, number in options.ending_offsets.items()
            if number == EARLIEST
        ]
    if starting == "committed" and "group" not in options.given:
        problems.append("option 'startingOffsets' is 'committed'; give the group with option 'group'")
    problems += _times_in_wrong_order(options)
    if problems:
        raise OptionError.of(problems)


def starting_option(options: Options) -> str:
    """The option that decides where the source starts, as in Spark's Kafka source: a time, then times by queue, then offsets."""
    if options.starting_timestamp is not None:
        return "startingTimestamp"
    return "startingOffsets" if options.starting_offsets_by_timestamp is None else "startingOffsetsByTimestamp"


def ending_option(options: Options) -> str:
    """The option that decides where a batch ends."""
    if options.ending_timestamp is not None:
        return "endingTimestamp"
    return "endingOffsets" if options.ending_offsets_by_timestamp is None else "endingOffsetsByTimestamp"


def _times_in_wrong_order(options: Options) -> list[str]:
    """The problem that a starting time is after the ending time, for all queues or for one."""
    of_all = options.starting_timestamp, options.ending_timestamp
    by_queue = options.starting_offsets_by_timestamp or {}, options.ending_offsets_by_timestamp or {}
    for queue in [None] if None not in of_all else sorted({*by_queue[0], *by_queue[1]}):
        start, end = (
            all_queues if all_queues is not None or queue is None else times.get(queue)
            for all_queues, times in zip(of_all, by_queue, strict=True)
        )
        if start is not None and end is not None and start > end:
            return [
                f"option {starting_option(options)!r} is {f'{queue}: ' if queue else ''}{utc_text(start)}, but option "
                f"{ending_option(options)!r} ends before that, at {utc_text(end)}; expected a start that is not after the end"
            ]
    return []


def starting_offsets(
    offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    """Starting offsets."""
    option = starting_option(options)
    times = _times_by_queue(options.starting_timestamp, options.starting_offsets_by_timestamp, bounds, option)
    if times is not None:
        return _start_at_times(offsets, options, bounds, times, option, deadline)
    if options.starting_offsets == "committed":
        return _start_at_committed(offsets, options, bounds, deadline)
    return resolve_offsets(options.starting_offsets, bounds, option)


def ending_offsets(
    offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    """Ending offsets, each one past the last message to be read."""
    option = ending_option(options)
    times = _times_by_queue(options.ending_timestamp, options.ending_offsets_by_timestamp, bounds, option)
    if times is not None:
        return _offsets_at_times(offsets, options.group, bounds, times, deadline)
    return resolve_offsets(options.ending_offsets, bounds, option)


def check_order(options: Options, starts: Positions, ends: Positions, bounds: Bounds) -> None:
    """Raise ``OffsetError`` for queues that would end before they start.

    A group may have committed an offset after the time at which the batch ends: such a queue has nothing left to read.
    """
    start_option, end_option = starting_option(options), ending_option(options)
    if (start_option, options.starting_offsets) == ("startingOffsets", "committed") and end_option != "endingOffsets":
        ends = {queue: bound.max_offset for queue, bound in bounds.items()}
    if backwards := sorted(queue for queue, start in starts.items() if start > ends[queue]):
        first = backwards[0]
        raise OffsetError(
            f"the start is after the end in {queues_text(backwards)}: {first} starts at offset {starts[first]} "
            f"(option {start_option!r}) and ends at {ends[first]} (option {end_option!r})",
            topic=first.topic,
            remedy="Give an earlier start, or a later end",
        )


def _times_by_queue(
    of_all: int | None, by_queue: Mapping[MessageQueue, int] | None, bounds: Bounds, option: str
) -> Mapping[MessageQueue, int] | None:
    """The time of each queue; None if the source does not start or end by time."""
    if of_all is not None:
        return dict.fromkeys(bounds, of_all)
    if by_queue is not None:
        check_same_queues(by_queue, bounds, option)
    return by_queue


def _offsets_at_times(
    offsets: OffsetReader, group: str, bounds: Bounds, times: Mapping[MessageQueue, int], deadline: Deadline
) -> dict[MessageQueue, int]:
    """First offset stored at or after each time, within bounds: a broker may answer below its minimum."""
    answered = offsets.search_offsets({queue: times[queue] for queue in bounds}, deadline, group=group)
    return {q: bounds[q].clamp(o) for q, o in answered.items()}


def _start_at_times(
    offsets: OffsetReader,
    options: Options,
    bounds: Bounds,
    times: Mapping[MessageQueue, int],
    option: str,
    deadline: Deadline,
) -> dict[MessageQueue, int]:
    starts = _offsets_at_times(offsets, options.group, bounds, times, deadline)
    # An empty queue has no message that is older than the time: it starts at its end.
    all_older = sorted(q for q, offset in starts.items() if bounds[q].min_offset < bounds[q].max_offset <= offset)
    if all_older and options.starting_offsets_by_timestamp_strategy == "error":
        raise OffsetError(
            f"option {option!r}: {queues_text(all_older)} {'has' if len(all_older) == 1 else 'have'} no message "
            "stored at or after the time",
            remedy="Give an earlier time, or set 'startingOffsetsByTimestampStrategy' to 'latest' to start at the end",
        )
    return starts


def _start_at_committed(
    offsets: OffsetReader, options: Options, bounds: Bounds, deadline: Deadline
) -> dict[MessageQueue, int]:
    committed = offsets.committed(options.group, sorted(bounds), deadline)
    missing = sorted(queue for queue, offset in committed.items() if offset is None)
    if missing and options.committed_fallback == "error":
        raise OffsetError(
            f"option 'startingOffsets' is 'committed', but group {options.group!r} has no offset of {queues_text(missing)}",
            remedy="Set option 'committedFallback' to 'earliest' or 'latest'",
        )
    fallback = resolve_offsets(options.committed_fallback, bounds, "committedFallback") if missing else {}
    return {queue: fallback[queue] if offset is None else offset for queue, offset in committed.items()}


def resolve_offsets(
    wanted: str | Mapping[MessageQueue | str, int], bounds: Bounds, option: str
) -> dict[MessageQueue, int]:
    """Offsets for ``earliest``, ``latest`` or JSON offsets (−2 earliest, −1 latest) within ``bounds``.

    JSON must name every queue, or its topic, and no other. A number below the minimum stays as it is: what is missing then is
    data loss, and reported as that.
    """
    if isinstance(wanted, str):
        lowest = wanted == "earliest"
        return {queue: b.min_offset if lowest else b.max_offset for queue, b in bounds.items()}
    by_queue = _number_by_queue(wanted, bounds, option)
    check_same_queues(by_queue, bounds, option)
    resolved = {}
    for queue, number in by_queue.items():
        if number > bounds[queue].max_offset:
            raise OffsetError(
                f"option {option!r}: {queue} is {number}, but the queue ends at {bounds[queue].max_offset}",
                topic=queue.topic,
                remedy="Give an offset up to the end, or -1 for the end",
            )
        marks = {EARLIEST: bounds[queue].min_offset, LATEST: bounds[queue].max_offset}
        resolved[queue] = marks.get(number, number)
    return resolved


def _number_by_queue(wanted: Mapping[MessageQueue | str, int], bounds: Bounds, option: str) -> dict[MessageQueue, int]:
    """The number of each queue; the number of a topic applies to all its queues."""
    of_topics = {topic: number for topic, number in wanted.items() if isinstance(topic, str)}
    if unknown := sorted(of_topics.keys() - {queue.topic for queue in bounds}):
        raise OffsetError(f"option {option!r} names topics that are not read: {', '.join(unknown)}")
    by_queue = {queue: of_topics[queue.topic] for queue in bounds if queue.topic in of_topics}
    return by_queue | {queue: number for queue, number in wanted.items() if not isinstance(queue, str)}


_REMEDY_OF_MISSING_QUEUES = {
    "startingOffsets": "Add them, with -2 for the first message that is kept, or -1 for the end; or name their topics with "
    "'earliest' or 'latest'",
    "endingOffsets": "Add them, with -1 for the end; or name their topics with 'latest'",
}


def check_same_queues(wanted: Iterable[MessageQueue], bounds: Bounds, option: str) -> None:
    """Raise ``OffsetError`` unless exactly the queues that are read are named."""
    named = set(wanted)
    if missing := bounds.keys() - named:
        raise OffsetError(
            f"option {option!r} must name every queue; it lacks {queues_text(missing)}",
            remedy=_REMEDY_OF_MISSING_QUEUES.get(option, "Add them, each with a time"),
        )
    if unknown := named - bounds.keys():
        raise OffsetError(f"option {option!r} names queues that are not read: {queues_text(unknown)}")


def queues_text(queues: Iterable[MessageQueue]) -> str:
    """The first ten queues as text."""
    names = [str(queue) for queue in sorted(queues)]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
