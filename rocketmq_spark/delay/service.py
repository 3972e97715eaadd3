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
from rocketmq_spark.delay.commits import REQUEST_S, CommittedProgress, GroupNames, ProgressCommits
from rocketmq_spark.delay.envelope_records import (
    BackPressure,
    BrokerAvailability,
    EnvelopeReader,
    RecreationCheck,
    Rules,
)
from rocketmq_spark.delay.queue_records import QueueRecords
from rocketmq_spark.delay.release import Progress, QueueCheckpoint, advanced, checkpoints_of, note_name, resume
from rocketmq_spark.errors import BrokerError, OffsetError, RocketMQError, SpoolFull
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import INNER_TOPIC

logger = logging.getLogger(__name__)

NO_PROGRESS = Progress(0, 0, 0)
# Messages per write, seconds between commits, the timeout of a poll, and the pause after a failed commit.
PAGE, COMMIT_S, POLL_S, RETRY_S = 2000, 0.5, 0.2, 5.0
# A turn gathers messages, because each turn sends a request to the broker of every queue that has messages.
GATHER_S, GATHER_BYTES = 0.02, 32 << 20
# Time for the previous node of a queue to notice that it has lost the queue, and to commit its progress.
HAND_OVER_S = 2.0
# After JOIN_S without a queue, the node assumes that it will get none.
JOIN_S, PAUSE_S = 30.0, 0.5
# A node that starts a queue first reads its existing messages, for up to this time, because some may cancel others.
CATCH_UP_S = 60.0
# Intervals of checks whether queues still have the messages that were read, and whether another node committed their progress.
RECREATION_CHECK_S, COMMIT_CHECK_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class NodeTools:
    """The clock for due times; a function for a broker's retention (None if unknown); a function that creates a group on all
    brokers; the rules for what may be delivered; and the topic of envelopes.
    """

    now_ms: Callable[[], int]
    retention_ms: Callable[[str], int | None]
    make_group: Callable[[str, Mapping[MessageQueue, int]], None]
    rules: Rules
    topic: str = INNER_TOPIC


@dataclass(slots=True)
class CommitState:
    """The committed progress of an own queue, as this node knows it.

    ``committed`` is the progress that this node wrote or read last (None if unknown). ``proven`` is the progress that the read
    ones proved: the node does not store envelopes that are done. The node commits only while ``is_current``: no other node has
    committed since the last check. ``conflicts`` counts the consecutive checks in which another node's progress claimed that an
    envelope is done which waits here.
    """

    committed: CommittedProgress | None
    proven: Progress
    next_check: Deadline
    is_current: bool = True
    conflicts: int = 0


