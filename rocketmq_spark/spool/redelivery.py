"""Hands due records to their handlers, and settles the results.

This module is a driver: it has a thread of a ``Timer``, and gets the clock as an argument. It keeps only the records in flight in
memory, reads a page at a time, and holds no snapshot. Due times refer to the clock, which users may set. Pauses are measured by
the timer's clock, which never goes back. While attempts for a target fail, only one record of the target is in flight at a time.
So an outage uses up few attempts, and the next attempt shows that the broker is back. Each success doubles the number of the
target's records that may be in flight. Records for other targets do not wait for the failing target (see ``turns``).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import ClosedError, RocketMQError
from rocketmq_spark.model import Resent
from rocketmq_spark.spool.lanes import BatchPolicy, LeasedRecord, Schedule, UnreachableTargets
from rocketmq_spark.spool.records import TARGET_RULES_NOTE, Dead, Done, Record, Replaced, RetryLater, Verdict
from rocketmq_spark.spool.store import Store
from rocketmq_spark.spool.turns import InFlightRecord, TargetStates

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES = 64, 64 << 20
PAGE_SIZE, COMPARE_PAGE_SIZE = 1000, 100
# How long a turn waits after a result, so that one write can settle further results.
GATHER_S = 0.005
# While only few slots are free, records are handed out at most once in this interval, so that one write can settle many
# records.
CROWDED_PAUSE_MS = 50
# The pause after a failure of the store, such as a full disk.
FAILURE_PAUSE_S = 1.0


# A function that sends a record, or several records of a lane together. If the stored target of the first record is not the
# target of its send, the function sends nothing, and returns the target of the send.
Handler = Callable[[Sequence[Record], Callable[[Resent], None]], str | None]


class DeadLetters(NamedTuple):
    """How dead letters are created and read. Dead letters are records with a kind of their own.

    Args:
        kind: The kind of dead letters.
        create: Returns the dead letter of a record that is given up; None if the record gets no dead letter. If the record is
            already a message for the topic of dead letters, ``create`` returns the record itself, which then waits for this
            topic.
        open: Returns the record and the reason that are in a dead letter.
        describe: Returns a description of the message in a record or dead letter, for the log.
    """

    kind: str
    create: Callable[[Record, Resent], Record | None]
    open: Callable[[Record], tuple[Record, str]]
    describe: Callable[[Record], str]


class TargetRules(NamedTuple):
    """``target_of`` returns the target of a record by the current rules; ``fingerprint`` identifies these rules."""

    target_of: Callable[[Record], str]
    fingerprint: bytes


class RecordResult(NamedTuple):
    """The result of a record that was in flight since ``in_flight_since_ms``. With a ``target``, the record was not sent, because
    its stored target differs from ``target``, the target of its send.
    """

    leased: LeasedRecord
    in_flight_since_ms: int
    resent: Resent
    target: str | None = None


class Redelivery:
    """Hands the due records of a store to the handlers of their kinds. A record is handed out with the records that are sent
    together with it. At most ``max_in_flight`` records and about ``MAX_IN_FLIGHT_BYTES`` are in flight at once.

    Handlers are called on this object's thread. A handler reports its result once, on any thread. If a handler raises an
    exception, the record has failed. A record without a handler becomes a dead letter. If a broker permanently rejects several
    records that were sent together, they are sent one by one, because one of them may be the cause.

    With ``dead_letters``, a record that is given up is replaced by its dead letter: a record for the topic of dead letters, which
    is sent like all other records. If a broker permanently rejects the dead letter, the original record stays as a dead record.
    After a temporary failure, a dead letter is not given up, but sent again after the schedule's last pause.

    A record is sent only if its stored target is the target of its send. After an update or with other options, the two targets
    may differ. In this case, the record is first stored again with the target of its send. With ``target_rules``, records do not
    wait for the wrong target: if the rules have changed since the store was last used, each turn compares the targets of a page
    of records with the new rules.
    """

    def __init__(
        self,
        store: Store,
        handlers: Mapping[str, Handler],
        clock: Callable[[], int],
        timer: Timer,
        schedule: Schedule | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        dead_letters: DeadLetters | None = None,
        target_rules: TargetRules | None = None,
    ) -> None:
        self.delivered_count = 0
        self.trouble: str | None = None  # the current error of the store
        self.needs_answers = False  # if false, calls of ``on_answer`` have no effect
        self._store = store
        self._handlers = handlers
        self._dead_letters = dead_letters
        self._clock = clock
        self._timer = timer
        self._schedule = schedule or Schedule()
        self.batch_policy = BatchPolicy()
        self._unreachable_targets = UnreachableTargets()
        self._target_rules = target_rules
        # The key at which the comparison of targets continues; None if all records have been compared.
        self._next_key_to_compare = (
            None if target_rules is None or store.has_targets_of(target_rules.fingerprint) else b""
        )
        # The targets whose records must become due, each with the key at which the next page begins (None: at the target's first
        # record).
        self._next_keys_to_make_due: dict[str, bytes | None] = {}
        self._in_flight: dict[int, LeasedRecord] = {}
        self._results: dict[int, RecordResult] = {}  # by sequence
        self._max_in_flight = max_in_flight
        self._target_states = TargetStates(max_in_flight)
        # With a large ``max_in_flight``, many results arrive at about the same time, and one write should settle all these
        # results.
        self._min_free_slots, self._gather_s = (
            (1, 0.0) if max_in_flight <= MAX_IN_FLIGHT else (max_in_flight // 8, GATHER_S)
        )
        self._last_hand_out_ms = 0  # the time of the last turn that handed out records
        self._next_turn_ms: int | None = None
        self._turn_is_scheduled = self._turn_is_running = False
        self._is_closed = self._is_paused = False
        self._lock = threading.RLock()  # Ctrl-C cannot leave the lock held
        self._changed = threading.Condition(self._lock)
        self._settle_lock = threading.Lock()  # ``close`` may settle while a turn settles

    def wake(self, delay_s: float = 0.0) -> None:
        """Schedule a turn. To be called after the start, and after records were added."""
        with self._lock:
            if not self._turn_is_scheduled and not self._is_closed:
                self._timer.call_later(delay_s, self._turn)
                # The flag is set only after the call of ``call_later``: if this call raises or is interrupted, no turn is
                # scheduled.
                self._turn_is_scheduled = True

    def set_paused(self, paused: bool) -> None:
        """Stop handing out records; with ``paused`` false, continue."""
        with self._lock:
            is_resumed, self._is_paused = self._is_paused and not paused, paused
        if is_resumed:
            self.wake()

    def retry_earlier_records(self) -> None:
        """Send the records of an earlier process. When a target answers, the records that may wait for this target become due."""
        with self._lock:
            self._unreachable_targets.assume_all_failed(self._timer.now_ms())
            self.needs_answers = True
        self.wake()

    def on_send_failed(self, target: str) -> None:
        """Record that a send to ``target`` failed and was added to the store."""
        with self._lock:
            self._unreachable_targets.record_failure(target, self._timer.now_ms())
            self._target_states.record_other_failure(target)
            self.needs_answers = True

    def on_answer(self, targets: Collection[str]) -> None:
        """Record that ``targets`` answer. The records that wait for these targets become due."""
        with self._lock:
            now_ms, previous_retry_ms = self._timer.now_ms(), self._unreachable_targets.next_early_retry_ms()
            self._target_states.record_answers(targets, now_ms)
            due_targets = self._unreachable_targets.record_answers(targets, now_ms)
            self._mark_targets_due(due_targets)
            is_rescheduled = self._unreachable_targets.next_early_retry_ms() != previous_retry_ms
        if due_targets or is_rescheduled:
            self.wake()

    def drain(self, deadline: Deadline) -> bool:
        """Wait until nothing is due and nothing is in flight. Returns False if ``deadline`` expires before."""
        self.wake()
        with self._lock:
            while self._is_busy():
                if deadline.expired:
                    return False
                self._timer.wait_notified(self._changed, deadline.remaining())
            return True

    def close(self, deadline: Deadline) -> None:
        """Stop handing out records, and wait for the records in flight. Records without a result are due in the next process."""
        with self._lock:
            self._is_closed = True
            while len(self._in_flight) > len(self._results) and not deadline.expired:
                self._timer.wait_notified(self._changed, deadline.remaining())
        self._timer.close()
        self._settle()

    def _is_busy(self) -> bool:
        if self._turn_is_scheduled or self._turn_is_running or self._next_keys_to_make_due or self._in_flight:
            return True
        due_ms = self._store.next_due_ms()
        return due_ms is not None and due_ms <= self._clock()

    def _turn(self) -> None:
        with self._lock:
            # ``_is_busy`` needs this flag, because the records that the running turn has taken may not be in ``_in_flight`` yet.
            self._turn_is_scheduled, self._turn_is_running = False, True
        try:
            pause_s = self._run_turn()
        finally:
            with self._lock:
                self._turn_is_running = False
                self._changed.notify_all()
        if pause_s is not None:
            self._schedule_turn(pause_s)

    def _run_turn(self) -> float | None:
        """Returns the seconds until the next turn, or None if an event will start the next turn."""
        try:
            self._settle()
            self._make_records_due()
            self._compare_targets()
            pause_s = self._hand_out()
            self.trouble = None
            return pause_s
        except ClosedError:
            return None
        except RocketMQError as e:
            logger.error("the spool in %s failed, retrying in %g s: %s", self._store.path, FAILURE_PAUSE_S, e)
            self.trouble = str(e)
            return FAILURE_PAUSE_S
        except Exception as e:  # even a bug must not end redelivery
            logger.exception("the spool in %s failed, retrying in %g s", self._store.path, FAILURE_PAUSE_S)
            self.trouble = f"{type(e).__name__}: {e}"
            return FAILURE_PAUSE_S

    def _schedule_turn(self, pause_s: float) -> None:
        """Schedule a turn in ``pause_s`` seconds, unless an earlier turn is scheduled. A later turn that is already scheduled
        still takes place.
        """
        turn_ms = self._timer.now_ms() + round(1000 * pause_s)
        with self._lock:
            if self._is_closed or (self._next_turn_ms is not None and self._next_turn_ms <= turn_ms):
                return
            self._next_turn_ms = turn_ms

        def run() -> None:
            with self._lock:
                if self._next_turn_ms == turn_ms:
                    self._next_turn_ms = None
            self._turn()

        self._timer.call_later(pause_s, run)

    def _hand_out(self) -> float | None:
        """Returns the seconds until more records are due, or None if an event will start the next turn."""
        now_ms, timer_now_ms = self._clock(), self._timer.now_ms()
        with self._lock:
            if self._is_paused:
                return 0.0 if self._next_key_to_compare is not None else None
            in_flight = [InFlightRecord(leased.record.target, leased.size) for leased in self._in_flight.values()]
            admission = self._target_states.admission(in_flight, timer_now_ms, MAX_IN_FLIGHT_BYTES)
            crowded_pause_left_ms = 0
            if admission.free_slots < self._min_free_slots and len(self._in_flight) > len(self._results):
                crowded_pause_left_ms = self._last_hand_out_ms + CROWDED_PAUSE_MS - timer_now_ms
            if self._is_closed or admission.free_slots <= 0:  # the next result will start a turn
                return 0.0 if self._next_keys_to_make_due or self._next_key_to_compare is not None else None
        if crowded_pause_left_ms <= 0:
            self._last_hand_out_ms = timer_now_ms
            admission.choose_failing_targets(lambda targets: self._store.due_targets(targets, now_ms))
            # While attempts for a target fail, its records are sent alone.
            for leased in self._store.take(
                now_ms,
                admission.free_slots,
                admission.free_bytes,
                admission.limited_predicate(self.batch_policy.limited_predicate),
                admission,
            ):
                self._call_handler(leased)
        with self._lock:
            if self._next_keys_to_make_due or self._next_key_to_compare is not None or admission.should_choose_again:
                return 0.0
            if admission.free_slots <= 0:
                return None
            if crowded_pause_left_ms > 0:
                return crowded_pause_left_ms / 1000
        # A refused target needs no timer: its next result starts a turn.
        first_due_ms, wake_times_ms = (
            self._store.next_due_ms(admission.refused_targets),
            (admission.next_pause_end_ms, self._unreachable_targets.next_early_retry_ms()),
        )
        pauses_ms = [at_ms - timer_now_ms for at_ms in wake_times_ms if at_ms is not None]
        pauses_ms += [] if first_due_ms is None else [first_due_ms - now_ms]
        return max(0.0, min(pauses_ms) / 1000) if pauses_ms else None

    def _call_handler(self, leased: LeasedRecord) -> None:
        with self._lock:
            self._in_flight[leased.due.sequence] = leased
        handler, on_result = (
            self._handlers.get(leased.record.kind),
            functools.partial(self._on_result, leased, self._timer.now_ms()),
        )
        if handler is None:
            on_result(Resent(None, f"no handler for records of kind {leased.record.kind!r}"))
            return
        try:
            target = handler([leased.record, *(follower.record for follower in leased.followers)], on_result)
        except Exception as e:  # a bug of a handler must not lose the record or stop others
            logger.exception("a record of kind %s failed", leased.record.kind)
            on_result(Resent(None, f"{type(e).__name__}: {e}", is_temporary=True))
            return
        if target is not None:
            on_result(Resent(), target)

    def _on_result(
        self, leased: LeasedRecord, in_flight_since_ms: int, resent: Resent, target: str | None = None
    ) -> None:
        with self._lock:
            sequence = leased.due.sequence
            if self._in_flight.get(sequence) is not leased or sequence in self._results:
                return  # the handler has already reported a result
            self._results[sequence] = RecordResult(leased, in_flight_since_ms, resent, target)
            self._changed.notify_all()
        self.wake(self._gather_s)

    def _settle(self) -> None:
        with self._settle_lock:
            with self._lock:
                results = list(self._results.values())
            if not results:
                return
            now_ms, timer_now_ms = self._clock(), self._timer.now_ms()
            verdicts = [(result, self._verdict(result, now_ms)) for result in results]
            verdicts_to_log = [
                (result.leased, verdict) for result, verdict in verdicts if self._store.awaits_result(result.leased)
            ]
            self._store.settle([(result.leased, verdict) for result, verdict in verdicts], now_ms)
            with self._lock:
                for result in results:
                    del self._results[result.leased.due.sequence], self._in_flight[result.leased.due.sequence]
                uncounted_targets = {leased.record.target for leased in self._in_flight.values()}
                for result in results:
                    self._record_result(result, timer_now_ms, uncounted_targets)
                if not len(self._store):
                    self._unreachable_targets.forget_failures()
                    self._target_states.forget_failures()
                self.needs_answers = bool(self._unreachable_targets)
            for leased, verdict in verdicts_to_log:
                self._log_verdict(leased, verdict)

    def _log_verdict(self, leased: LeasedRecord, verdict: Verdict) -> None:
        if isinstance(verdict, Dead):
            outcome_text = "is given up" if verdict.record is None else "stays there as a dead letter"
        elif isinstance(verdict, Replaced) and verdict.reason is not None:
            outcome_text = "is given up, and becomes a dead letter for another topic"
        else:
            return
        message = "" if self._dead_letters is None else f" ({self._dead_letters.describe(leased.record)})"
        logger.error(
            "record %d of the spool in %s%s %s: %s",
            leased.due.sequence,
            self._store.path,
            message,
            outcome_text,
            verdict.reason,
        )

    def _verdict(self, result: RecordResult, now_ms: int) -> Verdict:
        leased, resent, dead_letters = result.leased, result.resent, self._dead_letters
        if result.target is not None:
            return Replaced(dataclasses.replace(leased.record, target=result.target))
        if resent.error is None:
            return Done()
        if not resent.is_temporary and leased.followers:
            logger.warning(
                "%d messages of a failed batch are sent one by one: %s", 1 + len(leased.followers), resent.error
            )
            return RetryLater(now_ms, resent.error)
        due_ms = self._schedule.due_ms(leased.state.tries + 1, now_ms) if resent.is_temporary else None
        if due_ms is not None:
            return RetryLater(due_ms, resent.error)
        if dead_letters is None:
            return Dead(resent.error)
        last_retry_ms = now_ms + round(1000 * self._schedule.pauses_s[-1])
        if self._is_dead_letter(leased.record):
            if resent.is_temporary:
                return RetryLater(last_retry_ms, resent.error)
            record, reason = dead_letters.open(leased.record)
            return Dead(f"{reason}; its dead letter is not sent: {resent.error}", record=record)
        try:
            dead_letter = dead_letters.create(leased.record, resent)
        except Exception:  # a bug of ``create`` must not stop other records
            logger.exception("record %d has no dead letter", leased.due.sequence)
            dead_letter = None
        if dead_letter is leased.record:
            return RetryLater(last_retry_ms, resent.error)
        return Dead(resent.error) if dead_letter is None else Replaced(dead_letter, resent.error)

    def _is_dead_letter(self, record: Record) -> bool:
        return self._dead_letters is not None and record.kind == self._dead_letters.kind

    def _record_result(self, result: RecordResult, now_ms: int, uncounted_targets: set[str]) -> None:
        """Record a result. If several attempts for a target were in flight together, only the last failure counts.
        ``uncounted_targets`` are the targets whose next failure does not count, because other attempts for the target are in
        flight, or because a failure was counted already. This method adds targets to ``uncounted_targets``. ``now_ms`` is the
        timer's time.
        """
        leased, resent = result.leased, result.resent
        if result.target is not None:
            return
        self.batch_policy.record_result(
            leased.record.lane, 1 + len(leased.followers), resent.error is None, not resent.is_temporary
        )
        if not self._store.holds_lane(leased.record.lane):
            self.batch_policy.forget_lane(leased.record.lane)
        target = leased.record.target
        if resent.error is None:
            if not self._is_dead_letter(leased.record):
                self.delivered_count += 1 + len(leased.followers)
            self._target_states.record_success(target, now_ms)
        elif resent.is_temporary:
            self._target_states.record_failure(target, now_ms, target not in uncounted_targets)
            uncounted_targets.add(target)
            self._unreachable_targets.record_failure(target, now_ms, result.in_flight_since_ms)
        else:
            self._target_states.record_answers([target], now_ms)

    def _mark_targets_due(self, targets: set[str]) -> None:
        """Mark the records of these targets as due now, and end the pauses of the targets."""
        self._next_keys_to_make_due.update(dict.fromkeys(targets))
        self._target_states.end_pauses(targets)

    def _make_records_due(self) -> None:
        with self._lock:
            self._mark_targets_due(self._unreachable_targets.start_early_retries(self._timer.now_ms()))
            targets = list(self._next_keys_to_make_due)
        for target in targets[:PAGE_SIZE]:
            with self._lock:
                start = self._next_keys_to_make_due.pop(target)
            try:
                next_key = self._store.make_due(target, start, PAGE_SIZE, self._clock())
            except BaseException:
                with self._lock:
                    self._next_keys_to_make_due.setdefault(target, start)
                raise
            if next_key is not None:
                with self._lock:
                    # If the target has answered again meanwhile, the next page begins at its first record.
                    self._next_keys_to_make_due.setdefault(target, next_key)
                return  # the other steps of the turn wait for this page

    def _compare_targets(self) -> None:
        """Compare a page of records with the current rules, and correct the targets of these records."""
        if self._next_key_to_compare is None or self._target_rules is None:
            return
        # A dead letter that waits for a topic becomes due at once if the rules now have another topic for it.
        kind = None if self._dead_letters is None else self._dead_letters.kind
        next_key = self._store.retarget(
            self._target_rules.target_of, self._next_key_to_compare, COMPARE_PAGE_SIZE, kind, self._clock()
        )
        if next_key is None:
            self._store.add([], {TARGET_RULES_NOTE: self._target_rules.fingerprint})
        self._next_key_to_compare = next_key
