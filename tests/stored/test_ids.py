"""Of ids just what is compared, and of those of one task or batch only."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rocketmq_spark.columnar.encode.content import BatchName, ContentIds
from rocketmq_spark.stored.ids import compared, with_scope

NAME = BatchName("query", 0, 7, b"offsets", "sink")
ROWS = np.arange(36, dtype=np.uint8).reshape(3, 12)


def ids(partition: int, now_ms: int) -> list[str]:
    made = np.empty((3, 56), np.uint8)
    ContentIds(NAME.scope(partition), lambda: now_ms).fill(made, ROWS)
    return [bytes(row).decode() for row in made]


def test_ids_of_two_attempts_compare_equal_and_others_are_dropped() -> None:
    first, again, other = ids(3, 1_700_000_000_000), ids(3, 1_700_000_999_999), ids(4, 1_700_000_000_000)
    assert not set(first) & set(again)
    strangers = ["7F0000010007ABCDEF0123456789ABCD", first[0][:40], "", None, "F" * 56]
    stored = pa.array([*strangers, *first, *other, *again], pa.string())
    mine = with_scope(stored, NAME.scope(3))
    assert mine.to_pylist() == [*first, *again]
    assert compared(mine, 10).tolist() == [*ROWS.tolist(), *ROWS.tolist()]
    of_batch = with_scope(stored.slice(2), NAME.digest())
    assert len(of_batch) == 9
    assert compared(of_batch.slice(3), 7)[0].tolist() == [0, 0, 4, *ROWS[0].tolist()]
    assert compared(with_scope(stored, bytes(10)), 10).shape == (0, 12)
