"""Looks for members of a group that have different subscriptions, which causes no error.

Brokers keep one subscription per group, that of the last heartbeat, and filter the messages of all members by it; queues are
shared among all members, also those without the topic. So messages that only one member subscribes to are lost or stay unread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.consumer.settings import Subscriptions
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Filter
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.properties import parse_subscription

logger = logging.getLogger(__name__)

# Heartbeats come every 30 s, so each member's heartbeat is the last one at some of the checks.
COMPARE_S = 20.0


class SubscriptionConflicts:
    """Compares the subscriptions at brokers with this member's. Logs a difference once, if two checks find it."""

    def __init__(self, port: GroupMember, group: str, subscriptions: Subscriptions) -> None:
        self._port = port
        self._group = group
        self._subscriptions = subscriptions
        self._last: tuple[str, ...] = ()
        self._logged: set[tuple[str, ...]] = set()

    def look(self, deadline: Deadline) -> None:
        mine = self._subscriptions.all()
        topic = next((topic for topic in mine if not topic.startswith(RETRY_PREFIX)), None)
        if topic is None:
            return
        try:
            found = differences(mine, self._port.filters(self._group, topic, deadline))
        except RocketMQError as e:
            logger.debug("cannot read the subscriptions of group %s: %s", self._group, e)
            return
        if found and found == self._last and found not in self._logged:
            self._logged.add(found)
            logger.warning(
                "members of group %s have different subscriptions: %s. Brokers keep one subscription per group, so messages "
                "are lost to some: let all members subscribe to the same, or give them groups of their own",
                self._group,
                "; ".join(found),
            )
        self._last = found


def differences(mine: Mapping[str, Filter], theirs: Mapping[str, Filter]) -> tuple[str, ...]:
    """Describe the differences between two sets of subscriptions. The order of tags is ignored."""
    found = []
    for topic in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(topic), theirs.get(topic)
        if here is None or there is None or _meaning(here) != _meaning(there):
            found.append(f"topic {topic} is {_shown(here)} here and {_shown(there)} elsewhere")
    return tuple(found)


def _meaning(wanted: Filter) -> object:
    if wanted.kind != "TAG":
        return wanted.kind, wanted.expression
    try:
        return wanted.kind, parse_subscription(wanted.expression).tags
    except ValueError:
        return wanted.kind, wanted.expression


def _shown(wanted: Filter | None) -> str:
    return "not subscribed to" if wanted is None else f"subscribed to with {wanted.expression!r}"
