"""What is cancelled, closed or given no thread, in between: calls that have not begun, listeners, and the event loop itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import Message, aio
from rocketmq_spark.aio import producer as module
from rocketmq_spark.aio.loop import CoroutineListener, EventLoop
from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer.listener import Context
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.errors import ClosedError, OptionError, SendFailed
from rocketmq_spark.session import consumers
from tests.aio.conftest import producing, run, until, waits
from tests.aio.test_aio_loop import Blocking, in_a_thread
from tests.consumer.group import GroupBench, group
from tests.consumer.pull_bench import A, bodies, made
from tests.fakes.group_member import QueueMember
from tests.fakes.sender import ScriptedSender
from tests.helpers import no_more_threads, raising
from tests.queues import q

__all__ = ["group"]


def test_a_call_that_is_cancelled_before_it_began_has_no_effect(sender: ScriptedSender) -> None:
    async def body() -> None:
        busy = threading.Event()
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            producer._loop._thread_pool = ThreadPoolExecutor(1)
            kept = producer._loop.start(busy.wait, 60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await producer.send_batch([Message("T", b"cancelled")])
            oneway = asyncio.create_task(producer.send_oneway(Message("T", b"cancelled, too")))
            await asyncio.sleep(0)
            oneway.cancel()
            with pytest.raises(asyncio.CancelledError):
                await oneway
            busy.set()
            await kept
            await producer.send_batch([Message("T", b"1")])
        assert all(b"cancelled" not in request.body for request in sender.requests)
        assert len(sender.requests) == 2

    run(body)


def test_a_call_for_which_there_was_no_thread_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def body() -> None:
        loop, busy = EventLoop(2), threading.Event()
        kept = loop.start(busy.wait, 60)
        with monkeypatch.context() as full_up:
            no_more_threads(full_up, "rocketmq-aio")
            with pytest.raises(RuntimeError, match="thread"):
                await loop.call(calls.append, "was refused")
        busy.set()
        await kept
        await loop.call(calls.append, "later")
        assert calls == ["later"]
        loop.close()

    run(body)


def test_a_send_for_which_there_was_no_thread_is_counted_once(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that it got later counted it once more, and no flush said from then on that all was sent."""

    async def body() -> None:
        busy = threading.Event()
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            producer._loop._thread_pool = ThreadPoolExecutor(2, "rocketmq-aio")  # none of its threads is idle
            kept = producer._loop.start(busy.wait, 60)
            with monkeypatch.context() as full_up:
                no_more_threads(full_up, "rocketmq-aio")
                full_up.setattr(module, "has_cached_route", lambda *args: False)
                with pytest.raises(SendFailed, match="nothing was sent"):
                    await producer.send(Message("T", b"1"))
            busy.set()
            await kept
            await producer.queues("T")
            assert await producer.flush(0.5)
            assert [request.body for request in sender.requests] == [b"0"]

    run(body)


def test_close_that_finds_no_thread_can_be_called_again(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "Consumer", Blocking)

    async def body() -> None:
        producer, consumer = aio.Producer("h:1", "g"), aio.Consumer("h:1", "g")
        closed = consumer._consumer.calls  # type: ignore[attr-defined]
        for one in (producer, consumer):
            with monkeypatch.context() as full_up:
                no_more_threads(full_up, "rocketmq-aio-close")
                with pytest.raises(RuntimeError, match="thread"):
                    await one.close()
            if one is producer:
                await producer.send(Message("T", b"0"))
            assert closed == []
            await one.close()
            with pytest.raises(ClosedError):
                one._check_open()
        assert closed == ["stop"]

    run(body)


