"""Commits a group's offsets the moment a query makes progress or ends, from the driver program.

The source itself commits finished positions when Spark asks for the next ones, which after the last batch of a run is
at the next start. A listener hears of that batch at once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
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
from rocketmq_spark.spark.source import filters
from rocketmq_spark.spark.source.commit import GroupOffsets
from rocketmq_spark.spark.source.offsets import Offsets

logger = logging.getLogger(__name__)


class GroupOffsetListener(StreamingQueryListener):
    """Commits the offsets of a consumer group whenever a query makes progress, for dashboards and for later starts.

    ``spark.streams.addListener(GroupOffsetListener(name_server="host:9876", group="orders"))``. A query continues from Spark's
    checkpoint; these offsets are read only by tools and by new queries with ``startingOffsets=committed``. Sources of other
    formats, clusters (by ``brokerClusterName``), namespaces and environments are ignored.

    Args:
        name_server: ``host:port``, several separated by ``;``.
        options: Options of the source (docs/options.md), in snake_case or camelCase: ``group`` is required; ``subscribe``
            limits the topics; without it the listener commits for every rocketmq source of the session.

    Raises:
        OptionError: An option is unknown or has a wrong value.
    """

    def __init__(self, **options: object) -> None:
        parsed = options_table.parse(options).for_role("stream source")
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the group whose offsets are committed")
        self._options = parsed
        self._topics = set(parsed.subscribe)
        self._group_offsets = GroupOffsets(parsed)
        self._finished: dict[UUID, list[Offsets]] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Does nothing at ``event``: no batch is finished yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Commit the end of the batch of ``event``. Failures are logged, because Spark ignores exceptions of listeners."""
        ends = [self._mine(source.endOffset) for source in event.progress.sources]
        self._finished[event.progress.runId] = [end for end in ends if end.positions]
        self._commit(event.progress.runId)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Retry failed commits while the query of ``event`` is idle."""
        self._commit(event.runId)

    def _mine(self, logged: str) -> Offsets:
        try:
            end = Offsets.from_json(logged)
        except OffsetError:
            return Offsets({})  # another format's source
        if filters.is_elsewhere(self._options, end):
            return Offsets({})
        mine = {q: o for q, o in end.positions.items() if not self._topics or q.topic in self._topics}
        return replace(end, positions=mine)

    def _commit(self, run: UUID) -> None:
        for end in self._finished.get(run, []):
            try:
                self._group_offsets.commit(end.positions, end.reads)
            except RocketMQError:
                logger.exception("the offsets of a finished batch are not committed")

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query of ``event``. Its last progress was reported before."""
        self._finished.pop(event.runId, None)