class DelayService:
    """One node. ``open_spool`` makes the spool that sends from ``store``."""

    def __init__(
        self,
        reader: EnvelopeReader,
        member: GroupMember,
        names: GroupNames,
        store: Store,
        open_spool: Callable[[], SendSpool],
        tools: NodeTools,
    ) -> None:
        self._reader = reader
        self._member, self._recreation = member, RecreationCheck(member, names.group)
        self._commits = ProgressCommits(member, names, tools.make_group)
        self._store, self._records = store, QueueRecords(store, self._recreation)
        self._open_spool = open_spool
        self._now_ms, self._topic, self._rules = tools.now_ms, tools.topic, tools.rules
        self._retention = envelope_records.Retention(tools.retention_ms)
        self._spool: SendSpool | None = None
        self._checkpoints: dict[MessageQueue, QueueCheckpoint] = {}
        self._commit_states: dict[MessageQueue, CommitState] = {}
        self._acquired: dict[MessageQueue, Deadline | None] = {}
        # Queues that will be handed over or started again, with their checkpoints; None if the progress must not be committed.
        self._revoked: dict[MessageQueue, QueueCheckpoint | None] = {}
        self._availability, self._complaints = BrokerAvailability(RETRY_S), LogThrottle()
        self._back_pressure = BackPressure(store.path, reader)
        self._damage_count = store.damage_count
        self._next_commit = self._next_recreation_check = Deadline(0.0)
        self._has_joined, self._join_until = False, Deadline.after(JOIN_S)
        self._catch_up_ends: dict[MessageQueue, int] = {}
        self._catch_up_until, self.stored = Deadline(0.0), 0

    def run(self, stop: Latch) -> None:
        """Run until ``stop`` is set. Then wait for sends in flight, and leave the group, so that other nodes get the queues."""
        try:
            while not stop.is_set():
                try:
                    self.turn()
                except SpoolFull:  # ``turn`` has logged it
                    stop.wait(PAUSE_S)
                except RocketMQError as e:
                    if not e.retriable:
                        raise
                    logger.warning("the delay service continues after an error: %s", e)
                    stop.wait(PAUSE_S)
                except Exception:  # a bug must not keep the messages of all others from being sent
                    logger.exception("the delay service continues after an error")
                    stop.wait(RETRY_S)
        finally:
            self.close()

    def turn(self) -> None:
        """One step: take over and give up queues, read and store envelopes, commit the progress.

        After an error, all queues are started again, because polled messages that were not stored would otherwise be skipped.
        After ``SpoolFull``, nothing is read for a while, but stored messages are sent.
        """
        try:
            self._run_turn()
        except Exception as e:
            self._restart(self._checkpoints)
            if isinstance(e, SpoolFull):
                self._back_pressure.on_full(e, self.waiting)
            raise

    def _run_turn(self) -> None:
        if self._damage_count != self._store.damage_count:
            # The topic still has what the store lost. Notes may have been written after the damage.
            self._store.add([], {note_name(queue): b"" for queue in checkpoints_of(self._store.notes())})
            self._damage_count = self._store.damage_count
            self._restart(self._checkpoints)
        self._back_pressure.apply()
        polled, started = self._poll(), set(self._checkpoints)
        self._update_assignment(set(self._reader.assignment()))
        self._check_commits()  # before envelopes are stored: a node that was paused learns here what another node has sent
        # Messages of a queue that were polled before it was started are dropped here, and read again from its start.
        polled = [message for message in polled if message.queue in started & self._checkpoints.keys()]
        self._check_recreation(
            {message.queue for message in polled if message.queue_offset >= self._checkpoints[message.queue].read_end}
        )
        self._store_envelopes([message for message in polled if message.queue in self._checkpoints])
        is_catching_up = self._is_catching_up()
        if self._spool is None and self._has_joined and not is_catching_up:
            self._spool = self._open_spool()
        if self._spool is not None:
            self._spool.redelivery.set_paused(is_catching_up)
            self._spool.redelivery.wake()  # the clock may have been set forward
        if self._next_commit.expired:
            self._next_commit = Deadline.after(COMMIT_S if self._commit_progress(self._checkpoints) else RETRY_S)

    @property
    def sent(self) -> int:
        """The number of originals that brokers have accepted."""
        return 0 if self._spool is None else self._spool.redelivery.delivered_count

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
            self._check_commits(all_now=True)
            self._commit_progress(self._checkpoints)
        except RocketMQError as e:
            logger.warning("could not commit the last positions: %s", e)
        finally:
            self._checkpoints.clear()
            self._reader.close()
            if self._spool is not None:
                self._spool.close(Deadline.after(0))
            self._store.close()

    # --- queues

    def _update_assignment(self, assigned: set[MessageQueue]) -> None:
        self._revoked |= {queue: self._checkpoints.pop(queue) for queue in self._checkpoints.keys() - assigned}
        # Queues that were not started yet, but have records from before.
        unstarted = self._acquired.keys() - assigned - self._revoked.keys()
        self._revoked |= {q: None for q in unstarted if self._store.places(envelope_records.space_of(q))}
        self._revoked = {queue: seen for queue, seen in self._revoked.items() if queue not in assigned}
        self._hand_over_revoked()
        self._acquired = {queue: self._acquired.get(queue) for queue in assigned - self._checkpoints.keys()}
        self._availability.for_each(self._acquired, self._start)
        # Do not wait for a broker that does not answer, unless the store has its records, which others may have sent meanwhile.
        not_started = (
            q
            for q in assigned - set(self._checkpoints)
            if self._store.places(envelope_records.space_of(q)) or not self._availability.is_unavailable(q)
        )
        if not self._has_joined and (self._join_until.expired or (assigned and not any(not_started))):
            self._has_joined = True
            self._revoked |= dict.fromkeys(self._records.queues() - assigned)  # queues of an earlier process
            self._hand_over_revoked()

    def _restart(self, queues: Iterable[MessageQueue]) -> None:
        """Start these queues again, or hand over those that are no longer assigned."""
        for queue in list(queues):
            del self._checkpoints[queue]
            self._revoked[queue] = None

    def _check_recreation(self, with_messages: set[MessageQueue]) -> None:
        """Start queues again whose topic was created again. Checks queues with new messages (``with_messages``), and sometimes
        all. A queue with new messages that cannot be checked is started again, too.
        """
        unchanged = set()

        def look(queue: MessageQueue) -> None:
            try:
                is_unchanged = self._recreation.is_unchanged(queue, self._checkpoints[queue])
            except RocketMQError as e:
                if e.retriable:
                    raise
                logger.info("cannot check whether %s still has the messages that were read: %s", queue, e)
                return
            if is_unchanged:
                unchanged.add(queue)
            else:
                self._restart([queue])

        queues = with_messages
        if self._next_recreation_check.expired:
            queues, self._next_recreation_check = set(self._checkpoints), Deadline.after(RECREATION_CHECK_S)
        self._availability.for_each(queues, look)
        self._restart((with_messages - unchanged) & self._checkpoints.keys())

    def _hand_over_revoked(self) -> None:
        """Hand over revoked queues. Queues that are missing in the route (there are fewer now, their broker is down, or the topic
        was another one) stay, and their messages are sent from here.
        """
        if not self._revoked:
            return
        try:
            existing = set(self._member.queues(self._topic, Deadline.after(REQUEST_S)))
        except RocketMQError as e:
            logger.info("cannot list the queues of %s: %s", self._topic, e)
            return
        self._availability.for_each(self._revoked.keys() & existing, self._hand_over)

    def _check_commits(self, all_now: bool = False) -> None:
        """Read the committed progress of own queues if the next check is due."""
        due = {queue for queue in self._checkpoints if all_now or self._commit_states[queue].next_check.expired}
        for queue in due:
            self._commit_states[queue].is_current = False
        self._availability.for_each(due, self._check_commit)

    def _check_commit(self, queue: MessageQueue) -> None:
        checkpoint = self._merge_committed(queue, self._checkpoints[queue])
        if checkpoint is None:
            self._restart([queue])
        else:
            self._checkpoints[queue] = checkpoint

    def _merge_committed(self, queue: MessageQueue, checkpoint: QueueCheckpoint) -> QueueCheckpoint | None:
        """``checkpoint``, extended by the committed progress of a queue. None if the queue has other messages now.

        Another node may have committed: the previous owner, after a pause, or the next one, if this node was paused. Both are
        right, so the merged progress is committed next. But a record that waits here is never done, whatever others commit.
        """
        state, committed = self._commit_states[queue], self._commits.fetch(queue)
        if committed != state.committed or state.conflicts:
            if not self._recreation.is_unchanged(queue, checkpoint):
                return None
            state.committed, valid = committed, None if committed is None else self._valid_progress(queue, committed)
            if valid is not None:
                state.proven = state.proven.merged(valid)
            if valid is not None and self._records.has(queue, valid.is_done):
                state.conflicts += 1
                logger.warning(
                    "%s: another node committed that envelopes are done which wait here; they stay here. It stood still, or this "
                    "node did", queue,
                )  # fmt: skip
            else:
                state.conflicts = 0
                if valid is not None and committed is not None:
                    checkpoint = self._with_newest_ms(
                        queue, checkpoint._replace(committed=checkpoint.committed.merged(valid)), committed
                    )
        state.is_current, state.next_check = True, Deadline.after(COMMIT_CHECK_S)
        return checkpoint

    def _valid_progress(self, queue: MessageQueue, committed: CommittedProgress) -> Progress | None:
        """The committed progress, if it is about the messages that the queue has now."""
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
        if committed.progress.oldest > bounds.max_offset:
            return None
        return (
            None
            if self._recreation.changed_from(queue, *committed.read_end, bounds) is not None
            else committed.progress
        )

    def _hand_over(self, queue: MessageQueue) -> None:
        """Hand a queue over to another node."""
        checkpoint = self._revoked[queue]
        if checkpoint is not None and (checkpoint := self._merge_committed(queue, checkpoint)) is not None:
            state = self._commit_states[queue]
            if state.committed is not None and not state.conflicts:
                self._commit_progress({queue: checkpoint})
        self._release_records(queue)
        del self._revoked[queue]
        self._commit_states.pop(queue, None)

    def _start(self, queue: MessageQueue) -> None:
        """Start an assigned queue. If another node had it, wait ``HAND_OVER_S`` for its commit. Raises errors of requests."""
        committed, noted = self._commits.fetch(queue), self._records.checkpoint(queue)
        # Whether another node has had the queue since this node's checkpoint.
        had_other_owner = committed is not None and (noted is None or noted.committed != committed.progress)
        if had_other_owner:
            wait_until = self._acquired[queue] = self._acquired[queue] or Deadline.after(HAND_OVER_S)
            if not wait_until.expired:
                return
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
        checkpoint = self._starting_checkpoint(queue, noted, committed, had_other_owner, bounds)
        if checkpoint.read_end < bounds.min_offset:
            logger.warning(
                "%s begins at %d, and envelopes from %d on are not done: what is not in %s is lost; the topic's retention "
                "must exceed the longest delay", queue, bounds.min_offset, checkpoint.read_end, self._store.path,
            )  # fmt: skip
        try:
            self._reader.seek(queue, max(bounds.min_offset, checkpoint.read_end))
        except OffsetError as e:  # the queue was revoked meanwhile
            logger.info("%s is not started yet: %s", queue, e)
            return
        self._checkpoints[queue] = checkpoint
        self._commit_states[queue] = CommitState(committed, checkpoint.committed, Deadline.after(COMMIT_CHECK_S))
        if max(bounds.min_offset, checkpoint.read_end) < bounds.max_offset:
            if queue not in self._catch_up_ends:
                # A queue that is started again after an error does not prolong the wait.
                self._catch_up_until = Deadline.after(CATCH_UP_S)
            self._catch_up_ends[queue] = bounds.max_offset
        else:  # an earlier end of the queue is no longer valid if the topic was created again with fewer messages
            self._catch_up_ends.pop(queue, None)
        logger.info(
            "%s is read from %d on; all before %d are done", queue, checkpoint.read_end, checkpoint.committed.oldest
        )

    def _starting_checkpoint(
        self,
        queue: MessageQueue,
        noted: QueueCheckpoint | None,
        committed: CommittedProgress | None,
        had_other_owner: bool,
        bounds: QueueBounds,
    ) -> QueueCheckpoint:
        """Where a queue starts. This node's checkpoint, and commits of other owners, may be about messages that no longer
        exist.
        """
        progress = None if committed is None else committed.progress
        if (
            committed is not None
            and had_other_owner
            and (changed_from := self._recreation.changed_from_logged(queue, *committed.read_end, bounds)) is not None
        ):
            progress = committed.progress.truncated(changed_from)
        if (
            noted is not None
            and (changed_from := self._recreation.changed_from_logged(queue, *noted.last_read, bounds)) is not None
        ):
            # Remove the queue's marks from records whose messages are no longer in the topic. The others are not done.
            first, end = bounds.min_offset, changed_from
            self._records.for_marks(queue, lambda offset, due_ms: not first <= offset < end, self._store.remove_marks)
            noted = noted.truncated(changed_from)
            progress = progress if had_other_owner else noted.committed
        if progress is not None and had_other_owner:
            progress = progress if noted is None else progress.merged(noted.committed)
            self._records.for_marks(queue, progress.is_done, self._store.drop_records)
        return self._with_newest_ms(queue, resume(noted, progress, bounds.min_offset), committed)

    def _with_newest_ms(
        self, queue: MessageQueue, checkpoint: QueueCheckpoint, committed: CommittedProgress | None
    ) -> QueueCheckpoint:
        """``seen`` with the latest store time of all messages before its end, those that only another node has read included. If
        that node has not committed a store time, the broker is queried. Without the store time, these messages would look like
        those of a topic that was created again, or such a topic would not be detected.
        """
        committed_ms, (end, newest_ms) = 0 if committed is None else committed.newest_ms, checkpoint.last_read
        newest_ms = max(newest_ms, committed_ms)
        if end and (not newest_ms or (end > checkpoint.read_end and not committed_ms)):
            newest_ms = max(newest_ms, self._recreation.newest_store_ms(queue, end, self._now_ms()))
        return checkpoint._replace(newest_ms=newest_ms)

    def _is_catching_up(self) -> bool:
        """Whether some queue has not been read yet up to the end that it had when it was started."""
        ends = {queue: end for queue, end in self._catch_up_ends.items() if queue in self._checkpoints}
        self._catch_up_ends = {queue: end for queue, end in ends.items() if self._checkpoints[queue].read_end < end}
        return bool(self._catch_up_ends) and not self._catch_up_until.expired

    def _release_records(self, queue: MessageQueue) -> None:
        """Drop a queue's records that its next owner can read again; the others stay, and are sent from here."""
        try:
            checkpoint = self._records.checkpoint(queue)
            bounds = self._member.bounds(queue, Deadline.after(REQUEST_S))
            changed_from = (
                None
                if checkpoint is None
                else self._recreation.changed_from_logged(queue, *checkpoint.last_read, bounds)
            )
        except RocketMQError as e:
            if e.retriable:
                raise
            logger.warning("the messages of %s stay here, and another node may send them, too: %s", queue, e)
            return
        first, end = bounds.min_offset, 1 << 63 if changed_from is None else changed_from
        state = self._commit_states.get(queue)
        not_read_by_next = (
            state.committed.progress
            if state is not None and state.committed is not None and state.conflicts
            else NO_PROGRESS
        )

        def is_next(offset: int, due_ms: int) -> bool:
            """Whether the next owner reads and sends it."""
            return first <= offset < end and not not_read_by_next.is_done(offset, due_ms)

        # A hand-over takes several writes. If one fails, another turn or process completes the hand-over. Until then, no progress
        # of the queue may be committed. If the queue is assigned again, it is read from the oldest envelope that is not done.
        self._revoked[queue] = None
        if checkpoint is not None:
            self._store.add([], {note_name(queue): checkpoint._replace(is_handing_over=True).encode()})
        # Records that stay lose their marks of the queue: the progress of later owners does not cover these records.
        self._records.for_marks(queue, lambda offset, due_ms: not is_next(offset, due_ms), self._store.remove_marks)
        count = self._records.for_marks(queue, is_next, self._store.hand_over)
        self._store.add([], {note_name(queue): b""})
        logger.info("%s was handed over to another node, with %d waiting messages", queue, count)

    # --- envelopes

    def _poll(self) -> list[ReceivedMessage]:
        polled = more = self._read(POLL_S)
        gathering, size = Deadline.after(GATHER_S), 0
        while (
            more and len(polled) < PAGE and (size := size + sum(len(message.body) for message in more)) < GATHER_BYTES
        ):
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
            if e.retriable or not self._availability.any_answered:
                raise
            logger.log(self._complaints.level("poll", e), "a broker refuses a pull, it is asked again: %s", e)
            return []

    def _store_envelopes(self, messages: Sequence[ReceivedMessage]) -> None:
        """Store all envelopes that are not done, and with them the new positions."""
        self._restart(
            {message.queue for message in messages if self._checkpoints[message.queue].shows_recreation(message)}
        )
        messages = [message for message in messages if message.queue in self._checkpoints]
        now_ms, checkpoints, records, cancelled_marks = self._now_ms(), dict(self._checkpoints), [], set()
        for message in messages:
            queue, offset = message.queue, message.queue_offset
            checkpoint = checkpoints[queue]
            if offset < checkpoint.read_end:
                continue
            newest_ms = max(checkpoint.newest_ms, message.store_timestamp)
            checkpoints[queue] = checkpoint._replace(read_end=offset + 1, newest_ms=newest_ms)
            effect = envelope_records.effect_of(self._rules, queue, offset, message.body, now_ms)
            if effect.cancelled_mark is not None:
                cancelled_marks.add(effect.cancelled_mark)
            elif effect.record is not None and not self._commit_states[queue].proven.is_done(offset, effect.due_ms):
                records.append((effect.record, effect.due_ms))
                self._retention.record_delay(queue.broker_name, effect.due_ms - message.store_timestamp)
        changed = {queue: entry for queue, entry in checkpoints.items() if entry != self._checkpoints[queue]}
        if not changed:
            return
        notes = {note_name(queue): entry.encode() for queue, entry in changed.items()}
        to_store = [
            entry for entry in records if entry[0].marks[0] not in cancelled_marks
        ]  # otherwise it could be sent before it is cancelled
        self._store.add(to_store, None if cancelled_marks else notes)
        if to_store:
            self._back_pressure.on_stored()
        if cancelled_marks:  # note the position only after the cancellation, so that a crash reads it again
            cancelled = len(records) - len(to_store) + self._store.drop_records(list(cancelled_marks))
            logger.info("%d of %d messages are taken back", cancelled, len(cancelled_marks))
            self._store.add([], notes)
        self._checkpoints = checkpoints
        self.stored += len(to_store)
        self._retention.warn()

    # --- positions

    def _commit_progress(self, checkpoints: dict[MessageQueue, QueueCheckpoint]) -> bool:
        """Commit the progress of queues. Returns whether all commits succeeded; failed ones are repeated next time. Until then
        brokers have an older progress, which is safe.
        """
        first_waiting_ms = self._records.first_due_ms()
        now_ms, last_done_due_ms = self._now_ms(), self._store.last_done_due_ms
        to_commit: dict[MessageQueue, CommittedProgress] = {}
        for queue, checkpoint in checkpoints.items():
            state = self._commit_states[queue]
            if not state.is_current or state.conflicts == 1:
                # Others' numbers stay until the next check, which may find them again.
                continue
            oldest_waiting = self._records.oldest_offset(queue)
            oldest = checkpoint.read_end if oldest_waiting is None else min(checkpoint.read_end, oldest_waiting)
            done_ms = max(last_done_due_ms, state.proven.done_ms)
            progress = advanced(checkpoint.committed, oldest, checkpoint.read_end, first_waiting_ms, done_ms, now_ms)
            committed_before = None if state.committed is None else state.committed.progress
            # Everything is done before and now, so a newer ``done_ms`` adds nothing.
            adds_nothing = (
                committed_before is not None
                and progress.oldest == progress.read_end == committed_before.oldest == committed_before.read_end
            )
            if progress != committed_before and not adds_nothing:
                to_commit[queue] = CommittedProgress(progress, checkpoint.newest_ms)
                state.committed = None
        # Do not commit after damage, because lost records are not done; the next turn reads them again.
        if not to_commit or self._damage_count != self._store.damage_count:
            return True
        all_accepted = self._commits.commit(to_commit)
        for queue, committed in to_commit.items():
            checkpoints[queue] = checkpoints[queue]._replace(committed=committed.progress)
            self._commit_states[queue].committed = CommittedProgress.decode(committed.encode())
        if to_commit:
            self._store.add([], {note_name(queue): checkpoints[queue].encode() for queue in to_commit})
        return all_accepted
