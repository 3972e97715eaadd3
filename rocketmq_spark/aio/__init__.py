"""Producers and consumers for asyncio, with the names and arguments of the others: ``from rocketmq_spark import aio``.

Each stands on its counterpart for threads: what may wait is done by threads, and outcomes are handed to the event loop, many at a
wake-up. An object belongs to the event loop in which it was first used.

What is cancelled before it began has no effect. A send that had begun may be stored. Messages that came for a poll that was
cancelled are returned by the next one.
"""

from rocketmq_spark.aio.consumers import Consumer, PullConsumer, SimpleConsumer
from rocketmq_spark.aio.producer import AsyncHalfMessage, Producer

__all__ = ["AsyncHalfMessage", "Consumer", "Producer", "PullConsumer", "SimpleConsumer"]
