"""The note of a batch: made once, durable, read by whoever comes after, and gone with Spark's own logs."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import ArrowNotImplementedError
from pyarrow.fs import FileType, LocalFileSystem, SubTreeFileSystem

from rocketmq_spark.columnar.encode.content_ids import BatchName
from rocketmq_spark.errors import OffsetError, OptionError, UnprovedError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.checkpoints import batch_notes, files, offset_log, rewind
from rocketmq_spark.spark.checkpoints.batch_notes import BatchNote
from rocketmq_spark.spark.checkpoints.files import Folder, checkpoint_folder
from rocketmq_spark.spark.checkpoints.owners import describe_exposure
from rocketmq_spark.spark.sink import exactly_once
from rocketmq_spark.stored.ends import QueueEnds
from rocketmq_spark.stored.scan import ScanTools

ENDS = QueueEnds({MessageQueue("t", "a", 0): 7}, {"a": "a:1"})
LATER = QueueEnds({MessageQueue("t", "a", 0): 9}, {"a": "a:1"})


def checkpoint(path: Path, batches: int = 1) -> Path:
    (path / "offsets").mkdir(parents=True)
    (path / "metadata").write_text(json.dumps({"id": "query-1"}))
    for number in range(batches):
        (path / "offsets" / str(number)).write_text(f"v1\n{{}}\n{number}")
    return path


@pytest.fixture(params=["on this machine", "on another file system"])
def folder(request: Any, tmp_path: Path) -> Folder:
    path = checkpoint(tmp_path / "checkpoint")
    if request.param == "on this machine":
        return checkpoint_folder(str(path))
    return Folder("other://checkpoint", SubTreeFileSystem(str(path), LocalFileSystem()), "")


def test_a_batch_is_begun_once_and_its_note_stays(folder: Folder) -> None:
    name = batch_notes.batch_name(folder, "sink")
    assert (name.query, name.epoch, name.number, name.write_name) == ("query-1", 0, 0, "sink")
    first = batch_notes.begin_batch(folder, name, lambda: ENDS)
    assert (first.had_note, first.note.ends) == (False, ENDS)
    again = batch_notes.begin_batch(
        folder, batch_notes.batch_name(folder, "sink"), lambda: pytest.fail("the note is there")
    )
    assert (again.had_note, again.note) == (True, first.note)


def test_note_that_another_process_wrote_first_counts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks may have sent rows before our ends were asked for: without a look they would be sent again."""
    name = batch_notes.batch_name(folder, "sink")
    create, others = Folder.create, [BatchNote(name, ENDS), BatchNote(name._replace(epoch=1), ENDS)]

    def late(self: Folder, path: str, content: bytes) -> bool:
        create(self, path, others[0].to_bytes())
        return create(self, path, content)

    monkeypatch.setattr(Folder, "create", late)
    assert batch_notes.begin_batch(folder, name, lambda: LATER) == (others.pop(0), True)
    folder.delete_folder("rocketmq/0")
    with pytest.raises(OffsetError, match=r"0/sink was written by another process meanwhile"):
        batch_notes.begin_batch(folder, name, lambda: LATER)


def test_note_with_other_offsets_or_epoch_is_of_another_batch(folder: Folder, tmp_path: Path) -> None:
    batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)
    (tmp_path / "checkpoint" / "offsets" / "0").write_text("planned anew")
    name = batch_notes.batch_name(folder, "sink")
    assert batch_notes.begin_batch(folder, name, lambda: LATER) == (BatchNote(name, LATER), False)
    batch_notes.increment_epoch(folder)
    raised = batch_notes.batch_name(folder, "sink")
    assert raised.epoch == 1
    assert batch_notes.begin_batch(folder, raised, lambda: ENDS) == (BatchNote(raised, ENDS), False)
    assert batch_notes.begin_batch(folder, raised, lambda: LATER).had_note


