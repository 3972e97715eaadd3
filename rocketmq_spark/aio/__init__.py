"""Producers and consumers for asyncio: ``from rocketmq_spark import aio``.

Methods and arguments are the same as those of the classes for threads, with these exceptions: ``Consumer.close(timeout_s)``
replaces ``stop``; ``send`` and ``request`` also replace ``send_async`` and ``request_async``; ``poll_arrow``, ``add_hook``,
``faults`` and ``spool_metrics`` are missing.

Each class wraps its counterpart for threads: blocking calls run on threads, and their outcomes are passed to the event loop,
many outcomes per wake-up. An object belongs to the event loop in which it was first used.

A call that is cancelled before it begins has no effect. If a send is cancelled later, its message may be stored. The next poll
returns the messages of a cancelled poll.
"""

from rocketmq_spark.aio.consumers import Consumer, PullConsumer, SimpleConsumer
from rocketmq_spark.aio.producer import AsyncHalfMessage, Producer

__all__ = ["AsyncHalfMessage", "Consumer", "Producer", "PullConsumer", "SimpleConsumer"]
