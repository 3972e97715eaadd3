"""Of ids just what is compared, and of those of one task or batch only."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode.rows import ReferenceDecoder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.columnar.encode.content_ids import BatchName, ContentIds
from rocketmq_spark.errors import UnprovedError
from rocketmq_spark.model import NO_FILTER, Filter, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers, Hole
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.stored import ends
from rocketmq_spark.stored.ends import BatchHashes, compared_bytes, id_reader, ids_in_scope
from tests.decode import fetching
from tests.harness import peak_bytes

NAME = BatchName("query", 0, 7, b"offsets", "sink")
ROWS = np.arange(36, dtype=np.uint8).reshape(3, 12)


def ids(partition: int, now_ms: int) -> list[str]:
    made = np.empty((3, 56), np.uint8)
    ContentIds(NAME.scope(partition), lambda: now_ms).fill(made, ROWS)
    return [bytes(row).decode() for row in made]


def test_ids_of_two_attempts_are_equal_and_others_are_dropped() -> None:
    first, again, other = ids(3, 1_700_000_000_000), ids(3, 1_700_000_999_999), ids(4, 1_700_000_000_000)
    assert not set(first) & set(again)
    strangers = ["7F0000010007ABCDEF0123456789ABCD", first[0][:40], "", None, "F" * 56]
    stored = pa.array([*strangers, *first, *other, *again], pa.string())
    mine = ids_in_scope(stored, NAME.scope(3))
    assert mine.to_pylist() == [*first, *again]
    assert compared_bytes(mine, 10).tolist() == [*ROWS.tolist(), *ROWS.tolist()]
    of_batch = ids_in_scope(stored.slice(2), NAME.digest())
    assert len(of_batch) == 9
    assert compared_bytes(of_batch.slice(3), 7)[0].tolist() == [0, 0, 4, *ROWS[0].tolist()]
    assert compared_bytes(ids_in_scope(stored, bytes(10)), 10).shape == (0, 12)


@pytest.mark.parametrize(("limit", "told_apart"), [(18, 5), (17, 5), (17, 4), (17, 1)])
def test_tasks_are_given_their_ids_or_where_these_lie(
    monkeypatch: pytest.MonkeyPatch, limit: int, told_apart: int
) -> None:
    """Of many ids each task reads those between its first and its last one, and not what all others have sent."""
    monkeypatch.setattr(ends, "MAX_TASK_RANGES", told_apart)
    first, second = fetching.QUEUES[:2]
    found = BatchHashes(NAME.digest(), limit)
    for tasks, parts in (
        ((3, 70_000), [(first, 5, 9), (second, 0, 4)]),
        ((70_000,), [(first, 9, 12)]),
        ((), [(first, 12, 99)]),
        ((4, 70_000, 4), [(second, 40, 60)]),
    ):
        found.set_ranges([OffsetRange(*part) for part in parts])
        stored = [each for task in tasks for each in ids(task, 1_700_000_000_000)]
        found(pa.array(["7F0000010007ABCDEF0123456789ABCD", *stored], pa.string()))
    assert found.count == 18
    places = {
        3: [(first, 5, 9), (second, 0, 4)],
        4: [(second, 40, 60)],
        70_000: [(first, 5, 12), (second, 0, 60)],
    }
    if told_apart < 5:  # each has all
        places = dict.fromkeys(places, places[70_000])
    assert found.ranges_by_task() == {task: [OffsetRange(*part) for part in parts] for task, parts in places.items()}
    counts = {3: 1, 4: 2, 70_000: 3}
    assert found.counts == {task: 3 * count for task, count in counts.items()}
    assert found.hashes_by_partition() == (
        {task: ROWS.tobytes() * count for task, count in counts.items()} if limit == 18 else None
    )


def test_where_all_lie_begins_with_the_first_of_any_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many places each task is given all: of a queue where a task that was found later has earlier messages, too."""
    monkeypatch.setattr(ends, "MAX_TASK_RANGES", 2)
    first, second = fetching.QUEUES[:2]
    found = BatchHashes(NAME.digest(), 0)
    for task, part in ((3, (first, 5, 9)), (4, (second, 0, 4)), (3, (second, 40, 60))):
        found.set_ranges([OffsetRange(*part)])
        found(pa.array(ids(task, 1_700_000_000_000), pa.string()))
    everywhere = [OffsetRange(first, 5, 9), OffsetRange(second, 0, 60)]
    assert found.ranges_by_task() == {3: everywhere, 4: everywhere}


