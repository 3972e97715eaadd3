"""Decides for which targets records may be handed out now, so that unavailable targets do not block others. Pure.

A target *answers* for a minute after a success, until its next failure. A target that failed and does not answer is
*failing*, and any other target is *new*. Records in flight occupy *slots*. A new or failing target has one record in flight at a
time. All new targets together may use a part of the slots, and all failing targets together another part. So a target that
answers finds free slots. If there are more failing targets than slots for failing targets, these targets take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from rocketmq_spark.spool.lanes import BatchPredicate, send_alone
from rocketmq_spark.spool.records import Record

# Pauses between the attempts for a target that fails, in ms. The first pause follows the second consecutive failure, and each
# further pause is twice as long.
PAUSE_MS, LONGEST_PAUSE_MS = 10, 1000
# The share of all slots that new targets may use together, and the share that failing targets may use together.
NEW_SHARE, FAILING_SHARE = 3 / 8, 1 / 2
# How long a target counts as answering after a success. Later, it may have become unavailable.
ANSWERS_MS = 60_000
# The slots that a target that answers may use, as a multiple of the free slots. So other targets find free slots if this target
# stops answering.
MAX_PER_FREE_SLOT = 7


class Window(NamedTuple):
    """Limits for a target that failed: how many of its records may be in flight, and until when no record may be handed out.
    ``failures`` counts the consecutive failures since the last success.
    """

    size: int
    failures: int = 0
    pause_until_ms: int = 0

    def after_failure(self, now_ms: int) -> Window:
        """The window after a failed attempt, or after several failed attempts that were in flight together."""
        # Without the limit, a large exponent would make a huge number.
        pause_ms = min(LONGEST_PAUSE_MS, PAUSE_MS << min(self.failures - 1, 10)) if self.failures else 0
        return Window(1, self.failures + 1, now_ms + pause_ms)


class InFlightRecord(NamedTuple):
    """The target and size of a record in flight."""

    target: str
    size: int


class TargetStates:
    """The results of attempts by target. Used under the lock of its ``Redelivery``."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._answered_ms: dict[str, int] = {}  # by target: its last success, the oldest first
        # Of targets that failed. Each success doubles a window, and removes it when it is large enough.
        self._windows: dict[str, Window] = {}

    def record_success(self, target: str, now_ms: int) -> None:
        """Note an attempt that succeeded."""
        self._record_answer(target, now_ms)
        if (window := self._windows.pop(target, None)) is not None and 2 * window.size < self._slots:
            self._windows[target] = Window(2 * window.size)

    def record_failure(self, target: str, now_ms: int, is_counted: bool) -> None:
        """Note a failed attempt. Of attempts that were in flight together, only the last attempt ``is_counted``."""
        self._answered_ms.pop(target, None)
        window = self._windows.get(target, Window(1))
        self._windows[target] = window.after_failure(now_ms) if is_counted else window._replace(size=1)

    def record_answers(self, targets: Iterable[str], now_ms: int) -> None:
        """Note that targets have answered other requests. Targets with a failed attempt are ignored."""
        for target in targets:
            if target not in self._windows:
                self._record_answer(target, now_ms)

    def record_other_failure(self, target: str) -> None:
        """Note that a request to the target failed that was not an attempt to send a record."""
        self._answered_ms.pop(target, None)

    def end_pauses(self, targets: Collection[str]) -> None:
        """Allow attempts for these targets now."""
        for target in targets & self._windows.keys():
            self._windows[target] = Window(self._windows[target].size)

    def forget_failures(self) -> None:
        """Forget failures, when no record waits any more."""
        self._windows.clear()

    def admission(self, in_flight: Iterable[InFlightRecord], now_ms: int, max_bytes: int) -> Admission:
        """The decisions for this moment. ``max_bytes`` limits all records in flight together."""
        while self._answered_ms and now_ms - next(iter(self._answered_ms.values())) >= ANSWERS_MS:
            del self._answered_ms[next(iter(self._answered_ms))]
        admission = Admission(dict(self._windows), self._answered_ms.keys(), self._slots, now_ms, max_bytes)
        for record in in_flight:
            admission.add_in_flight(*record)
        return admission

    def _record_answer(self, target: str, now_ms: int) -> None:
        self._answered_ms.pop(target, None)
        self._answered_ms[target] = now_ms


