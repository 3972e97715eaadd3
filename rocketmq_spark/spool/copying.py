"""Copies a spool, perhaps of another user, into a new folder of this user.

The files of a RocksDB database can be crafted so that an iterator and a look-up find different values. Therefore this process
does not open the files of another user. A second process, ``owner_reader``, runs as the owner, opens the files, and sends the
entries over a pipe. This process does not trust the second process either: it checks each entry, writes it once into a new
database, and derives all other data from the records. As a result, ``spool show`` and ``spool send`` see the same records in the
copy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline, epoch_ms
from rocketmq_spark.base.process import PythonCall, python_call
from rocketmq_spark.errors import DecodeError, SpoolError
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.files import FreeSpace, check_temporary_folder, sync_folder
from rocketmq_spark.spool.owner_reader import DERIVED_AREAS, END_MARK, FRAME_HEADER
from rocketmq_spark.spool.pending import migrate_keys
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING_PREFIX,
    MAX_MARKS,
    NOTE,
    NUMBER_LIMIT,
    OWNER,
    PENDING,
    RECORD,
    TARGET_RULES_NOTE,
    TOTALS,
    UNINDEXED,
    UNKNOWN_OWNER,
    Due,
    PendingKey,
    Record,
    RecordState,
    SpoolOwner,
    Totals,
    decode_record,
    due_of_key,
    record_key,
    sequence_of,
)
from rocketmq_spark.spool.recovery import SalvageResult, derive, stored_totals
from rocketmq_spark.spool.spool import SEND_KIND, send_of

logger = logging.getLogger(__name__)

# The maximum size of a copied key, of a copied record, and of the value of any other copied entry.
MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_OTHER_VALUE_BYTES = 1 << 16, 64 << 20, 1 << 20
# This number is added to the bytes of each entry, for the memory that ``derive`` and RocksDB need.
ENTRY_OVERHEAD_BYTES = 512
# Measured values: ``derive``, and the write of its result, keep several copies of lanes, targets and marks in memory.
_TEXT_COPIES, _MARK_OVERHEAD_BYTES = 4, 250
_MAX_REPORT_BYTES = 1 << 16
_PENDING_AREAS = (PENDING, UNINDEXED)
_PORTION_ENTRIES, _PORTION_BYTES = 1000, 8 << 20
_READ_BYTES = 1 << 18
_LONGEST_POLL_S = 3600.0  # the operating system accepts at most 24 days
_PASSED_VARIABLES = {"PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "TMPDIR"}
_KILL_TIMEOUT_S = 5.0  # how long to wait for the end of a killed reader, which may hang in a file system
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from rocketmq_spark.spool.owner_reader import main; main(sys.argv[1])"
)


# For each kind of records with marks: a function that returns the record to write. The function derives the marks from what
# ``show`` and ``export`` print of the record. It raises ``DecodeError`` with the reason if the record must not be copied.
CopyRules = Mapping[str, Callable[[Record], Record]]
NO_COPY_RULES: CopyRules = MappingProxyType({})


class CopyLimits:
    """The deadline of a copy, and the maximum number of bytes that are read for it, including entries that are not copied."""

    def __init__(self, deadline: Deadline, max_bytes: int) -> None:
        self.deadline = deadline
        self._max_bytes = self._bytes_left = max_bytes

    def check_deadline(self) -> None:
        """Raise ``SpoolError`` after the deadline."""
        if self.deadline.expired:
            raise SpoolError(
                "reading took too long",
                remedy="Raise --timeout, or copy each spool alone. The owner of a spool can stop the process that reads it",
            )

    def add_bytes(self, count: int) -> None:
        """Count ``count`` bytes. Raises ``SpoolError`` if the total exceeds the limit."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise SpoolError(
                f"it has more than {self._max_bytes} bytes, where each entry counts {ENTRY_OVERHEAD_BYTES} bytes extra, and "
                "lanes, targets and marks count several times, because copying keeps several copies of them in memory",
                remedy="Raise --max-bytes if you expect that many bytes",
            )


class CopyResult(NamedTuple):
    """The numbers of waiting and of dead records in a copy, the number of entries that were not copied, by reason, whether the
    source is damaged, and warnings.

    ``left_out_note_count`` counts the notes of a delay node that were not copied. The notes say which messages the node has
    read, so a node with these notes would skip messages that are not in the copy. Without notes, a node reads its queues again.
    """

    waiting_count: int
    dead_count: int
    left_out_count_by_reason: Mapping[str, int]
    is_damaged: bool
    warnings: list[str]
    left_out_note_count: int = 0


