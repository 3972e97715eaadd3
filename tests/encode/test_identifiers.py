"""Message ids by the thousand."""

import random
from datetime import datetime

import numpy as np
import pytest

from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.wire.identifiers import UniqKey, UniqKeys

NOVEMBER = datetime(2026, 11, 30, 23, 59, 59)


def texts(ids, count):
    rows = np.empty((count, 32), np.uint8)
    ids.fill(rows)
    return [bytes(row).decode() for row in rows]


def at(moment=NOVEMBER):
    return lambda: round(moment.timestamp() * 1000)


@pytest.mark.parametrize("first", [0, 65_530, (1 << 32) - 3])
def test_prefix_and_counter(first):
    ids = UniqueIds(b"\x01\xff345678", at(), first)
    ms = UniqKey.parse(UniqKeys(random.Random(0)).next(at()())).month_ms
    assert texts(ids, 10) + texts(ids, 1) == [
        f"01FF333435363738{i >> 16 & 0xFFFF:04X}{ms:08X}{i & 0xFFFF:04X}" for i in range(first, first + 11)
    ]


def test_the_time_is_where_java_has_it_also_when_the_month_turns():
    now = [NOVEMBER, datetime(2026, 12, 1, 0, 0, 1)]
    ids = UniqueIds(b"\xff" * 8, lambda: at(now[0])())
    while now:
        java = UniqKey.parse(UniqKeys(random.Random(0)).next(at(now[0])()))
        (ours,) = texts(ids, 1)
        assert UniqKey.parse(ours).month_ms == java.month_ms
        del now[0]


def test_many_are_unique():
    assert len(set(texts(UniqueIds(b"12345678", at(), 60_000), 80_000))) == 80_000


def test_the_prefix_has_eight_bytes():
    with pytest.raises(ValueError, match="8 bytes"):
        UniqueIds(b"short", at())
