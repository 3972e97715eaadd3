"""Sends of coroutines: what they wait for, and what is left when they are cancelled or the producer closes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import Message, aio
from rocketmq_spark.aio import producer as module
from rocketmq_spark.aio.loop import DEFAULT_MAX_THREADS, YIELD_AFTER_S
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import ClosedError, MessageIllegal, MessageRefused, NotSupported, SendFailed
from rocketmq_spark.model import MessageQueue, SendResult
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.producer import encoding
from tests.aio.conftest import WAIT_S, producing, run, until
from tests.consumer.messages import message
from tests.fakes.sender import ScriptedSender, ok, refused
from tests.helpers import raising


def test_concurrent_sends_keep_order_and_get_their_own_results(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"first"))
            results = await asyncio.gather(*[producer.send(Message("T", b"%d" % i)) for i in range(50)])
            assert [request.body for request in sender.requests] == [b"first", *(b"%d" % i for i in range(50))]
            assert len({result.msg_id for result in results}) == 50

    run(body)


def test_what_a_broker_or_we_refuse_is_raised_to_its_caller(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"x"))
            sender.script = [refused(Response.MESSAGE_ILLEGAL)]
            outcomes = await asyncio.gather(
                producer.send(Message("T", b"illegal")), producer.send(Message("T", b"")), producer.send(Message("T", b"y")),
                return_exceptions=True,
            )  # fmt: skip
            assert [type(outcome) for outcome in outcomes] == [MessageIllegal, MessageRefused, SendResult]
            with pytest.raises(MessageRefused):
                await producer.send(Message("bad topic", b"x"))

    run(body)


@pytest.mark.parametrize(
    "wrong", ["text", None, Message("T", None), Message("T", 5), Message([], b"x"), Message("slow", None)], ids=repr
)  # fmt: skip
def test_what_is_no_message_is_an_error_of_its_own_send_only(sender: ScriptedSender, wrong: Any) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"first"))
            outcomes = await asyncio.gather(
                producer.send(wrong), producer.send(Message("T", b"behind")), return_exceptions=True
            )
            assert isinstance(outcomes[0], MessageRefused | AttributeError | TypeError)
            assert isinstance(outcomes[1], SendResult)
            assert (await producer.send(Message("T", b"later"))).msg_id
            assert [request.body for request in sender.requests] == [b"first", b"behind", b"later"]

    run(body)


@pytest.mark.parametrize("place", ["a thread of its own", "the threads of all"])
def test_send_without_threads_fails_and_later_sends_succeed(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def none(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            with monkeypatch.context() as full_up:
                full_up.setattr(module, "start_thread", none)
                full_up.setattr(producer._loop, "start", none)
                sends_now = "sends_without_waiting" if place.startswith("a") else "has_cached_route"
                full_up.setattr(module, sends_now, lambda *args: False)
                sends = [producer.send(Message("T", b"%d" % i)) for i in range(2)]
                outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert ["nothing was sent: can't start new thread" in str(outcome) for outcome in outcomes] == [True, True]
            assert {type(outcome) for outcome in outcomes} == {SendFailed}
            await producer.send(Message("T", b"1"))
            assert await producer.flush()
            assert [request.body for request in sender.requests] == [b"0", b"1"]

    run(body)


def test_interrupted_send_leaves_later_sends_intact(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that runs its event loop by hand, and goes on after Ctrl-C."""
    loop = asyncio.new_event_loop()
    producer = aio.Producer("h:1", "g")
    loop.run_until_complete(producer.send(Message("T", b"0")))
    sends = [loop.create_task(producer.send(Message("T", b"%d" % i))) for i in (1, 2)]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(producer, "_begin", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(0.01))
    assert loop.run_until_complete(asyncio.wait_for(sends[1], WAIT_S)).msg_id
    assert sends[0].cancelled()
    loop.run_until_complete(producer.close())
    loop.close()


