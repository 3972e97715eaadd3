"""A damaged store: what can be read is kept, the rest is named. Also what tools ask of all records.

First the database: what can be read is moved to a new one in the same folder, and the damaged files are kept beside it. One
block that cannot be read costs what stands in it. Where RocksDB finds nothing of a table any more, or does not open at all, a
copy that it put together again is asked for what is missing: such a copy may hold what was settled. This may be killed at any
point: the new files take their place in steps that the next one to open the folder finishes.

Then the records, which are what counts: when they are due, their order and the totals are made again from them. No other
process uses the ``Database`` meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError, SpoolError, SpoolFull
from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import WHOLE, Damaged, Database, rebuild
from rocketmq_spark.spool.files import FULL, mirror, sync_folder
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING,
    LOST_OWNER,
    MARK,
    NOTE,
    ORDER,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    Due,
    Record,
    RecordState,
    SpoolOwner,
    Totals,
    behind,
    decoded,
    lane_of,
    numbered,
    ordered,
)
from rocketmq_spark.spool.records import sequence_of as number

logger = logging.getLogger(__name__)

# Folders within that of the database. A new one is ``NEW`` until it is complete and ``WHOLE`` from then on; the old files
# go to ``LEAVING``, which is given a name of its own when all are there.
_NEW, _LEAVING, _COPY, DAMAGED = "salvaged", "leaving", "copy", "damaged"
_PORTION, _PORTION_BYTES = 1000, 8 << 20
_ALL = (b"\0", b"\xff")


class Salvaged(NamedTuple):
    """Where the damaged files are, and whether what was counted before can be trusted. ``rebuilt`` are the areas of which a
    rebuilt copy gave something: that may have been over before.
    """

    folder: Path
    counted: bool
    rebuilt: frozenset[bytes] = frozenset()


def salvage(path: Path) -> Salvaged:
    """Make a database of what can be read. It must not be open. Raises ``SpoolError`` where its folder is in use."""
    with held(path):
        new = Database(path / _NEW)
        try:
            gaps, counted = _copy_readable(path, new)
            rebuilt = _copy_rebuilt(path, new, gaps) if gaps else frozenset()
        finally:
            new.close()
        (path / _NEW / "LOCK").unlink(missing_ok=True)
        (path / _LEAVING).mkdir()
        (path / _NEW).rename(path / WHOLE)
        sync_folder(path)
        return Salvaged(_exchange(path), counted, rebuilt)


def finish(path: Path) -> None:
    """What a process that died left of such work: finished, or taken away where the old files are still the truth."""
    try:
        left = any((path / name).exists() for name in (_NEW, WHOLE, _LEAVING, _COPY))
    except OSError as e:  # a disk that fails, or a mount that has gone
        raise SpoolError(f"the spool in {path} cannot be read: {e}", remedy="Check its disk") from e
    if left:
        with held(path):
            pass


def _copy_readable(path: Path, new: Database) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The ranges that could not be read, and whether the totals could, and no log had lost any."""
    try:
        old = Database(path, read_only=True)
    except SpoolError:
        return [_ALL], False
    try:
        counted = False
        for key in _copied(old, new, *_ALL):
            counted = counted or key == TOTALS
        return old.gaps, counted and old.damage is None
    finally:
        old.close()


def _copy_rebuilt(path: Path, new: Database, gaps: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The areas of which it gave something."""
    areas: set[bytes] = set()
    copy = path / _COPY
    copy.mkdir()
    mirror(path, copy, shutil.copyfile)
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
    """The keys that are copied, in portions; what the new one has stays."""
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
    """With RocksDB's own lock, and nothing left of an earlier time. Raises ``SpoolError`` where a process has it open."""
    try:
        lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise SpoolError(f"the spool in {path} is in use by another process") from e
            if (path / WHOLE).exists():
                _exchange(path)
            for name in (_NEW, _LEAVING, _COPY):
                shutil.rmtree(path / name, ignore_errors=True)
            yield
        finally:
            os.close(lock)
    except OSError as e:  # a full disk, most likely: the old files are still the truth, or the next one goes on
        kind = SpoolFull if e.errno in FULL else SpoolError
        raise kind(f"the damaged spool in {path} could not be put together again: {e}") from e


def _exchange(path: Path) -> Path:
    """The old files out, the new ones in; where the old ones are."""
    kept = next(one for n in itertools.count(1) if not (one := path / f"{DAMAGED}-{n}").exists())
    if (path / _LEAVING).exists():
        for file in _files(path):
            file.rename(path / _LEAVING / file.name)
        (path / _LEAVING).rename(kept)
        sync_folder(path)
    # CURRENT last: with it there is a database.
    for file in sorted(_files(path / WHOLE), key=lambda file: file.name == "CURRENT"):
        file.rename(path / file.name)
    (path / WHOLE).rmdir()
    sync_folder(path)
    return kept


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and file.name != "LOCK"]


_NAMED = 20