class Admission:
    """Decides which records may be handed out now. ``add_in_flight`` counts records in flight, and records that are handed out.

    Args:
        windows: The limits of targets that failed.
        answering_targets: Targets that answer.
        slots: The number of records that may be in flight. A large record occupies several slots: ``max_bytes`` fill all slots.

    ``refused_targets`` are the targets whose due records must wait. ``next_pause_end_ms`` is the end of their first pause.
    """

    def __init__(
        self,
        windows: Mapping[str, Window],
        answering_targets: Collection[str],
        slots: int,
        now_ms: int,
        max_bytes: int = 1 << 62,
    ) -> None:
        self._windows, self._answering_targets = windows, answering_targets
        self._now_ms = now_ms
        self._slots, self._max_bytes = slots, max_bytes
        self._slots_left = {
            False: max(1, int(slots * NEW_SHARE)),
            True: max(1, int(slots * FAILING_SHARE)),
        }  # by whether a target is failing
        self._in_flight: Counter[str] = Counter()
        self._slots_used: Counter[str] = Counter()  # slots by target
        self._chosen_targets: Collection[str] | None = None
        self.free_slots = slots
        self.refused_targets: set[str] = set()
        self.has_passed_over = False
        self.next_pause_end_ms: int | None = None

    @property
    def free_bytes(self) -> int:
        return self.free_slots * self._max_bytes // self._slots

    @property
    def should_repeat(self) -> bool:
        """Whether a failing target was passed over for chosen targets that then had no record to hand out."""
        return self.has_passed_over and self.free_slots > 0 and self._slots_left[True] > 0

    def choose_failing(self, find_due: Callable[[Collection[str]], Collection[str]]) -> None:
        """If more failing targets are ready than slots are left for them, choose the targets that have waited for the longest
        time. ``find_due`` returns those of its targets that have due records.
        """
        ready_targets = [
            target
            for target, window in self._windows.items()
            if target not in self._answering_targets
            and window.pause_until_ms <= self._now_ms
            and self._is_below_limit(target, window)
        ]
        slots = max(0, self._slots_left[True])
        if len(ready_targets) > slots:
            due_targets = find_due(ready_targets) if slots else ()
            self._chosen_targets = sorted(due_targets, key=lambda target: self._windows[target].pause_until_ms)[:slots]

    def limited_predicate(self, predicate: BatchPredicate) -> BatchPredicate:
        """``predicate``, except that records of a target with a window of one are sent alone."""

        def limited_predicate_of(first: Record) -> Callable[[Record], bool]:
            window = self._windows.get(first.target)
            return (predicate if window is None or window.size > 1 else send_alone)(first)

        return limited_predicate_of

    def accepts(self, target: str) -> bool:
        """Whether a record of the target may be handed out."""
        if self._may_hand_out(target, self._windows.get(target)):
            return True
        self.refused_targets.add(target)
        return False

    def _may_hand_out(self, target: str, window: Window | None) -> bool:
        if not self._is_below_limit(target, window):
            return False
        if self._answers(target, window):
            return self._slots_used[target] < MAX_PER_FREE_SLOT * self.free_slots
        if window is not None and window.pause_until_ms > self._now_ms:
            self.next_pause_end_ms = min(self.next_pause_end_ms or window.pause_until_ms, window.pause_until_ms)
            return False
        if window is not None and self._chosen_targets is not None and target not in self._chosen_targets:
            self.has_passed_over = True
            return False
        return self.free_slots > 0 and self._slots_left[window is not None] > 0

    def _is_below_limit(self, target: str, window: Window | None) -> bool:
        if not self._answers(target, window):
            return not self._in_flight[target]
        return window is None or self._in_flight[target] < window.size

    def _answers(self, target: str, window: Window | None) -> bool:
        """Whether the target answers. Records without a target count as answering until they fail."""
        return target in self._answering_targets or (not target and window is None)

    def add_in_flight(self, target: str, size: int) -> None:
        """Count a record that is in flight, or is handed out."""
        slots = max(1, -(-size * self._slots // self._max_bytes))
        self._in_flight[target] += 1
        self._slots_used[target] += slots
        self.free_slots -= slots
        window = self._windows.get(target)
        if not self._answers(target, window):
            self._slots_left[window is not None] -= slots
