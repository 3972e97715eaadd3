"""The queues of a ``PullConsumer``: their offsets, and the fetched messages that wait for a poll.

This module is pure: time and answers are arguments, and the caller sends the requests. A queue has three offsets:

- ``pull_offset``: where its next pull begins.
- ``position``: the offset after the last message that a poll returned.
- ``finished_offset``: all messages before this offset are finished, so the offset may be committed.

The messages of a poll are finished when the next poll begins, so no message is lost if the program ends before that poll. If
Ctrl-C interrupts a poll, or the caller leaves the loop over its messages, some messages that the poll took may not be returned.
The next poll returns the unreturned messages first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.model import (
    MASTER_ID,
    NO_FILTER,
    Filter,
    MessageQueue,
    PullAnswer,
    PullStatus,
    ReceivedMessage,
)
from rocketmq_spark.model.membership import QueueInfo

Bytes = bytes | memoryview
UncommittedOffsets = dict[MessageQueue, int]
ONE_ANSWER = 0  # a value of ``max_parts``: take only the first answer of a part


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A pull to send now. A seek or a new assignment changes the token of the queue, which makes the answer obsolete."""

    queue: MessageQueue
    offset: int
    broker_id: int
    token: int


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """Consecutive answers from one queue. Their messages are still encoded, in ``stored``."""

    queue: MessageQueue
    start: int  # the first offset of the first answer
    ends: Sequence[tuple[int, int]]  # for each answer: the offset after its messages, the end of its bytes
    stored: Bytes  # the encoded messages of all answers
    decode: Callable[[int, int, Bytes], Iterable[ReceivedMessage]]  # gets ``start``, ``next_offset`` and ``stored``
    filter: Filter = NO_FILTER  # the filter of the pull requests
    returned_up_to: int = 0  # the messages before this offset were returned by polls

    @property
    def next_offset(self) -> int:
        return self.ends[-1][0]

    @property
    def offset_count(self) -> int:
        """The number of offsets that were not returned yet, including offsets without a message."""
        return self.next_offset - self.first_offset

    @property
    def first_offset(self) -> int:
        """The first offset that was not returned yet."""
        return max(self.start, self.returned_up_to)

    def read(self) -> Iterable[ReceivedMessage]:
        """Return the messages that were not returned yet; they may be decoded lazily."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        if self.returned_up_to <= self.start:
            return messages
        return (message for message in messages if message.queue_offset >= self.returned_up_to)

    def returned_count(self) -> int:
        """Return how many messages were returned already."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        return sum(1 for _ in takewhile(lambda m: m.queue_offset < self.returned_up_to, messages))

    def split_first_answer(self) -> list[FetchedPart]:
        """Split this part after the first answer that was not completely returned; returns one part if no answer follows."""
        answer_count = 1 + sum(next_offset <= self.returned_up_to for next_offset, _ in self.ends[:-1])
        view, (split_offset, split_byte) = memoryview(self.stored), self.ends[answer_count - 1]
        parts = [replace(self, ends=self.ends[:answer_count], stored=view[:split_byte])]
        if remaining_ends := [(offset, end_byte - split_byte) for offset, end_byte in self.ends[answer_count:]]:
            parts.append(replace(self, start=split_offset, ends=remaining_ends, stored=view[split_byte:]))
        return parts


class _TakenPart(NamedTuple):
    """A part that a poll took. A seek changes the token of the queue, which makes the part obsolete."""

    part: FetchedPart
    state: AssignedQueue
    token: int
    returned_up_to: int = 0  # the poll returned the messages before this offset


@dataclass(slots=True, eq=False)
class AssignedQueue:
    """The state of one assigned queue. The docstring of the module explains the three offsets of a queue."""

    pull_offset: int
    position: int
    finished_offset: int
    committed_offset: int | None  # None if the broker has no offset of the group, or may have lost the offset
    token: int = 0  # changes with each seek and assignment, which makes earlier pulls obsolete
    is_fetching: bool = False  # whether a pull or a read ahead runs
    paused: bool = False
    retry_at: float = 0.0  # after a failure, no pull is sent before this time
    broker_id: int = MASTER_ID  # the replica that gets the next pull
    cached_count: int = 0  # how many offsets are in the parts that wait for a poll
    cached_bytes: int = 0
    end_offset: int | None = None  # the end offset that the last answer reported
    cooldown_until: float = 0.0  # the queue is not read ahead before this time

    @classmethod
    def from_start(cls, start: StartOffset) -> AssignedQueue:
        return cls(start.offset, start.offset, start.offset, start.offset if start.is_committed else None)


