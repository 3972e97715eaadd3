"""Java's hash and order of texts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.java import sorted_texts, string_hash, string_sort_key
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.environment import queue_order, sorted_queues


def slow(text: str) -> int:
    h = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(data), 2):
        h = (h * 31 + int.from_bytes(data[i : i + 2], "big")) % (1 << 32)
    return h - (1 << 32) if h >= 1 << 31 else h


@settings(deadline=None)
@given(st.text(st.characters(codec=None)))
def test_string_hash_is_the_polynomial_over_utf_16(text: str) -> None:
    assert string_hash(text) == slow(text)


def test_string_order_is_javas_beyond_the_basic_plane() -> None:
    assert sorted(["\ue000", "\U0001f600"]) != sorted(["\ue000", "\U0001f600"], key=string_sort_key)
    brokers = ["broker-10", "broker-2", "Broker-x", "broker-2a"]
    assert sorted(brokers, key=string_sort_key) == ["Broker-x", "broker-10", "broker-2", "broker-2a"]


@given(st.lists(st.text(st.characters(codec=None), max_size=3)))
def test_texts_and_queues_sort_as_in_java_ascii_or_not(names: list[str]) -> None:
    assert sorted_texts(names) == sorted(names, key=string_sort_key)
    queues = [MessageQueue(topic, broker, len(topic)) for topic, broker in zip(names, reversed(names), strict=True)]
    assert sorted_queues(queues) == sorted(queues, key=queue_order)
