"""Takes and releases queues as a rebalance decided, in an order that loses no messages.

Mirrors ``RebalanceImpl.updateProcessQueueTableInRebalance`` and ``RebalancePushImpl``. A released queue is dropped first, so
that no listener gets more of its messages; then its offset is committed, its lock is released, and it is forgotten. While an
ordered listener has messages of the queue, it is only dropped; the other steps follow when the listener returns, so that the
committed offset is behind these messages. (Java ignores the result of such a call, and the next owner repeats its messages.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import Complaints
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.offset_store import OffsetStore
from rocketmq_spark.consumer.push.orderly import Orderly
from rocketmq_spark.consumer.rebalance import (
    ConsumeFrom,
    ConsumeFromWhere,
    StartOffset,
    StartOffsetRequests,
    start_offset,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
# A Proxy does not answer for a broker that is away, and listeners keep running until the request times out.
UNNOTICED_TIMEOUT_S = 1.0
EXPECTED_MS = 60_000  # for how long a released queue, or one that could not be started, is expected to come back
FORCED_UNLOCK_MS = 20_000  # a listener that hangs must not keep a revoked queue from other members for ever
SOON_MS = 5_000  # a queue that comes later than that after its topic was subscribed to was not there then, or could not be asked

Begin = Callable[[ProcessQueue, int], None]


class Ownership:
    """The queues of one member. ``begin`` starts the pulls of a queue. A queue of which ``orderly`` runs a call waits for it.

    ``subscribed_ms`` returns when a topic was subscribed to, by the clock of leases.
    """

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        held: MemberState,
        store: OffsetStore,
        begin: Begin,
        timer: Timer,
    ) -> None:
        self._port = port
        self._settings = settings
        self._held = held
        self._store = store
        self._begin = begin
        self._timer = timer
        self._lease_ms = timer.lease_ms
        self._made_ms = timer.lease_ms()
        self.subscribed_ms: Callable[[str], int] = lambda topic: 0
        self.make_queue: Callable[[MessageQueue, int], ProcessQueue] = ProcessQueue
        self.orderly: Orderly | None = None
        self._left = False
        # Offsets that an operator set, or a repair, and no broker stored yet; of ``_moving``, which were given up for that, also
        # those that one did: a pull that was under way brings an offset from before, which may be stored after it.
        self._set: dict[MessageQueue, int] = {}
        self._moving: set[MessageQueue] = set()
        # Queues between a release and the next begin, and until when: a reset that comes meanwhile counts for them, too.
        self._expected: dict[MessageQueue, int] = {}
        self._resets = 0
        self._complaints = Complaints()  # of the queues of a topic at a broker

    def drop(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Release ``queues``; returns those that were released. A queue whose messages a listener has is released later."""
        with self._held.lock:
            held = [self._held.queues[queue] for queue in queues if queue in self._held.queues]
            for each in held:
                each.drop(self._lease_ms())
        free = [each.queue for each in held if not self._in_use(each)]
        self._release(free)
        return free

    def add(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Start ``queues``; returns those that were started. The next run retries the others, such as locked ones."""
        with self._held.lock:
            wanted = [queue for queue in queues if queue not in self._held.queues]
            asked_ms = self._lease_ms()  # a lock counts from its request, because reading offsets may take long
            self._expect(wanted, asked_ms)
        granted: Mapping[MessageQueue, object] = {}
        if self._locks and wanted:
            granted = locked(self._port, self._settings.group, wanted, TIMEOUT_S)
            wanted = [queue for queue in wanted if queue in granted]
        troubled: set[str] = set()  # brokers that do not answer: their other queues need not wait for that, too
        begun = [
            q for q in wanted if q.broker_name not in troubled and self._added(q, asked_ms, granted.get(q), troubled)
        ]
        with self._held.lock:
            fresh = self._held.offsets.untold().keys() & set(begun)
        if fresh:  # else who begins them after a crash would begin elsewhere, and lose what came meanwhile
            self._store.persist(Deadline.after(TIMEOUT_S), fresh)
        with self._held.lock:
            idle = set(wanted) - self._held.queues.keys() - set(begun)
        if self._locks and idle:  # else whose turn it is next, here or elsewhere, would wait until the locks expire
            self._port.unlock(self._settings.group, idle, Deadline.after(TIMEOUT_S))
        return begun

    def yield_others(self, topic: str, mine: Collection[MessageQueue]) -> None:
        """Note the assigned queues of the topic. Pending resets of its other queues are left to their owners."""
        with self._held.lock:
            others = self._moving - set(mine) - self._held.queues.keys()
            for queue in [queue for queue in others if queue.topic == topic]:
                self._moving.discard(queue)
                self._set.pop(queue, None)

    def repair(self, queue: ProcessQueue, offset: int) -> None:
        """Commit ``offset`` in place of one that does not exist, and release the queue; a rebalance starts it again."""
        with self._held.lock:
            if queue.dropped:
                return
        self._replace({queue.queue: offset})

    def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Drop cached messages and continue at ``offsets``: they are committed, and a rebalance starts the queues again."""
        here, away = self._replace(offsets)
        for text, queues in (
            ("group %s: offsets are reset to %s", here),
            (
                "group %s: offsets of queues that are changing hands are reset to %s, for the member that begins them next",
                away,
            ),
            (
                "group %s: this member does not have these queues and did not reset them: %s",
                offsets.keys() - here - away,
            ),
        ):
            if queues:
                logger.warning(text, self._settings.group, {str(queue): offsets[queue] for queue in sorted(queues)})

    def _replace(self, offsets: Mapping[MessageQueue, int]) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Replace offsets of owned and just released queues; returns both sets."""
        now_ms = self._lease_ms()
        with self._held.lock:
            self._resets += 1
            mine = [self._held.queues[queue] for queue in offsets if queue in self._held.queues]
            here = {each.queue for each in mine}
            away = {queue for queue in offsets if queue not in here and self._expected.get(queue, 0) > now_ms}
            for each in mine:
                each.drop(now_ms)
                each.clear()
            for queue in (*here, *away):
                self._held.offsets.put(queue, offsets[queue])
                self._set[queue] = offsets[queue]
            self._moving |= here
        busy = [each.queue for each in mine if self._in_use(each)]
        # The others are stored when they are given up, now. Those that are away may be on their way to another member.
        self._store.persist(Deadline.after(TIMEOUT_S), [*busy, *away])
        self.drop(here)
        with self._held.lock:
            self._forget([queue for queue in away if queue not in self._held.queues])
        return here, away

    def lock_all(self) -> None:
        """Renew the locks of all queues. A queue without a lock is not consumed until it is locked again."""
        queues = [each.queue for each in self._held.owned()]
        if queues and self._locks:
            self._lock(queues, TIMEOUT_S if self._port.has_notices else UNNOTICED_TIMEOUT_S)

    def relock(self, queues: Sequence[ProcessQueue]) -> set[MessageQueue]:
        """Request the locks of these queues; returns those that were granted."""
        return self._lock([each.queue for each in queues], 1.0)

    def leave(self, deadline: Deadline) -> None:
        """Release all queues, even if listeners have messages: commit offsets and release locks. No queue is added afterwards."""
        with self._held.lock:
            self._left = True
            queues = list(self._held.queues)
            for each in self._held.queues.values():
                each.drop(self._lease_ms())
        self._release(queues, deadline)

    @property
    def _locks(self) -> bool:
        return self._settings.ordered and self._settings.clustering

    def _in_use(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of a dropped queue, and the queue waits for it.

        Without the lock, another member may have the queue; then the time counts from the last lock, as in Java.
        """
        if self.orderly is None or not self.orderly.calling(queue):
            return False
        since_ms = queue.dropped_ms if self.orderly.ready(queue) else queue.lock.granted_ms or 0
        return self._lease_ms() <= since_ms + FORCED_UNLOCK_MS

    def _release(self, queues: Sequence[MessageQueue], deadline: Deadline | None = None) -> None:
        if not queues:
            return
        deadline = deadline or Deadline.after(TIMEOUT_S)
        with self._held.lock:
            for queue in queues:
                if (held := self._held.queues.get(queue)) is not None:
                    held.released = (
                        True  # an offset of a call that ends now might be stored after one of the next owner
                    )
        while True:
            resets = self._resets  # before: one that comes meanwhile, on another thread at the end, is stored, too
            self._store.persist(deadline, queues)
            if self._locks:
                self._port.unlock(self._settings.group, queues, deadline)
            with self._held.lock:
                if self._resets != resets:
                    continue
                for queue in queues:
                    self._held.queues.pop(queue, None)
                    self._held.ends.pop(queue, None)
                    self._expected[queue] = self._lease_ms() + EXPECTED_MS
                self._forget(queues)
                return

    def _forget(self, queues: Iterable[MessageQueue]) -> None:
        """Forget queues; needs the lock. An offset that was set, or finished since, is kept until a broker stores it."""
        unheard = self._held.offsets.unheard()
        for queue in queues:
            if queue in unheard and queue in self._set:
                self._set[queue] = unheard[queue]
                self._moving.discard(queue)
            elif queue not in self._moving:
                self._set.pop(queue, None)
            self._held.offsets.forget(queue)

    def _expect(self, queues: Iterable[MessageQueue], now_ms: int) -> None:
        """Expect queues back; needs the lock. A set offset is kept only while rebalances try to start its queue again."""
        for queue in queues:
            away = self._expected.get(queue, 0) <= now_ms
            if away and (offset := self._set.pop(queue, None)) is not None and queue not in self._moving:
                text = "group %s: offset %d of %s was set, no broker stored it, and the queue was away for long: it is dropped"
                logger.warning(text, self._settings.group, offset, queue)
            self._expected[queue] = now_ms + EXPECTED_MS

    def _added(self, queue: MessageQueue, locked_ms: int, connection: object, troubled: set[str]) -> bool:
        with self._held.lock:
            self._held.offsets.forget(queue)
            resets = self._resets
        try:
            offset, stored = self._start(queue)
        except RocketMQError as e:
            level = self._complaints.level((queue.topic, queue.broker_name), e)
            logger.log(level, "queue %s is not started yet, its offset cannot be read: %s", queue, e)
            if isinstance(e, CallTimeout | ConnectionLost):  # others may be of this queue alone
                troubled.add(queue.broker_name)
            return False
        self._complaints.over((queue.topic, queue.broker_name))
        fresh = self.make_queue(queue, self._timer.now_ms())
        if self._locks:
            fresh.lock.grant(locked_ms, connection)
        with self._held.lock:
            # Or a run beside this one was first, or a reset came: what was read may be from before it.
            if self._left or queue in self._held.queues or self._resets != resets:
                return False
            if queue in self._set:  # what is stored is from before it was set
                offset, stored = self._set[queue], False
            self._expected.pop(queue, None)
            self._moving.discard(queue)
            self._held.queues[queue] = fresh
            self._held.offsets.put(queue, offset)
            if stored:
                self._held.offsets.reported({queue: offset})
        self._begin(fresh, offset)
        return True

    def _start(self, queue: MessageQueue) -> StartOffset:
        deadline = Deadline.after(TIMEOUT_S)
        questions = StartOffsetRequests(
            lambda: self._store.read(queue, deadline),
            lambda: self._port.bounds(queue, deadline).max_offset,
            lambda epoch_ms: self._port.search_offset(queue, epoch_ms, deadline, self._settings.group),
        )
        return start_offset(queue, self._mode(queue.topic), questions)

    def _mode(self, topic: str) -> ConsumeFrom:
        """Return where a queue without an offset begins.

        At the end, a broadcasting member would skip messages of a queue that was created while it runs. If the group shares
        its queues, the broker returns 0 for such a queue.
        """
        mode = self._settings.consume_from
        age_ms = self._lease_ms() - max(
            self._made_ms, self.subscribed_ms(topic)
        )  # the wall clock may have been put right
        if self._settings.clustering or mode.where is not ConsumeFromWhere.LATEST or age_ms <= SOON_MS:
            return mode
        return ConsumeFrom(ConsumeFromWhere.TIMESTAMP, self._timer.wall_ms() - age_ms)

    def _lock(self, queues: Sequence[MessageQueue], timeout_s: float) -> set[MessageQueue]:
        """Request locks of owned queues; returns those that were granted."""
        asked_ms = self._lease_ms()
        granted = locked(self._port, self._settings.group, queues, timeout_s)
        regained: list[ProcessQueue] = []
        with self._held.lock:
            for queue in queues:
                held = self._held.queues.get(queue)
                if held is not None and queue not in granted:
                    held.lock.mark_lost()
                elif held is not None and held.lock.is_held(asked_ms, granted[queue]):
                    held.lock.grant(asked_ms, granted[queue])
                elif held is not None:
                    regained.append(held)
        deadline = Deadline.after(TIMEOUT_S)
        return granted.keys() - {
            held.queue for held in regained if not self._regained(held, asked_ms, granted[held.queue], deadline)
        }

    def _regained(self, held: ProcessQueue, asked_ms: int, connection: object, deadline: Deadline) -> bool:
        """Whether this member continues with a queue whose lock it had lost for a while.

        If another member committed a higher offset meanwhile, the queue is released, and a rebalance starts it there.
        """
        try:
            stored = self._store.read(held.queue, deadline)
        except RocketMQError as e:
            logger.info("queue %s is locked again, but its offset cannot be read yet: %s", held.queue, e)
            return False
        with self._held.lock:
            finished = self._held.offsets.get(held.queue)
            if stored is None or finished is None or stored <= finished:
                held.lock.grant(asked_ms, connection)
                return True
            held.drop(asked_ms)
        text = "group %s: another member had %s and finished it up to offset %d: continuing there, not at %d"
        logger.warning(text, self._settings.group, held.queue, stored, finished)
        if self.orderly is not None:
            self.orderly.left()
        return False


def locked(
    port: GroupMember, group: str, queues: Sequence[MessageQueue], timeout_s: float
) -> dict[MessageQueue, object]:
    """Request locks; returns those that were granted, with the connections for which they count.

    That is the connection before the request: if the broker was away meanwhile, the lock may be from before that.
    """
    before = {name: port.connection(name) for name in {queue.broker_name for queue in queues}}
    granted = port.lock(group, queues, Deadline.after(timeout_s))
    return {queue: before[queue.broker_name] or port.connection(queue.broker_name) for queue in granted}