def test_a_damaged_note_may_have_been_handed_out(folder: Folder, tmp_path: Path) -> None:
    """Taken for none, it would have all rows of its batch sent again."""
    name = batch_notes.batch_name(folder, "sink")
    batch_notes.begin_batch(folder, name, lambda: ENDS)
    path = tmp_path / "checkpoint" / "rocketmq" / "0" / "sink"
    whole = path.read_bytes()
    flipped = [whole.replace(b'"0": 7', b'"0": 6'), whole.replace(name.offsets.hex().encode(), b"00" * 16)]
    wrong = [b'{"v": "token"}', b'{"v": Infinity}', b"[" * 200_000]
    for content in (*(whole[:cut] for cut in (0, 1, len(whole) // 2, len(whole) - 2)), *flipped, *wrong):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(UnprovedError, match=r"its note .*/checkpoint/rocketmq/0/sink is damaged") as error:
            batch_notes.begin_batch(folder, name, lambda: LATER)
        assert "token" not in str(error.value)
        assert path.read_bytes() == content
    path.write_bytes(whole)
    assert batch_notes.begin_batch(folder, name, lambda: LATER) == (BatchNote(name, ENDS), True)


def test_a_note_of_an_earlier_version_has_no_sum(folder: Folder, tmp_path: Path) -> None:
    name = batch_notes.batch_name(folder, "sink")
    batch_notes.begin_batch(folder, name, lambda: ENDS)
    path = tmp_path / "checkpoint" / "rocketmq" / "0" / "sink"
    value = json.loads(path.read_bytes())
    del value["sum"], value["stored"], value["settle"]
    path.write_text(json.dumps(value))
    assert batch_notes.begin_batch(folder, name, lambda: LATER) == (BatchNote(name, ENDS), True)


def test_batch_begun_by_earlier_version_is_not_taken_as_unsent(folder: Folder, tmp_path: Path) -> None:
    """Its rows have ids that are made otherwise: none would be found, and all would be sent again."""
    name = batch_notes.batch_name(folder, "sink")
    path = tmp_path / "checkpoint" / "rocketmq" / "0" / "sink"
    path.parent.mkdir(parents=True)
    earlier = BatchNote(name, ENDS, version=1).to_bytes()
    path.write_bytes(earlier)
    for asked in (
        lambda: batch_notes.begin_batch(folder, name, lambda: LATER),
        lambda: batch_notes.notes_of_batch(folder, name),
        lambda: batch_notes.batch_status(folder, "sink"),
    ):
        with pytest.raises(UnprovedError, match=r"unfinished batch 0 .* version 1; this version reads 2.*with option"):
            asked()
    assert path.read_bytes() == earlier
    taken_back = name._replace(epoch=1)
    assert not batch_notes.begin_batch(folder, taken_back, lambda: LATER).had_note, (
        "a batch that was taken back has other ids in any case"
    )


def test_the_last_batch_is_that_of_the_largest_number(folder: Folder, tmp_path: Path) -> None:
    """Of its texts 9 would be the last for ever, whose note is there: the rows of later batches had its ids."""
    for number in (9, 10, 100):
        (tmp_path / "checkpoint" / "offsets" / str(number)).write_text("planned")
        assert batch_notes.batch_name(folder, "sink").number == number


def test_each_rewind_raises_the_epoch(folder: Folder) -> None:
    """After the second one rows with the ids of the first would be taken for stored."""
    batch_notes.increment_epoch(folder)
    assert batch_notes.epoch(folder) == 0, "nothing was sent by a note"
    batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)
    for count in (1, 2, 3):
        batch_notes.increment_epoch(folder)
        assert batch_notes.epoch(folder) == count


def test_stored_id_scan_waits_for_longest_settle_time_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with a longer time something may arrive behind a look that waits for the new one only."""
    waited: list[float] = []

    class Looked:
        def __init__(self, tools: ScanTools, since: QueueEnds) -> None:
            waited.append(tools.settle_s)

        def run(self, take: object) -> None:
            """Nothing is stored."""

    unused: Any = None
    monkeypatch.setattr(exactly_once, "StoredIdScan", Looked)
    monkeypatch.setattr(exactly_once, "scan_tools", lambda *_, **__: ScanTools(unused, unused, unused, 1.0, 4.0))
    name = BatchName("query-1", 0, 0, b"", "sink")
    for before_s in (60.0, 1.0):
        exactly_once._read_stored_hashes(unused, name, BatchNote(name, ENDS, settle_s=before_s))
    assert waited == [60.0, 4.0]


def test_a_note_keeps_its_ends_and_masters_where_others_join() -> None:
    """With the master of now a look would not see that another copy has taken over, which may lack what was stored."""
    (old,), new = ENDS.end_offsets, MessageQueue("t", "b", 0)
    now = QueueEnds({old: 9, new: 3}, {"a": "a:2", "b": "b:1"}, {old: 5, new: 6})
    assert ENDS.with_further_queues(now) == QueueEnds({old: 7, new: 3}, {"a": "a:1", "b": "b:1"}, {new: 6})


def test_what_is_being_written_beside_notes_is_none(folder: Folder, tmp_path: Path) -> None:
    name = batch_notes.batch_name(folder, "sink")
    note = batch_notes.begin_batch(folder, name, lambda: ENDS).note
    (tmp_path / "checkpoint" / "rocketmq" / "0" / ".other.part").write_bytes(b"{")
    assert batch_notes.notes_of_batch(folder, name) == [note]


def test_a_finished_batch_of_an_earlier_version_has_its_note(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    note = BatchNote(batch_notes.batch_name(folder, "sink"), ENDS, version=1)
    for below, content in (("rocketmq/0/sink", note.to_bytes()), ("commits/0", b"v1")):
        (path / below).parent.mkdir(parents=True)
        (path / below).write_bytes(content)
    assert batch_notes.batch_status(folder, "sink") == "batch 0 is finished, with a note"


def test_notes_of_named_writes_count_but_not_of_a_finished_batch(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "second"), lambda: ENDS)
    assert batch_notes.batch_status(folder, "sink") == "batch 0 is begun, with a note"
    (path / "rocketmq" / "0" / "second").write_bytes(b"damaged")
    with pytest.raises(UnprovedError, match="damaged"):
        batch_notes.batch_status(folder, "sink")
    (path / "commits").mkdir()
    (path / "commits" / "0").write_bytes(b"v1")
    assert batch_notes.batch_status(folder, "sink") == "batch 0 is finished, with a note"


def test_note_keeps_the_longest_settle_time_of_its_runs(folder: Folder) -> None:
    name = batch_notes.batch_name(folder, "sink")
    note = batch_notes.begin_batch(folder, name, lambda: ENDS, settle_s=60.0).note
    for settle_s, kept_s in ((4.0, 60.0), (90.0, 90.0), (4.0, 90.0)):
        batch_notes.add_queues(folder, note, ENDS, settle_s)
        note = batch_notes.begin_batch(folder, name, lambda: LATER, settle_s=settle_s).note
        assert note.settle_s == kept_s


class Clobbering:
    """A file system whose move removes what is there first, as pyarrow's of HDFS does; then it may be interrupted."""

    type_name, cut = "hdfs", False

    def __init__(self, system: Any) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def move(self, source: str, target: str) -> None:
        if self._system.get_file_info(target).type != FileType.NotFound:
            self._system.delete_file(target)
            if self.cut and not target.rpartition("/")[2].startswith("."):
                raise OSError("the name node is away")
        self._system.move(source, target)


def test_note_survives_where_files_cannot_be_replaced_atomically(tmp_path: Path) -> None:
    """Without it the batch would be a new one, and all of its rows would be sent again."""
    path = str(checkpoint(tmp_path / "checkpoint"))
    system = Clobbering(SubTreeFileSystem(path, LocalFileSystem()))
    folder = Folder("hdfs://checkpoint", system, "")
    name = batch_notes.batch_name(folder, "sink")
    note = batch_notes.begin_batch(folder, name, lambda: ENDS).note
    joined = ENDS.with_further_queues(QueueEnds({MessageQueue("t", "b", 0): 3}, {"b": "b:1"}))
    system.cut = True
    with pytest.raises(OffsetError, match="the name node is away"):
        batch_notes.add_queues(folder, note, joined)
    assert folder.read_bytes("rocketmq/0/sink") is None
    system.cut = False
    assert batch_notes.begin_batch(folder, name, lambda: LATER) == (BatchNote(name, joined), True)
    batch_notes.increment_epoch(folder)
    assert not batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: LATER).had_note


def test_a_file_system_that_moves_no_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyarrow's of an Azure account without a hierarchical namespace."""

    def move(*given: object) -> None:
        raise ArrowNotImplementedError("not fully implemented")

    system = Clobbering(SubTreeFileSystem(str(checkpoint(tmp_path / "c")), LocalFileSystem()))
    monkeypatch.setattr(system, "move", move, raising=False)
    folder = Folder("abfs://c", system, "")
    with pytest.raises(OffsetError, match="abfs://c: not fully implemented"):
        batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)


