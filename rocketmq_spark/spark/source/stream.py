"""Plans a stream in the driver: where the stream starts, where each batch ends, and which messages were lost.

Spark passes offsets from its offset log, and logs the offsets that this module returns. Spark may call any method first
in a new process, so ``Stream`` keeps only values that it can request from the brokers again. This module sends the
requests, and ``planning`` makes the decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    partition_reader,
    partitioning,
    planning,
    subscription,
)
from rocketmq_spark.spark.source.bounds_reader import BoundsReader, check_filter, planning_deadline
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.group_offsets import GroupOffsets
from rocketmq_spark.spark.source.offsets import Bounds, OffsetLogCache, Offsets, Positions, queues_text
from rocketmq_spark.spark.source.partition_numbers import PartitionNumbers
from rocketmq_spark.spark.source.partition_reader import RangePartition
from rocketmq_spark.spark.source.partitioning import Partitioning
from rocketmq_spark.spark.source.plan_state import (
    AvailableNowTarget,
    LastPlan,
    PlanOutcome,
    StartOffsets,
    TargetState,
)
from rocketmq_spark.spark.source.planning import QueuesView, ReadLimitPolicy, TriggerLimits
from rocketmq_spark.spark.source.progress import ProgressReport
from rocketmq_spark.spark.source.recreated_topics import RecreationResult, RecreationWatch, topic_broker
from rocketmq_spark.spark.source.starting_offsets import starting_offsets
from rocketmq_spark.spark.source.waiting import (
    UnavailableQueuesLog,
    WaitLimits,
    fetch_bounds_of_masters,
    retry_until,
    with_compaction_start,
)

logger = logging.getLogger(__name__)

# How long ``latestOffset`` pauses if the stream is idle or has fewer messages than ``minOffsetsPerTrigger``. Without a pause,
# Spark would call ``latestOffset`` again at once, and each call parses and compares the offsets of all queues. The pause also
# delays the other sources of the query.
_MAX_IDLE_WAIT_S = 0.1
# The pause before the next plan if brokers did not answer.
_RETRY_PAUSE_S = 0.2


class Stream:
    """One run of a streaming query. Confined to one thread."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or Clock()
        self.offset_log = OffsetLogCache()
        self._bounds_reader = BoundsReader(options, self._clock)
        self._group_offsets = GroupOffsets(options)
        self._read_limit_policy = ReadLimitPolicy(options.max_trigger_delay)
        self._partitioning = Partitioning.of(options)
        self._partitioning_json = self._partitioning.to_json()
        self._partition_numbers = PartitionNumbers(options, self._bounds_reader)
        self._unavailable_queues_log = UnavailableQueuesLog()
        self._progress_report = ProgressReport()
        # The keys of the warnings that were logged in this run.
        self._warned_keys: set[str] = set()
        # The start of the query. None until Spark asks for the start. Spark asks only while the first batch is not committed.
        self._initial_start: StartOffsets | None = None
        self._target = AvailableNowTarget()
        # The last plan of this run; None before the first plan.
        self._last_plan: LastPlan | None = None
        # The end that ``latestOffset`` returned last.
        self._last_end: Offsets | None = None
        # Whether the checkpoint and the options were checked in this run, and whether brokers checked the filter.
        self._has_checked_options = False
        self._is_filter_checked = False
        self._recreation_watch = self._new_watch()

    def _new_watch(self) -> RecreationWatch:
        return RecreationWatch(self._bounds_reader.offset_reader, self._options.group)

    def initialOffset(self) -> Offsets:
        """Return the start of a new query. Spark calls this method twice and plans with the second answer. So the start is
        resolved only once, and both answers are equal.
        """
        if self._initial_start is None:
            self._bounds_reader.begin_call()
            wait_limits = WaitLimits.of_start(self._options)
            try:
                self._initial_start = retry_until(
                    self._bounds_reader, lambda: self._resolve_start(wait_limits), wait_limits
                )
            except (OffsetError, OptionError, RouteNotFound, TopicNotFound) as e:
                # For a new query, ``latestOffset`` raises this error. Spark also calls ``initialOffset`` if batch 0 was logged
                # but not committed. For a logged batch, the logged end records the start of the batch, and ``failOnDataLoss``
                # decides about topics and queues that no longer exist.
                self._initial_start = StartOffsets(Offsets({}), e)
        return self._initial_start.offsets

    def _resolve_start(self, wait_limits: WaitLimits) -> StartOffsets:
        bounds_reader, options = self._bounds_reader, self._options
        view = fetch_bounds_of_masters(bounds_reader, options, wait_limits)
        bounds, recreation_watch = view.bounds, self._new_watch()
        recreation_watch.start(view.master_bounds(), view.connections)
        self._check_filter(bounds)
        start_positions = starting_offsets(bounds_reader.offset_reader(), options, bounds, planning_deadline(options))
        # This call may fetch a new view, which the first plan may use.
        with_compaction_start(bounds_reader, options, view, start_positions)
        _warn_if_no_topic(options, bounds)
        newest_store_ms = planning.newest_store_ms(start_positions, Offsets({}), bounds)
        newest_store_ms |= recreation_watch.newest_store_ms(
            Offsets(start_positions), bounds, Deadline.after(options.request_timeout)
        )
        self._has_checked_options = True
        offsets = Offsets(
            start_positions,
            {},
            newest_store_ms,
            self._source_identity(),
            bounds_reader.owned_queues.environment_numbers,
        )
        return StartOffsets(offsets, recreation_watch=recreation_watch)

    def latestOffset(self, start: Offsets, limits: TriggerLimits, is_start_processed: bool = True) -> Offsets:
        """Return the end of the next batch, or ``start`` itself if there is no batch.

        If ``is_start_processed`` is true, Spark has processed everything before ``start``, so ``start`` is committed as the
        offsets of the group.
        """
        self._bounds_reader.begin_call()
        if self._initial_start is not None and (error := self._initial_start.error_of(start)) is not None:
            raise error
        wait_limits = WaitLimits.of_batch(self._options, has_waited_for_topics=self._initial_start is not None)
        if not self._has_checked_options:
            retry_until(self._bounds_reader, lambda: self._validate(start), wait_limits)
        if self._target.must_fetch_ends:
            self._bounds_reader.set_checkpoint_offsets(start, self._target.ends)
            master_view = retry_until(
                self._bounds_reader,
                lambda: fetch_bounds_of_masters(self._bounds_reader, self._options, wait_limits),
                wait_limits,
            )
            self._target = AvailableNowTarget.of_view(master_view)
        self._bounds_reader.set_checkpoint_offsets(start, self._target.ends)
        if is_start_processed:
            self._group_offsets.commit(start.positions)
        if self._target.state is TargetState.FIXED:
            end = retry_until(self._bounds_reader, lambda: self._plan_end(start, limits), wait_limits)
        else:
            end = self._try_to_plan_end(start, limits)
        self._last_end = end
        return end

    def _try_to_plan_end(self, start: Offsets, limits: TriggerLimits) -> Offsets:
        """Return the end of the next batch. If a server does not answer, return ``start`` after a pause, because Spark asks
        again.
        """
        try:
            return self._plan_end(start, limits)
        except RocketMQError as e:
            self._bounds_reader.note_retriable_error(e)
        self._clock.sleep(_RETRY_PAUSE_S)
        return start

    def _plan_end(self, start: Offsets, limits: TriggerLimits) -> Offsets:
        last_plan = self._last_plan if self._last_plan is not None and self._last_plan.start == start else None
        self._pause_after(last_plan)
        view = self._fetch_view(start, last_plan)
        if self._partition_numbers.has_unlogged_queues(start):
            # An empty batch logs the numbers of the repeated batch now, because the next batch with messages may come days later,
            # in another run.
            queue_runs = self._partition_numbers.queue_runs_between(start, start.positions)
            return replace(start, new_queue_starts={}, queue_runs=queue_runs)
        if last_plan is not None and last_plan.is_idle_for(view):
            if view.poll_number != last_plan.view.poll_number:
                self._recreation_watch.note_unchanged()
            outcome = PlanOutcome.IDLE if last_plan.outcome is PlanOutcome.DRAINED else last_plan.outcome
            self._last_plan = replace(last_plan, view=view, outcome=outcome)
            return start
        if not self._is_filter_checked:
            self._check_filter(view.bounds)
        adapted_start, readable_view, recreation_result = self._apply_queue_changes(start, view, last_plan)
        return self._apply_read_limits(start, adapted_start, readable_view, limits, recreation_result)

    def _pause_after(self, last_plan: LastPlan | None) -> None:
        """Pause if the last plan from the same start planned no batch."""
        if last_plan is None:
            return
        if last_plan.is_idle and self._target.ends is None:
            self._bounds_reader.wait_for_next_poll(_MAX_IDLE_WAIT_S)
        elif last_plan.outcome is PlanOutcome.DELAYED:
            self._clock.sleep(_MAX_IDLE_WAIT_S)

    def _fetch_view(self, start: Offsets, last_plan: LastPlan | None) -> QueuesView:
        """Return the current view of the queues. Raises ``BrokerNotFound`` if an AvailableNow run must wait for a broker."""
        target_ends = self._target.ends
        view = self._bounds_reader.latest_view(wait_for_all=target_ends is not None)
        if last_plan is not None and view.poll_number == last_plan.view.poll_number:
            return last_plan.view
        view = planning.without_stale_replicas(start, view)
        if target_ends is not None:
            self._check_target(start, view, target_ends)
        missing_queues = _missing_queues(start, view)
        if missing_queues or not self._unavailable_queues_log.is_empty:
            unavailable_queues = [q for q in missing_queues if q.topic in view.topics and not view.is_topic_deleted(q)]
            self._unavailable_queues_log.update(
                unavailable_queues, view.bounds, self._unavailable_reason, is_run_ending=target_ends is not None
            )
        return view

    def _check_target(self, start: Offsets, view: QueuesView, target_ends: Positions) -> None:
        """Raise ``BrokerNotFound`` if queues have no messages to read now, although the run has not read these queues to its
        target ends.
        """
        pending_queues = planning.pending_queues(start, view, target_ends)
        removed_ends = self._bounds_reader.removed_queue_ends(pending_queues, view) if pending_queues else {}
        if pending_queues := [queue for queue in pending_queues if queue not in removed_ends]:
            cause = self._bounds_reader.retriable_errors.retry_errors.first_error
            raise BrokerNotFound(
                f"no broker answers for {queues_text(pending_queues)}, which this run must read to its end",
                cause.addr if cause else None,
                remark=cause.message if cause else self._unavailable_reason(pending_queues[0]),
                remedy="Check the brokers, or raise option 'readDeadline'",
            ) from cause

    def _unavailable_reason(self, queue: MessageQueue) -> str:
        return subscription.unavailable_reason(self._bounds_reader.known_routes.get(queue.topic), queue)

    def _apply_queue_changes(
        self, start: Offsets, view: QueuesView, last_plan: LastPlan | None
    ) -> tuple[Offsets, QueuesView, RecreationResult]:
        """Return three values: ``start`` adapted to changes of its queues, the view without queues that cannot be planned now,
        and the result of the check for topics that were created again.

        Reports losses, and raises ``DataLossError`` if option ``failOnDataLoss`` says so.
        """
        subscribed_start = self._without_unsubscribed_topics(start, view)
        readable_view = planning.without_timed_out_brokers(view)
        recreation_result = self._find_recreated_queues(start, subscribed_start, readable_view)
        if recreation_result.errors:
            # The plan omits queues whose broker did not answer whether they were created again.
            answered_bounds = {
                q: b for q, b in readable_view.bounds.items() if topic_broker(q) not in recreation_result.errors
            }
            readable_view = replace(readable_view, bounds=answered_bounds)
        missing_queues = _missing_queues(subscribed_start, readable_view)
        removed_ends = self._bounds_reader.removed_queue_ends(missing_queues, readable_view) if missing_queues else {}
        adapted_start, losses = planning.apply_queue_changes(
            subscribed_start, readable_view, self._target.ends, recreation_result.recreated_queues, removed_ends
        )
        reported_losses = frozenset[Loss]() if last_plan is None else last_plan.reported_losses
        if losses:
            if self._target.ends is not None:
                ends = planning.capped_target_ends(readable_view, self._target.ends, removed_ends)
                self._target = replace(self._target, ends=ends)
            # If a loss must fail the query, each plan reports the loss again, so that each plan fails.
            must_fail = self._options.fail_on_data_loss == "fail"
            self._report_losses(losses if must_fail else data_loss.unreported_losses(losses, reported_losses))
            reported_losses = reported_losses.union(losses)
        self._last_plan = LastPlan(start, PlanOutcome.CHECKED, view, reported_losses)
        return adapted_start, readable_view, recreation_result

    def _find_recreated_queues(self, start: Offsets, subscribed_start: Offsets, view: QueuesView) -> RecreationResult:
        """Return the queues that were created again. If a broker does not answer in an AvailableNow run, raise its error, because
        the run must not end without the queues of this broker.
        """
        if self._initial_start is not None and self._initial_start.recreation_watch is not None:
            # The watch of ``_initial_start`` knows only bounds of this run. If an earlier run logged the first batch, the start
            # of the batch is older than these bounds, so that watch is not used.
            if start == self._initial_start.offsets:
                self._recreation_watch = self._initial_start.recreation_watch
            self._initial_start = replace(self._initial_start, recreation_watch=None)
        # All requests together get the timeout of one request, so a broker that hangs does not delay the queues of other brokers.
        deadline = Deadline.after(self._options.request_timeout)
        recreation_result = self._recreation_watch.check(
            subscribed_start, view.master_bounds(), deadline, view.connections
        )
        for error in recreation_result.errors.values():
            if self._target.ends is not None:
                raise error
            self._bounds_reader.note_retriable_error(error)
        return recreation_result

    def _apply_read_limits(
        self,
        start: Offsets,
        adapted_start: Offsets,
        view: QueuesView,
        limits: TriggerLimits,
        recreation_result: RecreationResult,
    ) -> Offsets:
        """Return the end of a batch from ``adapted_start``. Return ``start`` if there is nothing to read, or if the batch waits
        for more messages.
        """
        assert self._last_plan is not None
        ends = planning.readable_ends(view, self._target.ends)
        first_offsets = {queue: view.bounds[queue].min_offset for queue in ends}
        readable_start = planning.raised_to_min_offsets(adapted_start, view.bounds)
        backlogs = planning.backlog_by_queue({**first_offsets, **readable_start.positions}, ends)
        if self._target.ends is not None:
            # The ends are fixed, so a wait would bring no more messages.
            limits = replace(limits, min_offsets=None)
        max_offsets = self._read_limit_policy.max_offsets(
            backlogs,
            limits,
            lambda queue: self._sample_size(queue, adapted_start, first_offsets[queue]),
            self._clock.now(),
        )
        if max_offsets == 0:
            self._last_plan = replace(self._last_plan, outcome=PlanOutcome.DELAYED)
            return start
        if backlogs and limits.max_bytes is not None and self._read_limit_policy.has_no_sample:
            self._warn_once(
                "size estimate",
                "option 'maxBytesPerTrigger' is %d, but no broker returned a sample of the unread messages: until one does, each "
                "message is assumed to have %d bytes, so batches are small",
                limits.max_bytes,
                planning.ASSUMED_MESSAGE_BYTES,
            )
        end = planning.next_end(readable_start, ends, first_offsets, max_offsets)
        if end == start:
            self._note_idle(adapted_start, view, recreation_result)
            return start
        end = planning.batch_end(
            start, adapted_start, end, view, None if self._initial_start is None else self._initial_start.offsets
        )
        newest_store_ms = self._recreation_watch.newest_store_ms(
            end, view.bounds, Deadline.after(self._options.request_timeout)
        )
        self._read_limit_policy.note_planned_batch(self._clock.now())
        end = replace(
            end,
            newest_store_ms={**end.newest_store_ms, **newest_store_ms} if newest_store_ms else end.newest_store_ms,
            source_identity=self._source_identity(),
            environment_numbers=self._bounds_reader.owned_queues.environment_numbers,
            partitioning_json=self._partitioning_json,
            queue_runs=self._partition_numbers.queue_runs_between(start, end.positions),
        )
        reads_all = self._target.ends is None and (max_offsets is None or sum(backlogs.values()) <= max_offsets)
        if reads_all and self._is_complete(end, view) and planning.has_store_times(view):
            self._last_plan = LastPlan(end, PlanOutcome.DRAINED, self._last_plan.view)
        else:
            self._last_plan = replace(self._last_plan, outcome=PlanOutcome.PLANNED)
        return end

    def _is_complete(self, offsets: Offsets, view: QueuesView) -> bool:
        """Whether ``view`` has all queues of ``offsets``. Queues that cannot be planned now were removed from ``view``."""
        assert self._last_plan is not None
        return not (self._last_plan.view.timed_out_brokers or _missing_queues(offsets, view))

    def _note_idle(self, adapted_start: Offsets, view: QueuesView, recreation_result: RecreationResult) -> None:
        """Note that there is nothing to read until the view changes. If queues are missing in ``view``, or if brokers must be
        asked about queues again, there may be something to read after the next poll.
        """
        assert self._last_plan is not None
        is_complete = self._is_complete(adapted_start, view)
        if is_complete:
            self._read_limit_policy.note_nothing_to_read(self._clock.now())
        if not recreation_result.errors:
            is_steady = is_complete and recreation_result.is_decided
            outcome = PlanOutcome.IDLE if is_steady else PlanOutcome.IDLE_UNTIL_POLL
            self._last_plan = replace(self._last_plan, outcome=outcome)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the current ends of all queues and the figures of this run, for the progress of the query."""
        self._bounds_reader.begin_call()
        view = self._bounds_reader.latest_view(is_same_batch=True)
        return self._progress_report.report(view, self._last_end, int(self._clock.now() * 1000))

    def prepareForTriggerAvailableNow(self) -> None:
        """Make this run end at the current ends of the queues.

        The first call of ``latestOffset`` fetches the ends if this method cannot: if a master does not answer, if the run waits
        for its first topic, or if the positions determine which queues the run reads.
        """
        self._target = AvailableNowTarget(TargetState.REQUESTED)
        self._last_plan = None  # the last plan may have ended at the target of an earlier run
        if is_by_position(self._options) or self._options.assign:  # Spark has not passed the positions yet
            return
        self._bounds_reader.begin_call()
        try:
            view = self._bounds_reader.fetch_complete_view()
        except RocketMQError as e:
            if not e.retriable:
                raise
            return
        if view.topics or not self._options.topic_wait:
            self._target = AvailableNowTarget.of_view(view)

    def partitions(self, start: Offsets, end: Offsets) -> list[RangePartition]:
        """Return the tasks of a batch. The call for a batch that was logged but not committed may be the first call in a run."""
        self._bounds_reader.begin_call()
        # If this run has not planned a batch yet, an earlier run logged the batch.
        was_logged_before = self._last_end is None
        initial_start = StartOffsets(Offsets({})) if self._initial_start is None else self._initial_start
        starts_query = self._initial_start is not None and start == initial_start.offsets
        if was_logged_before:
            checkpoint_identity.check_checkpoint(self._options, end)
        # Spark repeats several batches as one batch only after a restart. Batch 0 is read from the starts that its end records,
        # because ``start`` is resolved from the starting options again, and may differ.
        new_ranges = planning.new_queue_ranges(start, end) if was_logged_before and not starts_query else []
        ranges = sorted([*planning.ranges(start, end), *new_ranges])
        if not ranges:
            return []
        # The tasks of a batch depend only on its log entry. If messages were lost, a task has fewer rows or no rows, so that the
        # other tasks, and the tasks of the next source of a union, keep their numbers. The ids of exactly-once contain these
        # numbers.
        planned_tasks = partitioning.plan_tasks(self._partitioning_of_logged_batch(end, ranges), end.positions, ranges)
        if initial_start.error_of(start) is not None:
            start = replace(end, positions=end.new_queue_starts)
        known_offsets = planning.combined_start(start, end) if was_logged_before or end.new_queue_starts else start
        self._bounds_reader.set_checkpoint_offsets(known_offsets, self._target.ends)
        losses: list[Loss] = []
        if was_logged_before:
            view, recreated_queues = self._fetch_view_of_logged_batch(known_offsets, end, ranges)
            ranges, new_losses = planning.without_recreated_queues(ranges, view, recreated_queues)
            losses += self._report_losses(new_losses)
        else:
            view = self._bounds_reader.latest_view(is_same_batch=True)
        if self._initial_start is not None:
            self._initial_start = self._initial_start.without_error()
        # Messages before the minimum offset of a new queue are no loss, because the queue starts with its first message.
        expired_ranges = planning.truncated_ranges(new_ranges, view.master_bounds())
        ranges = planning.without_lost_offsets(ranges, expired_ranges)
        ranges, new_losses = planning.readable_ranges(ranges, view)
        losses += self._report_losses(new_losses)
        route_reader, offset_reader = self._bounds_reader.ports
        mismatched_queues = partition_reader.replica_mismatches(self._options, route_reader, offset_reader, ranges)
        lost_ranges = [*expired_ranges, *(lost_range for lost_range, _ in losses)]
        remaining_tasks = [planning.without_lost_offsets(task, lost_ranges) for task in planned_tasks]
        partition_numbers = self._partition_numbers.numbers_of_batch(end, {part.queue for part in ranges})
        return partition_reader.input_partitions(
            route_reader, remaining_tasks, mismatched_queues, end, partition_numbers
        )

    def _partitioning_of_logged_batch(self, end: Offsets, ranges: Sequence[OffsetRange]) -> Partitioning:
        """Return the partitioning that split the batch into tasks when its end was logged. If the end does not record an option,
        use the present value of the option, and warn.

        A batch of one row is one task with any options, so there is no warning for such a batch.
        """
        logged_partitioning, unusable_names = partitioning.logged_partitioning(
            end.partitioning_json, self._partitioning
        )
        if unusable_names and sum(r.size for r in ranges) > 1:
            self._warn_once(
                "partitioning",
                "the offset of this batch does not say what decided its tasks (%s): another version of rocketmq-spark planned "
                "the batch, or another callable as allocationStrategy did. The present options decide now. If the options "
                "changed since the first attempt, a sink with deliveryGuarantee=exactly-once may store rows of this batch twice",
                ", ".join(unusable_names),
            )
        return logged_partitioning

    def _fetch_view_of_logged_batch(
        self, known_offsets: Offsets, end: Offsets, ranges: Sequence[OffsetRange]
    ) -> tuple[QueuesView, list[MessageQueue]]:
        """Return the view of all queues, and the queues of a logged batch that were created again while the query was down.

        A batch that was planned before must be read completely, so this method waits for all brokers.
        """

        def fetch() -> tuple[QueuesView, list[MessageQueue]]:
            view = self._bounds_reader.fetch_complete_view()
            self._check_identity(end)
            logged_end = planning.logged_end(ranges, end, view)
            # The watch of the stream is not used here. The first check of that watch must have all queues of the stream, but
            # this check has only the queues of the batch.
            watch = self._new_watch()
            result = watch.check(logged_end, view.master_bounds(), planning_deadline(self._options), view.connections)
            for error in result.errors.values():
                raise error
            if not self._has_checked_options:
                self._check_options(known_offsets, view.bounds)
            return view, result.recreated_queues

        try:
            return retry_until(self._bounds_reader, fetch, WaitLimits.of_batch(self._options))
        except RocketMQError as e:
            if e.retriable and e.queue is not None:
                partition_reader.add_waiting_advice(e, "its broker", is_streaming=True)
            raise

    def _validate(self, start: Offsets) -> None:
        """Check the checkpoint and the options, with the bounds of all queues."""
        self._bounds_reader.set_checkpoint_offsets(start, self._target.ends)
        bounds = self._bounds_reader.fetch_complete_view().bounds
        self._check_identity(start)
        self._check_options(start, bounds)

    def _check_identity(self, offsets: Offsets) -> None:
        """Raise ``CheckpointMismatch`` if ``offsets`` belong to another cluster, or to other queues of the environment."""
        clusters = checkpoint_identity.clusters_of(self._bounds_reader.known_routes.values())
        checkpoint_identity.check_clusters(self._options, offsets, clusters)
        checkpoint_identity.check_environment_queues(
            self._options, offsets, self._bounds_reader.owned_queues.environment_numbers
        )

    def _check_options(self, start: Offsets, bounds: Bounds) -> None:
        """Let brokers check the filter, and log how the options differ from the checkpoint."""
        options = self._options
        self._check_filter(bounds)
        _warn_if_no_topic(options, bounds)
        self._has_checked_options = True
        if options.given_fields & {"starting_offsets", "starting_timestamp", "starting_offsets_by_timestamp"}:
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
        """Let brokers check the filter once per run. The check waits for the first queue, because a pattern may match no topic at
        first.
        """
        if bounds and not self._is_filter_checked:
            check_filter(self._options, bounds)
            self._is_filter_checked = True

    def _report_losses(self, losses: Sequence[Loss]) -> Sequence[Loss]:
        """Report ``losses`` and return them. Raises ``DataLossError`` if option ``failOnDataLoss`` says so."""
        data_loss.report_data_loss(self._options.fail_on_data_loss, losses)
        self._progress_report.add_losses(losses)
        return losses

    def _without_unsubscribed_topics(self, start: Offsets, view: QueuesView) -> Offsets:
        subscribed_start = planning.without_unsubscribed_topics(start, view.topics)
        if subscribed_start != start:
            unsubscribed_topics = sorted(
                {q.topic for q in start.positions} - {q.topic for q in subscribed_start.positions}
            )
            topics_text = ", ".join(unsubscribed_topics)
            self._warn_once(
                f"unsubscribed: {topics_text}",
                "topics that are no longer subscribed to are removed from the offsets: %s",
                topics_text,
            )
        return subscribed_start

    def _sample_size(self, queue: MessageQueue, start: Offsets, min_offset: int) -> tuple[int, int]:
        offset = max(start.positions.get(queue, min_offset), min_offset)
        try:
            # The deadline is short, because an estimate is enough, and the messages of other queues must not wait for a sample.
            deadline = Deadline.after(min(1.0, self._options.request_timeout))
            return self._bounds_reader.offset_reader().sample(self._options.group, queue, offset, deadline)
        except RocketMQError as e:
            if not e.retriable:
                raise
            return 0, 0  # without a sample, the limit uses earlier samples, or an assumed size

    def _source_identity(self) -> dict[str, object]:
        clusters = checkpoint_identity.clusters_of(self._bounds_reader.known_routes.values())
        return checkpoint_identity.source_identity(self._options, clusters)

    def _warn_once(self, key: str, text: str, *values: object) -> None:
        """Log a warning once per run and ``key``."""
        if key not in self._warned_keys:
            self._warned_keys.add(key)
            logger.warning(text, *values)


def _missing_queues(offsets: Offsets, view: QueuesView) -> list[MessageQueue]:
    """Return the queues with a position that are not in the view."""
    if offsets.positions.keys() <= view.bounds.keys():
        return []
    return [queue for queue in offsets.positions if queue not in view.bounds]


def _warn_if_no_topic(options: Options, bounds: Bounds) -> None:
    if options.subscribe_pattern is not None and not bounds:
        logger.warning(
            "no topic matches option 'subscribePattern' %r yet; the stream waits for one, and reads it from its first message",
            options.subscribe_pattern,
        )
