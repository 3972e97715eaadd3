"""What a ``PullConsumer`` does beside its polls: its membership in the group, commits, routes, and the group's changes.

It joins the group with its first topic. Commits and routes stay on the thread that polls; the group's changes are followed there
or on a thread of its own, for a member that works long between polls must give queues up, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSet

from rocketmq_spark.base.clock import Clock, Deadline, NowAndThen
from rocketmq_spark.base.process import entry
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.pull.assigned import FetchedPart, Left
from rocketmq_spark.consumer.pull.polls import Polls, Positions
from rocketmq_spark.consumer.rebalance import QueueShare, Start, clustering_share, wait_s
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import CallTimeout, ConnectionLost, InvalidParameter, RocketMQError, ServerFault
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
INTRODUCED_S = 3.0  # as often at most a broker that does not know this member gets another heartbeat


class Subscribed:
    """The group's other side."""

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
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
        self._introductions = NowAndThen(INTRODUCED_S)
        self._unheard = False  # a broker does not know this member: it has been restarted
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
        try:
            self._member.heartbeat(self._positions.soon())
        finally:  # Ctrl-C, too
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
        self.balanced, self._unheard = True, False
        # Before anything is asked: a change that is reported meanwhile counts.
        self._due_at = self._clock.now() + wait_s(True)
        found: dict[MessageQueue, Start | None] = {}
        troubled: set[str] = set()  # brokers that do not answer: a poll is not to wait for each of their queues
        for topic in self.topics:
            share = self._share(topic)
            mine = {queue for queue in owned if queue.topic == topic}
            for queue in sorted(mine if share.queues is None else share.queues):
                if queue in mine:
                    found[queue] = None
                elif queue.broker_name not in troubled and (start := self._start(queue, troubled)) is not None:
                    found[queue] = start
        if (
            self._unheard and self._introductions.due()
        ):  # brokers notify all members then, also those that do not know this one
            self._member.heartbeat(self._positions.soon())
        if not self.balanced:
            self._due_at = min(self._due_at, self._clock.now() + wait_s(False))
        return found

    def _start(self, queue: MessageQueue, troubled: MutableSet[str]) -> Start | None:
        try:
            return self._positions.start(queue)
        except RocketMQError as e:
            self.balanced = False
            logger.warning("%s is assigned, but its start offset cannot be read yet: %s", queue, e)
            if isinstance(e, CallTimeout | ConnectionLost):  # others may be of this queue, or its topic, alone
                troubled.add(queue.broker_name)
            return None

    def _share(self, topic: str) -> QueueShare:
        try:
            queues = self._positions.queues(topic)
            members = self._member.members(self._settings.group, topic, self._positions.soon())
        except RocketMQError as e:
            logger.warning("the assignment of topic %s stays unchanged: %s", topic, e)
            self.balanced = False
            self._unheard |= isinstance(e, ServerFault)
            return QueueShare(None)
        self._unheard |= self._member.client_id not in members
        share = clustering_share(self._settings.allocate, self._member.client_id, queues, members)
        if share.problem is not None or not members:
            self.balanced = False
            logger.warning(
                "the assignment of topic %s stays unchanged: %s", topic, share.problem or "no member is known yet"
            )
        return share

    def leave(self) -> None:
        """Tell brokers, so that the others take over."""
        if self._leave is not None:
            self._leave(self._positions.soon())
            self._leave = None  # not before: an interrupted one is repeated


FOLLOW_S = 1.0  # as often at most the group is looked at between polls
# So often all offsets are to be stored again, those of idle queues too (Java does it each time): a master that was away comes
# back with old ones, and a member that was cut off stores what it had finished before the queue was ours.
AGAIN_S = 30.0
LOOK_S = 0.01  # as long at least a poll waits while another thread looks


