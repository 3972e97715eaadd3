"""What lies in a spool, for tools: it takes no lock, so a living process may go on with it meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.keys import DEAD, PENDING, RECORD, TOTALS, Due, behind, numbered, sequence_of
from rocketmq_spark.spool.records import Record, RecordState, SpoolOwner, Totals, decoded


class SpoolEntry(NamedTuple):
    """A record: ``pending`` with its due time (ms since 1970), ``behind`` another one of its lane, or ``dead``."""

    sequence: int
    standing: str
    due_ms: int | None
    state: RecordState | None
    record: Record | DecodeError


class SpoolReading:
    """A spool as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self._db = Database(path, read_only=True)

    @property
    def totals(self) -> Totals | None:
        """None where they cannot be read."""
        data = self._db.get(TOTALS)
        if data is None and self.is_damaged:
            return None
        return Totals() if data is None else Totals.decode(data)

    @property
    def owner(self) -> SpoolOwner:
        """Whose records these are."""
        return SpoolOwner.stored(self._db.get)

    @property
    def is_damaged(self) -> bool:
        """Whether anything could not be read so far."""
        return bool(self._db.gaps or self._db.damage)

    @property
    def first_due_ms(self) -> int | None:
        """When the first record is due."""
        first = next(self._db.scan(PENDING, behind(PENDING)), None)
        return None if first is None else Due.parse(first[0]).due_ms

    def entries(self) -> Iterator[SpoolEntry]:
        """All records: pending ones as they are due, then those behind them, then the dead, each as they were stored."""
        for key, value in self._db.scan(PENDING, behind(PENDING)):
            due = Due.parse(key)
            yield SpoolEntry(due.sequence, "pending", due.due_ms, _state(value), self._record(due.sequence))
        pending = {sequence_of(key) for key, _ in self._db.scan(PENDING, behind(PENDING))}
        dead = {sequence_of(key) for key, _ in self._db.scan(DEAD, behind(DEAD))}
        for key, data in self._db.scan(RECORD, behind(RECORD)):
            sequence = sequence_of(key)
            if sequence not in pending and sequence not in dead:
                yield SpoolEntry(sequence, "behind", None, None, decoded(data))
        for sequence in sorted(dead):
            value = self._db.get(numbered(DEAD, sequence)) or b""
            yield SpoolEntry(sequence, "dead", None, _state(value), self._record(sequence))

    def close(self) -> None:
        self._db.close()

    def _record(self, sequence: int) -> Record | DecodeError:
        return decoded(self._db.get(numbered(RECORD, sequence)))


def _state(data: bytes) -> RecordState | None:
    with contextlib.suppress(DecodeError):
        return RecordState.decode(data)
    return None
