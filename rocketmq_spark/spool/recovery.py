"""Repair of a damaged store: keeps what can be read, and reports the rest. Also queries over all records, for tools.

First the database is repaired: all readable entries are copied to a new one in the same folder, and the damaged files are kept
next to it. A bad block costs only the entries in it. If RocksDB cannot read a whole table, or cannot open the database, the
missing entries are taken from a copy that RocksDB has rebuilt; such a copy may contain records that were already settled. The
process may be killed at any point: the next one that opens the folder completes the exchange of the files.

Then the records are repaired: due times, order and totals are derived from them again. No other process uses the ``Database``
meanwhile.
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

from rocketmq_spark.base.folders import PRIVATE, copy_regular, open_lock
from rocketmq_spark.errors import DecodeError, SpoolError, SpoolFull
from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import OPEN_IT, WHOLE, Damaged, Database, rebuild
from rocketmq_spark.spool.files import FULL, mirror, not_readable, sync_folder
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING,
    LOST_OWNER,
    MARK,
    MOST,
    NOTE,
    ORDER,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    UNINDEXED,
    VERSION,
    Due,
    PendingPlace,
    Record,
    RecordState,
    SpoolOwner,
    Totals,
    behind,
    decoded,
    lane_of,
    numbered,
    ordered,
    pending_place,
)
from rocketmq_spark.spool.records import sequence_of as number

logger = logging.getLogger(__name__)

# Folders inside that of the database. The new database is in ``_NEW`` until it is complete, then in ``WHOLE``. The old files go
# to ``_LEAVING``, which becomes ``damaged-N`` when all of them are there.
_NEW, _LEAVING, _COPY, DAMAGED = "salvaged", "leaving", "copy", "damaged"
_PORTION, _PORTION_BYTES = 1000, 8 << 20
ALL_KEYS = (b"\0", b"\xff")


class Salvaged(NamedTuple):
    """Where the damaged files are, and whether the previous totals can be trusted. ``rebuilt`` are the areas with entries from a
    rebuilt copy, which may have been settled before.
    """

    folder: Path
    counted: bool
    rebuilt: frozenset[bytes] = frozenset()


def salvage(path: Path) -> Salvaged:
    """Make a new database of all readable entries. The old one must not be open. Raises ``SpoolError`` if it is in use."""
    with held(path):
        new = Database(path / _NEW)
        try:
            gaps, counted = _copy_readable(path, new)
            rebuilt = _copy_rebuilt(path, new, gaps) if gaps else frozenset()
        finally:
            new.close()
        (path / _NEW / "LOCK").unlink(missing_ok=True)
        (path / _LEAVING).mkdir(PRIVATE)
        (path / _NEW).rename(path / WHOLE)
        sync_folder(path)
        return Salvaged(_exchange(path), counted, rebuilt)


def database_in(path: Path, names: Container[str]) -> Path | None:
    """Return the folder with the database that an opening for writing uses, by the names in ``path``. None: an exchange has begun
    to move the new files to ``path``, so that neither folder has all of them.
    """
    if WHOLE not in names:
        return path
    return path / WHOLE if _LEAVING in names else None


def database_to_read(path: Path) -> Path:
    """Return the folder with the database that an opening for writing would use now. Changes nothing. Raises ``Damaged`` if no
    folder has all of it.
    """
    try:
        names = os.listdir(path)
    except OSError:  # opening it raises the error
        return path
    if (found := database_in(path, names)) is None:
        raise Damaged(
            f"the spool in {path} is damaged: an earlier repair of it has not ended, and its files are in two folders",
            remedy=OPEN_IT,
        )
    return found


def finish(path: Path) -> None:
    """Complete the repair of a process that died, or remove its rest if the old files are still complete."""
    try:
        left = any((path / name).exists() for name in (_NEW, WHOLE, _LEAVING, _COPY))
    except PermissionError as e:
        raise not_readable(path) from e
    except OSError as e:  # a disk that fails, or a mount that has gone
        raise SpoolError(f"the spool in {path} cannot be read: {e}", remedy="Check its disk") from e
    if left:
        with held(path):
            pass


def _copy_readable(path: Path, new: Database) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Returns the ranges that could not be read, and whether the totals could be read and no log had lost any."""
    try:
        old = Database(path, read_only=True)
    except SpoolError:
        return [ALL_KEYS], False
    try:
        counted = False
        for key in _copied(old, new, *ALL_KEYS):
            counted = counted or key == TOTALS
        return old.gaps, counted and old.damage is None
    finally:
        old.close()


