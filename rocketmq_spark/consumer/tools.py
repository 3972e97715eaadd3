"""The tools with which a consumer is built, and the times of a running consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.base.threads import KeyedExecutor, Timer
from rocketmq_spark.consumer.listener import Replier
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.prefetch import BacklogReader
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.consumer.tracing import ListenerTraces

TIMEOUT_S = 3.0  # the timeout of requests
STATS_INTERVAL_S = 60.0  # the interval at which the log gets the figures
CLOSE_TIMEOUT_S = 1.0  # how long ``stop`` waits for pulls and timers, before the last commit


@dataclass(frozen=True, slots=True)
class ConsumerTools:
    """The tools with which a consumer is built. Sessions and tests pass different tools."""

    make_timer: Callable[[str], Timer] = Timer  # creates a timer with this name
    make_workers: Callable[[str, int], ListenerPool] = ListenerPool  # creates the threads of the listener
    # Creates the threads that send back late messages, with one thread for each queue.
    make_per_queue_threads: Callable[[], KeyedExecutor] = KeyedExecutor
    backlog_reader: BacklogReader | None = None  # None if no queue is read ahead
    replier: Replier | None = None  # sends replies to requests (request-reply)
    make_traces: Callable[[], ListenerTraces | None] = lambda: None  # creates the traces of listener calls
    rows_decoder: RowsDecoder | None = None  # decodes fetched messages into rows, for a listener of record batches
