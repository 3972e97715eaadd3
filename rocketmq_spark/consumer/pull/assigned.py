"""The queues of a ``PullConsumer``: where each is pulled, what waits to be polled, and which offsets may be committed.

Pure: time and answers are arguments, the caller asks brokers. A queue has three offsets: ``pull_at``, where its next pull
begins; ``taken``, behind the last message that a poll gave; ``done``, what the caller has finished. What a poll gave is
finished when the next poll begins, not before: so a message is not lost when no poll follows. What a poll took and did not
come to give (it was interrupted, or a loop over messages was left) comes again first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from rocketmq_spark.consumer.rebalance import Start
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


@dataclass(frozen=True, slots=True)
class Ask:
    """A pull that is to be made now. Its answer comes with ``token``: a seek meanwhile makes it worthless."""

    queue: MessageQueue
    offset: int
    broker_id: int
    token: int


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """The messages of answers in a row, ``stored``, with the filter of their requests.

    ``ends`` has the next offset of each answer, and where its bytes end. ``decode`` makes messages of bytes, from an offset on
    and up to another. Messages before ``begun`` were given already.
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
        """How many offsets it covers: at least as many as it has messages."""
        return self.next_offset - self.first

    @property
    def first(self) -> int:
        """Its first offset that was not given."""
        return max(self.start, self.begun)

    def read(self) -> Iterable[ReceivedMessage]:
        """The messages as objects, which may be made one by one."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        return (m for m in messages if m.queue_offset >= self.begun) if self.begun > self.start else messages

    def given(self) -> int:
        """How many of its messages were given already."""
        messages = self.decode(self.start, self.next_offset, self.stored)
        return sum(1 for _ in takewhile(lambda m: m.queue_offset < self.begun, messages))

    def cut(self) -> tuple[FetchedPart, FetchedPart]:
        """The first answer, and the others."""
        (at, end), *rest = self.ends
        view = memoryview(self.stored)
        others = [(next_offset, behind - end) for next_offset, behind in rest]
        return replace(self, ends=self.ends[:1], stored=view[:end]), replace(
            self, start=at, ends=others, stored=view[end:]
        )


class _Lent(NamedTuple):
    """A part that a poll took, with its queue as it was then: a seek meanwhile makes the part worthless.

    The caller has its messages before ``given_up_to``.
    """

    part: FetchedPart
    place: AssignedQueue
    token: int
    given_up_to: int = 0


@dataclass(slots=True, eq=False)
class AssignedQueue:
    """One queue. ``end`` is where it ended by the last answer of a broker, ``calm_until`` when it may be read ahead again.

    ``committed`` None: the group has no offset of it yet, or may have lost it.
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
    def of(cls, start: Start) -> AssignedQueue:
        return cls(start.offset, start.offset, start.offset, start.offset if start.stored else None)