def test_a_note_of_a_later_version_is_not_guessed_at(folder: Folder, tmp_path: Path) -> None:
    name = batch_notes.batch_name(folder, "sink")
    path = tmp_path / "checkpoint" / "rocketmq" / "0" / "sink"
    path.parent.mkdir(parents=True)
    path.write_bytes(BatchNote(name, ENDS).to_bytes().replace(b'"v": 2', b'"v": 3'))
    with pytest.raises(OptionError, match="version 3"):
        batch_notes.begin_batch(folder, name, lambda: ENDS)


def test_notes_go_with_sparks_log(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for number in range(4):
        (path / "offsets" / str(number)).write_text(str(number))
        batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)
        batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "second"), lambda: ENDS)
        (path / "offsets" / str(number - 2)).unlink(missing_ok=True)
    kept = sorted(str(p.relative_to(path / "rocketmq")) for p in (path / "rocketmq").rglob("*") if p.is_file())
    assert kept == ["1/second", "1/sink", "2/second", "2/sink", "3/second", "3/sink"]
    assert sorted(p.name for p in (path / "rocketmq").iterdir()) == ["1", "2", "3"], "nothing is left of older ones"


def test_a_log_that_cannot_be_listed_takes_no_note_with_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's file system of HDFS lists nothing while the name node fails; without its note the batch would be sent again."""
    name, files = batch_notes.batch_name(folder, "sink"), Folder.files
    monkeypatch.setattr(Folder, "files", lambda self, below: {} if below == "offsets" else files(self, below))
    batch_notes.begin_batch(folder, name, lambda: ENDS)
    assert batch_notes.begin_batch(folder, name, lambda: LATER).had_note


