"""A process instead of the reader of a spool: it sends what a test says."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from rocketmq_spark.base.process import PythonCall, python_call
from rocketmq_spark.spool.copying import MAX_KEY_BYTES, MAX_VALUE_BYTES
from rocketmq_spark.spool.owner_reader import END_MARK, FRAME_HEADER
from rocketmq_spark.spool.records import (
    DEAD,
    LASTING_PREFIX,
    NOTE,
    OWNER,
    RECORD,
    Due,
    PendingKey,
    Record,
    RecordState,
    SpoolOwner,
    lane_key,
    record_key,
)
from tests.spool.bench import record

# For statements.
USED = (LASTING_PREFIX, tempfile, os, signal, MAX_KEY_BYTES, MAX_VALUE_BYTES, PendingKey, lane_key)

STATE = RecordState(1, 2, "reason").encode()
ENTRIES: list[tuple[bytes, bytes]] = [
    (record_key(DEAD, 2), STATE),
    (OWNER[0], SpoolOwner(("a:1",), "").encode()),
    (NOTE + b"name", b"value"),
    (Due(5, 1).mark_value, STATE),
    (record_key(RECORD, 1), record(b"1").encode()),
    (record_key(RECORD, 2), record(b"2").encode()),
    (record_key(RECORD, 3), Record("k", b"3", 1, "t", b"lane", ((b"space", b"place"),)).encode()),
    (OWNER[1], SpoolOwner(("a:1",), "").encode()),
]
out = sys.stdout.buffer if sys.stdout is sys.__stdout__ else None


def put(key: bytes, value: bytes) -> None:
    """Send an entry."""
    assert out is not None
    out.write(FRAME_HEADER.pack(len(key), len(value)) + key + value)


def report(text: bytes) -> None:
    """Send the last frame."""
    assert out is not None
    out.write(FRAME_HEADER.pack(END_MARK, len(text)) + text)
    out.flush()


def end(**more: object) -> None:
    """Send the report of a reader that has read everything."""
    report(json.dumps({"damaged": False, "warnings": [], **more}).encode())


def reader(*statements: str) -> PythonCall:
    """The call of a process that runs the statements with the names of this module."""
    root = str(Path(__file__).parents[2])
    return python_call(
        "-c", "\n".join(["from tests.spool.scripted_reader import *", *statements]), first_import_folders=[root]
    )
