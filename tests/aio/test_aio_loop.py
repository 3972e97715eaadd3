"""The ways between an event loop and threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import aio
from rocketmq_spark.aio.loop import DEFAULT_MAX_THREADS, CoroutineListener, EventLoop
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.consumer.listener import Context, Redeliver
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError, OptionError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.session import consumers
from tests.aio.conftest import run, until, waits
from tests.consumer.group import GroupBench, group
from tests.consumer.pull_bench import A, bodies
from tests.fakes.group_member import numbered
from tests.helpers import RAISED, raising
from tests.queues import q

__all__ = ["group"]


def in_a_thread(loop: EventLoop, code: object, *args: object) -> Future[object]:
    """What ``loop.run`` gives to a thread."""
    given: Future[object] = Future()

    def call() -> None:
        outcome = capture(loop.run, code, *args)  # type: ignore[arg-type]
        if isinstance(outcome, Failure):
            given.set_exception(outcome.error)
        else:
            given.set_result(outcome)

    threading.Thread(target=call, daemon=True).start()
    return given


def test_coroutines_run_in_the_loop_functions_in_calling_thread() -> None:
    async def where(number: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        return number, threading.get_ident()

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        asked = in_a_thread(loop, where, 7)
        await until(asked.done)
        assert asked.result() == (7, threading.get_ident())
        assert loop.run(lambda: 5) == 5
        plain = in_a_thread(loop, threading.get_ident)
        await until(plain.done)
        assert plain.result() != threading.get_ident()
        loop.close()

    run(body)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_coroutine_exception_reaches_caller_and_loop_survives(error: BaseException) -> None:
    async def failing() -> None:
        raise error

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        asked = in_a_thread(loop, failing)
        await until(asked.done)
        assert asked.exception() is error
        loop.close()

    run(body)


def test_a_close_cancels_what_runs_for_a_thread() -> None:
    async def endless() -> None:
        await asyncio.get_running_loop().create_future()

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        asked = in_a_thread(loop, endless)
        await until(lambda: loop._tasks)
        loop.close()
        await until(asked.done)
        assert isinstance(asked.exception(), ClosedError)

    run(body)


def test_a_thread_does_not_wait_for_a_loop_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.aio.loop._CLOSED_LOOP_CHECK_S", 0.01)
    loop, asked = EventLoop(), list[Future[object]]()
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def body() -> None:
        loop.running_loop()
        asked.append(in_a_thread(loop, endless))
        await until(begun.is_set)
        for task in loop._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(body())
    event_loop.close()  # of a program that cancels nothing
    assert isinstance(asked[0].exception(60), ClosedError)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            loop.schedule(lambda: None)
    loop.set_outcome(asyncio.Future(loop=event_loop), None)


def test_an_object_belongs_to_one_event_loop() -> None:
    loop = EventLoop()

    async def use() -> None:
        loop.running_loop()

    asyncio.run(use())
    with pytest.raises(OptionError, match="another event loop before; expected one object for each loop"):
        asyncio.run(use())


def test_parallel_listener_calls_keep_the_limit_and_all_finish() -> None:
    most = 0
    running = 0
    may_end = asyncio.Event()
    begun: list[int] = []

    async def listener(messages: int, context: Context) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        begun.append(messages)
        await may_end.wait()
        running -= 1

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 3), list[object]()

        def take(numbers: range) -> None:
            for number in numbers:
                waits(code, number, outcomes.append)

        await asyncio.to_thread(take, range(10))
        await until(lambda: len(begun) == 3)
        assert outcomes == []
        may_end.set()
        await until(lambda: len(outcomes) == 10)
        assert (most, begun) == (3, list(range(10)))
        await asyncio.to_thread(take, range(5))
        await until(lambda: len(outcomes) == 15)
        loop.close()

    run(body)


def test_quick_listeners_let_the_event_loop_have_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.aio.loop.YIELD_AFTER_S", 0.0)
    turns = 0

    async def listener(messages: int, context: Context) -> None:
        if messages == 99:
            assert turns > 0

    async def body() -> None:
        nonlocal turns
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 1), list[object]()
        for number in range(100):
            waits(code, number, outcomes.append)
        while len(outcomes) < 100:
            await asyncio.sleep(0)
            turns += 1
        await until(lambda: outcomes == [None] * 100)
        loop.close()

    run(body)


def test_outcome_is_settled_later_when_no_thread_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.aio.loop.RETRY_PAUSE_S", 0.001)

    async def listener(messages: str, context: Context) -> object:
        return context.retry(3)

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        start, refused, outcomes = loop.start, [1, 2], []

        def full_up(*given: Any) -> Any:
            if refused:
                refused.pop()
                raise RuntimeError("can't start new thread")
            return start(*given)

        monkeypatch.setattr(loop, "start", full_up)
        waits(CoroutineListener(loop, listener, 3), "later", outcomes.append)
        await until(lambda: bool(outcomes))
        assert (outcomes, refused) == ([Redeliver(3)], [])
        loop.close()

    run(body)


def test_what_is_no_plain_success_is_settled_on_a_thread() -> None:
    """A broker may be asked to take the messages back."""
    error = ZeroDivisionError("mine")

    async def listener(messages: str, context: Context) -> object:
        if messages == "fails":
            raise error
        if messages == "some":
            context.ack_index = 0
            return None
        return context.retry(3)

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code = CoroutineListener(loop, listener, 3)
        outcomes: dict[str, tuple[object, bool]] = {}

        def ended(name: str, outcome: object) -> None:
            outcomes[name] = outcome, threading.current_thread() is threading.main_thread()

        for name in ("fails", "some", "later"):
            waits(code, name, lambda outcome, name=name: ended(name, outcome))
        await until(lambda: len(outcomes) == 3)
        assert outcomes == {"fails": (Failure(error), False), "some": (None, False), "later": (Redeliver(3), False)}
        loop.close()

    run(body)


def test_closed_loop_cancels_running_calls_and_refuses_new_ones() -> None:
    loop = EventLoop()
    outcomes: list[object] = []
    begun = threading.Event()

    async def listener(messages: str, context: Context) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    code = CoroutineListener(loop, listener, 1)

    async def body() -> None:
        loop.running_loop()
        waits(code, "endless", outcomes.append)
        await until(begun.is_set)
        loop.close()
        await asyncio.sleep(0)

    run(body)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            waits(code, "late", outcomes.append)
    assert outcomes == []


def test_listener_fails_when_its_awaited_task_is_cancelled() -> None:
    """Not the listener: its messages were never finished, and those behind them never began."""

    async def listener(messages: int, context: Context) -> None:
        if messages == 0:
            other = asyncio.create_task(asyncio.sleep(60))
            other.cancel()
            await other

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 1), list[object]()
        for number in range(3):
            waits(code, number, outcomes.append)
        await until(lambda: len(outcomes) == 3)
        (failed,) = (outcome for outcome in outcomes if outcome is not None)
        assert isinstance(failed, Failure)
        assert isinstance(failed.error, asyncio.CancelledError)
        loop.close()

    run(body)


def test_outcome_without_a_thread_delays_no_other_outcome(caplog: pytest.LogCaptureFixture) -> None:
    async def listener(messages: int, context: Context) -> None:
        if messages == 0:
            raise ZeroDivisionError

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        loop.start = raising(RuntimeError("can't start new thread"))  # type: ignore[method-assign]
        code, outcomes = CoroutineListener(loop, listener, 1), list[object]()
        for number in range(3):
            waits(code, number, outcomes.append)
        await until(lambda: outcomes == [None, None])
        loop.close()

    run(body)
    assert "cannot be returned to the broker now: RuntimeError: can't start new thread" in caplog.text


def test_loop_closed_during_a_wake_up_refuses_later_calls() -> None:
    """What came later waited for that wake-up, for ever."""
    loop = EventLoop()

    async def listener(messages: int, context: Context) -> None:
        raise AssertionError("it is called by no one")

    async def body() -> None:
        loop.running_loop()

    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(body())
    code = CoroutineListener(loop, listener, 1)
    waits(code, 0, lambda outcome: None)
    event_loop.close()
    with pytest.raises(RuntimeError):
        waits(code, 1, lambda outcome: None)
    with pytest.raises(RuntimeError):
        loop.schedule(lambda: None)


@pytest.mark.parametrize("ends", ["it closes", "its queue goes to another member"])
def test_stopping_consumer_calls_no_listener_for_queued_messages(group: GroupBench, ends: str) -> None:
    called: list[bytes] = []

    async def listener(messages: Any, context: Context) -> None:
        called.append(messages[0].body)
        await may_end.wait()

    async def body() -> None:
        nonlocal may_end
        may_end = asyncio.Event()
        loop = EventLoop()
        loop.running_loop()
        consumer, _ = group.start(CoroutineListener(loop, listener, 1), name="b")
        group.time.advance(3)
        group.brokers.send(q("a:0"), b"0", b"1", b"2")
        group.time.advance(1)
        await until(lambda: called == [b"0"])
        if ends == "it closes":
            assert consumer._running is not None
            consumer._running._consume_service.close()
        else:
            group.start(name="a")
            group.time.advance(40)
        may_end.set()
        await until(lambda: not loop._tasks)
        assert called == [b"0"]
        loop.close()

    may_end = asyncio.Event()
    run(body)


class Blocking:
    """Stands for a consumer for threads: its calls wait until they are let go."""

    settings = ConsumerSettings(group="g")
    _polls = SimpleNamespace(has_returned_all=False, returned_up_to=None)

    def __init__(self, *names: object, **options: object) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> list[object]:
            self.calls.append(name)
            assert name in ("stop", "close", "ack") or self.go.wait(60)
            return []

        return call


def test_consumer_run_cancelled_during_start_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "Consumer", Blocking)

    async def body() -> None:
        consumer = aio.Consumer("h:1", "g")
        calls = consumer._consumer.calls  # type: ignore[attr-defined]
        running = asyncio.create_task(consumer.run(lambda messages, context: None))
        await until(lambda: calls)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert calls == ["start", "stop"]
        consumer._consumer.go.set()  # type: ignore[attr-defined]

    run(body)


@pytest.mark.parametrize("kind", ["PullConsumer", "SimpleConsumer"])
def test_a_close_that_is_cancelled_at_once_closes_all_the_same(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also where the program keeps all threads of the event loop."""
    monkeypatch.setattr(consumers, kind, Blocking)

    async def body() -> None:
        busy = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        kept = asyncio.create_task(asyncio.to_thread(busy.wait, 60))
        consumer = getattr(aio, kind)("h:1", "g")
        await asyncio.sleep(0)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        closing.cancel()
        await until(lambda: consumer._consumer.calls == ["close"])
        busy.set()
        await kept

    run(body)


