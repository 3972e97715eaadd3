"""``python -m rocketmq_spark`` is the command ``rocketmq-spark``."""

from __future__ import annotations

from rocketmq_spark.cli import main

if __name__ == "__main__":
    main()
