"""The driver's side of a stream: where it starts, where a batch ends, and which messages were lost.

Spark passes positions from its offset log, and logs those that this module returns. Everything that ``Stream`` remembers between
calls is a cache, or can be requested from the brokers again. Any method may be the first one that Spark calls; the names are
Spark's. This module requests facts from brokers; ``decisions`` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import (
    BrokerNotFound,
    OffsetError,
    OptionError,
    RocketMQError,
    RouteNotFound,
    TopicNotFound,
)
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import by_position
from rocketmq_spark.spark.source import decisions, filters, kafka_partitions, partitioning, planner, tasks
from rocketmq_spark.spark.source.catalog import OffsetCache, check_filter, planning_deadline
from rocketmq_spark.spark.source.commit import GroupOffsets
from rocketmq_spark.spark.source.decisions import Account, Loss, QueuesView
from rocketmq_spark.spark.source.kafka_partitions import QueueRuns
from rocketmq_spark.spark.source.offsets import Bounds, OffsetLog, Offsets, Positions, listed, starting
from rocketmq_spark.spark.source.partitioning import Partitioning
from rocketmq_spark.spark.source.planner import Admission, TriggerLimits
from rocketmq_spark.spark.source.recreation import RecreationWatch, Share, share
from rocketmq_spark.spark.source.tasks import RangePartition
from rocketmq_spark.spark.source.waiting import Absence, begun, patiently, whole

logger = logging.getLogger(__name__)

# How long ``latestOffset`` waits if the stream is idle or waits for more messages. Spark asks again at once, and each question
# costs reading and writing the offsets of all queues. The other sources of the query wait meanwhile.
_LONGEST_WAIT_S = 0.1
# Pause before brokers that did not answer are asked again.
_PAUSE_S = 0.2


class Stream:
    """One run of a streaming query."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.log = OffsetLog()
        self._clock = clock or Clock()
        self._catalog = OffsetCache(options, self._clock)
        self._group_offsets = GroupOffsets(options)
        self._admission = Admission(options.max_trigger_delay)
        self._absence = Absence()
        self._looked: tuple[Offsets, QueuesView] | None = None
        self._initial: Offsets | None = None
        self._unresolved: RocketMQError | None = None
        self._to_freeze = False
        self._frozen: Positions | None = None
        self._opened = self._filter_checked = False
        self._watch = self._new_watch()
        self._began: RecreationWatch | None = None
        self._unproven = False
        self._left: list[str] = []
        self._reported: tuple[Offsets, frozenset[Loss]] | None = None
        self._idle: tuple[QueuesView, Offsets] | None = None
        self._waits: Offsets | None = None
        self._account = Account()
        self._partitioning = Partitioning.of(options)
        self._warned_of_split = False
        self._end: Offsets | None = None
        self._guessed = False
        self._newest: tuple[QueuesView, Offsets | None, dict[str, Any]] | None = None
        # The newest partition numbers, and the queues of a repeated batch of which no log entry has the number yet.
        self._runs: QueueRuns = {}
        self._unlogged: set[MessageQueue] = set()

    def initialOffset(self) -> Offsets:
        """The start of a new query. Spark asks twice and plans with the second answer, so it is resolved once."""
        if self._initial is None:
            try:
                self._initial = self._resolved()
            except (OffsetError, OptionError, RouteNotFound, TopicNotFound) as e:
                # Spark calls this, too, if batch 0 was logged and not committed. The logged end then has the batch's start, and
                # ``failOnDataLoss`` decides about topics and queues that no longer exist. A new query fails in ``latestOffset``.
                self._unresolved, self._initial = e, Offsets({})
        return self._initial

    def _resolved(self) -> Offsets:
        catalog, options = self._catalog, self._options
        view, offsets = whole(catalog), catalog.offsets
        bounds, began = view.bounds, self._new_watch()
        began.begin(view.of_masters())
        patiently(catalog, lambda: self._check_filter(bounds))
        _warn_of_no_topic(options, bounds)
        begin = patiently(catalog, lambda: starting(offsets, options, bounds, planning_deadline(options)))
        begun(catalog, options, view, begin)  # for the first plan, which may come at once
        marks = planner.marks(begin, Offsets({}), bounds)
        marks |= self._watch.marks(Offsets(begin), bounds, Deadline.after(options.request_timeout))
        self._opened, self._began = True, began
        return Offsets(begin, {}, marks, _reads(options, catalog), catalog.environment)

    def _new_watch(self) -> RecreationWatch:
        return RecreationWatch(lambda: self._catalog.offsets, self._options.group)

    def latestOffset(self, begin: Offsets, limits: TriggerLimits, finished: bool = True) -> Offsets:
        """The end of the next batch; ``begin`` itself if there is no batch.

        ``finished`` is whether Spark has read everything before ``begin``, so that the group's offsets may be committed there.
        """
        self._end = self._next(begin, limits, finished)
        return self._end

    def _next(self, begin: Offsets, limits: TriggerLimits, finished: bool) -> Offsets:
        if self._unresolved is not None and begin == self._initial:
            raise self._unresolved
        self._open(begin)
        self._catalog.expect(begin, self._frozen)
        if self._to_freeze:
            self._frozen = patiently(self._catalog, lambda: whole(self._catalog).ends())
            self._to_freeze = False
        if finished:
            self._group_offsets.commit(begin.positions)
        if self._frozen is not None:
            return patiently(self._catalog, lambda: self._planned(begin, limits))
        try:
            return self._planned(begin, limits)
        except RocketMQError as e:
            self._catalog.waits(e)
        self._clock.sleep(_PAUSE_S)
        return begin

    def _planned(self, begin: Offsets, limits: TriggerLimits) -> Offsets:
        if self._idle is not None and self._idle[1] is begin and self._frozen is None:
            self._catalog.rest(_LONGEST_WAIT_S)
        if self._waits is begin:
            self._clock.sleep(_LONGEST_WAIT_S)
        view = self._view(begin)
        if self._idle is not None and self._idle[0] is view and self._idle[1] is begin:
            return begin
        self._check_filter(view.bounds)
        if self._unlogged:
            self._unlogged -= kafka_partitions.partition_numbers(begin.partitions).keys()
        if (
            self._unlogged
        ):  # the next batch may come days later, in another run, and must have the numbers of the repeated one
            return replace(begin, start={}, partitions=self._numbered(begin, begin))
        moved, readable = self._moved(begin, decisions.heard(view))
        ends = decisions.ends(readable, self._frozen)
        begins = {queue: readable.bounds[queue].min_offset for queue in ends}
        live = planner.above_minimum(moved, readable.bounds)
        waiting = planner.backlog({**begins, **live.positions}, ends)
        if self._frozen is not None:  # this run reads up to fixed ends, so waiting would bring no more messages
            limits = replace(limits, min_offsets=None)
        max_offsets = self._admission.max_offsets(
            waiting, limits, lambda queue: self._sample(queue, moved, begins[queue]), self._clock.now()
        )
        if max_offsets == 0:
            self._waits, self._idle = begin, None
            return begin
        if waiting and limits.max_bytes is not None and self._admission.guesses:
            self._guessed = self._guessed or _tell_guess(limits.max_bytes)
        end = planner.next_end(live, ends, begins, max_offsets)
        if end is begin:
            self._idle = None if waiting or self._unproven else (view, begin)
            if not (waiting or view.silent or moved.positions.keys() - readable.bounds.keys()):
                self._admission.found_nothing(self._clock.now())
            return begin
        end = decisions.completed(begin, moved, end, readable, self._initial)
        marks = self._watch.marks(end, readable.bounds, Deadline.after(self._options.request_timeout))
        end = replace(end, marks={**end.marks, **marks}) if marks else end
        self._admission.admitted(self._clock.now())
        return replace(
            end,
            reads=_reads(self._options, self._catalog),
            environment=self._catalog.environment,
            plan=self._partitioning.to_json(),
            partitions=self._numbered(begin, end),
        )

    def _numbered(self, begin: Offsets, end: Offsets) -> QueueRuns:
        """The numbers of queues with ``kafkaColumns``: those of the checkpoint and of this run, and the next ones for queues that
        are new. While the option is off, those of the checkpoint stay in it.
        """
        topics = {queue.topic for queue in (*begin.positions, *end.positions)}
        kept = {topic: runs for topic, runs in {**begin.partitions, **self._runs}.items() if topic in topics}
        if not self._options.kafka_columns:
            return kept
        there = self._catalog.numbered(topics, begun=kept)
        self._runs = kafka_partitions.with_new_queues(kept, (*there, *begin.positions, *end.positions))
        return self._runs

    def _numbers_of_batch(self, end: Offsets, queues: set[MessageQueue]) -> Mapping[MessageQueue, int]:
        """The numbers for a batch that reads ``queues``: those in its log entry. A batch that was logged while ``kafkaColumns``
        was off gets numbers once; the next entry has them.
        """
        if not self._options.kafka_columns:
            return {}
        numbers = kafka_partitions.partition_numbers(end.partitions)
        if not (lacking := queues - numbers.keys()):
            return numbers
        self._unlogged |= lacking
        return kafka_partitions.partition_numbers(self._numbered(end, end))

    def _view(self, begin: Offsets) -> QueuesView:
        """The queues and their bounds now. With fixed ends (AvailableNow), waits for brokers that have messages before them."""
        deadline = Deadline.after(self._options.read_deadline)
        while True:
            recent = self._catalog.recent(patient=self._frozen is not None)
            view = decisions.trusted(begin, recent)
            missing = decisions.awaited(begin, view, self._frozen)
            unread = self._catalog.hidden(missing, view)
            missing = [queue for queue in missing if queue not in unread]
            if not missing:
                self._tell_absent(begin, recent, view)
                return view
            if deadline.expired:
                cause, first = self._catalog.trouble.first, missing[0]
                why = filters.why_absent(self._catalog.known_routes.get(first.topic), first)
                raise BrokerNotFound(
                    f"no broker answers for {listed(missing)}, which this run must read to its end",
                    cause.addr if cause else None,
                    remark=cause.message if cause else why,
                    remedy="Check the brokers, or raise option 'readDeadline'",
                ) from cause
            self._clock.sleep(_PAUSE_S)

    def _tell_absent(self, begin: Offsets, recent: QueuesView, view: QueuesView) -> None:
        if self._looked is not None and self._looked[0] is begin and self._looked[1] is recent:
            return
        self._looked = begin, recent
        topics = set(self._catalog.topics_or_last())
        wanted = (queue for queue in begin.positions if queue.topic in topics and not view.lacks(queue))
        self._absence.look(
            wanted,
            view.bounds,
            lambda q: filters.why_absent(self._catalog.known_routes.get(q.topic), q),
            ends=self._frozen is not None,
        )

    def reportLatestOffset(self) -> dict[str, Any]:
        """The current ends of all queues and the figures of the run, for the progress of the query."""
        view, end = self._catalog.recent(same_batch=True), self._end
        if self._newest is None or self._newest[0] is not view or self._newest[1] is not end:
            report = self._account.report(view, end, int(self._clock.now() * 1000))
            self._newest = (view, end, {**report, **Offsets(view.ends()).to_json()})
        return self._newest[2]

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the ends of this run: read up to the current ends, and no further.

        If a master does not answer, or the queues depend on the positions, the first ``latestOffset`` fixes the ends.
        """
        if by_position(self._options) or self._options.assign:  # the positions say which queues these are
            self._to_freeze = True
            return
        try:
            view = self._catalog.sweep()
        except RocketMQError as e:
            if not e.retriable:
                raise
            self._to_freeze = True
        else:
            self._to_freeze = len(view.of_masters()) < len(view.bounds)
            self._frozen = view.ends()

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """The tasks of a batch. For a batch that was logged and not committed, this may be the first call of a run."""
        logged_before = self._end is None  # this run has returned no end yet, so an earlier run logged the batch
        if logged_before:
            filters.check_checkpoint(self._options, end)
        # Only a restart repeats several batches as one. Batch 0 is read from the starts in its end instead, because ``start`` is
        # resolved anew from the starting options, and may differ.
        begun = planner.begun_between(start, end) if logged_before and start != self._initial else []
        ranges = sorted([*planner.ranges(start, end), *begun])
        if not ranges:
            return []
        # The tasks of a batch depend on its log entry alone. Losses leave a task with fewer rows, or with none: other tasks,
        # and those of the next source of a union, keep their numbers, which are part of the ids of exactly-once.
        planned = partitioning.tasks(self._logged_partitioning(end, ranges), end.positions, ranges)
        if self._unresolved is not None and start == self._initial:
            start = replace(end, positions=end.start)
        known = planner.known_between(start, end) if logged_before or end.start else start
        self._catalog.expect(known)
        losses: list[Loss] = []
        if not logged_before:
            view = self._catalog.recent(same_batch=True)
        else:
            view = _of_all(self._catalog)
            filters.check_clusters(self._options, end, _clusters(self._catalog))
            filters.check_owned(self._options, end, self._catalog.environment)
            ranges, lost = decisions.of_same_topics(ranges, view, self._made_again_since(end, view, ranges))
            losses += self._accept(lost)
        self._open(known, view)
        self._unresolved = None  # the query has a logged batch, so the starting options have no effect any more
        before = planner.truncated(begun, view.of_masters())  # no loss: such a queue began with its first message
        ranges = planner.without(ranges, before)
        ranges, lost = decisions.readable(ranges, view)
        losses += self._accept(lost)
        others = tasks.differing(self._options, self._catalog.routes, self._catalog.offsets, ranges)
        lost_ranges = [*before, *(lost_range for lost_range, _ in losses)]
        left = [planner.without(task, lost_ranges) for task in planned]
        numbers = self._numbers_of_batch(end, {part.queue for part in ranges})
        return tasks.partitions(self._catalog.routes, left, others, end, numbers)

    def _logged_partitioning(self, end: Offsets, ranges: Sequence[OffsetRange]) -> Partitioning:
        """Return the options that split the batch into tasks when its end was logged. Options that the end does not record have
        their present values, with a warning.

        One row is one task with any options, so batches of one row cause no warning.
        """
        logged, unknown = partitioning.logged(end.plan, self._partitioning)
        if unknown and not self._warned_of_split and sum(r.size for r in ranges) > 1:
            self._warned_of_split = True
            logger.warning(
                "the offset of this batch does not say what decided its tasks (%s): another version of rocketmq-spark planned "
                "the batch, or another callable as allocationStrategy did. The present options decide now. If the options "
                "changed since the first attempt, a sink with deliveryGuarantee=exactly-once may store rows of this batch twice",
                ", ".join(unknown),
            )
        return logged

    def _accept(self, lost: Sequence[Loss]) -> Sequence[Loss]:
        """Report ``lost`` and return it. Raises ``DataLossError`` if option ``failOnDataLoss`` says so."""
        decisions.report(self._options.fail_on_data_loss, lost)
        self._account.lost(lost)
        return lost

    def _made_again_since(self, end: Offsets, view: QueuesView, ranges: Sequence[OffsetRange]) -> list[MessageQueue]:
        """Queues of a logged batch whose topics were created again while the query was down."""
        logged, bounds = decisions.logged(ranges, end, view), view.of_masters()
        watch = self._new_watch()  # another one, because the stream's own watch must begin with all queues

        def look() -> list[MessageQueue]:
            found = watch.look(logged, bounds, planning_deadline(self._options))
            for error in found.unanswered.values():
                raise error
            return found.made_again

        return patiently(self._catalog, look)

    def _open(self, begin: Offsets, view: QueuesView | None = None) -> None:
        """Check the checkpoint and the options once per run, with the bounds of ``view`` or, without it, of a new look."""
        if self._opened:
            return
        options = self._options
        self._catalog.expect(begin)
        catalog = self._catalog
        bounds = (view or patiently(catalog, catalog.sweep)).bounds
        filters.check_clusters(options, begin, _clusters(catalog))
        filters.check_owned(options, begin, catalog.environment)
        patiently(catalog, lambda: self._check_filter(bounds))
        _warn_of_no_topic(options, bounds)
        self._opened = True
        if options.given & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
            logger.warning("the query continues from its checkpoint; starting options have no effect")
        was, now = filters.filter_of(begin.reads), filters.filter_of(filters.recorded(options))
        if was != now:
            logger.warning("the filter changed from %s to %s since the last run", was, now)
        added = sorted({queue.topic for queue in bounds} - {queue.topic for queue in begin.positions})
        if added:
            logger.warning("topics that are not in the checkpoint start at their first offset: %s", ", ".join(added))

    def _check_filter(self, bounds: Bounds) -> None:
        """Let brokers check the filter once, as soon as there is a queue: a pattern may match no topic when the run begins."""
        if bounds and not self._filter_checked:
            check_filter(self._options, bounds)
            self._filter_checked = True

    def _moved(self, begin: Offsets, view: QueuesView) -> tuple[Offsets, QueuesView]:
        """``begin`` after what happened to its queues, losses that the user allows to be stepped over; and what can be read."""
        known = self._subscribed(begin)
        if self._began is not None:  # positions of a batch that was logged before are older than what that one saw
            self._watch, self._began = self._began if begin == self._initial else self._watch, None
        # A broker that hangs does not hold up what others have: it is asked no longer than for one request.
        deadline = Deadline.after(self._options.request_timeout)
        found = self._watch.look(known, view.of_masters(), deadline, view.connections)
        view = self._answering(view, found.unanswered)
        hidden = self._catalog.hidden((queue for queue in known.positions if queue not in view.bounds), view)
        moved, lost = decisions.moved(known, view, self._frozen, found.made_again, hidden)
        if lost and self._frozen is not None:
            self._frozen = decisions.lowered(view, self._frozen, hidden)
        self._report(begin, lost)
        return moved, view

    def _report(self, begin: Offsets, lost: list[Loss]) -> None:
        """Once for each position, however often it is planned from while a batch waits for more."""
        fail = self._options.fail_on_data_loss == "fail"
        reported = self._reported[1] if self._reported is not None and self._reported[0] is begin else frozenset()
        new = [part for part in lost if fail or part not in reported]
        decisions.report(self._options.fail_on_data_loss, new)
        self._account.lost(new)
        self._reported = (begin, reported.union(lost)) if lost else self._reported

    def _subscribed(self, begin: Offsets) -> Offsets:
        known = decisions.subscribed(begin, set(self._catalog.topics_or_last()))
        if known is not begin:
            left = sorted({q.topic for q in begin.positions} - {q.topic for q in known.positions})
            if left != self._left:
                logger.warning(
                    "topics that are no longer subscribed to are removed from the offsets: %s", ", ".join(left)
                )
            self._left = left
        return known

    def _answering(self, view: QueuesView, unanswered: Mapping[Share, RocketMQError]) -> QueuesView:
        """Without the queues of which it is not known whether they were made again: their broker is waited for."""
        self._unproven = bool(unanswered)
        for error in unanswered.values():
            if self._frozen is not None:  # this run may not end without them
                raise error
            self._catalog.waits(error)
        if not unanswered:
            return view
        return replace(view, bounds={q: b for q, b in view.bounds.items() if share(q) not in unanswered})

    def _sample(self, queue: MessageQueue, begin: Offsets, minimum: int) -> tuple[int, int]:
        offset = max(begin.positions.get(queue, minimum), minimum)
        try:
            # A guess is not worth a long wait, in which others have something to be read.
            deadline = Deadline.after(min(1.0, self._options.request_timeout))
            return self._catalog.offsets.sample(self._options.group, queue, offset, deadline)
        except RocketMQError as e:
            if not e.retriable:
                raise
            return 0, 0  # what was learnt before has to do, or a cautious guess


def _warn_of_no_topic(options: Options, bounds: Bounds) -> None:
    if options.subscribe_pattern is not None and not bounds:
        logger.warning(
            "no topic matches option 'subscribePattern' %r yet; the stream waits for one, and reads it from its first message",
            options.subscribe_pattern,
        )


def _reads(options: Options, catalog: OffsetCache) -> dict[str, object]:
    return filters.recorded(options, _clusters(catalog))


def _clusters(catalog: OffsetCache) -> list[str]:
    return filters.clusters_of(catalog.known_routes.values())


def _of_all(catalog: OffsetCache) -> QueuesView:
    """What exists, from all brokers: what was planned before is read as it was."""
    try:
        return patiently(catalog, catalog.sweep)
    except RocketMQError as e:
        if e.retriable and e.queue is not None:
            tasks.add_waiting_advice(e, "its broker", streaming=True)
        raise


def _tell_guess(max_bytes: int) -> bool:
    logger.warning(
        "option 'maxBytesPerTrigger' is %d, but no broker returned a sample of the unread messages: until one does, each "
        "message is assumed to have %d bytes, so batches are small",
        max_bytes,
        planner.LARGEST_BYTES,
    )
    return True
