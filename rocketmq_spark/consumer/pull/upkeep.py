"""The work of a ``PullConsumer`` besides pulls: its membership in the group, commits, routes, and rebalances.

It joins the group with its first topic. The polling thread commits and refreshes routes. Rebalances run there or on another
thread, because a member that works for long between polls must release queues, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSet

from rocketmq_spark.base.clock import Clock, Deadline, NowAndThen
from rocketmq_spark.base.complaints import Complaints
from rocketmq_spark.base.process import entry
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.pull.assigned import FetchedPart, Left
from rocketmq_spark.consumer.pull.contact import Contact
from rocketmq_spark.consumer.pull.polls import Polls, Positions
from rocketmq_spark.consumer.rebalance import Allocation, StartOffset, allocate_clustering, wait_s
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.troubles import COMPARE_S, ConsumeModes, SubscriptionConflicts
from rocketmq_spark.errors import CallTimeout, ConnectionLost, InvalidParameter, RocketMQError, ServerFault
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import Asked, Membership
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30.0
INTRODUCED_S = 3.0  # minimum interval of extra heartbeats to brokers that do not list this member


class Subscribed:
    """The member's view of its group: subscriptions, heartbeats and allocation."""

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        positions: Positions,
        clock: Clock,
        contact: Contact,
    ) -> None:
        self._contact = contact
        self._member = member
        self._settings = settings
        self._subscriptions = subscriptions
        self._positions = positions
        self._clock = clock
        self._leave: Callable[[Deadline], None] | None = None
        self._due_at = 0.0
        self._introductions = NowAndThen(INTRODUCED_S)
        self.conflicts = SubscriptionConflicts(member, settings.group, subscriptions)
        self.modes = ConsumeModes(member, settings.group, subscriptions)
        self._unheard = False  # a broker does not list this member, because it restarted
        self._complaints = Complaints()  # of topics, and of queues
        self.balanced = False

    @property
    def topics(self) -> Collection[str]:
        return self._subscriptions.each().keys()

    def set(self, topic: str, wanted: Filter | None, asked: Asked) -> None:
        """Subscribe, or unsubscribe with None. A heartbeat tells brokers at once, which may then send requests.

        If the queues cannot be fetched, or this process already has a member of the group, this raises and changes nothing.
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
        """The content of heartbeats."""
        each = self._subscriptions.each()
        return Membership(
            {topic: one.filter for topic, one in each.items()},
            {topic: one.version_ms for topic, one in each.items()},
            "CONSUME_ACTIVELY",
        )

    def changed(self) -> None:
        """The group has changed: the next check is due."""
        self._due_at = 0.0

    def wait_s(self) -> float:
        """Seconds until the next check."""
        return max(0.0, self._due_at - self._clock.now())

    def look(self, owned: Collection[MessageQueue]) -> dict[MessageQueue, StartOffset | None]:
        """The queues allocated to this member: None for those that it owns already, otherwise their start.

        If a request fails, the queues of its topic do not change. A queue without a start waits for the next check, in a second.
        """
        self.balanced, self._unheard = True, False
        # First, so that a change reported during the requests is not lost.
        self._due_at = self._clock.now() + wait_s(True, has_notices=self._member.has_notices)
        found: dict[MessageQueue, StartOffset | None] = {}
        troubled: set[str] = set()  # brokers that do not answer: wait only once for each
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
        ):  # brokers then notify all members, even if they do not list this one
            self._member.heartbeat(self._positions.soon())
        if not self.balanced:
            self._due_at = min(self._due_at, self._clock.now() + wait_s(False))
        return found

    def _start(self, queue: MessageQueue, troubled: MutableSet[str]) -> StartOffset | None:
        try:
            start = self._positions.start(queue)
        except RocketMQError as e:
            self.balanced = False
            self._contact.failed(queue.broker_name, e)
            level = self._complaints.level((queue.topic, queue.broker_name), e)
            logger.log(level, "%s is assigned, but its start offset cannot be read yet: %s", queue, e)
            if isinstance(e, CallTimeout | ConnectionLost):  # other errors may concern only this queue or topic
                troubled.add(queue.broker_name)
            return None
        self._contact.reads(queue.broker_name)
        self._complaints.over((queue.topic, queue.broker_name))
        return start

    def _share(self, topic: str) -> Allocation:
        try:
            queues = self._positions.queues(topic)
            members = self._member.members(self._settings.group, topic, self._positions.soon())
        except RocketMQError as e:
            self._contact.failed(topic, e, self._member.has_notices)
            self._stays(topic, e)
            self._unheard |= isinstance(e, ServerFault)
            return Allocation(None)
        # A Proxy sends no notices, and answers by itself who the members are.
        self._contact.answered(topic, self._member.has_notices)
        self._unheard |= self._member.client_id not in members
        share = allocate_clustering(self._settings.allocate, self._member.client_id, queues, members)
        if share.problem is not None or not members:
            self._stays(topic, share.problem or "no member is known yet")
        else:
            self._complaints.over(topic)
        return share

    def _stays(self, topic: str, why: object) -> None:
        self.balanced = False
        logger.log(self._complaints.level(topic, why), "the assignment of topic %s stays unchanged: %s", topic, why)

    def leave(self) -> None:
        """Unregister from the brokers, so that other members take over."""
        if self._leave is not None:
            self._leave(self._positions.soon())
            self._leave = None  # only now: an interrupted call is repeated


FOLLOW_S = 1.0  # minimum interval of checks between polls
# Interval of commits of all offsets, also of idle queues (Java always commits all): a master may return with old offsets, and
# a member that was cut off may commit offsets from before this member owned the queue.
AGAIN_S = 30.0
LOOK_S = 0.01  # minimum wait of a poll while another thread checks


class Upkeep:
    """Rebalances and commits of one consumer."""

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
        self._turn_of: int | None = None  # id of a thread; invalid while the lock is free, as after Ctrl-C
        self._storing = threading.RLock()  # reentrant: a signal handler may commit during a commit
        self._left: Left = {}  # offsets of released queues that are not committed yet, as after Ctrl-C
        self._resets: deque[tuple[MessageQueue, int, bool]] = deque()
        polls.away = self.moved
        self._following = False
        self._next_commit = clock.now() + settings.auto_commit_interval_s
        self._next_again = clock.now() + AGAIN_S
        self._next_refresh = clock.now() + settings.route_refresh_s

    def begin(self, timeout_s: float) -> Deadline:
        """Begin a poll: messages that the last one returned are finished, those that it did not return wait again."""
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
                        break  # all topics use the same name servers
        return deadline

    def next(self, deadline: Deadline, most: int) -> list[FetchedPart]:
        """Wait for messages until ``deadline``, and rebalance when due.

        Raises ``ConnectionLost`` if no broker has answered for a minute since the first poll.
        """
        contact = self._polls.contact
        while True:
            until = deadline.within(contact.left_s())
            parts = self._next(until, most)
            if parts or self._polls.closed:
                return parts
            contact.check()
            if deadline.expired or not until.expired:
                return []

    def _next(self, deadline: Deadline, most: int) -> list[FetchedPart]:
        while True:
            if not self._shared.topics:
                return self._polls.wait(deadline, most)
            try:
                # Cached messages must not wait for brokers that hang: another thread checks the group, too.
                if self._following and (parts := self._polls.wait(Deadline.after(0), most)):
                    return parts
                self.look()
                self._polls.contact.check_servers()
                parts = self._polls.wait(deadline.within(max(LOOK_S, self._shared.wait_s())), most)
            except (InvalidParameter, ServerFault):  # the latter from brokers before 5.0
                if not self._is_gone(self._polls.failed):
                    raise
                self.look()
                continue
            if parts or deadline.expired or self._polls.closed:
                return parts

    def _is_gone(self, queue: MessageQueue | None) -> bool:
        """Whether a queue that its broker rejects no longer exists; then the next check is due.

        Its topic now has fewer read queues, or was created again with fewer.
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
        """Start to rebalance between polls, too."""
        if self._following:
            self._timer.later(0, self.look)
            return
        self._timer.later(FOLLOW_S, self._turn)
        self._following = True  # only now: without a thread the next call tries again
        self._timer.every(COMPARE_S, lambda: self._shared.conflicts.look(self._positions.soon()), COMPARE_S)
        self._timer.every(COMPARE_S, lambda: self._shared.modes.look(self._positions.soon()), 0.0)

    def _turn(self) -> None:
        try:
            self.look()
        finally:
            self._timer.later(FOLLOW_S, self._turn)

    def changed(self) -> None:
        """A broker reported a change of the group."""
        self._shared.changed()
        self._polls.wake()
        self._timer.later(0, self.look)

    def moved(self, queue: MessageQueue, offset: int, given_up: bool = True) -> None:
        """The answer to a pull of a released queue reported a reset. No other pull reports it, so it is committed soon.

        Not ``given_up``: the broker reported the reset to all members, and this one may be acquiring the queue.
        """
        if not given_up and not self._turns.locked():
            return
        self._resets.append((queue, offset, given_up))
        with contextlib.suppress(RuntimeError):  # no more threads: at the close, then
            self._timer.later(0, self._settle_in_turn)

    def _settle_in_turn(self) -> None:
        with self._turns:  # not during a rebalance, which may be reading the queue's start
            self._turn_of = threading.get_ident()
            self._settle()

    def _settle(self) -> None:
        """Commit resets after the commit of released queues, which may have stored an offset from before the reset."""
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
        """Rebalance if due, unless another thread does."""
        if self._shared.topics and not self._shared.wait_s() and not self._turns.locked():
            self.rebalance()

    def have(self, starts: Mapping[MessageQueue, StartOffset | None]) -> None:
        """Read these queues, as in ``Assigned.assign``; finished offsets of released queues are committed.

        The start of a queue that the group never had is committed, too. Otherwise it would start at another offset after a
        crash, or for the next owner, and messages that arrived in between would be lost.
        """
        if not self._settings.auto_commit:
            self._polls.assign(starts)
            return
        self._commit(lambda: self._give_up(starts))  # evaluated when it is sent, so that an earlier reset counts
        self._commit(self._polls.unstored)

    def rebalance(self) -> None:
        """Rebalance now: one thread at a time, and not within a rebalance.

        ``with`` statements release their locks even after Ctrl-C.
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
        """Stop rebalancing, release all queues, commit finished offsets with option 'autoCommit', and leave the group.

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
        except BaseException:  # Ctrl-C, too: the assignment is unknown, and the next check would be in 20 s
            self._shared.changed()
            raise

    def store_finished(self) -> dict[MessageQueue, RocketMQError]:
        """Commit the offsets that are finished when the earlier commits have ended."""
        return self._commit(self._polls.finish)

    def store(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit. Failures are logged, returned, and retried by the next commit of finished offsets.

        One commit at a time: an offset from before a reset must not reach the broker after the offset of the reset.
        """
        return self._commit(lambda: offsets)

    def _commit(self, offsets: Callable[[], Mapping[MessageQueue, int]]) -> dict[MessageQueue, RocketMQError]:
        with self._storing:
            return self._stored(offsets())

    def _give_up(self, starts: Mapping[MessageQueue, StartOffset | None]) -> Left:
        """Read only these queues. Commit current finished offsets of the released ones, including resets and queues that an
        interrupted call released before. Returns what is left to commit, which is nothing.
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
