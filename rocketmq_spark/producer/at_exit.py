"""Closes the producers that a program leaves open at its exit. Sends waiting messages, and reports unacknowledged messages."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.producer.settings import ProducerSettings


class OpenProducer(Protocol):
    """The attributes of a producer that are used at exit."""

    settings: ProducerSettings

    def at_exit(self, deadline: Deadline) -> Mapping[str, RocketMQError]:
        """Send waiting batches until ``deadline``. Returns the errors of the sends that fail after the call began, by message id.
        A closed producer returns an empty mapping.
        """


# These sets have weak references, so that a producer can be collected after the program dropped it.
_open_producers: weakref.WeakSet[OpenProducer] = weakref.WeakSet()
_producers_closed_last: weakref.WeakSet[OpenProducer] = weakref.WeakSet()


def register_at_exit(producer: OpenProducer, close_last: bool = False) -> None:
    """Register a producer for the exit. A producer with ``close_last`` sends the traces of other clients. It is closed after
    the other producers, because their last sends still create trace records.
    """
    _open_producers.add(producer)
    if close_last:
        _producers_closed_last.add(producer)


# The maximum time for closing all producers together. A process must end even if the send timeouts of its producers are long.
MAX_EXIT_S = 30.0


@atexit.register
def _close_producers() -> None:
    deadline, producers = Deadline.after(MAX_EXIT_S), sorted(_open_producers, key=_producers_closed_last.__contains__)
    for remaining_count, producer in zip(range(len(producers), 0, -1), producers, strict=True):
        # Each producer gets a share of the time.
        failures = producer.at_exit(deadline.within(deadline.remaining() / remaining_count))
        if failures:
            ids_text, cause = ", ".join(list(failures)[:10]), next(iter(failures.values()))
            sys.stderr.write(
                f"rocketmq-spark: the producer of group {producer.settings.group!r} was not closed, and {len(failures)} "
                f"messages are not acknowledged: {ids_text}{', …' if len(failures) > 10 else ''}. {cause}\n"
            )
