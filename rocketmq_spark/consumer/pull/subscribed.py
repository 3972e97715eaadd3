"""Topics that a ``PullConsumer`` shares with the other members of its group: which queues are its own now.

It joins the group with its first topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.consumer.pull.positions import Positions
from rocketmq_spark.consumer.rebalance import QueueShare, Start, clustering_share, wait_s
from rocketmq_spark.consumer.settings import PullConsumerSettings
from rocketmq_spark.consumer.subscriptions import Subscriptions
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0


class Subscribed:
    """The group's other side."""

    def __init__(
        self,
        member: GroupMember,
        settings: PullConsumerSettings,
        subscriptions: Subscriptions,
        positions: Positions,
        clock: Clock,
    ) -> None:
        self._member = member
        self._settings = settings
        self._subscriptions = subscriptions
        self._positions = positions
        self._clock = clock
        self._leave: Callable[[Deadline], None] | None = None
        self._due_at = 0.0
        self.balanced = False

    @property
    def topics(self) -> Collection[str]:
        return self._subscriptions.each().keys()

    def set(self, topic: str, wanted: Filter | None, asked: Asked) -> None:
        """Subscribe, or not any more; brokers hear of it at once, and may ask from then on.

        Raises what the question for the queues raises, or that the group has a member, and then nothing has changed.
        """
        if wanted is not None:
            self._positions.queues(topic)
        if self._leave is None:
            self._leave = self._member.join(self._settings.group, self.membership, asked, HEARTBEAT_S)
        if wanted is not None:
            self._subscriptions.add(topic, wanted)
        else:
            self._subscriptions.remove(topic)
        self._member.heartbeat(self._positions.soon())
        self._due_at = 0.0

    def membership(self) -> Membership:
        """What heartbeats report of it."""
        each = self._subscriptions.each()
        return Membership(
            {topic: one.filter for topic, one in each.items()},
            {topic: one.version_ms for topic, one in each.items()},
            "CONSUME_ACTIVELY",
        )

    def changed(self) -> None:
        """Something is not as it was: the next look is due."""
        self._due_at = 0.0

    def wait_s(self) -> float:
        """Until the next look."""
        return max(0.0, self._due_at - self._clock.now())

    def look(self, owned: Collection[MessageQueue]) -> dict[MessageQueue, Start | None]:
        """The queues that are this member's now: None for those that it owns already, otherwise where they begin.

        What cannot be found out changes nothing; a queue without a start is left for the next look, in a second.
        """
        self.balanced = True
        # Before anything is asked: a change that is reported meanwhile counts.
        self._due_at = self._clock.now() + wait_s(True)
        found: dict[MessageQueue, Start | None] = {}
        for topic in self.topics:
            share = self._share(topic)
            mine = {queue for queue in owned if queue.topic == topic}
            for queue in sorted(mine if share.queues is None else share.queues):
                try:
                    found[queue] = None if queue in mine else self._positions.start(queue)
                except RocketMQError as e:
                    self.balanced = False
                    logger.warning("%s is ours, but where it begins is not known yet: %s", queue, e)
        if not self.balanced:
            self._due_at = min(self._due_at, self._clock.now() + wait_s(False))
        return found

    def _share(self, topic: str) -> QueueShare:
        try:
            queues = self._positions.queues(topic)
            members = self._member.members(self._settings.group, topic, self._positions.soon())
        except RocketMQError as e:
            logger.warning("the queues of %s stay as they are: %s", topic, e)
            self.balanced = False
            return QueueShare(None)
        share = clustering_share(self._settings.allocate, self._member.client_id, queues, members)
        if share.problem is not None or not members:
            self.balanced = False
            logger.warning("the queues of %s stay as they are: %s", topic, share.problem or "no member is known yet")
        return share

    def leave(self) -> None:
        """Tell brokers, so that the others take over."""
        if self._leave is not None:
            self._leave(self._positions.soon())
            self._leave = None  # not before: an interrupted one is repeated
