"""Checks for conditions that make members of a group miss or repeat messages without an error.

Different subscriptions: brokers keep one subscription per group, from the last heartbeat, and filter the messages of all
members by this subscription. But all members share the queues of a topic, even members that do not subscribe to the topic. So
messages that only some members subscribe to are skipped or stay unread.

POP: an operator may switch a group to POP (``mqadmin setConsumeMode``). Then Java members with ``clientRebalance=false`` pop,
and other members pull, so brokers deliver each message twice.

Restarted brokers: a broker forgets the members of groups when it restarts. ``Reregistration`` registers this member again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline, RateLimit
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.settings import Subscriptions
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Filter
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.properties import parse_subscription

logger = logging.getLogger(__name__)

# Brokers keep the subscription of the last heartbeat. Checks are more frequent than heartbeats (30 s), so that some checks find
# the subscription of another member.
COMPARISON_INTERVAL_S = 20.0
# The subscriptions of other members may differ in any number of ways. These limits keep the differences from filling the memory
# and the log.
_MAX_REMEMBERED_DIGESTS, _MAX_SHOWN_DIFFERENCES, _MAX_SHOWN_CHARACTERS = 100, 5, 200


class SubscriptionConflicts:
    """Compares the subscriptions that brokers have for the group with those of this member. Logs a conflict once, after two
    checks in a row found the same conflict.
    """

    def __init__(self, port: GroupMember, group: str, subscriptions: Subscriptions) -> None:
        self._port = port
        self._group = group
        self._subscriptions = subscriptions
        self._last_digest = b""  # the digest of the conflict that the last check found, if any
        self._logged_digests: dict[bytes, None] = {}  # the digests of the logged conflicts, the newest last

    def check(self, deadline: Deadline) -> None:
        own_filters = self._subscriptions.filters()
        topic = next((topic for topic in own_filters if not topic.startswith(RETRY_PREFIX)), None)
        if topic is None:
            return
        try:
            conflict = differences(own_filters, self._port.filters(self._group, topic, deadline))
        except RocketMQError as e:
            logger.debug("cannot read the subscriptions of group %s: %s", self._group, e)
            return
        digest = conflict.digest if conflict is not None else b""
        if conflict is not None and digest == self._last_digest and digest not in self._logged_digests:
            self._logged_digests[digest] = None
            while len(self._logged_digests) > _MAX_REMEMBERED_DIGESTS:
                del self._logged_digests[next(iter(self._logged_digests))]
            logger.warning(
                "members of group %s have different subscriptions: %s. Brokers keep one subscription per group, so some members "
                "miss messages. Give all members the same subscriptions, or use one group for each subscription",
                self._group,
                conflict.text,
            )
        self._last_digest = digest


class Differences(NamedTuple):
    """The differences between two sets of subscriptions: a digest of all differences, and a text with the first differences."""

    digest: bytes
    text: str


def differences(own_filters: Mapping[str, Filter], group_filters: Mapping[str, Filter]) -> Differences | None:
    """Return the differences between two sets of subscriptions. The order of tags is ignored."""
    digest, shown_texts, count = hashlib.sha256(), [], 0
    for topic in sorted(own_filters.keys() | group_filters.keys()):
        own_filter, other_filter = own_filters.get(topic), group_filters.get(topic)
        if own_filter is None or other_filter is None or _comparable_form(own_filter) != _comparable_form(other_filter):
            digest.update(repr((topic, own_filter, other_filter)).encode(errors="backslashreplace"))
            count += 1
            if count <= _MAX_SHOWN_DIFFERENCES:
                shown_texts.append(
                    f"topic {_truncated(topic)} is {_description(own_filter)} here and {_description(other_filter)} elsewhere"
                )
    if count > _MAX_SHOWN_DIFFERENCES:
        shown_texts.append(f"and {count - _MAX_SHOWN_DIFFERENCES} more")
    return Differences(digest.digest(), "; ".join(shown_texts)) if count else None


def _truncated(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "…"


def _comparable_form(topic_filter: Filter) -> object:
    if topic_filter.kind != "TAG":
        return topic_filter.kind, topic_filter.expression
    try:
        return topic_filter.kind, parse_subscription(topic_filter.expression).tags
    except ValueError:
        return topic_filter.kind, topic_filter.expression


def _description(topic_filter: Filter | None) -> str:
    return (
        "not subscribed to" if topic_filter is None else f"subscribed to with {_truncated(topic_filter.expression)!r}"
    )


POP = "POP"
POP_REMEDY = (
    "Set the mode back with mqadmin setConsumeMode -m PULL, or let all members of the group consume over gRPC "
    "(option transport=grpc)"
)


class ConsumeModes:
    """Warns if the consume mode of a topic is POP. Members over remoting pull even then, so messages may be delivered twice.
    Warns once for each topic and broker.
    """

    def __init__(self, port: GroupMember, group: str, subscriptions: Subscriptions) -> None:
        self._port = port
        self._group = group
        self._subscriptions = subscriptions
        self._pop_topics_and_brokers: set[tuple[str, str]] = set()

    def check(self, deadline: Deadline) -> None:
        topics = [topic for topic in self._subscriptions.filters() if not topic.startswith(RETRY_PREFIX)]
        modes = self._port.consume_modes(self._group, topics, deadline)
        pop_topics_and_brokers = {topic_and_broker for topic_and_broker, mode in modes.items() if mode == POP}
        for topic in sorted({topic for topic, _ in pop_topics_and_brokers - self._pop_topics_and_brokers}):
            logger.warning(
                "group %s: the consume mode of topic %s is POP at %s, but this member pulls. Other members may pop, such as Java "
                "consumers with clientRebalance=false: then messages are delivered twice. %s",
                self._group,
                topic,
                ", ".join(sorted(broker for name, broker in pop_topics_and_brokers if name == topic)),
                POP_REMEDY,
            )
        self._pop_topics_and_brokers = (self._pop_topics_and_brokers - modes.keys()) | pop_topics_and_brokers


TIMEOUT_S = 3.0  # the timeout of a heartbeat
MIN_HEARTBEAT_GAP_S = 3.0  # the shortest interval of heartbeats after rejected pulls
HEARTBEAT_RETRY_INTERVAL_S = 1.0  # the interval of heartbeats while a broker has no connection
HEARTBEAT_RETRY_PERIOD_S = 60.0  # after this time, only the regular heartbeats are sent


class Reregistration:
    """Registers this member again with brokers that were restarted. The heartbeat that registers the member makes the broker
    notify all members.

    ``rebalance`` then fetches the members and the route again, because the route may not have included the restarting broker.
    """

    def __init__(self, port: GroupMember, timer: Timer, rebalance: Callable[[], None]) -> None:
        self._port = port
        self._timer = timer
        self._rebalance = rebalance
        self._rate_limit = RateLimit(MIN_HEARTBEAT_GAP_S)

    def on_unknown_member(self) -> None:
        """Register soon, without blocking, because a broker that does not know this member rejected a pull."""
        if self._rate_limit.due():
            self._timer.call_later(0, self._register_again)

    def on_connection_lost(self, broker_name: str) -> None:
        """Send a heartbeat when the lost connection to a broker is open again. This method does not block.

        Rejected pulls do not always show that a broker was restarted. If the restarted broker already knows another member of
        the group, it does not reject the pulls of this member.
        """
        self._schedule_heartbeat(broker_name, self._timer.now_ms() + 1000 * HEARTBEAT_RETRY_PERIOD_S)

    def _schedule_heartbeat(self, broker_name: str, retry_until_ms: float) -> None:
        self._timer.call_later(
            HEARTBEAT_RETRY_INTERVAL_S, partial(self._heartbeat_until_connected, broker_name, retry_until_ms)
        )

    def _heartbeat_until_connected(self, broker_name: str, retry_until_ms: float) -> None:
        try:
            self._heartbeat()
        finally:
            if self._port.connection(broker_name) is None and self._timer.now_ms() < retry_until_ms:
                self._schedule_heartbeat(broker_name, retry_until_ms)
            else:
                self._rebalance()

    def _heartbeat(self) -> None:
        self._port.heartbeat(Deadline.after(TIMEOUT_S))

    def _register_again(self) -> None:
        self._heartbeat()
        self._rebalance()
