"""What a query's folder says, in files as Spark writes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.checkpoints import files, offset_log
from rocketmq_spark.spark.checkpoints.files import open_folder
from rocketmq_spark.spark.checkpoints.offset_log import LoggedBatch, history, last_batch, read_batch, uncommitted_batch
from rocketmq_spark.spark.source.offsets import Offsets

Q, P = MessageQueue("t", "broker-a", 3), MessageQueue("prices", "broker-a", 0)


def entry(folder: Path, number: int, *sources: str, done: bool = True, begun_ms: int | None = None) -> None:
    head = {} if begun_ms is None else {"batchWatermarkMs": 0, "batchTimestampMs": begun_ms}
    for name in ("offsets", "commits"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "offsets" / str(number)).write_text("\n".join(("v1", json.dumps(head), *sources)))
    (folder / "offsets" / f".{number}.crc").write_bytes(b"crc")
    if done:
        (folder / "commits" / str(number)).write_text("v1\n{}")


def named(folder: Path, number: int, done: bool = True, **sources: str) -> None:
    """An entry of version 2."""
    entry(folder, number, *(f"{name}:{offset}" for name, offset in sources.items()), done=done)
    path = folder / "offsets" / str(number)
    path.write_text(path.read_text().replace("v1", "v2", 1))


def ours(offset: int, start: int | None = None) -> str:
    return json.dumps(Offsets({Q: offset}, {} if start is None else {Q: start}).to_json())


def other(offset: int, start: int | None = None) -> str:
    return json.dumps(Offsets({P: offset}, {} if start is None else {P: start}).to_json())


def test_the_last_batch_that_is_done_and_that_was_begun(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        entry(tmp_path, number, ours(number), done=number < 10)
    assert last_batch(open_folder(str(tmp_path))) == LoggedBatch(9, {0: Offsets({Q: 9})})
    assert last_batch(open_folder(str(tmp_path)), committed=False) == LoggedBatch(10, {0: Offsets({Q: 10})})


def test_the_batch_that_is_not_done_with_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    assert uncommitted_batch(open_folder(str(tmp_path))) is None
    entry(tmp_path, 0, ours(8, start=3), done=False)
    found = uncommitted_batch(open_folder(str(tmp_path)))
    assert found is not None
    assert (found.batch.number, found.ranges, found.done_ms) == (0, [OffsetRange(Q, 3, 8)], None)
    entry(tmp_path, 0, ours(8, start=3))
    assert uncommitted_batch(open_folder(str(tmp_path))) is None
    entry(tmp_path, 1, ours(9), done=False, begun_ms=77)
    found = uncommitted_batch(open_folder(str(tmp_path)))
    assert found is not None
    assert (found.batch.number, found.batch.planned_ms, found.ranges) == (1, 77, [OffsetRange(Q, 8, 9)])
    (tmp_path / "offsets" / "0").unlink()
    found = uncommitted_batch(open_folder(str(tmp_path)))
    assert found is not None
    assert (found.ranges, found.queues_without_start) == ([], [Q])


def test_foreign_sources_and_those_without_offset_are_left_out(tmp_path: Path) -> None:
    entry(tmp_path, 0, '{"other":{"0":5}}', "-", ours(7), '"12"', '{"logOffset":1}')
    assert read_batch(open_folder(str(tmp_path)), 0).sources == {2: Offsets({Q: 7})}


def test_a_folder_is_named_as_spark_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def from_uri(name: str) -> tuple[None, str]:
        asked.append(name)
        return None, "bucket/q"

    monkeypatch.setattr("pyarrow.fs.FileSystem", SimpleNamespace(from_uri=from_uri))
    for name in ("s3a://bucket/q", "s3n://bucket/q", "s3://bucket/q", "hdfs://h/q"):
        open_folder(name)
    assert asked == ["s3://bucket/q"] * 3 + ["hdfs://h/q"]
    monkeypatch.chdir(tmp_path)
    assert open_folder("s3a").name == "s3a"


def test_a_query_without_a_batch_has_none(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    assert last_batch(open_folder(str(tmp_path))) is None
    entry(tmp_path, 0, ours(1), done=False)
    assert last_batch(open_folder(str(tmp_path))) is None


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(OffsetError, match="is not a checkpoint: it has no folder 'offsets'"):
        last_batch(open_folder(str(tmp_path)))
    entry(tmp_path, 0)
    for text in ("something", "v3\n{}\norders:{}"):
        (tmp_path / "offsets" / "0").write_text(text)
        with pytest.raises(
            OffsetError, match=r"offsets/0 does not begin with the version of Spark's offset log, v1 or v2"
        ):
            last_batch(open_folder(str(tmp_path)))


@pytest.mark.parametrize(
    "content",
    [b"token", b"v1\n{}\ntoken\xff", b'v1\n{}\n{"v":1,"topics":{"t":{"a":{"0":"token"}}}}', b"v2\n{}\ntoken"],
    ids=[*"abcd"],
)
def test_an_error_about_an_entry_contains_no_text_of_it(tmp_path: Path, content: bytes) -> None:
    """``lag --serve`` shows the error to everyone who can connect to its port."""
    entry(tmp_path, 0)
    (tmp_path / "offsets" / "0").write_bytes(content)
    with pytest.raises(OffsetError, match="offsets/0") as error:
        last_batch(open_folder(str(tmp_path)))
    shown: BaseException | None = error.value
    while shown is not None:
        assert not any(part in str(shown) for part in ("token", "0xff"))
        shown = shown.__cause__


@pytest.mark.parametrize(
    "content",
    [
        "", "v1", "v1\n{}", "v1\n{}\n" + ours(7)[:-9], "v1\n{}\n-\n" + ours(7)[:1],
        "v2", "v2\n{}", "v2\n{}\norders:" + ours(7)[:-9], "v2\n{}\nord",
    ],
    ids=[*"abcdefghi"],
)  # fmt: skip
def test_a_damaged_entry_is_not_taken_for_one_without_a_source(tmp_path: Path, content: str) -> None:
    entry(tmp_path, 0, ours(1))
    entry(tmp_path, 1, ours(2))
    (tmp_path / "offsets" / "1").write_text(content)
    for look in (last_batch, history):
        with pytest.raises(OffsetError, match=r"offsets/1 is damaged.*Restore that file"):
            look(open_folder(str(tmp_path)))


def test_json_that_is_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    deep = "[" * 200_000
    entry(tmp_path, 0, '{"topics":' + deep)
    with pytest.raises(OffsetError, match="offsets/0 is damaged"):
        last_batch(open_folder(str(tmp_path)))
    for head in (deep, '{"batchTimestampMs":Infinity}'):
        (tmp_path / "offsets" / "0").write_text(f"v1\n{head}\n{ours(7)}")
        assert read_batch(open_folder(str(tmp_path)), 0).planned_ms is None


def test_sources_of_version_2_are_told_apart_by_name(tmp_path: Path) -> None:
    """Their order may change, and sources come and go."""
    named(tmp_path, 0, orders=ours(5, start=2), prices=other(4, start=1), rates='{"offset":3}')
    named(tmp_path, 1, rates="-", prices=other(6), orders=ours(9))
    named(tmp_path, 2, orders=ours(10))
    named(tmp_path, 3, again=other(7, start=0), orders=ours(10), done=False)
    found = history(open_folder(str(tmp_path)))
    assert [read.ranges for read in found] == [
        [OffsetRange(Q, 2, 5), OffsetRange(P, 1, 4)], [OffsetRange(P, 4, 6), OffsetRange(Q, 5, 9)],
        [OffsetRange(Q, 9, 10)], [OffsetRange(P, 0, 7)],
    ]  # fmt: skip
    assert [list(read.batch.sources) for read in found] == [
        ["orders", "prices"], ["prices", "orders"], ["orders"], ["again", "orders"],
    ]  # fmt: skip
    unfinished = uncommitted_batch(open_folder(str(tmp_path)))
    assert unfinished is not None
    assert unfinished.ranges == [OffsetRange(P, 0, 7)]


def test_a_source_with_nothing_new_reads_nothing(tmp_path: Path) -> None:
    """Its entry is that of the batch before, with the start of that batch."""
    entry(tmp_path, 0, ours(5, start=2), other(4, start=1))
    entry(tmp_path, 1, ours(9), other(4, start=1))
    assert history(open_folder(str(tmp_path)))[1].ranges == [OffsetRange(Q, 5, 9)]


def test_a_self_join_reads_its_ranges_once(tmp_path: Path) -> None:
    """Spark logs its one source twice. Two sources that are not equally far are two."""
    entry(tmp_path, 0, ours(5, start=2), ours(5, start=2))
    entry(tmp_path, 1, ours(9), ours(7))
    first, second = history(open_folder(str(tmp_path)))
    assert (first.ranges, first.size) == ([OffsetRange(Q, 2, 5)], 3)
    assert (second.ranges, second.size) == ([OffsetRange(Q, 5, 9), OffsetRange(Q, 5, 7)], 6)
    (tmp_path / "offsets" / "0").unlink()
    assert history(open_folder(str(tmp_path)))[0].queues_without_start == [Q]


def test_batches_that_are_removed_during_a_look_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        entry(tmp_path, number, ours(number))
    listed = offset_log.planned_batches

    def then_removed(opened: files.Folder) -> set[int]:
        found = listed(opened)
        (tmp_path / "offsets" / "0").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(offset_log, "planned_batches", then_removed)
    assert [found.batch.number for found in history(open_folder(str(tmp_path)))] == [1, 2]


def test_what_each_batch_read(tmp_path: Path) -> None:
    """From the end of the one before; from where it says itself, first of all and where a topic was made again."""
    entry(tmp_path, 0, ours(5, start=2), begun_ms=1000)
    entry(tmp_path, 1, ours(5), begun_ms=2000)
    entry(tmp_path, 2, ours(4, start=1))
    entry(tmp_path, 3, ours(9), done=False)
    found = history(open_folder(str(tmp_path)))
    assert [read.ranges for read in found] == [
        [OffsetRange(Q, 2, 5)], [], [OffsetRange(Q, 1, 4)], [OffsetRange(Q, 4, 9)],
    ]  # fmt: skip
    assert [read.size for read in found] == [3, 0, 3, 5]
    assert [read.batch.planned_ms for read in found] == [1000, 2000, None, None]
    written = (tmp_path / "commits" / "0").stat().st_mtime_ns // 1_000_000
    assert (found[0].done_ms, found[3].done_ms) == (written, None)


def test_batch_start_is_unknown_when_previous_batch_is_not_kept(tmp_path: Path) -> None:
    entry(tmp_path, 7, ours(5))
    entry(tmp_path, 9, ours(8))
    found = history(open_folder(str(tmp_path)))
    assert [(read.ranges, read.queues_without_start, read.size) for read in found] == [([], [Q], None)] * 2


def test_queue_read_by_several_sources_counts_the_lowest_offset(tmp_path: Path) -> None:
    entry(tmp_path, 0, ours(8), ours(5), ours(6))
    assert read_batch(open_folder(str(tmp_path)), 0).positions == {Q: 5}
