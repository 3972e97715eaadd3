"""What cannot be read any more. Data loss goes through one function, chosen by ``failOnDataLoss``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.pull.verdict import Cause

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
