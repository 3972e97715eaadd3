"""A copy of a spool has what its reader sent, as far as that is understood; neither the reader nor the files are trusted."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline, utc_text
from rocketmq_spark.base.process import python_call
from rocketmq_spark.cli.command import app
from rocketmq_spark.delay.envelope_records import (
    COPY_RULES,
    DELAYED_KIND,
    OTHER_ID_REASON,
    DeliveryRules,
    RecreationCheck,
    dead_letter_of,
    effect_of,
)
from rocketmq_spark.delay.node import purpose_of
from rocketmq_spark.delay.queue_records import QueueRecords
from rocketmq_spark.delay.release import Progress, QueueCheckpoint, note_name
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.send import Resent
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool import copying
from rocketmq_spark.spool.copying import CopyLimits, CopyResult, EntryChecker, copy_spool, new_folder
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.files import COPY_TO_SERVE, RESERVE_BYTES, check_temporary_folder
from rocketmq_spark.spool.owner_reader import DERIVED_AREAS
from rocketmq_spark.spool.records import (
    DEAD,
    IDENTITY,
    LASTING_PREFIX,
    NOTE,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    UNKNOWN_OWNER,
    Dead,
    Due,
    PendingKey,
    Record,
    RecordState,
    RetryLater,
    SpoolOwner,
    Totals,
    lane_key,
    record_key,
)
from rocketmq_spark.spool.recovery import ALL_KEYS
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import Envelope
from rocketmq_spark.wire.properties import encode_properties
from tests import users
from tests.spool.bench import record
from tests.spool.crafted import crafted
from tests.spool.scripted_reader import ENTRIES, STATE, reader
from tests.spool.test_recovery import damage, filled

NOW_MS = 10**13
ROOT = Path(__file__).parents[2]


def limits(seconds: float = 60, max_bytes: int = 1 << 30) -> CopyLimits:
    return CopyLimits(Deadline.after(seconds), max_bytes)


def content(path: Path) -> dict[bytes, bytes]:
    with contextlib.closing(Database(path, read_only=True)) as db:
        return dict(db.scan(*ALL_KEYS))


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def sent(path: Path) -> list[bytes]:
    """The payloads that a process sends, which opens the spool."""
    with contextlib.closing(Store(path, sync="never")) as store:
        return [work.record.payload for work in store.take(NOW_MS, 100)]


def spool_with_everything(path: Path) -> Path:
    store = Store(path, sync="never")
    store.set_owner(SpoolOwner(("127.0.0.1:1",), "", "environment 'eu' (suffix)"))
    lane = [record(b"%d" % n, lane=b"lane") for n in range(3)]
    marked = Record("k", b"marked", 5)
    notes = {LASTING_PREFIX + b"queues": b"its value", b"t/broker-a/0": b"read", b"t/broker-a/1": b""}
    store.add([(each, 9) for each in (*lane, marked, record(b"late"), record(b"dead"))], notes)
    works = store.take(NOW_MS, 100)
    verdicts = {b"dead": Dead("no"), b"late": RetryLater(NOW_MS + 5, "away")}
    store.settle([(work, verdicts[work.record.payload]) for work in works if work.record.payload in verdicts], NOW_MS)
    store.close()
    return path


def test_a_copy_has_all_records_and_the_source_stays_as_it_is(tmp_path: Path) -> None:
    source, copy = spool_with_everything(tmp_path / "source"), tmp_path / "copy"
    before = files_of(source)
    assert copy_spool(source, copy, limits()) == CopyResult(5, 1, {}, False, [], left_out_note_count=1)
    assert files_of(source) == before
    expected, found = content(source), content(copy)
    for note in (b"t/broker-a/0", b"t/broker-a/1"):  # a node believes it, and nobody sees it
        del expected[NOTE + note]
    expected_totals, totals = (Totals.decode(each.pop(TOTALS)) for each in (expected, found))
    assert found == expected
    assert expected_totals is not None
    assert totals is not None
    expected_totals.last_recorded_ms = totals.last_recorded_ms
    assert totals == expected_totals
    assert copy.stat().st_mode & 0o777 == 0o700


def test_copy_of_crafted_spool_shows_and_sends_same_record(tmp_path: Path) -> None:
    """RocksDB itself would show one record and send the other."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    key, [looked_up, iterated] = record_key(RECORD, 1), [record(name).encode() for name in (b"looked up", b"iterated")]
    rest = [(Due(1, 1).mark_value, STATE), (TOTALS, Totals(2, 1, len(looked_up)).encode())]
    crafted(source, [(key, looked_up), *rest], [(key, iterated)])
    with contextlib.closing(Database(source, read_only=True)) as db:
        assert db.get(key) == looked_up
        assert dict(db.scan(*ALL_KEYS))[key] == iterated
    assert copy_spool(source, copy, limits()) == CopyResult(1, 0, {}, False, [])
    with contextlib.closing(SpoolReading(copy)) as reading:
        (shown,) = reading.entries()
    assert isinstance(shown.record, Record)
    assert sent(copy) == [shown.record.payload] == [b"iterated"]


