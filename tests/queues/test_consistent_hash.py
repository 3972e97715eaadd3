from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.allocation import Ring, allocate_all, md5_hash, queue_key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("CID-0-0", 1900518137),
        ("CID-0-1", 2611424514),
        ("CID-1-0", 1110034835),
        ("CID-2-2", 3485833272),
        (queue_key(MessageQueue("topic_test", "brokerName", 0)), 2171879703),
        (queue_key(MessageQueue("topic_test", "brokerName", 7)), 2468874514),
    ],
)
def test_hash_values_of_the_java_class(key: str, expected: int) -> None:
    assert md5_hash(key) == expected


def test_the_key_of_a_queue_is_javas_text() -> None:
    assert queue_key(MessageQueue("t", "b", 3)) == "MessageQueue [topic=t, brokerName=b, queueId=3]"


def places(key: str) -> int:
    return {"a-0": 10, "a-1": 30, "a-2": 50, "b-0": 20, "b-1": 30}.get(key, int(key) if key.isdigit() else 99)


def test_key_belongs_to_next_place_on_ring_and_wraps() -> None:
    ring = Ring(["a", "b"], 1, places)
    assert [ring.owner(key) for key in ("5", "10", "11", "20", "21")] == ["a", "a", "b", "b", "a"]


def test_later_hash_wins_tie_and_repeated_consumer_adds_places() -> None:
    assert Ring(["a", "b"], 2, places).owner("30") == "b"
    assert Ring(["a", "a"], 1, places).places == [10, 30]


def test_a_ring_without_places_owns_nothing() -> None:
    assert Ring(["a"], 0, places).owner("1") is None


def test_the_topic_is_hashed_as_brokers_know_it() -> None:
    """A member of Java's in the same namespace has the whole name."""
    users, wire = ([MessageQueue(topic, "b", number) for number in range(40)] for topic in ("t", "ns%t"))
    members = ["one", "two", "three"]
    mine = allocate_all("consistentHash", users, members, onWire="ns%".__add__)
    theirs = allocate_all("consistentHash", wire, members)
    assert {who: [queue.queue_id for queue in share] for who, share in mine.items()} == {
        who: [queue.queue_id for queue in share] for who, share in theirs.items()
    }
    assert mine != allocate_all("consistentHash", users, members)