@contextlib.contextmanager
def new_folder(copy: Path, source: Path) -> Iterator[Path]:
    """Yield an empty private folder. At the end of the block, a folder with files is renamed to ``copy``, and an empty folder is
    removed.

    Raises ``SpoolError`` if ``copy`` exists, is in ``source``, or could be replaced by other users.
    """
    if os.path.lexists(copy):
        raise SpoolError(f"{copy} exists already", remedy="Name a folder that does not exist yet")
    parent = copy.absolute().parent
    if Path(os.path.realpath(parent)).is_relative_to(os.path.realpath(source)):
        raise SpoolError(f"{copy} is in {source}", remedy="Name a folder of yours elsewhere")
    _check_exposure(parent, copy)
    try:
        new_path = Path(tempfile.mkdtemp(prefix=".rocketmq-spark-copy-", dir=parent))
    except OSError as e:
        raise SpoolError(
            f"the folder {copy} cannot be created: {e.strerror}",
            remedy=f"Name a folder in a folder that exists, not in {parent}",
        ) from e
    try:
        _check_exposure(new_path, copy)
        yield new_path
        if new_path.is_dir() and os.listdir(new_path):
            _rename_new(new_path, copy.absolute())
    finally:
        shutil.rmtree(new_path, ignore_errors=True)


def _check_exposure(folder: Path, copy: Path) -> None:
    if (exposure := next(folders.exposures(folder), None)) is not None:
        raise SpoolError(
            f"{copy} would lie in {exposure}", remedy="Name a folder in one that only you and root may change"
        )


def _rename_new(new_path: Path, copy: Path) -> None:
    try:
        new_path.rename(copy)
    except OSError as e:  # another process has created ``copy`` meanwhile
        raise SpoolError(
            f"the folder {copy} cannot be created: {e.strerror}", remedy="Name a folder that does not exist yet"
        ) from e
    sync_folder(copy.parent)


def copy_spool(
    path: Path,
    destination: Path,
    limits: CopyLimits,
    reader: PythonCall | None = None,
    rules: CopyRules = NO_COPY_RULES,
) -> CopyResult:
    """Copy the spool in ``path`` into a new database in the folder ``destination``. Removes ``destination`` if copying fails.

    ``reader`` starts the process that reads, and ``rules`` has a function for each kind of records with marks. Raises
    ``SpoolError`` if the reader fails or exceeds the ``limits``.
    """
    path = path.absolute()
    try:
        limits.check_deadline()  # earlier copies may have used up the time
        with (
            contextlib.closing(Database(destination)) as db,
            _running_reader(path, reader or _reader_call(path), limits) as pipe,
        ):
            return _copy_entries(path, db, pipe, rules)
    except SpoolError as e:
        shutil.rmtree(destination, ignore_errors=True)
        raise SpoolError(f"the spool in {path} was not copied: {e.message}", remark=e.remark, remedy=e.remedy) from e
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise


def _copy_entries(path: Path, db: Database, pipe: _Pipe, rules: CopyRules) -> CopyResult:
    checker, free_space = EntryChecker(rules), FreeSpace(db.path, None)
    portion: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in pipe.frames():
        if (entry := checker.entry_to_copy(key, value)) is None:
            continue
        pipe.limits.add_bytes(checker.derived_bytes)
        portion.append(entry)
        size += len(key) + len(value or b"")
        if len(portion) >= _PORTION_ENTRIES or size >= _PORTION_BYTES:
            _write_portion(db, portion, free_space)
            portion, size = [], 0
    _write_portion(db, portion, free_space)
    report, source_totals = (
        pipe.report,
        Totals(depth=checker.record_count, give_ups=checker.dead_count, last_recorded_ms=epoch_ms()),
    )
    owner = checker.owner or (UNKNOWN_OWNER if report.is_damaged else SpoolOwner())
    db.write([(TOTALS, source_totals.encode()), *((key, owner.encode()) for key in OWNER)])
    migrate_keys(db, is_damaged=True)
    derive_result = derive(db, SalvageResult(path, totals_are_exact=False) if report.is_damaged else None)
    checker.count_states_without_record(derive_result.lost_sequences)
    totals = stored_totals(db) or Totals()
    return CopyResult(
        totals.depth,
        totals.dead,
        dict(checker.left_out_count_by_reason),
        report.is_damaged,
        report.warnings,
        checker.left_out_note_count,
    )


