"""Waits up to ``readDeadline`` for queues and brokers that are unavailable, with new routes for each attempt.

A stream logs the queues that it waits for, because it looks idle while it waits.

A start that reaches no server at all does not wait: it fails after ``numRetries``, because an address may be misspelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.retry import RetryErrors
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.source import checkpoint_identity
from rocketmq_spark.spark.source.catalog import OffsetCache
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions, queues_text
from rocketmq_spark.spark.source.planning import QueuesView

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_PAUSE_S = 0.2


def retry_until_deadline(catalog: OffsetCache, ask: Callable[[], T], deadline: Deadline | None = None) -> T:
    """Call ``ask`` until it returns. A retriable error is raised only after ``deadline``, together with the first error.

    If no route and no offset names a topic, its name may be misspelled, so its ``RouteNotFound`` is raised at once.
    """
    deadline = deadline or Deadline.after(catalog.read_deadline_s)
    trouble = RetryErrors()
    while True:
        try:
            return ask()
        except RocketMQError as e:
            trouble.record(e, catalog.clock.now())
            if not e.retriable or (isinstance(e, RouteNotFound) and not catalog.is_known_topic(e.topic)):
                raise
            if deadline.expired:
                trouble.raise_final(e, catalog.clock.now())
            catalog.note_retriable_error(e)
        deadline.pause(_RETRY_PAUSE_S)
        catalog.refresh_routes()


def fetch_bounds_of_masters(catalog: OffsetCache) -> QueuesView:
    """Return the bounds that masters report. If only slaves of a broker are up, waits for its master, because slaves may lack
    messages.

    Raises ``BrokerNotFound`` if the master does not register within ``readDeadline``.
    """
    deadline = Deadline.after(catalog.read_deadline_s)
    view = catalog.fetch_all()
    while without_master := sorted({queue.broker_name for queue in view.bounds} & view.brokers_without_master):
        error = BrokerNotFound(
            f"only slaves of {', '.join(without_master)} are up, which may lack messages that the master has",
            remedy="Start the master, or raise option 'readDeadline' to wait longer for it",
        )
        if deadline.expired:
            raise error
        catalog.note_retriable_error(error)
        deadline.pause(1.0)
        view = retry_until_deadline(catalog, catalog.fetch_all, deadline)
    return view


def with_compaction_start(catalog: OffsetCache, options: Options, view: QueuesView, start: Positions) -> QueuesView:
    """Return the view for a read from ``start``. The minimum offset of a compaction topic is that of the first kept
    message, which may be before the log begins. So messages that compaction removed are not reported as lost.
    """
    if all(at >= view.bounds[queue].min_offset for queue, at in start.items()):
        return view
    catalog.set_checkpoint_offsets(Offsets(start, source_identity=checkpoint_identity.source_identity(options)))
    return retry_until_deadline(catalog, catalog.fetch_all)


class UnavailableQueuesLog:
    """Logs which queues with a position are unavailable, and which are available again."""

    def __init__(self) -> None:
        self._unavailable: set[MessageQueue] = set()

    def update(
        self,
        queues: Iterable[MessageQueue],
        bounds: Bounds,
        reason_of: Callable[[MessageQueue], str],
        run_ends: bool = False,
    ) -> None:
        """Log the changes since the last call. ``reason_of`` returns the reason for a queue. ``run_ends``: the run ends without
        them.
        """
        unavailable = {queue for queue in queues if queue not in bounds}
        newly_unavailable, available_again = (
            unavailable - self._unavailable,
            {queue for queue in self._unavailable - unavailable if queue in bounds},
        )
        self._unavailable = unavailable
        if newly_unavailable:
            action = "the run ends without" if run_ends else "the stream waits for"
            logger.warning(
                "%s queues that it cannot read now: %s", action, _grouped_by_reason(newly_unavailable, reason_of)
            )
        if available_again:
            logger.warning("the stream can read these queues again: %s", queues_text(available_again))


def _grouped_by_reason(queues: Iterable[MessageQueue], reason_of: Callable[[MessageQueue], str]) -> str:
    reasons: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        reasons.setdefault(reason_of(queue), []).append(queue)
    return "; ".join(f"{queues_text(queues_of_reason)} ({reason})" for reason, queues_of_reason in reasons.items())
