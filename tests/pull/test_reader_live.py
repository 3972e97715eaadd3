"""Offset ranges on a real broker, with a faulty network between, and with a broker that is killed and comes back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from rocketmq_spark.base.codes import PullSysFlag
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import BrokerBusy
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, OffsetRange, SendRequest
from rocketmq_spark.pull import progress_timeout
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.remoting.bulk import BulkStream, PullTemplate
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.messages import BatchItem, decode_messages, encode_batch
from tests.client.conftest import Parts
from tests.fix_proxy import FaultyProxy
from tests.helpers import awaited, killed, told
from tests.mockbroker import eventually
from tests.reading import names


def template(queue: MessageQueue) -> PullTemplate:
    fields = {"commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0, "queueOffset": 0, "maxMsgNums": 1}
    return PullTemplate(
        rpc.PULL_MESSAGE.request(
            consumerGroup=f"reader-{queue.topic}",
            topic=queue.topic,
            queueId=queue.queue_id,
            sysFlag=PullSysFlag.SUBSCRIPTION,
            subscription="*",
            bname=queue.broker_name,
            **fields,
        )
    )


class Reading:
    """A read of whole queues; every message is decoded and its offset noted."""

    def __init__(
        self, ranges: Sequence[OffsetRange], address: Callable[[], str], settings: PullSettings | None = None
    ) -> None:
        self.ranges = ranges
        self.lost: list[tuple[int, int, Cause]] = []
        self.offsets: list[tuple[int, int]] = []
        self.reader = RangeReader(
            ranges,
            lambda deadline: BulkStream(address(), deadline.within(2.0), None),
            [template(r.queue) for r in ranges],
            settings or PullSettings(),
            lambda part, cause: self.lost.append((part.start, part.end, cause)),
        )

    def __iter__(self) -> Iterator[int]:
        for fetched in self.reader.fetch():
            for answer in fetched.answers:
                body = memoryview(fetched.buffer)[answer.begin : answer.end]
                self.offsets += [(m.queue_id, m.queue_offset) for m in decode_messages(body)]
            yield len(fetched.answers)

    def run(self) -> list[tuple[int, int]]:
        for _ in self:
            pass
        return self.offsets

    @property
    def expected(self) -> list[tuple[int, int]]:
        return [(r.queue.queue_id, n) for r in self.ranges for n in range(r.start, r.end)]


def fill(parts: Parts, topic: str, counts: Sequence[int], size: int = 200) -> list[MessageQueue]:
    """Send so many messages to each queue; returns when all can be read."""
    queues = [MessageQueue(topic, parts.sender.publish_queues(topic, parts.soon)[0].broker_name, i)
              for i in range(len(counts))]  # fmt: skip
    for queue, count in zip(queues, counts, strict=True):
        for at in range(0, count, 2000):
            items = [BatchItem(bytes(size), f"UNIQ_KEY\x01{n}\x02") for n in range(at, min(count, at + 2000))]
            request = SendRequest("g", encode_batch(items), batch=True)
            eventually(lambda queue=queue, request=request: sent(parts, queue, request))  # type: ignore[misc]
    wanted = dict(zip(queues, counts, strict=True))
    eventually(lambda: parts.offset_reader.max_offsets(queues, parts.soon) == wanted)
    return queues


def sent(parts: Parts, queue: MessageQueue, request: SendRequest) -> bool:
    """False when the broker was busy: that is never stored."""
    try:
        parts.sender.send(queue, request, parts.soon)
    except BrokerBusy:
        return False
    return True


def whole(queues: Sequence[MessageQueue], counts: Sequence[int]) -> list[OffsetRange]:
    return [OffsetRange(queue, 0, count) for queue, count in zip(queues, counts, strict=True)]


@pytest.fixture
def admin(broker_cluster: LocalBroker) -> BaseAdmin:
    return broker_cluster.admin


@pytest.fixture
def filled(real: Parts, topic: str) -> list[OffsetRange]:
    counts = (3000, 1, 500)
    return whole(fill(real, topic, counts), counts)


@pytest.fixture
def address(real: Parts, filled: list[OffsetRange]) -> str:
    return real.routes.address(filled[0].queue.broker_name)


def test_whole_queues_at_sight(filled: list[OffsetRange], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer has the layout that is recognised without being parsed."""
    monkeypatch.setattr(BulkStream, "_parse_frame", None)
    reading = Reading(filled, lambda: address)
    assert reading.run() == reading.expected
    assert reading.reader.requests.sent_count < 150


def test_cold_data_in_eights(lone: LocalBroker) -> None:
    ratios = ("accessMessageInMemoryMaxRatio", "accessMessageInMemoryHotRatio")
    (broker,), counts = lone.brokers, (3000, 1, 500)
    (topic,) = names(1, "eights")
    lone.create_topic(topic, queues=len(counts))
    with contextlib.closing(Parts(lone.name_server)) as parts:
        filled = whole(fill(parts, topic, counts), counts)
        before = {name: lone.admin.broker_config(broker)[name] for name in ratios}
        lone.admin.update_broker_config(broker, dict.fromkeys(ratios, "0"))
        try:
            reading = Reading(filled, lambda: lone.address(broker))
            assert reading.run() == reading.expected
            assert reading.reader.requests.sent_count > 400
        finally:
            lone.admin.update_broker_config(broker, before)


