"""Repair of a damaged store: keeps what can be read, and reports the rest. The module also has queries over all records, for
tools.

First the database is repaired: all readable entries are copied to a new database in the same folder. The damaged files are kept
next to the new database. Normally, only the entries in a bad block are lost. If RocksDB cannot read a whole table, or cannot open
the database, the missing entries are taken from a copy that RocksDB has rebuilt. A rebuilt copy may contain records that were
already settled. The process may be killed at any point: the next process that opens the folder completes the exchange of the
files.

Then the records are repaired: due times, order and totals are derived from the records again. Meanwhile no other process uses the
``Database``.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shlex
import shutil
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.base.folders import PRIVATE_MODE, copy_regular, open_lock
from rocketmq_spark.errors import DecodeError, SpoolError, SpoolFull
from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import COMPLETE_FOLDER, REPAIR_REMEDY, Damaged, Database, rebuild_database
from rocketmq_spark.spool.files import DISK_FULL_ERRNOS, mirror, not_readable_error, sync_folder
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING_PREFIX,
    MARK,
    NOTE,
    NUMBER_LIMIT,
    ORDER,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    UNINDEXED,
    UNKNOWN_OWNER,
    VERSION,
    Due,
    PendingKey,
    Record,
    RecordState,
    SpoolOwner,
    Totals,
    area_end,
    decode_record,
    lane_key,
    lane_of,
    pending_key,
    record_key,
    sequence_of,
)

logger = logging.getLogger(__name__)

# The names of folders in the folder of the database. The new database is in ``_NEW_FOLDER`` until it is complete, and then in
# ``COMPLETE_FOLDER``. The old files are moved to ``_OLD_FOLDER``. When ``_OLD_FOLDER`` has all old files, it is renamed to
# ``damaged-N``.
_NEW_FOLDER, _OLD_FOLDER, _COPY_FOLDER, DAMAGED_FOLDER = "salvaged", "leaving", "copy", "damaged"
_PORTION_ENTRIES, _PORTION_BYTES = 1000, 8 << 20
ALL_KEYS = (b"\0", b"\xff")


class SalvageResult(NamedTuple):
    """The folder with the damaged files, and whether the previous totals are exact. ``rebuilt_areas`` are the areas with entries
    from a rebuilt copy; the records of these entries may have been settled already.
    """

    folder: Path
    totals_are_exact: bool
    rebuilt_areas: frozenset[bytes] = frozenset()


def salvage(path: Path) -> SalvageResult:
    """Make a new database of all readable entries. The old database must not be open. Raises ``SpoolError`` if a process uses the
    old database.
    """
    with locked(path):
        new_database = Database(path / _NEW_FOLDER)
        try:
            gaps, totals_are_exact = _copy_readable(path, new_database)
            rebuilt_areas = _copy_rebuilt(path, new_database, gaps) if gaps else frozenset()
        finally:
            new_database.close()
        (path / _NEW_FOLDER / "LOCK").unlink(missing_ok=True)
        (path / _OLD_FOLDER).mkdir(PRIVATE_MODE)
        (path / _NEW_FOLDER).rename(path / COMPLETE_FOLDER)
        sync_folder(path)
        return SalvageResult(_swap_files(path), totals_are_exact, rebuilt_areas)


def complete_folder_in(path: Path, names: Container[str]) -> Path | None:
    """Return the folder that has all files of the database. ``names`` are the names of the files and folders in ``path``.
    Return None while the new files are moved to ``path``, because neither folder has all files then.
    """
    if COMPLETE_FOLDER not in names:
        return path
    return path / COMPLETE_FOLDER if _OLD_FOLDER in names else None


def complete_folder_of(path: Path) -> Path:
    """Return the folder that has all files of the database. Changes nothing. Raises ``Damaged`` if no folder has all files."""
    try:
        names = os.listdir(path)
    except OSError:  # opening the database raises this error
        return path
    if (database_folder := complete_folder_in(path, names)) is None:
        raise Damaged(
            f"the spool in {path} is damaged: an earlier repair of it has not ended, and its files are in two folders",
            remedy=REPAIR_REMEDY,
        )
    return database_folder


def finish_repair(path: Path) -> None:
    """If an earlier process died during a repair, complete this repair. If the old files are still complete, only remove the
    files of the repair.
    """
    try:
        is_unfinished = any(
            (path / name).exists() for name in (_NEW_FOLDER, COMPLETE_FOLDER, _OLD_FOLDER, _COPY_FOLDER)
        )
    except PermissionError as e:
        raise not_readable_error(path) from e
    except OSError as e:  # the disk fails, or the mount is lost
        raise SpoolError(f"the spool in {path} cannot be read: {e}", remedy="Check its disk") from e
    if is_unfinished:
        with locked(path):
            pass


def _copy_readable(path: Path, new_database: Database) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Copy the readable entries. Returns the ranges of keys that could not be read, and whether the totals are exact: they were
    read, and no log had lost writes.
    """
    try:
        old_database = Database(path, read_only=True)
    except SpoolError:
        return [ALL_KEYS], False
    try:
        has_totals = False
        for key in _copy_entries(old_database, new_database, *ALL_KEYS):
            has_totals = has_totals or key == TOTALS
        return old_database.gaps, has_totals and old_database.damage is None
    finally:
        old_database.close()


