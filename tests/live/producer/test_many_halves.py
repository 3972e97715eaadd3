"""Issue 31: of many transactions exactly those are delivered that were committed, each once, whoever decided and died.

A broker that asks every second takes as many questions until it gives a message up as one that asks every 30 s takes time.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.send import HalfState
from tests.fix_clusters import ASKS, WITHOUT_TIMERS
from tests.helpers import stored_now, total
from tests.live.producer import halving
from tests.mockbroker import eventually
from tests.scale import SCALE
from tests.witness import java_command, java_read

MANY = 10_000 if SCALE >= 1 else 400
KILLS = 20 if SCALE >= 1 else 4
THREADS = 8
# How each message is decided: by the program, or by the function, which may need several tries.
KINDS = (
    "block",
    "raises",
    "commit",
    "rollback",
    "left",
    "dropped",
    "left late",
    "dropped late",
    "left raises",
    "left wrong",
)
DELIVERED = {"block", "commit", "left", "left late", "left raises", "left wrong"}


@pytest.fixture(scope="module")
def asking_often() -> Iterator[LocalBroker]:
    """A broker that asks soon, and often."""
    with LocalBroker(conf={**WITHOUT_TIMERS, **ASKS, "transactionCheckMax": 450}, quiet=True) as mq:
        yield mq


class Undone(Exception):
    """The work of a block failed."""


class Shop:
    """Orders by number; what becomes of each is fixed before it is sent."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.asked: defaultdict[int, int] = defaultdict(int)
        self.wrong: list[str] = []

    def order(self, producer: Producer, i: int) -> None:
        kind, message = self.kinds[i], Message("many", b"%d" % i, keys=[f"k{i}"])
        if kind in ("block", "raises"):
            try:
                with producer.transaction(message) as half:
                    if kind == "raises":
                        raise Undone
            except Undone:
                pass
        else:
            half = producer.send_half(message)
            if kind in ("commit", "rollback"):
                (half.commit if kind == "commit" else half.rollback)()
        expected = HalfState.COMMITTED if kind in DELIVERED else HalfState.ROLLED_BACK
        if kind[:4] not in ("left", "drop") and half.state is not expected:
            self.wrong.append(f"{i} {kind} {half.state}")

    def decide(self, message: ReceivedMessage) -> str | None:
        i = int(message.body)
        kind = self.kinds[i]
        self.asked[i] += 1
        if not kind.startswith(("left", "dropped")):
            self.wrong.append(f"{i} {kind} was asked")
        elif self.asked[i] == 1 and kind != "left" and kind != "dropped":
            if kind == "left raises":
                raise ConnectionError("the database is away")
            return None if kind == "left wrong" else "UNKNOWN"
        return "COMMIT" if kind in DELIVERED else "ROLLBACK"


def test_committed_transactions_of_many_threads_deliver_once(
    asking_often: LocalBroker,
) -> None:
    asking_often.create_topic("many", 4)
    rng = random.Random()
    kinds = [*KINDS, *rng.choices(KINDS, k=MANY - len(KINDS))]
    rng.shuffle(kinds)
    shop = Shop([*kinds, "dropped"])  # the last one is sent when all others are decided
    begun = time.monotonic()
    with Producer(asking_often.name_server, "many", transaction_check=shop.decide, send_timeout=30_000) as producer:

        def work(first: int) -> None:
            for i in range(first, MANY, THREADS):
                shop.order(producer, i)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        sent = time.monotonic() - begun
        undecided = {i: 1 + (kind.count(" ")) for i, kind in enumerate(kinds) if kind.startswith(("left", "dropped"))}
        eventually(lambda: all(shop.asked[i] >= times for i, times in undecided.items()), 300)
        expected = Counter(b"%d" % i for i, kind in enumerate(kinds) if kind in DELIVERED)
        total(asking_often, "many", sum(expected.values()), 300)
        shop.order(producer, MANY)
        eventually(lambda: shop.asked[MANY] > 0, 60)  # 5 s later at least, other questions would have come
        asked = time.monotonic() - begun
        found = java_read(asking_often.name_server, "many", sum(expected.values()), bodies=True)
    assert shop.wrong == []
    assert Counter(record.body for record in found) == expected
    print(
        f"{MANY} transactions: sent in {sent:.1f} s, {len(undecided)} decided by the function, all after {asked:.1f} s"
    )