class Ready:
    """Parts of queues in ``places`` that wait to be polled, in the order in which they came, and what a poll took of them.

    What was taken is not given yet: ``give``, ``give_up_to`` or ``take_back`` follow.
    """

    def __init__(self, places: Mapping[MessageQueue, AssignedQueue]) -> None:
        self._places = places
        self._parts: deque[FetchedPart] = deque()
        self._lent: list[_Lent] = []
        self._counted = True  # what waits of each queue

    def add(self, part: FetchedPart) -> None:
        place = self._places[part.queue]
        place.waiting += part.count
        place.bytes += len(part.stored)
        self._parts.append(part)

    def keep(self, wanted: Callable[[FetchedPart], bool]) -> None:
        """Forget the others."""
        self._counted = False
        self._parts = deque(part for part in self._parts if wanted(part))

    def take(self, most: int = 1) -> list[FetchedPart]:
        """The parts that came first, of queues that are not paused; if it is one only, no more than an answer."""
        taken: list[FetchedPart] = []
        left: deque[FetchedPart] = deque()
        parts = iter(self._parts)
        while len(taken) < most and (part := next(parts, None)) is not None:
            place = self._places.get(part.queue)
            if place is None or place.paused:  # None: it was given up, and Ctrl-C came before its parts were forgotten
                left.append(part)
            elif most == 1 and len(part.ends) > 1:
                first, others = part.cut()
                taken.append(first)
                left.append(others)
            else:
                taken.append(part)
        left.extend(parts)
        lent = [_Lent(part, place := self._places[part.queue], place.token) for part in taken]
        self._parts, self._lent = left, lent  # in one step, which Ctrl-C does not part
        for each in lent:
            each.place.waiting -= each.part.count
            each.place.bytes -= len(each.part.stored)
        return taken

    def give(self) -> None:
        """The caller has what was taken last."""
        self._pass([lent for lent in self._lent if self._stands(lent)])
        self._lent = []

    def give_up_to(self, next_offset: int) -> None:
        """The caller has the part that was taken last, alone, up to an offset."""
        self._lent = [lent._replace(given_up_to=next_offset) for lent in self._lent]
        for lent in self._lent:
            if self._stands(lent):
                lent.place.taken = next_offset

    def lends(self, part: FetchedPart) -> bool:
        """Whether ``part``, which was taken alone, may be given: it was not taken back, and its queue not sought or paused."""
        return any(lent.part is part and not lent.place.paused and self._stands(lent) for lent in self._lent)

    def lends_of(self, place: AssignedQueue) -> bool:
        """Whether something of a queue was taken and not given yet."""
        return any(lent.place is place for lent in self._lent)

    def take_back(self) -> None:
        """What was taken last and not given comes again, before all other."""
        if not self._lent and self._counted:
            return  # of many queues thousands of parts wait, and each poll comes here
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
        """The first offset that waits of each of these queues of which something does."""
        found, left = dict[MessageQueue, int](), set(queues)
        for part in takewhile(lambda _: left, self._parts):
            if part.queue in left:
                found[part.queue] = part.first
                left.discard(part.queue)
        return found

    def _pass(self, lents: Sequence[_Lent]) -> None:
        """What was passed over behind these is done with them, up to what waits; before them, too, if a topic was made again."""
        firsts = self.firsts(lent.part.queue for lent in lents)
        for lent in lents:
            lent.place.taken = firsts.get(lent.part.queue, lent.place.pull_at)

    def _stands(self, lent: _Lent) -> bool:
        return self._places.get(lent.part.queue) is lent.place and lent.place.token == lent.token