def test_records_of_killed_process_are_copied_from_its_log(tmp_path: Path) -> None:
    filled(tmp_path / "source")
    before = files_of(tmp_path / "source")
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits())
    assert (copied.waiting_count, copied.is_damaged) == (300, False)
    assert files_of(tmp_path / "source") == before


def test_damaged_spool_is_copied_in_part_without_stale_notes(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path / "source", sync="never")) as store:
        noise = random.Random(1)
        store.add(
            [(record(noise.randbytes(200)), 1) for _ in range(300)], {b"old": b"1", LASTING_PREFIX + b"stays": b"1"}
        )
    (table,) = (tmp_path / "source").glob("*.sst")
    damage(table, 3 * table.stat().st_size // 4, 1)
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits())
    assert copied.is_damaged
    assert 0 < copied.waiting_count < 300
    with contextlib.closing(Store(tmp_path / "copy", sync="never")) as store:
        assert store.notes() == {LASTING_PREFIX + b"stays": b"1"}
        assert store.totals.depth == len(store.take(NOW_MS, 1000))


def test_copy_keeps_lasting_notes_and_damage_makes_owner_unknown(tmp_path: Path) -> None:
    notes = "put(NOTE + b'all is stored', b'1')", "put(NOTE + LASTING_PREFIX + b'queues', b'1')"
    statements = *notes, "put(record_key(RECORD, 1), record(b'1').encode())"
    for damaged, owner in ((False, SpoolOwner()), (True, UNKNOWN_OWNER)):
        copy = tmp_path / f"{damaged}"
        call = reader(*statements, f"end(damaged={damaged})")
        assert copy_spool(tmp_path / "source", copy, limits(), call) == CopyResult(
            1, 0, {}, damaged, [], left_out_note_count=1
        )
        with contextlib.closing(Store(copy, sync="never")) as store:
            assert store.notes() == {LASTING_PREFIX + b"queues": b"1"}
        with contextlib.closing(SpoolReading(copy)) as reading:
            assert reading.owner == owner


def test_spool_that_cannot_be_opened_is_reported_with_remedy(tmp_path: Path) -> None:
    spool_with_everything(tmp_path / "source")
    (tmp_path / "source" / "CURRENT").unlink()
    with pytest.raises(
        SpoolError, match=r"was not copied: its reader reports.*CURRENT is missing.*spool repair FOLDER"
    ):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits())
    assert not (tmp_path / "copy").exists()


def test_what_this_package_writes_is_taken() -> None:
    checked = EntryChecker()
    assert [key for key, value in ENTRIES if checked.entry_to_copy(key, value) is None] == [
        OWNER[0],
        NOTE + b"name",
        OWNER[1],
    ]
    assert (checked.left_out_count_by_reason, checked.record_count, checked.dead_count) == ({}, 3, 1)
    assert checked.owner == SpoolOwner(("a:1",), "")


def with_version(value: bytes, version: int) -> bytes:
    return bytes([version]) + value[1:]


def with_longer_target() -> bytes:
    """A record whose target has no bytes, although its length says 9; its checksum is right."""
    data = bytearray(Record("k", b"", 1).encode())
    data[5 + 10 : 5 + 12] = (9).to_bytes(2)
    data[1:5] = zlib.crc32(data[5:]).to_bytes(4)
    return bytes(data)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"", b"", copying.OUT_OF_ORDER),
        (b"u", b"", copying.UNKNOWN_KIND),
        (b"ex", SpoolOwner().encode(), copying.UNKNOWN_KIND),
        (RECORD, record(b"x").encode(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1) + b"x", record(b"x").encode(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 2**62), record(b"x").encode(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), record(b"x").encode()[:-1] + b"y", copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), with_version(record(b"x").encode(), 3), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), with_longer_target(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), record(b"x", at_ms=2**62).encode(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), Record("send", b"no send", 1).encode(), copying.UNREADABLE_RECORD),
        (record_key(RECORD, 1), Record("k", b"", 1, marks=((b"", b""),) * 5).encode(), copying.TOO_MANY_MARKS),
        (record_key(RECORD, 1), None, copying.TOO_LONG),
        (record_key(DEAD, 1), STATE + b"\xff", copying.UNREADABLE_STATE),
        (record_key(DEAD, 1), STATE[:9], copying.UNREADABLE_STATE),
        (record_key(DEAD, 1), RecordState(1, 2, "x" * copying.MAX_OTHER_VALUE_BYTES).encode(), copying.TOO_LONG),
        (DEAD, STATE, copying.UNREADABLE_STATE),
        (Due(2**63, 1).mark_value, STATE, copying.UNREADABLE_STATE),
        (Due(1, 2**63).mark_value, STATE, copying.UNREADABLE_STATE),
        (Due(1, 1).mark_value, RecordState(1, 2**63).encode(), copying.UNREADABLE_STATE),
        (Due(1, 1).mark_value[:-1], STATE, copying.UNREADABLE_STATE),
        (PendingKey("t", True, Due(1, 2**63)).encoded, STATE, copying.UNREADABLE_STATE),
        (PendingKey("t", True, Due(1, 1)).encoded + b"x", STATE, copying.UNREADABLE_STATE),
        (PENDING + b"x" * 18, STATE, copying.UNREADABLE_STATE),
        (NOTE + b"n", b"x" * (copying.MAX_OTHER_VALUE_BYTES + 1), copying.TOO_LONG),
        (OWNER[0], b"[2]", copying.UNREADABLE_OWNER),
        (OWNER[0], b'[1, "", 5, null, ""]', copying.UNREADABLE_OWNER),
        (OWNER[0], b'[1, "", [5], null, ""]', copying.UNREADABLE_OWNER),
        (OWNER[0], b'[1, "", [], {}, {}]', copying.UNREADABLE_OWNER),
    ],
)
def test_what_is_not_understood_is_left_out_with_the_reason(key: bytes, value: bytes | None, reason: str) -> None:
    checked = EntryChecker()
    assert not checked.entry_to_copy(key, value)
    assert checked.left_out_count_by_reason == {reason: 1}
    assert checked.owner == (UNKNOWN_OWNER if reason == copying.UNREADABLE_OWNER else None)