class ReadyParts:
    """Fetched parts that wait for a poll, in the order of their arrival, and the parts that the last poll took.

    A poll returns a taken part later, or never. ``mark_returned`` and ``mark_returned_up_to`` record that the poll returned the
    part; ``take_back`` puts back a part that the poll did not return.
    """

    def __init__(self, states: Mapping[MessageQueue, AssignedQueue]) -> None:
        self._states = states
        self._parts: deque[FetchedPart] = deque()
        self._taken_parts: list[_TakenPart] = []
        self._counts_are_valid = True  # whether ``cached_count`` and ``cached_bytes`` of each queue are up to date

    def add(self, part: FetchedPart) -> None:
        state = self._states[part.queue]
        state.cached_count += part.offset_count
        state.cached_bytes += len(part.stored)
        self._parts.append(part)

    def retain(self, must_keep: Callable[[FetchedPart], bool]) -> None:
        """Drop all parts except those for which ``must_keep`` returns True."""
        self._counts_are_valid = False
        self._parts = deque(part for part in self._parts if must_keep(part))

    def take(self, max_parts: int = ONE_ANSWER) -> list[FetchedPart]:
        """Take the oldest parts of queues that are not paused: at most ``max_parts`` parts, or with ``ONE_ANSWER`` a single
        answer.
        """
        oldest_parts: list[FetchedPart] = []
        remaining_parts: deque[FetchedPart] = deque()
        waiting_parts = iter(self._parts)
        while len(oldest_parts) < max(max_parts, 1) and (part := next(waiting_parts, None)) is not None:
            state = self._states.get(part.queue)
            # The state is None if Ctrl-C interrupted ``assign`` before ``assign`` dropped the parts of the queue.
            if state is None or state.paused:
                remaining_parts.append(part)
            elif max_parts == ONE_ANSWER and len(part.ends) > 1:
                first_part, *later_parts = part.split_first_answer()
                oldest_parts.append(first_part)
                remaining_parts.extend(later_parts)
            else:
                oldest_parts.append(part)
        remaining_parts.extend(waiting_parts)
        taken_parts = [_TakenPart(part, state := self._states[part.queue], state.token) for part in oldest_parts]
        # One statement, so that Ctrl-C cannot interrupt between the two assignments.
        self._parts, self._taken_parts = remaining_parts, taken_parts
        for taken_part in taken_parts:
            taken_part.state.cached_count -= taken_part.part.offset_count
            taken_part.state.cached_bytes -= len(taken_part.part.stored)
        return oldest_parts

    def mark_returned(self) -> None:
        """Record that the poll returned the parts that it took."""
        self._skip_gaps([taken_part for taken_part in self._taken_parts if self._is_current(taken_part)])
        self._taken_parts = []

    def mark_returned_up_to(self, next_offset: int) -> None:
        """Record that a loop yielded the messages before ``next_offset`` of the part that it took."""
        self._taken_parts = [taken_part._replace(returned_up_to=next_offset) for taken_part in self._taken_parts]
        for taken_part in self._taken_parts:
            if self._is_current(taken_part):
                taken_part.state.position = next_offset

    def may_return(self, part: FetchedPart) -> bool:
        """Whether a loop may yield messages of ``part``. False if the part was put back, if the queue is paused, or if the
        queue was revoked or moved by a seek since the poll.
        """
        return any(
            taken_part.part is part and not taken_part.state.paused and self._is_current(taken_part)
            for taken_part in self._taken_parts
        )

    def has_current_part(self) -> bool:
        """Whether some taken part has a queue that was neither revoked nor moved by a seek since the poll."""
        return any(map(self._is_current, self._taken_parts))

    def has_taken(self, state: AssignedQueue) -> bool:
        """Whether a poll took a part of the queue and has not returned it yet."""
        return any(taken_part.state is state for taken_part in self._taken_parts)

    def take_back(self) -> None:
        """Put back the messages that were taken but not returned, before all other messages."""
        if not self._taken_parts and self._counts_are_valid:
            return  # this saves time, because every poll calls this method, and thousands of parts may wait
        current_parts = [taken_part for taken_part in self._taken_parts if self._is_current(taken_part)]
        unreturned_parts = [
            replace(taken_part.part, returned_up_to=max(taken_part.part.returned_up_to, taken_part.returned_up_to))
            for taken_part in current_parts
        ]
        waiting_parts = (part for part in self._parts if part.queue in self._states)
        parts = deque([*(part for part in unreturned_parts if part.offset_count > 0), *waiting_parts])
        for state in self._states.values():
            state.cached_count = state.cached_bytes = 0
        for part in parts:
            self._states[part.queue].cached_count += part.offset_count
            self._states[part.queue].cached_bytes += len(part.stored)
        # Ctrl-C may interrupt the loops above. The attributes are set after the loops, so that the next call counts again.
        self._parts, self._taken_parts, self._counts_are_valid = parts, [], True
        self._skip_gaps(
            [taken_part for taken_part in current_parts if taken_part.part.next_offset <= taken_part.returned_up_to]
        )

    def first_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the first waiting offset of each of these queues. Queues without waiting messages are left out."""
        first_offsets, queues_left = dict[MessageQueue, int](), set(queues)
        for part in takewhile(lambda _: queues_left, self._parts):
            if part.queue in queues_left:
                first_offsets[part.queue] = part.first_offset
                queues_left.discard(part.queue)
        return first_offsets

    def _skip_gaps(self, taken_parts: Sequence[_TakenPart]) -> None:
        """For each part that was returned completely: set the position of its queue after the part, and skip offsets without
        messages.

        If the topic was created again, the new position may be before the part.
        """
        first_offsets = self.first_offsets(taken_part.part.queue for taken_part in taken_parts)
        for taken_part in taken_parts:
            taken_part.state.position = first_offsets.get(taken_part.part.queue, taken_part.state.pull_offset)

    def _is_current(self, taken_part: _TakenPart) -> bool:
        return (
            self._states.get(taken_part.part.queue) is taken_part.state and taken_part.state.token == taken_part.token
        )


class AssignedQueues:
    """All assigned queues of a consumer. Other classes only read ``states``.

    A queue is pulled while fewer than ``max_count`` offsets and fewer than ``max_bytes`` bytes of the queue wait for a poll.
    """

    def __init__(self, max_count: int, max_bytes: int = 100 << 20) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self.states: dict[MessageQueue, AssignedQueue] = {}
        self.ready_parts = ReadyParts(self.states)
        self._last_token = 0  # the token that was given last
        # The function is called if the answer to a pull of a released queue reports a reset. The function must not block.
        self.on_released_queue_reset: Callable[[MessageQueue, int], None] = lambda queue, offset: None

    # --- queues

    def assign(
        self,
        start_offsets: Mapping[MessageQueue, StartOffset | None],
        uncommitted_offsets: UncommittedOffsets | None = None,
    ) -> UncommittedOffsets:
        """Replace the assigned queues. ``start_offsets`` has the start offset of new queues, and None for queues that stay.

        Returns the offsets of released queues that may still be committed. They are stored in ``uncommitted_offsets`` before
        the queues are released, so that Ctrl-C loses no offset.
        """
        released_queues = self.states.keys() - start_offsets.keys()
        uncommitted_offsets = {} if uncommitted_offsets is None else uncommitted_offsets
        uncommitted_offsets.update(
            (q, offset) for q, offset in self.offsets_to_commit().items() if q in released_queues
        )
        for queue in released_queues:
            del self.states[queue]
        self.ready_parts.retain(lambda part: part.queue in self.states)
        for queue, start in start_offsets.items():
            if queue not in self.states:
                assert start is not None, queue
                self.states[queue] = state = AssignedQueue.from_start(start)
                self._renew_token(state)
        return uncommitted_offsets

    def pause(self, queues: Iterable[MessageQueue], paused: bool = True) -> None:
        """Pause or resume these queues. A paused queue is not pulled, and its cached messages wait until it is resumed."""
        for queue in queues:
            self.states[queue].paused = paused

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset``, and let the next commit store it. Messages that were pulled, and pulls in flight, are
        dropped.
        """
        state = self.states[queue]
        state.pull_offset = state.position = state.finished_offset = offset
        # None makes the next commit store the offset, even if the offset equals the last committed offset. The answer to an
        # earlier commit may be lost, and the earlier commit may have stored another offset.
        state.committed_offset = None
        state.broker_id, state.retry_at = MASTER_ID, 0.0
        self._renew_token(state)
        self.ready_parts.retain(lambda part: part.queue != queue)
        state.cached_count = state.cached_bytes = 0

    def _renew_token(self, state: AssignedQueue) -> None:
        self._last_token += 1
        state.token = self._last_token
        state.is_fetching = False

    # --- pulls

    def due_requests(
        self, now: float, excluded_queues: Collection[MessageQueue] = (), requests: list[FetchRequest] | None = None
    ) -> list[FetchRequest]:
        """Return the pulls to send now: at most one per queue, and no pull for the queues in ``excluded_queues``.

        A pull is in flight until ``on_answer``, ``on_failure`` or ``cancel`` is called. Each pull is added to ``requests``
        before ``is_fetching`` is set, so that the caller can cancel the pull after Ctrl-C.
        """
        requests = [] if requests is None else requests
        for queue, state in self.states.items():
            if state.is_fetching or state.paused or state.retry_at > now or queue in excluded_queues:
                continue
            if state.cached_count < self._max_count and state.cached_bytes < self._max_bytes:
                requests.append(FetchRequest(queue, state.pull_offset, state.broker_id, state.token))
                state.is_fetching = True
        return requests

    def cancel(self, requests: Iterable[FetchRequest]) -> None:
        """Mark pulls as due again, because they may not have been sent. If a pull is sent twice, the first answer counts."""
        for request in requests:
            if (state := self._current_queue(request)) is not None:
                state.is_fetching = False

    def next_retry_at(self, now: float) -> float | None:
        """Return the time when the next failed pull is due again; None if no failed pull waits."""
        retry_times = [
            state.retry_at for state in self.states.values() if not state.is_fetching and state.retry_at > now
        ]
        return min(retry_times, default=None)

    def on_answer(self, request: FetchRequest, answer: PullAnswer, request_filter: Filter = NO_FILTER) -> bool:
        """Add the messages of an answer; returns False if the answer is obsolete."""
        state = self._current_queue(request)
        if answer.is_reset:
            self.reset(request, answer.next_offset)
            return request.queue in self.states
        if state is None or request.offset != state.pull_offset:
            return False
        if state.retry_at:  # a broker that was unavailable may have lost the last commit
            state.retry_at, state.committed_offset = 0.0, None
        state.is_fetching, state.broker_id = False, answer.broker_id
        state.pull_offset, state.end_offset = answer.next_offset, answer.max_offset
        if answer.status is PullStatus.FOUND:
            ends = ((answer.next_offset, len(answer.stored_messages)),)
            part = FetchedPart(
                request.queue,
                request.offset,
                ends,
                answer.stored_messages,
                lambda *_: answer.read_messages(),
                request_filter,
            )
            self.ready_parts.add(part)
        elif not state.cached_count and not self.ready_parts.has_taken(state):
            state.position = answer.next_offset  # no message of the skipped offsets matches the filter
        return True

    def on_failure(self, request: FetchRequest, retry_at: float) -> bool:
        """Retry a failed pull at ``retry_at``; returns False if the pull is obsolete."""
        if (state := self._current_queue(request)) is None:
            return False
        state.is_fetching, state.broker_id, state.retry_at = False, MASTER_ID, retry_at
        return True

    def mark_read_ahead(self, requests: Iterable[FetchRequest]) -> None:
        """Mark these queues as read ahead, so that they get no pulls."""
        for request in requests:
            self.states[request.queue].is_fetching = True

    def accept(self, request: FetchRequest, part: FetchedPart) -> bool:
        """Add messages that were read ahead; returns False if they are obsolete."""
        state = self._current_queue(request)
        if state is None:
            return False
        state.pull_offset = part.next_offset
        self.ready_parts.add(part)
        return True

    def process_accepted_parts(self, parts: Sequence[tuple[FetchRequest, FetchedPart]]) -> None:
        """Do nothing: ``accept`` added the parts, and a poll decodes them."""

    def reset(self, request: FetchRequest, offset: int) -> None:
        """Apply an operator's reset, even if an obsolete answer reports the reset, because brokers report a reset only once."""
        if request.queue in self.states:
            self.seek(request.queue, offset)
        else:
            self.on_released_queue_reset(request.queue, offset)

    def release(self, requests: Iterable[FetchRequest], cooldown_until: float) -> None:
        """Mark these queues as no longer read ahead, so that their pulls are due. The queues are not read ahead again before
        ``cooldown_until``.
        """
        for request in requests:
            if (state := self._current_queue(request)) is not None:
                state.is_fetching = False
                state.cooldown_until = cooldown_until

    def _current_queue(self, request: FetchRequest) -> AssignedQueue | None:
        state = self.states.get(request.queue)
        return state if state is not None and state.token == request.token else None

    # --- offsets

    def queue_infos(self) -> dict[MessageQueue, QueueInfo]:
        """Return the state of each queue, for ``mqadmin consumerStatus``."""
        first_offsets = self.ready_parts.first_offsets(self.states)
        return {
            queue: QueueInfo(
                state.finished_offset,
                first_offsets.get(queue),
                state.pull_offset - 1 if queue in first_offsets else None,
                state.cached_count,
                state.cached_bytes,
            )
            for queue, state in self.states.items()
        }

    def finish_returned_messages(self, repeat_commits: bool = False) -> None:
        """Count all returned messages as finished. With ``repeat_commits``, offsets that were committed before are committed
        again.
        """
        for state in self.states.values():
            state.finished_offset = state.position
            if repeat_commits:
                state.committed_offset = None

    def offsets_to_commit(self) -> dict[MessageQueue, int]:
        """Return the offsets of finished messages that are not committed yet."""
        return {
            queue: state.finished_offset
            for queue, state in self.states.items()
            if state.finished_offset != state.committed_offset
        }

    def mark_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Record that brokers have stored these offsets."""
        for queue, offset in offsets.items():
            if queue in self.states:
                self.states[queue].committed_offset = offset
