"""Rewinds a query to the end of an earlier batch by removing what Spark wrote after it.

``plan_rewind`` changes nothing. ``execute`` removes the entries of later batches in both logs, and the versions of state that
these batches wrote. Before the removal, ``execute`` copies these files to a backup. Batch N writes version N + 1 of the state. If
the version of a removed batch remained, Spark would load this old version when the query has a new batch with the same number.
``drift`` compares the positions of a query with what brokers have now.
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
        """Whether the queue still has all messages that the query has not read."""
        return self in (DriftState.READ, DriftState.BEHIND, DriftState.NEW)

    @property
    def is_unavailable(self) -> bool:
        """Whether the broker is unavailable, so that it is unknown whether messages were lost."""
        return self in (DriftState.UNAVAILABLE, DriftState.UNREGISTERED)


class Drift(NamedTuple):
    """The position of the query in a queue, the bounds of the queue, and how the two relate. Depending on ``state``, ``offsets``
    is the number of unread offsets, of lost offsets, or of offsets that will be read again.
    """

    queue: MessageQueue
    position: int | None
    bounds: QueueBounds | None
    state: DriftState
    offsets: int | None = None


def drift(
    positions: Mapping[MessageQueue, int | None],
    bounds: Mapping[MessageQueue, QueueBounds],
    recreated_queues: Collection[MessageQueue] = (),
    unavailable_brokers: Collection[str] = (),
    unregistered_brokers: Collection[str] = (),
) -> list[Drift]:
    """Compare position and bounds of every queue that the query or a broker has. ``recreated_queues`` are queues whose topic was
    deleted and created again. ``unavailable_brokers`` are brokers that did not answer. ``unregistered_brokers`` are brokers that
    are registered at no name server now.
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
                Drift(queue, position, queue_bounds, *_drift_state(position, queue_bounds, queue in recreated_queues))
            )
    return drifts


def _drift_state(position: int | None, queue_bounds: QueueBounds, is_recreated: bool) -> tuple[DriftState, int | None]:
    if position is None:
        return DriftState.NEW, queue_bounds.max_offset - queue_bounds.min_offset
    if is_recreated:
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
# The order in which the files of a batch are removed: its commit, its state, its offsets. If the removal stops halfway, the
# offsets still exist, so Spark repeats the same batch and writes its state again. If the offsets were removed first, Spark could
# plan another batch with this number, and use the old state for it.
_REMOVAL_ORDER = ("commits", "made", "offsets")
_LOG_FILE = re.compile(rf"(?:{'|'.join(_LOG_FOLDERS)})/\.?\d+(?:\.crc)?|metadata")
_STATE_FILE = re.compile(r"(state/.*/)\.?(\d+)(?:_[^/]*)?\.(?:delta|snapshot|zip|changelog)(?:\.crc)?")


class RewindPlan(NamedTuple):
    """``batch`` will be the last batch. The batches ``later_batches`` are removed, and their ``ranges`` will be read again.
    First, ``files_to_copy`` are copied to the backup. After the copy, ``files_to_remove`` are removed in their order.
    """

    batch: LoggedBatch
    later_batches: list[int]
    ranges: list[OffsetRange]
    files_to_remove: list[str]
    files_to_copy: list[str]


def choose_batch(history: Sequence[BatchRead], number: int | None, before_ms: int | None) -> LoggedBatch:
    """Return the batch to rewind to: the batch ``number``, or the last batch that began by ``before_ms``, so that all messages
    stored after that time are read again. Raises ``OffsetError`` if the batch is not in the checkpoint or not finished.
    """
    finished_batches = {
        batch_read.batch.number: batch_read.batch for batch_read in history if batch_read.done_ms is not None
    }
    if not finished_batches:
        raise OffsetError(
            "no batch of this query is finished", remedy="There is nothing to go back to: delete the folder"
        )
    finished_text = f"batches {min(finished_batches)} to {max(finished_batches)} are kept and done"
    if number is not None:
        if number not in finished_batches:
            raise OffsetError(f"there is no batch {number} to go back to: {finished_text}", remedy="Name one of these")
        return finished_batches[number]
    assert before_ms is not None
    candidates = [
        batch for batch in finished_batches.values() if batch.planned_ms is not None and batch.planned_ms <= before_ms
    ]
    if not candidates:
        first_planned_ms = next(iter(finished_batches.values())).planned_ms
        raise OffsetError(
            f"no batch in the checkpoint began at or before {_time_text(before_ms)}: {finished_text}, the first of them began at "
            f"{_time_text(first_planned_ms)}",
            remedy="To read from further back, start a query with another checkpointLocation and option 'startingTimestamp'",
        )
    return max(candidates, key=lambda batch: batch.number)


