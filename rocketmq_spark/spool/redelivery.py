"""Hands due records to their handlers, and settles the results.

This is a driver: it has a thread of a ``Timer``, and gets the clock as an argument. It keeps only the records in memory that it
has handed out, reads a page at a time, and holds no snapshot. Due times are those of the clock, which may be set; pauses are
measured by the timer's clock, which never goes back. While attempts for a target fail, it hands out one record of the
target at a time, so that an outage uses up few attempts and the next attempt shows that the broker is back; each success doubles
that number. Records for other targets do not wait meanwhile: see ``turns``.
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
from rocketmq_spark.spool.lanes import Runs, Schedule, UnreachableTargets, Work
from rocketmq_spark.spool.records import TARGETING, Dead, Done, Record, Replaced, RetryLater, Verdict
from rocketmq_spark.spool.store import Store
from rocketmq_spark.spool.turns import OutRecord, Targets

logger = logging.getLogger(__name__)

MAX_OUT, MAX_OUT_BYTES = 64, 64 << 20
PAGE, COMPARED = 1000, 100
GATHER_S = 0.005
# While fewer slots are free than are worth a turn: the interval of turns.
CROWDED_MS = 50
# After a failure of the store, such as a full disk.
TROUBLE_S = 1.0


# Sends one record, or several records of a lane together. If the send of the first record has another target than the record,
# returns the target of the send, and sends nothing.
Handler = Callable[[Sequence[Record], Callable[[Resent], None]], str | None]


class Letters(NamedTuple):
    """Dead letters as records of a kind of their own.

    Args:
        kind: The kind of dead letters.
        made: Returns the dead letter of a record that is given up after a result; None if the record has no dead letter; the
            record itself if it is sent to the topic of dead letters anyway, and waits for that topic.
        opened: Returns the record that was given up and the reason, from its dead letter.
        named: Returns the name of a record's message, or of a dead letter's message, for the log.
    """

    kind: str
    made: Callable[[Record, Resent], Record | None]
    opened: Callable[[Record], tuple[Record, str]]
    named: Callable[[Record], str]


class Targeting(NamedTuple):
    """``of`` returns the target of a record by the current rules; ``rules`` is the fingerprint of these rules."""

    of: Callable[[Record], str]
    rules: bytes


class RecordResult(NamedTuple):
    """The result of a record that was out since ``since_ms``. With a ``target``, the record was not sent, because its send has
    this target and the record has another one.
    """

    work: Work
    since_ms: int
    resent: Resent
    target: str | None = None


class Redelivery:
    """Hands out the records of a store by their kind, at most ``max_out`` and ``MAX_OUT_BYTES`` (or one record more) at once,
    each with the records that are sent with it.

    Handlers are called on this object's thread, and call back once, on any thread. An exception counts as a failure. A
    record without a handler becomes a dead letter. If a broker permanently rejects several records that were sent together, they
    are sent one by one, because one of them may be the cause.

    With ``letters``, a record that is given up is replaced by its dead letter: a record for the topic of dead letters, which is
    sent as all others are. If a broker permanently rejects the letter, the record stays as a dead one. A letter is not given
    up after temporary failures: it is tried again after the schedule's last pause.

    A record is handed out, and its result counts, only for the target of its send. If the stored target is another one (from an
    earlier release, or from other options), the record is stored again with the target of its send before it is sent. With
    ``targeting``, records need not wait for the wrong target until then: if the rules have changed since the store was last used,
    each turn compares the targets of a page of records, from the first record to the last.
    """

    def __init__(
        self,
        store: Store,
        handlers: Mapping[str, Handler],
        clock: Callable[[], int],
        timer: Timer,
        schedule: Schedule | None = None,
        max_out: int = MAX_OUT,
        letters: Letters | None = None,
        targeting: Targeting | None = None,
    ) -> None:
        self.delivered = 0
        self.trouble: str | None = None  # the store's error, while it lasts
        self.listens = False  # whether calls of ``answered`` can have an effect
        self._store = store
        self._handlers = handlers
        self._letters = letters
        self._clock = clock
        self._timer = timer
        self._schedule = schedule or Schedule()
        self.runs = Runs()
        self._silences = UnreachableTargets()
        self._targeting = targeting
        # The key from which on targets must be compared; None if all have been compared.
        self._compare_from = None if targeting is None or store.has_targets_by(targeting.rules) else b""
        self._called: dict[str, bytes | None] = {}  # targets whose records become due, and from where on
        self._out: dict[int, Work] = {}
        self._ended: dict[int, RecordResult] = {}  # by sequence
        self._max_out = max_out
        self._targets = Targets(max_out)
        # With a large ``max_out``, many records end at about the same time. One write settles all of them.
        self._least, self._gather_s = (1, 0.0) if max_out <= MAX_OUT else (max_out // 8, GATHER_S)
        self._handed_ms = 0  # the last turn that handed records out
        self._alarm_ms: int | None = None
        self._asked = self._turning = False
        self._closed = self._held = False
        self._changing = threading.RLock()  # ``with`` takes the lock itself, so Ctrl-C cannot leave it locked
        self._changed = threading.Condition(self._changing)
        self._settling = threading.Lock()  # ``close`` and a turn that still runs may both settle

    def wake(self, in_s: float = 0.0) -> None:
        """Schedule a turn, after a start or an addition."""
        with self._changing:
            if not self._asked and not self._closed:
                self._timer.call_later(in_s, self._turn)  # first: if it raises or is interrupted, no turn is scheduled
                self._asked = True

    def hold(self, held: bool) -> None:
        """Hand out nothing while ``held``."""
        with self._changing:
            released, self._held = self._held and not held, held
        if released:
            self.wake()

    def begin(self) -> None:
        """Start with the records of an earlier process: any target that answers from now on may be one that they wait for."""
        with self._changing:
            self._silences.assume(self._timer.now_ms())
            self.listens = True
        self.wake()

    def failed(self, target: str) -> None:
        """Note that a record was added because a send to ``target`` failed."""
        with self._changing:
            self._silences.failed(target, self._timer.now_ms())
            self._targets.doubt(target)
            self.listens = True

    def answered(self, targets: Collection[str]) -> None:
        """Note that targets answer: records that wait for them become due."""
        with self._changing:
            now_ms, before_ms = self._timer.now_ms(), self._silences.next_ms()
            self._targets.answered(targets, now_ms)
            called = self._silences.answered(targets, now_ms)
            self._call(called)
            later = self._silences.next_ms() != before_ms
        if called or later:
            self.wake()

    def drain(self, deadline: Deadline) -> bool:
        """Wait until nothing is due and nothing is out; False when ``deadline`` comes first."""
        self.wake()
        with self._changing:
            while self._busy():
                if deadline.expired:
                    return False
                self._timer.wait_notified(self._changed, deadline.remaining())
            return True

    def close(self, deadline: Deadline) -> None:
        """Hand out nothing more, and wait for records that are out. Those without a result then are due for the next process."""
        with self._changing:
            self._closed = True
            while len(self._out) > len(self._ended) and not deadline.expired:
                self._timer.wait_notified(self._changed, deadline.remaining())
        self._timer.close()
        self._settle()

    def _busy(self) -> bool:
        if self._asked or self._turning or self._called or self._out:
            return True
        due_ms = self._store.next_due_ms()
        return due_ms is not None and due_ms <= self._clock()

    def _turn(self) -> None:
        with self._changing:
            self._asked, self._turning = False, True  # records that a turn has taken are in ``_out`` only later
        try:
            pause_s = self._take_turn()
        finally:
            with self._changing:
                self._turning = False
                self._changed.notify_all()
        if pause_s is not None:
            self._alarm(pause_s)

    def _take_turn(self) -> float | None:
        """Returns the seconds until the next turn, or None if another event will start it."""
        try:
            self._settle()
            self._hasten()
            self._compare()
            pause_s = self._hand_out()
            self.trouble = None
            return pause_s
        except ClosedError:
            return None
        except RocketMQError as e:
            logger.error("the spool in %s failed, retrying in %g s: %s", self._store.path, TROUBLE_S, e)
            self.trouble = str(e)
            return TROUBLE_S
        except Exception as e:  # a bug must not stop redelivery
            logger.exception("the spool in %s failed, retrying in %g s", self._store.path, TROUBLE_S)
            self.trouble = f"{type(e).__name__}: {e}"
            return TROUBLE_S

    def _alarm(self, pause_s: float) -> None:
        """Schedule a turn in ``pause_s``. A later one that is scheduled already stays, and finds nothing to do."""
        at_ms = self._timer.now_ms() + round(1000 * pause_s)
        with self._changing:
            if self._closed or (self._alarm_ms is not None and self._alarm_ms <= at_ms):
                return
            self._alarm_ms = at_ms

        def ring() -> None:
            with self._changing:
                if self._alarm_ms == at_ms:
                    self._alarm_ms = None
            self._turn()

        self._timer.call_later(pause_s, ring)

    def _hand_out(self) -> float | None:
        """Returns the seconds until more records are due, or None if another event will start the next turn."""
        now_ms, steady_ms = self._clock(), self._timer.now_ms()
        with self._changing:
            if self._held:
                return 0.0 if self._compare_from is not None else None
            out = [OutRecord(work.record.target, work.size) for work in self._out.values()]
            turns = self._targets.turns(out, steady_ms, MAX_OUT_BYTES)
            crowded_ms = 0
            if turns.free < self._least and len(self._out) > len(self._ended):
                crowded_ms = self._handed_ms + CROWDED_MS - steady_ms
            if self._closed or turns.free <= 0:  # the next result starts a turn
                return 0.0 if self._called or self._compare_from is not None else None
        if crowded_ms <= 0:
            self._handed_ms = steady_ms
            turns.choose(lambda targets: self._store.due_targets(targets, now_ms))
            # While attempts for a target fail, its records are sent alone.
            for work in self._store.take(now_ms, turns.free, turns.free_bytes, turns.joins(self.runs.of), turns):
                self._try(work)
        with self._changing:
            if self._called or self._compare_from is not None or turns.goes_on:
                return 0.0
            if turns.free <= 0:
                return None
            if crowded_ms > 0:
                return crowded_ms / 1000
        # Records of a target that has as many out as it may need no alarm: its next result starts a turn.
        first_ms, waits = self._store.next_due_ms(turns.refused), (turns.next_ms, self._silences.next_ms())
        left_ms = [at_ms - steady_ms for at_ms in waits if at_ms is not None]
        left_ms += [] if first_ms is None else [first_ms - now_ms]
        return max(0.0, min(left_ms) / 1000) if left_ms else None

    def _try(self, work: Work) -> None:
        with self._changing:
            self._out[work.due.sequence] = work
        handler, end = self._handlers.get(work.record.kind), functools.partial(self._end, work, self._timer.now_ms())
        if handler is None:
            end(Resent(None, f"no handler for records of kind {work.record.kind!r}"))
            return
        try:
            target = handler([work.record, *(other.record for other in work.behind)], end)
        except Exception as e:  # a handler's bug must neither lose a record nor stop the others
            logger.exception("a record of kind %s failed", work.record.kind)
            end(Resent(None, f"{type(e).__name__}: {e}", is_temporary=True))
            return
        if target is not None:
            end(Resent(), target)

    def _end(self, work: Work, since_ms: int, resent: Resent, target: str | None = None) -> None:
        with self._changing:
            sequence = work.due.sequence
            if self._out.get(sequence) is not work or sequence in self._ended:
                return  # a second answer
            self._ended[sequence] = RecordResult(work, since_ms, resent, target)
            self._changed.notify_all()
        self.wake(self._gather_s)

    def _settle(self) -> None:
        with self._settling:
            with self._changing:
                ended = list(self._ended.values())
            if not ended:
                return
            now_ms, steady_ms = self._clock(), self._timer.now_ms()
            settled = [(each, self._verdict(each, now_ms)) for each in ended]
            kept = [(each.work, verdict) for each, verdict in settled if self._store.is_kept(each.work)]
            self._store.settle([(each.work, verdict) for each, verdict in settled], now_ms)
            with self._changing:
                for each in ended:
                    del self._ended[each.work.due.sequence], self._out[each.work.due.sequence]
                failing = {work.record.target for work in self._out.values()}
                for each in ended:
                    self._note(each, steady_ms, failing)
                if not len(self._store):
                    self._silences.forget()
                    self._targets.forget_failures()
                self.listens = bool(self._silences)
            for work, verdict in kept:
                self._log(work, verdict)

    def _log(self, work: Work, verdict: Verdict) -> None:
        if isinstance(verdict, Dead):
            how = "is given up" if verdict.record is None else "stays there as a dead letter"
        elif isinstance(verdict, Replaced) and verdict.reason is not None:
            how = "is given up, and becomes a dead letter for another topic"
        else:
            return
        message = "" if self._letters is None else f" ({self._letters.named(work.record)})"
        logger.error(
            "record %d of the spool in %s%s %s: %s", work.due.sequence, self._store.path, message, how, verdict.reason
        )

    def _verdict(self, ended: RecordResult, now_ms: int) -> Verdict:
        work, resent, letters = ended.work, ended.resent, self._letters
        if ended.target is not None:
            return Replaced(dataclasses.replace(work.record, target=ended.target))
        if resent.error is None:
            return Done()
        if not resent.is_temporary and work.behind:
            logger.warning("%d messages of a failed batch are sent one by one: %s", 1 + len(work.behind), resent.error)
            return RetryLater(now_ms, resent.error)
        due_ms = self._schedule.due_ms(work.state.tries + 1, now_ms) if resent.is_temporary else None
        if due_ms is not None:
            return RetryLater(due_ms, resent.error)
        if letters is None:
            return Dead(resent.error)
        last_ms = now_ms + round(1000 * self._schedule.steps_s[-1])
        if self._is_letter(work.record):
            if resent.is_temporary:
                return RetryLater(last_ms, resent.error)
            record, reason = letters.opened(work.record)
            return Dead(f"{reason}; its dead letter is not sent: {resent.error}", record=record)
        try:
            letter = letters.made(work.record, resent)
        except Exception:  # as in ``_try``
            logger.exception("record %d has no dead letter", work.due.sequence)
            letter = None
        if letter is work.record:
            return RetryLater(last_ms, resent.error)
        return Dead(resent.error) if letter is None else Replaced(letter, resent.error)

    def _is_letter(self, record: Record) -> bool:
        return self._letters is not None and record.kind == self._letters.kind

    def _note(self, ended: RecordResult, now_ms: int, failing: set[str]) -> None:
        """Note a result. Of attempts for a target that were out together, only the last failure counts: ``failing`` are targets
        with attempts that are still out, or whose failure was counted. ``now_ms`` is that of the timer.
        """
        work, resent = ended.work, ended.resent
        if ended.target is not None:
            return
        self.runs.ended(work.record.lane, 1 + len(work.behind), resent.error is None, not resent.is_temporary)
        if not self._store.holds(work.record.lane):
            self.runs.forget(work.record.lane)
        target = work.record.target
        if resent.error is None:
            if not self._is_letter(work.record):
                self.delivered += 1 + len(work.behind)
            self._targets.succeeded(target, now_ms)
        elif resent.is_temporary:
            self._targets.failed(target, now_ms, target not in failing)
            failing.add(target)
            self._silences.failed(target, now_ms, ended.since_ms)
        else:
            self._targets.answered([target], now_ms)

    def _call(self, targets: set[str]) -> None:
        """Mark the records of these targets as due now, and end the pauses of the targets."""
        self._called.update(dict.fromkeys(targets))
        self._targets.end_pauses(targets)

    def _hasten(self) -> None:
        with self._changing:
            self._call(self._silences.due(self._timer.now_ms()))
            called = list(self._called)
        for target in called[:PAGE]:
            with self._changing:
                start = self._called.pop(target)
            try:
                goes_on = self._store.hasten(target, start, PAGE, self._clock())
            except BaseException:
                with self._changing:
                    self._called.setdefault(target, start)
                raise
            if goes_on is not None:
                with self._changing:
                    self._called.setdefault(target, goes_on)  # another call meanwhile begins with the first record
                return  # one page per turn, because others wait

    def _compare(self) -> None:
        """Give the records of a page the targets that they have by the current rules."""
        if self._compare_from is None or self._targeting is None:
            return
        # A dead letter that has waited for a topic without an answer is due at once if it gets another topic.
        kind = None if self._letters is None else self._letters.kind
        goes_on = self._store.retarget(self._targeting.of, self._compare_from, COMPARED, kind, self._clock())
        if goes_on is None:
            self._store.add([], {TARGETING: self._targeting.rules})
        self._compare_from = goes_on
