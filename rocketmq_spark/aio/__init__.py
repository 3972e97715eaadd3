"""Producers and consumers for asyncio: ``from rocketmq_spark import aio``.

Methods and arguments are the same as those of the classes of ``rocketmq_spark``, except that ``Consumer.close(timeout_s)``
replaces ``stop``, ``send`` also replaces ``send_async``, and ``request`` also replaces ``request_async``. The methods
``poll_arrow``, ``add_hook``, ``faults`` and ``spool_metrics`` are missing.

Each class wraps the blocking class of the same name. Blocking calls run on threads. One wake-up of the event loop may deliver the
outcomes of many calls. An object belongs to the event loop in which it was first used.

A call that is cancelled before it begins has no effect. If a send is cancelled after it has begun, its message may be stored. If
a poll is cancelled, the next poll returns its messages.
"""

from rocketmq_spark.aio.consumers import Consumer, PullConsumer, SimpleConsumer
from rocketmq_spark.aio.producer import AsyncHalfMessage, Producer

__all__ = ["AsyncHalfMessage", "Consumer", "Producer", "PullConsumer", "SimpleConsumer"]
