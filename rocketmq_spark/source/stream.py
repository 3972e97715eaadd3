"""The driver's side of a stream: where it starts, how far a batch goes, what was lost on the way.

Positions come in from Spark's log and go back to it; what this object remembers between calls is a cache, or can be had
again from the brokers. Any method may be the first one called.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound, OffsetError, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.options import Options
from rocketmq_spark.pull.verdict import Cause
from rocketmq_spark.source import allocation, filters, loss, planner, positions, tasks
from rocketmq_spark.source.admission import Admission, Wanted
from rocketmq_spark.source.catalog import Catalog, View
from rocketmq_spark.source.offsets import Offsets, Positions
from rocketmq_spark.source.publish import Publisher
from rocketmq_spark.source.tasks import RangePartition
from rocketmq_spark.source.waiting import Absence, patiently, whole

T = TypeVar("T")

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
        self._absence = Absence()
        self._looked: tuple[Offsets, View] | None = None
        self._initial: Offsets | None = None
        self._unresolved: OffsetError | None = None
        self._to_freeze = False
        self._frozen: dict[MessageQueue, int] | None = None
        self._opened = False
        self._compared = False
        self._left: list[str] = []
        self._told: tuple[Offsets, frozenset[tuple[OffsetRange, Cause]]] | None = None
        self._given: tuple[dict[str, Any], Offsets] | None = None
        self._idle: tuple[View, Offsets] | None = None
        self._newest: tuple[View, dict[str, Any]] | None = None

    def initial(self) -> Offsets:
        """The start of a new query. Spark asks twice and plans with the second answer, so it is resolved once."""
        if self._initial is None:
            bounds = whole(self._catalog).bounds
            offsets = self._catalog.offsets
            self._patiently(lambda: filters.validate(offsets, self._options, bounds, self._deadline()))
            begin: Positions = {}
            try:
                begin = self._patiently(lambda: positions.start(offsets, self._options, bounds, self._deadline()))
            except OffsetError as e:
                # Spark asks here, too, when batch 0 was logged and not finished, and then the logged end knows the start.
                self._unresolved = e
            self._initial = Offsets(
                begin, filter=filters.recorded(self._options), environment=self._catalog.environment
            )
            self._opened = self._unresolved is None
        return self._initial

    def parsed(self, start: dict[str, Any]) -> Offsets:
        """The offsets of Spark's log. An idle query hands the same over many times a second."""
        if self._given is None or self._given[0] != start:
            self._given = (start, Offsets.from_json(start))
        return self._given[1]

    def latest(self, begin: Offsets, wanted: Wanted) -> Offsets:
        """Where the next batch ends; ``begin`` itself when there is none. What lies before ``begin`` is finished work."""
        if self._unresolved is not None and not begin.positions:
            raise self._unresolved
        self._open(begin)
        self._catalog.expect(begin)
        if self._to_freeze:
            self._frozen, self._to_freeze = self._patiently(self._ends_now), False
        self._publisher.publish(begin.positions)
        if self._frozen is not None:
            return self._patiently(lambda: self._planned(begin, wanted))
        try:
            return self._planned(begin, wanted)
        except RocketMQError as e:
            self._catalog.waits(e)
        time.sleep(0.2)
        return begin

    def _patiently(self, ask: Callable[[], T]) -> T:
        """A run that goes on from a checkpoint outlives what a running one outlives."""
        return patiently(self._catalog, ask)

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
            recent = self._catalog.recent(patient=self._frozen is not None)
            view = _trusted(recent, begin)
            missing = [
                queue
                for queue, end in (self._frozen or {}).items()
                if not view.lacks(queue) and end > begin.positions.get(queue, 0) and _wanting(queue, end, begin, view)
            ]
            missing = [queue for queue in missing if queue not in self._catalog.hidden(missing, view)]
            if not missing:
                self._tell_absent(begin, recent, view)
                return view
            if deadline.expired:
                cause = self._catalog.trouble.first
                raise BrokerNotFound(
                    f"no broker answers for {positions.listed(missing)}, which this run has to read to its end",
                    cause.addr if cause else None,
                    remark=cause.message if cause else None,
                    remedy="Look at the brokers, or raise option 'readDeadline'",
                ) from cause
            time.sleep(0.2)

    def _tell_absent(self, begin: Offsets, recent: View, view: View) -> None:
        if self._looked is not None and self._looked[0] is begin and self._looked[1] is recent:
            return
        self._looked = begin, recent
        topics = set(self._catalog.topics_or_last())
        wanted = (queue for queue in begin.positions if queue.topic in topics and not view.lacks(queue))
        self._absence.look(wanted, view.bounds, self._catalog.why_absent)

    def _completed(self, begin: Offsets, moved: Offsets, end: Offsets, view: View) -> Offsets:
        """The end with all that a restart must know."""
        restarted = {} if moved is begin else dict(moved.start)
        end = Offsets(end.positions, {**restarted, **(end.start if end is not moved else {})})
        if self._initial is not None and begin == self._initial:
            end = planner.first_batch(self._initial, end)
        marks = planner.marks(end.positions, moved.marks, view.bounds)
        recorded = filters.recorded(self._options)
        return replace(end, marks=marks, filter=recorded, environment=self._catalog.environment)

    def _admitting(self, wanted: Wanted) -> Wanted:
        """A run that reads what is there and ends does not wait for more."""
        return wanted if self._frozen is None else replace(wanted, least=None)

    def _ends(self, view: View) -> dict[MessageQueue, int]:
        if self._frozen is None:
            return _ends(view.bounds)
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
            self._newest = (view, Offsets(_ends(view.bounds)).to_json())
        return self._newest[1]

    def freeze(self) -> None:
        """Read up to what is there now, and no further. What is missing is waited for when positions are known."""
        try:
            view = self._catalog.sweep()
        except RocketMQError as e:
            if not e.retriable:
                raise
            self._to_freeze = True
        else:
            self._to_freeze = len(_of_masters(view)) < len(view.bounds)
            self._frozen = _ends(view.bounds)

    def _ends_now(self) -> dict[MessageQueue, int]:
        return _ends(whole(self._catalog).bounds)

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """The tasks of a batch. May be the first call of all: a batch that was logged but not finished."""
        ranges = planner.ranges(start, end)
        if not ranges:
            return []
        if self._unresolved is not None and not start.positions:
            start = replace(end, positions=end.start)
        self._catalog.expect(start)
        if self._opened:
            view = self._catalog.recent()
        else:
            view = self._patiently(self._catalog.sweep)
            ranges = self._same_topics(start, view, ranges)
        self._open(start)
        bounds = view.bounds
        gone = [r for r in ranges if view.lacks(r.queue)]
        lost = planner.truncated(ranges, _of_masters(view))
        causes = [*((part, Cause.TRUNCATED) for part in lost), *((part, Cause.TOPIC_DELETED) for part in gone)]
        loss.report(self._options.fail_on_data_loss, causes)
        ranges = planner.without(ranges, [*lost, *gone])
        return tasks.partitions(self._catalog.routes, allocation.tasks(self._options, bounds, ranges))

    def _same_topics(self, start: Offsets, view: View, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Without the ranges of topics that were made again while the query was down: their offsets mean other messages."""
        suspected = loss.suspects(start, _of_masters(view), {r.queue for r in ranges})
        group, asked = self._options.group, self._catalog.offsets
        gone = set(self._patiently(lambda: loss.recreated(asked, group, start.positions, suspected, self._deadline())))
        lost = [(r, Cause.WENT_BACK) for r in ranges if r.queue in gone]
        loss.report(self._options.fail_on_data_loss, lost)
        return [r for r in ranges if r.queue not in gone]

    def _open(self, begin: Offsets) -> None:
        """Once per run: what only a start can tell."""
        if self._opened:
            return
        options = self._options
        self._catalog.expect(begin)
        bounds = self._patiently(self._catalog.sweep).bounds
        self._patiently(lambda: filters.validate(self._catalog.offsets, options, bounds, self._deadline()))
        self._opened = True
        if options.given & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
            logger.warning("the checkpoint decides where the query goes on; the starting options have no effect")
        if dict(begin.filter) != filters.recorded(options):
            logger.warning(
                "the filter changed from %s to %s since the last run", begin.filter, filters.recorded(options)
            )
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
        self._report(begin, lost)
        if not restart and not dropped and not skipped:
            return found
        kept = {queue: p for queue, p in found.positions.items() if queue not in dropped}
        kept.update(restart)
        kept.update({part.queue: part.end for part in skipped})
        marks = {queue: mark for queue, mark in found.marks.items() if queue not in restart and queue in kept}
        return Offsets(kept, {**restart, **{part.queue: part.end for part in skipped}}, marks, found.filter)

    def _report(self, begin: Offsets, lost: list[tuple[OffsetRange, Cause]]) -> None:
        """Once for each position, however often it is planned from while a batch waits for more."""
        fail = self._options.fail_on_data_loss == "fail"
        told = self._told[1] if self._told is not None and self._told[0] is begin else frozenset()
        loss.report(self._options.fail_on_data_loss, [one for one in lost if fail or one not in told])
        self._told = (begin, told.union(lost)) if lost else self._told

    def _shrunk(self, frozen: dict[MessageQueue, int], found: Offsets, view: View) -> list[OffsetRange]:
        """What was there when the run began and is not any more: the end of a queue went back. Told once."""
        parts = []
        of_masters = _of_masters(view)
        for queue, end in sorted(frozen.items()):
            bounds = of_masters.get(queue)
            if bounds is not None and found.positions.get(queue, 0) <= bounds.max_offset < end:
                parts.append(OffsetRange(queue, bounds.max_offset, end))
                frozen[queue] = bounds.max_offset
        return parts

    def _subscribed(self, begin: Offsets) -> Offsets:
        topics = set(self._catalog.topics_or_last())
        gone = sorted({queue.topic for queue in begin.positions if queue.topic not in topics})
        if not topics or not gone:
            return begin
        if gone != self._left:
            logger.warning("topics that are not subscribed to any more leave the offsets: %s", ", ".join(gone))
        self._left = gone
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
        suspected = loss.suspects(found, _of_masters(view), moving)
        first, self._compared = not self._compared, True
        if len(suspected) > _CHECKED_QUEUES and not (first and self._initial is None):
            return []
        group = self._options.group
        return loss.recreated(self._catalog.offsets, group, found.positions, suspected, self._deadline())

    def _sample(self, queue: MessageQueue, begin: Offsets, minimum: int) -> tuple[int, int]:
        offset = max(begin.positions.get(queue, minimum), minimum)
        try:
            # A guess is not worth a long wait, in which others have something to be read.
            deadline = Deadline.after(min(1.0, self._options.request_timeout))
            return self._catalog.offsets.sample(self._options.group, queue, offset, deadline)
        except RocketMQError as e:
            if not e.retriable:
                raise
            return 0, 0  # what was learnt before has to do

    def _deadline(self) -> Deadline:
        return Deadline.after(10 * self._options.request_timeout)


def _ends(bounds: planner.Bounds) -> dict[MessageQueue, int]:
    return {queue: of_queue.max_offset for queue, of_queue in bounds.items()}


def _of_masters(view: View) -> planner.Bounds:
    """The bounds that masters tell. Where only slaves live nobody can be asked whether a topic was made again."""
    return {queue: bounds for queue, bounds in view.bounds.items() if queue.broker_name not in view.orphans}


def _wanting(queue: MessageQueue, end: int, begin: Offsets, view: View) -> bool:
    """Whether a queue that is to be read up to ``end`` gives nothing more now, as a slave that lags behind its master."""
    bounds = view.bounds.get(queue)
    if bounds is None or queue.broker_name not in view.orphans:
        return bounds is None
    return bounds.max_offset < end and begin.positions.get(queue, bounds.min_offset) >= bounds.max_offset


def _trusted(view: View, begin: Offsets) -> View:
    """Without queues of slaves that have not what lies at our position, or that are new: their master is waited for."""
    if not view.orphans:
        return view
    kept = {
        queue: bounds
        for queue, bounds in view.bounds.items()
        if queue.broker_name not in view.orphans or _goes_on(queue, bounds, begin)
    }
    return replace(view, bounds=kept)


def _goes_on(queue: MessageQueue, bounds: QueueBounds, begin: Offsets) -> bool:
    """Whether a slave has what comes next, if there is something.

    Messages that are older than what was read are those of a topic that was made again since: a slave keeps the index.
    """
    position = begin.positions.get(queue, -1)
    if not bounds.min_offset <= position <= bounds.max_offset:
        return False
    return position == bounds.max_offset or bounds.last_update_ms >= begin.marks.get(queue, 0)
