"""The run of the demo, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.cli.demo.accounts import Accounts
from rocketmq_spark.cli.demo.batch_totals import Batches, BatchTotals, Kill
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.order_writer import CLOSING_ORDERS, OrderWriter
from rocketmq_spark.cli.demo.view import DemoView
from rocketmq_spark.cli.demo.watch import DemoState, DemoWatch
from rocketmq_spark.errors import RocketMQError

# The driver may be killed after this part of the writing time.
_KILL_FRACTION = 0.4
_REFRESH_S = 0.5
# The pause between two checks whether to kill the driver now.
_KILL_CHECK_S = 0.01
# If the last order is read and no number changes for this time, the driver is killed between two batches.
_IDLE_BEFORE_KILL_S = 5.0
# If no number changes for this time, which includes Spark's start, the run fails.
_NO_PROGRESS_S = 180.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a complete run has counted, shown and killed."""

    accounts: Accounts
    state: DemoState
    kill: Kill


class DemoRun:
    """Writes orders while the query reads them, kills Spark's driver and starts it again, ends the open windows with a last
    order, and lets the driver read all totals back.

    The driver is killed in a batch that has stored totals and is not finished. In a run of a few seconds, the interrupted batch
    may be the batch that reads the last order.
    """

    def __init__(
        self, driver: SparkDriver, watch: DemoWatch, writer: OrderWriter, view: DemoView, seconds: float
    ) -> None:
        self._driver = driver
        self._watch = watch
        self._writer = writer
        self._view = view
        self._seconds = seconds
        self._batch_totals = BatchTotals()
        self._batches = Batches(-1, -1)  # the batches in the last listing of the checkpoint
        self._kill: Kill | None = None
        self._has_recovered = False
        # Values of ``time.monotonic()``.
        self._killed_s = 0.0
        self._writing_began_s: float | None = None
        self._shown_s = float("-inf")
        self._last_progress_s = time.monotonic()

    def run(self, exactly_once: bool) -> DemoResult:
        state, writer = self._watch.state, self._writer
        self._wait("waiting for Spark's first batch", lambda: bool(state.batch_ms))
        writer.start()
        self._writing_began_s = time.monotonic()
        self._wait("writing orders", lambda: writer.is_done)
        self._wait("reading the rest", lambda: state.read >= writer.sent_count)
        writer.end_windows()
        self._wait("ending the last windows", lambda: self._has_recovered and state.read > writer.sent_count)
        self._driver.finish()
        self._wait("reading the totals back", lambda: self._watch.returned_totals is not None)
        self._driver.wait()
        state.phase = "done"
        self._show()
        assert self._kill is not None
        return DemoResult(self._accounts(exactly_once), state, self._kill)

    def _wait(self, phase: str, has_reached: Callable[[], bool]) -> None:
        """Refresh and show the state until ``has_reached``. Kills the driver once, after ``_KILL_FRACTION`` of the time."""
        state = self._watch.state
        state.phase = phase
        while True:
            figures_before = state.read, state.totals_seen, state.sent
            self._watch.refresh()
            state.sent = self._writer.sent_count
            state.closing = CLOSING_ORDERS if state.read > state.sent else 0
            state.elapsed_s = 0.0 if self._writing_began_s is None else time.monotonic() - self._writing_began_s
            self._report_repeated_batch()
            self._check_progress(has_changed=figures_before != (state.read, state.totals_seen, state.sent))
            if has_reached():
                return
            if time.monotonic() - self._shown_s >= self._view.interval_s:
                self._show()
            if self._kill is None and state.elapsed_s > self._seconds * _KILL_FRACTION:
                self._kill_in_a_batch()
            else:
                time.sleep(_REFRESH_S)

    def _report_repeated_batch(self) -> None:
        if self._kill is None or self._has_recovered:
            return
        batch = self._kill.batch
        self._has_recovered = batch is None or self._watch.newest_finished >= batch
        if self._has_recovered and batch is not None:
            recovery_s = time.monotonic() - self._killed_s
            self._watch.state.events.append(
                f"A new driver repeated batch {batch} and continues, {recovery_s:.0f} s after the kill"
            )

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        self._view.show(self._watch.state)

    def _check_progress(self, has_changed: bool) -> None:
        now, state = time.monotonic(), self._watch.state
        if has_changed:
            self._last_progress_s = now
        elif now - self._last_progress_s > _NO_PROGRESS_S:
            raise RocketMQError(
                f"{state.phase}: nothing has changed for {_NO_PROGRESS_S:.0f} s; "
                f"{state.orders_read} of {self._writer.sent_count} orders are read",
                remedy=self._watch.remedy,
            )

    def _kill_in_a_batch(self) -> None:
        """Wait until the driver should be killed, and kill it. Return at the next refresh at the latest. During the decision,
        all processes of the driver are stopped, so that Spark cannot finish the batch, and no worker sends more of its totals.
        """
        end_s = time.monotonic() + _REFRESH_S
        while time.monotonic() < end_s:
            if self._count_stored_in_flight():
                if self._driver.stop() and (stored_count := self._count_stored_in_flight()):
                    self._replace_driver(Kill(self._batches.newest_begun, stored_count))
                    return
                self._driver.resume()
            time.sleep(_KILL_CHECK_S)
        has_read_all = self._watch.state.read > self._writer.sent_count
        if has_read_all and time.monotonic() - self._last_progress_s > _IDLE_BEFORE_KILL_S:
            if self._driver.stop() and not self._watch.batches().is_in_flight:
                self._replace_driver(Kill(None, 0))
            else:
                self._driver.resume()

    def _count_stored_in_flight(self) -> int | None:
        """Return how many totals the batch in flight has stored; None if no batch is in flight, or the number is unknown.

        The checkpoint is listed after the totals were counted. If this listing equals the listing of the last call, no batch
        began or finished in between.
        """
        total_count = self._watch.stored_totals()
        if total_count is None:
            return None
        batches_before, self._batches = self._batches, self._watch.batches()
        return self._batch_totals.stored(batches_before, total_count, self._batches)

    def _replace_driver(self, kill: Kill) -> None:
        self._kill = kill
        self._driver.kill()
        self._watch.state.events.append(f"{kill} ... Spark starts again")
        self._show()
        self._killed_s = self._last_progress_s = time.monotonic()
        self._driver.start()

    def _accounts(self, exactly_once: bool) -> Accounts:
        returned_totals, state = self._watch.returned_totals, self._watch.state
        assert returned_totals is not None
        return Accounts(
            orders_written=self._writer.sent_count,
            orders_read=state.orders_read,
            orders_returned=returned_totals.orders,
            totals_returned=returned_totals.different,
            totals_repeated=returned_totals.repeated,
            cents_written=self._writer.cents,
            cents_returned=returned_totals.cents,
            dropped_late=state.dropped_late,
            exactly_once=exactly_once,
        )
