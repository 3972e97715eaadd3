"""How far a node is with a queue of envelopes, and what another one may leave out that takes the queue over. Pure.

A group's offset alone says too little: it stays at the oldest envelope whose original was not sent, and behind that one lie
many whose originals were. So three numbers are kept at the broker, as offsets of three groups.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, ReceivedMessage

_SEEN = struct.Struct(">6Q")
_EARLIER = struct.Struct(">5Q")  # of releases that did not write the last number


class Progress(NamedTuple):
    """All envelopes before offset ``oldest`` are done; of those before ``stored`` also all that were due by ``done_ms``."""

    oldest: int
    stored: int
    done_ms: int

    def done(self, offset: int, due_ms: int) -> bool:
        """Whether the original of an envelope was sent for sure."""
        return offset < self.oldest or (offset < self.stored and due_ms <= self.done_ms)

    def then(self, later: Progress) -> Progress:
        """What is true after both. Envelopes that come late put ``done_ms`` back: then what was said before says more, unless
        all that it spoke of is done. A moment that a clock told which was ahead would be kept for as long as it was.
        """
        oldest = max(self.oldest, later.oldest)
        newer = later.stored >= self.stored and (later.done_ms >= self.done_ms or oldest >= self.stored)
        stored, done_ms = (later if newer else self)[1:]
        return Progress(oldest, stored, done_ms)


class Seen(NamedTuple):
    """What a node wrote down of a queue: all from ``begin`` to before ``stored`` is in its store, or done; and what it told.

    ``newest_ms`` is the latest store time of what it read: what a broker stored later than that lies at ``stored`` or behind.
    0 where nothing was read.
    """

    begin: int
    stored: int
    told: Progress
    newest_ms: int = 0

    def encode(self) -> bytes:
        return _SEEN.pack(self.begin, self.stored, *self.told, self.newest_ms)

    def is_other(self, message: ReceivedMessage) -> bool:
        """Whether it lies where another one was read: the topic was made again."""
        return message.queue_offset < self.stored and 0 < self.newest_ms < message.store_timestamp

    def cut(self, at: int) -> Seen:
        """What still holds when a broker's messages from ``at`` on are others than those that were read."""
        begin, oldest = min(self.begin, at), min(self.told.oldest, at)
        return Seen(begin, at, Progress(oldest, at, self.told.done_ms), self.newest_ms)

    @classmethod
    def decode(cls, data: bytes | None) -> Seen | None:
        """None where nothing is written, or what only another release reads: then the queue is read again."""
        if not data or len(data) not in (_EARLIER.size, _SEEN.size):
            return None
        layout = _EARLIER if len(data) == _EARLIER.size else _SEEN
        begin, stored, oldest, told, done_ms, *newest_ms = layout.unpack(data)
        return cls(begin, stored, Progress(oldest, told, done_ms), *newest_ms)


def note_of(queue: MessageQueue) -> bytes:
    """The name of the note that a ``Seen`` of the queue is."""
    return str(queue).encode()


def noted(notes: Mapping[bytes, bytes]) -> dict[MessageQueue, Seen]:
    """What is written down of queues."""
    found = {}
    for name, value in notes.items():
        if (seen := Seen.decode(value)) is not None:
            topic, _, rest = name.decode().partition("/")
            broker_name, _, number = rest.rpartition("/")  # a broker's name may have one, too
            found[MessageQueue(topic, broker_name, int(number))] = seen
    return found


def resumed(seen: Seen | None, told: Progress | None, first: int) -> Seen:
    """Where a node begins with a queue that it gets: where it was, if it has all since the oldest that is not done; else there.

    ``told`` is what the last node of the queue said, ``first`` the first offset that the broker keeps.
    """
    if told is None:
        return seen or Seen(first, first, Progress(first, first, 0))
    if seen is not None and seen.begin <= told.oldest <= seen.stored:
        return seen._replace(told=told)
    return Seen(told.oldest, told.oldest, told)
