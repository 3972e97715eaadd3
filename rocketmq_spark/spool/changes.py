"""One write of a store, before it is made: what it puts and deletes, and the totals after it. Pure."""

from __future__ import annotations

from rocketmq_spark.spool.keys import DEAD, LAST, RECORD, TOTALS, Due, marked, numbered, ordered
from rocketmq_spark.spool.records import Record, RecordState, Totals, decoded

_NEVER = Due(LAST, LAST)


class AtomicChange:
    """Steps that happen together or not at all. ``earliest`` is the first of what it lets be pending."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals.copy()
        self.puts: list[tuple[bytes, bytes]] = []
        self.deletes: list[bytes] = []
        self.earliest = _NEVER

    @property
    def all_puts(self) -> list[tuple[bytes, bytes]]:
        return [*self.puts, (TOTALS, self.totals.encode())]

    def add(self, record: Record, data: bytes) -> int:
        """A new record, as ``data``; gives its sequence."""
        totals = self.totals
        sequence = totals.next_sequence
        totals.next_sequence += 1
        totals.depth += 1
        totals.size += len(data)
        totals.last_ms = max(totals.last_ms, record.stored_ms)
        self.puts.append((numbered(RECORD, sequence), data))
        if record.lane:
            self.puts.append((ordered(record.lane, sequence), b""))
        return sequence

    def mark(self, record: Record, due: Due) -> None:
        """By its marks a record is found, and when it is due."""
        self.puts += [(marked(*mark), due.key) for mark in record.marks]

    def pend(self, due: Due, state: RecordState) -> None:
        self.puts.append((due.key, state.encode()))
        self.earliest = min(self.earliest, due)

    def remark(self, data: bytes | None, due: Due) -> None:
        """The same of a record as it is stored, if it can be read."""
        if isinstance(record := decoded(data), Record):
            self.mark(record, due)

    def unmark(self, record: Record) -> None:
        self.deletes += [marked(*mark) for mark in record.marks]

    def finish(self, sequence: int, size: int) -> None:
        """A record is over."""
        self.deletes.append(numbered(RECORD, sequence))
        self.totals.depth -= 1
        self.totals.size -= size

    def bury(self, sequence: int, size: int, state: RecordState) -> None:
        """A record is given up; it stays where it is, among the dead."""
        self.puts.append((numbered(DEAD, sequence), state.encode()))
        totals = self.totals
        totals.depth, totals.size = totals.depth - 1, totals.size - size
        totals.dead, totals.dead_bytes = totals.dead + 1, totals.dead_bytes + size
        totals.give_ups += 1

    def revive(self, sequence: int, size: int) -> None:
        """A dead record is none any more; who calls lets it be pending."""
        self.deletes.append(numbered(DEAD, sequence))
        totals = self.totals
        totals.depth, totals.size = totals.depth + 1, totals.size + size
        totals.dead, totals.dead_bytes = totals.dead - 1, totals.dead_bytes - size
