"""The note of a batch: the end offsets of the sink's queues before any row of the batch was sent.

The file is ``rocketmq/<batch>/<write name>`` in the query's checkpoint. The driver writes this file before a task may send. If a
driver finds the note of an earlier run, rows of the batch may be stored at the noted offsets or later. A note is no lock: it does
not stop another driver.

The folder ``rocketmq`` also contains the epoch, a number. A rewind increments the epoch, so that rows get other ids when they are
sent again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rocketmq_spark.columnar.encode.content_ids import BatchName
from rocketmq_spark.errors import OffsetError, OptionError, UnprovedError
from rocketmq_spark.spark.checkpoints.files import Folder
from rocketmq_spark.spark.checkpoints.offset_log import logged_times_ms
from rocketmq_spark.stored.ends import OR_AT_LEAST_ONCE, QueueEnds

logger = logging.getLogger(__name__)

NOTES_FOLDER = "rocketmq"
# The version of the function that computes row ids. A note of version 1 belongs to rows with other ids.
VERSION = 2
_EPOCH_PATH = f"{NOTES_FOLDER}/epoch"
_DIGEST_BYTES = 16
_CHECKSUM_KEY = "sum"


@dataclass(frozen=True, slots=True)
class BatchNote:
    """The identity of a batch, and the end offsets of the queues before it.

    ``scope`` names the namespace and the environment of the topics. ``settle_s`` is the longest time that a sent request may
    take to arrive at a broker. If the runs of the batch had different times, ``settle_s`` is the largest. ``version`` says how
    the ids of the rows are computed.
    """

    name: BatchName
    ends: QueueEnds
    scope: str = ""
    settle_s: float = 0.0
    version: int = VERSION

    def to_bytes(self) -> bytes:
        name = self.name
        value = {
            "v": self.version,
            "query": name.query,
            "epoch": name.epoch,
            "batch": name.number,
            "offsets": name.offsets.hex(),
            "write": name.write_name,
            "within": self.scope,
            "settle": self.settle_s,
            **self.ends.to_json(),
        }
        return json.dumps({**value, _CHECKSUM_KEY: _checksum(value)}).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes, path: str) -> BatchNote:
        """Parse a note. Raises ``UnprovedError`` if the note is damaged. A note is written atomically, so the damage came
        later, and tasks may have sent rows in the meantime. Raises ``OptionError`` for a note of a later version.
        """
        try:
            value = json.loads(content)
            version = int(value["v"])
            if version <= VERSION:
                if value.pop(_CHECKSUM_KEY, None) not in (None, _checksum(value)):  # earlier versions wrote no checksum
                    raise ValueError("its checksum differs")
                name = BatchName(
                    value["query"], value["epoch"], value["batch"], bytes.fromhex(value["offsets"]), value["write"]
                )
                ends, settle_s = QueueEnds.from_json(value), float(value.get("settle", 0.0))
                return cls(name, ends, value.get("within", ""), settle_s, version)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise UnprovedError(
                f"what is stored of the unfinished batch cannot be proved: its note {path} is damaged ({type(e).__name__})",
                remedy=f"Restore that file, {OR_AT_LEAST_ONCE}",
            ) from None
        raise OptionError(
            f"the note of the unfinished batch has version {version}, but this rocketmq-spark reads version {VERSION}",
            remedy="Start the query with the version of rocketmq-spark that began the batch",
        )

    def belongs_to(self, name: BatchName) -> bool:
        """Whether this is a note of the batch ``name``, for any of its writes.

        Raises ``UnprovedError`` if an earlier version computed the ids: with the ids of this version, no stored row would be
        recognized, and all rows would be sent again.
        """
        if self.name._replace(write_name=name.write_name) != name:
            return False
        if self.version != VERSION:
            raise UnprovedError(
                f"what is stored of the unfinished batch {name.number} cannot be proved: it was begun by an earlier version of "
                f"rocketmq-spark, which gave rows other ids (its note has version {self.version}; this version reads {VERSION})",
                remedy=f"Finish the batch with the version that began it, {OR_AT_LEAST_ONCE}",
            )
        return True


def _checksum(value: Mapping[str, Any]) -> str:
    """Return the checksum of a note. ``json`` keeps the order of keys, so a parsed note gives the same text."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


class BegunBatch(NamedTuple):
    """The note of a batch. If ``had_note`` is true, the batch had this note already, so an earlier run may have sent rows of the
    batch.
    """

    note: BatchNote
    had_note: bool