def state_of_0_1(target: str) -> bytes:
    return RecordState(1, 2).encode()[:-2] + len(target).to_bytes(2) + target.encode() + b"reason"


@pytest.mark.parametrize("key", [Due(5, 1).mark_value, PendingKey("another", True, Due(5, 1)).encoded])
@pytest.mark.parametrize("state", [STATE, state_of_0_1("broker b")])
def test_the_target_of_a_pending_record_is_that_of_the_record(tmp_path: Path, key: bytes, state: bytes) -> None:
    assert EntryChecker().entry_to_copy(key, state) == (Due(5, 1).mark_value, STATE)
    entries = sorted([(key, state), (record_key(RECORD, 1), Record("k", b"1", 1, "mine").encode())])
    call = reader(*(f"put({each!r}, {value!r})" for each, value in entries), "end()")
    assert copy_spool(tmp_path / "source", tmp_path / "copy", limits(), call) == CopyResult(1, 0, {}, False, [])
    assert content(tmp_path / "copy")[PendingKey("mine", True, Due(5, 1)).encoded] == STATE


def test_a_key_is_taken_once_and_only_behind_those_before_it() -> None:
    checked = EntryChecker()
    keys = [record_key(RECORD, number) for number in (2, 2, 1, 3)]
    assert [checked.entry_to_copy(key, record(b"x").encode()) is not None for key in keys] == [True, False, False, True]
    assert checked.left_out_count_by_reason == {copying.OUT_OF_ORDER: 2}


def test_a_record_has_one_state(tmp_path: Path) -> None:
    """Each state gets the target of the record in its key, so many states of one record took memory without a limit."""
    checked = EntryChecker()
    first = Due(1, 5)
    assert checked.entry_to_copy(first.mark_value, STATE) is not None
    assert checked.entry_to_copy(Due(2, 5).mark_value, STATE) is None
    assert checked.entry_to_copy(PendingKey("t", True, Due(3, 5)).encoded, STATE) is None
    assert checked.entry_to_copy(PendingKey("t", True, Due(3, 6)).encoded, STATE) is not None
    assert checked.left_out_count_by_reason == {copying.SECOND_STATE: 2}


@pytest.mark.parametrize("area", DERIVED_AREAS)
def test_what_is_derived_from_records_is_not_taken(area: bytes) -> None:
    checked = EntryChecker()
    assert not checked.entry_to_copy(area + b"anything", b"anything")
    assert not checked.left_out_count_by_reason


def test_a_reader_may_send_keys_twice_and_in_any_order(tmp_path: Path) -> None:
    """As from a database with crafted levels: the later one of two values is not in the copy."""
    call = reader(
        "for key, value in ENTRIES: put(key, value)",
        "put(record_key(RECORD, 1), record(b'another').encode())",
        "put(lane_key(b'lane', 7), b'')",
        "end(warnings=['careful'])",
    )
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits(), call)
    assert copied == CopyResult(2, 1, {copying.OUT_OF_ORDER: 1}, False, ["careful"], left_out_note_count=1)
    assert sent(tmp_path / "copy") == [b"1", b"3"]
    found = content(tmp_path / "copy")
    assert lane_key(b"lane", 3) in found
    assert lane_key(b"lane", 7) not in found


def test_copy_omits_states_without_record_and_sends_no_dead_one(tmp_path: Path) -> None:
    call = reader(
        "put(record_key(DEAD, 1), STATE)",
        "put(record_key(DEAD, 7), STATE)",
        "put(Due(1, 1).mark_value, STATE)",
        "put(Due(2, 8).mark_value, STATE)",
        "put(Due(3, 2).mark_value, STATE)",
        "put(record_key(RECORD, 1), record(b'dead').encode())",
        "put(record_key(RECORD, 2), b'broken')",
        "end()",
    )
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits(), call)
    assert copied == CopyResult(0, 1, {copying.UNREADABLE_RECORD: 1, copying.STATE_WITHOUT_RECORD: 2}, False, [])
    assert sent(tmp_path / "copy") == []
    with contextlib.closing(Store(tmp_path / "copy", sync="never")) as store:
        assert (store.damage_count, store.revive(1)) == (0, 1)


