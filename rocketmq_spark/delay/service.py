"""A node of the delay service: a member of a group that shares the queues of ``dmq_inner_topic``.

A delayed message waits in the inner topic and, as a record, in the node's store (``spool/store``). The node writes a record
durably before it reads on; ``spool/redelivery`` takes due records from the store, and their originals are sent. A record is
deleted when a broker has accepted its original. The inner topic remains authoritative. With the committed ``Progress``, another
node can take over a queue, or this node can continue with an empty disk. A node stores the records of its own queues. When a node
loses a queue, it drops the records whose messages are still in the topic, and keeps the others.

This module is a driver: it does I/O. One thread, the caller of ``run``, reads, stores and commits; the spool's thread sends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import Latch
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.commits import REQUEST_TIMEOUT_S, CommittedProgress, GroupNames, ProgressCommits
from rocketmq_spark.delay.envelope_records import (
    BackPressure,
    BrokerAvailability,
    DeliveryRules,
    EnvelopeReader,
    RecreationCheck,
)
from rocketmq_spark.delay.queue_records import QueueRecords
from rocketmq_spark.delay.release import (
    Progress,
    QueueCheckpoint,
    advanced_progress,
    checkpoints_of,
    note_name,
    resumed_checkpoint,
)
from rocketmq_spark.errors import BrokerError, OffsetError, RocketMQError, SpoolFull
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import INNER_TOPIC

logger = logging.getLogger(__name__)

NO_PROGRESS = Progress(0, 0, 0)
# The number of messages in a write, the seconds between two commits, the timeout of a poll, and the pause after a failed commit,
# after an unexpected error, or before the queues of a broker that failed are tried again.
PAGE, COMMIT_S, POLL_S, RETRY_S = 2000, 0.5, 0.2, 5.0
# The time and the size after which a call of ``turn`` stops gathering messages. Gathering saves requests, because each call
# sends a request for every queue that has messages.
GATHER_S, GATHER_BYTES = 0.02, 32 << 20
# Within this time, the previous node of a queue notices that it has lost the queue, and commits its progress.
HAND_OVER_S = 2.0
# After JOIN_S without a queue, the node assumes that it will get no queue. PAUSE_S is the pause after a temporary error.
JOIN_S, PAUSE_S = 30.0, 0.5
# After a node has started a queue, it first reads the messages that the queue already had. Until then, but at most for this time,
# the node sends nothing. Some of these messages may cancel other messages.
CATCH_UP_S = 60.0
# How often a node checks whether queues still have the messages that were read, and how often it checks whether another node has
# committed the progress of its queues.
RECREATION_CHECK_S, COMMIT_CHECK_S = 5.0, 10.0


@dataclass(frozen=True, slots=True)
class NodeTools:
    """What a node needs besides its parts. ``now_ms`` is the clock for due times, ``retention_ms`` returns a broker's retention
    (None if unknown), ``make_group`` creates a group on all brokers, ``rules`` say what may be delivered, and ``topic`` is the
    topic of envelopes.
    """

    now_ms: Callable[[], int]
    retention_ms: Callable[[str], int | None]
    make_group: Callable[[str, Mapping[MessageQueue, int]], None]
    rules: DeliveryRules
    topic: str = INNER_TOPIC


@dataclass(slots=True)
class CommitState:
    """The committed progress of an own queue, as this node knows it.

    ``committed_progress`` is the progress that this node wrote or read last (None if unknown). ``proven_progress`` follows from
    the commits that this node has read. The node does not store the envelopes that are done according to this progress. The
    node commits only while ``is_current``, which means that no other node has committed since the last check.
    ``conflict_count`` is the number of consecutive checks that found a conflict: an envelope waits here, but is done according
    to another node's progress.
    """

    committed_progress: CommittedProgress | None
    proven_progress: Progress
    next_check_deadline: Deadline
    is_current: bool = True
    conflict_count: int = 0


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
        self._member, self._recreation_check = member, RecreationCheck(member, names.group)
        self._commits = ProgressCommits(member, names, tools.make_group)
        self._store, self._records = store, QueueRecords(store, self._recreation_check)
        self._open_spool = open_spool
        self._now_ms, self._topic, self._rules = tools.now_ms, tools.topic, tools.rules
        self._retention = envelope_records.Retention(tools.retention_ms)
        self._spool: SendSpool | None = None
        self._checkpoints: dict[MessageQueue, QueueCheckpoint] = {}
        self._commit_states: dict[MessageQueue, CommitState] = {}
        # The end of the wait for the commit of the queue's previous node; None if there is no such wait yet.
        self._queues_to_start: dict[MessageQueue, Deadline | None] = {}
        # The checkpoints of the queues that will be handed over or started again. The checkpoint is None if the queue's progress
        # must not be committed.
        self._revoked_queues: dict[MessageQueue, QueueCheckpoint | None] = {}
        self._availability, self._log_throttle = BrokerAvailability(RETRY_S), LogThrottle()
        self._back_pressure = BackPressure(store.path, reader)
        self._damage_count = store.damage_count
        self._commit_deadline = self._recreation_check_deadline = Deadline(0.0)
        self._has_joined, self._join_deadline = False, Deadline.after(JOIN_S)
        self._catch_up_ends: dict[MessageQueue, int] = {}
        self._catch_up_deadline, self.stored_count = Deadline(0.0), 0

    def run(self, stop: Latch) -> None:
        """Run until ``stop`` is set. Then wait for sends in flight, and leave the group, so that other nodes get the queues."""
        try:
            while not stop.is_set():
                try:
                    self.turn()
                except SpoolFull:  # ``turn`` has logged the error
                    stop.wait(PAUSE_S)
                except RocketMQError as e:
                    if not e.retriable:
                        raise
                    logger.warning("the delay service continues after an error: %s", e)
                    stop.wait(PAUSE_S)
                except Exception:  # a bug must not keep other messages from being sent
                    logger.exception("the delay service continues after an error")
                    stop.wait(RETRY_S)
        finally:
            self.close()

    def turn(self) -> None:
        """Run one step: take over and give up queues, read and store envelopes, commit the progress.

        After an error, all queues are started again, because polled messages that were not stored would otherwise be skipped.
        After ``SpoolFull``, nothing is read for a while, but stored messages are sent.
        """
        try:
            self._run_turn()
        except Exception as e:
            self._restart(self._checkpoints)
            if isinstance(e, SpoolFull):
                self._back_pressure.on_full(e, self.waiting_count)
            raise

    def _run_turn(self) -> None:
        if self._damage_count != self._store.damage_count:
            # All queues are read again, because the topic still has the records that the store lost. A queue is also read again
            # if its note is newer than the damage.
            self._store.add([], {note_name(queue): b"" for queue in checkpoints_of(self._store.notes())})
            self._damage_count = self._store.damage_count
            self._restart(self._checkpoints)
        self._back_pressure.apply()
        messages, started_queues = self._poll(), set(self._checkpoints)
        self._update_assignment(set(self._reader.assignment()))
        # A node that was paused learns here what another node has sent, before it stores envelopes.
        self._check_commits()
        # If a queue was started after the poll, its polled messages are dropped here, and read again from the start of the queue.
        messages = [message for message in messages if message.queue in started_queues & self._checkpoints.keys()]
        self._check_recreation(
            {message.queue for message in messages if message.queue_offset >= self._checkpoints[message.queue].read_end}
        )
        self._store_envelopes([message for message in messages if message.queue in self._checkpoints])
        is_catching_up = self._is_catching_up()
        if self._spool is None and self._has_joined and not is_catching_up:
            self._spool = self._open_spool()
        if self._spool is not None:
            self._spool.redelivery.set_paused(is_catching_up)
            self._spool.redelivery.wake()  # if the clock was set forward, records may be due earlier than planned
        if self._commit_deadline.expired:
            self._commit_deadline = Deadline.after(COMMIT_S if self._commit_progress(self._checkpoints) else RETRY_S)

    @property
    def sent_count(self) -> int:
        """The number of originals that brokers have accepted."""
        return 0 if self._spool is None else self._spool.redelivery.delivered_count

    @property
    def waiting_count(self) -> int:
        """The number of messages in the store."""
        return len(self._store)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop sending, commit the progress, leave the group, and release the store."""
        deadline = Deadline.after(timeout_s)
        try:
            if self._spool is not None:
                self._spool.redelivery.close(deadline)
            self._check_commits(checks_all=True)
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

    def _update_assignment(self, assigned_queues: set[MessageQueue]) -> None:
        self._revoked_queues |= {
            queue: self._checkpoints.pop(queue) for queue in self._checkpoints.keys() - assigned_queues
        }
        # These queues were not started yet, but the store has records of them from an earlier time.
        unstarted_queues = self._queues_to_start.keys() - assigned_queues - self._revoked_queues.keys()
        self._revoked_queues |= {q: None for q in unstarted_queues if self._store.places(envelope_records.space_of(q))}
        self._revoked_queues = {
            queue: checkpoint for queue, checkpoint in self._revoked_queues.items() if queue not in assigned_queues
        }
        self._hand_over_revoked()
        self._queues_to_start = {
            queue: self._queues_to_start.get(queue) for queue in assigned_queues - self._checkpoints.keys()
        }
        self._availability.for_each(self._queues_to_start, self._start)
        # Wait for a queue whose broker does not answer only if the store has records of the queue, because other nodes may have
        # sent the messages of these records meanwhile.
        queues_to_await = (
            q
            for q in assigned_queues - set(self._checkpoints)
            if self._store.places(envelope_records.space_of(q)) or not self._availability.is_unavailable(q)
        )
        if not self._has_joined and (self._join_deadline.expired or (assigned_queues and not any(queues_to_await))):
            self._has_joined = True
            # The queues of an earlier process.
            self._revoked_queues |= dict.fromkeys(self._records.queues() - assigned_queues)
            self._hand_over_revoked()

    def _restart(self, queues: Iterable[MessageQueue]) -> None:
        """Start ``queues`` again. If a queue is no longer assigned, it is handed over instead."""
        for queue in list(queues):
            del self._checkpoints[queue]
            self._revoked_queues[queue] = None

    def _check_recreation(self, queues_with_messages: set[MessageQueue]) -> None:
        """Start queues again if their topic was created again. Checks the queues with new messages (``queues_with_messages``),
        and every ``RECREATION_CHECK_S`` seconds all queues. If a queue with new messages cannot be checked, it is also started
        again.
        """
        unchanged_queues = set()

        def check_queue(queue: MessageQueue) -> None:
            try:
                is_unchanged = self._recreation_check.is_unchanged(queue, self._checkpoints[queue])
            except RocketMQError as e:
                if e.retriable:
                    raise
                logger.info("cannot check whether %s still has the messages that were read: %s", queue, e)
                return
            if is_unchanged:
                unchanged_queues.add(queue)
            else:
                self._restart([queue])

        queues = queues_with_messages
        if self._recreation_check_deadline.expired:
            queues, self._recreation_check_deadline = set(self._checkpoints), Deadline.after(RECREATION_CHECK_S)
        self._availability.for_each(queues, check_queue)
        self._restart((queues_with_messages - unchanged_queues) & self._checkpoints.keys())

    def _hand_over_revoked(self) -> None:
        """Hand over revoked queues. A queue that is missing in the route is not handed over, and this node sends its messages. A
        queue is missing if the topic has fewer queues now, if its broker is down, or if the topic was created again.
        """
        if not self._revoked_queues:
            return
        try:
            existing_queues = set(self._member.queues(self._topic, Deadline.after(REQUEST_TIMEOUT_S)))
        except RocketMQError as e:
            logger.info("cannot list the queues of %s: %s", self._topic, e)
            return
        self._availability.for_each(self._revoked_queues.keys() & existing_queues, self._hand_over)

    def _check_commits(self, checks_all: bool = False) -> None:
        """Read the committed progress of own queues if the next check is due."""
        due_queues = {
            queue for queue in self._checkpoints if checks_all or self._commit_states[queue].next_check_deadline.expired
        }
        for queue in due_queues:
            self._commit_states[queue].is_current = False
        self._availability.for_each(due_queues, self._check_commit)

    def _check_commit(self, queue: MessageQueue) -> None:
        checkpoint = self._merge_committed_progress(queue, self._checkpoints[queue])
        if checkpoint is None:
            self._restart([queue])
        else:
            self._checkpoints[queue] = checkpoint

    def _merge_committed_progress(self, queue: MessageQueue, checkpoint: QueueCheckpoint) -> QueueCheckpoint | None:
        """Return ``checkpoint``, extended by the committed progress of a queue. Return None if the queue was created again since
        ``checkpoint``.

        Another node may have committed: the previous owner, after a pause, or the next owner, if this node was paused. Both nodes
        are right, so the merged progress is committed next. But while a record waits here, its message is not done, whatever
        other nodes commit.
        """
        state, committed = self._commit_states[queue], self._commits.fetch(queue)
        if committed != state.committed_progress or state.conflict_count:
            if not self._recreation_check.is_unchanged(queue, checkpoint):
                return None
            state.committed_progress, valid_progress = (
                committed,
                None if committed is None else self._valid_progress(queue, committed),
            )
            if valid_progress is not None:
                state.proven_progress = state.proven_progress.merged_with(valid_progress)
            if valid_progress is not None and self._records.has_record(queue, valid_progress.is_done):
                state.conflict_count += 1
                logger.warning(
                    "%s: another node committed envelopes as done, but these envelopes still wait on this node, and stay here. "
                    "One of the two nodes was paused", queue,
                )  # fmt: skip
            else:
                state.conflict_count = 0
                if valid_progress is not None and committed is not None:
                    checkpoint = self._with_newest_store_ms(
                        queue,
                        checkpoint._replace(committed=checkpoint.committed.merged_with(valid_progress)),
                        committed,
                    )
        state.is_current, state.next_check_deadline = True, Deadline.after(COMMIT_CHECK_S)
        return checkpoint

    def _valid_progress(self, queue: MessageQueue, committed: CommittedProgress) -> Progress | None:
        """Return the committed progress if it is about the messages that the queue has now, else None."""
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_TIMEOUT_S))
        if committed.progress.oldest_offset > bounds.max_offset:
            return None
        return (
            None
            if self._recreation_check.first_changed_offset(queue, *committed.end_and_newest_store_ms, bounds)
            is not None
            else committed.progress
        )

    def _hand_over(self, queue: MessageQueue) -> None:
        """Hand a queue over to another node."""
        checkpoint = self._revoked_queues[queue]
        if checkpoint is not None and (checkpoint := self._merge_committed_progress(queue, checkpoint)) is not None:
            state = self._commit_states[queue]
            if state.committed_progress is not None and not state.conflict_count:
                self._commit_progress({queue: checkpoint})
        self._release_records(queue)
        del self._revoked_queues[queue]
        self._commit_states.pop(queue, None)

    def _start(self, queue: MessageQueue) -> None:
        """Start an assigned queue. If another node had the queue, wait ``HAND_OVER_S`` for the commit of that node. Raises
        errors of requests.
        """
        committed, own_checkpoint = self._commits.fetch(queue), self._records.checkpoint(queue)
        # Whether another node has had the queue since this node's checkpoint.
        had_other_owner = committed is not None and (
            own_checkpoint is None or own_checkpoint.committed != committed.progress
        )
        if had_other_owner:
            hand_over_deadline = self._queues_to_start[queue] = self._queues_to_start[queue] or Deadline.after(
                HAND_OVER_S
            )
            if not hand_over_deadline.expired:
                return
        bounds = self._member.bounds(queue, Deadline.after(REQUEST_TIMEOUT_S))
        checkpoint = self._starting_checkpoint(queue, own_checkpoint, committed, had_other_owner, bounds)
        if checkpoint.read_end < bounds.min_offset:
            logger.warning(
                "%s begins at %d, and envelopes from %d on are not done: envelopes that are not in %s are lost; the topic's "
                "retention must exceed the longest delay", queue, bounds.min_offset, checkpoint.read_end, self._store.path,
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
                self._catch_up_deadline = Deadline.after(CATCH_UP_S)
            self._catch_up_ends[queue] = bounds.max_offset
        else:  # if the topic was created again with fewer messages, the recorded end is obsolete
            self._catch_up_ends.pop(queue, None)
        logger.info(
            "%s is read from %d on; all envelopes before %d are done",
            queue,
            checkpoint.read_end,
            checkpoint.committed.oldest_offset,
        )

    def _starting_checkpoint(
        self,
        queue: MessageQueue,
        own_checkpoint: QueueCheckpoint | None,
        committed: CommittedProgress | None,
        had_other_owner: bool,
        bounds: QueueBounds,
    ) -> QueueCheckpoint:
        """Return where a queue starts. This node's checkpoint, and commits of other owners, may be about messages that no
        longer exist.
        """
        progress = None if committed is None else committed.progress
        if (
            committed is not None
            and had_other_owner
            and (
                first_changed_offset := self._recreation_check.first_changed_offset_with_log(
                    queue, *committed.end_and_newest_store_ms, bounds
                )
            )
            is not None
        ):
            progress = committed.progress.truncated_at(first_changed_offset)
        if (
            own_checkpoint is not None
            and (
                first_changed_offset := self._recreation_check.first_changed_offset_with_log(
                    queue, *own_checkpoint.end_and_newest_store_ms, bounds
                )
            )
            is not None
        ):
            # Records whose messages are no longer in the topic lose their marks of the queue. The messages of the other records
            # are still in the topic, and not done.
            first_offset, end_offset = bounds.min_offset, first_changed_offset
            self._records.sum_for_marks(
                queue, lambda offset, due_ms: not first_offset <= offset < end_offset, self._store.remove_marks
            )
            own_checkpoint = own_checkpoint.truncated_at(first_changed_offset)
            progress = progress if had_other_owner else own_checkpoint.committed
        if progress is not None and had_other_owner:
            progress = progress if own_checkpoint is None else progress.merged_with(own_checkpoint.committed)
            self._records.sum_for_marks(queue, progress.is_done, self._store.drop_records)
        return self._with_newest_store_ms(
            queue, resumed_checkpoint(own_checkpoint, progress, bounds.min_offset), committed
        )

    def _with_newest_store_ms(
        self, queue: MessageQueue, checkpoint: QueueCheckpoint, committed: CommittedProgress | None
    ) -> QueueCheckpoint:
        """Return ``checkpoint`` with the latest store time of all messages before its end, including messages that only another
        node has read. If the other node has not committed a store time, the broker is queried. Without the store time, this node
        could not tell these messages from messages of a topic that was created again.
        """
        committed_ms, (end, newest_store_ms) = (
            0 if committed is None else committed.newest_store_ms,
            checkpoint.end_and_newest_store_ms,
        )
        newest_store_ms = max(newest_store_ms, committed_ms)
        if end and (not newest_store_ms or (end > checkpoint.read_end and not committed_ms)):
            newest_store_ms = max(newest_store_ms, self._recreation_check.newest_store_ms(queue, end, self._now_ms()))
        return checkpoint._replace(newest_store_ms=newest_store_ms)

    def _is_catching_up(self) -> bool:
        """Whether a queue has unread messages from before it was started; always False after ``CATCH_UP_S`` seconds."""
        ends = {queue: end for queue, end in self._catch_up_ends.items() if queue in self._checkpoints}
        self._catch_up_ends = {queue: end for queue, end in ends.items() if self._checkpoints[queue].read_end < end}
        return bool(self._catch_up_ends) and not self._catch_up_deadline.expired

    def _release_records(self, queue: MessageQueue) -> None:
        """Drop the records of a queue whose messages the next owner can read again. The other records stay, and this node sends
        them.
        """
        try:
            checkpoint = self._records.checkpoint(queue)
            bounds = self._member.bounds(queue, Deadline.after(REQUEST_TIMEOUT_S))
            first_changed_offset = (
                None
                if checkpoint is None
                else self._recreation_check.first_changed_offset_with_log(
                    queue, *checkpoint.end_and_newest_store_ms, bounds
                )
            )
        except RocketMQError as e:
            if e.retriable:
                raise
            logger.warning("the messages of %s stay here, and another node may send them, too: %s", queue, e)
            return
        first_offset, end_offset = bounds.min_offset, 1 << 63 if first_changed_offset is None else first_changed_offset
        state = self._commit_states.get(queue)
        progress_of_others = (
            state.committed_progress.progress
            if state is not None and state.committed_progress is not None and state.conflict_count
            else NO_PROGRESS
        )

        def is_for_next_owner(offset: int, due_ms: int) -> bool:
            """Whether the next owner reads and sends the message of a record."""
            return first_offset <= offset < end_offset and not progress_of_others.is_done(offset, due_ms)

        # A hand-over takes several writes. If a write fails, a later turn or another process completes the hand-over. Before
        # the hand-over is complete, no progress of the queue may be committed. If the queue is assigned again, it is read from
        # the oldest envelope that is not done.
        self._revoked_queues[queue] = None
        if checkpoint is not None:
            self._store.add([], {note_name(queue): checkpoint._replace(is_handing_over=True).encode()})
        # Records that stay here lose their marks of the queue, because the progress of later owners does not cover them.
        self._records.sum_for_marks(
            queue, lambda offset, due_ms: not is_for_next_owner(offset, due_ms), self._store.remove_marks
        )
        count = self._records.sum_for_marks(queue, is_for_next_owner, self._store.hand_over)
        self._store.add([], {note_name(queue): b""})
        logger.info("%s was handed over to another node, with %d waiting messages", queue, count)

    # --- envelopes

    def _poll(self) -> list[ReceivedMessage]:
        messages = new_messages = self._read(POLL_S)
        gather_deadline, size = Deadline.after(GATHER_S), 0
        while (
            new_messages
            and len(messages) < PAGE
            and (size := size + sum(len(message.body) for message in new_messages)) < GATHER_BYTES
        ):
            new_messages = self._read(gather_deadline.remaining())
            messages += new_messages
        return messages

    def _read(self, timeout_s: float) -> list[ReceivedMessage]:
        """Return messages that have arrived. Raises the errors of a poll, but a permanent error only while no broker has
        answered. Once a broker has answered, a permanent error concerns only one broker, and the pull from this broker is
        repeated.
        """
        try:
            return self._reader.poll(timeout_s)
        except BrokerError as e:
            if e.retriable or not self._availability.has_any_broker_answered:
                raise
            logger.log(self._log_throttle.level("poll", e), "a broker refuses a pull, which is repeated: %s", e)
            return []

    def _store_envelopes(self, messages: Sequence[ReceivedMessage]) -> None:
        """Store all envelopes that are not done, together with the new positions."""
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
            newest_store_ms = max(checkpoint.newest_store_ms, message.store_timestamp)
            checkpoints[queue] = checkpoint._replace(read_end=offset + 1, newest_store_ms=newest_store_ms)
            effect = envelope_records.effect_of(self._rules, queue, offset, message.body, now_ms)
            if effect.cancelled_mark is not None:
                cancelled_marks.add(effect.cancelled_mark)
            elif effect.record is not None and not self._commit_states[queue].proven_progress.is_done(
                offset, effect.due_ms
            ):
                records.append((effect.record, effect.due_ms))
                self._retention.record_delay(queue.broker_name, effect.due_ms - message.store_timestamp)
        changed_checkpoints = {
            queue: entry for queue, entry in checkpoints.items() if entry != self._checkpoints[queue]
        }
        if not changed_checkpoints:
            return
        notes = {note_name(queue): entry.encode() for queue, entry in changed_checkpoints.items()}
        # A cancelled record is not stored, because it could be sent before it is cancelled.
        records_to_store = [entry for entry in records if entry[0].marks[0] not in cancelled_marks]
        self._store.add(records_to_store, None if cancelled_marks else notes)
        if records_to_store:
            self._back_pressure.on_stored()
        # The position is stored only after the cancellation. If the process dies in between, the cancellation is read again.
        if cancelled_marks:
            cancelled_count = len(records) - len(records_to_store) + self._store.drop_records(list(cancelled_marks))
            logger.info("%d messages are cancelled; %d cancellations were read", cancelled_count, len(cancelled_marks))
            self._store.add([], notes)
        self._checkpoints = checkpoints
        self.stored_count += len(records_to_store)
        self._retention.warn()

    # --- positions

    def _commit_progress(self, checkpoints: dict[MessageQueue, QueueCheckpoint]) -> bool:
        """Commit the progress of queues. Returns whether all commits succeeded. Failed commits are repeated next time; until
        then, brokers have an older progress, which is safe.
        """
        first_waiting_due_ms = self._records.first_due_ms()
        now_ms, last_done_due_ms = self._now_ms(), self._store.last_done_due_ms
        progress_to_commit: dict[MessageQueue, CommittedProgress] = {}
        for queue, checkpoint in checkpoints.items():
            state = self._commit_states[queue]
            if not state.is_current or state.conflict_count == 1:
                # Do not overwrite another node's progress before the next check, which shows whether a conflict lasts.
                continue
            oldest_waiting_offset = self._records.oldest_offset(queue)
            oldest_offset = (
                checkpoint.read_end
                if oldest_waiting_offset is None
                else min(checkpoint.read_end, oldest_waiting_offset)
            )
            done_ms = max(last_done_due_ms, state.proven_progress.done_ms)
            progress = advanced_progress(
                checkpoint.committed, oldest_offset, checkpoint.read_end, first_waiting_due_ms, done_ms, now_ms
            )
            previous_progress = None if state.committed_progress is None else state.committed_progress.progress
            # All envelopes were done at the last commit, and all are done now, so a newer ``done_ms`` adds nothing.
            adds_nothing = (
                previous_progress is not None
                and progress.oldest_offset
                == progress.read_end
                == previous_progress.oldest_offset
                == previous_progress.read_end
            )
            if progress != previous_progress and not adds_nothing:
                progress_to_commit[queue] = CommittedProgress(progress, checkpoint.newest_store_ms)
                state.committed_progress = None
        # Do not commit after damage, because lost records are not done. The next turn reads the lost messages again.
        if not progress_to_commit or self._damage_count != self._store.damage_count:
            return True
        all_accepted = self._commits.commit(progress_to_commit)
        for queue, committed in progress_to_commit.items():
            checkpoints[queue] = checkpoints[queue]._replace(committed=committed.progress)
            self._commit_states[queue].committed_progress = CommittedProgress.decode(committed.encode())
        if progress_to_commit:
            self._store.add([], {note_name(queue): checkpoints[queue].encode() for queue in progress_to_commit})
        return all_accepted