def test_those_who_wait_for_messages_hold_up_no_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "SimpleConsumer", Blocking)

    async def body() -> None:
        async with aio.SimpleConsumer(group="g") as consumer:
            receives = [asyncio.create_task(consumer.receive()) for _ in range(DEFAULT_MAX_THREADS + 1)]
            await until(lambda: consumer._consumer.calls == ["receive"] * DEFAULT_MAX_THREADS)
            await consumer.ack(None)  # type: ignore[arg-type]
            consumer._consumer.go.set()  # type: ignore[attr-defined]
            await asyncio.gather(*receives)

    run(body)


def test_repeatedly_cancelled_receives_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Proxy keeps each question for 5 s at least: they waited for a thread one behind the other, more and more of them."""
    monkeypatch.setattr(consumers, "SimpleConsumer", Blocking)

    async def body() -> None:
        async with aio.SimpleConsumer(group="g") as consumer:
            stub: Any = consumer._consumer
            for _ in range(3):
                receives = [asyncio.create_task(consumer.receive()) for _ in range(2)]
                await asyncio.sleep(0)  # they have begun
                await until(lambda: len(stub.calls) >= 2)
                for one in receives:
                    one.cancel()
                assert len(await asyncio.wait_for(asyncio.wait(receives), 60)) == 2
            stub.go.set()
            assert await consumer.receive() == []
            assert stub.calls == ["receive"] * 3

    run(body)


def test_a_poll_keeps_to_its_time_behind_one_that_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one may have more time, and what comes for it is the next poll's."""
    may_end, answers = threading.Event(), iter([(1, 2), (3,)])

    def answer(consumer: object, wait_s: float) -> Iterator[ReceivedMessage]:
        assert may_end.wait(60)
        return iter([numbered(A, offset) for offset in next(answers)])

    monkeypatch.setattr(consumers, "PullConsumer", Blocking)
    monkeypatch.setattr("rocketmq_spark.aio.consumers.next_answer", answer)

    async def body() -> None:
        async with aio.PullConsumer("h:1", "g") as consumer:
            first = asyncio.create_task(consumer.poll(50))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert await consumer.poll(0) == []
            assert await consumer.poll(0.01) == []
            may_end.set()
            assert [bodies(await consumer.poll(50)) for _ in range(2)] == [[1, 2], [3]]

    run(body)


