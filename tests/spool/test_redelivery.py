"""Who is handed out when, with a clock that the test moves and real RocksDB."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base import clock
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import Resent
from rocketmq_spark.spool import redelivery
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import RETRY_PAUSES_S, Schedule
from rocketmq_spark.spool.records import Record
from rocketmq_spark.spool.redelivery import MAX_IN_FLIGHT, Redelivery
from rocketmq_spark.spool.store import Store
from tests.fakes.timer import ManualTimer
from tests.helpers import WAIT_S, no_more_threads, raising, waits_in
from tests.spool.bench import BASE_MS, Bench, record

DOWN = Resent(None, "down", is_temporary=True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "s")


def test_outage_of_10_seconds_ends_with_delivery_at_third_try(bench: Bench) -> None:
    bench.works = lambda one: DOWN if bench.time.now - bench.start < 10 else Resent()
    bench.add(record(b"x"))
    bench.time.advance(5000)
    assert bench.seconds == [3, 8, 38]
    assert bench.redelivery.delivered_count == 1
    assert len(bench.store) == 0
    assert bench.store.next_due_ms() is None


def test_tenth_failure_makes_record_dead_and_keeps_payload(bench: Bench) -> None:
    bench.works = lambda one: DOWN
    bench.add(record(b"x"))
    bench.time.advance(10_000)
    assert bench.seconds == [3, 8, 38, 98, 218, 518, 998, 1598, 2498, 4298]
    assert (bench.store.totals.dead, bench.store.totals.give_ups, len(bench.store)) == (1, 1, 0)


def test_limit_of_three(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "s", Schedule(RETRY_PAUSES_S[:3]))
    bench.works = lambda one: DOWN
    bench.add(record(b"x"))
    bench.time.advance(10_000)
    assert bench.seconds == [3, 8, 38]
    assert bench.store.totals.dead == 1


def test_record_without_handler_becomes_dead_and_keeps_payload(bench: Bench) -> None:
    bench.add(record(b"x", kind="a:b"))
    bench.time.advance(5)
    assert bench.tried == []
    assert bench.store.totals.dead == 1
    assert bench.store.revive(bench.now_ms()) == 1


def test_handler_exception_counts_as_failure(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def works(one: object) -> Resent:
        if len(bench.tried) == 1:
            raise ZeroDivisionError("a bug")
        return Resent()

    bench.works = works
    bench.add(record(b"x"))
    bench.time.advance(60)
    assert bench.seconds == [3, 8]
    assert "ZeroDivisionError" in caplog.text
    assert len(bench.store) == 0


def test_the_first_answer_counts(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.waiting = []
    bench.add(record(b"x"), after_s=0)
    bench.time.advance(0)
    (done,) = bench.waiting
    done(Resent())
    done(Resent(None, "too late", is_temporary=True))
    bench.time.advance(1)
    done(Resent(None, "much too late", is_temporary=True))
    bench.time.advance(5000)
    assert (bench.redelivery.delivered_count, len(bench.store), bench.store.totals.dead) == (1, 0, 0)
    assert (bench.payloads, bench.redelivery.trouble, caplog.text) == ([b"x"], None, "")


def test_a_final_failure_is_not_repeated(bench: Bench) -> None:
    bench.works = lambda one: Resent(None, "no permission")
    bench.add(record(b"x"))
    bench.time.advance(5000)
    assert bench.seconds == [3]
    assert bench.store.totals.dead == 1


def test_batches_that_take_too_long_shrink_without_many_repeats(tmp_path: Path) -> None:
    """Each that is longer than 20 is stored, but without an answer in time, as over a slow line."""
    bench, stored = Bench(tmp_path / "s"), Counter[bytes]()

    def handle(records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        stored.update(one.payload for one in records)
        done(Resent() if len(records) <= 20 else DOWN)

    bench.redelivery._handlers = {"k": handle}
    bench.joins = lambda head, other: True
    bench.add(*(record(b"%d" % i, lane=b"l") for i in range(600)))
    bench.time.advance(5000)
    assert (len(bench.store), len(stored)) == (0, 600)
    assert max(stored.values()) <= 8


def test_large_records_that_are_out_have_a_bound_of_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redelivery, "MAX_IN_FLIGHT_BYTES", 2500)
    bench.waiting = []
    bench.add(*(record(b"%d" % i * 1000) for i in range(8)), after_s=0)
    bench.time.advance(0)
    assert len(bench.waiting) == 3
    bench.waiting.pop(0)(Resent())
    bench.time.advance(0)
    assert len(bench.waiting) == 3
    while bench.waiting:
        bench.waiting.pop(0)(Resent())
        bench.time.advance(0)
    assert [payload[:1] for payload in bench.payloads] == [b"%d" % i for i in range(8)]


def test_redelivery_leases_no_more_records_than_it_hands_out(bench: Bench) -> None:
    bench.waiting = []
    bench.add(*(record(str(i).encode()) for i in range(3 * MAX_IN_FLIGHT)), after_s=0)
    bench.time.advance(1)
    assert len(bench.waiting) == 7 * MAX_IN_FLIGHT // 8
    bench.waiting.pop(0)(Resent())
    bench.time.advance(0)
    assert len(bench.waiting) == 7 * MAX_IN_FLIGHT // 8
    while bench.waiting:
        bench.waiting.pop(0)(Resent())
        bench.time.advance(0)
    assert bench.payloads == [str(i).encode() for i in range(3 * MAX_IN_FLIGHT)]
    assert len(bench.store) == 0


def test_only_one_record_is_in_flight_while_tries_fail(bench: Bench) -> None:
    bench.waiting = []
    bench.add(*(record(str(i).encode()) for i in range(200)), after_s=0)
    bench.time.advance(0)
    for _ in range(7 * MAX_IN_FLIGHT // 8):
        bench.waiting.pop(0)(DOWN)
    bench.time.advance(0)
    assert len(bench.waiting) == 1
    bench.waiting.pop(0)(Resent())
    bench.time.advance(0)
    assert len(bench.waiting) == 2


@pytest.mark.parametrize(("answer_s", "left"), [(2.0, 0), (40.0, 1)])
def test_the_close_waits_for_what_is_out_and_takes_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer_s: float, left: int
) -> None:
    """An answer that is not waited for is a record that the next process sends again."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=bench.time.monotonic))
    bench.waiting = []
    bench.add(record(b"out"), after_s=0)
    bench.time.advance(0)
    (done,) = bench.waiting
    bench.add(record(b"due meanwhile"), after_s=1)
    ManualTimer(bench.time).call_later(answer_s, lambda: done(Resent()))
    bench.redelivery.close(Deadline.after(30))
    assert bench.payloads == [b"out"]
    assert bench.store.totals.depth == 1 + left