def test_unreadable_owner_leaves_copied_records_without_owner(tmp_path: Path) -> None:
    call = reader("put(OWNER[0], b'[9]')", "put(record_key(RECORD, 1), record(b'x').encode())", "end()")
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits(), call)
    assert copied.left_out_count_by_reason == {copying.UNREADABLE_OWNER: 1}
    with contextlib.closing(Store(tmp_path / "copy")) as store, pytest.raises(SpoolError, match="an owner that a"):
        store.set_owner(SpoolOwner(("a:1",)))


def test_an_entry_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    call = reader(
        "put(b'n' * (MAX_KEY_BYTES + 9), b'x')",
        "out.write(FRAME_HEADER.pack(9, MAX_VALUE_BYTES + 5) + record_key(RECORD, 1))",
        "out.write(bytes(MAX_VALUE_BYTES + 5))",
        "put(record_key(RECORD, 2), record(b'2').encode())",
        "end()",
    )
    copied = copy_spool(tmp_path / "source", tmp_path / "copy", limits(), call)
    assert copied == CopyResult(1, 0, {copying.TOO_LONG: 2}, False, [])


ENDLESS = "while True: put(%s)"


@pytest.mark.parametrize(
    ("statement", "given", "expected"),
    [
        (ENDLESS % "b'', b''", (60, 100_000), r"more than 100000 bytes.* Raise --max-bytes"),
        (ENDLESS % "b'n', b'x' * 5000", (60, 100_000), r"more than 100000 bytes"),
        ("out.write(FRAME_HEADER.pack(9, 2**32 - 1)); out.flush(); sys.stdin.read()", (60, 10**6), "more than 1000000"),
        ("while True: out.write(bytes(FRAME_HEADER.size))", (60, 100_000), r"more than 100000 bytes"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", (0.5, 10**6), r"reading took too long\. Raise --timeout"),
        ("put(b'n', b'x'); out.flush(); os.close(1); signal.pause()", (60, 10**6), r"ended without a report"),
        ("out.write(b'half'); out.flush(); os._exit(0)", (60, 10**6), r"ended without a report"),
        ("os.kill(os.getpid(), signal.SIGKILL)", (60, 10**6), r"ended without a report"),
        ("report(b'x' * 70000)", (60, 10**6), r"ended with a report of 70000 bytes"),
        ("report(b'[]')", (60, 10**6), r"an unreadable report"),
        ("report(b'{}')", (60, 10**6), r"an unreadable report"),
        ("report(b'[' * 60000)", (60, 10**6), r"an unreadable report"),
        ("end(warnings=5)", (60, 10**6), r"an unreadable report"),
        ("end(error='no\\x1b[2J', remedy='Run: rm')", (60, 10**6), r"its reader reports: no\\x1b\[2J\. Run: rm$"),
    ],
)
def test_a_reader_may_end_stop_or_send_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, given: tuple[float, int], expected: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: object, **how: object) -> subprocess.Popen[bytes]:
        started.append(real(*args, **how))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SpoolError, match=rf"the spool in {tmp_path / 'source'} was not copied: .*{expected}"):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits(*given), reader(statement))
    assert not (tmp_path / "copy").exists()
    (process,) = started
    assert process.returncode is not None, "it was killed and has ended"
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_copy_leaves_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    nearly_full = os.statvfs_result((1, 1, 1, RESERVE_BYTES, RESERVE_BYTES, 1, 1, 1, 1, 1))
    monkeypatch.setattr(os, "statvfs", lambda _: nearly_full)
    with pytest.raises(SpoolError, match="was not copied: the disk of the spool"):
        copy_spool(source, tmp_path / "copy", limits())
    assert not (tmp_path / "copy").exists()


WATCHED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from rocketmq_spark.base import folders
from rocketmq_spark.spool import owner_reader
late = []
def outside(path):
    return not isinstance(path, int) and not os.fspath(path).startswith(sys.argv[2])
def watch(event, details):
    if not folders.has_own_rights() and (event == "import" or event == "open" and outside(details[0])):
        late.append((event, str(details[0])))
sys.addaudithook(watch)
real = owner_reader._write_entries
def report(path, out):
    real(path, out)
    raise ValueError(f"{sorted({*os.getresuid()})} {sorted({*os.getresgid(), *os.getgroups()})} late: {late}")
