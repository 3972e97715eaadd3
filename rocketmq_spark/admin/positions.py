"""Where a consumer group goes on in each queue, and what brokers have there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocketmq_spark.admin.tools import AdminTools, deadline
from rocketmq_spark.client import groups
from rocketmq_spark.errors import OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.model.lag import QueueLag

Positions = dict[MessageQueue, int | None]


@dataclass(frozen=True, slots=True)
class QueuePositions:
    """Queues as they were at one moment, and what brokers did not tell: an error of each that did not answer."""

    rows: list[QueueLag]
    errors: list[RocketMQError] = field(default_factory=list)


def of_group(tools: AdminTools, group: str, topics: Sequence[str]) -> Positions:
    """All queues of the topics that the group has an offset of, None for those where it has none.

    Raises ``OffsetError`` where it has none at all.
    """
    found: Positions = {}
    for topic in topics or tools.admin.consumed_topics(group):
        queues = tools.routes.existing(topic).readable()
        found |= tools.brokers.committed(group, queues, deadline(tools))
    if all(position is None for position in found.values()):
        where = f" in {', '.join(topics)}" if topics else ""
        remedy = near_groups(tools, group) or "Was something consumed and committed?"
        raise OffsetError(f"group {group} has no offsets{where}", remedy=remedy)
    return found


def near_groups(tools: AdminTools, group: str) -> str:
    """A question for who may have misspelt a group, with the nearest names; empty if brokers know it, or none that is near."""
    try:
        known = groups.groups(tools.calls, tools.admin)
    except RocketMQError:  # it is a hint only
        return ""
    near = difflib.get_close_matches(group, known, n=3, cutoff=0.6) if group not in known else []
    return f"Did you mean {', '.join(near)}?" if near else ""


def look(tools: AdminTools, positions: Mapping[MessageQueue, int | None]) -> QueuePositions:
    """What brokers have in these queues, and when the next message of each was stored."""
    bounds, errors = bounds_of(tools, positions)
    within = deadline(tools)
    rows = []
    for queue in sorted(positions):
        if queue not in bounds:
            rows.append(QueueLag(queue, None, positions[queue], None))
            continue
        row = QueueLag(queue, bounds[queue].min_offset, positions[queue], bounds[queue].max_offset)
        if row.lag and row.next_offset is not None and not errors:
            try:
                stored_ms = tools.brokers.store_time_ms(GROUP, queue, row.next_offset, within)
                row = row._replace(next_stored_ms=stored_ms)
            except RocketMQError as e:
                errors.append(e)
        rows.append(row)
    return QueuePositions(rows, errors)


def bounds_of(
    tools: AdminTools, queues: Mapping[MessageQueue, object]
) -> tuple[dict[MessageQueue, QueueBounds], list[RocketMQError]]:
    """Bounds as far as brokers tell them, and an error of each that does not, and of each topic without any broker."""
    errors: list[RocketMQError] = []
    routed = set()
    for topic in sorted({queue.topic for queue in queues}):
        try:
            tools.routes.existing(topic)
            routed.add(topic)
        except RouteNotFound as e:
            errors.append(e)
    asked = sorted(queue for queue in queues if queue.topic in routed)
    bounds = tools.brokers.bounds(asked, deadline(tools), lambda error, queue: errors.append(error))
    return bounds, errors
