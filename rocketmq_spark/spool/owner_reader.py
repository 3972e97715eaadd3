"""The process that reads a spool with the rights of its owner, and writes the entries to its standard output.

``copying`` starts this process. The process writes each entry as a frame: the lengths of key and value, the key, the value. The
last frame has ``END_MARK`` as the length of the key. The value of the last frame is JSON: whether damage was found or which error
occurred, and the warnings. The owner of the spool may control this process, so ``copying`` trusts none of the output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.spool.owner_rights import become_owner
from rocketmq_spark.spool.records import MARK, ORDER, TOTALS
from rocketmq_spark.spool.spool import SpoolReading

FRAME_HEADER = struct.Struct(">II")
# The length of the key in the last frame. No entry has a key of this length.
END_MARK = 2**32 - 1
# The areas that ``recovery.derive`` builds from records. These areas are not read from the spool of another user.
DERIVED_AREAS = (ORDER, MARK, TOTALS)

# A limit of the memory of this process. Without this limit, the files of the owner would decide how much RocksDB and the checks
# of logs read at once.
_MEMORY_BYTES = 4 << 30
_MAX_WARNINGS, _WARNING_CHARS = 10, 1000


def main(path: str) -> None:
    """Write the entries of the spool in ``path``, and then the last frame."""
    _limit_memory()
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    out = sys.stdout.buffer
    try:
        report: dict[str, object] = {"damaged": _write_entries(Path(path), out)}
    except RocketMQError as e:
        report = {"error": e.message, "remedy": e.remedy}
    except Exception as e:  # noqa: BLE001 - ``copying`` raises an error with this text
        report = {"error": f"the spool in {path} cannot be read: {type(e).__name__}: {e}"}
    text = json.dumps({**report, "warnings": warnings.texts}).encode()
    out.write(FRAME_HEADER.pack(END_MARK, len(text)) + text)
    out.flush()


def _write_entries(path: Path, out: BinaryIO) -> bool:
    """Returns whether the spool is damaged."""
    become_owner(path)
    with contextlib.closing(SpoolReading(path)) as reading:
        for key, value in _entries_to_copy(reading):
            out.write(FRAME_HEADER.pack(len(key), len(value)))
            out.write(key)
            out.write(value)
        return reading.is_damaged


def _entries_to_copy(reading: SpoolReading) -> Iterator[tuple[bytes, bytes]]:
    return ((key, value) for key, value in reading.stored_entries() if not key.startswith(DERIVED_AREAS))


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):
        # The call fails if the hard limit is lower, or if the system has no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


class _Warnings(logging.Handler):
    """Keeps the first warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.texts) < _MAX_WARNINGS:
            self.texts.append(record.getMessage()[:_WARNING_CHARS])
