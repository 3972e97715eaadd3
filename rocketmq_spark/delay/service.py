"""A node of the delay service: a member of a group that shares the queues of ``dmq_inner_topic``.

A delayed message waits in the inner topic and, as a record, in the node's store (``spool/store``). The node writes a record
durably before it reads on; ``spool/redelivery`` takes due records from the store, and their originals are sent. A record is
deleted when a broker has accepted its original. The inner topic remains authoritative: by the committed ``Progress``, another
node can take over a queue, or this one can continue with an empty disk. A node stores the records of its own queues; when it
loses a queue, it keeps only the records that the topic no longer has.

This is a driver: one thread, the caller of ``run``, reads, stores and commits. The spool's thread sends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.commits import REQUEST_S, Commits, Committed, Names
from rocketmq_spark.delay.envelope_records import Answering, EnvelopeReader, Remade, Room, Rules
from rocketmq_spark.delay.queue_records import QueueRecords
from rocketmq_spark.delay.release import Progress, Seen, advanced, note_of, noted, resumed
from rocketmq_spark.errors import BrokerError, OffsetError, RocketMQError, SpoolFull
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import INNER_TOPIC

logger = logging.getLogger(__name__)

NOTHING = Progress(0, 0, 0)
# Messages per write, seconds between commits, the timeout of a poll, and the pause after a failed commit.
PAGE, TELL_S, POLL_S, AGAIN_S = 2000, 0.5, 0.2, 5.0
# After the first message of a turn: each turn asks the broker of every queue that has messages.
GATHER_S, GATHER_BYTES = 0.02, 32 << 20
# Time for the previous node of a queue to notice that it has lost the queue, and to commit its progress.
HAND_OVER_S = 2.0
# After JOIN_S without a queue, the node assumes that it will get none.
JOIN_S, PAUSE_S = 30.0, 0.5
# A node that starts a queue first reads its existing messages, for up to this time, because some may cancel others.
CATCH_UP_S = 60.0
# Intervals of checks whether queues still have the messages that were read, and whether another node committed their progress.
LOOK_S, CHECK_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The clock for due times; a function for a broker's retention (None if unknown); a function that creates a group on all
    brokers; the rules for what may be delivered; and the topic of envelopes.
    """

    now_ms: Callable[[], int]
    kept_ms: Callable[[str], int | None]
    make_group: Callable[[str, Mapping[MessageQueue, int]], None]
    rules: Rules
    topic: str = INNER_TOPIC


@dataclass(slots=True)
class Shared:
    """What the nodes of a group have in common about a queue of this node.

    ``told`` are the committed numbers as this node wrote or read them last (None if unknown), and ``proven`` is what those that
    it read proved: the node does not store envelopes that are done. The node commits only while it is ``sure``
    that no other one did since its last look. ``doubts`` counts how often in turn the numbers of another node said that an
    envelope is done which waits here.
    """

    told: Committed | None
    proven: Progress
    next_check: Deadline
    sure: bool = True
    doubts: int = 0


