"""A real RocketMQ for tests, notebooks and the demo: servers of a pinned version as child processes."""

from __future__ import annotations

from rocketmq_spark.localbroker.cluster import LocalBroker

__all__ = ["LocalBroker"]
