"""RocketMQ itself for tests, notebooks and the demo: real servers of a pinned version as children of this process."""

from __future__ import annotations

from rocketmq_spark.localbroker.cluster import LocalBroker

__all__ = ["LocalBroker"]
