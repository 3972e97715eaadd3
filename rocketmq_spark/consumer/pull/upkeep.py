"""What a ``PullConsumer`` does beside its polls: commits and routes on the thread that polls, and the group's changes there or
on a thread of its own, for a member that works long between polls must give queues up, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.lifecycle import entry
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.consumer.pull.assigned import FetchedPart
from rocketmq_spark.consumer.pull.polls import Polls
from rocketmq_spark.consumer.pull.positions import Positions
from rocketmq_spark.consumer.pull.subscribed import Subscribed
from rocketmq_spark.consumer.rebalance import Start
from rocketmq_spark.consumer.settings import PullConsumerSettings
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0  # as often at most the group is looked at between polls
# So often all offsets are to be stored again, those of idle queues too (Java does it each time): a master that was away comes
# back with old ones, and a member that was cut off stores what it had finished before the queue was ours.
AGAIN_S = 30.0
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
        self._turns = threading.Lock()
        self._turn_of: int | None = None  # a thread; it means nothing while the lock is free, where Ctrl-C left it
        self._storing = threading.RLock()  # not plain: a signal handler may commit above a commit
        self._left: dict[MessageQueue, int] = {}  # of queues that were given up at the end, not stored yet
        self._following = False
        self._next_commit = clock.now() + settings.auto_commit_interval_s
        self._next_again = clock.now() + AGAIN_S
        self._next_refresh = clock.now() + settings.route_refresh_s

    def begin(self, timeout_s: float) -> Deadline:
        """A poll begins: what the last one gave is finished, and what it did not come to give waits again."""
        deadline = Deadline.after(timeout_s)
        self._polls.begin()
        now = self._clock.now()
        again = now >= self._next_again
        if again:
            self._next_again = now + AGAIN_S
        self._polls.finish(again)
        if self._settings.auto_commit and now >= self._next_commit:
            self._next_commit = now + self._settings.auto_commit_interval_s
            self.store_finished()
        if now >= self._next_refresh:
            self._next_refresh = now + self._settings.route_refresh_s
            for topic in sorted({queue.topic for queue in self._polls.queues()}):
                try:
                    self._positions.queues(topic)
                except RocketMQError as e:
                    logger.info("the route of %s cannot be refreshed: %s", topic, e)
        return deadline

    @entry
    def next(self, deadline: Deadline, most: int) -> list[FetchedPart]:
        """What comes before ``deadline``, while the group's changes are followed."""
        while True:
            if not self._shared.topics:
                return self._polls.wait(deadline, most)
            self.look()
            parts = self._polls.wait(deadline.within(max(LOOK_S, self._shared.wait_s())), most)
            if parts or deadline.expired or self._polls.closed:
                return parts

    def follow(self) -> None:
        """Follow the group's changes from now on, also between polls."""
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
        """Have the queues that are ours now, if that is due and no other thread does it."""
        if self._shared.topics and not self._shared.wait_s() and not self._turns.locked():
            self.rebalance()

    def have(self, starts: Mapping[MessageQueue, Start | None]) -> None:
        """Read these queues, as in ``Assigned.assign``; what is finished of those that go is committed.

        So is where a queue begins that the group never had: else it would begin at another offset after a crash, or for
        the next owner, and what came meanwhile would be lost.
        """
        if not self._settings.auto_commit:
            self._polls.assign(starts)
            return
        self._commit(lambda: self._polls.assign(starts))  # in its turn: a reset that comes before that counts
        self._commit(self._polls.unstored)

    def rebalance(self) -> None:
        """Have the queues that are ours now, at once: one thread at a time, and not within a rebalance.

        Wherever Ctrl-C comes, a ``with`` statement releases its lock.
        """
        if self._turns.locked() and self._turn_of == threading.get_ident():
            return
        with self._turns:
            self._turn_of = threading.get_ident()
            try:
                self._rebalance()
            finally:
                self._turn_of = None

    @entry
    def close(self) -> None:
        """Follow the group no more, give all queues up, commit what is finished if option 'autoCommit' says so, and leave.

        An interrupted close may be repeated.
        """
        self._timer.close()
        with self._storing:
            try:
                self._store_left()
            finally:
                self._shared.leave()

    def _rebalance(self) -> None:
        if self._polls.closed:
            return
        owned = self._polls.queues()
        found = self._shared.look(owned)
        if found.keys() != set(owned):
            logger.info("group %s: %d queues are ours now, before %d", self._settings.group, len(found), len(owned))
            self.have(found)

    def store_finished(self) -> dict[MessageQueue, RocketMQError]:
        """Commit what is finished, as it is when the commits before this one are through."""
        return self._commit(self._polls.finish)

    def store(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit; what could not be stored is logged, given, and tried again by the next commit of what is finished.

        One commit at a time: an offset that was taken before a reset must not reach the broker after the one of the reset.
        """
        return self._commit(lambda: offsets)

    def _commit(self, offsets: Callable[[], Mapping[MessageQueue, int]]) -> dict[MessageQueue, RocketMQError]:
        with self._storing:
            return self._stored(offsets())

    def _store_left(self) -> None:
        """Commit what is finished: as it is now, after a reset that came while the consumer ended."""
        self._left |= self._polls.assign({})
        if self._settings.auto_commit:
            self._stored(self._left)
        self._left = {}

    def _stored(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        failed = self._positions.store(offsets)
        self._polls.committed({queue: offset for queue, offset in offsets.items() if queue not in failed})
        return failed
