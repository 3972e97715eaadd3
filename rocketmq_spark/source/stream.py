"""The driver's side of a stream: where it starts, how far a batch goes, what was lost on the way.

Positions come in from Spark's log and go back to it; what this object remembers between calls is a cache, or can be had
again from the brokers. Any method may be the first one called.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rocketmq_spark.client.pull import Cause
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.source import allocation, filters, loss, planner, positions, recreation, tasks
from rocketmq_spark.source.admission import Admission, Wanted
from rocketmq_spark.source.catalog import Catalog, View
from rocketmq_spark.source.offsets import Offsets
from rocketmq_spark.source.publish import Publisher
from rocketmq_spark.source.tasks import RangePartition

logger = logging.getLogger(__name__)

# Whether topics were made again is asked for so many queues before each batch; for all of them at a start.
_CHECKED_QUEUES = 256
# How long an idle stream holds an answer back, and with it the other sources of its query. Spark asks at once again,
# and to read and write the offsets of many queues is what such a question costs.
_LONGEST_WAIT_S = 0.1


class Stream:
    """One run of a streaming query."""

    def __init__(self, options: Options) -> None:
        # Spark gives a stream a process of its own. What was imported stays: the full collections that come with views of
        # thousands of queues need not look through it, which is most of what they would do.
        gc.freeze()
        self._options = options
        self._catalog = Catalog(options)
        self._publisher = Publisher(options)
        self._admission = Admission(options.max_trigger_delay)
        self._initial: Offsets | None = None
        self._frozen: dict[MessageQueue, int] | None = None
        self._opened = False
        self._compared = False
        self._given: tuple[dict[str, Any], Offsets] | None = None
        self._idle: tuple[View, Offsets] | None = None
        self._newest: tuple[View, dict[str, Any]] | None = None

    def initial(self) -> Offsets:
        """The start of a new query. Spark asks twice and plans with the second answer, so it is resolved once."""
        if self._initial is None:
            bounds = self._catalog.sweep().bounds
            client, deadline = self._catalog.client, self._deadline()
            filters.validate(client, self._options, bounds, deadline)
            begin = positions.start(client, self._options, bounds, deadline)
            self._initial = Offsets(begin, filter=filters.recorded(self._options))
            self._opened = True
        return self._initial

    def parsed(self, start: dict[str, Any]) -> Offsets:
        """The offsets of Spark's log. An idle query hands the same over many times a second."""
        if self._given is None or self._given[0] != start:
            self._given = (start, Offsets.from_json(start))
        return self._given[1]

    def latest(self, begin: Offsets, wanted: Wanted) -> Offsets:
        """Where the next batch ends; ``begin`` itself when there is none. What lies before ``begin`` is finished work."""
        self._open(begin)
        self._publisher.publish(begin.positions)
        deadline = Deadline.after(self._options.read_deadline)
        while True:
            try:
                return self._planned(begin, wanted)
            except RocketMQError as e:
                if not e.retriable or (self._frozen is not None and deadline.expired):
                    raise
                self._catalog.waits(e)
            time.sleep(0.2)
            if self._frozen is None:
                return begin

    def _planned(self, begin: Offsets, wanted: Wanted) -> Offsets:
        if self._idle is not None and self._idle[1] is begin and self._frozen is None:
            self._catalog.rest(_LONGEST_WAIT_S)
        view = self._view(begin)
        if self._idle is not None and self._idle[0] is view and self._idle[1] is begin:
            return begin
        moved = self._moved(begin, view)
        ends = self._ends(view)
        begins = {queue: view.bounds[queue].min_offset for queue in ends}
        live = planner.above_minimum(moved, view.bounds)
        waiting = planner.backlog({**begins, **live.positions}, ends)
        most = self._admission.most(waiting, self._admitting(wanted), lambda q: self._sample(q, moved, begins[q]))
        if most == 0:
            return begin
        end = planner.next_end(live, ends, begins, most)
        if end is begin:
            self._idle = None if waiting else (view, begin)
            return begin
        return self._completed(begin, moved, end, view)

    def _view(self, begin: Offsets) -> View:
        """What exists now. A run that ends with what was there at its start waits for brokers that have some of it."""
        deadline = Deadline.after(self._options.read_deadline)
        while True:
            view = _trusted(self._catalog.recent(), begin)
            missing = [
                queue
                for queue, end in (self._frozen or {}).items()
                if queue not in view.bounds and not view.lacks(queue) and end > begin.positions.get(queue, 0)
            ]
            missing = [queue for queue in missing if queue not in self._catalog.hidden(missing, view)]
            if not missing:
                return view
            if deadline.expired:
                raise BrokerNotFound(
                    f"no broker answers for {positions.listed(missing)}, which this run has to read to its end",
                    remedy="Look at the brokers, or raise option 'readDeadline'",
                )
            time.sleep(0.2)

    def _completed(self, begin: Offsets, moved: Offsets, end: Offsets, view: View) -> Offsets:
        """The end with all that a restart must know."""
        restarted = {} if moved is begin else dict(moved.start)
        end = Offsets(end.positions, {**restarted, **(end.start if end is not moved else {})})
        if self._initial is not None and begin == self._initial:
            end = planner.first_batch(self._initial, end)
        marks = planner.marks(end.positions, moved.marks, view.bounds)
        return replace(end, marks=marks, filter=filters.recorded(self._options))

    def _admitting(self, wanted: Wanted) -> Wanted:
        """A run that reads what is there and ends does not wait for more."""
        return wanted if self._frozen is None else replace(wanted, least=None)

    def _ends(self, view: View) -> dict[MessageQueue, int]:
        if self._frozen is None:
            return {queue: bounds.max_offset for queue, bounds in view.bounds.items()}
        # Frozen ends are checked each time: a queue may have vanished or gone back since.
        return {
            queue: min(end, view.bounds[queue].max_offset)
            for queue, end in self._frozen.items()
            if queue in view.bounds
        }

    def newest(self) -> dict[str, Any]:
        """The ends of all queues now, for the progress of the query."""
        view = self._catalog.recent()
        if self._newest is None or self._newest[0] is not view:
            ends = {queue: bounds.max_offset for queue, bounds in view.bounds.items()}
            self._newest = (view, Offsets(ends).to_json())
        return self._newest[1]

    def freeze(self) -> None:
        """Read up to what is there now, and no further. That a topic is missing is said when positions are known."""
        try:
            bounds = self._catalog.sweep().bounds
        except RouteNotFound:
            bounds = self._catalog.recent().bounds
        self._frozen = {queue: of_queue.max_offset for queue, of_queue in bounds.items()}

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """The tasks of a batch. May be the first call of all: a batch that was logged but not finished."""
        ranges = planner.ranges(start, end)
        if not ranges:
            return []
        self._catalog.expect(start.positions)
        view = self._catalog.recent() if self._opened else self._catalog.sweep()
        bounds = view.bounds
        if not self._opened:
            ranges = self._same_topics(start, view, ranges)
        self._open(start)
        gone = [r for r in ranges if view.lacks(r.queue)]
        lost = planner.truncated(ranges, bounds)
        causes = [*((part, Cause.TRUNCATED) for part in lost), *((part, Cause.TOPIC_DELETED) for part in gone)]
        loss.report(self._options.fail_on_data_loss, causes)
        ranges = planner.without(ranges, [*lost, *gone])
        return tasks.partitions(self._catalog.client, allocation.tasks(self._options, bounds, ranges))

    def _same_topics(self, start: Offsets, view: View, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Without the ranges of topics that were made again while the query was down: their offsets mean other messages."""
        suspected = recreation.suspects(start, _of_masters(view), {r.queue for r in ranges})
        group, client = self._options.group, self._catalog.client
        gone = set(recreation.recreated(client, group, start.positions, suspected, self._deadline()))
        lost = [(r, Cause.WENT_BACK) for r in ranges if r.queue in gone]
        loss.report(self._options.fail_on_data_loss, lost)
        return [r for r in ranges if r.queue not in gone]

    def _open(self, begin: Offsets) -> None:
        """Once per run: what only a start can tell."""
        if self._opened:
            return
        self._opened = True
        options = self._options
        if options.given & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
            logger.warning("the checkpoint decides where the query goes on; the starting options have no effect")
        if dict(begin.filter) != filters.recorded(options):
            logger.warning(
                "the filter changed from %s to %s since the last run", begin.filter, filters.recorded(options)
            )
        self._catalog.expect(begin.positions)
        bounds = self._catalog.sweep().bounds
        filters.validate(self._catalog.client, options, bounds, self._deadline())
        added = sorted({queue.topic for queue in bounds} - {queue.topic for queue in begin.positions})
        if added:
            logger.warning("topics that the checkpoint does not know start at their minimum: %s", ", ".join(added))

    def _moved(self, begin: Offsets, view: View) -> Offsets:
        """``begin`` after what happened to its queues: dropped topics, losses that the user allows to be stepped over."""
        found = self._subscribed(begin)
        lost: list[tuple[OffsetRange, Cause]] = []
        restart: dict[MessageQueue, int] = {}
        for part in planner.went_back(found.positions, view.bounds):
            lost.append((part, Cause.WENT_BACK))
            restart[part.queue] = view.bounds[part.queue].min_offset
        if self._frozen is not None:
            lost += [(part, Cause.WENT_BACK) for part in self._shrunk(self._frozen, found, view)]
        for queue in self._recreated(found, view):
            position = found.positions[queue]
            lost.append((OffsetRange(queue, position, position), Cause.WENT_BACK))
            restart[queue] = view.bounds[queue].min_offset
        dropped = {queue for queue in found.positions if view.lacks(queue)}
        lost += [(OffsetRange(q, found.positions[q], found.positions[q]), Cause.TOPIC_DELETED) for q in sorted(dropped)]
        skipped = self._hidden(found, view)
        lost += [(part, Cause.QUEUE_GONE) for part in skipped]
        loss.report(self._options.fail_on_data_loss, lost)
        if not restart and not dropped and not skipped:
            return found
        kept = {queue: p for queue, p in found.positions.items() if queue not in dropped}
        kept.update(restart)
        kept.update({part.queue: part.end for part in skipped})
        marks = {queue: mark for queue, mark in found.marks.items() if queue not in restart and queue in kept}
        return Offsets(kept, {**restart, **{part.queue: part.end for part in skipped}}, marks, found.filter)

    def _shrunk(self, frozen: dict[MessageQueue, int], found: Offsets, view: View) -> list[OffsetRange]:
        """What was there when the run began and is not any more: the end of a queue went back. Told once."""
        parts = []
        for queue, end in sorted(frozen.items()):
            bounds = view.bounds.get(queue)
            if bounds is not None and found.positions.get(queue, 0) <= bounds.max_offset < end:
                parts.append(OffsetRange(queue, bounds.max_offset, end))
                frozen[queue] = bounds.max_offset
        return parts

    def _subscribed(self, begin: Offsets) -> Offsets:
        topics = set(self._catalog.topics_or_last())
        gone = sorted({queue.topic for queue in begin.positions if queue.topic not in topics})
        if not topics or not gone or self._options.subscribe_pattern is not None:
            return begin
        logger.warning("topics that are not subscribed to any more leave the offsets: %s", ", ".join(gone))
        kept = {queue: position for queue, position in begin.positions.items() if queue.topic in topics}
        return Offsets(kept, {}, {q: m for q, m in begin.marks.items() if q in kept}, begin.filter)

    def _hidden(self, found: Offsets, view: View) -> list[OffsetRange]:
        """Unread parts of queues that their broker does not read any more; finished ones keep their position quietly."""
        ends = self._catalog.hidden((queue for queue in found.positions if queue not in view.bounds), view)
        return [
            OffsetRange(queue, found.positions[queue], end)
            for queue, end in sorted(ends.items())
            if end > found.positions[queue]
        ]

    def _recreated(self, found: Offsets, view: View) -> Iterable[MessageQueue]:
        moving = {q for q, b in view.bounds.items() if b.max_offset > found.positions.get(q, b.max_offset)}
        suspected = recreation.suspects(found, _of_masters(view), moving)
        first, self._compared = not self._compared, True
        if len(suspected) > _CHECKED_QUEUES and not (first and self._initial is None):
            return []
        group = self._options.group
        return recreation.recreated(self._catalog.client, group, found.positions, suspected, self._deadline())

    def _sample(self, queue: MessageQueue, begin: Offsets, minimum: int) -> tuple[int, int]:
        offset = max(begin.positions.get(queue, minimum), minimum)
        try:
            return self._catalog.client.brokers.sample(self._options.group, queue, offset, self._deadline())
        except RocketMQError as e:
            if not e.retriable:
                raise
            return 0, 0  # what was learnt before has to do

    def _deadline(self) -> Deadline:
        return Deadline.after(10 * self._options.request_timeout)


def _of_masters(view: View) -> planner.Bounds:
    """The bounds that masters tell. Where only slaves live nobody can be asked whether a topic was made again."""
    return {queue: bounds for queue, bounds in view.bounds.items() if queue.broker_name not in view.orphans}


def _trusted(view: View, begin: Offsets) -> View:
    """Without queues of slaves that have not what lies at our position: their master is waited for."""
    if not view.orphans:
        return view
    kept = {
        queue: bounds
        for queue, bounds in view.bounds.items()
        if queue.broker_name not in view.orphans
        or bounds.min_offset <= begin.positions.get(queue, bounds.min_offset) <= bounds.max_offset
    }
    return replace(view, bounds=kept)
