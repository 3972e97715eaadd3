"""The demo's data: generated orders, the producer thread that sends them, and the sums that check the result.

The demo is right when the sums of what was written, read, aggregated and read back agree. They can agree exactly: an order
belongs to one window and one region; a window's total is sent once, when the watermark has passed the window's end; and a
last order dated far ahead moves the watermark past the end of every window that holds orders. The window of that last order
stays open, so no total includes it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from rocketmq_spark.base.threads import Latch
from rocketmq_spark.cli.produce import Orders, paced
from rocketmq_spark.options.names import camel_case
from rocketmq_spark.session.producers import Producer

CLOSING_ORDERS = 1


@dataclass(frozen=True, slots=True)
class Accounts:
    """Counts of orders and of totals along the way. Amounts are in cents.

    ``totals_repeated`` are totals that are stored more than once. Only with ``exactly_once`` there must be none; a total counts
    once in the other numbers.
    """

    orders_written: int
    orders_read: int
    orders_returned: int
    totals_returned: int
    totals_repeated: int
    cents_written: int
    cents_returned: int
    dropped_late: int
    exactly_once: bool

    @property
    def balanced(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """What does not agree, as sentences without full stops."""
        pairs = (
            ("orders", self.orders_written, "read by the query", self.orders_read),
            ("orders", self.orders_written, "in the totals read back", self.orders_returned),
            ("cents", self.cents_written, "in the totals read back", self.cents_returned),
        )
        differences = [f"{a} {what} written, but {b} {second}" for what, a, second, b in pairs if a != b]
        if self.exactly_once and self.totals_repeated:
            differences.append(f"{self.totals_repeated} totals are stored twice")
        if differences and self.dropped_late:
            differences.append(f"{self.dropped_late} rows came later than the watermark allows and were dropped")
        return differences

    def document(self) -> Mapping[str, object]:
        return {camel_case(name): value for name, value in asdict(self).items()} | {"balanced": self.balanced}

    def lines(self) -> list[str]:
        """The books for a person."""
        written, returned = (f"{cents / 100:,.2f}" for cents in (self.cents_written, self.cents_returned))
        sign = "=" if self.cents_written == self.cents_returned else "≠"
        # Without exactly-once a batch that is repeated sends its totals again.
        twice = (
            f"{self.totals_repeated:,} of them stored twice" if self.totals_repeated else "none of them stored twice"
        )
        return [
            f"orders written to the broker      {self.orders_written:>9,}",
            f"orders read by the query          {self.orders_read:>9,}",
            f"orders in the totals read back    {self.orders_returned:>9,}  in {self.totals_returned:,} totals, {twice}",
            f"amount written and read back      {written} {sign} {returned}",
        ]

    def verdict(self) -> str:
        """The counts of orders in one line, and whether all agree."""
        counts = (self.orders_written, self.orders_read, self.orders_returned)
        signs = ("=" if a == b else "≠" for a, b in itertools.pairwise(counts))
        text = f"{counts[0]:,}" + "".join(f" {sign} {count:,}" for sign, count in zip(signs, counts[1:], strict=True))
        return f"{text}. {'All agree.' if self.balanced else 'They do not agree.'}"


_DAY_S = 86_400.0
# How long orders under way are waited for if the run has failed.
_FAILED_CLOSE_S = 1.0


class Feed:
    """Writes one order when entered, so that there is something to start on, and the others for ``seconds`` after
    ``start``. Leaving the block stops it early."""

    def __init__(self, name_server: str, topic: str, rate: float, seconds: float) -> None:
        self._topic = topic
        self._rate = rate
        self._seconds = seconds
        self._producer = Producer(name_server=name_server, group="rocketmq-spark-demo", send_timeout="30s")
        self._orders = Orders()
        self._stop = Latch()
        self._thread = ThreadPoolExecutor(1, "demo producer")
        self._writing: Future[None] | None = None
        self.sent = 0
        self.cents = 0

    def __enter__(self) -> Feed:
        self._send(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if kind is not None:
            self._producer.close(
                _FAILED_CLOSE_S
            )  # which ends the thread, too: it may wait for a broker that does not answer
        self._thread.shutdown()
        self._producer.close()

    def start(self) -> None:
        self._writing = self._thread.submit(self._write)

    @property
    def started(self) -> bool:
        return self._writing is not None

    @property
    def done(self) -> bool:
        """Whether all orders are written. Raises what ended the thread early."""
        if self._writing is None or not self._writing.done():
            return False
        self._writing.result()
        return True

    def end_windows(self) -> None:
        """One more order, dated ahead: it takes the watermark past every window with orders, and is in no total."""
        order = self._orders.next()
        self._producer.send(replace(order, at_s=order.at_s + _DAY_S, region="closing").message(self._topic))

    def _write(self) -> None:
        end = time.monotonic() + self._seconds
        for due in paced(self._rate, None, self._stop):
            self._send(due)
            if time.monotonic() >= end:
                return

    def _send(self, count: int) -> None:
        # A group is acknowledged before the next one gets its times: orders come nearly sorted, and none comes late.
        orders = [self._orders.next() for _ in range(count)]
        answers = [self._producer.send_async(order.message(self._topic)) for order in orders]
        for order, answer in zip(orders, answers, strict=True):
            answer.result()
            self.sent += 1
            self.cents += order.cents
