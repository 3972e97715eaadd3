"""Message ids by the thousand."""

import pytest

from rocketmq_spark.sink.identifiers import UniqueIds


def texts(rows):
    return [bytes(row).decode() for row in rows]


@pytest.mark.parametrize("first", [0, 65_530, (1 << 32) - 3])
def test_prefix_and_counter(first):
    ids = UniqueIds(b"\x01\xff345678", first)
    assert texts(ids.take(10)) + texts(ids.take(1)) == [f"01FF333435363738{i:016X}" for i in range(first, first + 11)]


def test_many_are_unique():
    assert len(set(texts(UniqueIds(b"12345678", 60_000).take(80_000)))) == 80_000


def test_the_prefix_has_eight_bytes():
    with pytest.raises(ValueError, match="8 bytes"):
        UniqueIds(b"short")