def test_a_second_answer_changes_nothing(bench: Bench) -> None:
    bench.waiting = []
    bench.add(record(b"x"), after_s=0)
    bench.time.advance(0)
    done = bench.waiting.pop()
    done(Resent())
    done(DOWN)
    bench.time.advance(5000)
    done(DOWN)
    bench.time.advance(5000)
    assert len(bench.tried) == 1
    assert bench.store.totals.depth == 0


def test_what_answers_again_makes_what_waits_for_it_due_at_once(bench: Bench) -> None:
    down = {"a", "b"}
    bench.works = lambda one: DOWN if one.target in down else Resent()
    bench.add(record(b"a", target="a"), record(b"b", target="b"))
    bench.time.advance(100)
    down.clear()
    tried = len(bench.tried)
    bench.redelivery.on_answer(["a", "c"])
    bench.time.advance(0)
    assert bench.tried[tried:] == [(100, b"a")]
    bench.time.advance(118)
    assert bench.tried[tried + 1 :] == [(218, b"b")]


def test_record_failing_while_others_succeed_is_retried_soon(bench: Bench) -> None:
    """The first one is tried first whenever its target answers: it has had the most tries, and would wait for minutes."""
    down = [True]
    bench.works = lambda one: (
        DOWN if down[0] or (one.payload == b"first" and bench.time.now - bench.start < 102) else Resent()
    )
    bench.add(*(record(payload, target="a") for payload in (b"first", b"second", b"third")))
    bench.redelivery.on_send_failed("a")
    bench.time.advance(100)
    down[0] = False
    tried = len(bench.tried)
    handle = bench.redelivery._handlers["k"]

    def and_answers(records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        def handled(how: Resent) -> None:
            done(how)
            if how.error is None:
                bench.redelivery.on_answer(["a"])

        handle(records, handled)

    bench.redelivery._handlers = {"k": and_answers}
    bench.redelivery.on_answer(["a"])
    bench.time.advance(4)
    assert bench.tried[tried:] == [(100, b"first"), (100, b"second"), (100, b"third"), (103, b"first")]
    assert len(bench.store) == 0


@pytest.mark.parametrize("page", [1, 1000])
def test_a_call_while_another_one_runs_is_not_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(redelivery, "PAGE_SIZE", page)
    bench.add(record(b"a", target="t"), record(b"b", target="t"), after_s=1000)
    hasten, calls = bench.store.make_due, []

    def hastened(*args: Any) -> bytes | None:
        found = hasten(*args)
        calls.append(args)
        if len(calls) == 1:
            bench.add(record(b"c", target="t"), after_s=900)
            bench.redelivery.on_send_failed("t")
            bench.time.now += 4  # the next call may be 3 s after the failure
            bench.redelivery.on_answer(["t"])
        return found

    monkeypatch.setattr(bench.store, "make_due", hastened)
    bench.redelivery.on_send_failed("t")
    bench.redelivery.on_answer(["t"])
    bench.time.advance(1)
    bench.time.advance(5)
    assert sorted(bench.payloads) == [b"a", b"b", b"c"]


def test_a_call_whose_write_failed_is_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add(record(b"a", target="t"), after_s=1000)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "make_due", raising(SpoolError("full")))
        bench.redelivery.on_send_failed("t")
        bench.redelivery.on_answer(["t"])
        bench.time.advance(0.5)
    assert "full" in (bench.redelivery.trouble or "")
    bench.time.advance(2)
    assert bench.payloads == [b"a"]


