"""Which brokers answer: what is to be done for their queues must not wait for one that does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError, SpoolError
from rocketmq_spark.model import MessageQueue

logger = logging.getLogger(__name__)


class Answering:
    """A broker that did not answer is asked again after ``again_s`` seconds. Not thread-safe."""

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._silent: dict[str, Deadline] = {}

    def each(self, queues: Iterable[MessageQueue], step: Callable[[MessageQueue], None]) -> None:
        """A step for each queue. Those of a broker that does not answer are left for another call.

        Raises what will not pass, and what is wrong with the spool.
        """
        for queue in sorted(queues):
            name = queue.broker_name
            if name in self._silent and not self._silent[name].expired:
                continue
            try:
                step(queue)
                self._silent.pop(name, None)
            except RocketMQError as e:
                if not e.retriable or isinstance(e, SpoolError):
                    raise
                # Once when it begins.
                level = logging.INFO if name in self._silent else logging.WARNING
                logger.log(level, "%s is neither begun nor left while its broker does not answer: %s", queue, e)
                self._silent[name] = Deadline.after(self._again_s)
