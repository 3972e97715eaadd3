"""A database in which RocksDB's iterator and its look-up find different values of a key."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.files import _crc32c, _masked_checksum, manifest

_HEADER = struct.Struct("<IHB")
_NEW_FILE = b"g"  # in the manifest, followed by the level and the number of the file


def crafted(path: Path, looked_up: list[tuple[bytes, bytes]], iterated: list[tuple[bytes, bytes]]) -> None:
    """Write the entries ``iterated`` later than those of the same keys that are ``looked_up``, but into a lower level: a look-up
    takes what it finds in the highest one, and an iterator the latest value.
    """
    for entries in (looked_up, iterated):
        with contextlib.closing(Database(path)) as db:
            db.write(entries)
            db._db.flush()
    file = manifest(path)
    assert file is not None
    new = _NEW_FILE + bytes([0, max(int(table.stem) for table in path.glob("*.sst"))])
    data, at, places = bytearray(file.read_bytes()), 0, []
    while at + _HEADER.size <= len(data):
        _, length, kind = _HEADER.unpack_from(data, at)
        begin, end = at + _HEADER.size, at + _HEADER.size + length
        found = data.find(new, begin, end)
        if found >= 0:
            places.append((at, begin, end, kind, found + len(_NEW_FILE)))
        at = end
    at, begin, end, kind, level = places[-1]
    data[level] = 6
    struct.pack_into("<I", data, at, _masked_checksum(_crc32c(bytes([kind]) + data[begin:end])))
    file.write_bytes(data)