def test_a_poll_that_a_close_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def answer(consumer: object, wait_s: float) -> Iterator[int]:
        assert closed.wait(60)
        return iter(())

    monkeypatch.setattr(consumers, "PullConsumer", Blocking)
    monkeypatch.setattr("rocketmq_spark.aio.consumers.next_answer", answer)

    async def body() -> None:
        consumer = aio.PullConsumer("h:1", "g")
        polling = asyncio.create_task(consumer.poll(50))
        await asyncio.sleep(0)
        await consumer.close()
        closed.set()
        with pytest.raises(ClosedError):
            await polling
        with pytest.raises(ClosedError):
            consumer._loop.start(threading.get_ident)

    run(body)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), "1", None, True])
def test_a_poll_takes_the_times_of_a_poll(monkeypatch: pytest.MonkeyPatch, timeout_s: Any) -> None:
    """One that is no number never came to its end, and asked without a pause."""
    monkeypatch.setattr(consumers, "PullConsumer", Blocking)

    async def body() -> None:
        async with aio.PullConsumer("h:1", "g") as consumer:
            with pytest.raises(OptionError, match="expected a number of seconds up to 1000000000"):
                await consumer.poll(timeout_s)

    run(body)


def test_a_call_without_end_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from rocketmq_spark.aio import loop\n"
        "loop._EXIT_TIMEOUT_S = 0.2\n"
        "async def body():\n"
        "    made = loop.EventLoop()\n"
        "    made.start(threading.Event().wait)\n"
        "    made.start_on_new_thread(threading.Event().wait)\n"
        "    print('begun')\n"
        "asyncio.run(body())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "begun\n"


def test_a_process_that_ends_waits_for_what_is_under_way() -> None:
    code = (
        "import asyncio, time\n"
        "from rocketmq_spark.aio import loop\n"
        "async def body():\n"
        "    made = loop.EventLoop(1)\n"
        "    for text in 'ab':\n"
        "        made.start(lambda text=text: (time.sleep(0.1), print(text)))\n"
        "asyncio.run(body())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "a\nb\n"
