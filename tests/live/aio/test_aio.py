"""Producers and consumers for asyncio on real brokers, with RocketMQ's own client as the witness, and in a web application."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rocketmq_spark import Message, ReceivedMessage, aio
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model.message import PoppedMessage
from tests.aio.conftest import run, until
from tests.fix_spark import ROOT
from tests.helpers import stored
from tests.live.grpc.proxied import forgotten, new_topic
from tests.witness import java_read

__all__ = ["forgotten"]


def test_what_tasks_send_java_reads(rocketmq: LocalBroker, topic: str) -> None:
    async def body() -> None:
        async with aio.Producer(rocketmq.name_server, "g") as producer:
            results = await asyncio.gather(*[producer.send(Message(topic, b"%d" % i)) for i in range(500)])
            ids.update(result.msg_id for result in results)

    ids: set[str] = set()
    run(body)
    found = java_read(rocketmq.name_server, topic, 500, bodies=True)
    assert Counter(record.body for record in found) == Counter(b"%d" % i for i in range(500))
    assert {record.id for record in found} == ids


@pytest.mark.parametrize("ordered", [False, True], ids=["concurrent", "ordered"])
def test_coroutine_listeners_finish_messages_and_retry_failures(
    rocketmq: LocalBroker, topic: str, ordered: bool
) -> None:
    got: Counter[bytes] = Counter()

    async def listener(messages: tuple[ReceivedMessage, ...], context: Any) -> None:
        await asyncio.sleep(0)
        for message in messages:
            got[message.body] += 1
            if message.body == b"7" and got[message.body] == 1:
                raise ZeroDivisionError("the first time")

    async def body() -> None:
        options: dict[str, Any] = {"consume_from_where": "earliest", "ordered": ordered}
        async with aio.Producer(rocketmq.name_server, "g") as producer:
            await asyncio.gather(*[producer.send(Message(topic, b"%d" % i)) for i in range(50)])
        async with aio.Consumer(rocketmq.name_server, f"g-{topic}", **options) as consumer:
            await consumer.subscribe(topic)
            await consumer.start(listener)
            await until(lambda: sum(got.values()) == 51)
            await until(lambda: consumer.stats().consumed == 50)
        async with aio.Consumer(rocketmq.name_server, f"g-{topic}", **options) as consumer:
            await consumer.subscribe(topic)
            await consumer.start(listener)  # gets nothing that was finished
            async with aio.Producer(rocketmq.name_server, "g") as producer:
                await producer.send(Message(topic, b"last"))
            await until(lambda: got[b"last"] == 1)
        assert got == Counter({**{b"%d" % i: 1 for i in range(50)}, b"7": 2, b"last": 1})

    run(body)


def test_run_ends_when_it_is_cancelled(rocketmq: LocalBroker, topic: str) -> None:
    async def body() -> None:
        got = asyncio.Event()

        async def listener(messages: object, context: object) -> None:
            got.set()

        consumer = aio.Consumer(rocketmq.name_server, f"g-{topic}", consume_from_where="earliest")
        await consumer.subscribe(topic)
        task = asyncio.create_task(consumer.run(listener))
        async with aio.Producer(rocketmq.name_server, "g") as producer:
            await producer.send(Message(topic, b"x"))
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await consumer.close() == []

    run(body)


def test_loop_break_and_cancelled_poll_lose_no_message(rocketmq: LocalBroker, topic: str) -> None:
    """What was given before the commit is the group's; the next member goes on behind it."""
    bodies = [b"%d" % i for i in range(96)]

    async def body() -> None:
        async with aio.Producer(rocketmq.name_server, "g") as producer:
            queue = (await producer.queues(topic))[0]
            async with aio.PullConsumer(rocketmq.name_server, f"g-{topic}", auto_commit=False) as consumer:
                await consumer.assign([queue])
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(consumer.poll(30), 0.2)  # nothing is there yet
                for each in bodies:
                    await producer.send(Message(topic, each), queue=queue)
                got: list[bytes] = []
                async for message in consumer:
                    got.append(message.body)
                    if len(got) == 12:
                        break
                await consumer.commit()
                assert await consumer.committed(queue) == 12
                async for message in consumer:
                    got.append(message.body)
                    if len(got) == 50:
                        break
                got += [message.body for message in await consumer.poll()]
                while len(got) < 96:
                    got += [message.body for message in await consumer.poll()]
                assert got == bodies
                assert await consumer.poll(0) == []
                await consumer.seek(queue, 90)
                assert [message.body for message in await consumer.poll()] == bodies[90:]
            async with aio.PullConsumer(rocketmq.name_server, f"g-{topic}") as second:
                await second.assign([queue])
                assert (await second.poll())[0].body == b"12"

    run(body)