def test_ids_of_tasks_that_nobody_has_fill_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client that copies the scope of a batch may store ids of any task."""
    monkeypatch.setattr(ends, "MAX_TASKS", 5)
    first = fetching.QUEUES[0]
    found = BatchHashes(NAME.digest(), 0)
    for task in (4, *range(5, 40), 70_000):
        found.set_ranges([OffsetRange(first, task, task + 1)])
        found(pa.array(ids(task, 1_700_000_000_000), pa.string()))
    assert found.ranges_by_task() == {4: [OffsetRange(first, 4, 5)], 5: [OffsetRange(first, 5, 70_001)]}
    assert found.counts == {4: 3, 5: 108}
    assert [ends.task_key(task) for task in (4, 5, 70_000)] == [4, 5, 5]


def test_bodies_are_not_decompressed_for_their_ids() -> None:
    """Of a batch topic as of others: a message of kilobytes may become megabytes."""
    data = fetching.stored(
        body=zlib.compress(bytes(8 << 20)),
        sys_flag=int(SysFlag.COMPRESSED | SysFlag.ZLIB),
        properties=b"UNIQ_KEY\x01a\x02",
    )
    fetched = FetchedAnswers(
        np.frombuffer(bytearray(data * 8), np.uint8), [FetchedAnswer(0, 0, 8, 8, 0, 8 * len(data))]
    )
    careful = ReferenceDecoder(
        fetching.QUEUES, tuple(c for c in BASIC_COLUMNS if c.name in ("msgId", "sysFlag")), "none"
    )
    found: list[pa.RecordBatch] = []
    assert peak_bytes(lambda: found.extend(careful.batches(fetched, None))) < 4 << 20
    assert found[0].column(0).to_pylist() == ["a"] * 8


def test_nothing_is_stored_of_a_batch() -> None:
    found = BatchHashes(NAME.digest(), 10)
    assert (found.hashes_by_partition(), found.ranges_by_task(), found.count) == ({}, {}, 0)


class Pulls:
    """A puller whose one reader says a loss first, and then gives what it has; holes that are doubted are lost."""

    is_compacted = staticmethod(lambda queue: False)

    def __init__(self, fetched: FetchedAnswers, loss: Cause | None = None) -> None:
        self.fetched, self.loss = fetched, loss

    def reader(
        self, ranges: Sequence[OffsetRange], on_loss: OnLoss, filtered: Filter, known: str | None, recreated: None
    ) -> Pulls:
        assert filtered is NO_FILTER
        self.ranges, self.on_loss = ranges, on_loss
        return self

    def fetch(self) -> Iterator[FetchedAnswers]:
        if self.loss is not None:
            self.on_loss(self.ranges[0], self.loss)
        yield self.fetched

    def count_usable_answers(self, holes: Sequence[Hole]) -> int:
        for hole in holes:
            self.on_loss(OffsetRange(self.ranges[0].queue, hole.start, hole.end), Cause.TRUNCATED)
        return len(self.fetched.answers)


def read(pulls: Any, end: int) -> list[str]:
    ranges = [OffsetRange(fetching.QUEUES[0], 5, end)]
    return [each for part in id_reader(lambda: pulls)(ranges) for each in part.to_pylist()]


def answer(*offsets: int) -> FetchedAnswers:
    made = [fetching.stored(properties=fetching.text(UNIQ_KEY=f"id-{at}"), queue_offset=at) for at in offsets]
    return fetching.fetch(fetching.Answer(made, start=5))


def test_ids_of_ranges_are_read() -> None:
    assert read(Pulls(answer(5, 6, 7)), 8) == ["id-5", "id-6", "id-7"]
    said: list[Any] = []
    pulls: Any = Pulls(answer(5, 6, 7))
    for part in id_reader(lambda: pulls, said.extend)([OffsetRange(fetching.QUEUES[0], 5, 8)]):
        said += part.to_pylist()
    assert said == [OffsetRange(fetching.QUEUES[0], 5, 8), "id-5", "id-6", "id-7"], "before the ids"


@pytest.mark.parametrize("cause", list(Cause))
def test_what_is_gone_cannot_be_proved(cause: Cause) -> None:
    with pytest.raises(UnprovedError, match="offsets 5 to 8 are gone") as e:
        read(Pulls(answer(5, 6, 7), cause), 8)
    assert "may repeat rows" in str(e.value)


def test_a_hole_in_what_was_read_cannot_be_proved() -> None:
    with pytest.raises(UnprovedError, match="offsets 6 to 8 are gone"):
        read(Pulls(answer(5, 8)), 9)
