"""By what records are found while they are kept: the first place of a space, and a record by its mark.

A driver over a ``Database``, under the lock of its store. It remembers where a space began, for RocksDB steps over all that
was deleted before the first key that is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.keys import MARK, Due, behind, behind_space, marked, place_of
from rocketmq_spark.spool.records import Record


class Marks:
    """The marks of one database."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._floors: dict[bytes, bytes] = {}
        self.used = next(db.scan(MARK, behind(MARK)), None) is not None

    def known(self, space: bytes, place: bytes) -> Due | None:
        """The record that is found there, with when it is due."""
        value = self._db.get(marked(space, place))
        return None if value is None else Due.parse(value)

    def first(self, space: bytes) -> bytes | None:
        """The first place of a space that is taken."""
        for place, _ in self.all(space, self._floors.get(space)):
            self._floors[space] = place
            return place
        self._floors.pop(space, None)
        return None

    def all(self, space: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, Due]]:
        """The places of a space in their order, each with its record."""
        for key, value in self._db.scan(marked(space, start or b""), behind_space(space)):
            yield place_of(key), Due.parse(value)

    def keys(self, space: bytes) -> list[bytes]:
        """What has to be deleted when the space is empty."""
        self._floors.pop(space, None)
        return [marked(space, place) for place, _ in self.all(space)]

    def added(self, record: Record) -> None:
        """A record has these marks now."""
        self.used = True
        for space, place in record.marks:
            floor = self._floors.get(space)
            if floor is not None and place < floor:
                self._floors[space] = place