def test_more_than_a_page_is_hastened(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.spool.redelivery.PAGE_SIZE", 3)
    bench.add(*(record(str(i).encode(), target="a") for i in range(20)), after_s=1800)
    bench.redelivery.on_send_failed("a")
    bench.redelivery.on_answer(["a"])
    bench.time.advance(0)
    assert sorted(bench.payloads) == sorted(str(i).encode() for i in range(20))


def test_of_a_lane_one_is_out_and_a_failure_holds_the_others_up(bench: Bench) -> None:
    bench.works = lambda one: DOWN if bench.time.now - bench.start < 10 else Resent()
    for i in range(5):
        bench.add(record(str(i).encode(), lane=b"l"))
    bench.time.advance(100)
    assert bench.tried == [(3, b"0"), (8, b"0"), *((38, str(i).encode()) for i in range(5))]


def test_a_dead_one_lets_its_lane_go_on(bench: Bench) -> None:
    bench.works = lambda one: Resent(None, "no") if one.payload == b"0" else Resent()
    bench.add(record(b"0", lane=b"l"), record(b"1", lane=b"l"))
    bench.time.advance(3)
    assert bench.payloads == [b"0", b"1"]


def test_an_alarm_is_set_once_however_often_somebody_wakes_it(bench: Bench) -> None:
    bench.add(record(b"x"), after_s=1000)
    for _ in range(50):
        bench.redelivery.wake()
        bench.time.advance(0)
    assert len(bench.time.due) == 1


def test_redelivery_that_lacked_thread_resumes_at_next_wakeup(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.works = lambda one: Resent()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(bench.redelivery._timer, "call_later", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            bench.redelivery.wake()
    bench.add(record(b"x"))
    bench.time.advance(10)
    assert bench.redelivery.delivered_count == 1


def test_large_window_refills_in_large_parts_and_settles_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "s", max_out=8 * MAX_IN_FLIGHT)
    bench.waiting = []
    bench.redelivery.on_answer(["a", "b"])
    payloads = [b"%03d" % i for i in range(10 * MAX_IN_FLIGHT)]
    bench.add(*(record(payload, target="ab"[i % 2]) for i, payload in enumerate(payloads)), after_s=0)
    bench.time.advance(1)
    most = len(bench.waiting)
    assert 7 * MAX_IN_FLIGHT < most < 8 * MAX_IN_FLIGHT
    settled, out = [], []
    settle = bench.store.settle
    monkeypatch.setattr(
        bench.store, "settle", lambda outcomes, now_ms: settled.append(len(outcomes)) or settle(outcomes, now_ms)
    )
    for count, pause_s in ((5, 0.01), (20, 0.01), (0, 0.05)):
        for _ in range(count):
            bench.waiting.pop(0)(Resent())
        bench.time.advance(pause_s)
        out.append(len(bench.waiting))
    assert (settled, out) == ([5, 20], [most, most - 20, most])
    while bench.waiting:
        bench.waiting.pop(0)(Resent())
        bench.time.advance(1)
    assert sorted(bench.payloads) == payloads
    assert len(bench.store) == 0


def test_damage_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is met in the middle of a scan is made whole by the next turn; while that cannot be done, it is said each second."""
    filler = Store(tmp_path, sync="never")
    filler.add([(record(b"%d " % i + bytes(100), at_ms=1), BASE_MS) for i in range(500)])
    filler.close()
    (table,) = tmp_path.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    bench = Bench(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "salvage", raising(SpoolError("no space left on device")))
        bench.redelivery.retry_earlier_records()
        for _ in range(200):
            bench.time.advance(0.1)
        assert "no space left on device" in str(bench.redelivery.trouble)
        tried = len(bench.tried)
    for _ in range(200):
        bench.time.advance(0.1)
    assert bench.redelivery.trouble is None
    assert len(bench.tried) > max(tried, 400)
    assert len(bench.store) == 0
    bench.redelivery.close(Deadline.after(1))
    bench.store.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ZeroDivisionError("a bug")])
def test_any_folder_error_is_reported_and_redelivery_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A write fails, and then the folder cannot be looked at: a disk that fails, a mount that has gone."""
    bench.add(record(b"x"))
    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", raising(SpoolError("Input/output error")))
        bench.time.advance(3.5)
        patched.setattr(Path, "exists", raising(error))
        bench.time.advance(10)
        assert str(error) in str(bench.redelivery.trouble)
    bench.time.advance(2)
    assert bench.redelivery.trouble is None
    assert len(bench.store) == 0


def laned(bench: Bench, count: int, lane: bytes = b"l") -> None:
    bench.add(*(record(b"%d" % number, lane=lane) for number in range(count)), after_s=0)


def test_what_joins_the_head_of_its_lane_goes_with_it(bench: Bench) -> None:
    bench.joins = lambda head, other: int(other.payload) % 10 != 0
    laned(bench, 35)
    bench.add(*(record(b"other") for _ in range(3)), after_s=0)
    bench.time.advance(0)
    assert bench.together == [10, 1, 1, 1, 10, 10, 5]
    assert [one for one in bench.payloads if one != b"other"] == [b"%d" % number for number in range(35)]
    assert bench.redelivery.delivered_count == 38
    assert (len(bench.store), bench.store.totals.size) == (0, 0)
    assert not bench.store.holds_lane(b"l")


def test_what_is_being_taken_is_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    take, busy = bench.store.take, []

    def taking(*args: Any, **kwargs: Any) -> object:
        taken = take(*args, **kwargs)
        busy.append((len(taken), bench.redelivery._is_busy()))
        return taken

    monkeypatch.setattr(bench.store, "take", taking)
    bench.add(record(b"x"), after_s=0)
    bench.time.advance(0)
    assert busy[0] == (1, True), "else a drain would end before it is handed out"
    assert not bench.redelivery._is_busy()


def test_what_is_added_while_a_lane_is_under_way_waits_behind_it(bench: Bench) -> None:
    bench.joins, bench.waiting = lambda head, other: True, []
    laned(bench, 3)
    bench.time.advance(0)
    bench.add(record(b"3", lane=b"l"), after_s=0)
    bench.time.advance(0)
    assert bench.together == [3]
    assert bench.store.holds_lane(b"l")
    bench.waiting.pop()(Resent())
    bench.time.advance(0)
    assert bench.together == [3, 1]
    bench.waiting.pop()(Resent())
    bench.time.advance(0)
    assert not bench.store.holds_lane(b"l")


def test_failed_batch_costs_head_a_try_and_sends_it_alone(bench: Bench) -> None:
    """So does what is added while tries fail."""
    bench.joins = lambda head, other: True
    bench.works = lambda one: DOWN if bench.time.now - bench.start < 10 else Resent()
    laned(bench, 5)
    bench.time.advance(1)
    laned(bench, 4, b"m")
    bench.time.advance(100)
    assert bench.together == [5, 1, 1, 1, 1, 2, 2, 4]
    assert bench.payloads[-9:] == [b"0", b"1", b"2", b"3", b"4", b"0", b"1", b"2", b"3"]
    assert (len(bench.store), bench.store.totals.dead) == (0, 0)


def test_refused_record_does_not_end_others_of_its_batch(bench: Bench) -> None:
    bench.joins = lambda head, other: True
    bench.works = lambda one: Resent(None, "illegal") if one.payload == b"3" else Resent()
    laned(bench, 9)
    bench.time.advance(100)
    assert bench.together == [9] + [1] * 9
    assert bench.payloads[9:] == [b"%d" % number for number in range(9)]
    assert (bench.redelivery.delivered_count, len(bench.store), bench.store.totals.dead) == (8, 0, 1)
    bench.works = lambda one: Resent()
    laned(bench, 3)
    bench.time.advance(0)
    assert bench.together[10:] == [3], "together again"


def test_lane_in_flight_at_process_end_is_sent_by_next_process(bench: Bench, tmp_path: Path) -> None:
    bench.joins, bench.waiting = lambda head, other: True, []
    laned(bench, 4)
    bench.time.advance(0)
    assert bench.together == [4]
    bench.store.close()
    again = Bench(tmp_path / "s")
    again.joins = lambda head, other: True
    again.redelivery.wake()
    again.time.advance(1)
    assert again.payloads == [b"0", b"1", b"2", b"3"]
    assert len(again.store) == 0


def test_what_came_back_from_the_dead_goes_alone(bench: Bench) -> None:
    bench.works = lambda one: Resent(None, "illegal")
    laned(bench, 2)
    bench.time.advance(0)
    bench.works, bench.joins = lambda one: Resent(), lambda head, other: True
    bench.waiting = []
    assert bench.store.revive(bench.now_ms()) == 2
    bench.add(record(b"2", lane=b"l"), record(b"3", lane=b"l"), after_s=0)
    bench.time.advance(0)
    assert bench.together[2:] == [1, 1, 2]


def test_a_thread_that_cannot_be_started_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        timer, sent = Timer("spool-without-threads"), threading.Event()
        redelivery = Redelivery(
            store, {"k": lambda records, done: (done(Resent()), sent.set())}, lambda: BASE_MS, timer
        )
        store.add([(record(b"x"), BASE_MS)])
        with monkeypatch.context() as patched:
            no_more_threads(patched, "spool-without-threads")
            with pytest.raises(RuntimeError):
                redelivery.wake()
        redelivery.wake()
        assert sent.wait(WAIT_S)
        redelivery.close(Deadline.after(WAIT_S))


def test_close_does_not_count_results_of_running_turn_twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that a disk holds up for longer than the close waits for its thread."""
    bench.waiting = []
    bench.add(record(b"x"), record(b"y"), record(b"z"))
    bench.time.advance(4)
    hangs, goes_on, settle = threading.Event(), threading.Event(), Store.settle

    def held_up(store: Store, *given: Any) -> None:
        hangs.set()
        assert goes_on.wait(WAIT_S)
        settle(store, *given)

    monkeypatch.setattr(Store, "settle", held_up)
    for done in bench.waiting[:1]:
        done(Resent())
    turn = threading.Thread(target=bench.redelivery._settle)
    turn.start()
    assert hangs.wait(WAIT_S)
    close = threading.Thread(target=bench.redelivery.close, args=(Deadline.after(0),))
    close.start()
    waits_in(close, Redelivery._settle)
    goes_on.set()
    turn.join(WAIT_S)
    close.join(WAIT_S)
    assert (len(bench.store), bench.redelivery.delivered_count) == (2, 1)