owner_reader._write_entries = report
owner_reader.main(sys.argv[2])
"""


def test_copy_reader_runs_as_owner_and_needs_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    uids, gids = [os.getuid()], sorted({*os.getresgid(), *os.getgroups()})
    if users.IS_ROOT:
        users.root_beside(monkeypatch, source)
        uids, gids = [users.OTHER], [65534]
    call = python_call("-c", WATCHED, str(ROOT), str(source))
    with pytest.raises(SpoolError) as failed:
        copy_spool(source, tmp_path / "copy", limits(), call)
    assert f"ValueError: {uids} {gids} late: []" in str(failed.value)


def test_the_reader_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SECRET_KEY", "s")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("LC_ALL", "C")
    started: list[dict[str, str]] = []

    def start(*, env: dict[str, str], **_: object) -> None:
        started.append(env)
        raise SpoolError("enough")

    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(SpoolError, match="enough"):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits())
    [environment] = started
    assert environment["LC_ALL"] == "C"
    assert "s" not in environment.values()


@pytest.mark.parametrize("after", [ENDLESS % "b'n', b'x' * 5000", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_reader_that_is_killed_leaves_no_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Its temporary files are logs of the spool."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    used = f"assert tempfile.mkdtemp().startswith({str(temporary)!r})"
    with pytest.raises(SpoolError, match=r"more than 100000 bytes|ended without a report"):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits(60, 100_000), reader(used, after))
    assert not [*temporary.iterdir()]


def test_the_temporary_files_of_a_reader_are_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uids: list[int] = []
    real = subprocess.Popen

    def start(*given: object, env: dict[str, str], **how: object) -> object:
        if "TMPDIR" not in env:
            return real(*given, env=env, **how)  # type: ignore[call-overload]
        uids.append(os.stat(env["TMPDIR"]).st_uid)
        raise SpoolError("enough")

    users.root_beside(monkeypatch, spool_with_everything(tmp_path / "source"))
    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(SpoolError, match="enough"):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits())
    assert uids == [(tmp_path / "source").stat().st_uid]


def temporary(path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.mark.skipif(not users.IS_ROOT, reason="needs a second user")
def test_a_temporary_folder_closed_to_the_owner_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python remembers root's folder, and root then takes the rights of a spool's owner."""
    users.let_in(tmp_path)
    (tmp_path / "closed").mkdir(0o700)
    above = temporary(tmp_path / "closed" / "temporary", monkeypatch, 0o755)
    remedy = r"Set the variable TMPDIR .* mode 0755, or .* sticky bit \(mode 1777\)"
    with folders.as_user(users.OTHER), pytest.raises(SpoolError, match=rf"uid {users.OTHER} .* {above}.*{remedy}"):
        check_temporary_folder()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_temporary_folder_that_others_may_exchange_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Its owner led root to another folder, which then was the owner's."""
    source = spool_with_everything(tmp_path / "source")
    users.of_root(monkeypatch, os.getuid())
    above = temporary(tmp_path / "temporary", monkeypatch, mode)
    done = command(source, tmp_path / "copy")
    if mode == 0o777:
        expected = (
            f"lie in {above}, in which others (mode 0777) may replace files and folders. Set the variable TMPDIR to"
        )
        assert expected in " ".join(done.stderr.split())
    assert done.exit_code == (mode == 0o777)
    assert not [*above.iterdir()]


def test_a_mirror_is_not_made_where_others_may_exchange_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    users.of_root(monkeypatch, os.getuid())
    temporary(tmp_path / "temporary", monkeypatch, 0o777)
    (manifest,) = source.glob("MANIFEST-*")
    data = bytearray(manifest.read_bytes())
    data[6] ^= 0x40  # the type of the first record
    manifest.write_bytes(data)
    with pytest.raises(SpoolError, match="a temporary folder for messages would lie in"):
        SpoolReading(source)


@pytest.mark.skipif(not users.IS_ROOT, reason="needs a second user")
@pytest.mark.parametrize(
    ("statements", "left"),
    [
        (["os.setuid(34567)", "[(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]"], []),
        (["os.rmdir(here)", "os.makedirs(here + '/of root')"], ["of root"]),
    ],
    ids=["deep", "of another user"],
)
def test_the_owners_rights_remove_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statements: list[str], left: list[str]
) -> None:
    """The owner may put there what takes root's memory, or let the folder of another user have the name."""
    users.root_beside(monkeypatch, spool_with_everything(tmp_path / "source"))
    above = temporary(tmp_path / "temporary", monkeypatch, 0o1777)
    first = "here = os.environ['TMPDIR']", "os.chdir(here)"
    copy_spool(tmp_path / "source", tmp_path / "copy", limits(), reader(*first, *statements, "end()"))
    assert [path.name for path in above.glob("*/*")] == left