@pytest.mark.parametrize("kind", ["Consumer", "PullConsumer"])
def test_a_close_that_failed_may_be_called_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of a wrong time nothing had changed, and the consumer stayed in its group for as long as the program ran."""
    calls: list[str] = []

    def stop(*given: object) -> list[object]:
        calls.append("stop")
        if len(calls) == 1:
            raise OptionError("timeout_s is nan")
        return []

    monkeypatch.setattr(consumers, kind, lambda *names, **options: SimpleNamespace(stop=stop, close=stop))

    async def body() -> None:
        consumer = getattr(aio, kind)("h:1", "g")
        with pytest.raises(OptionError, match="nan"):
            await consumer.close()
        assert consumer._check_open() is asyncio.get_running_loop()
        assert not consumer._loop.is_shut_down
        for _ in range(2):
            await consumer.close()
        assert calls == ["stop", "stop"]
        assert consumer._loop.is_shut_down

    run(body)


@pytest.mark.parametrize("why", ["its time is no number", "it is interrupted", "the producer fails"])
def test_a_producer_whose_close_failed_sends_and_may_be_closed(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(module, "sends_without_waiting", lambda *of: False)  # all go through the line

    async def body() -> None:
        producer = aio.Producer("h:1", "g", send_timeout="60s")
        await producer.queues("T")
        await producer.send(Message("T", b"0"))
        with monkeypatch.context() as failing:
            if why == "it is interrupted":
                failing.setattr(producer, "_begin_new_sends", raising(KeyboardInterrupt()))
            elif why == "the producer fails":
                failing.setattr(producer._producer, "close", raising(OptionError("no")))
            with pytest.raises((OptionError, KeyboardInterrupt)):
                await producer.close(float("nan") if why == "its time is no number" else None)
        await asyncio.wait_for(producer.send(Message("T", b"1")), 20)
        thread = producer._send_thread._thread
        assert await producer.close() == []
        await until(lambda: thread is not None and not thread.is_alive())
        with pytest.raises(ClosedError):
            await producer.send(Message("T", b"2"))
        assert [request.body for request in sender.requests] == [b"0", b"1"]

    run(body)


def test_ctrl_c_in_one_outcome_loses_no_later_outcome() -> None:
    """Of a program that runs its event loop by hand, and goes on after Ctrl-C."""
    loop, event_loop = EventLoop(), asyncio.new_event_loop()

    async def begin() -> asyncio.Future[int]:
        return loop.running_loop().create_future()

    async def end() -> int:
        return await asyncio.wait_for(future, 10)

    future = event_loop.run_until_complete(begin())
    loop.schedule(raising(KeyboardInterrupt()))
    loop.set_outcome(future, 5)
    with pytest.raises(KeyboardInterrupt):
        event_loop.run_until_complete(asyncio.sleep(10))
    assert event_loop.run_until_complete(end()) == 5
    event_loop.close()


def test_a_loop_over_messages_ends_with_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of threads does: also where the close comes just before the consumer is asked."""
    asked, closed = threading.Event(), threading.Event()

    def answer(consumer: object, wait_s: float) -> Any:
        asked.set()
        assert closed.wait(60)
        raise ClosedError("the consumer is closed")

    monkeypatch.setattr(consumers, "PullConsumer", Blocking)
    monkeypatch.setattr("rocketmq_spark.aio.consumers.next_answer", answer)

    async def body() -> None:
        async with aio.PullConsumer("h:1", "g") as consumer:

            async def read() -> list[Any]:
                return [message async for message in consumer]

            reading = asyncio.create_task(read())
            await until(asked.is_set)
            await consumer.close()
            closed.set()
            assert await reading == []

    run(body)


