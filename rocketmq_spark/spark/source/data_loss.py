"""Reports data loss: raises an error or logs the loss, as option ``failOnDataLoss`` says. The source reports every loss through
this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import Cause

logger = logging.getLogger(__name__)


Loss = tuple[OffsetRange, Cause]


_REMEDY = "Set option 'failOnDataLoss' to 'warn' or 'ignore' to go on without these offsets"


_REMEDY_OF_RESET = f"{_REMEDY}; a stream then reads all present messages of a queue that went back"


def _range_text(lost_range: OffsetRange) -> str:
    """Return the text of a lost range. An empty range stands for an unknown number of offsets from its start on."""
    offsets_text = (
        f"offsets {lost_range.start} to {lost_range.end}"
        if lost_range.size > 0
        else f"from offset {lost_range.start} on"
    )
    return f"{lost_range.queue} {offsets_text}"


def _count_text(lost_ranges: Sequence[OffsetRange]) -> str:
    sizes = [part.size for part in lost_ranges if part.size > 0]
    if not sizes:
        return "an unknown number of"
    return f"{'at least ' if len(sizes) < len(lost_ranges) else ''}{sum(sizes)}"


def unreported_losses(losses: Iterable[Loss], reported_losses: Iterable[Loss]) -> list[Loss]:
    """Return the parts of ``losses`` that are not in ``reported_losses``; both have losses of one start.

    While a batch waits for more messages, each plan finds its losses again, with other ranges. If a topic was created again, the
    lost range of a queue gets smaller while new messages come. If messages expire, the lost range gets larger.
    """
    reported_ranges: dict[tuple[MessageQueue, Cause], list[OffsetRange]] = {}
    for lost_range, cause in reported_losses:
        reported_ranges.setdefault((lost_range.queue, cause), []).append(lost_range)
    new_losses = []
    for lost_range, cause in losses:
        ranges = reported_ranges.get((lost_range.queue, cause), [])
        if not any(part.start <= lost_range.start and lost_range.end <= part.end for part in ranges):
            reported_end = max(
                (part.end for part in ranges if part.start == lost_range.start), default=lost_range.start
            )
            new_losses.append((lost_range._replace(start=reported_end), cause))
    return new_losses


def report_data_loss(policy: str, losses: Sequence[tuple[OffsetRange, Cause]]) -> None:
    """Raise ``DataLossError``, or log one line, depending on ``policy``, which is ``fail``, ``warn`` or ``ignore``."""
    if not losses:
        return
    ranges_text = "; ".join(f"{_range_text(part)} ({cause.value})" for part, cause in losses[:10])
    more_text = f" and {len(losses) - 10} more" if len(losses) > 10 else ""
    text = f"{_count_text([part for part, _ in losses])} offsets cannot be read any more: {ranges_text}{more_text}"
    if policy == "fail":
        first_queue = losses[0][0].queue
        remedy = _REMEDY_OF_RESET if any(cause is Cause.WENT_BACK for _, cause in losses) else _REMEDY
        raise DataLossError(text, topic=first_queue.topic, queue=str(first_queue), remedy=remedy)
    logger.log(logging.WARNING if policy == "warn" else logging.INFO, "%s; failOnDataLoss=%s", text, policy)
