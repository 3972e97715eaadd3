"""The state of a run between two calls of Spark: where the query starts, where a run ends, and the last plan. Pure values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Offsets, Positions
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.recreated_topics import RecreationWatch


@dataclass(frozen=True, slots=True)
class StartOffsets:
    """The start of a new query, which is resolved once in a run.

    If the start could not be resolved, ``error`` is the reason, and ``offsets`` are empty. ``recreation_watch`` knows the bounds
    with which the start was resolved. The first plan uses ``recreation_watch`` if its batch starts at ``offsets``.
    """

    offsets: Offsets
    error: RocketMQError | None = None
    recreation_watch: RecreationWatch | None = None

    def error_of(self, start: Offsets) -> RocketMQError | None:
        """Return the error of a query that starts at ``start``."""
        return self.error if self.error is not None and start == self.offsets else None

    def without_error(self) -> StartOffsets:
        """Return the start without its error. When a batch is logged, the starting options have no effect any more, so their
        error does not matter.
        """
        return replace(self, error=None)


class TargetState(enum.Enum):
    """How much is known about the ends of an AvailableNow run."""

    OFF = "the trigger is another one"
    REQUESTED = "the first plan fetches the ends"
    PARTIAL = "some ends are those of slaves, so the first plan fetches the ends of the masters"
    FIXED = "the run reads up to these ends"


@dataclass(frozen=True, slots=True)
class AvailableNowTarget:
    """The ends up to which an AvailableNow run reads. ``ends`` is None while the ends are unknown."""

    state: TargetState = TargetState.OFF
    ends: Positions | None = None

    @property
    def must_fetch_ends(self) -> bool:
        return self.state in (TargetState.REQUESTED, TargetState.PARTIAL)

    @classmethod
    def of_view(cls, view: QueuesView) -> AvailableNowTarget:
        """Return a target with the ends of ``view``. If brokers have only slaves now, the target is partial."""
        is_partial = len(view.master_bounds()) < len(view.bounds)
        return cls(TargetState.PARTIAL if is_partial else TargetState.FIXED, view.ends())


class PlanOutcome(enum.Enum):
    """What the last call of ``latestOffset`` decided."""

    CHECKED = "the changes of the queues were reported, and the plan was not finished"
    IDLE = "there is nothing to read until the view changes"
    IDLE_UNTIL_POLL = "there is nothing to read until the next poll, after which brokers are asked again"
    DELAYED = "the batch waits for ``minOffsetsPerTrigger``"
    PLANNED = "there is a batch"
    DRAINED = "there is a batch, and after it nothing to read until the view changes"


@dataclass(frozen=True, slots=True)
class LastPlan:
    """The last call of ``latestOffset``: the start and the view from which it planned, and what it decided.

    If the outcome is ``DRAINED``, ``start`` is the end of the planned batch.

    ``reported_losses`` are the losses that were reported for ``start``. While a batch waits for more messages, each plan finds
    the same losses, which must be reported only once.
    """

    start: Offsets
    outcome: PlanOutcome
    view: QueuesView
    reported_losses: frozenset[Loss] = frozenset()

    @property
    def is_idle(self) -> bool:
        return self.outcome in (PlanOutcome.IDLE, PlanOutcome.IDLE_UNTIL_POLL)

    def is_idle_for(self, view: QueuesView) -> bool:
        """Whether another plan from ``start`` would find nothing to read in ``view``."""
        if self.outcome in (PlanOutcome.IDLE, PlanOutcome.DRAINED):
            return view == self.view
        return self.outcome is PlanOutcome.IDLE_UNTIL_POLL and view.poll_number == self.view.poll_number