@pytest.mark.skipif(not users.IS_ROOT, reason="needs a second user")
def test_removing_temporary_files_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users.root_beside(monkeypatch, spool_with_everything(tmp_path / "source"))
    temporary(tmp_path / "temporary", monkeypatch, 0o1777)
    (stopped := tmp_path / "rm").write_text("#!/bin/sh\nkill -STOP $$\n")
    stopped.chmod(0o755)
    monkeypatch.setattr(os, "defpath", str(tmp_path))
    monkeypatch.setattr(copying, "_KILL_TIMEOUT_S", 0.2)
    call = reader("open(os.environ['TMPDIR'] + '/file', 'x')", "os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(SpoolError, match="took too long"):
        copy_spool(tmp_path / "source", tmp_path / "copy", limits(4), call)
    assert f"was not removed: let {folders.user_text(users.OTHER)} remove it, not root" in caplog.text


def spool(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["spool", *map(str, arguments)])


def command(*arguments: object) -> Result:
    return spool("copy", *arguments)


# Of the one note in ``spool_with_everything``.
NOT_COPIED = (
    "; 1 notes of a delay node about its queues are not copied: a node with the copy reads the queues again from their "
    "committed offsets"
)


def base_of_two(tmp_path: Path) -> tuple[Path, Path]:
    one, two = (spool_with_everything(tmp_path / "base" / f"worker-{name}") for name in ("a", "b"))
    (tmp_path / "base").chmod(0o755)
    return one, two


def test_a_folder_of_several_spools_becomes_a_folder_of_copies(tmp_path: Path) -> None:
    """Also of several users, because each spool is read by a process of its own."""
    one, two = base_of_two(tmp_path)
    if users.IS_ROOT:
        for path, uid in ((one, users.OTHER), (two, users.OTHER + 5)):
            users.let_in(path)
            for each in (path, *path.rglob("*")):
                os.chown(each, uid, uid)
    done = command(tmp_path / "base", tmp_path / "copy")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{path} -> {tmp_path}/copy/worker-{number}: 5 wait, 1 dead{NOT_COPIED}"
        for number, path in ((1, one), (2, two))
    ]
    for path in ((tmp_path / "copy"), *(tmp_path / "copy").rglob("*")):
        assert path.stat().st_uid == os.getuid()
    assert sent(tmp_path / "copy" / "worker-2") == sent(tmp_path / "copy" / "worker-1") != []
    assert folders.has_own_rights()


def test_spool_containing_link_is_not_copied_but_others_are(tmp_path: Path) -> None:
    one, two = base_of_two(tmp_path)
    (tmp_path / "mine").write_text("important")
    (one / "000099.sst").symlink_to(tmp_path / "mine")
    done = command(tmp_path / "base", tmp_path / "copy")
    assert done.exit_code == 1
    assert f"the spool in {one} was not copied: its reader reports: the spool in {one} is not used" in done.stderr
    assert f"{one}/000099.sst is a link" in done.stderr
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["worker-2"]
    assert sent(tmp_path / "copy" / "worker-2")
    assert str(two) in done.stdout


def test_an_incomplete_copy_is_an_error_and_kept(tmp_path: Path) -> None:
    source = spool_with_everything(tmp_path / "source")
    with contextlib.closing(Database(source)) as db:
        db.write([(b"future", b""), (record_key(RECORD, 9), b"broken")])
    done = command(source, tmp_path / "copy")
    assert done.exit_code == 1
    assert f"the spool in {source} was copied in part: 1 entries were left out: of a kind" in done.stderr
    assert "1 entries were left out: records that cannot be read" in done.stderr
    assert sent(tmp_path / "copy")


