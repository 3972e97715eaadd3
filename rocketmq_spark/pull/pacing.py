"""How many messages a pull requests, and how many pulls are in flight.

``PullPacing`` learns from answers how much to request. A short answer shows the most that the broker gives; now and then one
pull requests twice as many messages, in case an operator raised the limits or cold data became warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocketmq_spark.options import Options
from rocketmq_spark.pull.pending import PendingOffsets
from rocketmq_spark.remoting.bulk import PullTemplate

_MAX_OPAQUE = 0x7FFFFFFF


class PullRequests:
    """Frames from the templates of the ranges, in their order."""

    def __init__(self, templates: Sequence[PullTemplate]) -> None:
        self._templates = templates
        self._opaque = self._signed_from = 0
        self.sent = 0

    def take(self, missing: PendingOffsets, pacing: PullPacing, pulls: int, count: int) -> list[bytes]:
        """``pulls`` requests of ``count`` for the lowest missing offsets, which are under way from now on."""
        if self._opaque + pulls > _MAX_OPAQUE:
            self._opaque = 0
        first = self._opaque
        slots = missing.send(first, count, pulls)
        self._opaque += len(slots)
        self.sent += len(slots)
        pacing.asked(max(limit - start for _, start, limit in slots))
        templates = self._templates
        # A filtered pull scans as many offsets as it is asked for; the count never falls short of the slot.
        return [
            templates[number].frame(opaque, start, limit - start)
            for opaque, (number, start, limit) in enumerate(slots, first)
        ]

    def other_keys(self, opaque: int) -> bool:
        """Whether a request that was refused would have other keys by now."""
        if opaque < self._signed_from:
            return True
        changed = [template.renew() for template in self._templates]
        if any(changed):
            self._signed_from = self._opaque
        return any(changed)


FIRST_PULL_MESSAGES = 8


DEFAULT_ANSWER_MESSAGES = 32


DEFAULT_ANSWER_BYTES = 256 << 10


MAX_PULL_BYTES = 1 << 20


MAX_PULL_DEPTH = 256


ADAPTIVE_DEPTH_BYTES = 4 << 20


FILTERED_ANSWER_BYTES = 64 << 10


# How long a broker may contradict what it said when the batch was planned, before that is called loss.
LOSS_GRACE_S = 15.0


_PROBE_AFTER = 64


_INERTIA = 0.9


@dataclass(frozen=True, slots=True)
class PullSettings:
    """``depth`` None adapts the number of pulls to the size of the answers. With ``follows_resets`` an operator's reset of the
    group ends the read (``RangeReader.resets``).
    """

    max_bytes_in_flight: int = 8 << 20
    depth: int | None = None
    batch_size: int = 1024
    read_deadline_s: float = 120.0
    fetched_rows: int = 32_768
    filtered: bool = False
    grace_s: float = LOSS_GRACE_S
    follows_resets: bool = False

    @classmethod
    def of(cls, options: Options) -> PullSettings:
        """Those of a read with these options."""
        return cls(options.max_bytes_in_flight, options.pull_depth, options.pull_batch_size, options.read_deadline)


class PullPacing:
    """Messages to ask for in a pull, and pulls to keep under way."""

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self.count = settings.batch_size if settings.filtered else min(FIRST_PULL_MESSAGES, settings.batch_size)
        self._bytes_per_message = 0.0
        self._answer_bytes = 0.0
        self._full_answers = 0
        self._patience = 1
        self._probing = False
        self._seen = False

    def next_count(self) -> int:
        """Messages to ask for in the next pull, at most."""
        if self._settings.filtered:
            return self.count
        if self._probing or self._full_answers < self._patience:
            return min(self.count, self._max_pull())
        return min(max(self.count, min(self.count * 2, self._settings.batch_size)), self._max_pull())

    def asked(self, count: int) -> None:
        """A pull of ``count`` was sent: fewer than proposed where a range ends."""
        self._probing = self._probing or count > self.count

    def forget(self) -> None:
        """What was asked will not be answered."""
        self._probing = False

    def pulls(self, count: int, asked: int) -> int:
        """How many more pulls of ``count`` the bound of bytes allows while ``asked`` messages are under way, as far as
        their size is known; one when ``count`` is a probe."""
        max_messages = int(self._settings.max_bytes_in_flight / max(1.0, self._bytes_per_message))
        room = max(0, (max_messages - asked) // count)
        return min(1, room) if count > self.count else room

    def passed(self) -> None:
        """The broker looked through what was asked for and nothing matched."""
        self._seen = True
        self._bytes_per_message *= _INERTIA
        self._answer_bytes *= _INERTIA

    def depth(self) -> int:
        if not self._seen:
            return 1
        # The next filtered answer may be full although the last ones were empty.
        full = FILTERED_ANSWER_BYTES if self._settings.filtered else self._bytes_per_message * self.count
        answer = max(1.0, self._answer_bytes, full)
        max_depth = int(self._settings.max_bytes_in_flight / answer)
        if self._settings.depth:
            return max(1, min(self._settings.depth, max_depth))
        return max(1, min(MAX_PULL_DEPTH, max_depth, max(4, int(ADAPTIVE_DEPTH_BYTES / answer))))

    def learn(self, asked: int, offset_count: int, size: int, answers: int = 1) -> None:
        """An answer covered ``offset_count`` of the ``asked`` offsets with ``size`` bytes; of several like it the largest."""
        first = not self._bytes_per_message
        self._seen = True
        self._bytes_per_message = _follow(self._bytes_per_message, size / max(1, offset_count))
        self._answer_bytes = _follow(self._answer_bytes, size)
        if self._settings.filtered:
            return
        if first:
            stock = min(
                DEFAULT_ANSWER_MESSAGES,
                self._settings.batch_size,
                int(DEFAULT_ANSWER_BYTES / max(1.0, self._bytes_per_message)),
            )
            self.count = max(1, offset_count, stock)
            return
        probe = asked > self.count
        if probe:
            self._probing = False
        if offset_count < asked:
            self.count = max(self.count, offset_count) if probe else max(1, offset_count)
            self._full_answers, self._patience = 0, _PROBE_AFTER
        elif probe:
            self.count, self._full_answers, self._patience = asked, 1, 1
        elif asked == self.count:
            self._full_answers += answers

    def _max_pull(self) -> int:
        max_bytes = min(MAX_PULL_BYTES, self._settings.max_bytes_in_flight)
        return max(1, int(max_bytes / max(1.0, self._bytes_per_message)))


def _follow(estimate: float, seen: float) -> float:
    """Upwards at once, for the bound of bytes under way is a promise; downwards slowly."""
    return seen if seen >= estimate else _INERTIA * estimate + (1 - _INERTIA) * seen
