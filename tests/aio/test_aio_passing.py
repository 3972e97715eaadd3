"""What coroutines are given reaches the object that they wrap, and its answer comes back."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import aio
from rocketmq_spark.aio.loop import DEFAULT_MAX_THREADS
from rocketmq_spark.aio.producer import AsyncHalfMessage
from rocketmq_spark.consumer.listener import DeferredListener
from rocketmq_spark.errors import CallTimeout, SendFailed
from rocketmq_spark.model import Message
from rocketmq_spark.session import consumers, producers
from tests.aio.conftest import WAIT_S, producing, run, until, waits
from tests.fakes.sender import ScriptedSender
from tests.queues import q

M, A, B = Message("T", b"x"), q("a:0"), q("a:1")
SUBSCRIBED: list[tuple[Any, ...]] = [
    ("subscribe", "T", {"tags": "a", "sql": None}),
    ("subscribe", "T", {"sql": "n > 1"}),
    ("unsubscribe", "T", {}),
]
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "Producer": [
        ("queues", "T", {}),
        ("send_oneway", M, {"queue": A}),
        ("send_batch", [M], {"queue": A, "timeout_s": 3.0}),
        ("send_arrow", "rows", {"topic": "T", "timeout_s": 3.0}),
        ("send_many", [M], {"timeout_s": 3.0}),
        ("reply", M, b"answer", {"properties": {"a": "b"}, "timeout_s": 3.0}),
        ("recall", "T", "handle", {}),
        ("close", {"timeout_s": 3.0}),
    ],
    "Consumer": SUBSCRIBED,
    "PullConsumer": [
        *SUBSCRIBED,
        ("queues", "T", {}),
        ("assign", [A, B], {}),
        ("assignment", {}),
        ("pause", A, B, {}),
        ("resume", A, B, {}),
        ("seek", A, 7, {}),
        ("seek_to_beginning", A, B, {}),
        ("seek_to_end", A, B, {}),
        ("seek_to_timestamp", 1_600_000_000_000, A, B, {}),
        ("commit", {"offsets": {A: 7}}),
        ("commit", {}),
        ("committed", A, {}),
        ("close", {}),
    ],
    "SimpleConsumer": [
        *SUBSCRIBED,
        ("receive", {"max_messages": 3, "invisible": "40s", "wait": "2s"}),
        ("ack", M, {}),
        ("change_invisible", M, "50s", {}),
        ("forward_to_dlq", M, {}),
        ("close", {}),
    ],
}


class Wrapped:
    """Instead of the object that is wrapped: notes which of its methods is called with what, by the names of ``kind``."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, bound(self._kind, name, args, kwargs)))
            return f"what {name} returns"

        return call

    def _deadline(self, timeout_s: float) -> Any:
        class Given:
            @staticmethod
            def remaining() -> float:
                return timeout_s

            expired = False

        return Given()


def bound(kind: type, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    given = inspect.signature(getattr(kind, name)).bind(None, *args, **kwargs)
    given.apply_defaults()
    return dict(given.arguments)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind, calls in CALLS.items() for call in calls],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_call_is_that_of_the_wrapped_object(
    monkeypatch: pytest.MonkeyPatch, kind: str, call: tuple[Any, ...]
) -> None:
    where = producers if kind == "Producer" else consumers
    real = getattr(where, kind)
    monkeypatch.setattr(where, kind, lambda *given, **options: Wrapped(real))
    name, *args, kwargs = call

    async def body() -> None:
        made = getattr(aio, kind)(group="g")
        wrapped = made._producer if kind == "Producer" else made._consumer
        answer = await getattr(made, name)(*args, **kwargs)
        assert wrapped.calls == [(name, bound(real, name, args, kwargs))]
        is_none = inspect.signature(getattr(type(made), name)).return_annotation == "None"
        assert answer == (None if is_none else f"what {name} returns")
        await made.close()

    run(body)


HOW: dict[str, Any] = {
    "queue": A,
    "selector": "hash",
    "arg": "k",
    "delay_level": 3,
    "delay": 5.0,
    "deliver_at": datetime(2030, 1, 1, tzinfo=UTC),
    "timeout_s": 3.0,
}