def _copy_rebuilt(path: Path, new_database: Database, gaps: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Returns the areas of the entries that were taken from the rebuilt copy."""
    areas: set[bytes] = set()
    copy_path = path / _COPY_FOLDER
    copy_path.mkdir(PRIVATE_MODE)
    mirror(path, copy_path, copy_regular)
    rebuild_database(copy_path)
    with contextlib.suppress(Damaged):  # the rebuilt copy may be damaged, too
        rebuilt_database = Database(copy_path, read_only=True)
        try:
            for start, end in gaps:
                areas.update(key[:1] for key in _copy_entries(rebuilt_database, new_database, start, end))
        finally:
            rebuilt_database.close()
    shutil.rmtree(copy_path)
    return frozenset(areas)


def _copy_entries(old_database: Database, new_database: Database, start: bytes, end: bytes) -> Iterator[bytes]:
    """Copies entries in portions, and yields their keys. Entries that the new database already has are not changed."""
    portion: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in old_database.scan(start, end):
        if new_database.get(key) is None:
            portion.append((key, value))
            size += len(value)
            yield key
        if len(portion) >= _PORTION_ENTRIES or size >= _PORTION_BYTES:
            new_database.write(portion)
            portion, size = [], 0
    new_database.write(portion, sync=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds RocksDB's own lock, and removes files of earlier repairs. Raises ``SpoolError`` if a process has the spool open."""
    try:
        lock = open_lock(path / "LOCK", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise SpoolError(f"the spool in {path} is in use by another process") from e
            if complete_folder_in(path, os.listdir(path)) != path:
                _swap_files(path)
            for name in (_NEW_FOLDER, _OLD_FOLDER, _COPY_FOLDER):
                shutil.rmtree(path / name, ignore_errors=True)
            yield
        finally:
            os.close(lock)
    except OSError as e:  # if the old files are no longer complete, the next opening completes the swap
        error_class = SpoolFull if e.errno in DISK_FULL_ERRNOS else SpoolError
        raise error_class(f"the damaged spool in {path} could not be put together again: {e}") from e


def _swap_files(path: Path) -> Path:
    """Replace the old files with the new files. Returns the folder with the old files."""
    damaged_folder = next(
        folder for number in itertools.count(1) if not (folder := path / f"{DAMAGED_FOLDER}-{number}").exists()
    )
    if (path / _OLD_FOLDER).exists():
        for file in _files(path):
            file.rename(path / _OLD_FOLDER / file.name)
        (path / _OLD_FOLDER).rename(damaged_folder)
        sync_folder(path)
    # CURRENT comes last, because it makes the folder a database.
    for file in sorted(_files(path / COMPLETE_FOLDER), key=lambda file: file.name == "CURRENT"):
        file.rename(path / file.name)
    (path / COMPLETE_FOLDER).rmdir()
    sync_folder(path)
    return damaged_folder


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and file.name != "LOCK"]


_MAX_LOGGED_SEQUENCES = 20


def find_contradiction(db: Database) -> str | None:
    """Return a clause about readable entries that contradict each other; None if there is no contradiction.

    If there are dead letters, this function reads all pending records and all records in lanes. Otherwise it reads only the last
    record.
    """
    totals, last_key = stored_totals(db), db.last_key(RECORD, area_end(RECORD))
    if (
        totals is not None
        and last_key is not None
        and (totals.next_sequence <= sequence_of(last_key) or not totals.all_bytes)
    ):
        return "its totals do not count all records"
    dead_sequences = {sequence_of(key) for key, _ in db.scan(DEAD, area_end(DEAD))}
    waiting_sequences = (
        sequence_of(key) for area in (PENDING, UNINDEXED, ORDER) for key, _ in db.scan(area, area_end(area))
    )
    return (
        "a record is both dead and waiting"
        if dead_sequences and any(sequence in dead_sequences for sequence in waiting_sequences)
        else None
    )


class DeriveResult(NamedTuple):
    """The number of present records, the number of missing records, the sequences without a record, and whether these numbers are
    exact.
    """

    present_count: int
    missing_count: int
    lost_sequences: Sequence[int]
    is_exact: bool


def repair(db: Database, salvage_result: SalvageResult | None = None) -> None:
    """Repair the records of a store that lost data, and log the result; ``salvage_result`` is the result of the database's
    repair.
    """
    _log_repair(db, derive(db, salvage_result), None if salvage_result is None else salvage_result.folder)


def derive(db: Database, salvage_result: SalvageResult | None = None) -> DeriveResult:
    """Derive due times, order, marks and totals from the records.

    A record without a due time becomes due at its original due time, or now. If a pending record and its stored key have
    different targets, the record keeps its due time and its count of failures. The due times and lane entries of missing
    records and of dead records are deleted. A record that does not match its checksum becomes a dead letter when it is taken.
    If records are lost, notes without ``LASTING_PREFIX`` are deleted, because they may be about lost records.
    """
    old_totals = _totals_or_empty(db)
    dead_sequences = {sequence_of(key) for key, _ in db.scan(DEAD, area_end(DEAD))}
    pending_key_by_sequence, obsolete_keys = _unique_pending_keys(db, dead_sequences)
    lane_by_sequence = {sequence_of(key): lane_of(key) for key, _ in db.scan(ORDER, area_end(ORDER))}
    state_by_sequence = {
        sequence_of(key): value for key, value in db.scan(ORDER, area_end(ORDER)) if value
    }  # states of records that were moved from another store
    change = AtomicChange(
        Totals(
            give_ups=old_totals.give_ups,
            last_recorded_ms=old_totals.last_recorded_ms,
            next_sequence=old_totals.next_sequence,
        )
    )
    totals, present_sequences, started_lanes = change.totals, set(), set()
    for key, data in db.scan(RECORD, area_end(RECORD)):
        sequence, record = sequence_of(key), decode_record(data)
        if sequence >= NUMBER_LIMIT:
            raise SpoolError(
                f"record {sequence} of the spool in {db.path} has a number that no store reaches, so its file was changed",
                remedy=f"Copy the rest: rocketmq-spark spool copy {shlex.quote(str(db.path))} COPY",
            )
        present_sequences.add(sequence)
        lane = record.lane if isinstance(record, Record) else lane_by_sequence.get(sequence, b"")
        totals.next_sequence = max(totals.next_sequence, sequence + 1)
        if sequence in dead_sequences:
            totals.dead += 1
            totals.dead_bytes += len(data)
            continue
        totals.depth += 1
        totals.size += len(data)
        due_ms = record.original_due_ms if isinstance(record, Record) else None
        due = Due(totals.last_recorded_ms if due_ms is None else due_ms, sequence)
        value, current_key = state_by_sequence.get(sequence, b""), pending_key_by_sequence.get(sequence)
        if current_key is not None and isinstance(record, Record) and current_key.target != record.target:
            # The record got another target: either the key or the record is from the time before this change.
            change.remove_pending(pending_key_by_sequence.pop(sequence))
            value = db.get(current_key.encoded) or b""
            current_key = record.retargeted_key(
                current_key, current_key.due, has_failed=RecordState.decode_or_empty(value).tries > 0
            )
        state = RecordState.decode_or_empty(value)
        current_key = current_key or pending_key(record, due, has_failed=state.tries > 0)
        change.mark_encoded(data, current_key.due)
        if lane and sequence not in lane_by_sequence:
            change.puts.append((lane_key(lane, sequence), b""))
        if sequence not in pending_key_by_sequence and (not lane or lane not in started_lanes):
            change.add_pending(current_key, state._replace(state_since_ms=totals.last_recorded_ms).encode())
        elif sequence in pending_key_by_sequence and lane in started_lanes:
            change.remove_pending(current_key)  # an earlier record of the lane was recovered
        if lane:
            started_lanes.add(lane)
    lost_sequences = sorted(({*pending_key_by_sequence, *dead_sequences, *lane_by_sequence}) - present_sequences)
    for sequence in lost_sequences:
        change.deletes += [pending_key_by_sequence[sequence].encoded] if sequence in pending_key_by_sequence else []
        change.deletes += [record_key(DEAD, sequence)] if sequence in dead_sequences else []
        change.deletes += [lane_key(lane_by_sequence[sequence], sequence)] if sequence in lane_by_sequence else []
    change.deletes += [key for key, _ in db.scan(ORDER, area_end(ORDER)) if sequence_of(key) in dead_sequences]
    live_sequences = present_sequences - dead_sequences
    stale_keys = [
        key for key, value in db.scan(MARK, area_end(MARK)) if Due.parse(value).sequence not in live_sequences
    ]
    # A rebuilt copy may contain settled records. In this case, neither keys without a record nor earlier totals show how many
    # records are lost.
    rebuilt_areas = frozenset() if salvage_result is None else salvage_result.rebuilt_areas
    lost_sequences = [] if rebuilt_areas & {PENDING, UNINDEXED, DEAD, ORDER} else lost_sequences
    missing_count = max(
        len(lost_sequences),
        0 if TOTALS in rebuilt_areas else old_totals.depth + old_totals.dead - len(present_sequences),
    )
    is_exact = salvage_result is None or (salvage_result.totals_are_exact and RECORD not in rebuilt_areas)
    if missing_count or not is_exact:
        stale_keys += [key for key, _ in db.scan(NOTE, area_end(NOTE)) if not key.startswith(NOTE + LASTING_PREFIX)]
    db.write(change.all_puts, change.deletes + stale_keys + obsolete_keys, sync=True)
    return DeriveResult(len(present_sequences), missing_count, lost_sequences, is_exact)


def _unique_pending_keys(db: Database, dead_sequences: Container[int]) -> tuple[dict[int, PendingKey], list[bytes]]:
    """Return the keys of pending records, and obsolete keys. An obsolete key exists again because the block with its deletion was
    lost.
    """
    keys = sorted(_pending_keys(db), key=lambda key: key.due)
    pending_key_by_sequence = {key.due.sequence: key for key in reversed(keys)}
    return pending_key_by_sequence, [
        key.encoded
        for key in keys
        if pending_key_by_sequence[key.due.sequence] is not key or key.due.sequence in dead_sequences
    ]


def _pending_keys(db: Database) -> Iterator[PendingKey]:
    return (PendingKey.parse(key) for key, _ in db.scan(PENDING, area_end(PENDING)))


def pending_keys_of(db: Database, sequences: Collection[int]) -> dict[int, PendingKey | None]:
    """Return the keys of these pending records; None for a missing record, and for a record behind another record of its lane."""
    if not sequences:
        return {}
    key_by_sequence = {key.due.sequence: key for key in _pending_keys(db)}
    return {sequence: key_by_sequence.get(sequence) for sequence in sequences}


def other_release_error(path: Path, error: DecodeError) -> SpoolError:
    return SpoolError(f"the spool in {path} cannot be opened: {error.message}", remedy="Use the release that wrote it")


def read_owner(db: Database) -> SpoolOwner:
    """Return the owner of a store's records. Raises ``SpoolError`` if the owner cannot be read."""
    try:
        return SpoolOwner.read(db.get)
    except DecodeError as e:
        raise other_release_error(db.path, e) from e


def restore_owner(db: Database, known_owner: SpoolOwner | None, salvage_result: SalvageResult | None) -> None:
    """Restore the owner of the records. If the owner is lost, and ``known_owner`` is None, store ``UNKNOWN_OWNER``."""
    if not all(map(db.get, OWNER)):
        stored_owner = known_owner or SpoolOwner.read(db.get)
        owner = UNKNOWN_OWNER if salvage_result and stored_owner == SpoolOwner() else stored_owner
        db.write([(key, owner.encode()) for key in OWNER], sync=True)


def _log_repair(db: Database, derive_result: DeriveResult, damaged_folder: Path | None) -> None:
    present_count, missing_count, lost_sequences, is_exact = derive_result
    lost_text = str(missing_count)
    if not is_exact:
        lost_text = f"at least {missing_count}" if missing_count else "an unknown number, perhaps none,"
    logger.error(
        "the spool in %s was repaired: %d records are there, %s are lost%s%s",
        db.path,
        present_count,
        lost_text,
        f", among them those with the numbers {', '.join(map(str, lost_sequences[:_MAX_LOGGED_SEQUENCES]))}"
        if lost_sequences
        else "",
        f"; the damaged files are kept in {damaged_folder}" if damaged_folder else "",
    )


def mark_keys_of(db: Database, sequence: int) -> list[bytes]:
    """Return the keys of a record's marks."""
    return [key for key, value in db.scan(MARK, area_end(MARK)) if Due.parse(value).sequence == sequence]


def dead_records(db: Database) -> Iterator[tuple[int, Record | DecodeError, int]]:
    """Yield the sequence, the record and the size of each dead record."""
    for key, _ in db.scan(DEAD, area_end(DEAD)):
        sequence = sequence_of(key)
        data = db.get(record_key(RECORD, sequence))
        yield sequence, decode_record(data), len(data or b"")


def _totals_or_empty(db: Database) -> Totals:
    try:
        return stored_totals(db) or Totals()
    except DecodeError:
        return Totals()


def needs_repair(db: Database) -> bool:
    """Whether a store must be repaired: its entries contradict each other, its totals are damaged, or its totals are missing
    although it has records. A store with pending records is also repaired if an earlier release, which does not find these
    records, wrote the totals.
    """
    data = db.get(TOTALS)
    if data is not None and Totals.decode(data) is None:
        return True
    areas = (RECORD, PENDING) if data is None else (PENDING,) if data[0] == VERSION else ()
    if any(next(db.scan(area, area_end(area)), None) is not None for area in areas):
        return True
    return find_contradiction(db) is not None


def stored_totals(db: Database) -> Totals | None:
    """Return the totals of a store; None if the totals are missing or damaged. Raises ``DecodeError`` if they have another
    format.
    """
    data = db.get(TOTALS)
    return None if data is None else Totals.decode(data)
