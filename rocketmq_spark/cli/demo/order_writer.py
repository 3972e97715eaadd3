"""The producer thread that writes the generated orders of the demo."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.produce import Orders, due_counts
from rocketmq_spark.session.producers import Producer

# The number of orders that ``end_windows`` sends. No total includes these orders.
CLOSING_ORDERS = 1
_DAY_S = 86_400.0
# If the run has failed, the producer waits this long for the acknowledgements of orders.
_CLOSE_TIMEOUT_AFTER_FAILURE_S = 1.0


class OrderWriter:
    """Writes one order when the block is entered, for Spark's first batch, and more for ``seconds`` after ``start``. Leaving the
    block stops the writer early.
    """

    def __init__(self, name_server: str, topic: str, rate: float, seconds: float) -> None:
        self._topic = topic
        self._rate = rate
        self._seconds = seconds
        self._producer = Producer(name_server=name_server, group="rocketmq-spark-demo", send_timeout="30s")
        self._orders = Orders()
        self._stop_latch = Latch()
        self._executor = ThreadPoolExecutor(1, "demo producer")
        self._write_future: Future[None] | None = None
        # The executor's thread writes these fields, and the demo's thread reads them.
        self.sent_count = 0
        self.cents = 0

    def __enter__(self) -> OrderWriter:
        self._send(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_latch.set()
        if kind is not None:
            # Closing the producer also ends the thread, which may be waiting for a broker that does not answer.
            self._producer.close(_CLOSE_TIMEOUT_AFTER_FAILURE_S)
        self._executor.shutdown()
        self._producer.close()

    def start(self) -> None:
        self._write_future = self._executor.submit(self._write)

    @property
    def is_done(self) -> bool:
        """Whether all orders are written. Raises the error that ended the thread early."""
        if self._write_future is None or not self._write_future.done():
            return False
        self._write_future.result()
        return True

    def end_windows(self) -> None:
        """Send an order with a time in the future, which moves the watermark past every window with orders. No total includes
        this order.
        """
        order = self._orders.next()
        self._producer.send(replace(order, time_s=order.time_s + _DAY_S, region="closing").message(self._topic))

    def _write(self) -> None:
        end_s = time.monotonic() + self._seconds
        for due_count in due_counts(self._rate, None, self._stop_latch):
            self._send(due_count)
            if time.monotonic() >= end_s:
                return

    def _send(self, count: int) -> None:
        # These orders are acknowledged before the next orders get their times. So orders arrive nearly sorted by time, and none
        # is too late for its window.
        orders = [self._orders.next() for _ in range(count)]
        futures = [self._producer.send_async(order.message(self._topic)) for order in orders]
        for order, future in zip(orders, futures, strict=True):
            future.result()
            self.sent_count += 1
            self.cents += order.cents