@pytest.mark.parametrize(
    ("name", "more"),
    [*(("send", {key: value}) for key, value in HOW.items()), ("send", {}), ("send", HOW)]
    + [(name, more) for name in ("send_half", "transaction") for more in ({}, {"timeout_s": 3.0})],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_how_a_message_is_sent_is_what_was_said(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any]
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(message: Message, *given: object, **how: Any) -> None:
        asked.append({key: value for key, value in how.items() if value is not None})
        raise SendFailed("no")

    async def body() -> None:
        async with producing() as producer:
            monkeypatch.setattr(producer._producer, "send_async" if name == "send" else name, refuse)
            made = getattr(producer, name)(M, **more)
            with pytest.raises(SendFailed):
                await (made.__aenter__() if name == "transaction" else made)

    run(body)
    assert asked == [more]


@pytest.mark.parametrize("name", ["commit", "rollback"])
def test_a_half_message_is_decided_within_the_time(name: str) -> None:
    half: Any = SimpleNamespace(
        message=M, result=None, commit=lambda t: ("commit", t), rollback=lambda t: ("rollback", t)
    )
    decided: list[object] = []

    async def call(code: Any, *args: Any) -> None:
        decided.append(code(*args))

    run(lambda: getattr(AsyncHalfMessage(half, call), name)(3.0))
    assert decided == [(name, 3.0)]


def test_a_request_without_a_reply_raises_what_the_producer_says(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Future[Any] = Future()
    asked.set_exception(CallTimeout("no reply"))
    given: list[Any] = []

    async def body() -> None:
        async with producing() as producer:
            monkeypatch.setattr(
                producer._producer, "request_async", lambda *message, **how: given.append((message, how)) or asked
            )
            with pytest.raises(CallTimeout):
                await producer.request(M, timeout_s=3.0)

    run(body)
    assert given == [((M,), {"timeout_s": 3.0})]


def test_every_call_is_looked_at() -> None:
    others = {
        "Producer": {"send", "request", "send_half", "transaction", "flush"},
        "Consumer": {"start", "run", "stats", "close"},
        "PullConsumer": {"poll"},
        "SimpleConsumer": set[str](),
    }
    for kind, calls in CALLS.items():
        public = {name for name, value in vars(getattr(aio, kind)).items() if callable(value) and name[0] != "_"}
        assert public == {call[0] for call in calls} | others[kind]


@pytest.mark.parametrize(
    ("how", "in_loop"),
    [({"delay": 5.0}, False), ({"deliver_at": 1 << 42}, False), ({"delay_level": 3}, True), ({}, True)],
)
def test_a_delay_is_sent_from_a_thread(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], in_loop: bool
) -> None:
    """It asks the broker how long its timers may be: one that hangs would hold up the event loop."""
    threads: list[bool] = []

    async def body() -> None:
        async with producing() as producer:
            await producer.send(Message("T", b"0"))
            send = producer._producer.send_async

            def noted(*given: Any, **more: Any) -> Any:
                threads.append(threading.current_thread() is threading.main_thread())
                return send(*given, **more)

            monkeypatch.setattr(producer._producer, "send_async", noted)
            await asyncio.wait([asyncio.ensure_future(producer.send(Message("T", b"1"), **how))])

    run(body)
    assert threads == [in_loop]


def test_calls_that_send_tables_hold_up_no_others(sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(*given: object) -> None:
        begun.release()
        assert go.wait(WAIT_S)

    async def body() -> None:
        async with producing() as producer:
            monkeypatch.setattr(producer._producer, "send_arrow", slow)
            calls = [asyncio.ensure_future(producer.send_arrow("rows")) for _ in range(DEFAULT_MAX_THREADS)]
            try:
                for _ in calls:
                    assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
                assert await asyncio.wait_for(producer.queues("T"), WAIT_S / 4)
            finally:
                go.set()
            await asyncio.gather(*calls)

    run(body)


@pytest.mark.parametrize(
    ("options", "in_loop"),
    [
        ({"name_server": "h:1"}, True),
        ({"name_server": "h:1", "ordered": True}, False),
        ({"transport": "grpc", "proxy_endpoint": "h:1"}, False),
    ],
)
def test_what_calls_one_by_one_gets_a_function(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], in_loop: bool
) -> None:
    """Consumers in order, and those of a Proxy, call a listener and wait for it."""
    started: list[object] = []
    monkeypatch.setattr(consumers.Consumer, "start", lambda consumer, code: started.append(code))

    async def listener(messages: object, context: object) -> None: ...

    async def body() -> None:
        async with aio.Consumer(group="g", **options) as consumer:
            await consumer.start(listener)

    run(body)
    (code,) = started
    assert isinstance(code, DeferredListener) == in_loop


def test_so_many_listeners_run_at_a_time_as_the_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand messages that came at once would all be at work at once."""
    started: list[Any] = []
    monkeypatch.setattr(consumers.Consumer, "start", lambda consumer, code: started.append(code))
    running: list[object] = []
    ended: list[object] = []

    async def body() -> None:
        go = asyncio.Event()

        async def listener(messages: object, context: object) -> None:
            running.append(messages)
            await go.wait()

        async with aio.Consumer("h:1", "g", consume_thread_min=3) as consumer:
            await consumer.start(listener)
            for number in range(9):
                waits(started[0], number, ended.append)
            await until(lambda: len(running) >= 3)
            for _ in range(10):
                await asyncio.sleep(0)
            assert running == [0, 1, 2]
            go.set()
            await until(lambda: len(ended) == 9)

    run(body)


def test_a_close_returns_what_listeners_did_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    real = consumers.Consumer
    monkeypatch.setattr(consumers, "Consumer", lambda *given, **options: Wrapped(real))

    async def body() -> None:
        consumer: Any = aio.Consumer("h:1", "g")
        assert await consumer.close(3.0) == "what stop returns"
        assert consumer._consumer.calls == [("stop", bound(real, "stop", (3.0,), {}))]
        assert await consumer.close() == []

    run(body)


def test_consumer_run_cancelled_after_start_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at Ctrl-C: it would keep its queues, and go on calling the listener, as long as the program runs."""
    real = consumers.Consumer
    monkeypatch.setattr(consumers, "Consumer", lambda *given, **options: Wrapped(real))
    monkeypatch.setattr(aio.Consumer, "start", lambda consumer, listener: asyncio.sleep(0))

    async def body() -> None:
        consumer: Any = aio.Consumer("h:1", "g")
        running = asyncio.create_task(consumer.run(lambda messages, context: None))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (running.done(), consumer._consumer.calls) == (False, [])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert consumer._consumer.calls == [("stop", bound(real, "stop", (30.0,), {}))]

    run(body)