def batch_name(folder: Folder, write_name: str, number: int | None = None) -> BatchName:
    """Return the identity of batch ``number`` of a query, by default of the last batch that Spark has planned.

    Raises ``OptionError`` if the folder is not a checkpoint.
    """
    metadata = folder.read_bytes("metadata")
    try:
        query = str(json.loads(metadata or b"")["id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OptionError(
            f"{folder.name} is not the checkpoint of a query: its file 'metadata' has no id",
            remedy="Give the writer's checkpointLocation, as Spark has it",
        ) from None
    if number is None:
        planned_times_ms = logged_times_ms(folder, "offsets")
        if not planned_times_ms:
            raise OptionError(
                f"{folder.name} has no planned batch: there is nothing in its folder 'offsets'",
                remedy="Switch asynchronous progress tracking off (asyncProgressTrackingEnabled)",
            )
        number = max(planned_times_ms)
    offsets = folder.read_bytes(f"offsets/{number}")
    if offsets is None:
        raise OptionError(
            f"{folder.name} has no planned batch {number}",
            remedy="Give the checkpointLocation of the query that calls, and switch asynchronous progress tracking off",
        )
    digest = hashlib.blake2b(offsets, digest_size=_DIGEST_BYTES).digest()
    return BatchName(query, epoch(folder), number, digest, write_name)


def begin_batch(
    folder: Folder, name: BatchName, fetch_ends: Callable[[], QueueEnds], scope: str = "", settle_s: float = 0.0
) -> BegunBatch:
    """Return the existing note of the batch, or write a new note with the result of ``fetch_ends``. The note is durable when the
    function returns.

    A note with another epoch or other offsets belongs to a batch that was rewound. The new note replaces such a note.
    """
    path = f"{NOTES_FOLDER}/{name.number}/{name.write_name}"
    existing_note = _read_note(folder, path)
    if existing_note is not None and existing_note.belongs_to(name):
        return BegunBatch(existing_note, True)
    note = BatchNote(name, fetch_ends(), scope, settle_s)
    if existing_note is not None:
        folder.replace(path, note.to_bytes())
        return BegunBatch(note, False)
    if folder.create(path, note.to_bytes()):
        _delete_old_notes(folder)
        return BegunBatch(note, False)
    existing_note = _read_note(folder, path)
    if existing_note is None or not existing_note.belongs_to(name):
        raise OffsetError(
            f"{folder.name}/{path} was written by another process meanwhile",
            remedy="Run one query with this checkpoint at a time",
        )
    return BegunBatch(existing_note, True)


def _read_note(folder: Folder, path: str) -> BatchNote | None:
    content = folder.read_bytes(path)
    if content is None:
        content = folder.read_bytes(_backup_path(path))
    return None if content is None else BatchNote.from_bytes(content, f"{folder.name}/{path}")


def notes_of_batch(folder: Folder, name: BatchName) -> list[BatchNote]:
    """Return the notes of all writes of a batch."""
    notes = [_read_note(folder, path) for path in _note_paths(folder, name.number)]
    return [note for note in notes if note is not None and note.belongs_to(name)]


def _note_paths(folder: Folder, number: int) -> list[str]:
    return sorted(
        path for path in folder.files(f"{NOTES_FOLDER}/{number}") if not path.rpartition("/")[2].startswith(".")
    )


def add_queues(folder: Folder, note: BatchNote, current_ends: QueueEnds, settle_s: float = 0.0) -> BatchNote:
    """Add to the note the queues that it lacks, with their current ends; no task has sent to these queues. The note is durable
    when the function returns.
    """
    extended_note = replace(
        note, ends=note.ends.with_further_queues(current_ends), settle_s=max(note.settle_s, settle_s)
    )
    if extended_note != note:
        path = f"{NOTES_FOLDER}/{note.name.number}/{note.name.write_name}"
        for target in (_backup_path(path), path):
            folder.replace(target, extended_note.to_bytes())
    return extended_note


def _backup_path(path: str) -> str:
    """Return the path of the copy of a note. The copy is written before the note is replaced. On HDFS, pyarrow deletes the old
    note before it moves the new note into its place, so the copy may be the only note if the driver stops in between.
    """
    parent, _, name = path.rpartition("/")
    return f"{parent}/.{name}"


def batch_status(folder: Folder, write_name: str) -> str:
    """Return the state of a query's last batch as a phrase. Raises ``RocketMQError`` if the query could not continue after this
    batch.
    """
    if folder.read_bytes("metadata") is None and not folder.files("offsets"):
        return "the query was not started yet"
    name = batch_name(folder, write_name)
    is_finished = folder.read_bytes(f"commits/{name.number}") is not None
    notes = _note_paths(folder, name.number) if is_finished else notes_of_batch(folder, name)
    state = "finished" if is_finished else "begun"
    return f"batch {name.number} is {state}, {'with' if notes else 'without'} a note"


def epoch(folder: Folder) -> int:
    """Return how often the query was rewound."""
    content = folder.read_bytes(_EPOCH_PATH)
    try:
        return int(content) if content is not None else 0
    except ValueError:
        raise OffsetError(f"{folder.name}/{_EPOCH_PATH} is not a number", remedy="Restore that file") from None


def increment_epoch(folder: Folder) -> None:
    """Increment the epoch, so that rows get other ids, and rows that were sent before the rewind are sent again."""
    if folder.exists(NOTES_FOLDER):
        folder.replace(_EPOCH_PATH, b"%d" % (epoch(folder) + 1))


def _delete_old_notes(folder: Folder) -> None:
    """Remove the notes of batches that Spark's log no longer has. If the log looks empty, all notes are kept, because
    HDFS may fail to list the log."""
    oldest_batch = min(logged_times_ms(folder, "offsets"), default=0)
    for name in folder.folders(NOTES_FOLDER):
        if name.isdecimal() and int(name) < oldest_batch:
            try:
                folder.delete_folder(f"{NOTES_FOLDER}/{name}")
            except OffsetError as e:  # another write of this batch may delete the folder, too; the next batch retries
                logger.info("could not delete old notes: %s", e)
