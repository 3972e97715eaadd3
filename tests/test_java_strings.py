"""Java's hash and order of texts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.java import string_hash, string_order


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
    assert sorted(["\ue000", "\U0001f600"]) != sorted(["\ue000", "\U0001f600"], key=string_order)
    brokers = ["broker-10", "broker-2", "Broker-x", "broker-2a"]
    assert sorted(brokers, key=string_order) == ["Broker-x", "broker-10", "broker-2", "broker-2a"]