def test_a_request_is_answered_by_a_coroutine(rocketmq: LocalBroker, topic: str) -> None:
    async def listener(messages: tuple[ReceivedMessage, ...], context: Any) -> None:
        await asyncio.to_thread(context.reply, b"re:" + messages[0].body)

    async def body() -> None:
        async with (
            aio.Consumer(rocketmq.name_server, f"g-{topic}", consume_from_where="earliest") as consumer,
            aio.Producer(rocketmq.name_server, "g") as producer,
        ):
            await consumer.subscribe(topic)
            await consumer.start(listener)
            asked = [producer.request(Message(topic, b"%d" % i), timeout_s=60) for i in range(50)]
            assert [reply.body for reply in await asyncio.gather(*asked)] == [b"re:%d" % i for i in range(50)]

    run(body)


def test_a_web_application_sends_on_each_request(rocketmq: LocalBroker, topic: str) -> None:
    """uvicorn owns the event loop; the producer lives as long as the application."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        async with aio.Producer(rocketmq.name_server, "web") as producer:
            app.state.producer = producer
            yield

    async def order(request: Request) -> PlainTextResponse:
        result = await request.app.state.producer.send(Message(topic, await request.body()))
        return PlainTextResponse(result.msg_id)

    async def body() -> None:
        app = Starlette(routes=[Route("/orders", order, methods=["POST"])], lifespan=lifespan)
        server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answers = await asyncio.gather(*[client.post("/orders", content=b"%d" % i) for i in range(100)])
        assert {answer.status_code for answer in answers} == {200}
        ids.update(answer.text for answer in answers)
        server.should_exit = True
        await serving

    ids: set[str] = set()
    run(body)
    found = java_read(rocketmq.name_server, topic, 100, bodies=True)
    assert {record.id for record in found} == ids
    assert Counter(record.body for record in found) == Counter(b"%d" % i for i in range(100))


def test_simple_consumer_keeps_messages_of_cancelled_receive(proxied: LocalBroker) -> None:
    topic = new_topic(proxied)
    options: dict[str, Any] = {"proxy_endpoint": proxied.proxy_grpc}

    async def body() -> None:
        async with (
            aio.SimpleConsumer(group=f"g-{topic}", **options) as consumer,
            aio.Producer(group="g", transport="grpc", send_timeout="30s", **options) as producer,
        ):
            await consumer.subscribe(topic)
            receiving = asyncio.create_task(consumer.receive(1, wait="20s"))
            await asyncio.sleep(0.5)  # the question is at the Proxy, most likely; if not the test proves less
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            sent = {(await producer.send(Message(topic, b"%d" % i))).msg_id for i in range(3)}
            got: dict[str, bytes] = {}
            while len(got) < 3:
                for message in await consumer.receive(16, wait="5s"):
                    assert message.delivery_attempt == 1, "it was lost, and came again"
                    got[message.msg_id] = message.body
                    await consumer.ack(message)
            assert got.keys() == sent

    run(body)


def test_grpc_coroutine_listener_finishes_and_retries_messages(proxied: LocalBroker) -> None:
    topic = new_topic(proxied)
    options: dict[str, Any] = {"transport": "grpc", "proxy_endpoint": proxied.proxy_grpc}
    got: Counter[bytes] = Counter()
    loops: set[asyncio.AbstractEventLoop] = set()

    async def listener(messages: tuple[PoppedMessage, ...], context: Any) -> object:
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        (message,) = messages
        got[message.body] += 1
        return context.retry(1) if message.body == b"7" and got[message.body] == 1 else None

    async def body() -> None:
        async with (
            aio.Consumer(group=f"g-{topic}", **options) as consumer,
            aio.Producer(group="g", send_timeout="30s", **options) as producer,
        ):
            await consumer.subscribe(topic)
            await consumer.start(listener)
            await asyncio.gather(*[producer.send(Message(topic, b"%d" % i)) for i in range(50)])
            await until(lambda: (consumer.stats().consumed, consumer.stats().cached) == (50, 0))
            assert got == Counter({**{b"%d" % i: 1 for i in range(50)}, b"7": 2})
            assert loops == {asyncio.get_running_loop()}
            assert consumer.stats().failed == 1

    run(body)


def test_the_page_s_programs_do_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "asyncio.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "page", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-3:] == ["sent 10", "orders", "done"]


def test_nothing_is_stored_of_what_was_cancelled_before_it_began(rocketmq: LocalBroker, topic: str) -> None:
    async def body() -> None:
        async with aio.Producer(rocketmq.name_server, "g") as producer:
            await producer.send(Message(topic, b"first"))
            send = asyncio.create_task(producer.send(Message(topic, b"cancelled")))
            asyncio.get_running_loop().call_soon(send.cancel)
            await producer.send(Message(topic, b"second"))
            assert send.cancelled()

    run(body)
    assert Counter(message.body for message in stored(rocketmq, topic, 2)) == Counter([b"first", b"second"])
