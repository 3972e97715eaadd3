"""A damaged store: what can be read is kept, the rest is named. Also what tools ask of all records.

A driver over a ``Database`` that no other process uses meanwhile. The records are what counts: when they are due, their order
and the totals are made again from them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.keys import (
    DEAD,
    MARK,
    NOTE,
    ORDER,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    Due,
    behind,
    lane_of,
    numbered,
    ordered,
)
from rocketmq_spark.spool.keys import sequence_of as number
from rocketmq_spark.spool.records import LOST_OWNER, Record, RecordState, SpoolOwner, Totals, decoded
from rocketmq_spark.spool.salvage import Salvaged

logger = logging.getLogger(__name__)

_NAMED = 20


def repair(db: Database, salvaged: Salvaged | None = None) -> None:
    """Make a store whole again that lost bytes; ``salvaged`` says what of it was moved there.

    A record without a due time is due when it was at first, now where it does not say. Due times and places in lanes
    without a record are dropped and named in the log. A record that does not fit its checksum stays, and goes to the dead
    when it is taken. Notes speak of records that may be lost, so they go where any is.
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
        stale += [key for key, _ in db.scan(NOTE, behind(NOTE))]
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
