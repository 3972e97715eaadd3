"""What happens in the demo, in its order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.cli.demo.aim import Aim, Batches, Kill
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.feed import CLOSING_ORDERS, Accounts, Feed
from rocketmq_spark.cli.demo.view import DemoView
from rocketmq_spark.cli.demo.watch import DemoState, DemoWatch
from rocketmq_spark.errors import RocketMQError

# The driver may be killed from this part of the writing on.
_KILL_AFTER = 0.4
_LOOK_S = 0.5
# The time between two looks for a batch in which to kill it.
_AIM_S = 0.01
# If all is written, and no batch begins for so long, it is killed between two batches.
_IDLE_S = 5.0
# How long nothing may change before the last orders are called missing. Spark's start is a part of it.
_STILL_S = 180.0


@dataclass(frozen=True, slots=True)
class Result:
    accounts: Accounts
    state: DemoState
    kill: Kill


class Script:
    """Orders are written and read; Spark's driver is killed and started again; a last order ends the open windows; the driver
    reads all totals back.

    The driver is killed in a batch that has stored totals and is not finished. In a run of a few seconds this may be a batch that
    the last order causes.
    """

    def __init__(self, driver: SparkDriver, watch: DemoWatch, feed: Feed, shown: DemoView, seconds: float) -> None:
        self._driver = driver
        self._watch = watch
        self._feed = feed
        self._shown = shown
        self._seconds = seconds
        self._aim = Aim()
        self._batches = Batches(-1, -1)
        self._kill: Kill | None = None
        self._killed_at = 0.0
        self._back = False
        self._began: float | None = None
        self._shown_at = float("-inf")
        self._changed_at = time.monotonic()

    def run(self, exactly_once: bool) -> Result:
        state, feed = self._watch.state, self._feed
        self._go_on("waiting for Spark's first batch", lambda: bool(state.batch_ms))
        feed.start()
        self._began = time.monotonic()
        self._go_on("writing orders", lambda: feed.done)
        self._go_on("reading the rest", lambda: state.read >= feed.sent)
        feed.end_windows()
        self._go_on("ending the last windows", lambda: self._back and state.read > feed.sent)
        self._driver.finish()
        self._go_on("reading the totals back", lambda: self._watch.returned is not None)
        self._driver.wait()
        state.phase = "done"
        self._show()
        assert self._kill is not None
        return Result(self._accounts(exactly_once), state, self._kill)

    def _go_on(self, phase: str, reached: Callable[[], bool]) -> None:
        state = self._watch.state
        state.phase = phase
        while True:
            before = state.read, state.totals_seen, state.sent
            self._watch.look()
            state.sent = self._feed.sent
            state.closing = CLOSING_ORDERS if state.read > state.sent else 0
            state.elapsed_s = 0.0 if self._began is None else time.monotonic() - self._began
            self._tell_that_spark_is_back()
            self._check_progress(before == (state.read, state.totals_seen, state.sent))
            if reached():
                return
            if time.monotonic() - self._shown_at >= self._shown.interval_s:
                self._show()
            if self._kill is None and state.elapsed_s > self._seconds * _KILL_AFTER:
                self._kill_in_a_batch()
            else:
                time.sleep(_LOOK_S)

    def _tell_that_spark_is_back(self) -> None:
        if self._kill is None or self._back:
            return
        batch = self._kill.batch
        self._back = batch is None or self._watch.finished >= batch
        if self._back and batch is not None:
            after = time.monotonic() - self._killed_at
            self._watch.state.events.append(f"A new driver has repeated batch {batch} and goes on, {after:.0f} s later")

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._shown.show(self._watch.state)

    def _check_progress(self, still: bool) -> None:
        now, state = time.monotonic(), self._watch.state
        if not still:
            self._changed_at = now
        elif now - self._changed_at > _STILL_S:
            raise RocketMQError(f"the query has read {state.read} of {self._feed.sent} orders and makes no progress")

    def _kill_in_a_batch(self) -> None:
        """Look for the moment, for the time between two looks at the figures. The decision is made while no process of the driver
        runs: until then Spark may finish the batch, and a worker may send more of its totals.
        """
        end = time.monotonic() + _LOOK_S
        while time.monotonic() < end:
            if self._stored_in_flight():
                if self._driver.stop() and (stored := self._stored_in_flight()):
                    self._end_driver(Kill(self._batches.begun, stored))
                    return
                self._driver.resume()
            time.sleep(_AIM_S)
        written = self._watch.state.read > self._feed.sent
        if written and time.monotonic() - self._changed_at > _IDLE_S:
            if self._driver.stop() and not self._watch.batches().in_flight:
                self._end_driver(Kill(None, 0))
            else:
                self._driver.resume()

    def _stored_in_flight(self) -> int | None:
        """How many totals the batch in flight has stored; None if none is, or if it is not known.

        The checkpoint is listed after the totals were counted. The listing before is that of the last call: if both are the same,
        nothing changed in between.
        """
        totals = self._watch.stored_totals()
        if totals is None:
            return None
        before, self._batches = self._batches, self._watch.batches()
        return self._aim.stored(before, totals, self._batches)

    def _end_driver(self, kill: Kill) -> None:
        self._kill = kill
        self._driver.kill()
        self._watch.state.events.append(f"{kill} ... Spark starts again")
        self._show()
        self._killed_at = self._changed_at = time.monotonic()
        self._driver.start()

    def _accounts(self, exactly_once: bool) -> Accounts:
        returned, state = self._watch.returned, self._watch.state
        assert returned is not None
        return Accounts(
            orders_written=self._feed.sent,
            orders_read=state.orders_read,
            orders_returned=returned.orders,
            totals_returned=returned.different,
            totals_repeated=returned.repeated,
            cents_written=self._feed.cents,
            cents_returned=returned.cents,
            dropped_late=state.dropped_late,
            exactly_once=exactly_once,
        )