def a_folder_that_exists(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy", "exists already. Name a folder that does not exist yet"


def a_link_to_nothing(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "copy").symlink_to(tmp_path / "nothing")
    return tmp_path / "copy", "exists already"


def a_folder_in_the_source(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "link").symlink_to(tmp_path / "source")
    return tmp_path / "link" / "copy", f"is in {tmp_path}/source. Name a folder of yours elsewhere"


def a_folder_in_none(tmp_path: Path) -> tuple[Path, str]:
    return (
        tmp_path / "none" / "copy",
        "cannot be created: No such file or directory. Name a folder in a folder that exists",
    )


def a_folder_where_others_may_replace_it(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    return tmp_path / "open" / "copy", "in which others (mode 0777) may replace files and folders. Name a folder in one"


@pytest.mark.parametrize(
    "place",
    [
        a_folder_that_exists,
        a_link_to_nothing,
        a_folder_in_the_source,
        a_folder_in_none,
        a_folder_where_others_may_replace_it,
    ],
)
def test_a_copy_needs_a_new_folder_of_this_user_alone(
    tmp_path: Path, place: Callable[[Path], tuple[Path, str]]
) -> None:
    source = spool_with_everything(tmp_path / "source")
    copy, expected = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = command(source, copy)
    assert done.exit_code == 1
    assert expected in " ".join(done.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_copy_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    source = spool_with_everything(tmp_path / "source")

    def fail(*_: object) -> None:
        raise error("stop")

    monkeypatch.setattr(copying, "derive", fail)
    assert command(source, tmp_path / "copy").exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_copy_that_a_signal_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    source = spool_with_everything(tmp_path / "source")
    monkeypatch.setattr(copying, "derive", lambda *_: signal.raise_signal(number))
    before = signal.getsignal(number)
    assert command(source, tmp_path / "copy").exit_code == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert signal.getsignal(number) == before


def test_a_copy_ignores_signals_that_nohup_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    real = copying.derive
    monkeypatch.setattr(copying, "derive", lambda *given: (signal.raise_signal(signal.SIGHUP), real(*given))[1])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert command(source, tmp_path / "copy").exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_warning_is_said_to_be_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    monkeypatch.setattr(copying, "copy_spool", lambda *_, **__: CopyResult(0, 0, {}, False, ["careful"]))
    assert f"{source}: its reader reports: careful" in command(source, tmp_path / "copy").stderr


def test_nothing_is_created_in_the_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spool_with_everything(tmp_path / "source")
    (tmp_path / "theirs").mkdir()
    users.give_away(monkeypatch, tmp_path / "theirs")
    monkeypatch.setattr("tempfile.mkdtemp", None)
    assert "Name a folder in one that only you and root" in command(source, tmp_path / "theirs" / "copy").stderr


def test_of_two_commands_with_one_name_the_second_one_fails(tmp_path: Path) -> None:
    source = spool_with_everything(tmp_path / "source")
    refused = pytest.raises(SpoolError, match=r"cannot be created: .* Name a folder that does not exist yet")
    with refused, new_folder(tmp_path / "copy", source) as new:
        (new / "mine").touch()
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "of another").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "source"]
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["of another"]


@pytest.mark.parametrize(("target", "size"), [("t" * 60_000, 60_000), ("t" * 14_999 + "\U0001f600", 60_000)])
def test_what_is_held_several_times_is_counted_so(tmp_path: Path, target: str, size: int) -> None:
    """A record of 200 KB in few bytes on disk took a GiB of memory for each 200 MiB of the limit. Python holds a text in four
    bytes a character if one of them needs it.
    """
    source = Store(tmp_path / "source", "never")
    marks = ((b"a", b"m" * 60_000),)
    texts = {"lane": b"l" * 60_000, "target": target}
    source.add([(Record("kind", b"", 1, **texts), 1)])  # type: ignore[arg-type]
    source.close()
    checked, counted = EntryChecker({"kind": lambda record: replace(record, marks=marks)}), []
    for key, value in content(tmp_path / "source").items():
        if checked.entry_to_copy(key, value) is not None:
            counted.append(checked.derived_bytes)
    assert sum(counted) == 4 * (120_001 + size) + 250
    done = command(tmp_path / "source", tmp_path / "copy", "--max-bytes", "500k")
    assert "it has more than 512000 bytes" in " ".join(done.stderr.split())
    assert command(tmp_path / "source", tmp_path / "copy", "--max-bytes", "1m").exit_code == 0


def test_the_limits_hold_for_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_of_two(tmp_path)
    done = command(tmp_path / "base", tmp_path / "copy", "--max-bytes", "10k")
    assert done.exit_code == 1
    assert "worker-b was not copied: it has more than 10240 bytes" in done.stderr
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["worker-1"]
    monkeypatch.setattr(subprocess, "Popen", None)  # after the time, no further process starts
    done = command(tmp_path / "base", tmp_path / "late", "--timeout", "0")
    assert done.stderr.count("reading took too long") == 2
    assert not (tmp_path / "late").exists()
    assert command(tmp_path / "base", tmp_path / "late", "--max-bytes", "much").exit_code == 2


QUEUE = MessageQueue("dmq_inner_topic", "broker-a", 0)
LATER_MS = NOW_MS + 7
RULES = DeliveryRules(ProducerSettings(group="g"), "dead")


def delay_folder(path: Path) -> Path:
    """Of a node: a message with an escape code, no envelope, a dead letter, and a note that says more was read."""
    more = {"TAGS": "a\x1b[31m", "DMQ_QUEUE": "broker-a:3"}
    stored, other = (encode_properties({"UNIQ_KEY": name, **more}) for name in ("A1", "A2"))
    envelope = Envelope("orders", LATER_MS, "A1", 5, 9, stored, b"delayed body").pack()
    given_up = Envelope("orders", LATER_MS, "A2", 5, 9, other, b"given up").pack()
    with contextlib.closing(Store(path, sync="never")) as store:
        store.set_owner(SpoolOwner(("127.0.0.1:1",), "", purpose=purpose_of("rocketmq_delay")))
        arrived = [
            effect_of(RULES, QUEUE, offset, body, NOW_MS)
            for offset, body in enumerate((envelope, b"RDMQ\x1b", given_up))
        ]
        records = [(each.record, each.due_ms) for each in arrived if each.record is not None]
        dead = dead_letter_of(RULES, records[2][0], Resent(error="no topic ? orders"))
        assert dead is not None
        records[2] = replace(dead, payload=dead.payload.replace(b"no topic ?", b"no topic \x1b")), LATER_MS
        store.add(records, {note_name(QUEUE): QueueCheckpoint(0, 500, Progress(0, 0, 0)).encode()})
    return path


def test_the_copy_of_a_nodes_folder_has_messages_and_no_note(tmp_path: Path) -> None:
    """A node that believes the note never reads envelopes 2 to 499, and commits that they are done."""
    source, copy = delay_folder(tmp_path / "source"), tmp_path / "copy"
    done = command(source, copy)
    assert done.exit_code == 0
    assert f"3 wait, 0 dead{NOT_COPIED}" in done.stdout
    with contextlib.closing(Store(copy, use=COPY_TO_SERVE)) as store:
        assert QueueRecords(store, RecreationCheck(None, "g")).checkpoint(QUEUE) is None  # type: ignore[arg-type]
        store.set_owner(SpoolOwner(("127.0.0.1:1",), "", purpose=purpose_of("rocketmq_delay")))
        assert len(store) == 3


def test_records_have_marks_that_follow_from_what_is_shown(tmp_path: Path) -> None:
    """A node takes two messages with one identity for one, and drops records by their marks of a queue."""
    source, copy = delay_folder(tmp_path / "source"), tmp_path / "copy"
    victim = effect_of(RULES, QUEUE, 0, Envelope("orders", LATER_MS, "A9", 5, 9, "", b"x").pack(), NOW_MS).record
    assert victim is not None
    with contextlib.closing(Store(source, sync="never")) as store:
        before = [work.record for work in store.take(NOW_MS + 10**9, 100)]
        lies = (DELAYED_KIND, b"mine", victim.marks), ("unknown", b"", ((IDENTITY, b"abc"),))
        store.add([(Record(kind, data, 1, marks=marks), 1) for kind, data, marks in lies])
    assert copy_spool(source, copy, limits(), rules=COPY_RULES).left_out_count_by_reason == {}
    with contextlib.closing(Store(copy, sync="never")) as store:
        found = {work.record.payload: work.record.marks for work in store.take(NOW_MS + 10**9, 100)}
    own = effect_of(RULES, QUEUE, 0, b"mine", NOW_MS).record
    assert own is not None
    assert found == {record.payload: record.marks[:1] for record in (*before, own)} | {b"": ()}


def test_an_envelope_with_the_digest_of_another_id_is_left_out(tmp_path: Path) -> None:
    """A node would take that message for a copy of this one, and never send it."""
    source = delay_folder(tmp_path / "source")
    stored = encode_properties({"UNIQ_KEY": "harmless"})
    data = Envelope("orders", LATER_MS, "VICTIM", 5, 0, stored, b"harmless").pack()
    with contextlib.closing(Store(source, sync="never")) as store:
        store.add([(Record(DELAYED_KIND, data, 1, "topic orders"), LATER_MS)])
    done = command(source, tmp_path / "copy")
    assert done.exit_code == 1
    assert f"1 entries were left out: {OTHER_ID_REASON}" in " ".join(done.stderr.split())
    assert "3 wait" in done.stdout


def test_delayed_messages_are_shown_as_they_are_sent(tmp_path: Path) -> None:
    folder = delay_folder(tmp_path / "folder")
    bad, good, dead = (json.loads(line) for line in spool("export", folder).stdout.splitlines())
    assert (good["topic"], good["queue"], good["msgIds"]) == ("orders", "orders/broker-a/3", ["A1"])
    assert (good["delayedUntil"], good["bornTimestamp"], good["flag"]) == (utc_text(LATER_MS), 5, 9)
    assert base64.b64decode(good["body"]) == b"delayed body"
    assert good["properties"] == {"UNIQ_KEY": "A1", "TAGS": "a\x1b[31m"}
    assert "is no envelope" in bad["error"] or "are no envelope" in bad["error"]
    assert base64.b64decode(bad["payload"]) == b"RDMQ\x1b"
    assert (dead["kind"], dead["topic"], base64.b64decode(dead["body"])) == ("dead letter", "orders", b"given up")
    assert dead["givenUp"] == "no topic ? orders"
    shown = spool("show", folder, "--records")
    assert "givenUp no topic ? orders" in shown.stdout
    assert f"topic orders  queue orders/broker-a/3  delayedUntil {utc_text(LATER_MS)}  A1" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_notes_that_lead_records_are_shown(tmp_path: Path) -> None:
    note, value = LASTING_PREFIX + b"queues of t\x1b", b'[["broker-b", 1]]'
    with contextlib.closing(Store(tmp_path / "source", sync="never")) as store:
        store.add([(record(b"x"), 1)], {note: value})
    assert command(tmp_path / "source", tmp_path / "copy").exit_code == 0
    text = spool("show", tmp_path / "copy").stderr
    assert 'queues of t\\x1b: [["broker-b", 1]]' in text
    (row,) = (json.loads(line) for line in spool("show", tmp_path / "copy", "--json").stdout.splitlines())
    assert row["notes"] == {note.decode(): value.decode()}


@pytest.mark.parametrize(
    ("of", "opened_for", "remedy"),
    [
        (purpose_of("a"), "", "delay serve --data '.*/a b'"),
        (purpose_of("a"), purpose_of("b"), "A node of that --group .* delay serve --data"),
        ("", purpose_of("a"), "folder of its own.*spool send"),
        (UNKNOWN_OWNER.purpose, "", "spool assign"),
    ],
)
def test_a_folder_for_another_purpose_names_its_command(tmp_path: Path, of: str, opened_for: str, remedy: str) -> None:
    with contextlib.closing(Store(tmp_path / "a b", sync="never")) as store:
        store.set_owner(SpoolOwner(("127.0.0.1:1",), "", purpose=of) if of != UNKNOWN_OWNER.purpose else UNKNOWN_OWNER)
        store.add([(record(b"x"), 1)])
        with pytest.raises(SpoolError, match=f"holds records of.*{remedy}"):
            store.set_owner(SpoolOwner(("127.0.0.1:1",), "", purpose=opened_for))