def _write_portion(db: Database, portion: list[tuple[bytes, bytes]], free_space: FreeSpace) -> None:
    if (problem := free_space.check(0, sum(len(key) + len(value) for key, value in portion))) is not None:
        raise problem
    db.write(portion)


# The reasons for which entries are not copied, as ``left_out_count_by_reason`` has them.
UNKNOWN_KIND = "of a kind that this release does not know"
OUT_OF_ORDER = "twice, or out of order"
TOO_LONG = "too long"
UNREADABLE_RECORD = "records that cannot be read"
TOO_MANY_MARKS = "records with more marks than this package writes"
UNREADABLE_STATE = "states of records that cannot be read"
SECOND_STATE = "second states of a record"
UNREADABLE_OWNER = "owners that cannot be read"
STATE_WITHOUT_RECORD = "states of records that are not there"


class EntryChecker:
    """Decides which entries of a spool are copied, and counts the others by reason. Pure.

    Keys must ascend, so that each key is written once. Each value must be exactly what this package writes. The keys of pending
    records are copied without their targets; ``migrate_keys`` adds the targets of the records.

    Marks are not copied, because users cannot check them: ``show`` and ``export`` do not print marks. With a wrong mark, the
    store would drop a record, or take the record for another message. Records of a kind in ``rules`` get the marks that follow
    from their payloads; other records get no marks.
    """

    def __init__(self, rules: CopyRules = NO_COPY_RULES) -> None:
        self._rules = rules
        self._record_data = b""  # the last record, encoded for the copy
        self.left_out_count_by_reason: Counter[str] = Counter()
        self.record_count = self.dead_count = (
            0  # the numbers of records in the source, and of dead records that are copied
        )
        self.left_out_note_count = 0  # the number of notes that are not copied
        self.owner: SpoolOwner | None = None
        # The memory that ``derive`` needs for the last record in addition to the record's entry.
        self.derived_bytes = 0
        self._unreadable_sequences: set[int] = set()
        # The sequences of records that have a pending state. A record may have only one pending state.
        self._sequences_with_state: set[int] = set()
        self._last_key = b""

    def entry_to_copy(self, key: bytes, value: bytes | None) -> tuple[bytes, bytes] | None:
        """Return the entry to write for an entry of the source; None if the entry is not copied. ``value`` is None for a value
        that is too long. If the entry contains the owner of the records, this method sets ``owner``.
        """
        area = key[:1]
        self.derived_bytes = 0
        if area in DERIVED_AREAS:
            return None
        reason = self._problem(area, key, value)
        self._last_key = max(self._last_key, key)
        if area == RECORD:
            self.record_count += 1
        if reason is not None:
            self.left_out_count_by_reason[reason] += 1
            if area == RECORD and len(key) == len(record_key(RECORD, 0)):
                self._unreadable_sequences.add(sequence_of(key))
            return None
        if area == NOTE and not key.startswith(NOTE + LASTING_PREFIX):
            # An empty note counts as deleted.
            self.left_out_note_count += bool(value) and key != NOTE + TARGET_RULES_NOTE
            return None
        if area == RECORD:
            return key, self._record_data
        self.dead_count += area == DEAD
        if value is None or area in OWNER:
            return None
        return (
            (due_of_key(key).mark_value, RecordState.decode(value).encode()) if area in _PENDING_AREAS else (key, value)
        )

    def count_states_without_record(self, sequences: Iterable[int]) -> None:
        """Count the states that are not copied because their records are missing."""
        if count := len({*sequences} - self._unreadable_sequences):
            self.left_out_count_by_reason[STATE_WITHOUT_RECORD] += count

    def _problem(self, area: bytes, key: bytes, value: bytes | None) -> str | None:
        if key <= self._last_key:
            return OUT_OF_ORDER
        if value is None or (area != RECORD and len(value) > MAX_OTHER_VALUE_BYTES):
            return TOO_LONG
        if area == RECORD:
            return self._record_problem(value) if _is_record_key(key) else UNREADABLE_RECORD
        if area == DEAD:
            return None if _is_record_key(key) and _is_state(value) else UNREADABLE_STATE
        if area in _PENDING_AREAS:
            return (
                self._pending_problem(due_of_key(key).sequence)
                if _is_pending_key(key) and _is_state(value)
                else UNREADABLE_STATE
            )
        if key in OWNER:
            return self._owner_problem(value)
        return None if area == NOTE else UNKNOWN_KIND

    def _pending_problem(self, sequence: int) -> str | None:
        if sequence in self._sequences_with_state:
            return SECOND_STATE
        self._sequences_with_state.add(sequence)
        return None

    def _record_problem(self, value: bytes) -> str | None:
        record = decode_record(value)
        if not isinstance(record, Record) or record.encode() != value:
            return UNREADABLE_RECORD
        if len(record.marks) > MAX_MARKS:
            return TOO_MANY_MARKS
        try:
            record = self._rules.get(record.kind, _without_marks)(record)
        except DecodeError as e:
            return e.message
        if max(record.stored_ms, record.original_due_ms or 0) >= NUMBER_LIMIT or not _is_usable_record(record):
            return UNREADABLE_RECORD
        # In memory, Python uses up to four bytes for a character.
        target_size = len(record.target) if record.target.isascii() else 4 * len(record.target)
        text_size = target_size + len(record.lane) + sum(map(len, itertools.chain(*record.marks)))
        self.derived_bytes = _TEXT_COPIES * text_size + _MARK_OVERHEAD_BYTES * len(record.marks)
        self._record_data = record.encode()
        return None

    def _owner_problem(self, value: bytes) -> str | None:
        try:
            owner = SpoolOwner.decode(value)
            texts = (*owner.servers, owner.environment, owner.purpose, owner.namespace or "")
            is_readable = all(isinstance(text, str) for text in texts)
        except (DecodeError, TypeError):
            is_readable = False
        if not is_readable:
            self.owner = self.owner or UNKNOWN_OWNER  # no process sends the records of this owner
            return UNREADABLE_OWNER
        if self.owner in (None, UNKNOWN_OWNER):
            self.owner = owner
        return None


