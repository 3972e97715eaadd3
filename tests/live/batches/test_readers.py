"""What sink and producer write to a batch topic, as RocketMQ's own consumers read it, and ours: each message once, by its id."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark import Producer
from rocketmq_spark.base.codes import Property
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.helpers import killed
from tests.live.consumer.members import Members, members
from tests.live.writes import Make, Writes, frame, numbered, writes
from tests.mockbroker import eventually
from tests.reading import names, read
from tests.scale import scaled
from tests.witness import Record, java_read

__all__ = ["members", "writes"]

COUNT = scaled(200_000) // 2  # by the sink, and as many by a producer
ROWS = 2_000
KILLS = scaled(5)
TAGS = ("a", "b", "c", None)


@pytest.fixture
def topic(make_topic: Make) -> str:
    """Members are those of this topic, too."""
    return make_topic(queues=4, batch=True)


def batches(count: int, first: int = 0) -> Iterator[Any]:
    for at in range(first, first + count, ROWS):
        rows = range(at, min(first + count, at + ROWS))
        yield frame(
            body=numbered(len(rows), at),
            tags=[TAGS[i % len(TAGS)] for i in rows],
            keys=[[f"k{i % 50}"] for i in rows],
            properties=[[("n", f"{i}")] for i in rows],
        )


def sink_ids(writes: Writes) -> Counter[str]:
    """Ids of what the sink handed to brokers, each batch once, however often it was tried."""
    requests = {id(request): request for _, request in writes.requests}
    items = [item for request in requests.values() for item in decode_batch(bytes(request.body))]
    return Counter(decode_properties(item.properties)[Property.UNIQ_KEY] for item in items)


def produced(mq: LocalBroker, topic: str, count: int, first: int) -> None:
    with Producer(name_server=mq.name_server, group="p_whole", send_timeout="30s") as producer:
        for at in range(first, first + count, ROWS):
            rows = range(at, min(first + count, at + ROWS))
            for tag in TAGS:
                of_tag = [Message(topic, f"{i:06}".encode(), tags=tag) for i in rows if TAGS[i % len(TAGS)] == tag]
                if of_tag:
                    producer.send_batch(of_tag)


def ours(mq: LocalBroker, topic: str, **options: str) -> Counter[tuple[str, int, int]]:
    return Counter((row["msgId"], row["queueId"], row["queueOffset"]) for row in read(mq, subscribe=topic, **options))


def seen(records: list[Record]) -> Counter[tuple[str, int, int]]:
    return Counter((record.id, record.queue, record.offset) for record in records)


def test_javas_consumers_read_what_sink_and_producer_wrote(
    rocketmq: LocalBroker, topic: str, writes: Writes, members: Members
) -> None:
    """One member of each kind: push, LitePull, and plain pulls, which see properties too."""
    done = writes.stream(batches(COUNT), next(batches(1)).schema, topic=topic, batchMaxBytes="64k")
    assert done.rows == COUNT
    produced(rocketmq, topic, COUNT, COUNT)
    whole = java_read(rocketmq.name_server, topic, 2 * COUNT, bodies=True)
    assert sorted(record.body.decode() for record in whole) == numbered(2 * COUNT)
    assert all(record.tags == TAGS[int(record.body) % len(TAGS)] for record in whole)
    of_sink = [record for record in whole if int(record.body) < COUNT]
    assert Counter(record.id for record in of_sink) == sink_ids(writes)
    assert all(record.properties["n"] == str(int(record.body)) for record in of_sink)
    assert all(record.keys == [f"k{int(record.body) % 50}"] for record in of_sink)
    places = seen(whole)
    assert len(places) == 2 * COUNT
    assert ours(rocketmq, topic) == places
    for group, more in (("push", {}), ("lite", {"lite": "true"})):
        members.group = f"g-{group}-{topic}"
        with members.java(**more) as java:
            eventually(lambda: len(java.got()) >= 2 * COUNT, 300)
        assert Counter((got["id"], got["queue"], got["offset"]) for got in java.got()) == places


def test_a_broker_filters_batches_by_the_tag_of_their_rows(
    rocketmq: LocalBroker, topic: str, writes: Writes, members: Members
) -> None:
    """Java's member gets every message of a tag. Ours reads the same, though it compares tags itself."""
    writes.stream(batches(ROWS), next(batches(1)).schema, topic=topic)
    wanted = {f"{i:06}" for i in range(ROWS) if TAGS[i % len(TAGS)] in ("a", "c")}
    with members.java(tags="a || c") as java:
        eventually(lambda: len(java.got()) >= len(wanted), 60)
    assert Counter(java.bodies()) == Counter(wanted)
    assert ours(rocketmq, topic, tags="a || c").total() == len(wanted)


def test_kills_of_a_broker_in_the_middle_of_a_write_lose_nothing(
    lone: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was stored and not acknowledged is there twice, as a whole; Java and we see the same."""
    (topic,) = names(1, "killed")
    lone.create_topic(topic, queues=4, batch=True)
    writes = Writes(lone.name_server, monkeypatch)
    every = 2 * COUNT // ROWS // KILLS
    restarts: list[threading.Thread] = []

    def interrupted() -> Iterator[Any]:
        """The rows; in the middle of each part of them the broker dies while they are under way."""
        for number, batch in enumerate(batches(2 * COUNT)):
            if number % every == every // 2:
                for earlier in restarts:
                    earlier.join()
                killed(lone, "broker-a")
                restarts.append(threading.Thread(target=lone.restart, args=("broker-a",)))
                restarts[-1].start()
            yield batch

    done = writes.stream(interrupted(), next(batches(1)).schema, topic=topic, batchMaxBytes="64k")
    restarts[-1].join()
    assert (done.rows, len(restarts)) == (2 * COUNT, KILLS)
    assert done.retries
    whole = java_read(lone.name_server, topic, 2 * COUNT, bodies=True)
    assert set(sink_ids(writes)) == {record.id for record in whole}
    assert {record.body.decode() for record in whole} == set(numbered(2 * COUNT))
    assert ours(lone, topic) == seen(whole)
    print(f"{KILLS} kills, {done.retries} batches tried again, {len(whole) - 2 * COUNT} messages twice")