def repair(db: Database, salvaged: Salvaged | None = None) -> None:
    """Make a store whole again that lost bytes; ``salvaged`` says what of it was moved there.

    A record without a due time is due when it was at first, now where it does not say. Due times and places in lanes
    without a record are dropped and named in the log. A record that does not match its checksum stays, and goes to the dead
    when it is taken. Notes but the ``LASTING`` speak of records that may be lost, so they go where any is.
    """
    before = _totals(db)
    dead = {number(key) for key, _ in db.scan(DEAD, behind(DEAD))}
    pending, doubled = _places(db, dead)
    lanes = {number(key): lane_of(key) for key, _ in db.scan(ORDER, behind(ORDER))}
    change = AtomicChange(Totals(give_ups=before.give_ups, last_ms=before.last_ms, next_sequence=before.next_sequence))
    totals, kept, busy = change.totals, set(), set()
    for key, data in db.scan(RECORD, behind(RECORD)):
        sequence, record = number(key), decoded(data)
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
        due = pending.get(sequence) or Due(totals.last_ms if due_ms is None else due_ms, sequence)
        change.remark(data, due)
        if lane and sequence not in lanes:
            change.puts.append((ordered(lane, sequence), b""))
        if sequence not in pending and (not lane or lane not in busy):
            change.pend(due, RecordState(0, totals.last_ms, getattr(record, "first_target", "")))
        elif sequence in pending and lane in busy:
            change.deletes.append(pending[sequence].key)  # an earlier one of its lane came back
        if lane:
            busy.add(lane)
    lost = sorted(({*pending, *dead, *lanes}) - kept)
    for sequence in lost:
        change.deletes += [pending[sequence].key] if sequence in pending else []
        change.deletes += [numbered(DEAD, sequence)] if sequence in dead else []
        change.deletes += [ordered(lanes[sequence], sequence)] if sequence in lanes else []
    stale = [key for key, value in db.scan(MARK, behind(MARK)) if Due.parse(value).sequence not in kept - dead]
    # Of what was over before and came back neither says how many are lost: places without a record, and older counts.
    rebuilt = frozenset() if salvaged is None else salvaged.rebuilt
    lost = [] if rebuilt & {PENDING, DEAD, ORDER} else lost
    missing = max(len(lost), 0 if TOTALS in rebuilt else before.depth + before.dead - len(kept))
    exact = salvaged is None or (salvaged.counted and RECORD not in rebuilt)
    if missing or not exact:
        stale += [key for key, _ in db.scan(NOTE, behind(NOTE)) if not key.startswith(NOTE + LASTING)]
    db.write(change.all_puts, change.deletes + stale + doubled, sync=True)
    _say(db, len(kept), missing, lost, None if salvaged is None else salvaged.folder, exact)


def _places(db: Database, dead: Container[int]) -> tuple[dict[int, Due], list[bytes]]:
    """When records are due, and the keys that came back when a block was lost of what had ended them."""
    places = [Due.parse(key) for key, _ in db.scan(PENDING, behind(PENDING))]
    pending = {due.sequence: due for due in reversed(places)}
    return pending, [due.key for due in places if pending[due.sequence] is not due or due.sequence in dead]


def pending_now(db: Database, sequences: Collection[int]) -> dict[int, Due | None]:
    """When each of these is due; None for what is not there, or waits behind another one."""
    if not sequences:
        return {}
    found = {due.sequence: due for due in (Due.parse(key) for key, _ in db.scan(PENDING, behind(PENDING)))}
    return {sequence: found.get(sequence) for sequence in sequences}


def of_another_release(path: Path, error: DecodeError) -> SpoolError:
    return SpoolError(f"the spool in {path} cannot be opened: {error.message}", remedy="Use the release that wrote it")


def owner_in(db: Database) -> SpoolOwner:
    """Whose records these are. Raises ``SpoolError`` where that cannot be read."""
    try:
        return SpoolOwner.stored(db.get)
    except DecodeError as e:
        raise of_another_release(db.path, e) from e


def name_owner(db: Database, known: SpoolOwner | None, salvaged: Salvaged | None) -> None:
    """Write down again whose records these are. Where that is lost and not ``known`` they have no owner."""
    if not all(map(db.get, OWNER)):
        held = known or SpoolOwner.stored(db.get)
        owner = LOST_OWNER if salvaged and held == SpoolOwner() else held
        db.write([(key, owner.encode()) for key in OWNER], sync=True)


def _say(db: Database, kept: int, missing: int, lost: Sequence[int], damaged_files: Path | None, exact: bool) -> None:
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
    """The keys of its marks."""
    return [key for key, value in db.scan(MARK, behind(MARK)) if Due.parse(value).sequence == sequence]


def dead_ones(db: Database) -> Iterator[tuple[int, Record | DecodeError, int]]:
    """Sequence, record and size of all that were given up."""
    for key, _ in db.scan(DEAD, behind(DEAD)):
        sequence = number(key)
        data = db.get(numbered(RECORD, sequence))
        yield sequence, decoded(data), len(data or b"")


def _totals(db: Database) -> Totals:
    data = db.get(TOTALS)
    try:
        return Totals() if data is None else Totals.decode(data)
    except DecodeError:
        return Totals()
