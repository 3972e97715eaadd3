"""Lets Spark find ``format("rocketmq")`` by itself: it imports every top-level ``pyspark_*`` package.

One package that fails to import breaks that search for all of them, so nothing but the standard library and pyspark is
imported here, and everything else when the source is made.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """Stands in for ``RocketMQDataSource`` until Spark makes one."""

    def __new__(cls, options: dict[str, str]) -> Any:
        from rocketmq_spark.spark.datasource import RocketMQDataSource

        return RocketMQDataSource(options)

    @classmethod
    def name(cls) -> str:
        return "rocketmq"