def test_what_was_acknowledged_a_moment_ago_is_not_loss(real: Parts, topic: str) -> None:
    queue = real.sender.publish_queues(topic, real.soon)[0]
    body = encode_batch([BatchItem(bytes(50), f"UNIQ_KEY\x01{n}\x02") for n in range(2000)])
    real.sender.send(queue, SendRequest("g", body, batch=True), real.soon)
    reading = Reading([OffsetRange(queue, 0, 2000)], lambda: real.routes.address(queue.broker_name))
    assert reading.run() == reading.expected
    assert reading.lost == []


def test_an_operator_s_reset_is_ignored(real: Parts, filled: list[OffsetRange], address: str) -> None:
    topic = filled[0].queue.topic
    Reading([OffsetRange(filled[0].queue, 0, 1)], lambda: address).run()  # now the group exists
    reset = rpc.INVOKE_BROKER_TO_RESET_OFFSET.request(
        group=f"reader-{topic}", topic=topic, timestamp=0, isForce=True, queueId=-1
    )
    assert real.rpc_client.request(address, reset).code == 0
    reading = Reading([OffsetRange(filled[0].queue, 100, 300)], lambda: address)
    assert reading.run() == reading.expected
    assert reading.reader.requests.sent_count > 1


def test_a_deleted_topic_and_one_that_was_made_again(
    real: Parts, filled: list[OffsetRange], address: str, admin: BaseAdmin
) -> None:
    topic, settings = filled[0].queue.topic, PullSettings(grace_s=0.3)
    admin.delete_topic(topic)
    gone = Reading(filled[:1], lambda: address, settings)
    assert gone.run() == []
    assert gone.lost == [(0, 3000, Cause.TOPIC_DELETED)]
    admin.create_topic(topic, 1)
    fill(real, topic, [10])
    again = Reading(filled[:1], lambda: address, settings)
    assert again.run() == [(0, n) for n in range(10)]
    assert again.lost == [(10, 3000, Cause.WENT_BACK)]


def test_a_queue_that_is_hidden(filled: list[OffsetRange], address: str, admin: BaseAdmin) -> None:
    admin.create_topic(filled[0].queue.topic, 2)
    reading = Reading(filled[2:], lambda: address, PullSettings(grace_s=0.3))
    assert reading.run() == []
    assert reading.lost == [(0, 500, Cause.QUEUE_GONE)]


class TestFaultyNetwork:
    @pytest.fixture
    def proxy(self, address: str, make_proxy: Callable[[str], FaultyProxy]) -> FaultyProxy:
        return make_proxy(address)

    def test_connections_that_break_again_and_again(self, filled: list[OffsetRange], proxy: FaultyProxy) -> None:
        reading = Reading(filled, lambda: proxy.address, PullSettings(offsets_per_fetch=100))
        proxy.cut_after(50_000)
        for i, _ in enumerate(reading):
            proxy.cut_after(30_000 + 7_000 * i)
        assert reading.offsets == reading.expected
        assert proxy.cuts > 0  # how often it meets an open one is chance

    def test_resets_between_buffers(self, filled: list[OffsetRange], proxy: FaultyProxy) -> None:
        reading = Reading(filled, lambda: proxy.address, PullSettings(offsets_per_fetch=500))
        for _ in reading:
            proxy.cut(reset=True)
        assert reading.offsets == reading.expected
        assert proxy.cuts > 0  # how often it meets an open one is chance

    def test_a_byte_at_a_time(self, filled: list[OffsetRange], proxy: FaultyProxy) -> None:
        proxy.max_per_write = 1
        reading = Reading([OffsetRange(filled[0].queue, 10, 40)], lambda: proxy.address)
        assert reading.run() == reading.expected

    def test_a_way_that_swallows_everything_is_left(
        self, filled: list[OffsetRange], proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress_timeout, "MAX_BROKER_SILENCE_S", 0.2)
        taken: list[str] = []

        def way() -> str:
            taken.append(proxy.target if taken else proxy.address)
            return taken[-1]

        count = proxy.count

        def swallowing(size: int, answers: bool) -> None:
            """From some answers on: all may be there before the first rows are looked at."""
            count(size, answers)
            if proxy.answered > 30_000:
                proxy.black_hole()

        monkeypatch.setattr(proxy, "count", swallowing)
        reading = Reading(filled, way, PullSettings(offsets_per_fetch=100))
        reading.run()
        assert reading.offsets == reading.expected
        assert taken[1:], "all was there before"

    def test_a_slow_way(self, filled: list[OffsetRange], proxy: FaultyProxy) -> None:
        proxy.delay_s = 0.005
        reading = Reading(filled, lambda: proxy.address)
        assert reading.run() == reading.expected


def test_broker_killed_during_a_read_loses_and_repeats_nothing(lone: LocalBroker) -> None:
    """Most of it was not asked for when the broker dies, and it stays away until the read says that it waits."""
    counts, most = (3000, 1000), 256 << 10
    (topic,) = names(1, "killed")
    lone.create_topic(topic, 2)
    parts = Parts(lone.name_server)
    queues = fill(parts, topic, counts, 1000)
    (broker,) = lone.brokers
    settings = PullSettings(max_bytes_in_flight=most, offsets_per_fetch=500, read_deadline_s=600.0)
    reading = Reading(whole(queues, counts), lambda: lone.address(broker), settings)
    with told("the read waits for") as missed:
        restart = threading.Thread(target=lambda: (awaited(missed.is_set), lone.restart(broker)))
        for i, _ in enumerate(reading):
            if i == 1:
                assert len(reading.offsets) + most // 1000 < sum(counts), "all of it may be here"
                killed(lone, broker)
                restart.start()
        assert missed.is_set(), "nobody missed it"
        restart.join()
    parts.pool.close()
    assert reading.lost == []
    assert reading.offsets == reading.expected
