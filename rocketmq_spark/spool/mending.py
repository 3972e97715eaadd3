"""A damaged store: what can be read is kept, the rest is named. Also what tools ask of all records.

A driver over a ``Database`` that nobody else uses meanwhile. The records are what counts: when they are due, their order
and the totals are made again from them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.spool.changes import Change
from rocketmq_spark.spool.database import Database, repaired
from rocketmq_spark.spool.keys import (
    DEAD,
    MARK,
    ORDER,
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
from rocketmq_spark.spool.records import Record, State, Totals, decoded

logger = logging.getLogger(__name__)

_NAMED = 20


def repair(path: Path) -> None:
    """Let RocksDB save what it can from files that do not fit their checksums, and mend that."""
    database = repaired(path)
    try:
        mend(database)
    finally:
        database.close()


def mend(db: Database) -> None:
    """Make a store whole again that lost bytes.

    Records without a due time are due now, due times and places in lanes without a record are dropped and named in the
    log. A record that does not fit its checksum stays, and goes to the dead when it is taken.
    """
    before = _totals(db)
    pending = {number(key): Due.parse(key) for key, _ in db.scan(PENDING, behind(PENDING))}
    dead = {number(key) for key, _ in db.scan(DEAD, behind(DEAD))}
    lanes = {number(key): lane_of(key) for key, _ in db.scan(ORDER, behind(ORDER))}
    change = Change(Totals(give_ups=before.give_ups, last_ms=before.last_ms, next_sequence=before.next_sequence))
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
        change.remark(data, pending.get(sequence, Due(totals.last_ms, sequence)))
        if lane and sequence not in lanes:
            change.puts.append((ordered(lane, sequence), b""))
        if sequence not in pending and (not lane or lane not in busy):
            change.pend(Due(totals.last_ms, sequence), State(0, totals.last_ms, getattr(record, "target", "")))
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
    db.write(change.all_puts, change.deletes + stale, sync=True)
    missing = max(len(lost), before.depth + before.dead - len(kept))
    logger.error(
        "the spool in %s was mended: %d records are there, %d are lost%s",
        db.path,
        len(kept),
        missing,
        f", among them those with the numbers {', '.join(map(str, lost[:_NAMED]))}" if lost else "",
    )


def lane_with(db: Database, sequence: int) -> bytes | None:
    """The lane of a record that cannot be asked."""
    for key, _ in db.scan(ORDER, behind(ORDER)):
        if number(key) == sequence:
            return lane_of(key)
    return None


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
