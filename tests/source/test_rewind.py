"""Back to an earlier batch, in folders as Spark writes them."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark import checkpoints
from rocketmq_spark.spark.checkpoints import rewind
from rocketmq_spark.spark.checkpoints.files import Folder, open_folder
from rocketmq_spark.spark.checkpoints.offset_log import history, last_batch, logged_times_ms
from rocketmq_spark.spark.source.offsets import Offsets
from tests.source.test_checkpoint import P, Q, entry, named, other, ours

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def query(tmp_path: Path) -> Folder:
    """Five batches, begun at second 1 to 5, of ten offsets each; the last is not done."""
    made = tmp_path / "query"
    made.mkdir()
    (made / "metadata").write_text('{"id":"x"}')
    for number in range(5):
        text = ours(10 * (number + 1), start=None if number else 0)
        entry(made, number, text, done=number < 4, begun_ms=1000 * (number + 1))
    return open_folder(str(made))


def state(query: Folder, *names: str) -> None:
    for name in names:
        path = Path(query.name, "state", "0", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.mark.parametrize(
    ("number", "before_ms", "found"), [(2, None, 2), (None, 3000, 2), (None, 2999, 1), (None, 99_000, 3), (0, None, 0)]
)
def test_which_batch(query: Folder, number: int | None, before_ms: int | None, found: int) -> None:
    assert rewind.choose_batch(history(query), number, before_ms).number == found


@pytest.mark.parametrize(
    ("number", "before_ms", "said"),
    [
        (4, None, "there is no batch 4 to go back to: batches 0 to 3 are kept and done"),
        (9, None, "there is no batch 9"),
        (
            None,
            999,
            r"no batch in the checkpoint began at or before 1970-01-01T00:00:00Z: .*began at 1970-01-01T00:00:01Z",
        ),
    ],
)
def test_which_cannot_be(query: Folder, number: int | None, before_ms: int | None, said: str) -> None:
    with pytest.raises(OffsetError, match=said):
        rewind.choose_batch(history(query), number, before_ms)


def test_query_without_a_finished_batch_cannot_be_rewound(query: Folder) -> None:
    for number in range(4):
        query.delete([f"commits/{number}"])
    with pytest.raises(OffsetError, match="no batch of this query is finished"):
        rewind.choose_batch(history(query), None, 99_000)


def test_when_a_batch_was_begun_may_not_be_known(tmp_path: Path) -> None:
    entry(tmp_path, 0, ours(5))
    with pytest.raises(OffsetError, match=r"are kept and done, the first of them began at an unknown time\. To read"):
        rewind.choose_batch(history(open_folder(str(tmp_path))), None, 99_000)


def go(query: Folder, number: int) -> tuple[rewind.RewindPlan, Folder]:
    reads = history(query)
    planned = rewind.plan_rewind(query, reads, rewind.choose_batch(reads, number, None))
    return planned, rewind.execute(query, planned, AT)


def test_nothing_is_removed_where_numpy_is_missing(query: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(query.files(recursive=True))
    monkeypatch.delattr(checkpoints, "batch_notes", raising=False)
    monkeypatch.setitem(sys.modules, "rocketmq_spark.spark.checkpoints.batch_notes", None)
    with pytest.raises(ModuleNotFoundError):
        go(query, 1)
    assert set(query.files(recursive=True)) == before


def test_what_was_behind_it_goes_and_is_kept_beside(query: Folder) -> None:
    before = {path: query.read(path) for path in query.files(recursive=True) if not path.endswith(".crc")}
    planned, backup = go(query, 1)
    assert (planned.later_batches, planned.ranges) == ([2, 3, 4], [OffsetRange(Q, 20, 50)])
    assert backup.name == f"{query.name}.before-rewind-20260131T120000Z"
    assert {path: backup.read(path) for path in backup.files(recursive=True) if not path.endswith(".crc")} == before
    left = last_batch(query)
    assert left is not None
    assert (left.number, left.positions, last_batch(query, committed=False)) == (1, {Q: 20}, left)
    assert set(query.files(recursive=True)) == {
        "metadata", "offsets/0", "offsets/1", "offsets/.0.crc", "offsets/.1.crc", "commits/0", "commits/1",
    }  # fmt: skip


def test_rewound_ranges_begin_at_the_batch_end_or_at_queue_start(
    query: Folder,
) -> None:
    """Also of a queue that a later batch says itself where it began, as one does of a topic that was made again."""
    new = MessageQueue("t", "broker-a", 4)
    entry(Path(query.name), 5, json.dumps(Offsets({Q: 70, new: 9}, {Q: 60, new: 2}).to_json()))
    reads = history(query)
    planned = rewind.plan_rewind(query, reads, rewind.choose_batch(reads, 1, None))
    assert planned.ranges == [OffsetRange(Q, 20, 70), OffsetRange(new, 2, 9)]


def test_wherever_it_stops_the_folder_is_one_to_go_on_from(query: Folder) -> None:
    """Of each step: what is done has an entry in both logs, and nothing is missing in between."""
    reads = history(query)
    planned = rewind.plan_rewind(query, reads, rewind.choose_batch(reads, 1, None))
    for path in planned.files_to_remove:
        query.delete([path])
        found = history(query)
        assert [read.batch.number for read in found] == list(range(len(found)))
        assert all(read.done_ms is not None for read in found[:-1])
        assert logged_times_ms(query, "commits").keys() <= logged_times_ms(query, "offsets").keys()


def test_interrupted_rewind_leaves_no_state_of_an_unlogged_batch(query: Folder) -> None:
    """Spark would take it for what the new batch of that number made; and what is done has its state."""
    state(query, *(f"0/{version}.delta" for version in range(1, 7)), "0/5.snapshot", "1/4.zip", "1/2_a.zip")
    reads = history(query)
    planned = rewind.plan_rewind(query, reads, rewind.choose_batch(reads, 1, None))
    assert planned.files_to_remove[0] == "state/0/0/6.delta"  # no batch of the log made it
    for path in planned.files_to_remove:
        query.delete([path])
        kept = max(int(path.rpartition("/")[2][0]) for path in query.files("state", recursive=True))
        assert max(logged_times_ms(query, "commits")) + 1 <= kept <= max(logged_times_ms(query, "offsets")) + 1


def test_rewind_removes_later_versions_of_state_too(query: Folder) -> None:
    state(query, "0/1.delta", "0/2.delta", "0/.2.delta.crc", "0/3.delta", "0/.3.delta.crc", "0/4.snapshot", "1/2_ab-c.zip",
          "1/3_ab-c.changelog", "1/SSTs/000012.sst", "_metadata/metadata")  # fmt: skip
    planned, backup = go(query, 1)
    left = {path for path in query.files(recursive=True) if path.startswith("state")}
    assert left == {
        f"state/0/{name}"
        for name in (
            "0/1.delta",
            "0/2.delta",
            "0/.2.delta.crc",
            "1/2_ab-c.zip",
            "1/SSTs/000012.sst",
            "_metadata/metadata",
        )
    }
    assert backup.read("state/0/0/3.delta") == "0/3.delta"
    assert not planned.files_to_remove[-1].startswith("commits")


def test_state_that_is_gone_is_refused(query: Folder) -> None:
    state(query, "0/4.delta", "0/5.delta", "1/2.delta")
    with pytest.raises(OffsetError, match=r"version 2 of it is gone in state/0/0\. Rewind to a later batch"):
        go(query, 1)
    state(query, "0/2.delta", "1/4.delta", "2/4.delta")
    for name in ("1/2.delta", "0/4.delta", "0/5.delta"):
        Path(query.name, "state", "0", name).unlink()
    with pytest.raises(OffsetError, match=r"version 2 of it is gone in state/0/1 and 1 more\. Rewind to a later batch"):
        go(query, 1)
    assert len(history(query)) == 5


def test_the_last_batch_leaves_nothing_to_do(query: Folder) -> None:
    query.delete(["offsets/4", "offsets/.4.crc"])
    reads = history(query)
    assert rewind.plan_rewind(query, reads, rewind.choose_batch(reads, 3, None))[1:4] == ([], [], [])


def test_when_it_was_changed(query: Folder) -> None:
    newest = max(path.stat().st_mtime_ns for path in Path(query.name).rglob("*") if path.is_file())
    assert rewind.changed_ms(query) == newest // 1_000_000
    assert rewind.changed_ms(open_folder(query.name + "-not")) is None


def test_each_named_source_goes_back_to_its_own_position(tmp_path: Path) -> None:
    """One was renamed since, so the query will read its topic from its start again."""
    made = tmp_path / "query"
    made.mkdir()
    named(made, 0, orders=ours(5, start=2), prices=other(4, start=1))
    named(made, 1, again=other(7, start=0), orders=ours(9))
    query = open_folder(str(made))
    reads = history(query)
    planned = rewind.plan_rewind(query, reads, rewind.choose_batch(reads, 0, None))
    assert planned.ranges == [OffsetRange(P, 0, 7), OffsetRange(Q, 5, 9)]
    rewind.execute(query, planned, AT)
    assert [read.batch.number for read in history(query)] == [0]
