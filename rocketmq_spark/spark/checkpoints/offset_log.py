"""Reads from the checkpoint of a query what the rocketmq sources of the query have read.

``offsets/N`` has the positions at which batch N ends. Its lines are a version, settings, and a line for each source of the query.
In version 1 the line of a source is its offset, and Spark identifies the source by its index in the query. In version 2
(``spark.sql.streaming.offsetLog.formatVersion``, and all queries with ``enableSourceEvolution``) the name of the source precedes
the offset, as in ``orders:{"topics":…}``, and sources may be added, removed and reordered. Spark writes ``commits/N`` when the
batch is done, and keeps the last hundred batches (``spark.sql.streaming.minBatchesToRetain``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.checkpoints.files import RESTORE_FILE, Folder
from rocketmq_spark.spark.source import checkpoint_identity
from rocketmq_spark.spark.source.offsets import Offsets, Positions

_VERSIONS = ("v1", "v2")
_HEADER_LINES = 2  # the number of lines before the line of the first source

# Identifies a source of a query: its index, or its name in a log of version 2.
SourceId = int | str


class LoggedBatch(NamedTuple):
    """The positions at which batch ``number`` ends, by source. Sources of other formats are omitted. ``planned_ms`` is when Spark
    planned the batch; None if the entry does not have this time.
    """

    number: int
    sources: dict[SourceId, Offsets]
    planned_ms: int | None = None

    @property
    def positions(self) -> dict[MessageQueue, int]:
        """The position of each queue that any source reads. If two sources read a queue, the lower position counts."""
        return lowest_positions(offsets.positions for offsets in self.sources.values())

    @property
    def source_identities(self) -> list[Mapping[str, object]]:
        """The identity of each source (``checkpoint_identity``)."""
        return [offsets.source_identity for offsets in self.sources.values()]

    def batch_of_clusters(self, clusters: Collection[str]) -> tuple[LoggedBatch, list[str]]:
        """Return the batch without the sources of other clusters, and the names of the other clusters. Queues of another cluster
        may have the same names.

        If no source would remain, the batch is returned unchanged, because ``clusters`` may lack a cluster whose brokers are
        unavailable.
        """
        other_clusters = {
            source: checkpoint_identity.other_clusters(offsets.source_identity, sorted(clusters))
            for source, offsets in self.sources.items()
        }
        own_sources = {source: offsets for source, offsets in self.sources.items() if not other_clusters[source]}
        if not own_sources:
            return self, []
        return self._replace(sources=own_sources), sorted({name for names in other_clusters.values() for name in names})


class BatchRead(NamedTuple):
    """A batch with the ranges that it read.

    ``queues_without_start`` has the queues whose start is unknown, because Spark has removed the batch that ended there.
    ``done_ms`` is when the batch was finished; None if it is not finished.
    """

    batch: LoggedBatch
    ranges: list[OffsetRange]
    queues_without_start: list[MessageQueue]
    done_ms: int | None

    @property
    def size(self) -> int | None:
        """Number of offsets that the batch read; None if the range of a queue is unknown."""
        return None if self.queues_without_start else sum(range_.size for range_ in self.ranges)


def lowest_positions(all_positions: Iterable[Positions]) -> dict[MessageQueue, int]:
    """Return the lowest position of each queue in ``all_positions``."""
    position_by_queue: dict[MessageQueue, int] = {}
    for positions in all_positions:
        for queue, position in positions.items():
            position_by_queue[queue] = min(position, position_by_queue.get(queue, position))
    return position_by_queue


def logged_times_ms(folder: Folder, log: str) -> dict[int, int]:
    """Return the batch numbers in ``log``, each with the time when its entry was written (epoch ms)."""
    entries = {path.rpartition("/")[2]: time_ms for path, time_ms in folder.files(log).items()}
    return {int(name): time_ms for name, time_ms in sorted(entries.items()) if name.isdecimal()}


def last_batch(folder: Folder, committed: bool = True) -> LoggedBatch | None:
    """Return the last finished batch, or with ``committed=False`` the last planned batch; None if there is no such batch yet.

    Raises ``OffsetError`` if the folder is not a checkpoint.
    """
    batch_numbers = planned_batches(folder)
    if committed:
        batch_numbers &= logged_times_ms(folder, "commits").keys()
    return read_batch(folder, max(batch_numbers)) if batch_numbers else None


def planned_batches(folder: Folder) -> set[int]:
    """Return the numbers of the batches in the offset log. Raises ``OffsetError`` if the folder is not a checkpoint."""
    if not folder.exists("offsets"):
        raise OffsetError(
            f"{folder.name} is not a checkpoint: it has no folder 'offsets'", remedy="Name a checkpointLocation"
        )
    return set(logged_times_ms(folder, "offsets"))


def uncommitted_batch(folder: Folder) -> BatchRead | None:
    """Return the planned but unfinished batch with its ranges; None if all batches are finished. An unfinished batch is running,
    or is repeated when the query starts again.
    """
    batch_numbers = planned_batches(folder)
    number = max(batch_numbers, default=None)
    if number is None or number in logged_times_ms(folder, "commits"):
        return None
    batch = read_batch(folder, number)
    # With asynchronous progress tracking, the previous batch may be missing in the log. If so, Spark repeats all batches since
    # the last logged batch.
    previous_number = max((n for n in batch_numbers if n < number), default=None)
    previous_batch = None if previous_number is None else read_batch(folder, previous_number)
    return BatchRead(batch, *_ranges_after(previous_batch, batch), None)


def read_batch(folder: Folder, number: int) -> LoggedBatch:
    """Return one entry of the offset log. Raises ``OffsetError`` if the entry cannot be read."""
    path = f"offsets/{number}"
    lines = folder.read(path).splitlines()
    version = lines[0] if lines else ""
    if version in ("", *_VERSIONS) and len(lines) <= _HEADER_LINES:
        raise _damaged_entry(folder, path)
    if version not in _VERSIONS:
        raise OffsetError(
            f"{folder.name}/{path} does not begin with the version of Spark's offset log, v1 or v2",
            remedy="If a newer Spark wrote it, upgrade rocketmq-spark",
        )
    try:
        source_lines = map(_split_name, lines[_HEADER_LINES:]) if version == "v2" else enumerate(lines[_HEADER_LINES:])
        offsets_by_source = {source: _rocketmq_offsets(text) for source, text in source_lines}
    except (ValueError, RecursionError):  # JSON that is nested too deep raises RecursionError
        raise _damaged_entry(folder, path) from None
    sources: dict[SourceId, Offsets] = {
        source: offsets for source, offsets in offsets_by_source.items() if offsets is not None
    }
    return LoggedBatch(number, sources, _planned_ms(lines[1:2]))


def _split_name(line: str) -> tuple[SourceId, str]:
    """Return the name of a source and the text of its offset. Raises ``ValueError`` for a truncated line."""
    name, colon, offset = line.partition(":")
    if not colon:
        raise ValueError(line)
    return name, offset


def _damaged_entry(folder: Folder, path: str) -> OffsetError:
    """Return the error for an incomplete entry. Spark writes entries atomically, with a line for each source."""
    return OffsetError(
        f"{folder.name}/{path} is damaged: it is incomplete, perhaps because its writer was killed",
        remedy=RESTORE_FILE,
    )


def history(folder: Folder) -> list[BatchRead]:
    """Return all batches that the checkpoint still has, oldest first, with the ranges that each of them read."""
    committed_ms = logged_times_ms(folder, "commits")
    batches = list(_existing_batches(folder))
    batch_reads = []
    previous_batch: LoggedBatch | None = None
    for batch in batches:
        is_next = previous_batch is not None and previous_batch.number == batch.number - 1
        ranges, queues_without_start = _ranges_after(previous_batch if is_next else None, batch)
        batch_reads.append(BatchRead(batch, ranges, queues_without_start, committed_ms.get(batch.number)))
        previous_batch = batch
    return batch_reads


def _existing_batches(folder: Folder) -> Iterator[LoggedBatch]:
    """Yield all batches. Batches that Spark removes meanwhile are skipped."""
    for number in sorted(planned_batches(folder)):
        try:
            yield read_batch(folder, number)
        except OffsetError as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise


def _ranges_after(
    previous_batch: LoggedBatch | None, batch: LoggedBatch
) -> tuple[list[OffsetRange], list[MessageQueue]]:
    starts: dict[SourceId, Positions] = {}
    for source, offsets in batch.sources.items():
        previous_offsets = None if previous_batch is None else previous_batch.sources.get(source)
        if previous_offsets == offsets:
            # The batch has no new messages, and its entry repeats the starts of an earlier batch.
            starts[source] = offsets.positions
        else:
            starts[source] = {
                **(previous_offsets.positions if previous_offsets is not None else {}),
                **offsets.new_queue_starts,
            }
    return batch_ranges(starts, batch)


def batch_ranges(
    starts: Mapping[SourceId, Positions], end_batch: LoggedBatch
) -> tuple[list[OffsetRange], list[MessageQueue]]:
    """Return the ranges that the sources of a batch read from ``starts`` to the batch's end, and the queues without a start.

    Omits empty ranges. If two sources have the same range, it is returned once, because Spark logs the one source of a self-join
    twice.
    """
    ranges: dict[OffsetRange, None] = {}
    queues_without_start: dict[MessageQueue, None] = {}
    for source, offsets in end_batch.sources.items():
        source_starts = starts.get(source, {})
        for queue, end_offset in sorted(offsets.positions.items()):
            if queue not in source_starts:
                queues_without_start[queue] = None
            elif source_starts[queue] < end_offset:
                ranges[OffsetRange(queue, source_starts[queue], end_offset)] = None
    return list(ranges), list(queues_without_start)


def _planned_ms(lines: list[str]) -> int | None:
    try:
        return int(json.loads(lines[0])["batchTimestampMs"])
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _rocketmq_offsets(line: str) -> Offsets | None:
    """Return the offsets in a line; None for a source of another format. Raises ``ValueError`` for truncated JSON."""
    try:
        value = json.loads(line)
    except ValueError:
        if line.startswith("{"):
            raise
        return None  # Spark writes "-" for a source without an offset
    if not isinstance(value, dict) or "topics" not in value or "v" not in value:
        return None
    return Offsets.from_json(value)
