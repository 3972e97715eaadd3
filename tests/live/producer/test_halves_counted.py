"""A third each of many half messages is committed, rolled back, left: over gRPC, and over remoting while the broker is killed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark import Message, PoppedMessage, Producer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import ReceivedMessage
from tests.fix_clusters import ASKS, WITHOUT_TIMERS
from tests.helpers import killed, stored_now
from tests.live.grpc.proxied import new_topic
from tests.live.producer import halving
from tests.mockbroker import eventually
from tests.scale import SCALE, soak
from tests.witness import java_read

THROUGH_PROXY = 1000 if SCALE >= 1 else 90
DEATHS = 20 if SCALE >= 1 else 3
MANY, KILLS = (10_000, 10) if SCALE >= 1 else (400, 1)
THREADS = 6
CONF = {**WITHOUT_TIMERS, **ASKS, "transactionCheckMax": 450}


@pytest.fixture(scope="module")
def counting() -> Iterator[LocalBroker]:
    """A broker that asks soon and often, and a Proxy."""
    with LocalBroker(conf=CONF, proxy=True, quiet=True) as mq:
        yield mq


class Shop:
    """Its database is what was saved. Of those that are left half were saved."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.saved: set[bytes] = set()
        self.asked: Counter[bytes] = Counter()
        self.doubtful: set[bytes] = set()  # a decision that may not have arrived
        self.again = 0
        self.done = self.begun = 0
        self.until = 0  # no more may begin
        self.may_begin = threading.Condition()
        self.broken: list[BaseException] = []

    def decide(self, message: ReceivedMessage | PoppedMessage) -> str:
        self.asked[message.body] += 1
        return "COMMIT" if message.body in self.saved else "ROLLBACK"

    def let(self, many: int) -> None:
        """So many orders in all may begin."""
        with self.may_begin:
            self.until = many
            self.may_begin.notify_all()

    def order(self, producer: Producer, i: int) -> None:
        with self.may_begin:
            assert self.may_begin.wait_for(lambda: self.begun < self.until, 300), "no more may begin"
            self.begun += 1
        body, kind = b"%d" % i, i % 3
        deadline = time.monotonic() + 120
        while True:
            try:
                half = producer.send_half(Message(self.topic, body))
                break
            except RocketMQError:
                assert time.monotonic() < deadline
                self.again += 1
        if kind == 0 or (kind == 2 and i % 2):
            self.saved.add(body)
        try:
            if kind == 0:
                half.commit()
            elif kind == 1:
                half.rollback()
        except RocketMQError:
            self.doubtful.add(body)
        with self.may_begin:
            self.done += 1

    def all(self, producer: Producer, many: int, kills: int = 0) -> list[threading.Thread]:
        """Threads that order so many; at most so many as are to be ordered before the first kill and the second, if there are."""
        self.let(2 * many // (kills + 2))

        def work(first: int) -> None:
            try:
                for i in range(first, many, THREADS):
                    self.order(producer, i)
            except BaseException as e:
                self.broken.append(e)
                raise

        threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
        for thread in threads:
            thread.start()
        return threads

    def broker_dies(self, mq: LocalBroker, threads: list[threading.Thread], many: int) -> None:
        """It is killed and started again, at equal distances, while so many are ordered: the next ones only when it is dead."""
        for number in range(KILLS):
            eventually(lambda number=number: self.done > many * (number + 1) // (KILLS + 2) or self.broken, 300)
            killed(mq, "broker-a")
            assert any(thread.is_alive() for thread in threads), "all was ordered before"
            self.let(many * (number + 3) // (KILLS + 2))
            mq.restart("broker-a")

    def over(self, mq: LocalBroker, producer: Producer, threads: list[threading.Thread]) -> Counter[bytes]:
        """What Java reads when all are decided."""
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive()
        assert self.broken == []
        eventually(lambda: self.saved <= {message.body for message in stored_now(mq, self.topic)}, 300)
        producer.send_half(Message(self.topic, b"last"))
        eventually(lambda: self.asked[b"last"] > 0, 90)  # 5 s later at least, other questions would have come
        return Counter(record.body for record in java_read(mq.name_server, self.topic, len(self.saved), bodies=True))


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=soak)], ids=["", "the broker is killed"])
def test_grpc_delivers_all_committed_messages_and_nothing_else(counting: LocalBroker, dies: bool) -> None:
    """Some more than once, as the page says: a Proxy does not prove that the broker has a commit."""
    shop = Shop(new_topic(counting, "TRANSACTION", 4))
    options = {"transport": "grpc", "proxy_endpoint": counting.proxy_grpc, "send_timeout": 30_000}
    with Producer(group="shop", transaction_check=shop.decide, **options) as producer:
        threads = shop.all(producer, THROUGH_PROXY, KILLS * dies)
        if dies:
            shop.broker_dies(counting, threads, THROUGH_PROXY)
        found = shop.over(counting, producer, threads)
    assert set(found) == shop.saved
    assert len(shop.saved) >= THROUGH_PROXY // 3
    again = found.total() - len(found)
    print(f"{THROUGH_PROXY} over gRPC, {KILLS * dies} kills: {len(shop.saved)} saved, {again} delivered again")