def test_a_poll_returns_no_more_at_once_than_that_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of some kilobytes may become gigabytes."""
    made: list[int] = []

    def answers(consumer: object, wait_s: float) -> Any:
        for number in range(len(made), 6):
            made.append(number)
            yield SimpleNamespace(body=b"x" * 40)

    monkeypatch.setattr(consumers, "PullConsumer", Blocking)
    monkeypatch.setattr("rocketmq_spark.aio.consumers.next_answer", answers)
    monkeypatch.setattr("rocketmq_spark.consumer.pull.PORTION_BYTES", 100)

    async def body() -> None:
        async with aio.PullConsumer("h:1", "g") as consumer:
            for count in (3, 6):
                assert len(await consumer.poll(1)) == 3
                assert len(made) == count
            assert await consumer.poll(0) == []

    run(body)


@pytest.mark.parametrize("earlier", [0, 2])
def test_messages_of_a_poll_that_raises_are_returned_again(monkeypatch: pytest.MonkeyPatch, earlier: int) -> None:
    """For instance for want of memory: the caller had none of those that were decoded before."""
    fake, errors, each = QueueMember([A]), [MemoryError()], Polls.yield_messages

    def short_of_memory(polls: Polls, part: Any) -> Any:
        for message in each(polls, part):
            if bodies([message]) == [earlier + 3] and errors:
                raise errors.pop()
            yield message

    monkeypatch.setattr(consumers, "PullConsumer", lambda *names: made(fake))
    monkeypatch.setattr(Polls, "yield_messages", short_of_memory)
    fake.add(A, 10)

    async def body() -> None:
        async with aio.PullConsumer("h:1", "g") as consumer:
            await consumer.assign([A])
            messages = aiter(consumer)
            assert bodies([await anext(messages) for _ in range(earlier)]) == [*range(earlier)]
            with pytest.raises(MemoryError):
                await consumer.poll()
            await consumer.commit()
            assert fake.stored[A] == earlier
            assert bodies(await consumer.poll()) == [*range(earlier, 10)]

    run(body)


def test_messages_of_a_cancelled_receive_go_to_the_next_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else gets it before its invisible time is over."""
    answers = iter([["one", "two", "three"], ["four"]])

    class Receiving(Blocking):
        def receive(self, *how: object) -> list[str]:
            self.calls.append("receive")
            assert self.go.wait(60)
            return next(answers, [])

    monkeypatch.setattr(consumers, "SimpleConsumer", Receiving)

    async def body() -> None:
        async with aio.SimpleConsumer(group="g") as consumer:
            stub: Any = consumer._consumer
            cancelled = asyncio.create_task(consumer.receive())
            await until(lambda: stub.calls)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            stub.go.set()
            assert [await consumer.receive(2) for _ in range(3)] == [["one", "two"], ["three"], ["four"]]
            assert stub.calls == ["receive"] * 2

    run(body)


def test_listeners_have_their_time_though_the_close_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping, may_stop = threading.Event(), threading.Event()

    def stop(timeout_s: float) -> list[object]:
        stopping.set()
        assert may_stop.wait(60)
        return []

    monkeypatch.setattr(consumers, "Consumer", Blocking)

    async def body() -> None:
        consumer = aio.Consumer("h:1", "g")
        consumer._consumer.stop = stop  # type: ignore[assignment,method-assign]
        consumer._check_open()
        may_end, ended = asyncio.Event(), list[object]()

        async def listener() -> None:
            await may_end.wait()

        listening = in_a_thread(consumer._loop, listener)
        await until(lambda: consumer._loop._tasks)
        closing = asyncio.create_task(consumer.close())
        await until(stopping.is_set)
        closing.cancel()
        ended += await asyncio.gather(closing, return_exceptions=True)
        may_end.set()
        await until(listening.done)
        assert listening.result() is None
        may_stop.set()
        await until(lambda: consumer._loop.is_shut_down)

    run(body)


@pytest.mark.parametrize("began", [True, False])
def test_listener_cancelled_from_outside_fails_and_others_run(began: bool) -> None:
    """As with ``for task in asyncio.all_tasks(): task.cancel()``. Its messages were not finished before ``consumeTimeout``."""
    called: list[int] = []

    async def listener(messages: int, context: Context) -> None:
        called.append(messages)
        if messages == 0:
            await asyncio.get_running_loop().create_future()

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        code, outcomes = CoroutineListener(loop, listener, 1), list[object]()
        for number in range(3):
            waits(code, number if began else number + 1, outcomes.append)
        if began:
            await until(lambda: called)
        else:
            loop._drain()
        (task,) = loop._tasks
        task.cancel()
        await until(lambda: len(outcomes) == 3)
        assert called == ([0, 1, 2] if began else [1, 2, 3])
        failed = [outcome for outcome in outcomes if outcome is not None]
        assert len(failed) == began
        for outcome in failed:
            assert isinstance(outcome, Failure)
            assert isinstance(outcome.error, asyncio.CancelledError)
        loop.close()

    run(body)