def _is_record_key(key: bytes) -> bool:
    return len(key) == len(record_key(RECORD, 0)) and sequence_of(key) < NUMBER_LIMIT


def _is_pending_key(key: bytes) -> bool:
    if key[:1] == UNINDEXED:
        is_well_formed = len(key) == len(Due(0, 0).mark_value)
    else:
        is_well_formed = (
            len(key) >= len(PendingKey("", False, Due(0, 0)).encoded) and key == PendingKey.parse(key).encoded
        )
    return is_well_formed and max(due_of_key(key)) < NUMBER_LIMIT


def _without_marks(record: Record) -> Record:
    return replace(record, marks=()) if record.marks else record


def _is_usable_record(record: Record) -> bool:
    """Whether a record can be shown and sent. Returns False for a send that cannot be decoded."""
    if record.kind == SEND_KIND:
        try:
            send_of(record)
        except DecodeError:
            return False
    return True


def _is_state(value: bytes) -> bool:
    try:
        state = RecordState.decode(value)
    except DecodeError:
        return False
    target = RecordState.legacy_target(value).encode()  # written by releases before 0.2
    return len(state.encode()) + len(target) == len(value) and state.state_since_ms < NUMBER_LIMIT


class _ReaderReport(NamedTuple):
    """What the reader reported at its end."""

    is_damaged: bool
    warnings: list[str]


