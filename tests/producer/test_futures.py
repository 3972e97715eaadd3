from __future__ import annotations

import logging
import pickle
from concurrent.futures import ThreadPoolExecutor, as_completed, wait

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.futures import FutureRegistry, Promise
from rocketmq_spark.producer.outgoing import split_result
from tests.fakes.sender import ok
from tests.helpers import RAISED, raising
from tests.mockbroker import eventually
from tests.producer.bench import Bench
from tests.queues import q


def test_completion_sets_future_and_runs_callback_on_its_thread(bench: Bench) -> None:
    pending, seen = FutureRegistry(bench.timer("x-callback")), []
    future = pending.create(seen.append)
    assert not future.cancel()
    error = ConnectionLost("x")
    pending.resolve([future], [error])
    assert future.exception(0) is error
    assert seen == []
    bench.time.run_due()
    assert seen == [error]


@pytest.mark.parametrize("error", RAISED[:2])
def test_raising_callback_does_not_affect_other_futures(bench: Bench, caplog, error) -> None:
    """Python's own futures log an ``Exception`` and let everything else through."""
    pending, told = FutureRegistry(bench.timer("x-callback")), []
    promises = [pending.create(told.append) for _ in range(3)]
    for promise in promises:
        promise.add_done_callback(raising(error))
    lost = ConnectionLost("x")
    pending.resolve(promises, [lost] * len(promises))
    bench.time.run_due()
    assert [promise.exception(0) for promise in promises] == told == [lost] * 3
    assert caplog.text.count("mine") >= 3
    assert pending.wait_until_empty(Deadline.after(0))


@pytest.mark.parametrize("first", ["waits", "keeps"])
def test_each_message_of_a_batch_has_its_own_result(bench: Bench, first: str) -> None:
    """Created when it is read; a callback and whoever waits get the same."""
    pending, called = FutureRegistry(bench.timer("x-callback")), []
    promises = [pending.create(called.append) for _ in range(3)]
    place = ok(q("a:0"), SendRequest("g", b"x"))
    outcomes = split_result(place._replace(msg_id="A,B,C", offset_msg_id="x,y,z"), 3)
    expected = [place._replace(msg_id=m, offset_msg_id=o, queue_offset=place.queue_offset + i)
                for i, (m, o) in enumerate(zip("ABC", "xyz", strict=True))]  # fmt: skip
    with ThreadPoolExecutor(1) as waiter:
        waits = waiter.submit(wait, promises, 30) if first == "waits" else None
        if waits is not None:
            eventually(lambda: all(promise._has_waiters for promise in promises))
        pending.resolve(promises, outcomes)
        assert waits is None or waits.result(30).done == set(promises)
    bench.time.run_due()
    assert [promise.result(0) for promise in promises] == [p.result() for p in promises] == called == expected
    assert [promise.exception(0) for promise in promises] == [None] * 3
    assert "returned SendResult" in repr(promises[0])


def test_future_of_one_message_does_not_keep_ids_of_its_batch(bench: Bench) -> None:
    pending = FutureRegistry(bench.timer("x-callback"))
    place = ok(q("a:0"), SendRequest("g", b"x"))
    sizes = []
    for count in (2, 1000):
        ids = [f"{i:032}" for i in range(count)]
        kept = [pending.create(msg_id=msg_id) for msg_id in ids]
        pending.resolve(kept, split_result(place._replace(msg_id=",".join(ids), offset_msg_id=",".join(ids)), count))
        result = kept[1].result(0)
        assert (result.msg_id, result.offset_msg_id, result.queue_offset) == (ids[1], ids[1], 101)
        sizes.append(len(pickle.dumps({name: what for name, what in vars(kept[1]).items() if what is not pending})))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("first", ["waits", "keeps"])
def test_a_promise_does_what_futures_of_python_do(bench: Bench, first: str) -> None:
    """Whoever comes first: those who wait for it, of several threads, or the outcome."""
    pending, called = FutureRegistry(bench.timer("x-callback")), []
    promises = [pending.create() for _ in range(3)]
    outcomes = [ok(q("a:0"), SendRequest("g", b"x")), ConnectionLost("x"), ok(q("a:1"), SendRequest("g", b"x"))]

    def keep() -> None:
        pending.resolve(promises, outcomes)

    def waited() -> tuple[set[object], set[object], list[object]]:
        return set(as_completed(promises, 30)), set(wait(promises, 30).done), [p.exception(30) for p in promises]

    if first == "keeps":
        keep()
    for promise in promises:
        promise.add_done_callback(called.append)
    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(waited) for _ in range(2)]
        if first == "waits":
            eventually(lambda: all(len(p._waiters) == 2 for p in promises))
            assert (called, [p.done() for p in promises]) == ([], [False] * 3)
            with pytest.raises(TimeoutError):
                promises[0].result(0)
            keep()
        found = [thread.result(60) for thread in threads]
    assert found == [(set(promises), set(promises), [None, outcomes[1], None])] * 2
    assert called == promises
    assert [(p.done(), p.running(), p.cancel(), p.cancelled()) for p in promises] == [(True, False, False, False)] * 3
    assert promises[2].result(0) is outcomes[2]
    with pytest.raises(ConnectionLost):
        promises[1].result(0)


def test_futures_share_no_lock_that_waiting_for_several_takes(bench: Bench) -> None:
    """It takes them in the order of addresses, so that a shared one would come in any order, and two threads to a halt."""
    pending = FutureRegistry(bench.timer("x-callback"))
    one, other = pending.create(), pending.create()
    assert len({id(one._condition), id(one._condition), id(other._condition)}) == 2
    assert one._condition._lock is not other._condition._lock  # type: ignore[attr-defined]
    assert not hasattr(one, "_other")


@pytest.mark.parametrize("at", ["_has_waiters", "_waiters", "_done_callbacks", "_condition"])
def test_interrupted_wait_for_future_can_be_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Wherever it was: otherwise the outcome would be set without a word to it."""
    pending, called = FutureRegistry(bench.timer("x-callback")), []
    promise, result = pending.create(), ok(q("a:0"), SendRequest("g", b"x"))

    def interrupted(self: Promise, name: str, value: object) -> None:
        if name == at:
            monkeypatch.undo()
            raise KeyboardInterrupt
        object.__setattr__(self, name, value)

    monkeypatch.setattr(Promise, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        promise.add_done_callback(called.append)
    promise.add_done_callback(called.append)
    pending.resolve([promise], [result])
    assert (called, promise.result(0)) == ([promise], result)


def test_none_left_waits_for_every_completion(bench: Bench) -> None:
    timer = bench.timer("x-callback")
    pending = FutureRegistry(timer)
    first = pending.create()
    pending.create()
    assert not pending.wait_until_empty(Deadline.after(1))
    pending.discard()
    result = ok(q("a:0"), SendRequest("g", b"x"))
    timer.call_later(0.5, lambda: pending.resolve([first], [result]))
    assert pending.wait_until_empty(Deadline.after(1))
    assert bench.time.now == pytest.approx(1001.5)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_close_lets_the_last_callbacks_run_even_when_one_fails(
    error: BaseException, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    pending, seen = FutureRegistry(Timer("callbacks")), []
    first = pending.create(raising(error))
    second = pending.create(seen.append)
    with caplog.at_level(logging.ERROR):
        pending.resolve([first, second], [ConnectionLost("x"), ConnectionLost("y")])
        pending.close()
    assert len(seen) == 1
    assert type(error).__name__ in caplog.text
