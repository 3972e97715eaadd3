"""Rewinds a query to the end of an earlier batch by removing what Spark wrote after it.

``plan_rewind`` changes nothing; ``execute`` copies files to a backup before it removes them: the entries of later batches in both
logs, and the versions of state that these batches wrote. Batch N writes version N + 1; if a later version remained, Spark would
load it when the query reaches that number again. ``drift`` compares the positions of a query with what brokers have now.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from rocketmq_spark.base.clock import utc_text
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.spark.checkpoints.files import Folder
from rocketmq_spark.spark.checkpoints.offset_log import BatchRead, LoggedBatch, SourceId, batch_ranges, lowest_positions
from rocketmq_spark.spark.source.offsets import Positions


class DriftState(enum.Enum):
    """How the position of a query in a queue relates to the bounds of the queue."""

    READ = "read"
    BEHIND = "behind"
    NEW = "new"
    LOST = "lost"
    WENT_BACK = "went back"
    RECREATED = "made again"
    REMOVED = "gone"
    UNAVAILABLE = "unknown"
    UNREGISTERED = "not registered"

    @property
    def is_lossless(self) -> bool:
        """Whether all unread messages are there."""
        return self in (DriftState.READ, DriftState.BEHIND, DriftState.NEW)

    @property
    def is_unavailable(self) -> bool:
        """Whether the broker is unavailable, so that it is unknown whether messages were lost."""
        return self in (DriftState.UNAVAILABLE, DriftState.UNREGISTERED)


class Drift(NamedTuple):
    """The position of the query in a queue, the bounds of the queue, and how many ``offsets`` are unread, lost, or read again."""

    queue: MessageQueue
    position: int | None
    bounds: QueueBounds | None
    state: DriftState
    offsets: int | None = None


def drift(
    positions: Mapping[MessageQueue, int | None],
    bounds: Mapping[MessageQueue, QueueBounds],
    recreated: Collection[MessageQueue] = (),
    unavailable_brokers: Collection[str] = (),
    unregistered_brokers: Collection[str] = (),
) -> list[Drift]:
    """Compare every queue that the query or a broker has. ``recreated``: queues whose topic was deleted and created again;
    ``unavailable_brokers``: brokers that did not answer; ``unregistered_brokers``: brokers that no name server has
    registered now.
    """
    drifts = []
    for queue in sorted({*positions, *bounds}):
        position, queue_bounds = positions.get(queue), bounds.get(queue)
        if queue_bounds is None:
            state = DriftState.UNAVAILABLE if queue.broker_name in unavailable_brokers else DriftState.REMOVED
            drifts.append(
                Drift(
                    queue,
                    position,
                    None,
                    DriftState.UNREGISTERED if queue.broker_name in unregistered_brokers else state,
                )
            )
        else:
            drifts.append(
                Drift(queue, position, queue_bounds, *_drift_state(position, queue_bounds, queue in recreated))
            )
    return drifts


def _drift_state(position: int | None, queue_bounds: QueueBounds, recreated: bool) -> tuple[DriftState, int | None]:
    if position is None:
        return DriftState.NEW, queue_bounds.max_offset - queue_bounds.min_offset
    if recreated:
        return DriftState.RECREATED, queue_bounds.max_offset - queue_bounds.min_offset
    if position > queue_bounds.max_offset:
        return DriftState.WENT_BACK, position - queue_bounds.max_offset
    if position < queue_bounds.min_offset:
        return DriftState.LOST, queue_bounds.min_offset - position
    return (
        (DriftState.BEHIND, queue_bounds.max_offset - position)
        if position < queue_bounds.max_offset
        else (DriftState.READ, 0)
    )


_LOG_FOLDERS = ("commits", "offsets")
# Order of removal within a batch: its commit, its state, its offsets. If the removal stops between them, Spark repeats the batch
# and writes its state again. If both log entries were removed first, Spark could use the old state for a new batch.
_REMOVAL_ORDER = ("commits", "made", "offsets")
_LOG_FILE = re.compile(rf"(?:{'|'.join(_LOG_FOLDERS)})/\.?\d+(?:\.crc)?|metadata")
_STATE_FILE = re.compile(r"(state/.*/)\.?(\d+)(?:_[^/]*)?\.(?:delta|snapshot|zip|changelog)(?:\.crc)?")


class RewindPlan(NamedTuple):
    """``batch`` will be the last one; ``rolled_back`` are the later batches, which are removed, and ``ranges`` what
    these read, which will be read again. ``removed``: files in the order of removal; ``saved``: files that are copied before.
    """

    batch: LoggedBatch
    rolled_back: list[int]
    ranges: list[OffsetRange]
    removed: list[str]
    saved: list[str]


def choose_batch(history: Sequence[BatchRead], number: int | None, before_ms: int | None) -> LoggedBatch:
    """Return the batch to rewind to: by number, or the last one that began by ``before_ms``, so that all messages stored after
    that time are read again. Raises ``OffsetError`` if the batch is not in the checkpoint or not finished.
    """
    finished = {read.batch.number: read.batch for read in history if read.done_ms is not None}
    if not finished:
        raise OffsetError(
            "no batch of this query is finished", remedy="There is nothing to go back to: delete the folder"
        )
    finished_text = f"batches {min(finished)} to {max(finished)} are kept and done"
    if number is not None:
        if number not in finished:
            raise OffsetError(f"there is no batch {number} to go back to: {finished_text}", remedy="Name one of these")
        return finished[number]
    assert before_ms is not None
    candidates = [
        batch for batch in finished.values() if batch.planned_ms is not None and batch.planned_ms <= before_ms
    ]
    if not candidates:
        first = next(iter(finished.values())).planned_ms
        raise OffsetError(
            f"no batch in the checkpoint began at or before {_time_text(before_ms)}: {finished_text}, the first of them began at "
            f"{_time_text(first)}",
            remedy="To read from further back, start a query with another checkpointLocation and option 'startingTimestamp'",
        )
    return max(candidates, key=lambda batch: batch.number)


def plan_rewind(folder: Folder, history: Sequence[BatchRead], batch: LoggedBatch) -> RewindPlan:
    """Return what to remove to rewind to the end of ``batch``. Raises ``OffsetError`` if the state after it was removed."""
    files = folder.files(recursive=True)
    rolled_back = [read.batch.number for read in history if read.batch.number > batch.number]
    logs = {
        path: (number, log)
        for number in rolled_back
        for log in _LOG_FOLDERS
        for path in _entry_files(log, number)
        if path in files
    }
    states = {path: int(match[2]) for path in files if (match := _STATE_FILE.fullmatch(path))}
    _check_state_versions(states, batch.number + 1)
    late_states = {path: (version - 1, "made") for path, version in states.items() if version > batch.number + 1}
    saved = [path for path in files if _LOG_FILE.fullmatch(path)]
    return RewindPlan(
        batch,
        rolled_back,
        _ranges_to_repeat(history, batch),
        _in_removal_order({**logs, **late_states}),
        sorted({*saved, *late_states}),
    )


def _in_removal_order(of_batches: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return the files sorted by batch, newest first, and within a batch in the order of ``_REMOVAL_ORDER``."""
    return sorted(of_batches, key=lambda path: (-of_batches[path][0], _REMOVAL_ORDER.index(of_batches[path][1]), path))


