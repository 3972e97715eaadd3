"""Decides for which targets records may be handed out now, so that unavailable targets do not block others. Pure.

After a success, a target *answers* for a minute, but at most until its next failure. A target that failed and does not answer
is *failing*, and any other target is *new*. Records in flight occupy *slots*. A new or failing target has one record in flight
at a time. All new targets together may use a part of the slots, and all failing targets together another part. Therefore some
slots are always left for targets that answer. If there are more failing targets than slots for failing targets, these targets
take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from rocketmq_spark.spool.lanes import BatchPredicate, send_alone
from rocketmq_spark.spool.records import Record

# Pauses between the attempts for a target that fails, in ms. The first pause follows the second consecutive failure, and each
# further pause is twice as long.
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 10, 1000
# The share of all slots that all new targets may use together, and the share that all failing targets may use together.
NEW_TARGETS_SHARE, FAILING_TARGETS_SHARE = 3 / 8, 1 / 2
# How long after a success a target counts as answering. After this time, the target may have become unavailable.
ANSWERING_MS = 60_000
# How many slots an answering target may use, as a multiple of the free slots. If this target stops answering, other targets still
# find free slots.
MAX_SLOTS_PER_FREE_SLOT = 7


class Window(NamedTuple):
    """Limits for a target that failed: how many of its records may be in flight, and until when no record may be handed out.
    ``failures`` counts the consecutive failures since the last success.
    """

    size: int
    failures: int = 0
    pause_until_ms: int = 0

    def after_failure(self, now_ms: int) -> Window:
        """The window after a failed attempt, or after several failed attempts that were in flight together."""
        # The exponent is limited, because a large exponent would make a huge number.
        pause_ms = min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(self.failures - 1, 10)) if self.failures else 0
        return Window(1, self.failures + 1, now_ms + pause_ms)


class InFlightRecord(NamedTuple):
    """The target and the size of a record in flight."""

    target: str
    size: int


class TargetStates:
    """The results of attempts, by target. The ``Redelivery`` that owns this object uses it under its lock."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._answered_ms: dict[str, int] = {}  # the time of the last success by target, the oldest time first
        # The windows of targets that failed. Each success doubles the size of a window. A window that is large enough is removed.
        self._windows: dict[str, Window] = {}

    def record_success(self, target: str, now_ms: int) -> None:
        """Record that an attempt has succeeded."""
        self._record_answer(target, now_ms)
        if (window := self._windows.pop(target, None)) is not None and 2 * window.size < self._slots:
            self._windows[target] = Window(2 * window.size)

    def record_failure(self, target: str, now_ms: int, is_counted: bool) -> None:
        """Record a failed attempt. If several attempts were in flight together, ``is_counted`` is true only for the last
        failure.
        """
        self._answered_ms.pop(target, None)
        window = self._windows.get(target, Window(1))
        self._windows[target] = window.after_failure(now_ms) if is_counted else window._replace(size=1)

    def record_answers(self, targets: Iterable[str], now_ms: int) -> None:
        """Record that targets have answered other requests than attempts. Targets whose last attempts failed are ignored."""
        for target in targets:
            if target not in self._windows:
                self._record_answer(target, now_ms)

    def record_other_failure(self, target: str) -> None:
        """Record a failed request to the target that was not an attempt to send a stored record."""
        self._answered_ms.pop(target, None)

    def end_pauses(self, targets: Collection[str]) -> None:
        """End the pauses of ``targets``, so that attempts are allowed now."""
        for target in targets & self._windows.keys():
            self._windows[target] = Window(self._windows[target].size)

    def forget_failures(self) -> None:
        """Forget all failures. To be called when no record waits."""
        self._windows.clear()

    def admission(self, in_flight: Iterable[InFlightRecord], now_ms: int, max_bytes: int) -> Admission:
        """Return the object that decides, at ``now_ms``, which records may be handed out. ``max_bytes`` limits the total size of
        the records in flight.
        """
        while self._answered_ms and now_ms - next(iter(self._answered_ms.values())) >= ANSWERING_MS:
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
        windows: The limits of the targets that failed.
        answering_targets: The targets that answer.
        slots: The number of records that may be in flight. A large record occupies several slots, so that records with
            ``max_bytes`` bytes in total fill all slots.

    ``refused_targets`` are the targets whose due records must wait. ``next_pause_end_ms`` is the end of the pause that ends
    first.
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
            False: max(1, int(slots * NEW_TARGETS_SHARE)),
            True: max(1, int(slots * FAILING_TARGETS_SHARE)),
        }  # True: slots for failing targets, False: for new targets
        self._in_flight: Counter[str] = Counter()
        self._slots_used: Counter[str] = Counter()  # number of used slots by target
        self._chosen_targets: Collection[str] | None = None
        self.free_slots = slots
        self.refused_targets: set[str] = set()
        self.has_passed_over_target = False
        self.next_pause_end_ms: int | None = None

    @property
    def free_bytes(self) -> int:
        return self.free_slots * self._max_bytes // self._slots

    @property
    def should_choose_again(self) -> bool:
        """Whether targets should be chosen again: a failing target was passed over, and the chosen targets had no record to hand
        out.
        """
        return self.has_passed_over_target and self.free_slots > 0 and self._slots_left[True] > 0

    def choose_failing_targets(self, find_due: Callable[[Collection[str]], Collection[str]]) -> None:
        """If there are more ready failing targets than slots left for failing targets, choose the targets that have waited for
        the longest time. ``find_due`` gets targets, and returns the ones that have due records.
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
        """Return ``predicate`` with a limit: the records of a target are sent alone if its window has the size 1."""

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
        if self._is_answering(target, window):
            return self._slots_used[target] < MAX_SLOTS_PER_FREE_SLOT * self.free_slots
        if window is not None and window.pause_until_ms > self._now_ms:
            self.next_pause_end_ms = min(self.next_pause_end_ms or window.pause_until_ms, window.pause_until_ms)
            return False
        if window is not None and self._chosen_targets is not None and target not in self._chosen_targets:
            self.has_passed_over_target = True
            return False
        return self.free_slots > 0 and self._slots_left[window is not None] > 0

    def _is_below_limit(self, target: str, window: Window | None) -> bool:
        if not self._is_answering(target, window):
            return not self._in_flight[target]
        return window is None or self._in_flight[target] < window.size

    def _is_answering(self, target: str, window: Window | None) -> bool:
        """Whether the target answers. Records without a target have the target ``""``, which counts as answering until one of
        these records fails.
        """
        return target in self._answering_targets or (not target and window is None)

    def add_in_flight(self, target: str, size: int) -> None:
        """Count a record that is in flight, or that is handed out now."""
        slots = max(1, -(-size * self._slots // self._max_bytes))
        self._in_flight[target] += 1
        self._slots_used[target] += slots
        self.free_slots -= slots
        window = self._windows.get(target)
        if not self._is_answering(target, window):
            self._slots_left[window is not None] -= slots