def test_old_notes_that_cannot_be_removed_do_not_hold_up_a_batch(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)
    (tmp_path / "checkpoint" / "offsets" / "1").write_text("1")
    (tmp_path / "checkpoint" / "offsets" / "0").unlink()

    def gone(self: Folder, below: str) -> None:
        raise OffsetError(f"{below} was removed by another write")

    monkeypatch.setattr(Folder, "delete_folder", gone)
    assert not batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS).had_note


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    folder = checkpoint_folder(str(tmp_path))
    with pytest.raises(OptionError, match="is not the checkpoint of a query"):
        batch_notes.batch_name(folder, "sink")
    checkpoint(tmp_path / "c", 0)
    with pytest.raises(OptionError, match="nothing in its folder 'offsets'"):
        batch_notes.batch_name(checkpoint_folder(str(tmp_path / "c")), "sink")
    with pytest.raises(OptionError, match="no planned batch 5"):
        batch_notes.batch_name(checkpoint_folder(str(tmp_path / "c")), "sink", 5)


def test_a_folder_that_takes_no_files_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c")
    (tmp_path / "c" / "rocketmq").write_text("a file")
    folder = checkpoint_folder(f"file:{tmp_path}/c")
    with pytest.raises(OffsetError, match="Check the path and its permissions"):
        batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)


