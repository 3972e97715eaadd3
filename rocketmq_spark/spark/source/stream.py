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
from rocketmq_spark.queues.environment import is_by_position
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
        # AvailableNow: the ends up to which this run reads. If requested, the next ``latestOffset`` still has to fetch them.
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
        self._last_idle_plan: tuple[QueuesView, Offsets] | None = None
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
        bounds, initial_watch = view.bounds, self._new_watch()
        initial_watch.start(view.master_bounds())
        retry_until_deadline(catalog, lambda: self._check_filter(bounds))
        _warn_if_no_topic(options, bounds)
        start = retry_until_deadline(
            catalog, lambda: starting_offsets(offsets, options, bounds, planning_deadline(options))
        )
        with_compaction_start(catalog, options, view, start)  # the first plan may use the view that this fetches
        newest_store_ms = planning.newest_store_ms(start, Offsets({}), bounds)
        newest_store_ms |= self._recreation_watch.newest_store_ms(
            Offsets(start), bounds, Deadline.after(options.request_timeout)
        )
        self._validated, self._initial_watch = True, initial_watch
        return Offsets(start, {}, newest_store_ms, _source_identity(options, catalog), catalog.environment)

    def _new_watch(self) -> RecreationWatch:
        return RecreationWatch(lambda: self._catalog.offsets, self._options.group)

    def latestOffset(self, start: Offsets, limits: TriggerLimits, finished: bool = True) -> Offsets:
        """Return the end of the next batch, or ``start`` itself if there is no batch.

        ``finished``: Spark has processed everything before ``start``, so ``start`` may be committed as the offsets of the group.
        """
        self._last_end = self._next_end(start, limits, finished)
        return self._last_end

    def _next_end(self, start: Offsets, limits: TriggerLimits, finished: bool) -> Offsets:
        if self._start_error is not None and start == self._initial_offset:
            raise self._start_error
        self._validate(start)
        self._catalog.set_checkpoint_offsets(start, self._available_now_ends)
        if self._available_now_requested:
            self._available_now_ends = retry_until_deadline(
                self._catalog, lambda: fetch_bounds_of_masters(self._catalog).ends()
            )
            self._available_now_requested = False
        if finished:
            self._group_offsets.commit(start.positions)
        if self._available_now_ends is not None:
            return retry_until_deadline(self._catalog, lambda: self._plan_end(start, limits))
        try:
            return self._plan_end(start, limits)
        except RocketMQError as e:
            self._catalog.note_retriable_error(e)
        self._clock.sleep(_RETRY_PAUSE_S)
        return start

    def _plan_end(self, start: Offsets, limits: TriggerLimits) -> Offsets:
        if self._last_idle_plan is not None and self._last_idle_plan[1] is start and self._available_now_ends is None:
            self._catalog.wait_for_next_poll(_MAX_IDLE_WAIT_S)
        if self._delayed_start is start:
            self._clock.sleep(_MAX_IDLE_WAIT_S)
        view = self._wait_for_view(start)
        if self._last_idle_plan is not None and self._last_idle_plan[0] is view and self._last_idle_plan[1] is start:
            return start
        self._check_filter(view.bounds)
        if self._unlogged_queues:
            self._unlogged_queues -= kafka_partitions.partition_numbers(start.partitions).keys()
        if self._unlogged_queues:
            # An empty batch logs the numbers of the repeated batch now, because the next batch may come days later, in another
            # run.
            return replace(start, new_queue_starts={}, partitions=self._runs_between(start, start))
        adapted, readable_view = self._apply_queue_changes(start, planning.without_timed_out(view))
        ends = planning.readable_ends(readable_view, self._available_now_ends)
        first_offsets = {queue: readable_view.bounds[queue].min_offset for queue in ends}
        from_minimum = planning.from_min_offsets(adapted, readable_view.bounds)
        backlog = planning.backlog({**first_offsets, **from_minimum.positions}, ends)
        if self._available_now_ends is not None:
            # Up to fixed ends, a wait brings no more messages.
            limits = replace(limits, min_offsets=None)
        max_offsets = self._read_limit_policy.max_offsets(
            backlog, limits, lambda queue: self._sample_size(queue, adapted, first_offsets[queue]), self._clock.now()
        )
        if max_offsets == 0:
            self._delayed_start, self._last_idle_plan = start, None
            return start
        if backlog and limits.max_bytes is not None and self._read_limit_policy.has_no_sample:
            self._warned_of_size_estimate = self._warned_of_size_estimate or _warn_of_size_estimate(limits.max_bytes)
        end = planning.next_end(from_minimum, ends, first_offsets, max_offsets)
        if end is start:
            self._last_idle_plan = None if backlog or self._recreation_unknown else (view, start)
            if not (backlog or view.timed_out_brokers or adapted.positions.keys() - readable_view.bounds.keys()):
                self._read_limit_policy.nothing_to_read(self._clock.now())
            return start
        end = planning.batch_end(start, adapted, end, readable_view, self._initial_offset)
        newest_store_ms = self._recreation_watch.newest_store_ms(
            end, readable_view.bounds, Deadline.after(self._options.request_timeout)
        )
        end = replace(end, newest_store_ms={**end.newest_store_ms, **newest_store_ms}) if newest_store_ms else end
        self._read_limit_policy.batch_planned(self._clock.now())
        return replace(
            end,
            source_identity=_source_identity(self._options, self._catalog),
            environment=self._catalog.environment,
            plan=self._partitioning.to_json(),
            partitions=self._runs_between(start, end),
        )

    def _runs_between(self, start: Offsets, end: Offsets) -> QueueRuns:
        """Return the queues by partition number for ``kafkaColumns``: the runs of the checkpoint and of this run, with new queues
        appended. Without the option, the runs of the checkpoint are returned unchanged.
        """
        topics = {queue.topic for queue in (*start.positions, *end.positions)}
        logged_runs = {
            topic: runs for topic, runs in {**start.partitions, **self._partition_runs}.items() if topic in topics
        }
        if not self._options.kafka_columns:
            return logged_runs
        routed_queues = self._catalog.partition_queues(topics, numbered_topics=logged_runs)
        self._partition_runs = kafka_partitions.with_new_queues(
            logged_runs, (*routed_queues, *start.positions, *end.positions)
        )
        return self._partition_runs

    def _numbers_for_batch(self, end: Offsets, queues: set[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the partition numbers for a batch that reads ``queues``, as its log entry has them.

        A batch that was logged without ``kafkaColumns`` gets numbers now, and the next log entry records them.
        """
        if not self._options.kafka_columns:
            return {}
        numbers = kafka_partitions.partition_numbers(end.partitions)
        if not (unnumbered := queues - numbers.keys()):
            return numbers
        self._unlogged_queues |= unnumbered
        return kafka_partitions.partition_numbers(self._runs_between(end, end))

    def _wait_for_view(self, start: Offsets) -> QueuesView:
        """Return the current view. An AvailableNow run waits for brokers that have messages before its ends.

        Raises ``BrokerNotFound`` if such a broker does not answer within ``readDeadline``.
        """
        deadline = Deadline.after(self._options.read_deadline)
        while True:
            polled = self._catalog.latest(wait_for_all=self._available_now_ends is not None)
            view = planning.without_stale_replicas(start, polled)
            pending = planning.pending_queues(start, view, self._available_now_ends)
            removed = self._catalog.removed_queue_ends(pending, view)
            pending = [queue for queue in pending if queue not in removed]
            if not pending:
                self._log_unavailable_queues(start, polled, view)
                return view
            if deadline.expired:
                cause, first_queue = self._catalog.retriable_failures.first_error, pending[0]
                reason = subscription.unavailable_reason(self._catalog.known_routes.get(first_queue.topic), first_queue)
                raise BrokerNotFound(
                    f"no broker answers for {queues_text(pending)}, which this run must read to its end",
                    cause.addr if cause else None,
                    remark=cause.message if cause else reason,
                    remedy="Check the brokers, or raise option 'readDeadline'",
                ) from cause
            self._clock.sleep(_RETRY_PAUSE_S)

    def _log_unavailable_queues(self, start: Offsets, polled: QueuesView, view: QueuesView) -> None:
        if (
            self._last_unavailable_check is not None
            and self._last_unavailable_check[0] is start
            and self._last_unavailable_check[1] is polled
        ):
            return
        self._last_unavailable_check = start, polled
        topics = set(self._catalog.topics_or_last_known())
        subscribed_queues = (
            queue for queue in start.positions if queue.topic in topics and not view.is_topic_deleted(queue)
        )
        self._unavailable_queues.update(
            subscribed_queues,
            view.bounds,
            lambda q: subscription.unavailable_reason(self._catalog.known_routes.get(q.topic), q),
            run_ends=self._available_now_ends is not None,
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
        if is_by_position(self._options) or self._options.assign:  # only the positions show which queues the run reads
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
        # This run has not planned a batch yet, so an earlier run logged this one.
        logged_before = self._last_end is None
        if logged_before:
            checkpoint_identity.check_checkpoint(self._options, end)
        # Only a restart repeats several batches as one. Batch 0 is read from the starts that its end records, because ``start``
        # is resolved again from the starting options, and may differ.
        new_ranges = planning.new_queue_ranges(start, end) if logged_before and start != self._initial_offset else []
        ranges = sorted([*planning.ranges(start, end), *new_ranges])
        if not ranges:
            return []
        # The tasks of a batch depend on its log entry alone. If messages were lost, a task has fewer rows, or none: the other
        # tasks, and those of the next source of a union, keep their numbers, which are part of the ids of exactly-once.
        planned_tasks = partitioning.plan_tasks(self._logged_partitioning(end, ranges), end.positions, ranges)
        if self._start_error is not None and start == self._initial_offset:
            start = replace(end, positions=end.new_queue_starts)
        known_offsets = planning.combined_start(start, end) if logged_before or end.new_queue_starts else start
        self._catalog.set_checkpoint_offsets(known_offsets)
        losses: list[Loss] = []
        if not logged_before:
            view = self._catalog.latest(same_batch=True)
        else:
            view = _fetch_all(self._catalog)
            checkpoint_identity.check_clusters(self._options, end, _known_clusters(self._catalog))
            checkpoint_identity.check_environment_queues(self._options, end, self._catalog.environment)
            ranges, lost = planning.drop_recreated(ranges, view, self._recreated_since(end, view, ranges))
            losses += self._report_losses(lost)
        self._validate(known_offsets, view)
        self._start_error = None  # a batch was logged, so the starting options have no effect any more
        # No loss: a new queue starts with its first message.
        expired_ranges = planning.truncated(new_ranges, view.master_bounds())
        ranges = planning.without_lost(ranges, expired_ranges)
        ranges, lost = planning.readable_ranges(ranges, view)
        losses += self._report_losses(lost)
        mismatched = partition_reader.replica_mismatches(
            self._options, self._catalog.routes, self._catalog.offsets, ranges
        )
        lost_ranges = [*expired_ranges, *(lost_range for lost_range, _ in losses)]
        remaining_tasks = [planning.without_lost(task, lost_ranges) for task in planned_tasks]
        partition_numbers = self._numbers_for_batch(end, {part.queue for part in ranges})
        return partition_reader.input_partitions(
            self._catalog.routes, remaining_tasks, mismatched, end, partition_numbers
        )

    def _logged_partitioning(self, end: Offsets, ranges: Sequence[OffsetRange]) -> Partitioning:
        """Return the options that split the batch into tasks when its end was logged. Warns if the end does not record an option;
        then its present value is used.

        A batch of one row is one task with any options, so it causes no warning.
        """
        logged, unusable_names = partitioning.logged_partitioning(end.plan, self._partitioning)
        if unusable_names and not self._warned_of_split and sum(r.size for r in ranges) > 1:
            self._warned_of_split = True
            logger.warning(
                "the offset of this batch does not say what decided its tasks (%s): another version of rocketmq-spark planned "
                "the batch, or another callable as allocationStrategy did. The present options decide now. If the options "
                "changed since the first attempt, a sink with deliveryGuarantee=exactly-once may store rows of this batch twice",
                ", ".join(unusable_names),
            )
        return logged

    def _report_losses(self, losses: Sequence[Loss]) -> Sequence[Loss]:
        """Report ``losses`` and return it. Raises ``DataLossError`` if option ``failOnDataLoss`` says so."""
        data_loss.report_data_loss(self._options.fail_on_data_loss, losses)
        self._progress.add_losses(losses)
        return losses

    def _recreated_since(self, end: Offsets, view: QueuesView, ranges: Sequence[OffsetRange]) -> list[MessageQueue]:
        """Return the queues of a logged batch whose topics were created again while the query was down."""
        logged_end, bounds = planning.logged_end(ranges, end, view), view.master_bounds()
        watch = self._new_watch()  # not the stream's own watch, which must start with all queues

        def check() -> list[MessageQueue]:
            result = watch.check(logged_end, bounds, planning_deadline(self._options))
            for error in result.unanswered.values():
                raise error
            return result.recreated

        return retry_until_deadline(self._catalog, check)

    def _validate(self, start: Offsets, view: QueuesView | None = None) -> None:
        """Check the checkpoint and the options once per run, with the bounds of ``view``, by default of a new poll."""
        if self._validated:
            return
        options = self._options
        self._catalog.set_checkpoint_offsets(start)
        catalog = self._catalog
        bounds = (view or retry_until_deadline(catalog, catalog.fetch_all)).bounds
        checkpoint_identity.check_clusters(options, start, _known_clusters(catalog))
        checkpoint_identity.check_environment_queues(options, start, catalog.environment)
        retry_until_deadline(catalog, lambda: self._check_filter(bounds))
        _warn_if_no_topic(options, bounds)
        self._validated = True
        if options.given & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
            logger.warning("the query continues from its checkpoint; starting options have no effect")
        filter_before, filter_now = (
            checkpoint_identity.filter_of(start.source_identity),
            checkpoint_identity.filter_of(checkpoint_identity.source_identity(options)),
        )
        if filter_before != filter_now:
            logger.warning("the filter changed from %s to %s since the last run", filter_before, filter_now)
        new_topics = sorted({queue.topic for queue in bounds} - {queue.topic for queue in start.positions})
        if new_topics:
            logger.warning(
                "topics that are not in the checkpoint start at their first offset: %s", ", ".join(new_topics)
            )

    def _check_filter(self, bounds: Bounds) -> None:
        """Let brokers check the filter once per run, when there is a queue: at first, a pattern may match no topic."""
        if bounds and not self._filter_checked:
            check_filter(self._options, bounds)
            self._filter_checked = True

    def _apply_queue_changes(self, start: Offsets, view: QueuesView) -> tuple[Offsets, QueuesView]:
        """Return ``start`` adapted to changes of its queues, and the view without queues that cannot be planned now.

        Reports losses: raises ``DataLossError`` if option ``failOnDataLoss`` says so.
        """
        subscribed = self._drop_unsubscribed(start)
        if self._initial_watch is not None:
            # If the first batch was logged by an earlier run, its start is older than what the initial watch has seen.
            self._recreation_watch, self._initial_watch = (
                self._initial_watch if start == self._initial_offset else self._recreation_watch,
                None,
            )
        # All requests together get the time of one, so a broker that hangs does not delay the queues of others.
        deadline = Deadline.after(self._options.request_timeout)
        result = self._recreation_watch.check(subscribed, view.master_bounds(), deadline, view.connections)
        view = self._without_unanswered(view, result.unanswered)
        removed = self._catalog.removed_queue_ends(
            (queue for queue in subscribed.positions if queue not in view.bounds), view
        )
        adapted, losses = planning.apply_queue_changes(
            subscribed, view, self._available_now_ends, result.recreated, removed
        )
        if losses and self._available_now_ends is not None:
            self._available_now_ends = planning.capped_target(view, self._available_now_ends, removed)
        self._report_new_losses(start, losses)
        return adapted, view

    def _report_new_losses(self, start: Offsets, losses: list[Loss]) -> None:
        """Report each loss once per start: while a batch waits for more messages, each plan from ``start`` finds it again."""
        must_fail = self._options.fail_on_data_loss == "fail"
        reported_before = (
            self._reported_losses[1]
            if self._reported_losses is not None and self._reported_losses[0] is start
            else frozenset()
        )
        new_losses = [part for part in losses if must_fail or part not in reported_before]
        data_loss.report_data_loss(self._options.fail_on_data_loss, new_losses)
        self._progress.add_losses(new_losses)
        self._reported_losses = (start, reported_before.union(losses)) if losses else self._reported_losses

    def _drop_unsubscribed(self, start: Offsets) -> Offsets:
        subscribed = planning.drop_unsubscribed(start, set(self._catalog.topics_or_last_known()))
        if subscribed is not start:
            unsubscribed = sorted({q.topic for q in start.positions} - {q.topic for q in subscribed.positions})
            if unsubscribed != self._unsubscribed_topics:
                logger.warning(
                    "topics that are no longer subscribed to are removed from the offsets: %s", ", ".join(unsubscribed)
                )
            self._unsubscribed_topics = unsubscribed
        return subscribed

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

    def _sample_size(self, queue: MessageQueue, start: Offsets, minimum: int) -> tuple[int, int]:
        offset = max(start.positions.get(queue, minimum), minimum)
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
