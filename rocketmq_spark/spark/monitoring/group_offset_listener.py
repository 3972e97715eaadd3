"""``GroupOffsetListener`` commits the offsets of a consumer group immediately after each batch of a query.

The source itself commits the positions of a finished batch when Spark requests the next batch. So without the listener, the
positions of the last batch of a run are committed only at the next start.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError
from rocketmq_spark.spark.monitoring.queries import end_offsets
from rocketmq_spark.spark.source.offsets import Offsets

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


class GroupOffsetListener(StreamingQueryListener):
    """Commits the offsets of a consumer group whenever a query makes progress, for dashboards and for new queries.

    ``spark.streams.addListener(GroupOffsetListener(name_server="host:9876", group="orders"))``. A query continues from Spark's
    checkpoint; these offsets are read only by tools and by new queries with ``startingOffsets=committed``. The listener ignores
    sources of other formats, of another cluster (``brokerClusterName``), namespace or environment, or with another ``group``.

    Args:
        name_server: ``host:port``, several separated by ``;``.
        options: Options of the source (docs/options.md), in snake_case or camelCase: ``group`` is required; ``subscribe``
            limits the topics (default: all that the sources read).

    Raises:
        OptionError: An option is unknown or has a wrong value.
    """

    def __init__(self, **options: object) -> None:
        # Imported when a listener is created, because this import loads the client.
        from rocketmq_spark.spark.source.group_offsets import GroupOffsets

        parsed_options = options_table.parse(options).for_role("stream source")
        if "group" not in parsed_options.given_fields:
            raise OptionError("option 'group' is required: name the group whose offsets are committed")
        self._options = parsed_options
        self._topics = set(parsed_options.subscribe)
        self._group_offsets = GroupOffsets(parsed_options)
        self._batch_ends_by_run: dict[UUID, list[Offsets]] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing with ``event``. No batch of this run is finished yet, so there is nothing to commit."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Commit the end of the batch of ``event``. Failures are logged, because Spark ignores exceptions of listeners."""
        ends = [self._own_offsets(end) for end in end_offsets(event.progress)]
        self._batch_ends_by_run[event.progress.runId] = [end for end in ends if end.positions]
        self._commit(event.progress.runId)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Retry failed commits while the query of ``event`` is idle."""
        self._commit(event.runId)

    def _own_offsets(self, log_entry: object) -> Offsets:
        from rocketmq_spark.spark.source import checkpoint_identity

        try:
            end = Offsets.from_json(log_entry)
        except OffsetError:
            return Offsets({})  # another format's source
        if checkpoint_identity.is_other_source(self._options, end):
            return Offsets({})
        own_positions = {q: o for q, o in end.positions.items() if not self._topics or q.topic in self._topics}
        return replace(end, positions=own_positions)

    def _commit(self, run_id: UUID) -> None:
        for end in self._batch_ends_by_run.get(run_id, []):
            try:
                self._group_offsets.commit(end.positions, end.source_identity)
            except RocketMQError:
                logger.exception("the offsets of a finished batch are not committed")

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query of ``event``. Spark reported the last progress of the query before this event."""
        self._batch_ends_by_run.pop(event.runId, None)
