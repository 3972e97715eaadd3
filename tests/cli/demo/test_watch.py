import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.cli.demo.watch import OBSERVED, DemoWatch
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source.offsets import Offsets
from tests.helpers import awaited, progress_json
from tests.reading import canonical


class Row(SimpleNamespace):
    def asDict(self):
        return vars(self)


@dataclass
class Query:
    """What a streaming query tells, made up."""

    recentProgress: list = field(default_factory=list)

    def report(self, batch, rows, totals=None, end=None, late=0):
        self.recentProgress = [  # Spark may forget old ones
            SimpleNamespace(
                batchId=batch,
                timestamp=f"t{batch}",
                numInputRows=rows,
                batchDuration=100 * batch,
                observedMetrics={} if totals is None else {OBSERVED: Row(totals=totals[0], orders=totals[1])},
                stateOperators=[SimpleNamespace(numRowsDroppedByWatermark=late)],
                json=progress_json(end),
            )
        ]


@pytest.fixture
def watch(rocketmq, make_topic, tmp_path):
    made = Stage(rocketmq.name_server, make_topic(queues=2), make_topic(queues=1), tmp_path, None)
    return made, Query(), lambda query: DemoWatch(made, query)


def test_progress_is_summed_over_batches_and_none_counts_twice(watch):
    _, query, make = watch
    one = make(query)
    assert one.look().read == 0
    query.report(1, 10)
    one.look()
    one.look()
    query.report(2, 5, totals=(3, 12), late=2)
    one.look()
    query.report(3, 0, totals=(1, 3))
    query.recentProgress[0].observedMetrics[OBSERVED].orders = None  # the sum over no rows
    sight = one.look()
    assert (sight.read, sight.totals_written, sight.orders_aggregated, sight.dropped_late) == (15, 4, 12, 2)
    assert sight.batch_ms == [100, 200], "batches without rows take no part"


def test_lag_and_newest_totals_come_from_the_broker(rocketmq, watch):
    made, query, make = watch
    one = make(query)
    totals = [
        {"window_start": "2026-01-31T12:00:00.000Z", "region": "asia", "orders": 1, "amount": 1.5},
        {"window_start": "2026-01-31T12:00:05.000Z", "region": "asia", "orders": 2, "amount": 1234.5},
    ]
    with Producer(name_server=rocketmq.name_server, group="cli-watch") as producer:
        for _ in range(3):
            producer.send(Message(made.orders, b"x"), queue=MessageQueue(made.orders, "broker-a", 1))
        for total in totals:
            producer.send(Message(made.totals, json.dumps(total).encode()))
    query.report(1, 1, end=canonical(Offsets({MessageQueue(made.orders, "broker-a", 1): 1}).to_json()))
    sight = awaited(one.look, lambda sight: sight.totals_seen == 2 and sum(sight.lag.values()) == 2)
    assert sight.lag == {"broker-a/0": 0, "broker-a/1": 2}
    assert (sight.window, sight.window_totals) == ("2026-01-31T12:00:05.000Z", {"asia": (2, "1,234.50")})