def execute(folder: Folder, planned: RewindPlan, at: datetime) -> Folder:
    """Rewind, and return the backup, a folder beside this one. The newest entry is removed first: if the process stops halfway,
    Spark can still continue from the folder.
    """
    # Imported before anything is removed, because it needs numpy, which may be missing.
    from rocketmq_spark.spark.checkpoints import batch_notes

    with folder.as_owner():
        batch_notes.epoch(folder)  # raises if the epoch is damaged, before anything is removed
    name = folder.name.rstrip("/").rpartition("/")[2]
    backup = folder.copy(planned.saved, f"{name}.before-rewind-{at:%Y%m%dT%H%M%SZ}")
    with folder.as_owner():
        folder.delete(planned.removed)
        batch_notes.increment_epoch(folder)  # last: until then, an unfinished batch in the log must keep its ids
    return backup


def changed_ms(folder: Folder) -> int | None:
    """When anything in the folder was last changed; None if the file system does not report times."""
    times = folder.files(recursive=True).values()
    return max(times, default=0) or None


def _entry_files(log: str, number: int) -> tuple[str, str]:
    return f"{log}/{number}", f"{log}/.{number}.crc"


def _ranges_to_repeat(history: Sequence[BatchRead], batch: LoggedBatch) -> list[OffsetRange]:
    """Return the ranges from the end of ``batch`` to the end of the last batch. Queues that were added later start where they
    were first read.
    """
    later = [read.batch for read in history if read.batch.number > batch.number]
    starts: dict[SourceId, Positions] = {}
    for source in history[-1].batch.sources:
        added = lowest_positions(one.sources[source].new_queue_starts for one in later if source in one.sources)
        starts[source] = {**added, **(batch.sources[source].positions if source in batch.sources else {})}
    return sorted(batch_ranges(starts, history[-1].batch)[0])


def _check_state_versions(states: Mapping[str, int], version: int) -> None:
    """Raise if a state store has lost the version that the next batch loads."""
    versions: dict[str, set[int]] = {}
    for path, number in states.items():
        versions.setdefault(path.rpartition("/")[0], set()).add(number)
    incomplete = sorted(store for store, numbers in versions.items() if version not in numbers)
    if incomplete:
        raise OffsetError(
            f"the query keeps state, and version {version} of it is gone in {incomplete[0]}"
            + (f" and {len(incomplete) - 1} more" if len(incomplete) > 1 else ""),
            remedy="Rewind to a later batch, or start the query with another checkpointLocation",
        )


def _time_text(epoch_ms: int | None) -> str:
    if epoch_ms is None:
        return "an unknown time"
    return utc_text(epoch_ms, "seconds")