class DelayService:
    """One node. ``open_spool`` makes the spool that sends from ``store``."""

    def __init__(
        self,
        reader: EnvelopeReader,
        member: GroupMember,
        names: Names,
        store: Store,
        open_spool: Callable[[], SendSpool],
        tools: Tools,
    ) -> None:
        self._reader = reader
        self._member, self._remade = member, Remade(member, names.group)
        self._commits = Commits(member, names, tools.make_group)
        self._store, self._records = store, QueueRecords(store, self._remade)
        self._open_spool = open_spool
        self._now_ms, self._topic, self._rules = tools.now_ms, tools.topic, tools.rules
        self._retention = envelope_records.Retention(tools.kept_ms)
        self._spool: SendSpool | None = None
        self._seen: dict[MessageQueue, Seen] = {}
        self._shared: dict[MessageQueue, Shared] = {}
        self._gained: dict[MessageQueue, Deadline | None] = {}
        # Queues that will be given up or started again, with their notes; None if the note must not be committed.
        self._going: dict[MessageQueue, Seen | None] = {}
        self._brokers, self._complaints = Answering(AGAIN_S), LogThrottle()
        self._room = Room(store.path, reader)
        self._damages = store.damages
        self._next_tell = self._next_look = Deadline(0.0)
        self._joined, self._patience = False, Deadline.after(JOIN_S)
        self._unread: dict[MessageQueue, int] = {}
        self._catching_up, self.stored = Deadline(0.0), 0

    def run(self, over: Latch) -> None:
        """Run until ``over`` is set. Then wait for sends in flight, and leave the group, so that other nodes get the queues."""
        try:
            while not over.is_set():
                try:
                    self.turn()
                except SpoolFull:  # ``turn`` has logged it
                    over.wait(PAUSE_S)
                except RocketMQError as e:
                    if not e.retriable:
                        raise
                    logger.warning("the delay service continues after an error: %s", e)
                    over.wait(PAUSE_S)
                except Exception:  # a bug must not keep the messages of all others from being sent
                    logger.exception("the delay service continues after an error")
                    over.wait(AGAIN_S)
        finally:
            self.close()

    def turn(self) -> None:
        """One step: take over and give up queues, read and store envelopes, commit the progress.

        After an error all queues are started again, because messages that were polled and not stored would otherwise be skipped.
        After ``SpoolFull``, nothing is read for a while, but stored messages are sent.
        """
        try:
            self._take_turn()
        except Exception as e:
            self._begin_again(self._seen)
            if isinstance(e, SpoolFull):
                self._room.refused(e, self.waiting)
            raise

    def _take_turn(self) -> None:
        if self._damages != self._store.damages:
            # The topic still has what the store lost. Notes may have been written after the damage.
            self._store.add([], {note_of(queue): b"" for queue in noted(self._store.notes())})
            self._damages = self._store.damages
            self._begin_again(self._seen)
        self._room.keep()
        polled, known = self._poll(), set(self._seen)
        self._own(set(self._reader.assignment()))
        self._check_all()  # before envelopes are stored: a node that stood still learns here what another one sent
        # Messages of a queue that were polled before it was started are dropped here, and read again from its start.
        polled = [message for message in polled if message.queue in known & self._seen.keys()]
        self._look({message.queue for message in polled if message.queue_offset >= self._seen[message.queue].stored})
        self._keep([message for message in polled if message.queue in self._seen])
        behind = self._is_behind()
        if self._spool is None and self._joined and not behind:
            self._spool = self._open_spool()
        if self._spool is not None:
            self._spool.redelivery.hold(behind)
            self._spool.redelivery.wake()  # the clock may have been set forward
        if self._next_tell.expired:
            self._next_tell = Deadline.after(TELL_S if self._tell(self._seen) else AGAIN_S)

    @property
    def sent(self) -> int:
        """The number of originals that brokers have accepted."""
        return 0 if self._spool is None else self._spool.redelivery.delivered

    @property
    def waiting(self) -> int:
        """The number of messages in the store."""
        return len(self._store)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop sending, commit the progress, leave the group, and release the store."""
        deadline = Deadline.after(timeout_s)
        try:
            if self._spool is not None:
                self._spool.redelivery.close(deadline)
            self._check_all(at_once=True)
            self._tell(self._seen)
        except RocketMQError as e:
            logger.warning("could not commit the last positions: %s", e)
        finally:
            self._seen.clear()
            self._reader.close()
            if self._spool is not None:
                self._spool.close(Deadline.after(0))
            self._store.close()

    # --- queues

    def _own(self, mine: set[MessageQueue]) -> None:
        self._going |= {queue: self._seen.pop(queue) for queue in self._seen.keys() - mine}
        # Queues that were not started yet, but have records from before.
        unstarted = self._gained.keys() - mine - self._going.keys()
        self._going |= {q: None for q in unstarted if self._store.places(envelope_records.space_of(q))}
        self._going = {queue: seen for queue, seen in self._going.items() if queue not in mine}
        self._give_up_all()
        self._gained = {queue: self._gained.get(queue) for queue in mine - self._seen.keys()}
        self._brokers.each(self._gained, self._begin)
        # Do not wait for a broker that does not answer, unless the store has its records, which others may have sent meanwhile.
        left = (
            q
            for q in mine - set(self._seen)
            if self._store.places(envelope_records.space_of(q)) or not self._brokers.is_silent(q)
        )
        if not self._joined and (self._patience.expired or (mine and not any(left))):
            self._joined = True
            self._going |= dict.fromkeys(self._records.queues() - mine)  # queues of an earlier process
            self._give_up_all()

    def _begin_again(self, queues: Iterable[MessageQueue]) -> None:
        """Start these queues again, or give up those that are no longer assigned."""
        for queue in list(queues):
            del self._seen[queue]
            self._going[queue] = None

    def _look(self, came: set[MessageQueue]) -> None:
        """Start queues again whose topic was created again: checks queues with new messages (``came``), and sometimes all. If a
        queue with new messages cannot be checked, it is started again, too.
        """
        same = set()

        def look(queue: MessageQueue) -> None:
            try:
                is_same = self._remade.is_same(queue, self._seen[queue])
            except RocketMQError as e:
                if e.retriable:
                    raise
                logger.info("cannot check whether %s still has the messages that were read: %s", queue, e)
                return
            if is_same:
                same.add(queue)
            else:
                self._begin_again([queue])

        asked = came
        if self._next_look.expired:
            asked, self._next_look = set(self._seen), Deadline.after(LOOK_S)
        self._brokers.each(asked, look)
        self._begin_again((came - same) & self._seen.keys())

    def _give_up_all(self) -> None:
        """Give up revoked queues. Queues that the route does not have (there are fewer now, their broker is down, or the topic
        was another one) are kept, and their messages are sent from here.
        """
        if not self._going:
            return
        try:
            read = set(self._member.queues(self._topic, Deadline.after(REQUEST_S)))
        except RocketMQError as e:
            logger.info("cannot list the queues of %s: %s", self._topic, e)
            return
        self._brokers.each(self._going.keys() & read, self._give_up)

    def _check_all(self, at_once: bool = False) -> None:
        """Read the numbers of own queues back, if it is time for it."""
        due = {queue for queue in self._seen if at_once or self._shared[queue].next_check.expired}
        for queue in due:
            self._shared[queue].sure = False
        self._brokers.each(due, self._check)

    def _check(self, queue: MessageQueue) -> None:
        seen = self._read_back(queue, self._seen[queue])
        if seen is None:
            self._begin_again([queue])
        else:
            self._seen[queue] = seen

    def _read_back(self, queue: MessageQueue, seen: Seen) -> Seen | None:
        """``seen``, and what the committed numbers of a queue prove besides. None if the queue has other messages now.

        Another node may have written these numbers: one that had the queue before, stood still and woke up, or the next one, if
        this node stood still. Both are right, so that the progress of both together is committed next. But a record that waits
        here is never done, whatever others say.
        """
        shared, last = self._shared[queue], self._commits.of(queue)
        if last != shared.told or shared.doubts:
            if not self._remade.is_same(queue, seen):
                return None
            shared.told, known = last, None if last is None else self._known(queue, last)
            if known is not None:
                shared.proven = shared.proven.joined(known)
            if known is not None and self._records.has(queue, known.done):
                shared.doubts += 1
                logger.warning(
                    "%s: another node committed that envelopes are done which wait here; they stay here. It stood still, or this "
                    "node did", queue,
                )  # fmt: skip
            else:
                shared.doubts = 0
                if known is not None and last is not None:
                    seen = self._timed(queue, seen._replace(committed=seen.committed.joined(known)), last)
        shared.sure, shared.next_check = True, Deadline.after(CHECK_S)
        return seen

    def _known(self, queue: MessageQueue, last: Committed) -> Progress | None:
        """The progress that was committed, if it is about the messages that the queue has now."""
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
        if last.progress.oldest > bounds.max_offset:
            return None
        return None if self._remade.differs_from(queue, *last.read, bounds) is not None else last.progress

    def _give_up(self, queue: MessageQueue) -> None:
        """Hand a queue over to another node."""
        seen = self._going[queue]
        if seen is not None and (seen := self._read_back(queue, seen)) is not None:
            shared = self._shared[queue]
            if shared.told is not None and not shared.doubts:
                self._tell({queue: seen})
        self._leave(queue)
        del self._going[queue]
        self._shared.pop(queue, None)

    def _begin(self, queue: MessageQueue) -> None:
        """Start an assigned queue. If another node had it, wait ``HAND_OVER_S`` for its commit. Raises errors of requests."""
        last, seen = self._commits.of(queue), self._records.note(queue)
        # Whether another node had the queue since.
        others = last is not None and (seen is None or seen.committed != last.progress)
        if others:
            patience = self._gained[queue] = self._gained[queue] or Deadline.after(HAND_OVER_S)
            if not patience.expired:
                return
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
        found = self._resumed(queue, seen, last, others, bounds)
        if found.stored < bounds.min_offset:
            logger.warning(
                "%s begins at %d, and envelopes from %d on are not done: what is not in %s is lost; the topic's retention "
                "must exceed the longest delay", queue, bounds.min_offset, found.stored, self._store.path,
            )  # fmt: skip
        try:
            self._reader.seek(queue, max(bounds.min_offset, found.stored))
        except OffsetError as e:  # the queue was revoked meanwhile
            logger.info("%s is not started yet: %s", queue, e)
            return
        self._seen[queue] = found
        self._shared[queue] = Shared(last, found.committed, Deadline.after(CHECK_S))
        if max(bounds.min_offset, found.stored) < bounds.max_offset:
            if queue not in self._unread:  # a queue that is started again after an error does not prolong the wait
                self._catching_up = Deadline.after(CATCH_UP_S)
            self._unread[queue] = bounds.max_offset
        else:  # an earlier end of the queue is no longer valid if the topic was created again with fewer messages
            self._unread.pop(queue, None)
        logger.info("%s is read from %d on; all before %d are done", queue, found.stored, found.committed.oldest)

    def _resumed(
        self, queue: MessageQueue, seen: Seen | None, last: Committed | None, others: bool, bounds: QueueBounds
    ) -> Seen:
        """Where a queue starts. This node's note, and the commits of ``others``, may be about messages that no longer exist."""
        progress = None if last is None else last.progress
        if last is not None and others and (at := self._remade.other_from(queue, *last.read, bounds)) is not None:
            progress = last.progress.cut(at)
        if seen is not None and (at := self._remade.other_from(queue, *seen.read, bounds)) is not None:
            # Records whose messages the topic no longer has lose their marks of the queue. The others are not done.
            first, end = bounds.min_offset, at
            self._records.each(queue, lambda offset, due_ms: not first <= offset < end, self._store.free)
            seen = seen.cut(at)
            progress = progress if others else seen.committed
        if progress is not None and others:
            progress = progress if seen is None else progress.joined(seen.committed)
            self._records.each(queue, progress.done, self._store.forget)
        return self._timed(queue, resumed(seen, progress, bounds.min_offset), last)

    def _timed(self, queue: MessageQueue, seen: Seen, last: Committed | None) -> Seen:
        """``seen`` with the latest store time of all messages before its end, those that only another node has read included. If
        that node has not committed a store time, the broker is queried. Without the store time, these messages would look like
        those of a topic that was created again, or such a topic would not be detected.
        """
        told_ms, (end, newest_ms) = 0 if last is None else last.newest_ms, seen.read
        newest_ms = max(newest_ms, told_ms)
        if end and (not newest_ms or (end > seen.stored and not told_ms)):
            newest_ms = max(newest_ms, self._remade.newest_of(queue, end, self._now_ms()))
        return seen._replace(newest_ms=newest_ms)

    def _is_behind(self) -> bool:
        """Whether some queue has not been read yet up to the end that it had when it was started."""
        unread = {queue: end for queue, end in self._unread.items() if queue in self._seen}
        self._unread = {queue: end for queue, end in unread.items() if self._seen[queue].stored < end}
        return bool(self._unread) and not self._catching_up.expired

    def _leave(self, queue: MessageQueue) -> None:
        """Drop a queue's records that its next owner can read again; the others stay, and are sent from here."""
        try:
            seen = self._records.note(queue)
            bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
            other = None if seen is None else self._remade.other_from(queue, *seen.read, bounds)
        except RocketMQError as e:
            if e.retriable:
                raise
            logger.warning("the messages of %s stay here, and another node may send them, too: %s", queue, e)
            return
        first, end = bounds.min_offset, 1 << 63 if other is None else other
        shared = self._shared.get(queue)
        skipped = shared.told.progress if shared is not None and shared.told is not None and shared.doubts else NOTHING

        def is_next(offset: int, due_ms: int) -> bool:
            """Whether the next owner reads and sends it."""
            return first <= offset < end and not skipped.done(offset, due_ms)

        # A hand-over takes several writes. If one fails, another turn or process completes the hand-over. Until then, no progress
        # of the queue may be committed. If the queue is assigned again, it is read from the oldest envelope that is not done.
        self._going[queue] = None
        if seen is not None:
            self._store.add([], {note_of(queue): seen._replace(leaving=True).encode()})
        # Records that stay lose their marks of the queue: the progress of later owners does not cover these records.
        self._records.each(queue, lambda offset, due_ms: not is_next(offset, due_ms), self._store.free)
        gone = self._records.each(queue, is_next, self._store.hand_over)
        self._store.add([], {note_of(queue): b""})
        logger.info("%s was handed over to another node, with %d waiting messages", queue, gone)

    # --- envelopes

    def _poll(self) -> list[ReceivedMessage]:
        polled = more = self._read(POLL_S)
        gathering, size = Deadline.after(GATHER_S), 0
        while more and len(polled) < PAGE and (size := size + sum(len(each.body) for each in more)) < GATHER_BYTES:
            more = self._read(gathering.remaining())
            polled += more
        return polled

    def _read(self, timeout_s: float) -> list[ReceivedMessage]:
        """Messages that arrived. Raises the errors of a poll, but a permanent one only while no broker has answered: later it is
        that of a single broker, whose pull is repeated.
        """
        try:
            return self._reader.poll(timeout_s)
        except BrokerError as e:
            if e.retriable or not self._brokers.any_answered:
                raise
            logger.log(self._complaints.level("poll", e), "a broker refuses a pull, it is asked again: %s", e)
            return []

    def _keep(self, messages: Sequence[ReceivedMessage]) -> None:
        """Store all envelopes that are not done, and with them the new positions."""
        self._begin_again({message.queue for message in messages if self._seen[message.queue].is_other(message)})
        messages = [message for message in messages if message.queue in self._seen]
        now_ms, seen, records, cancels = self._now_ms(), dict(self._seen), [], set()
        for message in messages:
            queue, offset = message.queue, message.queue_offset
            of_queue = seen[queue]
            if offset < of_queue.stored:
                continue
            newest_ms = max(of_queue.newest_ms, message.store_timestamp)
            seen[queue] = of_queue._replace(stored=offset + 1, newest_ms=newest_ms)
            found = envelope_records.arrival(self._rules, queue, offset, message.body, now_ms)
            if found.cancels is not None:
                cancels.add(found.cancels)
            elif found.record is not None and not self._shared[queue].proven.done(offset, found.due_ms):
                records.append((found.record, found.due_ms))
                self._retention.note(queue.broker_name, found.due_ms - message.store_timestamp)
        changed = {queue: each for queue, each in seen.items() if each != self._seen[queue]}
        if not changed:
            return
        notes = {note_of(queue): each.encode() for queue, each in changed.items()}
        kept = [each for each in records if each[0].marks[0] not in cancels]  # or it could be sent before that
        self._store.add(kept, None if cancels else notes)
        if kept:
            self._room.found()
        if cancels:  # note the position only after the cancellation, so that a crash reads it again
            gone = len(records) - len(kept) + self._store.forget(list(cancels))
            logger.info("%d of %d messages are taken back", gone, len(cancels))
            self._store.add([], notes)
        self._seen = seen
        self.stored += len(kept)
        self._retention.warn()

    # --- positions

    def _tell(self, known: dict[MessageQueue, Seen]) -> bool:
        """Commit the progress of queues. Returns whether all commits succeeded; failed ones are repeated next time. Until then
        brokers have an older progress, which is safe.
        """
        waits_from_ms = self._records.waits_from_ms()
        now_ms, ended_ms = self._now_ms(), self._store.ended_ms
        news: dict[MessageQueue, Committed] = {}
        for queue, seen in known.items():
            shared = self._shared[queue]
            if (
                not shared.sure or shared.doubts == 1
            ):  # others' numbers stay until the next check, which may find them again
                continue
            first = self._records.oldest(queue)
            oldest = seen.stored if first is None else min(seen.stored, first)
            done_ms = max(ended_ms, shared.proven.done_ms)
            now = advanced(seen.committed, oldest, seen.stored, waits_from_ms, done_ms, now_ms)
            told = None if shared.told is None else shared.told.progress
            # Everything is done before and now, so a newer ``done_ms`` adds nothing.
            nothing_new = told is not None and now.oldest == now.stored == told.oldest == told.stored
            if now != told and not nothing_new:
                news[queue] = Committed(now, seen.newest_ms)
                shared.told = None
        # Do not commit after damage, because lost records are not done; the next turn reads them again.
        if not news or self._damages != self._store.damages:
            return True
        all_told = self._commits.tell(news)
        for queue, committed in news.items():
            known[queue] = known[queue]._replace(committed=committed.progress)
            self._shared[queue].told = Committed.decode(committed.encode())
        if news:
            self._store.add([], {note_of(queue): known[queue].encode() for queue in news})
        return all_told
