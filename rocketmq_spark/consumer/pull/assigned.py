"""The queues of a ``PullConsumer``: where each is pulled, which messages wait for a poll, and which offsets may be committed.

Pure: time and answers are arguments, and the caller sends the requests. A queue has three offsets: ``pull_at``, where its next
pull begins; ``taken``, after the last message that a poll returned; ``done``, the end of what the caller has finished. Messages
are finished when the next poll begins, so none is lost if no poll follows. Messages that a poll took but did not return (it was
interrupted, or a loop over messages was left) are returned again, before others.
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
Left = dict[MessageQueue, int]
ONE_ANSWER = 0  # instead of a number of parts


@dataclass(frozen=True, slots=True)
class Ask:
    """A pull to send now. ``token`` identifies the position of its queue: after a seek, the answer is obsolete."""

    queue: MessageQueue
    offset: int
    broker_id: int
    token: int


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """The messages of consecutive answers in stored form, with the filter of their requests.

    ``ends`` has the next offset of each answer, and where its bytes end. ``decode`` decodes messages from bytes, within a range
    of offsets. Messages before ``begun`` were returned already.
    """

    queue: MessageQueue
    start: int
    ends: Sequence[tuple[int, int]]
    stored: Bytes
    decode: Callable[[int, int, Bytes], Iterable[ReceivedMessage]]
    filter: Filter = NO_FILTER
    begun: int = 0

    @property
    def next_offset(self) -> int:
        return self.ends[-1][0]

    @property
    def count(self) -> int:
        """The number of offsets that it covers; with gaps, more than it has messages."""
        return self.next_offset - self.first

    @property
    def first(self) -> int:
        """The first offset that was not returned yet."""
        return max(self.start, self.begun)

    def read(self) -> Iterable[ReceivedMessage]:
        """The messages as objects; they may be decoded lazily."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        return (m for m in messages if m.queue_offset >= self.begun) if self.begun > self.start else messages

    def given(self) -> int:
        """How many of its messages were returned already."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        return sum(1 for _ in takewhile(lambda m: m.queue_offset < self.begun, messages))

    def cut(self) -> list[FetchedPart]:
        """The answer with the first offset that was not returned yet, with those before it, and the answers behind it."""
        at = 1 + sum(next_offset <= self.begun for next_offset, _ in self.ends[:-1])
        view, (start, end) = memoryview(self.stored), self.ends[at - 1]
        parts = [replace(self, ends=self.ends[:at], stored=view[:end])]
        if others := [(next_offset, behind - end) for next_offset, behind in self.ends[at:]]:
            parts.append(replace(self, start=start, ends=others, stored=view[end:]))
        return parts


class _Lent(NamedTuple):
    """A part that a poll took, with the token of its queue at that time: after a seek, the part is obsolete.

    Messages before ``given_up_to`` were returned to the caller.
    """

    part: FetchedPart
    place: AssignedQueue
    token: int
    given_up_to: int = 0


@dataclass(slots=True, eq=False)
class AssignedQueue:
    """One queue. ``end``: its end in the broker's last answer; ``calm_until``: when it may be read ahead again.

    ``committed`` None: the group has no offset of the queue yet, or the broker may have lost it.
    """

    pull_at: int
    taken: int
    done: int
    committed: int | None
    token: int = 0
    asked: bool = False
    paused: bool = False
    retry_at: float = 0.0
    broker_id: int = MASTER_ID
    waiting: int = 0
    bytes: int = 0
    end: int | None = None
    calm_until: float = 0.0

    @classmethod
    def of(cls, start: StartOffset) -> AssignedQueue:
        return cls(start.offset, start.offset, start.offset, start.offset if start.committed else None)


class Ready:
    """Parts of the queues in ``places`` that wait for a poll, in the order of their arrival, and the parts that a poll took.

    A part that was taken is not returned yet: ``give``, ``give_up_to`` or ``take_back`` decides about it.
    """

    def __init__(self, places: Mapping[MessageQueue, AssignedQueue]) -> None:
        self._places = places
        self._parts: deque[FetchedPart] = deque()
        self._lent: list[_Lent] = []
        self._counted = True  # whether ``waiting`` of each queue is up to date

    def add(self, part: FetchedPart) -> None:
        place = self._places[part.queue]
        place.waiting += part.count
        place.bytes += len(part.stored)
        self._parts.append(part)

    def keep(self, wanted: Callable[[FetchedPart], bool]) -> None:
        """Drop all parts except the ``wanted`` ones."""
        self._counted = False
        self._parts = deque(part for part in self._parts if wanted(part))

    def take(self, most: int = ONE_ANSWER) -> list[FetchedPart]:
        """Take the oldest parts of queues that are not paused: at most ``most`` parts, or ``ONE_ANSWER`` of a part."""
        taken: list[FetchedPart] = []
        left: deque[FetchedPart] = deque()
        parts = iter(self._parts)
        while len(taken) < max(most, 1) and (part := next(parts, None)) is not None:
            place = self._places.get(part.queue)
            if place is None or place.paused:  # None: Ctrl-C came between the release of a queue and that of its parts
                left.append(part)
            elif most == ONE_ANSWER and len(part.ends) > 1:
                first, *others = part.cut()
                taken.append(first)
                left.extend(others)
            else:
                taken.append(part)
        left.extend(parts)
        lent = [_Lent(part, place := self._places[part.queue], place.token) for part in taken]
        self._parts, self._lent = left, lent  # one instruction, so that Ctrl-C cannot come between
        for each in lent:
            each.place.waiting -= each.part.count
            each.place.bytes -= len(each.part.stored)
        return taken

    def give(self) -> None:
        """Note that the parts taken last were returned to the caller."""
        self._pass([lent for lent in self._lent if self._stands(lent)])
        self._lent = []

    def give_up_to(self, next_offset: int) -> None:
        """Note that the part taken last, a single one, was returned to the caller up to ``next_offset``."""
        self._lent = [lent._replace(given_up_to=next_offset) for lent in self._lent]
        for lent in self._lent:
            if self._stands(lent):
                lent.place.taken = next_offset

    def lends(self, part: FetchedPart) -> bool:
        """Whether ``part``, taken alone, may be returned: it was not taken back, and its queue was neither sought nor paused."""
        return any(lent.part is part and not lent.place.paused and self._stands(lent) for lent in self._lent)

    def stands(self) -> bool:
        """Whether a part that was taken last still belongs to its queue: it was neither revoked nor sought since."""
        return any(map(self._stands, self._lent))

    def lends_of(self, place: AssignedQueue) -> bool:
        """Whether a part of the queue was taken and not returned yet."""
        return any(lent.place is place for lent in self._lent)

    def take_back(self) -> None:
        """Let the messages that were taken last and not returned wait again, before all others."""
        if not self._lent and self._counted:
            return  # every poll calls this, and thousands of parts may wait
        standing = [lent for lent in self._lent if self._stands(lent)]
        rest = [replace(lent.part, begun=max(lent.part.begun, lent.given_up_to)) for lent in standing]
        others = (part for part in self._parts if part.queue in self._places)
        parts = deque([*(part for part in rest if part.count > 0), *others])
        for place in self._places.values():
            place.waiting = place.bytes = 0
        for part in parts:
            self._places[part.queue].waiting += part.count
            self._places[part.queue].bytes += len(part.stored)
        self._parts, self._lent, self._counted = parts, [], True  # not before: Ctrl-C may keep some from being counted
        self._pass([lent for lent in standing if lent.part.next_offset <= lent.given_up_to])  # a loop gave all of it

    def firsts(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """The first waiting offset of each of these queues that has waiting messages."""
        found, left = dict[MessageQueue, int](), set(queues)
        for part in takewhile(lambda _: left, self._parts):
            if part.queue in left:
                found[part.queue] = part.first
                left.discard(part.queue)
        return found

    def _pass(self, lents: Sequence[_Lent]) -> None:
        """Skip offsets without messages after these parts, up to the next waiting one; before them, too, in a recreated topic."""
        firsts = self.firsts(lent.part.queue for lent in lents)
        for lent in lents:
            lent.place.taken = firsts.get(lent.part.queue, lent.place.pull_at)

    def _stands(self, lent: _Lent) -> bool:
        return self._places.get(lent.part.queue) is lent.place and lent.place.token == lent.token


class Assigned:
    """All queues. A queue is pulled while fewer than ``max_waiting`` of its offsets and ``max_bytes`` wait for a poll.

    Other classes only read ``places``. ``away`` is called for resets of queues that were released.
    """

    def __init__(self, max_waiting: int, max_bytes: int = 100 << 20) -> None:
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self.places: dict[MessageQueue, AssignedQueue] = {}
        self.ready = Ready(self.places)
        self._tokens = 0
        self.away: Callable[[MessageQueue, int], None] = lambda queue, offset: None  # must not block

    # --- which queues

    def assign(self, starts: Mapping[MessageQueue, StartOffset | None], left: Left | None = None) -> Left:
        """Own these queues and no others. New ones begin at their start; None is for those that are owned already.

        Returns the offsets of released queues that may still be committed. ``left`` gets them first, in case of Ctrl-C.
        """
        gone = self.places.keys() - starts.keys()
        (left := {} if left is None else left).update((q, at) for q, at in self.to_commit().items() if q in gone)
        for queue in gone:
            del self.places[queue]
        self.ready.keep(lambda part: part.queue in self.places)
        for queue, start in starts.items():
            if queue not in self.places:
                assert start is not None, queue
                self.places[queue] = place = AssignedQueue.of(start)
                self._renew(place)
        return left

    def pause(self, queues: Iterable[MessageQueue], paused: bool = True) -> None:
        """Stop or resume pulling and returning messages of these queues. Messages that were pulled are kept."""
        for queue in queues:
            self.places[queue].paused = paused

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset``, which is committed next. Messages that were pulled, and pulls in flight, are dropped."""
        place = self.places[queue]
        place.pull_at = place.taken = place.done = offset
        place.committed = None  # even if it equals the last commit: a later one without an answer may be stored
        place.broker_id, place.retry_at = MASTER_ID, 0.0
        self._renew(place)
        self.ready.keep(lambda part: part.queue != queue)
        place.waiting = place.bytes = 0

    def _renew(self, place: AssignedQueue) -> None:
        self._tokens += 1
        place.token = self._tokens
        place.asked = False

    # --- pulls

    def due(self, now: float, besides: Collection[MessageQueue] = (), asks: list[Ask] | None = None) -> list[Ask]:
        """The pulls to send now, at most one per queue, except for the queues in ``besides``; added to ``asks`` if given.

        They are in flight until ``answered``, ``failed`` or ``not_made``. Each is in the list before this, in case of Ctrl-C.
        """
        asks = [] if asks is None else asks
        for queue, place in self.places.items():
            if place.asked or place.paused or place.retry_at > now or queue in besides:
                continue
            if place.waiting < self._max_waiting and place.bytes < self._max_bytes:
                asks.append(Ask(queue, place.pull_at, place.broker_id, place.token))
                place.asked = True
        return asks

    def not_made(self, asks: Iterable[Ask]) -> None:
        """These pulls were perhaps not sent, so they are due again. If both are answered, the first answer counts."""
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False

    def next_retry(self, now: float) -> float | None:
        """When the next pull that failed is due again; None if there is none."""
        times = [place.retry_at for place in self.places.values() if not place.asked and place.retry_at > now]
        return min(times, default=None)

    def answered(self, ask: Ask, answer: PullAnswer, wanted: Filter = NO_FILTER) -> bool:
        """Add the messages of an answer; False if it is obsolete."""
        place = self._current(ask)
        if answer.reset:
            self.reset(ask, answer.next_offset)
            return ask.queue in self.places
        if place is None or ask.offset != place.pull_at:
            return False
        if place.retry_at:  # a broker that was unavailable may have lost the last commit
            place.retry_at, place.committed = 0.0, None
        place.asked, place.broker_id = False, answer.broker_id
        place.pull_at, place.end = answer.next_offset, answer.max_offset
        if answer.status is PullStatus.FOUND:
            ends = ((answer.next_offset, len(answer.stored)),)
            self.ready.add(FetchedPart(ask.queue, ask.offset, ends, answer.stored, lambda *_: answer.read(), wanted))
        elif not place.waiting and not self.ready.lends_of(place):
            place.taken = answer.next_offset  # no message in between matches the filter, or exists
        return True

    def failed(self, ask: Ask, retry_at: float) -> bool:
        """Retry a failed pull at ``retry_at``; False if it is obsolete."""
        if (place := self._current(ask)) is None:
            return False
        place.asked, place.broker_id, place.retry_at = False, MASTER_ID, retry_at
        return True

    def hold(self, asks: Iterable[Ask]) -> None:
        """Note that these queues are read ahead now, so that no pulls of them are due."""
        for ask in asks:
            self.places[ask.queue].asked = True

    def bring(self, ask: Ask, part: FetchedPart) -> bool:
        """Add messages that were read ahead; False if they are obsolete."""
        place = self._current(ask)
        if place is None:
            return False
        place.pull_at = part.next_offset
        self.ready.add(part)
        return True

    def brought(self, parts: Sequence[tuple[Ask, FetchedPart]]) -> None:
        """Let the parts wait for a poll."""

    def reset(self, ask: Ask, offset: int) -> None:
        """An operator reset the group: as ``seek``. An obsolete answer counts, too, because brokers report a reset only once."""
        if ask.queue in self.places:
            self.seek(ask.queue, offset)
        else:
            self.away(ask.queue, offset)

    def let_go(self, asks: Iterable[Ask], calm_until: float) -> None:
        """Note that these queues are no longer read ahead, and not again before ``calm_until``, so that pulls of them are due."""
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False
                place.calm_until = calm_until

    def _current(self, ask: Ask) -> AssignedQueue | None:
        place = self.places.get(ask.queue)
        return place if place is not None and place.token == ask.token else None

    # --- offsets

    def infos(self) -> dict[MessageQueue, QueueInfo]:
        """The state of each queue, for ``mqadmin consumerStatus``."""
        firsts = self.ready.firsts(self.places)
        return {
            q: QueueInfo(p.done, firsts.get(q), p.pull_at - 1 if q in firsts else None, p.waiting, p.bytes)
            for q, p in self.places.items()
        }

    def finish(self, again: bool = False) -> None:
        """Count all returned messages as finished. ``again``: also repeat offsets that are committed already."""
        for place in self.places.values():
            place.done = place.taken
            if again:
                place.committed = None

    def to_commit(self) -> dict[MessageQueue, int]:
        """The offsets of finished messages that are not committed yet."""
        return {q: place.done for q, place in self.places.items() if place.done != place.committed}

    def committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Note that brokers have stored these offsets."""
        for queue, offset in offsets.items():
            if queue in self.places:
                self.places[queue].committed = offset
