"""What becomes of producers that are still open when the program ends: they send what waits, and say what is lost."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping
from typing import Protocol

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.producer.settings import ProducerSettings


class Open(Protocol):
    """A producer as it is seen here."""

    settings: ProducerSettings

    def at_exit(self) -> Mapping[str, RocketMQError]:
        """Send what waits for company. What fails from now on, by message id; nothing for one that was closed."""


# What they hold keeps them alive.
_open: weakref.WeakSet[Open] = weakref.WeakSet()


def watch(producer: Open) -> None:
    """From now on until it is gone."""
    _open.add(producer)


@atexit.register
def _leave() -> None:
    for producer in list(_open):
        lost = producer.at_exit()
        if lost:
            shown, cause = ", ".join(list(lost)[:10]), next(iter(lost.values()))
            sys.stderr.write(
                f"rocketmq-spark: the producer of group {producer.settings.group!r} was not closed, and {len(lost)} "
                f"messages are not acknowledged: {shown}{', …' if len(lost) > 10 else ''}. {cause}\n"
            )
