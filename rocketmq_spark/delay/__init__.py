"""Delays of any length: messages wait in ``dmq_inner_topic`` and come to their own topic when they are due."""

from __future__ import annotations

from rocketmq_spark.delay.stream import DEAD_TOPIC, INNER_TOPIC, delayed

__all__ = ["DEAD_TOPIC", "INNER_TOPIC", "delayed"]
