"""What answers again is called at once, and not without end; what does not answer holds up no other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rocketmq_spark.model import Resent
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import FAILURE_MEMORY_MS, UnreachableTargets
from rocketmq_spark.spool.records import PENDING, Due, PendingKey, Record, RecordState, area_end
from rocketmq_spark.spool.redelivery import MAX_IN_FLIGHT
from tests.fakes.timer import ManualTimer
from tests.spool.bench import BASE_MS, Bench, database, record

DOWN = Resent(None, "down", is_temporary=True)


def test_what_failed_and_answers_is_called_once() -> None:
    silences = UnreachableTargets()
    assert not silences
    silences.record_failure("a", 0)
    assert silences
    assert silences.record_answers(["b"], 10) == set()
    assert silences.record_answers(["a", "b"], 10) == {"a"}
    assert silences.record_answers(["a"], 11) == set()


def test_each_call_that_was_in_vain_puts_the_next_one_off() -> None:
    silences, now_ms, pauses = UnreachableTargets(), 0, []
    silences.record_failure("a", now_ms)
    for _ in range(5):
        asked_ms = now_ms
        while not silences.record_answers(["a"], now_ms):
            now_ms += 500
        pauses.append((now_ms - asked_ms) // 1000)
        silences.record_failure("a", now_ms)
    assert pauses == [0, 3, 5, 30, 60]


def test_answer_too_early_for_next_retry_counts_at_due_time() -> None:
    silences = UnreachableTargets()
    silences.record_failure("a", 0)
    silences.record_answers(["a"], 0)
    silences.record_failure("a", 100, sent_ms=50)
    assert (silences.next_early_retry_ms(), silences.start_early_retries(10_000)) == (None, set())
    assert silences.record_answers(["a"], 200) == set()
    assert silences.next_early_retry_ms() == 3100
    assert (
        silences.start_early_retries(3099),
        silences.start_early_retries(3100),
        silences.start_early_retries(3101),
    ) == (set(), {"a"}, set())


def test_an_answer_counts_until_what_was_tried_after_it_fails() -> None:
    for sent_ms, called in ((10, {"a"}), (11, set())):
        silences = UnreachableTargets()
        silences.record_failure("a", 0)
        silences.record_answers(["a"], 10)
        silences.record_failure("a", 100, sent_ms)
        assert silences.start_early_retries(3100) == called
    silences = UnreachableTargets()
    silences.record_failure("a", 0)
    silences.record_answers(["a"], 10)
    silences.record_failure("a", 100, 20)
    silences.record_answers(["a"], 110)
    silences.record_failure("a", 120)  # of what was sent meanwhile, nobody knows since when
    assert silences.start_early_retries(10_000) == set()


def test_a_failure_long_after_the_last_one_begins_anew() -> None:
    silences = UnreachableTargets()
    silences.record_failure("a", 0)
    silences.record_answers(["a"], 0)
    silences.record_failure("a", 1000)
    assert silences.record_answers(["a"], 1001) == set()
    silences.record_failure("a", 1000 + FAILURE_MEMORY_MS)
    assert silences.record_answers(["a"], 1000 + FAILURE_MEMORY_MS) == {"a"}


def test_when_nothing_waits_all_is_forgotten() -> None:
    silences = UnreachableTargets()
    silences.record_failure("a", 0)
    silences.forget_failures()
    assert not silences


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "s")


def hanging(bench: Bench, until_s: float) -> None:
    """What is for targets named ``h…`` has no answer for 3 s and fails, until a moment; all else succeeds at once."""
    timer = ManualTimer(bench.time)

    def handle(records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        (one,) = records
        seconds = bench.time.now - bench.start
        bench.tried.append((round(seconds, 3), one.payload))
        if one.target.startswith("h") and seconds < until_s:
            timer.call_later(3.0, lambda: done(DOWN))
            return
        done(Resent())
        bench.redelivery.on_answer([one.target])

    bench.redelivery._handlers = {"k": handle}


def test_what_is_for_a_target_that_hangs_holds_up_no_other(bench: Bench) -> None:
    hanging(bench, until_s=60)
    for second in range(50):
        bench.add(*(record(b"h", target="h") for _ in range(20)), record(b"a", target="a"), after_s=second)
    bench.time.advance(55)
    others = [at - second for second, (at, payload) in enumerate(t for t in bench.tried if t[1] == b"a")]
    assert len(others) == 50
    assert max(others) < 0.1, "also while the first tries hang"
    assert len(bench.tried) - 50 < 150
    assert bench.store.totals.depth == 1000
    assert {entry.tries for _, entry in states(bench)} <= {0, 1, 2, 3}
    bench.time.advance(20)
    assert (bench.store.totals.depth, bench.store.totals.dead) == (0, 0), "and are sent when it answers"


@pytest.mark.parametrize("max_out", [MAX_IN_FLIGHT, 8 * MAX_IN_FLIGHT])
def test_first_tries_of_hanging_target_leave_room_for_others(tmp_path: Path, max_out: int) -> None:
    bench = Bench(tmp_path / "s", max_out=max_out)
    hanging(bench, until_s=1000)
    bench.redelivery.on_answer(["h"])
    bench.add(*(record(b"h", target="h") for _ in range(2 * max_out)), after_s=0)
    bench.time.advance(1)
    assert len(bench.tried) == 7 * max_out // 8
    bench.add(*(record(b"a", target="a") for _ in range(9)), after_s=0)
    bench.time.advance(1)
    others = [at for at, payload in bench.tried if payload == b"a"]
    assert (len(others), max(others) <= 1.01) == (9, True)


@pytest.mark.parametrize("max_out", [MAX_IN_FLIGHT, 8 * MAX_IN_FLIGHT])
@pytest.mark.parametrize("count", [2, 100, 900])
def test_many_targets_that_hang_hold_up_none_that_answers(tmp_path: Path, max_out: int, count: int) -> None:
    """Also while they are new, as after a start, and also a target without an attempt so far, once all others had one."""
    bench = Bench(tmp_path / "s", max_out=max_out)
    hanging(bench, until_s=10_000)
    bench.add(record(b"", target="a"), after_s=0)
    bench.time.advance(1)
    bench.add(*(record(b"h", target=f"h{i % count}") for i in range(2 * max(count, max_out))), after_s=0)
    for _ in range(5):
        bench.add(record(b"a", target="a"), after_s=0)
        bench.time.advance(1)
    late = [at - second for second, (at, _) in enumerate((t for t in bench.tried if t[1] == b"a"), 1)]
    assert (len(late), max(late) < 0.1) == (5, True)
    bench.time.advance(3 * count // (max_out // 4))
    now, asked = bench.time.now - bench.start, len(bench.tried)
    bench.add(record(b"b", target="b"), after_s=0)
    bench.time.advance(1)
    assert (round(now, 3), b"b") in bench.tried[asked:]


def test_targets_that_hang_are_tried_in_turn(bench: Bench) -> None:
    """There are more of them than slots for attempts, and the records of some were due before those of all others."""
    hanging(bench, until_s=10_000)
    for number in range(100):
        bench.add(*(record(b"%d" % number, target=f"h{number}") for _ in range(50)), after_s=0)
    bench.time.advance(20)
    before = Counter(bench.payloads)
    bench.time.advance(40)
    tries = Counter(bench.payloads) - before
    assert (len(tries), max(tries.values()) - min(tries.values()) <= 1) == (100, True)


def test_a_new_target_has_one_attempt_until_it_answers(bench: Bench) -> None:
    bench.waiting = []
    bench.add(*(record(b"n", target="n") for _ in range(9)), after_s=0)
    bench.time.advance(0)
    assert len(bench.waiting) == 1
    bench.waiting.pop()(Resent())
    bench.time.advance(0)
    assert len(bench.waiting) == 8


def test_a_send_that_fails_elsewhere_makes_its_target_a_new_one(bench: Bench) -> None:
    bench.waiting = []
    bench.redelivery.on_answer(["a", "b"])
    bench.redelivery.on_send_failed("a")
    bench.add(*(record(payload, target=payload.decode()) for payload in (b"a", b"b") for _ in range(9)), after_s=0)
    bench.time.advance(0)
    assert Counter(bench.payloads) == {b"a": 1, b"b": 9}


def test_a_target_passed_over_for_nothing_is_tried_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for one whose record turns out to be damaged."""
    bench.works = lambda one: DOWN
    bench.add(*(record(b"h", target=f"h{number:02}") for number in range(40)), after_s=0)
    bench.time.advance(2)
    assert len(bench.tried) == 40
    due_targets, wrong = bench.store.due_targets, [[f"h{number:02}" for number in range(32)]]
    monkeypatch.setattr(bench.store, "due_targets", lambda *given: wrong.pop() if wrong else due_targets(*given))
    bench.add(record(b"now", target="h39"), after_s=0)
    bench.time.advance(0)
    assert (bench.payloads[40:], wrong) == ([b"now"], [])


