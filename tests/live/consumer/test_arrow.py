"""Listeners of record batches on a real broker: every row that a listener of messages would get, and no other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import Consumer, Producer, aio
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX
from rocketmq_spark.consumer import push
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from tests.mockbroker import eventually
from tests.reading import feed
from tests.witness import java_read

_clients = itertools.count(5000)
MANY = 12_000  # so many that they are read ahead
WAIT_S = 60.0
OFTEN = {"persist_consumer_offset_interval": "200ms"}


class Group:
    """Members of one group, each with a client of its own, whose listeners get batches; ``got`` are the bodies of rows and their
    places.
    """

    def __init__(self, mq: LocalBroker, topic: str) -> None:
        self.mq, self.topic, self.name = mq, topic, f"a-{topic}"
        self.got: list[tuple[str, MessageQueue, int]] = []
        self.ids: list[str] = []
        self.sizes: list[int] = []
        self.lock = threading.Lock()
        self.all: list[Consumer] = []

    def make(self, **options: Any) -> Consumer:
        given = {"consume_from_where": "earliest", "arrow": True, **OFTEN, **options}
        self.all.append(Consumer(self.mq.name_server, self.name, connect_timeout=next(_clients), **given))
        return self.all[-1]

    def start(
        self, listener: Callable[..., Any] = lambda batch, context: None, tags: str | None = None, **options: Any
    ) -> Consumer:
        consumer = self.make(**options)
        consumer.subscribe(self.topic, tags=tags)

        def noting(batch: Any, context: Any) -> Any:
            self.note(batch, context)
            return listener(batch, context)

        consumer.start(noting)
        return consumer

    def note(self, batch: Any, context: Any) -> None:
        found = batch.to_pydict()
        with self.lock:
            self.sizes.append(batch.num_rows)
            self.ids += found["msgId"]
            self.got += [
                (body.decode(), context.queue, offset)
                for body, offset in zip(found["body"], found["queueOffset"], strict=True)
            ]

    def bodies(self) -> list[str]:
        with self.lock:
            return [body for body, _, _ in self.got]

    def stored(self, topic: str | None = None) -> int:
        queues = self.mq.admin.route(topic or self.topic).readable_queues()
        found = self.mq.admin.offset_reader.committed(self.name, queues, Deadline.after(10))
        return sum(offset or 0 for offset in found.values())

    def all_stored(self, count: int, topic: str | None = None) -> None:
        """Before who consumed them leaves: see ``Members.all_stored``."""
        eventually(lambda: self.stored(topic) == count, WAIT_S)


def owned(consumer: Consumer, topic: str) -> int:
    running = consumer._running
    return sum(held.queue.topic == topic for held in running.state.owned_queues())  # type: ignore[union-attr]


@pytest.fixture
def batches(rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(push, "FIRST_COMMIT_DELAY_S", 1.0)
    made = Group(rocketmq, topic)
    yield made
    for consumer in made.all:
        consumer.stop(5)


@pytest.mark.parametrize("ordered", [False, True])
def test_backlog_comes_once_in_large_batches_then_small_ones(batches: Group, ordered: bool) -> None:
    sent = feed(batches.mq, batches.topic, MANY)
    consumer = batches.start(ordered=ordered)
    eventually(lambda: len(batches.bodies()) >= MANY, WAIT_S)
    assert max(batches.sizes) > 32
    sent += feed(batches.mq, batches.topic, 40)
    eventually(lambda: len(batches.bodies()) >= len(sent), WAIT_S)
    batches.all_stored(len(sent))
    assert consumer.stop() == []
    assert Counter(batches.bodies()) == Counter(sent)
    assert batches.stored() == len(sent)
    assert Counter(batches.ids) == Counter(
        record.id for record in java_read(batches.mq.name_server, batches.topic, len(sent))
    )
    if ordered:
        for _, places in itertools.groupby(sorted(batches.got, key=lambda each: each[1]), key=lambda each: each[1]):
            offsets = [offset for _, _, offset in places]
            assert offsets == sorted(offsets)


@pytest.mark.parametrize("ordered", [False, True])
def test_two_members_that_join_and_leave_get_all_rows(batches: Group, ordered: bool) -> None:
    sent = feed(batches.mq, batches.topic, MANY)
    first = batches.start(ordered=ordered)
    eventually(lambda: len(batches.bodies()) >= MANY // 4, WAIT_S)
    second = batches.start(ordered=ordered)
    eventually(lambda: owned(first, batches.topic) == owned(second, batches.topic) == 4, WAIT_S)
    eventually(lambda: set(batches.bodies()) == set(sent), WAIT_S)
    calm = feed(batches.mq, batches.topic, MANY)
    eventually(lambda: set(batches.bodies()) == {*sent, *calm}, WAIT_S)
    batches.all_stored(len(sent) + len(calm))
    assert second.stop() == []
    eventually(lambda: owned(first, batches.topic) == 8, WAIT_S)
    calm += feed(batches.mq, batches.topic, 400)
    eventually(lambda: set(batches.bodies()) == {*sent, *calm}, WAIT_S)
    batches.all_stored(len(sent) + len(calm))
    assert first.stop() == []
    counts = Counter(batches.bodies())
    assert [body for body in calm if counts[body] > 1] == []  # of the first ones some may have come to both
    assert batches.stored() == len(sent) + len(calm)


def test_failed_rows_are_retried_and_then_become_dead_letters(batches: Group) -> None:
    """Of a batch only those behind ``ack_index`` fail."""
    sent, failed = feed(batches.mq, batches.topic, 600), set[str]()

    def listener(batch: Any, context: Any) -> Any:
        if context.queue.topic != batches.topic:
            return context.retry(1)
        context.ack_index, context.delay_level = batch.num_rows // 2 - 1, 1
        failed.update(body.decode() for body in batch.column("body").to_pylist()[batch.num_rows // 2 :])
        return None

    consumer = batches.start(listener, max_reconsume_times=2)
    retry = RETRY_PREFIX + batches.name
    eventually(lambda: len(set(batches.bodies())) == 600 and consumer.stats().sent_back == 3 * len(failed), WAIT_S)
    batches.all_stored(2 * len(failed), retry)
    assert consumer.stop() == []
    assert Counter(batches.bodies()) == Counter([*sent, *failed, *failed])
    assert 300 <= len(failed) < 600
    assert (batches.stored(), batches.stored(retry)) == (600, 2 * len(failed))
    dead = java_read(batches.mq.name_server, DLQ_PREFIX + batches.name, len(failed))
    ids = dict(zip(batches.bodies(), batches.ids, strict=True))
    assert Counter(record.id for record in dead) == Counter(ids[body] for body in failed)


def test_failed_ordered_batch_is_retried_until_dead_letter(batches: Group) -> None:
    feed(batches.mq, batches.topic, 90, queues=[0])
    failing: set[int] = set()

    def listener(batch: Any, context: Any) -> Any:
        first = batch.column("queueOffset")[0].as_py()
        if not failing:
            failing.update(batch.column("queueOffset").to_pylist())
        return context.suspend(10) if first in failing else None

    consumer = batches.start(listener, ordered=True, max_reconsume_times=2, consume_message_batch_max_size=20)
    eventually(lambda: consumer.stats().consumed == 90 - len(failing) and failing != set(), WAIT_S)
    batches.all_stored(90)
    assert consumer.stop() == []
    bad = [offset for _, _, offset in batches.got if offset in failing]
    assert bad == 3 * sorted(failing)
    assert [offset for _, _, offset in batches.got[len(bad) :]] == [*range(len(failing), 90)]
    assert (len(failing), max(batches.sizes)) == (20, 20)
    assert batches.stored() == 90
    dead = java_read(batches.mq.name_server, DLQ_PREFIX + batches.name, len(failing))
    assert {record.id for record in dead} == set(batches.ids[: len(failing)])


def test_tags_are_filtered_and_large_bodies_come_whole(batches: Group) -> None:
    feed(batches.mq, batches.topic, 200, tags="b")
    wanted = feed(batches.mq, batches.topic, 200, tags="a")
    with Producer(batches.mq.name_server, f"p-{batches.topic}") as producer:
        producer.send(Message(batches.topic, b"x" * (3 << 20), tags="a"))
    consumer = batches.start(tags="a || c")
    eventually(lambda: len(batches.bodies()) >= 201, WAIT_S)
    assert consumer.stop() == []
    assert Counter(map(len, batches.bodies()))[3 << 20] == 1
    assert Counter(body for body in batches.bodies() if len(body) < 1000) == Counter(wanted)


def test_coroutines_get_batches(batches: Group) -> None:
    sent = feed(batches.mq, batches.topic, 300)

    async def consume() -> None:
        done = asyncio.Event()

        async def listener(batch: Any, context: Any) -> None:
            await asyncio.sleep(0)
            batches.note(batch, context)
            if len(batches.got) >= len(sent):
                done.set()

        async with aio.Consumer(
            batches.mq.name_server, batches.name, arrow=True, consume_from_where="earliest", **OFTEN
        ) as consumer:
            await consumer.subscribe(batches.topic)
            await consumer.start(listener)
            await asyncio.wait_for(done.wait(), WAIT_S)
            await asyncio.to_thread(batches.all_stored, len(sent))

    asyncio.run(consume())
    assert Counter(batches.bodies()) == Counter(sent)
    assert batches.stored() == len(sent)