class Upkeep:
    """Of one consumer."""

    def __init__(
        self,
        settings: ConsumerSettings,
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
        self._left: Left = {}  # of queues that were given up, not stored yet: Ctrl-C may come between
        self._resets: deque[tuple[MessageQueue, int, bool]] = deque()
        polls.away = self.moved
        self._following = False
        self._next_commit = clock.now() + settings.auto_commit_interval_s
        self._next_again = clock.now() + AGAIN_S
        self._next_refresh = clock.now() + settings.route_refresh_s

    def begin(self, timeout_s: float) -> Deadline:
        """A poll begins: what the last one gave is finished, and what it did not come to give waits again."""
        deadline = Deadline.after(timeout_s)
        now = self._clock.now()
        again = now >= self._next_again
        if again:
            self._next_again = now + AGAIN_S
        self._polls.begin(again)
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
                    if isinstance(e, CallTimeout | ConnectionLost):
                        break  # those of all topics come from the same name servers
        return deadline

    def next(self, deadline: Deadline, most: int) -> list[FetchedPart]:
        """What comes before ``deadline``, while the group's changes are followed."""
        while True:
            if not self._shared.topics:
                return self._polls.wait(deadline, most)
            try:
                # What is there need not wait for brokers that hang: another thread looks, too.
                if self._following and (parts := self._polls.wait(Deadline.after(0), most)):
                    return parts
                self.look()
                parts = self._polls.wait(deadline.within(max(LOOK_S, self._shared.wait_s())), most)
            except (InvalidParameter, ServerFault):  # the latter from brokers before 5.0
                if not self._is_gone(self._polls.failed):
                    raise
                self.look()
                continue
            if parts or deadline.expired or self._polls.closed:
                return parts

    def _is_gone(self, queue: MessageQueue | None) -> bool:
        """Whether a queue that its broker refuses is none of its topic's any more; then the next look is due.

        Its topic has fewer read queues now, or was made again with fewer.
        """
        try:
            if queue is None or queue in self._positions.queues(queue.topic, refresh=True):
                return False
        except RocketMQError as e:
            logger.info("cannot check whether queue %s still exists: %s", queue, e)
            return False
        logger.warning("queue %s no longer exists", queue)
        self._shared.changed()
        return True

    def follow(self) -> None:
        """Follow the group's changes from now on, also between polls."""
        if self._following:
            self._timer.later(0, self.look)
            return
        self._timer.later(FOLLOW_S, self._turn)
        self._following = True  # not before: without a thread the next call tries again

    def _turn(self) -> None:
        try:
            self.look()
        finally:
            self._timer.later(FOLLOW_S, self._turn)

    def changed(self) -> None:
        """The group is not as it was, says a broker."""
        self._shared.changed()
        self._polls.wake()
        self._timer.later(0, self.look)

    def moved(self, queue: MessageQueue, offset: int, given_up: bool = True) -> None:
        """A pull of a queue that was given up heard of a reset, which no other pull hears of: it is stored soon.

        Not ``given_up``: its broker says so to all members, and the queue may be on its way here.
        """
        if not given_up and not self._turns.locked():
            return
        self._resets.append((queue, offset, given_up))
        with contextlib.suppress(RuntimeError):  # no more threads: at the end, then
            self._timer.later(0, self._settle_in_turn)

    def _settle_in_turn(self) -> None:
        with self._turns:  # not while the queue comes back: where it begins may be asked for by now
            self._turn_of = threading.get_ident()
            self._settle()

    def _settle(self) -> None:
        """Behind the commit of what was given up, which may have put the offset from before the reset in its place."""
        with contextlib.suppress(IndexError):
            while True:
                queue, offset, given_up = self._resets.popleft()
                self._left = {other: at for other, at in self._left.items() if other != queue}
                mine = self._polls.reset({queue: offset})
                if given_up:
                    text = (
                        "offset %d of %s, which was given up, is reset by its broker: it is stored for the next member"
                    )
                    logger.warning(text, offset, queue)
                elif mine:
                    logger.warning("%s was assigned meanwhile: it is reset to offset %d", queue, offset)
                self.store({queue: offset} if given_up else mine)

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
        self._commit(lambda: self._give_up(starts))  # in its turn: a reset that comes before that counts
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
                self._give_up({})
                self._settle()
            finally:
                self._shared.leave()

    def _rebalance(self) -> None:
        if self._polls.closed:
            return
        owned = self._polls.queues()
        try:
            found = self._shared.look(owned)
            if found.keys() != set(owned) or self._left:
                text = "group %s: %d queues are assigned now, %d before"
                logger.info(text, self._settings.group, len(found), len(owned))
                self.have(found)
        except BaseException:  # Ctrl-C, too: nobody knows what is assigned, and the next look would be in 20 s
            self._shared.changed()
            raise

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

    def _give_up(self, starts: Mapping[MessageQueue, Start | None]) -> Left:
        """Read these queues and no others, and commit what is finished of the others: as it is now, after a reset that came
        meanwhile, and also what an interrupted call gave up before. Gives what is left to be committed, which is nothing.
        """
        self._left = {queue: offset for queue, offset in self._left.items() if queue not in starts}
        self._polls.assign(starts, self._left)
        if self._settings.auto_commit:
            self._stored(self._left)
        self._left = {}
        return self._left

    def _stored(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        failed = self._positions.store(offsets)
        self._polls.committed({queue: offset for queue, offset in offsets.items() if queue not in failed})
        return failed