def entries(bench: Bench) -> dict[PendingKey, bytes]:
    return {PendingKey.parse(key): value for key, value in database(bench.store).scan(PENDING, area_end(PENDING))}


def states(bench: Bench) -> list[tuple[Due, RecordState]]:
    return [(pending.due, RecordState.decode(value)) for pending, value in entries(bench).items()]


def test_records_of_unreachable_target_are_not_read_or_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging(bench, until_s=1000)
    marked = [
        Record("k", b"%d" % i, BASE_MS, "h", marks=((b"id", Due(1, i).mark_value),))
        for i in range(2 * MAX_IN_FLIGHT + 100)
    ]
    bench.add(*marked, after_s=0)
    bench.add(*(record(b"%d" % i, target="h") for i in range(2 * MAX_IN_FLIGHT + 100)), after_s=0)
    bench.time.advance(5)
    before, tried = entries(bench), len(bench.tried)
    read: list[bytes] = []
    scan = Database.scan

    def counted(db: Database, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in scan(db, start, end):
            read.append(key)
            yield key, value

    with monkeypatch.context() as patched:
        patched.setattr(Database, "scan", counted)
        bench.add(*(record(b"a", target="a") for _ in range(20)), after_s=0.5)
        bench.time.advance(1)
    assert [payload for _, payload in bench.tried[tried:]].count(b"a") == 20
    assert len([key for key in read if PendingKey.parse(key).target == "h"]) <= 4, "those of the one attempt that ended"
    after = entries(bench)
    assert len(before.items() - after.items()) <= 1
    assert dict(bench.store._marks.scan(b"id")).items() >= {
        (mark.marks[0][1], pending.due)
        for mark in marked
        for pending in after
        if mark.payload == b"%d" % (pending.due.sequence - 1)
    }
    assert bench.store.drop_records([marked[-1].marks[0]]) == 1
    assert len(entries(bench)) == len(after) - 1


def test_pauses_between_failing_tries_grow_until_target_answers(bench: Bench) -> None:
    bench.works = lambda one: DOWN
    bench.add(*(record(b"%d" % i, target="h") for i in range(200)), after_s=0)
    for _ in range(400):
        bench.time.advance(0.01)
    ends = [0.0, *(second for second, _ in bench.tried if second)]
    pauses = [round(after - before, 2) for before, after in itertools.pairwise(ends)]
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    bench.works = lambda one: Resent()
    assert bench.redelivery._is_busy(), "a drain waits for the end of the pause"
    bench.redelivery.on_answer(["h"])
    bench.time.advance(0)
    assert len(bench.store) == 0


def test_a_clock_that_is_set_back_prolongs_no_pause(bench: Bench) -> None:
    """A pause that began by a clock an hour ahead would else end an hour later."""
    bench.step_ms = 3_600_000
    bench.works = lambda one: DOWN
    bench.add(*(record(b"%d" % i, target="h") for i in range(200)), after_s=0)
    bench.time.advance(5)
    bench.step_ms = 0
    bench.works = lambda one: Resent()
    bench.add(record(b"due", target="h"), after_s=0)
    bench.time.advance(1)
    assert bench.payloads[-1] == b"due"


def test_a_clock_that_is_set_back_puts_off_no_call(bench: Bench) -> None:
    bench.works = lambda one: DOWN
    bench.step_ms = 3_600_000
    bench.add(record(b"x", target="h"), after_s=0)
    for _ in range(2):  # the call after the second failure comes by the steps
        bench.time.advance(1)
        bench.redelivery.on_answer(["h"])
    bench.time.advance(0)
    bench.step_ms, bench.works = 0, lambda one: Resent()
    bench.redelivery.on_answer(["h"])
    bench.time.advance(5)
    assert len(bench.store) == 0


def test_answer_during_failing_try_still_brings_early_retry(bench: Bench) -> None:
    """The next call is put off, and comes long before the record is due."""
    bench.waiting = []
    bench.add(record(b"x", target="h"), after_s=0)
    bench.time.advance(0)
    bench.waiting.pop()(DOWN)
    bench.time.advance(0)
    bench.redelivery.on_answer(["h"])
    bench.time.advance(1)
    bench.redelivery.on_answer(["h"])
    bench.time.advance(1)
    bench.waiting.pop()(DOWN)
    bench.time.advance(20)
    assert bench.seconds == [0, 0, 5]


def test_what_a_later_release_wrote_holds_up_no_other(tmp_path: Path) -> None:
    """A call looks at all that waits; what cannot be read goes to the dead when it is due."""
    bench = Bench(tmp_path / "s")
    bench.add(record(b"later", target="a"), after_s=20)
    key, value = next(database(bench.store).scan(PENDING, area_end(PENDING)))
    database(bench.store).write([(key, b"\x02" + value[1:])])
    bench.add(record(b"mine", target="a"), after_s=10)
    bench.redelivery.on_send_failed("a")
    bench.redelivery.on_answer(["a"])
    bench.time.advance(1)
    assert bench.tried == [(0, b"mine")]
    assert bench.redelivery.trouble is None
    bench.time.advance(30)
    assert (bench.store.totals.dead, len(bench.store), len(bench.tried)) == (1, 0, 1)
