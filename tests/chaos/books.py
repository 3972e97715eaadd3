"""What was sent, what arrived, what was said to be lost, and what does not fit. Pure: lines and lists in, complaints out."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_PART = re.compile(r"(\S+)/(\S+)/(\d+) (?:offsets (\d+) to (\d+)|from offset (\d+) on) \(([^)]+)\)")
# With these causes everything of the queue from the first offset on may be gone, whatever the range says.
_WHOLE = ("went back", "deleted", "queue gone")


class Place(NamedTuple):
    topic: str
    broker: str
    queue: int


class Sent(NamedTuple):
    """A message that a broker acknowledged: ``number`` counts the messages of its key."""

    place: Place
    offset: int
    key: str
    number: int
    at: float
    generation: int = 0


class Row(NamedTuple):
    """A message as a query wrote it down."""

    place: Place
    offset: int
    key: str
    number: int
    generation: int = 0


class Loss(NamedTuple):
    place: Place
    start: int
    end: int
    cause: str

    @property
    def whole(self) -> bool:
        return any(word in self.cause for word in _WHOLE)

    def covers(self, place: Place, offset: int) -> bool:
        return self.place == place and self.start <= offset and (self.whole or offset < self.end)


def losses(log: str) -> list[Loss]:
    """The parts of all loss reports in a log."""
    lines = (line for line in log.splitlines() if "cannot be read any more" in line)
    found = [match for line in lines for match in _PART.finditer(line)]
    return [Loss(Place(m[1].split()[-1], m[2], int(m[3])), int(m[4] or m[6]), int(m[5] or m[6]), m[7]) for m in found]


def row(line: str) -> Row:
    """``topic|broker|queue|offset|key:number:generation``."""
    topic, broker, queue, offset, name = line.split("|")
    key, number, generation = name.split(":")
    return Row(Place(topic, broker, int(queue)), int(offset), key, int(number), int(generation))


def missing(sent: Iterable[Sent], rows: Iterable[Row], lost: Iterable[Loss]) -> list[Sent]:
    """Acknowledged messages that were not read, and that no report names.

    What is said of a whole queue is of generations that were deleted: of the last one of a topic everything is there.
    """
    sent = list(sent)
    last = {s.place.topic: s.generation for s in sorted(sent, key=lambda s: s.generation)}
    read = {(r.place, r.offset, r.key, r.number, r.generation) for r in rows}
    by_place = defaultdict(list)
    for part in lost:
        by_place[part.place].append(part)
    return [
        s
        for s in sent
        if (s.place, s.offset, s.key, s.number, s.generation) not in read
        and not any(
            part.covers(s.place, s.offset) and not (part.whole and 0 < s.generation == last[s.place.topic])
            for part in by_place[s.place]
        )
    ]


def untrue(lost: Iterable[Loss], kept: Mapping[Place, int]) -> list[Loss]:
    """Reports that name more than is gone, of topics that are never deleted: all of a queue, or what its broker has in the end,
    from the offset in ``kept`` on.
    """
    return [part for part in lost if part.whole or part.end > kept.get(part.place, 0)]


def twice(rows: Iterable[Row]) -> list[Row]:
    """Messages that stand in the files more than once."""
    return [r for r, times in Counter(rows).items() if times > 1]


def disordered(rows: Iterable[Row], origin: Callable[[Row], Place | None] = lambda row: None) -> list[tuple[Row, Row]]:
    """Neighbours of one queue and key whose first appearances are not in the order in which they were sent.

    Repeats are left out: a producer and a sink may send again what they had sent. ``origin`` is the queue that a copy
    was made from: a key's queue changes with the route, and of two queues the one whose broker is up is read first.
    """
    by_queue: dict[tuple[Place, str, int, Place | None], list[Row]] = defaultdict(list)
    for r in sorted(set(rows), key=lambda r: r.offset):
        by_queue[r.place, r.key, r.generation, origin(r)].append(r)
    found = []
    for of_key in by_queue.values():
        seen: set[int] = set()
        firsts = [r for r in of_key if not (r.number in seen or seen.add(r.number))]  # type: ignore[func-returns-value]
        found += [(a, b) for a, b in itertools.pairwise(firsts) if b.number < a.number]
    return found


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch read saw of a topic: per queue first and last offset and how many different ones, of how many rows."""

    begun: float
    seen: Mapping[Place, tuple[int, int, int, int]]
    away: frozenset[Place] = field(default_factory=frozenset)

    def complaints(self, sent: Iterable[Sent], window_s: float, kept: Mapping[Place, int]) -> list[str]:
        """``sent``: acknowledged messages of the topic. Every one of the last ``window_s`` before the read must be within,
        unless its queue could not be read or it lies below ``kept``, which retention may have deleted.
        """
        found = []
        for place, (first, last, different, count) in self.seen.items():
            if different != count:
                found.append(f"{place}: {count - different} rows twice")
            if last - first + 1 != different and first >= kept.get(place, 0):
                found.append(f"{place}: {different} of {first} to {last}")
        for s in sent:
            if not self.begun - window_s < s.at < self.begun or s.place in self.away:
                continue
            first, last, _, _ = self.seen.get(s.place, (0, -1, 0, 0))
            if not first <= s.offset <= last and s.offset >= kept.get(s.place, 0):
                found.append(
                    f"{s.place}: {s.offset}, acknowledged {self.begun - s.at:.1f} s before, is not in {first}-{last}"
                )
        return found