class Assigned:
    """All of them. A pull is made while fewer than ``max_waiting`` offsets and ``max_bytes`` of a queue wait to be polled.

    ``places`` is to be looked at only. ``away`` is for resets of queues that were given up.
    """

    def __init__(self, max_waiting: int, max_bytes: int = 100 << 20) -> None:
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self.places: dict[MessageQueue, AssignedQueue] = {}
        self.ready = Ready(self.places)
        self._tokens = 0
        self.away: Callable[[MessageQueue, int], None] = lambda queue, offset: None  # must not block

    # --- which queues

    def assign(self, starts: Mapping[MessageQueue, Start | None], left: Left | None = None) -> Left:
        """Have these queues and no others; new ones begin at their start, None is for those that are there already.

        Gives the offsets of the dropped ones that may still be committed. They are in ``left`` before that, for Ctrl-C.
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
        """Neither pull nor give messages of these queues, or do again. What was pulled is kept."""
        for queue in queues:
            self.places[queue].paused = paused

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at ``offset``; what was pulled or is under way is forgotten. It is what is committed next."""
        place = self.places[queue]
        place.pull_at = place.taken = place.done = offset
        place.committed = None  # also where it is what was committed last: a later one may be stored without an answer
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
        """The pulls to be made now, one at most for each queue ``besides`` some; added to ``asks`` if that is given.

        From here on they are under way: each is answered, or failed, or ``not_made``. It is in the list before that, for Ctrl-C.
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
        """These pulls were not made, or perhaps not: they are due again. Should both be answered, the first answer counts."""
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False

    def next_retry(self, now: float) -> float | None:
        """When a queue that failed is to be asked again; None when none waits for that."""
        times = [place.retry_at for place in self.places.values() if not place.asked and place.retry_at > now]
        return min(times, default=None)

    def answered(self, ask: Ask, answer: PullAnswer, wanted: Filter = NO_FILTER) -> bool:
        """Take an answer; False if it is obsolete."""
        place = self._current(ask)
        if answer.reset:
            self.reset(ask, answer.next_offset)
            return ask.queue in self.places
        if place is None or ask.offset != place.pull_at:
            return False
        if place.retry_at:  # a broker that was away may have lost the last commit
            place.retry_at, place.committed = 0.0, None
        place.asked, place.broker_id = False, answer.broker_id
        place.pull_at, place.end = answer.next_offset, answer.max_offset
        if answer.status is PullStatus.FOUND:
            ends = ((answer.next_offset, len(answer.stored)),)
            self.ready.add(FetchedPart(ask.queue, ask.offset, ends, answer.stored, lambda *_: answer.read(), wanted))
        elif not place.waiting and not self.ready.lends_of(place):
            place.taken = answer.next_offset  # nothing of what was passed over is wanted, or there at all
        return True

    def failed(self, ask: Ask, retry_at: float) -> bool:
        """The pull failed and is made again at ``retry_at``; False if it is obsolete."""
        if (place := self._current(ask)) is None:
            return False
        place.asked, place.broker_id, place.retry_at = False, MASTER_ID, retry_at
        return True

    def hold(self, asks: Iterable[Ask]) -> None:
        """These queues are read ahead from now on: no pulls of them are due."""
        for ask in asks:
            self.places[ask.queue].asked = True

    def bring(self, ask: Ask, part: FetchedPart) -> bool:
        """Take what was read ahead of a queue; False if it is obsolete."""
        place = self._current(ask)
        if place is None:
            return False
        place.pull_at = part.next_offset
        self.ready.add(part)
        return True

    def brought(self, ask: Ask, part: FetchedPart) -> None:
        """It waits to be polled."""

    def reset(self, ask: Ask, offset: int) -> None:
        """An operator moved the group: as ``seek``, also from an obsolete answer: no other pull gets it."""
        if ask.queue in self.places:
            self.seek(ask.queue, offset)
        else:
            self.away(ask.queue, offset)

    def let_go(self, asks: Iterable[Ask], calm_until: float) -> None:
        """These queues are read ahead no more, nor again before ``calm_until``: pulls of them are due."""
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False
                place.calm_until = calm_until

    def _current(self, ask: Ask) -> AssignedQueue | None:
        place = self.places.get(ask.queue)
        return place if place is not None and place.token == ask.token else None

    # --- offsets

    def infos(self) -> dict[MessageQueue, QueueInfo]:
        """As heartbeats report them."""
        firsts = self.ready.firsts(self.places)
        return {
            q: QueueInfo(p.done, firsts.get(q), p.pull_at - 1 if q in firsts else None, p.waiting, p.bytes)
            for q, p in self.places.items()
        }

    def finish(self, again: bool = False) -> None:
        """All that polls gave is finished: the next one begins, or the caller says so. ``again``: what is committed is to be
        committed once more.
        """
        for place in self.places.values():
            place.done = place.taken
            if again:
                place.committed = None

    def to_commit(self) -> dict[MessageQueue, int]:
        """Offsets of what is finished, where they are not committed yet."""
        return {q: place.done for q, place in self.places.items() if place.done != place.committed}

    def committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """These are stored now."""
        for queue, offset in offsets.items():
            if queue in self.places:
                self.places[queue].committed = offset