def test_only_one_of_two_creates_a_file(tmp_path: Path) -> None:
    folder = checkpoint_folder(str(tmp_path))
    assert folder.create("a/b", b"one")
    assert not folder.create("a/b", b"two")
    assert folder.read_bytes("a/b") == b"one"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_is_created_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on shares of SMB and on buckets that are mounted."""

    def no_links(*given: object, **at: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_links)
    test_only_one_of_two_creates_a_file(tmp_path)


def test_a_rewind_raises_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "c", 2)
    (path / "commits").mkdir()
    for number in range(2):
        line = json.dumps({"batchTimestampMs": 1})
        (path / "offsets" / str(number)).write_text(f"v1\n{line}\n-")
        (path / "commits" / str(number)).write_text("v1\n{}")
    folder = files.open_folder(str(path))
    batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: ENDS)
    history = offset_log.history(folder)
    planned = rewind.plan_rewind(folder, history, rewind.choose_batch(history, 0, None))
    monkeypatch.setattr(Folder, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rewind.execute(folder, planned, datetime(2026, 11, 24, tzinfo=UTC))
    assert batch_notes.begin_batch(folder, batch_notes.batch_name(folder, "sink"), lambda: LATER).had_note, (
        "the query may go on as it was"
    )
    monkeypatch.undo()
    rewind.execute(folder, planned, datetime(2026, 11, 25, tzinfo=UTC))
    assert batch_notes.epoch(folder) == 1


def interrupted(*given: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("location", "name"),
    [
        *(
            ("file:/a/b", "/a/b"),
            ("file:///a/b", "/a/b"),
            ("FILE:/a/b", "/a/b"),
            ("file:/a%20b", "/a%20b"),
            ("/a:b", "/a:b"),
        ),
        *(("~/a", "{here}/~/a"), ("./a:b", "{here}/a:b"), ("~", "{here}/~")),
        *(("/a/link/../b", "/a/b"), ("file:/a/link/../b", "/a/b"), ("link/../b", "{here}/b"), ("/../a", "/a")),
    ],
)
def test_checkpoints_are_called_as_spark_calls_them(
    location: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that is used is the one whose owners are checked."""
    monkeypatch.chdir(tmp_path)
    found = checkpoint_folder(location)
    assert found.name == name.format(here=tmp_path)
    assert files.local_path(location) == Path(found.name)


@pytest.mark.parametrize("location", ["hdfs:/a", "HDFS://h/a", "s3a://b/a", "odd:a"])
def test_a_checkpoint_on_another_file_system_has_no_local_path(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.local_path(location) is None
    assert describe_exposure(location) is None
    asked: list[str] = []
    monkeypatch.setattr(
        "pyarrow.fs.FileSystem", SimpleNamespace(from_uri=lambda name: (None, asked.append(name) or "/a"))
    )
    checkpoint_folder(location)
    assert asked == [location.replace("s3a", "s3")]


@pytest.mark.parametrize("of", [describe_exposure, checkpoint_folder, files.open_folder])
def test_a_checkpoint_that_no_system_opens_is_an_error(of: Callable[[str], object], tmp_path: Path) -> None:
    of(f"{tmp_path}/{'a' * 200}")
    for path in (f"{tmp_path}{'/a' * 5_000_000}", f"file:{tmp_path}{'/a' * 3000}"):
        with pytest.raises(
            OptionError, match=r"the checkpointLocation is '.{32}…'; it has \d+ bytes; expected at most 4096"
        ):
            of(path)
    with pytest.raises(OptionError, match=r"a{20}…' has 256 bytes; expected at most 255"):
        of(f"{tmp_path}/{'a' * 256}")