def test_event_loop_never_waits_for_buffer_room_for_properties(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing(send_timeout="60s") as producer:
            await producer.send(Message("T", b"0"))
            window = producer._producer._engine.send_window
            sender.script = [None]
            first = asyncio.create_task(producer.send(Message("T", b"1")))
            await until(lambda: sender.waiting)
            window._max_bytes = window.byte_count + 1
            began = time.monotonic()
            assert (await producer.send(Message("T", b"2"))).msg_id
            assert time.monotonic() - began < 30
            sender.answer()
            await first

    run(body)


def test_event_loop_never_waits_for_a_brokers_batch_settings(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs held it up for a third of the send timeout."""
    asked, go, in_time = threading.Event(), threading.Event(), list[bool]()

    def storage(topic: str, deadline: Deadline) -> BatchStorage | None:
        asked.set()
        in_time.append(go.wait(20))
        return None

    monkeypatch.setattr(sender, "batch_storage", storage)

    async def body() -> None:
        async with producing(auto_batch=True) as producer:
            await producer.queues("T")
            sends = [asyncio.create_task(producer.send(Message("T", b"0")))]
            await until(asked.is_set)
            sends.append(asyncio.create_task(producer.send(Message("T", b"1"))))
            assert (await producer.send(Message("T", b"alone"), timeout_s=60)).msg_id
            go.set()
            await asyncio.gather(*sends)
            assert all(in_time)
            in_time.clear()
            assert (await producer.send(Message("T", b"2"))).msg_id
            assert in_time == [], "it is known by now"

    run(body)


@pytest.mark.parametrize("size", [module.MAX_LOOP_BODY_BYTES, module.MAX_LOOP_BODY_BYTES + 1])
def test_large_bodies_are_compressed_on_a_thread(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """4 MB held up the event loop for a second."""
    threads, single = list[bool](), encoding.single_request

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return single(*given)

    monkeypatch.setattr(encoding, "single_request", noted)

    async def body() -> None:
        async with producing(compress_above=10 << 20) as producer:
            await producer.send(Message("T", b"0"))
            threads.clear()
            await producer.send(Message("T", b"1" * size))
            await producer.send(Message("T", b"2"))
            assert threads == [size == module.MAX_LOOP_BODY_BYTES, True]

    run(body)


def test_the_choice_of_a_queue_is_that_of_the_producer(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing() as producer:
            queues = await producer.queues("T")
            assert (await producer.send(Message("T", b"x"), queue=queues[1])).queue == queues[1]
            chosen = await producer.send(Message("T", b"x"), selector=lambda queues, message, arg: queues[arg], arg=2)
            assert chosen.queue == queues[2]

    run(body)


def test_a_topic_whose_route_takes_long_holds_up_no_other(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()
    route = sender.publish_queues

    def slow(topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        if topic == "slow":
            asked.set()
            assert answer.wait(60)
        return route(topic, deadline, refresh)

    monkeypatch.setattr(sender, "publish_queues", slow)
    sender.routes["slow"] = sender.routes["T"]

    async def body() -> None:
        async with producing() as producer:
            first = asyncio.create_task(producer.send(Message("slow", b"x"), timeout_s=60))
            await until(asked.is_set)
            for _ in range(3):
                await producer.send(Message("T", b"y"))
            assert not first.done()
            answer.set()
            await first

    run(body)


def full(producer: aio.Producer, room: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room, and who waits for it does so until ``room``."""
    send_async = producer._producer.send_async

    def waits(*args: object, **how: object) -> object:
        assert room.wait(60)
        return send_async(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "sends_without_waiting", lambda producer, message: False)
    monkeypatch.setattr(producer._producer, "send_async", waits)


def test_sends_waiting_for_room_keep_order_and_free_event_loop(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = threading.Event()

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            full(producer, room, monkeypatch)
            sends = [asyncio.create_task(producer.send(Message("T", b"%d" % i))) for i in range(1, 6)]
            await asyncio.sleep(0.01)
            monkeypatch.setattr(module, "sends_without_waiting", lambda producer, message: True)
            sends.append(asyncio.create_task(producer.send(Message("T", b"6"))))  # does not overtake those that wait
            await asyncio.sleep(0.01)
            assert len(sender.requests) == 1
            room.set()
            await asyncio.gather(*sends)
            assert [request.body for request in sender.requests] == [b"%d" % i for i in range(7)]

    run(body)


def test_a_send_that_found_no_room_in_its_time_says_so(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    room = threading.Event()

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            full(producer, room, monkeypatch)
            first = asyncio.create_task(producer.send(Message("T", b"1")))
            second = asyncio.create_task(producer.send(Message("T", b"2"), timeout_s=0.01))
            await asyncio.sleep(0)  # their first steps: their time begins
            await asyncio.sleep(0.05)
            room.set()
            await first
            with pytest.raises(SendFailed, match="has waited for the whole send timeout"):
                await second

    run(body)


def test_send_fails_if_its_route_was_not_requested_in_time(sender: ScriptedSender) -> None:
    """Others kept the threads: it does not go out long after its caller's time, and costs no thread."""
    room = threading.Event()

    async def body() -> None:
        async with producing() as producer:
            await producer.queues("T")
            for _ in range(DEFAULT_MAX_THREADS):
                producer._loop.start(room.wait, 60)
            late = asyncio.create_task(producer.send(Message("new", b"x"), timeout_s=0.01))
            await asyncio.sleep(0)  # its first step: its time begins
            await asyncio.sleep(0.05)
            room.set()
            with pytest.raises(SendFailed, match="wait for routes of topics, and this one has waited"):
                await late
            assert ("route", ("new", False)) not in sender.events

    run(body)


@pytest.mark.parametrize("wait_s", [None, 0.0])
def test_a_flush_waits_for_more_sends_than_one_turn_begins(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, wait_s: float | None
) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"first"))
            monkeypatch.setattr(module, "YIELD_AFTER_S", -1.0)  # a turn begins nothing
            sends = [asyncio.create_task(producer.send(Message("T", b"x"))) for _ in range(3)]
            await asyncio.sleep(0)
            flush = asyncio.create_task(producer.flush(wait_s))
            await asyncio.sleep(0)
            assert (len(sender.requests), flush.done()) == (1, wait_s is not None)
            monkeypatch.setattr(module, "YIELD_AFTER_S", 1.0)
            assert await flush is (wait_s is None)
            assert len(sender.requests) == 4 or wait_s is not None
            await asyncio.gather(*sends)

    run(body)


@pytest.mark.parametrize("ending", ["flush", "close"])
@pytest.mark.parametrize("lacks", ["room", "a route"])
def test_flush_and_close_wait_for_sends_not_yet_on_a_thread(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, ending: str, lacks: str
) -> None:
    room = threading.Event()

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            full(producer, room, monkeypatch)
            if lacks == "a route":
                monkeypatch.setattr(module, "has_cached_route", lambda *args: False)
            send = asyncio.create_task(producer.send(Message("T", b"1")))
            await asyncio.sleep(0)  # its first step
            if ending == "flush":
                assert await producer.flush(0) is False
            ends = asyncio.create_task(getattr(producer, ending)(60))
            await asyncio.sleep(0.05)
            assert not ends.done()
            room.set()
            assert await ends in (True, [])
            assert send.done() or (await send).msg_id
            assert [request.body for request in sender.requests] == [b"0", b"1"]

    run(body)


def test_flush_waits_for_sends_deferred_to_later_loop_turns(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            begin = producer._begin

            def slow(waiting: Any) -> None:
                time.sleep(YIELD_AFTER_S)
                begin(waiting)

            monkeypatch.setattr(producer, "_begin", slow)
            sends = [asyncio.create_task(producer.send(Message("T", b"%d" % i))) for i in range(1, 10)]
            await asyncio.sleep(0)  # their first step
            assert await producer.flush(0) is False
            assert await producer.flush()
            assert [request.body for request in sender.requests] == [b"%d" % i for i in range(10)]
            await asyncio.gather(*sends)

    run(body)


def test_a_send_that_is_cancelled_before_it_began_has_no_effect(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            send = asyncio.create_task(producer.send(Message("T", b"1")))
            asyncio.get_running_loop().call_soon(send.cancel)  # after its first step, and before the turn's sends
            await producer.send(Message("T", b"2"))
            assert send.cancelled()
            assert [request.body for request in sender.requests] == [b"0", b"2"]

    run(body)


def test_a_send_that_is_cancelled_later_costs_the_others_nothing(
    sender: ScriptedSender, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            sender.script = [None, None]
            first, second = (asyncio.create_task(producer.send(Message("T", b"%d" % i))) for i in (1, 2))
            await until(lambda: len(sender.waiting) == 2)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            sender.answer()
            sender.answer()
            assert (await second).msg_id
        assert caplog.text == ""

    run(body)


def test_close_waits_for_earlier_sends_and_refuses_later_ones(sender: ScriptedSender) -> None:
    async def body() -> None:
        producer = aio.Producer("h:1", "g")
        await producer.send(Message("T", b"0"))
        send = asyncio.create_task(producer.send(Message("T", b"1")))
        await asyncio.sleep(0)  # its first step
        assert await producer.close() == []
        assert (await send).msg_id
        with pytest.raises(ClosedError, match="the Producer is closed"):
            await producer.send(Message("T", b"2"))
        assert await producer.close() == []
        assert [request.body for request in sender.requests] == [b"0", b"1"]

    run(body)


def test_with_automatic_batches_one_request_has_many_messages(sender: ScriptedSender) -> None:
    async def body() -> None:
        async with producing(auto_batch=True, batch_max_delay="30s") as producer:
            await producer.queues("T")
            sends = [asyncio.create_task(producer.send(Message("T", b"%d" % i))) for i in range(200)]
            await asyncio.sleep(0)  # their first step
            assert await producer.flush()
            assert len({result.msg_id for result in await asyncio.gather(*sends)}) == 200
            assert len(sender.requests) < 20

    run(body)


def test_request_and_reply_are_those_of_the_producer(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.session.producers.replies", lambda options: None)

    async def body() -> None:
        async with producing() as producer:
            with pytest.raises(NotSupported):
                await producer.request(Message("T", b"x"))
            with pytest.raises(NotSupported):
                await producer.reply(message(0), b"x")

    run(body)


def test_bulk_sends_run_on_threads_and_block_no_other_send(sender: ScriptedSender) -> None:
    go_on = threading.Event()

    def waits(queue: MessageQueue, request: Any) -> SendResult:
        assert go_on.wait(WAIT_S)
        return ok(queue, request)

    async def body() -> None:
        async with producing() as producer:
            sender.script = [waits]
            rows = asyncio.ensure_future(producer.send_arrow(pa.table({"body": ["a", "b"]}), "T"))
            await until(lambda: sender.calls)
            await producer.send(Message("T", b"meanwhile"))
            go_on.set()
            assert [type(each) for each in await rows] == [SendResult] * 2
            sent = await producer.send_many((Message("T", b"%d" % i) for i in range(3)), key=lambda _: "k")
            assert [each.queue_offset for each in sent if isinstance(each, SendResult)] == [200, 201, 202]
            with pytest.raises(MessageRefused, match="row 0: body is empty"):
                await producer.send_arrow(pa.table({"body": [""]}), topic="T")

    run(body)


def test_calls_that_send_many_hold_up_no_others(sender: ScriptedSender) -> None:
    go_on = threading.Event()
    begun: list[int] = []

    def slowly(number: int) -> Iterator[Message]:
        begun.append(number)
        assert go_on.wait(WAIT_S)
        yield Message("T", b"%d" % number)

    async def body() -> None:
        async with producing() as producer:
            calls = [asyncio.ensure_future(producer.send_many(slowly(i))) for i in range(DEFAULT_MAX_THREADS + 2)]
            await until(lambda: len(begun) == DEFAULT_MAX_THREADS)
            try:
                sent = await asyncio.wait_for(producer.send(Message("T", b"its route is not known")), WAIT_S / 4)
                assert sent.queue_offset
                assert await producer.queues("T")
            finally:
                go_on.set()
            assert [len(each) for each in await asyncio.gather(*calls)] == [1] * len(calls)
        assert len(begun) == len(calls)
        with pytest.raises(ClosedError):
            await producer.send_many([Message("T", b"x")])

    run(body)
