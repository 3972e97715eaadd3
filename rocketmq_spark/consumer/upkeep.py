"""What a ``PullConsumer`` does beside its polls: commits and routes on the thread that polls, and the group's changes there or
on a thread of its own, for a member that works long between polls must give queues up, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from rocketmq_spark.clock import Clock, Deadline
from rocketmq_spark.consumer.assigned import Part
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.positions import Positions
from rocketmq_spark.consumer.pull_settings import PullConsumerSettings
from rocketmq_spark.consumer.subscribed import Subscribed
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0  # as often at most the group is looked at while nobody polls
LOOK_S = 0.01  # as long at least a poll waits while another thread looks


class Upkeep:
    """Of one consumer."""

    def __init__(
        self,
        settings: PullConsumerSettings,
        polls: Polls,
        positions: Positions,
        shared: Subscribed,
        clock: Clock,
        timer: Timer,
    ) -> None:
        self._settings = settings
        self._polls = polls
        self._positions = positions
        self._shared = shared
        self._clock = clock
        self._timer = timer
        self._looking = threading.Lock()
        self._following = False
        self._next_commit = clock.now() + settings.auto_commit_interval_s
        self._next_refresh = clock.now() + settings.route_refresh_s

    def begin(self, timeout_s: float) -> Deadline:
        """A poll begins: what the last one gave is finished."""
        self._polls.check_open()
        deadline = Deadline.after(timeout_s)
        finished, now = self._polls.finish(), self._clock.now()
        if self._settings.auto_commit and now >= self._next_commit:
            self._next_commit = now + self._settings.auto_commit_interval_s
            self.store(finished)
        if now >= self._next_refresh:
            self._next_refresh = now + self._settings.route_refresh_s
            for topic in sorted({queue.topic for queue in self._polls.queues()}):
                try:
                    self._positions.queues(topic)
                except RocketMQError as e:
                    logger.info("the route of %s cannot be refreshed: %s", topic, e)
        return deadline

    def next(self, deadline: Deadline, most: int) -> list[Part]:
        """What comes before ``deadline``, while the group's changes are followed."""
        while True:
            if not self._shared.topics:
                return self._polls.wait(deadline, most)
            self.look()
            parts = self._polls.wait(deadline.within(max(LOOK_S, self._shared.wait_s())), most)
            if parts or deadline.expired or self._polls.closed:
                return parts

    def follow(self) -> None:
        """Follow the group's changes from now on, whether somebody polls or not."""
        if not self._following:
            self._following = True
            self._timer.later(FOLLOW_S, self._turn)

    def _turn(self) -> None:
        try:
            self.look()
        finally:
            self._timer.later(max(FOLLOW_S, self._shared.wait_s()), self._turn)

    def changed(self) -> None:
        """The group is not as it was, says a broker."""
        self._shared.changed()
        self._polls.wake()
        self._timer.later(0, self.look)

    def look(self) -> None:
        """Have the queues that are ours now, if that is due and nobody else is at it."""
        if self._shared.topics and not self._shared.wait_s() and self._looking.acquire(blocking=False):
            try:
                self._rebalance()
            finally:
                self._looking.release()

    def have(self, starts: Mapping[MessageQueue, int | None]) -> None:
        """Read these queues, as in ``Assigned.assign``; what is finished of those that go is committed."""
        left = self._polls.assign(starts)
        if self._settings.auto_commit:
            self.store(left)

    def rebalance(self) -> None:
        """Have the queues that are ours now, at once."""
        with self._looking:
            self._rebalance()

    def close(self) -> None:
        """Follow the group no more."""
        self._timer.close()

    def _rebalance(self) -> None:
        if self._polls.closed:
            return
        owned = self._polls.queues()
        found = self._shared.look(owned)
        if found.keys() != set(owned):
            logger.info("group %s: %d queues are ours now, before %d", self._settings.group, len(found), len(owned))
            self.have(found)

    def store(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit; what could not be stored is logged, given, and tried again by the next commit of what is finished."""
        failed = self._positions.store(offsets)
        self._polls.committed({queue: offset for queue, offset in offsets.items() if queue not in failed})
        return failed
