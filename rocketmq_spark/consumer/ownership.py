"""Queues come and go: what a rebalance decided is carried out here, in the order that loses nothing.

Mirrors ``RebalanceImpl.updateProcessQueueTableInRebalance`` and ``RebalancePushImpl``. A queue that goes is dropped first, so
that no result of it counts any more; then its offset is stored, then the broker's lock is given back, then it is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.offset_store import OffsetStore
from rocketmq_spark.consumer.orderly import Orderly
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.start_offset import Questions, start_offset
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0
FORCED_UNLOCK_MS = 20_000  # after the last lock: a listener that hangs does not keep a queue from others for ever

Begin = Callable[[ProcessQueue, int], None]


class Ownership:
    """``begin`` starts the pulls of a queue. With ``orderly`` queues are locked at their brokers."""

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        held: Held,
        store: OffsetStore,
        begin: Begin,
        now_ms: Callable[[], int],
    ) -> None:
        self._port = port
        self._settings = settings
        self._held = held
        self._store = store
        self._begin = begin
        self._now_ms = now_ms
        self.orderly: Orderly | None = None
        self._left = False

    def drop(self, queues: Iterable[MessageQueue]) -> bool:
        """Give up ``queues``; False if a listener still has messages of one of them, which is then given up later."""
        with self._held.lock:
            held = [self._held.queues[queue] for queue in queues if queue in self._held.queues]
            for each in held:
                each.dropped = True
        free = [each for each in held if not self._in_use(each)]
        self._release([each.queue for each in free])
        return len(free) == len(held)

    def add(self, queues: Sequence[MessageQueue]) -> tuple[list[MessageQueue], bool]:
        """Begin ``queues``: those that were, and whether the lock of one was refused. Others are tried with the next run."""
        with self._held.lock:
            wanted = [queue for queue in queues if queue not in self._held.queues]
        locked = wanted
        if self._locks and wanted:
            granted = self._port.lock(self._settings.group, wanted, Deadline.after(TIMEOUT_S))
            locked = [queue for queue in wanted if queue in granted]
        troubled: set[str] = set()  # brokers that do not answer: their other queues need not wait for that, too
        added = [queue for queue in locked if queue.broker_name not in troubled and self._added(queue, troubled)]
        return added, len(locked) < len(wanted)

    def repair(self, queue: ProcessQueue, offset: int) -> None:
        """Store ``offset`` in place of one that is not to be had, and give the queue up; a rebalance brings it back."""
        with self._held.lock:
            if queue.dropped:
                return
            queue.dropped = True
            self._held.offsets.freeze(queue.queue, offset)
        self._release([queue.queue])

    def reset(self, offsets: dict[MessageQueue, int]) -> None:
        """As an administrator wants: forget what is cached and go on there."""
        with self._held.lock:
            mine = [self._held.queues[queue] for queue in offsets if queue in self._held.queues]
            for each in mine:
                each.dropped = True
                each.clear()
                self._held.offsets.put(each.queue, offsets[each.queue])
        self._release([each.queue for each in mine])

    def lock_all(self) -> None:
        """Renew the locks of all queues; one that is refused is not consumed until it is granted again."""
        queues = [each.queue for each in self._held.owned()]
        if queues and self._locks:
            self._note_locks(queues, self._port.lock(self._settings.group, queues, Deadline.after(TIMEOUT_S)))

    def relock(self, queue: ProcessQueue) -> bool:
        """Ask for the lock of one queue."""
        granted = self._port.lock(self._settings.group, [queue.queue], Deadline.after(1.0))
        self._note_locks([queue.queue], granted)
        return queue.queue in granted

    def leave(self, deadline: Deadline) -> None:
        """Give up everything, whatever listeners do; offsets are stored and locks given back. Nothing is added any more."""
        with self._held.lock:
            self._left = True
            queues = list(self._held.queues)
            for each in self._held.queues.values():
                each.dropped = True
        self._release(queues, deadline)

    @property
    def _locks(self) -> bool:
        return self._settings.ordered and self._settings.clustering

    def _in_use(self, queue: ProcessQueue) -> bool:
        if self.orderly is None or not self.orderly.calling(queue):
            return False
        granted = queue.lock.granted_ms
        return granted is None or self._now_ms() <= granted + FORCED_UNLOCK_MS

    def _release(self, queues: Sequence[MessageQueue], deadline: Deadline | None = None) -> None:
        if not queues:
            return
        deadline = deadline or Deadline.after(TIMEOUT_S)
        self._store.persist(deadline, queues)
        if self._locks:
            self._port.unlock(self._settings.group, queues, deadline)
        with self._held.lock:
            for queue in queues:
                self._held.queues.pop(queue, None)
                self._held.offsets.forget(queue)
                self._held.ends.pop(queue, None)

    def _added(self, queue: MessageQueue, troubled: set[str]) -> bool:
        with self._held.lock:
            self._held.offsets.forget(queue)
        try:
            offset, stored = self._start(queue)
        except RocketMQError as e:
            logger.warning("queue %s is not begun yet, its offset is not known: %s", queue, e)
            if e.retriable:
                troubled.add(queue.broker_name)
            return False
        fresh = ProcessQueue(queue, self._now_ms())
        if self._locks:
            fresh.lock.grant(self._now_ms())
        with self._held.lock:
            if self._left or queue in self._held.queues:  # or a run beside this one was first
                return False
            self._held.queues[queue] = fresh
            self._held.offsets.put(queue, offset)
            if stored:
                self._held.offsets.told({queue: offset})
        self._begin(fresh, offset)
        return True

    def _start(self, queue: MessageQueue) -> tuple[int, bool]:
        """Where it begins, and whether that is what is stored."""
        deadline = Deadline.after(TIMEOUT_S)
        found: list[int | None] = []

        def stored() -> int | None:
            found.append(self._store.read(queue, deadline))
            return found[0]

        questions = Questions(
            stored,
            lambda: self._port.bounds(queue, deadline).max_offset,
            lambda epoch_ms: self._port.search_offset(queue, epoch_ms, deadline),
        )
        return start_offset(queue, self._settings.consume_from, questions), found[0] is not None

    def _note_locks(self, queues: Iterable[MessageQueue], granted: set[MessageQueue]) -> None:
        with self._held.lock:
            for queue in queues:
                held = self._held.queues.get(queue)
                if held is not None and queue in granted:
                    held.lock.grant(self._now_ms())
                elif held is not None:
                    held.lock.lose()