@pytest.mark.parametrize("when", ["before its task begins", "before its turn"])
def test_closing_loop_refuses_pending_coroutine_and_frees_thread(when: str) -> None:
    async def never() -> None:
        raise AssertionError("it is closed")

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()
        asked = in_a_thread(loop, never)
        while not loop._ready_calls:  # the event loop has no turn meanwhile
            time.sleep(0.001)
        if when == "before its task begins":
            loop._drain()
        loop.close()
        await until(asked.done)
        assert isinstance(asked.exception(), ClosedError)

    run(body)


def test_a_coroutine_runs_in_the_context_of_its_thread() -> None:
    """Not in that of whoever woke the event loop: a trace of one message was another one's."""
    mine: ContextVar[int] = ContextVar("mine")

    async def listener(number: int) -> bool:
        await asyncio.sleep(0)
        return mine.get() == number

    async def body() -> None:
        loop = EventLoop()
        loop.running_loop()

        def call(number: int) -> Any:
            mine.set(number)
            return loop.run(listener, number)

        calls = [in_a_thread(loop, call_of) for call_of in [lambda n=n: call(n) for n in range(5)]]
        while len(loop._ready_calls) < 5:  # all wait for one turn of the event loop
            time.sleep(0.001)
        await until(lambda: all(each.done() for each in calls))
        assert [each.result() for each in calls] == [True] * 5
        loop.close()

    run(body)


def test_what_is_called_and_returns_a_coroutine_is_awaited() -> None:
    class Handler:
        async def __call__(self, number: int) -> tuple[int, int]:
            return number, threading.get_ident()

    async def body() -> None:
        loop, handler = EventLoop(), Handler()
        loop.running_loop()
        for code in (handler, lambda number: handler(number)):
            asked = in_a_thread(loop, code, 7)
            await until(asked.done)
            assert asked.result() == (7, threading.get_ident())
        loop.close()

    run(body)


def test_a_body_that_raises_what_no_future_takes_ends_its_send(sender: ScriptedSender) -> None:
    class Odd(bytes):
        def __len__(self) -> int:
            raise StopIteration

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            with pytest.raises(RuntimeError, match="StopIteration"):
                await producer.send(Message("T", Odd(b"1")))
            await producer.send(Message("T", b"2"))

    run(body)


def test_a_consumer_whose_event_loop_is_gone_leaves_its_group(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All messages failed then, and became dead letters in the end, though other members could have consumed them."""
    made, _ = group.consumer()
    monkeypatch.setattr(consumers, "Consumer", lambda *args, **options: made)
    stopped, stop = threading.Event(), made.stop

    def noted(timeout_s: float) -> object:
        try:
            return stop(timeout_s)
        finally:
            stopped.set()

    monkeypatch.setattr(made, "stop", noted)

    async def listener(messages: Any, context: Context) -> None:
        raise AssertionError("its loop is gone")

    async def program() -> None:
        consumer = aio.Consumer("h:1", "g")
        await consumer.subscribe("T")
        await consumer.start(listener)

    asyncio.run(program())
    group.time.advance(3)
    with caplog.at_level(logging.WARNING):
        group.brokers.send(q("a:0"), b"0")
        with contextlib.suppress(RuntimeError):
            group.time.advance(1)
        assert stopped.wait(60)
    assert "the event loop of a consumer was closed before the consumer, which now leaves group g" in caplog.text
    assert not group.brokers.members
