"""How many messages a pull requests, and how many pulls are in flight.

``PullPacing`` learns from answers how many messages to request. A short answer shows how many messages the broker returns at
most. Now and then, a pull requests twice as many messages as usual, in case an operator raised the limits or cold data became
warm.
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
        # The first opaque number of the requests that are signed with the current keys.
        self._first_signed_opaque = 0
        self.sent_count = 0

    def next_frames(
        self, pending: PendingOffsets, pacing: PullPacing, max_pulls: int, max_messages: int
    ) -> list[bytes]:
        """Return at most ``max_pulls`` requests for the lowest pending offsets, of at most ``max_messages`` each, and mark the
        pulls as in flight.
        """
        if self._opaque + max_pulls > _MAX_OPAQUE:
            self._opaque = 0
        first_opaque = self._opaque
        ranges = pending.start_pulls(first_opaque, max_messages, max_pulls)
        self._opaque += len(ranges)
        self.sent_count += len(ranges)
        pacing.on_pull_sent(max(limit - start for _, start, limit in ranges))
        templates = self._templates
        # The number of messages that a filtered pull requests is also the number of offsets that the broker searches. So this
        # number must be the size of the pull's range.
        return [
            templates[range_number].frame(opaque, start, limit - start)
            for opaque, (range_number, start, limit) in enumerate(ranges, first_opaque)
        ]

    def has_newer_keys(self, opaque: int) -> bool:
        """Whether the keys have changed since the request with this number was signed."""
        if opaque < self._first_signed_opaque:
            return True
        renewals = [template.renew() for template in self._templates]
        if any(renewals):
            self._first_signed_opaque = self._opaque
        return any(renewals)


FIRST_PULL_SIZE = 8  # messages
# The limits of an answer in a broker's default configuration.
DEFAULT_ANSWER_MESSAGES, DEFAULT_ANSWER_BYTES = 32, 256 << 10
MAX_PULL_BYTES = 1 << 20  # by the estimated size of messages, a pull requests at most this many bytes
MAX_PULL_DEPTH = 256
# Without option ``pullDepth``, at most this many bytes are in flight, but four pulls are always allowed.
MAX_ADAPTIVE_BYTES_IN_FLIGHT = 4 << 20
# With a filter, the depth allows for answers of this size.
FILTERED_ANSWER_BYTES = 64 << 10
# How long a broker may contradict the bounds that the plan saw, before the difference counts as a loss.
LOSS_GRACE_S = 15.0
# If a probe returned no more messages than other pulls, the next probe waits for this many full answers.
_ANSWERS_BETWEEN_PROBES = 64
# The weight of the previous estimate in the new estimate if a new value is smaller.
_SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Limits of a read. If ``depth`` is None, the number of pulls in flight adapts to the size of the answers. With
    ``follows_resets``, an operator's reset of the group ends the read (``RangeReader.resets``).
    """

    max_bytes_in_flight: int = 8 << 20
    depth: int | None = None
    batch_size: int = 1024
    read_deadline_s: float = 120.0
    offsets_per_fetch: int = 32_768
    has_filter: bool = False
    grace_s: float = LOSS_GRACE_S
    follows_resets: bool = False

    @classmethod
    def of(cls, options: Options) -> PullSettings:
        """Return the settings of a read with these options."""
        return cls(options.max_bytes_in_flight, options.pull_depth, options.pull_batch_size, options.read_deadline)


