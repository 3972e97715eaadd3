"""The driver of a stream: it plans where the stream starts, where a batch ends, and which messages were lost.

Spark passes offsets from its offset log, and logs the offsets that this module returns. ``Stream`` remembers nothing that it
could not request from the brokers again. Spark may call any method first. This module sends the requests; ``planning`` decides.
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
from rocketmq_spark.spark.source import (
    checkpoint_identity,
    data_loss,
    kafka_partitions,
    partition_reader,
    partitioning,
    planning,
    subscription,
)
from rocketmq_spark.spark.source.catalog import OffsetCache, check_filter, planning_deadline
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.group_offsets import GroupOffsets
from rocketmq_spark.spark.source.kafka_partitions import QueueRuns
from rocketmq_spark.spark.source.offsets import Bounds, OffsetLogCache, Offsets, Positions, queues_text
from rocketmq_spark.spark.source.partition_reader import RangePartition
from rocketmq_spark.spark.source.partitioning import Partitioning
from rocketmq_spark.spark.source.planning import QueuesView, ReadLimitPolicy, TriggerLimits
from rocketmq_spark.spark.source.progress import ProgressReporter
from rocketmq_spark.spark.source.recreated_topics import RecreationWatch, TopicBroker, topic_broker
from rocketmq_spark.spark.source.starting_offsets import starting_offsets
from rocketmq_spark.spark.source.waiting import (
    UnavailableQueuesLog,
    fetch_bounds_of_masters,
    retry_until_deadline,
    with_compaction_start,
)

logger = logging.getLogger(__name__)

# How long ``latestOffset`` waits if the stream is idle or waits for ``minOffsetsPerTrigger``. Without a wait, Spark would call it
# again at once, and each call parses and compares the offsets of all queues. Other sources of the query wait, too.
_MAX_IDLE_WAIT_S = 0.1
# Pause before the next request after brokers did not answer.
_RETRY_PAUSE_S = 0.2


class Stream:
    """One run of a streaming query. Confined to one thread.

    Several attributes compare offsets and views by identity: ``OffsetLogCache`` returns the same object for an equal log entry,
    and ``OffsetCache`` returns the same view until the next poll.
    """

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.log = OffsetLogCache()
        self._clock = clock or Clock()
        self._catalog = OffsetCache(options, self._clock)
        self._group_offsets = GroupOffsets(options)
        self._read_limit_policy = ReadLimitPolicy(options.max_trigger_delay)
        self._unavailable_queues = UnavailableQueuesLog()
        # The start and the view for which unavailable queues were logged last.
        self._last_unavailable_check: tuple[Offsets, QueuesView] | None = None
        # The start of a new query once it is resolved. If it could not be resolved: the error, which ``latestOffset`` raises.
        self._initial_offset: Offsets | None = None
        self._start_error: RocketMQError | None = None
        # AvailableNow: the ends up to which this run reads. If ``requested``, the next ``latestOffset`` still has to fetch them.
        self._available_now_requested = False
        self._available_now_ends: Positions | None = None
        # Whether the checkpoint and the options were checked in this run, and whether brokers checked the filter.
        self._validated = self._filter_checked = False
        self._recreation_watch = self._new_watch()
        # The watch that began with the bounds of ``initialOffset``. It replaces ``_recreation_watch`` if the first batch starts
        # there.
        self._initial_watch: RecreationWatch | None = None
        # Whether a broker did not answer whether its topics were created again.
        self._recreation_unknown = False
        # The topics that the last plan dropped from the offsets; a change is logged.
        self._unsubscribed_topics: list[str] = []
        # The losses that were reported for a start: while a batch waits for more messages, each plan finds them again.
        self._reported_losses: tuple[Offsets, frozenset[Loss]] | None = None
        # The view and the start of the last plan, if it found nothing to read.
        self._idle_at: tuple[QueuesView, Offsets] | None = None
        # The start of the last plan, if it waits for ``minOffsetsPerTrigger``.
        self._delayed_start: Offsets | None = None
        self._progress = ProgressReporter()
        self._partitioning = Partitioning.of(options)
        self._warned_of_split = False
        # What ``latestOffset`` returned last; None before its first call in this run.
        self._last_end: Offsets | None = None
        self._warned_of_size_estimate = False
        # The last report, with the view and the end that it describes.
        self._last_report: tuple[QueuesView, Offsets | None, dict[str, Any]] | None = None
        # The newest partition numbers, and the queues of a repeated batch whose number is in no log entry yet.
        self._partition_runs: QueueRuns = {}
        self._unlogged_queues: set[MessageQueue] = set()

    def initialOffset(self) -> Offsets:
        """Return the start of a new query. Spark calls this twice and plans with the second answer, so the start is resolved
        once.
        """
        if self._initial_offset is None:
            try:
                self._initial_offset = self._resolve_start()
            except (OffsetError, OptionError, RouteNotFound, TopicNotFound) as e:
                # Spark also calls this if batch 0 was logged and not committed. Then the logged end has the start of the batch,
                # and ``failOnDataLoss`` decides about topics and queues that no longer exist. A new query fails in
                # ``latestOffset``.
                self._start_error, self._initial_offset = e, Offsets({})
        return self._initial_offset

    def _resolve_start(self) -> Offsets:
        catalog, options = self._catalog, self._options
        view, offsets = fetch_bounds_of_masters(catalog), catalog.offsets
        bounds, began = view.bounds, self._new_watch()
        began.start(view.master_bounds())
        retry_until_deadline(catalog, lambda: self._check_filter(bounds))
        _warn_if_no_topic(options, bounds)
        begin = retry_until_deadline(
            catalog, lambda: starting_offsets(offsets, options, bounds, planning_deadline(options))
        )
        with_compaction_start(catalog, options, view, begin)  # the first plan may use the view that this fetches
        marks = planning.newest_store_ms(begin, Offsets({}), bounds)
        marks |= self._recreation_watch.newest_store_ms(Offsets(begin), bounds, Deadline.after(options.request_timeout))
        self._validated, self._initial_watch = True, began
        return Offsets(begin, {}, marks, _source_identity(options, catalog), catalog.environment)

    def _new_watch(self) -> RecreationWatch:
        return RecreationWatch(lambda: self._catalog.offsets, self._options.group)

    def latestOffset(self, begin: Offsets, limits: TriggerLimits, finished: bool = True) -> Offsets:
        """Return the end of the next batch, or ``begin`` itself if there is no batch.

        ``finished``: Spark has processed everything before ``begin``, so ``begin`` may be committed as the offsets of the group.
        """
        self._last_end = self._next_end(begin, limits, finished)
        return self._last_end

    def _next_end(self, begin: Offsets, limits: TriggerLimits, finished: bool) -> Offsets:
        if self._start_error is not None and begin == self._initial_offset:
            raise self._start_error
        self._validate(begin)
        self._catalog.set_checkpoint_offsets(begin, self._available_now_ends)
        if self._available_now_requested:
            self._available_now_ends = retry_until_deadline(
                self._catalog, lambda: fetch_bounds_of_masters(self._catalog).ends()
            )
            self._available_now_requested = False
        if finished:
            self._group_offsets.commit(begin.positions)
        if self._available_now_ends is not None:
            return retry_until_deadline(self._catalog, lambda: self._plan_end(begin, limits))
        try:
            return self._plan_end(begin, limits)
        except RocketMQError as e:
            self._catalog.note_retriable_error(e)
        self._clock.sleep(_RETRY_PAUSE_S)
        return begin

    def _plan_end(self, begin: Offsets, limits: TriggerLimits) -> Offsets:
        if self._idle_at is not None and self._idle_at[1] is begin and self._available_now_ends is None:
            self._catalog.wait_for_next_poll(_MAX_IDLE_WAIT_S)
        if self._delayed_start is begin:
            self._clock.sleep(_MAX_IDLE_WAIT_S)
        view = self._wait_for_view(begin)
        if self._idle_at is not None and self._idle_at[0] is view and self._idle_at[1] is begin:
            return begin
        self._check_filter(view.bounds)
        if self._unlogged_queues:
            self._unlogged_queues -= kafka_partitions.partition_numbers(begin.partitions).keys()
        if self._unlogged_queues:
            # An empty batch logs the numbers of the repeated batch now, because the next batch may come days later, in another
            # run.
            return replace(begin, new_queue_starts={}, partitions=self._runs_between(begin, begin))
        moved, readable = self._apply_queue_changes(begin, planning.without_timed_out(view))
        ends = planning.readable_ends(readable, self._available_now_ends)
        begins = {queue: readable.bounds[queue].min_offset for queue in ends}
        live = planning.from_min_offsets(moved, readable.bounds)
        waiting = planning.backlog({**begins, **live.positions}, ends)
        if self._available_now_ends is not None:
            # Up to fixed ends, a wait brings no more messages.
            limits = replace(limits, min_offsets=None)
        max_offsets = self._read_limit_policy.max_offsets(
            waiting, limits, lambda queue: self._sample_size(queue, moved, begins[queue]), self._clock.now()
        )
        if max_offsets == 0:
            self._delayed_start, self._idle_at = begin, None
            return begin
        if waiting and limits.max_bytes is not None and self._read_limit_policy.has_no_sample:
            self._warned_of_size_estimate = self._warned_of_size_estimate or _warn_of_size_estimate(limits.max_bytes)
        end = planning.next_end(live, ends, begins, max_offsets)
        if end is begin:
            self._idle_at = None if waiting or self._recreation_unknown else (view, begin)
            if not (waiting or view.timed_out_brokers or moved.positions.keys() - readable.bounds.keys()):
                self._read_limit_policy.nothing_to_read(self._clock.now())
            return begin
        end = planning.batch_end(begin, moved, end, readable, self._initial_offset)
        marks = self._recreation_watch.newest_store_ms(
            end, readable.bounds, Deadline.after(self._options.request_timeout)
        )
        end = replace(end, newest_store_ms={**end.newest_store_ms, **marks}) if marks else end
        self._read_limit_policy.batch_planned(self._clock.now())
        return replace(
            end,
            source_identity=_source_identity(self._options, self._catalog),
            environment=self._catalog.environment,
            plan=self._partitioning.to_json(),
            partitions=self._runs_between(begin, end),
        )

    def _runs_between(self, begin: Offsets, end: Offsets) -> QueueRuns:
        """Return the queues by partition number for ``kafkaColumns``: the runs of the checkpoint and of this run, with new queues
        appended. Without the option, the runs of the checkpoint are returned unchanged.
        """
        topics = {queue.topic for queue in (*begin.positions, *end.positions)}
        kept = {topic: runs for topic, runs in {**begin.partitions, **self._partition_runs}.items() if topic in topics}
        if not self._options.kafka_columns:
            return kept
        there = self._catalog.numbered_queues(topics, begun=kept)
        self._partition_runs = kafka_partitions.with_new_queues(kept, (*there, *begin.positions, *end.positions))
        return self._partition_runs

    def _numbers_for_batch(self, end: Offsets, queues: set[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the partition numbers for a batch that reads ``queues``, as its log entry has them.

        A batch that was logged without ``kafkaColumns`` gets numbers now, and the next log entry records them.
        """
        if not self._options.kafka_columns:
            return {}
        numbers = kafka_partitions.partition_numbers(end.partitions)
        if not (lacking := queues - numbers.keys()):
            return numbers
        self._unlogged_queues |= lacking
        return kafka_partitions.partition_numbers(self._runs_between(end, end))

    def _wait_for_view(self, begin: Offsets) -> QueuesView:
        """Return the current view. An AvailableNow run waits for brokers that have messages before its ends.

        Raises ``BrokerNotFound`` if such a broker does not answer within ``readDeadline``.
        """
        deadline = Deadline.after(self._options.read_deadline)
        while True:
            recent = self._catalog.latest(patient=self._available_now_ends is not None)
            view = planning.without_stale_replicas(begin, recent)
            missing = planning.pending_queues(begin, view, self._available_now_ends)
            unread = self._catalog.removed_queue_ends(missing, view)
            missing = [queue for queue in missing if queue not in unread]
            if not missing:
                self._log_unavailable_queues(begin, recent, view)
                return view
            if deadline.expired:
                cause, first = self._catalog.retriable_failures.first, missing[0]
                why = subscription.unavailable_reason(self._catalog.known_routes.get(first.topic), first)
                raise BrokerNotFound(
                    f"no broker answers for {queues_text(missing)}, which this run must read to its end",
                    cause.addr if cause else None,
                    remark=cause.message if cause else why,
                    remedy="Check the brokers, or raise option 'readDeadline'",
                ) from cause
            self._clock.sleep(_RETRY_PAUSE_S)

    def _log_unavailable_queues(self, begin: Offsets, recent: QueuesView, view: QueuesView) -> None:
        if (
            self._last_unavailable_check is not None
            and self._last_unavailable_check[0] is begin
            and self._last_unavailable_check[1] is recent
        ):
            return
        self._last_unavailable_check = begin, recent
        topics = set(self._catalog.topics_or_last_known())
        wanted = (queue for queue in begin.positions if queue.topic in topics and not view.is_topic_deleted(queue))
        self._unavailable_queues.update(
            wanted,
            view.bounds,
            lambda q: subscription.unavailable_reason(self._catalog.known_routes.get(q.topic), q),
            ends=self._available_now_ends is not None,
        )

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the current ends of all queues and the figures of this run, for the progress of the query."""
        view, end = self._catalog.latest(same_batch=True), self._last_end
        if self._last_report is None or self._last_report[0] is not view or self._last_report[1] is not end:
            report = self._progress.report(view, end, int(self._clock.now() * 1000))
            self._last_report = (view, end, {**report, **Offsets(view.ends()).to_json()})
        return self._last_report[2]

    def prepareForTriggerAvailableNow(self) -> None:
        """Make this run end at the current ends of the queues.

        If a master does not answer, or if the queues depend on the positions, the first ``latestOffset`` fetches the ends.
        """
        if by_position(self._options) or self._options.assign:  # only the positions show which queues the run reads
            self._available_now_requested = True
            return
        try:
            view = self._catalog.fetch_all()
        except RocketMQError as e:
            if not e.retriable:
                raise
            self._available_now_requested = True
        else:
            self._available_now_requested = len(view.master_bounds()) < len(view.bounds)
            self._available_now_ends = view.ends()

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """Return the tasks of a batch. If the batch was logged and not committed, this may be the first call of a run."""
        logged_before = (
            self._last_end is None
        )  # this run has not planned a batch yet, so an earlier run logged this one
        if logged_before:
            checkpoint_identity.check_checkpoint(self._options, end)
        # Only a restart repeats several batches as one. Batch 0 is read from the starts that its end records, because ``start``
        # is resolved again from the starting options, and may differ.
        begun = planning.new_queue_ranges(start, end) if logged_before and start != self._initial_offset else []
        ranges = sorted([*planning.ranges(start, end), *begun])
        if not ranges:
            return []
        # The tasks of a batch depend on its log entry alone. If messages were lost, a task has fewer rows, or none: the other
        # tasks, and those of the next source of a union, keep their numbers, which are part of the ids of exactly-once.
        planned = partitioning.plan_tasks(self._logged_partitioning(end, ranges), end.positions, ranges)
        if self._start_error is not None and start == self._initial_offset:
            start = replace(end, positions=end.new_queue_starts)
        known = planning.combined_start(start, end) if logged_before or end.new_queue_starts else start
        self._catalog.set_checkpoint_offsets(known)
        losses: list[Loss] = []
        if not logged_before:
            view = self._catalog.latest(same_batch=True)
        else:
            view = _fetch_all(self._catalog)
            checkpoint_identity.check_clusters(self._options, end, _known_clusters(self._catalog))
            checkpoint_identity.check_environment_queues(self._options, end, self._catalog.environment)
            ranges, lost = planning.drop_recreated(ranges, view, self._recreated_since(end, view, ranges))
            losses += self._report_losses(lost)
        self._validate(known, view)
        self._start_error = None  # a batch was logged, so the starting options have no effect any more
        before = planning.truncated(begun, view.master_bounds())  # no loss: a new queue starts with its first message
        ranges = planning.without_lost(ranges, before)
        ranges, lost = planning.readable_ranges(ranges, view)
        losses += self._report_losses(lost)
        others = partition_reader.replica_mismatches(self._options, self._catalog.routes, self._catalog.offsets, ranges)
        lost_ranges = [*before, *(lost_range for lost_range, _ in losses)]
        left = [planning.without_lost(task, lost_ranges) for task in planned]
        numbers = self._numbers_for_batch(end, {part.queue for part in ranges})
        return partition_reader.input_partitions(self._catalog.routes, left, others, end, numbers)

    def _logged_partitioning(self, end: Offsets, ranges: Sequence[OffsetRange]) -> Partitioning:
        """Return the options that split the batch into tasks when its end was logged. Warns if the end does not record an option;
        then its present value is used.

        A batch of one row is one task with any options, so it causes no warning.
        """
        logged, unknown = partitioning.logged_partitioning(end.plan, self._partitioning)
        if unknown and not self._warned_of_split and sum(r.size for r in ranges) > 1:
            self._warned_of_split = True
            logger.warning(
                "the offset of this batch does not say what decided its tasks (%s): another version of rocketmq-spark planned "
                "the batch, or another callable as allocationStrategy did. The present options decide now. If the options "
                "changed since the first attempt, a sink with deliveryGuarantee=exactly-once may store rows of this batch twice",
                ", ".join(unknown),
            )
        return logged

    def _report_losses(self, lost: Sequence[Loss]) -> Sequence[Loss]:
        """Report ``lost`` and return it. Raises ``DataLossError`` if option ``failOnDataLoss`` says so."""
        data_loss.report_data_loss(self._options.fail_on_data_loss, lost)
        self._progress.add_losses(lost)
        return lost

    def _recreated_since(self, end: Offsets, view: QueuesView, ranges: Sequence[OffsetRange]) -> list[MessageQueue]:
        """Return the queues of a logged batch whose topics were created again while the query was down."""
        logged, bounds = planning.logged_end(ranges, end, view), view.master_bounds()
        watch = self._new_watch()  # not the stream's own watch, which must start with all queues

        def look() -> list[MessageQueue]:
            found = watch.check(logged, bounds, planning_deadline(self._options))
            for error in found.unanswered.values():
                raise error
            return found.recreated

        return retry_until_deadline(self._catalog, look)

    def _validate(self, begin: Offsets, view: QueuesView | None = None) -> None:
        """Check the checkpoint and the options once per run, with the bounds of ``view``, by default of a new poll."""
        if self._validated:
            return
        options = self._options
        self._catalog.set_checkpoint_offsets(begin)
        catalog = self._catalog
        bounds = (view or retry_until_deadline(catalog, catalog.fetch_all)).bounds
        checkpoint_identity.check_clusters(options, begin, _known_clusters(catalog))
        checkpoint_identity.check_environment_queues(options, begin, catalog.environment)
        retry_until_deadline(catalog, lambda: self._check_filter(bounds))
        _warn_if_no_topic(options, bounds)
        self._validated = True
        if options.given & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
            logger.warning("the query continues from its checkpoint; starting options have no effect")
        was, now = (
            checkpoint_identity.filter_of(begin.source_identity),
            checkpoint_identity.filter_of(checkpoint_identity.source_identity(options)),
        )
        if was != now:
            logger.warning("the filter changed from %s to %s since the last run", was, now)
        added = sorted({queue.topic for queue in bounds} - {queue.topic for queue in begin.positions})
        if added:
            logger.warning("topics that are not in the checkpoint start at their first offset: %s", ", ".join(added))

    def _check_filter(self, bounds: Bounds) -> None:
        """Let brokers check the filter once per run, when there is a queue: at first, a pattern may match no topic."""
        if bounds and not self._filter_checked:
            check_filter(self._options, bounds)
            self._filter_checked = True

    def _apply_queue_changes(self, begin: Offsets, view: QueuesView) -> tuple[Offsets, QueuesView]:
        """Return ``begin`` adapted to changes of its queues, and the view without queues that cannot be planned now.

        Reports losses: raises ``DataLossError`` if option ``failOnDataLoss`` says so.
        """
        known = self._drop_unsubscribed(begin)
        if self._initial_watch is not None:
            # If the first batch was logged by an earlier run, its start is older than what the initial watch has seen.
            self._recreation_watch, self._initial_watch = (
                self._initial_watch if begin == self._initial_offset else self._recreation_watch,
                None,
            )
        # All requests together get the time of one, so a broker that hangs does not delay the queues of others.
        deadline = Deadline.after(self._options.request_timeout)
        found = self._recreation_watch.check(known, view.master_bounds(), deadline, view.connections)
        view = self._without_unanswered(view, found.unanswered)
        hidden = self._catalog.removed_queue_ends(
            (queue for queue in known.positions if queue not in view.bounds), view
        )
        moved, lost = planning.apply_queue_changes(known, view, self._available_now_ends, found.recreated, hidden)
        if lost and self._available_now_ends is not None:
            self._available_now_ends = planning.capped_target(view, self._available_now_ends, hidden)
        self._report_new_losses(begin, lost)
        return moved, view

    def _report_new_losses(self, begin: Offsets, lost: list[Loss]) -> None:
        """Report each loss once per start: while a batch waits for more messages, each plan from ``begin`` finds it again."""
        fail = self._options.fail_on_data_loss == "fail"
        reported = (
            self._reported_losses[1]
            if self._reported_losses is not None and self._reported_losses[0] is begin
            else frozenset()
        )
        new = [part for part in lost if fail or part not in reported]
        data_loss.report_data_loss(self._options.fail_on_data_loss, new)
        self._progress.add_losses(new)
        self._reported_losses = (begin, reported.union(lost)) if lost else self._reported_losses

    def _drop_unsubscribed(self, begin: Offsets) -> Offsets:
        known = planning.drop_unsubscribed(begin, set(self._catalog.topics_or_last_known()))
        if known is not begin:
            left = sorted({q.topic for q in begin.positions} - {q.topic for q in known.positions})
            if left != self._unsubscribed_topics:
                logger.warning(
                    "topics that are no longer subscribed to are removed from the offsets: %s", ", ".join(left)
                )
            self._unsubscribed_topics = left
        return known

    def _without_unanswered(self, view: QueuesView, unanswered: Mapping[TopicBroker, RocketMQError]) -> QueuesView:
        """Return ``view`` without queues whose broker did not answer whether they were created again. Raises the error in an
        AvailableNow run, which must not end without these queues.
        """
        self._recreation_unknown = bool(unanswered)
        for error in unanswered.values():
            if self._available_now_ends is not None:
                raise error
            self._catalog.note_retriable_error(error)
        if not unanswered:
            return view
        return replace(view, bounds={q: b for q, b in view.bounds.items() if topic_broker(q) not in unanswered})

    def _sample_size(self, queue: MessageQueue, begin: Offsets, minimum: int) -> tuple[int, int]:
        offset = max(begin.positions.get(queue, minimum), minimum)
        try:
            # A short deadline, because an estimate is enough, and the messages of other queues must not wait for it.
            deadline = Deadline.after(min(1.0, self._options.request_timeout))
            return self._catalog.offsets.sample(self._options.group, queue, offset, deadline)
        except RocketMQError as e:
            if not e.retriable:
                raise
            return 0, 0  # no sample: the limit uses earlier samples, or the largest size of a message


def _warn_if_no_topic(options: Options, bounds: Bounds) -> None:
    if options.subscribe_pattern is not None and not bounds:
        logger.warning(
            "no topic matches option 'subscribePattern' %r yet; the stream waits for one, and reads it from its first message",
            options.subscribe_pattern,
        )


def _source_identity(options: Options, catalog: OffsetCache) -> dict[str, object]:
    return checkpoint_identity.source_identity(options, _known_clusters(catalog))


def _known_clusters(catalog: OffsetCache) -> list[str]:
    return checkpoint_identity.clusters_of(catalog.known_routes.values())


def _fetch_all(catalog: OffsetCache) -> QueuesView:
    """Return the bounds of all queues. A batch that was planned before is read completely, so this waits for all brokers."""
    try:
        return retry_until_deadline(catalog, catalog.fetch_all)
    except RocketMQError as e:
        if e.retriable and e.queue is not None:
            partition_reader.add_waiting_advice(e, "its broker", streaming=True)
        raise


def _warn_of_size_estimate(max_bytes: int) -> bool:
    logger.warning(
        "option 'maxBytesPerTrigger' is %d, but no broker returned a sample of the unread messages: until one does, each "
        "message is assumed to have %d bytes, so batches are small",
        max_bytes,
        planning.ASSUMED_MESSAGE_BYTES,
    )
    return True
