"""Who of a group consumed what, and what does not fit: pure, lines of members' logs and a list of events in, complaints out.

A duplicate is explained by an event whose harm may still have been felt: the message had been consumed shortly before it or
later (so its offset need not have been stored), and came again before everybody could have got over it. In the same
times, and in no others, a queue may be consumed by two members.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

# Offsets are stored every 5 s, the first time after 10 s, and brokers write them down every 5 s.
UNSTORED_S = 15.0
# A rebalance comes in 20 s at the latest, and asks for up to 3 s.
REBALANCED_S = 25.0
# A broker that was restarted knows nobody; it knows all again after the heartbeat of everybody, which is one in 30 s. As old
# may be a route, so that members share out different queues.
KNOWN_S = 30.0
# Locks of who was killed; nobody gives them back.
LOCKED_S = 60.0


class What(Enum):
    JOIN = "join"
    LEAVE = "leave"
    KILL = "kill"
    BROKER = "broker"


class Event(NamedTuple):
    """Times are seconds since 1970. ``who``: a member, or the broker that was killed at ``begun`` and runs since ``ended``."""

    what: What
    who: str
    begun: float
    ended: float

    def over(self, ordered: bool) -> float:
        """When nothing can come of it any more."""
        if self.what is What.BROKER:
            return self.ended + KNOWN_S + REBALANCED_S
        return self.ended + REBALANCED_S + (LOCKED_S if ordered and self.what is What.KILL else 0)


class Place(NamedTuple):
    broker: str
    queue: int


class Took(NamedTuple):
    """A member's listener got a message; ``times`` is how often it had been sent back."""

    at: float
    member: str
    place: Place
    offset: int
    id: str
    times: int = 0


def read(member: str, group: str, text: str) -> Iterator[Took]:
    """Those of one group among the lines that a member has written; one that is cut off by its death is none."""
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n") and (said := json.loads(line)).get("group") == group:
            place = Place(said["broker"], said["queue"])
            yield Took(said["at"] / 1000, member, place, said["offset"], said["id"], said["times"])


def lost(sent: Iterable[str], took: Iterable[Took]) -> list[str]:
    """Ids that were acknowledged and never consumed."""
    seen = {t.id for t in took}
    return [each for each in sent if each not in seen]


def failed(took: Iterable[Took]) -> list[Took]:
    """Messages that were sent back, though no listener failed."""
    return [t for t in took if t.times]


def repeats(took: Iterable[Took]) -> list[tuple[Took, Took]]:
    """Each time that a message came again, with the time before. What a producer sent twice lies in two places: no repeat."""
    by_place = defaultdict(list)
    for t in sorted(took):
        by_place[t.place, t.offset].append(t)
    return [pair for each in by_place.values() for pair in itertools.pairwise(each)]


def reason(before: Took, again: Took, events: Iterable[Event], ordered: bool) -> str | None:
    """Why it came again; None when nothing explains it."""
    found = {
        _harm(event, before)
        for event in events
        if event.begun - UNSTORED_S <= before.at and event.begun <= again.at <= event.over(ordered)
    }
    return min(found, default=None)


def _harm(event: Event, before: Took) -> str:
    if event.what is What.KILL and event.who == before.member:
        return "after a kill"
    if event.what is What.BROKER and event.who == before.place.broker:
        return "broker restart"
    return "hand-over"


def explained(
    took: Iterable[Took], events: Sequence[Event], ordered: bool
) -> tuple[Counter[str], list[tuple[Took, Took]]]:
    """How many repeats have which reason, and those that have none."""
    counts: Counter[str] = Counter()
    none = []
    for pair in repeats(took):
        why = reason(*pair, events, ordered)
        if why is None:
            none.append(pair)
        else:
            counts[why] += 1
    return counts, none


def calm(events: Iterable[Event], until: float, ordered: bool) -> list[tuple[float, float]]:
    """From when to when no event was felt, from the first event on."""
    spans = []
    quiet_from: float | None = None
    for event in sorted(events, key=lambda event: event.begun):
        if quiet_from is not None and event.begun > quiet_from:
            spans.append((quiet_from, event.begun))
        quiet_from = max(event.over(ordered), quiet_from or 0.0)
    if quiet_from is not None and until > quiet_from:
        spans.append((quiet_from, until))
    return spans


def shared(took: Iterable[Took], spans: Collection[tuple[float, float]]) -> list[tuple[Place, tuple[str, ...]]]:
    """Queues that two or more members consumed within one calm span."""
    found: dict[tuple[Place, float], set[str]] = defaultdict(set)
    for t in took:
        for begin, end in spans:
            if begin <= t.at < end:
                found[t.place, begin].add(t.member)
    return [(place, tuple(sorted(who))) for (place, _), who in found.items() if len(who) > 1]


def within(took: Iterable[Took], spans: Collection[tuple[float, float]]) -> int:
    """How many messages were consumed in calm spans. If none were, nobody could see that two members had a queue."""
    return sum(any(begin <= t.at < end for begin, end in spans) for t in took)


def disordered(took: Iterable[Took]) -> list[tuple[Took, Took]]:
    """Messages that an ordered group saw for the first time behind one that stands after them in their queue.

    Members that go back, and then go on in order, only repeat what was seen: this holds whoever has the queue.
    """
    last: dict[Place, Took] = {}
    seen: set[tuple[Place, int]] = set()
    found = []
    for t in sorted(took):
        if (t.place, t.offset) in seen:
            continue
        seen.add((t.place, t.offset))
        if t.place in last and t.offset < last[t.place].offset:
            found.append((last[t.place], t))
        else:
            last[t.place] = t
    return found
