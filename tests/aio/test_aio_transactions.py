"""Transactions of coroutines: what becomes of a block that ends, is cancelled, or outlasts its producer."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark import Message, aio
from rocketmq_spark.aio.loop import DEFAULT_MAX_THREADS, EventLoop
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult
from rocketmq_spark.model.send import HalfPlace, HalfState, TransactionState
from tests.aio.conftest import producing, run, until
from tests.consumer.messages import message
from tests.fakes.sender import ScriptedSender, ok
from tests.helpers import no_more_threads

COMMIT, ROLLBACK = TransactionState.COMMIT, TransactionState.ROLLBACK


def ending_threads(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads on which half messages are decided."""
    end, threads = sender.end_transaction, list[str]()

    def ended(*given: Any) -> bool:
        threads.append(threading.current_thread().name)
        return end(*given)

    monkeypatch.setattr(sender, "end_transaction", ended)
    return threads


def test_block_commits_and_rolls_back_on_error_or_cancellation(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On threads: a broker that hangs holds up no event loop."""
    half_result, threads = SendResult, ending_threads(sender, monkeypatch)

    def stored(queue: MessageQueue, request: SendRequest) -> SendResult:
        return half_result(ok(queue, request).status, "", queue, 7, f"{7:032X}")

    async def was_saved(message: object) -> str:
        await asyncio.sleep(0)
        return "COMMIT"

    async def body() -> None:
        async with producing(transaction_check=was_saved) as producer:
            sender.script = [stored] * 4
            async with producer.transaction(Message("T", b"x")) as half:
                assert half.state is HalfState.PREPARED
            assert half.state is HalfState.COMMITTED
            with pytest.raises(KeyError):
                async with producer.transaction(Message("T", b"y")):
                    raise KeyError
            inside = asyncio.Event()

            async def cancelled() -> None:
                async with producer.transaction(Message("T", b"z")):
                    inside.set()
                    await asyncio.get_running_loop().create_future()

            task = asyncio.create_task(cancelled())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            by_hand = await producer.send_half(Message("T", b"w"))
            await by_hand.rollback()
            assert [decision for _, decision in sender.seen("end")] == [COMMIT, ROLLBACK, ROLLBACK, ROLLBACK]
            assert all(name.startswith("rocketmq-aio") for name in threads), threads
            assert sender.check is not None
            question = sender.check(
                replace(message(0), properties={"UNIQ_KEY": "other"}), HalfPlace("T", "a", "g", "o", "o")
            )
            assert callable(question)
            assert await asyncio.to_thread(question) is COMMIT

    run(body)


@pytest.mark.parametrize("alone", [False, True], ids=["block", "send_half"])
@pytest.mark.parametrize("closed", [False, True])
def test_block_cancelled_before_it_begins_rolls_back_its_message(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, closed: bool, alone: bool
) -> None:
    """Who cancelled it may keep the error, which holds the block. It ended in the event loop when that was dropped."""
    begun, may_end, threads, send = threading.Event(), threading.Event(), list[str](), sender.send
    end = sender.end_transaction

    def slow(*given: Any) -> SendResult:
        begun.set()
        assert may_end.wait(60)
        return send(*given)

    def ended(*given: Any) -> bool:
        threads.append(threading.current_thread().name)
        return end(*given)

    monkeypatch.setattr(sender, "send", slow)
    monkeypatch.setattr(sender, "end_transaction", ended)
    sender.script = [lambda queue, request: SendResult(ok(queue, request).status, "", queue, 7, f"{7:032X}")]

    async def body() -> None:
        async with producing(transaction_check=lambda message: "COMMIT") as producer:

            async def block() -> None:
                if alone:  # its message would be left to the function, which finds what the next attempt saved
                    await producer.send_half(Message("T", b"x"))
                async with producer.transaction(Message("T", b"x")):
                    pytest.fail("it was cancelled")

            task = asyncio.create_task(block())
            await until(begun.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as kept:
                await task
            if closed:
                await producer.close(0)
            may_end.set()
            await until(lambda: sender.seen("end"))
            assert kept.tb is not None
            assert [decision for _, decision in sender.seen("end")] == [ROLLBACK]
            assert threads[0].startswith("rocketmq-aio")

    run(body)


@pytest.mark.parametrize("alone", [False, True], ids=["block", "send_half"])
def test_what_is_cancelled_before_it_has_a_thread_is_not_sent(sender: ScriptedSender, alone: bool) -> None:
    async def body() -> None:
        may_end = threading.Event()
        async with producing(transaction_check=lambda message: "COMMIT") as producer:
            sender.script = [stored] * 2

            async def block() -> None:
                if alone:
                    await producer.send_half(Message("T", b"cancelled"))
                async with producer.transaction(Message("T", b"cancelled")):
                    pytest.fail("it was cancelled")

            waiting = [producer._loop.start(may_end.wait, 60) for _ in range(DEFAULT_MAX_THREADS)]
            task = asyncio.create_task(block())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_end.set()
            await asyncio.wait(waiting)
            async with producer.transaction(Message("T", b"x")):
                pass
        assert [request.data for request in sender.requests] == [b"x"]

    run(body)


def stored(queue: MessageQueue, request: SendRequest) -> SendResult:
    return ok(queue, request)._replace(offset_msg_id=f"{7:032X}")


@pytest.mark.parametrize("error", [None, KeyError("mine")], ids=["ends", "raises"])
@pytest.mark.parametrize("said", [False, True], ids=["by its end", "by hand"])
def test_block_outlasting_its_producer_commits_or_rolls_back(
    sender: ScriptedSender, error: KeyError | None, said: bool
) -> None:
    """As those of threads: what was saved in it must not be rolled back because another task closes the producer."""
    raised: list[KeyError] = []
    decision = COMMIT if error is None else ROLLBACK

    async def body() -> None:
        async with producing(transaction_check=lambda message: "COMMIT") as producer:
            sender.script = [stored]
            try:
                async with producer.transaction(Message("T", b"x")) as half:
                    await producer.close()
                    if said:
                        await (half.commit() if error is None else half.rollback())
                    if error is not None:
                        raise error
            except KeyError as e:
                raised.append(e)
            assert half.state is (HalfState.COMMITTED if error is None else HalfState.ROLLED_BACK)

    run(body)
    assert ([made for _, made in sender.seen("end")], raised) == ([decision], [] if error is None else [error])


def test_a_block_whose_end_has_no_thread_is_left_to_the_function(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with producing(transaction_check=lambda message: "COMMIT") as producer:
            sender.script = [stored]
            async with producer.transaction(Message("T", b"x")) as half:
                await producer.close()
                no_more_threads(monkeypatch)
            monkeypatch.undo()
            assert half.state is HalfState.UNKNOWN

    run(body)
    assert sender.seen("end") == []
    assert "is not decided; its broker will check it" in caplog.text


def test_unused_producer_answers_checks_in_its_event_loop(sender: ScriptedSender) -> None:
    """After a restart nothing else is done with it, and the half messages of before are asked about."""

    async def was_saved(message: object) -> str:
        await asyncio.sleep(0)
        return "COMMIT"

    async def body() -> None:
        producer = aio.Producer("h:1", "g", transaction_check=was_saved)
        assert sender.check is not None
        place = HalfPlace("T", "a", "g", "o", "o")
        question = sender.check(replace(message(0), properties={"UNIQ_KEY": "made"}), place)
        assert callable(question)
        assert await asyncio.to_thread(question) is COMMIT
        await producer.close()

    run(body)


def test_a_block_begins_in_the_context_of_its_task(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The span of the half message belongs to the trace of its task, as that of every other send."""
    mine, send, seen = ContextVar("mine", default=0), sender.send, list[int]()

    def noted(*given: Any) -> SendResult:
        seen.append(mine.get())
        return send(*given)

    monkeypatch.setattr(sender, "send", noted)

    async def body() -> None:
        mine.set(7)
        async with producing(transaction_check=lambda message: "COMMIT") as producer:
            sender.script = [stored]
            async with producer.transaction(Message("T", b"x")):
                pass

    run(body)
    assert seen == [7]


def test_cancelled_end_of_a_transaction_block_still_runs() -> None:
    """Its transaction would be neither committed nor rolled back, until the broker asks for it."""

    async def body() -> None:
        loop, busy, ended = EventLoop(1), threading.Event(), threading.Event()
        kept = loop.start(busy.wait, 60)
        ending = asyncio.create_task(loop.call_after_close(ended.set))
        await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert not ended.is_set(), "it had begun"
        busy.set()
        assert await kept
        await loop.call(int)  # what stood in line before it is done
        assert ended.is_set()
        loop.close()

    run(body)