def plan_rewind(folder: Folder, history: Sequence[BatchRead], batch: LoggedBatch) -> RewindPlan:
    """Return the plan of a rewind to the end of ``batch``. Raises ``OffsetError`` if Spark has removed the state that the query
    had at the end of ``batch``.
    """
    files = folder.files(recursive=True)
    later_batches = [read.batch.number for read in history if read.batch.number > batch.number]
    log_entries = {
        path: (number, log)
        for number in later_batches
        for log in _LOG_FOLDERS
        for path in _entry_files(log, number)
        if path in files
    }
    state_versions = {path: int(match[2]) for path in files if (match := _STATE_FILE.fullmatch(path))}
    _check_state_versions(state_versions, batch.number + 1)
    later_states = {
        path: (version - 1, "made") for path, version in state_versions.items() if version > batch.number + 1
    }
    files_to_copy = [path for path in files if _LOG_FILE.fullmatch(path)]
    return RewindPlan(
        batch,
        later_batches,
        _ranges_to_repeat(history, batch),
        _in_removal_order({**log_entries, **later_states}),
        sorted({*files_to_copy, *later_states}),
    )


def _in_removal_order(batch_and_kind_by_path: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return the files sorted by batch, newest first, and within a batch in the order of ``_REMOVAL_ORDER``."""
    return sorted(
        batch_and_kind_by_path,
        key=lambda path: (
            -batch_and_kind_by_path[path][0],
            _REMOVAL_ORDER.index(batch_and_kind_by_path[path][1]),
            path,
        ),
    )


def execute(folder: Folder, plan: RewindPlan, rewind_time: datetime) -> Folder:
    """Rewind the query, and return the backup, a folder beside this folder. The newest entry is removed first, so that Spark can
    still continue from the folder if the process stops halfway.
    """
    # This import comes before anything is removed, because the module needs numpy, which may be missing.
    from rocketmq_spark.spark.checkpoints import batch_notes

    with folder.as_owner():
        batch_notes.epoch(folder)  # raises if the epoch is damaged, before anything is removed
    name = folder.name.rstrip("/").rpartition("/")[2]
    backup = folder.copy(plan.files_to_copy, f"{name}.before-rewind-{rewind_time:%Y%m%dT%H%M%SZ}")
    with folder.as_owner():
        folder.delete(plan.files_to_remove)
        batch_notes.increment_epoch(
            folder
        )  # incremented last, because an unfinished batch that is still in the log must keep its ids
    return backup


def changed_ms(folder: Folder) -> int | None:
    """Return when a file in the folder was last changed; None if the file system does not report times."""
    times = folder.files(recursive=True).values()
    return max(times, default=0) or None


def _entry_files(log: str, number: int) -> tuple[str, str]:
    return f"{log}/{number}", f"{log}/.{number}.crc"


def _ranges_to_repeat(history: Sequence[BatchRead], batch: LoggedBatch) -> list[OffsetRange]:
    """Return the ranges from the end of ``batch`` to the end of the last batch. For a queue that was added after ``batch``, the
    range begins where the query first read the queue.
    """
    later_batches = [batch_read.batch for batch_read in history if batch_read.batch.number > batch.number]
    starts: dict[SourceId, Positions] = {}
    for source in history[-1].batch.sources:
        added_starts = lowest_positions(
            later_batch.sources[source].new_queue_starts
            for later_batch in later_batches
            if source in later_batch.sources
        )
        starts[source] = {**added_starts, **(batch.sources[source].positions if source in batch.sources else {})}
    return sorted(batch_ranges(starts, history[-1].batch)[0])


def _check_state_versions(state_versions: Mapping[str, int], version: int) -> None:
    """Raise if a state store has lost the version that the next batch loads."""
    versions: dict[str, set[int]] = {}
    for path, number in state_versions.items():
        versions.setdefault(path.rpartition("/")[0], set()).add(number)
    incomplete_stores = sorted(store for store, numbers in versions.items() if version not in numbers)
    if incomplete_stores:
        raise OffsetError(
            f"the query keeps state, and version {version} of it is gone in {incomplete_stores[0]}"
            + (f" and {len(incomplete_stores) - 1} more" if len(incomplete_stores) > 1 else ""),
            remedy="Rewind to a later batch, or start the query with another checkpointLocation",
        )


def _time_text(epoch_ms: int | None) -> str:
    if epoch_ms is None:
        return "an unknown time"
    return utc_text(epoch_ms, "seconds")