def test_next_grpc_producer_decides_half_messages_of_killed_one(counting: LocalBroker, tmp_path: Path) -> None:
    """The Proxy asks those that sent a half message to the topic, so the next producer sends one first."""
    topic = new_topic(counting, "TRANSACTION", 2)
    options = {"transport": "grpc", "proxy_endpoint": counting.proxy_grpc, "send_timeout": 30_000}
    asked: Counter[bytes] = Counter()
    each = THROUGH_PROXY // DEATHS + 1

    def decide(message: ReceivedMessage | PoppedMessage) -> str:
        asked[message.body] += 1
        return halving.was_saved(tmp_path, message)

    halving.killed(options, topic, tmp_path, 0, each)
    with Producer(group=halving.GROUP, transaction_check=decide, **options) as second:
        second.send_half(Message(topic, b"first")).rollback()
        for number in range(1, DEATHS):
            halving.killed(options, topic, tmp_path, number, each)
        saved = {order.encode() for order in halving.saved(tmp_path)}
        eventually(lambda: saved <= {message.body for message in stored_now(counting, topic)}, 300)
        second.send_half(Message(topic, b"last"))
        eventually(lambda: asked[b"last"] > 0, 90)  # 5 s later at least, other questions would have come
        found = Counter(record.body for record in java_read(counting.name_server, topic, len(saved), bodies=True))
    assert set(found) == saved
    assert len(saved) >= THROUGH_PROXY // 3
    assert any(body in saved for body in asked)
    print(
        f"{DEATHS} producers killed over gRPC: {DEATHS * (each + 1)} sent, {len(saved)} saved, {len(asked)} asked about,"
    )
    print(f"{max(asked.values())} times at most, {found.total() - len(found)} delivered again")


def test_killed_broker_loses_no_commit_and_delivers_nothing_else(counting: LocalBroker) -> None:
    """Some more than once, as the page says: where the answer to a commit is lost, or a commit has not been noted."""
    counting.create_topic("killed", 4)
    shop = Shop("killed")
    with Producer(counting.name_server, "killed", transaction_check=shop.decide) as producer:
        threads = shop.all(producer, MANY, KILLS)
        shop.broker_dies(counting, threads, MANY)
        found = shop.over(counting, producer, threads)
    assert shop.again + len(shop.doubtful) > 0, "nobody felt that the broker was killed"
    assert set(found) == shop.saved
    assert len(shop.saved) >= MANY // 3
    print(f"{MANY}, {KILLS} kills: {len(shop.saved)} saved, {shop.again} sends failed, {len(shop.doubtful)} decisions,")
    print(f"{len(shop.asked)} asked, {found.total() - len(found)} delivered again")
