"""Delays of any length: messages wait as envelopes in ``dmq_inner_topic``, and are sent to their own topic when they are due.

``delayed`` sends delayed messages in a Spark stream. The command ``rocketmq-spark delay serve`` (module ``node``) sends delayed
messages without Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocketmq_spark.delay.release import DEAD_TOPIC
from rocketmq_spark.wire.envelope import INNER_TOPIC

if TYPE_CHECKING:
    from rocketmq_spark.delay.stream import delayed

__all__ = ["DEAD_TOPIC", "INNER_TOPIC", "delayed"]


def __getattr__(name: str) -> Any:
    if name != "delayed":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rocketmq_spark.delay.stream import delayed  # imported late, because the service works without Spark

    return delayed
