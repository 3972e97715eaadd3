"""How a task reads: pulls under way, their bytes, its patience, and from which replica."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.remoting import bulk
from tests.mockbroker import eventually
from tests.reading import batch_reader, bodies, feed, names, post, read, rows


class InFlight:
    """What pulls of one read have under way, by their frames and answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pulls = self.messages = 0
        self._asked: dict[int, int] = {}
        frame, scan = bulk.PullTemplate.frame, bulk.BulkStream.scan

        def counted(template: bulk.PullTemplate, opaque: int, offset: int, count: int) -> bytes:
            self._asked[opaque] = count
            self.pulls = max(self.pulls, len(self._asked))
            self.messages = max(self.messages, sum(self._asked.values()))
            return frame(template, opaque, offset, count)

        def answered(stream: bulk.BulkStream):
            found, others = scan(stream)
            for opaque in [one[0] for one in (*found, *others)]:
                self._asked.pop(opaque, None)
            return found, others

        patch.setattr(bulk.PullTemplate, "frame", counted)
        patch.setattr(bulk.BulkStream, "scan", answered)


@pytest.fixture
def in_flight(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> Iterator[Callable[..., InFlight]]:
    """Reads a thousand messages of 8 KB and says what was under way."""
    topic = make_topic(queues=1)
    post(rocketmq, [Message(topic, f"{name:<8000}".encode()) for name in names(1000)])

    def under_way(**options: object) -> InFlight:
        with pytest.MonkeyPatch.context() as patch:
            seen = InFlight(patch)
            reader = batch_reader(rocketmq, subscribe=topic, numPartitions=1, **options)
            assert len(rows(reader, reader.partitions())) == 1000
            return seen

    return under_way


def test_pull_depth__is_how_many_pulls_are_under_way(in_flight):
    assert in_flight(pullDepth=1).pulls == 1
    assert in_flight(pullDepth=3).pulls == 3
    assert in_flight(pullDepth=20).pulls > 3


def test_max_bytes_in_flight__bounds_what_is_under_way(in_flight):
    assert in_flight(maxBytesInFlight="64k").messages <= 8
    assert in_flight(maxBytesInFlight="256k", pullDepth=1024).messages <= 32
    assert in_flight().messages > 64


def test_read_deadline__ends_wait_for_silent_broker(rocketmq, topic, make_proxy):
    feed(rocketmq, topic, 8)
    address = rocketmq.address("broker-a")
    proxy = make_proxy(address)
    reader = batch_reader(rocketmq, subscribe=topic, addressMap={address: proxy.address}, readDeadline="1s")
    partitions = reader.partitions()
    proxy.black_hole()
    started = time.monotonic()
    with pytest.raises(CallTimeout, match="readDeadline"):
        rows(reader, partitions)
    assert 1 <= time.monotonic() - started < 100  # of two minutes that it would wait
    proxy.heal()
    assert len(rows(reader, partitions)) == 8


def test_read_from__chooses_master_slave_or_brokers_suggestion(slaved, monkeypatch):
    slaved.create_topic("replicated", 4)
    sent = set(feed(slaved, "replicated", 40))
    master, slave = slaved.address("broker-a"), slaved.address("broker-a-slave-1")
    dialled: list[str] = []
    connect = bulk.connect

    def noted(address, deadline, tls):
        dialled.append(address)
        return connect(address, deadline, tls)

    monkeypatch.setattr(bulk, "connect", noted)

    def went(where: str) -> set[str]:
        dialled.clear()
        assert Counter(bodies(read(slaved, subscribe="replicated", readFrom=where))) == Counter(sent)
        return set(dialled)

    assert went("master") == went("hint") == {master}
    # As soon as it has everything; until then its master is asked for what it lacks.
    eventually(lambda: went("slave") == {slave}, 60)
