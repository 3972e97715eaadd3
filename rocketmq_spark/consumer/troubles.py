"""Detects what makes members of a group miss or repeat messages without an error: different subscriptions, and POP.

Brokers keep one subscription per group, that of the last heartbeat, and filter the messages of all members by it; queues are
shared among all members, also those without the topic. So messages that only one member subscribes to are lost or stay unread.

An operator may switch a group to POP (``mqadmin setConsumeMode``). Java members with ``clientRebalance=false`` then pop, and the
others pull: brokers deliver each message to both.

A restarted broker has forgotten the members of groups: ``Introductions`` registers a member with it again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline, NowAndThen
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.settings import Subscriptions
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Filter
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.properties import parse_subscription

logger = logging.getLogger(__name__)

# Heartbeats come every 30 s, so each member's heartbeat is the last one at some of the checks.
COMPARE_S = 20.0
# Other members choose what is different: so many differences are remembered, and so much of one is logged.
_MOST_LOGGED, _SHOWN, _SHOWN_CHARACTERS = 100, 5, 200


class SubscriptionConflicts:
    """Compares the subscriptions at brokers with this member's. Logs a difference once, if two checks find it."""

    def __init__(self, port: GroupMember, group: str, subscriptions: Subscriptions) -> None:
        self._port = port
        self._group = group
        self._subscriptions = subscriptions
        self._last = b""
        self._logged: dict[bytes, None] = {}  # digests, the newest last

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
        digest = found.digest if found is not None else b""
        if found is not None and digest == self._last and digest not in self._logged:
            self._logged[digest] = None
            while len(self._logged) > _MOST_LOGGED:
                del self._logged[next(iter(self._logged))]
            logger.warning(
                "members of group %s have different subscriptions: %s. Brokers keep one subscription per group, so messages "
                "are lost to some: let all members subscribe to the same, or give them groups of their own",
                self._group,
                found.text,
            )
        self._last = digest


class Differences(NamedTuple):
    """Differences between two sets of subscriptions: a digest of all, and the first ones for messages."""

    digest: bytes
    text: str


def differences(mine: Mapping[str, Filter], theirs: Mapping[str, Filter]) -> Differences | None:
    """Return the differences between two sets of subscriptions. The order of tags is ignored."""
    digest, shown, count = hashlib.sha256(), [], 0
    for topic in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(topic), theirs.get(topic)
        if here is None or there is None or _meaning(here) != _meaning(there):
            digest.update(repr((topic, here, there)).encode(errors="backslashreplace"))
            count += 1
            if count <= _SHOWN:
                shown.append(f"topic {_clipped(topic)} is {_shown(here)} here and {_shown(there)} elsewhere")
    if count > _SHOWN:
        shown.append(f"and {count - _SHOWN} more")
    return Differences(digest.digest(), "; ".join(shown)) if count else None


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _meaning(wanted: Filter) -> object:
    if wanted.kind != "TAG":
        return wanted.kind, wanted.expression
    try:
        return wanted.kind, parse_subscription(wanted.expression).tags
    except ValueError:
        return wanted.kind, wanted.expression


def _shown(wanted: Filter | None) -> str:
    return "not subscribed to" if wanted is None else f"subscribed to with {_clipped(wanted.expression)!r}"


POP = "POP"
POP_REMEDY = (
    "Set the mode back with mqadmin setConsumeMode -m PULL, or let all members of the group consume over gRPC "
    "(option transport=grpc)"
)


class ConsumeModes:
    """Warns if the consume mode of a topic is POP, because members over remoting pull. Warns once for each topic and broker."""

    def __init__(self, port: GroupMember, group: str, subscriptions: Subscriptions) -> None:
        self._port = port
        self._group = group
        self._subscriptions = subscriptions
        self._popped: set[tuple[str, str]] = set()

    def look(self, deadline: Deadline) -> None:
        topics = [topic for topic in self._subscriptions.all() if not topic.startswith(RETRY_PREFIX)]
        modes = self._port.consume_modes(self._group, topics, deadline)
        popped = {place for place, mode in modes.items() if mode == POP}
        for topic in sorted({topic for topic, _ in popped - self._popped}):
            logger.warning(
                "group %s: the consume mode of topic %s is POP at %s, but this member pulls. Other members may pop, such as Java "
                "consumers with clientRebalance=false: then messages are delivered twice. %s",
                self._group,
                topic,
                ", ".join(sorted(broker for name, broker in popped if name == topic)),
                POP_REMEDY,
            )
        self._popped = (self._popped - modes.keys()) | popped


TIMEOUT_S = 3.0
REFUSED_S = 3.0  # a broker that accepts no heartbeats does not get one with each pull
LOOK_S, LOST_S = 1.0, 60.0  # between heartbeats while a broker is away, and after how long the regular ones are enough


class Introductions:
    """Sends heartbeats to brokers that were restarted and do not know this member. These brokers then notify all members.

    The route may have lost a broker that was away, with its address: ``rebalance`` requests the route and the list of members.
    """

    def __init__(self, port: GroupMember, timer: Timer, rebalance: Callable[[], None]) -> None:
        self._port = port
        self._timer = timer
        self._rebalance = rebalance
        self._refused = NowAndThen(REFUSED_S)

    def refused(self) -> None:
        """A broker refused a pull because it does not know this member. Must not block."""
        if self._refused.due():
            self._timer.later(0, self._introduce)

    def lost(self, broker_name: str) -> None:
        """The connection to a broker broke: send a heartbeat as soon as there is one again. Must not block.

        A broker that was restarted does not refuse pulls of a member that it does not know if it knows others of the group.
        """
        self._look_for(broker_name, self._timer.now_ms() + 1000 * LOST_S)

    def _look_for(self, broker_name: str, until_ms: float) -> None:
        self._timer.later(LOOK_S, partial(self._look, broker_name, until_ms))

    def _look(self, broker_name: str, until_ms: float) -> None:
        try:
            self._beat()
        finally:
            if self._port.connection(broker_name) is None and self._timer.now_ms() < until_ms:
                self._look_for(broker_name, until_ms)
            else:
                self._rebalance()

    def _beat(self) -> None:
        self._port.heartbeat(Deadline.after(TIMEOUT_S))

    def _introduce(self) -> None:
        self._beat()
        self._rebalance()
