"""Commits a group's offsets the moment a query makes progress or ends, from the driver program.

The source itself commits finished positions when Spark asks for the next ones, which after the last batch of a run is
at the next start. A listener hears of that batch at once.
"""

from __future__ import annotations

import logging

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError
from rocketmq_spark.source.commit import GroupOffsets
from rocketmq_spark.source.offsets import Offsets

logger = logging.getLogger(__name__)


class GroupOffsetListener(StreamingQueryListener):
    """``spark.streams.addListener(GroupOffsetListener(name_server=…, group=…, subscribe=…))``.

    Takes the options of the source. Sources of other formats, and topics that ``subscribe`` does not name, are left
    alone; without ``subscribe`` it commits for every rocketmq source of the session.
    """

    def __init__(self, **options: object) -> None:
        parsed = options_table.parse(options).for_role("stream source")
        if "group" not in parsed.given:
            raise OptionError("option 'group' is required: name the group whose offsets are committed")
        self._topics = set(parsed.subscribe)
        self._group_offsets = GroupOffsets(parsed)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Does nothing at this ``event``: nothing is finished yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Commit where the batch of ``event`` ended. What cannot be committed is logged, for Spark swallows errors here."""
        for source in event.progress.sources:
            try:
                end = Offsets.from_json(source.endOffset)
            except OffsetError:
                continue  # another format's source
            mine = {q: o for q, o in end.positions.items() if not self._topics or q.topic in self._topics}
            try:
                self._group_offsets.commit(mine)
            except RocketMQError:
                logger.exception("the offsets of a finished batch are not committed")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Does nothing at this ``event``: nothing new is finished."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Does nothing at this ``event``: the last progress was heard before."""
