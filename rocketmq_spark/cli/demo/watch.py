"""The figures that the demo shows: from Spark's progress, from the checkpoint, from the broker, and from the newest totals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.demo.batch_totals import Batches
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.environment import DemoEnvironment
from rocketmq_spark.cli.topic_reader import TopicReader, earliest
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.checkpoints import files, offset_log

_LAG_TIMEOUT_S, _COUNT_TIMEOUT_S = 1.0, 10.0


@dataclass(slots=True)
class DemoState:
    """The demo at one moment. ``DemoRun`` sets ``sent``, ``closing``, ``phase``, ``elapsed_s`` and ``events``.

    ``read`` is how many messages the finished batches have read, according to Spark's checkpoint. ``closing`` of these messages
    end windows, and do not count as orders.
    """

    phase: str = "starting"
    elapsed_s: float = 0.0
    sent: int = 0
    read: int = 0
    closing: int = 0
    totals_seen: int = 0
    orders_in_totals: int = 0
    dropped_late: int = 0
    lag: dict[str, int] = field(default_factory=dict)
    batch_ms: list[int] = field(default_factory=list)
    window: str = ""
    window_totals: dict[str, tuple[int, str]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    @property
    def orders_read(self) -> int:
        return self.read - self.closing

    def document(self) -> Mapping[str, object]:
        return {
            "event": "progress",
            "phase": self.phase,
            "elapsedSeconds": round(self.elapsed_s, 1),
            "ordersWritten": self.sent,
            "ordersRead": self.orders_read,
            "totalsOut": self.totals_seen,
            "ordersInTotals": self.orders_in_totals,
            "lag": self.lag,
            "batches": len(self.batch_ms),
            "lastBatchMs": self.batch_ms[-1] if self.batch_ms else None,
        }


@dataclass(frozen=True, slots=True)
class ReturnedTotals:
    """Sums over the totals that the driver read back. ``different`` counts each total once. ``repeated`` is the number of totals
    that are stored more than once.
    """

    different: int
    repeated: int
    orders: int
    cents: int


class DemoWatch:
    """Keeps a ``DemoState`` up to date. Not thread-safe."""

    def __init__(self, environment: DemoEnvironment, driver: SparkDriver) -> None:
        self.state = DemoState()
        self.returned_totals: ReturnedTotals | None = None
        self.newest_finished = -1  # the newest batch that was finished at the last refresh
        self.remedy = environment.remedy
        self._driver = driver
        self._environment = environment
        self._checkpoint = files.open_folder(str(environment.checkpoint))
        options = options_table.parse({"name_server": environment.name_server}).for_role("batch source")
        self._client = session.client(options)
        self._totals_reader = TopicReader(options, environment.totals, lambda part, cause: None)
        self._totals_reader.seek(earliest)
        self._positions: Mapping[MessageQueue, int] = {}

    def refresh(self) -> DemoState:
        """Update the state from Spark, its checkpoint and the broker. The numbers of a broker that does not answer stay
        unchanged. Raises ``RocketMQError`` if the query, its process or a server of the demo has failed.
        """
        self._environment.check()
        self._read_reports()
        self.newest_finished = self.batches().newest_finished
        if self.newest_finished >= 0:
            self._positions = offset_log.read_batch(self._checkpoint, self.newest_finished).positions
            self.state.read = sum(self._positions.values())
        try:
            self._ask_broker()
        except RocketMQError as e:
            if not e.retriable:
                raise
        return self.state

    def batches(self) -> Batches:
        newest_begun, newest_finished = (
            max(offset_log.logged_times_ms(self._checkpoint, log), default=-1) for log in ("offsets", "commits")
        )
        # A batch may begin and finish between the two listings. Such a batch does not count as finished yet.
        return Batches(newest_begun, min(newest_begun, newest_finished))

    def stored_totals(self) -> int | None:
        """Number of totals in the topic; None if a broker does not answer."""
        try:
            return sum(self._end_offsets(self._environment.totals, _COUNT_TIMEOUT_S).values())
        except RocketMQError as e:
            if not e.retriable:
                raise
            return None

    def _read_reports(self) -> None:
        for report in self._driver.reports():
            match report:
                case {"progress": {"rows": int(rows), "ms": int(ms), "late": int(late)}}:
                    self.state.dropped_late += late
                    if rows:
                        self.state.batch_ms.append(ms)
                case {"totals": dict(totals)}:
                    self.returned_totals = ReturnedTotals(**totals)
                case {"failed": str(reason)}:
                    raise RocketMQError("the streaming query failed", remark=reason, remedy=self.remedy)

    def _end_offsets(self, topic: str, timeout_s: float) -> dict[MessageQueue, int]:
        queues = self._client.routes.get(topic).readable_queues()
        bounds = self._client.offset_reader.bounds(queues, Deadline.after(timeout_s))
        return {queue: bound.max_offset for queue, bound in bounds.items()}

    def _ask_broker(self) -> None:
        self.state.lag = {
            f"{queue.broker_name}/{queue.queue_id}": max(0, end - self._positions.get(queue, 0))
            for queue, end in self._end_offsets(self._environment.orders, _LAG_TIMEOUT_S).items()
        }
        for message in self._totals_reader.messages():
            total = json.loads(message.body)
            self.state.totals_seen += 1
            self.state.orders_in_totals += total["orders"]
            if total["window_start"] > self.state.window:
                self.state.window = total["window_start"]
                self.state.window_totals = {}
            if total["window_start"] == self.state.window:
                self.state.window_totals[total["region"]] = (total["orders"], f"{total['amount']:,.2f}")
