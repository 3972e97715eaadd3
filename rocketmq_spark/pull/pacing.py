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
    """Pull requests as frames, made from the templates of the ranges."""

    def __init__(self, templates: Sequence[PullTemplate]) -> None:
        self._templates = templates
        self._opaque = 0
        # The first opaque number of the requests that are signed with the present keys.
        self._signed_from = 0
        self.sent = 0

    def next_frames(self, pending: PendingOffsets, pacing: PullPacing, pulls: int, count: int) -> list[bytes]:
        """Return at most ``pulls`` requests of at most ``count`` messages for the lowest pending offsets. They are in flight from
        now on.
        """
        if self._opaque + pulls > _MAX_OPAQUE:
            self._opaque = 0
        first = self._opaque
        ranges = pending.start_pulls(first, count, pulls)
        self._opaque += len(ranges)
        self.sent += len(ranges)
        pacing.pull_sent(max(limit - start for _, start, limit in ranges))
        templates = self._templates
        # A filtered pull scans as many offsets as it requests, so the count is never less than the range.
        return [
            templates[number].frame(opaque, start, limit - start)
            for opaque, (number, start, limit) in enumerate(ranges, first)
        ]

    def has_newer_keys(self, opaque: int) -> bool:
        """Whether a request that was refused would be signed with other keys now."""
        if opaque < self._signed_from:
            return True
        changed = [template.renew() for template in self._templates]
        if any(changed):
            self._signed_from = self._opaque
        return any(changed)


FIRST_PULL_MESSAGES = 8
# The limits of an answer in a broker's default configuration.
DEFAULT_ANSWER_MESSAGES, DEFAULT_ANSWER_BYTES = 32, 256 << 10
MAX_PULL_BYTES = 1 << 20
MAX_PULL_DEPTH = 256
# Without option ``pullDepth``, so many bytes are in flight at most, but at least four pulls.
ADAPTIVE_DEPTH_BYTES = 4 << 20
FILTERED_ANSWER_BYTES = 64 << 10
# How long a broker may contradict the bounds that the plan saw, before the difference counts as a loss.
LOSS_GRACE_S = 15.0
# After a probe that brought no more messages, so many full answers come before the next probe.
_ANSWERS_BETWEEN_PROBES = 64
# The weight of the estimate so far if a new value is smaller.
_SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Limits of a read. ``depth`` None adapts the number of pulls in flight to the size of the answers. With ``follows_resets``,
    an operator's reset of the group ends the read (``RangeReader.resets``).
    """

    max_bytes_in_flight: int = 8 << 20
    depth: int | None = None
    batch_size: int = 1024
    read_deadline_s: float = 120.0
    fetched_offsets: int = 32_768
    filtered: bool = False
    grace_s: float = LOSS_GRACE_S
    follows_resets: bool = False

    @classmethod
    def of(cls, options: Options) -> PullSettings:
        """Return the settings of a read with these options."""
        return cls(options.max_bytes_in_flight, options.pull_depth, options.pull_batch_size, options.read_deadline)


class PullPacing:
    """Decides how many messages a pull requests, and how many pulls are in flight. A probe is a pull of twice as many."""

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self.pull_size = settings.batch_size if settings.filtered else min(FIRST_PULL_MESSAGES, settings.batch_size)
        self._bytes_per_message = 0.0
        self._answer_bytes = 0.0
        self._full_answers = 0
        self._answers_before_probe = 1
        self._probe_in_flight = False
        self._has_answer = False

    def next_pull_size(self) -> int:
        """Return how many messages the next pull requests at most."""
        if self._settings.filtered:
            return self.pull_size
        if self._probe_in_flight or self._full_answers < self._answers_before_probe:
            return min(self.pull_size, self._max_pull_size())
        return min(max(self.pull_size, min(self.pull_size * 2, self._settings.batch_size)), self._max_pull_size())

    def pull_sent(self, count: int) -> None:
        """A pull of ``count`` messages was sent: fewer than proposed at the end of a range."""
        self._probe_in_flight = self._probe_in_flight or count > self.pull_size

    def pulls_lost(self) -> None:
        """The pulls in flight will not be answered."""
        self._probe_in_flight = False

    def allowed_pulls(self, count: int, offsets_in_flight: int) -> int:
        """Return how many more pulls of ``count`` messages the limit of bytes allows, by the estimated size of messages; at most
        one if ``count`` is a probe.
        """
        max_messages = int(self._settings.max_bytes_in_flight / max(1.0, self._bytes_per_message))
        room = max(0, (max_messages - offsets_in_flight) // count)
        return min(1, room) if count > self.pull_size else room

    def nothing_matched(self) -> None:
        """The broker searched the requested offsets, and no message matched the filter."""
        self._has_answer = True
        self._bytes_per_message *= _SMOOTHING
        self._answer_bytes *= _SMOOTHING

    def depth(self) -> int:
        """Return how many pulls are in flight at most."""
        if not self._has_answer:
            return 1
        # The next filtered answer may be full although the last ones were empty.
        full_bytes = FILTERED_ANSWER_BYTES if self._settings.filtered else self._bytes_per_message * self.pull_size
        answer_bytes = max(1.0, self._answer_bytes, full_bytes)
        max_depth = int(self._settings.max_bytes_in_flight / answer_bytes)
        if self._settings.depth:
            return max(1, min(self._settings.depth, max_depth))
        return max(1, min(MAX_PULL_DEPTH, max_depth, max(4, int(ADAPTIVE_DEPTH_BYTES / answer_bytes))))

    def answer_received(self, requested: int, covered: int, size: int, count: int = 1) -> None:
        """Learn from ``count`` answers with ``covered`` of the ``requested`` offsets each. The largest has ``size`` bytes."""
        is_first = not self._bytes_per_message
        self._has_answer = True
        self._bytes_per_message = _smoothed(self._bytes_per_message, size / max(1, covered))
        self._answer_bytes = _smoothed(self._answer_bytes, size)
        if self._settings.filtered:
            return
        if is_first:
            default = min(
                DEFAULT_ANSWER_MESSAGES,
                self._settings.batch_size,
                int(DEFAULT_ANSWER_BYTES / max(1.0, self._bytes_per_message)),
            )
            self.pull_size = max(1, covered, default)
            return
        is_probe = requested > self.pull_size
        if is_probe:
            self._probe_in_flight = False
        if covered < requested:
            self.pull_size = max(self.pull_size, covered) if is_probe else max(1, covered)
            self._full_answers, self._answers_before_probe = 0, _ANSWERS_BETWEEN_PROBES
        elif is_probe:
            self.pull_size, self._full_answers, self._answers_before_probe = requested, 1, 1
        elif requested == self.pull_size:
            self._full_answers += count

    def _max_pull_size(self) -> int:
        max_bytes = min(MAX_PULL_BYTES, self._settings.max_bytes_in_flight)
        return max(1, int(max_bytes / max(1.0, self._bytes_per_message)))


def _smoothed(estimate: float, value: float) -> float:
    """Follow larger values at once, because the limit of bytes in flight is a promise, and smaller ones slowly."""
    return value if value >= estimate else _SMOOTHING * estimate + (1 - _SMOOTHING) * value