def _copy_rebuilt(path: Path, new: Database, gaps: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Returns the areas with entries from the rebuilt copy."""
    areas: set[bytes] = set()
    copy = path / _COPY
    copy.mkdir(PRIVATE)
    mirror(path, copy, copy_regular)
    rebuild(copy)
    with contextlib.suppress(Damaged):  # then nothing more can be had
        rebuilt = Database(copy, read_only=True)
        try:
            for start, end in gaps:
                areas.update(key[:1] for key in _copied(rebuilt, new, start, end))
        finally:
            rebuilt.close()
    shutil.rmtree(copy)
    return frozenset(areas)


def _copied(old: Database, new: Database, start: bytes, end: bytes) -> Iterator[bytes]:
    """Yields the copied keys, and writes them in portions; entries that the new database has already are kept."""
    portion: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in old.scan(start, end):
        if new.get(key) is None:
            portion.append((key, value))
            size += len(value)
            yield key
        if len(portion) >= _PORTION or size >= _PORTION_BYTES:
            new.write(portion)
            portion, size = [], 0
    new.write(portion, sync=True)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds RocksDB's own lock, after removing rests of earlier repairs. Raises ``SpoolError`` if a process has it open."""
    try:
        lock = open_lock(path / "LOCK", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise SpoolError(f"the spool in {path} is in use by another process") from e
            if database_in(path, os.listdir(path)) != path:
                _exchange(path)
            for name in (_NEW, _LEAVING, _COPY):
                shutil.rmtree(path / name, ignore_errors=True)
            yield
        finally:
            os.close(lock)
    except OSError as e:  # probably a full disk: the old files are still complete, or the next open ends the exchange
        kind = SpoolFull if e.errno in FULL else SpoolError
        raise kind(f"the damaged spool in {path} could not be put together again: {e}") from e


def _exchange(path: Path) -> Path:
    """Replace the old files with the new ones. Returns the folder with the old ones."""
    kept = next(one for n in itertools.count(1) if not (one := path / f"{DAMAGED}-{n}").exists())
    if (path / _LEAVING).exists():
        for file in _files(path):
            file.rename(path / _LEAVING / file.name)
        (path / _LEAVING).rename(kept)
        sync_folder(path)
    # CURRENT comes last, because it makes the folder a database.
    for file in sorted(_files(path / WHOLE), key=lambda file: file.name == "CURRENT"):
        file.rename(path / file.name)
    (path / WHOLE).rmdir()
    sync_folder(path)
    return kept


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and file.name != "LOCK"]


_NAMED = 20


def contradiction(db: Database) -> str | None:
    """Return a clause about entries that cannot all be true, although each can be read; None if there are none.

    Reads all due times and places in lanes if there are dead letters, and otherwise only the last record.
    """
    totals, last = stored_totals(db), db.last_key(RECORD, behind(RECORD))
    if totals is not None and last is not None and (totals.next_sequence <= number(last) or not totals.all_bytes):
        return "its totals do not count all records"
    dead = {number(key) for key, _ in db.scan(DEAD, behind(DEAD))}
    waiting = (number(key) for area in (PENDING, UNINDEXED, ORDER) for key, _ in db.scan(area, behind(area)))
    return "a record is both dead and waiting" if dead and any(each in dead for each in waiting) else None


class Derived(NamedTuple):
    """The number of records that are there, how many are ``missing``, which numbers have no record, and whether that is exact."""

    kept: int
    missing: int
    lost: Sequence[int]
    exact: bool


def repair(db: Database, salvaged: Salvaged | None = None) -> None:
    """Repair the records of a store that lost data, and log the result; ``salvaged`` is that of the database's repair."""
    _say(db, derive(db, salvaged), None if salvaged is None else salvaged.folder)


def derive(db: Database, salvaged: Salvaged | None = None) -> Derived:
    """Derive due times, order, marks and totals from the records.

    A record without a due time becomes due at its original one, or now. A record that is pending for another target keeps its due
    time and its count of failures. Due times and places in lanes without a record are dropped. A dead record has neither. A
    record that does not match its checksum becomes a dead letter when it is taken. If records are lost, all notes but
    ``LASTING`` ones are deleted, because they may be about lost records.
    """
    before = _totals(db)
    dead = {number(key) for key, _ in db.scan(DEAD, behind(DEAD))}
    pending, doubled = _places(db, dead)
    lanes = {number(key): lane_of(key) for key, _ in db.scan(ORDER, behind(ORDER))}
    states = {number(key): value for key, value in db.scan(ORDER, behind(ORDER)) if value}  # of records that were moved
    change = AtomicChange(Totals(give_ups=before.give_ups, last_ms=before.last_ms, next_sequence=before.next_sequence))
    totals, kept, busy = change.totals, set(), set()
    for key, data in db.scan(RECORD, behind(RECORD)):
        sequence, record = number(key), decoded(data)
        if sequence >= MOST:
            raise SpoolError(
                f"record {sequence} of the spool in {db.path} has a number that no store reaches: the file was changed",
                remedy=f"Copy the rest: rocketmq-spark spool copy {shlex.quote(str(db.path))} COPY",
            )
        kept.add(sequence)
        lane = record.lane if isinstance(record, Record) else lanes.get(sequence, b"")
        totals.next_sequence = max(totals.next_sequence, sequence + 1)
        if sequence in dead:
            totals.dead += 1
            totals.dead_bytes += len(data)
            continue
        totals.depth += 1
        totals.size += len(data)
        due_ms = record.first_due_ms if isinstance(record, Record) else None
        due = Due(totals.last_ms if due_ms is None else due_ms, sequence)
        value, place = states.get(sequence, b""), pending.get(sequence)
        if place is not None and isinstance(record, Record) and place.target != record.target:
            # The target of the record was changed, and either the place or the record is from before the change.
            change.unpend(pending.pop(sequence))
            value = db.get(place.key) or b""
            place = record.moved(place, place.due, failed=RecordState.known(value).tries > 0)
        state = RecordState.known(value)
        place = place or pending_place(record, due, failed=state.tries > 0)
        change.remark(data, place.due)
        if lane and sequence not in lanes:
            change.puts.append((ordered(lane, sequence), b""))
        if sequence not in pending and (not lane or lane not in busy):
            change.pend(place, state._replace(since_ms=totals.last_ms).encode())
        elif sequence in pending and lane in busy:
            change.unpend(place)  # an earlier record of its lane was recovered and goes first
        if lane:
            busy.add(lane)
    lost = sorted(({*pending, *dead, *lanes}) - kept)
    for sequence in lost:
        change.deletes += [pending[sequence].key] if sequence in pending else []
        change.deletes += [numbered(DEAD, sequence)] if sequence in dead else []
        change.deletes += [ordered(lanes[sequence], sequence)] if sequence in lanes else []
    change.deletes += [key for key, _ in db.scan(ORDER, behind(ORDER)) if number(key) in dead]
    alive = kept - dead
    stale = [key for key, value in db.scan(MARK, behind(MARK)) if Due.parse(value).sequence not in alive]
    # Settled records may have been recovered, too. Then neither places without a record nor earlier totals say how many are lost.
    rebuilt = frozenset() if salvaged is None else salvaged.rebuilt
    lost = [] if rebuilt & {PENDING, UNINDEXED, DEAD, ORDER} else lost
    missing = max(len(lost), 0 if TOTALS in rebuilt else before.depth + before.dead - len(kept))
    exact = salvaged is None or (salvaged.counted and RECORD not in rebuilt)
    if missing or not exact:
        stale += [key for key, _ in db.scan(NOTE, behind(NOTE)) if not key.startswith(NOTE + LASTING)]
    db.write(change.all_puts, change.deletes + stale + doubled, sync=True)
    return Derived(len(kept), missing, lost, exact)


def _places(db: Database, dead: Container[int]) -> tuple[dict[int, PendingPlace], list[bytes]]:
    """The places of pending records, and obsolete keys, which are back because the block with their deletion was lost."""
    places = sorted(_pending_places(db), key=lambda place: place.due)
    pending = {place.due.sequence: place for place in reversed(places)}
    return pending, [
        place.key for place in places if pending[place.due.sequence] is not place or place.due.sequence in dead
    ]


def _pending_places(db: Database) -> Iterator[PendingPlace]:
    return (PendingPlace.parse(key) for key, _ in db.scan(PENDING, behind(PENDING)))


def pending_now(db: Database, sequences: Collection[int]) -> dict[int, PendingPlace | None]:
    """The place of each of these records; None for a missing record, or one that waits behind another one."""
    if not sequences:
        return {}
    found = {place.due.sequence: place for place in _pending_places(db)}
    return {sequence: found.get(sequence) for sequence in sequences}


def of_another_release(path: Path, error: DecodeError) -> SpoolError:
    return SpoolError(f"the spool in {path} cannot be opened: {error.message}", remedy="Use the release that wrote it")


def owner_in(db: Database) -> SpoolOwner:
    """The owner of a store's records. Raises ``SpoolError`` if it cannot be read."""
    try:
        return SpoolOwner.stored(db.get)
    except DecodeError as e:
        raise of_another_release(db.path, e) from e


def name_owner(db: Database, known: SpoolOwner | None, salvaged: Salvaged | None) -> None:
    """Write the owner of the records again. If it is lost and not ``known``, the records have no owner."""
    if not all(map(db.get, OWNER)):
        held = known or SpoolOwner.stored(db.get)
        owner = LOST_OWNER if salvaged and held == SpoolOwner() else held
        db.write([(key, owner.encode()) for key in OWNER], sync=True)


def _say(db: Database, derived: Derived, damaged_files: Path | None) -> None:
    kept, missing, lost, exact = derived
    how_many = str(missing)
    if not exact:
        how_many = f"at least {missing}" if missing else "an unknown number, perhaps none,"
    logger.error(
        "the spool in %s was repaired: %d records are there, %s are lost%s%s",
        db.path,
        kept,
        how_many,
        f", among them those with the numbers {', '.join(map(str, lost[:_NAMED]))}" if lost else "",
        f"; the damaged files are kept in {damaged_files}" if damaged_files else "",
    )


def marks_with(db: Database, sequence: int) -> list[bytes]:
    """The keys of a record's marks."""
    return [key for key, value in db.scan(MARK, behind(MARK)) if Due.parse(value).sequence == sequence]


def dead_ones(db: Database) -> Iterator[tuple[int, Record | DecodeError, int]]:
    """Sequence, record and size of each dead record."""
    for key, _ in db.scan(DEAD, behind(DEAD)):
        sequence = number(key)
        data = db.get(numbered(RECORD, sequence))
        yield sequence, decoded(data), len(data or b"")


def _totals(db: Database) -> Totals:
    try:
        return stored_totals(db) or Totals()
    except DecodeError:
        return Totals()


def needs_repair(db: Database) -> bool:
    """Whether the entries of a store contradict each other, or its totals are damaged, or missing although it has records or
    pending places, or were written by an earlier release that repaired the store and did not find its pending records.
    """
    data = db.get(TOTALS)
    if data is not None and Totals.decode(data) is None:
        return True
    uncounted = (RECORD, PENDING) if data is None else (PENDING,) if data[0] == VERSION else ()
    if any(next(db.scan(area, behind(area)), None) is not None for area in uncounted):
        return True
    return contradiction(db) is not None


def stored_totals(db: Database) -> Totals | None:
    """Return the totals of a store, None if they are missing or damaged. Raises ``DecodeError`` for another format."""
    data = db.get(TOTALS)
    return None if data is None else Totals.decode(data)
