"""Rewinds a query to the end of an earlier batch by removing what Spark wrote after it.

``plan`` only looks; ``carry_out`` copies the files before it removes them: the entries of both logs behind that batch, and
the versions of state that they made. Batch N leaves version N + 1, and Spark would load a later one when it reaches that
number again. ``drift`` compares the positions of a query with what brokers have now. Pure.
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
from rocketmq_spark.spark.checkpoints.entries import Folder, LoggedBatch, Read, merged


class DriftState(enum.Enum):
    """``lossless`` states are those in which nothing is missing."""

    READ = "read"
    BEHIND = "behind"
    NEW = "new"
    LOST = "lost"
    WENT_BACK = "went back"
    MADE_AGAIN = "made again"
    GONE = "gone"
    AWAY = "unknown"
    UNREGISTERED = "not registered"

    @property
    def lossless(self) -> bool:
        return self in (DriftState.READ, DriftState.BEHIND, DriftState.NEW)

    @property
    def waits(self) -> bool:
        """Whether its broker is waited for, without a known loss."""
        return self in (DriftState.AWAY, DriftState.UNREGISTERED)


class Drift(NamedTuple):
    """One queue: where the reader goes on, what its broker has, and ``offsets``: messages behind, lost, or to read anew."""

    queue: MessageQueue
    position: int | None
    bounds: QueueBounds | None
    state: DriftState
    offsets: int | None = None


def drift(
    positions: Mapping[MessageQueue, int | None],
    bounds: Mapping[MessageQueue, QueueBounds],
    made_again: Collection[MessageQueue] = (),
    away: Collection[str] = (),
    unregistered: Collection[str] = (),
) -> list[Drift]:
    """Every queue of either side. ``made_again`` are queues whose topic was deleted and created since; ``away`` are brokers that
    did not answer, ``unregistered`` those that no name server knows now.
    """
    found = []
    for queue in sorted({*positions, *bounds}):
        position, bound = positions.get(queue), bounds.get(queue)
        if bound is None:
            state = DriftState.AWAY if queue.broker_name in away else DriftState.GONE
            found.append(
                Drift(queue, position, None, DriftState.UNREGISTERED if queue.broker_name in unregistered else state)
            )
        else:
            found.append(Drift(queue, position, bound, *_state(position, bound, queue in made_again)))
    return found


def _state(position: int | None, bound: QueueBounds, made_again: bool) -> tuple[DriftState, int | None]:
    if position is None:
        return DriftState.NEW, bound.max_offset - bound.min_offset
    if made_again:
        return DriftState.MADE_AGAIN, bound.max_offset - bound.min_offset
    if position > bound.max_offset:
        return DriftState.WENT_BACK, position - bound.max_offset
    if position < bound.min_offset:
        return DriftState.LOST, bound.min_offset - position
    return (DriftState.BEHIND, bound.max_offset - position) if position < bound.max_offset else (DriftState.READ, 0)


_LOGS = ("commits", "offsets")
# Of a batch goes first that it was done, then the state that it made, then that it was begun: in between Spark would do it
# again and make its state again. Were both entries gone first, that state would be taken for a new batch's.
_STEPS = ("commits", "made", "offsets")
_STATE = re.compile(r"(state/.*/)\.?(\d+)(?:_[^/]*)?\.(?:delta|snapshot|zip|changelog)(?:\.crc)?")


class RewindPlan(NamedTuple):
    """``batch`` stays and is the last; ``again`` are the batches behind it that go, ``ranges`` what they read and will be read
    again. ``removed`` are files in the order in which they go, ``saved`` those that are copied before.
    """

    batch: LoggedBatch
    again: list[int]
    ranges: list[OffsetRange]
    removed: list[str]
    saved: list[str]


def chosen(history: Sequence[Read], number: int | None, before_ms: int | None) -> LoggedBatch:
    """The batch to go back to: by its number, or the last one that was begun by a time, so that all that was stored after it is
    read again. Raises ``OffsetError`` for one that is not kept, or not done.
    """
    done = {read.batch.number: read.batch for read in history if read.done_ms is not None}
    if not done:
        raise OffsetError(
            "no batch of this query is finished", remedy="There is nothing to go back to: delete the folder"
        )
    kept = f"batches {min(done)} to {max(done)} are kept and done"
    if number is not None:
        if number not in done:
            raise OffsetError(f"there is no batch {number} to go back to: {kept}", remedy="Name one of these")
        return done[number]
    assert before_ms is not None
    early = [batch for batch in done.values() if batch.begun_ms is not None and batch.begun_ms <= before_ms]
    if not early:
        first = next(iter(done.values())).begun_ms
        raise OffsetError(
            f"no batch that is kept was begun by {_text(before_ms)}: {kept}, the first of {_text(first)}",
            remedy="To read from further back, start a query with another checkpointLocation and option 'startingTimestamp'",
        )
    return max(early, key=lambda batch: batch.number)


def plan(folder: Folder, history: Sequence[Read], batch: LoggedBatch) -> RewindPlan:
    """What going back to the end of ``batch`` takes. Raises ``OffsetError`` where its state is not kept any more."""
    files = folder.files(recursive=True)
    again = [read.batch.number for read in history if read.batch.number > batch.number]
    logs = {path: (number, log) for number in again for log in _LOGS for path in _entry(log, number) if path in files}
    states = {path: int(match[2]) for path in files if (match := _STATE.fullmatch(path))}
    _refuse_lost_state(states, batch.number + 1)
    late = {path: (version - 1, "made") for path, version in states.items() if version > batch.number + 1}
    saved = [path for path in files if path.split("/")[0] in (*_LOGS, "metadata")]
    return RewindPlan(batch, again, _ranges(history, batch), _backwards({**logs, **late}), sorted({*saved, *late}))


def _backwards(of_batches: Mapping[str, tuple[int, str]]) -> list[str]:
    """Files by the number of their batch, the newest first, and of each batch in the order of ``_STEPS``."""
    return sorted(of_batches, key=lambda path: (-of_batches[path][0], _STEPS.index(of_batches[path][1]), path))


def carry_out(folder: Folder, planned: RewindPlan, at: datetime) -> Folder:
    """Do it; gives the backup, a folder beside this one. The newest entry goes first: whatever stops this on the way, the
    folder is one that Spark can go on from.
    """
    # Before anything is removed: it needs numpy, which may be missing.
    from rocketmq_spark.spark.checkpoints import notes

    notes.epoch(folder)  # one that is damaged could not be raised afterwards
    name = folder.name.rstrip("/").rpartition("/")[2]
    backup = folder.copy(planned.saved, f"{name}.before-rewind-{at:%Y%m%dT%H%M%SZ}")
    folder.delete(planned.removed)
    notes.raise_epoch(folder)  # at last: a batch that is still there would be sent again, unfinished as it is
    return backup


def changed_ms(folder: Folder) -> int | None:
    """When anything in it was changed last; None where its file system does not say."""
    times = folder.files(recursive=True).values()
    return max(times, default=0) or None


def _entry(log: str, number: int) -> tuple[str, str]:
    return f"{log}/{number}", f"{log}/.{number}.crc"


def _ranges(history: Sequence[Read], batch: LoggedBatch) -> list[OffsetRange]:
    """From the end of ``batch`` to the end of the last one, where they are the same queues of the same topics."""
    start, ends = batch.positions, history[-1].batch.positions
    added = merged(
        offsets.start for read in history if read.batch.number > batch.number for offsets in read.batch.sources.values()
    )
    begins = {**added, **start}
    return [OffsetRange(q, begins[q], ends[q]) for q in sorted(ends) if q in begins and begins[q] < ends[q]]


def _refuse_lost_state(states: Mapping[str, int], version: int) -> None:
    """Every store must still have the version that the next batch begins with."""
    kept: dict[str, set[int]] = {}
    for path, number in states.items():
        kept.setdefault(path.rpartition("/")[0], set()).add(number)
    lacking = sorted(store for store, numbers in kept.items() if version not in numbers)
    if lacking:
        raise OffsetError(
            f"the query keeps state, and version {version} of it is gone in {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            remedy="Rewind to a later batch, or start the query with another checkpointLocation",
        )


def _text(epoch_ms: int | None) -> str:
    if epoch_ms is None:
        return "an unknown time"
    return utc_text(epoch_ms, "seconds")