class PullPacing:
    """Decides how many messages a pull requests, and how many pulls are in flight. A probe is a pull of twice the usual
    size.
    """

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self.pull_size = settings.batch_size if settings.has_filter else min(FIRST_PULL_SIZE, settings.batch_size)
        self._bytes_per_message = 0.0
        self._answer_bytes = 0.0
        self._full_answer_count = 0
        self._answers_before_probe = 1
        self._is_probe_in_flight = False
        self._has_answer = False

    def next_pull_size(self) -> int:
        """Return how many messages the next pull requests at most."""
        if self._settings.has_filter:
            return self.pull_size
        if self._is_probe_in_flight or self._full_answer_count < self._answers_before_probe:
            return min(self.pull_size, self._max_pull_size())
        return min(max(self.pull_size, min(self.pull_size * 2, self._settings.batch_size)), self._max_pull_size())

    def on_pull_sent(self, count: int) -> None:
        """Record that a pull of ``count`` messages was sent. At the end of a range, ``count`` is less than ``next_pull_size``."""
        self._is_probe_in_flight = self._is_probe_in_flight or count > self.pull_size

    def on_pulls_lost(self) -> None:
        """Record that the pulls in flight will not be answered."""
        self._is_probe_in_flight = False

    def allowed_pull_count(self, count: int, offsets_in_flight: int) -> int:
        """Return how many more pulls of ``count`` messages the limit of bytes allows, by the estimated size of messages. If a
        pull of this size is a probe, the result is at most one.
        """
        max_messages = int(self._settings.max_bytes_in_flight / max(1.0, self._bytes_per_message))
        allowed_count = max(0, (max_messages - offsets_in_flight) // count)
        return min(1, allowed_count) if count > self.pull_size else allowed_count

    def on_nothing_matched(self) -> None:
        """Record that the broker searched the requested offsets, and no message matched the filter."""
        self._has_answer = True
        self._bytes_per_message *= _SMOOTHING
        self._answer_bytes *= _SMOOTHING

    def depth(self) -> int:
        """Return how many pulls are in flight at most."""
        if not self._has_answer:
            return 1
        # With a filter, a full answer may follow empty answers, so the depth allows for full answers.
        full_answer_bytes = (
            FILTERED_ANSWER_BYTES if self._settings.has_filter else self._bytes_per_message * self.pull_size
        )
        answer_bytes = max(1.0, self._answer_bytes, full_answer_bytes)
        max_depth = int(self._settings.max_bytes_in_flight / answer_bytes)
        if self._settings.depth:
            return max(1, min(self._settings.depth, max_depth))
        return max(1, min(MAX_PULL_DEPTH, max_depth, max(4, int(MAX_ADAPTIVE_BYTES_IN_FLIGHT / answer_bytes))))

    def on_answers_received(
        self, requested_count: int, covered_count: int, largest_answer_bytes: int, answer_count: int = 1
    ) -> None:
        """Learn from ``answer_count`` answers, each of which covered ``covered_count`` of ``requested_count`` offsets. The
        largest answer has ``largest_answer_bytes`` bytes.
        """
        is_first_answer = not self._bytes_per_message
        self._has_answer = True
        self._bytes_per_message = _smoothed_estimate(
            self._bytes_per_message, largest_answer_bytes / max(1, covered_count)
        )
        self._answer_bytes = _smoothed_estimate(self._answer_bytes, largest_answer_bytes)
        if self._settings.has_filter:
            return
        if is_first_answer:
            default_size = min(
                DEFAULT_ANSWER_MESSAGES,
                self._settings.batch_size,
                int(DEFAULT_ANSWER_BYTES / max(1.0, self._bytes_per_message)),
            )
            self.pull_size = max(1, covered_count, default_size)
            return
        is_probe = requested_count > self.pull_size
        if is_probe:
            self._is_probe_in_flight = False
        if covered_count < requested_count:
            self.pull_size = max(self.pull_size, covered_count) if is_probe else max(1, covered_count)
            self._full_answer_count, self._answers_before_probe = 0, _ANSWERS_BETWEEN_PROBES
        elif is_probe:
            self.pull_size, self._full_answer_count, self._answers_before_probe = requested_count, 1, 1
        elif requested_count == self.pull_size:
            self._full_answer_count += answer_count

    def _max_pull_size(self) -> int:
        max_bytes = min(MAX_PULL_BYTES, self._settings.max_bytes_in_flight)
        return max(1, int(max_bytes / max(1.0, self._bytes_per_message)))


def _smoothed_estimate(estimate: float, value: float) -> float:
    """Follow larger values at once, because the limit of bytes in flight must hold. Follow smaller values slowly."""
    return value if value >= estimate else _SMOOTHING * estimate + (1 - _SMOOTHING) * value
