"""What cannot be read any more. Data loss goes through one function, chosen by ``failOnDataLoss``.

A topic may have been deleted and made again under its name: its offsets start at 0 again. As long as they lie below the
old position the broker's maximum tells; once the new data has grown past it nothing does, except time: every message of
the new topic is younger than all of the old one. Offsets carry the newest store time seen as a mark; the first message
younger than the mark must not lie before the position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.pull.verdict import Cause
from rocketmq_spark.source.offsets import Bounds, Offsets, Positions

logger = logging.getLogger(__name__)

_REMEDY = "Set option 'failOnDataLoss' to 'warn' or 'ignore' to go on without these offsets"


def settled(policy: str, ranges: list[OffsetRange], lost: Sequence[tuple[OffsetRange, Cause]]) -> list[OffsetRange]:
    """What is left of a plan after its losses were reported: the one step of batches and streams."""
    report(policy, lost)
    return ranges


def report(policy: str, lost: Sequence[tuple[OffsetRange, Cause]]) -> None:
    """Fail, warn or note that offsets cannot be read. One call is one line, or one error."""
    if not lost:
        return
    count = sum(max(0, part.size) for part, _ in lost)
    shown = "; ".join(f"{part.queue} offsets {part.start} to {part.end} ({cause.value})" for part, cause in lost[:10])
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    text = f"{count} offsets cannot be read any more: {shown}{more}"
    if policy == "fail":
        first = lost[0][0].queue
        raise DataLossError(text, topic=first.topic, queue=str(first), remedy=_REMEDY)
    logger.log(logging.WARNING if policy == "warn" else logging.INFO, "%s; failOnDataLoss=%s", text, policy)


def suspects(offsets: Offsets, bounds: Bounds, queues: set[MessageQueue] | None = None) -> dict[MessageQueue, int]:
    """Queues whose mark can be checked, with the mark."""
    return {
        queue: mark
        for queue, mark in offsets.marks.items()
        if (queues is None or queue in queues)
        and queue in bounds
        and bounds[queue].min_offset < offsets.positions.get(queue, 0) <= bounds[queue].max_offset
    }


def recreated(
    offsets: OffsetReader, group: str, positions: Positions, suspected: Positions, deadline: Deadline
) -> list[MessageQueue]:
    """Those of ``suspected`` (queue to mark) that were made again since."""
    if not suspected:
        return []
    times = {queue: mark + 1 for queue, mark in suspected.items()}
    younger = offsets.search_offsets(times, deadline)
    made_again = []
    for queue in sorted(suspected):
        if younger[queue] >= positions[queue]:
            continue
        # Clocks of masters differ, so the message before the position has the last word.
        stored_ms = offsets.store_time_ms(group, queue, positions[queue] - 1, deadline)
        if stored_ms is not None and stored_ms > suspected[queue]:
            made_again.append(queue)
    return made_again
