"""Transactions on a real broker, with RocketMQ's own client as the reader."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.model.send import HalfState
from rocketmq_spark.producer import transactions
from tests.fix_clusters import ASKS, WITHOUT_TIMERS
from tests.fix_spark import ROOT
from tests.helpers import killed, stored_now
from tests.mockbroker import eventually
from tests.witness import java_read


@pytest.fixture(scope="module")
def asking() -> Iterator[LocalBroker]:
    """A broker that asks soon."""
    with LocalBroker(conf={**WITHOUT_TIMERS, **ASKS}, quiet=True) as mq:
        yield mq


def bodies(mq: LocalBroker, topic: str) -> Counter[bytes]:
    return Counter(message.body for message in stored_now(mq, topic))


class Orders:
    """A shop's own table: what was saved, and what brokers asked about."""

    def __init__(self) -> None:
        self.saved: set[bytes] = set()
        self.asked: list[bytes] = []

    def was_saved(self, message: ReceivedMessage) -> str:
        self.asked.append(message.body)
        return "COMMIT" if message.body in self.saved else "ROLLBACK"


def test_java_reads_committed_messages_and_no_rolled_back_ones(asking: LocalBroker) -> None:
    asking.create_topic("decided", 2)
    orders = Orders()
    with Producer(asking.name_server, "decided", transaction_check=orders.was_saved) as producer:
        for i in range(30):
            with producer.transaction(Message("decided", b"yes %d" % i, tags="a", keys=[f"k{i}"])) as half:
                assert half.state is HalfState.PREPARED
                assert bodies(asking, "decided")[b"yes %d" % i] == 0
            with pytest.raises(KeyError), producer.transaction(Message("decided", b"no %d" % i)):
                raise KeyError
    found = java_read(asking.name_server, "decided", 30, bodies=True)
    assert Counter(record.body for record in found) == Counter(b"yes %d" % i for i in range(30))
    assert {(record.tags, *(record.keys or ())) for record in found} == {("a", f"k{i}") for i in range(30)}
    assert orders.asked == []


def test_next_producer_decides_half_messages_after_broker_kill(
    asking: LocalBroker,
) -> None:
    """The second producer has sent nothing: all brokers hear of it all the same."""
    asking.create_topic("left", 2)
    first = Producer(asking.name_server, "left")  # answers no questions, as one that has died
    first.close()
    orders = Orders()
    with Producer(asking.name_server, "left", transaction_check=lambda message: "UNKNOWN") as producer:
        for i in range(10):
            producer.send_half(Message("left", b"yes %d" % i))
            producer.send_half(Message("left", b"no %d" % i))
    transactions._registry._recent_fates.clear()  # as in another process
    orders.saved = {b"yes %d" % i for i in range(10)}
    killed(asking, "broker-a")
    asking.restart("broker-a")
    with Producer(asking.name_server, "left", transaction_check=orders.was_saved):
        eventually(lambda: len(set(orders.asked)) == 20, 60)
        eventually(lambda: sum(bodies(asking, "left").values()) >= 10, 60)
    assert bodies(asking, "left") == Counter(orders.saved)


def test_a_block_that_outlasts_the_questions_is_delivered_once(asking: LocalBroker) -> None:
    asking.create_topic("slow", 1)
    orders = Orders()
    moved: list[object] = []
    with Producer(asking.name_server, "slow", transaction_check=orders.was_saved) as producer:
        with producer.transaction(Message("slow", b"slow")) as half:
            before = half._fate._place
            eventually(lambda: half._fate._place != before, 60)  # the broker has asked
            moved.append(half._fate._place)
            assert half.state is HalfState.PREPARED
        producer.send_half(Message("slow", b"later"))
        transactions._registry._recent_fates.popitem()
        eventually(lambda: b"later" in orders.asked, 60)  # 5 s later at least, other questions would have come
    assert bodies(asking, "slow") == Counter([b"slow"])
    assert set(orders.asked) == {b"later"}


def test_a_slow_function_delivers_once(asking: LocalBroker) -> None:
    """The broker asks every second, each time about a new copy, long before the function has come to the last message."""
    asking.create_topic("late", 1)
    orders = Orders()
    orders.saved = {b"%d" % i for i in range(12)}

    def slow(message: ReceivedMessage) -> str:
        time.sleep(0.5)
        return orders.was_saved(message)

    with Producer(asking.name_server, "late", transaction_check=slow) as producer:
        for body in orders.saved:
            producer.send_half(Message("late", body))
        eventually(lambda: set(bodies(asking, "late")) == orders.saved, 60)
        producer.send_half(Message("late", b"last"))
        eventually(lambda: b"last" in orders.asked, 60)  # 5 s later at least, other questions would have come
    assert bodies(asking, "late") == Counter(orders.saved)


def test_a_large_body_is_compressed_and_read_as_it_was(asking: LocalBroker) -> None:
    asking.create_topic("large", 1)
    orders = Orders()
    body = b"0123456789" * 2000
    with Producer(asking.name_server, "large", transaction_check=orders.was_saved) as producer:
        with producer.transaction(Message("large", body)):
            pass
        orders.saved = {body + b"!"}  # before it can be asked about, on a slow machine too
        producer.send_half(Message("large", body + b"!"))
        transactions._registry._recent_fates.clear()
        eventually(lambda: orders.asked == [body + b"!"], 60)
        eventually(lambda: sum(bodies(asking, "large").values()) == 2, 60)
    found = java_read(asking.name_server, "large", 2, bodies=True)
    assert Counter(record.body for record in found) == Counter([body, body + b"!"])


def test_in_a_namespace_the_same(asking: LocalBroker) -> None:
    asking.create_topic("ns%inside", 1)
    orders = Orders()
    with Producer(asking.name_server, "inside", namespace="ns", transaction_check=orders.was_saved) as producer:
        with producer.transaction(Message("inside", b"kept")):
            pass
        orders.saved = {b"asked"}
        producer.send_half(Message("inside", b"asked"))
        transactions._registry._recent_fates.clear()
        eventually(lambda: orders.asked == [b"asked"], 60)
        eventually(lambda: bodies(asking, "ns%inside") == Counter([b"kept", b"asked"]), 30)


def test_the_page_s_program_delivers_what_it_says(asking: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    asking.create_topic("orders", 1)
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "transactions.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(compile(program.replace("127.0.0.1:9876", asking.name_server), "page", "exec"), {})
    assert capsys.readouterr().out == "HalfState.COMMITTED\n"
    eventually(lambda: bodies(asking, "orders") == Counter([b"seven"]), 30)  # indexed a moment after it was stored
