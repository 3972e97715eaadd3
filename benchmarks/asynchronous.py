"""Producers and consumers for asyncio next to those for threads: the same work, in turns."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import harness, raw, workload
from benchmarks.harness import Case, Found, Result
from rocketmq_spark import Consumer, Message, Producer, PullConsumer, aio
from rocketmq_spark.localbroker import LocalBroker

AT_ONCE = 64  # senders that wait for each of their sends
FEWER = 50
SENDS, LISTENERS = "sends of 64 senders", "messages to a listener"
SIZE = 100
_WITHIN_S = 120.0


def run(broker: LocalBroker, options: Any, found: Found) -> None:
    count = harness.count_of(options.messages, SIZE) // FEWER
    broker.create_topic("asyncio-sends")
    workload.fill(broker, "asyncio-reads", 5 * count, SIZE)
    pairs = Pairs(broker, count)
    for title, cases in ((SENDS, pairs.senders()), (LISTENERS, pairs.readers())):
        harness.rounds(cases, options.repeats)
        found[f"asyncio {title}"] = harness.report(f"Asyncio: {title}, {SIZE} B (thousand a second)", cases, SIZE)


class Pairs:
    """Each way with threads, and with coroutines."""

    def __init__(self, broker: LocalBroker, count: int) -> None:
        self.broker, self.count = broker, count
        self.pid = raw.pid_of(broker)
        self.body = bytes(SIZE)

    def senders(self) -> list[Case]:
        return [
            Case("Producer.send, threads", lambda: self.sent_by_threads({})),
            Case("aio.Producer.send", lambda: asyncio.run(self.sent_by_tasks({}))),
            Case("Producer.send, threads, autoBatch", lambda: self.sent_by_threads({"auto_batch": True})),
            Case("aio.Producer.send, autoBatch", lambda: asyncio.run(self.sent_by_tasks({"auto_batch": True}))),
        ]

    def readers(self) -> list[Case]:
        return [
            Case("Consumer", self.heard_by_threads),
            Case("aio.Consumer", lambda: asyncio.run(self.heard_by_tasks())),
            Case("PullConsumer, loop", self.looped),
            Case("aio.PullConsumer, loop", lambda: asyncio.run(self.looped_by_a_task())),
        ]

    def sent_by_threads(self, how: dict[str, Any]) -> Result:
        message = Message("asyncio-sends", self.body)
        with Producer(self.broker.name_server, "bench", **how) as producer, ThreadPoolExecutor(AT_ONCE) as threads:
            producer.send(message)

            def each(_: int) -> int:
                for _ in range(self.count // AT_ONCE):
                    producer.send(message)
                return self.count // AT_ONCE

            with harness.timed([self.pid], self.count // AT_ONCE * AT_ONCE) as result:
                done = sum(threads.map(each, range(AT_ONCE)))
        harness.expect("Producer", done, result.messages)
        return result

    async def sent_by_tasks(self, how: dict[str, Any]) -> Result:
        message = Message("asyncio-sends", self.body)
        async with aio.Producer(self.broker.name_server, "bench", **how) as producer:
            await producer.send(message)

            async def each() -> int:
                for _ in range(self.count // AT_ONCE):
                    await producer.send(message)
                return self.count // AT_ONCE

            with harness.timed([self.pid], self.count // AT_ONCE * AT_ONCE) as result:
                done = sum(await asyncio.gather(*[each() for _ in range(AT_ONCE)]))
        harness.expect("aio.Producer", done, result.messages)
        return result

    def heard_by_threads(self) -> Result:
        done, calls = threading.Event(), itertools.count(1)

        def listener(messages: Any, context: Any) -> None:
            if next(calls) == 5 * self.count:
                done.set()

        with Consumer(**self._of_a_group()) as consumer:
            consumer.subscribe("asyncio-reads")
            with harness.timed([self.pid], 5 * self.count) as result:
                consumer.start(listener)
                done.wait(_WITHIN_S)
        harness.expect("Consumer", next(calls) - 1, result.messages)
        return result

    async def heard_by_tasks(self) -> Result:
        done, calls = asyncio.Event(), itertools.count(1)

        async def listener(messages: Any, context: Any) -> None:
            if next(calls) == 5 * self.count:
                done.set()

        async with aio.Consumer(**self._of_a_group()) as consumer:
            await consumer.subscribe("asyncio-reads")
            with harness.timed([self.pid], 5 * self.count) as result:
                await consumer.start(listener)
                await asyncio.wait_for(done.wait(), _WITHIN_S)
        harness.expect("aio.Consumer", next(calls) - 1, result.messages)
        return result

    def looped(self) -> Result:
        with PullConsumer(**self._of_a_group()) as consumer, harness.timed([self.pid], 5 * self.count) as result:
            consumer.assign(self._queues())
            rows = sum(1 for _ in itertools.islice(consumer, result.messages))
        harness.expect("PullConsumer", rows, result.messages)
        return result

    async def looped_by_a_task(self) -> Result:
        rows = 0
        async with aio.PullConsumer(**self._of_a_group()) as consumer:
            with harness.timed([self.pid], 5 * self.count) as result:
                await consumer.assign(self._queues())
                async for _ in consumer:
                    rows += 1
                    if rows == result.messages:
                        break
        harness.expect("aio.PullConsumer", rows, result.messages)
        return result

    def _of_a_group(self) -> dict[str, Any]:
        return {
            "name_server": self.broker.name_server,
            "group": f"bench-{os.urandom(4).hex()}",
            "consume_from_where": "earliest",
        }

    def _queues(self) -> list[Any]:
        return sorted(self.broker.admin.route("asyncio-reads").readable_queues())