class _Pipe:
    """The frames from a reader, which may send wrong data, too much data, or nothing."""

    def __init__(self, descriptor: int, limits: CopyLimits) -> None:
        self.report = _ReaderReport(False, [])
        self._descriptor = descriptor
        self.limits = limits
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def frames(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield keys and values. If an entry is too long, yield the beginning of its key, and None as the value. Sets ``report``
        after the last entry.
        """
        while True:
            key_size, value_size = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size))
            if key_size == END_MARK:
                self.report = self._parse_report(value_size)
                return
            self.limits.add_bytes(ENTRY_OVERHEAD_BYTES + key_size + value_size)
            key = self._read(min(key_size, MAX_KEY_BYTES))
            if key_size <= MAX_KEY_BYTES and value_size <= MAX_VALUE_BYTES:
                yield key, self._read(value_size)
            else:
                self._skip_bytes(key_size - len(key) + value_size)
                yield key, None

    def _parse_report(self, count: int) -> _ReaderReport:
        if count > _MAX_REPORT_BYTES:
            raise SpoolError(f"the process that reads it ended with a report of {count} bytes")
        data = self._read(count)
        try:
            values = json.loads(data)
            error, remedy, warnings = values.get("error"), values.get("remedy"), values["warnings"]
            if error is None:
                return _ReaderReport(bool(values["damaged"]), [str(text) for text in warnings])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise SpoolError("the process that reads it ended with an unreadable report") from e
        # The reader's text becomes the error's remark, not its message, because the owner of the files may have chosen the words.
        raise SpoolError("its reader reports", remark=f"{error}. {remedy}" if remedy else str(error))

    def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._fill_buffer()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _skip_bytes(self, count: int) -> None:
        while count:
            if not self._buffer:
                self._fill_buffer()
            skipped = min(count, len(self._buffer))
            del self._buffer[:skipped]
            count -= skipped

    def _fill_buffer(self) -> None:
        self.limits.check_deadline()
        while not self._poll.poll(1000 * min(self.limits.deadline.remaining(), _LONGEST_POLL_S)):
            self.limits.check_deadline()
        if not (new_bytes := os.read(self._descriptor, _READ_BYTES)):
            raise SpoolError("the process that reads it ended without a report", remedy="Run the command again")
        self._buffer += new_bytes


def _reader_call(path: Path) -> PythonCall:
    call = python_call("-c", _PROGRAM, str(path), *filter(os.path.isabs, sys.path))
    # The reader gets no secrets in its environment, because the owner of the files may control the reader.
    env = {
        name: value
        for name, value in call["env"].items()
        if name in _PASSED_VARIABLES or name.startswith(("LC_", "PYTHON"))
    }
    return {**call, "env": env}


@contextlib.contextmanager
def _running_reader(path: Path, reader: PythonCall, limits: CopyLimits) -> Iterator[_Pipe]:
    """Start a reader, and kill it at the end of the block. The reader has no terminal. Otherwise the owner of the spool, who
    may control the reader, could enter commands into the terminal of the user who copies the spool.
    """
    devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
    with _temporary_folder(path, limits.deadline) as temporary_path:
        reader_call: PythonCall = {**reader, "env": {**reader["env"], "TMPDIR": str(temporary_path)}}
        process = subprocess.Popen(**reader_call, stdin=devnull, stdout=pipe, stderr=devnull, start_new_session=True)
        with _killed_at_end(process) as descriptor:
            yield _Pipe(descriptor, limits)


@contextlib.contextmanager
def _temporary_folder(path: Path, deadline: Deadline) -> Iterator[Path]:
    """Yield a folder for a reader's temporary files, and remove the folder at the end of the block. The files contain messages,
    and a killed reader does not delete them.
    """
    check_temporary_folder()
    owner = os.geteuid()
    with contextlib.suppress(OSError):  # if the spool no longer exists, the reader reports it
        owner = folders.owner_uid(path.stat())
    temporary_folder = folders.make_temporary_folder(owner, "rocketmq-spark-reader-")
    try:
        yield temporary_folder.path
    finally:
        _remove_temporary_folder(temporary_folder, deadline)


def _remove_temporary_folder(temporary_folder: folders.TemporaryFolder, deadline: Deadline) -> None:
    """Remove a temporary folder. If another user owns the folder, a process with that user's rights removes it, because that user
    may have put any files into the folder, or another folder in its place. The process is killed at the deadline.
    """
    if temporary_folder.uid == os.geteuid():
        shutil.rmtree(temporary_folder.path, ignore_errors=True)
        return
    gid, groups = folders.groups_of(temporary_folder.uid)
    devnull = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            ["rm", "-rf", "--", str(temporary_folder.path)], stdin=devnull, stdout=devnull, stderr=devnull,
            env={"PATH": os.defpath}, cwd="/", start_new_session=True, user=temporary_folder.uid, group=gid, extra_groups=groups,
        )  # fmt: skip
        try:
            process.wait(max(_KILL_TIMEOUT_S, deadline.remaining()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_TIMEOUT_S)
    try:
        temporary_folder.path.rmdir()  # ``rm`` could only empty the folder: its owner may not change the parent folder
    except FileNotFoundError:
        return
    except OSError:
        logger.warning(
            "%s was not removed: let %s remove it, not root",
            temporary_folder.path,
            folders.user_text(temporary_folder.uid),
        )


@contextlib.contextmanager
def _killed_at_end(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """Yield the descriptor of the process's output. Kill the process at the end of the block."""
    assert process.stdout is not None
    try:
        yield process.stdout.fileno()
    finally:
        with contextlib.suppress(OSError):  # the process has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_TIMEOUT_S)
