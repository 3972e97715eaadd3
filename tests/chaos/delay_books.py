"""The accounts of a run of delay nodes: what was sent early, and why messages were sent more than once. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

COMMITTED_MS = (
    4000  # a kill undoes what was sent since the last commit: half a second, a second of the number, and slack
)
MOVED_MS = 30_000  # until members have the queues of one that is no longer there
TAKEN_MS = 2500  # until a node that takes a queue over reads the numbers of the one before
REGAINED_MS = 5000
IN_TURN_MS = 2000  # from the clock's reading, by which a node takes messages, to their sending
CHECKED_MS = 15_000  # until an owner repairs the numbers that a node which stood still has put back


class Sent(NamedTuple):
    """A send: when (ms since 1970), by which node, what its clock said, when it was due, and the body."""

    at_ms: int
    node: str
    now_ms: int
    due_ms: int
    body: str


class Event(NamedTuple):
    """What happened to a node, and when: ``kill``, ``freeze`` (until it woke), ``taken`` (it took a queue over), or ``clock``,
    which was ``ahead_ms`` since.
    """

    kind: str
    node: str
    begin_ms: int
    end_ms: int
    ahead_ms: int = 0


def parsed(node: str, text: str) -> list[Sent]:
    """The lines that a node wrote; the last one may not be whole."""
    lines = (line.split(" ", 3) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [Sent(int(at), node, int(now), int(due), body.rstrip()) for at, now, due, body in lines]


def early(sends: Iterable[Sent], events: Sequence[Event]) -> list[Sent]:
    """Those that were not due by the clock of the node that sent them: neither when it sent them, nor, if the clock was set
    meanwhile, when it took them.
    """
    return [sent for sent in sends if sent.now_ms < sent.due_ms and not _taken_before_clock_was_set(sent, events)]


def _taken_before_clock_was_set(sent: Sent, events: Sequence[Event]) -> bool:
    ahead_ms, own = 0, sorted((e for e in events if e.node == sent.node), key=lambda e: e.begin_ms)
    for event in own:
        if event.kind == "clock":
            frozen_ms = sum(
                max(0, min(e.end_ms, sent.at_ms) - max(e.begin_ms, event.begin_ms)) for e in own if e.kind == "freeze"
            )
            ran_ms = sent.at_ms - event.begin_ms - frozen_ms
            if -IN_TURN_MS <= ran_ms <= IN_TURN_MS and event.begin_ms + ahead_ms >= sent.due_ms:
                return True
            ahead_ms = event.ahead_ms
    return False


def repeats(sends: Iterable[Sent]) -> list[tuple[Sent, Sent]]:
    """Each send of a message and the next one of it."""
    by_body: Mapping[str, list[Sent]] = defaultdict(list)
    for sent in sorted(sends):
        by_body[sent.body].append(sent)
    return [pair for same in by_body.values() for pair in pairwise(same)]


def reason(first: Sent, again: Sent, events: Sequence[Event]) -> str | None:
    """Why a message was sent again, by what ``docs/delay.md`` says of duplicates; None if it does not say that."""
    if not_due_everywhere(first, again, events):
        return "clocks differ"
    for event in events:
        begin, end = event.begin_ms, event.end_ms
        if event.kind == "kill" and event.node == first.node:
            woke = any(e.kind == "freeze" and e.end_ms - 1000 <= begin <= e.end_ms + CHECKED_MS for e in events)
            if begin - COMMITTED_MS <= first.at_ms <= begin or (woke and first.at_ms <= begin <= again.at_ms):
                return "killed"
        if event.kind == "freeze":
            if event.node == first.node and begin - COMMITTED_MS <= first.at_ms <= end + MOVED_MS:
                return "froze"
            if event.node == again.node and end <= again.at_ms <= end + MOVED_MS:
                return "woke"
            if end - COMMITTED_MS - TAKEN_MS <= first.at_ms <= end + REGAINED_MS <= again.at_ms:
                return "moved"  # the node that woke has its queues again, and need not take them over
        if event.kind == "taken" and begin - COMMITTED_MS - TAKEN_MS <= first.at_ms <= begin <= again.at_ms:
            return "moved"
    return None


def not_due_everywhere(first: Sent, again: Sent, events: Sequence[Event]) -> bool:
    """Whether the clock of some node said between both sends that the message is not due yet."""
    clocks: dict[str, tuple[int, int]] = {}  # when it was set, and by how much it is ahead since
    for event in sorted((e for e in events if e.kind == "clock"), key=lambda e: e.begin_ms):
        if event.begin_ms <= first.at_ms:
            clocks[event.node] = first.at_ms, event.ahead_ms
        elif event.begin_ms <= again.at_ms and event.begin_ms + event.ahead_ms < first.due_ms:
            return True
    return any(at_ms + ahead_ms < first.due_ms for at_ms, ahead_ms in [(first.at_ms, 0), *clocks.values()])


def reasons(pairs: Iterable[tuple[Sent, Sent]], events: Sequence[Event]) -> Counter[str | None]:
    return Counter(reason(first, again, events) for first, again in pairs)
