"""Says why a stream looks idle: one line when queues leave its view, one when they come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.source.positions import Bounds, listed

logger = logging.getLogger(__name__)


class Absence:
    """Queues with a position that cannot be read at the moment."""

    def __init__(self) -> None:
        self._gone: set[MessageQueue] = set()

    def look(self, wanted: Iterable[MessageQueue], bounds: Bounds, why: Callable[[MessageQueue], str]) -> None:
        """Tell what changed; ``why`` is asked once about every queue that went."""
        absent = {queue for queue in wanted if queue not in bounds}
        went, back = absent - self._gone, {queue for queue in self._gone - absent if queue in bounds}
        self._gone = absent
        if went:
            logger.warning("the stream waits for queues that it cannot read now: %s", _by_reason(went, why))
        if back:
            logger.warning("the stream reads again from %s", listed(back))


def _by_reason(queues: Iterable[MessageQueue], why: Callable[[MessageQueue], str]) -> str:
    reasons: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        reasons.setdefault(why(queue), []).append(queue)
    return "; ".join(f"{listed(of_reason)} ({reason})" for reason, of_reason in reasons.items())