def test_half_messages_of_killed_producers_follow_check_function(asking_often: LocalBroker, tmp_path: Path) -> None:
    topic, options = "killed", {"name_server": asking_often.name_server}
    asking_often.create_topic(topic, 2)
    rng = random.Random()
    asked: list[bytes] = []

    def decide(message: ReceivedMessage) -> str:
        asked.append(message.body)
        return "ROLLBACK" if message.body == b"last" else halving.was_saved(tmp_path, message)

    halving.killed(options, topic, tmp_path, 0, rng.randrange(8, 40))
    with Producer(group=halving.GROUP, transaction_check=decide, **options) as second:
        for number in range(1, KILLS):
            halving.killed(options, topic, tmp_path, number, rng.randrange(8, 40))
        expected = Counter(order.encode() for order in halving.saved(tmp_path))

        def delivered() -> Counter[bytes]:
            return Counter(message.body for message in stored_now(asking_often, topic))

        eventually(lambda: expected <= delivered(), 120)
        second.send_half(Message(topic, b"last"))
        eventually(lambda: b"last" in asked, 60)  # 5 s later at least, other questions would have come
        assert delivered() == expected
    assert len(expected) >= KILLS
    print(f"{KILLS} kills: {len(expected)} orders were saved, the second producer was asked {len(asked)} times")


def listened(lines: IO[bytes], asked: list[bytes], all_sent: threading.Event) -> None:
    """Read what ``tests/witness/Halves.java`` prints, among what RocketMQ prints, to its end."""
    for said in (json.loads(line) for line in lines if line.startswith(b"{")):
        if "asked" in said:
            asked.append(said["asked"].encode())
        else:
            all_sent.set()


def test_java_decides_ours_and_we_decide_java_s(asking_often: LocalBroker) -> None:
    """One group, whose function and listener say the same: what begins with yes was saved."""
    asking_often.create_topic("shared", 2)
    count = 10_000 if SCALE >= 1 else 20  # of each side
    options = {"nameServer": asking_often.name_server, "group": "shared", "topic": "shared", "count": str(count)}
    command = [*java_command("Halves"), *(f"{name}={value}" for name, value in options.items())]
    ours: list[bytes] = []
    java_s: list[bytes] = []

    def decide(message: ReceivedMessage) -> str:
        ours.append(message.body)
        return "COMMIT" if message.body.startswith(b"yes") else "ROLLBACK"

    with (
        Producer(asking_often.name_server, "shared", transaction_check=decide) as producer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as java,
    ):
        assert java.stdin is not None
        assert java.stdout is not None
        all_sent = threading.Event()
        reader = threading.Thread(target=listened, args=(java.stdout, java_s, all_sent))
        reader.start()
        assert all_sent.wait(60)
        for i in range(count // 2):
            producer.send_half(Message("shared", b"yes python %d" % i))
            producer.send_half(Message("shared", b"no python %d" % i))
        expected = {b"yes python %d" % i for i in range(count // 2)} | {b"yes java %d" % i for i in range(0, count, 2)}
        eventually(
            lambda: {message.body for message in stored_now(asking_often, "shared")} == expected, 60 + count / 50
        )
        producer.send_half(Message("shared", b"no python last"))
        eventually(lambda: b"no python last" in (*ours, *java_s), 60)  # 5 s later at least
        java.stdin.close()
        reader.join(60)
    asked = Counter([*ours, *java_s])
    print(f"{2 * count} half messages, asked about so many times: {dict(Counter(asked.values()))}")
    stored = Counter(message.body for message in stored_now(asking_often, "shared"))
    assert stored.keys() == expected
    # A broker that asks again before it has noted a decision stores a message for each commit.
    assert all(times <= asked[body] for body, times in stored.items())
    assert any(b"java" in body for body in ours)
    assert any(b"python" in body for body in java_s)
